"""A ``score_mod`` as a function of tensors, and its check before a kernel compiles it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

import torch
from torch import Tensor

from flexmask._checks import kind_of
from flexmask._vmap import reason_of
from flexmask.errors import FlexmaskError, OperandError
from flexmask.scores.score import ScoreMod

#: The functions that `check_scores` has called.
_CHECKED: WeakSet[ScoreMod] = WeakSet()


def over_indices(score_mod: ScoreMod) -> ScoreMod:
    """Maps a function of scalars over [b, h, q, kv] with vmap, as FlexAttention does, so that `bias[b][h]` works."""

    def apply(*values: Tensor) -> object:
        if torch.compiler.is_compiling():  # a graph cannot break within a try block on every version of torch
            return score_mod(*values)
        try:
            return score_mod(*values)
        except (FlexmaskError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a function of the user raises
            raise OperandError(f"score_mod fails for the indices of scores: {reason_of(error)}") from error

    def checked(score: Tensor, *indices: Tensor) -> Tensor:
        found = apply(score, *indices)
        if not isinstance(found, Tensor) or found.dim() or found.dtype == torch.bool:
            raise OperandError(
                f"score_mod must return a score, a tensor of shape [], got {kind_of(found)}; a condition is a mask"
            )
        return found

    mapped: Callable[..., Tensor] = checked
    for axis in (4, 3, 2, 1):
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    return mapped


@torch.no_grad()
def check_scores(score_mod: ScoreMod, query: Tensor, key: Tensor) -> None:
    """Calls a ``score_mod`` once for the first and last sequence, head, query and key, as kernels do not check what it returns.

    Args:
        score_mod: the function.
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.

    Raises:
        OperandError: it fails, or does not return a score.
    """
    with suppress(TypeError):  # of an object that has no hash
        if score_mod in _CHECKED:
            return
    ends = [torch.arange(2, device=query.device) * (size - 1) for size in (*query.shape[:3], key.shape[2])]
    over_indices(score_mod)(query.new_zeros(2, 2, 2, 2), *ends)
    with suppress(TypeError):
        _CHECKED.add(score_mod)
