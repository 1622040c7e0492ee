"""Comparisons of a mask with a reference: ``assert_equivalent``, with its findings, and ``assert_subset``.

Every lowering is compared with the expected cells, and attention on each backend with dense masked softmax in float64: outputs,
and gradients where the backend has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexmask._checks import checked_number, kind_of
from flexmask.backends.api import attention
from flexmask.backends.backend import Backend, Call, get_backend, ordered_backends
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.intervals.bind import bind
from flexmask.lowering.block_mask import block_sizes
from flexmask.lowering.dense import cell_evaluator
from flexmask.lowering.mask_mod import Form, has_interval_form
from flexmask.testing.settings import Finding, Reference, Setting, compare_cells, make_setting, picture_around, reference_cells
from flexmask.tracing.trace import MaskLike, as_mask

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]

#: The greatest error of a number x against its value v, |x - v| / (1 + |v|).
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
#: GPUs may multiply float32 with fewer bits.
GPU_TOLERANCE = 1e-2
#: Channels of a head. FlexAttention on CUDA takes no fewer.
WIDTH = 16


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
        dtypes: of query, key and value; ``()`` for no attention. Those that a backend does not support are left out, such as
            float64 for ``"flex"``; one that supports none of them is checked in bfloat16.
        tolerance: the greatest error of outputs and gradients against float64, relative to 1 plus the size of the number; the
            default depends on the dtype and device.

    Raises:
        AssertionError: something differs; the message says what and how much, with a picture of the place.
        LoweringError: the mask cannot be lowered with these arguments, or has more than 2**22 cells, or one of ``backends`` does
            not support its calls.
        OperandError: ``mask`` or ``reference`` is of a wrong type, or does not fit.
    """
    __tracebackhide__ = True
    setting = make_setting(mask, q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=device, reference=reference)
    findings = agreement(setting, block_size, backends, dtypes, tolerance)
    wrong = [finding for finding in findings if finding.wrong]
    if wrong:
        against = "its own expression" if reference is None else "the reference"
        others = f"\nalso wrong: {', '.join(finding.name for finding in wrong[1:])}" if len(wrong) > 1 else ""
        picture = f"\n\n{wrong[0].picture}" if wrong[0].picture else ""
        raise AssertionError(f"{setting.mask.brief()}\n{wrong[0].name}, against {against}: {wrong[0].text}{others}{picture}")


def agreement(
    setting: Setting,
    block_size: int | tuple[int, int] = 8,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    tolerance: float | None = None,
) -> Iterator[Finding]:
    """The findings of :func:`assert_equivalent`, one for each check; the other arguments are the same.

    Raises:
        ExpressionError: a backend that is not registered, or a dtype without a tolerance.
        OperandError: what is no list of them, or a tolerance that is no number; or the reference, as :func:`reference_cells`.
        LoweringError: a backend that supports none of the dtypes, nor bfloat16.
    """
    names = own_backends(setting) if backends is None else backends
    for argument, given, example in (("backends", names, '["sdpa"]'), ("dtypes", dtypes, "[torch.float32]")):
        if not isinstance(given, list | tuple):
            raise OperandError(f"{argument} must be a list, e.g. {argument}={example}, got {kind_of(given)}")
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype) or dtype not in TOLERANCE:
            raise ExpressionError(f"dtypes are {', '.join(map(str, TOLERANCE))}, got {dtype}")
    if tolerance is not None:
        checked_number(tolerance, "tolerance")
    chosen = [get_backend(name) for name in names]
    wanted = reference_cells(setting)
    yield from check_lowerings(setting, wanted, block_size)
    for backend in chosen:
        supported = [dtype for dtype in dtypes if backend.reason_against(_example(setting, dtype)) is None]
        for dtype in supported or ([torch.bfloat16] if dtypes else []):
            yield from _check(setting, wanted, backend, dtype, tolerance)


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

    def marks(rows: slice, columns: slice) -> Tensor:
        shown = []
        for part in (mask, other):
            context = bind(part, q_len, kv_len, batch, heads, q_offset, device)
            cells = cell_evaluator(context)(rows.start, rows.stop, columns.start, columns.stop)
            shown.append(cells[min(b, context.batch - 1), min(h, context.heads - 1)].cpu())
        return torch.where(shown[0] & ~shown[1], 2, shown[0].int())

    legend = "# shown by both   . hidden by the first   + shown by it alone"
    picture = picture_around((q, kv), (q_len, kv_len or q_len), marks, ".#+", legend)
    raise AssertionError(
        f"{mask.brief()}\nshows {found.only_self:,} of {found.cells:,} cells that are hidden in\n{other.brief()}\n"
        f"the first at {found.first_self}\n\n{picture}"
    )


