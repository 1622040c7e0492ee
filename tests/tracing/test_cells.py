"""Dense tables are found to be named masks: always the same cells, in the words of the masks that they were made from."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask import Mask, from_dense
from flexmask.errors import LoweringError
from flexmask.expr.mask import Named
from tests.support import oracle
from tests.support.examples import EXAMPLES
from tests.support.named_masks import NAMES, SHAPES, fits, named

FORMS = [(12, 12), (7, 12), (12, 7)]
IDS = [0, 0, 0, 1, 1, 2, 2, 2, 2, -1, -1, -1]
MIXED = [0, 1, 0, 1, 1, -1, 2, 0, 2, 1, -1, 2]
DEPTHS = [0, 1, 2, 2, 3, 1, 2, 2, 0, 1, 1, 2]


def cells_of(allowed: oracle.Predicate, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> torch.Tensor:
    return torch.tensor(oracle.table_of(allowed, q_len, kv_len, batch=batch, heads=heads))


def has_table(mask: Mask) -> bool:
    return any(isinstance(node, Named) and node.name == "from_dense" for node in mask.walk())


def recognized(cells: torch.Tensor) -> Mask:
    """The mask that is found, which has exactly these cells."""
    found = from_dense(cells).recognize()
    batch, heads, q_len, kv_len = cells.shape
    assert torch.equal(found.dense(q_len, kv_len, batch=batch, heads=heads).expand_as(cells), cells), found
    return found


#: What is found in the cells of a mask at 12 x 12.
TEXTS: dict[str, tuple[oracle.Predicate, int]] = {
    "full": (oracle.full(), 1),
    "empty": (oracle.empty(), 1),
    "causal": (oracle.causal(), 2),
    "causal(offset=-2)": (oracle.causal(offset=-2), 1),
    "sliding_window(left=3, right=1)": (oracle.sliding_window(3, 1), 1),
    "sliding_window(left=2, right=None)": (oracle.sliding_window(2, None), 1),
    "shift(sliding_window(left=2, right=0), kv=-1)": (oracle.shift(oracle.sliding_window(2, 0), 0, -1), 1),
    "key_padding(lengths=7)": (oracle.key_padding(7), 2),
    "key_padding(lengths=[7, 0])": (oracle.key_padding([7, 0]), 2),
    "causal & key_padding(start=[0, 3])": (oracle.both(oracle.causal(), oracle.key_start([0, 3])), 2),
    "key_padding(start=[2, 4]) & key_padding(lengths=[9, 12])": (
        oracle.both(oracle.key_padding([9, 12]), oracle.key_start([2, 4])),
        2,
    ),
    "key_padding(keep=<bool[12]>)": (oracle.key_keep([i % 3 != 1 for i in range(12)]), 1),
    "query_padding(lengths=[9, 4]) & key_padding(lengths=7)": (
        oracle.both(oracle.query_padding([9, 4]), oracle.key_padding(7)),
        2,
    ),
    "causal & document(lengths=[[5, 7, 0], [4, 4, 4]])": (
        oracle.both(oracle.causal(), oracle.document([[0] * 5 + [1] * 7, [0] * 4 + [1] * 4 + [2] * 4])),
        2,
    ),
    "document(lengths=[8, 4])": (oracle.document([0] * 8 + [1] * 4), 1),
    "causal & document(lengths=[5, 4, 3]) & key_padding(start=5)": (
        oracle.both(oracle.causal(), oracle.document([-1] * 5 + [0] * 4 + [1] * 3)),
        1,
    ),
    "causal & document(lengths=[4, 3, 5]) & key_padding(keep=<bool[12]>)": (
        oracle.both(oracle.causal(), oracle.document([0] * 4 + [-1] * 3 + [1] * 5)),
        1,
    ),
    "document(lengths=[3, 2, 4], padding=True)": (oracle.document(IDS), 1),
    "sliding_window(left=2, right=0) & document(lengths=[3, 2, 4], padding=True)": (
        oracle.both(oracle.sliding_window(2, 0), oracle.document(IDS)),
        1,
    ),
    "causal & document(ids=<int64[12]>)": (oracle.both(oracle.causal(), oracle.document(MIXED)), 1),
    "prefix_lm(prefix_lengths=[4, 0])": (oracle.prefix_lm([4, 0]), 2),
    "causal & chunked(size=4)": (oracle.both(oracle.causal(), oracle.chunked(4)), 1),
    "causal & chunked(size=4, start=[1, 3]) & key_padding(start=[1, 3])": (
        oracle.both(oracle.both(oracle.causal(), oracle.key_start([1, 3])), oracle.chunked(4, [1, 3])),
        2,
    ),
    "sink_window(sinks=2, left=0)": (oracle.sink_window(2, 0), 1),
    "sink_window(sinks=2, left=3)": (oracle.sink_window(2, 3), 1),
    "sink_window(sinks=2, left=3) & key_padding(start=[1, 0])": (
        oracle.both(oracle.sink_window(2, 3), oracle.key_start([1, 0])),
        2,
    ),
    "prefix_tree(end=<int64[12]>)": (oracle.prefix_tree(DEPTHS), 1),
    "prefix_tree(end=<int64[2, 12]>)": (
        oracle.both(oracle.prefix_tree([DEPTHS, [0, 1, 2, 2, 1, 2, 1, 2, 3, 3, 1, 2]]), oracle.key_padding([12, 9])),
        2,
    ),
    "causal & eviction(steps=<int64[12]>)": (
        oracle.both(oracle.causal(), oracle.eviction([4, 12, 7, 5, 8, 7, 12, 9, 10, 12, 11, 12])),
        1,
    ),
    "eviction(steps=<int64[12]>)": (oracle.eviction([4] * 4 + [12] * 8), 1),
    "block_causal(size=3)": (oracle.block_causal(3), 1),
    "chunk_window(size=2, left=1)": (oracle.chunk_window(2, 1), 1),
    "bidirectional_spans(ids=<int64[12]>)": (oracle.bidirectional_spans([-1, 0, 0, -1, 1, 1, 1, 1, -1, -1, 2, 2]), 1),
    "bidirectional_spans(ids=<int64[12]>) & key_padding(lengths=11)": (
        oracle.both(oracle.bidirectional_spans([0] * 7 + [1] * 5), oracle.key_padding(11)),
        1,
    ),
    "per_head([causal, sliding_window(left=1, right=1)])": (
        oracle.per_head([oracle.causal(), oracle.sliding_window(1, 1)]),
        1,
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    allowed, batch = TEXTS[text]
    found = recognized(cells_of(allowed, 12, 12, batch, heads=2 if "per_head" in text else 1))
    assert str(found) == text


@pytest.mark.parametrize(("q_len", "kv_len"), FORMS[1:])
@pytest.mark.parametrize("text", [text for text in TEXTS if "spans" not in text])
def test_other_shapes_have_names(text: str, q_len: int, kv_len: int) -> None:
    """Spans have ids that serve queries and keys, of which there are then as many."""
    allowed, batch = TEXTS[text]
    assert not has_table(recognized(cells_of(allowed, q_len, kv_len, batch, heads=2)))


def test_positions_at_the_end() -> None:
    """Queries after a cache."""
    assert str(recognized(cells_of(oracle.causal("lower_right"), 3, 8))) == "causal(align='lower_right')"
    window = oracle.shift(oracle.sliding_window(2, 0), kv=5)
    assert str(recognized(cells_of(window, 3, 8))) == "shift(sliding_window(left=2, right=0), kv=5)"
    assert str(recognized(cells_of(oracle.key_start([2, 5]), 1, 8, 2))) == "key_padding(start=[2, 5])"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_named_mask(name: str) -> None:
    for _, allowed in EXAMPLES[name]:
        for q_len in (4, 2, 1):
            recognized(cells_of(allowed, q_len, 4, heads=2))


@pytest.mark.parametrize("shape", ["square", "wide", "tall"])
def test_masks_of_batches(shape: str) -> None:
    sizes = SHAPES[shape]
    for name in NAMES:
        if fits(name, sizes):
            recognized(named(name, sizes).expected(sizes))


def drawn_lengths(numbers: random.Random, total: int) -> list[int]:
    ends = sorted(numbers.sample(range(1, total), 3))
    return [stop - start for start, stop in zip([0, *ends], [*ends, total], strict=True)]


def drawn_depths(numbers: random.Random, total: int) -> list[int]:
    depths = [0]
    while len(depths) < total:
        depths.append(numbers.randint(0, depths[-1] + 1))
    return depths


def conjunction(numbers: random.Random, q_len: int, kv_len: int, batch: int) -> oracle.Predicate:
    """Two to four masks, each with data for each sequence."""

    def each(draw: Callable[[], Any]) -> Any:
        return [draw() for _ in range(batch)]

    total = max(q_len, kv_len)
    masks: list[Callable[[], oracle.Predicate]] = [
        lambda: oracle.causal(offset=numbers.randint(-2, 2)),
        lambda: oracle.sliding_window(numbers.randint(0, 5), numbers.choice([0, 2, None])),
        lambda: oracle.key_padding(each(lambda: numbers.randint(0, kv_len))),
        lambda: oracle.key_start(each(lambda: numbers.randint(0, kv_len))),
        lambda: oracle.key_keep(each(lambda: numbers.choices([True, False], [4, 1], k=kv_len))),
        lambda: oracle.query_padding(each(lambda: numbers.randint(0, q_len))),
        lambda: oracle.query_keep(each(lambda: numbers.choices([True, False], [4, 1], k=q_len))),
        lambda: oracle.document(each(lambda: oracle.ids_of_lengths(drawn_lengths(numbers, total), total))),
        lambda: oracle.prefix_lm(each(lambda: numbers.randint(0, kv_len))),
        lambda: oracle.chunked(numbers.randint(1, 6)),
        lambda: oracle.prefix_tree(each(lambda: drawn_depths(numbers, total))),
    ]
    allowed = oracle.full()
    for draw in numbers.sample(masks, numbers.randint(2, 4)):
        allowed = oracle.both(allowed, draw())
    return allowed


@pytest.mark.parametrize("seed", range(24))
def test_conjunctions_have_names(seed: int) -> None:
    numbers = random.Random(seed)
    (q_len, kv_len), batch = FORMS[seed % 3], numbers.randint(1, 3)
    assert not has_table(recognized(cells_of(conjunction(numbers, q_len, kv_len, batch), q_len, kv_len, batch)))


@pytest.mark.parametrize("seed", range(8))
def test_noise(seed: int) -> None:
    """Cells of which some are flipped: few leave most proposals right, and some of these masks have names after all."""
    numbers = random.Random(seed)
    cells = cells_of(conjunction(numbers, 12, 12, 2), 12, 12, 2)
    for flips in (1, 2, 20):
        for _ in range(flips):
            cells[numbers.randrange(2), 0, numbers.randrange(12), numbers.randrange(12)] ^= True
        recognized(cells)


def test_what_has_no_name_is_unchanged() -> None:
    mask = from_dense(torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5)
    assert mask.recognize() is mask
    for other in (fm.causal() | (fm.kv < 3), fm.parse("from_dense(cells)"), fm.masks.shift(from_dense([[1, 0], [1, 1]]), q=1)):
        assert other.recognize() is other


def test_parts_of_masks() -> None:
    """Tables in a composition, and of hidden cells."""
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert str((~from_dense(hidden)).recognize()) == "causal"
    table = from_dense([[1, 0], [1, 1]])
    assert str((fm.key_padding([1, 2]) & table | (fm.kv == 0)).recognize()) == "key_padding(lengths=[1, 2]) & causal | (kv == 0)"


def test_tables_of_traced_functions() -> None:
    cells = cells_of(oracle.both(oracle.causal(), oracle.key_padding([3, 6])), 6, 6, 2)
    kinds = torch.tensor([[1, 2], [2, 1]]).repeat_interleave(3, 0).repeat_interleave(3, 1)
    for mask_mod, text in (
        (lambda b, h, q, kv: cells[b, 0, q, kv], "causal & key_padding(lengths=[3, 6])"),
        (lambda b, h, q, kv: ~cells[0, 0, q, kv] | (q < 1), "eviction(steps=<int64[6]>) | (q < 1)"),
        (lambda b, h, q, kv: kinds[q, kv] == 1, "chunked(size=3)"),
    ):
        found = fm.from_mask_mod(mask_mod).recognize()
        assert str(found) == text
        assert found.equals(mask_mod, 6, batch=2)


def test_result_lowers_without_a_table() -> None:
    cells = fm.parse("causal & document(lengths=[100, 156])").dense(256)
    found = from_dense(cells).recognize()
    assert found.rows(256).exact
    assert not found.tensors
    assert found.equals("causal & document(lengths=[100, 156])", 256)


def test_tables_without_values() -> None:
    mask = from_dense(torch.ones(4, 4, dtype=torch.bool, device="meta"))
    assert mask.recognize() is mask


def test_other_numbers() -> None:
    with pytest.raises(LoweringError, match="0 and 1"):
        from_dense(torch.full((4, 4), 2)).recognize()
