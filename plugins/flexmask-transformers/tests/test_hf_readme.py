"""The README runs as it stands, and its table is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import flexmask_transformers
import pytest
import torch
import transformers
from hf_models import TEXT
from transformers import masking_utils

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning")
def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 6
    assert len(blocks[0].strip().split("\n")) <= 15
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("use_cpu=True", "use_cpu=True, disable_tqdm=True"), names)
    printed = capsys.readouterr().out
    assert "causal & key_padding(keep=<bool[2, 6]>)" in printed
    assert "causal & document(ids=<int64[1, 6]>)\ncausal\n" in printed
    assert "flexmask  position_ids, with a cache                  isolated" in printed
    assert re.search(r"sdpa      position_ids, with a cache                  LEAKS by [\d.e-]+ into positions 5-15", printed)


def text_of(make: Any, **options: Any) -> str:
    sizes = {**TEXT, "sliding_window": 4, "attention_chunk_size": 4}
    config = transformers.LlamaConfig(**sizes, attn_implementation="flexmask")
    arguments = {"inputs_embeds": torch.empty(2, 8, 1), "attention_mask": None, "past_key_values": None, **options}
    return str(flexmask_transformers.to_mask(make(config=config, **arguments)))


SPANS = torch.tensor([[-1, 0, 0, -1, 1, 1, 1, -1]] * 2)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        ("create_causal_mask", {}, "causal"),
        ("create_sliding_window_causal_mask", {}, "sliding_window(left=3, right=0)"),
        ("create_bidirectional_mask", {}, "full"),
        ("create_bidirectional_sliding_window_mask", {}, "sliding_window(left=4, right=4)"),
        (
            "create_chunked_causal_mask",
            {},
            "((kv - <left_padding: int64[2]>[b]) // 4 == (q - <left_padding: int64[2]>[b]) // 4) & causal",
        ),
        ("create_causal_mask", {"block_sequence_ids": SPANS}, "bidirectional_spans(ids=<block_sequence_ids: int64[2, 8]>)"),
        ("create_causal_mask", {"or_mask_function": lambda b, h, q, kv: kv < 2}, "prefix_lm(prefix_lengths=2)"),
        ("create_causal_mask", {"and_mask_function": lambda b, h, q, kv: kv < 2}, "causal & (kv < 2)"),
    ],
)
def test_the_table_of_masks(make: str, options: dict[str, Any], text: str) -> None:
    if "block_sequence_ids" in options and transformers.__version__ == "5.4.0":
        pytest.skip("transformers 5.4 has other arguments for images")
    assert text_of(getattr(masking_utils, make), **options) == text
