"""The drop-in for torch's create_block_mask: the same lists, whatever the sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention, noop_mask

import flexmask as fm

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


def check_lists(found: BlockMask, wanted: BlockMask) -> None:
    """The lists of both are the same; what stands behind ``num_blocks`` is undefined."""
    assert found.shape == wanted.shape
    assert found.seq_lengths == wanted.seq_lengths
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = (getattr(made, f"{kind}_num_blocks") for made in (found, wanted))
        assert torch.equal(ours, theirs), kind
        assert ours.dtype == theirs.dtype
        ours, theirs = (getattr(made, f"{kind}_indices") for made in (found, wanted))
        assert ours.shape == theirs.shape, kind
        assert ours.dtype == theirs.dtype
        known = torch.arange(ours.shape[-1]) < getattr(found, f"{kind}_num_blocks").unsqueeze(-1)
        assert torch.equal(ours * known, theirs * known), kind


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask_mod", MODS, ids=lambda mod: mod.__name__)
def test_lists_are_those_of_torch(mask_mod: Any, sizes: tuple[Any, ...]) -> None:
    batch, heads, q_len, kv_len, block_size = sizes
    found = fm.create_block_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size)
    check_lists(found, create_block_mask(mask_mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size))
    assert found.mask_mod is mask_mod


def test_lengths_one_after_another() -> None:
    """Nothing that is kept of one length serves another."""
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


def test_compile_is_taken_and_ignored() -> None:
    found = fm.create_block_mask(causal, 1, 1, 40, 40, "cpu", 16, True)
    check_lists(found, create_block_mask(causal, 1, 1, 40, 40, "cpu", 16))


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"separate_full_blocks": False}, fm.LoweringError, "separate_full_blocks"),
    ({"compute_dq_write_order": True}, fm.LoweringError, "compute_dq_write_order"),
    ({"dq_kv_order": "kv"}, fm.OperandError, "dq_kv_order .* 'kv'"),
    ({"BLOCK_SIZE": 0}, fm.LoweringError, "block"),
    ({"Q_LEN": 0}, fm.LoweringError, "q_len"),
    ({"mask_mod": 3}, fm.OperandError, "int 3"),
    ({"mask_mod": lambda b, h, q: q > 2}, fm.OperandError, "too many positional"),
    ({"mask_mod": lambda b, h, q, kv: q - kv}, fm.TraceError, "int64"),
    ({"mask_mod": documents, "KV_LEN": 400}, fm.LoweringError, "300"),
]


@pytest.mark.parametrize(
    ("changed", "kind", "wanted"), REFUSED, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_refusals(changed: dict[str, Any], kind: type[Exception], wanted: str) -> None:
    given: dict[str, Any] = {"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 16, "KV_LEN": 16, "device": "cpu"} | changed
    with pytest.raises(kind, match=wanted):
        fm.create_block_mask(**given)


@pytest.mark.slow
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
    with pytest.raises(fm.LoweringError, match="there is no device 'gpu'"):
        fm.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 8, 8, device="gpu")
