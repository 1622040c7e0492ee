"""The entries of the gallery that people look for by name: each against a predicate in plain Python, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.gallery.rendered import python
from flexmask.gallery.source import Entry, read_entries, select_entries

ENTRIES = {entry.title: entry for entry in read_entries(Path(__file__).parents[2] / "gallery" / "gallery.toml")}
NAMED = [entry for entry in ENTRIES.values() if entry.family in ("basics", "block grids", "models")]

Predicate = Callable[[int, int, int, int], bool]


def data(title: str, name: str) -> Any:
    return ENTRIES[title].params[name]


def packed(*lengths: int) -> list[int]:
    return [document for document, length in enumerate(lengths) for _ in range(length)]


def windows(*images: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The window of each patch of images in windows of 4 x 4, stored window by window and not padded at the edges."""
    found = []
    for image, (high, wide) in enumerate(images):
        for top in range(0, high, 4):
            for left in range(0, wide, 4):
                found += [(image, top, left)] * (min(4, high - top) * min(4, wide - left))
    return found


def swin(size: int = 8, window: int = 4, shift: int = 2) -> list[list[bool]]:
    """Shifted windows as in the paper: a cyclic shift, windows, and in each only cells of the same region of the image."""
    region = [0 if at < size - window else 1 if at < size - shift else 2 for at in range(size)]
    place = {}  # of a pixel, in the image that is shifted to the upper left: its window and its region
    for row in range(size):
        for column in range(size):
            there = (row - shift) % size, (column - shift) % size
            place[row * size + column] = (*(at // window for at in there), *(region[at] for at in there))
    return [[place[one] == place[other] for other in range(size * size)] for one in range(size * size)]


def longnet(head: int, q: int, kv: int) -> bool:
    for segment, rate in ((4, 1), (8, 2), (16, 4)):
        start = q // segment * segment
        taken = range(start + head % rate, start + segment, rate)
        if q in taken and kv in taken and kv <= q:
            return True
    return False


def sparse(head: int, q: int, kv: int) -> bool:
    """The branches of native sparse attention: 5 compressed keys of 8 tokens at a stride of 4, and then 24 tokens."""
    if kv < 5:
        return head == 0 and all(token <= q for token in range(4 * kv, 4 * kv + 8))
    token = kv - 5
    if head == 1:
        return token <= q and data("Native sparse attention", "chosen")[q][token // 4] == 1
    return head == 2 and q - 6 < token <= q


def ancestors(node: int) -> list[int]:
    parents = [-1, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8]
    return [node] if node == 0 else [node, *ancestors(parents[node])]


PACKED, THREE, SWIN, QWEN = packed(5, 4, 7), packed(8, 10, 6), swin(), windows((6, 6), (4, 6))
SCALES, NAVIT = packed(1, 4, 9, 16), [*packed(16, 12, 15), *range(-5, 0)]
#: A rank has a chunk from the front and one from the back of 8 chunks of 5 tokens.
ZIGZAG = [token for rank in range(4) for chunk in (rank, 7 - rank) for token in range(5 * chunk, 5 * chunk + 5)]

PREDICATES: dict[str, Predicate] = {
    "A causal mask": lambda b, h, q, kv: kv <= q,
    "Padding": lambda b, h, q, kv: kv < 9,
    "A sliding window": lambda b, h, q, kv: kv in (q - 3, q - 2, q - 1, q),
    "A window to both sides": lambda b, h, q, kv: abs(q - kv) <= 2,
    "Three documents in one sequence": lambda b, h, q, kv: PACKED[q] == PACKED[kv],
    "Causal and documents": lambda b, h, q, kv: kv <= q and PACKED[q] == PACKED[kv],
    "A causal mask in blocks": lambda b, h, q, kv: kv <= q,
    "A window in blocks": lambda b, h, q, kv: -2 <= q - kv <= 2,
    "Documents in blocks": lambda b, h, q, kv: THREE[q] == THREE[kv],
    "GPT": lambda b, h, q, kv: kv <= q,
    "Qwen with prompts padded on the left": lambda b, h, q, kv: (0, 5)[b] <= kv <= q,
    "gpt-oss": lambda b, h, q, kv: kv <= q and (h == 1 or q - kv < 6),
    "ALiBi": lambda b, h, q, kv: kv <= q,
    "Transformer-XL": lambda b, h, q, kv: kv <= q and kv // 8 >= q // 8 - 1,
    "T5": lambda b, h, q, kv: kv < (20, 13)[b] or 20 <= kv <= q,
    "Whisper": lambda b, h, q, kv: kv < 20 or kv - 20 <= q,
    "ViT": lambda b, h, q, kv: True,
    "NaViT": lambda b, h, q, kv: NAVIT[q] == NAVIT[kv] >= 0,
    "The windows of Qwen2.5-VL": lambda b, h, q, kv: QWEN[q] == QWEN[kv],
    "The shifted windows of a Swin Transformer": lambda b, h, q, kv: SWIN[q][kv],
    "Perceiver": lambda b, h, q, kv: kv < (44, 26)[b],
    "Set Transformer": lambda b, h, q, kv: max(q, kv) < (24, 17)[b] and (q < 4) != (kv < 4),
    "Decision Transformer": lambda b, h, q, kv: 6 <= kv <= q,
    "VAR": lambda b, h, q, kv: SCALES[kv] <= SCALES[q],
    "Diffusion Forcing": lambda b, h, q, kv: kv // 8 <= q // 8,
    "Chameleon": lambda b, h, q, kv: kv <= q,
    "LongNet": lambda b, h, q, kv: longnet(h, q, kv),
    "LogSparse Transformer": lambda b, h, q, kv: kv == q or kv in [q - 2**power for power in range(6)],
    "Routing Transformer": lambda b, h, q, kv: (
        kv <= q and data("Routing Transformer", "clusters")[q] == data("Routing Transformer", "clusters")[kv]
    ),
    "Native sparse attention": lambda b, h, q, kv: sparse(h, q, kv),
    "MoBA": lambda b, h, q, kv: kv <= q and (q // 4 == kv // 4 or data("MoBA", "chosen")[q][kv // 4] == 1),
    "DeepSeek sparse attention": lambda b, h, q, kv: kv <= q and data("DeepSeek sparse attention", "chosen")[q][kv] == 1,
    "Quest": lambda b, h, q, kv: kv <= q + 36 and data("Quest", "chosen")[q][kv // 6] == 1,
    "SnapKV": lambda b, h, q, kv: kv <= q + 20 and (kv >= 16 or data("SnapKV", "kept")[h][kv] == 1),
    "H2O": lambda b, h, q, kv: kv <= q < data("H2O", "steps")[kv],
    "Medusa": lambda b, h, q, kv: kv < 9 or kv - 9 in ancestors(q),
    "Multi-token prediction": lambda b, h, q, kv: kv <= q < 16 - b,
    "Zigzag ring attention": lambda b, h, q, kv: ZIGZAG[kv] <= ZIGZAG[q],
}


def cells_of(entry: Entry) -> torch.Tensor:
    return entry.mask().dense(entry.q_len, entry.kv_len)


@pytest.mark.parametrize("entry", NAMED, ids=[entry.title for entry in NAMED])
def test_entry_is_the_mask_of_its_source(entry: Entry) -> None:
    cells = cells_of(entry)
    said = [
        [[[PREDICATES[entry.title](b, h, q, kv) for kv in range(entry.kv_len)] for q in range(entry.q_len)] for h in range(heads)]
        for heads in [cells.shape[1]]
        for b in range(cells.shape[0])
    ]
    assert cells.tolist() == said


def test_each_predicate_has_an_entry() -> None:
    assert set(PREDICATES) == {entry.title for entry in NAMED}


def test_choices_are_those_of_their_sources() -> None:
    """Data that stands for scores keeps to the rules by which the models choose."""
    moba, nsa = data("MoBA", "chosen"), data("Native sparse attention", "chosen")
    for q in range(24):
        own = q // 4
        assert sum(moba[q]) == min(2, own)
        assert not any(moba[q][own:])
        assert sum(nsa[q]) == min(3, own + 1)
        assert nsa[q][0] == nsa[q][own] == 1
    assert cells_of(ENTRIES["DeepSeek sparse attention"])[0, 0].sum(1).tolist() == [min(q + 1, 5) for q in range(16)]
    assert all(sum(row) == 3 for row in data("Quest", "chosen"))
    assert all(sum(head) == 5 and not any(head[16:]) for head in data("SnapKV", "kept"))


def test_a_cache_of_heavy_hitters_keeps_its_budget_and_the_last_tokens() -> None:
    cells = cells_of(ENTRIES["H2O"])[0, 0]
    assert cells.sum(1).tolist() == [min(q + 1, 9) for q in range(32)]  # 8 in the cache, and the token itself
    assert all(bool(cells[q, max(0, q - 4) : q + 1].all()) for q in range(32))


def test_zigzag_gives_each_rank_the_same_work() -> None:
    cells = cells_of(ENTRIES["Zigzag ring attention"])[0, 0]
    assert len({int(rows.sum()) for rows in cells.split(10)}) == 1


def test_alibi_has_its_score_mod() -> None:
    """Slopes that halve from head to head, from 1/2 on: the attention of the layers adds their bias."""
    made: dict[str, Any] = {}
    exec(python(ENTRIES["ALiBi"]), made)
    query, key, value = torch.randn(3, 1, 8, 16, 4).unbind()
    found = fm.attention(query, key, value, made["mask"], score_mod=made["score_mod"])
    places = torch.arange(16)
    slopes = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    bias = -slopes[:, None, None] * (places[:, None] - places)
    bias = bias.masked_fill(places > places[:, None], -torch.inf)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES.values() if entry.computed], ids=lambda entry: entry.title)
def test_code_computes_data_of_the_right_form(entry: Entry) -> None:
    for name, code in entry.computed.items():
        wanted = torch.tensor(entry.params[name])
        torch.manual_seed(0)
        known = {
            "torch": torch,
            "scores": torch.randn(wanted.shape),
            "x": torch.randn(len(wanted), 8),
            "centroids": torch.randn(4, 8),
        }
        made = eval(code, known)
        assert made.shape == wanted.shape
        assert made.dtype == wanted.dtype
        fm.parse(entry.text, **{**entry.params, name: made}).dense(entry.q_len, entry.kv_len)


#: What people look for, and an entry that they find.
SEARCHES = {
    **dict.fromkeys(("Swin", "shifted window"), "The shifted windows of a Swin Transformer"),
    **dict.fromkeys(("best-of-n", "best of n", "GRPO"), "Several answers to one prompt"),
    **dict.fromkeys(("zigzag", "ring attention", "striped attention"), "Zigzag ring attention"),
    **dict.fromkeys(("NSA", "native sparse attention"), "Native sparse attention"),
    **dict.fromkeys(("DSA", "DeepSeek sparse attention"), "DeepSeek sparse attention"),
    **dict.fromkeys(("T5", "encoder-decoder", "encoder", "decoder"), "T5"),
    **dict.fromkeys(("GPT", "gpt-2", "decoder", "Llama"), "GPT"),
    **dict.fromkeys(("Qwen", "qwen-vl"), "The windows of Qwen2.5-VL"),
    **{
        "MTP": "Multi-token prediction",
        "ViT": "ViT",
        "LogSparse": "LogSparse Transformer",
        "BERT": "An encoder with empty rows of padding",
    },
    **{
        name: name
        for name in (
            *(
                "Medusa",
                "MoBA",
                "Quest",
                "SnapKV",
                "H2O",
                "Perceiver",
                "Set Transformer",
                "Decision Transformer",
                "Whisper",
                "VAR",
            ),
            *("Diffusion Forcing", "Chameleon", "LongNet", "Routing Transformer", "gpt-oss", "Transformer-XL", "ALiBi"),
        )
    },
}


@pytest.mark.parametrize("name", SEARCHES)
def test_search_finds_models_and_methods(name: str) -> None:
    for written in (name, name.lower(), name.upper()):
        assert SEARCHES[name] in [entry.title for entry in select_entries([*ENTRIES.values()], [written])]
