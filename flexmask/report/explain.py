"""Explanations in words: the conditions of a mask, its lowerings, what the kernels of attention do with it, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._checks import check_flag, checked_int, count_text, lengths_text, names_explained
from flexmask.blocks.classify import classify
from flexmask.blocks.sparse import BlockSets
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import Compare, Mask, Truth
from flexmask.expr.methods import EQUIVALENTS
from flexmask.expr.tables import Lookup
from flexmask.intervals.bands import band_of, compares_classes, fused_kind, has_whole_rows
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.context import Context
from flexmask.intervals.sizes import lengths_hint
from flexmask.intervals.solve import Span, is_separable, separate
from flexmask.lowering.block_mask import block_lists, block_mask, block_sizes
from flexmask.lowering.dense import cell_evaluator
from flexmask.lowering.flash import TILE, flash_block_size, flash_refusal
from flexmask.lowering.mask_mod import has_interval_form, tested_count, tests_both_ends
from flexmask.lowering.varlen import varlen_arguments
from flexmask.report.compare import Cell
from flexmask.report.stats import Stats, stats
from flexmask.report.terms import alternatives, hidden_text, reason, terms
from flexmask.tracing.trace import MaskLike, as_mask

#: The block sizes that are compared: torch's default, and what FlashAttention 4 takes on Hopper and on Blackwell.
SIZES = ((64, 64), (128, 128), (256, 128))
#: By the kind of a band: the call of scaled_dot_product_attention that needs no mask.
SDPA = {"whole": "scaled_dot_product_attention without a mask", "causal": "scaled_dot_product_attention(is_causal=True)"}
#: The fewest keys that a kernel visits at a time.
STEP = 16


def kernel_lines(context: Context, unread: Context) -> list[tuple[str, str]]:
    """What the kernels of attention do with a mask, as pairs of a label, which may be empty, and a text.

    Args:
        context: the lowering context, on the CPU.
        unread: the same on ``meta``, where no value can be read.
    """
    bounds = analyze(context)
    band, fused = band_of(context), fused_kind(context)
    if not has_interval_form(bounds):
        why = f"a row has {bounds.upper.slots} key intervals" if bounds.exact else "it is not separable in q and kv"
        cells = f"the expression, cell by cell, since {why}"
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


# ---------------------------------------------------------------- explanations


@dataclass(frozen=True)
class Leaf:
    """One condition of a mask, solved for the key where possible.

    Attributes:
        text: the condition.
        kind: how its keys are computed.
        separable: whether it is separable in q and kv, so that its keys are intervals.
    """

    text: str
    kind: str
    separable: bool


@dataclass(frozen=True)
class CellReason:
    """Why one cell of a mask is visible or hidden.

    Attributes:
        cell: its place.
        shown_by: the terms of the mask that show the cell, of ``a | b`` those of ``a`` and ``b`` that do.
        hidden_by: the terms that hide it, of ``a | b`` as ``"none of: a, b"``; empty where it is visible. All terms together,
            joined by ``&``, are the mask.
    """

    cell: Cell
    shown_by: tuple[str, ...]
    hidden_by: tuple[str, ...]

    @property
    def visible(self) -> bool:
        """Whether the cell is visible."""
        return not self.hidden_by


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`; ``str()`` gives it as text.

    Attributes:
        mask: the mask as it was written, with the words of its named parts.
        definition: the mask with every named mask replaced by its definition.
        recognized: the mask with named masks in place of its dense tables, as :meth:`flexmask.Mask.recognize` finds them; empty
            where it has no table, or none is found.
        leaves: the conditions in it, solved for the key where possible.
        exact: whether its rows are exact key intervals; otherwise cells are evaluated in some blocks.
        intervals: the most key intervals of a row, or of its upper bound where the rows are not exact.
        mean_intervals: the mean number of key intervals of a row, or of its upper bound.
        form: the form of its ``mask_mod``, with the number of intervals that it tests.
        open_blocks: blocks that the key intervals leave open.
        row_bytes: memory of the rows, in bytes.
        dense_bytes: memory of the dense mask, in bytes.
        stats: the statistics of its cells and blocks.
        cell: why the cell that was asked for is visible or hidden; None where none was.
        kernel: what the kernels of attention do with the mask, as pairs of a label and a text; empty where it was not asked for.
    """

    mask: str
    definition: str
    recognized: str
    leaves: tuple[Leaf, ...]
    exact: bool
    intervals: int
    mean_intervals: float
    form: str
    open_blocks: int
    row_bytes: int
    dense_bytes: int
    stats: Stats
    cell: CellReason | None = None
    kernel: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[tuple[str, str]]:
        """The explanation as pairs of a label, which may be empty, and a text."""
        stats = self.stats
        sizes = " x ".join(map(str, stats.block_size))
        groups = f"{count_text(stats.batch, 'sequence')}, {count_text(stats.heads, 'head')}"
        hidden = count_text(stats.fully_masked_rows, "fully masked row")
        memory = (
            f"BlockMask {memory_text(stats.block_mask_bytes)}, torch's own {memory_text(stats.torch_block_mask_bytes)}, "
            f"rows {memory_text(self.row_bytes)}, dense {memory_text(self.dense_bytes)}"
        )
        rows = f"at most {count_text(self.intervals, 'key interval')}, {self.mean_intervals:.2f} on average"
        blocks = "from the rows alone"
        if not self.exact:
            rows += ", of bounds within which the mask lies"
            blocks = f"from the rows, and {self.open_blocks:,} of {stats.blocks:,} from ranges of values or cell by cell"
        return [
            ("mask", self.mask),
            *([("definition", self.definition)] if self.definition != self.mask else []),
            *([("recognized", self.recognized)] if self.recognized else []),
            ("lengths", f"{lengths_text(stats.q_len, stats.kv_len)}, {groups}"),
            *(("conditions" if i == 0 else "", f"{leaf.text}: {leaf.kind}") for i, leaf in enumerate(self.leaves)),
            ("rows", rows),
            ("mask_mod", self.form),
            ("blocks", f"{sizes}, {blocks}"),
            ("", f"{stats.partial_blocks:,} partial, {stats.full_blocks:,} full, {stats.empty_blocks:,} skipped"),
            *([("", f"partial blocks are {stats.partial_fill:.1%} visible")] if stats.partial_blocks else []),
            ("visible", f"{stats.visible_fraction:.2%} of {stats.cells:,} cells; {hidden}"),
            ("memory", memory),
            ("attention", _cost_text(stats)),
            *(_cell_lines(self.cell) if self.cell is not None else []),
            *self.kernel,
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.lines())
        return "\n".join(f"{label:<{width}}  {text}" for label, text in self.lines())


