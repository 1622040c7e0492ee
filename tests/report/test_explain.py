"""Explanations of masks, against counts of their cells; and the command that prints them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask.cli import main
from flexmask.errors import LoweringError, OperandError
from tests.support import oracle
from tests.support.cli import PLAIN

b, h, kv, q = fm.b, fm.h, fm.kv, fm.q

MASKS: dict[str, tuple[fm.Mask, bool]] = {
    "causal": (fm.causal(), True),
    "documents": (fm.causal() & fm.document(lengths=[7, 3, 10]), True),
    "padding": (fm.key_padding([9, 20]) & fm.query_padding([20, 4]), True),
    "heads": (fm.per_head([fm.causal(), fm.full()]), True),
    "sinks": (fm.sliding_window(left=2, right=0) | (kv < 2), True),
    "mixed": (fm.causal() & (q * kv % 3 == 1), False),
    "empty": (fm.empty(), True),
}
LENGTH = 20


@pytest.mark.parametrize(("mask", "exact"), MASKS.values(), ids=MASKS.keys())
def test_numbers(mask: fm.Mask, exact: bool) -> None:
    found = fm.explain(mask, LENGTH, block_size=(4, 8))
    cells = mask.dense(LENGTH)
    assert found.exact is exact
    rows = [oracle.intervals_of(row) for row in cells.flatten(0, 2).tolist()]
    if exact:
        assert found.intervals == max(map(len, rows))
        assert found.mean_intervals == pytest.approx(sum(map(len, rows)) / len(rows))
        assert found.open_blocks == 0
    kinds = oracle.classify_blocks(cells, 4, 8).flatten().tolist()
    stats = found.stats
    assert kinds.count(oracle.PARTIAL) == stats.partial_blocks
    assert kinds.count(oracle.FULL) == stats.full_blocks
    assert kinds.count(oracle.EMPTY) == stats.empty_blocks
    assert 0 <= found.open_blocks <= len(kinds)
    assert stats.visible_fraction == pytest.approx(float(cells.double().mean()))
    assert stats.fully_masked_rows == int((~cells.any(-1)).sum())
    assert found.dense_bytes == cells.numel()
    assert found.row_bytes > 0


def test_open_blocks() -> None:
    found = fm.explain(fm.causal() & ((q - kv) * (q + kv) % 3 == 0), 16, block_size=4)
    assert not found.exact
    assert found.open_blocks == 10  # on and below the diagonal of a grid of 4 x 4
    assert "10 of 16" in str(found)


def test_text() -> None:
    text = str(fm.explain(fm.causal() & fm.document(lengths=[7, 3, 10]), LENGTH, block_size=8))
    assert text.splitlines()[0].split() == ["mask", "causal", "&", "document(lengths=[7,", "3,", "10])"]
    for wanted in ("definition", "20 queries x 20 keys, 1 sequence, 1 head", "kv <= q", "one key interval", "8 x 8"):
        assert wanted in text
    assert "at most 1 key interval, 1.00 on average" in text
    assert text.count("visible") == 2


LEAVES: list[tuple[fm.Mask, list[tuple[str, bool]]]] = [
    (fm.causal(), [("one key interval", True)]),
    (fm.document([0, 0, 1, 1]), [("runs of keys with the query's value", True), ("a test of the query", True)]),
    (q % 3 == 0, [("a test of the query", True)]),
    (kv % 3 == 0, [("runs of keys", True)]),
    (kv % 4 <= q % 4, [("one key interval in each non-decreasing piece", True)]),
    ((q - kv) % 3 == 0, [("not separable in q and kv: evaluated cell by cell", False)]),
    (fm.full(), [("every key", True)]),
    (fm.empty(), [("no key", True)]),
]


@pytest.mark.parametrize(("mask", "wanted"), LEAVES, ids=[str(mask) for mask, _ in LEAVES])
def test_leaves(mask: fm.Mask, wanted: list[tuple[str, bool]]) -> None:
    found = fm.explain(mask, 4)
    assert sorted((leaf.kind, leaf.separable) for leaf in found.leaves) == sorted(wanted)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "wanted"),
    [
        (100, 100, "the mask is smaller than one block of 128 x 128, so nothing is skipped"),
        (128, 128, "about 100.00% of the work of dense attention"),
        (1, 1000, "no less work than dense attention, as blocks reach beyond the ends of the mask"),
        (4096, 4096, "about 51.56% of the work of dense attention"),  # 528 of 1,024 blocks
    ],
)
def test_work(q_len: int, kv_len: int, wanted: str) -> None:
    assert dict(fm.explain(fm.causal(), q_len, kv_len, q_offset=kv_len - q_len).lines())["attention"] == wanted


def test_traced_functions() -> None:
    found = fm.explain(fm.from_mask_mod(lambda b, h, q, kv: (q >= kv) & (torch.sin(q - kv) > 0)), 16)
    assert found.mask.startswith("causal & ")
    assert not found.exact
    assert [leaf.separable for leaf in found.leaves].count(False) == 1


def test_dense_tables_have_the_masks_that_they_are() -> None:
    cells = torch.ones(20, 20, dtype=torch.bool).tril() & (torch.arange(20) < 12)
    assert "recognized  causal & key_padding(lengths=12)" in str(fm.explain(fm.from_dense(cells), 20)).splitlines()
    for mask in (fm.causal(), fm.from_dense(cells ^ (torch.arange(20) % 7 == 3))):
        assert not fm.explain(mask, 20).recognized
        assert "recognized" not in str(fm.explain(mask, 20))


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(LoweringError, match="4"):
        fm.explain(fm.document([0, 0, 1, 1]), 9)
    with pytest.raises(LoweringError, match="block"):
        fm.explain(fm.causal(), 9, block_size=0)


# ---------------------------------------------------------------- the command

MODULE = """
import torch
import flexmask as fm

