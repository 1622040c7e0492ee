"""Rendered entries: the cells of their panels, their statistics, and code for them: a shell command, and lines of Python."""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flexmask
from flexmask.errors import FlexmaskError, RenderError
from flexmask.gallery.source import Entry
from flexmask.plotting.html import block_size_for
from flexmask.plotting.sheet import Sheet, panel_sheet
from flexmask.registry import names
from flexmask.report.stats import Stats


@dataclass(frozen=True, eq=False)
class RenderedEntry:
    """An entry with its panels and statistics.

    Attributes:
        entry: the entry.
        sheet: its panels.
        stats: the statistics of all sequences and heads, with the drawn block size, else with a suitable one.
    """

    entry: Entry
    sheet: Sheet
    stats: Stats


def render_entry(entry: Entry) -> RenderedEntry:
    """Renders an entry.

    Raises:
        RenderError: its text is no mask, or its data, lengths, sequence, head or labels do not fit; the message names the entry.
    """
    try:
        mask = entry.mask()
    except FlexmaskError as error:
        raise RenderError(f"entry {entry.title!r}: text, params: {error}") from error
    if mask.params:
        raise RenderError(f"entry {entry.title!r}: params has no value for {', '.join(mask.params)}")
    block_size = entry.block_size or block_size_for(entry.q_len, entry.kv_len)
    keys = "params, q_len, kv_len"
    try:
        stats = mask.stats(entry.q_len, entry.kv_len, q_offset=entry.q_offset, block_size=block_size)
        keys = "batch, head"
        sheet = panel_sheet(
            mask,
            entry.q_len,
            entry.kv_len,
            batch=entry.batch,
            head=entry.head,
            q_offset=entry.q_offset,
            block_size=entry.block_size,
            why=entry.why,
            tokens=entry.q_tokens,
            kv_tokens=entry.kv_tokens,
        )
    except FlexmaskError as error:
        raise RenderError(f"entry {entry.title!r}: {keys}: {error}") from error
    return RenderedEntry(entry, sheet, stats)


#: Characters of a line of Python at most, where it can be broken; and equal or consecutive values that are written as one.
WIDTH, RUN = 100, 4


def command(entry: Entry) -> str:
    """The line that draws the entry in the terminal."""
    words = ["flexmask", "render", _quoted(entry.text)]
    for name, value in entry.params.items():
        words += ["-p", _quoted(f"{name}={json.dumps(value, separators=(',', ':'))}")]
    if entry.kv_len == entry.q_len:
        words += ["--seq-len", str(entry.q_len)]
    else:
        words += ["--q-len", str(entry.q_len), "--kv-len", str(entry.kv_len)]
    numbers = {"--q-offset": entry.q_offset, "--batch": entry.batch, "--head": entry.head, "--block-size": entry.block_size}
    for option, number in numbers.items():
        if number:
            words += [option, str(number)]
    if entry.why:
        words.append("--why")
    if entry.q_tokens is not None:
        words += ["--tokens", _quoted(_labels(entry.q_tokens))]
    if entry.kv_tokens is not None and entry.kv_tokens != entry.q_tokens:
        words += ["--kv-tokens", _quoted(_labels(entry.kv_tokens))]
    return " ".join(words)


def python(entry: Entry) -> str:
    """The lines that define the data, make the mask, lower it to a BlockMask, and define the ``score_mod`` next to it."""
    writer = _Python(entry.params)
    mask = ast.unparse(writer.visit(ast.parse(entry.text, mode="eval")))
    data = []
    for name, value in entry.params.items():
        if name in entry.computed:
            data.append(f"# A model computes it, e.g. {name} = {entry.computed[name]}")
        written = _written(value)
        data.append(f"{name} = table({written})" if name in writer.tables else f"{name} = {written}")
    modules = {"flexmask": writer.used & {*flexmask.__all__}, "flexmask.masks": writer.used - {*flexmask.__all__}}
    imports = [f"from {module} import {', '.join(sorted(found))}" for module, found in modules.items() if found]
    lengths = [str(entry.q_len)] if entry.kv_len == entry.q_len else [str(entry.q_len), str(entry.kv_len)]
    if entry.q_offset:
        lengths.append(f"q_offset={entry.q_offset}")
    lowering = f"block_mask = mask.block_mask({', '.join(lengths)})"
    call = "# flexmask.attention(query, key, value, mask, score_mod=score_mod)"
    scores = ["", "", *entry.score_mod.strip().splitlines(), "", "", call] if entry.score_mod else []
    return "\n".join([*imports, "", *data, f"mask = {mask}", lowering, *scores])


class _Python(ast.NodeTransformer):
    """From the text of a mask to Python: named masks are called, and looked up data is a table.

    Attributes:
        params: the names of data.
        tables: the names of data that is looked up by index.
        used: the names to import.
    """

    def __init__(self, params: Any) -> None:
        self.params, self.masks = set(params), set(names())
        self.tables: set[str] = set()
        self.used: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id != "abs":
            self.used.add(node.func.id)
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(word) for word in node.keywords]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name):
            self.tables.add(node.value.id)
            self.used.add("table")
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.params:
            return node
        self.used.add(node.id)
        return ast.Call(node, [], []) if node.id in self.masks else node


def _written(value: Any) -> str:
    """Data as Python: runs of equal and of consecutive values as one expression each, and a row of a table in each line."""
    if not isinstance(value, list):
        return repr(value)
    if value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_written(row)},\n" for row in value) + "]"
    for parts in (map(repr, value), _runs(value)):
        line = f"[{', '.join(parts)}]"
        if len(line) <= WIDTH:
            return line
    return f"[\n{textwrap.indent(textwrap.fill(line[1:-1], WIDTH), '    ')}\n]"


def _runs(values: Sequence[Any]) -> list[str]:
    """The values, of which long runs are unpacked: ``*[0] * 9`` or ``*range(3, 9)``."""
    parts = []
    at = 0
    while at < len(values):
        value, same, rising = values[at], at, at
        while same < len(values) and values[same] == value:
            same += 1
        while type(value) is int and rising < len(values) and values[rising] == value + rising - at:
            rising += 1
        end = max(same, rising)
        if end - at < RUN:
            parts.append(repr(value))
            end = at + 1
        elif same == end:
            parts.append(f"*[{value!r}] * {end - at}")
        else:
            parts.append(f"*range({value}, {value + end - at})" if value else f"*range({end - at})")
        at = end
    return parts


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
