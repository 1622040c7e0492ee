"""The code paths to one result: each is compared with the oracle, whatever the size of the mask."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import flexmask as fm
from flexmask import _sync
from flexmask.lowering import block_lists
from flexmask.lowering import block_mask as lowering
from tests.support import oracle
from tests.support.exhaustive import half, one_in
from tests.support.lowerings import blocks_of, check_block_mask, check_lists, check_mask_mod, check_rows
from tests.support.paths import PATHS, path
from tests.support.strategies import Case, Shape, shaped_masks

BLOCK_SIZES = st.sampled_from([1, 3, 4, (4, 8), (8, 3), 16])


def is_known(shape: Shape) -> bool:
    """Whether no query is beyond the keys at a position on the device, where data cannot be checked."""
    return isinstance(shape.q_offset, int) or shape.q_end <= shape.kv_len


@half
@given(shaped_masks(), BLOCK_SIZES)
def test_paths_of_random_mask(drawn: tuple[Case, Shape], block_size: int | tuple[int, int]) -> None:
    case, shape = drawn
    expected = case.expected(shape)
    for name in PATHS:
        if is_known(shape) or "host syncs avoided" not in name:
            note(name)
            with path(name):
                check_block_mask(case, shape, expected, block_size)
                if name in ("host syncs avoided", "runs of queries"):
                    check_rows(case, shape, expected)
                    check_mask_mod(case, shape, expected)


LONG: list[fm.Mask] = [
    fm.causal(),
    fm.causal() & fm.document(lengths=[300, 20, 1000, 700]),
    fm.sliding_window(size=130) | (fm.kv < 3),
    fm.prefix_lm([200, 1999]),
    fm.document([i % 7 for i in range(2020)]),
    ~fm.causal() ^ (fm.q // 100 == fm.kv // 100),
    fm.sliding_window(left=40, right=40) & ((fm.q - fm.kv) % 3 == 0),
    fm.per_head([fm.causal(), fm.masks.transpose(fm.causal())]),
    fm.kv // 4 == 2 * fm.q,
]


SIZE = 2020


@cache
def kinds_of(mask: fm.Mask) -> Tensor:
    """Which blocks of 4 are empty, partial and full, counted from the cells."""
    return oracle.classify_blocks(mask.dense(SIZE, heads=2).expand(2, 2, SIZE, SIZE), 4, 4)


@pytest.mark.parametrize(("name", "mask"), one_in(6, PATHS, LONG))
def test_blocks_of_long_mask(name: str, mask: fm.Mask) -> None:
    """Blocks of 4 in 2,020 tokens: 255,025 in all, more than the grid has on the CPU."""
    with path(name):
        found = mask.block_mask(SIZE, block_size=4)
    check_lists(found, Shape(SIZE, SIZE, batch=2, heads=2), kinds_of(mask))


@pytest.mark.parametrize("name", PATHS)
def test_rows_without_keys_list_no_block_of_few_keys(name: str) -> None:
    """A block holds more keys than there are."""
    with path(name):
        found = (fm.q < 4).block_mask(8, block_size=(4, 16))
    check_lists(found, Shape(8, 8), oracle.classify_blocks((fm.q < 4).dense(8), 4, 16))


# ---------------------------------------------------------------- data that changes


def by_torch(ids: Tensor) -> None:
    ids[2:] = 5


def by_numpy(ids: Tensor) -> None:
    ids.numpy()[2:] = 5


@pytest.mark.parametrize("change", [by_torch, by_numpy])
def test_decoding_sees_changed_data(change: Callable[[Tensor], None]) -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = fm.document(ids)
    for _ in range(2):
        assert mask.rows(1, 6, q_offset=1).lower.bounds.flatten().tolist() == [0, 3]
    change(ids)
    assert mask.rows(1, 6, q_offset=1).lower.bounds.flatten().tolist() == [0, 2]


def test_changed_data_is_seen_where_host_syncs_are_avoided() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = fm.document(ids)
    with path("host syncs avoided"):
        assert mask.rows(6).lower.bounds[0, 0, 1].flatten().tolist() == [0, 3]
        ids[2:] = 5
        assert mask.rows(6).lower.bounds[0, 0, 1].flatten().tolist() == [0, 2]
        with torch.inference_mode():
            unversioned = torch.tensor([0, 0, 1])
            assert fm.document(unversioned).rows(3).lower.bounds[0, 0, 0].flatten().tolist() == [0, 2]


@pytest.mark.parametrize("length", [5, 8])
def test_decoding_takes_lists_at_any_length(length: int) -> None:
    mask = fm.document(lengths=[2, 3], padding=True)
    assert mask.rows(1, length, q_offset=4).lower.bounds.flatten().tolist() == [2, 5]
    assert mask.rows(1, 9, q_offset=4).lower.bounds.flatten().tolist() == [2, 5]


# ---------------------------------------------------------------- host syncs


def masks_without_host_sync(device: str) -> dict[str, fm.Mask]:
    """Masks whose sizes follow from the shapes of their data. On ``meta`` data has no values: reading one is an error."""
    lengths = torch.tensor([600, 900], device=device)
    documents = torch.tensor([[500, 300, 200], [1, 999, 0]], device=device)
    return {
        "full": fm.full(),
        "causal": fm.causal(),
        "window": fm.sliding_window(size=9),
        "sinks": fm.causal() & (fm.sliding_window(size=9) | (fm.kv < 4)),
        "prefix": fm.prefix_lm(lengths),
        "padding": fm.key_padding(lengths),
        "packed documents": fm.causal() & fm.document(lengths=documents) & fm.key_padding(lengths),
        "cumulative lengths": fm.document(cu_seqlens=torch.tensor([0, 30, 1000], device=device)),
        "lists": fm.document(lengths=[500, 500]),
        "windows in documents": fm.per_document(fm.sliding_window(size=9), lengths=documents),
        "heads": fm.per_head([fm.causal(), fm.sliding_window(size=9)]),
        "complement": ~fm.causal() ^ fm.sliding_window(left=3, right=3),
        "a few dilated": fm.sliding_window(left=9, right=9) & ((fm.q - fm.kv) % 4 == 0),
    }


@pytest.mark.parametrize("name", masks_without_host_sync("meta"))
def test_no_host_sync(name: str) -> None:
    """Lowering reads no value of a tensor, also for a decoding step at positions on the device."""
    mask = masks_without_host_sync("meta")[name]
    offset = torch.tensor([700, 800], device="meta")
    assert mask.block_mask(1000, device="meta").kv_indices.shape[-2:] == (8, 8)
    assert mask.block_mask(1, 1000, q_offset=offset, device="meta").kv_indices.shape[-2:] == (1, 8)


@pytest.mark.parametrize("name", masks_without_host_sync("meta"))
def test_no_tensor_is_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host would wait for its values."""
    mask, printed = masks_without_host_sync("cpu")[name], list[str]()

    def text(tensor: Tensor) -> str:
        printed.append(str(tensor.shape))
        return printed[-1]

    monkeypatch.setattr(torch.Tensor, "__repr__", text)
    for device_is_far in (False, True):
        monkeypatch.setattr(_sync, "needs_sync", lambda tensor, is_far=device_is_far: is_far)
        mask.block_mask(1000), mask.block_mask(1, 1000, q_offset=torch.tensor([3, 5]))
    assert printed == []


