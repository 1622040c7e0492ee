"""Long lists in the text of a mask: read in linear time, as short ones are, and refused with the number of characters."""

import ast
import random
from collections.abc import Callable

import pytest

import flexmask as fm
from flexmask.errors import TextError
from flexmask.parser import MAX_LENGTH, MAX_TEXT

LONG = [random.Random(0).randrange(3) for _ in range(2000)]


def test_the_text_of_a_long_mask_is_read_back() -> None:
    lengths = [1] * 400_000
    mask = fm.parse("document(lengths=[" + ",".join(map(str, lengths)) + "])")
    assert mask == fm.document(lengths=lengths)
    assert len(str(mask)) > MAX_LENGTH
    assert fm.parse(str(mask)) == mask


def test_python_reads_no_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its syntax tree has an object for each number, of which a million take seconds."""
    read = []
    own = ast.parse

    def parse(text: str, mode: str) -> ast.AST:
        read.append(text)
        return own(text, mode=mode)

    monkeypatch.setattr(ast, "parse", parse)
    fm.parse(f"document(lengths={LONG}) & causal")
    assert "".join(read).split() == ["document(lengths=[", "])", "&", "causal"]


LESS = [-value for value in LONG]
TRUTH = [value > 0 for value in LONG]
SAME: list[tuple[str, Callable[[], fm.Mask]]] = [
    (f"document({LONG}) & document([0, 1])", lambda: fm.document(LONG) & fm.document([0, 1])),
    (f"causal | document(ids=[{LONG}, {LESS}])", lambda: fm.causal() | fm.document([LONG, LESS])),
    (f"table({LONG})[q] == table([{LESS},{LONG}])[b, kv]", lambda: fm.table(LONG)[fm.q] == fm.table([LESS, LONG])[fm.b, fm.kv]),
    (f"document({LESS}, {LONG}) & named(causal, 'é {LONG}')", lambda: fm.document(LESS, LONG) & fm.causal().named(f"é {LONG}")),
    (f"named(causal, 'é') & document({LONG})", lambda: fm.causal().named("é") & fm.document(LONG)),
    (f'named(causal, "é\\"") & document({LONG})', lambda: fm.causal().named('é"') & fm.document(LONG)),
    (f"key_padding(keep={TRUTH})", lambda: fm.key_padding(keep=TRUTH)),
    (f"document([ {' ,  '.join(map(str, LONG))} ])", lambda: fm.document(LONG)),
    (f"document({str(LONG)[:-1]},])", lambda: fm.document(LONG)),
    (f"document([1_0, {str(LONG)[1:]})", lambda: fm.document([10, *LONG])),
]


@pytest.mark.parametrize(("text", "made"), SAME, ids=[text[:20] for text, _ in SAME])
def test_long_lists_are_read_as_python_does(text: str, made: Callable[[], fm.Mask]) -> None:
    mask = fm.parse(text)
    assert mask == made()
    assert str(mask) == str(made())


def test_errors_behind_a_long_list_keep_their_place() -> None:
    text = f"named(document({LONG}), 'é') & document({LONG}) & casual"
    with pytest.raises(TextError) as caught:
        fm.parse(text)
    assert caught.value.column == text.index("casual")
    assert caught.value.text == text


def test_numbers_that_python_refuses_are_refused() -> None:
    for strange in ("01", "1.5", "1 2", ""):
        items = [*map(str, LONG), strange, "1"]
        with pytest.raises(TextError):
            fm.parse(f"document([{', '.join(items)}])")


def test_a_text_that_is_too_long_says_so() -> None:
    long = " & ".join(["causal"] * (MAX_LENGTH // 9 + 10))
    with pytest.raises(TextError, match=rf"the text has {len(long):,} characters; at most 1,000,000 are read. Bind long data"):
        fm.parse(long)
    with pytest.raises(TextError, match=r"the text has 100,000,008 characters; at most 100,000,000 are read"):
        fm.parse("causal" + " " * MAX_TEXT + "&q")
