"""How long something takes and how much memory it needs at the most."""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Measurement", "measure", "measure_kernels", "wait"]

#: Time for all runs of a candidate.
SECONDS = {"cpu": 2.0, "cuda": 0.3}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Measurement:
    """What was measured of one candidate.

    Attributes:
        seconds: the median of the runs, of kernels the mean.
        runs: how many there were, without those that warm up.
        peak: bytes held at the most beyond those before the run, its result included; None where the system does not say.
        note: what else there is to say of it.
    """

    seconds: float
    runs: int
    peak: int | None
    note: str = ""


def measure(
    run: Callable[[Any], object],
    prepare: Callable[[], Any] = lambda: None,
    *,
    device: str = "cpu",
    seconds: float | None = None,
    most: int = 51,
) -> Measurement:
    """Measures ``run(prepare())``, of which only ``run`` counts.

    Args:
        run: what is measured.
        prepare: makes the argument of each run, before its time starts.
        device: ``"cpu"`` or ``"cuda"``, whose work is waited for.
        seconds: time for all runs, those of SECONDS by default; slow ones are run three times, or once where one alone takes as
            long as all may.
        most: runs at the most.
    """
    seconds = SECONDS[device] if seconds is None else seconds
    torch.empty(30 * 2**20, dtype=torch.uint8)  # as in a model, glibc keeps memory of this size once it was freed
    first = _timed(run, prepare(), device)  # compiles, loads, and grows the allocator
    if first > seconds:
        first = _timed(run, prepare(), device)
    runs = 1 if first > 5 * seconds else max(3, min(most, int(seconds / max(first, 1e-6))))
    if runs > 3:
        for _ in range(3):
            _timed(run, prepare(), device)
    times = [_timed(run, prepare(), device) for _ in range(runs)]
    return Measurement(statistics.median(times), runs, _peak(run, prepare(), device))


def measure_kernels(run: Callable[[], object], *, seconds: float = 0.1, most: int = 20) -> Measurement:
    """Measures for how long a GPU is busy with ``run()``: the sum of its kernels' times, the mean of all runs.

    Args:
        run: what is measured.
        seconds: time for all runs; there are at least three.
        most: runs at the most.
    """
    _timed(lambda _: run(), None, "cuda")  # compiles
    single = _timed(lambda _: run(), None, "cuda")
    runs = max(3, min(most, int(seconds / single)))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            run()
        wait("cuda")
    busy = sum(event.self_device_time_total for event in profiler.key_averages())
    return Measurement(busy * 1e-6 / runs, runs, _peak(lambda _: run(), None, "cuda"))


def _timed(run: Callable[[Any], object], argument: Any, device: str) -> float:
    wait(device)
    start = time.perf_counter()
    result = run(argument)
    wait(device)
    taken = time.perf_counter() - start
    del result
    return taken


def wait(device: str) -> None:
    """Waits until a device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(run: Callable[[Any], object], argument: Any, device: str) -> int | None:
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(argument)
        wait(device)
        return torch.cuda.max_memory_allocated() - before
    if not CLEAR.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would be used again unseen
    CLEAR.write_text("5")  # the greatest amount so far is forgotten
    before = _resident("VmRSS")
    run(argument)
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024