@names_explained(EQUIVALENTS)
def explain(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
    cell: Sequence[int] | None = None,
    kernel: bool = False,
) -> Explanation:
    """Explains the conditions of a mask, its lowerings, and their cost.

    Args:
        mask: a mask, its text, or a ``mask_mod``.
        q_len: queries. This and the other arguments are as for every lowering.
        kv_len: keys, by default as many as queries.
        batch: sequences.
        heads: heads.
        q_offset: position of the first query.
        device: where the mask is lowered.
        block_size: tokens in a block, or the pair (queries, keys).
        cell: ``(q, kv)`` or ``(b, h, q, kv)``, a cell of which to say which terms of the mask hide it; ``q`` counts from 0
            whatever the offset.
        kernel: whether to say also what the kernels of attention do with the mask: what they test in a cell, the blocks at three
            sizes, which of the faster kernels take it, or why not, and whether its lowering forces a host sync on a GPU. It is
            computed on the CPU.

    Raises:
        OperandError: a cell that is not two or four integers, or ``kernel`` is no truth value.
        LoweringError: the mask cannot be lowered at these lengths, has no such cell, or is on ``meta``.
    """
    check_flag(kernel, "kernel")
    mask = as_mask(mask, device=device)
    context = bind(mask, q_len, kv_len, batch, heads, q_offset, device)
    _sync.check_values(context.device, "an explanation counts cells")
    sets = BlockSets(context, *block_sizes(block_size))
    bounds = analyze(context)
    counts = (bounds.upper.lo < bounds.upper.hi).sum(-1)
    open_blocks = classify(bounds, sets).open

    def on(place: str) -> Context:
        offset = q_offset.to(place) if isinstance(q_offset, Tensor) else q_offset
        return bind(mask.to(place), q_len, kv_len, batch, heads, offset, place)

    tests_keys = has_interval_form(bounds)
    ends = {id(end): end for rows in (bounds.lower, bounds.upper) for end in (rows.lo, rows.hi)}
    return Explanation(
        mask=mask.spoken(),
        definition=mask.expand().spoken(),
        recognized="" if (found := mask.recognize()) is mask else found.spoken(),
        leaves=tuple(_leaf(condition, context, bounds) for condition in _conditions(separate(context.mask))),
        exact=bounds.exact,
        intervals=int(counts.max()),
        mean_intervals=float(counts.double().mean()),
        form=f"tests {count_text(bounds.lower.slots, 'key interval')} for each query" if tests_keys else "the expression",
        open_blocks=0 if open_blocks is None else sets.count(open_blocks),
        row_bytes=sum(end.numel() * end.element_size() for end in ends.values()),
        dense_bytes=context.batch * context.heads * context.q_len * context.kv_len,
        stats=stats(context, block_size, bounds),
        cell=None if cell is None else _reason(context, cell, heads),
        kernel=tuple(kernel_lines(on("cpu"), on("meta"))) if kernel else (),
    )


