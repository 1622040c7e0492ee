"""Data of a mask that is written between the forward and the backward pass: the gradient of the old data, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import flexmask as fm
from flexmask.errors import LoweringError

BATCH, LENGTH = 2, 12
WRITTEN = "modified by an inplace operation: the Tensor .* was written after the forward pass"


class Holder:
    """A ``mask_mod`` that reads an attribute."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.ids[b, q] >= self.ids[b, kv]


def traced(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: ids[b, q] >= ids[b, kv]


def opaque(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: torch.sin(ids[b, q] * ids[b, kv]) >= 0


def block_mask(mask_mod: Callable[..., Tensor]) -> Any:
    return create_block_mask(mask_mod, BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)


def ids() -> Tensor:
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 5 % 7


def ancestors() -> Tensor:
    return torch.eye(LENGTH, dtype=torch.bool).repeat(BATCH, 1, 1)


#: Masks that are evaluated cell by cell, from their data.
MASKS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any]]] = {
    "from_dense": (lambda: torch.rand(BATCH, LENGTH, LENGTH) < 0.5, fm.from_dense),
    "a comparison": (ids, lambda t: fm.table(t)[fm.b, fm.q] >= fm.table(t)[fm.b, fm.kv]),
    "eviction": (lambda: ids() + 3, lambda t: fm.masks.eviction(t)),
    "tree": (ancestors, lambda t: fm.masks.tree(ancestors=t)),
    "a mask_mod": (ids, traced),
    "an opaque call": (ids, opaque),
    "an object": (ids, Holder),
    "a BlockMask": (ids, lambda t: block_mask(traced(t))),
    "a BlockMask of an object": (ids, lambda t: block_mask(Holder(t))),
}


def inputs() -> tuple[Tensor, Tensor]:
    """Query, key and value in one tensor, and a gradient of the output."""
    shape = BATCH, 2, LENGTH, 4
    return torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)


def attend(x: Tensor, mask: Any, **options: Any) -> Tensor:
    out: Tensor = fm.attention(x, x, x, mask, backend="sdpa", **options)
    return out


def raise_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * 2


@pytest.mark.parametrize(
    "options", [{}, {"score_mod": raise_score}, {"dropout_p": 0.3, "dropout_seed": 1}], ids=["plain", "score_mod", "dropout"]
)
@pytest.mark.parametrize("name", MASKS)
def test_cells_are_not_computed_from_other_data(name: str, options: dict[str, Any]) -> None:
    make, mask = MASKS[name]
    data, (x, grad) = make(), inputs()
    out = attend(x, mask(data), **options)
    torch.autograd.grad(out, x, grad, retain_graph=True)
    data.copy_(data.flip(-1))
    with pytest.raises(LoweringError, match=WRITTEN):
        torch.autograd.grad(out, x, grad)


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return ids()


def write_in_inference_mode(data: Tensor) -> None:
    with torch.inference_mode():
        data.copy_(data.flip(-1))


#: Writes that torch's version counter does not count, and the data.
UNCOUNTED: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], object]]] = {
    "another memory": (ids, lambda data: setattr(data, "data", data.flip(-1))),
    "inference mode": (in_inference_mode, write_in_inference_mode),
}


@pytest.mark.parametrize("name", ["a comparison", "eviction", "an opaque call", "a BlockMask"])
@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_without_a_version(write: str, name: str) -> None:
    make, change = UNCOUNTED[write]
    data, (x, grad) = make(), inputs()
    out = attend(x, MASKS[name][1](data))
    torch.autograd.grad(out, x, grad, retain_graph=True)
    change(data)
    with pytest.raises(LoweringError, match=WRITTEN):
        torch.autograd.grad(out, x, grad)


@pytest.mark.parametrize("options", [{}, {"score_mod": raise_score}], ids=["plain", "score_mod"])
def test_second_derivatives(options: dict[str, Any]) -> None:
    data, (x, grad) = ids(), inputs()
    (first,) = torch.autograd.grad(attend(x, traced(data), **options), x, grad, create_graph=True)
    data.copy_(data.flip(-1))
    with pytest.raises(LoweringError, match=WRITTEN):
        torch.autograd.grad(first, x, grad)


def test_positions_of_the_queries() -> None:
    offset, (x, grad) = torch.tensor([0, 1]), inputs()
    out = attend(x, (fm.q - fm.kv) % 3 == 0, q_offset=offset)
    offset += 1
    with pytest.raises(LoweringError, match=WRITTEN):
        torch.autograd.grad(out, x, grad)


