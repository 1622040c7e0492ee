"""The errors that flexmask raises. Each is also the builtin error that a caller would expect.

FlexmaskError
├── ExpressionError (ValueError)      an expression without a meaning, or data that does not fit it
│   ├── DuplicateNameError            two packages define a mask of the same name
│   └── TextError                     a text that is not a mask; the message has a caret under the column
├── OperandError (TypeError)          an operand or argument of the wrong type
├── LoweringError (ValueError)        a mask that cannot be lowered at the given lengths, sizes or device
├── TraceError (ValueError)           a function that cannot be traced with ``strict=True``
└── RenderError (ValueError)          a picture that cannot be drawn or written

PluginWarning (UserWarning)           a plugin that cannot be imported or registers no mask; everything else works
"""

__all__ = [
    "DuplicateNameError",
    "ExpressionError",
    "FlexmaskError",
    "LoweringError",
    "OperandError",
    "PluginWarning",
    "RenderError",
    "TextError",
    "TraceError",
]


class FlexmaskError(Exception):
    """The base of every error of this library."""


class ExpressionError(FlexmaskError, ValueError):
    """An expression without a meaning, or data that does not fit it."""


class OperandError(FlexmaskError, TypeError):
    """An operand or argument of the wrong type."""


class LoweringError(FlexmaskError, ValueError):
    """A mask that cannot be lowered at the given lengths, sizes or device."""


class TraceError(FlexmaskError, ValueError):
    """A function that cannot be traced with ``strict=True``: it has an operation without an expression."""


class RenderError(FlexmaskError, ValueError):
    """A picture that cannot be drawn or written."""


class TextError(ExpressionError):
    """Text that is not a mask.

    Args:
        reason: what is wrong, and what is expected.
        text: the whole text.
        column: where in the text, counted from 0; None where the whole text is meant.
    """

    def __init__(self, reason: str, text: str = "", column: int | None = None) -> None:
        self.reason, self.text, self.column = reason, text, column
        if column is not None:
            first = max(0, column - 60)  # the part of a long text around the column
            reason = f"{reason}\n  {text[first : column + 60]}\n  {' ' * (column - first)}^"
        super().__init__(reason)

    def __reduce__(self) -> tuple[type["TextError"], tuple[str, str, int | None]]:
        return type(self), (self.reason, self.text, self.column)


class DuplicateNameError(ExpressionError):
    """Two packages define a mask of the same name.

    Args:
        name: the name.
        packages: the package that registered the name first, and the other one; the same package twice if it defines two
            masks of one name. ``__main__`` is the running script.
    """

    def __init__(self, name: str, *packages: str) -> None:
        self.name, self.packages = name, packages
        first, second = ("the running script (__main__)" if package == "__main__" else package for package in packages)
        if first == second:
            reason = f"{first} defines two masks named {name}. Give one another name; to define it again, restart Python"
        else:
            reason = f"two packages define a mask named {name}: {first} and {second}. Give one of them another name"
            for package in packages[::-1]:
                reason += "" if package in {"flexmask", "__main__"} else f", or run `pip uninstall {package}`"
        super().__init__(reason)

    def __reduce__(self) -> tuple[type["DuplicateNameError"], tuple[str, ...]]:
        return type(self), (self.name, *self.packages)


class PluginWarning(UserWarning):
    """An installed plugin that cannot be used: it cannot be imported, or it registers no mask."""
