"""Operations that an expression does not have, kept as calls: what a traced function does beyond index arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexmask.expr.index import PRECEDENCE, Index
from flexmask.expr.node import Key, Node, key_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Captured", "Opaque"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Captured(Node):
    """A tensor of any dtype that a call takes as it is. It compares by identity."""

    tensor: Tensor

    def _make_key(self) -> Key:
        return Key(("Captured", id(self.tensor)))

    def write(self, bare: bool) -> tuple[str, int]:
        return f"<{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}>", PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opaque(Index):
    """``function(*arguments)``: correct everywhere, and known for nothing but the symbols that it depends on.

    Its value may be a truth value, or a number that is no integer where another call takes it. It has no text that reads back.

    Args:
        function: takes and gives tensors without axes, as a ``mask_mod`` does under ``torch.vmap``.
        arguments: index expressions, masks, captured tensors and plain values.
        keywords: the names of the last arguments where they are given by name.
        shape: of the value, which has axes only where another call takes it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    def _make_key(self) -> Key:
        # 1, 1.0 and True are equal, but not to a function
        arguments = tuple((type(value), key_of(value)) for value in self.arguments)
        return Key(("Opaque", self.function, arguments, self.keywords))

    def write(self, bare: bool) -> tuple[str, int]:
        texts = [value.write(bare)[0] if isinstance(value, Node) else repr(value) for value in self.arguments]
        first = len(texts) - len(self.keywords)
        texts[first:] = [f"{name}={text}" for name, text in zip(self.keywords, texts[first:], strict=True)]
        return f"<{getattr(self.function, '__name__', repr(self.function))}({', '.join(texts)})>", PRECEDENCE["atom"]
