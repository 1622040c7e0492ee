"""Modules: multi-head attention under a mask, and the cache of keys and values for decoding.

Takes ``[B, q_len, d_in]`` and a mask; gives ``[B, q_len, d_out]``. Weights convert from and to ``torch.nn.MultiheadAttention``.
For a cache of your own, or of another library, `mask_over_cache` gives the mask of each call, and `first_dropped` says whether
it attends to keys that the cache has dropped.
"""

from flexmask.nn.cache_masks import CallTokens, mask_over_cache
from flexmask.nn.hidden_keys import first_dropped
from flexmask.nn.kv_cache import KVCache, Step
from flexmask.nn.multihead import MultiheadFlexAttention, call

__all__ = ["CallTokens", "KVCache", "MultiheadFlexAttention", "Step", "call", "first_dropped", "mask_over_cache"]
