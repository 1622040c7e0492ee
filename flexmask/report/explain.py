"""Explanations: what a mask means, how it is lowered, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmask.blocks.sparse import known_blocks
from flexmask.expr.mask import Compare, Mask, PerHead, Truth
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import RowBounds, analyse
from flexmask.intervals.context import Context
from flexmask.intervals.solve import Span, is_separable, separate
from flexmask.lowering.block_mask import sizes_of
from flexmask.lowering.mask_mod import form_of
from flexmask.report.stats import Stats, stats
from flexmask.tracing.as_mask import MaskLike, as_mask

__all__ = ["Explanation", "Leaf", "explain", "memory_text"]


@dataclass(frozen=True)
class Leaf:
    """One condition of a mask in its separated form.

    Attributes:
        text: the condition.
        kind: how its keys are found.
        separates: whether query and key stand apart in it, so that its keys can be intervals.
    """

    text: str
    kind: str
    separates: bool


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; ``str()`` gives it as text.

    Attributes:
        mask: the mask as it was written.
        definition: the same with every named mask replaced by its definition.
        leaves: the conditions that it comes down to, solved for the key where they can be.
        exact: whether its rows are intervals of keys; otherwise some blocks have to be evaluated cell by cell.
        intervals: the most intervals of a row, of a bound on it where the rows are not exact.
        mean_intervals: how many intervals a row has on average, likewise.
        form: the form of its ``mask_mod``, with the intervals that it tests.
        open_blocks: blocks that the rows leave open.
        row_bytes: memory of the rows, in bytes.
        dense_bytes: memory of the dense mask, in bytes.
        stats: how much it shows, and what its blocks cost.
    """

    mask: str
    definition: str
    leaves: tuple[Leaf, ...]
    exact: bool
    intervals: int
    mean_intervals: float
    form: str
    open_blocks: int
    row_bytes: int
    dense_bytes: int
    stats: Stats

    def lines(self) -> list[tuple[str, str]]:
        """The explanation as pairs of a label, which may be empty, and a text."""
        found = self.stats
        sizes = " x ".join(map(str, found.block_size))
        groups = f"{_counted(found.batch, 'sequence')}, {_counted(found.heads, 'head')}"
        hidden = _counted(found.empty_rows, "query", "queries")
        kinds = {"BlockMask": found.block_mask_bytes, "rows": self.row_bytes, "dense": self.dense_bytes}
        memory = ", ".join(f"{kind} {memory_text(size)}" for kind, size in kinds.items())
        rows = f"at most {_counted(self.intervals, 'interval')} of keys, {self.mean_intervals:.2f} on average"
        blocks = "from the rows alone"
        if not self.exact:
            rows += ", of bounds within which the mask lies"
            blocks = f"from the rows, and {self.open_blocks:,} of {found.blocks:,} from ranges of values or cell by cell"
        return [
            ("mask", self.mask),
            *([("definition", self.definition)] if self.definition != self.mask else []),
            ("lengths", f"{found.q_len:,} queries x {found.kv_len:,} keys, {groups}"),
            *(("conditions" if i == 0 else "", f"{leaf.text}: {leaf.kind}") for i, leaf in enumerate(self.leaves)),
            ("rows", rows),
            ("mask_mod", self.form),
            ("blocks", f"{sizes}, {blocks}"),
            ("", f"{found.partial_blocks:,} partial, {found.full_blocks:,} full, {found.empty_blocks:,} skipped"),
            ("", f"partial blocks are {found.partial_fill:.1%} visible"),
            ("visible", f"{found.visible_fraction:.2%} of {found.cells:,} cells; {hidden} without a key"),
            ("memory", memory),
            ("attention", _cost(found.cost)),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.lines())
        return "\n".join(f"{label:<{width}}  {text}" for label, text in self.lines())


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
) -> Explanation:
    """What a mask means, how it is lowered, and what it costs.

    Args:
        mask: a mask, its text, or a ``mask_mod``.
        q_len: queries. This and what follows is as for every lowering.
        kv_len: keys, by default as many as queries.
        batch: sequences.
        heads: heads.
        q_offset: position of the first query.
        device: where it is lowered.
        block_size: tokens in a block, or the pair (queries, keys).

    Raises:
        LoweringError: the mask cannot be lowered at these lengths.
    """
    mask = as_mask(mask, device=device)
    context = bind(mask, q_len, kv_len, batch, heads, q_offset, device)
    sizes = sizes_of(block_size)
    bounds = analyse(context)
    counts = (bounds.upper.lo < bounds.upper.hi).sum(-1)
    _, _, left_open = known_blocks(bounds, context, *sizes)
    ends = {id(end): end for rows in (bounds.lower, bounds.upper) for end in (rows.lo, rows.hi)}
    return Explanation(
        mask=str(mask),
        definition=str(mask.expand()),
        leaves=tuple(_described(leaf, context, bounds) for leaf in _leaves(separate(mask.expand()))),
        exact=bounds.exact,
        intervals=int(counts.max()),
        mean_intervals=float(counts.double().mean()),
        form=_form(bounds),
        open_blocks=0 if left_open is None else int(left_open.counts().sum()),
        row_bytes=sum(end.numel() * end.element_size() for end in ends.values()),
        dense_bytes=_cells(context),
        stats=stats(context, sizes, bounds),
    )


def _cells(context: Context) -> int:
    return context.batch * context.heads * context.q_len * context.kv_len


def _leaves(mask: Mask) -> list[Mask]:
    """The conditions under the boolean operators, each once."""
    if isinstance(mask, Span | Compare):
        return [mask]
    below = mask.masks if isinstance(mask, PerHead) else [child for child in mask.children() if isinstance(child, Mask)]
    found = {leaf.key: leaf for child in below for leaf in _leaves(child)}
    return list(found.values()) or [mask]


def _described(mask: Mask, context: Context, bounds: RowBounds) -> Leaf:
    """A condition, and whether it is one that leaves the rows open."""
    leaf = _leaf(mask)
    if bounds.exact or not leaf.separates or analyse(replace(context, mask=mask)).exact:
        return leaf
    return replace(leaf, kind=f"{leaf.kind}; in more intervals than are listed")


def _leaf(mask: Mask) -> Leaf:
    match mask:
        case Span():
            return Leaf(str(mask)[1:-1], "one interval of keys", True)
        case Compare("==" | "!=") if is_separable(mask):
            return Leaf(str(mask), "runs of keys with the query's value", True)
        case Compare() if is_separable(mask):
            return Leaf(str(mask), "a stretch of keys wherever the values rise", True)
        case Compare() if "kv" not in mask.symbols:
            return Leaf(str(mask), "a test of the query", True)
        case Compare() if "q" not in mask.symbols:
            return Leaf(str(mask), "runs of keys", True)
        case Compare():
            return Leaf(str(mask), "mixes query and key, so it does not separate: evaluated cell by cell", False)
    return Leaf(str(mask), "every key" if mask == Truth(True) else "no key", True)


def _form(bounds: RowBounds) -> str:
    slots = form_of(bounds)
    return "the expression" if slots is None else f"intervals: tests {slots} of them, one kernel for all such masks"


def _cost(cost: float) -> str:
    if cost > 1:
        return "no less work than dense attention, as blocks reach beyond the ends of the mask"
    return f"about {cost:.2%} of the work of dense attention"


def _counted(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def memory_text(number: int) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number} bytes"