@pytest.mark.parametrize("options", [{}, {"score_mod": raise_score}, {"dropout_p": 0.3}], ids=["plain", "score_mod", "dropout"])
def test_positions_of_key_intervals_are_kept(options: dict[str, Any]) -> None:
    offset, (x, grad) = torch.tensor([0, 1]), inputs()
    out = attend(x, "causal", q_offset=offset, **options)
    (want,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    offset += 1
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], want)


def test_data_of_a_score_mod() -> None:
    bias, (x, grad) = torch.randn(LENGTH), inputs()
    out = attend(x, "causal", score_mod=lambda score, b, h, q, kv: score + bias[kv])
    bias.zero_()
    with pytest.raises(LoweringError, match=WRITTEN):
        torch.autograd.grad(out, x, grad)


def test_layers_that_share_a_mask() -> None:
    make, mask = MASKS["from_dense"]
    data, (x, grad) = make(), inputs()
    with fm.MaskCache():
        out = attend(attend(x, mask(data)), mask(data))
        data.copy_(~data)
        again = attend(x, mask(data))
        with pytest.raises(LoweringError, match=WRITTEN):
            torch.autograd.grad(out, x, grad)
        data.copy_(data.clone())  # the same values, of which the cache has a result
        torch.autograd.grad(attend(x, mask(data)), x, grad)
    with pytest.raises(LoweringError, match=WRITTEN):
        torch.autograd.grad(again, x, grad)


def test_a_module_with_a_cache() -> None:
    layer, cache, data = fm.MultiheadFlexAttention(4, 4, 2), fm.KVCache(LENGTH), ids()
    x = torch.randn(BATCH, LENGTH, 4)
    mask = fm.table(data)[fm.b, fm.q] >= fm.table(data)[fm.b, fm.kv]
    layer(x[:, :8], mask & fm.causal(), cache=cache)
    out = layer(x[:, 8:], mask & fm.causal(), cache=cache)
    data.copy_(data.flip(-1))
    with pytest.raises(LoweringError, match=WRITTEN):
        out.sum().backward()


@pytest.mark.parametrize("score_mod", [None, raise_score])
def test_key_intervals_of_a_lowered_mask(score_mod: Any) -> None:
    lowered, (x, grad) = fm.plan("causal & sliding_window(size=3)", LENGTH)(), inputs()
    (first,) = torch.autograd.grad(attend(x, lowered, score_mod=score_mod), x, grad, create_graph=True)
    lowered.bounds.zero_()
    with pytest.raises((LoweringError, RuntimeError), match="modified by an inplace operation"):
        torch.autograd.grad(first, x, grad)


def test_masks_of_key_intervals_keep_what_they_need() -> None:
    data, (x, grad) = torch.arange(LENGTH) // 4, inputs()
    cells = data[:, None] == data
    (want,) = torch.autograd.grad(scaled_dot_product_attention(x, x, x, cells), x, grad)
    out = attend(x, fm.document(data))
    data.zero_()
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], want)


@pytest.mark.slow
def test_compiled_code_keeps_what_it_needs() -> None:
    data, (x, grad) = torch.rand(BATCH, LENGTH, LENGTH) < 0.5, inputs()
    data[..., 0] = True
    (want,) = torch.autograd.grad(scaled_dot_product_attention(x, x, x, data[:, None]), x, grad)
    out = torch.compile(lambda x: attend(x, fm.from_dense(data)), backend="aot_eager", fullgraph=True)(x)
    data.fill_(True)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], want)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mask", [fm.key_padding, fm.from_dense], ids=["key intervals", "cells"])
def test_tensors_that_a_checkpoint_takes_are_not_read_anew(mask: Callable[[Tensor], fm.Mask], use_reentrant: bool) -> None:
    """Torch sees writes to its positional arguments; what the function captures it would read again, as of any function."""
    data = torch.tensor([9, 12]) if mask is fm.key_padding else torch.rand(BATCH, LENGTH, LENGTH) < 0.5

    def layer(x: Tensor, data: Tensor) -> Tensor:
        return attend(x, mask(data))

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        x, grad = inputs()
        return checkpoint(layer, x, data, use_reentrant=use_reentrant), x, grad

    out, x, grad = outputs()
    out.backward(grad)
    assert x.grad is not None
    wanted = x.detach().requires_grad_()
    torch.testing.assert_close(x.grad, torch.autograd.grad(layer(wanted, data), wanted, grad)[0])
    out, x, grad = outputs()
    data.copy_(data.flip(-1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)
