"""Decoding with a KVCache: each step's rows equal those of dense masked softmax over the whole sequence."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.intervals.context import MAX_LENGTH
from flexmask.nn import CallTokens, first_dropped, mask_over_cache
from flexmask.nn.cache_masks import check_window
from flexmask.nn.lookback import lookback_of
from flexmask.report.compare import difference
from tests.support import oracle
from tests.support.exhaustive import exhaustive
from tests.support.rope import turn
from tests.support.strategies import Case as DrawnCase
from tests.support.strategies import Shape, mask_cases

S, WINDOW = 23, 5
IDS = [[0] * 7 + [1] * 6 + [2] * 10, [3] * 4 + [4] * 16 + [-1] * 3]
STARTS = [3, 0]
#: How the sequence comes in: at once, in chunks, and token by token.
CHUNKS = {"prefill, then one by one": [9] + [1] * 14, "chunks": [4, 7, 1, 2, 9], "one by one": [1] * S, "at once": [S]}


@dataclass(frozen=True)
class Case:
    """A mask with the data of the whole sequence, its meaning in plain Python, and how the module and its cache are made."""

    mask: str
    allowed: oracle.Predicate
    data: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None

    def module(self) -> MultiheadFlexAttention:
        torch.manual_seed(0)
        return MultiheadFlexAttention(6, 8, 4, mask=self.mask, **self.options).double()

    def cache(self) -> KVCache:
        return KVCache(window=self.window) if self.window else KVCache(S)


def after_start(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return STARTS[b] <= kv <= q


def third_diagonals(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return kv <= q and (q - kv) % 3 == 0


WINDOWED = oracle.sliding_window(size=WINDOW)
DOCUMENTS = oracle.both(oracle.causal(), oracle.document(IDS))
LENGTHS = torch.tensor([S, 17])
KEEP = torch.rand(2, S, generator=torch.Generator().manual_seed(3)) < 0.7
PACKED = [[7, 6, 10], [4, 16, 0]]
WHOLE = [[7, 6, 10], [4, 16, 3]]
CHUNKED = oracle.both(oracle.causal(), lambda b, h, q, kv, q_len, kv_len: q // WINDOW == kv // WINDOW)

CASES: dict[str, Case] = {
    "causal": Case("causal", oracle.causal()),
    "window": Case(f"sliding_window(size={WINDOW})", WINDOWED),
    "window, its keys only": Case(f"sliding_window(size={WINDOW})", WINDOWED, window=WINDOW),
    "window of 1": Case("sliding_window(size=1)", oracle.sliding_window(size=1), window=1),
    "documents": Case("causal & document(ids)", DOCUMENTS, {"ids": torch.tensor(IDS)}),
    "documents, literal": Case(f"causal & document(ids={IDS})", DOCUMENTS),
    "documents by lengths": Case(f"causal & document(lengths={PACKED}, padding=True)", DOCUMENTS),
    "documents by lengths of all tokens": Case(
        "causal & document(lengths=n)",
        oracle.both(oracle.causal(), oracle.document([oracle.ids_of_lengths(row, S) for row in WHOLE])),
        {"n": torch.tensor(WHOLE)},
    ),
    "documents shorter than the window, its keys only": Case(
        "causal & document(ids)", DOCUMENTS, {"ids": torch.tensor(IDS)}, {}, 16
    ),
    "documents restart": Case("per_document(causal, ids)", oracle.per_document(oracle.causal(), IDS), {"ids": torch.tensor(IDS)}),
    "documents within documents": Case(
        "causal & per_document(document(lengths=[4, 19]), ids)",
        oracle.both(oracle.causal(), oracle.per_document(oracle.document(oracle.ids_of_lengths([4, 19], S)), IDS)),
        {"ids": torch.tensor(IDS)},
    ),
    "documents in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & document(ids)", oracle.both(WINDOWED, DOCUMENTS), {"ids": torch.tensor(IDS)}, {}, WINDOW
    ),
    "documents by lengths in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & document(lengths={PACKED}, padding=True)",
        oracle.both(WINDOWED, DOCUMENTS),
        window=WINDOW,
    ),
    "lengths of the whole": Case(
        "causal & key_padding(lengths)", oracle.both(oracle.causal(), oracle.key_padding(LENGTHS.tolist())), {"lengths": LENGTHS}
    ),
    "keep, its keys only": Case(
        f"sliding_window(size={WINDOW}) & key_padding(keep=keep)",
        oracle.both(WINDOWED, oracle.key_keep(KEEP.tolist())),
        {"keep": KEEP},
        window=WINDOW,
    ),
    "padding on the left": Case("causal & (kv >= start[b])", after_start, {"start": torch.tensor(STARTS)}),
    "padding on the left, by name": Case("causal & key_padding(start=pad)", after_start, {"pad": torch.tensor(STARTS)}),
    "padding on the left, literal": Case(f"causal & key_padding(start={STARTS})", after_start),
    "padding on the left in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & key_padding(start={STARTS})", oracle.both(WINDOWED, after_start), window=WINDOW
    ),
    "chunks, their keys only": Case(f"causal & chunked({WINDOW})", CHUNKED, window=WINDOW),
    "a window for each head, its keys only": Case(
        f"per_head([sliding_window(size={WINDOW}), sliding_window(size=2), sliding_window(size=1), empty])",
        oracle.per_head([WINDOWED, oracle.sliding_window(size=2), oracle.sliding_window(size=1), oracle.empty()]),
        window=WINDOW,
    ),
    "diagonals": Case("causal & ((q - kv) % 3 == 0)", third_diagonals),
    "diagonals in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & ((q - kv) % 3 == 0)", oracle.both(WINDOWED, third_diagonals), window=WINDOW
    ),
    "grouped heads": Case("causal", oracle.causal(), options={"n_kv_heads": 2}),
    "one key head, rope, its keys only": Case(
        f"sliding_window(size={WINDOW})", WINDOWED, options={"n_kv_heads": 1, "rope": turn}, window=WINDOW
    ),
    "rope": Case("causal", oracle.causal(), options={"rope": turn}),
    "score_mod": Case(
        "causal",
        oracle.causal(),
        options={"score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.1 * (h + 1) * (q_idx - kv_idx)},
    ),
    "score_mod, its keys only": Case(
        f"sliding_window(size={WINDOW})",
        WINDOWED,
        options={"score_mod": lambda score, b, h, q_idx, kv_idx: score * (1 + 0.2 * b + 0.01 * q_idx * kv_idx)},
        window=WINDOW,
    ),
}


def inputs(length: int = S, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def dense_forward(case: Case, module: MultiheadFlexAttention, x: Tensor) -> Tensor:
    """Masked softmax over the whole sequence in float64, with the weights of the module."""
    query, key, value = (
        part.unflatten(-1, (-1, module.d_head)).transpose(1, 2)
        for part in module.in_proj(x).split([8, 2 * module.n_kv_heads, 2 * module.n_kv_heads], -1)
    )
    places = torch.arange(x.shape[1])
    if module.rope is not None:
        query, key = turn(query, places), turn(key, places)
    visible = torch.tensor(oracle.table_of(case.allowed, x.shape[1], x.shape[1], batch=2, heads=4, q_offset=0))
    heads = oracle.attention(query, key, value, visible, score_mod=module.score_mod)
    out: Tensor = module.out_proj(heads.transpose(1, 2).flatten(2))
    return out


def decode(module: MultiheadFlexAttention, x: Tensor, chunks: Iterable[int], cache: KVCache, **data: Any) -> Tensor:
    parts = x.split(list(chunks), 1)
    return torch.cat([module(part, cache=cache, **data) for part in parts], 1)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", CASES)
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


def test_no_mask_attends_to_the_tokens_so_far() -> None:
    module, x = MultiheadFlexAttention(6, 8, 4).double(), inputs()
    cache, ragged = KVCache(S), KVCache(S)
    module(x[:, :4], cache=cache)
    check_close(module(x[:, 4:6], cache=cache), module(x[:, :6])[:, 4:])
    module(x[:, :4], cache=ragged)
    ragged.truncate([4, 2])
    check_close(module(x[:, 4:6], cache=ragged)[1], module(x[1:, [0, 1, 4, 5]])[0, 2:])


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
        cache.append(torch.ones(2, 2, 1, 2), torch.ones(2, 2, 1, 2))


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
    batch, x = len(before), inputs(14, len(before))
    module = MultiheadFlexAttention(6, 8, 2, rope=turn, dtype=torch.float64)
    past = fm.sliding_window(size=window) if window else fm.causal()
    cache = KVCache(window=window) if window else KVCache(14)
    tree, depth = fm.masks.tree(parents=TREES[:batch], prefix=5), torch.tensor(DEPTHS[:batch])
    if window:
        tree &= fm.kv > 5 + fm.table(depth)[fm.b, fm.q] - window
    with torch.set_grad_enabled(grad):
        module(x[:, :5], past, cache=cache)
        drafts = module(x[:, 5:11], fm.masks.shift(tree, q=5), cache=cache, positions=5 + depth)
        cache.accept(path, prefix=prefix)
        found = module(x[:, 11:], past, cache=cache)
        if grad:
            drafts.sum().backward()  # of tensors that the cache held
    for one, (begin, nodes) in enumerate(zip(before, accepted, strict=True)):
        places = [*range(begin), *(5 + node for node in nodes), 11, 12, 13]
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
@pytest.mark.parametrize("backend", ["eager", *exhaustive(["inductor"])])
@pytest.mark.parametrize("ragged", [False, True])
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
        for step in range(8):
            places = torch.tensor([4, 3 if ragged else 4]) + step
            rows = torch.arange(2)[:, None]
            found = compiled(x[rows, places[:, None]], fm.causal().block_mask(1, 16, q_offset=places), cache=cache)
            torch.testing.assert_close(found, expected[rows, places[:, None]], rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2


def filled(number: int, cache: KVCache) -> KVCache:
    mask = f"sliding_window(size={cache.window})" if cache.window else None
    MultiheadFlexAttention(6, 8, 4).double()(inputs(number), mask, cache=cache)
    return copy.deepcopy(cache)  # with which another layer may go on


def call(cache: Any, x: Tensor | None = None, **options: Any) -> Callable[[], object]:
    module = MultiheadFlexAttention(6, 8, 4).double()
    return lambda: module(inputs(3) if x is None else x, cache=cache, **options)


def grown_to(mask: str | None, chunks: list[int], cache: KVCache, **data: Any) -> Callable[[], object]:
    """Gives the cache all chunks; the last call is the one that raises."""
    module = MultiheadFlexAttention(6, 8, 4).double()
    *before, last = inputs(sum(chunks)).split(chunks, 1)
    for part in before:
        module(part, mask, cache=cache, **data)
    return lambda: module(last, mask, cache=cache, **data)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "float": (lambda: KVCache(2.0), OperandError, r"capacity.*2\.0"),  # type: ignore[arg-type]
    "nothing": (lambda: KVCache(0), ExpressionError, "capacity.*at least 1.*0"),
    "no window": (lambda: KVCache(window=0), ExpressionError, "window.*at least 1.*0"),
    "no cache": (call({}), OperandError, "KVCache.*dict"),
    "no capacity": (call(KVCache()), LoweringError, r"KVCache\(capacity\)"),
    "overflow": (call(filled(6, KVCache(8))), LoweringError, "capacity=8.*6 are taken.*3 more.*window=.*reset"),
    "another batch": (call(filled(3, KVCache(8)), inputs(1, batch=3)), LoweringError, "2 sequences.*reset"),
    "context where tokens are": (call(filled(3, KVCache(8)), context=inputs(3)), LoweringError, "holds tokens.*own"),
    "truncate the empty": (lambda: KVCache(8).truncate(0), LoweringError, "empty"),
    "reorder the empty": (lambda: KVCache(8).reorder(torch.tensor([0])), LoweringError, "empty"),
    "truncate to more": (lambda: filled(3, KVCache(8)).truncate([4, 1]), LoweringError, r"\[3, 3\].*\[4, 1\]"),
    "truncate three": (lambda: filled(3, KVCache(8)).truncate([1, 1, 1]), LoweringError, r"int\[2\].*\[3\]"),
    "accept in the empty": (lambda: KVCache(8).accept([0], prefix=0), LoweringError, "empty"),
    "accept a node that is not there": (
        lambda: filled(5, KVCache(8)).accept([0, 2], prefix=3),
        LoweringError,
        r"path \[0, 2\] after prefix=3.*5 tokens",
    ),
    "accept in another order": (lambda: filled(5, KVCache(8)).accept([1, 0], prefix=3), LoweringError, r"increasing.*\[1, 0\]"),
    "accept after a gap": (lambda: filled(5, KVCache(8)).accept([-1, 1], prefix=3), LoweringError, r"then -1.*\[-1, 1\]"),
    "accept before the start": (lambda: filled(5, KVCache(8)).accept([0], prefix=-1), LoweringError, "prefix=-1"),
    "accept in three": (lambda: filled(5, KVCache(8)).accept([[0], [0], [0]], prefix=3), LoweringError, r"int\[2, n\]"),
    "accept behind three": (lambda: filled(5, KVCache(8)).accept([0], prefix=[3, 3, 3]), LoweringError, r"int\[2\].*\[3\]"),
    "accept a number": (lambda: filled(5, KVCache(8)).accept(0, prefix=3), LoweringError, r"int\[n\]"),  # type: ignore[arg-type]
    "accept by truth": (lambda: filled(5, KVCache(8)).accept([True], prefix=3), OperandError, "path must be.*integers"),
    "accept half": (lambda: filled(5, KVCache(8)).accept([0], prefix=2.5), OperandError, r"prefix must be.*2\.5"),  # type: ignore[arg-type]
    "accept where the window is gone": (
        lambda: filled(3, filled(9, KVCache(window=4))).accept([1], prefix=7),
        LoweringError,
        r"window of 4",
    ),
    "window gone": (
        lambda: filled(3, filled(9, KVCache(window=4))).truncate(7),
        LoweringError,
        r"window of 4.*\[7, 7\].*\[6, 6\]",
    ),
    "unbound": (call(KVCache(8), mask="key_padding(n)"), ExpressionError, "n=..."),
    "padding on the left that moves": (
        call(KVCache(8), mask="causal & key_padding(lengths=[2, 3], side='left')"),
        LoweringError,
        r"key_padding\(lengths=\[2, 3\], side='left'\) depends on kv_len.*of a cache.*key_padding\(start=\.\.\.\)",
    ),
    "queries padded on the left": (
        call(KVCache(8), mask="query_padding(lengths=[2, 3], side='left')"),
        LoweringError,
        "depends on q_len.*start=",
    ),
    "accept paths of uneven lengths": (
        lambda: filled(5, KVCache(8)).accept([[0, 1], [0]], prefix=3),
        ExpressionError,
        "^accept: path has lists of uneven lengths.*shorter paths with -1",
    ),
    "accept floats": (
        lambda: filled(5, KVCache(8)).accept([0.5], prefix=3),  # type: ignore[arg-type]
        OperandError,
        "^accept: path must be a list or tensor of integers, got list",
    ),
    "a tree at the start of the sequence": (
        call(filled(3, KVCache(8)), inputs(2), mask="tree(parents=[-1, 0], prefix=3)"),
        LoweringError,
        r"tree\(.*2 values along q.*row 0 of a mask is the first token of the sequence.*shift\(mask, q=cache.length\)",
    ),
    "documents of the call": (
        grown_to("causal & document(ids)", [2, 2], KVCache(8), ids=torch.zeros(2, 2, dtype=torch.int64)),
        LoweringError,
        r"2 values along q.*position 4: give values for all tokens",
    ),
    "lower_right": (call(KVCache(8), mask="causal('lower_right')"), LoweringError, r"kv_len and q_len.*causal\(\)"),
    "a comparison with kv_len": (
        call(KVCache(8), mask="causal & (kv > kv_len - 3)"),
        LoweringError,
        "kv > kv_len - 3 depends",
    ),
    "lower_right over a context": (
        call(KVCache(), mask="causal('lower_right')", context=inputs(5)),
        LoweringError,
        r"causal\(align='lower_right'\) depends on q_len",
    ),
    "causal in a window": (
        call(KVCache(window=3), inputs(1), mask="causal"),
        LoweringError,
        r"^causal lets queries at any distance attend to the key at position 0, so that no KVCache\(window=\.\.\.\) is enough.*"
        r"KVCache\(capacity\) for all keys.*sliding_window\(size=3\)",
    ),
    "everything in a window": (
        call(KVCache(window=3), inputs(1)),
        LoweringError,
        "a call without a mask lets queries at any distance attend to the key at position 0",
    ),
    "sinks in a window": (
        call(KVCache(window=8), inputs(1), mask="sink_window(1, size=3)"),
        LoweringError,
        r"sink_window\(sinks=1, size=3\) lets queries at any distance attend to the key at position 0",
    ),
    "sinks of one head in a window": (
        call(KVCache(window=8), inputs(1), mask="per_head([empty, empty, empty, (kv == 2) | (kv == q)])"),
        LoweringError,
        "per_head.* at any distance attend to the key at position 2",
    ),
    "another mask in a later step": (
        lambda: call(filled(4, KVCache(window=3)), inputs(1), mask="causal")(),
        LoweringError,
        r"causal lets.* position 4 attend to the key at position 0.*KVCache\(window=3\).*no window is enough.*that key\. Give",
    ),
    "a longer window": (
        grown_to("sliding_window(size=6)", [4, 1], KVCache(window=4)),
        LoweringError,
        r"position 4 attend to the key at position 0.*dropped: give window=6, KVCache\(capacity\)",
    ),
    "sinks and padding in a window": (
        grown_to("sink_window(1, size=3) & key_padding(start=n)", [3, 1], KVCache(window=3), n=torch.tensor([0, 1])),
        LoweringError,
        "position 3 attend to the key at position 0.*no window is enough, since queries at any distance attend to that key",
    ),
    "a longer document": (
        grown_to("causal & document(ids)", [4, 1], KVCache(window=3), ids=torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])),
        LoweringError,
        "query at position 4 attend to the key at position 1.*dropped: give window=4 or more",
    ),
    "diagonals beyond a window": (
        call(KVCache(window=4), inputs(1), mask="causal & ((q - kv) % 4 == 0)"),
        LoweringError,
        "at any distance attend to the key at position 0",
    ),
    "a plan for another length": (
        lambda: call(filled(4, KVCache(10)), inputs(1), mask=fm.plan("causal", 1, 8)(q_offset=4))(),
        LoweringError,
        r"LoweredMask is for kv_len=8, but the call attends to 5 keys.*5, or once for its capacity: flexmask.plan\(mask, 1, 10\)",
    ),
    "a BlockMask for another length": (
        lambda: call(filled(4, KVCache(window=4)), inputs(1), mask=fm.causal().block_mask(1, 8, q_offset=4))(),
        LoweringError,
        r"BlockMask is for kv_len=8, but the call attends to 4 keys, those in the cache after it. Make the mask for kv_len=4$",
    ),
    "documents that end": (
        grown_to("causal & document(lengths=[[2, 3], [3, 1]])", [3, 1, 1], KVCache(8)),
        LoweringError,
        "lengths of sequence 1 cover 4 of 5 tokens.*padding=True",
    ),
    "right padding that was not cut": (
        grown_to("causal & key_padding(lengths=[4, 2])", [4, 1], KVCache(8)),
        LoweringError,
        r"every token of this call padding.*position 4.*truncate\(lengths\).*key_padding\(start=",
    ),
    "right padding under another name": (
        grown_to("causal & cross_length([4, 2])", [4, 1], KVCache(8)),
        LoweringError,
        r"cross_length\(.* makes every token of this call padding.*position 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name: str) -> None:
    attempt, kind, message = REFUSED[name]
    with pytest.raises(kind) as caught:
        attempt()
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


SHAPE = Shape(12, 12, batch=2, heads=4, lengths=())


@given(mask_cases(SHAPE, 2), st.sampled_from([[7, 1, 1, 1, 1, 1], [4, 3, 5], [1] * 12]), st.sampled_from([None, 1, 3, 6]))
def test_a_cache_is_right_or_raises(case: DrawnCase, chunks: list[int], window: int | None) -> None:
    """For any mask and window, no row differs from that of the whole sequence."""
    mask, allowed = fm.causal() & case.mask, oracle.both(oracle.causal(), case.allowed)
    module, x, cache = CASES["causal"].module(), inputs(12), KVCache(12, window=window)
    with torch.no_grad():
        expected = dense_forward(Case("", allowed), module, x)
        done = 0
        for part in x.split(chunks, 1):
            try:
                found = module(part, mask, cache=cache)
            except LoweringError as error:
                padding = "makes every token of this call padding"
                if not re.search(f"has dropped|is enough|{padding}" if window else padding, str(error)):
                    raise
                return
            check_close(found, expected[:, done : done + part.shape[1]])
            done += part.shape[1]


@given(mask_cases(SHAPE, 3))
def test_visible_keys_are_within_the_lookback(case: DrawnCase) -> None:
    whole, most, ahead = lookback_of(case.mask)
    _, _, query, key = case.expected(SHAPE).nonzero().unbind(-1)
    assert max((query - key).tolist(), default=0) <= most
    assert max((key - query).tolist(), default=0) <= ahead
    _, _, query, key = (~case.expected(SHAPE)).nonzero().unbind(-1)
    assert all(distance < 0 or distance > whole for distance in (query - key).tolist())


@pytest.mark.parametrize(
    ("text", "whole", "most", "ahead"),
    [
        ("sliding_window(size=4)", 3, 3, 0),
        ("sliding_window(size=4) & document(ids)", -1, 3, 0),
        ("abs(q - kv) <= 3", 3, 3, 3),
        ("(abs(q - kv) <= 3) | (kv == q - 9)", 3, 9, 3),
        ("per_head([sliding_window(size=2), sliding_window(left=6, right=2)])", 1, 6, 2),
        ("dilated_window(left=3, right=0, dilation=2)", -1, 3, 0),
        ("empty | (kv > q)", -1, 0, MAX_LENGTH),
        ("causal", MAX_LENGTH, MAX_LENGTH, 0),
        ("causal & (kv < q)", -1, MAX_LENGTH, 0),
        ("causal | (kv < lengths[b])", -1, MAX_LENGTH, MAX_LENGTH),
        ("sliding_window(size=4) | causal", MAX_LENGTH, MAX_LENGTH, 0),
        ("kv >= q - lengths[b]", -1, MAX_LENGTH, MAX_LENGTH),
    ],
)
def test_lookback(text: str, whole: int, most: int, ahead: int) -> None:
    assert lookback_of(fm.parse(text)) == (whole, most, ahead)


#: Masks of 6 tokens whose data shows a key after the first 3, and the query and the key that the message names.
LATER = {
    "(causal & (kind[b, q] == kind[b, kv])) | (system[b, kv] == 1)": "0 attend to the key at position 4",
    "causal | (kv < reach[b, q])": "2 .* at position 3",
    "key_padding(keep=system)": "0 .* at position 4",
    "causal | (kv < prefix[b])": "0 .* at position 3",
    "prefix_lm(prefix)": "0 .* at position 3",
    "key_padding(prefix)": "0 .* at position 3",
    "document(lengths=[2, 4])": "2 .* at position 3",
}
DATA = {
    "kind": torch.tensor([[0, 1, 0, 1, 0, 0]]).expand(2, -1),
    "system": torch.tensor([[1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0]]),
    "reach": torch.tensor([[1, 2, 4, 4, 5, 6]]).expand(2, -1),
    "prefix": torch.tensor([2, 5]),
}


@pytest.mark.parametrize("text", LATER)
def test_data_that_shows_a_later_key_is_an_error(text: str) -> None:
    module, x, mask = CASES["causal"].module(), inputs(6), fm.parse(text)
    mask = mask.bind(**{name: DATA[name] for name in mask.params})
    cache = KVCache(8)
    with pytest.raises(LoweringError, match=f"the query at position {LATER[text]}, which comes after .* mask & causal"):
        module(x[:, :3], mask, cache=cache)
    assert cache.length == 0
    for hidden in (mask & fm.causal(), fm.causal() & mask):
        check_close(decode(module, x, [3, 1, 2], KVCache(8), mask=hidden), module(x, hidden))
    check_close(decode(module, x, [6], KVCache(8), mask=mask), module(x, mask))


def test_later_keys_that_data_hides_are_no_error() -> None:
    """Rows are compared where the expression does not hide later keys, and not where it does or where data ends."""
    module, x = CASES["causal"].module(), inputs(6)
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    for mask in (fm.from_dense(lower), fm.document(torch.tensor([0, 0, 0, 1, 2, 2]))):
        check_close(decode(module, x, [3, 1, 2], KVCache(8), mask=mask), module(x, mask))
    steps = [lower[: n + 1, : n + 1] for n in range(6)]
    cache = KVCache(8)
    found = torch.cat([module(x[:, n : n + 1], fm.key_padding(keep=steps[n][n]), cache=cache) for n in range(6)], 1)
    check_close(found, module(x, "causal"))


def test_later_keys_are_compared_only_where_the_expression_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmask.nn.later_keys.difference", lambda *_: pytest.fail("rows are compared"))
    module, x = CASES["causal"].module(), inputs(6)
    for mask in (fm.causal() & fm.document(DATA["kind"]), fm.sliding_window(size=3) & fm.key_padding(keep=DATA["system"])):
        decode(module, x, [3, 1, 2], KVCache(8), mask=mask)


@pytest.mark.parametrize(
    ("mask", "is_needed"), [("causal", False), ("sliding_window(size=6)", False), ("sliding_window(size=5)", True)]
)
def test_a_step_that_attends_to_the_whole_cache_needs_no_mask(mask: str, is_needed: bool) -> None:
    module, x, cache = CASES["causal"].module(), inputs(6), KVCache(12)
    module(x[:, :5], "causal", cache=cache)
    cache.append(*(torch.zeros_like(part[:, :, :1]) for part in (cache.key, cache.value) if part is not None))
    assert (cache.call_mask(fm.parse(mask), torch.empty(1, 2, 1, 0), torch.empty(1, 2, 1, 0), {}) is not None) == is_needed


def test_a_window_on_another_device() -> None:
    """Tensors are not read there. A mask without tensors is compared, for the longest sequence."""
    device = torch.device("meta")
    length = torch.zeros(2, dtype=torch.int64, device=device)
    for tokens in (CallTokens(2, 1, 7, 8, 5, device), CallTokens(2, 1, length, 8, length, device)):
        for text in ("causal", "chunked(8) & causal", "document(lengths=[8])"):
            with pytest.raises(LoweringError, match="query at position 7 attend to the key at position 0"):
                check_window(fm.parse(text), tokens, 3, 4)
        check_window(fm.sliding_window(size=3), tokens, 3, 4)
        check_window(fm.parse("causal & chunked(2)"), tokens, 3, 4)
        check_window(fm.causal() & fm.document(torch.zeros(8, dtype=torch.int64, device=device)), tokens, 3, 4)


def test_masks_for_a_cache_of_your_own() -> None:
    """Cells are places in the cache, and a dropped key has its position. Data may be longer; where it fits nothing changes."""
    device, ids = torch.device("cpu"), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2]])
    mask = fm.causal() & fm.document(ids)
    whole = [[k <= q and bool(ids[0, q] == ids[0, k]) for k in range(8)] for q in range(8)]
    assert mask_over_cache(mask, CallTokens(1, 9, 0, 9, 0, device)) is mask
    assert mask_over_cache(mask, CallTokens(1, 8, 0, 8, 0, device)).dense(8)[0, 0].tolist() == whole
    tokens = CallTokens(1, 2, 6, 8, 4, device)
    assert mask_over_cache(mask, tokens).dense(2, 4, q_offset=6)[0, 0].tolist() == [row[4:] for row in whole[6:]]
    assert first_dropped(mask, tokens, 3) == (0, 0, 6, 3)
    assert first_dropped(mask & fm.sliding_window(size=3), tokens, 3) is None
    assert first_dropped(fm.causal() & fm.document(torch.tensor([0] * 4 + [1] * 4)), tokens, 3) is None


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
    for contexts in ({}, {"context": inputs(5)}):
        cache = KVCache(S)
        second(inputs(0), cache=cache, **contexts) if not contexts else None
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
        module(inputs(3), cache=cache)
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
            with pytest.raises(LoweringError, match=r"position 0.*no window is enough"):
                module(x[:, 9:11], "causal", cache=cache)
        check_close(module(x[:, 9:], cache=cache), expected[:, 9:])


def test_the_window_is_that_of_each_sequence() -> None:
    """At 6 and 4 tokens, a chunk of 4 from position 4 on is whole in the window of the second sequence only."""
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(window=3)
    with torch.no_grad():
        module(inputs(6), "causal & chunked(6)", cache=cache)
        cache.truncate([6, 4])
        with pytest.raises(LoweringError, match=r"position 6 attend to the key at position 3.*window=4"):
            module(inputs(1), "causal & (kv // 3 == q // 3 - (b == 0))".replace("(b == 0)", "where(b == 0, 1, 0)"), cache=cache)
        module(inputs(1), "causal & (kv // 3 == q // 3)", cache=cache)


def test_a_window_of_the_mask_is_not_compared_with_dropped_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is free for masks with a lookback; for others, layers in a MaskCache share one comparison."""
    compared: list[Any] = []

    def counted(*args: Any) -> Any:
        compared.append(args)
        return difference(*args)

    monkeypatch.setattr("flexmask.nn.cache_masks.difference", counted)
    for name, times in (
        ("window, its keys only", 0),
        ("documents in a window, its keys only", 0),
        ("chunks, their keys only", 4),
    ):
        case, x = CASES[name], inputs()
        modules = [case.module() for _ in range(2)]
        caches = [case.cache() for _ in modules]
        with torch.no_grad(), fm.MaskCache():
            for part in x[:, :13].split([9, 1, 1, 1, 1], 1):
                for module, cache in zip(modules, caches, strict=True):
                    module(part, cache=cache, **case.data)
        assert len(compared) == times


