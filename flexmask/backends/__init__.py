"""Attention under a mask, and the backends that run it.

Takes ``query [B, H, q_len, D]``, ``key [B, H_kv, kv_len, D]``, ``value [B, H_kv, kv_len, D_v]`` and a mask; gives
``[B, H, q_len, D_v]``. A backend is a :class:`Backend`: ``flex`` is compiled FlexAttention, ``flash`` the same with
FlashAttention 4, ``sdpa`` is exact attention in tiles.
"""

from flexmask.backends.api import attention, choose_backend
from flexmask.backends.backend import Backend, Call, backend_names, register_backend
from flexmask.backends.cache import MaskCache
from flexmask.backends.weights import attention_weights

__all__ = [
    "Backend",
    "Call",
    "MaskCache",
    "attention",
    "attention_weights",
    "backend_names",
    "choose_backend",
    "register_backend",
]
