"""A mask lowered at some lengths as one pytree of tensors, which every backend of attention takes.

Compiled code takes it as an input without compiling again for other values. It can be moved to a device, sent to other processes
and saved in files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils._pytree import register_pytree_node, tree_map_only

from flexmask import _sync
from flexmask._checks import check_flag, kind_of
from flexmask._transforms import can_keep_tensors, is_captured, vectorized
from flexmask.blocks.grid import BlockGrid
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import Truth
from flexmask.intervals.bands import KINDS, READ, Band, Fused
from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.closures import without_unit_axes
from flexmask.intervals.columns import runs
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.block_lists import grid_lists
from flexmask.lowering.block_mask import block_lists, from_lists
from flexmask.lowering.mask_mod import MaskMod, interval_mod
from flexmask.lowering.triton import class_mod

#: The most cells that a graph evaluates, for a mask that is not separable in q and kv.
MAX_CELLS = 2**26

#: What to write where a LoweredMask is given to what takes something else.
HINT = (
    "It is for flexmask.attention(query, key, value, lowered). Other functions take lowered.dense(), a tensor, or "
    "lowered.block_mask; plan.mask is the Mask, to draw or to compose"
)


class LoweredMask:
    """A mask lowered at some lengths, which :func:`flexmask.attention` takes as its mask. A :class:`flexmask.Plan` makes it.

    Attributes:
        shape: ``(batch, heads, q_len, kv_len)``; ``heads`` is 1 where the mask is the same for all heads.
        bounds: the key intervals of each query row, ``int32[B', H', Q', K, 2]``, sorted and disjoint. Each of the first three
            axes is 1 where the mask does not depend on it. Unused intervals are ``[kv_len, kv_len)``.
        cells: None where the intervals are the mask. Where a part of the mask is not separable in q and kv, the intervals hold
            all visible keys, and ``bool[B', H', q_len or 1, kv_len]`` says which of them are visible. Its third axis is 1
            where it is broadcast over the queries.
        block_size: queries and keys in a block of :attr:`block_mask`.
        band: which ends of the intervals of a row follow from the query's position alone: see
            :func:`flexmask.intervals.bands.band_of`.
        classes: the tensors of :func:`flexmask.lowering.triton.classes`, where a query attends to the keys of its class.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        bounds: Tensor,
        cells: Tensor | None = None,
        block_size: tuple[int, int] = (128, 128),
        lists: tuple[Tensor, ...] = (),
        band: Band = READ,
        classes: tuple[Tensor, ...] = (),
    ) -> None:
        self.shape, self.bounds, self.cells, self.block_size, self.band = shape, bounds, cells, block_size, band
        self.classes, self._lists = classes, lists
        self._mask_mods: dict[tuple[bool, bool], _sync.Stamped[MaskMod]] = {}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.bounds.device

    @property
    def fused(self) -> Fused:
        """``"whole"`` for a mask of all keys, ``"causal"`` for that of ``is_causal``: torch's fused kernels take these without a
        tensor. None for another mask."""
        return KINDS.get(self.band)

    @property
    def mask_mod(self) -> MaskMod:
        """The mask as a function ``(b, h, q_idx, kv_idx) -> bool`` for FlexAttention."""
        return self._mask_mod()

    @property
    def block_mask(self) -> BlockMask:
        """The BlockMask with the blocks that torch's ``create_block_mask`` lists."""
        return self._block_mask(self.mask_mod)

    @property
    def triton_block_mask(self) -> BlockMask:
        """As :attr:`block_mask`, with the ``mask_mod`` that Triton's kernels compute fastest."""
        if self.classes and _sync.needs_sync(self.bounds):
            return self._block_mask(class_mod(*self.classes))
        return self._block_mask(self._mask_mod(joins_ends=True))

    def _mask_mod(self, *, joins_ends: bool = False) -> MaskMod:
        """The function, kept for the next layer: to make its tensors takes several kernel launches."""
        leaves = [self.bounds] if self.cells is None else [self.bounds, self.cells]
        if not can_keep_tensors() or not all(map(_sync.has_stamp, leaves)):
            return self._make_mask_mod(joins_ends)
        setting = joins_ends, torch.is_inference_mode_enabled()  # whose tensors have no gradients elsewhere
        known = self._mask_mods.get(setting)
        if known is None or not known.stamp.holds(leaves):
            known = _sync.Stamped(_sync.Stamp(leaves, copies=False), self._make_mask_mod(joins_ends))
            self._mask_mods[setting] = known
        return known.result

    def _make_mask_mod(self, joins_ends: bool) -> MaskMod:
        if self.cells is None:
            return interval_mod(self._rows(), self.shape[:3], self.band, joins_ends=joins_ends)
        of_cells = _cells_mod(self.cells)
        return of_cells if self.cells.shape[2] > 1 else _both(interval_mod(self._rows(), self.shape[:3]), of_cells)

    def _block_mask(self, mask_mod: MaskMod) -> BlockMask:
        tensors = self._lists or flat_lists(self._context(), self._rows(), self.cells, self.block_size)
        if not torch.compiler.is_compiling():
            self._lists = tensors
        lists = list(zip(tensors[::2], tensors[1::2], strict=True))
        return from_lists(lists, mask_mod, self.shape[2:], self.block_size)

    def dense(self) -> Tensor:
        """The mask as ``bool[B, H, q_len, kv_len]``."""
        kv = torch.arange(self.shape[3], device=self.device)
        visible = self._rows().holds(kv)
        return (visible if self.cells is None else visible & self.cells).expand(self.shape)

    def __bool__(self) -> NoReturn:
        raise OperandError(
            f"a LoweredMask has no single truth value: `and`, `or` and `not` do not compose masks, and `lowered is None` asks "
            f"whether there is one. {HINT}"
        )

    #: Looking up by index is no iteration, which would end in an error.
    __iter__: ClassVar[None] = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Torch calls this in place of a function that is given a LoweredMask."""
        name = getattr(function, "__name__", str(function)).strip("_")
        if "checkpoint" in name:
            raise OperandError(
                "in compiled code write checkpoint(lambda x: layer(x, lowered), x): it takes no LoweredMask as an argument"
            )
        raise OperandError(f"torch's function {name} takes tensors, not a LoweredMask. {HINT}")

    def __getattr__(self, name: str) -> NoReturn:
        """Says what to write for an attribute of a tensor or of a Mask."""
        hint = "" if name.startswith("_") else f". {HINT}"
        raise AttributeError(f"'LoweredMask' object has no attribute {name!r}{hint}", name=name, obj=self)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same value with its tensors on a device; for ``non_blocking`` see :meth:`torch.Tensor.to`."""
        if not isinstance(device, torch.device | str):
            raise OperandError(f"LoweredMask.to takes a torch.device or its name, e.g. 'cuda:0', got {kind_of(device)}")
        check_flag(non_blocking, "non_blocking")
        where = _sync.resolve_device(device)
        return cast(Self, tree_map_only(Tensor, lambda tensor: tensor.to(where, non_blocking=non_blocking), self))

    def pin_memory(self) -> Self:
        """The same value with its tensors in pinned memory, as a ``DataLoader(pin_memory=True)`` asks for."""
        return cast(Self, tree_map_only(Tensor, Tensor.pin_memory, self))

    def __getitem__(self, index: int | slice) -> Self:
        """The mask of some sequences of the batch: an index, which keeps the axis, or a slice."""
        if isinstance(index, bool) or not isinstance(index, int | slice):
            raise OperandError(f"a LoweredMask is indexed by sequences, an int or a slice, got {kind_of(index)}")
        batch = self.shape[0]
        if isinstance(index, int) and not -batch <= index < batch:
            raise LoweringError(f"the LoweredMask has {batch} sequences, so there is none at {index}")
        part = slice(index, index + 1 or None) if isinstance(index, int) else index
        if not all(end is None or type(end) is int for end in (part.start, part.stop, part.step)) or (part.step or 1) < 1:
            raise OperandError(f"a slice of a LoweredMask has integers as its ends and a step above 0, got {index}")
        number = len(range(batch)[part])
        if not number:
            raise LoweringError(f"the LoweredMask has {batch} sequences, of which {index} leaves none")
        (_, *leaves), layout = self.flatten()
        cut = [leaf[part] if isinstance(leaf, Tensor) and leaf.shape[0] == batch else leaf for leaf in leaves]
        return self.unflatten([number, *cut], layout)

    def flatten(self) -> tuple[list[Any], Any]:
        """The sizes and the tensors, and what :meth:`unflatten` takes with them."""
        cells = [] if self.cells is None else [self.cells]
        tensors = [self.bounds, *cells, *self.classes, *self._lists]
        return [*self.shape, *tensors], (len(cells), len(self.classes), self.block_size, self.band)

    @classmethod
    def unflatten(cls, leaves: Iterable[Any], layout: Any) -> Self:
        """The LoweredMask of the two results of :meth:`flatten`."""
        batch, heads, q_len, kv_len, bounds, *rest = leaves
        cells, count, block_size, band = layout
        classes, lists = tuple(rest[cells : cells + count]), tuple(rest[cells + count :])
        shape = batch, heads, q_len, kv_len
        return cls(shape, bounds, rest[0] if cells else None, block_size, lists, band, classes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mask_mods": {}}  # closures cannot be pickled

    def __repr__(self) -> str:
        kind = "key intervals" if self.cells is None else "key intervals and cells"
        return f"LoweredMask(shape={self.shape}, {self.bounds.shape[3]} {kind}, block_size={self.block_size}, {self.device})"

    def _rows(self) -> Rows:
        lo, hi = self.bounds.unbind(-1)
        return Rows(lo, hi, self.shape[3])

    def _context(self) -> Context:
        batch, heads, q_len, kv_len = self.shape
        own = self.bounds.shape[0] if self.cells is None else max(self.bounds.shape[0], self.cells.shape[0])
        return Context(Truth(True), q_len, kv_len, own, batch, heads, 0, None, self.device)


def outside_inference_mode(lowered: LoweredMask) -> LoweredMask:
    """The same value, of tensors that a backward pass may save: copies of those that were made in inference mode."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not lowered.bounds.is_inference():
        return lowered
    return cast(LoweredMask, tree_map_only(Tensor, torch.clone, lowered))


def flat_lists(context: Context, rows: Rows, cells: Tensor | None, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    """The lists of a BlockMask, given the key intervals and the cells of a :class:`LoweredMask`.

    Their tensors are one after the other, the numbers of blocks before the indices of each.
    """
    if cells is None:
        lists = block_lists(RowBounds(rows, rows), context, sizes)
    else:
        lists = grid_lists([*BlockGrid(context, *sizes).from_cells(rows, cells)], context.full_batch, None)
    return tuple(tensor for block_list in lists for tensor in block_list)


def _cells_mod(cells: Tensor) -> MaskMod:
    own, axes = without_unit_axes(cells, 3)
    return lambda b, h, q_idx, kv_idx: own[(*[(b, h, q_idx)[axis] for axis in axes], kv_idx)]


def _both(one: MaskMod, two: MaskMod) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: one(b, h, q_idx, kv_idx) & two(b, h, q_idx, kv_idx)


torch.serialization.add_safe_globals([LoweredMask])  # it holds tensors and numbers alone, so torch.load may make one
register_pytree_node(LoweredMask, LoweredMask.flatten, LoweredMask.unflatten, serialized_type_name="flexmask.LoweredMask")


# ---------------------------------------------------------------- of other BlockMasks


def from_block_mask(block_mask: BlockMask) -> tuple[Tensor, Tensor | MaskMod]:
    """The bounds ``int32[B', H', Q', K, 2]`` and the cells of a BlockMask; see :class:`LoweredMask`.

    The cells are a ``mask_mod``. In a graph, where values cannot be read, they are ``bool[B, H, q_len, kv_len]``, and the bounds
    hold all keys.

    A key is visible in a full block, and in a partial block where the ``mask_mod`` shows it. The layers of a model read the lists
    of a BlockMask once.

    Raises:
        LoweringError: the number of cells is too great for a graph.
    """
    lists = [getattr(block_mask, f"{kind}kv_{part}") for kind in ("", "full_") for part in ("num_blocks", "indices")]
    lists = [tensor for tensor in lists if tensor is not None]
    if is_captured() or not all(map(_sync.has_stamp, lists)):
        return _read(block_mask)
    setting = block_mask.seq_lengths, block_mask.BLOCK_SIZE, block_mask.mask_mod, torch.is_inference_mode_enabled()
    known = _KNOWN.get(block_mask)
    if known is None or not known.stamp.holds(lists, setting):
        _KNOWN[block_mask] = known = _sync.Stamped(_sync.Stamp(lists, setting), _read(block_mask))
    return known.result


#: What was read from the lists of the BlockMasks in use.
_KNOWN: WeakKeyDictionary[BlockMask, _sync.Stamped[tuple[Tensor, Tensor | MaskMod]]] = WeakKeyDictionary()


def _read(block_mask: BlockMask) -> tuple[Tensor, Tensor | MaskMod]:
    """See :func:`from_block_mask`."""
    q_len, kv_len = block_mask.seq_lengths
    q_size, kv_size = block_mask.BLOCK_SIZE
    partial = _grid(block_mask.kv_num_blocks, block_mask.kv_indices, -(-kv_len // kv_size))
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _grid(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, full.shape[3])
    batch, heads, device = *partial.shape[:2], partial.device
    mod = block_mask.mask_mod

    def cells(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = b * int(batch > 1), h * int(heads > 1), q_idx // q_size, kv_idx // kv_size
        visible: Tensor = full[own] | vectorized(mod, b, h, q_idx, kv_idx)
        return visible

    if is_captured():
        count = batch * heads * q_len * kv_len
        if count > MAX_CELLS:
            raise LoweringError(
                f"a graph evaluates all {count} cells of a BlockMask on this backend; at most {MAX_CELLS} are possible. Give "
                "it a LoweredMask of flexmask.plan()"
            )
        b, h, q, kv = (torch.arange(size, device=device) for size in (batch, heads, q_len, kv_len))
        own = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), (q // q_size).unsqueeze(-1), kv // kv_size
        visible = full[own] | (partial[own] & create_mask(mod, batch, heads, q_len, kv_len, device))
        return Rows.everything(kv_len, device).bounds, visible
    listed = runs((partial | full).flatten(0, 2)[:, None], full.shape[3])
    rows = torch.arange(q_len, device=device) // q_size
    ends = [(end.view(*partial.shape[:3], -1)[:, :, rows] * kv_size).clamp(max=kv_len) for end in (listed.lo, listed.hi)]
    return torch.stack(ends, -1), cells


def _grid(number: Tensor, indices: Tensor, width: int) -> Tensor:
    """The listed blocks as ``bool[B, H, q_blocks, kv_blocks]``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < number.unsqueeze(-1)
    at = torch.where(listed, indices.long(), width)  # unused entries go to a column that is cut off
    grid = torch.zeros((*number.shape, width + 1), dtype=torch.bool, device=indices.device)
    return grid.scatter_(-1, at, True)[..., :width]
