"""The statistics of a mask, for JSON and for tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexmask.report.stats import Stats


def statistics(stats: Stats) -> dict[str, object]:
    """Every figure by its name."""
    derived = ("visible_fraction", "empty_blocks", "block_sparsity", "partial_fill", "cost")
    return asdict(stats) | {name: getattr(stats, name) for name in derived}


def statistics_rows(stats: Stats) -> list[tuple[str, str]]:
    """The statistics as pairs of a label and a text."""
    from flexmask.report.explain import memory_text

    return [
        ("cells", f"{stats.cells:,}"),
        ("visible", f"{stats.visible:,}"),
        ("visible fraction", f"{stats.visible_fraction:.2%}"),
        ("fully masked rows", f"{stats.fully_masked_rows:,}"),
        ("blocks", f"{stats.blocks:,}"),
        ("  full", f"{stats.full_blocks:,}"),
        ("  partial", f"{stats.partial_blocks:,}"),
        ("  empty", f"{stats.empty_blocks:,}"),
        ("block sparsity", f"{stats.block_sparsity:.2%}"),
        ("partial fill", f"{stats.partial_fill:.2%}"),
        ("BlockMask", memory_text(stats.block_mask_bytes)),
        ("  torch's own", memory_text(stats.torch_block_mask_bytes)),
        ("cost against dense", f"{stats.cost:,.2%}"),
    ]
