"""Comparisons of a mask with a reference: ``assert_equivalent``, its findings, and ``assert_subset``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexmask.intervals.bind import bind
from flexmask.lowering.dense import cell_evaluator
from flexmask.testing.backends import check_backends, own_backends
from flexmask.testing.findings import Finding, part_around, picture_part
from flexmask.testing.lowerings import check_lowerings
from flexmask.testing.settings import Reference, Setting, make_setting, reference_cells
from flexmask.tracing.as_mask import MaskLike, as_mask


def assert_equivalent(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    reference: Reference | None = None,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 8,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    tolerance: float | None = None,
) -> None:
    """Asserts that all lowerings of a mask have the cells of a reference, and that attention is correct under them.

    Compares ``dense``, ``rows``, ``mask_mod`` in both forms, ``block_mask`` (its lists with those of torch's
    ``create_block_mask``, and the cells rebuilt from them) and ``stats`` with the reference, and outputs and gradients of
    :func:`flexmask.attention` with dense masked softmax in float64.

    Without a reference, compares the lowerings with the mask's expression form. That finds wrong lowerings, but not a mask
    that differs from the author's intention: only a reference does.

    Args:
        mask: the mask, its text, or a ``mask_mod``. Its tensors are moved to the device.
        q_len: queries. This and the following arguments are those of every lowering.
        kv_len: keys, by default as many as queries.
        reference: the expected mask: a mask or its text; a function ``(b, h, q_idx, kv_idx) -> bool``, called as
            FlexAttention calls a ``mask_mod``, with queries that count from 0 and captured tensors on the device; or
            ``bool[q_len, kv_len]``, ``bool[B, q_len, kv_len]`` or ``bool[B, H, q_len, kv_len]``.
        batch: sequences, by default those of the mask or the reference.
        heads: heads, by default those of the mask or the reference.
        q_offset: position of the first query.
        device: the device of the check.
        block_size: tokens in a block of the BlockMask, or the pair (queries, keys).
        backends: names of backends of attention; ``()`` for none. By default those that have gradients on the device:
            ``("sdpa", "flex")`` on CUDA and ``("sdpa",)`` elsewhere, and other registered backends that have gradients.
            On the CPU ``"flex"`` has no gradients, and compiles for some seconds for each new shape.
        dtypes: of query, key and value. FlexAttention is skipped for float64, which it does not support.
        tolerance: the greatest error of outputs and gradients against float64, relative to 1 plus the size of the number; the
            default depends on the dtype and device.

    Raises:
        AssertionError: something differs; the message says what and how much, with a picture of the place.
        LoweringError: the mask cannot be lowered with these arguments, or has more than 2**22 cells.
        OperandError: ``mask`` or ``reference`` is of a wrong type, or does not fit.
    """
    __tracebackhide__ = True
    setting = make_setting(mask, q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=device, reference=reference)
    findings = agreement(setting, reference, block_size, backends, dtypes, tolerance)
    wrong = [finding for finding in findings if finding.wrong]
    if wrong:
        against = "its own expression" if reference is None else "the reference"
        others = f"\nalso wrong: {', '.join(finding.name for finding in wrong[1:])}" if len(wrong) > 1 else ""
        picture = f"\n\n{wrong[0].picture}" if wrong[0].picture else ""
        raise AssertionError(f"{setting.mask.brief()}\n{wrong[0].name}, against {against}: {wrong[0].text}{others}{picture}")


def agreement(
    setting: Setting,
    reference: Reference | None = None,
    block_size: int | tuple[int, int] = 8,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    tolerance: float | None = None,
) -> Iterator[Finding]:
    """The findings of :func:`assert_equivalent`, one for each check; the other arguments are the same."""
    if reference is None:
        wanted = setting.mask.dense(**setting.lowering).expand(setting.shape)
    else:
        wanted = reference_cells(reference, setting)
    yield from check_lowerings(setting, wanted, block_size)
    yield from check_backends(setting, wanted, own_backends(setting) if backends is None else backends, dtypes, tolerance)


def assert_subset(
    mask: MaskLike,
    other: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str | None = None,
) -> None:
    """Asserts that all visible cells of a mask are visible in another one, at any length: see :meth:`flexmask.Mask.difference`.

    Args:
        mask: the mask with fewer visible cells, its text, or a ``mask_mod``.
        other: the mask with more visible cells, in one of these forms.
        q_len: queries. This and the following arguments are those of every lowering.
        kv_len: keys, by default as many as queries.
        batch: sequences.
        heads: heads.
        q_offset: position of the first query.
        device: the device of the check.

    Raises:
        AssertionError: a cell is visible only in ``mask``; the message has their number, the first, and a picture around it.
        LoweringError: one of them cannot be lowered at these lengths.
    """
    __tracebackhide__ = True
    mask, other = as_mask(mask, device=device), as_mask(other, "other", device=device)
    found = mask.difference(other, q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=device)
    if found.first_self is None:
        return
    b, h, q, kv = found.first_self
    rows, columns = part_around((q, kv), (q_len, kv_len or q_len))
    shown = []
    for part in (mask, other):
        context = bind(part, q_len, kv_len, batch, heads, q_offset, device)
        cells = cell_evaluator(context)(rows.start, rows.stop, columns.start, columns.stop)
        shown.append(cells[min(b, context.batch - 1), min(h, context.heads - 1)].cpu())
    marks = torch.where(shown[0] & ~shown[1], 2, shown[0].int())
    picture = picture_part(
        marks, (rows.start, columns.start), ".#+", "# shown by both   . hidden by the first   + shown by it alone"
    )
    raise AssertionError(
        f"{mask.brief()}\nshows {found.only_self:,} of {found.cells:,} cells that are hidden in\n{other.brief()}\n"
        f"the first at {found.first_self}\n\n{picture}"
    )
