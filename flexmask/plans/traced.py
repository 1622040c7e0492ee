"""The call that dynamo does not trace: it runs while ``torch.compile`` makes a graph, which gets its operations."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from flexmask._transforms import are_ints, captured, has_values
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError
from flexmask.expr.deferred import DeferredMask
from flexmask.expr.mask import Mask
from flexmask.plans.capture import Setting, context_of, lower
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


def lower_traced(
    mask: DeferredMask,
    sizes: tuple[int, int, int, int],
    q_offset: int | Tensor,
    device: torch.device,
    block_size: tuple[int, int],
) -> LoweredMask:
    """A LoweredMask, lowered in the graph that ``torch.compile`` makes.

    Args:
        mask: the mask.
        sizes: ``q_len``, ``kv_len``, ``batch`` and ``heads``; see :class:`Setting`.
        q_offset: position of the first query.
        device: where results are made.
        block_size: see :class:`Setting`.

    Raises:
        FlexmaskError: the mask cannot be made or lowered.
    """
    found = _lower(mask, *sizes, q_offset, device, *block_size)
    if isinstance(found, _Refusal):
        raise ERRORS[found.kind](found.message)
    return found


@torch._dynamo.nonstrict_trace
def _lower(*given: Any) -> LoweredMask | _Refusal:
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


def _lowered(
    deferred: DeferredMask,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    q_offset: int | Tensor,
    device: torch.device,
    *block_size: int,
) -> LoweredMask:
    if not isinstance(q_offset, Tensor) and not are_ints(q_offset):  # one that changes is data
        q_offset = torch.full((1,), q_offset, dtype=torch.int64, device=device)
    setting = Setting(q_len, kv_len, batch, heads, 0, device, (int(block_size[0]), int(block_size[1])))
    with captured():
        return lower(context_of(_made(deferred, device), setting, q_offset), setting.block_size)


def _made(deferred: DeferredMask, device: torch.device) -> Mask:
    """The mask, of which lists of numbers that change are data. Other numbers are a part of it, so that each is a graph."""

    def tensor(values: Any) -> Tensor:
        return torch.stack(list(map(tensor, values))) if isinstance(values, list) else torch.full((), values, device=device)

    def numbers(value: Any) -> Any:
        return tree_map_only(torch.SymInt, int, value)

    def lists(value: Any) -> Any:
        changes = isinstance(value, list) and any(isinstance(number, torch.SymInt) for number in tree_leaves(value))
        return tensor(value) if changes else numbers(value)

    try:
        return cast(Mask, deferred.made_with(lists))
    except FlexmaskError:  # such as the sizes of an image, which are no data
        return cast(Mask, deferred.made_with(numbers))


def _fix_sizes(given: Any) -> Any:
    """Makes the graph one for the sizes that it is made with."""
    for size in given.shape if isinstance(given, Tensor) else [given]:
        int(size)
    return given


register_pytree_node(
    _Refusal,
    lambda refusal: ([], (refusal.kind, refusal.message)),
    lambda _, context: _Refusal(*context),
    serialized_type_name="flexmask.Refusal",
)
