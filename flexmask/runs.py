"""Runs: from values along the keys to the intervals of keys where a condition on them holds."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.rows import Rows

__all__ = ["matching_runs", "runs", "threshold"]


def runs(holds: Tensor, kv_len: int) -> Rows:
    """The keys where ``bool[B, H, kv_len]`` is True, the same in every row.

    The number of intervals depends on the values, so this waits for the device.
    """
    holds = holds.expand(*holds.shape[:2], kv_len)
    edges = torch.nn.functional.pad(holds, (1, 1)).to(torch.int8).diff()
    starts, stops = (_listed(edges == sign, kv_len) for sign in (1, -1))
    return Rows(starts, stops, kv_len)


def _listed(marked: Tensor, fill: int) -> Tensor:
    """The marked positions of each row in order, ``int32[B, H, 1, K]``, filled up with ``fill``."""
    count = marked.sum(-1)
    slots = max(1, int(count.max()))
    row, position = marked.flatten(0, 1).nonzero(as_tuple=True)
    first = (count.flatten().cumsum(0) - count.flatten())[row]
    found = torch.full((count.numel(), slots), fill, dtype=torch.int32, device=marked.device)
    found[row, torch.arange(row.numel(), device=row.device) - first] = position.to(torch.int32)
    return found.view(*count.shape, 1, slots)


def threshold(column: Tensor, value: Tensor, kv_len: int) -> Rows | None:
    """The keys with ``column[b, h, kv] <= value[b, h, q]``, or None where the column neither rises nor falls throughout.

    Whether it does depends on the values, so this waits for the device.
    """
    column = column.expand(*column.shape[:2], kv_len)
    step = column.diff()
    if bool((step >= 0).all()):
        return Rows.spans(torch.zeros_like(value), _search(column, value, right=True), kv_len)
    if bool((step <= 0).all()):
        return Rows.spans(_search(-column, -value, right=False), torch.full_like(value, kv_len), kv_len)
    return None


def _search(column: Tensor, value: Tensor, *, right: bool) -> Tensor:
    shape = torch.broadcast_shapes(column.shape[:2], value.shape[:2])
    column, value = column.expand(*shape, -1).contiguous(), value.expand(*shape, -1).contiguous()
    return torch.searchsorted(column, value.to(column.dtype), right=right)


def matching_runs(column: Tensor, value: Tensor, kv_len: int, most: int) -> Rows | None:
    """The keys with ``column[b, h, kv] == value[b, h, q]``, or None where some row needs more than ``most`` intervals.

    Values come in runs on both sides, so only one of each run is looked at. How many runs there are depends on the values,
    so this waits for the device.
    """
    starts, stops, held = _value_runs(column.expand(*column.shape[:2], kv_len))
    held, order = held.sort(dim=-1, stable=True)
    starts, stops = starts.gather(-1, order), stops.gather(-1, order)
    q_starts, q_stops, wanted = _value_runs(value)
    first, last = _search(held, wanted, right=False), _search(held, wanted, right=True)
    found = (last - first).masked_fill(q_starts >= q_stops, 0)  # runs that only fill a line up want nothing
    slots = max(1, int(found.max()))
    if slots > most:
        return None
    slot = torch.arange(slots, device=first.device)
    at, unused = first.unsqueeze(-1) + slot, slot >= found.unsqueeze(-1)
    at = at.clamp(max=held.shape[-1] - 1).flatten(2)
    lo, hi = (
        end.expand(*at.shape[:2], -1).gather(-1, at).view(unused.shape).masked_fill(unused, kv_len) for end in (starts, stops)
    )
    repeats = (q_stops - q_starts).expand(*at.shape[:2], -1).flatten()
    total = at.shape[0] * at.shape[1] * value.shape[2]
    lo, hi = (
        end.flatten(0, 2).repeat_interleave(repeats, 0, output_size=total).view(*at.shape[:2], -1, slots) for end in (lo, hi)
    )
    return Rows(lo, hi, kv_len)


def _value_runs(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The runs of equal values along ``[B, H, n]``: their starts, stops and values, ``[B, H, runs]``.

    Where a line has fewer runs than another it is filled up with empty runs of the greatest integer, which as a value of its
    own is not told from them; no length, id or position is that large.
    """
    n = values.shape[-1]
    changes = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[..., 1:], values[..., :-1], out=changes[..., 1:])
    starts = _listed(changes, n).squeeze(2)
    stops = torch.nn.functional.pad(starts[..., 1:], (0, 1), value=n)
    held = values.gather(-1, starts.clamp(max=n - 1).long())
    return starts, stops, held.masked_fill(starts == n, torch.iinfo(held.dtype).max)
