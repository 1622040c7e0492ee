"""Functions of a user that attention calls again in the backward pass, and whether they still read what they read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flexmask import _sync
from flexmask._checks import kind_of
from flexmask._transforms import has_values, is_wrapped
from flexmask.errors import LoweringError


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
