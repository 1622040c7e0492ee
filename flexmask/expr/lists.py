"""Lists in a mask that compiled code gets as an argument: constants of its graph, or inputs once their numbers changed."""

from __future__ import annotations

from flexmask.expr.form import Kept, Key
from flexmask.expr.index import Arithmetic
from flexmask.expr.mask import Mask
from flexmask.expr.node import Node
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Literal, Lookup, Ranged, TensorTable

#: By the digest of a lifted form, that of the first mask with it in compiled code.
TRACED = Kept(256)
#: Operations whose result on positions is solved for the key with known numbers alone.
WITH_NUMBERS = {"*", "%", "minimum", "maximum"}


def lifted(mask: Mask) -> Mask | None:
    """The mask with its lists for sequences, heads and documents as tensors, or None where there is no such list.

    Raises:
        AttributeError: tensors that are made now have no values later. So a guard of a graph fails, which asks for it.
    """
    from flexmask._transforms import can_keep_tensors, has_transforms

    if has_transforms() or not can_keep_tensors():
        raise AttributeError("tensors of lists are of no use within transforms and modes of torch")
    found: set[Key] = set()
    left: set[Key] = set()
    for node in mask.walk():
        if isinstance(node, Lookup) and (key := _list_of(node)) is not None:
            found.add(key)
        elif isinstance(node, Arithmetic) and node.sign in WITH_NUMBERS and node.symbols & {"q", "kv"}:
            left.update(below.key for below in node.walk() if isinstance(below, Literal))
    found -= left

    def tensor(node: Node) -> Node | None:
        return TensorTable(node.to_tensor(), is_list=True) if isinstance(node, Literal) and node.key in found else None

    return mask.replace(tensor) if found else None  # type: ignore[return-value]


def have_changed(mask: Mask) -> bool:
    """See :meth:`Mask.is_traced_with_other_lists`."""
    other: Mask | None = getattr(mask, "lifted", None)
    if other is None:
        return False
    digest: str = mask.form.digest
    first: str = TRACED.add(other.form.digest, digest)
    return first != digest


def _list_of(lookup: Lookup) -> Key | None:
    """The key of the list with a number for each sequence, head or document that is looked up, if it is one."""
    table = lookup.table
    if isinstance(table, DocumentTable) and table.rule in COVERING:
        table = table.source
    elif any(index.symbols & {"q", "kv"} for index in lookup.indices):
        return None  # with data along the tokens a graph may evaluate each cell
    table = table.source if isinstance(table, Ranged) else table
    return table.key if isinstance(table, Literal) else None
