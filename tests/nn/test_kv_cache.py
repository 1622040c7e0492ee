"""Decoding with a KVCache: each step's rows equal those of dense masked softmax over the whole sequence."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention
from flexmask.errors import LoweringError, OperandError
from tests.nn.cache_cases import (
    CASES,
    CHUNKS,
    IDS,
    STARTS,
    WINDOW,
    S,
    after_start,
    check_close,
    decode,
    dense_forward,
    inputs,
)
from tests.support import oracle
from tests.support.exhaustive import each_run, exhaustive
from tests.support.rope import turn

#: Each case in one of the ways with several calls, in turn.
EACH = [(name, list(CHUNKS)[number % 3]) for number, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "chunks"), [*EACH, *exhaustive(sorted(set(product(CASES, CHUNKS)) - set(EACH)))])
def test_every_step_is_the_whole_sequence(name: str, chunks: str) -> None:
    case, x = CASES[name], inputs()
    module = case.module()
    with torch.no_grad():
        expected = dense_forward(case, module, x)
        check_close(module(x, **case.data), expected)
        check_close(decode(module, x, CHUNKS[chunks], case.cache(), **case.data), expected)


@pytest.mark.parametrize("name", CASES)
def test_sequences_at_other_positions(name: str) -> None:
    """Two prompts of 12 and 7 tokens, padded on the right, then steps at each sequence's own position."""
    case, x, prompts, steps = CASES[name], inputs(), [12, 7], [1, 3, 1, 1, 4, 1]
    module, cache = case.module(), case.cache()
    with torch.no_grad():
        expected = dense_forward(case, module, x)
        found = module(x[:, :12], cache=cache, **case.data)
        for b, length in enumerate(prompts):
            check_close(found[b, :length], expected[b, :length])
        cache.truncate(prompts)
        at = torch.tensor(prompts)
        for step in steps:
            places = at[:, None] + torch.arange(step)
            rows = torch.arange(2)[:, None]
            check_close(module(x[rows, places], cache=cache, **case.data), expected[rows, places])
            at += step
            assert isinstance(cache.length, Tensor)
            assert torch.equal(cache.length, at)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["causal", "documents", "documents in a window, its keys only"])
def test_on_each_device_in_float32(name: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case, x = CASES[name], inputs()
    module, cache = case.module(), case.cache()
    expected = dense_forward(case, module, x)
    module = module.float().to(device)
    data = {key: value.to(device) for key, value in case.data.items()}
    with torch.no_grad():
        found = decode(module, x.float().to(device), CHUNKS["chunks"], cache, **data)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-3, atol=1e-3)


def test_data_of_the_tokens_so_far_does_as_well() -> None:
    case, x, ids = CASES["documents"], inputs(), torch.tensor(IDS)
    module, cache = case.module(), case.cache()
    with torch.no_grad():
        expected = dense_forward(case, module, x)
        for place in range(S):
            found = module(x[:, place : place + 1], cache=cache, ids=ids[:, : place + 1])
            check_close(found, expected[:, place : place + 1])


