"""Masks as pytrees of their tensors, as ``torch.utils._pytree``, ``torch.export`` and ``torch.func`` see them.

So are the masks that traced code makes, before a graph is made: torch reads which types are pytrees when it begins.

It is imported with the expressions where torch is loaded, else with what lowers them or where the first tensor comes into a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch.utils._pytree import SequenceKey, register_pytree_node

from flexmask.expr.deferred import KINDS
from flexmask.expr.form import Held, filled
from flexmask.expr.mask import And, Compare, Mask, Named, Not, Or, PerHead, Truth, Xor
from flexmask.expr.tables import Slot


def _flatten(mask: Mask) -> tuple[list[Any], Mask]:
    return [held.tensor for held in mask.held], mask.form


def _flatten_with_keys(mask: Mask) -> tuple[list[Any], Mask]:
    return [(SequenceKey(number), held.tensor) for number, held in enumerate(mask.held)], mask.form


def _unflatten(leaves: Iterable[Any], form: Any) -> Mask:
    """The form with other leaves, which may be anything: they are checked where the mask is used."""
    slots = {slot.number: slot for slot in form.walk() if isinstance(slot, Slot)}
    return cast(Mask, filled(form, tuple([Held(leaf, slots[number]) for number, leaf in enumerate(leaves)])))


for _kind in (And, Compare, Named, Not, Or, PerHead, Truth, Xor):
    register_pytree_node(
        _kind,
        _flatten,
        _unflatten,
        serialized_type_name=f"flexmask.{_kind.__name__}",
        flatten_with_keys_fn=_flatten_with_keys,
    )
for _deferred in KINDS:
    register_pytree_node(_deferred, _deferred.flatten, _deferred.unflatten, serialized_type_name=f"flexmask.{_deferred.__name__}")
