"""One mask for all that differ in their tensors alone: what is worked out about it serves each of them, also one made anew."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, cast

import torch

from flexmask._transforms import is_captured, is_observed, outside_transforms
from flexmask.expr.mask import Mask
from flexmask.expr.opaque import Opaque
from flexmask.expr.tables import Literal

__all__ = ["shared_form"]

#: The most masks that are kept, those used last.
MAX_FORMS = 128

_FORMS: OrderedDict[Any, Mask] = OrderedDict()
_LOCK = Lock()


def shared_form(mask: Mask) -> Mask:
    """The mask of the same structure, with tensors without values of the same shapes in the places of :attr:`Mask.tensors`.

    It is the mask itself where it is not shared: with a function or data by value, whose memory would stay in use; in a graph
    that is captured; and for tensors without values.
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
    if any(isinstance(node, Opaque | Literal) for node in mask.expand().walk()):
        return mask
    with outside_transforms():
        places = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in mask.tensors]
    form = mask.with_tensors(places) if places else mask
    with _LOCK:
        form = _FORMS.setdefault(key, form)
        while len(_FORMS) > MAX_FORMS:
            _FORMS.popitem(last=False)
        return form