def _reason(context: Context, cell: Sequence[int], heads: int | None) -> CellReason:
    """Which terms of the mask of a context show a cell, and which hide it."""
    mask = context.named
    if not isinstance(cell, Sequence) or len(cell) not in (2, 4):
        raise OperandError(f"cell must be (q, kv) or (b, h, q, kv), got {cell!r}")
    sizes = (context.full_batch, max(context.heads, heads or 1), context.q_len, context.kv_len)
    place = Cell(*((0, 0, *cell) if len(cell) == 2 else cell))
    for axis, position, size in zip(place._fields, place, sizes, strict=True):
        if checked_int(position, f"cell: {axis}", 0, kind=LoweringError) >= size:
            hints = (lengths_hint(node, context.source) for node in mask.expand().walk() if isinstance(node, Lookup))
            hint = next(filter(None, hints), "") if axis in ("q", "kv") else ""
            raise LoweringError(f"cell: {axis} must be at most {size - 1}, got {position}{hint}")
    b, h = min(place.b, context.batch - 1), min(place.h, context.heads - 1)  # one stands for all that are the same

    def shows(term: Mask) -> bool:
        evaluate = cell_evaluator(replace(context, mask=term.expand()))
        return bool(evaluate(place.q, place.q + 1, place.kv, place.kv + 1)[b, h])

    shown_by, hidden_by = list[str](), list[str]()
    for term in terms(mask, h):
        showing = [context.filled(part).spoken() for part in alternatives(term) if shows(part)]
        shown_by += showing
        hidden_by += [] if showing else [reason(context.filled(term))]
    return CellReason(place, tuple(shown_by), tuple(hidden_by))


def _cell_lines(found: CellReason) -> list[tuple[str, str]]:
    return [
        ("cell", f"{found.cell} is {'visible' if found.visible else 'hidden'}"),
        *(("", hidden_text(text)) for text in found.hidden_by),
        *(("", f"shown by {text}") for text in found.shown_by),
    ]


def _conditions(mask: Mask) -> list[Mask]:
    """The conditions under the boolean operators, each once."""
    if isinstance(mask, Span | Compare):
        return [mask]
    below = [child for child in mask.below if isinstance(child, Mask)]
    conditions = {condition.key: condition for child in below for condition in _conditions(child)}
    return list(conditions.values()) or [mask]


def _leaf(mask: Mask, context: Context, bounds: RowBounds) -> Leaf:
    """A condition, and whether it has more intervals than the rows list."""
    leaf = _listed_leaf(context.filled(mask))
    if bounds.exact or not leaf.separable or analyze(replace(context, mask=mask)).exact:
        return leaf
    return replace(leaf, kind=f"{leaf.kind}; in more key intervals than are listed")


def _listed_leaf(mask: Mask) -> Leaf:
    match mask:
        case Span():
            return Leaf(mask.spoken()[1:-1], "one key interval", True)
        case Compare("==" | "!=") if is_separable(mask):
            return Leaf(mask.spoken(), "runs of keys with the query's value", True)
        case Compare() if is_separable(mask):
            return Leaf(mask.spoken(), "one key interval in each non-decreasing piece", True)
        case Compare() if "kv" not in mask.symbols:
            return Leaf(mask.spoken(), "a test of the query", True)
        case Compare() if "q" not in mask.symbols:
            return Leaf(mask.spoken(), "runs of keys", True)
        case Compare():
            return Leaf(mask.spoken(), "not separable in q and kv: evaluated cell by cell", False)
    return Leaf(mask.spoken(), "every key" if mask == Truth(True) else "no key", True)


def _cost_text(stats: Stats) -> str:
    if stats.cost <= 1:
        return f"about {stats.cost:.2%} of the work of dense attention"
    if stats.blocks == stats.batch * stats.heads and not stats.empty_blocks:
        return f"the mask is smaller than one block of {stats.block_size[0]} x {stats.block_size[1]}, so nothing is skipped"
    return "no less work than dense attention, as blocks reach beyond the ends of the mask"


def memory_text(number: int) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number} bytes"
