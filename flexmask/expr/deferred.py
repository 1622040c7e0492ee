"""What code under ``torch.compile`` makes: masks, index expressions and tables as the calls that make them.

The calls run when a mask is lowered. Lists in a mask that such code gets as an argument are constants of its graph, or inputs
once their numbers changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flexmask._checks import is_tensor, is_traced
from flexmask.errors import OperandError
from flexmask.expr.choice import where
from flexmask.expr.data import table
from flexmask.expr.deferral import FUNCTIONS, GIVEN, LEAF, SYMBOL, Argument, Deferred, forwarded, name_of
from flexmask.expr.form import Kept, Key, of_digest
from flexmask.expr.index import Arithmetic, Index, Symbol, absolute, arithmetic
from flexmask.expr.mask import Mask
from flexmask.expr.node import Node
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Literal, Lookup, Ranged, Table, TensorTable, looked_up, param

FUNCTIONS |= {GIVEN: of_digest, SYMBOL: Symbol}
#: The calls whose arguments by name are values of the mask's parameters.
BINDING = {"parse", "flexmask.expr.mask.Mask.bind"}


class DeferredMask(Deferred, Mask):
    """A mask as a call."""


class DeferredIndex(Deferred, Index):
    """An index expression as a call; one of a parameter is looked up, too."""

    def __getitem__(self, indices: Any) -> Index:
        return looked_up(cast(Any, self), indices)


class DeferredTable(Deferred, Table):
    """A table as a call."""

    shape, boolean, constant, to_tensor = map(forwarded, ("shape", "boolean", "constant", "to_tensor"))


#: The classes of deferred values.
KINDS: tuple[type[Deferred], ...] = (DeferredMask, DeferredIndex, DeferredTable)

#: The functions that make no masks, by their names.
PARAM, TABLE, WHERE = name_of(param), name_of(table), name_of(where)
OF_INDICES = {PARAM, name_of(absolute), name_of(arithmetic), name_of(looked_up)}


def _kind(call: str, args: tuple[Any, ...]) -> type[Deferred]:
    """The class of what a call makes."""
    if call == TABLE:
        return DeferredTable
    of_indices = call in OF_INDICES or (call == WHERE and not any(isinstance(choice, Mask) for choice in args[1:]))
    return DeferredIndex if of_indices else DeferredMask


def deferred(call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], params: tuple[str, ...] = ()) -> Deferred:
    """The call of a deferrable function as a value.

    Args:
        call: the function's key in :data:`flexmask.expr.deferral.FUNCTIONS`.
        args: arguments by position.
        kwargs: arguments by name.
        params: the parameters of the mask in addition to those of the masks among the arguments. Those that the call gives values
            are taken away.

    Raises:
        OperandError: an argument that a graph cannot take.
    """
    values = (*args, *kwargs.values())
    leaves: list[Any] = []
    names = {*params, *(args if call == PARAM else ())}
    items = tuple([_argument(value, leaves, names) for value in values])
    free = names - set(kwargs) if call in BINDING else names
    return _kind(call, values)(("call", call, items, tuple(kwargs)), tuple(leaves), tuple(sorted(free)))


def in_graph(mask: Mask) -> DeferredMask:
    """A mask as one that a graph takes, with its tensors as inputs."""
    if isinstance(mask, DeferredMask):
        return mask
    if is_traced() and mask.is_traced_with_other_lists():
        mask = cast(Mask, mask.lifted)
    tensors = mask.tensors
    items = ("value", mask.form.digest), ("list", (LEAF,) * len(tensors))
    return DeferredMask(("call", GIVEN, items, ()), tensors, mask.params)


def _argument(value: Any, leaves: list[Any], params: set[str]) -> Argument:
    """An argument as a graph takes it; its leaves and its parameters are added to those of others."""
    if isinstance(value, Mask):
        value = in_graph(value)
    if isinstance(value, Deferred):
        leaves.extend(value.leaves)
        params.update(value.params)
        return value.call
    if isinstance(value, Symbol):
        return "call", SYMBOL, (("value", value.name),), ()
    if value is None or isinstance(value, str):
        return "value", value
    if isinstance(value, bool | int | float) or is_tensor(value):
        leaves.append(value)
        return LEAF
    if isinstance(value, list | tuple):
        return "list", tuple([_argument(item, leaves, params) for item in value])
    raise OperandError(
        "in code that torch.compile traces, a mask is made of tensors, numbers, lists, texts and masks, got "
        f"{type(value).__name__}; make the mask outside and pass it, or make its parts there"
    )


# ---------------------------------------------------------------- lists


#: By the digest of a lifted form, that of the first mask with it in compiled code.
TRACED = Kept(256)
#: Operations whose result on positions is solved for the key with known numbers alone.
WITH_NUMBERS = {"*", "%", "minimum", "maximum"}


def lifted(mask: Mask) -> Mask | None:
    """The mask with its lists for sequences, heads and documents as tensors, or None where there is no such list.

    Raises:
        AttributeError: tensors that are made now have no values later. So a guard of a graph fails, which asks for it.
    """
    from flexmask._transforms import can_keep_tensors, has_transforms

    if has_transforms() or not can_keep_tensors():
        raise AttributeError("tensors of lists are of no use within transforms and modes of torch")
    found: set[Key] = set()
    left: set[Key] = set()
    for node in mask.walk():
        if isinstance(node, Lookup) and (key := _list_of(node)) is not None:
            found.add(key)
        elif isinstance(node, Arithmetic) and node.sign in WITH_NUMBERS and node.symbols & {"q", "kv"}:
            left.update(below.key for below in node.walk() if isinstance(below, Literal))
    found -= left

    def tensor(node: Node) -> Node | None:
        return TensorTable(node.to_tensor(), is_list=True) if isinstance(node, Literal) and node.key in found else None

    return mask.replace(tensor) if found else None  # type: ignore[return-value]


def have_changed(mask: Mask) -> bool:
    """See :meth:`Mask.is_traced_with_other_lists`."""
    other: Mask | None = getattr(mask, "lifted", None)
    if other is None:
        return False
    digest: str = mask.form.digest
    first: str = TRACED.add(other.form.digest, digest)
    return first != digest


def _list_of(lookup: Lookup) -> Key | None:
    """The key of the list with a number for each sequence, head or document that is looked up, if it is one."""
    source = lookup.table
    if isinstance(source, DocumentTable) and source.rule in COVERING:
        source = source.source
    elif any(index.symbols & {"q", "kv"} for index in lookup.indices):
        return None  # with data along the tokens a graph may evaluate each cell
    source = source.source if isinstance(source, Ranged) else source
    return source.key if isinstance(source, Literal) else None
