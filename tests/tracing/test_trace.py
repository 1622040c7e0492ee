"""Tracing: a mask_mod and the mask that it becomes agree cell by cell, and keep the structure that they have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

import flexmask as fm
from flexmask.errors import LoweringError, OperandError, TraceError

Q, KV, B, H = 13, 11, 2, 2
PLACES = 40  # captured tensors are longer than the mask

_generator = torch.Generator().manual_seed(0)


def _drawn(low: int, high: int, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randint(low, high, (*sizes, PLACES), generator=_generator, dtype=dtype)


LONG = _drawn(-9, 30, torch.int64)
INTS = _drawn(-9, 9, torch.int32)
SHORTS = _drawn(-30_000, 30_000, torch.int16)
BYTES = _drawn(0, 250, torch.uint8)
BYTES[0] = 0
CHARS = _drawn(-120, 120, torch.int8)
FLAGS = torch.rand(PLACES, generator=_generator) > 0.5
FLOATS = torch.rand(PLACES, generator=_generator) * 10
IDS = _drawn(0, 4, torch.int64, 2)
DEEP = _drawn(-3, 4, torch.int64, 2, 2)
TABLE = torch.ones(2, 2, PLACES, PLACES, dtype=torch.bool).tril()
FIVE = torch.tensor(5)

#: What stands in the texts below.
NAMES = {
    **{"torch": torch, "L": LONG, "I": INTS, "S": SHORTS, "Y": BYTES, "C": CHARS, "P": FLAGS, "F": FLOATS},
    **{"D": IDS, "E": DEEP, "T": TABLE, "five": FIVE},
}

#: Bodies of mask_mods that become expressions.
EXACT = {
    "comparison": [
        "q >= kv",
        "5 > kv",
        "q < 2.0",
        "q.ge(kv)",
        "torch.eq(q, kv)",
        "q != kv",
        "(q > kv) == (q > 3)",
        "(q > 2) != P[kv]",
    ],
    "arithmetic": [
        *("3 - q >= -kv", "five * q > kv", "q - kv < five", "17 % (q + 1) == kv", "17 // (q + 1) == kv", "-q % 4 == kv % 4"),
        *("(q - kv) // -3 > 0", "torch.div(q - kv, 3, rounding_mode='floor') == 1", "torch.fmod(q, 3) == 0", "q.pow(2) > kv"),
        *("torch.rsub(q, kv, alpha=2) > -3", "torch.add(q, kv, alpha=2) > 7", "torch.add(input=q, other=kv) > 3"),
        *("(q - kv).abs() < 3", "q ** 2 > kv", "torch.minimum(q, five) > kv", "q.clamp(2, 5) == kv", "q.clamp(5, 2) == kv"),
        *("torch.max(q, kv) > 3", "q.clamp(min=kv) == q", "torch.square(q) > kv"),
    ],
    "bits": [
        *("(q & 3) == (kv & 3)", "((q - kv) & 3) == 1", "(q << 1) > kv", "((q - kv) >> 1) == -2", "(~q) < -kv"),
        *("(C[q] & 127) > 50", "(Y[q] & 3) == 1"),
    ],
    "truth": [
        *("~(q > kv) | (kv > 3)", "(q > kv) ^ (kv > 3)", "True & (q > kv)", "(q > kv) * (q > 3)", "(q > kv) + (q > 3)"),
        *("torch.logical_and(q, kv > 2)", "torch.logical_not(q - kv)", "((q > kv) * 2 + (q > 3)) == 3", "(q > kv) == 1"),
        *("torch.where(q > 3, kv > 2, q > 1)", "torch.where(condition=q > 3, input=kv, other=q) > 2", "torch.tensor(False)"),
        *("torch.where(q > 3, True, kv > q)", "kv.where(q > 3, q) > 2", "(q > kv).masked_fill(kv == 2, True)"),
    ],
    "casts": [
        *("(q > kv).int() + (q > 3).long() == 2", "I[q].bool()", "Y[q].short() - 300 > -200", "Y[q].long() - Y[kv].long() > 3"),
        *("S[q].long() * S[kv].long() > 0", "q.to(torch.bool)", "q.type_as(I[q]) > kv"),
    ],
    "constants": [
        *("torch.zeros_like(q) == kv", "torch.full_like(q, 3) < kv", "q.new_ones((), dtype=torch.bool)", "torch.tensor(3) < kv"),
        *("torch.tensor([3, 4])[h] < kv", "(torch.arange(3) == q).any()", "torch.isin(kv, torch.tensor([1, 3, 5]))"),
        *("torch.isin(kv, torch.tensor([1, 3]), invert=True)", "torch.isin(kv, torch.tensor([], dtype=torch.int64))"),
    ],
    "lookups": [
        *("I[q] == I[kv]", "P[q] & P[kv]", "P[q] == P[kv]", "D[b, q] == D[b, kv]", "D[b][q] == D[b][kv]", "D[..., q][b] > 1"),
        *("D[:, q][b] > 1", "D[b, -1] > kv", "D[:, 5:][b, q] > 1", "D.T[q, b] > 1", "D[None, b, q].any()", "L[-1] > q"),
        *("L[q - 40] > 3", "L[q - kv] > 3", "L[torch.where(q > kv, q - kv, 0)] > 3", "L[L[q]] > 3", "L[P[q].long()] > 3"),
        *("L[I[q] % 40] > 3", "E[b, h, q] > E[b, h, kv]", "E[b][h, kv] > 1", "E[:, h, q][b] > 1"),
        *("E[b, h, torch.arange(3)].sum() > kv", "E[b, :, q].sum() > 1", "T[b, h, q, kv]", "T[b][h][q][kv]", "T[b, :, q][h, kv]"),
        *("L.view(4, 10)[q % 4][kv % 10] > 3", "E[b, h, 1:5].any()", "L[q // 2] == L[kv // 2]"),
    ],
    "vectors": [
        *("(D[:, q] == D[:, kv]).any()", "D[:, q].sum() > 3", "D[:, q].amax() == D[:, kv].amin()", "torch.stack([q, kv])[1] > 3"),
        *(
            "torch.stack([P[q], P[kv]]).amax()",
            "torch.stack([P[q], P[kv]]).amin() == P[q]",
            "torch.stack([P[q], P[kv]]).sum() == 2",
        ),
        *("(torch.tensor([[1, 2], [3, 4]]) + q).sum() > kv * 3", "(q.expand(4) > torch.arange(4)).view(2, 2).any(1).all()"),
        *(
            "(q.repeat(3) + torch.arange(3)).flip(0)[0] > kv",
            "(torch.tensor([2, 5, 9]) <= q).sum() == (torch.tensor([2, 5, 9]) <= kv).sum()",
        ),
    ],
}

#: Bodies of which some operation is kept as a call, and what a strict error names.
OPAQUE = [
    ("torch.sin(q.float()) > 0", "float"),
    ("torch.stack([q, kv])[h] > 3", "getitem"),
    ("E[b, torch.arange(2), q][h] > 1", "getitem"),
    ("q / 2 == kv", "div"),
    ("q > 2.5", "gt"),
    ("(q & kv) == 0", "and"),
    ("(q ^ 1) == kv", "xor"),
    ("2 ** q > kv", "pow"),
    ("torch.gcd(q, kv) == 1", "gcd"),
    ("F[q] > F[kv]", "gt"),
    ("F[q] * q // 2 > kv", "mul"),
    ("torch.div(q - kv, 3, rounding_mode='trunc') == 0", "div"),
    ("torch.fmod(q - kv, 3) == 0", "fmod"),
    ("((q > kv) ** 2 + (q >= kv) ** 2) == 2", "pow"),
    ("(torch.square(q > kv) + (q > kv)) == 2", "square"),
    ("Y[q] - 1 > kv", "sub"),
    ("Y[q] > -1", "gt"),
    ("Y[q] < 300", "lt"),
    ("C[q] > 300", "gt"),
    ("C[q] // 300 == -1", "div"),
    ("(C[q] & 255) > 0", "and"),
    ("S[q] < 40_000", "lt"),
    ("I[q] * 300_000_000 > kv", "mul"),
    ("(Y[q] - Y[kv]).long() + q > 3", "sub"),
    ("torch.where(q > kv, Y[q], -1) == 255", "where"),
    ("~Y[q] > 100", "invert|not"),
    ("I[q].to(torch.uint8) == 250", "to"),
    ("D[:, q].float().sum() > 3", "float"),
    ("D[:, q].cumsum(0)[1] > 3", "cumsum"),
    ("D[:, q].argmax() == 1", "argmax"),
    ("D[:, q].sum(dtype=torch.int32) > 3", "sum"),
    ("(D[:, q] == D[:, kv]).float().cumsum(0).mean() > 0.4", "float"),
    ("torch.einsum('i,i->', torch.arange(3), torch.stack([q, kv, b])) > 5", "einsum"),
    ("L.index_select(0, q[None])[0] > 3", "index_select"),
    ("torch.searchsorted(torch.tensor([2, 5, 9]), q) == torch.bucketize(kv, torch.tensor([2, 5, 9]))", "searchsorted"),
]

#: Bodies that do what has no expression at all, so that the whole function is kept.
WHOLE = ["torch.vmap(lambda x: x > q)(torch.arange(3)).any()"]


def of_text(body: str) -> Any:
    return eval(f"lambda b, h, q, kv: {body}", NAMES)


def check(mask_mod: Any, mask: fm.Mask, *, blocks: bool = True) -> None:
    """The cells and blocks of the mask equal those that torch computes from the function."""
    for q_len, kv_len, batch, heads in ((Q, KV, B, H), (5, 19, 1, 2)):
        expected = create_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu")
        found = mask.dense(q_len, kv_len, batch=batch, heads=heads)
        assert torch.equal(found.expand(batch, heads, q_len, kv_len), expected)
        if blocks:
            visible = expected.sum((2, 3)) > 0
            made = mask.block_mask(q_len, kv_len, batch=batch, heads=heads, block_size=32)
            assert torch.equal((made.kv_num_blocks > 0).expand(batch, heads, 1)[..., 0], visible)


def uses_calls(mask: fm.Mask) -> bool:
    return any(type(node).__name__ == "Opaque" for node in mask.expand().walk())


EACH = [(kind, body) for kind, bodies in EXACT.items() for body in bodies]


@pytest.mark.parametrize("body", [body for _, body in EACH], ids=[f"{kind}: {body}" for kind, body in EACH])
def test_expressions(body: str) -> None:
    mask_mod = of_text(body)
    mask = fm.from_mask_mod(mask_mod, strict=True)
    check(mask_mod, mask)
    assert not uses_calls(mask)


@pytest.mark.parametrize(("body", "operation"), OPAQUE, ids=[body for body, _ in OPAQUE])
def test_calls(body: str, operation: str) -> None:
    mask_mod = of_text(body)
    mask = fm.from_mask_mod(mask_mod)
    check(mask_mod, mask)
    assert uses_calls(mask)
    with pytest.raises(TraceError, match=rf"\w*({operation})\w* has no expression"):
        fm.from_mask_mod(mask_mod, strict=True)


@pytest.mark.parametrize("body", WHOLE)
def test_whole_functions(body: str) -> None:
    mask_mod = of_text(body)
    mask = fm.from_mask_mod(mask_mod)
    check(mask_mod, mask)
    with pytest.raises(TraceError, match="lambda"):
        fm.from_mask_mod(mask_mod, strict=True)


# ---------------------------------------------------------------- functions and objects


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return IDS[b, q_idx] == IDS[b, kv_idx]


def windowed(size: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q - kv < size


def with_default(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, size: int = 3) -> Tensor:
    return q - kv < size


class Window:
    """A window as an object."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() < self.size


