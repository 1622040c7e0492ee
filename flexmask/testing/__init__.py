"""Assertions for users' test suites; the messages show where something is wrong.

``assert_equivalent`` compares all lowerings of a mask with a reference. ``assert_no_leak`` checks that the outputs of a model
depend only on positions that a mask shows. ``assert_subset`` compares two masks. ``assert_batch_invariant`` checks that a model
gives a document the same output in every packing. With pytest each is a fixture: see
:mod:`flexmask.pytest_plugin`.
"""

from flexmask.testing.equivalence import assert_equivalent, assert_subset
from flexmask.testing.invariance import assert_batch_invariant
from flexmask.testing.leaks import assert_no_leak

__all__ = ["assert_batch_invariant", "assert_equivalent", "assert_no_leak", "assert_subset"]
