"""Key intervals: the keys that each query row attends to.

Takes a mask and the lengths it is lowered at; gives `RowBounds`: two `Rows`, each with the ends ``lo`` and ``hi``
``int32[B', H', q_len, K]`` of sorted, disjoint
intervals that bound the mask from below and from above, and are equal where it is separable.
"""

from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.rows import Rows

__all__ = ["RowBounds", "Rows"]
