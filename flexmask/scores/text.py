"""The text form of scores: calls of the named ones, joined by ``+`` and ``>>``. Parsed with ``ast``, never evaluated."""

from __future__ import annotations

import ast
import inspect
import operator
from functools import lru_cache

from flexmask._checks import call_error, check_function, is_traced, kind_of, nearest
from flexmask.errors import FlexmaskError, OperandError, TextError
from flexmask.scores.score import Score, ScoreMod, alibi, bias, relative_bias, softcap

NAMED = {define.__name__: define for define in (alibi, bias, relative_bias, softcap)}
JOINS = {ast.Add: operator.add, ast.RShift: operator.rshift}


def parse(text: str) -> Score:
    """Parses a score, e.g. ``"alibi() >> softcap(50.0)"``.

    The text has the names of :mod:`flexmask.scores` with numbers and lists, joined by ``+`` and ``>>``, in Python's precedence:
    ``+`` binds more tightly. ``parse(str(score)) == score`` where it holds no tensors.

    Args:
        text: the score.

    Raises:
        TextError: the text is not a score.
        OperandError: ``text`` is not a string.
    """
    if not isinstance(text, str):
        raise OperandError(f"parse() reads a string, got {kind_of(text)}")
    return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Score:
    line = " ".join(text.split())
    try:
        return _read(ast.parse(line, mode="eval").body, line)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, FlexmaskError):
            raise
        reason = f"this is not an expression: {getattr(error, 'msg', error)}"
        raise TextError(reason, line[:1000], (getattr(error, "offset", None) or 1) - 1) from None


def _read(node: ast.expr, line: str) -> Score:
    try:
        match node:
            case ast.BinOp(left, join, right) if type(join) in JOINS:
                found: Score = JOINS[type(join)](_read(left, line), _read(right, line))
                return found
            case ast.Name(name) | ast.Call(ast.Name(name)):
                if name not in NAMED:
                    known = ", ".join(NAMED)
                    raise TextError(f"there is no score {name}.{nearest(name, NAMED)} There are {known}", line, node.col_offset)
                calls = [node] if isinstance(node, ast.Call) else []
                values = [ast.literal_eval(value) for call in calls for value in call.args]
                named = {str(word.arg): ast.literal_eval(word.value) for call in calls for word in call.keywords}
                try:
                    inspect.signature(NAMED[name]).bind(*values, **named)
                except TypeError as error:
                    raise TextError(call_error(NAMED[name], error, values, named), line, node.col_offset) from None
                return NAMED[name](*values, **named)
    except TextError:
        raise
    except (FlexmaskError, ValueError) as error:
        reason = str(error) if isinstance(error, FlexmaskError) else "its arguments are numbers and lists"
        raise TextError(reason, line, node.col_offset) from None
    reason = "wanted scores, as alibi() or softcap(50.0), joined by + to add biases and by >> to do one after another"
    raise TextError(reason, line, getattr(node, "col_offset", 0))


def as_score_mod(given: object) -> Score | ScoreMod | None:
    """A score from a text, or what is given where it is a Score, a function or None.

    Raises:
        OperandError: it is neither.
        TextError: a text that is not a score.
    """
    if given is None or isinstance(given, Score):
        return given
    if isinstance(given, str):
        return parse(given)
    if not is_traced():
        check_function(given, "score_mod", "(score, b, h, q_idx, kv_idx) -> score, a score of flexmask.scores or its text")
    return given  # type: ignore[return-value]
