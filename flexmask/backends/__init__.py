"""Attention under a mask, and the backends that run it.

Takes ``query [B, H, q_len, D]``, ``key`` and ``value [B, H_kv, kv_len, D]`` and a mask; gives ``[B, H, q_len, D_v]`` from
compiled FlexAttention, from torch's SDPA, or from exact attention in tiles with gradients on every device.
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
