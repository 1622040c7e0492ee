"""Expressions as deep as they may be: everything works with them from deep inside a program, and deeper ones are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo  # not first in the 200th call
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask import Mask, h, kv, q
from flexmask.errors import ExpressionError, TextError, TraceError
from flexmask.expr.node import MAX_DEPTH
from tests.support.block_lists import check_lists
from tests.support.exhaustive import exhaustive, one_in
from tests.support.lowerings import check_lists_of_cells
from tests.support.strategies import Shape

T = TypeVar("T")

#: Calls that the program has made before, of the thousand that Python allows.
FRAMES = 200


def from_deep_inside(use: Callable[[], T], frames: int = FRAMES) -> T:
    """What a function gives when it is called in the 200th call."""
    return from_deep_inside(use, frames - 1) if frames else use()


def alternating(mask: Any, i: int) -> Any:
    return mask & (kv != q - i - 1) if i % 2 else mask | (kv == q + i)


def not_separable(mask: Any, i: int) -> Any:
    return mask & ((q * kv + i) % 5 != 0) if i % 2 else mask | ((q * kv + i) % 7 == 0)


def by_head(mask: Any, i: int) -> Any:
    return fm.per_head([mask & (kv != i), fm.causal()])


TABLE = fm.table([0, 2, 1, 3])

#: What is built on what there is, and what it starts from.
STEPS: dict[str, tuple[Any, Callable[[Any, int], Any]]] = {
    "and, or": (fm.causal(), alternating),
    "not separable": ((q * kv) % 3 == 0, not_separable),
    "not": (fm.causal(), lambda mask, i: ~(mask & (kv != i))),
    "exclusive": (fm.causal(), lambda mask, i: (mask ^ (kv == i)) | (q == i)),
    "named": (fm.causal(), lambda mask, i: fm.masks.shift(mask, q=1 - 2 * (i % 2))),
    "by head": (fm.causal(), by_head),
    "sum": (q, lambda index, i: index + (kv if i % 2 else q)),
    "remainder": (q, lambda index, i: (index * (kv + 1)) % (i + 2)),
    "distance": (q, lambda index, i: abs(index - kv - i)),
    "extreme": (q, lambda index, i: fm.minimum(fm.maximum(index, kv - i), q + i)),
    "choice": (q, lambda index, i: fm.where(kv > i, index, kv + i)),
    "lookup": (q % 4, lambda index, i: TABLE[index] if i % 2 else (index + kv) % 4),
}


def mask_of(value: Any) -> Mask:
    return value if isinstance(value, Mask) else value % 4 <= 1


@cache
def deepest(name: str) -> Mask:
    """The deepest mask of a kind, built until the next step is refused."""
    value, step = STEPS[name]
    found = mask_of(value)
    for i in range(2 * MAX_DEPTH):
        try:
            value = step(value, i)
            found = mask_of(value)
        except ExpressionError:
            assert found.depth > MAX_DEPTH - 5
            return found
    raise AssertionError("nothing is refused")


def compiled(mask: Mask) -> bool:
    mask_mod = mask.mask_mod(8, heads=2, form="expression")
    at = torch.zeros(8, dtype=torch.int64), torch.arange(8) % 2, torch.arange(8), torch.arange(8).flip(0)
    torch._dynamo.reset()
    return torch.equal(torch.compile(mask_mod, fullgraph=True, backend="eager")(*at), mask_mod(*at))


def attended(mask: Mask) -> bool:
    ones = torch.ones(1, 2, 8, 4)
    return bool((fm.attention(ones, ones, ones, mask=mask) <= 1).all())


def shown(mask: Mask) -> bool:
    mask.show(8)
    return True


USES: dict[str, Callable[[Mask], Any]] = {
    "str": lambda mask: str(mask) and mask.brief(),
    "repr": repr,
    "parse": lambda mask: fm.parse(str(mask)) == mask,
    "hash": lambda mask: hash(mask) == hash(mask & mask),
    "equal": lambda mask: mask == pickle.loads(pickle.dumps(mask)),
    "copy": lambda mask: copy.deepcopy(mask) == mask == copy.copy(mask),
    "expand": lambda mask: mask.expand().depth <= mask.depth,
    "to": lambda mask: mask.to("cpu") == mask,
    "dense": lambda mask: mask.dense(6, heads=2).shape,
    "rows": lambda mask: mask.rows(6, heads=2).upper.slots,
    "block_mask": lambda mask: mask.block_mask(40, heads=2, block_size=16).shape,
    "stats": lambda mask: mask.stats(40, heads=2, block_size=16).cells,
    "difference": lambda mask: str(mask.difference(fm.causal(), 8, heads=2)),
    "mask_mod": lambda mask: mask.mask_mod(8, heads=2),
    "explain": lambda mask: str(fm.explain(mask, 8, heads=2)),
    "attention": attended,
    "show": shown,
}


@pytest.mark.parametrize(("name", "use"), one_in(5, STEPS, USES))
def test_the_deepest_mask_can_be_used(name: str, use: str) -> None:
    mask = from_deep_inside(lambda: deepest(name))
    assert from_deep_inside(lambda: USES[use](mask))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by head", *exhaustive(["choice", "and, or", "not separable", "sum"])])
def test_the_deepest_mask_can_be_compiled(name: str) -> None:
    mask = deepest(name)
    assert from_deep_inside(lambda: compiled(mask))


@pytest.mark.parametrize("name", STEPS)
def test_the_deepest_mask_means_what_it_says(name: str) -> None:
    """Its blocks are those of its cells, which are computed step by step as a user would."""
    mask = deepest(name)
    cells = mask.dense(40, heads=2).expand(1, 2, 40, 40)
    check_lists_of_cells(fm.create_block_mask(mask, 1, 2, 40, 40, device="cpu", BLOCK_SIZE=8), Shape(40, 40, heads=2), cells)


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(
        ExpressionError, match=rf"101 operations inside each other; at most {MAX_DEPTH} .* add numbers up in groups"
    ):
        reduce(alternating, range(200), fm.causal())
    text = "q" + " + kv" * 200 + " == 0"
    with pytest.raises(TextError, match="operations inside each other"):
        fm.parse(text)
    with pytest.raises(ExpressionError, match="operations inside each other"):
        deepest("sum").substitute(q=q + h + 1 + kv)


def test_many_operands_of_one_operator_are_not_deep() -> None:
    mask = fm.causal()
    for i in range(300):
        mask = mask | (kv == q + 2 * i)
    assert mask.depth < 10
    expected = torch.tensor([[j <= i or (j - i) % 2 == 0 for j in range(64)] for i in range(64)])
    assert torch.equal(from_deep_inside(lambda: mask.dense(64))[0, 0], expected)
    assert torch.equal(
        mask.mask_mod(64, form="expression")(*(torch.tensor(0),) * 2, torch.arange(64)[:, None], torch.arange(64)), expected
    )


def cuts(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The number of cuts before a position, as some write it: a sum of 300 comparisons."""
    own = sum((q >= cut).long() for cut in range(3, 903, 3))
    return own == sum((kv >= cut).long() for cut in range(3, 903, 3))


def test_deep_functions_are_kept_as_calls() -> None:
    found = fm.create_block_mask(cuts, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=16)
    check_lists(found, create_block_mask(cuts, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=16))
    with pytest.raises(TraceError, match="operations inside each other"):
        fm.from_mask_mod(cuts, strict=True)


def test_many_piecewise_values_inside_each_other() -> None:
    """Solving each of 30 distances for the key would double the number of conditions 30 times."""
    index: Any = q
    for i in range(30):
        index = abs(index - kv - i)
    cells = (index <= 3).dense(40)[0, 0].tolist()
    for row, query in enumerate(cells):
        for column, visible in enumerate(query):
            value = row
            for i in range(30):
                value = abs(value - column - i)
            assert visible == (value <= 3)
    found = (index <= 3).stats(40)
    assert found.visible == sum(map(sum, cells))
