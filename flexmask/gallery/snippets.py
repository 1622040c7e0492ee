"""Code for an entry: a shell command that draws it, and lines of Python that make it."""

from __future__ import annotations

import json
import re
import shlex

from flexmask.gallery.entry import Entry

__all__ = ["command", "python"]


def command(entry: Entry) -> str:
    """The line that draws the entry in the terminal."""
    words = ["flexmask", "render", _quoted(entry.text)]
    for name, value in entry.params.items():
        words += ["-p", _quoted(f"{name}={json.dumps(value, separators=(',', ':'))}")]
    if entry.kv_len == entry.q_len:
        words += ["--seq-len", str(entry.q_len)]
    else:
        words += ["--q-len", str(entry.q_len), "--kv-len", str(entry.kv_len)]
    for option, number in (("--q-offset", entry.q_offset), ("--batch", entry.batch), ("--head", entry.head)):
        if number:
            words += [option, str(number)]
    if entry.block_size is not None:
        words += ["--block-size", str(entry.block_size)]
    if entry.why:
        words.append("--why")
    if entry.q_tokens is not None:
        words += ["--tokens", _quoted(_labels(entry.q_tokens))]
    if entry.kv_tokens is not None and entry.kv_tokens != entry.q_tokens:
        words += ["--kv-tokens", _quoted(_labels(entry.kv_tokens))]
    return " ".join(words)


def python(entry: Entry) -> str:
    """The lines that make the mask, and its BlockMask."""
    values = "".join(f", {name}={value!r}" for name, value in entry.params.items())
    lengths = [str(entry.q_len)] if entry.kv_len == entry.q_len else [str(entry.q_len), str(entry.kv_len)]
    if entry.q_offset:
        lengths.append(f"q_offset={entry.q_offset}")
    return "\n".join(
        [
            "import flexmask",
            "",
            f"mask = flexmask.parse({json.dumps(entry.text, ensure_ascii=False)}{values})",
            f"block_mask = mask.block_mask({', '.join(lengths)})",
        ]
    )


def _labels(tokens: tuple[str, ...]) -> str:
    """Labels as a text of words, or as a list where they are no words or would be read as something else."""
    words = " ".join(tokens)
    plain = tuple(words.split()) == tokens and words[0] != "@" and (words[0], words[-1]) != ("[", "]")
    return words if plain else json.dumps(tokens, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A text as one word of a shell, in double quotes where nothing in it means anything there."""
    if re.fullmatch(r"[\w.,/@%+:-]+", text):
        return text
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
