"""Modules: multi-head attention under a mask, and the cache of keys and values for decoding.

Takes ``[B, q_len, embed_dim]`` and a mask; gives the same shape. Parameters are those of ``torch.nn.MultiheadAttention``.
"""

from flexmask.nn.kv_cache import KVCache
from flexmask.nn.multihead import MultiheadFlexAttention

__all__ = ["KVCache", "MultiheadFlexAttention"]
