"""Masks for the interactive page, made by hand: what loops over the cells say of them, and the data that the page gets."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flexmask.plotting.html import Data, compressed

__all__ = ["Case", "N", "PADDED", "block_kind", "by_area", "case", "causal", "packed_text"]

TEXT = (
    "The quick brown fox jumps over a lazy dog . Attention masks as values compose with operators and print . One two </b> &amp;"
)
DOCUMENTS = [[8, 10, 6], [5, 19, 0]]
PADDED = [22, 20]
N = 24


@dataclass(frozen=True)
class Case:
    """A mask as loops see it, and as the page gets it."""

    terms: dict[str, Callable[[int, int, int], bool]]
    view: Data

    def hiding(self, b: int, q: int, kv: int) -> list[str]:
        return [name for name, shows in self.terms.items() if not shows(b, q, kv)]

    def says(self, b: int, q: int, kv: int) -> str:
        """What is to be read for a cell, up to its blocks and bands."""
        names = self.hiding(b, q, kv)
        if not names:
            return "visible"
        if len(self.terms) == 1:
            return "hidden"
        return f"hidden by {names[0]}" + (f", also {' and '.join(f'by {name}' for name in names[1:])}" if names[1:] else "")


def block_kind(cells: list[bool], area: int) -> int:
    return 0 if not any(cells) else 2 if all(cells) and len(cells) == area else 1


def case(
    terms: dict[str, Callable[[int, int, int], bool]],
    q_len: int,
    kv_len: int,
    *,
    batches: int = 1,
    block_size: list[int] | None = None,
    q_offset: int = 0,
    tokens: list[str] | None = None,
    bands: Callable[[int], list[Data]] = lambda b: [],
) -> Case:
    """The view's data, cell by cell."""
    names, panels = list(terms), list[Data]()
    for b in range(batches):
        cells = [(b, q + q_offset, kv) for q in range(q_len) for kv in range(kv_len)]
        hiding = [[kind for kind, name in enumerate(names, start=1) if not terms[name](*cell)] for cell in cells]
        kinds = [hidden[0] if hidden else 0 for hidden in hiding]
        blocks: list[int] = []
        if block_size is not None:
            high, wide = block_size
            for top in range(0, q_len, high):
                for left in range(0, kv_len, wide):
                    rows, columns = range(top, min(top + high, q_len)), range(left, min(left + wide, kv_len))
                    blocks.append(block_kind([kinds[q * kv_len + kv] == 0 for q in rows for kv in columns], high * wide))
        bits = struct.pack(f"<{len(hiding)}I", *(sum(1 << kind for kind in hidden) for hidden in hiding))
        panels.append(
            {
                "batch": b,
                "head": 0,
                "q_offset": q_offset,
                "pairs": [[kinds.count(kind)] * 2 for kind in range(len(names) + 1)],
                "cells": compressed(bytes(kinds)),
                "hidden_by": compressed(bits) if len(names) > 1 else None,
                "shares": None,
                "estimated": None,
                "blocks": compressed(bytes(blocks)) if block_size is not None else None,
                "bands": bands(b),
            }
        )
    labels: list[Data] = [{"role": "hidden", "label": f"hidden by {name}" if len(names) > 1 else "hidden"} for name in names]
    view: Data = {
        "text": " & ".join(names),
        "q_len": q_len,
        "kv_len": kv_len,
        "batches": batches,
        "heads": 1,
        "categories": [{"role": "visible", "label": "visible"}, *labels],
        "step": [1, 1],
        "shape": [q_len, kv_len],
        "block_size": block_size,
        "q_tokens": tokens,
        "kv_tokens": tokens,
        "start": "blocks" if block_size else "why",
        "panels": panels,
    }
    return Case(terms, view)


def packed_text(tokens: bool = True, block_size: list[int] | None = None) -> Case:
    """Two sequences of packed documents, padded at the end."""
    ids = [[i for i, length in enumerate(lengths) for _ in range(length)] for lengths in DOCUMENTS]

    def bands(b: int) -> list[Data]:
        starts = [0, DOCUMENTS[b][0], sum(DOCUMENTS[b][:2])]
        count = len([length for length in DOCUMENTS[b] if length])
        names, starts = ["0", "1", "2"][:count], starts[:count]
        return [
            {"axis": "q", "label": "document", "starts": starts, "values": names},
            {"axis": "kv", "label": "document", "starts": starts, "values": names},
            {"axis": "kv", "label": "padding", "starts": [0, PADDED[b]], "values": ["", "padding"]},
        ]

    return case(
        {
            "causal": lambda b, q, kv: kv <= q,
            "document(lengths=[[8, 10, 6], [5, 19, 0]])": lambda b, q, kv: ids[b][q] == ids[b][kv],
            "key_padding(lengths=[22, 20])": lambda b, q, kv: kv < PADDED[b],
        },
        N,
        N,
        batches=2,
        block_size=block_size,
        tokens=TEXT.split(" ") if tokens else None,
        bands=bands,
    )


def causal(q_len: int = 6, kv_len: int = 6, **options: Any) -> Case:
    offset = options.get("q_offset", 0)
    options.setdefault("block_size", None)
    return case({"causal": lambda b, q, kv: kv <= q}, q_len, kv_len, **{**options, "q_offset": offset})


def by_area(size: int = 512, step: int = 256) -> Data:
    """Causal, far too large for cells: pixels on the diagonal show half of what they stand for."""
    shares = bytearray()
    for role in ("visible", "hidden"):
        for row in range(size):
            for column in range(size):
                visible = 255 if column < row else 128 if column == row else 0
                shares.append(visible if role == "visible" else 255 - visible)
    length = size * step
    visible = length * (length + 1) // 2
    estimated = bytes(int(row == column == 7) for row in range(size) for column in range(size))
    blocks = bytes(2 if column < row else int(column == row) for row in range(size // 4) for column in range(size // 4))
    return {
        **causal().view,
        "q_len": length,
        "kv_len": length,
        "step": [step, step],
        "shape": [size, size],
        "block_size": [4 * step, 4 * step],
        "panels": [
            {
                **causal().view["panels"][0],
                "pairs": [[visible] * 2, [length * length - visible] * 2],
                "cells": None,
                "shares": compressed(bytes(shares)),
                "estimated": compressed(estimated),
                "blocks": compressed(blocks),
            }
        ],
    }
