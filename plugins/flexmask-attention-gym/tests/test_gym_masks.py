"""Every mask against attention-gym's own generator with its own arguments: each cell, and each block."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any

import attn_gym.masks as gym
import flexmask_attention_gym.masks as package
import pytest
import torch
from attn_gym.masks.document_mask import length_to_offsets
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmask

MaskMod = Callable[..., torch.Tensor]

OFFSETS = torch.tensor([0, 3, 3, 8, 12])
PREFIXES = torch.tensor([0, 0, 0, 3])
MARKS = torch.tensor([True, False, False, True, False, False, False, False, False, False, False, True])
PARENTS = [-1, 0, 0, 1, 1, 2, 5]
SPANS = torch.tensor([[0, 3], [2, 9], [9, 9]])
TOPK = torch.tensor([[[[0, 2], [1, 0], [2, 1]], [[1, 1], [0, 2], [2, 2]]]] * 2)
TOPK[1] = TOPK[1].flip(0)
REAL = torch.tensor([4, 2, 3])


def noop(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return q_idx >= 0


def band(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return (q_idx - kv_idx).abs() <= 1


@dataclass
class Case:
    """A mask's text, the ``mask_mod`` that it must equal, and the lengths at which they are compared."""

    text: str
    mask_mod: MaskMod
    q_len: int = 12
    kv_len: int = 12
    batch: int = 1
    heads: int = 1


