"""The gallery's source: every entry is declared in full and draws what its caption says, and every named mask stands in one."""

import ast
import re
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.expr.mask import Named, Truth
from tests.support.examples import OWN_MASKS

SOURCE = Path(__file__).parents[2] / "gallery" / "gallery.toml"
ENTRIES: list[dict[str, Any]] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["mask"]
WANTED = {"title", "family", "text", "q_len", "tags", "caption", "source"}
ALLOWED = {"aliases", "computed", "kv_len", "q_offset", "block_size", "batch", "head", "why", "q_tokens", "kv_tokens", "params"}
ALLOWED |= {"score_mod"}
FAMILIES = {"basics", "block grids", "models", "compositions"} | {
    path.stem for path in (Path(fm.__file__).parent / "catalogue").glob("*.py")
}
TAGS = {
    *("causal", "window", "sinks", "global", "prefix", "blocks", "sparse", "indices"),
    *("padding", "packing", "batch", "per-head"),
    *("encoder", "decoder", "cross-attention"),
    *("training", "inference", "kv-cache", "long-context", "diffusion", "speculative", "parallel"),
    *("images", "video", "speech", "graphs"),
    "composing",
}
#: Entries that show everything, or nothing.
PLAIN = {"full": 1.0, "empty": 0.0}


