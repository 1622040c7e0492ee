"""What a layer does to its scores, as a value: steps that are composed, printed, parsed and compared; as a ``score_mod``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flexmask._checks import (
    check_flag,
    check_function,
    checked_int,
    checked_number,
    is_traced,
    kind_of,
    misfit,
    nearest,
    not_plain_reason,
)
from flexmask._sync import resolve_device
from flexmask._transforms import number_text
from flexmask.errors import ExpressionError, FlexmaskError, OperandError, TextError
from flexmask.scores.steps import Alibi, Bias, Relative, Softcap, Step, check_cells, checked_table

#: The most queries, keys, heads or sequences.
MAX_SIZE = 2**30

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Score:
    """What becomes of the scores of attention, made by the functions of :mod:`flexmask.scores`.

    ``a + b`` adds two biases, ``a >> b`` does ``a`` and then ``b``. ``str`` gives the text that :func:`flexmask.scores.parse`
    reads back where it holds no tensors. Scores are equal where their steps are; tensors compare by identity.

    Attributes:
        steps: what is done, in order.
    """

    steps: tuple[Step, ...]

    def __add__(self, other: object) -> Score:
        if not isinstance(other, Score):
            raise OperandError(f"+ adds biases of flexmask.scores, got {kind_of(other)}; a number for each cell is bias(table)")
        if not (self.is_additive and other.is_additive):
            raise OperandError(f"+ adds biases, and one of {self} and {other} is none; write a >> b to do b after a")
        return Score((*self.steps, *other.steps))

    def __rshift__(self, other: object) -> Score:
        if not isinstance(other, Score):
            raise OperandError(
                f">> joins scores of flexmask.scores, got {kind_of(other)}; for a function of your own write one score_mod that "
                "calls score.score_mod(heads)"
            )
        return Score((*self.steps, *other.steps))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return tuple((step.text(), id(table) if isinstance(table := step.table, Tensor) else table) for step in self.steps)

    def __repr__(self) -> str:
        found = self.steps[0].text()
        for before, step in pairwise(self.steps):
            found += (" >> " if Softcap in (type(before), type(step)) else " + ") + step.text()
        return found

    @property
    def is_additive(self) -> bool:
        """Whether it only adds biases."""
        return not any(isinstance(step, Softcap) for step in self.steps)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds."""
        return tuple(table for step in self.steps if isinstance(table := step.table, Tensor))

    def to(self, device: torch.device | str) -> Score:
        """With its tensors on a device. A ``Parameter`` stays: its module moves it."""
        where = resolve_device(device)
        return self.with_tensors([own if isinstance(own, nn.Parameter) else own.to(where) for own in self.tensors])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Score:
        """The same score with other tensors in the places of :attr:`tensors`."""
        others = iter(tensors)
        steps = [step if not isinstance(step.table, Tensor) else replace(step, table=next(others)) for step in self.steps]
        return Score(tuple(steps)) if tensors else self

    def score_mod(
        self, heads: int | None = None, *, q_offset: int | Tensor = 0, device: torch.device | str | None = None
    ) -> ScoreMod:
        """As a function ``(score, b, h, q_idx, kv_idx) -> score`` for torch's ``flex_attention``.

        Args:
            heads: the query heads; ``alibi()`` without slopes needs them.
            q_offset: position of the first query, an int or ``int[B]``.
            device: of tables that are given as lists; by default that of new tensors.

        Raises:
            LoweringError: a score that has other numbers of heads, or tensors on another device.
        """
        at = None if device is None else resolve_device(device)
        heads = None if heads is None else checked_int(heads, "heads")
        return self.placed_function(heads, _offset(q_offset), 0, at)

    def placed_function(
        self, heads: int | None, rows: int | Tensor, columns: int | Tensor, device: torch.device | None
    ) -> ScoreMod:
        """As :meth:`score_mod`, where the first query and the first key are at these positions."""
        parts = [_function(step, heads, device) for step in self.steps]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q = q_idx + (rows[b] if isinstance(rows, Tensor) else rows)
            kv = kv_idx + (columns[b] if isinstance(columns, Tensor) else columns)
            for part in parts:
                score = part(score, b, h, q, kv)
            return score

        return score_mod

    def dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        heads: int,
        batch: int = 1,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """What becomes of scores of 0: the bias, ``float32[batch, heads, q_len, kv_len]``.

        Args:
            q_len: number of queries.
            kv_len: number of keys; ``q_len`` by default.
            heads: number of query heads.
            batch: number of sequences.
            q_offset: position of the first query, an int or ``int[B]``.
            device: of the result.
        """
        given = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": q_len if kv_len is None else kv_len}
        sizes = [checked_int(size, name, most=MAX_SIZE) for name, size in given.items()]
        if isinstance(q_offset := _offset(q_offset), Tensor) and q_offset.shape != (batch,):
            raise OperandError(f"q_offset must be an int or int[B], here [{batch}], got {list(q_offset.shape)}")
        if device is None:
            device = self.tensors[0].device if self.tensors else torch.get_default_device()
        first = resolve_device(device)
        for step in self.steps:
            if isinstance(step, Bias):
                check_cells(step.on(sizes[1], first), sizes, q_offset, 0)
        b, h, q_idx, kv_idx = (torch.arange(size, device=first) for size in sizes)
        function = self.score_mod(heads, q_offset=q_offset, device=first)
        found = function(torch.zeros(sizes, device=first), b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx)
        return found.expand(sizes)


