"""attention-gym's score mods in the attention module, against softmax written out, outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attn_gym.mods import generate_alibi_bias, generate_tanh_softcap
from torch import Tensor

import flexmask

HEADS, LENGTH, WIDTH = 4, 200, 32


def alibi(scores: Tensor) -> Tensor:
    """Each head's slope times how far the key stands behind the query."""
    slopes = torch.tensor([2.0 ** (-(head + 1) * 8 / HEADS) for head in range(HEADS)], dtype=scores.dtype)
    place = torch.arange(LENGTH, dtype=scores.dtype)
    return scores + slopes[:, None, None] * (place[None, :] - place[:, None])


def capped(scores: Tensor) -> Tensor:
    return 3 * torch.tanh(scores / 3)


@pytest.mark.parametrize(
    ("score_mod", "written"),
    [(generate_alibi_bias(HEADS), alibi), (generate_tanh_softcap(3), capped)],
    ids=["alibi", "softcap"],
)
def test_score_mods(score_mod: Callable[..., Tensor], written: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer = flexmask.MultiheadFlexAttention(
        WIDTH, WIDTH, HEADS, score_mod=score_mod, mask="causal & key_padding([200, 150])", dtype=torch.float64
    )
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    out, query, key = layer(x, return_qk=True)
    value = layer.in_proj(x)[..., 2 * WIDTH :].unflatten(-1, (HEADS, -1)).transpose(1, 2)
    place, real = torch.arange(LENGTH), torch.tensor([200, 150])
    visible = (place <= place[:, None]) & (place < real[:, None, None, None])
    scores = written(query @ key.mT / math.sqrt(WIDTH // HEADS)).masked_fill(~visible, -math.inf)
    wanted = layer.out_proj((torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-10)
    found, true = (torch.autograd.grad(one.square().sum(), x, retain_graph=True)[0] for one in (out, wanted))
    torch.testing.assert_close(found, true, rtol=1e-8, atol=1e-9)
