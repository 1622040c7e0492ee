"""Opaque calls: operations of a traced function that no expression has. They are exact, and lowered cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from flexmask.expr.form import Key
from flexmask.expr.index import PRECEDENCE, Index
from flexmask.expr.node import Node, key_of


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opaque(Index):
    """``function(*arguments)``, of which only the symbols that it depends on are known.

    Its value may be a truth value, or a number that is no integer where another call takes it. Its text cannot be parsed.

    Args:
        function: takes and gives tensors without axes, as a ``mask_mod`` does under ``torch.vmap``.
        arguments: index expressions, masks, captured tensors and plain values.
        keywords: the names of the last arguments where they are given by name.
        shape: of the value, which has axes only where another call takes it.
    """

    KEPT: ClassVar[bool] = False  # a function may hold tensors
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    def _make_key(self) -> Key:
        # 1, 1.0 and True are equal, but not to a function
        arguments = tuple((type(value), key_of(value)) for value in self.arguments)
        return Key("Opaque", self.function, arguments, self.keywords)

    def write(self, bare: bool) -> tuple[str, int]:
        return f"<{self._call_text(bare)}>", PRECEDENCE["atom"]

    def _call_text(self, bare: bool) -> str:
        """The call without the angle brackets that mark the outermost of nested calls."""

        def text_of(value: Any) -> str:
            if isinstance(value, Opaque):
                return value._call_text(bare)
            return value.write(bare)[0] if isinstance(value, Node) else repr(value)

        texts = [text_of(value) for value in self.arguments]
        first = len(texts) - len(self.keywords)
        texts[first:] = [f"{name}={text}" for name, text in zip(self.keywords, texts[first:], strict=True)]
        name = getattr(self.function, "__name__", repr(self.function)).strip("<>_")
        return f"{name}({', '.join(texts)})"
