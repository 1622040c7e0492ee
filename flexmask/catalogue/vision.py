"""Masks for images and videos: neighborhoods, windows, tiles, the two heads of Sparse VideoGen, images in a text."""

from __future__ import annotations

from math import inf, prod
from typing import Any

from flexmask.catalogue.arguments import fixed_int, fixed_ints, int_or_index, lookup
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import Data, as_table
from flexmask.expr.index import Index, b, h, kv, maximum, minimum, q
from flexmask.expr.mask import And, Mask, Or
from flexmask.expr.tables import Param
from flexmask.registry import named

__all__ = ["image_cross", "neighborhood", "shifted_window", "sliding_tile", "svg_spatial", "svg_temporal", "tile_topk"]


@named
def neighborhood(canvas: Data, kernel: Data, *, tile: Data | None = None) -> Mask:
    """Each pixel attends to the window around it. At the edges the window is moved inwards and keeps its size.

    Predicate: ``(y >= start) & (y < start + kernel)`` along each axis, with the coordinates ``x`` of the query and ``y`` of the
    key and ``start = minimum(maximum(x - kernel // 2, 0), canvas - kernel)``

    ``neighborhood(canvas=[2, 4], kernel=[2, 3])`` at 8 x 8::

        ■ ■ ■ ⬚ ■ ■ ■ ⬚
        ■ ■ ■ ⬚ ■ ■ ■ ⬚
        ⬚ ■ ■ ■ ⬚ ■ ■ ■
        ⬚ ■ ■ ■ ⬚ ■ ■ ■
        ■ ■ ■ ⬚ ■ ■ ■ ⬚
        ■ ■ ■ ⬚ ■ ■ ■ ⬚
        ⬚ ■ ■ ■ ⬚ ■ ■ ■
        ⬚ ■ ■ ■ ⬚ ■ ■ ■

    ``neighborhood(canvas=[2, 4], kernel=[1, 3], tile=[2, 2])`` at 8 x 8::

        ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ■ ■ ⬚ ⬚ ■ ⬚
        ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ⬚ ⬚ ■ ■
        ⬚ ⬚ ⬚ ■ ⬚ ⬚ ■ ■

    Args:
        canvas: the size of the canvas along 1, 2 or 3 axes, outermost first, e.g. ``[height, width]``. Positions are
            row-major: the last axis runs fastest.
        kernel: the size of the window along each axis, at most that of the canvas. Every query attends to ``prod(kernel)`` keys.
        tile: the size of tiles if positions run through one tile after another; it must divide the canvas.

    Raises:
        ExpressionError: sizes that do not fit each other.

    Source: NATTEN, https://arxiv.org/abs/2204.07143. The canvas need not be square; ``generate_natten`` of attention-gym
    clamps the window of one axis by the length of the other, which is right on square canvases only.
    """
    sizes, window = _axes("neighborhood", canvas, kernel)
    if tile is None:
        return _window(sizes, window, _coordinates(q, sizes), _coordinates(kv, sizes))
    tiles = fixed_ints(tile, "neighborhood: tile", [len(sizes)])
    grid = _divided("neighborhood", "canvas", sizes, tiles)
    queries, keys = _tiled(q, grid, tiles), _tiled(kv, grid, tiles)
    around: list[Mask] = []  # implied by the rest; it rules out whole tiles before single pixels are compared
    for x, y, n, k, t in zip(queries, _coordinates(kv // prod(tiles), grid), sizes, window, tiles, strict=True):
        start = _start(x, n, k)
        around += [(y >= start // t) & (y <= (start + (k - 1)) // t)]
    return And.make((*around, _window(sizes, window, queries, keys)))


@named
def shifted_window(canvas: Data, window: Data, shift: Data | None = None) -> Mask:
    """Each pixel attends to the pixels of its own window. The windows tile a canvas, and are moved by a shift.

    Predicate: ``(x + window - shift) // window == (y + window - shift) // window`` along each axis, with the coordinates ``x`` of
    the query and ``y`` of the key; keys after the canvas are masked out

    ``shifted_window(canvas=[2, 4], window=[2, 2], shift=[0, 1])`` at 8 x 8::

        ■ ⬚ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ■ ■ ⬚ ⬚ ■ ■ ⬚
        ⬚ ■ ■ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ⬚ ⬚ ⬚ ■
        ■ ⬚ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ■ ■ ⬚ ⬚ ■ ■ ⬚
        ⬚ ■ ■ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ⬚ ⬚ ⬚ ■

    Windows at the edges are smaller. On pixels in their own order this is what a cyclic shift computes, whose mask keeps the two
    sides of an edge apart.

    Args:
        canvas: the size of the canvas along 1, 2 or 3 axes, outermost first, e.g. ``[height, width]``. Positions are
            row-major: the last axis runs fastest.
        window: the size of the windows along each axis, at most that of the canvas.
        shift: where the first whole window begins along each axis, less than the window; by default 0.

    Raises:
        ExpressionError: sizes that do not fit each other.

    Source: Swin Transformer, https://arxiv.org/abs/2103.14030
    """
    sizes, windows = _axes("shifted_window", canvas, window, "window")
    shifts = [0] * len(sizes) if shift is None else fixed_ints(shift, "shifted_window: shift", [len(sizes)], 0)
    if any(s >= w for s, w in zip(shifts, windows, strict=True)):
        raise ExpressionError(f"shifted_window: the shift {shifts} must be less than the window {windows}")
    numbers = zip(*(_coordinates(position, sizes) for position in (q, kv)), windows, shifts, strict=True)
    same = [(x + (w - s) % w) // w == (y + (w - s) % w) // w for x, y, w, s in numbers]
    return And.make((*same, kv < prod(sizes)))


@named
def sliding_tile(canvas: Data, kernel: Data, tile: Data, *, text: int = 0) -> Mask:
    """Each tile of a canvas attends to the tiles around it. The text after the canvas attends to all, and all attend to it.

    Predicate: ``(kv < pixels + text) & ((q >= pixels) | (kv >= pixels) | near)`` with ``pixels = prod(canvas)`` and
    ``near`` the :func:`neighborhood` of ``canvas // tile`` and ``kernel // tile`` at the tiles of ``q`` and ``kv``

    ``sliding_tile(canvas=[1, 6], kernel=[1, 4], tile=[1, 2], text=1)`` at 7 x 8::

        ■ ■ ■ ■ ⬚ ⬚ ■ ⬚
        ■ ■ ■ ■ ⬚ ⬚ ■ ⬚
        ■ ■ ■ ■ ⬚ ⬚ ■ ⬚
        ■ ■ ■ ■ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ■ ■ ■ ■ ■ ⬚
        ⬚ ⬚ ■ ■ ■ ■ ■ ⬚
        ■ ■ ■ ■ ■ ■ ■ ⬚

    Args:
        canvas: the size of the canvas along 1, 2 or 3 axes, outermost first, e.g. ``[frames, height, width]``. Positions run
            through the tiles, one after another.
        kernel: the size of the window along each axis, in pixels.
        tile: the size of a tile along each axis; it must divide canvas and kernel.
        text: tokens of text after the canvas; later positions are padding.

    Raises:
        ExpressionError: sizes that do not fit each other.

    Source: Sliding Tile Attention, https://arxiv.org/abs/2502.04507; ``generate_sta_mask_mod_3d`` of attention-gym.
    """
    sizes, window = _axes("sliding_tile", canvas, kernel)
    tiles = fixed_ints(tile, "sliding_tile: tile", [len(sizes)])
    grid, reach = (_divided("sliding_tile", name, of, tiles) for name, of in (("canvas", sizes), ("kernel", window)))
    pixels = prod(sizes)
    n = prod(tiles)
    near = _window(grid, reach, _coordinates(q // n, grid), _coordinates(kv // n, grid))
    return (kv < pixels + fixed_int(text, "sliding_tile: text")) & ((q >= pixels) | (kv >= pixels) | near)


@named
def svg_spatial(frame_length: int, *, width: float, prompt: Index | int = 0, sinks: Index | int = 0, round_to: int = 1) -> Mask:
    """Each token of a video attends to the frames around it; the prompt attends to all, and all attend to it: a spatial head.

    Predicate: ``(abs(q - kv) < reach) | (q < prompt) | (kv < prompt + sinks * frame_length)`` with
    ``reach = width * frame_length // round_to * round_to``

    ``svg_spatial(frame_length=2, width=1, prompt=1)`` at 7 x 7 and 4 x 7::

        ■ ■ ■ ■ ■ ■ ■     ■ ■ ■ ■ ■ ■ ■
        ■ ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚ ⬚
        ■ ⬚ ■ ■ ■ ⬚ ⬚     ■ ⬚ ■ ■ ■ ⬚ ⬚
        ■ ⬚ ⬚ ■ ■ ■ ⬚
        ■ ⬚ ⬚ ⬚ ■ ■ ■
        ■ ⬚ ⬚ ⬚ ⬚ ■ ■

    Args:
        frame_length: tokens in a frame.
        width: frames to either side; a part of a frame too, e.g. 1.5.
        prompt: tokens of the prompt, before the video.
        sinks: frames at the start of the video that every token attends to.
        round_to: the reach in tokens is rounded down to a multiple of this; the published code has 128.

    Raises:
        ExpressionError: a number out of range, or a reach of no token.

    Source: Sparse VideoGen, https://arxiv.org/abs/2502.01776; ``generate_spatial_head_mask_mod`` of attention-gym.
    """
    length, unit = fixed_int(frame_length, "svg_spatial: frame_length", 1), fixed_int(round_to, "svg_spatial: round_to", 1)
    if isinstance(width, bool) or not isinstance(width, int | float):
        raise OperandError(f"svg_spatial: width must be a number of frames, got {width!r}")
    if not 0 <= width < inf:
        raise ExpressionError(f"svg_spatial: width must be a finite number of frames from 0 up, got {width}")
    reach = _reach("svg_spatial", int(width * length) // unit * unit, f"{width} frames of {length} in steps of {unit}")
    text, first = int_or_index(prompt, "svg_spatial: prompt"), int_or_index(sinks, "svg_spatial: sinks")
    return ((kv > q - reach) & (kv < q + reach)) | (q < text) | (kv < text + first * length)


@named
def svg_temporal(frame_length: int, *, frames: int, width: int, prompt: Index | int = 0) -> Mask:
    """Each token of a video attends to those near its own place in every frame; the prompt as in a spatial head: a temporal head.

    Predicate: ``(abs((q - prompt) % frame_length - (kv - prompt) % frame_length) < width * frame_length // frames)``, or
    ``q < prompt``, or ``kv < prompt``; keys after the last frame are masked out, except for the prompt

    ``svg_temporal(frame_length=3, frames=3, width=1)`` at 9 x 9::

        ■ ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚
        ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚ ■
        ■ ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚
        ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚ ■
        ■ ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚
        ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ■ ⬚ ⬚ ■ ⬚ ⬚ ■

    Args:
        frame_length: tokens in a frame.
        frames: frames of the video.
        width: of ``frames`` parts of a frame, those to either side.
        prompt: tokens of the prompt, before the video.

    Raises:
        ExpressionError: a number out of range, or a width of no token.

    Source: Sparse VideoGen, https://arxiv.org/abs/2502.01776; ``generate_temporal_head_mask_mod`` of attention-gym.
    """
    length, count = fixed_int(frame_length, "svg_temporal: frame_length", 1), fixed_int(frames, "svg_temporal: frames", 1)
    share = fixed_int(width, "svg_temporal: width") * length // count
    reach = _reach("svg_temporal", share, f"{width} of {count} parts of a frame of {length}")
    text = int_or_index(prompt, "svg_temporal: prompt")
    place, other = (q - text) % length, (kv - text) % length
    near = (other > place - reach) & (other < place + reach) & (kv < text + count * length)
    return (q < text) | (kv < text) | near


@named
def image_cross(spans: Data, image_length: Index | int) -> Mask:
    """Cross-attention from text to images: the queries in an image's span attend to all tokens of the image.

    Predicate: ``(q >= spans[b, i, 0]) & (q < spans[b, i, 1])`` with the image ``i = kv // image_length``

    ``image_cross(spans=[[0, 3], [1, 3], [3, 5]], image_length=2)`` at 5 x 6::

        ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■

    Args:
        spans: for each image the first query that attends to it and the end of these queries, ``int[n, 2]`` or ``int[B, n, 2]``.
        image_length: tokens of each image.

    Raises:
        ExpressionError: an image of no token, or spans of another shape.

    Source: Flamingo, https://arxiv.org/abs/2204.14198; ``generate_vision_cross_attention_mask_mod`` of attention-gym.
    """
    image = kv // int_or_index(image_length, "image_cross: image_length", 1)
    if not isinstance(spans, Param) and as_table(spans, "image_cross: spans").shape[-1:] != (2,):
        raise ExpressionError("image_cross: spans must be pairs, the first query of each image and the one after its last")
    start, stop = (lookup(spans, "image_cross: spans", "[n, 2] or [B, n, 2]", (image, side), (b, image, side)) for side in (0, 1))
    return (q >= start) & (q < stop)


@named
def tile_topk(topk: Data, size: Index | int, *, sizes: Data | None = None) -> Mask:
    """Each tile of queries attends to the tiles of keys chosen for it.

    Predicate: ``kv // size`` is one of ``topk[b, h, q // size, :]``, and ``kv % size < sizes[b, kv // size]``

    ``tile_topk(topk=[[0, 1], [1, 2], [0, 2]], size=2)`` at 6 x 6 and 4 x 6::

        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■     ⬚ ⬚ ■ ■ ■ ■
        ⬚ ⬚ ■ ■ ■ ■     ⬚ ⬚ ■ ■ ■ ■
        ■ ■ ⬚ ⬚ ■ ■
        ■ ■ ⬚ ⬚ ■ ■

    ``tile_topk(topk=[[0], [1], [2]], size=2, sizes=[2, 1, 2])`` at 6 x 6 and 4 x 6::

        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ⬚ ⬚ ⬚     ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ⬚ ⬚ ⬚     ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■

    Args:
        topk: the tiles chosen for each tile of queries, ``int[tiles, K]``, ``int[B, tiles, K]`` or ``int[B, H, tiles, K]``; an
            axis B or H of size 1 is broadcast, an entry below 0 is no tile.
        size: tokens in a tile.
        sizes: the real tokens of each tile where the others are padding, ``int[tiles]`` or ``int[B, tiles]``.

    Raises:
        ExpressionError: a size below 1, a table of another shape, or a parameter for ``topk``: the mask has K conditions.

    Source: VSA, https://arxiv.org/abs/2505.13389; ``generate_vsa_mask_mod`` of attention-gym.
    """
    n = int_or_index(size, "tile_topk: size", 1)
    if isinstance(topk, Param):
        raise ExpressionError(
            f"tile_topk: topk cannot be a parameter, as the mask has a condition for each choice: give the values of {topk}"
        )
    table, axes = as_table(topk, "tile_topk: topk"), "[tiles, K], [B, tiles, K] or [B, H, tiles, K]"
    seen: list[Mask] = []
    for i in range((table.shape and table.shape[-1]) or 0):
        tile = lookup(table, "tile_topk: topk", axes, (q // n, i), (b, q // n, i), (b, h, q // n, i))
        chosen = kv // n == tile
        if sizes is not None:
            at = maximum(tile, 0)
            chosen &= kv < tile * n + lookup(sizes, "tile_topk: sizes", "[tiles] or [B, tiles]", (at,), (b, at))
        seen.append(chosen)
    if not seen:
        raise ExpressionError(f"tile_topk: topk must have the axes {axes}, got an integer")
    return Or.make(tuple(seen))


def _axes(name: str, canvas: Any, kernel: Any, what: str = "kernel") -> tuple[list[int], list[int]]:
    sizes = fixed_ints(canvas, f"{name}: canvas", (1, 2, 3))
    window = fixed_ints(kernel, f"{name}: {what}", [len(sizes)])
    if any(k > n for k, n in zip(window, sizes, strict=True)):
        raise ExpressionError(f"{name}: the {what} {window} must fit into the canvas {sizes}")
    return sizes, window


def _divided(name: str, what: str, sizes: list[int], tiles: list[int]) -> list[int]:
    if any(n % t for n, t in zip(sizes, tiles, strict=True)):
        raise ExpressionError(f"{name}: the tile {tiles} must divide the {what} {sizes} along each axis")
    return [n // t for n, t in zip(sizes, tiles, strict=True)]


def _reach(name: str, reach: int, what: str) -> int:
    if reach < 1:
        raise ExpressionError(f"{name}: {what} are {reach} tokens, so no token would attend to itself; give a larger width")
    return reach


def _coordinates(position: Index, sizes: list[int]) -> list[Index]:
    """The coordinates of a position, the last axis fastest."""
    at = [position // prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return at[:1] + [index % size for index, size in zip(at[1:], sizes[1:], strict=True)]


def _tiled(position: Index, grid: list[int], tiles: list[int]) -> list[Index]:
    """The coordinates of a position that runs through the tiles of a grid, one after another."""
    outer, inner = _coordinates(position // prod(tiles), grid), _coordinates(position % prod(tiles), tiles)
    return [index * size + within for index, size, within in zip(outer, tiles, inner, strict=True)]


def _window(sizes: list[int], window: list[int], queries: list[Index], keys: list[Index]) -> Mask:
    """The keys in the windows around queries, moved inwards at the edges, from the coordinates of both."""
    inside: list[Mask] = []
    for size, k, x, y in zip(sizes, window, queries, keys, strict=True):
        start = _start(x, size, k)
        inside += [(y >= start) & (y < start + k)]
    return And.make(tuple(inside))


def _start(x: Index, size: int, k: int) -> Index:
    return minimum(maximum(x - k // 2, 0), size - k)
