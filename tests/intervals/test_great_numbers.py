"""Masks with numbers around 2**31, 2**32 and 2**60 to 2**63, in every lowering, against Python's own integers.

``pytest --hypothesis-profile=all tests/intervals/test_great_numbers.py`` or
``python -m tests.intervals.test_great_numbers 20000 [SEED]`` draws as many expressions. One that overflows 64 bits as it is
written may be refused; it is never silently wrong.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import flexmask as fm
from flexmask import Mask, _sync
from flexmask.errors import FlexmaskError, LoweringError
from tests.support import oracle

EXAMPLES = 2 * settings().max_examples

#: An expression: an operator or kind, and its operands.
Tree: TypeAlias = tuple[Any, ...]

LEAST, GREATEST = -(2**63), 2**63 - 1
AROUND = [2**31, 2**32, 2**58, 2**60, 2**61, 2**62, 2**63, 3 * 2**61, 10**18]
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
BOOLEAN = {"&": operator.and_, "|": operator.or_, "^": operator.xor}


@dataclass(frozen=True)
class Setting:
    """What a mask is lowered with."""

    q_len: int
    kv_len: int
    batch: int
    heads: int
    q_offset: int

    @property
    def lowering(self) -> dict[str, Any]:
        return vars(self)

    def size(self, axis: str) -> int:
        return {"q": self.q_len + self.q_offset, "kv": self.kv_len, "b": self.batch, "h": self.heads}[axis]


# ---------------------------------------------------------------- drawing


class Draw:
    """Draws expressions from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        q_len = pick([1, 2, 5, 9, 12])
        self.setting = Setting(q_len, pick([q_len, q_len, 1, 4, 11]), pick([1, 1, 2]), pick([1, 1, 2]), pick([0, 0, 0, 3]))

    def great(self) -> int:
        number = self.random.choice(AROUND) + self.random.randint(-3, 3)
        return max(LEAST, min(GREATEST, number * self.random.choice([1, 1, -1])))

    def number(self) -> int:
        return self.great() if self.random.random() < 0.4 else self.random.randint(-4, 12)

    def symbol(self) -> Tree:
        return ("symbol", self.random.choice(["q", "q", "q", "kv", "kv", "kv", "b", "h"]))

    def table(self) -> Tree:
        axis = self.random.choice(["q", "q", "kv", "kv", "b", "h"])
        kind = self.random.choice(["list", "int64", "int64", "int32", "bool"])
        size = self.setting.size(axis)
        if kind == "bool":
            data: list[Any] = [self.random.random() < 0.5 for _ in range(size)]
        elif kind == "int32":
            data = [max(-(2**31), min(2**31 - 1, self.number())) for _ in range(size)]
        else:
            few = [self.number() for _ in range(self.random.choice([1, 2, 4]))]
            data = [self.random.choice(few) for _ in range(size)]
        if self.random.random() < 0.3:
            data.sort(reverse=self.random.random() < 0.3)
        return ("table", kind, tuple(data), axis)

    def index(self, depth: int) -> Tree:
        kinds = ["symbol", "symbol", "table", "number"] if depth <= 0 else ["symbol", "table", "pair", "pair", "scale", "divide"]
        kind = self.random.choice(kinds + (["abs", "extreme", "where", "number"] if depth > 0 else []))
        if kind == "symbol":
            return self.symbol()
        if kind == "table":
            return self.table()
        if kind == "number":
            return ("number", self.number())
        first = self.index(depth - 1)
        if kind == "pair":
            return (self.random.choice(["+", "-"]), first, self.index(depth - 1))
        if kind == "scale":
            return ("*", first, ("number", self.number()))
        if kind == "divide":
            return (self.random.choice(["//", "//", "%"]), first, ("number", self.number() or 3))
        if kind == "abs":
            return ("abs", first)
        second = self.index(depth - 1)
        if kind == "extreme":
            return (self.random.choice(["minimum", "maximum"]), first, second)
        return ("where", self.mask(0), first, second)

    def mask(self, depth: int) -> Tree:
        if depth > 0 and self.random.random() < 0.5:
            if self.random.random() < 0.2:
                return ("~", self.mask(depth - 1))
            return (self.random.choice(["&", "&", "|", "^"]), self.mask(depth - 1), self.mask(depth - 1))
        return (self.random.choice(list(COMPARE)), self.index(2), self.index(2))


