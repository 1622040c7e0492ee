"""The nodes of a mask on which its lowering depends: its data and what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexmask.expr.index import Symbol
from flexmask.expr.mask import Mask, PerHead
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup, Ranged, Slot
from flexmask.intervals.checks import AXES, Computed, is_computed
from flexmask.intervals.extent import Extent


@dataclass(frozen=True, slots=True)
class Parts:
    """The nodes of a mask that are validated, each once, operands before operations."""

    lookups: list[Lookup]
    slots: list[Slot]
    ranged: list[Ranged]
    switches: list[PerHead]
    computed: list[Computed]
    axes: list[tuple[Lookup, int, str]]  # which axis of a lookup has which axis of the mask; data that may be longer comes last


def parts_of(mask: Mask) -> Parts:
    """The parts of the form of a mask, found once and kept with it."""
    return mask.form.kept("parts", lambda: _parts(mask.form))


def _parts(form: Mask) -> Parts:
    found: dict[Any, Node] = {}
    for node in form.expand().walk():
        # What a table may hold depends on its use, so that one table can have several checks.
        use = (node.what, str(node.high)) if isinstance(node, Ranged) else may_be_longer(node)
        found.setdefault((node.key, use), node)
    nodes = list(found.values())
    ranges: dict[Any, Extent | None] = {}
    lookups = [node for node in nodes if isinstance(node, Lookup)]
    axes: list[tuple[Lookup, int, str]] = [
        (node, place, index.name)
        for node in sorted(lookups, key=may_be_longer)
        for place, index in enumerate(node.indices)
        if isinstance(index, Symbol) and index.name in AXES
    ]
    return Parts(
        lookups,
        [node for node in nodes if isinstance(node, Slot)],
        [node for node in nodes if isinstance(node, Ranged)],
        [node for node in nodes if isinstance(node, PerHead)],
        [node for node in nodes if isinstance(node, Computed) and is_computed(node, ranges)],
        axes,
    )


def may_be_longer(node: Node) -> bool:
    """Whether the data of a lookup may have more values than positions."""
    return isinstance(node, Lookup) and getattr(node.table, "may_be_longer", False)