def _offset(q_offset: object) -> int | Tensor:
    if isinstance(q_offset, Tensor):
        if not_plain_reason(q_offset) or q_offset.dim() != 1 or q_offset.dtype not in (torch.int32, torch.int64):
            raise OperandError(f"q_offset must be an int or int[B], got {kind_of(q_offset)}")
        return q_offset
    return checked_int(q_offset, "q_offset", None, MAX_SIZE)


def _function(step: Step, heads: int | None, device: torch.device | None) -> ScoreMod:
    if isinstance(step, Softcap):
        cap = number_text(step.cap)
        return lambda score, b, h, q, kv: float(cap) * torch.tanh(score / float(cap))
    if isinstance(step, Bias):
        table = step.on(heads, device)
        per_batch, per_head = table.size(0) > 1, table.size(1) > 1
        # Keys below position 0, which only a cache has, are masked out.
        return lambda score, b, h, q, kv: (
            score + table[b if per_batch else b * 0, h if per_head else h * 0, q, kv.clamp(min=0)].to(score.dtype)
        )
    by_distance = step.by_distance(heads, device)
    return lambda score, b, h, q, kv: score + by_distance(h, kv - q).to(score.dtype)


#: What ``score_mod=`` takes: a score, its text, or a function.
ScoreLike: TypeAlias = Score | ScoreMod | str

# ---------------------------------------------------------------- the named scores


def alibi(slopes: Any = None) -> Score:
    """A bias that falls with the distance, with another slope in each head.

    Score: ``score - slopes[h] * abs(q - kv)``

    Under a causal mask that is the bias of the paper; where a query attends to later keys, it falls in both directions.

    Args:
        slopes: ``[H]``, one for each query head, a list or a floating-point tensor, which may require gradients. By default those
            of the paper, for any number of heads: ``2 ** (-8 * (h + 1) / H)`` where it is a power of 2.

    Raises:
        OperandError: slopes that are not numbers ``[H]``.
        LoweringError: in a call, a number of slopes other than that of its query heads.

    Source: Press et al., https://arxiv.org/abs/2108.12409
    """
    return Score((Alibi(None if slopes is None else checked_table(slopes, "alibi: slopes", ("[H]",))),))


