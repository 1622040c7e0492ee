"""Binds a mask to lengths: validates its data against them and makes the lowering context, with data as tensors.

Values of tensors in another device's memory are not read, which would force a host sync; their shapes are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._checks import check_plain, checked_int
from flexmask._transforms import are_ints, can_keep_tensors, is_captured, usable
from flexmask.errors import LoweringError
from flexmask.expr.form import NeedsDataError, filled
from flexmask.expr.index import Constant, Symbol
from flexmask.expr.mask import Mask
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Literal, Lookup, Param, Ranged, Slot, Table
from flexmask.intervals.checks import check_ranges, end_of_index
from flexmask.intervals.context import MAX_LENGTH, Context, Tables
from flexmask.intervals.documents import check_covers, document_stops, document_table
from flexmask.intervals.extent import values_extent
from flexmask.intervals.operations import greater
from flexmask.intervals.sizes import checked_size, checked_sizes, parts_of

#: How far the first query may be from the start, so that sums of positions are 64-bit integers still.
MAX_OFFSET = 2**60


def bind(
    mask: Any,
    q_len: int,
    kv_len: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str | None = None,
) -> Context:
    """The context in which a mask is lowered at some lengths and sizes, its data validated against them.

    Raises:
        LoweringError: an unbound parameter, or data that contradicts the lengths, the sizes, the device or other data.
        OperandError: a length that is not an integer.
    """
    check_bound(mask)
    if len(mask.form.slots) > len(mask.held):  # a function that makes a mask lowers an argument
        raise NeedsDataError("the values of data")
    mask.check_held()
    parts, form = parts_of(mask), mask.form.expand()
    q_len = checked_size(q_len, "q_len")
    kv_len = q_len if kv_len is None else checked_size(kv_len, "kv_len")
    for slot in parts.slots:
        if not slot.is_argument and 0 in mask.held[slot.number].shape:
            table = filled(slot, mask.held)
            raise LoweringError(f"{table} of the mask {mask.brief()} holds no values; attention takes it for an empty batch")
    where = _device(mask, device, q_offset)
    if "q_len" in form.symbols and not (isinstance(q_offset, int) and q_offset == 0):
        raise LoweringError(
            f"{mask.brief()} places the queries by q_len, so q_offset={q_offset} would move them twice; with q_offset "
            'use causal(align="upper_left"), and query_padding(start=...) for padding on the left'
        )
    offset, q_end = _offset(q_offset, q_len)
    needed = {"kv": kv_len, "q": q_end}
    sizes = checked_sizes(mask, {"b": batch, "h": heads}, offset, needed)
    counts = sizes["b"], sizes["b"] if batch is None else batch, sizes["h"]
    context = Context(form, q_len, kv_len, *counts, offset, q_end, where, source=mask)
    for lookup in parts.lookups:
        _add_table(lookup.table, context)
    for slot in parts.slots:
        if slot.is_argument:
            context.tables[slot.key] = _usable(slot, context)
    for ranged in parts.ranged:
        _check_range(ranged, context)
    check_ranges(parts.computed, context)
    for lookup in parts.lookups:
        _check_covers(lookup, context)
    return context


def check_bound(mask: Mask, caller: str = "") -> None:
    """Raises a LoweringError if a mask has unbound parameters, of which ``caller`` takes the values, if it has a name."""
    if mask.params:
        given = ", ".join(f"{name}=..." for name in mask.params)
        call = f", or in the call: {caller}(..., {given})" if caller else ""
        raise LoweringError(f"the mask {mask.brief()} has unbound parameters: give them with mask.bind({given}){call}")


def _device(mask: Mask, device: torch.device | str | None, q_offset: object) -> torch.device:
    found: dict[torch.device, Slot | None] = {}
    for slot in parts_of(mask).slots:
        if not slot.is_list:
            found.setdefault(mask.held[slot.number].tensor.device, slot)
    if isinstance(q_offset, Tensor):
        found.setdefault(q_offset.device, None)
    wanted = next(iter(found), torch.device("cpu")) if device is None else _sync.resolve_device(device)
    for where, strange in found.items():
        if where != wanted or (where.type == "meta" and device is None):
            text = "q_offset" if strange is None else f"the tensor {filled(strange, mask.held)} of the mask {mask.brief()}"
            unwanted = f", not on {wanted}" if where != wanted else ""
            raise LoweringError(f"{text} is on {where}{unwanted}; {_sync.move_remedy(where, wanted)}")
    return wanted


def _offset(q_offset: Any, q_len: int) -> tuple[int | Tensor, int | None]:
    """The offset, checked, and the position after the last query; None where reading it would force a host sync."""
    offset: int | Tensor
    if isinstance(q_offset, Tensor):
        check_plain(q_offset, "q_offset")
        q_offset = usable(q_offset, lambda: "q_offset")
        is_other = q_offset.is_floating_point() or q_offset.is_complex() or q_offset.dtype == torch.bool
        if is_other or q_offset.dim() > 1 or q_offset.numel() == 0:
            raise LoweringError(f"q_offset must be an int or an integer tensor [B], got {q_offset.dtype}{list(q_offset.shape)}")
        offset = given = cast(Tensor, q_offset).long().reshape(-1)
        _sync.require(lambda: given >= 0, given.device, "q_offset must be at least 0")
        if _sync.needs_sync(offset):
            return offset, None
        least, most = values_extent(offset)
        if least < 0:
            raise LoweringError(f"q_offset must be at least 0, got {q_offset.tolist()}")
    else:
        offset = most = checked_int(q_offset, "q_offset", 0, MAX_OFFSET, LoweringError, "an int or an integer tensor [B]")
    if q_len + most > MAX_LENGTH:
        raise LoweringError(f"the queries reach position {q_len + most} (q_offset + q_len), which must be at most {MAX_LENGTH}")
    return offset, q_len + most


def _usable(slot: Slot, context: Context) -> Tensor:
    tensor = usable(context.source.held[slot.number].tensor, lambda: f"the data of {context.source.brief()}")
    return tensor.to(context.device) if slot.is_list else tensor


def _tensor(table: Table | Param, context: Context) -> Tensor:
    """The data of a table on the context's device, checked."""
    match table:
        case Slot():
            tensor = _usable(table, context)
            return tensor if tensor.dtype == torch.bool else tensor.long()  # narrow integers would overflow
        case Literal():

            def made() -> Tensor:
                return table.to_tensor().to(context.device)

            return table.kept(str(context.device), made) if can_keep_tensors() else made()
        case Ranged(source):
            return _tensor(source, context)
        case DocumentTable():
            return _derived(table, context, document_table)
    raise AssertionError(f"not a table: {table!r}")


