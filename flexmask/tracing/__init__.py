"""Tracing: from the ``mask_mod`` functions that FlexAttention takes to masks.

Takes a ``mask_mod``, which it calls once with proxies; gives a mask, in which named masks have their names and operations without
an expression are opaque calls. ``create_block_mask`` replaces torch's function of this name. `cells` finds named masks in dense
tables, for :meth:`flexmask.Mask.recognize`.
"""

from flexmask.tracing.create_block_mask import create_block_mask
from flexmask.tracing.trace import MaskLike, as_mask, from_mask_mod

__all__ = ["MaskLike", "as_mask", "create_block_mask", "from_mask_mod"]
