"""A mask that code under ``torch.compile`` makes: the call that makes it, which runs when the mask is lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from flexmask._checks import is_tensor, is_traced
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.deferral import FUNCTIONS, Deferred
from flexmask.expr.mask import Mask
from flexmask.expr.node import Node, Structure

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DeferredMask", "deferred", "in_graph"]

#: The name of a call whose arguments are the structure of a mask and its tensors.
GIVEN = "given"
#: The name of a call that stands for None, which a graph does not take.
NONE = "none"
#: The calls whose arguments by name are values of the mask's parameters.
BINDING = {"parse", "flexmask.expr.mask.Mask.bind"}


#: What is known of a mask once its call is made.
DERIVED = ("key", "structure", "symbols", "depth", "below", "held", "tensors", "memo")


def _of_mask(name: str) -> Any:
    return property(lambda self: getattr(self._outside(), name))


class DeferredMask(Deferred, Mask):
    """A mask as the call of a deferrable function. It is a pytree of the tensors among its arguments.

    Attributes:
        call: the function's key in :data:`flexmask.expr.deferral.FUNCTIONS`, :data:`GIVEN` or :data:`NONE`.
        args: arguments by position.
        kwargs: arguments by name.
        params: the names of the parameters that are not bound yet.
    """

    call: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], params: tuple[str, ...]) -> None:
        for name, value in (("call", call), ("args", args), ("kwargs", kwargs), ("params", params)):
            object.__setattr__(self, name, value)

    def made(self) -> Mask:
        """The mask that the call makes.

        Raises:
            OperandError: it makes no mask.
            FlexmaskError: the function refuses its arguments.
        """
        if "mask" not in self.__dict__:
            made = _made(self)
            if not isinstance(made, Mask):
                raise OperandError(f"{self.call} makes no mask")
            object.__setattr__(self, "mask", made)
        return cast(Mask, self.__dict__["mask"])

    def flatten(self) -> tuple[list[Any], Any]:
        """The arguments, and what :meth:`unflatten` takes with them."""
        return [self.args, self.kwargs], (self.call, self.params)

    @classmethod
    def unflatten(cls, arguments: Any, context: Any) -> DeferredMask:
        """The mask of the two results of :meth:`flatten`."""
        call, params = context
        args, kwargs = arguments
        return cls(call, args, kwargs, params)

    def brief(self) -> str:
        """The call as a text that needs no values of its tensors."""
        name = self.call.rpartition(".")[2]
        if name == "parse":
            return cast(str, self.args[0])
        if name == "_combine":
            sign, left, right = self.args
            return f"{_operand(left)} {sign} {_operand(right)}"
        if name == "__invert__":
            return f"~{_operand(self.args[0])}"
        return f"{name}(...)" if self.args or self.kwargs else name

    def __str__(self) -> str:
        return self.brief() if is_traced() else str(self.made())

    def __repr__(self) -> str:
        return self.brief() if is_traced() else repr(self.made())

    def _outside(self) -> Mask:
        """The mask that the call makes, where the code is not traced."""
        if is_traced():
            raise LoweringError(
                f"the mask {self.brief()} is made in code that torch.compile traces, where only flexmask's attention and "
                "modules take it: make it outside, and lower it there or pass it"
            )
        return self.made()

    def walk(self) -> list[Node]:
        """See :meth:`flexmask.expr.node.Node.walk`."""
        return self._outside().walk()

    def replace(self, function: Callable[[Node], Node | None]) -> Node:
        """See :meth:`flexmask.expr.node.Node.replace`."""
        return self._outside().replace(function)

    key, structure, symbols, depth, below, held, tensors, memo = map(_of_mask, DERIVED)


def deferred(call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], params: tuple[str, ...] = ()) -> DeferredMask:
    """The call of a deferrable function as a mask.

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
    names = set(params)
    for part in (*plain, *named.values()):
        for own in part if isinstance(part, tuple) else (part,):
            if isinstance(own, DeferredMask):
                names.update(own.params)
    return DeferredMask(call, plain, named, tuple(sorted(names - set(named) if call in BINDING else names)))


def _operand(value: Any) -> str:
    text = value.brief() if isinstance(value, Mask) else "..."
    return f"({text})" if " " in text else text


def in_graph(mask: Mask) -> DeferredMask:
    """A mask as one that a graph takes, with its tensors as inputs."""
    return mask if isinstance(mask, DeferredMask) else DeferredMask(GIVEN, (mask.structure, mask.tensors), {}, mask.params)


def _argument(value: Any) -> Any:
    """An argument as a graph takes it."""
    if isinstance(value, Mask):
        return in_graph(value)
    if value is None:
        return DeferredMask(NONE, (), {}, ())
    if isinstance(value, bool | int | float | str) or is_tensor(value):
        return value
    if isinstance(value, list | tuple):
        return tuple([_argument(item) for item in value])
    raise OperandError(
        "in code that torch.compile traces, a mask is made of tensors, numbers, lists, texts and masks, got "
        f"{type(value).__name__}; make the mask outside and pass it, write it as text, or pass what a flexmask.plan gives"
    )


def _made(value: Any) -> Any:
    match value:
        case DeferredMask(call="given", args=(Structure() as structure, tensors)):
            return cast(Mask, structure.node).with_tensors(cast("tuple[Tensor, ...]", tensors))
        case DeferredMask(call="none"):
            return None
        case DeferredMask(call=call, args=args, kwargs=kwargs):
            return FUNCTIONS[call](*map(_made, args), **{name: _made(own) for name, own in kwargs.items()})
        case tuple():
            return [_made(item) for item in value]
    return value