def test_data_along_queries_needs_no_host_sync() -> None:
    lengths, positions = torch.tensor([9, 8], device="meta"), torch.zeros((2, 1000), dtype=torch.long, device="meta")
    for mask in (fm.query_padding(lengths), fm.cross_length(lengths, q_lengths=lengths), fm.document(position_ids=positions)):
        assert mask.block_mask(1000, device="meta").kv_num_blocks.device.type == "meta"


MASKS_WITH_HOST_SYNC = {
    "kept keys": fm.key_padding(keep=torch.ones(4000, dtype=torch.bool, device="meta")),
    "ids": fm.document(torch.zeros(4000, dtype=torch.long, device="meta")),
    "a list of ids": fm.document([0] * 4000),
    "a condition on keys": fm.kv % 4 == 0,
    "keys that match": fm.q % 7 == fm.kv % 7,
    "nine pieces": reduce(operator.or_, (fm.kv == 100 * i for i in range(9))),
    "many dilated": fm.sliding_window(left=9, right=9) & ((fm.q - fm.kv) % 4 == 0),
}


@pytest.mark.parametrize("name", MASKS_WITH_HOST_SYNC)
def test_unknown_sizes_force_a_host_sync(name: str) -> None:
    """Key intervals of an unknown number are counted."""
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        MASKS_WITH_HOST_SYNC[name].block_mask(4000, device="meta")