@pytest.mark.parametrize(
    "mask", ["causal", f"sliding_window(size={WINDOW})", "prefix_lm(2)", "causal & document(lengths=[5, 18])"]
)
def test_steps_with_projections_of_your_own(mask: str) -> None:
    """A step that is not committed changes nothing; its tokens are taken again."""
    query, key, value = torch.randn(3, 2, 4, S, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for cache in (KVCache(S), KVCache(S, window=S)):
        found = []
        for begin, end in ((0, 9), (9, 10), (10, 14), (14, S)):
            part = slice(begin, end)
            cache.step(-query[:, :, part], -key[:, :, part], -value[:, :, part], mask)
            assert cache.length == begin
            step = cache.step(query[:, :, part], key[:, :, part], value[:, :, part], mask)
            found.append(fm.attention(query[:, :, part], step.key, step.value, step.mask, q_offset=step.q_offset))
            step.commit()
        check_close(torch.cat(found, 2), fm.attention(query, key, value, mask))


@pytest.mark.parametrize("other", [(2, 5), (1, 7)])
def test_another_context_needs_a_reset(other: tuple[int, int]) -> None:
    module, cache = MultiheadFlexAttention(6, 8, 4, d_context=10).double(), KVCache()
    x, context = inputs(3), torch.randn(2, 7, 10, dtype=torch.float64)
    module(x, context=context, cache=cache)
    again = x[: other[0]], torch.randn(*other, 10, dtype=torch.float64)
    with pytest.raises(LoweringError, match=r"holds the keys of a context \[B, kv_len\] = \[2, 7\].*reset\(\)"):
        module(again[0], context=again[1], cache=cache)
    cache.reset()
    check_close(module(again[0], context=again[1], cache=cache), module(again[0], context=again[1]))


@pytest.mark.parametrize("rope", [None, turn])
@pytest.mark.parametrize("d_context", [6, 10])
def test_keys_of_a_context_are_computed_once(d_context: int, rope: Any) -> None:
    mask = "key_padding(lengths) & ((q + kv) % 4 != 0)"
    module = MultiheadFlexAttention(6, 8, 4, d_context=d_context, n_kv_heads=2, rope=rope, mask=mask).double()
    x, context, lengths = inputs(9), torch.randn(2, 7, d_context, dtype=torch.float64), torch.tensor([7, 3])
    expected = module(x, context=context, lengths=lengths)
    first, *rest = x.split([4, 1, 1, 3], 1)
    cache = KVCache()
    found = [module(first, context=context, cache=cache, lengths=lengths)]
    context.zero_()
    found += [module(part, cache=cache, context=context if place else None, lengths=lengths) for place, part in enumerate(rest)]
    check_close(torch.cat(found, 1), expected)
    assert cache.length == 9
    with pytest.raises(LoweringError, match="holds the keys of a context"):
        cache.step(torch.ones(2, 4, 1, 2), torch.ones(2, 2, 1, 2), torch.ones(2, 2, 1, 2), None)


def test_truncate_takes_drafts_back() -> None:
    for name in ("causal", "window, its keys only"):
        case, x = CASES[name], inputs()
        module, cache = case.module(), case.cache()
        with torch.no_grad():
            expected = dense_forward(case, module, x)
            module(x[:, :9], cache=cache)
            module(torch.cat((x[:, 9:10], -x[:, 10:13]), 1), cache=cache)  # the first of four was right
            cache.truncate(10)
            check_close(module(x[:, 10:15], cache=cache), expected[:, 10:15])


def test_reorder_moves_sequences() -> None:
    for name in ("rope", "window, its keys only"):
        case, x = CASES[name], inputs()
        module, cache = case.module(), case.cache()
        with torch.no_grad():
            module(x[:, :12], cache=cache)
            cache.truncate([12, 8])
            module(x[:, 12:14], cache=cache)
            order = torch.tensor([1, 0, 1])
            same = copy.deepcopy(cache)
            cache.reorder(order)
            expected = module(x[:, 14:15], cache=same)
            check_close(module(x[order, 14:15], cache=cache), expected[order])


def test_reset_starts_over() -> None:
    module, cache, x = CASES["causal"].module(), KVCache(S), inputs()
    module(x, cache=cache)
    cache.reset()
    assert cache.length == 0
    check_close(module(x[:1, :3], cache=cache), module(x[:1, :3]))


def test_the_nodes_of_a_tree_after_a_prompt() -> None:
    """Each node has the output of the last token of its own branch."""
    x, module, cache = inputs(9, 1), MultiheadFlexAttention(6, 6, 2, dtype=torch.float64), KVCache(9)
    module(x[:, :5], "causal", cache=cache)
    nodes = fm.masks.tree(parents=[-1, 0, 0, 1], prefix=5)
    found = module(x[:, 5:], fm.masks.shift(nodes, q=5), cache=cache)
    for node, branch in enumerate([[5], [5, 6], [5, 7], [5, 6, 8]]):
        check_close(found[:, node], module(x[:, [*range(5), *branch]], "causal")[:, -1])


#: Two trees of six drafts, and paths in them: what is given, the tokens before the tree, and the nodes that are accepted.
TREES, DEPTHS = [[-1, 0, 0, 1, 2, 2], [-1, -1, 1, 1, 3, 0]], [[0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 2, 1]]
ACCEPTED: dict[str, tuple[Any, Any, list[int], list[list[int]]]] = {
    "one path": ([0, 2, 5], 5, [5], [[0, 2, 5]]),
    "a first run": ([0, 1], 5, [5], [[0, 1]]),
    "no node": ([], 5, [5], [[]]),
    "a path in each sequence": ([[0, 2, 5], [1, 3, -1]], 5, [5, 5], [[0, 2, 5], [1, 3]]),
    "tensors": (torch.tensor([[-1, -1], [1, 2]]), torch.tensor([4, 5]), [4, 5], [[], [1, 2]]),
}


@pytest.mark.parametrize(
    ("name", "window"), [*((name, None) for name in ACCEPTED), ("one path", 4), ("a path in each sequence", 4)]
)
@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_an_accepted_path_follows_the_prefix(name: str, window: int | None, grad: bool) -> None:
    """The tokens after it have the outputs of a sequence that never had the other nodes, with ``rope`` and windows by depth."""
    path, prefix, before, accepted = ACCEPTED[name]
    later = 7 if window else 0  # so that the cache has dropped keys
    first, prefix, before = 5 + later, prefix + later, [number + later for number in before]
    batch, x = len(before), inputs(first + 9, len(before))
    module = MultiheadFlexAttention(6, 8, 2, rope=turn, dtype=torch.float64)
    past = fm.sliding_window(size=window) if window else fm.causal()
    cache = KVCache(window=window + 6) if window else KVCache(14)
    tree, depth = fm.masks.tree(parents=TREES[:batch], prefix=first), torch.tensor(DEPTHS[:batch])
    if window:
        tree &= fm.kv > first + fm.table(depth)[fm.b, fm.q] - window
    drafted = fm.masks.shift(tree, q=first)
    if window:  # by depth: the other nodes lie between a query and its keys
        drafted &= fm.sliding_window(size=window + 6)
    with torch.set_grad_enabled(grad):
        module(x[:, :first], past, cache=cache)
        drafts = module(x[:, first : first + 6], drafted, cache=cache, positions=first + depth)
        assert bool(cache.start) == bool(window)
        cache.accept(path, prefix=prefix)
        found = module(x[:, first + 6 :], past, cache=cache)
        if grad:
            drafts.sum().backward()  # of tensors that the cache held
    for one, (begin, nodes) in enumerate(zip(before, accepted, strict=True)):
        places = [*range(begin), *(first + node for node in nodes), *range(first + 6, first + 9)]
        check_close(found[one], module(x[one : one + 1, places], past)[0, -3:])


def test_rounds_of_drafts_of_two_sequences() -> None:
    """The prefix of a round is the length of the cache, which is a tensor once the sequences have accepted other numbers."""
    module, cache, x = MultiheadFlexAttention(6, 8, 2, rope=turn, dtype=torch.float64), KVCache(24), inputs(20)
    depth = torch.tensor(DEPTHS[0])
    rounds = [[[0, 2, 5], [0, 1, -1]], [[-1, -1], [0, 2]], [[0, 1, 3], [0, -1, -1]]]
    tokens = [list(range(4)) for _ in x]  # of each sequence, in `x`
    with torch.no_grad():
        module(x[:, :4], "causal", cache=cache)
        for first, paths in zip((4, 10, 14), rounds, strict=True):
            prefix: Any = cache.length
            mask = fm.masks.shift(fm.masks.tree(parents=TREES[0], prefix=prefix), q=prefix)
            positions = cache.positions(1, x.device) + depth
            found = module(x[:, first : first + 6], mask, cache=cache, positions=positions)
            for node, branch in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]):
                for one in range(2):
                    places = [*tokens[one], *(first + place for place in branch)]
                    check_close(found[one, node], module(x[one : one + 1, places], "causal")[0, -1])
            cache.accept(paths, prefix=prefix)
            tokens = [[*own, *(first + n for n in path if n >= 0)] for own, path in zip(tokens, paths, strict=True)]
            assert torch.as_tensor(cache.length).tolist() == [len(own) for own in tokens]


