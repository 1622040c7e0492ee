"""Pictures of attention weights: of one head, of the mean of all heads, or of each head on a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from torch import Tensor

from flexmask._checks import check_plain, checked_int
from flexmask.catalogue import from_dense
from flexmask.errors import OperandError, RenderError
from flexmask.expr.mask import Truth
from flexmask.intervals.bind import bind
from flexmask.lowering.dense import dense
from flexmask.plotting.annotations import LabelOptions, bands_of, key_labels, query_labels
from flexmask.plotting.caption import shortened
from flexmask.plotting.density import cells_in, summed
from flexmask.plotting.raster import Picture, Scores, rasterize
from flexmask.plotting.sheet import Indices, Sheet, arrange, panel_indices
from flexmask.tracing.trace import MaskLike, as_mask


def score_picture(
    weights: Tensor,
    mask: MaskLike | None = None,
    *,
    batch: int = 0,
    head: int | None = None,
    **options: Unpack[LabelOptions],
) -> Picture:
    """A picture of the weights of one sequence, and of one head or the mean of all.

    Args:
        weights: ``float[B, H, q_len, kv_len]``, as :func:`flexmask.backends.attention_weights` gives them.
        mask: its hidden cells are drawn as hidden instead of as weights of 0.
        batch: which sequence.
        head: which head; None for the mean of all.
        options: options of labels, as for :func:`flexmask.plotting.raster.rasterize`.

    Raises:
        RenderError: a sequence or head that the weights do not have, or weights that are not finite.
        OperandError: weights that are not such a tensor.
    """
    (found,) = _pictures(weights, mask, [(batch, head)], options)
    return found


def score_sheet(
    weights: Tensor,
    mask: MaskLike | None = None,
    *,
    batch: Indices = 0,
    head: Indices = "all",
    **options: Unpack[LabelOptions],
) -> Sheet:
    """A picture of the weights of each of some heads, and of each of some sequences, on one scale.

    Args:
        weights: ``float[B, H, q_len, kv_len]``.
        mask: its hidden cells are drawn as hidden.
        batch: which sequences: an index, a list of them, or ``"all"``.
        head: which heads, in the same way.
        options: options of labels, as for :func:`flexmask.plotting.raster.rasterize`.
    """
    _check_weights(weights)
    places = panel_indices(batch, head, weights.shape[0], weights.shape[1])
    found = _pictures(weights, mask, places, options)
    most = max(shown.scores.most for shown in found if shown.scores is not None)
    return arrange([replace(shown, scores=shown.scores and replace(shown.scores, most=most)) for shown in found], places)


def _pictures(
    weights: Tensor, mask: MaskLike | None, places: Sequence[tuple[int, int | None]], options: LabelOptions
) -> list[Picture]:
    """A picture for each sequence and head; None for the mean of all heads."""
    _check_weights(weights)
    batches, heads, q_len, kv_len = weights.shape
    for batch, head in places:
        for name, index, size in (("batch", batch, batches), ("head", 0 if head is None else head, heads)):
            checked_int(index, name, 0, size - 1, RenderError, "an index")
    whole = Truth(True) if mask is None else as_mask(mask, device=weights.device)
    context = bind(whole, q_len, kv_len, batch=batches, heads=heads, q_offset=options.get("q_offset", 0))
    visible, offset, tokens = dense(context).expand(weights.shape), context.q_offset, options.get("tokens")
    found = []
    for batch, head in places:
        drawn = slice(None) if head is None else slice(head, head + 1)
        values = weights[batch, drawn].mean(0).detach().float().cpu()
        if not values.isfinite().all():
            raise RenderError("weights must be finite; flexmask.backends.attention_weights gives 0 in fully masked rows")
        shown = rasterize(from_dense(visible[batch, drawn].any(0).cpu()), q_len, kv_len)
        first = int(offset[min(batch, offset.numel() - 1)]) if isinstance(offset, Tensor) else offset
        sums = summed(np.add, values.numpy().astype(np.float64), shown.step)
        pixels = (sums / cells_in(q_len, kv_len, shown.step)).astype(np.float32)
        found.append(
            replace(
                shown,
                text="attention weights" if mask is None else shortened(str(whole)),
                q_offset=first,
                batch=batch,
                batches=batches,
                head=head or 0,
                heads=heads if head is not None else 1,
                bands=bands_of(context, batch, head or 0) if options.get("bands", True) else (),
                q_tokens=None if tokens is None else query_labels(tokens, q_len, kv_len, first),
                kv_tokens=key_labels(kv_len, tokens, options.get("kv_tokens")),
                scores=Scores(pixels, float(pixels.max()), heads if head is None and heads > 1 else None),
            )
        )
    return found


def _check_weights(weights: Tensor) -> None:
    if isinstance(weights, Tensor):
        check_plain(weights, "weights")
    if not isinstance(weights, Tensor) or weights.dim() != 4 or not weights.is_floating_point():
        got = f"{weights.dtype}{list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise OperandError(f"weights must be a floating-point tensor [B, H, q_len, kv_len], got {got}")
    if not weights.numel():
        raise RenderError(f"there are no weights in {list(weights.shape)}")
