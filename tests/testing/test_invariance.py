"""Documents aligned to blocks, and the check that a document gives the same bits however it is packed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexmask as fm
from flexmask import Mask
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.lowering import AlignedDocuments, align_documents
from flexmask.testing import assert_batch_invariant
from flexmask.tracing.trace import as_mask

# ---------------------------------------------------------------- documents aligned to blocks


def test_documents_begin_at_blocks() -> None:
    documents = align_documents([3, 4, 5], 4)
    assert documents.lengths == ((3, 4, 5),)
    assert documents.ids.tolist() == [[0, 0, 0, -1, 1, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1, -1]]
    assert documents.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0]]
    assert documents.index.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_sequences_of_documents() -> None:
    documents = align_documents([[2, 1], [0, 3, 2], []], (2, 3), length=18)
    empty = [-1] * 4
    assert documents.lengths == ((2, 1), (0, 3, 2), ())
    assert documents.ids.tolist() == [
        [0, 0, *empty, 1, -1, *empty, *[-1] * 6],
        [1, 1, 1, -1, -1, -1, 2, 2, *empty, *[-1] * 6],
        [-1] * 18,
    ]
    assert documents.index.tolist() == [0, 1, 6, 18, 19, 20, 24, 25]


def test_packing_and_back() -> None:
    documents = align_documents([[2, 1], [3]], 4)
    tokens = torch.arange(1, 7)
    packed = documents.pack(tokens, fill=-7)
    assert packed.tolist() == [[1, 2, -7, -7, 3, -7, -7, -7], [4, 5, 6, *[-7] * 5]]
    assert torch.equal(documents.unpack(packed), tokens)
    assert [part.tolist() for part in documents.split(packed)] == [[1, 2], [3], [4, 5, 6]]
    wide = torch.randn(6, 2, 5, dtype=torch.bfloat16)
    assert documents.pack(wide).shape == (2, 8, 2, 5)
    assert documents.pack(wide)[0, 2:4].count_nonzero() == 0
    assert torch.equal(documents.unpack(documents.pack(wide)), wide)


def test_gradients_pass_through() -> None:
    documents = align_documents([2, 1], 4)
    tokens = torch.randn(3, 2, requires_grad=True)
    documents.unpack(documents.pack(tokens) ** 2).sum().backward()
    assert tokens.grad is not None
    torch.testing.assert_close(tokens.grad, 2 * tokens.detach())


def test_a_document_of_no_tokens_takes_no_block() -> None:
    documents = align_documents([0, 2, 0, 1], 4)
    assert documents.ids.tolist() == [[1, 1, -1, -1, 3, -1, -1, -1]]
    assert [part.shape[0] for part in documents.split(documents.pack(torch.arange(3)))] == [0, 2, 0, 1]


@pytest.mark.parametrize("lengths", [torch.tensor([2, 3]), (2, 3), [torch.tensor(2), 3]], ids=str)
def test_lengths_of_any_kind(lengths: Any) -> None:
    assert align_documents(lengths, 4).ids.tolist() == [[0, 0, -1, -1, 1, 1, 1, -1]]


def test_lengths_of_sequences_in_a_tensor() -> None:
    assert align_documents(torch.tensor([[2, 1], [3, 0]]), 2).ids.tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]


def test_one_token_and_one_block() -> None:
    assert align_documents([1], 1).ids.tolist() == [[0]]
    assert align_documents([1]).ids.shape == (1, 128)


def test_the_device() -> None:
    documents = align_documents([1, 2], 2, device="meta")
    assert {part.device.type for part in (documents.ids, documents.position_ids, documents.index)} == {"meta"}


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": [3, -1]}, LoweringError, "must not be negative"),
    ({"lengths": []}, LoweringError, "at least one token"),
    ({"lengths": [[0], []]}, LoweringError, "at least one token"),
    ({"lengths": 3}, OperandError, "lengths must be integers"),
    ({"lengths": [1.5]}, OperandError, "lengths must be integers, got 1.5"),
    ({"lengths": [True]}, OperandError, "lengths must be integers, got True"),
    ({"lengths": [[1], 2]}, OperandError, "got both"),
    ({"length": 12}, LoweringError, "a multiple of 8 and at least 16"),
    ({"length": 20}, LoweringError, "a multiple of 8 and at least 16"),
    ({"length": 1.0}, OperandError, "length must be an integer"),
    ({"block_size": 0}, LoweringError, "block_size"),
]


@pytest.mark.parametrize(("changed", "kind", "wanted"), REFUSED, ids=str)
def test_refusals(changed: dict[str, Any], kind: type[Exception], wanted: str) -> None:
    given: dict[str, Any] = {"lengths": [3, 4], "block_size": 8} | changed
    with pytest.raises(kind, match=wanted):
        align_documents(**given)


def test_tensors_that_do_not_fit() -> None:
    documents = align_documents([3, 4], 8)
    with pytest.raises(LoweringError, match=r"tokens must be \[7, \.\.\.\].*got a tensor \[6, 2\]"):
        documents.pack(torch.zeros(6, 2))
    with pytest.raises(LoweringError, match=r"\[B, length, \.\.\.\] = \[1, 16\] and more, got \[1, 15, 2\]"):
        documents.unpack(torch.zeros(1, 15, 2))


# ---------------------------------------------------------------- the same bits

LENGTHS = [300, 150, 250, 60]
TOKENS = torch.randn(sum(LENGTHS), 3 * 32, generator=torch.Generator().manual_seed(0))


def attend(x: Tensor, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Attention of two heads over tokens that are query, key and value at once."""
    query, key, value = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in x.chunk(3, -1))
    return call(query, key, value).transpose(1, 2).flatten(2)


