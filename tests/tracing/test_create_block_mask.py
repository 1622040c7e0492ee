"""create_block_mask gives the same block lists as torch's, at all sizes."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention, noop_mask

import flexmask as fm
from flexmask.errors import LoweringError, OperandError, TraceError
from tests.support.block_lists import check_defined, check_lists, ours, theirs
from tests.support.paths import WAYS, path

#: What torch's function takes, which differs between its versions.
THEIR_ARGUMENTS = inspect.signature(create_block_mask).parameters
LENGTH = 300
IDS = torch.arange(LENGTH).div(37, rounding_mode="floor").expand(2, LENGTH).contiguous()
SCORES = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (IDS[b, q] == IDS[b, kv])


def slopes(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() < (8 << h)


def pieces(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q % 7 - kv % 7).abs() <= 1


def residues(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv * 13) % 5 > q // 2


def one_query(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv - h == kv + 1 - q


def scored(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (SCORES[q] > SCORES[kv] - 1) & (q >= kv)


MODS = [causal, documents, slopes, pieces, residues, one_query, scored, noop_mask]
#: B of None with data of two sequences is tested here too; see `test_data_of_several_sequences_needs_their_number`.
first_only = pytest.mark.filterwarnings("ignore:mask_mod reads data of:UserWarning")
#: B, H, Q_LEN, KV_LEN and the block size; B and H of None count as 1.
SIZES: list[tuple[int | None, int | None, int, int, int | tuple[int, int]]] = [
    (None, None, 13, 11, 4),
    (1, 1, 7, 19, (4, 8)),
    (2, 3, 16, 16, 16),
    (2, 2, 1, 40, 4),
    (1, 2, 40, 3, (8, 3)),
    (2, None, 300, 130, 128),
    (None, 4, 128, 256, 128),
    (2, 2, 5, 5, 128),
]


@pytest.mark.parametrize(
    ("mask_mod", "sizes"),
    [(mod, sizes) for i, mod in enumerate(MODS) for j, sizes in enumerate(SIZES) if (i + j) % 2 == i // 4],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@first_only
def test_lists_are_those_of_torch(mask_mod: Any, sizes: tuple[Any, ...]) -> None:
    batch, heads, q_len, kv_len, block_size = sizes
    found = fm.create_block_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size)
    check_lists(found, create_block_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size))
    assert found.mask_mod is mask_mod


def test_lengths_one_after_another() -> None:
    """No cached value of one length is used for another."""
    for kv_len in (11, 19, 40, 3):
        found = fm.create_block_mask(one_query, 2, 2, 13, kv_len, device="cpu", BLOCK_SIZE=4)
        check_lists(found, create_block_mask(one_query, 2, 2, 13, kv_len, device="cpu", BLOCK_SIZE=4))


def test_masks_are_taken_as_well() -> None:
    mask = fm.causal() & fm.document(IDS)
    found = fm.create_block_mask(mask, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)
    check_lists(found, create_block_mask(documents, 2, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16))
    assert found.mask_mod is not documents
    heads = fm.create_block_mask(mask, 2, 3, LENGTH, LENGTH, BLOCK_SIZE=16)
    check_lists(heads, create_block_mask(documents, 2, 3, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16))


#: Sizes at which torch's function takes no time.
SMALL = [sizes for sizes in SIZES if max(sizes[2:4]) < 100]
#: Each function by each way, at sizes in turn.
EACH = [(mod, SMALL[(i + j) % len(SMALL)], way) for i, mod in enumerate(MODS) for j, way in enumerate(WAYS)]
each = pytest.mark.parametrize(("mask_mod", "sizes", "way"), EACH, ids=lambda value: getattr(value, "__name__", str(value)))
with_order = pytest.mark.skipif("compute_dq_write_order" not in THEIR_ARGUMENTS, reason="this torch has no write order")


@each
@first_only
def test_full_blocks_among_the_others(mask_mod: Any, sizes: tuple[Any, ...], way: str) -> None:
    found = ours(mask_mod, sizes, way, separate_full_blocks=False)
    assert found.full_kv_num_blocks is None
    assert found.full_q_num_blocks is None
    wanted = theirs(mask_mod, sizes).to_dense()
    assert torch.equal(found.to_dense(), wanted)
    assert torch.equal(BlockMask.from_kv_blocks(found.q_num_blocks, found.q_indices).to_dense(), wanted.mT)
    if "separate_full_blocks" in THEIR_ARGUMENTS:
        check_lists(found, theirs(mask_mod, sizes, separate_full_blocks=False))


@with_order
@each
@first_only
def test_write_order(mask_mod: Any, sizes: tuple[Any, ...], way: str) -> None:
    for options in ({}, {"dq_kv_order": False}, {"separate_full_blocks": False}):
        asked: dict[str, Any] = {"compute_dq_write_order": True, **options}
        check_order(ours(mask_mod, sizes, way, **asked), theirs(mask_mod, sizes, **asked))


def check_order(found: Any, wanted: Any) -> None:
    check_lists(found, wanted)
    assert found.dq_kv_order is wanted.dq_kv_order is None
    assert found.dq_kv_order_spt is wanted.dq_kv_order_spt
    check_defined(found.dq_write_order, wanted.dq_write_order, found.q_num_blocks, "dq_write_order")
    assert (found.dq_write_order_full is None) == (wanted.dq_write_order_full is None)
    if wanted.dq_write_order_full is not None:
        check_defined(found.dq_write_order_full, wanted.dq_write_order_full, found.full_q_num_blocks, "dq_write_order_full")


@with_order
@pytest.mark.parametrize("way", WAYS)
def test_write_order_of_a_part(way: str) -> None:
    """A part of a BlockMask with a write order has one too."""
    setting: Any = {"B": 2, "H": 2, "Q_LEN": LENGTH, "KV_LEN": LENGTH, "device": "cpu", "BLOCK_SIZE": 16}
    with path(way):
        found = fm.create_block_mask(slopes, **setting, compute_dq_write_order=True)
    wanted = create_block_mask(slopes, **setting, compute_dq_write_order=True)
    check_order(found.to("cpu"), wanted.to("cpu"))
    check_order(found[1:, :, 2:9], wanted[1:, :, 2:9])
    smaller = {**setting, "Q_LEN": 160, "KV_LEN": 192}
    check_order(found._adjust(160, 192), create_block_mask(slopes, **smaller, compute_dq_write_order=True))


@with_order
@pytest.mark.parametrize("descending", [True, False])
def test_write_order_of_a_mask(descending: bool) -> None:
    order: Any = {"compute_dq_write_order": True, "dq_kv_order": descending}
    found = fm.causal().block_mask(LENGTH, block_size=16, **order)
    check_order(found, create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16, **order))


@pytest.mark.skipif("compute_dq_write_order" in THEIR_ARGUMENTS, reason="this torch has a write order")
def test_no_write_order() -> None:
    with pytest.raises(LoweringError, match=r"torch 2\.13 or newer"):
        fm.causal().block_mask(40, compute_dq_write_order=True)
    with pytest.raises(LoweringError, match=r"torch 2\.13 or newer"):
        fm.create_block_mask(causal, 1, 1, 40, 40, device="cpu", compute_dq_write_order=True)


@with_order
def test_the_write_order_of_a_long_mask_is_packed() -> None:
    """A table of 2**11 x 2**11 blocks would take 16 MiB for each list."""
    found: Any = fm.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv < 256), 1, 4, 2**18, 2**18, device="cpu", compute_dq_write_order=True
    )
    assert found.dq_write_order.shape == (1, 4, 2**11, 2**11)
    assert found.dq_write_order.untyped_storage().nbytes() < 2**18
    # Of the blocks kv <= q <= kv + 2 of a query block the last one stands first.
    assert found.q_indices[0, 3, 100, :2].tolist() == [100, 102]
    assert found.dq_write_order[0, 3, 100, :2].tolist() == [0, 2]
    assert found.dq_write_order_full[0, 3, 100, :1].tolist() == [1]


@pytest.mark.parametrize("options", [{}, {"separate_full_blocks": False}], ids=str)
@pytest.mark.parametrize(("batch", "heads"), [(0, 1), (0, 3), (2, 0), (0, 0), (0, None), (None, 0)])
def test_no_sequences_or_heads(batch: int | None, heads: int | None, options: dict[str, Any]) -> None:
    if options and "separate_full_blocks" not in THEIR_ARGUMENTS:
        pytest.skip("torch's function does not take these arguments")
    setting: Any = {"B": batch, "H": heads, "Q_LEN": 40, "KV_LEN": 30, "device": "cpu", "BLOCK_SIZE": 16, **options}
    for mask_mod in (causal, slopes):
        found = fm.create_block_mask(mask_mod, **setting)
        check_lists(found, create_block_mask(mask_mod, **setting))
        assert found.mask_mod is mask_mod
    check_lists(fm.create_block_mask(fm.causal(), **setting), create_block_mask(causal, **setting))


def test_no_sequences_in_the_data_either() -> None:
    ids = torch.zeros((0, 40), dtype=torch.long)
    found = fm.create_block_mask(lambda b, h, q, kv: ids[b, q] == ids[b, kv], 0, 2, 40, 40, device="cpu")
    assert found.shape == (0, 2, 40, 40)


def test_compile_is_taken_and_ignored() -> None:
    found = fm.create_block_mask(causal, 1, 1, 40, 40, "cpu", 16, True)
    check_lists(found, create_block_mask(causal, 1, 1, 40, 40, "cpu", 16))


def test_data_of_several_sequences_needs_their_number() -> None:
    """As torch, it computes the blocks of the first; unlike torch, it says so."""
    setting: Any = {"Q_LEN": LENGTH, "KV_LEN": LENGTH, "device": "cpu"}
    with pytest.warns(UserWarning, match=r"data of 2 sequences by b, but B=None computes the first .*: give B=2$") as caught:
        found = fm.create_block_mask(documents, None, None, **setting)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    check_lists(found, create_block_mask(documents, None, None, **setting))
    width = torch.tensor([40, 60, 80])
    with pytest.warns(UserWarning, match=r"data of 3 heads by h, but H=None computes the first .*: give H=3$"):
        fm.create_block_mask(lambda b, h, q, kv: q - kv < width[h], None, None, **setting)


@pytest.mark.parametrize(
    ("mask_mod", "batch"),
    [
        (documents, 1),
        (documents, 2),
        (slopes, None),
        (lambda b, h, q, kv: IDS[:1][b, q] == IDS[:1][b, kv], None),
        (lambda b, h, q, kv: IDS[0][q] == IDS[0][kv], None),
        (fm.document(IDS), None),
    ],
)
def test_no_warning(mask_mod: Any, batch: int | None, recwarn: pytest.WarningsRecorder) -> None:
    fm.create_block_mask(mask_mod, batch, None, LENGTH, LENGTH, device="cpu")
    assert not list(recwarn)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"separate_full_blocks": "no"}, OperandError, "separate_full_blocks must be True or False, got str no"),
    ({"B": -1}, LoweringError, "batch"),
    ({"B": 0, "H": -1}, LoweringError, "heads"),
    ({"dq_kv_order": "kv"}, OperandError, "dq_kv_order must be True or False, got str kv"),
    ({"BLOCK_SIZE": 0}, LoweringError, "block"),
    ({"Q_LEN": 0}, LoweringError, "q_len"),
    ({"mask_mod": 3}, OperandError, "int 3"),
    ({"mask_mod": lambda b, h, q: q > 2}, OperandError, "too many positional"),
    ({"mask_mod": lambda b, h, q, kv: q - kv}, TraceError, "int64"),
    ({"mask_mod": documents, "KV_LEN": 400}, LoweringError, "300"),
]


@pytest.mark.parametrize(
    ("changed", "kind", "wanted"), REFUSED, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_errors(changed: dict[str, Any], kind: type[Exception], wanted: str) -> None:
    given: dict[str, Any] = {"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 16, "KV_LEN": 16, "device": "cpu"} | changed
    with pytest.raises(kind, match=wanted):
        fm.create_block_mask(**given)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("mask_mod", [documents, scored], ids=lambda mod: mod.__name__)
def test_compiled_attention(mask_mod: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, LENGTH, 16, generator=generator) for _ in range(3))
    compiled = torch.compile(flex_attention)
    found, wanted = (
        compiled(query, key, value, block_mask=make(mask_mod, 2, 2, LENGTH, LENGTH, device="cpu"))
        for make in (fm.create_block_mask, create_block_mask)
    )
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_heads_that_are_the_same_share_their_memory() -> None:
    """Lists of long masks are packed, and stay so whatever the number of heads."""
    found = fm.create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 256), 1, 8, 2**18, 2**18, device="cpu")
    assert found.kv_indices.shape == (1, 8, 2**11, 2**11)
    assert found.kv_indices.untyped_storage().nbytes() < 2**21


def test_no_such_device() -> None:
    with pytest.raises(LoweringError, match="there is no device 'gpu'"):
        fm.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 8, 8, device="gpu")
