"""One analyzed mask for all masks of one structure, shapes and dtypes: its solved comparisons are used again, its data is not."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, cast

import torch

from flexmask._transforms import is_captured, is_observed, outside_transforms
from flexmask.expr.mask import Compare, Mask
from flexmask.expr.opaque import Opaque
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Literal, Lookup
from flexmask.intervals.documents import is_at_positions
from flexmask.intervals.solve import is_separable, separate

__all__ = ["shared_form"]

#: The most masks that are kept, those used last.
MAX_FORMS = 128

_FORMS: OrderedDict[Any, Mask] = OrderedDict()
_LOCK = Lock()


def shared_form(mask: Mask) -> Mask:
    """A mask of the same structure, shared by all masks of that structure, shapes and dtypes; its tensors have no values.

    It is the mask itself where tensors would be kept with a form: with functions, data by value, and runs of equal values; in a
    graph that is captured; and for tensors without values.
    """
    if "form" not in mask.memo:
        if is_captured() or any(map(is_observed, mask.tensors)):
            return mask
        found = _form(mask)
        mask.memo["form"] = None if found is mask else found  # kept as long as the mask, without a cycle
    form = cast("Mask | None", mask.memo["form"])
    return mask if form is None else form


def _form(mask: Mask) -> Mask:
    key = mask.structure, tuple((tensor.shape, tensor.dtype) for tensor in mask.tensors)
    with _LOCK:
        form = _FORMS.get(key)
        if form is not None:
            _FORMS.move_to_end(key)
            return form
    whole = mask.expand()  # as lowerings solve it, so that this is done once
    if any(isinstance(node, Opaque | Literal) for node in whole.walk()) or any(map(_has_runs, separate(whole).walk())):
        return mask
    with outside_transforms():
        places = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in mask.tensors]
    form = mask.with_tensors(places) if places else mask
    with _LOCK:
        form = _FORMS.setdefault(key, form)
        while len(_FORMS) > MAX_FORMS:
            _FORMS.popitem(last=False)
        return form


def _has_runs(node: object) -> bool:
    """Whether the rows of a condition follow from runs of equal values, which are kept with its nodes."""
    if not isinstance(node, Compare) or node.sign not in ("==", "!=") or not is_separable(node):
        return False
    match node.left, node.right:  # documents given by lengths have stops in place of runs
        case (
            Lookup(DocumentTable(rule) | DocumentTable("starts", DocumentTable(rule)) as table, indices),
            Lookup(DocumentTable() as other, others),
        ) if rule in COVERING and table == other:
            return not (is_at_positions(indices) and is_at_positions(others))
    return True
