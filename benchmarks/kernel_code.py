"""``python -m benchmarks.kernel_code``: the instructions of FlexAttention's Triton kernels, compiled without a GPU.

For each mask those of the loop over partial blocks in the forward pass, next to those of the same mask by hand. It needs a CUDA
build of torch, and up to an hour of one core.
"""

from __future__ import annotations

import re
import subprocess
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch._inductor.utils import fresh_cache
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import flexmask
from benchmarks.kernel_workloads import counted_workloads, further_kernel_workloads, kernel_workloads
from benchmarks.workloads import Workload
from tests.kernels import virtual_gpu

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "kernel_code.md"
GPUS = {"sm_80": virtual_gpu.A100, "sm_90": virtual_gpu.H100, "sm_100": virtual_gpu.B200, "sm_120": virtual_gpu.RTX}
CHANNELS = 128, 64
HEADS, LENGTH = 2, 2048
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:\d+|T)\s+)?([A-Z0-9_.]+)(.*)")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class Code(NamedTuple):
    """A kernel in machine code.

    Attributes:
        loop: instructions of its loop over partial blocks.
        spills: instructions of the whole kernel that store and load spilled registers.
    """

    loop: int
    spills: int


def workloads() -> list[Workload]:
    """The masks whose kernels are counted."""
    return [make for group in (kernel_workloads, further_kernel_workloads, counted_workloads) for make in group(LENGTH, "cpu")]


def counted(gpu: str, channels: int) -> list[tuple[Code, Code]]:
    """The code of each mask by hand and by flexmask, for a GPU and a width of heads.

    It patches torch, so it runs in a process of its own.
    """
    binaries: list[bytes] = []

    def compile_kernel(*args: Any, **options: Any) -> Any:
        built = compiled(*args, **options)
        if "tem_fused_flex_attention" in built.metadata.name:
            binaries.append(built.asm["cubin"])
        return built

    def code_of(mask: BlockMask) -> Code:
        torch.compiler.reset()
        binaries.clear()
        query, key, value = torch.randn(3, 1, HEADS, LENGTH, channels, dtype=torch.bfloat16, requires_grad=True)
        with fresh_cache():  # two masks may have one kernel
            torch.compile(flex_attention, backend=backend, fullgraph=True)(query, key, value, block_mask=mask)
        (binary,) = binaries
        return code(binary)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        backend = virtual_gpu.install(patch, GPUS[gpu])
        compiled = triton.compile
        patch.setattr(triton, "compile", compile_kernel)
        for work in workloads():
            ours, by_hand = (work.mask().block_mask(LENGTH, heads=work.heads, form="triton") for _ in range(2))
            by_hand.mask_mod = work.mask_mod
            found.append((code_of(by_hand), code_of(ours)))
            print(gpu, channels, work.name, *found[-1], flush=True)
    return found


def code(binary: bytes) -> Code:
    """Counts the instructions in a kernel's machine code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        lines = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    names: list[str] = []
    labels, jumps = {}, []
    for line in lines:
        if label := LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := INSTRUCTION.search(line):
            if instruction[1].startswith("BRA") and (target := TARGET.search(instruction[2])):
                jumps.append((target[1], len(names)))
            names.append(instruction[1])
    loops = [(labels[target], stop) for target, stop in jumps if labels.get(target, stop) < stop]
    products = [place for place, name in enumerate(names) if "MMA" in name]
    of_blocks = [loop for loop in loops if any(loop[0] <= place <= loop[1] for place in products)]
    # The loop over partial blocks is the first one of those that hold no other.
    start, stop = min(loop for loop in of_blocks if not any(other != loop and _holds(loop, other) for other in of_blocks))
    return Code(stop + 1 - start, sum(name.startswith(("LDL", "STL")) for name in names))


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def table(found: dict[tuple[str, int], list[tuple[Code, Code]]], name: str) -> str:
    """One count of each kernel, as a Markdown table."""
    lines = [["mask", *(f"{gpu}, {channels}" for gpu, channels in found)], ["---"] * (1 + len(found))]
    for place, work in enumerate(workloads()):
        lines.append([work.name, *(" / ".join(f"{getattr(code, name):,}" for code in codes[place]) for codes in found.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Counts and writes the report."""
    settings = list(product(GPUS, CHANNELS))
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(settings, pool.starmap(counted, settings, chunksize=1), strict=True))
    pairs = [(codes[place][0].loop, codes[place][1].loop) for codes in found.values() for place in range(len(codes))]
    more = sum(ours > by_hand for by_hand, ours in pairs)
    versions = f"flexmask {flexmask.__version__}, torch {torch.__version__}, Triton {triton.__version__}"
    text = f"""# Instructions of GPU kernels

{versions}. `python -m benchmarks.kernel_code`: FlexAttention's kernels for the forward pass, bfloat16, compiled to machine code
without a GPU. A cell has two numbers: of the mask by hand, and of `block_mask(form="triton")`, which backend `flex` takes, with
the same lists of blocks. In {more:,} of {len(pairs):,} cells flexmask's loop has more instructions than the one by hand.

## The loop over partial blocks

{table(found, "loop")}

## Stores and loads of spilled registers, in the whole kernel

{table(found, "spills")}
"""
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