def tiled(x: Tensor, mask: Mask) -> Tensor:
    return attend(x, lambda query, key, value: fm.attention(query, key, value, mask, backend="sdpa"))


def whole(x: Tensor, mask: Mask) -> Tensor:
    """Dense attention, whose sums run over all keys of the packed sequence."""
    cells = mask.dense(x.shape[1])
    return attend(x, lambda query, key, value: F.scaled_dot_product_attention(query, key, value, cells))


def blockwise(x: Tensor, mask: Mask) -> Tensor:
    """Attention as FlexAttention's kernels compute it: block by block in the order of the list, with a running softmax."""
    block_mask = mask.block_mask(x.shape[1], separate_full_blocks=False)
    places = torch.arange(x.shape[1]).split(128)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        for b in range(x.shape[0]):
            group = min(b, block_mask.kv_num_blocks.shape[0] - 1)
            for row, q_idx in enumerate(places):
                total, peak, weight = torch.zeros(2, 128, 16), torch.full((2, 128, 1), -1e9), torch.zeros(2, 128, 1)
                for column in block_mask.kv_indices[group, 0, row, : int(block_mask.kv_num_blocks[group, 0, row])].tolist():
                    kv_idx = places[column]
                    seen = block_mask.mask_mod(torch.tensor(b), torch.tensor(0), q_idx.unsqueeze(1), kv_idx)
                    scores = query[b, :, q_idx] @ key[b, :, kv_idx].mT / 4
                    higher = torch.maximum(peak, scores.masked_fill(~seen, -1e9).amax(2, keepdim=True))
                    share = torch.exp(scores - higher).masked_fill(~seen, 0)
                    shrink, peak = torch.exp(peak - higher), higher
                    total = total * shrink + share @ value[b, :, kv_idx]
                    weight = weight * shrink + share.sum(2, keepdim=True)
                out[b, :, q_idx] = total / weight.clamp(min=1e-9)
        return out

    return attend(x, call)


MASKS = [None, fm.full(), "sliding_window(size=70)", lambda b, h, q, kv: (kv < 100) | (kv <= q)]


