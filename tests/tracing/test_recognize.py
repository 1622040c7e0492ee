"""Named masks are found in functions that are written without their names, and not where they differ."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import flexmask as fm
from flexmask.tracing.recognize import PATTERNS

SIZE = 12
IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, -1, -1, -1], [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]])
OTHERS = torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0]]).expand(2, SIZE).contiguous()
LENGTHS = torch.tensor([7, 12])
GLOBAL = torch.arange(SIZE) % 5 == 0
KEEP = torch.stack([torch.arange(SIZE) < 7, torch.arange(SIZE) != 3])
NAMES = {"torch": torch, "ids": IDS, "others": OTHERS, "lengths": LENGTHS, "is_global": GLOBAL, "keep": KEEP}

#: For each pattern the bodies of functions, and how the mask then prints.
RECOGNIZED: dict[str, list[tuple[str, str]]] = {
    "causal": [("q >= kv", "causal"), ("kv <= q", "causal"), ("q - kv > -1", "causal"), ("~(q < kv)", "causal")],
    "causal(offset=n)": [("q + 3 >= kv", "causal(offset=3)"), ("q > kv", "causal(offset=-1)")],
    "sliding_window(left=n, right=m)": [
        ("(q - kv).abs() <= 2", "sliding_window(left=2, right=2)"),
        ("(q >= kv) & (q - kv < 3)", "sliding_window(left=2, right=0)"),
    ],
    "sliding_window(left=n, right=None)": [("q - kv <= 4", "sliding_window(left=4, right=None)")],
    "dilated_window(left=n, right=m, dilation=k)": [
        ("((q - kv).abs() <= 4) & ((q - kv) % 2 == 0)", "dilated_window(left=4, right=4, dilation=2)")
    ],
    "sink_window(n, left=m)": [("(q >= kv) & ((q - kv <= 3) | (kv < 2))", "sink_window(sinks=2, left=3)")],
    "global_window(data, left=n, right=m)": [
        (
            "((q - kv).abs() <= 1) | is_global[q] | is_global[kv]",
            "global_window(is_global=<is_global: bool[12]>, left=1, right=1)",
        )
    ],
    "prefix_lm(n)": [
        ("(kv < 4) | (q >= kv)", "prefix_lm(prefix_lengths=4)"),
        ("(q >= kv) | (kv < lengths[b])", "prefix_lm(prefix_lengths=<lengths: int64[2]>)"),
    ],
    "document(data)": [("(ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0)", "document(ids=<ids: int64[2, 12]>)")],
    "document(data, more)": [
        ("(ids[b, q] == others[b, kv]) & (ids[b, q] >= 0)", "document(ids=<ids: int64[2, 12]>, kv_ids=<others: int64[2, 12]>)"),
    ],
    "bidirectional_spans(data)": [
        ("(q >= kv) | ((ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0))", "bidirectional_spans(ids=<ids: int64[2, 12]>)"),
    ],
    "chunked(n)": [("q // 4 == kv // 4", "chunked(size=4)"), ("(q >> 2) == (kv >> 2)", "chunked(size=4)")],
    "block_causal(n)": [("q // 3 >= kv // 3", "block_causal(size=3)")],
    "chunk_window(n, left=m)": [("(q // 2 - kv // 2 <= 1) & (q // 2 >= kv // 2)", "chunk_window(size=2, left=1)")],
    "prefix_tree(data)": [("(kv <= q) & (q < ids[b, kv])", "prefix_tree(end=<ids: int64[2, 12]>)")],
    "prefix_tree(data, order=more)": [
        (
            "(others[b, kv] <= others[b, q]) & (others[b, q] < ids[b, kv])",
            "prefix_tree(end=<ids: int64[2, 12]>, order=<others: int64[2, 12]>)",
        ),
        (
            "(others[b, q] >= others[b, kv]) & (others[b, q] <= ids[b, kv] - 1)",
            "prefix_tree(end=<ids: int64[2, 12]>, order=<others: int64[2, 12]>)",
        ),
    ],
    "key_padding(lengths=data)": [("kv < lengths[b]", "key_padding(lengths=<lengths: int64[2]>)")],
    "key_padding(start=data)": [("kv >= lengths[b]", "key_padding(start=<lengths: int64[2]>)")],
    "key_padding(keep=data)": [("keep[b, kv]", "key_padding(keep=<keep: bool[2, 12]>)")],
    "query_padding(lengths=data)": [("q < lengths[b]", "query_padding(lengths=<lengths: int64[2]>)")],
    "query_padding(start=data)": [("q >= lengths[b]", "query_padding(start=<lengths: int64[2]>)")],
    "query_padding(keep=data)": [("keep[b, q]", "query_padding(keep=<keep: bool[2, 12]>)")],
}

ROWS = [(body, text) for rows in RECOGNIZED.values() for body, text in rows]

#: Bodies that are near a named mask, and the names that they must not have.
NEAR = [
    ("q < kv", "causal"),
    ("q >= kv * 2", "causal"),
    ("q + h >= kv * 2", "causal"),
    ("(q - kv).abs() >= 2", "sliding_window"),
    ("((q - kv).abs() <= 4) & ((q - kv) % 2 == 1)", "dilated_window"),
    ("((q - kv).abs() <= 4) & ((q + kv) % 2 == 0)", "dilated_window"),
    ("(q >= kv) & ((q - kv <= 3) | (q < 2))", "sink_window"),
    ("(kv < 4) & (q >= kv)", "prefix_lm"),
    ("(ids[b, q] == ids[b, kv]) & (ids[b, q] >= 1)", "document"),
    ("ids[b, q] == ids[b, kv]", "document"),
    ("(ids[b, q] == ids[h, kv]) & (ids[b, q] >= 0)", "document"),
    ("(q >= kv) & (ids[b, q] == ids[b, kv]) & (others[b, q] >= 0)", "document"),
    ("q // 4 == kv // 5", "chunked"),
    ("q // 3 > kv // 3 + 1", "block_causal(3)"),
    ("kv < lengths[h]", "key_padding"),
    ("kv >= lengths[h]", "key_padding"),
    ("keep[h, kv]", "key_padding"),
    ("is_global[q] & is_global[kv]", "global_window"),
    ("(others[b, kv] <= others[b, q]) & (others[b, kv] < ids[b, q])", "prefix_tree"),
    ("(others[b, kv] < others[b, q]) & (others[b, q] < ids[b, kv])", "prefix_tree"),
    ("(kv <= q) & (others[b, q] < ids[b, kv])", "prefix_tree"),
]


def of_text(body: str) -> Any:
    return eval(f"lambda b, h, q, kv: {body}", NAMES)


def check(body: str, mask: fm.Mask) -> None:
    expected = create_mask(of_text(body), 2, 2, SIZE, SIZE, device="cpu")
    assert torch.equal(mask.dense(SIZE, batch=2, heads=2).expand(2, 2, SIZE, SIZE), expected)


def test_every_pattern_is_listed() -> None:
    assert set(RECOGNIZED) == set(PATTERNS)


@pytest.mark.parametrize(("body", "text"), ROWS, ids=[body for body, _ in ROWS])
def test_recognized(body: str, text: str) -> None:
    mask = fm.from_mask_mod(of_text(body))
    assert str(mask) == text
    check(body, mask)


@pytest.mark.parametrize(("body", "name"), NEAR, ids=[body for body, _ in NEAR])
def test_near_misses(body: str, name: str) -> None:
    mask = fm.from_mask_mod(of_text(body))
    assert name not in str(mask)
    check(body, mask)


@pytest.mark.parametrize(("body", "text"), ROWS, ids=[body for body, _ in ROWS])
def test_body_is_what_was_written(body: str, text: str) -> None:
    """A name does not change the expression under it."""
    from flexmask.tracing.trace import trace_function

    written = trace_function(of_text(body))
    assert fm.from_mask_mod(of_text(body)).expand().key == written.key


def test_parts_of_a_whole() -> None:
    mask = fm.from_mask_mod(of_text("(q >= kv) & (ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0) & (kv % 3 != 1)"))
    assert str(mask) == "causal & document(ids=<ids: int64[2, 12]>) & (kv % 3 != 1)"
    check("(q >= kv) & (ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0) & (kv % 3 != 1)", mask)
    assert str(fm.from_mask_mod(of_text("~((q // 4 == kv // 4) ^ (q >= kv))"))).count("chunked(size=4)") == 1


def test_each_part_is_named_and_twice_the_same_table_is_one() -> None:
    body = "(ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0) & (others[b, q] == others[b, kv]) & (others[b, q] >= 0)"
    assert str(fm.from_mask_mod(of_text(body))).count("document(ids=") == 2
    assert "kv_ids" not in str(fm.from_mask_mod(of_text(body)))
