"""Plans read no value of a mask's data; those that evaluate cells are compared with ``docs/host_syncs.md``."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import flexmask as fm
from flexmask import Mask
from flexmask.plans.capture import GRAPHS
from tests.lowering.test_host_syncs import MASKS, SHORT, TABLE, Watch, numbers
from tests.support.examples import EXAMPLES
from tests.support.exhaustive import one_in

META = torch.device("meta")


@cache
def documented() -> set[str]:
    """The masks that the documentation says a plan evaluates cell by cell."""
    paragraph = TABLE.read_text().split("## Plans")[1].partition("cell by cell")[2].partition("All other")[0]
    return set(re.findall(r"`([^`]+)`", paragraph))


def has_cells(mask: Mask, length: int) -> bool:
    """Whether the plan of a mask evaluates the cells of each query.

    It may read no value, and copies none to the device after the capture.
    """
    plan = fm.plan(mask, length, device=META)
    copies = []
    for _ in range(2):
        with Watch() as watch:
            lowered = plan()
            assert lowered.block_mask.kv_indices.device == META
        assert watch.reads == 0
        copies.append(watch.copies)
    assert copies[1] == 0
    return lowered.cells is not None and lowered.cells.shape[2] == length


@pytest.mark.parametrize("name", one_in(5, MASKS))
def test_named_masks(name: str) -> None:
    """A mask that a plan evaluates cell by cell is in the list under "Plans" of docs/host_syncs.md, and no other."""
    assert has_cells(MASKS[name](SHORT, "meta"), SHORT) == (name in documented())


def test_documented_masks_are_tested() -> None:
    assert documented() <= set(MASKS)
    assert {name.partition("(")[0] for name in MASKS} == set(EXAMPLES)


def test_documents_that_promise_to_be_contiguous_have_intervals() -> None:
    assert not has_cells(fm.document(numbers("meta", SHORT), contiguous=True), SHORT)


@pytest.mark.parametrize("source", ["lengths", "cu_seqlens"])
def test_examples_given_by_lengths_have_no_cells(source: str) -> None:
    for padding in (False, True):
        mask = fm.masks.in_context(**{source: numbers("meta", 3)}, padding=padding, test_start=numbers("meta", 1))
        assert fm.plan(mask, SHORT, device=META)().cells is None


def test_lists_are_copied_to_the_device_once() -> None:
    assert not has_cells(fm.causal() & fm.document(lengths=[SHORT - 9, 9]) & fm.prefix_lm([4]), SHORT)


def test_a_composed_mask_at_positions_that_only_the_device_knows() -> None:
    text = "causal & sliding_window(size=64) & document(cu_seqlens=cu) & key_padding(start=start)"
    plan, captures = fm.plan(text, 1, SHORT, batch=2, device=META), GRAPHS.captures
    for _ in range(2):
        with Watch() as watch:
            lowered = plan(cu=numbers("meta", 2, 9), start=numbers("meta", 2), q_offset=numbers("meta", 2))
        assert (watch.reads, watch.copies, lowered.cells) == (0, 0, None)
    assert GRAPHS.captures == captures + 1
