"""The errors that flexmask raises. Each is also the builtin error that a caller would expect.

FlexmaskError
├── ExpressionError (ValueError)      an expression that has no meaning, or data that does not fit it
│   └── TextError                     text that is not a mask: shows the text and a caret under the column
├── OperandError (TypeError)          an operand or argument of the wrong type
├── LoweringError (ValueError)        a mask that cannot be lowered at the lengths, sizes or device asked for
└── RenderError (ValueError)          a picture that cannot be drawn or written
"""

__all__ = ["ExpressionError", "FlexmaskError", "LoweringError", "OperandError", "RenderError", "TextError"]


class FlexmaskError(Exception):
    """The base of every error of this library."""


class ExpressionError(FlexmaskError, ValueError):
    """An expression that has no meaning, or data that does not fit it."""


class OperandError(FlexmaskError, TypeError):
    """An operand or argument of the wrong type."""


class LoweringError(FlexmaskError, ValueError):
    """A mask that cannot be lowered at the lengths, sizes or device asked for."""


class RenderError(FlexmaskError, ValueError):
    """A picture that cannot be drawn or written."""


class TextError(ExpressionError):
    """Text that is not a mask.

    Args:
        reason: what is wrong, and what was wanted.
        text: the whole text.
        column: where in the text, counted from 0; None where the whole text is meant.
    """

    def __init__(self, reason: str, text: str = "", column: int | None = None) -> None:
        self.reason, self.text, self.column = reason, text, column
        if column is not None:
            first = max(0, column - 60)  # of a long text, what stands around the column
            reason = f"{reason}\n  {text[first : column + 60]}\n  {' ' * (column - first)}^"
        super().__init__(reason)

    def __reduce__(self) -> tuple[type["TextError"], tuple[str, str, int | None]]:
        return type(self), (self.reason, self.text, self.column)
