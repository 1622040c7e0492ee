"""What code under ``torch.compile`` makes: masks, index expressions and tables as the calls that make them.

The calls run when a mask is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from flexmask._checks import is_tensor, is_traced
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.choice import where
from flexmask.expr.data import table
from flexmask.expr.deferral import FUNCTIONS, Deferred, name_of
from flexmask.expr.form import of_digest
from flexmask.expr.index import Index, Symbol, absolute, arithmetic
from flexmask.expr.mask import Mask
from flexmask.expr.node import Node
from flexmask.expr.tables import Table, looked_up, param

if TYPE_CHECKING:
    from torch import Tensor

#: The calls that stand for a mask, by the digest of its form and its tensors, for None, which a graph does not take, and for an
#: index symbol.
GIVEN, NONE, SYMBOL = "given", "none", "symbol"
FUNCTIONS |= {GIVEN: of_digest, NONE: lambda: None, SYMBOL: Symbol}
#: The calls whose arguments by name are values of the mask's parameters.
BINDING = {"parse", "flexmask.expr.mask.Mask.bind"}


#: What is known of an expression once its call is made.
DERIVED = ("key", "symbols", "depth", "below", "form", "held", "tensors", "memo")


def _of_made(name: str) -> Any:
    return property(lambda self: getattr(self._outside(), name))


class DeferredNode(Deferred):
    """An expression as the call of a deferrable function. It is a pytree of the tensors among its arguments.

    Attributes:
        call: the function's key in :data:`flexmask.expr.deferral.FUNCTIONS`.
        args: arguments by position.
        kwargs: arguments by name.
        params: the names of the parameters that are not bound yet.
    """

    call: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    params: tuple[str, ...]

    def __init__(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], params: tuple[str, ...]) -> None:
        for name, value in (("call", call), ("args", args), ("kwargs", kwargs), ("params", params)):
            object.__setattr__(self, name, value)

    def made(self) -> Any:
        """What the call makes.

        Raises:
            FlexmaskError: the function refuses its arguments.
        """
        if "node" not in self.__dict__:
            kwargs = {name: _made(value) for name, value in self.kwargs.items()}
            object.__setattr__(self, "node", FUNCTIONS[self.call](*map(_made, self.args), **kwargs))
        return self.__dict__["node"]

    def flatten(self) -> tuple[list[Any], Any]:
        """The arguments, and what :meth:`unflatten` takes with them."""
        return [self.args, self.kwargs], (self.call, self.params)

    @classmethod
    def unflatten(cls, arguments: Any, context: Any) -> Self:
        """The value of the two results of :meth:`flatten`."""
        call, params = context
        args, kwargs = arguments
        return cls(call, args, kwargs, params)

    def brief(self) -> str:
        """The call as a text that needs no values of its tensors."""
        name = self.call.rpartition(".")[2]
        if name in ("parse", SYMBOL):
            return cast(str, self.args[0])
        if name in ("_combine", "arithmetic", "compare"):
            sign, left, right = self.args
            return f"{_operand(left)} {sign} {_operand(right)}"
        if name == "__invert__":
            return f"~{_operand(self.args[0])}"
        return f"{name}(...)" if self.args or self.kwargs else name

    def __str__(self) -> str:
        return self.brief() if is_traced() else str(self.made())

    def __repr__(self) -> str:
        return self.brief() if is_traced() else repr(self.made())

    def _outside(self) -> Any:
        """What the call makes, where the code is not traced."""
        if is_traced():
            raise LoweringError(
                f"the mask {self.brief()} is made in code that torch.compile traces, where only flexmask's attention and "
                "modules take it: make it outside, and lower it there or pass it"
            )
        return self.made()

    def walk(self) -> list[Node]:
        """See :meth:`flexmask.expr.node.Node.walk`."""
        return cast("list[Node]", self._outside().walk())

    def replace(self, function: Callable[[Node], Node | None]) -> Node:
        """See :meth:`flexmask.expr.node.Node.replace`."""
        return cast(Node, self._outside().replace(function))

    key, symbols, depth, below, form, held, tensors, memo = map(_of_made, DERIVED)


class DeferredMask(DeferredNode, Mask):
    """A mask as a call."""


class DeferredIndex(DeferredNode, Index):
    """An index expression as a call; one of a parameter is looked up, too."""

    def __getitem__(self, indices: Any) -> Index:
        return looked_up(cast(Any, self), indices)


class DeferredTable(DeferredNode, Table):
    """A table as a call."""

    shape, boolean, constant = map(_of_made, ("shape", "boolean", "constant"))

    def to_tensor(self) -> Tensor:
        """See :meth:`flexmask.expr.tables.Table.to_tensor`."""
        return cast("Tensor", self._outside().to_tensor())


#: The classes of deferred values.
KINDS: tuple[type[DeferredNode], ...] = (DeferredMask, DeferredIndex, DeferredTable)

#: The functions that make no masks, by their names.
PARAM, TABLE, WHERE = name_of(param), name_of(table), name_of(where)
OF_INDICES = {PARAM, name_of(absolute), name_of(arithmetic), name_of(looked_up)}


def _kind(call: str, args: tuple[Any, ...]) -> type[DeferredNode]:
    """The class of what a call makes."""
    if call == TABLE:
        return DeferredTable
    of_indices = call in OF_INDICES or (call == WHERE and not any(isinstance(choice, Mask) for choice in args[1:]))
    return DeferredIndex if of_indices else DeferredMask


def deferred(call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], params: tuple[str, ...] = ()) -> DeferredNode:
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
    plain = tuple([_argument(arg) for arg in args])
    named = {name: _argument(arg) for name, arg in kwargs.items()}
    names = {*params, *(plain if call == PARAM else ())}
    for part in (*plain, *named.values()):
        for own in part if isinstance(part, tuple) else (part,):
            if isinstance(own, DeferredNode):
                names.update(own.params)
    kind = _kind(call, (*plain, *named.values()))
    return kind(call, plain, named, tuple(sorted(names - set(named) if call in BINDING else names)))


def _operand(value: Any) -> str:
    text = value.brief() if isinstance(value, DeferredNode) else str(value) if isinstance(value, int) else "..."
    return f"({text})" if " " in text else text


def in_graph(mask: Mask) -> DeferredMask:
    """A mask as one that a graph takes, with its tensors as inputs."""
    return mask if isinstance(mask, DeferredMask) else DeferredMask(GIVEN, (mask.form.digest, mask.tensors), {}, mask.params)


def _argument(value: Any) -> Any:
    """An argument as a graph takes it."""
    if isinstance(value, DeferredNode):
        return value
    if isinstance(value, Mask):
        return in_graph(value)
    if isinstance(value, Symbol):
        return DeferredIndex(SYMBOL, (value.name,), {}, ())
    if value is None:
        return DeferredMask(NONE, (), {}, ())
    if isinstance(value, bool | int | float | str) or is_tensor(value):
        return value
    if isinstance(value, list | tuple):
        return tuple([_argument(item) for item in value])
    raise OperandError(
        "in code that torch.compile traces, a mask is made of tensors, numbers, lists, texts and masks, got "
        f"{type(value).__name__}; make the mask outside and pass it, or make its parts there"
    )


def _made(value: Any) -> Any:
    if isinstance(value, DeferredNode):
        return value.made()
    return [_made(item) for item in value] if isinstance(value, tuple) else value
