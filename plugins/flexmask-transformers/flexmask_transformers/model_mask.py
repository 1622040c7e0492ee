"""The mask that a model's mask function makes and its attention layers receive: a flexmask Mask in the form of a 4-D tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmask import Mask, MaskCache, from_dense, key_padding, q
from flexmask.errors import OperandError
from flexmask.plans.capture import lower_in_graph
from flexmask_transformers.arguments import truth_values
from flexmask_transformers.packing import Documents

__all__ = ["ModelMask", "Request", "in_graph", "to_mask"]

#: Functions that a model may call on its mask: METADATA reads its shape, dtype or device, SAME returns the mask itself.
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
    "__format__",
}
SAME = {"contiguous", "clone", "detach", "type_as", "requires_grad_"}


@dataclass(frozen=True)
class Request:
    """What the next mask needs in addition to the arguments of a mask function.

    Attributes:
        documents: the documents of packed rows; None where rows are not packed.
        user_mask: the Mask, text or mask_mod that the caller gave as ``attention_mask``, or a dict of them for each layer type.
        keep: the 2-D mask, ``bool[B, tokens]``, or None.
        cache: the model's cache of keys, or None.
        knows_positions: whether ``documents`` are those of the ``position_ids`` that the model got.
    """

    documents: Documents | None = None
    user_mask: Any = None
    keep: Tensor | None = None
    cache: Any = None
    knows_positions: bool = False


class ModelMask(Tensor):
    """A Mask in the form ``bool[B, 1, q_len, kv_len]`` that transformers passes through a model, without values.

    Only flexmask's attention reads it. Any other operation raises, since a model that computes with its mask itself would give
    other numbers.

    Attributes:
        mask: the mask; its queries start at ``q_offset``, its keys at 0.
        q_offset: the position of the first query, an int or a tensor without axes.
        cache: the lowerings of the mask, which all layers share.
        is_chunked: whether it depends on positions in the document, not on distances alone.
        is_whole: whether it replaces the documents of ``cu_seq_lens`` and ``seq_idx``.
        request: the documents, user mask and cache that it was made with.
    """

    mask: Mask
    q_offset: int | Tensor
    cache: MaskCache
    is_chunked: bool
    is_whole: bool
    request: Request
    _variants: dict[Hashable, tuple[Any, Mask]]
    _moved: dict[torch.device, ModelMask]

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
        is_whole: bool = False,
        request: Request = Request(),
    ) -> ModelMask:
        """A mask for ``batch`` sequences of ``q_len`` queries and ``kv_len`` keys."""
        made = Tensor._make_wrapper_subclass(ModelMask, (batch, 1, q_len, kv_len), dtype=torch.bool, device=torch.device(device))
        assert isinstance(made, ModelMask)
        if isinstance(q_offset, Tensor):
            q_offset = q_offset.clone()  # a static cache counts on in this tensor when a layer adds its keys
        made.mask, made.q_offset, made.is_chunked, made.is_whole, made.request = mask, q_offset, is_chunked, is_whole, request
        made.cache, made._variants, made._moved = MaskCache(), {}, {}
        return made

    def moved(self, device: torch.device) -> ModelMask:
        """The mask on a device, for the layers there."""
        if device == self.device:
            return self
        if device not in self._moved:
            if self.device.type == "meta":
                raise OperandError(f"a mask on meta has no data to move to {device}; run the model on {device} itself")
            batch, _, q_len, kv_len = self.shape
            offset = self.q_offset.to(device) if isinstance(self.q_offset, Tensor) else self.q_offset
            flags: dict[str, Any] = {"is_chunked": self.is_chunked, "is_whole": self.is_whole, "request": self.request}
            self._moved[device] = ModelMask.make(self.mask.to(device), batch, q_len, kv_len, offset, device, **flags)
        return self._moved[device]

    def placed(self, mask: Mask) -> Mask:
        """A mask whose queries start at ``q_offset`` as one whose queries start at 0."""
        offset = 0 if self.device.type == "meta" else int(self.q_offset)
        return mask.substitute(q=q + offset) if offset else mask

    def variant(self, kind: str, data: tuple[object, ...], build: Callable[[], Mask]) -> Mask:
        """The mask that ``build`` makes from this one and ``data``; the layers of a model share it."""
        key = (kind, *map(id, data))
        if key not in self._variants:
            self._variants[key] = (data, build())  # keeping the data keeps its id in use
        return self._variants[key][1]

    def __repr__(self) -> str:  # type: ignore[override] # torch passes no contents to subclasses
        return f"ModelMask({self.mask}, shape={list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in METADATA or func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined] # reentrant checkpointing sets it
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "to" and isinstance(args[0], ModelMask):
            options = {key: value for key, value in (kwargs or {}).items() if key != "copy"}
            device = torch._C._nn._parse_to(*args[1:], **options)[0]
            return args[0] if device is None else args[0].moved(device)
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
        raise NotImplementedError(
            f"this model computes with its attention mask itself ({func}), which attn_implementation='flexmask' does not "
            "support; use attn_implementation='sdpa' for it"
        )


def _takes_all(mask: Tensor, index: Any) -> bool:
    """Whether an index such as ``[:, :, :, :kv_len]`` takes the whole mask."""
    places = index if isinstance(index, tuple) else (index,)
    with torch._C.DisableTorchFunctionSubclass():
        return len(places) <= 4 and all(
            place is Ellipsis or (isinstance(place, slice) and place.indices(size) == (0, size, 1))
            for place, size in zip(places[::-1], mask.shape[::-1], strict=False)
        )


def in_graph(mask: Any, position_ids: Any) -> Any:
    """What a model in a graph of ``torch.compile`` passes on for a mask that was made before, as ``generate`` makes it.

    Returns:
        Its cells ``bool[B, 1, q_len, kv_len]``, in a dict for each layer type. Another mask, and one that was made without the
        ``position_ids`` of the model, as it is.
    """
    if isinstance(mask, dict):
        return {name: in_graph(own, position_ids) for name, own in mask.items()}
    if not isinstance(mask, ModelMask) or not (position_ids is None or mask.request.knows_positions):
        return mask
    batch, _, q_len, kv_len = mask.shape
    query, key = (torch.empty(batch, 1, length, 1, device=mask.device) for length in (q_len, kv_len))
    return lower_in_graph(mask.mask, query, key, mask.q_offset, block_size=(0, 0)).dense()


def to_mask(attention_mask: Tensor) -> Mask:
    """The Mask that a tensor of transformers stands for.

    A tensor of four axes has names where it shows the cells of named masks: see :meth:`flexmask.Mask.recognize`.

    Args:
        attention_mask: what ``create_causal_mask`` and its relatives give: a :class:`ModelMask`, ``bool[B, H, q_len, kv_len]`` of
            ``"sdpa"``, or ``float[B, H, q_len, kv_len]`` of ``"eager"``, with 0 for visible and the least number or ``-inf`` for
            masked out; or the 2-D mask of a tokenizer, ``[B, kv_len]`` with 1 for real tokens.

    Raises:
        OperandError: another number of axes, a float tensor with other values, or integers that are not 0 or 1.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask.placed(attention_mask.mask)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() not in (2, 4):
        shape = f"{list(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise OperandError(f"to_mask takes a tensor [B, H, q_len, kv_len] or [B, kv_len], got {shape}")
    if attention_mask.layout != torch.strided:
        raise OperandError(f"to_mask takes a dense tensor, got one of {attention_mask.layout}; convert it with .to_dense()")
    if attention_mask.dim() == 2:
        return key_padding(keep=attention_mask)
    if not attention_mask.is_floating_point():
        return from_dense(truth_values(attention_mask)).recognize()
    if attention_mask.device.type == "meta":
        raise OperandError("to_mask reads the values of a float mask, and this one is on meta, where it has none")
    visible = attention_mask == 0
    if not (attention_mask[~visible] <= torch.finfo(attention_mask.dtype).min).all():  # NaN compares as False
        raise OperandError(
            "to_mask takes float masks of 0 and the least number of their dtype or -inf; this one has other values, as a "
            "position bias has, which is no mask"
        )
    return from_dense(visible).recognize()
