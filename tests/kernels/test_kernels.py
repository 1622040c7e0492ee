"""Every kind of mask and call in FlexAttention's CUDA kernels, against a softmax in float64."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexmask as fm
from flexmask.lowering import block_lists
from tests.kernels.cases import BUILT, CASES, Case, Shown, alibi, attended, block_mask, inputs
from tests.kernels.interpreted import virtual_gpu
from tests.support import oracle
from tests.support.dropout import kept_of
from tests.support.exhaustive import each_run, exhaustive

pytestmark = pytest.mark.kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
#: The cases of each run, which differ in their kernels. Masks of one interval share the kernel of one test below.
OFTEN = [
    *("a gap in each row", "four intervals", "not separable, with full blocks", "ragged, of two lengths"),
    *("fewer queries than keys", "grouped heads that differ", "heads of 64, values of 32", "views of one projection", "scores"),
    *("packed lists of heads", "packed lists, read off a range", "packed lists, the last row is longest"),
    *("decoding, packed lists", "decoding with gradients"),
]
FORWARD, BACKWARD = "fused_flex_attention", "fused_flex_attention_backward"


def visible(case: Case) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The visible cells, bool[2, H, Q, KV], and the indices as a score_mod has them."""
    kv_len = case.kv_len or case.q_len
    b, h, q, kv = torch.meshgrid(*map(torch.arange, (2, case.heads[0], case.q_len, kv_len)), indexing="ij")
    offset = case.q_offset[b] if isinstance(case.q_offset, Tensor) else case.q_offset
    return case.shown(b, h, q + offset, kv).expand(b.shape), (b, h, q, kv)


