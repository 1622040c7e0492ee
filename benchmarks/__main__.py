"""``python -m benchmarks``: measures flexmask and its peers and writes the report."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.report import write
from benchmarks.rows import Row
from benchmarks.sections import sections

RESULTS = Path(__file__).parent / "results"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to measure.")
@click.option("--quick", is_flag=True, help="A minute's version: fewer and shorter rows.")
@click.option("--only", multiple=True, metavar="TITLE", help="A section to measure; may be given several times.")
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the report.")
def main(device: str, quick: bool, only: tuple[str, ...], out: Path | None) -> None:
    """Measure flexmask side by side with its peers, and write tables and plots.

    Without -o, --quick and --only the results replace those in benchmarks/results.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device; measure with --device cpu")
    console = Console(stderr=True)
    torch.manual_seed(0)
    makers = sections(device, quick=quick)
    if unknown := [title for title in only if title not in makers]:
        raise click.BadParameter(f"got {unknown[0]!r}, wanted one of {', '.join(makers)}", param_hint="--only")
    found = [make() for title, make in makers.items() if not only or title in only]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(len(row.candidates) for section in found for row in section.rows))
        for section in found:
            for row in section.rows:
                for name, candidate in row.candidates.items():
                    progress.update(task, description=f"{section.title}: {row.name}, {row.length:,}: {name}")
                    if measured := candidate():
                        row.found[name] = measured
                    progress.advance(task)
                progress.console.print(_said(row), highlight=False, soft_wrap=True)
    folder = out or (None if quick or only else RESULTS)
    if folder:
        chosen = "".join(f" --only {shlex.quote(title)}" for title in only)
        write(found, device, folder, f"python -m benchmarks --device {device}{' --quick' if quick else ''}{chosen}")
        console.print(f"written to {folder}")


def _said(row: Row) -> str:
    times = ", ".join(f"{name} {found.seconds * 1e3:,.3f} ms" for name, found in row.found.items())
    return f"{row.name}, {row.length:,}: {times}"


if __name__ == "__main__":
    main()
