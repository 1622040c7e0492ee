"""Multi-head attention under any mask, as a module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask.algebra import Mask
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.functional import Backend, attention, check_backend

__all__ = ["MultiheadFlexAttention"]


class MultiheadFlexAttention(nn.Module):
    """Multi-head self-attention or cross-attention under any mask.

    The mask says True for what may be seen. (``torch.nn.MultiheadAttention`` says True for what may not.)

    Args:
        d_in: width of the input, and of the context in cross-attention.
        d_out: width of the output; each head has ``d_out / n_heads``.
        n_heads: number of heads; divides ``d_out``.
        bias: whether the projections of queries, keys and values have a bias. The output projection always has one.
        backend: see :func:`flexmask.attention`.

    Attributes:
        in_proj: the projections to queries, keys and values, one below the other: ``Linear(d_in, 3 * d_out)``.
        out_proj: ``Linear(d_out, d_out)``.

    Raises:
        ExpressionError: ``n_heads`` does not divide ``d_out``.

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762
    """

    def __init__(self, d_in: int, d_out: int, n_heads: int, bias: bool = False, *, backend: Backend = "auto") -> None:
        super().__init__()
        check_backend(backend)
        for name, size in (("d_in", d_in), ("d_out", d_out), ("n_heads", n_heads)):
            if not isinstance(size, int) or isinstance(size, bool):
                raise OperandError(f"{name} must be an integer, got {size!r}")
        if min(d_in, d_out, n_heads) < 1 or d_out % n_heads:
            raise ExpressionError(f"n_heads must divide d_out, and all must be at least 1; got {d_in=}, {d_out=}, {n_heads=}")
        self.d_in, self.d_out, self.n_heads, self.backend = d_in, d_out, n_heads, backend
        self.in_proj = nn.Linear(d_in, 3 * d_out, bias=bias)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(
        self,
        x: Tensor,
        mask: Mask | str | BlockMask | None = None,
        *,
        context: Tensor | None = None,
        return_qk: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Attends from each position of ``x`` to ``x``, or to ``context``.

        Args:
            x: ``[B, q_len, d_in]``.
            mask: what each position may see: a mask, its text, a BlockMask, or None for everything.
            context: ``[B, kv_len, d_in]``, where keys and values come from in cross-attention.
            return_qk: whether to return the queries and keys as well.

        Returns:
            ``[B, q_len, d_out]``; with ``return_qk`` also the queries and keys, ``[B, n_heads, length, d_out / n_heads]``.

        Raises:
            LoweringError: shapes that do not fit, or a mask that contradicts them.
        """
        for name, tensor in (("x", x), ("context", context)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
            if tensor is not None and tensor.dtype != self.in_proj.weight.dtype and not torch.is_autocast_enabled(x.device.type):
                raise OperandError(f"{name} is {tensor.dtype}, the module {self.in_proj.weight.dtype}; convert one with .to()")
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != self.d_in):
                raise LoweringError(f"{name} must be [B, length, {self.d_in}], got {list(tensor.shape)}")
        if context is not None and context.shape[0] != x.shape[0]:
            raise LoweringError(f"x and context must have one batch, got {x.shape[0]} and {context.shape[0]} sequences")
        query, key, value = self._project(x, context)
        seen = attention(query, key, value, mask, backend=self.backend)
        out: Tensor = self.out_proj(seen.transpose(1, 2).flatten(2))
        return (out, query, key) if return_qk else out

    def _project(self, x: Tensor, context: Tensor | None) -> list[Tensor]:
        if context is None:
            parts = self.in_proj(x).chunk(3, -1)
        else:
            weight, bias = self.in_proj.weight, self.in_proj.bias
            at = self.d_out
            queries = F.linear(x, weight[:at], None if bias is None else bias[:at])
            parts = (queries, *F.linear(context, weight[at:], None if bias is None else bias[at:]).chunk(2, -1))
        return [part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts]

    def extra_repr(self) -> str:
        """The sizes, as the module prints them."""
        return f"d_in={self.d_in}, d_out={self.d_out}, n_heads={self.n_heads}"
