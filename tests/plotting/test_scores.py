"""Attention weights against torch's attention, and their pictures: per head, averaged, with numbers where they fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.colors import to_rgb
from torch import Tensor

import flexmask as fm
from flexmask import Mask, MultiheadFlexAttention
from flexmask.errors import FlexmaskError, LoweringError, OperandError, RenderError
from flexmask.plotting.mpl import plot_score_panels, plot_scores
from flexmask.plotting.palette import HIDDEN
from flexmask.plotting.scores import score_picture, score_sheet

MASK = fm.causal() & fm.key_padding(lengths=[3, 6])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def softmax_over(query: Tensor, key: Tensor, cells: Tensor, scale: float) -> list[list[float]]:
    """The weights of one head, by loops."""
    rows = []
    for q in range(query.shape[0]):
        scores = {kv: scale * float(query[q] @ key[kv]) for kv in range(key.shape[0]) if cells[q, kv]}
        total = sum(np.exp(score) for score in scores.values())
        rows.append([float(np.exp(scores[kv]) / total) if kv in scores else 0.0 for kv in range(key.shape[0])])
    return rows


@pytest.mark.parametrize("scale", [None, 0.3])
def test_weights_are_those_of_a_softmax(scale: float | None) -> None:
    query, key = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8, seed=1)
    mask = MASK & (fm.q != 2)  # a query without keys
    found = fm.backends.attention_weights(query, key, mask, scale=scale)
    for b in range(2):
        for h in range(4):
            wanted = softmax_over(query[b, h], key[b, h // 2], mask.dense(6)[b, 0], 8**-0.5 if scale is None else scale)
            assert torch.allclose(found[b, h], torch.tensor(wanted), atol=1e-6)
    assert found[:, :, 2].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_times_values_are_attention(dtype: torch.dtype) -> None:
    query, key, value = (drawn(1, 3, 7, 4, seed=seed).to(dtype) for seed in range(3))
    weights = fm.backends.attention_weights(query, key, "sliding_window(size=3)")
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    out = fm.attention(query, key, value, "sliding_window(size=3)")
    assert torch.allclose(
        weights @ value.to(weights.dtype), out.to(weights.dtype), atol=0.02 if dtype == torch.bfloat16 else 1e-6
    )


def test_a_score_mod_and_an_offset_count() -> None:
    query, key = drawn(1, 2, 2, 4), drawn(1, 2, 6, 4, seed=1)

    def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - (h + 1) * (q_idx + 4 - kv_idx)

    found = fm.backends.attention_weights(query, key, fm.causal(), score_mod=nearer, q_offset=4)
    scores = query @ key.transpose(-1, -2) / 2
    for h in range(2):
        for q in range(2):
            biased = scores[0, h, q, : q + 5] - torch.tensor([(h + 1) * (q + 4 - kv) for kv in range(q + 5)])
            assert torch.allclose(found[0, h, q], F.pad(biased.softmax(-1), (0, 1 - q)), atol=1e-6)


def test_the_module_gives_its_weights() -> None:
    torch.manual_seed(0)
    layer = MultiheadFlexAttention(8, 8, 4, n_kv_heads=2, mask="causal & key_padding(lengths)", scale=0.7, dropout=0.5)
    x = torch.randn(2, 6, 8)
    state = torch.get_rng_state()
    found = layer.attention_weights(x, lengths=[3, 6])
    assert torch.equal(torch.get_rng_state(), state)
    _, query, key = layer(x, lengths=[3, 6], return_qk=True)
    assert torch.equal(found, fm.backends.attention_weights(query, key, MASK, scale=0.7))
    assert not found.requires_grad
    crossed = layer.attention_weights(x, "key_padding(lengths)", context=torch.randn(2, 4, 8), lengths=[1, 4])
    assert crossed.shape == (2, 4, 6, 4)
    assert torch.equal(crossed[0].sum((0, 1)) > 0, torch.tensor([True, False, False, False]))


# ---------------------------------------------------------------- pictures


def example() -> Tensor:
    return fm.backends.attention_weights(3 * drawn(2, 4, 6, 8), drawn(2, 2, 6, 8, seed=1), MASK)


def test_one_head_and_the_mean() -> None:
    weights = example()
    one, mean = score_picture(weights, MASK, batch=1, head=2), score_picture(weights, MASK, batch=1)
    assert one.scores is not None
    assert mean.scores is not None
    assert np.array_equal(one.scores.values, weights[1, 2])
    assert np.allclose(mean.scores.values, weights[1].mean(0))
    assert (one.scores.averaged, mean.scores.averaged) == (None, 4)
    assert np.array_equal(one.cells == 0, MASK.dense(6)[1, 0])


def test_numbers_and_colors_are_the_weights() -> None:
    weights = example()
    ax = plot_scores(weights, MASK, head=0, tokens="a b c d e f")
    written = {
        (int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in ax.texts if "." in text.get_text()
    }
    for q in range(6):
        for kv in range(6):
            expected = (
                f"{float(weights[0, 0, q, kv]):.2f}".removeprefix("0").replace("1.00", "1.0") if kv <= q and kv < 3 else None
            )
            assert written.get((q, kv)) == expected
    image = ax.images[0].get_array()
    assert image is not None
    lightness = image.sum(-1)
    assert np.allclose(image[0, 3], to_rgb(HIDDEN), atol=0.01)
    seen = [(float(weights[0, 0, q, kv]), -float(lightness[q, kv])) for q in range(6) for kv in range(6) if kv <= q and kv < 3]
    assert [weight for weight, _ in sorted(seen, key=lambda pair: pair[1])] == pytest.approx(sorted(w for w, _ in seen), abs=0.02)
    assert [label.get_text() for label in ax.get_yticklabels()] == list("abcdef")


def test_large_tables_are_averaged_without_numbers() -> None:
    weights = fm.backends.attention_weights(drawn(1, 1, 1500, 4), drawn(1, 1, 2100, 4, seed=1))
    shown = score_picture(weights)
    assert shown.scores is not None
    assert shown.step == (2, 3)
    assert np.allclose(shown.scores.values[7, 9], weights[0, 0, 14:16, 27:30].mean(), atol=1e-7)
    assert not [text for text in plot_scores(weights).texts if "." in text.get_text()]


def test_heads_stand_next_to_each_other_on_one_scale() -> None:
    weights = example()
    shown = score_sheet(weights, MASK, batch="all", head=[0, 3])
    assert shown.titles == ("sequence 0, head 0", "sequence 0, head 3", "sequence 1, head 0", "sequence 1, head 3")
    assert {picture.scores.most for picture in shown.pictures if picture.scores} == {float(weights[:, [0, 3]].max())}
    figure = plot_score_panels(weights, MASK)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["head 0", "head 1", "head 2", "head 3"]


def test_the_mean_shows_what_any_head_sees() -> None:
    mask = fm.per_head([fm.causal(), fm.kv < 1])
    weights = fm.backends.attention_weights(drawn(1, 2, 4, 4), drawn(1, 2, 4, 4, seed=1), mask)
    assert np.array_equal(score_picture(weights, mask).cells == 0, fm.causal().dense(4)[0, 0])
    assert np.array_equal(score_picture(weights, mask, head=1).cells == 0, (fm.kv < 1).dense(4)[0, 0].expand(4, 4))


def test_later_queries() -> None:
    weights = fm.backends.attention_weights(drawn(1, 1, 2, 4), drawn(1, 1, 5, 4), fm.causal(), q_offset=3)
    shown = score_picture(weights, fm.causal(), q_offset=3, tokens="a b c d e")
    assert (shown.q_offset, shown.q_tokens) == (3, ("d", "e"))
    assert (shown.cells == 0).sum(1).tolist() == [4, 5]


W = torch.full((1, 2, 3, 3), 1 / 3)
REFUSED: list[tuple[str, Callable[[], object], type[FlexmaskError], str]] = [
    (
        "three axes",
        lambda: plot_scores(W[0]),
        OperandError,
        r"\[B, H, q_len, kv_len\], got torch.float32\[2, 3, 3\]",
    ),
    ("no tensor", lambda: plot_scores([1.0]), OperandError, "got list"),  # type: ignore[arg-type]
    ("integers", lambda: plot_scores(W.long()), OperandError, "floating-point"),
    ("head", lambda: plot_scores(W, head=2), RenderError, "head must be at most 1, got 2"),
    ("sequence", lambda: plot_scores(W, batch=-1), RenderError, "batch must be at least 0, got -1"),
    ("none", lambda: plot_scores(W[:, :, :0]), RenderError, "no weights"),
    (
        "no heads",
        lambda: plot_score_panels(W, head=[]),
        OperandError,
        r"head must be an index, a list .* got \[\]",
    ),
    ("not finite", lambda: plot_scores(W * torch.nan), RenderError, "finite"),
    ("mask", lambda: plot_scores(W, fm.key_padding([1, 2])), LoweringError, "batch"),
    ("query", lambda: fm.backends.attention_weights(W[0], W), OperandError, r"query must be a tensor \[B, H, length, d_head\]"),
    ("key", lambda: fm.backends.attention_weights(W, W[..., :2]), LoweringError, "does not fit"),
    ("heads", lambda: fm.backends.attention_weights(W, W[:, [0, 0, 0]]), LoweringError, "multiple"),
    (
        "too large",
        lambda: fm.backends.attention_weights(
            W.expand(9, 2, 3, 3).repeat(1, 1, 9999, 1), W.expand(9, 2, 3, 3).repeat(1, 1, 9999, 1)
        ),
        LoweringError,
        "GiB",
    ),
    ("BlockMask", lambda: fm.backends.attention_weights(W, W, fm.causal().block_mask(3)), OperandError, "BlockMask"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("attempt", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(attempt: Callable[[], object], error: type[FlexmaskError], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()


def test_a_mask_of_a_module_must_be_a_mask() -> None:
    layer = MultiheadFlexAttention(4, 4, 2)
    with pytest.raises(OperandError, match="BlockMask"):
        layer.attention_weights(torch.zeros(1, 3, 4), fm.causal().block_mask(3))  # type: ignore[arg-type]
    mask: Mask = fm.causal()
    assert layer.attention_weights(torch.zeros(1, 3, 4), mask)[0, 0].tolist()[0] == [1, 0, 0]
