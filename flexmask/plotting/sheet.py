"""Sheets: several pictures in a grid, of sequences and heads, or of the terms of a mask and the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np

from flexmask.errors import OperandError, RenderError
from flexmask.expr.mask import Mask
from flexmask.plotting.annotations import ContentOptions, FrameOptions, PictureOptions, picture_lengths
from flexmask.plotting.caption import check_frame, picture_suffix, selection_notes, shortened
from flexmask.plotting.categories import MAX_TERMS, Category
from flexmask.plotting.density import select
from flexmask.plotting.raster import Picture, rasterize
from flexmask.report.terms import terms
from flexmask.tracing.trace import as_mask

#: The sequences or heads to draw: an index, a list, all, or the first few.
Indices: TypeAlias = int | Sequence[int] | Literal["all", "some"]

#: The most pictures on a sheet, and the number of sequences or heads for ``"some"``.
MAX_PANELS, FEW = 64, 8


@dataclass(frozen=True, eq=False)
class Sheet:
    """Pictures of the same lengths with the same categories of cells.

    Attributes:
        text: the text of the mask.
        pictures: the pictures, row by row.
        titles: a title for each.
        columns: the number of pictures in a row.
    """

    text: str
    pictures: tuple[Picture, ...]
    titles: tuple[str, ...]
    columns: int


def panel_sheet(
    mask: Mask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: Indices = "all",
    head: Indices = "all",
    **options: Unpack[ContentOptions],
) -> Sheet:
    """A picture for each sequence and head: sequences down and heads across if there are several of both.

    Args:
        mask: the mask.
        q_len: number of queries, by default from the mask's data.
        kv_len: number of keys, in the same way.
        batch: which sequences, all by default.
        head: which heads, in the same way.
        options: options of every picture, as for :func:`flexmask.plotting.raster.rasterize`.

    Raises:
        RenderError: more than 64 pictures, or an error of :func:`flexmask.plotting.raster.rasterize`.
    """
    mask = as_mask(mask)
    masks = [mask]
    if (against := options.get("against")) is not None:
        masks.append(as_mask(against, "against"))
        options["against"] = masks[1]
    queries, keys = picture_lengths(mask, q_len, kv_len, options)
    start = select(masks, queries, keys, 0, 0, options.get("q_offset", 0))
    places = panel_indices(batch, head, start.batches, start.heads)
    heads = {h for _, h in places if start.heads is None or h in range(start.heads)}  # rasterize raises for the others
    split = len({term for h in heads for term in terms(mask, h)}) <= MAX_TERMS
    found = [rasterize(mask, queries, keys, batch=b, head=h, split_heads=split, **options) for b, h in places]
    return arrange(_alike(found), places)


def term_sheet(mask: Mask, q_len: int | None = None, kv_len: int | None = None, **options: Unpack[PictureOptions]) -> Sheet:
    """A picture of each term of a mask, then one of the whole with the cells that each term masks out.

    Args:
        mask: the mask.
        q_len: number of queries, by default from the mask's data.
        kv_len: number of keys, in the same way.
        options: options of every picture, as for :func:`flexmask.plotting.raster.rasterize`; the last one has ``why=True``.
    """
    options["why"] = True
    whole = rasterize(mask, q_len, kv_len, **options)
    options |= {"q_offset": whole.q_offset, "why": False}
    parts, titles = [], []
    for term in terms(mask, whole.head):
        options |= {"batch": whole.batch if "b" in term.symbols else 0, "head": whole.head if "h" in term.symbols else 0}
        parts.append(rasterize(term, whole.q_len, whole.kv_len, **options))
        titles.append(shortened(term.spoken(), 4))
    return Sheet(
        whole.text, (*parts, whole), (*titles, ", ".join(["together", *selection_notes(whole)])), _columns(len(parts) + 1)
    )


def picture_or_sheet(
    mask: Mask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: Indices | None = None,
    head: Indices | None = None,
    terms: bool = False,
    **options: Unpack[ContentOptions],
) -> Picture | Sheet:
    """One picture, by default of the first sequence and head, or a sheet of several or of the terms.

    Raises:
        RenderError: several sequences or heads together with ``terms``, or an error of the pictures.
    """
    batch, head = (0 if given is None else given for given in (batch, head))
    if not (isinstance(batch, int) and isinstance(head, int)):
        if terms:
            raise RenderError("terms= draws one sequence and one head; choose them with batch= and head=")
        return panel_sheet(mask, q_len, kv_len, batch=batch, head=head, **options)
    place: PictureOptions = {**options, "batch": batch, "head": head}
    return term_sheet(mask, q_len, kv_len, **place) if terms else rasterize(mask, q_len, kv_len, **place)


def save(mask: Mask, path: str | Path, frame: FrameOptions, **options: Any) -> None:
    """Writes a picture of a mask, in the format of the suffix of ``path``: see :meth:`flexmask.Mask.save_picture`.

    Args:
        mask: the mask.
        path: the file.
        frame: what is around the cells.
        options: as for :func:`picture_or_sheet`.
    """
    suffix = picture_suffix(path)
    check_frame(frame.get("title"), frame.get("width"))
    if suffix == ".html":
        from flexmask.plotting.html import html

        if options.pop("terms", False):
            raise RenderError("the interactive view shows the terms itself; leave out terms=")
        if given := [name for name, value in frame.items() if value is not None and value is not True]:
            raise RenderError(f"the interactive view has its own title, legend and width; leave out {' and '.join(given)}")
        text = html(mask, **{**options, **{name: "some" for name in ("batch", "head") if options.get(name) is None}})
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8", newline="\n")
        return
    from flexmask.plotting.mpl.plot import save as save_drawing

    shown = picture_or_sheet(mask, **options)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_drawing(shown, path, **frame)


def panel_indices(batch: Indices, head: Indices, batches: int | None, heads: int | None) -> list[tuple[int, int]]:
    """The pairs of a sequence and a head to draw.

    Raises:
        RenderError: more than 64 pairs, or ``"all"`` of an unknown number.
        OperandError: neither an index, a list of them, ``"all"`` nor ``"some"``.
    """
    sequences, of_each = _indices("batch", batch, batches), _indices("head", head, heads)
    if len(sequences) * len(of_each) > MAX_PANELS:
        raise RenderError(
            f"{len(sequences):,} sequences x {len(of_each):,} heads are more than {MAX_PANELS} pictures; "
            "choose some with batch= and head="
        )
    return [(b, h) for b in sequences for h in of_each]


def arrange(pictures: Sequence[Picture], places: Sequence[tuple[int, int]]) -> Sheet:
    """Arranges pictures: sequences down and heads across if there are several of both."""
    sequences, heads = (len(set(indices)) for indices in zip(*places, strict=True))
    titles = tuple(", ".join([f"sequence {b}"] * (sequences > 1) + [f"head {h}"] * (heads > 1)) for b, h in places)
    columns = heads if sequences > 1 and heads > 1 else _columns(len(places))
    return Sheet(pictures[0].text, tuple(pictures), titles, columns)


def _indices(name: str, given: Indices, size: int | None) -> Sequence[int]:
    """The indices without duplicates; ``size`` is their number, or None if unknown."""
    if isinstance(given, str) and given == "some":
        return range(min(FEW, size or 1))
    if isinstance(given, str) and given == "all":
        if size is None:
            raise RenderError(f"the mask does not determine the size of {name}; choose the indices with {name}=")
        return range(size)
    if isinstance(given, int) and not isinstance(given, bool):
        return [given]
    if isinstance(given, list | tuple | range) and given and all(type(index) is int for index in given):
        return list(dict.fromkeys(given))
    raise OperandError(f'{name} must be an index, a list of them, "all" or "some", got {given!r}')


def _columns(count: int) -> int:
    """The columns of a grid: one row for a few pictures, else wider than high."""
    return count if count <= 4 else math.ceil(math.sqrt(count))


def _alike(pictures: list[Picture]) -> list[Picture]:
    """Gives all pictures the same categories, so that colors mean the same in each."""
    union = {_key(category): category for shown in pictures for category in shown.categories}
    return [_with_categories(shown, union) for shown in pictures]


def _key(category: Category) -> tuple[str, Mask | str]:
    """What categories of several pictures have in common."""
    return category.role, category.label if category.hides is None else category.hides


def _with_categories(shown: Picture, union: Mapping[tuple[str, Mask | str], Category]) -> Picture:
    pairs = [(0, 0)] * len(union)
    shares = np.zeros((len(union), *shown.shares.shape[1:]), dtype=np.float32)
    hidden_by = None if shown.hidden_by is None else np.zeros_like(shown.hidden_by)
    names = [*union]
    for own, category in enumerate(shown.categories):
        place = names.index(_key(category))
        pairs[place], shares[place] = shown.pairs[own], shown.shares[own]
        if hidden_by is not None and shown.hidden_by is not None:
            hidden_by |= (shown.hidden_by >> own & 1) << place
    return replace(shown, categories=tuple(union.values()), pairs=tuple(pairs), shares=shares, hidden_by=hidden_by)
