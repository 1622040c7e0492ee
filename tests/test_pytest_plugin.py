"""The pytest plugin, as another package's suite uses it."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from flexmask import pytest_plugin
from tests.support.imports import HEAVY, loaded_after

pytest_plugins = ["pytester"]

SUITE = """
import torch
import flexmask as fm

MASK = fm.causal() & fm.key_padding(torch.tensor([3, 5]))

def test_device(flexmask_device):
    assert flexmask_device == "cpu"

def test_right(assert_equivalent):
    assert_equivalent(MASK, 6, reference=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx < 3 + 2 * b))

def test_wrong(assert_equivalent):
    assert_equivalent(MASK, 6, reference=fm.causal())

def test_obeys(assert_no_leak):
    assert_no_leak(fm.MultiheadFlexAttention(8, 8, 2, mask=MASK), MASK, torch.randn(2, 6, 8))

def test_leaks(assert_no_leak):
    layer = fm.MultiheadFlexAttention(8, 8, 2)
    assert_no_leak(lambda x: layer(x, fm.causal()), MASK, torch.randn(2, 6, 8))

def test_mask_left_out(assert_no_leak):
    assert_no_leak(fm.MultiheadFlexAttention(8, 8, 2), MASK, torch.randn(2, 6, 8))

def test_mask_needed(assert_no_leak):
    assert_no_leak(lambda x, mask: x, MASK, torch.randn(2, 6, 8))

def test_subset(assert_subset):
    assert_subset("sliding_window(size=4)", "causal", 32)

def test_no_subset(assert_subset):
    assert_subset("causal", "sliding_window(size=4)", 32)

def test_invariant(assert_batch_invariant):
    assert_batch_invariant(lambda x, mask: x * 2, torch.randn(6, 8), [4, 2])

def test_not_invariant(assert_batch_invariant):
    assert_batch_invariant(lambda x, mask: x * x.shape[1], torch.randn(6, 8), [4, 2])
"""


def test_it_is_registered() -> None:
    (found,) = entry_points(group="pytest11", name="flexmask")
    assert found.load() is pytest_plugin


def test_a_suite_in_a_line_each(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=6)
    result.stdout.fnmatch_lines(["*dense, against the reference: * of 72 cells differ*", "*hidden by key_padding(*"])
    result.stdout.fnmatch_lines(["*depends on its packing: in one sequence, 32 of 32 numbers differ*"])
    result.stdout.fnmatch_lines(["*function(x, mask=mask)*"])
    for module in ("equivalence", "leaks", "influence"):
        result.stdout.no_fnmatch_line(f"*flexmask/testing/{module}.py*")  # the traceback ends in the user's own line


def test_several_devices(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "def test_device(flexmask_device):\n    assert flexmask_device in ('cpu', 'meta')\n"
        "def test_fixture(assert_equivalent):\n    assert assert_equivalent.keywords['device'] in ('cpu', 'meta')\n"
        "def test_other():\n    pass"
    )
    result = pytester.runpytest_inprocess("-v", *(f"--flexmask-device={device}" for device in ("cpu", "meta", "abacus")))
    result.assert_outcomes(passed=5, errors=2)  # there is no abacus
    result.stdout.fnmatch_lines(
        ["*test_device[[]cpu]*", "*test_device[[]meta]*", "*test_fixture[[]cpu]*", "*test_fixture[[]meta]*"]
    )
    result.stdout.fnmatch_lines(["*--flexmask-device abacus: *"])


def test_help(pytester: pytest.Pytester) -> None:
    output = pytester.runpytest_inprocess("--help").stdout.str()
    assert "attention masks:" in output
    assert "--flexmask-device=DEVICE" in output


def test_nothing_heavy_is_imported(pytester: pytest.Pytester) -> None:
    assert loaded_after("import flexmask.pytest_plugin", HEAVY) == set()
    pytester.makepyfile(
        "import sys\n\ndef test_light():\n    assert 'flexmask.pytest_plugin' in sys.modules\n"
        "    assert 'torch' not in sys.modules"
    )
    result = pytester.run(sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "-W", "error")
    result.assert_outcomes(passed=1)
