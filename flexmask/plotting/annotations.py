"""What is along the axes of a picture: labels, and bands that show the document of each position, and padding.

Bands come from the mask: documents from comparisons of the same data at query and key (``ids[b, q] == ids[b, kv]``), padding
from ``key_padding``, ``query_padding`` and ``cross_length``, and the trees of ``prefix_tree``, a band for each level,
from its ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from flexmask._checks import checked_int
from flexmask.errors import OperandError, RenderError
from flexmask.expr.index import Index, Symbol
from flexmask.expr.mask import And, Compare, Mask, Named, Or, PerHead
from flexmask.expr.node import Node
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Lookup, Param, Ranged, Slot, Table
from flexmask.intervals.context import Context
from flexmask.intervals.evaluation import Evaluation
from flexmask.report.lengths import resolve_lengths
from flexmask.tracing.trace import MaskLike

if TYPE_CHECKING:
    from flexmask.distributed.sharding import Sharding

#: Labels: a list, or a text whose words are the labels.
Tokens: TypeAlias = str | Sequence[str]


class LabelOptions(TypedDict, total=False):
    """Options of labels; each is an argument of :func:`flexmask.plotting.raster.rasterize`."""

    q_offset: int | Tensor
    tokens: Tokens | None
    kv_tokens: Tokens | None
    bands: bool


class ContentOptions(LabelOptions, total=False):
    """Options of any number of pictures; each is an argument of :func:`flexmask.plotting.raster.rasterize`."""

    block_size: int | tuple[int, int] | None
    why: bool | None
    against: MaskLike | None
    shards: Sharding | None
    max_pixels: tuple[int, int]
    max_blocks: tuple[int, int] | None


class FrameOptions(TypedDict, total=False):
    """What is around the cells of a file; each is an argument of :meth:`flexmask.Mask.save_picture`."""

    title: str | None
    legend: bool
    width: float | None


class PictureOptions(ContentOptions, total=False):
    """Options of one picture; each is an argument of :func:`flexmask.plotting.raster.rasterize`."""

    batch: int
    head: int


def _split(tokens: Tokens, what: str = "tokens") -> tuple[str, ...]:
    """Tokens as a tuple; a text is split at blanks.

    Raises:
        OperandError: they are neither a text nor a list of texts, or there are none.
    """
    found = tokens.split() if isinstance(tokens, str) else tokens
    if not isinstance(found, Sequence) or not found or not all(isinstance(token, str) for token in found):
        raise OperandError(f"{what} must be a string or a list of strings, at least one, got {tokens!r}")
    return tuple(found)


def _labels(tokens: Tokens, length: int, what: str) -> tuple[str, ...]:
    """The labels of positions, one for each.

    Raises:
        OperandError: ``tokens`` is neither a text nor a list of texts, or is empty.
        RenderError: there are not as many tokens as positions.
    """
    found = _split(tokens, what)
    if len(found) != length:
        raise RenderError(f"{what} must label each of the {length} positions, got {len(found)}")
    return found


def query_labels(tokens: Tokens, q_len: int, kv_len: int, offset: int) -> tuple[str, ...]:
    """The labels of the queries from position ``offset`` on: of tokens that label each key theirs, else one for each.

    Raises:
        OperandError: ``tokens`` is neither a text nor a list of texts, or is empty.
        RenderError: there are not as many tokens as positions.
    """
    found = _split(tokens)
    if len(found) == kv_len and offset + q_len <= kv_len:
        return found[offset : offset + q_len]
    return _labels(found, q_len, "tokens")


def key_labels(kv_len: int, tokens: Tokens | None, kv_tokens: Tokens | None) -> tuple[str, ...] | None:
    """The labels of the keys: ``kv_tokens``, else ``tokens``."""
    if kv_tokens is not None:
        return _labels(kv_tokens, kv_len, "kv_tokens")
    return None if tokens is None else _labels(tokens, kv_len, "tokens")


def picture_lengths(mask: Mask, q_len: int | None, kv_len: int | None, options: LabelOptions) -> tuple[int, int]:
    """The lengths: as given, with ``kv_len=q_len`` by default; else from the tokens; else from the mask's data."""
    tokens, kv_tokens, offset = options.get("tokens"), options.get("kv_tokens"), options.get("q_offset", 0)
    keys, name = (tokens, "tokens") if kv_tokens is None else (kv_tokens, "kv_tokens")
    if kv_len is None and keys is not None:
        kv_len = len(_split(keys, name))
    if q_len is None and tokens is not None:
        q_len = len(_split(tokens)) - (offset if isinstance(offset, int) else 0)
    q_len, kv_len = (n if n is None else checked_int(n, name, least=None) for name, n in (("q_len", q_len), ("kv_len", kv_len)))
    if q_len is None:
        return resolve_lengths(mask, kv_len=kv_len)
    return q_len, q_len if kv_len is None else kv_len


Axis: TypeAlias = Literal["q", "kv"]

#: The named masks that mask out padding.
PADDED = {"key_padding", "query_padding", "cross_length"}
PADDING = "padding"
#: The id that marks padding.
PADDED_ID = -2
#: The most stretches of a band, of which more could not be distinguished, and bands of a tree.
MAX_STRETCHES, MAX_LEVELS = 256, 8
#: The named masks whose queries see a key until its end, and what lies between.
NESTED, SUBTREE = "prefix_tree", "subtree"