def check_lowerings(setting: Setting, wanted: Tensor, block_size: int | tuple[int, int]) -> Iterator[Finding]:
    """Checks dense, rows, mask_mod in both forms, BlockMask and stats.

    Args:
        setting: the mask with its lengths and device.
        wanted: the expected cells, ``bool[B, H, q_len, kv_len]``.
        block_size: tokens in a block, or the pair (queries, keys).
    """
    mask, lowering = setting.mask, setting.lowering
    yield compare_cells("dense", mask.dense(**lowering).expand(setting.shape), wanted)
    bounds, keys = mask.rows(**lowering), torch.arange(setting.kv_len, device=setting.device)
    lower, upper = (rows.holds(keys).expand(setting.shape) for rows in (bounds.lower, bounds.upper))
    yield compare_cells("rows" if bounds.exact else "rows (bounds)", lower | (wanted & upper), wanted)
    forms: list[Form] = ["expression", "interval"] if has_interval_form(bounds) else ["expression"]
    for form in forms:
        yield compare_cells(f"mask_mod ({form})", setting.cells(mask.mask_mod(**lowering, form=form)), wanted)
    yield from _block_mask(mask.block_mask(**lowering, block_size=block_size), setting, wanted)
    yield _stats(setting, wanted, block_size)


def _block_mask(found: BlockMask, setting: Setting, wanted: Tensor) -> Iterator[Finding]:
    """Compares the lists of a BlockMask with those of torch, and the cells that a kernel computes from them."""
    theirs = create_block_mask(
        lambda b, h, q_idx, kv_idx: wanted[b, h, q_idx, kv_idx], *setting.shape, str(setting.device), found.BLOCK_SIZE
    )
    q_size, kv_size = found.BLOCK_SIZE
    seen = setting.cells(found.mask_mod)
    for along, what in (("kv", "forward"), ("q", "backward")):
        grids = []
        for kind in (along, f"full_{along}"):
            grid, named_twice = _grid(found, kind, setting)
            yield compare_cells(f"BlockMask ({kind}_indices)", grid ^ named_twice, _grid(theirs, kind, setting)[0], "blocks")
            grids.append(grid if along == "kv" else grid.transpose(2, 3))
        partial, full = (
            grid.repeat_interleave(q_size, 2).repeat_interleave(kv_size, 3)[:, :, : setting.q_len, : setting.kv_len]
            for grid in grids
        )
        yield compare_cells(f"BlockMask ({what} cells)", full | (partial & seen), wanted)


def _grid(block_mask: BlockMask, kind: str, setting: Setting) -> tuple[Tensor, Tensor]:
    """The blocks in a list of a BlockMask, and those listed more than once; ``bool[B, H, rows, columns]``."""
    counts, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
    width = indices.shape[-1]
    used = torch.arange(width, device=indices.device) < counts.unsqueeze(-1)
    times = torch.zeros(used.shape, dtype=torch.int32, device=indices.device)
    times.scatter_add_(-1, indices.where(used, 0).long(), used.to(torch.int32))
    shape = (setting.batch, setting.heads, *times.shape[2:])
    return (times > 0).expand(shape), (times > 1).expand(shape)


def _stats(setting: Setting, wanted: Tensor, block_size: int | tuple[int, int]) -> Finding:
    found = setting.mask.stats(**setting.lowering, block_size=block_size)
    cells = wanted[: found.batch, : found.heads]
    q_size, kv_size = block_sizes(block_size)
    padded = torch.nn.functional.pad(cells, (0, -setting.kv_len % kv_size, 0, -setting.q_len % q_size))
    visible = padded.unflatten(3, (-1, kv_size)).unflatten(2, (-1, q_size)).sum((3, 5))
    full = int((visible == q_size * kv_size).sum())
    statistics = {
        "visible": int(cells.sum()),
        "fully_masked_rows": int((~cells.any(-1)).sum()),
        "partial_blocks": int((visible > 0).sum()) - full,
        "full_blocks": full,
        "empty_blocks": int((visible == 0).sum()),
    }
    wrong = [f"{key} {own:,}, not {value:,}" for key, value in statistics.items() if (own := getattr(found, key)) != value]
    return Finding("stats", bool(wrong), ", ".join(wrong) or f"{len(statistics)} statistics agree")