TREE = gym.build_tree_ancestor_matrix(PARENTS, device="cpu")
CASES = [
    Case("gym_causal", gym.causal_mask, 9, 13),
    Case("gym_sliding_window(left=3)", gym.generate_sliding_window(3)),
    Case("gym_sliding_window(size=4)", gym.generate_sliding_window(3)),
    Case("gym_sliding_window(left=0)", gym.generate_sliding_window(0), 7, 5),
    Case("gym_dilated_window(left=5, right=5, dilation=2)", gym.generate_dilated_sliding_window(5, 2), 11, 14),
    Case("gym_dilated_window(left=4, right=4, dilation=3)", gym.generate_dilated_sliding_window(4, 3)),
    Case(f"gym_global_window(is_global={MARKS.tolist()}, left=2, right=2)", gym.generate_global_sliding_window(2, MARKS)),
    Case("gym_prefix_lm(prefix_length=4)", gym.generate_prefix_lm_mask(4), 9, 13),
    Case("gym_prefix_lm(prefix_length=0)", gym.generate_prefix_lm_mask(0)),
    Case("gym_document(causal, cu_seqlens=[0, 3, 3, 8, 12])", gym.generate_doc_mask_mod(gym.causal_mask, OFFSETS)),
    Case("gym_document(full, lengths=[3, 0, 5, 4])", gym.generate_doc_mask_mod(noop, OFFSETS)),
    Case("gym_document(abs(q - kv) <= 1, lengths=[3, 0, 5, 4])", gym.generate_doc_mask_mod(band, OFFSETS)),
    Case(
        "gym_document(gym_prefix_lm(prefix_length=2), lengths=[7, 5])",
        gym.generate_doc_mask_mod(gym.generate_prefix_lm_mask(2), length_to_offsets([7, 5], "cpu")),
    ),
    Case("gym_causal_document(lengths=[3, 0, 5, 4])", gym.generate_packed_causal_doc_mask_mod(OFFSETS)),
    Case("gym_causal_document(cu_seqlens=[0, 3, 3, 8, 12])", gym.generate_packed_causal_doc_mask_mod(OFFSETS)),
    Case(
        "gym_shared_prefix(prefix_of=[0, 0, 0, 3], lengths=[3, 0, 5, 4])", gym.generate_shared_prefix_mask_mod(OFFSETS, PREFIXES)
    ),
    Case("gym_batchify(causal, size=5)", gym.batchify_mask_mod(gym.causal_mask, 5), 12, 14),
    Case("gym_batchify(sliding_window(left=1, right=1), size=4)", gym.batchify_mask_mod(band, 4)),
    Case(f"gym_jetspec_tree(parents={PARENTS}, prefix=3)", gym.generate_jetspec_tree_causal_mask_mod(3, TREE), 7, 10),
    Case(f"gym_jetspec_tree(ancestors={TREE.tolist()})", gym.generate_jetspec_tree_causal_mask_mod(0, TREE), 7, 9),
    Case("gym_jetspec_training(prefix=3, size=4)", gym.generate_jetspec_training_mask_mod(3, 4), 8, 11),
    Case("gym_block_diffusion(length=6, size=2)", gym.generate_block_diffusion_mask(6, 2)),
    Case("gym_block_diffusion(length=7, size=3)", gym.generate_block_diffusion_mask(7, 3), 14, 14),
    Case("gym_natten(canvas=[5, 5], kernel=[3, 3])", gym.generate_natten(5, 5, 3, 3), 25, 25),
    Case("gym_natten(canvas=[3, 5], kernel=[1, 3])", gym.generate_natten(canvas_w=5, canvas_h=3, kernel_w=3, kernel_h=1), 15, 15),
    Case("gym_natten(canvas=[5, 4], kernel=[3, 1])", gym.generate_natten(canvas_w=4, canvas_h=5, kernel_w=1, kernel_h=3), 20, 20),
    Case("gym_natten(canvas=[4, 4], kernel=[2, 2])", gym.generate_natten(4, 4, 2, 2), 16, 16),
    Case(
        "gym_tiled_natten(canvas=[4, 6], kernel=[3, 5], tile=[2, 3])",
        gym.generate_tiled_natten(W=6, H=4, K_W=5, K_H=3, T_W=3, T_H=2),
        24,
        24,
    ),
    Case("gym_morton_natten(canvas=[4, 4], kernel=[3, 3])", gym.generate_morton_natten(4, 4, 3, 3), 16, 16),
    Case(
        "gym_morton_natten(canvas=[2, 4], kernel=[1, 3])",
        gym.generate_morton_natten(canvas_w=4, canvas_h=2, kernel_w=3, kernel_h=1),
        8,
        8,
    ),
    Case(
        "gym_sta(canvas=[4, 6], kernel=[2, 6], tile=[2, 2], text=2)",
        gym.generate_sta_mask_mod_2d((4, 6), (2, 6), (2, 2), 2),
        26,
        27,
    ),
    Case("gym_sta(canvas=[4, 8], kernel=[4, 4], tile=[2, 2])", gym.generate_sta_mask_mod_2d((4, 8), (4, 4), (2, 2)), 32, 32),
    Case(
        "gym_sta(canvas=[3, 4, 2], kernel=[1, 2, 2], tile=[1, 2, 1], text=1)",
        gym.generate_sta_mask_mod_3d((3, 4, 2), (1, 2, 2), (1, 2, 1), 1),
        25,
        25,
    ),
    Case(
        "gym_svg_spatial(frame_length=4, width=2, prompt=3, sinks=True, round_to=3)",
        gym.generate_spatial_head_mask_mod(3, 5, 4, 2, True, 3),
        23,
        23,
    ),
    Case("gym_svg_spatial(frame_length=70, width=2)", gym.generate_spatial_head_mask_mod(0, 5, 70, 2), 140, 9),
    Case(
        "gym_svg_temporal(frame_length=6, frames=3, width=1, prompt=2)", gym.generate_temporal_head_mask_mod(2, 3, 6, 1), 20, 20
    ),
    Case(f"gym_flamingo(spans={SPANS.tolist()}, image_length=2)", gym.generate_vision_cross_attention_mask_mod(SPANS, 2), 10, 6),
    Case(f"gym_vsa(topk={TOPK.tolist()}, size=4)", gym.generate_vsa_mask_mod(TOPK, 4), batch=2, heads=2),
    Case(f"gym_vsa(topk={TOPK.tolist()}, size=4, sizes=[4, 2, 3])", gym.generate_vsa_mask_mod(TOPK, 4, REAL), batch=2, heads=2),
]


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.text[:60] for case in cases])


def cells(case: Case) -> torch.Tensor:
    """attention-gym's mask, one call for each cell."""
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    return torch.tensor([bool(case.mask_mod(*map(torch.tensor, cell))) for cell in product(*map(range, shape))]).reshape(shape)


@each(CASES)
def test_cells_are_those_of_attention_gym(case: Case) -> None:
    dense = flexmask.parse(case.text).dense(case.q_len, case.kv_len)
    assert torch.equal(dense.expand(case.batch, case.heads, -1, -1), cells(case))


