"""The mask that a model's mask function makes and its attention layers receive: a flexmask Mask in the form of a 4-D tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flexmask import Mask, MaskCache, document
from flexmask.masks import reorder
from flexmask_transformers.request import Documents, Request

__all__ = ["ModelMask"]

#: Attributes and methods that a model may use: they ask for the shape and the dtype, or give the same mask.
METADATA = {
    "__get__",
    "dim",
    "size",
    "numel",
    "is_floating_point",
    "is_complex",
    "stride",
    "__len__",
    "get_device",
    "is_contiguous",
}
SAME = {"to", "contiguous", "clone", "detach", "type_as", "requires_grad_"}


class ModelMask(Tensor):
    """A Mask in the form ``bool[B, 1, q_len, kv_len]`` that transformers passes through a model, without values.

    Only flexmask's attention reads it. Any other operation raises, since a model that computes with its mask itself would give
    other numbers.

    Attributes:
        mask: the mask; its queries start at ``q_offset``, its keys at 0.
        q_offset: the position of the first query, an int or a tensor without axes.
        cache: the lowerings of the mask, which all layers share.
        is_chunked: whether it depends on positions in the document, not on distances alone.
        request: what it was made from.
    """

    mask: Mask
    q_offset: int | Tensor
    cache: MaskCache
    is_chunked: bool
    request: Request
    _variants: dict[Hashable, tuple[Any, Mask]]

    @staticmethod
    def make(
        mask: Mask,
        batch: int,
        q_len: int,
        kv_len: int,
        q_offset: int | Tensor,
        device: torch.device | str,
        *,
        is_chunked: bool = False,
        request: Request = Request(),
    ) -> ModelMask:
        """A mask for ``batch`` sequences of ``q_len`` queries and ``kv_len`` keys."""
        made = Tensor._make_wrapper_subclass(ModelMask, (batch, 1, q_len, kv_len), dtype=torch.bool, device=torch.device(device))
        assert isinstance(made, ModelMask)
        made.mask, made.q_offset, made.is_chunked, made.request = mask, q_offset, is_chunked, request
        made.cache, made._variants = MaskCache(), {}
        return made

    def within(self, documents: Documents) -> Mask:
        """The mask in each document of packed rows."""
        mask = reorder(self.mask, q=documents.positions, kv=documents.positions) if self.is_chunked else self.mask
        return mask & document(documents.ids)

    def variant(self, kind: str, data: object, build: Callable[[], Mask]) -> Mask:
        """The mask that ``build`` makes from this one and ``data``; the layers of a model share it."""
        key = (kind, id(data))
        if key not in self._variants:
            self._variants[key] = (data, build())  # keeping the data keeps its id in use
        return self._variants[key][1]

    def __repr__(self) -> str:  # type: ignore[override] # torch passes no contents to subclasses
        return f"ModelMask({self.mask}, shape={list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in SAME and isinstance(args[0], ModelMask):
            return args[0]
        if name == "__getitem__" and _takes_all(args[0], args[1]):
            return args[0]
        raise NotImplementedError(
            f"this model computes with its attention mask itself ({name}), which attn_implementation='flexmask' does not "
            "support; use attn_implementation='sdpa' for it"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as a disabled function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd's, around functions that get the mask as an argument
            return args[0]
        raise NotImplementedError(f"{func} on the attention mask of a model with attn_implementation='flexmask'")


def _takes_all(mask: Tensor, index: Any) -> bool:
    """Whether an index such as ``[:, :, :, :kv_len]`` takes the whole mask."""
    places = index if isinstance(index, tuple) else (index,)
    with torch._C.DisableTorchFunctionSubclass():
        return len(places) <= 4 and all(
            place is Ellipsis or (isinstance(place, slice) and place.indices(size) == (0, size, 1))
            for place, size in zip(places[::-1], mask.shape[::-1], strict=False)
        )