def test_gradients_reach_the_tokens_of_the_call() -> None:
    case, x = CASES["rope"], inputs()
    for cut in (None, [9, 9]):
        module, cache = case.module(), case.cache()
        old, new = x[:, :9].clone().requires_grad_(), x[:, 9:12].clone().requires_grad_()
        module(old, cache=cache)
        assert cache.key is not None and not cache.key.requires_grad  # noqa: PT018
        if cut is not None:
            cache.truncate(cut)
        out = module(new, cache=cache)
        module(x[:, 12:], cache=cache)  # what is saved for the backward pass stays as it is
        found = torch.autograd.grad(out.square().sum(), [new, module.in_proj.weight])
        plain = module(torch.cat((old.detach(), new), 1))[:, 9:]
        check_close(found[0], torch.autograd.grad(plain.square().sum(), new)[0])
        assert found[1].isfinite().all()


def test_copies_and_pickles() -> None:
    case, x = CASES["window, its keys only"], inputs()
    module, cache = case.module(), case.cache()
    with torch.no_grad():
        module(x[:, :9], cache=cache)
        twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        expected = module(x[:, 9:], cache=cache)
        for twin in twins:
            check_close(module(x[:, 9:], cache=twin), expected)
    assert repr(cache) == f"KVCache(capacity=None, window={WINDOW}, length={S})"


