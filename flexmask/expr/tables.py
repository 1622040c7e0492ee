"""Tables that masks look up: literal tables, tensors, and parameters to be bound later.

Literal data is kept by value and becomes a tensor only when a mask is lowered. A tensor is kept as it is, compares by identity
and stays on its device. :mod:`flexmask.expr.data` makes tables from a user's data.
"""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast
from typing import Literal as OneOf

from flexmask._checks import is_tensor
from flexmask.errors import ExpressionError, OperandError, TraceError
from flexmask.expr.deferral import deferrable
from flexmask.expr.form import Held, Key, NeedsDataError, Sizes, made
from flexmask.expr.index import PRECEDENCE, Index, as_index
from flexmask.expr.node import Node, within_depth

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Names that mean something in the text of a mask, so that no parameter can have them; named masks add theirs.
RESERVED = {"b", "h", "q", "kv", "q_len", "kv_len", "abs", "minimum", "maximum", "where", "table", "param"}
RESERVED |= {"document_ids", "document_starts", "subtree_ends"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Table(Node):
    """Integers or truth values (counted as 0 and 1) that are looked up by index: ``table(data)[b, q]``."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The size of each axis; None for one that grows to the length it is looked up at."""
        return self.form.shape_of(self.held)

    def shape_of(self, held: tuple[Held, ...]) -> tuple[int | None, ...]:
        """The shape of a form with data; None for all sizes of a form without."""
        raise NotImplementedError

    @property
    def boolean(self) -> bool:
        """Whether the values are truth values."""
        return False

    @property
    def constant(self) -> bool:
        """Whether the values can never change, as those of a tensor can."""
        return False

    def to_tensor(self) -> Tensor:
        """The values as a tensor: the user's own, or one made of literal data on the CPU, ``int64`` or ``bool``.

        Raises:
            OperandError: the table has no values until a mask is lowered.
        """
        raise OperandError(f"{self} has no values before a mask is lowered; data with values is flexmask.table(data)")

    def __getitem__(self, indices: Index | int | tuple[Index | int, ...]) -> Lookup:
        return looked_up(self, indices)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Literal(Table):
    """A table kept by value: ``data`` holds int64 values, or bytes of 0 and 1 where ``truth`` is set."""

    KEPT: ClassVar[bool] = False
    size: tuple[int, ...]
    data: bytes
    truth: bool

    def shape_of(self, held: tuple[Held, ...]) -> tuple[int | None, ...]:
        return self.size

    @property
    def boolean(self) -> bool:
        return self.truth

    @property
    def constant(self) -> bool:
        return True

    @property
    def extent(self) -> tuple[int, int]:
        """The least and the greatest value."""
        return self.kept("extent", lambda: (min(self.values), max(self.values)))

    @property
    def values(self) -> Sequence[int]:
        """The values in a row, truth values as 0 and 1."""
        return memoryview(self.data).cast("b" if self.truth else "q")

    def rows(self) -> list[list[int]]:
        """The values along the last axis, of each sequence where there are two axes."""
        return cast("list[list[int]]", self.tolist() if len(self.size) == 2 else [self.tolist()])

    def tolist(self) -> Any:
        """The values as an integer or nested lists."""
        view = memoryview(self.data).cast("?" if self.truth else "q", cast(Any, self.size))
        return view.tolist() if self.size else view[()]

    def to_tensor(self) -> Tensor:
        import torch

        if type(torch.empty(0, device="cpu")) is not torch.Tensor:  # FakeTensorMode does not see what is made from a buffer
            return torch.tensor(self.tolist(), device="cpu")
        return torch.frombuffer(bytearray(self.data), dtype=torch.bool if self.truth else torch.int64).view(self.size)

    def write(self, bare: bool) -> tuple[str, int]:
        return f"table({self.tolist()})", PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Slot(Table):
    """The place of a tensor in a form.

    Args:
        number: of the tensor in :attr:`Node.held`.
        axes: how many axes the tensor has.
        dtype: its dtype.
        may_be_longer, name, is_argument, is_list: see :class:`TensorTable`.
    """

    number: int
    axes: int
    dtype: torch.dtype
    may_be_longer: bool = False
    name: str = ""
    is_argument: bool = False
    is_list: bool = False

    def _make_key(self) -> Key:
        return Key("Slot", self.number, self.is_argument)

    def _make_slots(self) -> tuple[int, ...]:
        return (self.number,)

    @property
    def filled_kind(self) -> type[Node]:
        return TensorTable

    def _filled_values(self, made: dict[int, Node], held: tuple[Held, ...]) -> tuple[Any, ...]:
        return held[self.number].tensor, self.may_be_longer, self.name, self.is_argument, self.is_list

    def _with_numbers(self, numbers: dict[int, int]) -> Node:
        _, *others = self._values()
        return made(Slot, numbers[self.number], *others)

    def shape_of(self, held: tuple[Held, ...]) -> tuple[int | None, ...]:
        return tuple(held[self.number].tensor.shape) if held else Sizes((None,) * self.axes)

    def to_tensor(self) -> Tensor:
        raise NeedsDataError("the values of data")

    @property
    def boolean(self) -> bool:
        return str(self.dtype) == "torch.bool"

    def write(self, bare: bool) -> tuple[str, int]:
        named = f"{self.name}: " if self.name else ""
        return f"<{named}{str(self.dtype).removeprefix('torch.')}>", PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorTable(Table):
    """A tensor that the user handed in. It compares by identity and has no text form that reads back.

    Args:
        tensor: the values.
        may_be_longer: whether there may be more values than positions, as in a tensor that a traced function captured.
        name: what it is called in texts and messages: the user's name for it, the parameter that it is the value of, or the
            variable of a traced function.
        is_argument: whether it is an argument of an opaque call, as it is and of any dtype; otherwise it is looked up.
        is_list: whether it was a list of the mask, whose device does not count: it is copied to that of a lowering.
    """

    tensor: Tensor
    may_be_longer: bool = False
    name: str = ""
    is_argument: bool = False
    is_list: bool = False

    def __post_init__(self) -> None:
        import flexmask.expr.pytree  # noqa: F401 - so that the mask is one

        tensor, *others = self._values()
        form = made(Slot, 0, tensor.dim(), tensor.dtype, *others)
        self.take(form, (Held(self.tensor),))

    def _make_key(self) -> Key:
        return Key("TensorTable", id(self.tensor), self.is_argument)

    @property
    def boolean(self) -> bool:
        return str(self.tensor.dtype) == "torch.bool"

    def to_tensor(self) -> Tensor:
        return self.tensor

    def write(self, bare: bool) -> tuple[str, int]:
        named = f"{self.name}: " if self.name else ""
        return f"<{named}{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}>", PRECEDENCE["atom"]


#: See :class:`Ranged`.
Role: TypeAlias = OneOf["length"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranged(Table):
    """A table whose values must lie in ``low <= value <= high``, checked when a mask is lowered.

    Args:
        source: the values.
        what: their name, for the message, e.g. ``key_padding: lengths``.
        low: the least value allowed.
        high: the greatest, a number or what becomes one with ``q_len`` and ``kv_len``, or None for no limit.
        role: ``"length"`` where the values are those of padded sequences, without the padding on the right.
    """

    source: Table
    what: str
    low: int
    high: Index | None
    role: Role | None = None

    def _make_key(self) -> Key:
        return self.source.key  # its limits do not change what the table says

    def _make_symbols(self) -> frozenset[str]:
        return frozenset()

    def shape_of(self, held: tuple[Held, ...]) -> tuple[int | None, ...]:
        return self.source.shape_of(held)

    @property
    def boolean(self) -> bool:
        return self.form.source.boolean

    @property
    def constant(self) -> bool:
        return self.source.constant

    def to_tensor(self) -> Tensor:
        return self.source.to_tensor()

    def write(self, bare: bool) -> tuple[str, int]:
        return self.source.write(bare)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Param(Index):
    """A named value that is not known yet: an integer, or a table where it is looked up. Bound with ``mask.bind``."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise OperandError(
                f"a parameter's name must be a string, e.g. param('ids'), got {type(self.name).__name__} {self.name!r}"
            )
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise ExpressionError(f"a parameter's name must be an identifier and no keyword, got {self.name!r}")
        if self.name != (normal := unicodedata.normalize("NFKC", self.name)):
            raise ExpressionError(f"Python reads the name {self.name!r} as {normal!r}; name the parameter {normal!r}")
        if self.name in RESERVED:
            raise ExpressionError(f"{self.name} is the name of a symbol, mask or function; a parameter needs another name")
        Index.__post_init__(self)

    def __getitem__(self, indices: Index | int | tuple[Index | int, ...]) -> Lookup:
        return looked_up(self, indices)

    def _make_params(self) -> tuple[str, ...]:
        return (self.name,)

    def write(self, bare: bool) -> tuple[str, int]:
        return (self.name if bare else f"param({self.name!r})"), PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lookup(Index):
    """``table[index, ...]``: the value of a table at given indices, one for each axis."""

    table: Table | Param
    indices: tuple[Index, ...]

    def __post_init__(self) -> None:
        if isinstance(self.table, Table) and len(self.table.shape) != len(self.indices):
            indices = ", ".join(map(str, self.indices))
            axes, hint = len(self.table.shape), ""
            if (axes, len(self.indices)) == (2, 1):
                hint = f"; of data [B, S] write [b, {indices}]"
            elif (axes, len(self.indices)) == (1, 2) and indices.startswith("b, "):
                hint = f"; of data [S], the same for all sequences, write [{indices.removeprefix('b, ')}]"
            raise ExpressionError(
                f"{self.table} has {axes} {'axis' if axes == 1 else 'axes'} {list(self.table.shape)} but is looked up with "
                f"{len(self.indices)} indices [{indices}]{hint}"
            )
        Index.__post_init__(self)

    def comparison(self) -> str:
        # Where values are not known yet, as those of a parameter, they are most likely truth values: ids are compared with ids.
        is_truth = isinstance(self.table, Param) or self.table.boolean
        return f"({self.brief()} == 1)" if is_truth else Index.comparison(self)

    def write(self, bare: bool) -> tuple[str, int]:
        indices = ", ".join(index.write(bare)[0] for index in self.indices) or "()"
        return f"{self.table.write(bare)[0]}[{indices}]", PRECEDENCE["atom"]


@deferrable
def looked_up(table: Table | Param, indices: Index | int | tuple[Index | int, ...]) -> Lookup:
    """``table[indices]``."""
    indices = tuple(indices) if isinstance(indices, tuple | list) else (indices,)
    if isinstance(table, Param) and any(map(is_tensor, indices)):
        raise TraceError(
            f"the parameter {table.name} is looked up by tensors, as in a mask_mod, which has no parameters. Write an "
            f"expression, e.g. {table.name}[flexmask.b, flexmask.q] == {table.name}[flexmask.b, flexmask.kv]"
        )
    return within_depth(made(Lookup, table, tuple(map(as_index, indices))))


def write_data(data: Table | Param, bare: bool) -> str:
    """The text of data as an argument: a literal as a bare list, everything else as in an expression."""
    if isinstance(data, Ranged):
        return write_data(data.source, bare)
    return str(data.tolist()) if isinstance(data, Literal) else data.write(bare)[0]


def named_table(table: Table, name: str) -> Table:
    """A table with a name, if one is given, which texts and messages show where it holds a tensor."""
    return replace(table, name=name) if name and isinstance(table, TensorTable) else table


@deferrable
def param(name: str) -> Param:
    """A value that is bound later: ``document(param("ids")).bind(ids=tensor)``. In text, any free name is one."""
    return made(Param, name)
