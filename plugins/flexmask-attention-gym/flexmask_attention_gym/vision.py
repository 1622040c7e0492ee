"""attention-gym's masks for images and videos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexmask.errors import ExpressionError
from flexmask.expr import Index
from flexmask.registry import named
from flexmask_attention_gym.generators import MaskMod, each_axis, generated, positive, tensor

if TYPE_CHECKING:
    from flexmask.expr import Data

__all__ = [
    "gym_flamingo",
    "gym_morton_natten",
    "gym_natten",
    "gym_sta",
    "gym_svg_spatial",
    "gym_svg_temporal",
    "gym_tiled_natten",
    "gym_vsa",
]


@named
@generated
def gym_natten(canvas: Data, kernel: Data) -> MaskMod:
    """Each pixel sees the window around it, moved inwards at the edges: right for square canvases and kernels only.

    Predicate: along rows ``q // columns`` and columns ``q % columns``, ``abs(y - center) <= kernel // 2`` with
    ``center = minimum(maximum(x, kernel // 2), side - 1 - kernel // 2)``

    ``gym_natten(canvas=[4, 4], kernel=[3, 3])`` at 8 x 16::

        ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ■ ■ ■ ⬚ ⬚ ⬚ ⬚

    Args:
        canvas: ``[rows, columns]`` of the row-major canvas. attention-gym's ``canvas_h, canvas_w``.
        kernel: ``[rows, columns]`` of the window, odd; an even one is taken as one more. attention-gym's ``kernel_h, kernel_w``.

    attention-gym measures the row index against ``canvas_w`` and ``kernel_w``, and the column index against ``canvas_h`` and
    ``kernel_h``. Where the canvas or the kernel is not square, the windows are therefore not those of NATTEN; this mask stays as
    attention-gym's. :func:`flexmask.masks.neighborhood` is right on every canvas.

    Source: ``generate_natten`` of attention-gym, after NATTEN, https://arxiv.org/abs/2204.07143
    """
    from attn_gym.masks import generate_natten

    rows, columns = each_axis(canvas, "gym_natten: canvas", 2)
    high, wide = each_axis(kernel, "gym_natten: kernel", 2)
    return generate_natten(canvas_w=columns, canvas_h=rows, kernel_w=wide, kernel_h=high)


@named
@generated
def gym_tiled_natten(canvas: Data, kernel: Data, tile: Data) -> MaskMod:
    """The window around each pixel of a canvas whose positions run through tiles, one tile after another.

    Predicate: as ``gym_natten`` with the true rows and columns, ``x = (tile's x) * width + (x within the tile)``

    ``gym_tiled_natten(canvas=[2, 4], kernel=[1, 3], tile=[2, 2])`` at 8 x 8::

        ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ■ ■ ⬚ ⬚ ■ ⬚
        ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ⬚ ⬚ ■ ■
        ⬚ ⬚ ⬚ ■ ⬚ ⬚ ■ ■

    Args:
        canvas: ``[rows, columns]`` of the canvas. attention-gym's ``H, W``.
        kernel: ``[rows, columns]`` of the window, odd; an even one is taken as one more. attention-gym's ``K_H, K_W``.
        tile: ``[rows, columns]`` of a tile, which must divide the canvas. attention-gym's ``T_H, T_W``.

    Raises:
        ExpressionError: a tile that does not divide the canvas.

    Source: ``generate_tiled_natten`` of attention-gym; flexmask's own mask is ``neighborhood`` with a tile.
    """
    from attn_gym.masks import generate_tiled_natten

    (rows, columns), (high, wide) = (
        each_axis(canvas, "gym_tiled_natten: canvas", 2),
        each_axis(kernel, "gym_tiled_natten: kernel", 2),
    )
    tile_rows, tile_columns = each_axis(tile, "gym_tiled_natten: tile", 2)
    if rows % tile_rows or columns % tile_columns:
        raise ExpressionError(f"gym_tiled_natten: the tile {tile} must divide the canvas {canvas} along both axes")
    return generate_tiled_natten(W=columns, H=rows, K_W=wide, K_H=high, T_W=tile_columns, T_H=tile_rows)


@named
@generated
def gym_morton_natten(canvas: Data, kernel: Data) -> MaskMod:
    """The window around each pixel of a canvas whose positions follow a Morton curve.

    Predicate: as ``gym_natten`` with the true rows and columns, the odd and the even bits of a position

    ``gym_morton_natten(canvas=[4, 4], kernel=[3, 3])`` at 8 x 16::

        ■ ■ ■ ■ ■ ⬚ ■ ⬚ ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ■ ⬚ ■ ⬚ ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ■ ⬚ ■ ⬚ ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ■ ⬚ ■ ⬚ ■ ■ ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ■ ⬚ ■ ■ ■ ■ ■ ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ■ ⬚ ■ ■ ■ ■ ■ ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ■ ⬚ ■ ■ ■ ■ ■ ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ■ ⬚ ■ ■ ■ ■ ■ ⬚ ■ ⬚ ⬚ ■ ■ ⬚ ⬚

    Args:
        canvas: ``[rows, columns]`` of the canvas, a square of a power of two for positions without gaps. attention-gym's
            ``canvas_h, canvas_w``.
        kernel: ``[rows, columns]`` of the window, odd; an even one is taken as one more. attention-gym's ``kernel_h, kernel_w``.

    Source: ``generate_morton_natten`` of attention-gym.
    """
    from attn_gym.masks import generate_morton_natten

    (rows, columns), (high, wide) = (
        each_axis(canvas, "gym_morton_natten: canvas", 2),
        each_axis(kernel, "gym_morton_natten: kernel", 2),
    )
    return generate_morton_natten(canvas_w=columns, canvas_h=rows, kernel_w=wide, kernel_h=high)


@named
@generated
def gym_sta(canvas: Data, kernel: Data, tile: Data, *, text: Index | int = 0) -> MaskMod:
    """Sliding tiles: each tile of an image or video sees the window of tiles around its own; text sees and is seen by all.

    Predicate: along each axis of tiles, ``start <= y < start + kernel // tile`` with the window moved inwards at the edges;
    or ``q`` or ``kv`` is one of the ``text`` positions behind the canvas

    ``gym_sta(canvas=[2, 4], kernel=[2, 2], tile=[2, 2], text=1)`` at 9 x 9::

        ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ■
        ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ■
        ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ■
        ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■ ■
        ■ ■ ■ ■ ■ ■ ■ ■ ■

    Args:
        canvas: ``[rows, columns]`` or ``[frames, rows, columns]``; positions run through tiles, one tile after another.
        kernel: the window along each axis, in pixels; a multiple of the tile.
        tile: the size of a tile along each axis, which must divide the canvas.
        text: tokens of text behind the canvas. attention-gym's ``text_seq_len``.

    Raises:
        ExpressionError: a tile that does not divide the canvas or the kernel.

    Source: ``generate_sta_mask_mod_2d`` and ``generate_sta_mask_mod_3d`` of attention-gym, after sliding tile attention,
    https://arxiv.org/abs/2502.04507. In 3-D attention-gym's argument names end in ``twh``; the order is time, height, width.
    """
    from attn_gym.masks import generate_sta_mask_mod_2d, generate_sta_mask_mod_3d

    shape = tuple(each_axis(canvas, "gym_sta: canvas", 2, 3))
    axes = len(shape)
    window, block = tuple(each_axis(kernel, "gym_sta: kernel", axes)), tuple(each_axis(tile, "gym_sta: tile", axes))
    generate = generate_sta_mask_mod_2d if axes == 2 else generate_sta_mask_mod_3d
    made: MaskMod = generate(shape, window, block, positive(text, "gym_sta: text", 0))
    return made


@named
@generated
def gym_svg_spatial(
    frame_length: Index | int,
    *,
    width: Index | int,
    prompt: Index | int = 0,
    sinks: bool = False,
    round_to: Index | int = 128,
) -> MaskMod:
    """Spatial heads of Sparse VideoGen: a band of so many frames, and the prompt.

    Predicate: ``(q < prompt) | (kv < prompt) | (abs(q - kv) < width * frame_length // round_to * round_to)``; with ``sinks``
    also the first frame, ``kv < prompt + frame_length``

    ``gym_svg_spatial(frame_length=2, width=1, prompt=1, round_to=1)`` at 5 x 5::

        ■ ■ ■ ■ ■
        ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ⬚
        ■ ⬚ ■ ■ ■
        ■ ⬚ ⬚ ■ ■

    Args:
        frame_length: tokens in a frame. attention-gym's ``token_per_frame``.
        width: frames in the band to each side. The band counts the query's own key, so ``width * frame_length - 1`` others to
            each side.
        prompt: tokens of the prompt, which stands first. attention-gym's ``prompt_length``.
        sinks: whether every query sees the first frame. attention-gym's ``attn_sink``.
        round_to: the band is rounded down to a multiple of this. attention-gym's ``round_width``.

    attention-gym's ``num_frames`` has no influence on this mask.

    Source: ``generate_spatial_head_mask_mod`` of attention-gym, after https://arxiv.org/abs/2502.01776
    """
    from attn_gym.masks import generate_spatial_head_mask_mod

    return generate_spatial_head_mask_mod(
        prompt_length=positive(prompt, "gym_svg_spatial: prompt", 0),
        token_per_frame=positive(frame_length, "gym_svg_spatial: frame_length"),
        width=positive(width, "gym_svg_spatial: width"),
        attn_sink=bool(sinks),
        round_width=positive(round_to, "gym_svg_spatial: round_to"),
    )


@named
@generated
def gym_svg_temporal(frame_length: Index | int, *, frames: Index | int, width: Index | int, prompt: Index | int = 0) -> MaskMod:
    """Temporal heads of Sparse VideoGen: about the same place in every frame, and the prompt.

    Predicate: ``(q < prompt) | (kv < prompt) | (abs((q - prompt) % frame_length - (kv - prompt) % frame_length) < reach)`` with
    ``reach = width * frame_length // frames``

    ``gym_svg_temporal(frame_length=2, frames=2, width=1, prompt=1)`` at 5 x 5::

        ■ ■ ■ ■ ■
        ■ ■ ⬚ ■ ⬚
        ■ ⬚ ■ ⬚ ■
        ■ ■ ⬚ ■ ⬚
        ■ ⬚ ■ ⬚ ■

    Args:
        frame_length: tokens in a frame. attention-gym's ``token_per_frame``.
        frames: frames of the video. attention-gym's ``num_frames``.
        width: frames' worth of keys that a query sees to each side, spread over all frames.
        prompt: tokens of the prompt, which stands first. attention-gym's ``prompt_length``.

    Source: ``generate_temporal_head_mask_mod`` of attention-gym, after https://arxiv.org/abs/2502.01776
    """
    from attn_gym.masks import generate_temporal_head_mask_mod

    return generate_temporal_head_mask_mod(
        prompt_length=positive(prompt, "gym_svg_temporal: prompt", 0),
        num_frames=positive(frames, "gym_svg_temporal: frames"),
        token_per_frame=positive(frame_length, "gym_svg_temporal: frame_length"),
        width=positive(width, "gym_svg_temporal: width"),
    )


@named
@generated
def gym_flamingo(spans: Data, image_length: Index | int) -> MaskMod:
    """Text sees the images of its span: cross attention from text to images.

    Predicate: ``(q >= spans[kv // image_length, 0]) & (q < spans[kv // image_length, 1])``

    ``gym_flamingo(spans=[[0, 2], [1, 4]], image_length=2)`` at 4 x 4::

        ■ ■ ⬚ ⬚
        ■ ■ ■ ■
        ⬚ ⬚ ■ ■
        ⬚ ⬚ ■ ■

    Args:
        spans: ``[images, 2]``, the first query that sees an image and the one behind the last. attention-gym's ``intervals``.
        image_length: keys of an image, one image after another; there are ``images * image_length`` keys.

    Source: ``generate_vision_cross_attention_mask_mod`` of attention-gym, after Flamingo, https://arxiv.org/abs/2204.14198
    """
    from attn_gym.masks import generate_vision_cross_attention_mask_mod

    ranges = tensor(spans, "gym_flamingo: spans", "[images, 2]")
    if ranges.shape[-1] != 2:
        raise ExpressionError(f"gym_flamingo: spans must have the axes [images, 2], got shape {list(ranges.shape)}")
    return generate_vision_cross_attention_mask_mod(ranges, positive(image_length, "gym_flamingo: image_length"))


@named
@generated
def gym_vsa(topk: Data, size: Index | int, *, sizes: Data | None = None) -> MaskMod:
    """Video sparse attention: each tile of queries sees the tiles of keys that were chosen for it.

    Predicate: ``kv // size`` is one of ``topk[b, h, q // size]``; with ``sizes`` also ``kv % size < sizes[kv // size]``

    ``gym_vsa(topk=[[[[0, 1], [1, 2], [0, 2]]]], size=2)`` at 6 x 6::

        ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■
        ⬚ ⬚ ■ ■ ■ ■
        ■ ■ ⬚ ⬚ ■ ■
        ■ ■ ⬚ ⬚ ■ ■

    Args:
        topk: the tiles chosen for each tile of queries, ``int[B, H, tiles, K]``. attention-gym's ``topk_indices``.
        size: tokens in a tile. attention-gym's ``tile_numel``.
        sizes: the tokens of each tile of keys that are no padding, ``int[tiles]``. attention-gym's ``variable_block_sizes``.

    Source: ``generate_vsa_mask_mod`` of attention-gym, after VSA, https://arxiv.org/abs/2505.13389
    """
    from attn_gym.masks import generate_vsa_mask_mod

    chosen = tensor(topk, "gym_vsa: topk", "[B, H, tiles, K]")
    counts = None if sizes is None else tensor(sizes, "gym_vsa: sizes", "[tiles]")
    return generate_vsa_mask_mod(chosen, positive(size, "gym_vsa: size"), counts)