window = fm.sliding_window(left=2, right=0)
number = 3

def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 3)

def broken(b, h, q_idx):
    return q_idx

class Holder:
    mask = fm.causal()
"""


def run(*arguments: str) -> Result:
    return CliRunner(env=PLAIN).invoke(main, ["explain", *arguments], prog_name="flexmask")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    (tmp_path / "masks_to_explain.py").write_text(MODULE)
    (tmp_path / "module_that_fails.py").write_text("raise ValueError('half written')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "masks_to_explain", raising=False)
    return "masks_to_explain"


def test_command() -> None:
    result = run("causal & document(lengths=[7, 3, 10])", "--block-size", "4,8")
    assert result.exit_code == 0, result.output
    assert "20 queries x 20 keys" in result.stdout
    assert "4 x 8" in result.stdout
    assert result.stdout.isascii()


def test_command_with_parameters() -> None:
    result = run("document(ids)", "-p", "ids=[0,0,1,1]", "--heads", "3")
    assert result.exit_code == 0, result.output
    assert "4 queries x 4 keys" in result.stdout


def test_one_query_and_one_key() -> None:
    for kv_len, keys in ((1, "1 key"), (4, "4 keys")):
        assert ("lengths", f"1 query x {keys}, 1 sequence, 1 head") in fm.explain("causal", 1, kv_len).lines()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("mask_mod", "sliding_window(left=2, right=0)"), ("window", "sliding_window(left=2, right=0)"), ("Holder.mask", "causal")],
)
def test_function_references(module: str, name: str, wanted: str) -> None:
    path = list(sys.path)
    result = run(f"{module}:{name}", "--seq-len", "16")
    assert result.exit_code == 0, result.output
    assert wanted in result.stdout
    assert sys.path == path


REFUSED: list[tuple[list[str], str]] = [
    (["no_such_module:mask"], "cannot import no_such_module"),
    (["module_that_fails:mask"], "cannot import module_that_fails: ValueError: half written"),
    (["masks_to_explain:mask_mode"], "has no mask_mode. Did you mean mask_mod"),
    (["masks_to_explain:number"], "must be a Mask, its text or a mask_mod function, got int"),
    (["masks_to_explain:broken"], "neither a mask_mod"),
    (["casual"], "causal"),
    (["causal", "--seq-len", "0"], "0"),
    (["document([0, 1])", "--seq-len", "9"], "9"),
    (["causal", "--block-size", "0"], "0"),
]


@pytest.mark.parametrize(("arguments", "wanted"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_command_refuses(module: str, arguments: list[str], wanted: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert wanted in " ".join(result.output.split())
    assert not isinstance(result.exception, AssertionError)


def test_help_shows_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "flexmask explain" in result.output
    assert "MODULE" in result.output


@pytest.mark.parametrize(("mask", "exact"), MASKS.values(), ids=MASKS.keys())
def test_a_cell_is_hidden_by_the_terms_that_hide_it(mask: fm.Mask, exact: bool) -> None:
    cells = mask.dense(LENGTH)
    for cell in [(0, 0), (3, 7), (12, 4), (19, 19)]:
        for one in {0, cells.shape[0] - 1}:
            for head in {0, cells.shape[1] - 1}:
                reason = fm.explain(mask, LENGTH, cell=(one, head, *cell)).cell
                assert reason is not None
                assert reason.visible == bool(cells[(one, head, *cell)])
                hiding = [
                    part for text in reason.hidden_by for part in re.split(", (?![^(]*[)])", text.removeprefix("none of: "))
                ]
                for texts, shows in ((reason.shown_by, True), (hiding, False)):
                    for text in texts:
                        term = fm.parse(text).dense(LENGTH, batch=cells.shape[0], heads=cells.shape[1])
                        assert bool(term.expand_as(cells)[(one, head, *cell)]) is shows


def test_a_cell_has_all_terms_that_hide_it() -> None:
    mask = fm.causal() & fm.sliding_window(left=4, right=4) & fm.document(lengths=[5, 15])
    text = str(fm.explain(mask, LENGTH, cell=(2, 9)))
    wanted = """