@pytest.mark.slow
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


# ---------------------------------------------------------------- keys that were padding

PROMPT = torch.randn(2, 8, 6, dtype=torch.float64)
TOKEN = torch.randn(2, 1, 6, dtype=torch.float64)
RIGHT, LEFT = fm.causal() & fm.key_padding([5, 8]), fm.causal() & fm.key_padding(start=[3, 0])
NOT_PADDING = torch.tensor([[True] * 5 + [False] * 3 + [True], [True] * 9])
KEPT_LEFT = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
MIDDLE = torch.tensor([[1] * 5 + [0, 1, 0, 1], [1] * 9])


def step(prompt_mask: fm.Mask, mask: fm.Mask | None, change: Callable[[KVCache], None] = lambda cache: None) -> Tensor:
    """A prompt of 8 tokens, a change of the cache, and a token."""
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    module(PROMPT, prompt_mask, cache=cache)
    change(cache)
    out: Tensor = module(TOKEN, mask, cache=cache)
    return out


@pytest.mark.parametrize(
    ("prompt_mask", "mask", "where"),
    [
        (RIGHT, fm.causal(), "position 5 of sequence 0"),
        (RIGHT, None, "position 5 of sequence 0"),
        (RIGHT, fm.causal() & fm.key_padding([6, 9]), "position 5 of sequence 0"),
        (RIGHT, fm.causal() & fm.key_padding(keep=[[True] * 9, [True] * 9]), "position 5 of sequence 0"),
        (fm.causal() & fm.key_padding(6), fm.causal(), "position 6 of sequence 0"),
        (LEFT, fm.causal(), "position 0 of sequence 0"),
        (LEFT, fm.causal() & fm.key_padding(start=[2, 0]), "position 2 of sequence 0"),
        (fm.causal() & fm.key_padding(start=[0, 4]), fm.causal(), "position 0 of sequence 1"),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT.tolist()), None, "position 0 of sequence 0"),
        (fm.causal() & fm.key_padding(hide=1 - KEPT_LEFT), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal() & fm.key_padding(start=[2, 0]), "position 2 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=NOT_PADDING[:, :8]), fm.causal(), "position 5 of sequence 0"),
        (fm.causal() & fm.key_padding(hide=~NOT_PADDING[0, :8]), fm.causal(), "position 5 of sequence 0"),
        (RIGHT, fm.causal() & fm.key_padding(keep=MIDDLE), "position 6 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=MIDDLE[:, :8]), fm.causal(), "position 5 of sequence 0"),
        ((fm.causal() & LEFT) | (fm.prefix_lm(2) & LEFT), fm.causal(), "position 0 of sequence 0"),
        (fm.per_head([fm.causal() & LEFT] * 3 + [LEFT]), fm.causal(), "position 0 of sequence 0"),
        (fm.from_mask_mod(lambda b, h, q, kv: (kv <= q) & (KEPT_LEFT[b, kv] != 0)), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.cross_length([8, 7]), fm.causal(), "position 7 of sequence 1"),
        (fm.causal() & fm.document([[-1, 0, 0, 0, 0, 0, 0, 0], [1] * 8]), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.document(lengths=[[3, 5], [3, 3]], padding=True), fm.causal(), "position 6 of sequence 1"),
        (fm.per_document(fm.causal(), cu_seqlens=[0, 3, 5], padding=True), fm.causal(), "position 5 of sequence 0"),
    ],
)
def test_keys_that_were_padding_stay_masked_out(prompt_mask: fm.Mask, mask: fm.Mask | None, where: str) -> None:
    with pytest.raises(LoweringError, match=rf"{where}, which was padding.*truncate\(lengths\).*key_padding\(start=\.\.\.\)"):
        step(prompt_mask, mask)


