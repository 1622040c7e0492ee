"""The setting of a check: a mask with its lengths, sizes and device; the cells of a reference; and the findings of checks.

A finding is a line of text, and a small ASCII picture if cells differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from flexmask import _sync
from flexmask._checks import check_plain, not_plain_reason
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import Mask
from flexmask.expr.names import call_hint, describe_non_mask
from flexmask.intervals.bind import bind
from flexmask.lowering.mask_mod import MaskMod
from flexmask.tracing.trace import MaskLike, as_mask

Reference: TypeAlias = MaskLike | Tensor

#: The most cells of a check over all sequences and heads: their scores in float64 take 32 MiB.
MAX_CELLS = 2**22


@dataclass(frozen=True, eq=False)
class Setting:
    """A mask with the arguments of its lowerings.

    Attributes:
        mask: the mask, its tensors on the device.
        q_len: queries.
        kv_len: keys.
        batch: sequences.
        heads: heads.
        q_offset: position of the first query.
        device: the device of all tensors.
        reference: the expected mask in one of its forms, with the tensors of a mask on the device; the mask itself where none is
            given.
    """

    mask: Mask
    q_len: int
    kv_len: int
    batch: int
    heads: int
    q_offset: int | Tensor
    device: torch.device
    reference: Reference

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``[B, H, q_len, kv_len]``."""
        return self.batch, self.heads, self.q_len, self.kv_len

    @property
    def lowering(self) -> dict[str, Any]:
        """The arguments of a lowering."""
        return {name: getattr(self, name) for name in ("q_len", "kv_len", "batch", "heads", "q_offset", "device")}

    def cells(self, mask_mod: MaskMod) -> Tensor:
        """The cells of a ``mask_mod``, called with single indices as FlexAttention does."""
        return create_mask(mask_mod, *self.shape, device=str(self.device))


def check_size(shape: tuple[int, ...], remedy: str) -> None:
    """Checks that a table is small enough to be compared cell by cell.

    Raises:
        LoweringError: it has more than ``MAX_CELLS`` cells.
    """
    cells = torch.Size(shape).numel()
    if cells > MAX_CELLS:
        raise LoweringError(f"{list(shape)} are {cells:,} cells; at most {MAX_CELLS:,} are checked one by one: {remedy}")


def make_setting(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str = "cpu",
    reference: Reference | None = None,
) -> Setting:
    """The setting of a check, with the sequences and heads of the mask, the reference or the offset.

    Raises:
        LoweringError: the mask cannot be lowered with these arguments, or has too many cells.
        OperandError: ``mask`` or ``reference`` is of a wrong type.
    """
    where = _sync.resolve_device(device)
    _sync.check_values(where, "outputs are compared")
    mask = as_mask(mask, device=where).to(where)
    if isinstance(q_offset, Tensor):
        if q_offset.is_meta or not_plain_reason(q_offset):
            raise OperandError("q_offset must be an int or a plain tensor with values, on a device that has memory")
        q_offset = q_offset.to(where)
    context = bind(mask, q_len, kv_len, batch, heads, q_offset, where)
    said = [(context.full_batch, context.heads if heads is None else heads)]
    if isinstance(q_offset, Tensor):
        said.append((q_offset.numel(), 1))
    if isinstance(reference, Mask | str):
        reference = as_mask(reference, device=where).to(where)
        its = bind(reference, q_len, kv_len, batch, heads, q_offset, where)
        said.append((its.full_batch, its.heads))
    elif isinstance(reference, Tensor):
        reference = _as_4d(reference).to(where)
        said.append((reference.shape[0], reference.shape[1]))
    sequences, number = (max(sizes) for sizes in zip(*said, strict=True))
    wanted = mask if reference is None else reference
    setting = Setting(mask, q_len, context.kv_len, sequences, number, q_offset, context.device, wanted)
    check_size(setting.shape, "check shorter sequences, or compare two masks with mask.difference(other, q_len)")
    return setting