def looped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    found = q >= kv
    for step in range(3):
        found = found & (kv != step * 2) | (q == kv)
    return found


def helped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    def near(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).abs() < 3

    return near(q, kv) | near(q, kv * 2)


FUNCTIONS: dict[str, Any] = {
    "function": causal,
    "closure": of_text("D[b, q] == D[b, kv]"),
    "partial": partial(windowed, 3),
    "default": with_default,
    "object": Window(4),
    "and_masks": and_masks(causal, same_document),
    "or_masks": or_masks(causal, same_document, Window(2)),
    "no masks": and_masks(),
    "loop": looped,
    "helper": helped,
}


@pytest.mark.parametrize("mask_mod", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions(mask_mod: Any) -> None:
    mask = fm.from_mask_mod(mask_mod, strict=True)
    assert not uses_calls(mask)
    check(mask_mod, mask)


def test_masks_are_returned_as_they_are() -> None:
    mask = fm.causal()
    assert fm.from_mask_mod(mask) is mask


def test_caught_questions() -> None:
    """A function may catch what torch raises."""

    def caught(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        try:
            return q > 3 if q > kv else kv > 3
        except Exception:
            return q > kv

    check(caught, fm.from_mask_mod(caught))


# ---------------------------------------------------------------- operations in place


def and_in_place(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    found = q >= kv
    found &= q - kv < 3
    found |= kv < 1
    return found


def other_name(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q * 1
    alias = number.long()
    number += 2
    return alias > kv


def argument(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    q += 1
    return q > kv


def copied(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q.clone()
    number.add_(3)
    return (number > kv) & (q < 9)


def clamped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q.clamp(min=0)
    number -= 3
    return (number > kv) | (q < 4)


def first_power(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q**1
    number += 3
    return (number > kv) & (q < 9)


def looked_up(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = LONG[q]
    number *= 2
    return number > kv


def filled(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    found = torch.zeros_like(q >= kv)
    found |= q > kv
    found.masked_fill_(kv == 3, True)
    return found.logical_not_()


def viewed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q * 1
    view = number.view(1)
    number += 2
    return view[0] > kv


def viewed_from(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    number = q * 1
    view = number.view(1)
    view += 2
    return number > kv


IN_PLACE = [and_in_place, other_name, argument, copied, clamped, first_power, looked_up, filled]


@pytest.mark.parametrize("mask_mod", [*IN_PLACE, viewed, viewed_from], ids=lambda mask_mod: mask_mod.__name__)
def test_in_place(mask_mod: Any) -> None:
    before = LONG.clone()
    mask = fm.from_mask_mod(mask_mod)
    check(mask_mod, mask)
    check(mask_mod, mask | fm.empty())
    assert uses_calls(mask) == (mask_mod in (viewed, viewed_from))
    assert torch.equal(LONG, before)


def test_whole_function_changes_no_index() -> None:
    """In-place operations on the arguments of a function do not change the rest of the mask."""

    def steps(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q.view(1).add_(1)
        return q > kv

    mask = fm.from_mask_mod(steps) & (fm.q < 3)
    expected = torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) < 3)[:, None]
    for _ in range(2):
        assert torch.equal(mask.dense(5, batch=1, heads=1)[0, 0], expected)


# ---------------------------------------------------------------- structure


def test_structure_around_a_call() -> None:
    mask = fm.from_mask_mod(of_text("(q >= kv) & (F[q] > F[kv])"))
    found = mask.rows(Q)
    assert not found.exact
    assert torch.equal(found.upper.bounds[0, 0, :, 0], torch.stack((torch.zeros(Q), torch.arange(Q) + 1), -1).int())
    assert str(mask).startswith("causal & ")


def test_call_of_one_side_separates() -> None:
    """An opaque call of the key alone is separable, a column like any other."""
    mask_mod = of_text("torch.floor(kv / 3) > 1")
    mask = fm.from_mask_mod(mask_mod)
    assert mask.rows(Q, KV).exact
    check(mask_mod, mask)


def test_expressions_are_exact() -> None:
    assert fm.from_mask_mod(of_text("(q >= kv) & (D[b, q] == D[b, kv])")).rows(Q).exact
    assert fm.from_mask_mod(of_text("((q - kv).abs() < 3) | (kv < 2)")).rows(Q).exact


def test_vectors_are_evaluated_once() -> None:
    """Chains of calls on vectors do not multiply."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        values = IDS[:, q]
        for _ in range(6):
            values = values.cumsum(0)
        return values.sum() > kv

    check(mask_mod, fm.from_mask_mod(mask_mod))
    text = fm.from_mask_mod(mask_mod)
    steps = {node.key for node in text.walk() if type(node).__name__ == "Opaque"}
    assert len(steps) < 40


def test_captured_tensors_stay_the_functions_own() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = fm.from_mask_mod(lambda b, h, q, kv: ids[q] == ids[kv])
    assert mask.dense(4).sum() == 8
    ids.fill_(1)
    assert mask.dense(4).sum() == 16


def test_index_out_of_range() -> None:
    with pytest.raises(IndexError, match="index 40 is out of"):
        fm.from_mask_mod(of_text("L[40] > q"))
    with pytest.raises(LoweringError, match=r"ranges from 30 to 42.*40 values"):
        fm.from_mask_mod(of_text("L[q + 30] > 3")).dense(Q)
    with pytest.raises(IndexError):
        fm.from_mask_mod(of_text("L[q + kv + 30] > 3")).dense(Q)


# ---------------------------------------------------------------- refusals

REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("too few arguments", lambda b, h, q: q > 1, OperandError, "too many positional"),
    ("too many arguments", lambda b, h, q, kv, x: q > 1, OperandError, "missing a required argument: 'x'"),
    ("number", 3, OperandError, "int 3"),
    ("text", "causal", OperandError, r"the text 'causal': read it, flexmask.parse\('causal'\)"),
    ("class", torch.Tensor, OperandError, "got the class Tensor; give an object"),
    ("class of a function", type(lambda: 0), OperandError, "got the class function"),
    ("module of another signature", torch.nn.Linear(2, 2), OperandError, "Linear: too many positional"),
    ("mask that is not called", fm.causal, OperandError, r"the function causal: call it, causal\(\)"),
    (
        "mask of four arguments",
        fm.masks.sliding_tile,
        OperandError,
        r"call it with its arguments, sliding_tile\(canvas, ",
    ),
    ("score_mod", lambda score, b, h, q, kv: score, OperandError, "a score_mod is given as score_mod="),
    (
        "function that makes a mask",
        lambda b, h, q, kv: fm.causal(),
        TraceError,
        "gives a mask, causal, .* give that mask itself",
    ),
    ("tensor", torch.ones(3, 3), OperandError, "Tensor"),
    ("index", lambda b, h, q, kv: q - kv, TraceError, r"\[\] and torch\.int64; compare"),
    ("float", lambda b, h, q, kv: (q > kv).float(), TraceError, r"torch\.float32"),
    ("vector", lambda b, h, q, kv: (q > kv).unsqueeze(0), TraceError, r"shape \[1\]"),
    ("list", lambda b, h, q, kv: [q > kv], TraceError, "list"),
    ("nothing", lambda b, h, q, kv: None, TraceError, "NoneType"),
    ("integer", lambda b, h, q, kv: 1, TraceError, "int"),
]


@pytest.mark.parametrize(("function", "kind", "wanted"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_errors(function: Any, kind: type[Exception], wanted: str) -> None:
    with pytest.raises(kind, match=wanted):
        fm.from_mask_mod(function)


QUESTIONS: list[tuple[str, Callable[..., Any]]] = [
    ("__bool__", lambda b, h, q, kv: q > 3 if q > kv else kv > 3),
    ("item", lambda b, h, q, kv: q.item() > kv),
    ("__int__", lambda b, h, q, kv: int(q) > kv),
    ("tolist", lambda b, h, q, kv: q.tolist() > kv),
    ("__setitem__", lambda b, h, q, kv: torch.zeros(3).__setitem__(0, q)),
]


@pytest.mark.parametrize(("name", "function"), QUESTIONS, ids=[name for name, _ in QUESTIONS])
def test_questions_have_no_expression(name: str, function: Any) -> None:
    """torch raises for them too, when the mask is lowered."""
    with pytest.raises(TraceError, match=name):
        fm.from_mask_mod(function, strict=True)
    mask = fm.from_mask_mod(function)
    with pytest.raises(LoweringError, match=r"fails for the indices of cells.*(vmap|item|needs the value|data pointer)"):
        mask.dense(4, batch=1, heads=1)


@pytest.mark.parametrize("strict", [False, True])
def test_errors_of_the_function_are_its_own(strict: bool) -> None:
    def broken(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        raise KeyError("ids")

    with pytest.raises(KeyError, match="ids"):
        fm.from_mask_mod(broken, strict=strict)
    with pytest.raises(NameError, match="lenghts"):
        fm.from_mask_mod(lambda b, h, q, kv: q >= lenghts[b], strict=strict)  # type: ignore[name-defined]  # noqa: F821


def test_errors_of_a_function_that_is_called_for_cells_name_it() -> None:
    def of_numbers(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= {0: kv}[int(q)]

    mask = fm.from_mask_mod(of_numbers)
    for lower in (mask.dense, mask.block_mask, mask.stats):
        with pytest.raises(LoweringError, match="of_numbers, which is an opaque call, fails") as caught:
            lower(4, batch=1, heads=1)
        assert caught.value.__cause__ is not None
    with pytest.raises(LoweringError, match="as `if`, `and`, `or`"):
        fm.from_mask_mod(lambda b, h, q, kv: q > 3 if q > kv else kv > 3).dense(4, batch=1, heads=1)


def test_random_numbers_are_errors() -> None:
    with pytest.raises(TraceError, match="rand draws random numbers"):
        fm.from_mask_mod(lambda b, h, q, kv: torch.rand(()) < 0.5)


def test_older_names_of_types() -> None:
    def body(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return (q % 3 != 0) == (kv % 3).type("torch.BoolTensor")

    table = [[(row % 3 != 0) == (column % 3 != 0) for column in range(7)] for row in range(7)]
    assert fm.from_mask_mod(body).dense(7, batch=1, heads=1)[0, 0].tolist() == table


def test_data_that_changes_later() -> None:
    """Simplification must not depend on the values of captured tensors."""
    ids, offset = torch.tensor([0, 1, 1, 2]), torch.tensor(5)
    clamped = fm.from_mask_mod(lambda b, h, q, kv: ids[q].clamp(min=0) == ids[kv])
    cut = fm.from_mask_mod(lambda b, h, q, kv: torch.div(q + offset, 4, rounding_mode="trunc") == kv)
    ids[3], offset[...] = -1, -3
    assert clamped.dense(4)[0, 0].tolist() == [[max(a, 0) == b for b in ids.tolist()] for a in ids.tolist()]
    assert cut.dense(4)[0, 0].tolist() == [[int((row - 3) / 4) == column for column in range(4)] for row in range(4)]


def test_one_tensor_of_a_function_and_of_a_mask() -> None:
    """A function's tensors may be longer than the mask; a mask's own may not, in either order."""
    ids = torch.zeros(8, dtype=torch.int64)
    strict, traced = fm.document(ids), fm.from_mask_mod(lambda b, h, q, kv: ids[q] == ids[kv])
    assert traced.dense(4).all()
    for mask in (strict & traced, traced & strict):
        with pytest.raises(LoweringError, match="has 8 values along"):
            mask.dense(4)