# ---------------------------------------------------------------- packed lists


def packed(mask: fm.Mask, length: int, way: str = "packed sets") -> BlockMask:
    with path(way):
        return mask.block_mask(length)


PACKED = [fm.causal(), fm.causal() & fm.document(lengths=[700, 324]), fm.sliding_window(size=200) | (fm.kv < 4)]


def same_lists(found: BlockMask, wanted: BlockMask) -> bool:
    shape = Shape(found.seq_lengths[0], found.seq_lengths[1], *found.kv_num_blocks.shape[:2])
    kinds = ("kv", "full_kv", "q", "full_q")
    return all(list(blocks_of(found, kind, shape)) == list(blocks_of(wanted, kind, shape)) for kind in kinds)


@pytest.mark.parametrize("way", ["packed sets", "packed sets, shared strides"])
@pytest.mark.parametrize("mask", PACKED, ids=str)
def test_packed_lists_move_slice_pickle_and_print(mask: fm.Mask, way: str) -> None:
    found, wanted = packed(mask, 1024, way), mask.block_mask(1024)
    strides = {getattr(found, f"{kind}_indices").stride(2) for kind in ("kv", "full_kv", "q", "full_q")}
    assert strides != {8}, "no list is packed"
    assert same_lists(found.to("cpu"), wanted)
    assert str(found) == str(wanted)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    part, wanted_part = found[:, :, 2:5], wanted[:, :, 2:5]
    assert torch.equal(part.kv_num_blocks, wanted_part.kv_num_blocks)
    assert torch.equal(part.to_dense(), wanted_part.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        tensors = getattr(found, f"{kind}_num_blocks"), getattr(found, f"{kind}_indices")
        saved = io.BytesIO()
        torch.save(tensors, saved)
        for copy in (pickle.loads(pickle.dumps(tensors)), torch.load(io.BytesIO(saved.getvalue()))):
            assert torch.equal(copy[1], tensors[1])


PAIRS = [
    *PACKED,
    fm.empty(),
    fm.full(),
    fm.causal() & fm.sliding_window(size=300),
    fm.per_head([fm.causal(), fm.sliding_window(left=9, right=200)]),
    fm.key_padding(lengths=[1000, 0, 300]) & fm.causal(),
    fm.causal() & ((fm.q - fm.kv) % 3 == 0),
]


@pytest.mark.parametrize("mask", PAIRS, ids=str)
def test_full_blocks_have_the_strides_of_partial_ones(mask: fm.Mask) -> None:
    """CUDA kernels of torch 2.11 read both lists with the same strides, and decoding kernels do in every version."""
    with path("packed sets, shared strides"):
        found = mask.block_mask(1024)
    assert found.full_kv_indices is not None
    assert found.full_q_indices is not None
    assert found.q_indices is not None
    assert found.kv_indices.stride() == found.full_kv_indices.stride()
    assert found.q_indices.stride() == found.full_q_indices.stride()
    assert same_lists(found, mask.block_mask(1024))


@pytest.mark.parametrize("mask", PAIRS, ids=str)
def test_few_queries_share_strides_in_every_version(mask: fm.Mask) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_GRID", "MAX_ROOM"):
            patch.setattr(lowering, name, _sync.PerDevice(0, 0))
        found = mask.block_mask(100, 1024, block_size=(16, 32), q_offset=924)
    assert found.full_kv_indices is not None
    assert found.kv_indices.stride() == found.full_kv_indices.stride()
    assert same_lists(found, mask.block_mask(100, 1024, block_size=(16, 32), q_offset=924))


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("mask", PAIRS, ids=str)
def test_heads_and_batch_are_one_axis_in_memory(mask: fm.Mask, way: str) -> None:
    """CUDA kernels read the stride of heads alone and multiply it by the number of heads for the stride of the batch."""
    with path(way):
        made = mask.block_mask(1024, batch=3), fm.create_block_mask(mask, 3, 2, 1024, 1024)
    for found in made:
        for kind in ("kv", "full_kv", "q", "full_q"):
            for tensor in (getattr(found, f"{kind}_num_blocks"), getattr(found, f"{kind}_indices")):
                assert tensor.stride(0) == tensor.shape[1] * tensor.stride(1), kind
                assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, kind


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", PACKED, ids=str)
def test_compiled_attention_takes_packed_lists(mask: fm.Mask) -> None:
    torch.compiler.reset()  # kernels of other tests count towards torch's limit
    query, key, value = (torch.randn(1, 2, 1024, 32) for _ in range(3))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    with torch.no_grad():
        found = compiled(query, key, value, block_mask=packed(mask, 1024))
        torch.testing.assert_close(found, fm.attention(query, key, value, mask, backend="sdpa"))


MILLION = 2**20


@pytest.mark.parametrize(
    ("mask", "length", "most"),
    [
        (fm.causal(), MILLION, 2**22),
        (fm.causal(), MILLION + 1, 2**23),  # all blocks of the last query are partial
        (fm.causal() & fm.document(lengths=[512] * 2048), MILLION, 2**25),
        (fm.sliding_window(size=256), MILLION, 2**25),
    ],
    ids=lambda value: value.brief()[:40] if isinstance(value, fm.Mask) else "",
)
def test_lists_of_a_million_tokens_are_small(mask: fm.Mask, length: int, most: int) -> None:
    """With room for every block they would take 1 GiB."""
    if block_lists.SHARED_STRIDES and mask == fm.causal():
        pytest.skip("the partial blocks of a causal mask take the strides of its full ones, for kernels of this torch")
    made = mask.block_mask(length)
    lists = [getattr(made, f"{kind}_indices") for kind in ("kv", "full_kv", "q", "full_q")]
    assert sum(indices.untyped_storage().nbytes() for indices in lists) <= most
    assert lists[0].shape == (1, 1, -(-length // 128), -(-length // 128))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*masks_without_host_sync("meta"), "ids"])
def test_no_host_sync_on_cuda(name: str) -> None:
    """torch raises an error at a host sync. The first lowering of a kind copies lists and counts ids."""
    ids = fm.document(torch.arange(1000, device="cuda") // 300)
    mask, offset = {**masks_without_host_sync("cuda"), "ids": ids}[name], torch.tensor([3, 5], device="cuda")
    mask.block_mask(1000, device="cuda"), mask.block_mask(1, 1000, q_offset=offset)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = mask.block_mask(1000, device="cuda")
        step = mask.block_mask(1, 1000, q_offset=offset)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_host = mask.to("cpu")
    assert same_lists(found.to("cpu"), on_host.block_mask(1000))
    assert same_lists(step.to("cpu"), on_host.block_mask(1, 1000, q_offset=offset.cpu()))


# ---------------------------------------------------------------- threads


def test_threads_share_a_mask() -> None:
    """Cached data of one lowering is not used in another."""
    mask = fm.causal() & fm.document(lengths=[300, 200], padding=True)
    wanted = {length: mask.rows(1, length, q_offset=400).lower.bounds.tolist() for length in (500, 600, 700)}

    def lower(length: int) -> bool:
        return all(mask.rows(1, length, q_offset=400).lower.bounds.tolist() == wanted[length] for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lower, wanted))