# ---------------------------------------------------------------- three readings of an expression


def built(tree: Tree) -> Any:
    """The expression as the library's own."""
    match tree:
        case ("symbol", name):
            return getattr(fm, name)
        case ("number", value):
            return value
        case ("table", kind, data, axis):
            values = list(data) if kind == "list" else torch.tensor(data, dtype=getattr(torch, kind))
            return fm.table(values)[getattr(fm, axis)]
        case ("abs", operand):
            return abs(built(operand))
        case ("~", operand):
            return ~built(operand)
        case ("where", condition, then, otherwise):
            return fm.where(built(condition), built(then), built(otherwise))
        case ("minimum" | "maximum" as name, left, right):
            return getattr(fm, name)(built(left), built(right))
        case (sign, left, right):
            return (COMPARE | ARITHMETIC | BOOLEAN)[sign](_indexed(built(left)), built(right))
    raise AssertionError(tree)


def _indexed(value: Any) -> Any:
    """Numbers alone as expressions, so that no operation is Python's own."""
    return fm.q * 0 + value if isinstance(value, int) and not isinstance(value, bool) else value


def valued(tree: Tree, cell: dict[str, int], overflown: list[bool]) -> int:
    """The value in one cell, by Python's integers; notes whether some part is beyond 64 bits."""
    match tree:
        case ("symbol", name):
            return cell[name]
        case ("number", value):
            return int(value)
        case ("table", _, data, axis):
            return int(data[cell[axis]])
        case ("abs", operand):
            found = abs(valued(operand, cell, overflown))
        case ("~", operand):
            return not valued(operand, cell, overflown)
        case ("where", condition, then, otherwise):
            pair = valued(then, cell, overflown), valued(otherwise, cell, overflown)
            return pair[0] if valued(condition, cell, overflown) else pair[1]
        case ("minimum" | "maximum" as name, left, right):
            return {"minimum": min, "maximum": max}[name](valued(left, cell, overflown), valued(right, cell, overflown))
        case (sign, left, right):
            found = (COMPARE | ARITHMETIC | BOOLEAN)[sign](valued(left, cell, overflown), valued(right, cell, overflown))
    if not LEAST <= found <= GREATEST:
        overflown.append(True)
    return found


def torch_function(tree: Tree, tables: dict[int, Tensor]) -> Any:
    """The expression as a ``mask_mod`` that anyone could have written, on tensors captured in ``tables``."""

    def value(tree: Tree, cell: dict[str, Tensor]) -> Any:
        match tree:
            case ("symbol", name):
                return cell[name]
            case ("number", number):
                return torch.full_like(cell["q"], number)
            case ("table", kind, data, axis):
                if id(tree) not in tables:
                    dtype = torch.int64 if kind == "list" else getattr(torch, kind)
                    tables[id(tree)] = torch.tensor(data, dtype=dtype)
                return tables[id(tree)][cell[axis]].long()
            case ("abs", operand):
                return value(operand, cell).abs()
            case ("~", operand):
                return ~value(operand, cell)
            case ("where", condition, then, otherwise):
                return torch.where(value(condition, cell), value(then, cell), value(otherwise, cell))
            case ("minimum" | "maximum" as name, left, right):
                return getattr(torch, name)(value(left, cell), value(right, cell))
            case (sign, left, right):
                return (COMPARE | ARITHMETIC | BOOLEAN)[sign](value(left, cell), value(right, cell))
        raise AssertionError(tree)

    return lambda b, h, q_idx, kv_idx: value(tree, {"b": b, "h": h, "q": q_idx, "kv": kv_idx})


def table_of(tree: Tree, setting: Setting) -> tuple[Tensor, bool]:
    """The mask ``bool[B, H, q_len, kv_len]`` by Python's integers, and whether some part overflows in some cell."""
    overflown: list[bool] = []

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        return bool(valued(tree, {"b": b, "h": h, "q": q, "kv": kv}, overflown))

    sizes = {"batch": setting.batch, "heads": setting.heads, "q_offset": setting.q_offset}
    return torch.tensor(oracle.table_of(allowed, setting.q_len, setting.kv_len, **sizes)), bool(overflown)