@dataclass(frozen=True)
class Band:
    """The documents and the padding of the positions along one axis.

    Attributes:
        axis: along the queries or the keys.
        label: what the values are: the name of their data, else the words of their part of the mask, else its name.
        starts: the first position of each stretch, counted from 0; the first is 0, each ends where the next begins.
        values: the value of each stretch: an id, ``"padding"``, or ``""`` for nothing.
    """

    axis: Axis
    label: str
    starts: tuple[int, ...]
    values: tuple[str, ...]


def bands_of(context: Context, batch: int, head: int) -> tuple[Band, ...]:
    """The bands of one sequence and head of a mask. Padding is part of the first band of ids along its axis.

    Args:
        context: the lowering context of the mask.
        batch: index of the sequence in the context.
        head: index of the head.
    """
    return (*_along("q", context, batch, head), *_along("kv", context, batch, head))


def _along(axis: Axis, context: Context, batch: int, head: int) -> Iterator[Band]:
    length = context.q_len if axis == "q" else context.kv_len
    evaluation, padded = Evaluation(context, axis), torch.zeros(length, dtype=torch.bool, device="cpu")
    ids: dict[Any, tuple[str, Tensor]] = {}
    for label, node in _sources(context.named, axis, head, "ids", "", padding=True):
        values = evaluation.tensor(_ids(node, context))
        line = values[min(batch, values.shape[0] - 1), min(head, values.shape[1] - 1)].cpu().expand(length)
        if isinstance(node, Mask):
            padded = padded | ~line
        elif label == SUBTREE:
            ids |= {(node.key, level): (label, numbers) for level, numbers in enumerate(_levels(line.clamp(min=0)))}
        else:
            ids[node.key] = label, line
    if padded.any() and not ids:
        ids[PADDING] = PADDING, torch.zeros(length, dtype=torch.int64, device="cpu")
    for place, (label, line) in enumerate(ids.values()):
        marked = line.clamp(min=-1).masked_fill(padded, PADDED_ID) if place == 0 else line.clamp(min=-1)
        starts = [0, *((marked[1:] != marked[:-1]).nonzero().flatten() + 1).tolist()]
        if len(starts) <= MAX_STRETCHES:
            yield Band(axis, label, tuple(starts), tuple(_value(int(marked[start]), label) for start in starts))


def _sources(mask: Mask, axis: Axis, head: int, name: str, words: str, *, padding: bool) -> Iterator[tuple[str, Index | Mask]]:
    """Labels and expressions with the values of a band, in a mask named ``name``, for which the user has ``words``.

    An expression has ids, ends of subtrees, or is a mask that is false on padding.
    ``padding`` is False where the whole mask may show what this part masks out.
    """
    match mask:
        case Named() if mask.label:
            yield from _sources(mask.body, axis, head, name, mask.label, padding=padding)
        case Named():
            yield from _sources(mask.body, axis, head, mask.name, words, padding=padding)
        case And(operands) | Or(operands):
            for operand in operands:
                yield from _sources(operand, axis, head, name, words, padding=padding and isinstance(mask, And))
        case PerHead(masks):
            yield from _sources(masks[head], axis, head, name, words, padding=padding)
        case Compare("==", Lookup() as left, Lookup() as right) if left.table == right.table:
            sides = {_axis(left): left, _axis(right): right}
            if sides.keys() == {"q", "kv"}:
                yield _name(sides[axis].table) or words or name, sides[axis]
                if padding and name == "document":
                    yield PADDING, sides[axis] >= 0
        case Compare("<", Symbol("q"), ends) if name == NESTED and axis == _axis(ends) == "kv":
            yield SUBTREE, ends
        case Compare() if padding and name in PADDED and _axis(mask) == axis:
            yield PADDING, mask


def _levels(end: Tensor) -> list[Tensor]:
    """For each level of a tree the number of the segment at the root of the subtree that a token is in, -1 for none.

    Args:
        end: the first position behind the subtree of each token; tokens of a segment have the same.
    """
    starts = [0, *((end[1:] != end[:-1]).nonzero().flatten() + 1).tolist()]
    levels: list[Tensor] = []
    path: list[int] = []  # the ends of the subtrees that a segment is in
    for number, start in enumerate(starts if len(starts) <= MAX_STRETCHES else []):
        path = [stop for stop in path if stop > start]
        if len(path) == len(levels):
            levels.append(torch.full_like(end, -1))
        levels[len(path)][start : int(end[start])] = number
        path.append(int(end[start]))
    return levels[:MAX_LEVELS]


def _ids(node: Index | Mask, context: Context) -> Index | Mask:
    """The ids of documents in place of their first positions, where the context has both."""
    match node:
        case Lookup(DocumentTable("starts", source), indices) if source.key in {*context.tables, *context.tables.derived}:
            return Lookup(source, indices)
    return node


def _name(table: Table | Param) -> str:
    """The name of the data that ids are, which those that are counted from lengths have not."""
    match table:
        case Slot(name=name):
            return name
        case Ranged(source) | DocumentTable("starts", source):
            return _name(source)
    return ""


def _axis(node: Node) -> str | None:
    """The axis that a node depends on, or None if there are two or none."""
    axes = node.symbols & {"q", "kv"}
    return next(iter(axes)) if len(axes) == 1 else None


def _value(number: int, label: str) -> str:
    if number == PADDED_ID:
        return PADDING
    return "" if number < 0 or label == PADDING else str(number)
