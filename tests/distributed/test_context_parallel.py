"""Attention and models over the ranks of gloo groups equal one process. Each test starts its processes once for many checks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexmask as fm
from flexmask.backends.backend import ENTERED
from flexmask.distributed import ContextParallel
from flexmask.distributed.exchange import fingerprint
from flexmask.errors import LoweringError
from tests.distributed import models
from tests.distributed.equality import LONG, Checks, attention, check_cases, check_drawn, check_packed_prefixes
from tests.support.exhaustive import exhaustive
from tests.support.ranks import exit_codes, run_ranks


def two_ranks(rank: int) -> None:
    checks = Checks()
    checks("checkpoints", models.check_checkpoints)
    check_cases(checks, every=6)
    check_drawn(checks, 6)
    for strategy in ("keys", "heads"):
        checks(f"calls, {strategy}", models.check_calls, strategy)
        checks(f"packed prefixes, {strategy}", check_packed_prefixes, strategy)
    checks("a model", models.check_model, "heads")
    checks("tokens", models.check_tokens)
    checks("errors", models.check_errors)
    checks("calls that differ", models.check_calls_that_differ)
    checks.report()


def models_over_two_ranks(rank: int) -> None:
    checks = Checks()
    for strategy in ("keys", "heads"):
        checks(
            f"a model with checkpoints and dropout, {strategy}",
            lambda s=strategy: models.check_model(s, dropout=0.3, checkpointed=True),
        )
        checks(f"mixed precision, {strategy}", models.check_mixed_precision, strategy)
    checks("a compiled model", models.check_model, "keys", "eager")
    checks("compiled once", models.check_compiled_once)
    checks("torch's own context parallelism", models.check_torch_context_parallel)
    checks.report()


def three_ranks(rank: int) -> None:
    checks = Checks()
    check_cases(checks, every=3)
    checks("a model", models.check_model, "keys")
    checks("a rank with an error", models.check_rank_with_an_error)
    checks.report()


def four_ranks(rank: int) -> None:
    checks = Checks()
    check_cases(checks, every=3)
    checks("a model with 4 key heads", lambda: models.check_model("heads", kv_heads=4))
    models.check_meshes(checks)
    checks.report()


def eight_ranks(rank: int) -> None:
    checks = Checks()
    check_cases(checks)
    check_drawn(checks, 25)
    checks("a model", models.check_model, "keys")
    checks.report()


def many_checks(rank: int) -> None:
    checks = Checks()
    check_cases(checks, lengths=LONG)
    check_cases(checks)
    check_drawn(checks, 100)
    if dist.get_world_size() == 2:
        checks("compiled FlexAttention", models.check_compiled_flex)
        checks("a compiled model", models.check_model, "keys", "aot_eager")
    checks.report()


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, two_ranks)


@pytest.mark.slow
def test_models_over_two_ranks() -> None:
    run_ranks(2, models_over_two_ranks)


@pytest.mark.slow
def test_three_ranks() -> None:
    run_ranks(3, three_ranks)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_four_ranks() -> None:
    run_ranks(4, four_ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3, 4])
def test_long_sequences_and_many_masks(world: int) -> None:
    run_ranks(world, many_checks)


@pytest.mark.skipif((os.cpu_count() or 1) < 8, reason="needs 8 cores")
def test_eight_ranks() -> None:
    run_ranks(8, eight_ranks)


def dies(rank: int) -> None:
    """Rank 1 dies in the middle of a forward; rank 0 raises within the time-out of the group."""
    cp = ContextParallel(None, "causal", 9)
    x = [torch.randn(1, 2, len(cp.positions), 4)] * 3

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return score

    def forward() -> None:
        for _ in range(2):
            attention(*x, "causal", score_mod=score_mod)

    with pytest.raises(RuntimeError, match=r"[Tt]im|closed|reset"), cp:
        forward()
    assert not ENTERED


@pytest.mark.slow
def test_a_rank_that_dies() -> None:
    assert exit_codes(2, dies, timeout=5) == [0, -signal.SIGKILL]


# ---------------------------------------------------------------- in one process


def test_without_a_process_group() -> None:
    with pytest.raises(LoweringError, match="start the script with torchrun, and call"):
        ContextParallel(None, "causal", 8)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The group of one rank."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank(alone: dist.ProcessGroup) -> None:
    cp = ContextParallel(alone, None, 9)
    x = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    with cp, cp:
        assert [cp, cp] == ENTERED
        query, key, value = x
        torch.testing.assert_close(attention(*x), scaled_dot_product_attention(query, key, value))
    assert not ENTERED


def lengths_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([5])


def write_in_inference_mode(lengths: Tensor) -> None:
    with torch.inference_mode():
        lengths.fill_(8)


#: How to write data that torch's version counter does not count.
WRITES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], object]]] = {
    "NumPy": (lambda: torch.tensor([5]), lambda lengths: lengths.numpy().fill(8)),
    "data": (lambda: torch.tensor([5]), lambda lengths: lengths.data.fill_(8)),
    "other data": (lambda: torch.tensor([5]), lambda lengths: setattr(lengths, "data", torch.tensor([8]))),
    "inference mode": (lengths_in_inference_mode, write_in_inference_mode),
}


@pytest.mark.parametrize("name", WRITES)
def test_changed_data_is_an_error(alone: dist.ProcessGroup, name: str) -> None:
    make, write = WRITES[name]
    lengths, x = make(), [torch.randn(1, 2, 9, 4)] * 3
    mask = fm.key_padding(lengths)
    cp = ContextParallel(alone, mask, 9)
    with cp:
        attention(*x, mask)
        write(lengths)
        with pytest.raises(LoweringError, match="was changed after ContextParallel was made"):
            attention(*x, mask)
    with pytest.raises(LoweringError, match="was changed after ContextParallel was made"), cp:
        pass  # compiled code reads no data


def test_calls_after_the_first_are_not_compared(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    cp, x = ContextParallel(alone, ["causal", "full"], 9), [torch.randn(1, 2, 9, 4)] * 3
    with cp:
        attention(*x, "causal")
        attention(*x, None)
        monkeypatch.delattr(dist, "all_gather")
        attention(*x, "causal")


@pytest.mark.parametrize(
    ("declared", "given"), [(None, None), ("kv <= q", " q >= kv"), *exhaustive([("full", None), (fm.causal(), "causal()")])]
)
def test_compiled_calls_give_masks_by_text_or_not_at_all(alone: dist.ProcessGroup, declared: Any, given: str | None) -> None:
    cp, x = ContextParallel(alone, declared, 9), [torch.randn(1, 2, 9, 4) for _ in range(3)]
    compiled = torch.compile(lambda *x: attention(*x, given), backend="eager", fullgraph=True)
    with cp:
        torch.testing.assert_close(compiled(*x), attention(*x, given))
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(*x)


@pytest.mark.parametrize("inside", [False, True])
def test_masks_made_before_a_graph_break(alone: dist.ProcessGroup, inside: bool) -> None:
    x, eager = [torch.randn(1, 2, 9, 4) for _ in range(3)], torch.compiler.disable(attention)
    compiled = torch.compile(lambda *x: eager(*x, fm.parse("kv <= q")), backend="eager")
    with ContextParallel(alone, "q >= kv", 9) if inside else nullcontext():
        torch.testing.assert_close(compiled(*x), attention(*x, "kv <= q"))


def test_masks_that_compiled_calls_cannot_find(alone: dist.ProcessGroup) -> None:
    cp, x = ContextParallel(alone, fm.causal() & fm.document(torch.zeros(9, dtype=torch.int64)), 9), [torch.randn(1, 2, 9, 4)] * 3
    compiled = torch.compile(lambda *x: attention(*x, "causal"), backend="eager", fullgraph=True)
    with cp, pytest.raises(Exception, match=r"the mask causal is not declared.*pass the declared mask itself, or write its text"):
        compiled(*x)


def test_masks_in_use_are_left_after_an_error(alone: dist.ProcessGroup) -> None:
    with pytest.raises(KeyError), ContextParallel(alone, "causal", 9):
        raise KeyError
    assert not ENTERED


def test_fingerprints_follow_what_masks_say_and_not_where_their_data_is() -> None:
    ids = torch.tensor([0, 0, 1])
    same = [
        fm.causal() & fm.document(ids),
        fm.document(ids.clone()) & fm.causal(),
    ]
    others = [fm.causal() & fm.document(ids + 1), fm.causal() | fm.document(ids), fm.causal() & fm.document(ids.int())]
    assert len({fingerprint(mask) for mask in same}) == 1
    assert len({fingerprint(mask) for mask in [same[0], *others, [*same], 3, "3", None]}) == 1 + len(others) + 4
