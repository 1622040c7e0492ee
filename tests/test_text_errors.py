"""Text that is no mask: each is refused with an error that names the place and the remedy."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

import flexmask
from flexmask.errors import FlexmaskError

# Any, since the tests misuse them on purpose
fm: Any = flexmask
b, h, kv, q = fm.b, fm.h, fm.kv, fm.q

Attempt: TypeAlias = Callable[[], Any]
Row: TypeAlias = tuple[str, Attempt, str]

TEXT: list[tuple[str, str, int | None]] = [
    ("param(3) == 0", r"string, e.g. param\('ids'\), got int 3", 0),
    ("param(causal) == 0", "string ... causal", 0),
    ("kv < param('ﬁ')", "'fi'", 5),
    ("casual", "casual ... causal", None),  # a free name is a parameter; alone it is not a mask
    ("casual()", "casual ... Did you mean causal", 0),
    ("full & causel(offset=1)", "causel ... causal", 7),
    ("causal & slidingwindow(size=3)", "slidingwindow ... sliding_window", 9),
    ("causal(ofset=1)", "ofset ... offset", 0),
    ("causal(align='lower_rihgt')", "lower_rihgt ... lower_right", 0),
    ("causal &", "syntax|expression", None),
    ("(causal", "syntax|closed", None),
    ("", "empty|mask", None),
    ("   ", "empty|mask", None),
    ("causal.__class__", "causal.__class__|attribute", None),
    ("kv.__class__ < q", "attribute|__class__", None),
    ("ids.shape[0] < q", "attribute|shape", None),
    ("__import__('os') < q", "__import__", 0),
    ("kv < __builtins__", "__builtins__", 5),
    ("eval('1') < q", "eval", 0),
    ("kv < max(q, 3)", "max ... maximum", 5),
    ("(kv < 2).named('sinks')", "called ... write named", 0),
    ("causal and full", "and ... &", 0),
    ("causal or full", r"or ... \|", 0),
    ("not causal", "not ... ~", 0),
    ("0 <= q - kv < 3", "chain ... &", 0),
    ("q - kv < 3 & causal", "parentheses|&", None),
    ("q / 2 < kv", "//", 0),
    ("q ** 2 < kv", r"\*\*", 0),
    ("q << 2 < kv", "<<", 0),
    ("q < 0.5", r"0\.5", 4),
    ("flag[b, kv] == True", r"True cannot be an operand; write 1, e.g. flag\[b, kv\] == 1", 15),
    ("causal & flag[b, kv] == 1", r"^comparisons bind less tightly than &: put each in parentheses", 0),
    ("causal == flag[b, kv]", r"^== binds less tightly than & and \|: put each comparison in parentheses", 0),
    ("q < 'a'", "'a'", 4),
    ("q", "q ... mask", None),
    ("3", "3 ... mask", None),
    ("[causal]", "mask", None),
    ("lambda: causal", "lambda", 0),
    ("causal if full else empty", "where", 0),
    ("[x for x in y]", "for|comprehension|ListComp", 0),
    ("(x := causal)", ":=|NamedExpr", None),
    ("causal; full", "syntax", None),
    ("causal\nfull", "syntax", None),
    ("f'{causal}'", "f'|text|string|JoinedStr", None),
    ("causal(*[1])", r"\*", None),
    ("causal(**{'offset': 1})", r"\*\*|keyword", None),
    ("q in [1, 2]", "in", 0),
    ("q is kv", "is", 0),
    ("key_padding(lengths=[3, -1])", "-1", 0),
    ("key_padding(lengths=[[1], [2, 3]])", "uneven", 0),
    ("sliding_window(3)", "left ... right ... size", 0),
    ("sliding_window(256, 0)", r"by name ... write sliding_window\(left=256, right=0\)", 0),
    ("document()", "one of", 0),
    ("ids[b, q", "syntax|closed", None),
    ("kv < " + "9" * 5000, "long|digits|syntax|64", None),
]


@pytest.mark.parametrize(("text", "wanted", "column"), TEXT, ids=[row[0][:30] or "nothing" for row in TEXT])
def test_text_is_refused(text: str, wanted: str, column: int | None) -> None:
    with pytest.raises(fm.errors.TextError) as caught:
        fm.parse(text).dense(4)
    message = str(caught.value)
    for part in wanted.split(" ... "):
        assert re.search(part, message), f"{part!r} is not in the message: {message}"
    if column is not None:
        shown, caret = message.splitlines()[-2:]
        assert shown.strip() == text
        assert caret.index("^") - shown.index(text) == column


def test_text_too_long() -> None:
    with pytest.raises(fm.errors.TextError, match=r"long|characters"):
        fm.parse(" & ".join(f"(kv != {n})" for n in range(100_000)))


@pytest.mark.parametrize("text", ["~" * 5000 + "causal", "(" * 300 + "causal" + ")" * 300, "-" * 3000 + "q < kv"])
def test_text_too_deep(text: str) -> None:
    with pytest.raises(fm.errors.TextError, match=r"deep|depth|nested"):
        fm.parse(text)


def test_long_text_is_not_deep() -> None:
    mask = fm.parse(" & ".join(f"(kv != {n})" for n in range(400)))
    assert mask.dense(1, 410).sum() == 10
    assert fm.parse(str(mask)) == mask


@pytest.mark.parametrize("value", [None, 3, b"causal", ["causal"]])
def test_text_must_be_text(value: Any) -> None:
    with pytest.raises(FlexmaskError) as caught:
        fm.parse(value)
    assert isinstance(caught.value, TypeError)
