"""The nodes of a mask on which its lowering depends, and the sizes of its axes, on which the arguments of a lowering, the mask's
data and its heads must agree."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flexmask._checks import checked_int
from flexmask.errors import LoweringError
from flexmask.expr.form import filled
from flexmask.expr.index import Opaque, Symbol
from flexmask.expr.mask import Mask, Named, PerHead
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup, Ranged, Slot, Table
from flexmask.intervals.checks import AXES, Computed, is_computed
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.extent import Extent


@dataclass(frozen=True, slots=True)
class Parts:
    """The nodes of a mask that are validated, each once, operands before operations."""

    lookups: list[Lookup]
    slots: list[Slot]
    ranged: list[Ranged]
    switches: list[PerHead]
    computed: list[Computed]
    axes: list[tuple[Lookup, int, str]]  # which axis of a lookup has which axis of the mask; data that may be longer comes last


def parts_of(mask: Mask) -> Parts:
    """The parts of the form of a mask, found once and kept with it."""
    return mask.form.kept("parts", lambda: _parts(mask.form))


def _parts(form: Mask) -> Parts:
    found: dict[Any, Node] = {}
    for node in form.expand().walk():
        # What a table may hold depends on its use, so that one table can have several checks.
        use = (node.what, str(node.high)) if isinstance(node, Ranged) else may_be_longer(node)
        found.setdefault((node.key, use), node)
    nodes = list(found.values())
    ranges: dict[Any, Extent | None] = {}
    lookups = [node for node in nodes if isinstance(node, Lookup)]
    axes: list[tuple[Lookup, int, str]] = [
        (node, place, index.name)
        for node in sorted(lookups, key=may_be_longer)
        for place, index in enumerate(node.indices)
        if isinstance(index, Symbol) and index.name in AXES
    ]
    return Parts(
        lookups,
        [node for node in nodes if isinstance(node, Slot)],
        [node for node in nodes if isinstance(node, Ranged)],
        [node for node in nodes if isinstance(node, PerHead)],
        [node for node in nodes if isinstance(node, Computed) and is_computed(node, ranges)],
        axes,
    )


def may_be_longer(node: Node) -> bool:
    """Whether the data of a lookup may have more values than positions."""
    return isinstance(node, Lookup) and getattr(node.table, "may_be_longer", False)


#: The sizes of some axes, None where one is not known.
Sizes: TypeAlias = dict[str, int | None]
#: The arguments for the sizes of axes.
KEYWORDS = (("b", "batch"), ("h", "heads"))


def checked_size(size: object, what: str) -> int:
    """A length, or a number of sequences or heads, in its limits; in a graph for all sizes as it is.

    Raises:
        LoweringError: it is too small or too great.
        OperandError: it is no integer.
    """
    return cast(int, size) if isinstance(size, torch.SymInt) else checked_int(size, what, most=MAX_LENGTH, kind=LoweringError)


def checked_sizes(mask: Mask, given: Sizes, offset: int | Tensor, needed: Sizes) -> dict[str, int]:
    """The sizes of batch and heads, on which the arguments and all data of the mask must agree."""
    claims_of = _claims(mask, given, offset)
    moved = not (isinstance(offset, int) and offset == 0)
    for lookup, place, axis in parts_of(mask).axes:
        if axis in needed and (size := cast(Table, lookup.table).shape_of(mask.held)[place]) is not None:
            _check_axis(mask, lookup, axis, size, needed, moved=moved)
    sizes, form = {}, mask.form.expand()
    symbols = form.symbols
    for axis, keyword in KEYWORDS:
        dependent = axis in symbols or (axis == "b" and isinstance(offset, Tensor) and "q" in symbols)
        if dependent and not claims_of[axis] and not (axis == "b" and isinstance(offset, Tensor)):
            called = any(isinstance(node, Opaque) for node in form.walk())
            reason = "holds a function that tracing could not follow, and so may depend" if called else "depends"
            hint = "; or write a function of tensors, with & | ~ in place of `and`, `or`, `not` and `if`" if called else ""
            raise LoweringError(f"the mask {mask.brief()} {reason} on {axis}: give {keyword}={hint}")
        sizes[axis] = claims_of[axis][0][0] if dependent and claims_of[axis] else 1
    return sizes


def own_sizes(mask: Mask) -> dict[str, int]:
    """The sizes of the axes ``"b"`` and ``"h"`` that a mask's own data and heads determine."""
    claims_of: dict[str, Claims] = {"b": [], "h": []}
    _add_claims(mask, claims_of)
    return {axis: min(size for size, _ in claims) for axis, claims in claims_of.items() if claims}


