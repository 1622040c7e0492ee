"""The methods of a mask that lower, compare and draw it.

The functions that they call are in higher packages, which are imported when a method is first called. This is the one module
that imports against the order of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from flexmask._checks import names_explained
from flexmask.expr.node import Node

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from flexmask.expr.mask import Mask
    from flexmask.intervals.bounds import RowBounds
    from flexmask.intervals.context import Context
    from flexmask.lowering.mask_mod import Form, MaskMod
    from flexmask.plotting.labels import ContentOptions, PictureOptions
    from flexmask.plotting.sheet import Indices
    from flexmask.report.compare import Difference
    from flexmask.report.stats import Stats
    from flexmask.tracing.as_mask import MaskLike

__all__ = ["MaskMethods"]

#: For arguments of torch's create_block_mask, what to write.
EQUIVALENTS = {
    "B": "write batch=",
    "BLOCK_SIZE": "write block_size=",
    "H": "write heads=",
    "KV_LEN": "write kv_len=",
    "Q_LEN": "write q_len=",
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskMethods(Node):
    """Lowerings and pictures of a mask. Every lowering takes

    * ``q_len``, ``kv_len``: the numbers of queries and keys; ``kv_len`` defaults to ``q_len``;
    * ``batch``, ``heads``: taken from the mask's own tables where not given;
    * ``q_offset``: the position of the first query, an int, or an integer tensor ``[B]`` with one for each sequence;
    * ``device``: where the result is made; by default where the mask's tensors are, else the CPU.

    Pictures have queries down and keys across. Every picture takes

    * ``q_len``, ``kv_len``: the numbers of queries and keys; ``kv_len`` defaults to ``q_len``. Where neither is given,
      they follow from the tokens or the mask's data, else they are 16;
    * ``q_offset``: the position of the first query;
    * ``block_size``: also draws the block grid, with what a kernel skips, computes and discards;
    * ``why=True``: colors each hidden cell by the term that hides it, of several the first in reading order. The terms of
      ``a & b`` are those of each; a union is a term as a whole, or ``a | c`` and ``b | c`` where it is ``(a & b) | c``;
    * ``against=other``: which cells both masks show, only this one (A), or only the other one (B);
    * ``tokens``, ``kv_tokens``: labels of the queries, and of the keys unless these have their own: lists, or texts that are
      split at whitespace;
    * ``bands=False``: leaves out the documents and the padding along the edges;
    * ``batch``, ``head``: which sequence and head, by default the first.

    Long masks are downsampled: a pixel is the visible fraction of its cells.
    """

    @names_explained(EQUIVALENTS)
    def rows(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> RowBounds:
        """The key intervals of each query row: see :class:`flexmask.intervals.bounds.RowBounds`."""
        from flexmask.intervals.bounds import analyze

        return analyze(self._context(q_len, kv_len, batch, heads, q_offset, device))

    @names_explained(EQUIVALENTS)
    def dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The mask as ``bool[B, H, q_len, kv_len]``, with 1 for B or H where it does not depend on them.

        Raises:
            LoweringError: the tensor would be larger than 4 GiB.
        """
        from flexmask.lowering.dense import dense

        return dense(self._context(q_len, kv_len, batch, heads, q_offset, device))

    @names_explained(EQUIVALENTS)
    def mask_mod(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        form: Form = "auto",
    ) -> MaskMod:
        """A closure ``(b, h, q_idx, kv_idx) -> bool`` for FlexAttention; ``q_idx`` counts from 0 also with ``q_offset``.

        Args:
            form: ``"interval"`` tests the key against the row's intervals, and is the same code for every mask of up to 2,
                4 and 8 of them; ``"expression"`` computes the predicate; ``"auto"`` takes intervals where a row has at most 8.
        """
        from flexmask.lowering.mask_mod import mask_mod

        return mask_mod(self._context(q_len, kv_len, batch, heads, q_offset, device), form)

    @names_explained(EQUIVALENTS)
    def block_mask(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
        form: Form = "auto",
        separate_full_blocks: bool = True,
    ) -> BlockMask:
        """The ``BlockMask`` that ``torch.nn.attention.flex_attention.create_block_mask`` would make, without its cost.

        B is ``batch``; H is 1 unless the mask depends on the head. The BlockMask is a snapshot of the mask's data. It cannot be
        pickled, since its ``mask_mod`` is a closure: send the mask to other processes.

        Compiled code takes every BlockMask of the same lengths, batch and block size without compiling again, as long as both
        masks are per-head, or neither is, and the rows of both have at most 2 key intervals (or 4, or 8). On the CPU these are
        counted; elsewhere their number follows from the composition: ``a & b`` has at most as many as ``a`` and ``b`` less 1,
        ``a | b`` as ``a`` and ``b``, ``~a`` one more than ``a``. Beyond 2**20 blocks on the CPU and 2**22 elsewhere lists are
        packed; then their strides may differ as well.

        Host syncs on a GPU (``docs/host_syncs.md`` has them for each named mask; a composed mask has those of its parts):

        * None for most named masks, and for conditions of your own that are solved for the key.
        * At the first lowering of document ids, and of data in Python lists, which is copied to the device.
        * At each lowering for conditions on the key alone, and for rows with more than 8 key intervals.
        * At each lowering beyond 2**22 cells for what is not separable in q and kv, and beyond 2**22 blocks for every mask.

        Args:
            block_size: tokens in a block, or the pair (queries, keys).
            form: see :meth:`mask_mod`.
            separate_full_blocks: whether full blocks have lists of their own, for which kernels do not call ``mask_mod``. False
                gives the key blocks of a row one order, which batch-invariant numerics need: see
                :func:`flexmask.lowering.align_documents`.
        """
        from flexmask.lowering.block_mask import block_mask

        context = self._context(q_len, kv_len, batch, heads, q_offset, device)
        return block_mask(context, block_size, form, separate_full_blocks=separate_full_blocks)

    @names_explained(EQUIVALENTS)
    def stats(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> Stats:
        """The number of visible cells and blocks, and the cost of attention: see :class:`flexmask.report.stats.Stats`."""
        from flexmask.report.stats import stats

        return stats(self._context(q_len, kv_len, batch, heads, q_offset, device), block_size)

    def equals(
        self,
        other: MaskLike,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> bool:
        """Whether two masks show the same cells at these lengths, however they are written: see :meth:`difference`.

        ``==`` compares expressions instead, and needs no lengths.
        """
        return not self.difference(other, q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=device)

    def difference(
        self,
        other: MaskLike,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> Difference:
        """Where two masks differ at these lengths: how many cells only one of them shows, and the first of these.

        Computed from the key intervals. Cells are evaluated only in blocks that the rows leave open, a bounded number at a time.

        Args:
            other: the mask to compare with, its text, or a ``mask_mod``.

        Raises:
            OperandError: ``other`` is none of these.
            LoweringError: one of them cannot be lowered at these lengths, or they are for two sizes of batch or heads.
        """
        from flexmask.report.compare import difference

        return difference(cast("Mask", self), other, q_len, kv_len, batch, heads, q_offset, device)

    def plot(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        ax: Axes | None = None,
        title: str | None = None,
        **options: Unpack[PictureOptions],
    ) -> Axes:
        """Draws the mask with matplotlib, on given axes or on those of a new figure.

        Args:
            ax: where to draw; by default a new figure of a fitting size.
            title: instead of the mask's text.

        Returns:
            The axes, with queries and keys as units; ``axes.figure.savefig(...)`` writes them.

        Raises:
            RenderError: a sequence or head that the mask does not have, tokens that are not as many as positions, or
                ``against`` together with ``why`` or blocks.
        """
        from flexmask.plotting.mpl.plot import draw
        from flexmask.plotting.raster import rasterize

        return draw(rasterize(cast("Mask", self), q_len, kv_len, **options), ax=ax, title=title)

    def plot_panels(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: Indices = "all",
        head: Indices = "all",
        title: str | None = None,
        **options: Unpack[ContentOptions],
    ) -> Figure:
        """Draws several sequences and heads with matplotlib, a panel for each: sequences down, heads across.

        Args:
            batch: which sequences: an index, a list of them, ``"all"``, or ``"some"`` for the first eight.
            head: which heads, in the same forms.
            title: instead of the mask's text.

        Returns:
            The figure, with an axes for each panel; ``savefig(...)`` writes it.

        Raises:
            RenderError: more than 64 panels, or as :meth:`plot`.
        """
        from flexmask.plotting.mpl.panels import draw_sheet
        from flexmask.plotting.sheet import panel_sheet

        return draw_sheet(panel_sheet(cast("Mask", self), q_len, kv_len, batch=batch, head=head, **options), title=title)

    def plot_terms(
        self, q_len: int | None = None, kv_len: int | None = None, *, title: str | None = None, **options: Unpack[PictureOptions]
    ) -> Figure:
        """Draws each term of the composition with matplotlib, then the whole with what each term hides.

        Args:
            title: instead of the mask's text.

        Returns:
            The figure, with an axes for each term.

        Raises:
            RenderError: as :meth:`plot`.
        """
        from flexmask.plotting.mpl.panels import draw_sheet
        from flexmask.plotting.sheet import term_sheet

        return draw_sheet(term_sheet(cast("Mask", self), q_len, kv_len, **options), title=title)

    def show(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        console: Console | None = None,
        **options: Unpack[PictureOptions],
    ) -> None:
        """Draws the mask in the terminal, or as plain ASCII if the output is not a terminal.

        Args:
            console: where to draw; by default the standard output.
        """
        from flexmask.plotting.terminal.show import show

        show(cast("Mask", self), q_len, kv_len, console=console, **options)

    def html(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: Indices = "some",
        head: Indices = "some",
        **options: Unpack[ContentOptions],
    ) -> str:
        """The interactive view of the mask as one HTML document, which asks for nothing from outside.

        It pans, zooms, and says of each cell where it is, whether it is visible, by which terms it is hidden, and the kind of
        its block. Without ``against``, ``why`` is True where not given, and blocks are of 128 or, of short masks, about a quarter
        of their length.

        Args:
            batch: which sequences can be chosen: an index, a list of them, ``"all"``, or ``"some"`` for the first eight.
            head: which heads, in the same forms.

        Raises:
            RenderError: as :meth:`plot_panels`.
        """
        from flexmask.plotting.html.view import html

        return html(cast("Mask", self), q_len, kv_len, batch=batch, head=head, **options)

    def save_picture(
        self,
        path: str | Path,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: Indices | None = None,
        head: Indices | None = None,
        terms: bool = False,
        **options: Unpack[ContentOptions],
    ) -> None:
        """Writes a picture as ``.png`` or ``.svg``, or the interactive view as ``.html``; the same bytes for the same mask.

        Args:
            path: the file.
            batch: which sequence, or for a panel each a list of them, ``"all"`` or ``"some"``; None for the first, or for those
                that fit into an interactive view.
            head: which head, in the same forms.
            terms: draws each term of the mask next to the whole.

        Raises:
            RenderError: another ending, several sequences or heads together with ``terms``, an interactive view of terms, or as
                :meth:`plot`.
            OSError: the file cannot be written.
        """
        from flexmask.plotting.files import save

        save(cast("Mask", self), path, q_len, kv_len, batch=batch, head=head, terms=terms, **options)

    def _repr_html_(self) -> str:
        """The interactive view, as notebooks show it."""
        from flexmask.plotting.html.view import notebook_html

        return notebook_html(cast("Mask", self))

    def _context(
        self,
        q_len: int,
        kv_len: int | None,
        batch: int | None,
        heads: int | None,
        q_offset: int | Tensor,
        device: torch.device | str | None,
    ) -> Context:
        from flexmask.intervals.bind import bind

        return bind(cast("Mask", self), q_len, kv_len, batch, heads, q_offset, device)
