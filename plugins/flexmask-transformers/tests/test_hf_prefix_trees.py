"""Samples that share prefixes: with the tree as a mask each is what it is alone, and positions alone are no documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flexmask_transformers import use_mask
from hf_models import pair, tokens
from test_hf_masks import positions
from test_hf_models import CLOSE, documents_alone
from torch.testing import assert_close

from flexmask import b, kv, q, table
from flexmask.errors import LoweringError
from flexmask.packing import pack_prefixes

SAMPLES = [[5, 9, 3, 7], [5, 9, 3, 8, 4], [5, 9, 6], [11, 12], [5, 9, 3, 8, 4, 10, 13]]
BRANCHES = "position_ids go back, but not to the position at which the row begins.*prefix_tree"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3"])
def test_each_sample_is_what_it_is_alone(name: str) -> None:
    eager, ours = pair(name)
    packed = pack_prefixes(SAMPLES)
    depth, window = table(packed.position_ids), getattr(ours.config, "sliding_window", None) or 1000
    within = packed.mask & (depth[b, kv] > depth[b, q] - window)
    with use_mask(ours, {"full_attention": packed.mask, "sliding_attention": within}, combine="replace"):
        found = ours(packed.tokens, position_ids=packed.position_ids).logits
    for logits, sample in zip(packed.gather(found), SAMPLES, strict=True):
        assert_close(logits, eager(torch.tensor([sample])).logits[0], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt2"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_branches_are_no_documents(name: str, use_cache: bool) -> None:
    packed = pack_prefixes(SAMPLES)
    ours = pair(name)[1]
    with pytest.raises(LoweringError, match=BRANCHES):
        ours(packed.tokens, position_ids=packed.position_ids, use_cache=use_cache)
    with pytest.raises(LoweringError, match=BRANCHES), use_mask(ours, packed.mask):
        ours(packed.tokens, position_ids=packed.position_ids, use_cache=use_cache)


def test_branches_in_a_graph() -> None:
    packed = pack_prefixes(SAMPLES)
    compiled: Any = torch.compile(pair("llama")[1], backend="aot_eager")
    with pytest.raises(RuntimeError, match=BRANCHES):
        compiled(packed.tokens, position_ids=packed.position_ids, use_cache=False)


def test_documents_may_begin_at_any_position() -> None:
    """A row that begins inside a document, and one whose documents all begin at 3."""
    eager, ours = pair("llama")
    ids, lengths = tokens(1), (5, 4, 3)
    begun = positions(*lengths)
    begun[:, :5] += 7
    for given in (begun, positions(*lengths) + 3):  # rotary positions count by differences
        assert_close(ours(ids, position_ids=given).logits, documents_alone(eager, ids, lengths), **CLOSE)
