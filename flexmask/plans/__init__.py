"""Plans: a mask analysed once, and lowered at each step from its data alone.

Takes a mask with the lengths it is lowered at; gives a :class:`Plan`, a function from the mask's data to a :class:`LoweredMask`.
That is one value with the key intervals ``int32[B', H', Q', K, 2]`` and the lists of the BlockMask, which every backend takes.
"""

from flexmask.plans.api import Plan, plan
from flexmask.plans.lowered import LoweredMask

__all__ = ["LoweredMask", "Plan", "plan"]
