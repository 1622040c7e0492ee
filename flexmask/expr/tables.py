"""Data that masks look up: literal tables, tensors, and parameters to be bound later.

Literal data (integers, lists, NumPy arrays) is kept by value and becomes a tensor only when a mask is lowered. A tensor is
kept as it is, compares by identity and stays on its device.
"""

from __future__ import annotations

import keyword
import operator
import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast
from typing import Literal as OneOf

from flexmask._checks import is_tensor, not_plain_reason
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.index import PRECEDENCE, Constant, Index, Symbol, as_index, b
from flexmask.expr.node import Key, Node, within_depth

if TYPE_CHECKING:
    from torch import Tensor

    class SupportsArray(Protocol):
        """A NumPy array, or what turns into one."""

        def __array__(self) -> Any: ...

    #: What holds integers or truth values: a number, nested lists, a NumPy array, a tensor, a table, or a parameter.
    Data: TypeAlias = "int | Sequence[Any] | SupportsArray | Tensor | Table | Param"

__all__ = [
    "Literal",
    "Lookup",
    "Param",
    "Ranged",
    "Table",
    "TensorTable",
    "along",
    "as_table",
    "param",
    "per_batch",
    "ranged",
    "table",
    "truths",
]


#: Axes that data may have; no mask looks up more than 4.
MAX_AXES = 16
#: Names that mean something in the text of a mask, so that no parameter can have them; named masks add theirs.
RESERVED = {"b", "h", "q", "kv", "q_len", "kv_len", "abs", "minimum", "maximum", "where", "table", "param"}
RESERVED |= {"document_ids", "document_starts"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Table(Node):
    """Integers or truth values (counted as 0 and 1) that are looked up by index: ``table(data)[b, q]``."""

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The size of each axis; None for one that grows to the length it is looked up at."""
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
        raise OperandError(f"{self} has no values until a mask is lowered")

    def __getitem__(self, indices: Index | int | tuple[Index | int, ...]) -> Lookup:
        return within_depth(Lookup(self, tuple(map(as_index, indices if isinstance(indices, tuple) else (indices,)))))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Literal(Table):
    """A table kept by value: ``data`` holds int64 values, or bytes of 0 and 1 where ``truth`` is set."""

    size: tuple[int, ...]
    data: bytes
    truth: bool

    @property
    def shape(self) -> tuple[int | None, ...]:
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
        if "extent" not in self.memo:
            values = array("b" if self.truth else "q", self.data)
            self.memo["extent"] = min(values), max(values)
        return cast("tuple[int, int]", self.memo["extent"])

    def tolist(self) -> Any:
        """The values as an integer or nested lists."""
        view = memoryview(self.data).cast("?" if self.truth else "q", cast(Any, self.size))
        return view.tolist() if self.size else view[()]

    def to_tensor(self) -> Tensor:
        import torch

        if type(torch.empty(0)) is not torch.Tensor:  # FakeTensorMode does not see what is made from a buffer
            return torch.tensor(self.tolist())
        return torch.frombuffer(bytearray(self.data), dtype=torch.bool if self.truth else torch.int64).view(self.size)

    def write(self, bare: bool) -> tuple[str, int]:
        return f"table({self.tolist()})", PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorTable(Table):
    """A tensor that the user handed in. It compares by identity and has no text form that reads back.

    Args:
        tensor: the values.
        may_be_longer: whether there may be more values than positions, as in a tensor that a traced function captured.
    """

    tensor: Tensor
    may_be_longer: bool = False

    def _make_key(self) -> Key:
        return Key(("TensorTable", id(self.tensor)))

    @property
    def shape(self) -> tuple[int | None, ...]:
        return tuple(self.tensor.shape)

    @property
    def boolean(self) -> bool:
        return str(self.tensor.dtype) == "torch.bool"

    def to_tensor(self) -> Tensor:
        return self.tensor

    def write(self, bare: bool) -> tuple[str, int]:
        return f"<{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}>", PRECEDENCE["atom"]


#: See :class:`Ranged`.
Role: TypeAlias = OneOf["length", "start"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranged(Table):
    """A table whose values must lie in ``low <= value <= high``, checked when a mask is lowered.

    Args:
        source: the values.
        what: their name, for the message, e.g. ``key_padding: lengths``.
        low: the least value allowed.
        high: the greatest, a number or what becomes one with ``q_len`` and ``kv_len``, or None for no limit.
        role: what the values say of padded sequences: their ``"length"``, without padding on the right, or their ``"start"``, the
            number of padding tokens on the left.
    """

    source: Table
    what: str
    low: int
    high: Index | None
    role: Role | None = None

    def _make_key(self) -> Key:
        return self.source.key  # the check does not change what the table says

    def _make_symbols(self) -> frozenset[str]:
        return frozenset()

    @property
    def shape(self) -> tuple[int | None, ...]:
        return self.source.shape

    @property
    def boolean(self) -> bool:
        return self.source.boolean

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
                f"a parameter's name must be a text, e.g. param('ids'), got {type(self.name).__name__} {self.name!r}"
            )
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise ExpressionError(f"a parameter's name must be an identifier and no keyword, got {self.name!r}")
        if self.name != (normal := unicodedata.normalize("NFKC", self.name)):
            raise ExpressionError(f"Python reads the name {self.name!r} as {normal!r}; name the parameter {normal!r}")
        if self.name in RESERVED:
            raise ExpressionError(f"{self.name} is the name of a symbol, mask or function; a parameter needs another name")
        Index.__post_init__(self)

    def __getitem__(self, indices: Index | int | tuple[Index | int, ...]) -> Lookup:
        return within_depth(Lookup(self, tuple(map(as_index, indices if isinstance(indices, tuple) else (indices,)))))

    def write(self, bare: bool) -> tuple[str, int]:
        return (self.name if bare else f"param({self.name!r})"), PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lookup(Index):
    """``table[index, ...]``: the value of a table at given indices, one for each axis."""

    table: Table | Param
    indices: tuple[Index, ...]

    def __post_init__(self) -> None:
        Index.__post_init__(self)
        if isinstance(self.table, Table) and len(self.table.shape) != len(self.indices):
            raise ExpressionError(
                f"{self.table} has {len(self.table.shape)} axes {list(self.table.shape)} but is looked up with "
                f"{len(self.indices)} indices [{', '.join(map(str, self.indices))}]"
            )

    def write(self, bare: bool) -> tuple[str, int]:
        indices = ", ".join(index.write(bare)[0] for index in self.indices) or "()"
        return f"{self.table.write(bare)[0]}[{indices}]", PRECEDENCE["atom"]


def write_data(data: Table | Param, bare: bool) -> str:
    """The text of data as an argument: a literal as a bare list, everything else as in an expression."""
    if isinstance(data, Ranged):
        return write_data(data.source, bare)
    return str(data.tolist()) if isinstance(data, Literal) else data.write(bare)[0]


def param(name: str) -> Param:
    """A value that is bound later: ``document(param("ids")).bind(ids=tensor)``. In text, any free name is one."""
    return Param(name)


def table(data: Data) -> Table:
    """Data to be looked up by index, e.g. ``table(ids)[b, q]``.

    Args:
        data: integers or truth values: an int, a (nested) list, a NumPy array, or a tensor. Literals are copied, a tensor
            is kept as it is.

    Raises:
        OperandError: ``data`` holds something else, e.g. floating point numbers.
        ExpressionError: lists of uneven lengths, or no values at all.
    """
    return as_table(data, "table")


def as_table(data: object, what: str) -> Table:
    """As :func:`table`; ``what`` names the data in messages."""
    if isinstance(data, Table):
        return data
    if isinstance(data, Param):
        raise OperandError(f"{what}: a parameter is looked up as it is, {data.name}[b, q], without table()")
    if is_tensor(data):
        tensor = cast("Tensor", data)
        if reason := not_plain_reason(tensor):
            raise OperandError(f"{what} must be a plain tensor, got {reason}")
        if tensor.is_floating_point() or tensor.is_complex():
            raise OperandError(
                f"{what} must hold integers or truth values, got {tensor.dtype}. Of an additive mask, 0 for visible and -inf for "
                "hidden, take tensor == 0; of a mask of 0 and 1, tensor != 0; of ids, lengths or positions, tensor.long()"
            )
        if str(tensor.dtype) == "torch.uint64":
            raise OperandError(f"{what} must hold 64-bit integers or truth values, got torch.uint64. Convert it: .long()")
        if tensor.numel() == 0:
            raise ExpressionError(f"{what} holds no values: its shape is {list(tensor.shape)}")
        return TensorTable(tensor)
    if hasattr(data, "__array__") and hasattr(data, "dtype"):
        return _from_numpy(data, what)
    size = _list_shape(data, what, MAX_AXES)
    values = _flatten(data, len(size))
    if not values:
        raise ExpressionError(f"{what} holds no values: {data!r}")
    kinds = {type(value) is bool for value in values}
    if kinds == {True}:
        return Literal(size, bytes(values), True)
    try:
        if kinds == {False}:
            return Literal(size, array("q", map(operator.index, values)).tobytes(), False)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers is no integer either
        pass
    strange = next((value for value in values if not isinstance(value, int)), values[0])
    raise OperandError(
        f"{what} must hold either 64-bit integers or truth values throughout, got {type(strange).__name__} {strange!r}"
    )


def _from_numpy(given: Any, what: str) -> Literal:
    try:
        data = given.__array__()  # of a column of a table, for one
    except Exception as error:  # an array of another library may be where NumPy cannot read it
        raise OperandError(f"{what} must be data that NumPy can read, got {type(given).__name__}: {error}") from error
    if data.dtype.kind not in "iub":
        raise OperandError(f"{what} must hold integers or truth values, got dtype {data.dtype}. Convert it: .astype(int)")
    if data.size == 0:
        raise ExpressionError(f"{what} holds no values: its shape is {list(data.shape)}")
    if data.dtype.kind == "u" and int(data.max()) >= 2**63:
        raise OperandError(f"{what} must hold 64-bit integers, got {int(data.max())}")
    truth = data.dtype.kind == "b"
    return Literal(tuple(data.shape), data.astype("?" if truth else "i8").tobytes(), truth)


def _list_shape(data: object, what: str, most: int) -> tuple[int, ...]:
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        return ()
    if not most:
        raise ExpressionError(f"{what} has more than {MAX_AXES} lists within lists; give at most 4 axes")
    shapes = {_list_shape(item, what, most - 1) for item in data}
    if len(shapes) > 1:
        raise ExpressionError(f"{what} has lists of uneven lengths or depth: {data!r}. Pad them to one length.")
    return (len(data), *(shapes.pop() if shapes else ()))


def _flatten(data: Any, depth: int) -> list[Any]:
    if depth == 0:
        return [data]
    return list(data) if depth == 1 else [value for item in data for value in _flatten(item, depth - 1)]


def per_batch(data: Data, what: str, high: Symbol | None, *, role: Role | None = None) -> Index:
    """One number of tokens for every sequence of the batch: ``data[b]``, or ``data`` where it is a single integer.

    Each must lie between 0 and the length that ``high`` names. ``role``: see :class:`Ranged`.
    """
    if isinstance(data, Param):
        return data[b]
    values = ranged(data, what, 0, high, role=role)
    if len(values.shape) > 1:
        hint = "; of an attention_mask of 0 and 1 write keep=, of a key_padding_mask hide=" if role == "length" else ""
        raise ExpressionError(f"{what} must be an int or have one axis, the batch; got shape {list(values.shape)}{hint}")
    if values.boolean:
        raise OperandError(f"{what} must hold integers, got truth values; give a keep-mask as keep=")
    return values[b] if values.shape else values[()]


def along(data: Table | Param, position: Index) -> Lookup:
    """The value at a position of a sequence: ``data[position]``, or ``data[b, position]`` where data has a batch axis."""
    if isinstance(data, Param) or len(data.shape) == 2:
        return data[b, position]
    return data[position]


def truths(data: object, what: str, meaning: str) -> Table:
    """Truth values, also given as 0 and 1, which is checked at once of literal data and of a tensor when a mask is lowered.

    Args:
        data: the values.
        what: their name, for messages.
        meaning: what True is for, for messages.
    """
    values = as_table(data, what)
    if values.boolean:
        return values
    wanted = f"boolean, True for {meaning}, or of 0 and 1"
    if not isinstance(values, Literal):
        return Ranged(values, f"{what}, which must be {wanted},", 0, Constant(1))
    numbers = _flatten(values.tolist(), len(values.size))
    strange = next((number for number in numbers if number not in (0, 1)), None)
    if strange is not None:
        raise OperandError(f"{what} must be {wanted}, got {strange}; token counts are lengths=")
    return Literal(values.size, bytes(numbers), True)


def ranged(data: object, what: str, low: int, high: Symbol | None, *, role: Role | None = None) -> Table:
    """A table whose values must lie in a range: see :class:`Ranged`. Literal data is checked at once against ``low``."""
    values = as_table(data, what)
    source = values.source if isinstance(values, Ranged) else values
    if isinstance(source, Literal):
        worst = min(_flatten(source.tolist(), len(source.size)))
        if worst < low:
            raise ExpressionError(f"{what} must be at least {low}, got {worst}")
    return Ranged(source, what, low, high, role)
