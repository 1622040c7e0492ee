"""Modules: multi-head attention under a mask, and the cache of keys and values for decoding.

Takes ``[B, q_len, d_in]`` and a mask; gives ``[B, q_len, d_out]``. Weights convert from and to ``torch.nn.MultiheadAttention``.
"""

from flexmask.nn.kv_cache import KVCache
from flexmask.nn.multihead import MultiheadFlexAttention

__all__ = ["KVCache", "MultiheadFlexAttention"]