def test_a_call_that_shows_padding_changes_nothing() -> None:
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    module(PROMPT, RIGHT, cache=cache)
    for _ in range(2):
        with pytest.raises(LoweringError, match="was padding"):
            module(TOKEN, fm.causal(), cache=cache)
    cache.truncate([5, 8])
    module(TOKEN, fm.causal(), cache=cache)


@pytest.mark.parametrize(
    ("prompt_mask", "mask", "change"),
    [
        (RIGHT, fm.causal(), lambda cache: cache.truncate([5, 8])),
        (RIGHT, fm.causal(), lambda cache: cache.truncate([2, 3])),
        (RIGHT, fm.causal() & fm.key_padding(keep=NOT_PADDING), lambda cache: None),
        (RIGHT, fm.causal() & fm.sliding_window(size=1), lambda cache: None),
        (LEFT, LEFT, lambda cache: None),
        (LEFT, fm.causal() & fm.key_padding(start=torch.tensor([4, 1])), lambda cache: None),
        (LEFT, fm.causal() & fm.key_padding(start=[0, 3]), lambda cache: cache.reorder(torch.tensor([1, 0]))),
        (LEFT, fm.causal(), lambda cache: cache.reorder(torch.tensor([1, 1]))),
        (LEFT, fm.causal(), lambda cache: cache.truncate(0)),
        (fm.causal() & fm.key_padding([20, 30]), fm.causal(), lambda cache: None),
        (fm.causal() & ~fm.key_padding([5, 8]), fm.causal(), lambda cache: None),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), LEFT, lambda cache: None),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal() & fm.sliding_window(size=3), lambda cache: None),
        (fm.causal() & fm.key_padding(keep=NOT_PADDING[:, :8]), fm.causal(), lambda cache: cache.truncate([5, 8])),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal(), lambda cache: cache.reorder(torch.tensor([1, 1]))),
        (fm.causal() & fm.key_padding(keep=torch.ones(2, 8)[0].bool()), fm.causal(), lambda cache: None),
        (fm.causal() | fm.key_padding(keep=KEPT_LEFT), fm.causal(), lambda cache: None),
    ],
)
def test_padding_that_is_not_shown_is_no_error(prompt_mask: fm.Mask, mask: fm.Mask, change: Callable[[KVCache], None]) -> None:
    assert step(prompt_mask, mask, change).shape == (2, 1, 8)


