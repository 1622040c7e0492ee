"""The messages of errors: in the words of the documentation, one line each, and without words that only this library knows."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.support.messages import messages


@cache
def sentences() -> list[tuple[str, str]]:
    return [(place, text) for place, text in messages() if len(text.split()) > 3]


#: Words that a user of PyTorch cannot know, and what to write.
UNKNOWN = {
    r"\bsees\b|\bsee nothing\b": "attends to",
    r"\ba text (or|and)\b|\blist of texts\b": "string",
    r"shapes the mask": "the conditions of the mask depend on it",
    r"\b(doors?|mend|told|likewise|beside|in vain)\b": "plain words",
    r"\b(closure|raster|survey|slots?|leaf|clause)\b": "the user's words",
    r"from the start|stands? apart|looks? at|waits? for|follow from": "plain words",
}


def test_the_list_has_the_messages() -> None:
    assert len(sentences()) > 350
    assert any("q_len" in text for _, text in sentences())
    assert any(place.startswith("plugins/") for place, _ in sentences())


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_messages_are_in_plain_words(pattern: str) -> None:
    found = [f"{place}: {text}" for place, text in sentences() if re.search(pattern, text)]
    assert found == [], f"write: {UNKNOWN[pattern]}"


def test_messages_have_the_form_of_all() -> None:
    """They begin in lower case, or with what they are about, and name no exception: that is its type."""
    wrong = [
        f"{place}: {text}"
        for place, text in sentences()
        if re.match(r"(Error|Invalid|Cannot|Must|Please|Sorry)\b", text) or "!!" in text or re.search(r"\bplease\b", text)
    ]
    assert wrong == []
