"""attention-gym's picture of attention scores for a mask of flexmask."""

from __future__ import annotations

from pathlib import Path

import attn_gym.utils
import matplotlib as mpl
import pytest
import torch
from flexmask_attention_gym import visualize_attention_scores
from matplotlib.image import imread

import flexmask

mpl.use("Agg")

#: attention-gym hands matplotlib a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def scores(heads: int = 1, q_len: int = 4, kv_len: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, heads, q_len, 8), torch.randn(2, heads, kv_len, 8)


def test_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query, key = scores()
    visualize_attention_scores(query, key, flexmask.causal(), path=tmp_path / "scores", name="causal")
    assert imread(tmp_path / "scores.png").shape[2] == 4
    assert "Visualization saved as" in capsys.readouterr().out


def test_text_and_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    visualize_attention_scores(*scores(), "gym_sliding_window(left=1)", name="window")
    assert (tmp_path / "window.png").exists()


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The array that attention-gym works out from what it is given, for one head of one sequence."""
    drawn = []
    create = attn_gym.utils.create_score_mod

    def kept(*args: object, **kwargs: object) -> torch.Tensor:
        array: torch.Tensor = create(*args, **kwargs)
        drawn.append(array)
        return array

    monkeypatch.setattr(attn_gym.utils, "create_score_mod", kept)
    query, key = scores(heads=2)
    mask = flexmask.per_head([flexmask.causal(), flexmask.sliding_window(left=1, right=1)]) & flexmask.key_padding([2, 5])
    visualize_attention_scores(query, key, mask, path=tmp_path / "a.png", batch_idx=1, head_idx=1)
    assert torch.equal(drawn.pop()[0, 0], mask.dense(4, 6)[1, 1])

    def doubled(score: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        return score * 2

    visualize_attention_scores(query, key, mask, score_mod=doubled, path=tmp_path / "b.png", scale=1.0)
    torch.testing.assert_close(drawn[0][0, 0], 2 * query[0, 0] @ key[0, 0].T)
    assert torch.equal(drawn[1][0, 0], mask.dense(4, 6)[0, 0])


def test_a_mask_that_does_not_fit() -> None:
    with pytest.raises(flexmask.errors.FlexmaskError, match="kv_len"):
        visualize_attention_scores(*scores(), flexmask.key_padding([9, 9]))
