"""Modules: multi-head attention under a mask, and the cache of keys and values for decoding.

Takes ``[B, q_len, d_in]`` and a mask; gives ``[B, q_len, d_out]``. Weights convert from and to ``torch.nn.MultiheadAttention``.
For a cache of your own, or of another library, `mask_over_cache` gives the mask of each call, and `lookback` says how many keys
before a query it needs.
"""

from flexmask.nn.cache_masks import CallTokens, lookback, mask_over_cache
from flexmask.nn.kv_cache import KVCache, Step
from flexmask.nn.multihead import MultiheadFlexAttention, call

__all__ = ["CallTokens", "KVCache", "MultiheadFlexAttention", "Step", "call", "lookback", "mask_over_cache"]