# ---------------------------------------------------------------- comparing


def listed(numbers: Tensor, indices: Tensor) -> list[list[int]]:
    lines = zip(numbers.flatten().tolist(), indices.reshape(-1, indices.shape[-1]).tolist(), strict=True)
    return [sorted(line[:number]) for number, line in lines]


def wanted_blocks(wanted: Tensor, q_size: int, kv_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The partial and the full blocks of each block row."""
    lines = oracle.classify_blocks(wanted, q_size, kv_size).flatten(0, 2).tolist()
    return tuple([[i for i, kind in enumerate(row) if kind == which] for row in lines] for which in (oracle.PARTIAL, oracle.FULL))  # type: ignore[return-value]


def differences(mask: Mask, setting: Setting, wanted: Tensor, numbers: random.Random) -> list[str]:
    """Which lowerings differ from what is wanted."""
    found = []
    shape = wanted.shape
    where = setting.lowering

    def check(name: str, same: bool) -> None:
        if not same:
            found.append(name)

    check("dense", torch.equal(mask.dense(**where).expand(shape), wanted))
    rows = mask.rows(**where)
    keys = torch.arange(setting.kv_len)
    lower, upper = (part.holds(keys).expand(shape) for part in (rows.lower, rows.upper))
    check("rows", not bool((lower & ~wanted).any()) and not bool((wanted & ~upper).any()))
    check("exact rows", not rows.exact or torch.equal(lower, wanted))
    block_size: Any = numbers.choice([1, 2, 4, (2, 3)])
    q_size, kv_size = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    partial, full = wanted_blocks(wanted, q_size, kv_size)
    blocks = mask.block_mask(**where, block_size=block_size)
    lists = ((blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices))
    for name, (number, indices), expected in zip(("partial", "full"), lists, (partial, full), strict=True):
        assert number is not None
        assert indices is not None
        rows_of = -(-setting.q_len // q_size)
        size = (setting.batch, setting.heads, rows_of)
        check(f"{name} blocks", listed(number.expand(size), indices.expand(*size, -1)) == expected)
    stats = mask.stats(**where, block_size=block_size)
    share = wanted.shape[0] * wanted.shape[1] // (stats.batch * stats.heads)
    check("stats", stats.visible * share == int(wanted.sum()) and stats.fully_masked_rows * share == int((~wanted.any(-1)).sum()))
    check("counted blocks", stats.partial_blocks * share == sum(map(len, partial)))
    check("counted full blocks", stats.full_blocks * share == sum(map(len, full)))
    index = [torch.arange(size).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate(shape)]
    closures = {"expression": mask.mask_mod(**where, form="expression"), "own form": mask.mask_mod(**where)}
    for name, closure in closures.items():
        for dtype in (torch.int64, torch.int32):
            check(f"{name}, {dtype}", torch.equal(closure(*(i.to(dtype) for i in index)).expand(shape), wanted))
    return found


@dataclass
class Report:
    """What became of the expressions that were drawn."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, seed: int) -> None:
        draw = Draw(seed)
        tree = draw.mask(2)
        try:
            self._run(seed, draw, tree, draw.setting)
        except Exception as error:  # which the seed has to be known of
            self.failures.append(f"{seed}: {tree} at {draw.setting}: {error!r}")

    def _run(self, seed: int, draw: Draw, tree: Tree, setting: Setting) -> None:
        wanted, overflows = table_of(tree, setting)
        try:
            mask = built(tree)
            found = differences(mask, setting, wanted, draw.random)
        except FlexmaskError as error:
            named = "64-bit" in str(error) or "divide" in str(error)
            self.outcomes["refused" if overflows else "refused by extents"] += 1
            if not named or not (overflows or "ranges from" in str(error)):
                self.failures.append(f"{seed}: {tree} at {setting}: {error}")
            return
        self.outcomes["overflows, yet right" if overflows else "exact" if mask.rows(**setting.lowering).exact else "bounded"] += 1
        if not overflows and setting.q_offset == 0 and seed % 4 == 0:
            tables: dict[int, Tensor] = {}
            traced = fm.from_mask_mod(torch_function(tree, tables))
            self.outcomes["traced"] += 1
            found += [f"traced: {name}" for name in differences(traced, setting, wanted, draw.random)]
        if not overflows and seed % 3 == 0:
            self.outcomes["with unread data"] += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_sync, "needs_sync", lambda tensor: True)
                found += [f"with unread data: {name}" for name in differences(built(tree), setting, wanted, draw.random)]
        if not overflows and seed % 16 == 0:
            self.outcomes["attended"] += 1
            query = torch.randn(setting.batch, setting.heads, setting.q_len, 4)
            key = torch.randn(setting.batch, setting.heads, setting.kv_len, 4)
            output = fm.attention(query, key, key, mask, q_offset=setting.q_offset)
            if not torch.allclose(output, oracle.attention(query, key, key, wanted).float(), atol=1e-5):
                found.append("attention")
        if found:
            self.failures.append(f"{seed}: {tree} at {setting}: {', '.join(found)}")