def reference(case: Case, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, with a softmax in float64 that is written out."""
    shown, _ = visible(case)
    scores = oracle.attention_scores(query, key, case.call.get("scale"), case.call.get("score_mod"))
    weights, log_sum_exp = oracle.softmax(scores, shown), scores.masked_fill(~shown, -math.inf).logsumexp(-1)
    if p := case.call.get("dropout_p"):
        weights = weights * kept_of(11, p, *shown.shape) / (1 - p)
    return weights @ value.double().repeat_interleave(query.shape[1] // value.shape[1], 1), log_sum_exp


def check(case: Case, dtype: torch.dtype = torch.float32, change: Callable[[BlockMask], None] | None = None) -> None:
    """Asserts that the kernels give what the softmax does, for a mask that may be changed before."""
    virtual_gpu.launched.clear()
    tensors, mask = inputs(case, dtype), block_mask(case)
    if change is not None:
        change(mask)
    found, (wanted, _) = attended(case, tensors, mask), reference(case, *tensors)
    assert any(FORWARD in name for name in virtual_gpu.launched)
    assert found.dtype == dtype
    pairs = [(found, wanted)]
    if case.training:
        upstream = torch.randn(found.shape).to(dtype)
        losses = (found * upstream).sum(), (wanted * upstream).sum()
        pairs += zip(*(torch.autograd.grad(loss, tensors) for loss in losses), strict=True)
        assert any(BACKWARD in name for name in virtual_gpu.launched)
    for one, other in pairs:
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=TOLERANCE[dtype] * scale)
    hidden = ~visible(case)[0].any(-1)
    for rows in pairs[0][0], *(pair[0] for pair in pairs[1:2]):
        assert not rows[hidden].any(), "a row without a key gives exactly 0, and gradient 0"


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize(
    ("gpu", "names"),
    [("H100", BUILT[:1]), *exhaustive([("H100", BUILT[1:]), ("A100", BUILT)])],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_kernels_are_built(gpu: str, names: list[str]) -> None:
    """In a process of its own, since Triton decides where it is imported whether it interprets kernels."""
    command = [sys.executable, "-m", "tests.kernels.build", gpu, *names]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    architecture = {"A100": 80, "H100": 90}[gpu]
    found = json.loads(done.stdout)
    assert found.keys() == set(names)
    for name, kernels in found.items():
        assert any(FORWARD in kernel["name"] for kernel in kernels), name
        assert any(BACKWARD in kernel["name"] for kernel in kernels) == CASES[name].training, name
        for kernel in kernels:
            assert kernel["architecture"] == architecture
            assert kernel["shared"] <= kernel["available"], kernel


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("name", each_run(CASES, *OFTEN))
def test_attention(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(
    "name", ["documents", *exhaustive(["decoding", "two intervals", "not separable", "grouped heads", "dropout"])]
)
def test_half_precision(name: str) -> None:
    check(CASES[name], torch.bfloat16)


@pytest.mark.parametrize("in_graph", [True, *exhaustive([False])])
def test_mixed_precision(backend: Any, in_graph: bool) -> None:
    """Query and key in float32 and the value in bfloat16, as rotary embeddings give them, and gradients in these dtypes."""
    case = Case(fm.causal(), lambda b, h, q, kv: kv <= q, 128, heads=(4, 2), call={"score_mod": alibi})
    query, key, value = inputs(case, torch.float32)
    tensors = query, key, value.detach().bfloat16().requires_grad_()

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = "causal" if in_graph else block_mask(case)
        out: Tensor = fm.attention(query, key, value, mask, enable_gqa=True, backend="flex", **case.call)
        return out

    call: Any = torch.compile(step, backend=backend, fullgraph=True) if in_graph else step
    with torch.autocast("cpu", torch.bfloat16):
        found = call(*tensors)
    assert found.dtype == torch.bfloat16
    wanted, _ = reference(case, *tensors)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    for own, other in zip(*(torch.autograd.grad(out.float().square().sum(), tensors) for out in (found, wanted)), strict=True):
        assert own.dtype == other.dtype
        assert (own - other).norm() < 2e-2 * other.norm()


def test_log_sum_exp(backend: Any) -> None:
    """Attention over parts of the keys is put together from it, so it has a gradient too."""
    case = CASES["a sequence that is empty"]
    query, key, value = inputs(case, torch.float32)
    compiled: Any = torch.compile(fm.attention, backend=backend, fullgraph=True)
    found, found_lse = compiled(query, key, value, block_mask(case), backend="flex", return_lse=True)
    wanted, lse = reference(case, query, key, value)
    sees = lse > -math.inf
    assert (found_lse[~sees] == -math.inf).all()
    torch.testing.assert_close(found_lse[sees].double(), lse[sees], rtol=1e-6, atol=1e-6)
    losses = found.sum() + found_lse[sees].sum(), wanted.sum() + lse[sees].sum()
    grads = (torch.autograd.grad(loss, (query, key, value)) for loss in losses)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def graphs() -> int:
    """How many graphs dynamo made since it was reset."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def test_masks_of_a_kind_share_a_kernel() -> None:
    """Those of which the same ends are read along the same axes. Distances vary from the second one on."""
    before, window = graphs(), CASES["packed lists"]
    kinds = (
        (CASES["causal"],),
        (CASES["documents"], Case(window.mask, window.shown)),
        (CASES["a sequence that is empty"],),
        (CASES["prefix"],),
    )
    for number, cases in enumerate(kinds, 1):
        for case in cases:
            check(case)
        assert graphs() - before == number


#: Masks of numbers, whose kernels compute where their key intervals end.
OF_NUMBERS: dict[str, tuple[Callable[..., fm.Mask], Callable[..., Shown], list[tuple[int, ...]]]] = {
    "windows": (
        lambda left, right: fm.sliding_window(left=left, right=right),
        lambda left, right: lambda b, h, q, kv: (kv >= q - left) & (kv <= q + right),
        [(40, 3), (20, 20), (60, 5)],
    ),
    "chunks": (fm.masks.chunked, lambda size: lambda b, h, q, kv: q // size == kv // size, [(9,), (13,), (20,)]),
    "sinks": (
        lambda sinks, left: fm.masks.sink_window(sinks, left=left),
        lambda sinks, left: lambda b, h, q, kv: (kv <= q) & ((kv < sinks) | (q - kv <= left)),
        [(4, 20), (7, 33), (9, 40)],
    ),
}


@pytest.mark.parametrize("name", each_run(OF_NUMBERS, "sinks"))
def test_two_kernels_for_all_numbers(name: str) -> None:
    (mask, shown, numbers), before = OF_NUMBERS[name], graphs()
    for each in numbers:
        check(Case(mask(*each), shown(*each)))
    assert graphs() - before == 2


@pytest.mark.exhaustive
def test_one_kernel_for_all_lengths_from_the_second_on() -> None:
    before = graphs()
    for length in (256, 330, 440):
        check(Case(fm.causal() & (fm.kv >= 30), lambda b, h, q, kv: (kv <= q) & (kv >= 30), length))
    assert graphs() - before == 2


def test_heads_of_torch_s_create_block_mask() -> None:
    """Its BlockMasks have lists for each head, also where all heads see the same."""
    first = torch.tensor([0, 200])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= first[b])

    case = Case(fm.from_mask_mod(mask_mod), mask_mod, 384, heads=(4, 2))
    made = fm.create_block_mask(mask_mod, 2, 4, 384, 384, device="cpu")
    tensors = inputs(case, torch.float32)
    found, (wanted, _) = attended(case, tensors, made), reference(case, *tensors)
    losses = found.square().sum(), wanted.square().sum()
    pairs = [(found, wanted), *zip(*(torch.autograd.grad(loss, tensors) for loss in losses), strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


def test_a_module_in_one_graph(backend: Any) -> None:
    torch.manual_seed(0)
    layer = fm.MultiheadFlexAttention(64, 64, n_heads=2, n_kv_heads=1, backend="flex")
    plain = fm.MultiheadFlexAttention(64, 64, n_heads=2, n_kv_heads=1, backend="sdpa")
    plain.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(2, 256, 64, requires_grad=True)
    before = graphs()
    windows = fm.sliding_window(size=90) & fm.document(lengths=[[60, 196], [200, 56]])
    for mask in (windows, fm.causal() & fm.document(lengths=[[100, 156], [30, 226]])):
        found, wanted = compiled(x, mask.block_mask(256, batch=2, heads=2)), plain(x, mask)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        losses = (found.square().sum(), layer), (wanted.square().sum(), plain)
        grads = (torch.autograd.grad(loss, [x, *module.parameters()]) for loss, module in losses)
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert graphs() - before == 1


#: Masks of two documents in each sequence of 256 tokens, of which the second has 50 tokens of padding, with their data from the
#: position where the second document starts.
PLANS: dict[str, tuple[str, Callable[[Tensor], dict[str, Tensor]]]] = {
    "key intervals": (
        "causal & document(cu_seqlens=cu) & key_padding(lengths)",
        lambda starts: {
            "cu": torch.stack([torch.zeros_like(starts), starts, torch.full_like(starts, 256)], 1),
            "lengths": torch.tensor([256, 206]),
        },
    ),
    "cells": (
        "causal & document(ids) & key_padding(lengths)",
        lambda starts: {"ids": (torch.arange(256) >= starts[:, None]).long(), "lengths": torch.tensor([256, 206])},
    ),
}
#: Kernels that list the blocks of a packed mask at most.
LISTING = 15
#: Kernels that write the numbers of its keys, for a mask_mod that reads the ends of intervals.
NUMBERING = {"key intervals": 1, "cells": 0}


@pytest.mark.parametrize("kind", ["key intervals", *exhaustive(["cells"])])
def test_a_plan_and_its_attention_in_one_graph(backend: Any, kind: str) -> None:
    text, data_of = PLANS[kind]
    plan = fm.plan(text, 256, batch=2)

    def step(query: Tensor, key: Tensor, value: Tensor, data: dict[str, Tensor]) -> Tensor:
        return fm.attention(query, key, value, plan(**data), backend="flex")

    compiled, before = torch.compile(step, backend=backend, fullgraph=True), graphs()
    for starts in (torch.tensor([100, 30]), torch.tensor([256, 7])):

        def shown(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, starts: Tensor = starts) -> Tensor:
            return (kv <= q) & ((q < starts[b]) == (kv < starts[b])) & (kv < 256 - 50 * b)

        case = Case(fm.full(), shown)
        tensors = inputs(case, torch.float32)
        virtual_gpu.launched.clear()
        found, (wanted, _) = compiled(*tensors, data_of(starts)), reference(case, *tensors)
        assert sum(FORWARD not in name for name in virtual_gpu.launched) <= LISTING + NUMBERING[kind]
        losses = found.square().sum(), wanted.square().sum()
        pairs = [(found, wanted), *zip(*(torch.autograd.grad(loss, tensors) for loss in losses), strict=True)]
        assert any(BACKWARD in name for name in virtual_gpu.launched)
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
    assert graphs() - before == 1


# ---------------------------------------------------------------- the check can fail


def shifted(mask: BlockMask) -> None:
    """Each row sees one key more."""
    ends = dict(zip(mask.mask_mod.__code__.co_freevars, mask.mask_mod.__closure__ or (), strict=True))
    for _, (high,) in ends["intervals"].cell_contents:
        high.tensor.add_(1)


def without_a_block(kind: str) -> Callable[[BlockMask], None]:
    def change(mask: BlockMask) -> None:
        number = getattr(mask, f"{kind}_num_blocks")[1, 0]
        number[number.argmax()] -= 1

    return change


def other_block(kind: str) -> Callable[[BlockMask], None]:
    def change(mask: BlockMask) -> None:
        number, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
        indices[number.argmax(), 0] ^= 1

    return change


def full_instead_of_partial(mask: BlockMask) -> None:
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    number, indices = mask.kv_num_blocks.clone(), mask.kv_indices.clone()
    mask.kv_num_blocks.copy_(mask.full_kv_num_blocks)
    mask.kv_indices.copy_(mask.full_kv_indices)
    mask.full_kv_num_blocks.copy_(number)
    mask.full_kv_indices.copy_(indices)


MUTANTS: dict[str, Callable[[BlockMask], None]] = {
    "bounds": shifted,
    "full for partial": full_instead_of_partial,
    **{f"{kind} block missing": without_a_block(kind) for kind in ("kv", "full_kv", "q", "full_q")},
    **{f"{kind} block elsewhere": other_block(kind) for kind in ("kv", "full_kv", "full_q")},
}


def test_mutants_are_found() -> None:
    """One compilation serves all of them."""
    mask = fm.causal() & fm.key_padding(lengths=[384, 384])  # no key is padding, but the ends are read
    for change in MUTANTS.values():
        with pytest.raises(AssertionError, match=r"close|exactly 0"):
            check(Case(mask, CASES["causal"].shown, 384, heads=(1, 1)), change=change)


def test_memory_of_others_is_not_touched() -> None:
    for kind in ("kv", "full_kv", "q", "full_q"):

        def far(mask: BlockMask, kind: str = kind) -> None:
            getattr(mask, f"{kind}_indices").fill_(2**16)

        with pytest.raises(Exception, match="leaves the memory of its arguments"):
            check(CASES["causal"], change=far)


@pytest.mark.parametrize("name", ["decoding, packed lists", *exhaustive(["packed lists, read off a range"])])
def test_strides_of_full_blocks_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists with strides of their own are right where `block_sets` gives them, and wrong where it does not."""
    decoding = name.startswith("decoding")
    monkeypatch.setattr(block_lists, "MIN_PREFILL_ROWS", 0)
    wrong = decoding or block_lists.SHARED_STRIDES
    monkeypatch.setattr(block_lists, "SHARED_STRIDES", False)
    with pytest.raises(Exception, match=r"close|leaves the memory") if wrong else nullcontext():
        check(CASES[name])
