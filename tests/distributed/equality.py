"""What the ranks of a group compute, against dense masked attention in float64 in one process.

Functions of this module run in the processes of a test: see :func:`tests.support.ranks.run_ranks`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexmask as fm
from flexmask import Mask
from flexmask.distributed import ContextParallel
from flexmask.packing import pack_prefixes
from tests.support import oracle
from tests.support.strategies import Shape, mask_cases

#: ``cells(b, h, q, kv)`` of index tensors that broadcast.
Cells: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BATCH, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 2, 12, 12, 4, 3
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
attention: Any = fm.attention  # called with lists of tensors


class Checks:
    """Collects what fails in a process, so that all checks run and all ranks run the same."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, name: str, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except Exception:
            self.failed.append(f"rank {dist.get_rank()}, {name}:\n{traceback.format_exc()}")

    def report(self) -> None:
        assert not self.failed, "\n\n".join(self.failed)


def boundaries(length: int) -> Tensor:
    """Where documents of some lengths begin and end, 5 of them."""
    return torch.tensor([0, length // 7, length // 7, length // 3, length - length // 5, length])


def document_of(length: int) -> Tensor:
    return torch.searchsorted(boundaries(length)[1:], torch.arange(length), right=True)


def depths(length: int) -> Tensor:
    """The depths of the tokens of trees in two sequences."""
    places = torch.arange(length)
    return torch.stack([places % 16 % 5 + places % 16 // 10, places % 7])


def is_ancestor(depths: Tensor) -> Cells:
    """Whether a key is the query itself or above it: no token from behind the key up to the query is as high as the key."""
    found = torch.eye(depths.shape[1], dtype=torch.bool).repeat(BATCH, 1, 1)
    for query in range(1, depths.shape[1]):
        found[:, query] |= found[:, query - 1] & (depths[:, query, None] > depths)
    return lambda b, h, q, kv: found[b, q, kv]


def opaque(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A mask_mod with an operation that no expression has."""
    return (torch.bitwise_xor(q, kv) % 5 < 3) & (kv <= q + 3)


@dataclass(frozen=True)
class Case:
    """A mask of a length, and its cells."""

    mask: Callable[[int], Mask]
    cells: Callable[[int], Cells]


CASES = {
    "causal": Case(lambda n: fm.causal(), lambda n: lambda b, h, q, kv: kv <= q),
    "full": Case(lambda n: fm.full(), lambda n: lambda b, h, q, kv: (q >= 0) & (kv >= 0)),
    "empty": Case(lambda n: fm.empty(), lambda n: lambda b, h, q, kv: (q < 0) & (kv < 0)),
    "window": Case(lambda n: fm.sliding_window(left=5, right=2), lambda n: lambda b, h, q, kv: (q - kv <= 5) & (kv - q <= 2)),
    "documents": Case(
        lambda n: fm.causal() & fm.document(document_of(n)),
        lambda n: lambda b, h, q, kv: (kv <= q) & (document_of(n)[q] == document_of(n)[kv]),
    ),
    "documents by cu_seqlens": Case(
        lambda n: fm.document(cu_seqlens=boundaries(n)),
        lambda n: lambda b, h, q, kv: document_of(n)[q] == document_of(n)[kv],
    ),
    "prefix": Case(
        lambda n: fm.prefix_lm([n // 2, n // 5]),
        lambda n: lambda b, h, q, kv: (kv < torch.tensor([n // 2, n // 5])[b]) | (kv <= q),
    ),
    "prefix trees": Case(lambda n: fm.masks.prefix_tree(position_ids=depths(n)), lambda n: is_ancestor(depths(n))),
    "padding of each sequence": Case(
        lambda n: fm.causal() & fm.key_padding([n, n // 2]) & fm.query_padding([n, n // 2]),
        lambda n: lambda b, h, q, kv: (kv <= q) & (torch.maximum(q, kv) < torch.tensor([n, n // 2])[b]),
    ),
    "from the lower right": Case(lambda n: fm.causal("lower_right"), lambda n: lambda b, h, q, kv: kv <= q),
    "per head": Case(
        lambda n: fm.per_head([fm.causal(), fm.sliding_window(left=3, right=3), fm.full()] * 4),
        lambda n: lambda b, h, q, kv: ((h % 3 == 0) & (kv <= q)) | ((h % 3 == 1) & ((q - kv).abs() <= 3)) | (h % 3 == 2),
    ),
    "not separable": Case(
        lambda n: (abs(fm.q - fm.kv) <= 16) & ((fm.q - fm.kv) % 4 == 0),
        lambda n: lambda b, h, q, kv: ((q - kv).abs() <= 16) & ((q - kv) % 4 == 0),
    ),
    "not separable, of each sequence and head": Case(
        lambda n: (fm.q * fm.kv + fm.h + fm.b) % 3 == 1, lambda n: lambda b, h, q, kv: (q * kv + h + b) % 3 == 1
    ),
    "traced": Case(
        lambda n: fm.from_mask_mod(lambda b, h, q, kv: (q >= kv) & ((q - kv < 9) | (kv < 2))),
        lambda n: lambda b, h, q, kv: (q >= kv) & ((q - kv < 9) | (kv < 2)),
    ),
    "opaque": Case(lambda n: fm.from_mask_mod(opaque), lambda n: opaque),
}
LENGTHS = {name: [1, 2, 5, 61] for name in CASES} | {"causal": [1, 3, 127], "documents": [4, 64]}
LONG = {name: [257] for name in CASES} | {"causal": [1009], "documents": [2003]}


def table(cells: Cells, length: int) -> Tensor:
    """The cells as ``bool[BATCH, HEADS, length, length]``."""
    sizes = BATCH, HEADS, length, length
    b, h, q, kv = (torch.arange(size).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate(sizes))
    return cells(b, h, q, kv).expand(sizes)


def inputs(length: int, kv_heads: int = KV_HEADS) -> list[Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence, the same on each rank."""
    generator = torch.Generator().manual_seed(length)
    sizes = [(HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, VALUE_WIDTH), (HEADS, VALUE_WIDTH)]
    return [torch.randn(BATCH, heads, length, width, generator=generator, dtype=torch.float64) for heads, width in sizes]


def check_attention(cp: ContextParallel, mask: Mask, visible: Tensor, kv_heads: int = KV_HEADS, **options: Any) -> None:
    """The output and the gradients of a call, against those of one process."""
    *tensors, weight = inputs(cp.seq_len, kv_heads)
    whole = [tensor.clone().requires_grad_() for tensor in tensors]
    query, key, value = whole
    wanted = oracle.attention(query, key, value, visible)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), whole)
    own = [cp.shard(tensor, 2).requires_grad_() for tensor in tensors]
    with cp:
        found = attention(*own, mask, enable_gqa=kv_heads != HEADS, **options)
        grads = torch.autograd.grad((found * cp.shard(weight, 2)).sum(), own)
    torch.testing.assert_close(cp.unshard(found.detach(), 2), wanted.detach(), **EXACT)
    for one, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, cp.shard(other, 2), **EXACT)


def settings_of(world: int) -> Iterator[tuple[str, str, int]]:
    """``balance``, ``strategy`` and the heads of keys, in turn."""
    every = [("work", "keys", 2), ("head_tail", "keys", HEADS), ("contiguous", "heads", HEADS), ("work", "heads", world)]
    return cycle(every if HEADS % world == 0 else every[:2])


def check_cases(checks: Checks, every: int = 1, lengths: dict[str, list[int]] = LENGTHS) -> None:
    """All masks at several lengths, or every n-th of these."""
    turns = settings_of(dist.get_world_size())
    pairs = [(name, length) for name in CASES for length in lengths[name]]
    for name, length in pairs[::every]:
        turn = next(turns)
        checks(f"{name}, {length} tokens, {turn}", check_case, CASES[name], length, *turn)


def check_case(case: Case, length: int, balance: Any, strategy: Any, kv_heads: int) -> None:
    mask = case.mask(length)
    cp = ContextParallel(None, mask, length, balance=balance, strategy=strategy, batch=BATCH, heads=HEADS, block_size=16)
    check_attention(cp, mask, table(case.cells(length), length), kv_heads)


def check_packed_prefixes(strategy: Any) -> None:
    """The outputs, the losses and the gradients of samples that share their prefixes are those of each sample alone."""
    samples = [[3, 1, 4, 1, 5], [3, 1, 4, 2], [2, 7], [3, 1], [3, 1, 4, 1, 5, 9, 2, 6], [2, 8, 1]]
    packed, generator = pack_prefixes(samples), torch.Generator().manual_seed(0)
    sizes = [(10, 8, 3, HEADS, WIDTH), *((len(sample), HEADS, WIDTH) for sample in samples)]
    states, *weights = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    states.requires_grad_()  # the query, key and value of each token at each position

    def heads(tokens: Tensor, positions: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2) for x in states[tokens, positions].unbind(2)]

    cp = ContextParallel(None, packed.mask, packed.tokens.shape[1], strategy=strategy, batch=1, heads=HEADS)
    weight = cp.shard(packed.scatter(weights).transpose(1, 2), 2)
    with cp:
        out = attention(*(cp.shard(x, 2) for x in heads(packed.tokens, packed.position_ids)), packed.mask)
        (grad,) = torch.autograd.grad((out * weight).sum(), states)
    dist.all_reduce(grad)
    wanted = []
    for sample in samples:
        query, key, value = heads(torch.tensor([sample]), torch.arange(len(sample))[None])
        wanted.append(torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1))
    for found, one in zip(packed.gather(cp.unshard(out.detach(), 2).transpose(1, 2)), wanted, strict=True):
        torch.testing.assert_close(found, one.detach(), **EXACT)
    loss = torch.stack([(one * own).sum() for one, own in zip(wanted, weights, strict=True)]).sum()
    torch.testing.assert_close(grad, torch.autograd.grad(loss, states)[0], **EXACT)


def check_drawn(checks: Checks, count: int) -> None:
    """Masks that Hypothesis draws, the same on each rank: nothing is raised in a test, so that all ranks go on."""

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        length = data.draw(st.integers(1, 12))
        shape = Shape(length, length, BATCH, HEADS)
        case = data.draw(mask_cases(shape, depth=2))

        def check() -> None:
            cp = ContextParallel(None, case.mask, length, batch=BATCH, heads=HEADS, block_size=4)
            check_attention(cp, case.mask, case.expected(shape), 3)

        checks(f"drawn: {case.mask} at {length}", check)

    draw()