def test_great_numbers() -> None:
    report = Report()
    for seed in range(EXAMPLES):
        report.run(seed)
    assert not report.failures, "\n".join(report.failures[:10])
    assert report.outcomes["exact"] > EXAMPLES // 10
    assert report.outcomes["refused by extents"] < EXAMPLES // 20
    assert report.outcomes["traced"] > 0


# ---------------------------------------------------------------- no limit, as real code writes it

q, kv, h = fm.q, fm.kv, fm.h
FAR = fm.table([10**18] * 4 + [0] * 4)
TORCH = fm.table(torch.tensor([GREATEST] * 3 + [0, -5, 2, GREATEST, LEAST + 1]))

WRITTEN: list[tuple[Mask, Any]] = [
    (kv <= fm.where(q < 4, GREATEST, 0), lambda h, q, kv: q < 4 or kv == 0),
    (abs(q - kv) <= fm.where(h == 0, GREATEST, 2), lambda h, q, kv: h == 0 or abs(q - kv) <= 2),
    (q - kv >= fm.where(h == 0, -GREATEST, 2), lambda h, q, kv: h == 0 or q - kv >= 2),
    (kv // 16 <= FAR[q], lambda h, q, kv: True),
    (kv // 2 < FAR[q], lambda h, q, kv: q < 4),
    (kv <= abs(TORCH[q]), lambda h, q, kv: kv <= abs([9, 9, 9, 0, 5, 2, 9, 9][q])),
    ((q >= kv) & (kv <= GREATEST), lambda h, q, kv: q >= kv),
    (kv > -GREATEST, lambda h, q, kv: True),
    (kv // 2**62 <= q, lambda h, q, kv: True),
    (kv // GREATEST <= q, lambda h, q, kv: True),
    (q % 3 < kv // 2**62, lambda h, q, kv: False),
    (kv * 3 // 16 >= -FAR[q], lambda h, q, kv: True),
    ((q - kv) * 2**58 >= fm.where(h == 0, 0, -(2**59)), lambda h, q, kv: q - kv >= (0 if h == 0 else -2)),
    (kv % 3 <= fm.where(q < 4, GREATEST, 0), lambda h, q, kv: q < 4 or kv % 3 == 0),
    (kv % 3 - q % 3 >= fm.where(h == 0, -GREATEST, 0), lambda h, q, kv: h == 0 or kv % 3 >= q % 3),
    (abs(TORCH[q] - TORCH[kv]) <= GREATEST, None),
    (
        ((fm.table([GREATEST, 50])[h] - GREATEST) - kv * 3 >= GREATEST - fm.table([GREATEST, 0])[h]) & (q * kv % 3 == 0),
        lambda h, q, kv: h == 0 and kv == 0,
    ),
    (
        fm.table([GREATEST, GREATEST - 3])[h] - GREATEST >= GREATEST - fm.table([GREATEST, GREATEST])[h] - kv,
        lambda h, q, kv: h == 0 or kv >= 3,
    ),
    (fm.table([True] + [False] * 7)[kv] // 2**62 == 0, lambda h, q, kv: True),
    (kv <= q + fm.table([True] + [False] * 7)[q] * 2**32, lambda h, q, kv: q == 0 or kv <= q),
    ((fm.table([True] * 8)[q] == 2**32) & (kv >= 0), lambda h, q, kv: False),
    # The key behind the last one is 2**63, and both terms at their greatest are more.
    (kv <= fm.table([2**62] + [1] * 7)[q] + fm.table([2**62 - 1] + [2] * 7)[q], lambda h, q, kv: q == 0 or kv <= 3),
    (kv <= 2 * fm.table([2**62 - 1] + [1] * 7)[q] + fm.table([-5] + [3] * 7)[q], lambda h, q, kv: q == 0 or kv <= 5),
]


@pytest.mark.parametrize(("mask", "allowed"), WRITTEN, ids=[str(mask) for mask, _ in WRITTEN])
@pytest.mark.parametrize("unread", [False, True])
def test_no_limit(mask: Mask, allowed: Any, unread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(8, 8, 1, 2, 0)
    if allowed is None:
        with pytest.raises(LoweringError, match="beyond 64-bit"):
            mask.stats(8)
        return
    if unread:
        monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
    cells = [[[[bool(allowed(head, row, key)) for key in range(8)] for row in range(8)] for head in range(2)]]
    assert differences(mask, setting, torch.tensor(cells), random.Random(0)) == []


IS_PREFIX, LENGTHS = torch.arange(256) < 128, torch.tensor([GREATEST, 100])

MODS = {
    "where": lambda b, h, q_idx, kv_idx: kv_idx <= torch.where(IS_PREFIX[q_idx], GREATEST, q_idx),
    "where, of heads": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= torch.where(h == 0, GREATEST, 8),
    "masked_fill": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx.masked_fill(IS_PREFIX[q_idx], GREATEST),
    "clamp": lambda b, h, q_idx, kv_idx: kv_idx.clamp(max=GREATEST) <= (q_idx + 5).clamp(min=-GREATEST, max=GREATEST),
    "full_like": lambda b, h, q_idx, kv_idx: kv_idx < torch.full_like(q_idx, GREATEST),
    "captured": lambda b, h, q_idx, kv_idx: kv_idx < LENGTHS[b],
    "captured, computed with": lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= LENGTHS[b] // 2,
    "minimum": lambda b, h, q_idx, kv_idx: kv_idx <= torch.minimum(LENGTHS[b], q_idx),
    "all": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx <= GREATEST),
    "truth values": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + IS_PREFIX[q_idx].long() * 2**32,
    "not separable": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx + IS_PREFIX[q_idx] * 2**32) & ((q_idx * kv_idx) % 3 != 1),
}


@pytest.mark.parametrize("name", MODS)
def test_mask_mods_without_a_limit(name: str) -> None:
    theirs = create_block_mask(MODS[name], 2, 2, 256, 256, device="cpu", BLOCK_SIZE=64)
    ours = fm.create_block_mask(MODS[name], 2, 2, 256, 256, device="cpu", BLOCK_SIZE=64)
    for kind in ("kv", "full_kv"):
        pair = [
            listed(number.expand(2, 2, 4), indices.expand(2, 2, 4, 4))
            for blocks in (ours, theirs)
            for number, indices in [(getattr(blocks, f"{kind}_num_blocks"), getattr(blocks, f"{kind}_indices"))]
        ]
        assert pair[0] == pair[1]
    index = [torch.arange(size).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate((2, 2, 256, 256))]
    wanted = create_mask(MODS[name], 2, 2, 256, 256, "cpu")
    assert torch.equal(ours.mask_mod(*index).expand_as(wanted), wanted)
    assert torch.equal(fm.from_mask_mod(MODS[name]).dense(256, batch=2, heads=2).expand_as(wanted), wanted)


if __name__ == "__main__":
    many, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    whole = Report()
    for number in range(first, first + many):
        whole.run(number)
    print(many, "expressions:", dict(whole.outcomes), len(whole.failures), "failures")
    print("\n".join(whole.failures[:20]))
    sys.exit(bool(whole.failures))
