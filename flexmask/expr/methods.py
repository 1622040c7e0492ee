"""The methods of a mask that lower and compare it.

The functions that they call are in higher packages, which are imported when a method is first called. This module and `pictures`
alone import against the order of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from flexmask._checks import names_explained
from flexmask.expr.pictures import MaskPictures

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from flexmask.expr.mask import Mask
    from flexmask.intervals.bounds import RowBounds
    from flexmask.intervals.context import Context
    from flexmask.lowering.mask_mod import Form, MaskMod
    from flexmask.lowering.varlen import VarlenArguments
    from flexmask.plans.api import Plan
    from flexmask.report.compare import Difference
    from flexmask.report.stats import Stats
    from flexmask.tracing.trace import MaskLike

#: For arguments of torch's create_block_mask, what to write.
EQUIVALENTS = {
    "B": "write batch=",
    "BLOCK_SIZE": "write block_size=",
    "H": "write heads=",
    "KV_LEN": "write kv_len=",
    "Q_LEN": "write q_len=",
}
EQUIVALENTS_OF_PLAN = {**EQUIVALENTS, "q_offset": "give it to the call of the plan, plan(q_offset=position)"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MaskMethods(MaskPictures):
    """Lowerings of a mask. Every lowering takes

    * ``q_len``, ``kv_len``: the numbers of queries and keys; ``kv_len`` defaults to ``q_len``;
    * ``batch``, ``heads``: taken from the mask's own tables where not given;
    * ``q_offset``: the position of the first query, an int, or an integer tensor ``[B]`` with one for each sequence;
    * ``device``: where the result is made; by default where the mask's tensors are, else the CPU.
    """

    @names_explained(EQUIVALENTS)
    def rows(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> RowBounds:
        """The key intervals of each query row: see :class:`flexmask.intervals.bounds.RowBounds`."""
        from flexmask.intervals.bounds import analyze

        return analyze(self._context(q_len, kv_len, batch, heads, q_offset, device))

    @names_explained(EQUIVALENTS)
    def dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The mask as ``bool[B, H, q_len, kv_len]``, with 1 for B or H where it does not depend on them.

        Raises:
            LoweringError: the tensor would be larger than 4 GiB.
        """
        from flexmask.lowering.dense import dense

        return dense(self._context(q_len, kv_len, batch, heads, q_offset, device))

    @names_explained(EQUIVALENTS)
    def to_bias(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The mask as numbers to add to scores, ``[B, H, q_len, kv_len]``: 0 where it is True, else the least of the dtype.

        Code that computes ``softmax(scores + bias)`` takes it, such as ``eager`` attention in Transformers. There a boolean mask
        is added as 0 and 1. A fully masked row has equal weights there, and no NaN.

        Args:
            dtype: of the scores; ``torch.get_default_dtype()`` by default.

        Raises:
            OperandError: ``dtype`` is no floating-point dtype.
            LoweringError: the mask would be larger than 4 GiB.
        """
        from flexmask.lowering.dense import bias

        return bias(self._context(q_len, kv_len, batch, heads, q_offset, device), dtype)

    @names_explained(EQUIVALENTS)
    def mask_mod(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        form: Form = "auto",
    ) -> MaskMod:
        """A closure ``(b, h, q_idx, kv_idx) -> bool`` for FlexAttention; ``q_idx`` counts from 0 also with ``q_offset``.

        Args:
            form: ``"interval"`` tests the key against the row's intervals, and is the same code for every mask of up to 2,
                4 and 8 of them, on a GPU also of 1; ``"expression"`` computes the predicate; ``"auto"`` takes intervals where a
                row has at most 8. ``"triton"`` is for Triton's kernels on a GPU, as backend ``flex`` has it. Where a
                query attends to the keys of its class, as in :func:`document`, it compares the two classes. Where an end of an
                interval is data, it tests both ends at once, up to 32,768 keys. Both read a value of the key, which must be
                0 to ``kv_len - 1``. Otherwise, and on the CPU, it is ``"auto"``.
        """
        from flexmask.lowering.mask_mod import mask_mod

        return mask_mod(self._context(q_len, kv_len, batch, heads, q_offset, device), form)

    @names_explained(EQUIVALENTS)
    def block_mask(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
        form: Form = "auto",
        separate_full_blocks: bool = True,
        compute_dq_write_order: bool = False,
        dq_kv_order: bool = True,
    ) -> BlockMask:
        """The ``BlockMask`` that ``torch.nn.attention.flex_attention.create_block_mask`` would make, without its cost.

        B is ``batch``; H is 1 unless the mask depends on the head. The BlockMask is a snapshot of the mask's data. It cannot be
        pickled, since its ``mask_mod`` is a closure: send the mask to other processes.

        Code that ``torch.compile`` traces cannot call this; it can call a :func:`flexmask.plan`, or take the Mask. Compiled code
        that is given BlockMasks takes every one of the same lengths, batch and block size without compiling again, if both masks
        are per-head, or neither is, and the rows of both have at most 2 key intervals (or 4, or 8; on a GPU also 1). On the CPU
        these are counted; elsewhere their number follows from the composition: ``a & b`` has at most as many as ``a`` and ``b``
        less 1, ``a | b`` as ``a`` and ``b``, ``~a`` one more than ``a``. Beyond 2**20 blocks on the CPU and 2**22 elsewhere lists
        are packed; then their strides may differ as well.

        Host syncs on a GPU (``docs/host_syncs.md`` has them for each named mask; a composed mask has those of its parts):

        * None for most named masks, and for conditions of your own that are solved for the key.
        * At the first lowering of document ids, and of data in Python lists, which is copied to the device.
        * At each lowering for conditions on the key alone, and for rows with more than 8 key intervals.
        * At each lowering beyond 2**22 cells for what is not separable in q and kv, and beyond 2**22 blocks for every mask.

        Args:
            block_size: tokens in a block, or the pair (queries, keys).
            form: see :meth:`mask_mod`.
            separate_full_blocks: whether full blocks have lists of their own, for which kernels do not call ``mask_mod``. False
                gives the key blocks of a row one order, which batch-invariant numerics need: see
                :func:`flexmask.lowering.align_documents`.
            compute_dq_write_order, dq_kv_order: see :func:`flexmask.create_block_mask`.
        """
        from flexmask.lowering.block_mask import add_write_order, block_mask, check_write_order

        context = self._context(q_len, kv_len, batch, heads, q_offset, device)
        check_write_order(compute_dq_write_order, dq_kv_order)
        made = block_mask(context, block_size, form, separate_full_blocks=separate_full_blocks)
        if compute_dq_write_order:
            add_write_order(made, descending=dq_kv_order)
        return made

    @names_explained(EQUIVALENTS)
    def varlen(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> VarlenArguments:
        """The arguments of ``torch.nn.attention.varlen.varlen_attn`` for the tokens of all sequences, one after the other.

        It computes masks in which the queries and the keys are cut into segments, each query attends to keys of its own segment
        alone, and one window ``(left, right)`` holds in all of them: packed documents that are full, causal or have a window,
        also of other keys, and sequences with padding. They are found in the key intervals, however the mask is written, on the
        CPU: data on another device is copied there, which forces a host sync.

        Raises:
            LoweringError: the mask is none of these; the message has the first query that does not fit.
        """
        from torch import Tensor

        from flexmask._sync import resolve_device
        from flexmask.lowering.varlen import varlen_arguments

        mask = cast("Mask", self)
        where = next((tensor.device for tensor in mask.tensors), None) if device is None else resolve_device(device)
        offset = q_offset.cpu() if isinstance(q_offset, Tensor) and not q_offset.is_meta else q_offset
        made = varlen_arguments(mask.to("cpu")._context(q_len, kv_len, batch, heads, offset, None))
        return made if where is None else made.to(where)

    @names_explained(EQUIVALENTS_OF_PLAN)
    def plan(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
        compile: bool = False,
    ) -> Plan:
        """The mask analyzed once, to be lowered at each step from its data alone: see :func:`flexmask.plan`."""
        from flexmask.plans.api import plan

        options = {"device": device, "block_size": block_size, "compile": compile}
        return plan(cast("Mask", self), q_len, kv_len, batch=batch, heads=heads, **cast(Any, options))

    @names_explained(EQUIVALENTS)
    def stats(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> Stats:
        """The number of visible cells and blocks, and the cost of attention: see :class:`flexmask.report.stats.Stats`."""
        from flexmask.report.stats import stats

        return stats(self._context(q_len, kv_len, batch, heads, q_offset, device), block_size)

    @names_explained(EQUIVALENTS)
    def equals(
        self,
        other: MaskLike,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> bool:
        """Whether two masks show the same cells at these lengths, however they are written: see :meth:`difference`.

        ``==`` compares expressions instead, and needs no lengths.
        """
        return not self.difference(other, q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=device)

    @names_explained(EQUIVALENTS)
    def difference(
        self,
        other: MaskLike,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        q_offset: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> Difference:
        """Where two masks differ at these lengths: how many cells only one of them shows, and the first of these.

        The result has counts only: ``(a ^ b).show(q_len)`` draws the cells where two masks differ. It is computed from the key
        intervals. Cells are evaluated only in blocks that the rows leave open, a bounded number at a time.

        Args:
            other: the mask to compare with, its text, or a ``mask_mod``.

        Raises:
            OperandError: ``other`` is none of these.
            LoweringError: one of them cannot be lowered at these lengths, they are for two sizes of batch or heads, or the device
                is ``meta``.
        """
        from flexmask.report.compare import difference

        return difference(cast("Mask", self), other, q_len, kv_len, batch, heads, q_offset, device)

    def recognize(self) -> Mask:
        """The mask with its tables of cells, as by :func:`flexmask.from_dense`, as named masks, where these show the same cells.

        ``from_dense(cells).recognize()`` prints as ``causal & key_padding(lengths=[5, 7])``, lowers without a table, and shows at
        the lengths of the table exactly its cells; at others it goes on as its names say. A table, or ``~`` of one, becomes a
        conjunction of ``causal``, windows, paddings, ``chunked``, ``document``, ``sink_window``, ``prefix_lm``, ``block_causal``,
        ``chunk_window``, ``bidirectional_spans``, ``prefix_tree`` and ``eviction``, with data for each sequence where it differs,
        or one such mask for each head. Otherwise it stays as it is, and so do tables in the arguments of named masks.

        All cells are read: on a GPU this forces host syncs, and a table without values, as on ``meta``, stays as it is.

        Raises:
            LoweringError: a table of more than 4 GiB, or of other integers than 0 and 1.
        """
        from flexmask.tracing.cells import recognize_tables

        return recognize_tables(cast("Mask", self))

    def named(self, name: str) -> Mask:
        """The same mask with a name, which pictures, explanations and errors have in place of its expression.

        ``(images[b, q] == images[b, kv]).named("same image")`` names a condition of one's own, anywhere in a mask. It lowers as
        before, and is equal to the mask without the name. In text it is
        ``named(images[b, q] == images[b, kv], name='same image')``.

        Raises:
            OperandError: a name that is no string, or has nothing to read or several lines.
        """
        from flexmask.catalogue.combinators import named

        return named(cast("Mask", self), name)

    def _context(
        self,
        q_len: int,
        kv_len: int | None,
        batch: int | None,
        heads: int | None,
        q_offset: int | Tensor,
        device: torch.device | str | None,
    ) -> Context:
        from flexmask.intervals.bind import bind

        return bind(cast("Mask", self), q_len, kv_len, batch, heads, q_offset, device)