def each(check: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """A test of all entries, which says of which ones a check fails."""

    def test() -> None:
        failed = {}
        for entry in ENTRIES:
            try:
                check(entry)
            except AssertionError as error:
                failed[entry["title"]] = str(error)
        assert not failed

    test.__doc__ = check.__doc__
    return test


def mask_of(entry: dict[str, Any]) -> fm.Mask:
    return fm.parse(entry["text"]).bind(**entry.get("params", {}))


def lengths_of(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["q_len"], entry.get("kv_len", entry["q_len"])


def panels_of(entry: dict[str, Any]) -> list[torch.Tensor]:
    """The cells of the sequences and heads that the entry draws."""
    cells = mask_of(entry).dense(*lengths_of(entry), q_offset=entry.get("q_offset", 0))
    axes = zip(("batch", "head"), cells.shape[:2], strict=True)
    rows, heads = (range(n) if entry.get(key) == "all" else [entry.get(key, 0)] for key, n in axes)
    return [cells[row, head] for row in rows for head in heads]


def terms_of(text: str) -> int:
    """Named masks and comparisons in a text."""
    nodes = list(ast.walk(ast.parse(text, mode="eval")))
    names = sum(isinstance(node, ast.Name) and node.id in OWN_MASKS for node in nodes)
    return names + sum(isinstance(node, ast.Compare) for node in nodes)


def slug_of(title: str) -> str:
    return "-".join(re.findall("[a-z0-9]+", title.lower()))


def packed(*lengths: int) -> list[int]:
    """The document of each position."""
    return [document for document, length in enumerate(lengths) for _ in range(length)]


def span(start: int, length: int) -> set[int]:
    return set(range(start, start + length))


def together(q: int, kv: int, *spans: set[int]) -> bool:
    return any({q, kv} <= span for span in spans)


def in_window(at: int, other: int, size: int, kernel: int) -> bool:
    start = min(max(at - kernel // 2, 0), size - kernel)
    return start <= other < start + kernel


def in_branch(node: int, other: int) -> bool:
    parents = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 8]
    return node == other or (node >= 0 and in_branch(parents[node], other))


def served(q: int, kv: int) -> bool:
    q_lengths, kv_lengths = (7, 1, 1, 1, 6), (7, 12, 5, 9, 15)
    queries, keys = packed(*q_lengths), packed(*kv_lengths)
    own = queries[q]
    cached = kv_lengths[own] - q_lengths[own]
    return keys[kv] == own and kv - keys.index(own) <= cached + q - queries.index(own)


def denoised(q: int, kv: int) -> bool:
    if (q % 24 < 16) != (kv % 24 < 16):
        return False
    own, other = q % 24 // 4, kv % 24 // 4
    if kv < 24:
        return q < 24 and other == own
    return other < own if q < 24 else other <= own


TEXTS = {
    "padding": packed(13, 8, 20, 7),
    "window": packed(19, 6, 23),
    "encoder": packed(11, 21, 9, 7),
    "sinks": packed(18, 7, 23),
    "chunks": packed(21, 10, 17),
    "answers": packed(16, 9, 13, 10),
    "heads": packed(14, 18, 8),
}
STARTS = {name: [ids.index(own) for own in ids] for name, ids in TEXTS.items()}


def alike(name: str, q: int, kv: int) -> bool:
    return TEXTS[name][q] == TEXTS[name][kv]


#: What the captions of compositions say of a cell, by sequence, head, query and key.
CAPTIONS: dict[str, Callable[[int, int, int, int], bool]] = {
    "A padded batch in a decoder": lambda b, h, q, kv: kv <= q and kv < (9, 16, 12)[b],
    "An encoder with empty rows of padding": lambda b, h, q, kv: max(q, kv) < (16, 13, 9)[b],
    "Cross-attention of a translation": lambda b, h, q, kv: q < (15, 9, 13)[b] and kv < (14, 9, 12)[b],
    "Packed documents with padding behind them": lambda b, h, q, kv: kv <= q < 41 and alike("padding", q, kv),
    "A chunk of a prompt in a static cache": lambda b, h, q, kv: (0, 7, 12)[b] <= kv <= q,
    "A sliding window over packed documents": lambda b, h, q, kv: 0 <= q - kv <= 7 and alike("window", q, kv),
    "The local layers of ModernBERT": lambda b, h, q, kv: abs(q - kv) <= 5 and alike("encoder", q, kv),
    "Sinks and a window in packed documents": lambda b, h, q, kv: (
        kv <= q and alike("sinks", q, kv) and (q - kv <= 5 or kv < STARTS["sinks"][q] + 2)
    ),
    "The local layers of Llama 4 on packed documents": lambda b, h, q, kv: (
        kv <= q and q // 16 == kv // 16 and alike("chunks", q, kv)
    ),
    "Three objectives in one batch": lambda b, h, q, kv: kv < (14, 16, 13)[b] and (kv <= q, kv <= q or kv < 9, True)[b],
    "A prompt and images seen whole": lambda b, h, q, kv: (
        kv < 43 and (kv <= q or kv < 8 or together(q, kv, span(11, 9), span(26, 9)))
    ),
    "The local layers of Gemma 3 with images": lambda b, h, q, kv: 0 <= q - kv <= 7 or together(q, kv, span(5, 12), span(27, 12)),
    "Several answers to one prompt": lambda b, h, q, kv: kv <= q and (kv < 16 or alike("answers", q, kv)),
    "Gist tokens": lambda b, h, q, kv: kv <= q and not (q >= 16 and kv < 12),
    "A question and a long text": lambda b, h, q, kv: kv < 42 and (min(q, kv) < 7 or abs(q - kv) <= 4),
    "The two heads of the Sparse Transformer": lambda b, h, q, kv: (
        kv <= q and (q - kv <= 7 or (q - kv) % 8 == 0, q // 8 == kv // 8 or kv % 8 in (6, 7))[h]
    ),
    "Global and local heads over packed documents": lambda b, h, q, kv: (
        kv <= q and alike("heads", q, kv) and (True, q - kv <= 5)[h]
    ),
    "StreamingLLM with prompts padded on the left": lambda b, h, q, kv: (
        (0, 5, 12)[b] <= kv <= q and (q - kv <= 7 or kv < (0, 5, 12)[b] + 2)
    ),
    "The three kinds of heads of MInference": lambda b, h, q, kv: (
        kv <= q
        and (
            q - kv <= 8 or kv < 4,
            kv in (0, 7, 18, 19, 31) or q - kv in (0, 1, 2, 11, 22, 23),
            kv // 6 in ((0,), (0, 1), (0, 2), (1, 3), (0, 2, 4), (0, 3, 5), (2, 5, 6), (0, 4, 7))[q // 6],
        )[h]
    ),
    "Prefill and decoding in one step": lambda b, h, q, kv: served(q, kv),
    "A tree of drafts behind a padded prompt": lambda b, h, q, kv: kv >= 3 and (kv < 12 or in_branch(q, kv - 12)),
    "Block diffusion over packed documents": lambda b, h, q, kv: denoised(q, kv),
    "Neighborhood attention with registers": lambda b, h, q, kv: (
        min(q, kv) < 4 or (in_window((q - 4) // 8, (kv - 4) // 8, 6, 3) and in_window((q - 4) % 8, (kv - 4) % 8, 8, 5))
    ),
    "The windows of a Swin Transformer": lambda b, h, q, kv: (q // 32, q % 8 // 4) == (kv // 32, kv % 8 // 4),
    "Criss-cross attention": lambda b, h, q, kv: q // 8 == kv // 8 or q % 8 == kv % 8,
    "Frames of a streamed video": lambda b, h, q, kv: kv < 6 or 0 <= q // 6 - kv // 6 <= 2,
}


@each
def test_entry_is_declared_in_full(entry: dict[str, Any]) -> None:
    assert WANTED <= set(entry) <= WANTED | ALLOWED
    assert entry["family"] in FAMILIES
    assert entry["title"][0].isupper() or entry["title"] == "gpt-oss"
    assert re.search(r"https://\S+$", entry["source"])
    assert set(lengths_of(entry)) <= set(range(12, 65))
    assert entry.get("kv_len") != entry["q_len"]
    assert entry.get("q_offset", 1) > 0
    assert 2 <= entry.get("block_size", 2) <= 16


@each
def test_caption_is_one_or_two_sentences(entry: dict[str, Any]) -> None:
    caption = entry["caption"]
    assert 40 <= len(caption) <= 260
    assert caption[0].isupper()
    assert caption.endswith(".")
    assert len(re.findall(r"\.(?= [A-Z]|$)", caption)) in (1, 2)
    assert not slug_of(caption).startswith(slug_of(entry["title"]))


@each
def test_tags_are_of_the_vocabulary(entry: dict[str, Any]) -> None:
    tags = entry["tags"]
    assert 2 <= len(tags) <= 5
    assert len(set(tags)) == len(tags)
    assert set(tags) <= TAGS


def test_vocabulary_is_used_and_written_down() -> None:
    assert {tag for entry in ENTRIES for tag in entry["tags"]} == TAGS
    head = SOURCE.read_text(encoding="utf-8").partition("# The tags:")[2].partition("\n\n")[0]
    words = {word for line in head.splitlines()[1:] for word in re.sub(r"\([^)]*\)", "", line).replace(",", " ").split()[2:]}
    assert words == TAGS


@each
def test_tokens_label_every_query_and_key(entry: dict[str, Any]) -> None:
    for key, length in zip(("q_tokens", "kv_tokens"), lengths_of(entry), strict=True):
        tokens = entry.get(key)
        assert tokens is None or (len(tokens) == length and all(tokens))
    assert ("q_tokens" in entry) == ("kv_tokens" in entry)


@each
def test_sequences_and_heads_are_chosen(entry: dict[str, Any]) -> None:
    cells = mask_of(entry).dense(*lengths_of(entry), q_offset=entry.get("q_offset", 0))
    for key, n in zip(("batch", "head"), cells.shape[:2], strict=True):
        assert (key in entry) == (n > 1), f"{n} along {key}"
        assert entry.get(key, 0) in ("all", *range(n))


@each
def test_terms_are_distinguished_in_conjunctions_only(entry: dict[str, Any]) -> None:
    top = ast.parse(entry["text"], mode="eval").body
    assert entry.get("why", True) is True
    assert "why" not in entry or (isinstance(top, ast.BinOp) and isinstance(top.op, ast.BitAnd))


@each
def test_entry_lowers(entry: dict[str, Any]) -> None:
    mask, lengths, q_offset = mask_of(entry), lengths_of(entry), entry.get("q_offset", 0)
    assert not mask.params
    seen = mask.dense(*lengths, q_offset=q_offset)
    cells = torch.arange(lengths[1])
    rows = mask.rows(*lengths, q_offset=q_offset)
    assert not (rows.lower.holds(cells) & ~seen).any()
    assert not (seen & ~rows.upper.holds(cells)).any()


@each
def test_picture_shows_something(entry: dict[str, Any]) -> None:
    fraction = float(torch.stack(panels_of(entry)).double().mean())
    if entry["text"] in PLAIN:
        assert fraction == PLAIN[entry["text"]]
        return
    assert 0.1 < fraction < 0.8
    if (size := entry.get("block_size")) is not None:
        blocks = [block for panel in panels_of(entry) for rows in panel.split(size) for block in rows.split(size, 1)]
        kinds = {(bool(block.any()), bool(block.all())) for block in blocks}
        assert len(kinds) > 1


@pytest.mark.parametrize("title", CAPTIONS)
def test_composition_draws_its_caption(title: str) -> None:
    (entry,) = (entry for entry in ENTRIES if entry["title"] == title)
    first, (q_len, kv_len) = entry.get("q_offset", 0), lengths_of(entry)
    cells = mask_of(entry).dense(q_len, kv_len, q_offset=first)
    said = [
        [[[CAPTIONS[title](b, h, first + q, kv) for kv in range(kv_len)] for q in range(q_len)] for h in range(cells.shape[1])]
        for b in range(cells.shape[0])
    ]
    assert cells.tolist() == said


def test_bigbird_draws_its_caption() -> None:
    (entry,) = (entry for entry in ENTRIES if entry["title"] == "BigBird")
    cells = mask_of(entry).dense(48)[0, 0].view(12, 4, 12, 4)
    blocks = cells[:, 0, :, 0]
    assert torch.equal(cells, blocks[:, None, :, None].expand_as(cells))
    near = [{0, *range(max(own - 1, 0), min(own + 2, 12))} for own in range(12)]
    assert all(blocks[own, list(seen)].all() for own, seen in enumerate(near))
    assert blocks[0].all()
    assert {int(blocks[own].sum()) - len(near[own]) for own in range(1, 12)} == {1, 2}


def test_titles_and_masks_differ() -> None:
    assert len({slug_of(entry["title"]) for entry in ENTRIES}) == len(ENTRIES)
    assert len({entry["caption"] for entry in ENTRIES}) == len(ENTRIES)
    shown = [(mask_of(entry), *lengths_of(entry), tuple(entry.get("q_tokens", ())), entry["family"]) for entry in ENTRIES]
    assert len(set(shown)) == len(ENTRIES)


def test_simple_pictures_come_first() -> None:
    basics = [entry for entry in ENTRIES if entry["family"] == "basics"]
    assert [entry["text"] for entry in basics[:1]] == ["causal"]
    assert not any(entry.get("block_size") or entry.get("why") for entry in basics)
    assert all(entry["block_size"] for entry in ENTRIES if entry["family"] == "block grids")


def test_families_stand_together() -> None:
    families = [entry["family"] for entry in ENTRIES]
    assert families[0] == "basics"
    assert families[-1] == "compositions"
    assert len(set(families)) == 1 + sum(before != here for before, here in pairwise(families))


def test_compositions_have_terms() -> None:
    compositions = {entry["title"]: terms_of(entry["text"]) for entry in ENTRIES if entry["family"] == "compositions"}
    assert set(compositions) == {*CAPTIONS, "BigBird"}
    assert min(compositions.values()) >= 2


def test_every_named_mask_has_an_entry() -> None:
    families = [entry for entry in ENTRIES if entry["family"] not in ("basics", "block grids", "models", "compositions")]
    nodes = [node for entry in families for node in mask_of(entry).walk()]
    shown = {node.name for node in nodes if isinstance(node, Named)} | {str(node) for node in nodes if isinstance(node, Truth)}
    assert set(OWN_MASKS) - shown == set()
