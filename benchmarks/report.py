"""The results as Markdown and as plots of time and memory over the sequence length."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch
from matplotlib.figure import Figure

import flexmask
from benchmarks.measuring import Measurement
from benchmarks.rows import Row, Section
from flexmask._checks import count_text

__all__ = ["write"]

#: The candidates of the plots, with color and marker.
CURVES = {
    "flexmask": ("#0072b2", "o"),
    "create_block_mask": ("#d55e00", "s"),
    "compiled create_block_mask": ("#009e73", "^"),
}


def write(sections: list[Section], device: str, folder: Path, command: str) -> None:
    """Writes ``<device>.md``, and the plots ``<device>-time.png`` and ``<device>-memory.png`` of a section BlockMask."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# Measurements on {device.upper()}", _machine(device, command)]
    for section in sections:
        if section.title == "BlockMask":
            sweep = [row for row in section.rows if row.name == section.rows[0].name]
            for kind in ("time", "memory"):
                _plot(sweep, kind, folder / f"{device}-{kind}.png")
                parts.append(f"![{kind} of a BlockMask over the sequence length]({device}-{kind}.png)")
    parts += [_table(section) for section in sections]
    (folder / f"{device}.md").write_text("\n\n".join(parts) + "\n")


def _machine(device: str, command: str) -> str:
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {count_text(torch.get_num_threads(), 'thread')}"
    )
    versions = f"flexmask {flexmask.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return (
        f"{name}; {versions}. `{command}`: medians, of kernels the mean; all candidates of a row in one process, one "
        "after the other. Memory is the most that was held beyond what was there before, the result included. A dash: not "
        "measured."
    )


def _processor() -> str:
    """The model of the processor where the system says it, with its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return f"{found[1]} ({platform.machine()})" if found else platform.machine()


def _table(section: Section) -> str:
    names = list(dict.fromkeys(name for row in section.rows for name in row.found))
    peers = [name for name in names if name != section.ours]
    heads = ["", "tokens", *names, *(f"{name} / {section.ours}" for name in peers), *(f"memory, {name}" for name in names)]
    lines = [f"## {section.title}", "", section.text, "", _line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
    for row in section.rows:
        found = [row.found.get(name) for name in names]
        ratios = [_ratio(row, name, section.ours) for name in peers]
        lines.append(_line([row.name, f"{row.length:,}", *map(_time, found), *ratios, *map(_memory, found)]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(found: Measurement | None) -> str:
    if found is None:
        return "-"
    value = found.seconds
    text = f"{value * 1e6:.0f} µs" if value < 1e-3 else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
    notes = [found.note] * bool(found.note) + ["1 run"] * (found.runs == 1 and not found.note)
    return ", ".join([text, *notes])


def _ratio(row: Row, peer: str, ours: str) -> str:
    if peer not in row.found or ours not in row.found:
        return "-"
    ratio = row.found[peer].seconds / row.found[ours].seconds
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _memory(found: Measurement | None) -> str:
    return "-" if found is None or found.peak is None else f"{found.peak / 2**20:,.1f} MiB"


def _plot(rows: list[Row], kind: str, path: Path) -> None:
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, (color, marker) in CURVES.items():
        found = [(row.length, row.found[name]) for row in rows if name in row.found]
        values = [one.seconds * 1e3 if kind == "time" else (one.peak or 0) / 2**20 for _, one in found]
        places = [(length, value) for (length, _), value in zip(found, values, strict=True) if value > 0]
        if places:
            axes.plot(*zip(*places, strict=True), label=name, color=color, marker=marker)
    axes.set(yscale="log", xlabel="tokens", ylabel="milliseconds" if kind == "time" else "MiB")
    axes.set_xscale("log", base=2)
    axes.set_title(f"BlockMask of packed documents: {kind}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Software": None})
