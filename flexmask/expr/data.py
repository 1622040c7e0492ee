"""Makes tables from data: from integers, lists, NumPy arrays and tensors, with checks of types, shapes and values."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from flexmask._checks import check_plain, is_tensor, kind_of, not_plain_reason
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.deferral import deferrable
from flexmask.expr.form import made
from flexmask.expr.index import Index, Symbol, as_index, b
from flexmask.expr.tables import Literal, Lookup, Param, Ranged, Role, Table, TensorTable, named_table

if TYPE_CHECKING:
    from torch import Tensor


class SupportsArray(Protocol):
    """A NumPy array, or an object that converts to one."""

    def __array__(self) -> Any: ...


#: Integers or truth values: a number, nested lists, a NumPy array, a tensor, a table, or a parameter.
Data: TypeAlias = "int | Sequence[Any] | SupportsArray | Tensor | Table | Param"

#: What to write for a tensor of floats, by the argument; for any other it holds numbers.
INSTEAD_OF_FLOATS = {
    "table": "take tensor.long() of whole numbers, or compare them, as in tensor > 0; numbers to add to scores are a score_mod",
    **dict.fromkeys(
        ("key_padding: hide", "query_padding: hide"),
        "take tensor != 0, of an additive mask (-inf for padding) as of one of 0 and 1",
    ),
    **dict.fromkeys(
        ("key_padding: keep", "query_padding: keep", "from_dense: table"),
        "of an additive mask, 0 for visible and -inf for hidden, take tensor == 0; of one of 0 and 1, tensor != 0",
    ),
}

#: How to pad lists of uneven lengths, by the argument.
PADDING = {
    "accept: path": "shorter paths with -1",
    "tree: parents": "shorter trees with -1, which are roots that no node attends to",
}

#: Axes that data may have; no mask looks up more than 4.
MAX_AXES = 16


@deferrable
def table(data: Data, name: str = "") -> Table:
    """Data to be looked up by index, e.g. ``table(ids)[b, q]``.

    Args:
        data: integers or truth values: an int, a (nested) list, a NumPy array, or a tensor. Literals are copied, a tensor
            is kept as it is.
        name: what texts and messages call a tensor: ``<name: int64[2, 16]>``.

    Raises:
        OperandError: ``data`` holds something else, e.g. floating point numbers; or ``name`` is no string.
        ExpressionError: lists of uneven lengths, or no values at all, but for a tensor whose first axis is of an empty batch.
    """
    if not isinstance(name, str):
        raise OperandError(f"table: name must be a string, got {kind_of(name)}")
    return named_table(as_table(data, "table"), name)


def named_data(data: object, name: str) -> object:
    """A tensor that a table can hold as a table with a name; other data as it is."""
    if not is_tensor(data):
        return data
    tensor = cast("Tensor", data)
    is_integral = not (tensor.is_floating_point() or tensor.is_complex() or str(tensor.dtype) == "torch.uint64")
    fits = is_integral and tensor.dim() > 0 and tensor.numel() > 0 and not not_plain_reason(tensor)
    return TensorTable(tensor, name=name) if fits else data


def as_table(data: object, what: str) -> Table:
    """As :func:`table`; ``what`` names the data in messages."""
    if isinstance(data, Table):
        return data
    if isinstance(data, Param):
        raise OperandError(f"{what}: a parameter is looked up as it is, {data.name}[b, q], without table()")
    if is_tensor(data):
        tensor = cast("Tensor", data)
        check_plain(tensor, what)
        if tensor.is_floating_point() or tensor.is_complex():
            instead = INSTEAD_OF_FLOATS.get(what, "take tensor.long()")
            raise OperandError(f"{what} must hold integers or truth values, got {tensor.dtype}: {instead}")
        if str(tensor.dtype) == "torch.uint64":
            raise OperandError(f"{what} must hold 64-bit integers or truth values, got torch.uint64. Convert it: .long()")
        if 0 in tensor.shape[1:]:  # there are no sequences in an empty batch
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
    raise OperandError(f"{what} must hold either 64-bit integers or truth values throughout, got {_list_item(strange, values)}")


def _list_item(item: object, values: list[Any]) -> str:
    """What stands in a list in place of a number, for a message; of tensors and arrays, how to make one of them."""
    if not isinstance(getattr(item, "shape", None), Sequence):
        return f"{type(item).__name__} {item!r}"
    stack = "torch.stack(list)" if is_tensor(item) else "numpy.stack(list)"
    is_even = len({tuple(getattr(value, "shape", ())) for value in values}) == 1
    return f"a list with {kind_of(item)}: take {stack}" + ("" if is_even else ", after padding all of them to one length")


def _from_numpy(given: Any, what: str) -> Literal:
    try:
        data = given.__array__()  # also of other containers, such as a pandas column
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
    if not isinstance(data, Sequence) or isinstance(data, str | bytes | bytearray):
        return ()
    if not most:
        raise ExpressionError(f"{what} has more than {MAX_AXES} lists within lists; give at most 4 axes")
    shapes = {_list_shape(item, what, most - 1) for item in data}
    if len(shapes) > 1:
        padding = PADDING.get(what, "lengths of documents with 0")
        raise ExpressionError(f"{what} has lists of uneven lengths or depth: {data!r}. Pad them to one length, {padding}.")
    return (len(data), *(shapes.pop() if shapes else ()))


def _flatten(data: Any, depth: int) -> list[Any]:
    if depth == 0:
        return [data]
    return list(data) if depth == 1 else [value for item in data for value in _flatten(item, depth - 1)]


def as_number(value: object, name: str) -> Index:
    """The value of a parameter that a mask uses as one integer.

    Raises:
        ExpressionError: data with axes, which a mask looks up.
        OperandError: another value.
    """
    if not (isinstance(value, list | tuple | range | Table) or is_tensor(value) or getattr(value, "shape", None)):
        return as_index(value)
    data = as_table(value, name)
    if data.shape:
        per_token = f"{name}[b, q] or {name}[b, kv] for one per token of each"
        places = f"{name}[b] for one per sequence" if len(data.shape) == 1 else per_token
        raise ExpressionError(
            f"{name} has the shape {list(data.shape)}, but the mask uses it as one number. Look a value up: write {places}"
        )
    return data[()]


def per_batch(data: Data, what: str, high: Symbol | None, *, low: int | None = 0, role: Role | None = None) -> Index:
    """One number of tokens for every sequence of the batch: ``data[b]``, or ``data`` where it is a single integer.

    Each must lie between ``low`` (None for no limit) and the length that ``high`` names. ``role``: see :class:`Ranged`.
    """
    if isinstance(data, Param):
        return data[b]
    values = as_table(data, what) if low is None else ranged(data, what, low, high, role=role)
    if len(values.shape) > 1:
        hint = "; of an attention_mask of 0 and 1 write keep=, of a key_padding_mask hide=" if role == "length" else ""
        raise ExpressionError(f"{what} must be an int or have one axis, the batch; got shape {list(values.shape)}{hint}")
    if values.boolean:
        hint = "; give a keep-mask as keep=" if role == "length" else ""
        raise OperandError(f"{what} must hold integers, got truth values{hint}")
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
        return made(Ranged, values, f"{what}, which must be {wanted},", 0, as_index(1))
    strange = next((number for number in values.values if number not in (0, 1)), None)
    if strange is not None:
        raise OperandError(f"{what} must be {wanted}, got {strange}")
    return Literal(values.size, bytes(list(values.values)), True)


def ranged(data: object, what: str, low: int, high: Symbol | None, *, role: Role | None = None) -> Table:
    """A table whose values must lie in a range: see :class:`Ranged`. Literal data is checked at once against ``low``."""
    values = as_table(data, what)
    source = values.source if isinstance(values, Ranged) else values
    if isinstance(source, Literal) and source.extent[0] < low:
        raise ExpressionError(f"{what} must be at least {low}, got {source.extent[0]}")
    return made(Ranged, source, what, low, high, role)
