"""Keys of a KVCache that were padding stay masked out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention
from flexmask.errors import LoweringError

PROMPT = torch.randn(2, 8, 6, dtype=torch.float64)
TOKEN = torch.randn(2, 1, 6, dtype=torch.float64)
RIGHT, LEFT = fm.causal() & fm.key_padding([5, 8]), fm.causal() & fm.key_padding(start=[3, 0])
NOT_PADDING = torch.tensor([[True] * 5 + [False] * 3 + [True], [True] * 9])
KEPT_LEFT = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
MIDDLE = torch.tensor([[1] * 5 + [0, 1, 0, 1], [1] * 9])


def step(prompt_mask: fm.Mask, mask: fm.Mask | None, change: Callable[[KVCache], None] = lambda cache: None) -> Tensor:
    """A prompt of 8 tokens, a change of the cache, and a token."""
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    module(PROMPT, prompt_mask, cache=cache)
    change(cache)
    out: Tensor = module(TOKEN, mask, cache=cache)
    return out


@pytest.mark.parametrize(
    ("prompt_mask", "mask", "where"),
    [
        (RIGHT, fm.causal(), "position 5 of sequence 0"),
        (RIGHT, fm.causal() & fm.key_padding([6, 9]), "position 5 of sequence 0"),
        (RIGHT, fm.causal() & fm.key_padding(keep=[[True] * 9, [True] * 9]), "position 5 of sequence 0"),
        (fm.causal() & fm.key_padding(6), fm.causal(), "position 6 of sequence 0"),
        (LEFT, fm.causal(), "position 0 of sequence 0"),
        (LEFT, fm.causal() & fm.key_padding(start=[2, 0]), "position 2 of sequence 0"),
        (fm.causal() & fm.key_padding(start=[0, 4]), fm.causal(), "position 0 of sequence 1"),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT.tolist()), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.key_padding(hide=1 - KEPT_LEFT), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal() & fm.key_padding(start=[2, 0]), "position 2 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=NOT_PADDING[:, :8]), fm.causal(), "position 5 of sequence 0"),
        (fm.causal() & fm.key_padding(hide=~NOT_PADDING[0, :8]), fm.causal(), "position 5 of sequence 0"),
        (RIGHT, fm.causal() & fm.key_padding(keep=MIDDLE), "position 6 of sequence 0"),
        (fm.causal() & fm.key_padding(keep=MIDDLE[:, :8]), fm.causal(), "position 5 of sequence 0"),
        ((fm.causal() & LEFT) | (fm.prefix_lm(2) & LEFT), fm.causal(), "position 0 of sequence 0"),
        (fm.per_head([fm.causal() & LEFT] * 3 + [LEFT]), fm.causal(), "position 0 of sequence 0"),
        (fm.from_mask_mod(lambda b, h, q, kv: (kv <= q) & (KEPT_LEFT[b, kv] != 0)), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.cross_length([8, 7]), fm.causal(), "position 7 of sequence 1"),
        (fm.causal() & fm.document([[-1, 0, 0, 0, 0, 0, 0, 0], [1] * 8]), fm.causal(), "position 0 of sequence 0"),
        (fm.causal() & fm.document(lengths=[[3, 5], [3, 3]], padding=True), fm.causal(), "position 6 of sequence 1"),
        (fm.per_document(fm.causal(), cu_seqlens=[0, 3, 5], padding=True), fm.causal(), "position 5 of sequence 0"),
    ],
)
def test_keys_that_were_padding_stay_masked_out(prompt_mask: fm.Mask, mask: fm.Mask | None, where: str) -> None:
    with pytest.raises(LoweringError, match=rf"{where}, which was padding.*truncate\(lengths\).*key_padding\(start=\.\.\.\)"):
        step(prompt_mask, mask)


def test_a_call_that_shows_padding_changes_nothing() -> None:
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    module(PROMPT, RIGHT, cache=cache)
    for _ in range(2):
        with pytest.raises(LoweringError, match="was padding"):
            module(TOKEN, fm.causal(), cache=cache)
    cache.truncate([5, 8])
    module(TOKEN, fm.causal(), cache=cache)


@pytest.mark.parametrize(
    ("prompt_mask", "mask", "change"),
    [
        (RIGHT, fm.causal(), lambda cache: cache.truncate([5, 8])),
        (RIGHT, fm.causal(), lambda cache: cache.truncate([2, 3])),
        (RIGHT, fm.causal() & fm.key_padding(keep=NOT_PADDING), lambda cache: None),
        (RIGHT, fm.causal() & fm.sliding_window(size=1), lambda cache: None),
        (LEFT, LEFT, lambda cache: None),
        (LEFT, fm.causal() & fm.key_padding(start=torch.tensor([4, 1])), lambda cache: None),
        (LEFT, fm.causal() & fm.key_padding(start=[0, 3]), lambda cache: cache.reorder(torch.tensor([1, 0]))),
        (LEFT, fm.causal(), lambda cache: cache.reorder(torch.tensor([1, 1]))),
        (LEFT, fm.causal(), lambda cache: cache.truncate(0)),
        (fm.causal() & fm.key_padding([20, 30]), fm.causal(), lambda cache: None),
        (fm.causal() & ~fm.key_padding([5, 8]), fm.causal(), lambda cache: None),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), LEFT, lambda cache: None),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal() & fm.sliding_window(size=3), lambda cache: None),
        (fm.causal() & fm.key_padding(keep=NOT_PADDING[:, :8]), fm.causal(), lambda cache: cache.truncate([5, 8])),
        (fm.causal() & fm.key_padding(keep=KEPT_LEFT), fm.causal(), lambda cache: cache.reorder(torch.tensor([1, 1]))),
        (fm.causal() & fm.key_padding(keep=torch.ones(2, 8)[0].bool()), fm.causal(), lambda cache: None),
        (fm.causal() | fm.key_padding(keep=KEPT_LEFT), fm.causal(), lambda cache: None),
    ],
)
def test_padding_that_is_not_shown_is_no_error(prompt_mask: fm.Mask, mask: fm.Mask, change: Callable[[KVCache], None]) -> None:
    assert step(prompt_mask, mask, change).shape == (2, 1, 8)


def test_padding_of_another_batch_is_the_librarys_error() -> None:
    with pytest.raises(LoweringError, match=r"3.*2|2.*3"):
        step(fm.causal() & fm.key_padding([5, 8, 4]), None)


@pytest.mark.parametrize("seed", range(6))
def test_padding_of_several_chunks_stays_masked_out(seed: int) -> None:
    """Chunks whose padding is anywhere, cut and reordered: an error exactly where a step shows a key that was padding."""
    random = torch.Generator().manual_seed(seed)
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    real: list[list[bool]] = [[], []]
    for length in (4, 3, 5):
        for own in real:
            own += (torch.rand(length, generator=random) < 0.8).tolist()
        keep = torch.tensor(real)
        module(PROMPT[:, :length], fm.causal() & fm.key_padding(keep=keep if seed % 2 else keep.long()), cache=cache)
    if seed in (2, 3):
        cache.truncate(9)
        real = [own[:9] for own in real]
    if seed in (3, 4):
        cache.reorder(torch.tensor([1, 0]))
        real.reverse()
    for _ in range(8):
        keep = torch.rand(2, len(real[0]) + 1, generator=random) < 0.5
        shows = any(
            shown and not was for own, row in zip(real, keep.tolist(), strict=True) for was, shown in zip(own, row, strict=False)
        )
        if shows:
            with pytest.raises(LoweringError, match="was padding"):
                module(TOKEN, fm.causal() & fm.key_padding(keep=keep), cache=cache)
        keep[:, :-1] &= torch.tensor(real)
        module(TOKEN, fm.causal() & fm.key_padding(keep=keep), cache=cache)
        cache.truncate(len(real[0]))


def test_the_padding_is_kept_up_to_its_last_position() -> None:
    """So a check does not grow with the sequence."""
    module, cache = MultiheadFlexAttention(6, 8, 4).double(), KVCache(16)
    module(PROMPT, fm.causal() & fm.key_padding(keep=KEPT_LEFT), cache=cache)
    for length in (9, 10, 11):
        module(TOKEN, LEFT, cache=cache)
        assert cache._padded is not None
        assert cache._padded.shape == (2, 3)
        assert cache.length == length


def test_data_that_ends_before_the_tokens_says_what_to_append() -> None:
    keep = torch.ones(2, 8, dtype=torch.int64)
    wanted = r"key_padding\(keep=<int64\[2, 8\]>\) has 8 values along kv, but .* position 9: append a 1 .*start=\.\.\."
    with pytest.raises(LoweringError, match=wanted):
        step(fm.causal(), fm.causal() & fm.key_padding(keep=keep))
    with pytest.raises(LoweringError, match=r"document\(ids=<int64\[2, 8\]>\) has 8 values along q.*: give values for all"):
        step(fm.causal(), fm.causal() & fm.document(keep))
