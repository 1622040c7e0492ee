"""What is found by words: names of masks, models and methods by part, joined or apart, and with errors of spelling.

An entry is found where it has each word: as it stands anywhere in its texts, or without blanks and signs in one of its names, so
that ``llama4`` and ``streaming llm`` find what is called Llama 4 and StreamingLLM. A word that no entry has is read as the
nearest one of a name. The search of the gallery's page (``web/index.js``) finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flexmask._checks import closest

T = TypeVar("T")


@dataclass(frozen=True)
class Card:
    """What a thing is found by.

    Attributes:
        names: its names, the title first.
        texts: further texts.
    """

    names: tuple[str, ...]
    texts: tuple[str, ...]

    def has(self, word: str) -> bool:
        """Whether a word in small letters is in a text, or joined in a name."""
        return word in "\n".join((*self.names, *self.texts)).lower() or _is_in_a_name(word, self.names)

    def words(self) -> set[str]:
        """The words of the names, and each name as one word."""
        return {word for name in self.names for word in (*_words(name), _joined(name))}

    def fit(self, words: Sequence[str]) -> int:
        """How well words fit that it has: one that is a name counts more than one that begins or is in one, or is elsewhere."""
        whole = "".join(map(_joined, words))
        return sum(_fit(word, self.names) for word in words) + (4 if whole in map(_joined, self.names) else 0)


def find(words: str, things: Sequence[T], card: Callable[[T], Card]) -> list[T]:
    """The things that have all words, those that fit best first.

    Args:
        words: words with blanks between them, in any case.
        things: what to search.
        card: what a thing is found by.
    """
    cards = [card(thing) for thing in things]
    known = sorted(set[str]().union(*(each.words() for each in cards)))
    wanted = [word if any(each.has(word) for each in cards) else closest(word, known) or word for word in words.lower().split()]
    found = [(each.fit(wanted), thing) for each, thing in zip(cards, things, strict=True) if all(map(each.has, wanted))]
    return [thing for _, thing in sorted(found, key=lambda pair: -pair[0])]


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def _joined(name: str) -> str:
    return "".join(_words(name))


def _is_in_a_name(word: str, names: Sequence[str]) -> bool:
    return bool(_joined(word)) and any(_joined(word) in _joined(name) for name in names)


def _fit(word: str, names: Sequence[str]) -> int:
    if _joined(word) in map(_joined, names):
        return 3
    if any(part.startswith(word) for name in names for part in _words(name)):
        return 2
    return int(_is_in_a_name(word, names))
