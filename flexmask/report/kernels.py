"""What the kernels of attention do with a mask: what they test in a cell, which blocks they visit, and which take it."""

from __future__ import annotations

import torch

from flexmask._checks import count_text, lengths_text
from flexmask.errors import LoweringError
from flexmask.intervals.bands import band_of, compares_classes, fused_kind, has_whole_rows
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.context import Context
from flexmask.lowering.block_mask import block_lists, block_mask
from flexmask.lowering.flash import TILE, flash_block_size, flash_refusal
from flexmask.lowering.mask_mod import has_interval_form, tested_count, tests_both_ends
from flexmask.lowering.varlen import varlen_arguments
from flexmask.report.stats import stats

#: The block sizes that are compared: torch's default, and what FlashAttention 4 takes on Hopper and on Blackwell.
SIZES = ((64, 64), (128, 128), (256, 128))
#: By the kind of a band: the call of scaled_dot_product_attention that needs no mask.
SDPA = {"whole": "scaled_dot_product_attention without a mask", "causal": "scaled_dot_product_attention(is_causal=True)"}
#: The fewest keys that a kernel visits at a time.
STEP = 16


def kernel_lines(context: Context, unread: Context) -> list[tuple[str, str]]:
    """The explanation as pairs of a label, which may be empty, and a text.

    Args:
        context: the lowering context, on the CPU.
        unread: the same on ``meta``, where no value can be read.
    """
    bounds = analyze(context)
    band, fused = band_of(context), fused_kind(context)
    if not has_interval_form(bounds):
        reason = f"a row has {bounds.upper.slots} key intervals" if bounds.exact else "it is not separable in q and kv"
        cells = f"the expression, cell by cell, since {reason}"
        bits = "evaluates each cell"
    else:
        ends = [end for interval in band for end in interval]
        is_known = len(band) > 1 or "read" not in ends or bounds.lower.slots == 1
        count = len(band) if is_known else tested_count(bounds.lower.slots)
        read = sum(isinstance(end, str) for end in ends) if is_known else 2 * count
        cells = f"kv in {'the key interval' if count == 1 else f'one of {count} key intervals'} of the row, "
        cells += f"of which {read} {'end is' if read == 1 else 'ends are'} read from memory" if read else "computed from q"
        if tests_both_ends(band, context.kv_len):
            cells += "; backend flex compares both ends at once"
        bits = f"applies {count_text(count, 'interval')} to 32 keys at a time, as bits, on Blackwell (torch 2.15)"
        if compares_classes(context):
            cells = (
                "whether the query attends to all keys or to none: one value is read from memory"
                if has_whole_rows(context.mask)
                else "whether the query and the key are in one class: one value of each is read from memory"
            )
    if refusal := flash_refusal(context.named):
        bits, chosen = f"no: {refusal}", "flex"
    else:
        sizes = [" x ".join(map(str, flash_block_size(generation, context.q_len))) for generation in (9, 10)]
        bits += f"; blocks of {sizes[0]} on Hopper, {sizes[1]} on Blackwell, for heads of up to 128 channels"
        chosen = f"flex, as there are fewer than {TILE} queries"
        if context.q_len >= TILE:
            chosen = "flash where FlashAttention 4 is installed and takes the call, else flex"
    are_runs = fused is not None and not context.q_len % 128
    blocks = []
    for size in SIZES:
        found = stats(context, size, bounds)
        blocks.append(f"{size[0]} x {size[1]}: {found.partial_blocks:,} partial, {found.full_blocks:,} full of {found.blocks:,}")
    return [
        ("cells", cells),
        ("FLASH", bits),
        ("on CUDA", f"backend='auto' takes {chosen}"),
        *(("block sizes" if not number else "", text) for number, text in enumerate(blocks)),
        (
            "lists",
            "the blocks of a row are neighbors: backend flex sets FlexAttention's BLOCKS_ARE_CONTIGUOUS"
            if are_runs
            else "FlexAttention reads the place of each block",
        ),
        ("safe rows", _safe_text(context, bounds, is_set=are_runs)),
        ("SDPA alone", SDPA.get("whole" if _shows_all(bounds) else fused or "", "no: it needs this mask as a tensor")),
        ("varlen", _varlen_text(context)),
        ("host syncs", _sync_text(unread)),
    ]


def _shows_all(bounds: RowBounds) -> bool:
    """Whether each query attends to all keys."""
    rows = bounds.lower
    return rows.slots == 1 and bool(((rows.lo == 0) & (rows.hi == rows.kv_len)).all())


def _safe_text(context: Context, bounds: RowBounds, *, is_set: bool) -> str:
    """How many rows have a visible key at the first keys that FlexAttention's kernels visit: partial blocks before full ones.

    Args:
        context: the lowering context.
        bounds: of the mask.
        is_set: whether the option is set where there is neither a score_mod nor dropout.
    """
    if not bounds.exact:
        return "not known, as each cell is evaluated; FlexAttention's option ROWS_GUARANTEED_SAFE is left unset"
    (count, indices), _, (full_count, full_indices), _ = block_lists(bounds, context, (128, 128))
    first = torch.where(count > 0, indices[..., 0], full_indices[..., 0]) * 128
    visited = (count + full_count > 0).repeat_interleave(128, 2)[..., : context.q_len]
    start = first.repeat_interleave(128, 2)[..., : context.q_len].unsqueeze(-1)
    rows = bounds.lower
    safe = ((rows.lo < start + STEP) & (rows.hi > start) & (rows.lo < rows.hi)).any(-1) & visited
    if bool(safe.all()):
        said = "is set by backend flex without a score_mod and dropout" if is_set else "is left unset, and would hold"
        return f"all see one of the first {STEP} keys that FlexAttention visits: its option ROWS_GUARANTEED_SAFE {said}"
    return (
        f"{int(safe.sum()):,} of {safe.numel():,} see one of the first {STEP} keys that FlexAttention visits: its option "
        "ROWS_GUARANTEED_SAFE could give NaN and is left unset"
    )


def _sync_text(unread: Context) -> str:
    try:
        block_mask(unread)
    except RuntimeError:  # of an operator that reads values, which are not there
        return "mask.block_mask() has one, to count key intervals or blocks, which data or a great length decide; a plan has none"
    return "none"


def _varlen_text(context: Context) -> str:
    try:
        found = varlen_arguments(context)
    except LoweringError as error:
        return f"no: {error}"
    segments = count_text(len(found.cu_seq_q) - 1, "segment")
    return f"{segments} of at most {lengths_text(found.max_q, found.max_k, 'and')}, window_size={found.window_size}"
