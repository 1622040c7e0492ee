"""Every named mask against its plain Python meaning, cell by cell."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import flexmask as fm
from flexmask import Mask
from flexmask.errors import LoweringError
from tests.support import oracle
from tests.support.examples import EXAMPLES, OWN_MASKS
from tests.support.lowerings import check_lowerings
from tests.support.named_masks import (
    BOOLS,
    FORMS,
    FROM_THE_END,
    NAMES,
    PLAIN,
    SHAPES,
    WITH_DATA,
    assert_means,
    draw,
    fits,
    named,
)
from tests.support.strategies import Case, Shape

EACH = [(name, number) for name, examples in EXAMPLES.items() for number in range(len(examples))]


def test_every_named_mask_has_an_example() -> None:
    assert list(EXAMPLES) == OWN_MASKS


@pytest.mark.parametrize(("name", "number"), EACH, ids=[f"{name}-{number}" for name, number in EACH])
def test_example(name: str, number: int) -> None:
    arguments, allowed = EXAMPLES[name][number]
    case, shape = Case(getattr(fm.masks, name)(**arguments), allowed), Shape(4, 4, batch=2)
    check_lowerings(case, shape, case.expected(shape), 2)


@pytest.mark.parametrize(("name", "at"), [(name, at) for name in PLAIN for at in ("odd", "offsets") if fits(name, SHAPES[at])])
def test_sizes_of_a_mask_without_data(name: str, at: str) -> None:
    dense = assert_means(named(name, SHAPES[at]), SHAPES[at])
    moved = at == "offsets" and "q" in PLAIN[name][0]().symbols
    assert dense.shape[:2] == (3 if moved else 1, 2 if name == "per_head" else 1)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WITH_DATA)
def test_forms_of_data(name: str, form: str, batched: bool) -> None:
    """At one shape; ``lowering/test_lowerings.py`` has the others, with data in lists."""
    shape = SHAPES["odd"]
    dense = assert_means(WITH_DATA[name](shape, FORMS[form], batched), shape)
    assert dense.shape[:2] == (shape.batch if batched else 1, 1)


@pytest.mark.parametrize("form", FORMS)
def test_dense_table_for_each_head(form: str) -> None:
    shape = SHAPES["odd"]
    data = draw(3, BOOLS, shape.batch, shape.heads, shape.q_len, shape.kv_len)
    dense = assert_means(Case(fm.from_dense(FORMS[form](data)), oracle.dense(data)), shape)
    assert dense.shape == (3, 2, 9, 13)


@pytest.mark.parametrize("name", WITH_DATA)
def test_batch_is_read_from_the_data(name: str) -> None:
    shape = SHAPES["odd"]
    case = named(name, shape)
    assert torch.equal(case.mask.dense(shape.q_len, shape.kv_len), case.expected(shape)[:, :1])


def test_heads_are_read_from_per_head() -> None:
    case = named("per_head", SHAPES["square"])
    assert torch.equal(case.mask.dense(5), case.expected(Shape(5, 5, heads=2)))


@pytest.mark.parametrize("name", NAMES)
def test_kv_len_defaults_to_q_len(name: str) -> None:
    mask = named(name, SHAPES["square"]).mask
    assert torch.equal(mask.dense(8), mask.dense(8, 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offset_as_a_tensor(dtype: torch.dtype) -> None:
    shape = Shape(4, 11, batch=3, q_offset=(0, 7, 3))
    expected = named("causal", shape).expected(shape)
    assert torch.equal(fm.causal().dense(4, 11, q_offset=torch.tensor([0, 7, 3], dtype=dtype)), expected)
    assert torch.equal(fm.causal().dense(4, 11, q_offset=torch.tensor(7, dtype=dtype)), expected[1:2])


@pytest.mark.parametrize("name", sorted(FROM_THE_END))
def test_offset_of_a_mask_that_places_queries_by_q_len(name: str) -> None:
    with pytest.raises(LoweringError, match=r"q_len.*q_offset"):
        named(name, SHAPES["offset"]).mask.dense(4, 11, q_offset=7)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["key_padding", "key_padding left", "key_padding start", "query_padding left", "prefix_lm"])
def test_narrow_integers_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    """The lengths fit their dtype, but kv_len and the positions do not."""
    shape = Shape(5, 300, batch=3)
    lengths = [5, 0, 2]
    masks: dict[str, tuple[Callable[[torch.Tensor], Mask], oracle.Predicate]] = {
        "key_padding": (fm.key_padding, oracle.key_padding(lengths)),
        "key_padding left": (partial(fm.key_padding, side="left"), oracle.key_padding(lengths, "left")),
        "key_padding start": (lambda start: fm.key_padding(start=start), oracle.key_start(lengths)),
        "query_padding left": (partial(fm.query_padding, side="left"), oracle.query_padding(lengths, "left")),
        "prefix_lm": (fm.prefix_lm, oracle.prefix_lm(lengths)),
    }
    build, allowed = masks[name]
    assert_means(Case(build(torch.tensor(lengths, dtype=dtype)), allowed), shape)


def test_narrow_document_lengths_do_not_overflow() -> None:
    lengths = [200, 90, 10]
    case = Case(
        fm.document(lengths=torch.tensor(lengths, dtype=torch.uint8)),
        oracle.document(oracle.ids_of_lengths(lengths, 300)),
    )
    assert_means(case, Shape(3, 300))
    assert_means(case, Shape(3, 300, q_offset=190))


# ---------------------------------------------------------------- pictures drawn by hand, which hold the oracle too

PICTURES: list[tuple[str, Mask, oracle.Predicate, int, int, str]] = [
    ("causal square", fm.causal(), oracle.causal(), 4, 4, "#... ##.. ###. ####"),
    ("causal wide", fm.causal(), oracle.causal(), 3, 5, "#.... ##... ###.."),
    (
        "causal lower_right wide",
        fm.causal(align="lower_right"),
        oracle.causal("lower_right"),
        3,
        5,
        "###.. ####. #####",
    ),
    (
        "causal lower_right tall",
        fm.causal(align="lower_right"),
        oracle.causal("lower_right"),
        5,
        3,
        "... ... #.. ##. ###",
    ),
    ("window", fm.sliding_window(left=1, right=2), oracle.sliding_window(1, 2), 4, 6, "###... ####.. .####. ..####"),
    ("window size", fm.sliding_window(size=2), oracle.sliding_window(size=2), 4, 4, "#... ##.. .##. ..##"),
    ("key_padding", fm.key_padding(3), oracle.key_padding(3), 2, 5, "###.. ###.."),
    ("key_padding left", fm.key_padding(3, side="left"), oracle.key_padding(3, "left"), 2, 5, "..### ..###"),
    ("key_padding start", fm.key_padding(start=3), oracle.key_start(3), 2, 5, "...## ...##"),
    ("query_padding", fm.query_padding(1), oracle.query_padding(1), 3, 2, "## .. .."),
    ("query_padding start", fm.query_padding(start=1), oracle.query_start(1), 3, 2, ".. ## ##"),
    ("cross_length", fm.cross_length(2, q_lengths=1), oracle.cross_length(2, 1), 2, 4, "##.. ...."),
    (
        "document",
        fm.document([0, 0, 1, -1]),
        oracle.document([0, 0, 1, -1]),
        4,
        4,
        "##.. ##.. ..#. ....",
    ),
    ("prefix_lm", fm.prefix_lm(2), oracle.prefix_lm(2), 4, 4, "##.. ##.. ###. ####"),
    (
        "per_document",
        fm.per_document(fm.kv == 0, [0, 0, 1, 1, -1]),
        oracle.per_document(lambda b, h, q, kv, q_len, kv_len: kv == 0, [0, 0, 1, 1, -1]),
        5,
        5,
        "#.... #.... ..#.. ..#.. .....",
    ),
    (
        "shift",
        fm.masks.shift(fm.causal(), q=1, kv=2),
        oracle.shift(oracle.causal(), 1, 2),
        4,
        5,
        "##... ###.. ####. #####",
    ),
    ("transpose", fm.masks.transpose(fm.causal()), oracle.transpose(oracle.causal()), 3, 4, "#### .### ..##"),
]


@pytest.mark.parametrize(("mask", "allowed", "q_len", "kv_len", "picture"), [row[1:] for row in PICTURES])
def test_picture(mask: Mask, allowed: oracle.Predicate, q_len: int, kv_len: int, picture: str) -> None:
    def drawn(rows: list[list[bool]]) -> str:
        return " ".join("".join("#" if cell else "." for cell in row) for row in rows)

    assert drawn(oracle.table_of(allowed, q_len, kv_len)[0][0]) == picture
    assert drawn(mask.dense(q_len, kv_len)[0, 0].tolist()) == picture


@pytest.mark.parametrize("prefix", [4, [4], torch.tensor([4])], ids=repr)
def test_a_document_may_be_shorter_than_its_prefix(prefix: int | list[int] | torch.Tensor) -> None:
    """And so may the sequence, as the last one of a dataset."""
    mask = fm.per_document(fm.prefix_lm(prefix), lengths=[1, 2])
    assert mask.dense(3)[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
