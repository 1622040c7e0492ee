"""The lowering context: the lengths, sizes, offset and device of one lowering, and the mask's data as tensors that fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import flexmask.expr.pytree  # noqa: F401 - here torch is loaded, so masks are pytrees from now on
from flexmask._transforms import are_ints
from flexmask.expr.form import filled
from flexmask.expr.index import Constant, Symbol
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.expr.node import Node

#: The greatest length, batch, number of heads or block size; rows hold positions as 32-bit integers.
MAX_LENGTH = 2**30

N = TypeVar("N", bound=Node)


class Tables(dict[Any, Tensor]):
    """The data of a mask by the key of its node. Data that is derived from other data is computed when it is first looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.derived: dict[Any, Callable[[], Tensor]] = {}

    def __missing__(self, key: Any) -> Tensor:
        self[key] = made = self.derived[key]()
        return made

    def cloned(self) -> Tables:
        """Copies of all data, which later changes of the originals do not reach."""
        copies = Tables()
        copies.update({key: self[key].clone() for key in (*self, *self.derived)})
        return copies


@dataclass(frozen=True, eq=False)
class Context:
    """What a mask is lowered with.

    Attributes:
        mask: the form of the mask with names expanded. Only its nodes and those of ``named`` are evaluated in the context, as
            those of the user's mask have other keys.
        q_len: number of queries.
        kv_len: number of keys.
        batch: sequences, 1 where the mask is the same for all.
        full_batch: sequences, whether or not the mask is the same for all; 1 where the number is unknown.
        heads: heads, 1 where the mask is the same for all.
        q_offset: position of the first query: an int, or ``int64[B]`` on the device.
        q_end: one more than the position of the last query; None where reading it forces a host sync.
        device: where results are made.
        tables: the mask's data on the device, by the key of its node.
        stops: for documents given by lengths, the first position behind each, by the key of their table: see
            :func:`flexmask.intervals.documents.document_stops`.
        extents: value ranges computed so far: see :func:`flexmask.intervals.extent.extent`.
        source: the user's mask, which has the data.
        blocks: how many block rows and block columns there are, by the size of a block, where they are inputs of a graph.
    """

    mask: Mask
    q_len: int
    kv_len: int
    batch: int
    full_batch: int
    heads: int
    q_offset: int | Tensor
    q_end: int | None
    device: torch.device
    tables: Tables = field(default_factory=Tables, repr=False)
    stops: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    extents: dict[int, dict[Any, tuple[int, int] | None]] = field(default_factory=dict, repr=False)
    source: Mask = field(default=ALL_CELLS, repr=False)
    blocks: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def named(self) -> Mask:
        """The form of the mask with its names."""
        return self.source.form

    def filled(self, node: N) -> N:
        """A node of the context's forms with the user's data, as texts have it."""
        return filled(node, self.source.held)

    def with_lengths(self, node: N) -> N:
        """The expression with ``q_len`` and ``kv_len`` replaced by their values, where these are numbers."""
        if not node.symbols & {"q_len", "kv_len"} or not are_ints(self.q_len, self.kv_len):
            return node
        lengths = {"q_len": Constant(self.q_len), "kv_len": Constant(self.kv_len)}
        return cast(N, node.replace(lambda below: lengths.get(below.name) if isinstance(below, Symbol) else None))

    def of_queries(self, start: int, stop: int) -> Context:
        """The context of the queries ``start <= q < stop`` of a sequence, with all of its keys."""
        mask = self.with_lengths(self.mask)
        return replace(self, mask=mask, q_len=stop - start, q_offset=start, q_end=stop, extents={}, blocks={})

    @property
    def begins_at_0(self) -> bool:
        """Whether the first query is known to be at position 0."""
        return isinstance(self.q_offset, int) and self.q_offset == 0

    def size(self, name: str) -> int:
        """How many values an index symbol has."""
        return {"b": self.batch, "h": self.heads, "q": self.q_len, "kv": self.kv_len}[name]

    def index(self, name: str) -> Tensor:
        """All values of an index symbol, ``int64``; ``q`` counts from 0 whatever the offset."""
        return torch.arange(self.size(name), device=self.device)

    def grid(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four index tensors of a whole ``[B, H, q_len, kv_len]``, each along its own axis."""
        names = ("b", "h", "q", "kv")
        b, h, q, kv = (self.index(name).view([-1 if i == axis else 1 for i in range(4)]) for axis, name in enumerate(names))
        return b, h, q, kv
