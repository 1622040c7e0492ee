"""Processes on this machine that are the ranks of a gloo process group."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

#: Processes are forks of one that has imported what they run, which takes seconds once, not for each of them.
multiprocessing.set_forkserver_preload(["torch._dynamo", "tests.distributed.models"])

#: Seconds after which a collective that some rank does not join fails.
TIMEOUT = 120.0


def fork_ranks(world: int, function: Callable[..., Any], args: tuple[Any, ...], join: bool = True) -> Any:
    """Calls ``function(rank, *args)`` in so many processes, which may form a process group; what one raises is raised here."""
    return start_processes(function, args, world, join=join, start_method="forkserver")


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> None:
    """Calls ``function(rank, *args)`` in so many processes, a gloo group; what one raises is raised here.

    Args:
        world: processes.
        function: of a module, so that processes can import it.
        args: its further arguments.
        timeout: of collectives, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        fork_ranks(world, _start, (world, Path(folder) / "store", timeout, function, args))


def exit_codes(world: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[int | None]:
    """As :func:`run_ranks`, where processes may die: the exit code of each; 0 for one that raises nothing."""
    with tempfile.TemporaryDirectory() as folder:
        context = fork_ranks(world, _start, (world, Path(folder) / "store", timeout, function, args), join=False)
        for process in context.processes:
            process.join(TIMEOUT)
            process.kill()
        return [process.exitcode for process in context.processes]


def _start(rank: int, world: int, store: Path, timeout: float, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