def own_backends(setting: Setting) -> tuple[str, ...]:
    """The registered backends that have gradients in a setting."""
    with torch.enable_grad():
        call = _example(setting, torch.float32)
        call.query.requires_grad_()
        return tuple(backend.name for backend in ordered_backends(call) if backend.reason_against(call) is None)


def _example(setting: Setting, dtype: torch.dtype) -> Call:
    batch, heads, q_len, kv_len = setting.shape
    query, key = (torch.empty(batch, heads, length, WIDTH, device=setting.device, dtype=dtype) for length in (q_len, kv_len))
    return Call(query, key, key, setting.mask, q_offset=setting.q_offset)


def _check(setting: Setting, visible: Tensor, backend: Backend, dtype: torch.dtype, tolerance: float | None) -> Iterator[Finding]:
    """Checks :func:`flexmask.attention` with a backend: outputs, and gradients where it has them.

    Args:
        setting: the mask with its lengths and device.
        visible: the expected cells, ``bool[B, H, q_len, kv_len]``.
        backend: the backend.
        dtype: of query, key and value.
        tolerance: the greatest error of a number, relative to 1 plus its size; the default depends on the dtype.
    """
    least = 0 if setting.device.type == "cpu" else GPU_TOLERANCE
    most = max(least, TOLERANCE[dtype]) if tolerance is None else tolerance
    draw = torch.Generator().manual_seed(0)
    batch, heads, q_len, kv_len = setting.shape
    lengths = (q_len, kv_len, kv_len)
    precise = [torch.randn(batch, heads, length, WIDTH, generator=draw, dtype=torch.float64, device="cpu") for length in lengths]
    given = [tensor.to(dtype) for tensor in precise]
    inputs = cast(Inputs, tuple(tensor.to(setting.device).requires_grad_() for tensor in given))
    copies = cast(Inputs, tuple(tensor.double().requires_grad_() for tensor in given))
    seen = visible.cpu()
    call = Call(*inputs, setting.mask, q_offset=setting.q_offset)
    with torch.enable_grad():
        has_gradients = backend.reason_against(call) is None
    with torch.set_grad_enabled(has_gradients):
        if reason := backend.reason_against(call):
            raise LoweringError(f"the backend {backend.name!r} cannot be checked here: {reason}")
        out = attention(*inputs, setting.mask, q_offset=setting.q_offset, backend=backend.name)
    wanted = _softmax(copies, seen)
    name = f"{backend.name} {str(dtype).removeprefix('torch.')}"
    fully_masked = out.detach().cpu()[~seen.any(-1)]
    if fully_masked.count_nonzero():
        yield Finding(f"{name} output", True, f"{fully_masked.abs().max():.3g} in a fully masked row, not exactly 0")
    else:
        yield _compare(f"{name} output", out, wanted, most)
    if has_gradients:
        weight = torch.randn(out.shape, generator=draw, dtype=torch.float64, device="cpu")
        found = torch.autograd.grad((out.double().cpu() * weight).sum(), inputs)
        expected = torch.autograd.grad((wanted * weight).sum(), copies)
        for which, gradient, value in zip(("query", "key", "value"), found, expected, strict=True):
            yield _compare(f"{name} gradient of {which}", gradient, value, most)


def _softmax(tensors: Inputs, visible: Tensor) -> Tensor:
    """Masked softmax attention; 0 in fully masked rows."""
    query, key, value = tensors
    fully_masked = ~visible.any(-1, keepdim=True)
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf).masked_fill(fully_masked, 0), -1)
    return weights.masked_fill(fully_masked, 0) @ value


def _compare(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> Finding:
    value = wanted.detach()
    error = (found.detach().double().cpu() - value).abs() / (1 + value.abs())
    largest = float(error.max())
    wrong = not largest <= tolerance  # also where it is no number
    text = f"largest error {largest:.1e}, at most {tolerance:.0e}"
    if wrong:
        worst = torch.where(error.isnan(), torch.inf, error).argmax()
        b, h, place, _ = (int(i) for i in torch.unravel_index(worst, error.shape))
        text = f"largest error {largest:.1e}, more than {tolerance:.0e}, at b={b}, h={h}, position {place}"
    return Finding(name, wrong, text)
