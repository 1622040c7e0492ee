"""Plans: a mask analyzed once, and lowered at each step from its data alone.

Takes a mask with the lengths it is lowered at; gives a :class:`Plan`, a function from the mask's data to a :class:`LoweredMask`.
It has the key intervals ``int32[B', H', Q', K, 2]`` and the lists of the BlockMask, and every backend takes it.
"""

from flexmask.plans.api import Plan, plan
from flexmask.plans.lowered import LoweredMask

__all__ = ["LoweredMask", "Plan", "plan"]