def reference_cells(setting: Setting) -> Tensor:
    """The cells of the reference, ``bool[B, H, q_len, kv_len]``.

    Raises:
        OperandError: it is neither a mask, a function nor a boolean tensor that fits, or the function cannot be called.
    """
    reference = setting.reference
    if isinstance(reference, Mask):
        return reference.dense(**setting.lowering).expand(setting.shape)
    if isinstance(reference, Tensor):
        groups = zip(reference.shape[:2], setting.shape[:2], strict=True)
        if reference.shape[2:] != setting.shape[2:] or any(size not in (1, wanted) for size, wanted in groups):
            raise OperandError(
                f"the reference is for {list(reference.shape)}, the mask for {list(setting.shape)} (B, H, q_len, kv_len)"
            )
        return reference.expand(setting.shape)
    if call_hint(reference) or not callable(reference):
        wanted = "a Mask, its text, a mask_mod or a boolean tensor"
        raise OperandError(f"reference must be {wanted}, got {describe_non_mask(reference)}")
    try:
        found = setting.cells(reference)
    except Exception as error:  # a user's function may raise anything
        name = getattr(reference, "__name__", type(reference).__name__)
        raise OperandError(
            f"the reference {name} cannot be called as FlexAttention calls a mask_mod(b, h, q_idx, kv_idx): "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return found.to(torch.bool)


def _as_4d(reference: Tensor) -> Tensor:
    """A table of 2, 3 or 4 axes as ``bool[B, H, q_len, kv_len]``."""
    check_plain(reference, "a reference")
    if reference.dtype != torch.bool or not 2 <= reference.dim() <= 4:
        raise OperandError(
            "a reference tensor must be bool[q_len, kv_len], bool[B, q_len, kv_len] or bool[B, H, q_len, kv_len], "
            f"got {reference.dtype}{list(reference.shape)}"
        )
    return reference.unsqueeze(-3) if reference.dim() == 3 else reference.view(*[1] * (4 - reference.dim()), *reference.shape)


#: The most rows and columns of a picture.
HEIGHT, WIDTH = 16, 24
CORNER = "q\\kv"
#: The signs of cells: hidden in both, visible in both, missing, extra.
SIGNS = ".#-+"
LEGEND = "# visible   . hidden   - missing   + extra"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        wrong: whether the check failed.
        text: the result in statistics.
        picture: the cells around the first difference, as lines; empty if there is nothing to draw.
    """

    name: str
    wrong: bool
    text: str
    picture: str = ""


def compare_cells(name: str, found: Tensor, wanted: Tensor, unit: str = "cells") -> Finding:
    """Compares cells with the expected ones.

    Args:
        name: what was checked.
        found: ``bool[B, H, rows, columns]``.
        wanted: the expected cells, of the same shape.
        unit: the name of an entry, ``"cells"`` or ``"blocks"``.
    """
    missing, extra = wanted & ~found, found & ~wanted
    wrong = missing | extra
    count = int(wrong.sum())
    if not count:
        return Finding(name, False, f"0 of {wrong.numel():,} {unit} differ")
    b, h, row, column = wrong.nonzero()[0].tolist()
    first = f"the first at b={b}, h={h}, q={row}, kv={column}"
    if unit != "cells":
        first = f"the first at b={b}, h={h} in row {row}, column {column} of the blocks"
    text = f"{count:,} of {wrong.numel():,} {unit} differ ({int(missing.sum()):,} missing, {int(extra.sum()):,} extra), {first}"
    marks = found[b, h] + 2 * wrong[b, h]  # 3 for extra cells
    sizes = marks.shape[0], marks.shape[1]
    picture = picture_around((row, column), sizes, lambda rows, columns: marks[rows, columns], SIGNS, LEGEND)
    return Finding(name, True, text, picture)


def picture_around(
    at: tuple[int, int], sizes: tuple[int, int], marks: Callable[[slice, slice], Tensor], signs: str, legend: str
) -> str:
    """A picture of the part of a table around one place.

    Args:
        at: row and column of the place.
        sizes: rows and columns of the table.
        marks: from a range of rows and one of columns to the index of the sign of each cell there, ``int[rows, columns]``.
        signs: the signs.
        legend: their meanings.
    """
    rows, columns = (
        slice(start := max(0, min(place - most // 2, size - most)), min(start + most, size))
        for place, size, most in zip(at, sizes, (HEIGHT, WIDTH), strict=True)
    )
    top, left, cells = rows.start, columns.start, marks(rows, columns).tolist()
    margin = max(len(CORNER), len(str(top + len(cells) - 1)))
    step = (len(str(left + len(cells[0]) - 1)) + 2) // 2
    ruler = "".join(f"{left + column:<{2 * step}}" for column in range(0, len(cells[0]), step))
    lines = [f"{CORNER:>{margin}} {ruler.rstrip()}"]
    lines += [f"{top + row:>{margin}} {' '.join(signs[mark] for mark in line)}" for row, line in enumerate(cells)]
    shown = zip(("rows", "columns"), (rows, columns), sizes, strict=True)
    cut = [f"{name} {part.start} to {part.stop - 1} of {size:,}" for name, part, size in shown if part.stop - part.start < size]
    return "\n".join([*lines, "", legend, *([", ".join(cut)] if cut else [])])
