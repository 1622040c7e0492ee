"""The call that dynamo does not trace: it runs while ``torch.compile`` makes a graph, which gets its operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from flexmask._transforms import are_ints, captured, has_values
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError
from flexmask.expr.deferred import KINDS, DeferredMask, DeferredNode
from flexmask.expr.mask import Mask
from flexmask.plans.capture import Setting, bound, lower
from flexmask.plans.lowered import LoweredMask

#: The errors that a refused lowering raises.
ERRORS: dict[str, type[FlexmaskError]] = {kind.__name__: kind for kind in (LoweringError, ExpressionError, OperandError)}


class _Refusal:
    """An error of code that dynamo does not trace. It is returned, as dynamo would report it without its message.

    Attributes:
        kind: a key of `ERRORS`.
        message: the message.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message


def lower_traced(mask: DeferredMask, names: tuple[str, ...], setting: tuple[Any, ...], values: tuple[Tensor, ...]) -> LoweredMask:
    """A LoweredMask, lowered in the graph that ``torch.compile`` makes.

    Args:
        mask: the mask.
        names: the parameters of the mask.
        setting: the fields of the :class:`Setting`.
        values: the value of each parameter, and ``q_offset`` where it is a tensor.

    Raises:
        FlexmaskError: the mask cannot be made or lowered.
    """
    found = _lower(mask, names, setting, values)
    if isinstance(found, _Refusal):
        raise ERRORS[found.kind](found.message)
    return found


@torch._dynamo.nonstrict_trace
def _lower(
    deferred: DeferredMask, names: tuple[str, ...], setting: tuple[Any, ...], values: tuple[Tensor, ...]
) -> LoweredMask | _Refusal:
    given = deferred, names, setting, values
    try:
        return _lowered(*given)
    except FlexmaskError:
        if has_values(torch.empty(0, device="cpu")):  # the graph runs, as it is
            raise
    try:  # for these sizes alone, so that the message has them
        tree_map_only((Tensor, torch.SymInt), _fix_sizes, given)
        return _lowered(*given)
    except FlexmaskError as error:
        return _Refusal(next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "LoweringError"), str(error))


def _lowered(deferred: DeferredMask, names: tuple[str, ...], setting: tuple[Any, ...], values: tuple[Tensor, ...]) -> LoweredMask:
    q_len, kv_len, batch, heads, q_offset, device, block_size = setting
    if not are_ints(q_offset):  # one that changes is data
        q_offset, values = -1, (*values, torch.full((1,), q_offset, dtype=torch.int64, device=device))
    known = Setting(q_len, kv_len, batch, heads, q_offset, device, (int(block_size[0]), int(block_size[1])))
    with captured():
        mask = _made(deferred, device)
        tensors = (*(held.tensor for held in mask.held), *values)
        return lower(bound(mask, names, known, tensors), known.block_size)


def _made(deferred: DeferredMask, device: torch.device) -> Mask:
    """The mask, of which lists of numbers that change are data. Other numbers are a part of it, so that each is a graph."""

    def with_lists_as(data: Callable[[Any], Any]) -> Mask:
        def converted(value: Any) -> Any:
            match value:
                case DeferredNode():
                    (args, kwargs), context = value.flatten()
                    named = {name: converted(own) for name, own in kwargs.items()}
                    return value.unflatten((tuple(map(converted, args)), named), context)
                case tuple() if any(isinstance(number, torch.SymInt) for number in tree_leaves(value)):
                    return data(value)
                case tuple():
                    return tuple(map(converted, value))
            return tree_map_only(torch.SymInt, int, value)

        return cast(Mask, converted(deferred).made())

    def tensor(values: Any) -> Tensor:
        return torch.stack(list(map(tensor, values))) if isinstance(values, tuple) else torch.full((), values, device=device)

    try:
        return with_lists_as(tensor)
    except FlexmaskError:  # such as the sizes of an image, which are no data
        return with_lists_as(partial(tree_map_only, torch.SymInt, int))


def _fix_sizes(given: Any) -> Any:
    """Makes the graph one for the sizes that it is made with."""
    for size in given.shape if isinstance(given, Tensor) else [given]:
        int(size)
    return given


for _kind in KINDS:
    register_pytree_node(_kind, _kind.flatten, _kind.unflatten, serialized_type_name=f"flexmask.{_kind.__name__}")
register_pytree_node(
    _Refusal,
    lambda refusal: ([], (refusal.kind, refusal.message)),
    lambda _, context: _Refusal(*context),
    serialized_type_name="flexmask.Refusal",
)