@pytest.mark.parametrize(("window", "remedy"), [(None, "with window= for a sliding window"), (3, "with window= alone")])
def test_the_remedy_of_a_full_cache(window: int | None, remedy: str) -> None:
    module, cache = fm.MultiheadFlexAttention(16, 16, 2).eval(), KVCache(capacity=4, window=window)
    with torch.no_grad():
        module(torch.randn(1, 4, 16), fm.sliding_window(size=3), cache=cache)
        with pytest.raises(LoweringError, match=f"capacity=4 tokens, 4 are taken and 1 more do not fit.*{remedy}"):
            module(torch.randn(1, 1, 16), fm.sliding_window(size=3), cache=cache)


def test_data_of_another_batch_is_named_as_the_user_wrote_it() -> None:
    module = MultiheadFlexAttention(6, 8, 4)
    with pytest.raises(LoweringError, match=r"3 by key_padding\(lengths=\[3, 4, 5\]\)"):
        module(torch.zeros(2, 3, 6), "causal & key_padding(lengths=[3, 4, 5])", cache=KVCache(8))


def test_a_failed_call_leaves_the_cache_as_it_was() -> None:
    case, x = CASES["documents in a window, its keys only"], inputs()
    module, cache = case.module(), case.cache()
    with torch.no_grad():
        expected = dense_forward(case, module, x)
        module(x[:, :9], cache=cache, **case.data)
        with pytest.raises(LoweringError, match="9 values along q, but the tokens in the cache reach position 12"):
            module(x[:, 9:12], cache=cache, ids=torch.tensor(IDS)[:, :9])
        check_close(module(x[:, 9:12], cache=cache, **case.data), expected[:, 9:12])


