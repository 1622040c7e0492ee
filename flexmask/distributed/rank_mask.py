"""The mask of one rank: the key intervals of its queries, on the keys that it holds after the exchange.

A ContextParallel has one for each mask that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask._sync import Stamp
from flexmask.distributed.exchange import TokenExchange
from flexmask.errors import FlexmaskError, LoweringError
from flexmask.expr.deferred import DeferredMask
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.intervals.bounds import analyze
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.dense import CHUNK
from flexmask.parser import cached_mask, parse
from flexmask.plans.capture import lower
from flexmask.plans.lowered import MAX_CELLS, LoweredMask


def mask_of_queries(context: Context, runs: Tensor, keys: Tensor, block_size: tuple[int, int]) -> LoweredMask:
    """The mask at some queries and some keys. Only these queries are analyzed.

    The keys keep their order, and those that are left out are seen by none of the queries, so an interval of all keys is one of
    these keys.

    Args:
        context: of the whole sequence.
        runs: the positions of the queries, as intervals ``[lo, hi)`` in order, ``int64[n, 2]`` with n > 0.
        keys: the positions of the keys in order, ``int64[kv_len]`` with ``kv_len > 0``, on the context's device.
        block_size: queries and keys in a block.

    Raises:
        LoweringError: the mask is not separable in q and kv, and has too many cells.
    """
    parts = [context.of_queries(start, stop) for start, stop in runs.tolist()]
    bounds = [analyze(part) for part in parts]
    found = [part.upper for part in bounds]
    batch, heads = (max(rows.lo.shape[axis] for rows in found) for axis in (0, 1))
    whole = Rows.stacked([rows.expand(batch, heads, part.q_len) for rows, part in zip(found, parts, strict=True)], 2)
    positions = keys.to(torch.int32)
    lo, hi = (torch.searchsorted(positions, end.contiguous()).to(torch.int32) for end in (whole.lo, whole.hi))
    rows = Rows(lo, hi, len(keys)).joined()
    cells = None if all(part.exact for part in bounds) else _cells(context, parts, keys)
    shape = context.full_batch, context.heads, rows.lo.shape[2], len(keys)
    return LoweredMask(shape, rows.bounds, cells, block_size)


def mask_of_heads(context: Context, heads: range, block_size: tuple[int, int]) -> LoweredMask:
    """The mask of the whole sequence for some heads."""
    lowered = lower(context, (0, 0))
    if context.heads == 1:
        return LoweredMask(lowered.shape, lowered.bounds, lowered.cells, block_size, band=lowered.band)
    part = slice(heads.start, heads.stop)
    bounds, cells = (
        tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, part] for tensor in (lowered.bounds, lowered.cells)
    )
    assert bounds is not None, "every mask has key intervals"
    batch, _, *lengths = lowered.shape
    return LoweredMask((batch, len(heads), lengths[0], lengths[1]), bounds, cells, block_size)


def _cells(context: Context, parts: list[Context], keys: Tensor) -> Tensor:
    """The cells of the queries of all parts, ``bool[B', H', n, kv_len]``."""
    shape = context.batch, context.heads, sum(part.q_len for part in parts), len(keys)
    count = torch.Size(shape).numel()
    if count > MAX_CELLS:
        raise LoweringError(
            f"a part of {context.mask.brief()} is not separable in q and kv, so {count} cells of {list(shape)} are evaluated on "
            f"this rank; at most {MAX_CELLS} are possible. Use more ranks"
        )
    found, places = [], keys.view(1, 1, 1, -1)
    for part in parts:
        closure, (b, h, q, _) = mask_closure(part), part.grid()
        for rows in q.split(max(1, CHUNK * shape[2] // count), 2):
            found.append(closure(b, h, rows, places).expand(*shape[:2], rows.shape[2], -1))
    return torch.cat(found, 2)


@dataclass(frozen=True, eq=False)
class Declared:
    """A mask as this rank computes it.

    Attributes:
        mask: the mask of the whole sequence.
        sizes: the sequences and the query heads that a call must have; None where the mask is the same for all.
        lowered: the mask of the rank; None where it has no queries or no keys.
        keys: the exchange of keys; None where heads are exchanged.
        text: the text that makes an equal mask; None where it has tensors.
        stamp: of its tensors.
    """

    mask: Mask
    sizes: tuple[int | None, int | None]
    lowered: LoweredMask | None
    keys: TokenExchange | None
    text: str | None
    stamp: Stamp

    def check_unchanged(self) -> None:
        """Raises a LoweringError where the mask has other data since; not in compiled code, where it is a constant."""
        if not torch.compiler.is_compiling() and not self.stamp.holds(self.mask.tensors):
            raise LoweringError(
                f"the data of {self.mask.brief()} was changed after ContextParallel was made; make it again for other data"
            )


def find_declared(declared: Sequence[Declared], mask: Mask) -> Declared:
    """The declared mask that equals a mask, with the data that it had.

    Code that ``torch.compile`` traces compares no expressions: it finds the same object, or the text of an equal mask.

    Raises:
        LoweringError: there is none, or its data was changed.
    """
    is_traced = torch.compiler.is_compiling()
    for own in declared:
        if own.mask is mask or (_is_text_of(own, mask) if is_traced else own.mask == mask):
            own.check_unchanged()
            return own
    if is_traced:
        hint = "; in code that torch.compile traces, pass the declared mask itself, or write its text"
    elif any(own.mask.form.digest == mask.form.digest for own in declared):
        hint = "; its tensors are other objects, though the text is the same: use the declared mask"
    else:
        hint = ", with the same tensors"
    raise LoweringError(
        f"the mask {mask.brief()} is not declared: give it to ContextParallel(mesh, masks, seq_len), which has "
        f"{known(declared)}{hint}"
    )


def known(declared: Sequence[Declared]) -> str:
    """The declared masks, for messages."""
    return ", ".join(own.mask.brief() for own in declared)


def text_of(mask: Mask) -> str | None:
    """The text that makes an equal mask; None where it has tensors."""
    text = str(mask)
    try:
        return text if parse(text) == mask else None
    except FlexmaskError:
        return None


def _is_text_of(own: Declared, mask: Mask) -> bool:
    """Whether a mask that traced code makes of a text alone, or has by default, equals a declared one."""
    if isinstance(mask, DeferredMask):
        _, function, arguments, names = mask.call
        text = arguments[0][1] if function == "parse" and not names else None
    else:
        text = "full" if mask is ALL_CELLS else None
    return text is not None and own.text is not None and _are_equal(text, own.text)


def _are_equal(text: str, other: str) -> bool:
    return cached_mask(text) == cached_mask(other)


_are_equal._dynamo_marked_constant = True  # type: ignore[attr-defined] # texts are constants of traced code