def _values(table: Table, context: Context) -> Tensor:
    """The user's tensor of a table, on its own device."""
    match table:
        case Slot(number):
            return context.source.held[number].tensor
        case Ranged(source):
            return _values(source, context)
    return table.to_tensor()


def _add_table(table: Table | Param, context: Context) -> None:
    """Adds the data of a lookup to a context; of documents given by lengths their stops, from which the other data follows."""
    lengths = table.source if isinstance(table, DocumentTable) and table.rule == "starts" else table
    if not (isinstance(lengths, DocumentTable) and lengths.rule in COVERING):
        context.tables[table.key] = _tensor(table, context)
        return
    if lengths.key not in context.stops:
        context.stops[lengths.key] = _derived(lengths, context, document_stops)
    context.stops[table.key] = context.stops[lengths.key]
    without_data = replace(context, tables=Tables(), stops={})  # so that no cycle keeps the data in memory
    context.tables.derived[table.key] = lambda: _tensor(table, without_data)


def _derived(table: DocumentTable, context: Context, derive: Callable[..., Tensor]) -> Tensor:
    """What is computed from the source of a table of documents; kept where that never changes."""
    positions = greater(context.kv_len, context.q_end or 0)

    def derived() -> Tensor:
        return derive(table.rule, _tensor(table.source, context), positions, may_be_longer=table.may_be_longer)

    if not (table.constant and can_keep_tensors()):
        return derived()
    place, made = table.memo.get(derive.__name__, (None, None))
    if place != (positions, context.device):
        made = derived()
        table.memo[derive.__name__] = (positions, context.device), made
    return cast(Tensor, made)


def _check_covers(lookup: Lookup, context: Context) -> None:
    """Checks that documents given by lengths cover the positions that are looked up."""
    match lookup.table:
        case DocumentTable(rule, Table() as source, padding=False) as table if rule in COVERING:
            growing = table.may_be_longer  # with the tokens of each sequence
            needed = context.q_offset + context.q_len if growing else end_of_index(lookup.indices[-1], context)
            if needed is None or (are_ints(needed) and needed <= table.memo.get("covered", 0)):
                return
            check_covers(rule, _values(source, context), needed)
            if source.constant and are_ints(needed):
                table.memo["covered"] = needed


def _check_range(ranged: Ranged, context: Context) -> None:
    values, limit = _tensor(ranged.source, context), _limit(ranged, context)
    if _sync.needs_sync(values):
        if is_captured():
            _sync.require(lambda: values >= ranged.low, values.device, _least_wanted(ranged))
            if limit is not None:
                _sync.require(lambda: values <= limit, values.device, _most_wanted(ranged, limit))
        return
    constant = ranged.source.constant
    least, most = ranged.kept("extent", lambda: values_extent(values)) if constant else values_extent(values)
    if least < ranged.low:
        raise LoweringError(f"{_least_wanted(ranged)}, got {least}")
    if limit is not None and most > limit:
        raise LoweringError(f"{_most_wanted(ranged, limit)}, got {most}{_square_hint(ranged, context)}")


def _least_wanted(ranged: Ranged) -> str:
    return f"{ranged.what} must be at least {ranged.low}"


def _most_wanted(ranged: Ranged, limit: int) -> str:
    return f"{ranged.what} must be at most {limit if isinstance(ranged.high, Constant) else f'{ranged.high} = {limit}'}"


def _square_hint(ranged: Ranged, context: Context) -> str:
    """The hint where a number of keys is too great for a kv_len that may be q_len as none was given."""
    if context.q_len != context.kv_len or ranged.high is None or ranged.high.symbols != {"kv_len"}:
        return ""
    return (
        "; it is the number of keys: q_len unless kv_len= is given, in attention that of key, in a module that of x or context="
    )


def _limit(ranged: Ranged, context: Context) -> Any:
    """The greatest value that a table may have, or None where there is no limit."""
    if ranged.high is None:
        return None
    if "q_len" in ranged.high.symbols and (isinstance(context.q_offset, Tensor) or context.q_offset):
        return None  # the queries are a part of a sequence whose length nothing says
    match context.with_lengths(ranged.high):
        case Constant(value):
            return value
        case Symbol("q_len" | "kv_len" as name):  # in a graph for all lengths
            return getattr(context, name)
    return None  # a mask on blocks of a size that is not one number
