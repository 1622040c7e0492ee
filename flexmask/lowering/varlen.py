"""The arguments of variable-length attention: a mask as segments of queries, each with keys of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.errors import LoweringError
from flexmask.expr.mask import Named
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import Context

#: What to do with a mask that variable-length attention does not compute.
REMEDY = "use backend='flex' or 'sdpa'"


class VarlenArguments(NamedTuple):
    """A mask as the arguments of ``torch.nn.attention.varlen.varlen_attn``; see :meth:`flexmask.Mask.varlen`.

    Attributes:
        cu_seq_q: the first query of each segment, and the end, ``int32[segments + 1]``.
        cu_seq_k: the same of the keys; the tensor ``cu_seq_q`` itself where both are equal.
        max_q: the most queries in a segment.
        max_k: the most keys in a segment.
        window_size: how many keys before and after the diagonal a query attends to, -1 for all. The diagonal ends at the last
            query and the last key of each segment.
        queries: which queries these are, ``int64[tokens]`` of the ``B * q_len`` of all sequences, one after the other; None for
            all. The others attend to no key.
        keys: the same of the keys. To the others no query attends.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window_size: tuple[int, int]
    queries: Tensor | None
    keys: Tensor | None

    def to(self, device: torch.device) -> VarlenArguments:
        """The same on a device."""
        starts = self.cu_seq_q.to(device)
        key_starts = starts if self.cu_seq_k is self.cu_seq_q else self.cu_seq_k.to(device)
        queries, keys = (None if index is None else index.to(device) for index in (self.queries, self.keys))
        return self._replace(cu_seq_q=starts, cu_seq_k=key_starts, queries=queries, keys=keys)


def varlen_arguments(context: Context) -> VarlenArguments:
    """The mask of a lowering context on the CPU: see :meth:`flexmask.Mask.varlen`.

    Raises:
        LoweringError: variable-length attention does not compute the mask.
    """
    lo, hi = _intervals(context)
    whole = context.kv_len * (torch.arange(len(lo), device="cpu") // context.q_len)
    queries = (lo < hi).nonzero().flatten()
    if not len(queries):
        raise LoweringError(f"no query attends to a key, so there are no segments; {REMEDY}")
    lo, hi = (end[queries] + whole[queries] for end in (lo, hi))
    # A segment begins where a query attends to no key that one before it attends to.
    reach = hi.cummax(0).values
    begins = torch.ones_like(queries, dtype=torch.bool)
    begins[1:] = lo[1:] >= reach[:-1]
    starts, segment = begins.nonzero().flatten(), begins.cumsum(0) - 1
    stops = torch.cat((starts[1:], starts.new_tensor([len(queries)])))
    first, end = lo[starts], reach[stops - 1]
    diagonal = (end - stops)[segment] + torch.arange(len(queries), device="cpu")
    cut = lo > first[segment], hi < end[segment]
    window = [int(seen.mode().values) if seen.numel() else -1 for seen in ((diagonal - lo)[cut[0]], (hi - 1 - diagonal)[cut[1]])]
    wanted = (
        first[segment] if window[0] < 0 else torch.maximum(first[segment], diagonal - window[0]),
        end[segment] if window[1] < 0 else torch.minimum(end[segment], diagonal + window[1] + 1),
    )
    misfit = ((lo != wanted[0]) | (hi != wanted[1])).nonzero().flatten()
    if len(misfit):
        at = int(misfit[0])
        sequence, query = divmod(int(queries[at]), context.q_len)
        shown = [int(ends[at]) - sequence * context.kv_len for ends in (lo, hi)]
        raise LoweringError(
            f"variable-length attention does not compute the mask: query {query} of sequence {sequence} attends to the "
            f"keys [{shown[0]}, {shown[1]}), which is not the window {tuple(window)} of other queries, where the last query "
            f"and the last key of each segment are aligned. If some queries are padding, add query_padding(); else {REMEDY}"
        )
    cu_seq_q, cu_seq_k = (_starts(sizes) for sizes in (stops - starts, end - first))
    at_key = torch.arange(context.kv_len * context.full_batch, device="cpu")
    owner = torch.searchsorted(first, at_key, right=True) - 1
    keys = ((owner >= 0) & (at_key < end[owner.clamp(min=0)])).nonzero().flatten()
    return VarlenArguments(
        cu_seq_q,
        cu_seq_q if torch.equal(cu_seq_q, cu_seq_k) else cu_seq_k,
        int((stops - starts).max()),
        int((end - first).max()),
        (window[0], window[1]),
        None if len(queries) == len(whole) else queries,
        None if len(keys) == len(at_key) else keys,
    )


def _intervals(context: Context) -> tuple[Tensor, Tensor]:
    """The first key of each query, and the end of its keys, ``int64[B * q_len]``.

    Raises:
        LoweringError: a query has several key intervals, or the heads differ.
    """
    bounds = analyze(context)
    rows = bounds.lower
    if not bounds.exact:
        reason = "a part of it is not separable in q and kv"
        if any(isinstance(node, Named) and node.name == "from_dense" for node in context.named.walk()):
            reason += "; try mask.recognize(), which finds named masks in the cells of from_dense"
    elif rows.slots > 1:
        reason = f"its rows have {rows.slots} key intervals"
    elif rows.lo.shape[1] > 1:
        reason = "its heads differ"
    else:
        rows = rows.expand(context.full_batch, 1, context.q_len)
        return rows.lo.flatten().long(), rows.hi.flatten().long()
    raise LoweringError(f"variable-length attention does not compute the mask: {reason}; {REMEDY}")


def _starts(sizes: Tensor) -> Tensor:
    return torch.cat((sizes.new_zeros(1), sizes.cumsum(0))).to(torch.int32)