def test_padding_of_another_batch_is_the_librarys_error() -> None:
    with pytest.raises(LoweringError, match=r"3.*2|2.*3"):
        step(fm.causal() & fm.key_padding([5, 8, 4]), None)


@pytest.mark.parametrize("seed", range(6))
def test_padding_of_several_chunks_stays_masked_out(seed: int) -> None:
    """Chunks whose padding is anywhere, cut and reordered: an error exactly where a step shows a key that was padding."""
    random = torch.Generator().manual_seed(seed)
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    real: list[list[bool]] = [[], []]
    for length in (4, 3, 5):
        for own in real:
            own += (torch.rand(length, generator=random) < 0.8).tolist()
        keep = torch.tensor(real)
        module(PROMPT[:, :length], fm.causal() & fm.key_padding(keep=keep if seed % 2 else keep.long()), cache=cache)
    if seed in (2, 3):
        cache.truncate(9)
        real = [own[:9] for own in real]
    if seed in (3, 4):
        cache.reorder(torch.tensor([1, 0]))
        real.reverse()
    for _ in range(8):
        keep = torch.rand(2, len(real[0]) + 1, generator=random) < 0.5
        shows = any(
            shown and not was for own, row in zip(real, keep.tolist(), strict=True) for was, shown in zip(own, row, strict=False)
        )
        if shows:
            with pytest.raises(LoweringError, match="was padding"):
                module(TOKEN, fm.causal() & fm.key_padding(keep=keep), cache=cache)
        keep[:, :-1] &= torch.tensor(real)
        module(TOKEN, fm.causal() & fm.key_padding(keep=keep), cache=cache)
        cache.truncate(len(real[0]))


def test_the_padding_is_kept_up_to_its_last_position() -> None:
    """So a check does not grow with the sequence."""
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    module(PROMPT, fm.causal() & fm.key_padding(keep=KEPT_LEFT), cache=cache)
    for length in (9, 10, 11):
        module(TOKEN, LEFT, cache=cache)
        assert cache._padded is not None
        assert cache._padded.hidden.shape == (2, 3)
        assert cache.length == length


def test_data_that_ends_before_the_tokens_says_what_to_append() -> None:
    keep = torch.ones(2, 8, dtype=torch.int64)
    wanted = r"key_padding\(keep=<int64\[2, 8\]>\) has 8 values along kv, but .* position 9: append a 1 .*start=\.\.\."
    with pytest.raises(LoweringError, match=wanted):
        step(fm.causal(), fm.causal() & fm.key_padding(keep=keep))
    with pytest.raises(LoweringError, match=r"document\(ids=<int64\[2, 8\]>\) has 8 values along q.*: give values for all"):
        step(fm.causal(), fm.causal() & fm.document(keep))
