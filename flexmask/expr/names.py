"""The table of named masks, and the signatures of their functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from flexmask._checks import is_tensor, kind_of, signature_of
from flexmask.errors import FlexmaskError
from flexmask.expr.index import Index
from flexmask.expr.node import Node
from flexmask.expr.tables import Param, Table, write_data

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.expr.mask import Mask

#: Named masks by name. :mod:`flexmask.registry` adds those of plugins.
NAMES: dict[str, Callable[..., Mask]] = {}


def call_hint(value: object) -> str:
    """How a function that makes a named mask is called, for a message; nothing for anything else."""
    name = getattr(value, "__name__", "")
    define = NAMES.get(name) if isinstance(name, str) else None
    if define is None or define is not value:
        return ""
    try:
        define()
    except FlexmaskError:
        return f"call it with its arguments, {name}{signature_of(define)}"
    return f"call it, {name}()"


def describe_non_mask(value: Any) -> str:
    """What was given in place of a mask, and how to get a mask from it, for a message."""
    given = kind_of(value)
    match value:
        case str():
            return f"the text {value!r}: read it, flexmask.parse({value!r})"
        case type():
            return f"{given}; give an object of it"
        case Index():
            return f"{given}. Compare it to get a mask, e.g. {value.comparison()}"
        case list() | tuple() if value and all(isinstance(item, Node) and not isinstance(item, Index) for item in value):
            return f"{given}. A mask for each head is flexmask.per_head([...]); several that hold at once are joined with &"
        case _ if is_tensor(value):
            return f"{given}. {_from_tensor(value)}"
        case _ if type(value).__name__ == "BlockMask":
            return f"{given}; give the Mask that it was made from"
        case _ if type(value).__name__ == "LoweredMask":
            return f"{given}; give the Mask of its plan, plan.mask"
    if callable(value) and not isinstance(value, Node):
        name = getattr(value, "__name__", type(value).__name__)
        return f"{given}: {call_hint(value) or f'if it is a mask_mod, trace it, flexmask.from_mask_mod({name})'}"
    return f"{given}; the simplest masks are flexmask.causal() and 'causal'"


def _from_tensor(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "Of an additive mask, 0 for visible and -inf for hidden, take flexmask.from_dense(tensor == 0)"
    cells = "tensor" if str(tensor.dtype) == "torch.bool" else "tensor != 0"
    return (
        f"Where its True is for visible, as in SDPA, take flexmask.from_dense({cells}), or of bool[B, kv_len] "
        "flexmask.key_padding(keep=tensor); where its True is for hidden, as in torch.nn.MultiheadAttention, "
        f"~flexmask.from_dense({cells}) or flexmask.key_padding(hide=tensor)"
    )


def write_arguments(define: Callable[..., Mask], arguments: Iterable[tuple[str, Any]], bare: bool) -> str:
    """The arguments of a named mask as text: a leading mask by position, everything else by name."""

    def write(value: Any) -> str:
        if isinstance(value, tuple):
            return f"[{', '.join(map(write, value))}]"
        if isinstance(value, Table | Param):
            return write_data(value, bare)
        return value.write(bare)[0] if isinstance(value, Node) else repr(value)

    first = _first_parameter(define)
    return ", ".join(write(value) if key == first and _has_mask(value) else f"{key}={write(value)}" for key, value in arguments)


@cache
def _first_parameter(define: Callable[..., Mask]) -> str:
    return next(iter(inspect.signature(define).parameters), "")


def _has_mask(value: Any) -> bool:
    return isinstance(value, tuple) or (isinstance(value, Node) and not isinstance(value, Index | Table))
