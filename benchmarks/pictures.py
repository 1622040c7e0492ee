"""Pictures of packed masks as files, compared with a dense mask drawn as an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.nn.attention.flex_attention import create_mask

from benchmarks.workloads import Workload
from flexmask import causal

__all__ = ["drawings"]

#: Tokens up to which the dense mask is drawn: twice as many take more than 16 GB.
MOST_DENSE = 2**14


def drawings(work: Workload) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Each kind of picture of a mask, with what draws it."""
    mask, length = work.mask(), work.length

    def saved(name: str, **options: object) -> Callable[[], object]:
        def run() -> None:
            with TemporaryDirectory() as folder:
                mask.save_picture(Path(folder) / name, length, **options)  # type: ignore[arg-type]

        return run

    def dense() -> None:
        cells = create_mask(work.mask_mod, None, None, length, length, device="cpu")[0, 0]
        figure = Figure(figsize=(6, 6), dpi=200)
        FigureCanvasAgg(figure)
        figure.add_subplot().imshow(cells.to(torch.uint8).numpy())
        with TemporaryDirectory() as folder:
            figure.savefig(Path(folder) / "mask.png")

    peers: dict[str, Callable[[], object]] = {"create_mask and imshow": dense} if length <= MOST_DENSE else {}
    yield "visible cells, .png", {"flexmask": saved("mask.png"), **peers}
    yield "why cells are hidden, .png", {"flexmask": saved("mask.png", why=True)}
    yield "against causal, .png", {"flexmask": saved("mask.png", against=causal())}
    yield "interactive, .html", {"flexmask": saved("mask.html")}