@pytest.mark.parametrize("mask", MASKS, ids=["causal", "full", "a text", "a mask_mod"])
def test_aligned_documents_give_the_same_bits(mask: Any) -> None:
    assert_batch_invariant(blockwise, TOKENS, LENGTHS, mask=mask)
    mask = fm.causal() if mask is None else as_mask(mask)
    documents = align_documents(LENGTHS)
    x, packed = documents.pack(TOKENS), fm.per_document(mask, documents.ids)
    torch.testing.assert_close(documents.unpack(blockwise(x, packed)), documents.unpack(whole(x, packed)), atol=1e-5, rtol=1e-5)


def test_documents_that_are_not_aligned_do_not() -> None:
    with pytest.raises(
        AssertionError, match=r"depends on its packing: in .* numbers differ .* begin at multiples of 1 here: align"
    ):
        assert_batch_invariant(padded_blockwise, TOKENS, LENGTHS, block_size=1)


def padded_blockwise(x: Tensor, mask: Mask) -> Tensor:
    """The same for sequences of any length."""
    length = x.shape[1]
    inside = (fm.q < length) & (fm.kv < length)
    cells = F.pad(mask.dense(length), (0, -length % 128, 0, -length % 128))
    return blockwise(F.pad(x, (0, 0, 0, -length % 128)), fm.from_dense(cells) & inside)[:, :length]


@pytest.mark.parametrize("function", [whole, tiled], ids=["whole", "tiled"])
def test_a_function_that_is_not_invariant(function: Any) -> None:
    with pytest.raises(AssertionError, match=r"^the output of document \d \(\d+ tokens\) depends on its packing: "):
        assert_batch_invariant(function, TOKENS, LENGTHS, mask=fm.full())


@pytest.mark.parametrize("block_size", [1, 128])
def test_which_document_and_where(block_size: int) -> None:
    def shy(x: Tensor, documents: AlignedDocuments) -> Tensor:
        out = x.clone()
        if len(documents.lengths[0]) > 1:
            out.view(-1, x.shape[-1])[documents.index[documents.lengths[0][0] + 7], 5] += 1  # of the second of each packing
        return out

    with pytest.raises(AssertionError, match=r"document 1 \(150 tokens\).* 1 of 14,400 numbers .* its token 7, .* 1\.0e\+00"):
        assert_batch_invariant(shy, TOKENS, LENGTHS, block_size=block_size)


def test_each_way_of_packing_is_tried() -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []

    def watch(x: Tensor, documents: AlignedDocuments, mask: Mask) -> tuple[Tensor, str]:
        assert x.shape[:2] == documents.ids.shape
        cells = mask.dense(x.shape[1])
        positions = documents.position_ids
        own = documents.ids.unsqueeze(2) == documents.ids.unsqueeze(1)
        wanted = own & (documents.ids >= 0).unsqueeze(2) & (positions.unsqueeze(2) >= positions.unsqueeze(1))
        assert torch.equal(cells[:, 0], wanted)
        seen.append(documents.lengths)
        return x, "more"

    assert_batch_invariant(watch, torch.arange(9), [2, 3, 4], block_size=4)
    assert seen == [
        ((2,),),
        ((3,),),
        ((4,),),
        ((2,),),
        ((2, 3, 4),),
        ((4, 3, 2),),
        ((3,), (2, 4)),
        ((2,), (3,), (4,)),
    ]


def test_gradients() -> None:
    assert_batch_invariant(lambda x, mask: x.tanh() * 3, TOKENS, LENGTHS, gradients=True)

    def scaled(x: Tensor, documents: AlignedDocuments) -> Tensor:
        return x + (x.detach() - x) * len(documents.lengths[0])  # the same output, and gradients that know of the others

    assert_batch_invariant(scaled, TOKENS.round(), LENGTHS)
    with pytest.raises(AssertionError, match=r"the gradient of document 0"):
        assert_batch_invariant(scaled, TOKENS.round(), LENGTHS, gradients=True)


