"""The form of a ``mask_mod`` for Triton's kernels on a GPU: one value of each row where the others have two."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import flexmask as fm
from flexmask.lowering.ends import ReadEnd
from flexmask.lowering.triton import MOST_JOINT, joint_mod
from tests.lowering.test_bands import BANDS, READ, cells, computed_by, tensors_of
from tests.support.exhaustive import each_run, one_in
from tests.support.lowerings import lowered

# ---------------------------------------------------------------- both ends of an interval


def is_joint(mask_mod: Callable[..., Tensor]) -> bool:
    """Whether both ends are compared at once."""
    return mask_mod.__qualname__.startswith("joint_mod")


#: Ends of intervals, where halves of numbers begin and end.
ENDS = [0, 1, 2, 127, 128, 16383, 16384, 32766, 32767, 32768]


def joint(kv: Tensor, *ends: Tensor, first: Tensor | None = None) -> Tensor:
    """Whether one key of each row is among its first keys or in an interval.

    Args:
        kv: the keys.
        ends: where each interval begins and ends, in turn.
        first: where the first keys end.
    """
    read = [(ReadEnd(end.int(), (2,)),) for end in ends]
    firsts = [] if first is None else [((), (ReadEnd(first.int(), (2,)),))]
    found = joint_mod([*firsts, *zip(read[::2], read[1::2], strict=True)], MOST_JOINT, kv.device)
    row = torch.arange(len(kv), dtype=torch.int32)
    return found(row * 0, row * 0, row, kv.int())


def test_both_ends_are_compared_at_once() -> None:
    """In 32 bits, as kernels have positions."""
    low, high, kv = torch.tensor([*product(ENDS, ENDS, ENDS[:-1])]).T
    assert torch.equal(joint(kv, low, high), (low <= kv) & (kv < high))


@pytest.mark.parametrize("count", [2, 3])
def test_behind_an_interval_the_next_one_decides(count: int) -> None:
    """Sorted intervals, where unused ones come last."""
    intervals = [ends for number in range(count + 1) for ends in combinations(ENDS, 2 * number)]
    rows = [(*ends, *[MOST_JOINT] * (2 * count - len(ends))) for ends in intervals]
    *ends, kv = torch.tensor([(*row, key) for row in rows for key in ENDS[:-1]]).T
    wanted = torch.stack([(low <= kv) & (kv < high) for low, high in zip(ends[::2], ends[1::2], strict=True)]).any(0)
    assert torch.equal(joint(kv, *ends), wanted)


def test_first_keys_and_an_interval() -> None:
    """They may overlap."""
    first, low, high, kv = torch.tensor([*product(ENDS, ENDS, ENDS, ENDS[:-1])]).T
    assert torch.equal(joint(kv, low, high, first=first), (kv < first) | ((low <= kv) & (kv < high)))


#: Masks of one interval or several, by whether their ends are compared at once.
JOINT = {
    "causal": False,
    "sliding_window(size=3)": False,
    "causal & document([0, 0, 1, 1, 1, 1, 2, 2])": True,
    "causal & key_padding(start=[2, 0])": True,
    "(kv >= table([0, 3, 8, 2, 1, 0, 7, 5])[q]) & (kv < table([8, 4, 8, 1, 3, 0, 8, 6])[q])": True,
    "(kv >= table([0, 3, 8, 2, 1, 0, 7, 5])[q]) & (kv < 6)": True,
    "(kv >= 2) & (kv < table([8, 4, 8, 1, 3, 0, 8, 6])[q])": True,
    "(kv > q - 3) & (kv < table([8, 4, 8, 1, 3, 0, 8, 6])[q])": True,
    "(kv >= table([0, 3, 8, 2, 1, 0, 7, 5])[q]) & (kv < q + 40000)": True,
    "(kv > q + 90000) & (kv < table([8, 4, 8, 1, 3, 0, 8, 6])[q])": True,
    "(kv > q - 90000) & (kv < q - 90000 + table([0, 90000, 90001, 2, 3, 90008, 5, 6])[q])": True,
    "block_diffusion(length=4, size=2)": True,
    "multi_item(2, [0, 1, 2, 0, 1, 2])": False,
    "(kv == 1) | (kv == 3) | ((kv >= 5) & (kv < table([8, 4, 8, 1, 3, 0, 8, 6])[q]))": True,
}


@pytest.mark.parametrize("text", JOINT)
@pytest.mark.usefixtures("elsewhere")
def test_masks(text: str) -> None:
    """Kernels have positions of 32 bits."""
    mask = fm.parse(text)
    wanted = mask.dense(8, batch=2).expand(2, 1, 8, 8)
    indices = torch.meshgrid(*(torch.arange(size, dtype=torch.int32) for size in (2, 1, 8, 8)), indexing="ij")
    for found in (mask.mask_mod(8, batch=2, form="triton"), lowered(mask, 8, batch=2).triton_block_mask.mask_mod):
        assert is_joint(found) == JOINT[text]
        assert torch.equal(cells(found, 2, 1, 8, 8), wanted)
        assert torch.equal(found(*indices).expand(2, 1, 8, 8), wanted)
    assert not is_joint(mask.mask_mod(8, batch=2))  # what torch recognizes as intervals


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("elsewhere")
def test_bands(name: str) -> None:
    """Those of plans are in the test of the same name of ``test_bands.py``."""
    text, _, meaning = BANDS[name]
    q, kv = torch.meshgrid(torch.arange(5), torch.arange(8), indexing="ij")
    found = fm.parse(text).mask_mod(5, 8, form="triton")
    assert torch.equal(cells(found, 1, 1, 5, 8)[0, 0], meaning(q, kv))


@pytest.mark.parametrize("kv_len", [MOST_JOINT, MOST_JOINT + 1])
@pytest.mark.usefixtures("elsewhere")
def test_longer_masks_compare_each_end(kv_len: int) -> None:
    low, high = torch.tensor([0, kv_len - 1, 7, 5, kv_len]), torch.tensor([1, kv_len, kv_len, 5, kv_len])
    mask = (fm.kv >= fm.table(low)[fm.q]) & (fm.kv < fm.table(high)[fm.q])
    found = mask.mask_mod(5, kv_len, form="triton")
    assert is_joint(found) == (kv_len == MOST_JOINT)
    kv = torch.arange(kv_len)
    assert torch.equal(cells(found, 1, 1, 5, kv_len)[0, 0], (low[:, None] <= kv) & (kv < high[:, None]))


@pytest.mark.usefixtures("elsewhere")
def test_cells_and_intervals() -> None:
    """FlashAttention 4 takes both, so that each end is compared."""
    mask = fm.document([0, 0, 1, 1, 1, 1], contiguous=True) & fm.causal() & fm.key_padding(keep=torch.tensor([1, 0, 1, 1, 0, 1]))
    plan = mask.plan(6)()
    assert plan.cells is not None
    assert not is_joint(tensors_of(plan.triton_block_mask.mask_mod)["one"])
    assert torch.equal(cells(plan.triton_block_mask.mask_mod, 1, 1, 6, 6), mask.dense(6))


# ---------------------------------------------------------------- classes

#: Masks of classes, and others, by whether they are: of 6 queries and as many keys.
CLASSES = {
    "document([0, 0, 1, 1, -1, 2])": True,
    "document(lengths=[2, 4])": True,
    "document(cu_seqlens=[0, 2, 4], padding=True)": True,
    "document([0, 0, 1, 1, -1, -1], contiguous=True)": True,
    "document(position_ids=[0, 1, 0, 1, 2, 0])": True,
    "document([0, 0, 1, 1, 2, 2]) & document(lengths=[3, 3])": True,
    "document([3, 3, 1, 1, 1, 1]) & key_padding(lengths=[3]) & (kv != 1)": True,
    "per_document(full, lengths=[2, 4])": True,
    "(table([0, 0, 1, 1, 2, 2])[q] == table([0, 0, 1, 1, 2, 2])[kv]) & (table([0, 0, 1, 1, 2, 2])[q] != 1)": True,
    "(table([0, 0, 1, 1, 2, 2])[q] // 2 == table([0, 0, 1, 1, 2, 2])[kv] // 2) & (table([0, 0, 1, 1, 2, 2])[q] < 1)": False,
    "document([[0, 0, 1, 1, 1, 1]]) & (table([[1, 1, 1, 0, 1, 1]])[b, kv] == 1)": True,
    "document([0, 0, 1, 1, 1, 1]) & (table([0, 5, 1, 1, 1, 1])[q] == table([0, 0, 1, 1, 1, 1])[q])": True,
    "document([0, 0, 1, 1, 1, 1]) & (table([0, 0, 1, 1, 1, 1])[q] == table([0, 5, 1, 1, 1, 1])[q])": True,
    "document([0, 0, 1, 1, 1, 1]) & (table([0, 5, 1, 1, 1, 1])[q] == 1)": True,
    "document([0, 0, 1, 1, 1, 1]) & query_padding(lengths=[3])": True,
    "document([0, 0, 1, 1, 1, 1]) & (q != 3)": True,
    "document([0, 0, 1, 1, 1, 1], kv_ids=[0, 1, 1, 1, 2, 2])": True,
    "document([0, 2, 1, 1, -1, 2], kv_ids=[2, 1, 2, 2, 0, 3])": True,
    "cross_document(q_lengths=[1, 2, 3], kv_lengths=[3, 1, 2])": True,
    "query_padding(lengths=[3])": True,
    "table([1, 0, 1, 1, 0, 1])[q] == 1": True,
    "causal & document([0, 0, 1, 1, 1, 1])": False,
    "document([0, 0, 1, 1, 1, 1]) | causal": False,
    "key_padding(lengths=[3])": False,
    "full": False,
}


@pytest.mark.parametrize("text", CLASSES)
@pytest.mark.usefixtures("elsewhere")
def test_classes(text: str) -> None:
    mask = fm.parse(text)
    wanted, plan = mask.dense(6), lowered(mask, 6)
    assert bool(plan.classes) == CLASSES[text]
    for found in (mask.mask_mod(6, form="triton"), plan.triton_block_mask.mask_mod):
        assert torch.equal(cells(found, 1, 1, 6, 6), wanted)
        assert ("intervals" not in tensors_of(found)) == CLASSES[text]


@pytest.mark.parametrize("text", each_run(CLASSES, "document(lengths=[2, 4])", "document([0, 0, 1, 1, 1, 1]) & (q != 3)"))
@pytest.mark.usefixtures("elsewhere")
def test_classes_of_other_plans(text: str) -> None:
    """Those for all lengths have the same, and those of steps none."""
    mask = fm.parse(text)
    assert bool(mask.plan()(6).classes) == CLASSES[text]
    assert not mask.plan(6)(q_offset=torch.tensor([0])).classes
    assert "intervals" in tensors_of(mask.mask_mod(2, 6, q_offset=4, form="triton"))


CROSSED: dict[str, Callable[[int, int], fm.Mask]] = {
    "ids": lambda q_len, kv_len: fm.document(torch.arange(q_len) // 2, kv_ids=3 - torch.arange(kv_len) // 3),
    "offsets": lambda q_len, kv_len: fm.masks.cross_document(q_cu_seqlens=[0, 1, q_len], kv_cu_seqlens=[0, kv_len - 1, kv_len]),
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("name", "sizes"), one_in(2, CROSSED, [(5, 6), (6, 5), (9, 6), (6, 9), (1, 6), (6, 1)]))
def test_classes_of_other_numbers_of_keys(name: str, sizes: tuple[int, int]) -> None:
    q_len, kv_len = sizes
    mask = CROSSED[name](*sizes)
    for found in (mask.mask_mod(q_len, kv_len, form="triton"), lowered(mask, q_len, kv_len).triton_block_mask.mask_mod):
        assert "intervals" not in tensors_of(found)
        assert torch.equal(cells(found, 1, 1, q_len, kv_len), mask.dense(q_len, kv_len))


@pytest.mark.usefixtures("elsewhere")
def test_classes_are_data_of_a_lowered_mask() -> None:
    """Other values may be written into its tensors, as into those that a CUDA graph reads."""
    plan = fm.plan("document(cu_seqlens=cu)", 6)
    kept, other = plan(cu=torch.tensor([0, 2, 6])), plan(cu=torch.tensor([0, 5, 6]))
    mask_mod = kept.triton_block_mask.mask_mod
    tree_map(lambda one, two: one.copy_(two) if isinstance(one, Tensor) else one, kept, other)
    assert torch.equal(cells(mask_mod, 1, 1, 6, 6), other.dense())
    assert torch.equal(cells(kept[0].triton_block_mask.mask_mod, 1, 1, 6, 6), other.dense())


@pytest.mark.parametrize("text", ["document(lengths=[2, 4])", "causal & document(lengths=[2, 4])"])
def test_the_cpu_compares_each_end(text: str) -> None:
    mask = fm.parse(text)
    for found in (mask.mask_mod(6, form="triton"), mask.plan(6)().triton_block_mask.mask_mod):
        assert not is_joint(found)
        assert computed_by(found) == [(READ, READ)] * 2
