"""The methods of a mask that draw it.

As in `methods`, the functions that they call are in higher packages, which are imported when a method is first called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flexmask._checks import names_explained
from flexmask.expr.node import Node

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from torch import Tensor

    from flexmask.distributed.sharding import Sharding
    from flexmask.expr.mask import Mask
    from flexmask.plotting.annotations import ContentOptions, PictureOptions, Tokens
    from flexmask.plotting.sheet import Indices
    from flexmask.tracing.trace import MaskLike


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskPictures(Node):
    """Pictures of a mask: queries down, keys across, long masks downsampled. :meth:`plot` describes the arguments of all."""

    @names_explained({})
    def plot(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        q_offset: int | Tensor = 0,
        block_size: int | tuple[int, int] | None = None,
        why: bool = False,
        against: MaskLike | None = None,
        shards: Sharding | None = None,
        tokens: Tokens | None = None,
        kv_tokens: Tokens | None = None,
        bands: bool = True,
        max_pixels: tuple[int, int] = (1024, 1024),
        max_blocks: tuple[int, int] = (64, 64),
        ax: Axes | None = None,
        title: str | None = None,
    ) -> Axes:
        """Draws one sequence and head of the mask with matplotlib.

        Args:
            q_len: number of queries; by default from the tokens or the mask's data, else 16.
            kv_len: number of keys; ``q_len`` by default.
            batch: index of the sequence.
            head: index of the head.
            q_offset: position of the first query.
            block_size: also draws blocks of this many queries and keys: those that a kernel skips, and the cells that it computes
                and discards.
            why: colors each hidden cell by the term of the mask that hides it; of several terms by the first. The terms of
                ``a & b`` are those of ``a`` and ``b``, and any other mask is one, by the name that :meth:`named` gave it.
            against: another mask (B): colors the cells that are visible in both masks, only in this one (A), or only in B.
            shards: a plan of context parallelism, from :func:`flexmask.distributed.shard_sequence`: colors the visible cells by
                the rank that holds the query.
            tokens: labels of the queries, and of the keys unless ``kv_tokens`` is given: a list, or a text of words.
            kv_tokens: labels of the keys.
            bands: whether documents, prefix trees and padding are shown along the edges.
            max_pixels: rows and columns of the picture at most; in a downsampled picture a pixel is the visible fraction.
            max_blocks: rows and columns of blocks at most; with more, they are not drawn.
            ax: where to draw; by default a new figure of a fitting size.
            title: instead of the mask's text.

        Returns:
            The axes, with queries and keys as units; ``axes.figure.savefig(...)`` writes them.

        Raises:
            RenderError: a sequence or head that the mask does not have, tokens that are not as many as positions, or
                ``against`` or ``shards`` together with each other, ``why`` or ``block_size``.
        """
        from flexmask.plotting.mpl.plot import draw
        from flexmask.plotting.raster import rasterize

        options: PictureOptions = {"batch": batch, "head": head, "q_offset": q_offset, "block_size": block_size, "why": why}
        options |= {"against": against, "shards": shards, "tokens": tokens, "kv_tokens": kv_tokens, "bands": bands}
        options |= {"max_pixels": max_pixels, "max_blocks": max_blocks}
        shown = rasterize(cast("Mask", self), q_len, kv_len, **options)
        return draw(shown, ax=ax, title=title)

    @names_explained({})
    def plot_panels(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: Indices = "all",
        head: Indices = "all",
        q_offset: int | Tensor = 0,
        block_size: int | tuple[int, int] | None = None,
        why: bool = False,
        against: MaskLike | None = None,
        shards: Sharding | None = None,
        tokens: Tokens | None = None,
        kv_tokens: Tokens | None = None,
        bands: bool = True,
        max_pixels: tuple[int, int] = (1024, 1024),
        max_blocks: tuple[int, int] = (64, 64),
        title: str | None = None,
    ) -> Figure:
        """Draws several sequences and heads with matplotlib, a panel for each: sequences down, heads across.

        Args:
            batch: which sequences: an index, a list of them, ``"all"``, or ``"some"`` for the first eight.
            head: which heads, in the same forms.
            title: instead of the mask's text.

        The other arguments are those of :meth:`plot`.

        Returns:
            The figure, with an axes for each panel; ``savefig(...)`` writes it.

        Raises:
            RenderError: more than 64 panels, or as :meth:`plot`.
        """
        from flexmask.plotting.mpl.plot import draw_sheet
        from flexmask.plotting.sheet import panel_sheet

        options: ContentOptions = {
            "q_offset": q_offset,
            "block_size": block_size,
            "why": why,
            "against": against,
            "shards": shards,
        }
        options |= {"tokens": tokens, "kv_tokens": kv_tokens, "bands": bands, "max_pixels": max_pixels, "max_blocks": max_blocks}
        sheet = panel_sheet(cast("Mask", self), q_len, kv_len, batch=batch, head=head, **options)
        return draw_sheet(sheet, title=title)

    @names_explained({})
    def plot_terms(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        q_offset: int | Tensor = 0,
        block_size: int | tuple[int, int] | None = None,
        tokens: Tokens | None = None,
        kv_tokens: Tokens | None = None,
        bands: bool = True,
        max_pixels: tuple[int, int] = (1024, 1024),
        max_blocks: tuple[int, int] = (64, 64),
        title: str | None = None,
    ) -> Figure:
        """Draws each term of the mask with matplotlib, then the whole with what each term hides.

        The arguments are those of :meth:`plot`.

        Returns:
            The figure, with an axes for each term.

        Raises:
            RenderError: as :meth:`plot`.
        """
        from flexmask.plotting.mpl.plot import draw_sheet
        from flexmask.plotting.sheet import term_sheet

        options: PictureOptions = {"batch": batch, "head": head, "q_offset": q_offset, "block_size": block_size, "tokens": tokens}
        options |= {"kv_tokens": kv_tokens, "bands": bands, "max_pixels": max_pixels, "max_blocks": max_blocks}
        sheet = term_sheet(cast("Mask", self), q_len, kv_len, **options)
        return draw_sheet(sheet, title=title)

    @names_explained({})
    def show(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        q_offset: int | Tensor = 0,
        block_size: int | tuple[int, int] | None = None,
        why: bool = False,
        against: MaskLike | None = None,
        shards: Sharding | None = None,
        tokens: Tokens | None = None,
        kv_tokens: Tokens | None = None,
        bands: bool = True,
        console: Console | None = None,
    ) -> None:
        """Draws the mask in the terminal, or as plain ASCII if the output is not a terminal.

        A picture that is larger than the terminal is downsampled.

        Args:
            console: where to draw; by default the standard output.

        The other arguments are those of :meth:`plot`.
        """
        from flexmask.plotting.terminal.show import show

        options: PictureOptions = {"batch": batch, "head": head, "q_offset": q_offset, "block_size": block_size}
        options |= {"why": why, "against": against, "shards": shards, "tokens": tokens, "kv_tokens": kv_tokens, "bands": bands}
        show(cast("Mask", self), q_len, kv_len, console=console, **options)

    @names_explained({})
    def html(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: Indices = "some",
        head: Indices = "some",
        q_offset: int | Tensor = 0,
        block_size: int | tuple[int, int] | None = None,
        why: bool | None = None,
        against: MaskLike | None = None,
        tokens: Tokens | None = None,
        kv_tokens: Tokens | None = None,
        bands: bool = True,
        max_pixels: tuple[int, int] = (1024, 1024),
        max_blocks: tuple[int, int] | None = None,
    ) -> str:
        """Makes an interactive view of the mask: one HTML document, which loads nothing from outside.

        It pans and zooms. Of each cell it says where it is, whether it is visible, which terms hide it, and in which block it is.

        Args:
            batch: which sequences can be chosen: an index, a list of them, ``"all"``, or ``"some"`` for the first eight.
            head: which heads, in the same forms.
            block_size: by default 128 or, of short masks, about a quarter of their length.
            why: whether terms can be shown; True by default.

        The other arguments are those of :meth:`plot`.

        Raises:
            RenderError: as :meth:`plot_panels`.
        """
        from flexmask.plotting.html import html

        options: ContentOptions = {"q_offset": q_offset, "block_size": block_size, "why": why, "against": against}
        options |= {"tokens": tokens, "kv_tokens": kv_tokens, "bands": bands, "max_pixels": max_pixels, "max_blocks": max_blocks}
        return html(cast("Mask", self), q_len, kv_len, batch=batch, head=head, **options)

    @names_explained({})
    def save_picture(
        self,
        path: str | Path,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: Indices | None = None,
        head: Indices | None = None,
        q_offset: int | Tensor = 0,
        block_size: int | tuple[int, int] | None = None,
        why: bool | None = None,
        against: MaskLike | None = None,
        shards: Sharding | None = None,
        tokens: Tokens | None = None,
        kv_tokens: Tokens | None = None,
        bands: bool = True,
        max_pixels: tuple[int, int] = (1024, 1024),
        max_blocks: tuple[int, int] | None = None,
        terms: bool = False,
        title: str | None = None,
        legend: bool = True,
        width: float | None = None,
    ) -> None:
        """Writes a picture as ``.png``, ``.svg`` or ``.pdf``, or the interactive view as ``.html``.

        The same mask gives the same bytes.

        Args:
            path: the file, in a folder that is made where it is missing.
            batch: which sequence, or for a panel each a list of them, ``"all"`` or ``"some"``; None for the first, or for those
                that fit into an interactive view.
            head: which head, in the same forms.
            why: as for :meth:`plot`; True by default in an interactive view.
            terms: draws each term of the mask next to the whole.
            title: instead of the mask's text.
            legend: whether the notes and the meaning of the colors are below the cells.
            width: inches that the cells take across, of each panel where there are several. It, ``title`` and ``legend`` are
                for files without interaction.

        The other arguments are those of :meth:`plot`.

        Raises:
            RenderError: another ending, several sequences or heads together with ``terms``, an interactive view of terms, or as
                :meth:`plot`.
            OSError: the file cannot be written.
        """
        from flexmask.plotting.sheet import save

        options: ContentOptions = {
            "q_offset": q_offset,
            "block_size": block_size,
            "why": why,
            "against": against,
            "shards": shards,
        }
        options |= {"tokens": tokens, "kv_tokens": kv_tokens, "bands": bands, "max_pixels": max_pixels, "max_blocks": max_blocks}
        asked = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "head": head, "terms": terms}
        save(cast("Mask", self), path, {"title": title, "legend": legend, "width": width}, **asked, **options)

    def _repr_html_(self) -> str:
        """The interactive view, as notebooks show it."""
        from flexmask.plotting.html import notebook_html

        return notebook_html(cast("Mask", self))
