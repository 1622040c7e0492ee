"""The nodes of a mask on which its lowering depends: its data and what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from flexmask.expr.index import Absolute, Arithmetic, Symbol
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
    mask = mask.form
    if "parts" not in mask.memo:
        parts = Parts([], [], [], [], [], [])
        seen: set[Any] = set()
        ranges: dict[Any, Extent | None] = {}
        for node in mask.expand().walk():
            if not isinstance(node, Lookup | Slot | Ranged | PerHead | Arithmetic | Absolute):
                continue
            # What a table may hold depends on its use, so that one table can have several checks.
            use = (node.key, node.what, str(node.high)) if isinstance(node, Ranged) else (node.key, may_be_longer(node))
            if use in seen:
                continue
            seen.add(use)
            match node:
                case Lookup():
                    parts.lookups.append(node)
                    names = [index.name if isinstance(index, Symbol) else "" for index in node.indices]
                    parts.axes.extend((node, place, name) for place, name in enumerate(names) if name in AXES)
                case Slot():
                    parts.slots.append(node)
                case Ranged():
                    parts.ranged.append(node)
                case PerHead():
                    parts.switches.append(node)
            if isinstance(node, Computed) and is_computed(node, ranges):
                parts.computed.append(node)
        parts.axes.sort(key=lambda entry: may_be_longer(entry[0]))
        mask.memo["parts"] = parts
    return cast(Parts, mask.memo["parts"])


def may_be_longer(node: Node) -> bool:
    """Whether the data of a lookup may have more values than positions."""
    return isinstance(node, Lookup) and getattr(node.table, "may_be_longer", False)