cell        b=0, h=0, q=2, kv=9 is hidden
            hidden by causal
            hidden by sliding_window(left=4, right=4)
            hidden by document(lengths=[5, 15])"""
    assert text.endswith(wanted), text
    early = (fm.kv < 2).named("early")
    mask = fm.causal() & (fm.sliding_window(left=4, right=4) | early | fm.document(lengths=[5, 15]))
    assert str(fm.explain(mask, LENGTH, cell=(12, 3))).endswith(
        "kv=3 is hidden\n"
        "            none of: sliding_window(left=4, right=4), early, document(lengths=[5, 15])\n"
        "            shown by causal"
    )
    assert str(fm.explain(mask, LENGTH, cell=(12, 1))).endswith("shown by causal\n            shown by early")
    assert fm.explain(mask, LENGTH).mask == "causal & (sliding_window(left=4, right=4) | early | document(lengths=[5, 15]))"
    shifted = fm.explain("causal", 1, 512, q_offset=300, cell=(0, 300))
    assert str(shifted).endswith("kv=300 is visible\n            shown by causal")
    assert (
        fm.explain("causal", 4, batch=3, heads=2, cell=(2, 1, 0, 0)).cell
        == fm.explain("causal", 4, batch=3, heads=2, cell=[2, 1, 0, 0]).cell
    )


@pytest.mark.parametrize(
    ("cell", "kind", "message"),
    [
        ((20, 0), LoweringError, "cell: q.*20"),
        ((0, 0, 0, 20), LoweringError, "cell: kv"),
        ((0, 1, 0, 0), LoweringError, "cell: h"),
        ((0, -1), LoweringError, "cell: kv.*-1"),
        ((0.0, 1), OperandError, "cell: q"),
        (3, OperandError, r"\(q, kv\) or \(b, h, q, kv\), got 3"),
        ((1, 2, 3), OperandError, r"got \(1, 2, 3\)"),
    ],
)
def test_cells_that_are_none(cell: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fm.explain(fm.causal(), LENGTH, cell=cell)


def test_the_command_explains_a_cell() -> None:
    arguments = ("causal & document(lengths=[3, 5])", "--cell", "5,1")
    assert "hidden by document(lengths=[3, 5])" in run(*arguments).stdout
    assert '"hidden_by"' in run(*arguments, "--json").stdout
    assert run("causal", "--cell", "5").exit_code == 2


def test_explanation_is_a_value() -> None:
    first: Any = fm.explain(fm.causal(), 8)
    assert first == fm.explain(fm.causal(), 8)
    assert first != fm.explain(fm.causal(), 9)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        (fm.causal(), 300),
        (fm.full(), 200),
        (fm.sliding_window(size=50), 300),
        (fm.sliding_window(left=300, right=20), 500),
        (fm.causal() & fm.document(lengths=[100, 156, 44]), 300),
        (fm.prefix_lm(128), 300),
        (fm.causal(offset=127), 384),
        (fm.key_padding([130, 0]), 300),
        (fm.masks.sink_window(4, size=40), 300),
    ],
    ids=str,
)
def test_safe_rows(mask: fm.Mask, length: int) -> None:
    """Rows with a visible key among the first 16 that kernels visit, by the lists of torch's own BlockMask."""
    cells = mask.dense(length)
    lists = create_block_mask(lambda b, h, i, j: cells[b, h * 0, i, j], len(cells), None, length, length, device="cpu")
    assert lists.full_kv_num_blocks is not None
    assert lists.full_kv_indices is not None
    safe = 0
    for b, sequence in enumerate(cells[:, 0]):
        for row, visible in enumerate(sequence):
            at = (b, 0, row // 128)
            partial, full = lists.kv_num_blocks[at] > 0, lists.full_kv_num_blocks[at] > 0
            first = 128 * int((lists.kv_indices if partial else lists.full_kv_indices)[at][0])
            safe += bool((partial or full) and visible[first : first + 16].any())
    wanted = "all" if safe == cells[:, 0, :, 0].numel() else f"{safe:,} of {cells[:, 0, :, 0].numel():,}"
    assert dict(fm.explain(mask, length, kernel=True).kernel)["safe rows"].split(" see ")[0] == wanted


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (fm.causal() & fm.document(lengths=torch.tensor([7, 3, 10])), "none"),
        (fm.key_padding(lengths=[7]), "none"),
        ((q - kv) % 3 == 0, "none"),
        (fm.document(torch.arange(20) // 7), "mask.block_mask() has one"),
        (fm.key_padding(keep=torch.arange(20)[None] < 9), "mask.block_mask() has one"),
    ],
    ids=str,
)
def test_host_syncs(mask: fm.Mask, wanted: str) -> None:
    """As in the table of docs/host_syncs.md."""
    assert dict(fm.explain(mask, 20, kernel=True).kernel)["host syncs"].startswith(wanted)
    assert dict(fm.explain(mask, 20, q_offset=torch.tensor([0]), kernel=True).kernel)["host syncs"].startswith(wanted)


def test_kernels() -> None:
    mask = fm.causal() & fm.document(lengths=[7, 3, 10])
    assert fm.explain(mask, 20).kernel == ()
    found = fm.explain(mask, 20, kernel=True)
    assert found.kernel[:2] == (
        (
            "cells",
            "kv in the key interval of the row, of which 1 end is read from memory; backend flex compares both ends at once",
        ),
        (
            "FLASH",
            "applies 1 interval to 32 keys at a time, as bits, on Blackwell (torch 2.15); blocks of 128 x 128 on Hopper, "
            "128 x 128 on Blackwell, for heads of up to 128 channels",
        ),
    )
    lines = dict(found.lines())
    assert lines["varlen"] == "3 segments of at most 10 queries and 10 keys, window_size=(-1, 0)"
    assert lines["SDPA alone"] == "no: it needs this mask as a tensor"
    decoding = dict(fm.explain(fm.causal(), 1, 64, q_offset=63, kernel=True).kernel)
    assert decoding["SDPA alone"] == "scaled_dot_product_attention without a mask"
    assert decoding["on CUDA"] == "backend='auto' takes flex, as there are fewer than 128 queries"
    assert dict(fm.explain(fm.causal(), 256, kernel=True).kernel)["lists"].startswith("the blocks of a row are neighbors")
    assert dict(fm.explain(fm.causal(), 256, kernel=True).kernel)["cells"].endswith(", computed from q")
    assert dict(fm.explain(fm.causal(), 257, kernel=True).kernel)["lists"] == "FlexAttention reads the place of each block"
    classes = dict(fm.explain(fm.document(lengths=[9, 11]), 20, kernel=True).kernel)
    said = "whether the query and the key are in one class: one value of each is read from memory"
    assert classes["cells"] == said
    long = dict(fm.explain(fm.causal(), 257, kernel=True).kernel)
    assert "256 x 128 on Blackwell" in long["FLASH"]
    assert long["on CUDA"] == "backend='auto' takes flash where FlashAttention 4 is installed and takes the call, else flex"
    whole = dict(fm.explain(fm.query_padding(lengths=[9]), 20, kernel=True).kernel)
    assert whole["cells"] == "whether the query attends to all keys or to none: one value is read from memory"
    for alone, seq_len in ((fm.key_padding(lengths=[9]), 20), (fm.causal() & fm.key_padding(start=[9]), 2**15 + 1)):
        assert dict(fm.explain(alone, seq_len, kernel=True).kernel)["cells"].endswith("of which 1 end is read from memory")
    first, low, high = fm.table([9])[0], fm.table([1] * 20)[q], fm.table([12] * 20)[q]
    for mask, several in (
        ((kv < first) | fm.sliding_window(size=2), "1 end is read from memory"),
        ((kv < first) | ((kv > low) & (kv < high)), "3 ends are read from memory; backend flex compares both ends at once"),
        (fm.causal() & ((kv < first) | (kv > high)), "2 ends are read from memory"),
    ):
        cells = dict(fm.explain(mask, 20, kernel=True).kernel)["cells"]
        assert cells == f"kv in one of 2 key intervals of the row, of which {several}"
    others = dict(fm.explain((q - kv) % 3 == 0, 20, kernel=True).kernel)
    assert others["FLASH"] == "no: (q - kv) % 3 is negative for negative numbers in FlashAttention 4"
    assert others["on CUDA"] == "backend='auto' takes flex"
    assert others["cells"] == "the expression, cell by cell, since it is not separable in q and kv"
    assert others["varlen"].startswith("no: variable-length attention does not compute the mask")
    printed = run("causal", "--seq-len", "256", "--kernel")
    assert "scaled_dot_product_attention(is_causal=True)" in printed.output
    assert json.loads(run("causal", "--seq-len", "256", "--kernel", "--json").output)["kernel"][0][0] == "cells"