def check_batch(mask: Mask, batch: int) -> None:
    """Raises a LoweringError if the data of a mask has another number of sequences."""
    _claims(mask, {"b": batch, "h": None}, 0)


#: The different sizes of one axis, each with what determines it: data of the mask, or an argument.
Claims: TypeAlias = list[tuple[int, "Lookup | str"]]


def _claims(mask: Mask, given: Sizes, offset: int | Tensor) -> dict[str, Claims]:
    """The sizes of ``"b"`` and ``"h"``; raises a LoweringError if one axis has several."""
    claims_of: dict[str, Claims] = {"b": [], "h": []}
    for axis, keyword in KEYWORDS:
        if given[axis] is not None:
            _claim(claims_of[axis], checked_size(given[axis], keyword), f"the query ({keyword}={given[axis]})")
    if isinstance(offset, Tensor) and offset.numel() > 1:
        _claim(claims_of["b"], offset.numel(), f"q_offset of shape {list(offset.shape)}")
    _add_claims(mask, claims_of)
    for axis, keyword in KEYWORDS:
        if len(claims_of[axis]) > 1:
            texts = [(size, data_owner(by, mask) if isinstance(by, Lookup) else by) for size, by in claims_of[axis]]
            claims = " and ".join(f"{size} by {text}" for size, text in texts)
            has_one = any(size == 1 for size, _ in claims_of[axis])
            hint = "; data that serves every sequence has no batch axis" if axis == "b" and has_one else ""
            raise LoweringError(f"the mask {mask.brief()} has two sizes of {keyword}: {claims}{hint}")
    return claims_of


def _claim(claims: Claims, size: int, by: Lookup | str) -> None:
    """Adds a size unless it is claimed already."""
    if not any(claimed == size for claimed, _ in claims):
        claims.append((size, by))


def _add_claims(mask: Mask, claims_of: dict[str, Claims]) -> None:
    """Adds the sizes of ``"b"`` and ``"h"`` by heads and data; data that may be longer fits every smaller size."""
    parts = parts_of(mask)
    for switch in parts.switches:
        _claim(claims_of["h"], len(switch.masks), f"per_head of {len(switch.masks)} masks")
    for lookup, place, axis in parts.axes:
        is_sized = axis in claims_of and isinstance(lookup.table, Table)
        size = cast(Table, lookup.table).shape_of(mask.held)[place] if is_sized else None
        if size is not None and not (may_be_longer(lookup) and any(claimed < size for claimed, _ in claims_of[axis])):
            _claim(claims_of[axis], size, lookup)


def _check_axis(mask: Mask, lookup: Lookup, name: str, size: int, needed: Sizes, *, moved: bool) -> None:
    length = needed[name]
    is_longer = may_be_longer(lookup)
    if name == "kv" and (size < cast(int, length) if is_longer else size != length):
        raise LoweringError(
            f"{data_owner(lookup, mask)} has {size} values along kv, but kv_len is {length}{lengths_hint(lookup, mask)}"
        )
    if name == "q" and not (moved or is_longer) and size not in (length, needed["kv"]):
        hint = "; give q_offset for later queries" if size > cast(int, length) else lengths_hint(lookup, mask)
        raise LoweringError(f"{data_owner(lookup, mask)} has {size} values along q, but q_len is {length}{hint}")
    if name == "q" and length is not None and size < length:
        raise LoweringError(
            f"{data_owner(lookup, mask)} has {size} values along q, but the queries reach position {length} (q_offset + q_len)"
        )


def data_owner(lookup: Lookup, mask: Mask) -> str:
    """What a user calls the data of a lookup of the form, for messages: the innermost named mask that has it, if there is one."""
    owner = _named_owner(lookup, mask)
    return filled(lookup if owner is None else owner, mask.held).brief()


def _named_owner(lookup: Lookup, mask: Mask) -> Named | None:
    for named in (mask if lookup.held else mask.form).walk():
        if isinstance(named, Named) and any(node.key == lookup.key for node in named.body.expand().walk()):
            return named
    return None


def lengths_hint(lookup: Lookup, mask: Mask) -> str:
    """For ids that may be meant as lengths of documents."""
    owner = _named_owner(lookup, mask)
    arguments = {} if owner is None else dict(owner.arguments)
    if arguments.get("ids") is not lookup.table or owner is None or "lengths" not in inspect.signature(owner.define).parameters:
        return ""
    return "; ids have a value for each token, the lengths of documents are lengths="
