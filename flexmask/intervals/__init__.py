"""Key intervals: the keys that each query row attends to.

Takes a mask and the lengths it is lowered at; gives `RowBounds`, two `Rows` ``[B', H', q_len, K, 2]`` of sorted, disjoint
intervals that bound the mask from below and from above, and are equal where it is separable.
"""

from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.rows import Rows

__all__ = ["RowBounds", "Rows"]