def relative_bias(table: Any, *, max_distance: int = 128, bidirectional: bool = True) -> Score:
    """A learned bias for each head and each bucket of distances, as in T5.

    Score: ``score + table[bucket(kv - q), h]``

    Args:
        table: ``[buckets, H]``, as the weight of T5's ``relative_attention_bias``. Gradients reach a tensor.
        max_distance: greater distances are in the last bucket (``relative_attention_max_distance``).
        bidirectional: whether keys after the query have buckets of their own, half of them, as in encoders. Else they are in the
            bucket of the query's own position, as in decoders, where a mask hides them.

    Raises:
        OperandError: a table that is not numbers ``[buckets, H]``.
        ExpressionError: fewer than 2 buckets for a direction, an odd number with ``bidirectional``, or a ``max_distance`` that is
            less than the number of buckets.
        LoweringError: in a call, a table of another number of heads.

    Source: Raffel et al., https://arxiv.org/abs/1910.10683
    """
    found = checked_table(table, "relative_bias: table", ("[buckets, H]",))
    check_flag(bidirectional, "relative_bias: bidirectional")
    buckets, directions = len(found), 2 if bidirectional else 1
    if buckets % directions or buckets < 2 * directions:
        remedy = "an even number, at least 4; for a decoder give bidirectional=False" if bidirectional else "at least 2"
        shape = list((found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")).shape)
        raise ExpressionError(f"relative_bias: table has {buckets} buckets {shape}; wanted {remedy}")
    checked_int(max_distance, "relative_bias: max_distance", buckets // directions, MAX_SIZE)
    return Score((Relative(found, int(max_distance), bidirectional),))


def bias(table: Any) -> Score:
    """A bias for each query and key.

    Score: ``score + table[b, h, q, kv]``

    Args:
        table: ``[q, kv]``, ``[H, q, kv]`` or ``[B, H, q, kv]``, of which ``B`` and ``H`` may be 1, with a value for each position
            of a call or more. Gradients reach a tensor. Values of -inf hide a key, but no kernel skips it: use a mask.

    Raises:
        OperandError: a table that is not such numbers.
        LoweringError: in a call, a table that is too small, or of another number of heads or sequences.

    Source: ``attn_mask`` of ``torch.nn.functional.scaled_dot_product_attention``
    """
    return Score((Bias(checked_table(table, "bias: table", ("[q, kv]", "[H, q, kv]", "[B, H, q, kv]"))),))


def softcap(cap: float) -> Score:
    """Scores bounded smoothly, between ``-cap`` and ``cap``.

    Score: ``cap * tanh(score / cap)``

    Args:
        cap: the bound, a positive number.

    Raises:
        OperandError: it is not a number.
        ExpressionError: it is not positive.

    Source: Gemma 2, https://arxiv.org/abs/2408.00118
    """
    found = checked_number(cap, "softcap: cap")
    if found <= 0:
        raise ExpressionError(f"softcap: cap must be positive, got {cap}; scores become cap * tanh(score / cap)")
    return Score((Softcap(found),))


NAMED = {define.__name__: define for define in (alibi, bias, relative_bias, softcap)}
JOINS = {ast.Add: operator.add, ast.RShift: operator.rshift}


def parse(text: str) -> Score:
    """Parses a score, e.g. ``"alibi() >> softcap(50.0)"``.

    The text has the names of :mod:`flexmask.scores` with numbers and lists, joined by ``+`` and ``>>``, in Python's precedence:
    ``+`` binds more tightly. ``parse(str(score)) == score`` where it holds no tensors.

    Args:
        text: the score.

    Raises:
        TextError: the text is not a score.
        OperandError: ``text`` is not a string.
    """
    if not isinstance(text, str):
        raise OperandError(f"parse() reads a string, got {kind_of(text)}")
    return _parse(text)


parse._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compiler.assume_constant_result, without its imports


@lru_cache(maxsize=256)
def _parse(text: str) -> Score:
    line = " ".join(text.split())
    try:
        return _read(ast.parse(line, mode="eval").body, line)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, FlexmaskError):
            raise
        reason = f"this is not an expression: {getattr(error, 'msg', error)}"
        raise TextError(reason, line[:1000], (getattr(error, "offset", None) or 1) - 1) from None


def _read(node: ast.expr, line: str) -> Score:
    try:
        match node:
            case ast.BinOp(left, join, right) if type(join) in JOINS:
                found: Score = JOINS[type(join)](_read(left, line), _read(right, line))
                return found
            case ast.Name(name) | ast.Call(ast.Name(name)):
                if name not in NAMED:
                    known = ", ".join(NAMED)
                    raise TextError(f"there is no score {name}.{nearest(name, NAMED)} There are {known}", line, node.col_offset)
                calls = [node] if isinstance(node, ast.Call) else []
                values = [ast.literal_eval(value) for call in calls for value in call.args]
                named = {str(word.arg): ast.literal_eval(word.value) for call in calls for word in call.keywords}
                if misfits := misfit(NAMED[name], values, named):
                    raise TextError(misfits, line, node.col_offset)
                return NAMED[name](*values, **named)
    except TextError:
        raise
    except (FlexmaskError, ValueError) as error:
        reason = str(error) if isinstance(error, FlexmaskError) else "its arguments are numbers and lists"
        raise TextError(reason, line, node.col_offset) from None
    reason = "wanted scores, as alibi() or softcap(50.0), joined by + to add biases and by >> to do one after another"
    raise TextError(reason, line, getattr(node, "col_offset", 0))


def as_score_mod(given: object) -> Score | ScoreMod | None:
    """A score from a text, or what is given where it is a Score, a function or None.

    Raises:
        OperandError: it is neither.
        TextError: a text that is not a score.
    """
    if given is None or isinstance(given, Score):
        return given
    if isinstance(given, str):
        return parse(given)
    if not is_traced():
        check_function(given, "score_mod", "(score, b, h, q_idx, kv_idx) -> score, a score of flexmask.scores or its text")
    return given  # type: ignore[return-value]
