"""Masks of sequences that grow: data may reach beyond the tokens so far, and the first keys may be gone."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from flexmask.algebra import Mask
from flexmask.deriving import derive
from flexmask.errors import LoweringError
from flexmask.index import Constant, Index, Symbol, b, kv
from flexmask.nodes import Node
from flexmask.packing import Derived
from flexmask.tables import Lookup, Param, Ranged, Table, TensorTable

__all__ = ["grown"]


def grown(mask: Mask, end: int, batch: int, device: torch.device, first: int | Tensor = 0, *, complete: bool = False) -> Mask:
    """The mask of a whole sequence as one over the keys that are there.

    Data along queries and keys may have more values than there are tokens so far, and lengths may be those of the whole
    sequence.

    Args:
        mask: the mask.
        end: the position behind the last token so far.
        batch: sequences, which data with a batch axis must have.
        device: where tables of literal data are made.
        first: the position of the first key that is there, an int, or ``int[B]``; below 0 there is no key.
        complete: whether the keys are all there, as those of a context; then only data along the queries may be longer.

    Raises:
        LoweringError: an unbound parameter, or data that ends before the tokens do.
    """
    if mask.params:
        given = ", ".join(f"{name}=..." for name in mask.params)
        raise LoweringError(f"the mask {mask.brief()} has unbound parameters: give them with mask.bind({given})")
    grows = _Growth(end, batch, device, first, complete)
    moved = cast(Mask, mask.expand().replace(grows.node))
    return moved & (grows.kv >= 0) if isinstance(first, Tensor) else moved


class _Growth:
    """How each part of an expression changes."""

    def __init__(self, end: int, batch: int, device: torch.device, first: int | Tensor, complete: bool) -> None:
        self.complete = complete
        self.end, self.batch, self.device = end, batch, device
        self.shifts = isinstance(first, Tensor) or first != 0
        self.kv: Index = kv + (TensorTable(first)[b] if isinstance(first, Tensor) else first)
        self.tables: dict[object, Table] = {}

    def node(self, node: Node) -> Node | None:
        match node:
            case Lookup(Table() as source, indices):
                return Lookup(self.table(node, source, indices), tuple(cast(Index, i.replace(self.node)) for i in indices))
            case Symbol("kv") if self.shifts:
                return self.kv
            case Symbol("kv_len") if self.shifts:
                return Constant(self.end)
        return None

    def table(self, lookup: Lookup, source: Table, indices: tuple[Index, ...]) -> Table:
        """The table of a lookup, which may have values to spare where a position looks it up."""
        names = [index.name if isinstance(index, Symbol) else "" for index in indices]
        if self.complete and "q" not in names:
            return source  # the keys of a context are complete
        if not {"q", "kv"} & set(names):
            # A limit by the length is one by the whole sequence's, which nothing says.
            return Ranged(source.source, source.what, source.low, None) if isinstance(source, Ranged) else source
        sizes = dict(zip(names, source.shape, strict=True))
        if self.shifts and sizes.get("kv") is not None and cast(int, sizes["kv"]) < self.end:
            raise LoweringError(f"{lookup.brief()} has {sizes['kv']} values along kv, but the keys reach position {self.end}")
        if sizes.get("b", self.batch) != self.batch:
            return source  # which is refused, as always
        if source.key not in self.tables:
            self.tables[source.key] = TensorTable(self.values(source), spare=True)
        return self.tables[source.key]

    def values(self, source: Table | Param) -> Tensor:
        match source:
            case TensorTable(tensor):
                return tensor
            case Ranged(below):
                return self.values(below)
            case Derived(rule, below):
                values = self.values(below)
                return derive(rule, values, self.positions(rule, values))
        return cast(Table, source).to_tensor().to(self.device)

    def positions(self, rule: str, values: Tensor) -> int:
        """How many positions derived documents need: those of all tokens so far, and of all documents."""
        if values.device.type != "cpu" or rule not in ("lengths", "cu_seqlens"):
            return self.end
        totals = values.sum(-1) if rule == "lengths" else values[..., -1]
        return max(self.end, int(totals.max()))
