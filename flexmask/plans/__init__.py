"""Plans: a mask analyzed once, and lowered at each step from its data alone.

Takes a mask with the lengths it is lowered at; gives a :class:`Plan`, a function from the mask's data to a :class:`LoweredMask`.
It has the key intervals ``int32[B', H', Q', K, 2]`` and the lists of the BlockMask, and every backend takes it.

In code that ``torch.compile`` traces, attention and modules take

* a module's mask with parameters, whose values are inputs of the graph;
* a plan that is called there, or the LoweredMask that a plan gives, as an input, which all layers share;
* a Mask as an input. Masks that differ in more than their tensors compile again;
* a mask that is made there, as anywhere else, of tensors, numbers, lists and masks. ``~`` needs torch 2.14; before, write
  ``full() - mask``. Index expressions and tables that were made outside belong to a mask that was made outside.
"""

from flexmask.plans.api import Plan, plan
from flexmask.plans.lowered import LoweredMask

__all__ = ["LoweredMask", "Plan", "plan"]