class Layer(nn.Module):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return blockwise(x, mask)


def test_modules_and_devices() -> None:
    assert_batch_invariant(Layer(), TOKENS, LENGTHS, device="cpu")


def test_of_what_is_not_finite_nothing_can_be_said() -> None:
    with pytest.raises(AssertionError, match="document 0 alone is not finite"):
        assert_batch_invariant(lambda x, mask: x / 0, torch.zeros(9, 2), [4, 5], block_size=8)


def test_the_sign_of_zero_is_a_bit() -> None:
    with pytest.raises(AssertionError, match=r"document 0 .* 8 of 8 numbers"):
        assert_batch_invariant(
            lambda x, documents: x * 0 * (1 - 2 * (len(documents.lengths[0]) > 1)), torch.ones(9, 2), [4, 5], block_size=8
        )


UNFIT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"function": 3}, OperandError, "wanted a function and a tensor"),
    ({"x": [1, 2]}, OperandError, "wanted a function and a tensor"),
    ({"lengths": [9]}, LoweringError, "two or more documents"),
    ({"lengths": [4, 4]}, LoweringError, re.escape("got [9, 2] for the lengths [4, 4]")),
    ({"x": torch.zeros(())}, LoweringError, "two or more documents"),
    ({"function": lambda x: x}, OperandError, "a parameter mask or documents without a default"),
    ({"function": lambda x, mask=None: x}, OperandError, r"as your code does, e.g. lambda x, mask: function\(x, mask\)"),
    ({"function": lambda x, documents, mask: x.tolist(7)}, OperandError, r"\(x, documents=documents, mask=mask\): TypeError"),
    ({"function": lambda x, mask: fm.key_padding(keep=mask)}, OperandError, r"keep must hold(?s:.*)mask is the flexmask mask"),
    ({"function": lambda x, mask: None}, OperandError, "must give a tensor"),
    ({"function": lambda x, mask: x[:, 1:]}, LoweringError, re.escape("[B, length, ...] = [1, 8]")),
    ({"function": lambda x, mask: torch.rand_like(x)}, ExpressionError, "two outputs for one input"),
    ({"x": torch.arange(9), "gradients": True}, OperandError, "floating point"),
    ({"mask": 3}, OperandError, "mask must be a Mask, its text or a mask_mod"),
]


@pytest.mark.parametrize(("changed", "kind", "wanted"), UNFIT, ids=[wanted for _, _, wanted in UNFIT])
def test_what_cannot_be_checked(changed: dict[str, Any], kind: type[Exception], wanted: str) -> None:
    given: dict[str, Any] = {"function": lambda x, mask: x, "x": torch.zeros(9, 2), "lengths": [4, 5], "block_size": 8} | changed
    with pytest.raises(kind, match=wanted):
        assert_batch_invariant(given.pop("function"), given.pop("x"), given.pop("lengths"), **given)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("block_size", [64, 1], ids=["aligned", "anywhere"])
def test_compiled_attention(block_size: int) -> None:
    """FlexAttention's kernels give the same bits where documents begin at their blocks, and other bits where they do not."""
    torch.compiler.reset()

    def compiled(x: Tensor, mask: Mask) -> Tensor:
        block_mask = mask.block_mask(x.shape[1], block_size=64, separate_full_blocks=False)
        return attend(x, lambda query, key, value: fm.attention(query, key, value, block_mask, backend="flex"))

    given: Any = (compiled, TOKENS[:200], [70, 130])
    if block_size == 64:
        assert_batch_invariant(*given, mask=fm.full(), block_size=block_size)
        return
    with pytest.raises(AssertionError, match="depends on its packing"):
        assert_batch_invariant(*given, mask=fm.full(), block_size=block_size)
