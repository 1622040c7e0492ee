"""A ``score_mod`` as a function of tensors, its check, and whether functions of a user still read what they read before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flexmask import _sync
from flexmask._checks import kind_of
from flexmask._transforms import has_values, is_wrapped, reason_of
from flexmask.errors import FlexmaskError, LoweringError, OperandError
from flexmask.scores.score import ScoreMod


class Unchanged:
    """A function whose later calls raise where a tensor that the first call read was written since.

    Cells and scores are computed tile by tile, and again in the backward pass, by functions that read tensors which autograd does
    not know of. As autograd does for the tensors that it saves, this compares torch's version counters, and the memory.

    Args:
        function: the function. What it reads depends on no value.
        tensors: what it may read later, though not in its first call.
    """

    def __init__(self, function: Callable[..., Any], *tensors: Tensor) -> None:
        self._function, self._tensors = function, tensors
        self._read: list[tuple[Tensor, _sync.Stamp]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._read is None:
            with _Reads(arguments) as reads:
                found = self._function(*arguments)
            tensors = filter(_is_plain, (*self._tensors, *reads.tensors))
            self._read = [(tensor, _sync.Stamp([tensor], copies=False)) for tensor in tensors]
            return found
        for tensor, stamp in self._read:
            if not stamp.holds([tensor]):
                raise LoweringError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                    f"{kind_of(tensor)} that the mask or the score_mod reads was written after the forward pass. Call backward() "
                    "before, or give attention a clone of the data"
                )
        return self._function(*arguments)


def _is_plain(tensor: Tensor) -> bool:
    return not is_wrapped(tensor) and has_values(tensor)


class _Reads(TorchFunctionMode):
    """Collects the tensors that operations read and did not make.

    Args:
        arguments: of the function that runs, which do not count.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._known = set(map(id, arguments))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and id(value) not in self._known:
                self.tensors.append(value)
                self._known.add(id(value))
        found = func(*args, **(kwargs or {}))
        self._known.update(map(id, tree_leaves(found)))
        return found


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
