"""The methods of a mask that draw it.

As in `methods`, the functions that they call are in higher packages, which are imported when a method is first called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from flexmask.expr.node import Node

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from flexmask.expr.mask import Mask
    from flexmask.plotting.labels import ContentOptions, PictureOptions
    from flexmask.plotting.sheet import Indices

__all__ = ["MaskPictures"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskPictures(Node):
    """Pictures of a mask.

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
        """The interactive view of the mask as one HTML document, which loads nothing from outside.

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
