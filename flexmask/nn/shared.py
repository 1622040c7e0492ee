"""Layers with different masks: each takes of a model's data what its own mask has parameters for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexmask._checks import kind_of
from flexmask.errors import OperandError
from flexmask.nn.call_masks import RESERVED
from flexmask.nn.multihead import MultiheadFlexAttention


def call(layer: MultiheadFlexAttention, x: Tensor, **given: Any) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Calls a layer with a mask of its own, without the values of parameters that this mask does not have.

    For a model whose layers have different masks, which takes the data of all of them: ``call(layer, x, ids=ids, lengths=n)``
    gives ``lengths`` only to the layers with ``lengths`` among ``layer.mask.params``. A parameter that a mask has and that is not
    given is an error, so a misspelt name is one, too.

    Args:
        layer: the layer.
        x: as for :meth:`flexmask.MultiheadFlexAttention.forward`.
        given: the other arguments of ``forward`` but ``mask``, and values by the names of parameters.

    Raises:
        OperandError: ``layer`` is another module, or there is a ``mask`` among the arguments: call the layer with it.
        ExpressionError: a missing parameter of the layer's mask.
    """
    if not isinstance(layer, MultiheadFlexAttention):
        raise OperandError(f"layer must be a flexmask.MultiheadFlexAttention, got {kind_of(layer)}")
    if "mask" in given:
        raise OperandError("call takes the layer's own mask, which is set as layer.mask = ...; with another one call the layer")
    own = () if layer.mask is None else layer.mask.params
    out: Tensor | tuple[Tensor, Tensor, Tensor] = layer(x, **{k: v for k, v in given.items() if k in RESERVED or k in own})
    return out