@pytest.mark.slow
@pytest.mark.parametrize(("ragged", "backend"), each_run(product([False, True], ["eager", "inductor"]), (True, "eager")))
def test_compiled_decoding_takes_two_graphs(ragged: bool, backend: str) -> None:
    """A BlockMask over the capacity has one size for every step."""
    torch.compiler.reset()
    counters.clear()
    module, x, cache = MultiheadFlexAttention(6, 32, 2, rope=turn), torch.randn(2, 12, 6), KVCache(16)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = module(x, "causal")
        module(x[:, :4], "causal", cache=cache)
        if ragged:
            cache.truncate([4, 3])
        for step in range(4):
            places = torch.tensor([4, 3 if ragged else 4]) + step
            rows = torch.arange(2)[:, None]
            found = compiled(x[rows, places[:, None]], fm.causal().block_mask(1, 16, q_offset=places), cache=cache)
            torch.testing.assert_close(found, expected[rows, places[:, None]], rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2


def alone(module: MultiheadFlexAttention, mask: str, x: Tensor) -> Tensor:
    out: Tensor = module(x[None], mask)[0]
    return out


@pytest.mark.parametrize("mask", ["causal", f"sliding_window(size={WINDOW})", "causal & ((q - kv) % 3 == 0)"])
@pytest.mark.parametrize("chunks", [[9, 1, 1, 1], [4, 5, 1, 2], [12]])
def test_a_batch_with_padding_on_the_left(mask: str, chunks: list[int]) -> None:
    """Each sequence gives the same as alone, without padding, for any values in the padding."""
    module, x, pads = CASES["causal"].module(), inputs(12, batch=3), [4, 0, 2]
    with torch.no_grad():
        found = decode(module, x, chunks, KVCache(12), mask=f"({mask}) & key_padding(start=pads)", pads=pads)
        for b, pad in enumerate(pads):
            check_close(found[b, pad:], alone(module, mask, x[b, pad:]))


@pytest.mark.parametrize("mask", ["causal", f"sliding_window(size={WINDOW})"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_batch_with_padding_on_the_right(mask: str, window: int | None) -> None:
    module, x, lengths, cache = CASES["rope"].module(), inputs(12), [8, 5], KVCache(20, window=window)
    if window and mask == "causal":
        mask = f"causal & chunked({WINDOW})"
    with torch.no_grad():
        prompt = module(x[:, :8], f"({mask}) & key_padding(lengths)", cache=cache, lengths=lengths)
        cache.truncate(lengths)
        steps = [module(x[:, place : place + 1], mask, cache=cache) for place in range(8, 12)]
        for b, length in enumerate(lengths):
            expected = alone(module, mask, torch.cat((x[b, :length], x[b, 8:])))
            check_close(torch.cat((prompt[b, :length], *(step[b] for step in steps))), expected)


def test_left_padding_in_a_block_mask_does_not_move() -> None:
    mask = fm.causal() & fm.key_padding(start=STARTS)
    allowed = torch.tensor(oracle.table_of(after_start, S, S, batch=2))
    for place in range(S):
        made = mask.block_mask(1, S, q_offset=place, block_size=4)
        axes = torch.meshgrid(torch.arange(2), torch.tensor([0]), torch.tensor([0]), torch.arange(S), indexing="ij")
        assert torch.equal(made.mask_mod(*axes), allowed[:, :, place : place + 1])


def test_a_cache_belongs_to_one_layer() -> None:
    first, second = (MultiheadFlexAttention(6, 8, 4).double() for _ in range(2))
    calls: list[tuple[KVCache, dict[str, Any]]] = [(KVCache(S), {"mask": "causal"}), (KVCache(), {"context": inputs(5)})]
    for cache, contexts in calls:
        second(inputs(0), cache=cache, **contexts) if "mask" in contexts else None
        found = first(inputs(3), cache=cache, **contexts)
        with pytest.raises(LoweringError, match=r"another layer.*own.*reset\(\).*deepcopy"):
            second(inputs(3), cache=cache, **contexts)
        assert cache.length == 3
        cache.reset()
        second(inputs(3), cache=cache, **contexts)
        with pytest.raises(LoweringError, match="another layer"):
            first(inputs(3), cache=cache, **contexts)
        cache.reset()
        check_close(first(inputs(3), cache=cache, **contexts), found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_goes_on_in_a_copy_of_the_layer(copied: Callable[[KVCache], KVCache]) -> None:
    module, x, cache = CASES["causal"].module(), inputs(5), KVCache(S)
    twin = copy.deepcopy(module)
    module(x[:, :3], cache=cache)
    with pytest.raises(LoweringError, match="another layer"):
        twin(x[:, 3:], cache=cache)
    check_close(twin(x[:, 3:], cache=copied(cache)), module(x[:, 3:], cache=cache))


def test_a_cache_keeps_no_layer_alive() -> None:
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(8)
    with torch.no_grad():
        module(inputs(3), "causal", cache=cache)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_call_that_fails_for_the_window_leaves_the_cache_as_it_was() -> None:
    case, x = CASES["window, its keys only"], inputs()
    module, cache = case.module(), case.cache()
    with torch.no_grad():
        expected = dense_forward(case, module, x)
        module(x[:, :9], cache=cache)
        for _ in range(2):
            with pytest.raises(LoweringError, match="no limit on how far back"):
                module(x[:, 9:11], "causal", cache=cache)
        check_close(module(x[:, 9:], cache=cache), expected[:, 9:])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_prompt_that_is_compiled_moves_the_position() -> None:
    torch.manual_seed(0)
    layer, x = fm.MultiheadFlexAttention(16, 16, 4), torch.randn(2, 12, 16)
    torch.compiler.reset()
    compiled, cache = torch.compile(layer, fullgraph=True, backend="eager"), fm.KVCache(12)
    with torch.no_grad():
        whole = layer(x, fm.causal())
        parts = [compiled(x[:, :4], fm.causal().block_mask(4, 12), cache=cache)]
        assert cache.length == 4
        parts += [compiled(x[:, i : i + 1], fm.causal().block_mask(1, 12, q_offset=i), cache=cache) for i in (4, 5)]
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, :6], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [fm.key_padding([99, 99]), fm.key_padding(keep=[True] * 9)])
def test_a_context_is_checked_with_a_cache_too(mask: fm.Mask) -> None:
    layer, x, context = fm.MultiheadFlexAttention(8, 8, 2), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    for cache in (None, fm.KVCache()):
        with pytest.raises(LoweringError):
            layer(x, mask, context=context, cache=cache)


def test_a_prompt_in_inference_mode_can_go_on_without() -> None:
    layer, x, cache = fm.MultiheadFlexAttention(8, 8, 2), torch.randn(1, 5, 8), fm.KVCache(8)
    whole = layer(x, fm.causal())
    with torch.inference_mode():
        layer(x[:, :4], fm.causal(), cache=cache)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:, 4:], fm.causal(), cache=cache), whole[:, 4:].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [True, 2.5, torch.tensor([2.9, 1.2]), [True, False]], ids=str)
