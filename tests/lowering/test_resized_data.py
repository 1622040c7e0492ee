"""A tensor under a mask that takes another shape or dtype: an error wherever the mask is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexmask as fm
from flexmask.errors import LoweringError

LENGTH = 6
X = torch.zeros(1, 1, LENGTH, 2)
CHANGED = r"was torch.int64\[6\] when that was made, and is torch.int"

#: How to change the shape or the dtype.
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "more values": lambda ids: setattr(ids, "data", torch.arange(8)),
    "another axis": lambda ids: setattr(ids, "data", torch.zeros(1, LENGTH, dtype=torch.int64)),
    "another dtype": lambda ids: setattr(ids, "data", ids.int()),
    "resized": lambda ids: ids.resize_(4),
    "set": lambda ids: ids.set_(torch.arange(5).untyped_storage(), 0, (5,), (1,)),
}

#: Masks of ids, with an analysis that equal masks share, with one of their own, and with an opaque call.
MASKS: dict[str, Callable[[Tensor], fm.Mask]] = {
    "shared form": lambda ids: fm.causal() & fm.document(ids),
    "literal data": lambda ids: fm.document(ids) & fm.key_padding([6]),
    "opaque": lambda ids: fm.from_mask_mod(lambda b, h, q, kv: torch.sin(ids[q] - ids[kv]) > 0),
}

#: What reads the data of a mask.
USES: dict[str, Callable[[fm.Mask], object]] = {
    "dense": lambda mask: mask.dense(LENGTH),
    "rows": lambda mask: mask.rows(LENGTH),
    "block_mask": lambda mask: mask.block_mask(LENGTH),
    "attention": lambda mask: fm.attention(X, X, X, mask),
    "plan": lambda mask: mask.plan(LENGTH)(),
    "to": lambda mask: mask.to("cpu"),
}


@pytest.mark.parametrize("change", ["more values", "another axis"])
def test_a_module_with_a_cache(change: str) -> None:
    """Data may have more values than a cache has tokens, so that the step itself would take them."""
    ids = torch.zeros(LENGTH, dtype=torch.int64)
    layer, cache = fm.MultiheadFlexAttention(4, 4, 1, mask=fm.causal() & fm.document(ids)), fm.KVCache(LENGTH)
    layer(torch.zeros(1, 2, 4), cache=cache)
    CHANGES[change](ids)
    with pytest.raises(LoweringError, match=CHANGED):
        layer(torch.zeros(1, 2, 4), cache=cache)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("change", CHANGES)
def test_changes(change: str, name: str, used: bool) -> None:
    ids = torch.zeros(LENGTH, dtype=torch.int64)
    mask = MASKS[name](ids)
    if used:
        mask.dense(LENGTH)
    CHANGES[change](ids)
    with pytest.raises(LoweringError, match=CHANGED):
        mask.dense(LENGTH)


@pytest.mark.parametrize("use", USES)
def test_uses(use: str) -> None:
    ids = torch.zeros(LENGTH, dtype=torch.int64)
    mask = fm.document(ids)
    with fm.MaskCache():
        USES[use](mask)
        ids.data = torch.arange(8)
        with pytest.raises(LoweringError, match=CHANGED):
            USES[use](mask)


def test_a_plan_that_has_a_graph() -> None:
    ids = torch.zeros(LENGTH, dtype=torch.int64)
    plan = fm.document(ids).plan(LENGTH)
    plan()
    ids.data = torch.arange(8)
    with pytest.raises(LoweringError, match=CHANGED):
        plan()


@pytest.mark.slow
def test_compiled_code() -> None:
    """One graph serves all lengths, with the sizes that the data has: those that do not fit are an error."""
    compiled = torch.compile(lambda x, mask: fm.attention(x, x, x, mask), backend="eager", fullgraph=True)
    for length in (6, 8):
        ids, x = torch.zeros(length, dtype=torch.int64), torch.randn(1, 1, length, 2)
        mask = fm.document(ids)
        torch.testing.assert_close(compiled(x, mask), scaled_dot_product_attention(x, x, x))
    ids.data = torch.arange(9)
    with pytest.raises(Exception, match="has 9 values along q, but q_len is 8"):
        compiled(x, mask)
    x = torch.randn(1, 1, 9, 2)
    torch.testing.assert_close(compiled(x, mask), x)  # each token is a document
    ids.data = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(Exception, match="its shape and dtype may not: make the mask again"):
        compiled(x, mask)
