"""The steps that a score is made of: biases by the distance of query and key, biases by their positions, and soft-capping.

A step is an immutable value. Numbers in lists are kept by value, tensors are kept as they are and compare by identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from flexmask._checks import check_plain, kind_of
from flexmask._transforms import number_text
from flexmask.errors import LoweringError, OperandError

#: A table of numbers: a tensor, or nested tuples.
Table: TypeAlias = Tensor | tuple[object, ...]
#: The bias of a head by the distance ``kv - q``, both tensors that broadcast.
ByDistance: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """See :func:`flexmask.scores.alibi`."""

    table: Table | None

    def text(self) -> str:
        return "alibi()" if self.table is None else f"alibi(slopes={table_text(self.table)})"

    def by_distance(self, heads: int | None, device: torch.device | None) -> ByDistance:
        """The bias of heads by the distance. The default slopes are computed, so that there is no tensor to move."""
        if self.table is not None:
            slopes = on_device(self.table, device)
            check_heads("alibi", f"{slopes.size(0)} slopes", slopes.size(0), heads)
            return lambda h, distance: -slopes[h] * distance.abs()
        if heads is None:
            raise LoweringError("alibi() takes its slopes from the number of heads: give heads=, or alibi(slopes=...)")
        number = number_text(heads)

        def bias(h: Tensor, distance: Tensor) -> Tensor:
            total = int(number)
            fewer = 1 << (total.bit_length() - 1)  # the slopes of so many heads, then every other one of those of twice as many
            exponent = (h + 1) * (8 / fewer)
            if total > fewer:
                exponent = torch.where(h < fewer, exponent, (2 * (h - fewer) + 1) * (4 / fewer))
            return -torch.exp2(-exponent) * distance.abs()

        return bias


@dataclass(frozen=True, slots=True, eq=False)
class Relative:
    """See :func:`flexmask.scores.relative_bias`."""

    table: Table
    max_distance: int
    bidirectional: bool

    def text(self) -> str:
        options = "" if self.max_distance == 128 else f", max_distance={self.max_distance}"
        options += "" if self.bidirectional else ", bidirectional=False"
        return f"relative_bias({table_text(self.table)}{options})"

    def by_distance(self, heads: int | None, device: torch.device | None) -> ByDistance:
        """The bias of heads by the distance, from a table of all distances up to the greatest, which kernels look up."""
        table, number = on_device(self.table, device), number_text(self.max_distance)
        most = int(number)  # not that of self, which may be a variable of the graph
        check_heads("relative_bias", f"a table of {table.size(1)} heads", table.size(1), heads)
        distances = torch.arange(-most, most + 1, device=table.device)
        values = table[t5_buckets(distances, table.size(0), most, bidirectional=self.bidirectional)]
        return lambda h, distance: values[distance.clamp(-int(number), int(number)) + int(number), h]


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """See :func:`flexmask.scores.bias`."""

    table: Table

    def text(self) -> str:
        return f"bias({table_text(self.table)})"

    def on(self, heads: int | None, device: torch.device | None) -> Tensor:
        """The table, ``[B or 1, H or 1, q, kv]``."""
        found = on_device(self.table, device)
        found = found[(None,) * (4 - found.dim())]
        if found.size(1) > 1:
            check_heads("bias", f"a table of {found.size(1)} heads", found.size(1), heads)
        return found


def check_cells(table: Tensor, sizes: Sequence[int], rows: int | Tensor, columns: int | Tensor) -> None:
    """Raises a LoweringError where a table has no value for a cell; of positions that are tensors, torch raises."""
    batch, heads, q_len, kv_len = sizes
    needed = [at + size if isinstance(at, int) else size for at, size in ((rows, q_len), (columns, kv_len))]
    if table.size(0) not in (1, batch) or table.size(2) < needed[0] or table.size(3) < needed[1]:
        raise LoweringError(
            f"bias has a table {list(table.shape)}, and positions are up to {needed[0]} queries and {needed[1]} keys in "
            f"{batch} sequences; wanted [1 or {batch}, 1 or {heads}, {needed[0]}, {needed[1]}] or more"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Softcap:
    """See :func:`flexmask.scores.softcap`."""

    cap: float
    table: ClassVar[None] = None

    def text(self) -> str:
        return f"softcap({self.cap})"


Step: TypeAlias = Alibi | Relative | Bias | Softcap


def t5_buckets(distance: Tensor, buckets: int, max_distance: int, *, bidirectional: bool) -> Tensor:
    """The bucket of each distance ``kv - q``, as T5 has them: ``int64`` from 0 to ``buckets - 1``.

    Half of the buckets of a direction are for one distance each, the others for ranges that grow, up to ``max_distance``.
    Computed as in transformers, in float32, for the same buckets as those of its checkpoints.
    """
    first = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first, distance = (distance > 0) * buckets, distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


# ---------------------------------------------------------------- tables


def checked_table(values: object, what: str, axes: tuple[str, ...]) -> Table:
    """A table that a user gives: a tensor, or a list of numbers, of any library, as nested tuples.

    Args:
        values: what was given.
        what: its name, for messages.
        axes: the shapes that it may have, each as text, such as ``"[H]"``.

    Raises:
        OperandError: it is no tensor of floating-point numbers, nor numbers, or has another number of axes.
    """
    found = values
    if not isinstance(values, Tensor):
        try:
            are_truth = torch.as_tensor(values, device="cpu").dtype == torch.bool
            found = None if are_truth else torch.as_tensor(values, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            found = None
    wanted = f"{what} must be numbers {' or '.join(axes)}, as a floating-point tensor or a list, got {kind_of(values)}"
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise OperandError(wanted)
    check_plain(found, what)
    if found.dim() not in {text.count(",") + 1 for text in axes} or not found.numel():
        raise OperandError(wanted)
    if isinstance(values, Tensor):
        return values
    if not bool(found.isfinite().all()):
        raise OperandError(f"{what} must be finite numbers; hide keys by a mask")
    return _tuples(found.tolist())


def _tuples(values: list[object]) -> tuple[object, ...]:
    return tuple(_tuples(value) if isinstance(value, list) else value for value in values)


def table_text(table: Table) -> str:
    """The values of a table, of a tensor its dtype and shape."""
    if isinstance(table, Tensor):
        return f"<{str(table.dtype).removeprefix('torch.')}{list(table.shape)}>"
    return f"[{', '.join(table_text(value) if isinstance(value, tuple) else str(value) for value in table)}]"


def on_device(table: Table, device: torch.device | None) -> Tensor:
    """A table as a tensor on a device, in float32 where it is a list.

    Raises:
        LoweringError: it is a tensor on another device.
    """
    if not isinstance(table, Tensor):
        return torch.tensor(table, dtype=torch.float32, device=device)
    if device is not None and table.device != device:
        raise LoweringError(
            f"a score holds {kind_of(table)} on {table.device}, and the query is on {device}; make the score from the tensor on "
            f"that device: tensor.to({str(device)!r})"
        )
    return table


def check_heads(name: str, what: str, given: int, heads: int | None) -> None:
    """Raises a LoweringError unless a score is for the heads of a call."""
    if heads is not None and given != heads:
        raise LoweringError(f"{name} has {what}, and there are {heads} query heads; give one for each")
