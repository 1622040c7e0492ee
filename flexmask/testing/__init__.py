"""Checks for the test suites of those who use masks: each raises an AssertionError that shows where.

``assert_equivalent`` holds everything that a mask lowers to against a reference, ``assert_no_leak`` a model against the mask
that it should obey, ``assert_subset`` one mask against another, and ``assert_batch_invariant`` what a model computes of a
document against the same in other packings. With pytest, :mod:`flexmask.pytest_plugin` has all but ``assert_subset`` as
fixtures.
"""

from flexmask.testing.equivalence import assert_equivalent, assert_subset
from flexmask.testing.invariance import assert_batch_invariant
from flexmask.testing.leaks import assert_no_leak

__all__ = ["assert_batch_invariant", "assert_equivalent", "assert_no_leak", "assert_subset"]