def lists(mask: BlockMask) -> list[Any]:
    """The blocks of each row, partial and full; what lies behind the number of blocks is not defined."""
    found: list[Any] = []
    for numbers, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        assert numbers is not None
        assert indices is not None
        rows = zip(numbers.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
        found.append([sorted(row[:number]) for number, row in rows])
    return found


@each(CASES)
def test_blocks_are_those_of_create_block_mask(case: Case) -> None:
    lengths = (case.batch, case.heads, case.q_len, case.kv_len)
    wanted = create_block_mask(case.mask_mod, *lengths, device="cpu", BLOCK_SIZE=4)
    made = flexmask.parse(case.text).block_mask(case.q_len, case.kv_len, batch=case.batch, heads=case.heads, block_size=4)
    assert lists(made) == lists(wanted)


def test_every_generator_has_a_mask() -> None:
    generators = {name for name in dir(gym) if name.startswith("generate_") or name in {"causal_mask", "batchify_mask_mod"}}
    sources = "".join(inspect.getdoc(getattr(flexmask.masks, name)) or "" for name in package.__all__)
    assert [name for name in sorted(generators) if f"``{name}``" not in sources] == []
    assert {case.text.partition("(")[0] for case in CASES} == set(package.__all__)


@each(CASES)
def test_text_and_pickle_round_trip(case: Case) -> None:
    mask = flexmask.parse(case.text)
    assert flexmask.parse(str(mask)) == mask
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert torch.equal(again.dense(case.q_len, case.kv_len), mask.dense(case.q_len, case.kv_len))


@pytest.mark.parametrize(
    ("text", "values", "bound"),
    [
        ("gym_causal_document(cu_seqlens=starts)", {"starts": OFFSETS}, "gym_causal_document(cu_seqlens=[0, 3, 3, 8, 12])"),
        ("gym_document(document(ids), lengths=n)", {"ids": [0] * 12, "n": [5, 7]}, "gym_document(full, lengths=[5, 7])"),
        ("causal & gym_sliding_window(left=w)", {"w": 3}, "gym_sliding_window(left=3)"),
        ("gym_natten(canvas=c, kernel=[3, 3])", {"c": [3, 4]}, "gym_natten(canvas=[3, 4], kernel=[3, 3])"),
    ],
)
def test_parameters(text: str, values: dict[str, object], bound: str) -> None:
    mask = flexmask.parse(text)
    assert mask.params == tuple(sorted(values))
    assert torch.equal(mask.bind(**values).dense(12), flexmask.parse(bound).dense(12))


def test_tensors_stay_the_users_own() -> None:
    mask = flexmask.masks.gym_causal_document(cu_seqlens=OFFSETS)
    assert torch.equal(mask.dense(12)[0, 0], cells(Case("", gym.generate_packed_causal_doc_mask_mod(OFFSETS)))[0, 0])
    assert mask == flexmask.masks.gym_causal_document(cu_seqlens=OFFSETS)


REFUSED = [
    ("gym_sliding_window(left=-1)", "gym_sliding_window: left must be at least 0, got -1"),
    ("gym_sliding_window(left=[1])", "gym_sliding_window: left must be an integer"),
    ("gym_sliding_window", "give either left or size, got left=None and size=None"),
    ("gym_sliding_window(left=2, size=3)", "give either left or size"),
    (
        "gym_prefix_lm(1000000000000000000000000000000)",
        "gym_prefix_lm: prefix_length must be at most 2147483647, got 1000000000000000000000000000000",
    ),
    ("gym_sliding_window(size=0)", "gym_sliding_window: size must be at least 1, got 0"),
    ("gym_dilated_window(left=2, right=3, dilation=1)", "got left=2 and right=3; flexmask's dilated_window takes any"),
    ("gym_sliding_window(3)", "gym_sliding_window: .*left"),
    ("gym_sliding_window(left=q)", "gym_sliding_window: wanted a number or data, got the index expression q"),
    ("gym_document(causal)", "gym_document: give exactly one of lengths and cu_seqlens; got neither"),
    ("gym_document(causal, lengths=[2], cu_seqlens=[0, 2])", "got both"),
    ("gym_document(causal, lengths=[[2], [3]])", r"gym_document: lengths must have the axes \[documents\], got shape \[2, 1\]"),
    ("gym_document(causal, cu_seqlens=[1, 2])", "cu_seqlens must start with 0 and not fall"),
    ("gym_document(causal, lengths=[True, False])", "gym_document: lengths must be integers, got truth values"),
    ("gym_document(causal, lengths=[3, -1])", "lengths must not be negative"),
    ("gym_document(causal('lower_right'), lengths=[3])", "uses q_len or kv_len"),
    ("gym_document(3, lengths=[3])", "gym_document: wanted a mask first, got int 3"),
    ("gym_shared_prefix(prefix_of=[0], lengths=[3, 4])", "prefix_of must have one entry for 2 documents"),
    ("gym_global_window([2, 0], left=1, right=1)", "is_global must be boolean, or of 0 and 1"),
    ("gym_jetspec_tree(ancestors=[[2]])", "ancestors must be boolean, or of 0 and 1"),
    ("gym_jetspec_tree()", "exactly one of ancestors and parents"),
    ("gym_jetspec_tree(parents=[-1, 2, 0])", "the parent of node 1 must stand before it, got 2"),
    (
        "gym_jetspec_tree(ancestors=[[True, False]])",
        "attention-gym refuses this: ancestor_matrix must be square",
    ),
    ("gym_natten(canvas=[3], kernel=[3, 3])", r"gym_natten: canvas must be a list of 2 sizes, got \[3\]"),
    ("gym_natten(canvas=5, kernel=[3, 3])", "gym_natten: canvas must be data"),
    ("gym_sta(canvas=[4, 4], kernel=[4, 4], tile=[3, 2])", "Canvas height 4 is not divisible by tile height 3"),
    ("gym_sta(canvas=[4, 4], kernel=[4, 4, 4], tile=[2, 2])", "gym_sta: kernel must be a list of 2 sizes"),
    ("gym_tiled_natten(canvas=[4, 4], kernel=[3, 3], tile=[3, 2])", "must divide the canvas"),
    ("gym_flamingo(spans=[[0, 1, 2]], image_length=2)", r"\[images, 2\], got shape \[1, 3\]"),
    ("gym_vsa(topk=[[0]], size=2)", r"gym_vsa: topk must have the axes \[B, H, tiles, K\], got shape \[1, 1\]"),
]


def test_integers_of_any_size_are_taken() -> None:
    lengths = torch.tensor([5, 7], dtype=torch.uint8)
    assert torch.equal(
        flexmask.masks.gym_causal_document(lengths=lengths).dense(12),
        flexmask.masks.gym_causal_document(lengths=lengths.long()).dense(12),
    )


@pytest.mark.parametrize("ids", [[0, 0, 1, 1], torch.tensor([0, 0, 1, 1])], ids=["a list", "a tensor"])
def test_a_mask_within_with_data(ids: list[int] | torch.Tensor) -> None:
    """``gym_batchify`` lowers it, which needs the values."""
    mask = flexmask.masks.gym_batchify(flexmask.document(ids), size=4)
    row, chunk = torch.arange(8) % 4 // 2, torch.arange(8) // 4
    assert torch.equal(mask.dense(8)[0, 0], (row[:, None] == row) & (chunk[:, None] == chunk))


@pytest.mark.parametrize(("text", "wanted"), REFUSED, ids=[row[0] for row in REFUSED])
def test_bad_arguments_are_refused(text: str, wanted: str) -> None:
    with pytest.raises(flexmask.errors.TextError, match=wanted):
        flexmask.parse(text)


PICTURE = re.compile(r"``([^`\n]+)`` at ([^:\n]+)::\n\n((?: +[■⬚][ ■⬚]*\n?)+)")


@pytest.mark.parametrize("name", package.__all__)
def test_docstrings_draw_what_the_mask_says(name: str) -> None:
    document = (inspect.getdoc(getattr(package, name)) or "") + "\n"
    pictures = PICTURE.findall(document)
    assert "Predicate: " in document
    assert "Source: " in document
    assert pictures
    for text, shapes, drawing in pictures:
        lines = [re.split(r" {3,}", line.strip()) for line in drawing.rstrip().split("\n")]
        for column, shape in enumerate(re.findall(r"(\d+) x (\d+)", shapes)):
            drawn = [[cell == "■" for cell in line[column].split()] for line in lines if column < len(line)]
            q_len, kv_len = map(int, shape)
            assert drawn == flexmask.parse(text).dense(q_len, kv_len)[0, 0].tolist()


def test_the_package_is_a_plugin() -> None:
    (entry,) = [entry for entry in entry_points(group="flexmask.masks") if entry.name == "attention_gym"]
    assert entry.value == "flexmask_attention_gym.masks"
    assert sorted(package.__all__) == list(package.__all__) == [name for name in dir(flexmask.masks) if name.startswith("gym_")]


@pytest.mark.parametrize(("arguments", "said"), [(["list"], "gym_vsa("), (["list", "gym_sta"], "package flexmask-attention-gym")])
def test_listing_imports_neither_torch_nor_attention_gym(arguments: list[str], said: str) -> None:
    code = f"""
import sys
sys.argv = ["flexmask", *{arguments!r}]
from flexmask.cli import main
try:
    main()
finally:
    print("loaded:", *({{"torch", "attn_gym"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_readme_runs() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "README", "exec"), names)
    assert names["block_mask"].seq_lengths == (256, 256)