def test_lengths_to_keep_are_integers(lengths: Any) -> None:
    layer, cache = fm.MultiheadFlexAttention(8, 8, 2), fm.KVCache(8)
    layer(torch.randn(2, 4, 8), fm.causal(), cache=cache)
    with pytest.raises(OperandError, match="lengths must be integers"):
        cache.truncate(lengths)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_branches_of_a_cache_have_keys_of_their_own(duplicate: Callable[[KVCache], KVCache]) -> None:
    layer, x = MultiheadFlexAttention(8, 8, 2, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        whole, cache = layer(x, "causal"), KVCache(8)
        layer(x[:, :4], "causal", cache=cache)
        other = duplicate(cache)
        layer(x[:, 4:5], "causal", cache=cache)
        layer(torch.randn_like(x[:, :1]), "causal", cache=other)
        check_close(layer(x[:, 5:], "causal", cache=cache), whole[:, 5:])


def test_a_cache_that_was_reordered_in_inference_mode_goes_on_outside() -> None:
    layer, x = MultiheadFlexAttention(8, 8, 2, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)
    cache = KVCache(8)
    with torch.inference_mode():
        layer(x[:, :5], "causal", cache=cache)
        cache.reorder(torch.tensor([1, 0]))
    with torch.no_grad():
        check_close(layer(x.flip(0)[:, 5:], "causal", cache=cache), layer(x, "causal").flip(0)[:, 5:])
