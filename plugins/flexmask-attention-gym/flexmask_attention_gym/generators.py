"""From flexmask's arguments to attention-gym's, and from its ``mask_mod`` to a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce, wraps
from itertools import accumulate
from operator import and_
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, cast

import flexmask
from flexmask import Mask
from flexmask.errors import ExpressionError, FlexmaskError, OperandError
from flexmask.expr import Index, Table

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MaskMod", "each_axis", "generated", "inner", "offsets", "positive", "tensor", "truths"]

P = ParamSpec("P")
#: The greatest position that kernels count to.
MOST = 2**31 - 1
#: What attention-gym's generators return: ``(b, h, q_idx, kv_idx) -> bool``.
MaskMod: TypeAlias = "Callable[..., Tensor]"


def generated(define: Callable[P, MaskMod]) -> Callable[P, Mask]:
    """Makes a function that returns a ``mask_mod`` one that returns the mask that it computes.

    The generators need their arguments as numbers and tensors. As long as one is a parameter that is not bound yet, the
    result only holds the parameter; ``bind`` calls the function again. What attention-gym refuses is an ExpressionError.
    """

    @wraps(define)
    def build(*args: P.args, **kwargs: P.kwargs) -> Mask:
        waiting = [_parameter(value, define.__name__) for value in (*args, *kwargs.values()) if _is_open(value)]
        if waiting:
            return reduce(and_, waiting)
        try:
            return flexmask.from_mask_mod(define(*args, **kwargs))
        except FlexmaskError:
            raise
        except (AssertionError, ValueError) as error:
            raise ExpressionError(f"{define.__name__}: attention-gym refuses this: {error}") from error

    return build


def _is_open(value: object) -> bool:
    return isinstance(value, Index) or (isinstance(value, Mask) and bool(value.params))


def _parameter(value: Any, name: str) -> Mask:
    if isinstance(value, Mask):
        return value
    mask: Mask = value < 0
    if not mask.params:
        raise OperandError(f"{name}: wanted a number or data, got the index expression {value}")
    return mask


def positive(value: object, what: str, least: int = 1) -> int:
    """An integer from ``least`` to :data:`MOST`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OperandError(f"{what} must be an integer, got {value!r}")
    if value < least:
        raise ExpressionError(f"{what} must be at least {least}, got {value}")
    if value > MOST:
        raise ExpressionError(f"{what} must be at most {MOST}, got {value}")
    return value


def tensor(data: object, what: str, axes: str) -> Tensor:
    """Data as a tensor with as many axes as ``axes`` names, e.g. ``"[images, 2]"``."""
    if not isinstance(data, Table):
        raise OperandError(f"{what} must be data with the axes {axes}, got {data!r}")
    values = data.to_tensor()
    if values.dim() != axes.count(",") + 1 or not values.numel():
        raise ExpressionError(f"{what} must have the axes {axes}, got shape {list(values.shape)}")
    return values.long()


def truths(data: object, what: str, axes: str) -> Tensor:
    """As :func:`tensor`, of truth values, also given as 0 and 1."""
    values = tensor(data, what, axes)
    if bool(((values < 0) | (values > 1)).any()):
        raise OperandError(f"{what} must be boolean, or of 0 and 1, got {data}")
    return values.bool()


def each_axis(data: object, what: str, *axes: int) -> list[int]:
    """Sizes along as many axes as one of ``axes`` says, outermost first."""
    values: list[int] = tensor(data, what, "[axes]").tolist()
    if len(values) not in axes:
        raise ExpressionError(f"{what} must be a list of {' or '.join(map(str, axes))} sizes, got {values}")
    return [positive(value, what) for value in values]


def offsets(name: str, lengths: object, cu_seqlens: object) -> Tensor:
    """The cumulative lengths of documents, from either; attention-gym has one layout for the whole batch."""
    if (lengths is None) == (cu_seqlens is None):
        raise ExpressionError(
            f"{name}: give exactly one of lengths and cu_seqlens; got {'neither' if lengths is None else 'both'}"
        )
    data, what = (cu_seqlens, f"{name}: cu_seqlens") if lengths is None else (lengths, f"{name}: lengths")
    values = tensor(data, what, "[documents]")
    if cast("Table", data).boolean:
        raise OperandError(f"{what} must be integers, got truth values")
    if lengths is not None:
        values = values.new_tensor([0, *accumulate(values.tolist())])
    if int(values[0]) != 0 or bool((values.diff() < 0).any()):
        raise ExpressionError(f"{what} must {'start with 0 and not fall' if lengths is None else 'not be negative'}: {data}")
    return values


def inner(mask: object, name: str, length: int) -> MaskMod:
    """The ``mask_mod`` of a mask over positions below ``length``, as an argument of a generator."""
    if not isinstance(mask, Mask):
        raise OperandError(f"{name}: wanted a mask first, got {type(mask).__name__} {mask!r}")
    if mask.symbols & {"q_len", "kv_len"}:
        raise OperandError(f"{name}: {mask} uses q_len or kv_len, which a mask_mod inside of another does not know")
    return mask.mask_mod(length, form="expression")
