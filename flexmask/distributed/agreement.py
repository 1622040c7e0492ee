"""The process group of a mesh, and whether its ranks give the same arguments: a collective that compares fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexmask import _sync
from flexmask._checks import kind_of
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import And, Mask, Or, Xor
from flexmask.expr.node import Node


def group_of(mesh: Any) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension; all processes for None.

    Raises:
        LoweringError: there is none, or the mesh has more dimensions.
        OperandError: it is neither a mesh nor a group of this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise LoweringError(
            "torch.distributed has no process group: start the script with torchrun, and call "
            "torch.distributed.init_process_group() or init_device_mesh() first"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            hint = f"mesh[{names[-1]!r}]" if names else "one of its dimensions"
            raise LoweringError(f"mesh must have one dimension, got {mesh.ndim} of sizes {list(mesh.shape)}; take {hint}")
        return mesh.get_group()
    if mesh is None:
        mesh = dist.group.WORLD
    if not isinstance(mesh, dist.ProcessGroup):
        raise OperandError(
            f"mesh must be a DeviceMesh of one dimension or a process group this process is in, got {kind_of(mesh)}"
        )
    return mesh


def device_of(mesh: DeviceMesh | dist.ProcessGroup | None, group: dist.ProcessGroup) -> torch.device:
    """Where the tokens of a group's processes are."""
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return _sync.resolve_device(kind)


def check_agreement(arguments: Mapping[str, Any], error: Exception | None, group: Any, device: torch.device) -> None:
    """Compares the arguments of all ranks. Every rank of the group must call this.

    Args:
        arguments: by name; masks, and what has the same text on each rank.
        error: what this rank raises after this call, or None.
        group: the process group.
        device: where its tensors are.

    Raises:
        LoweringError: ranks whose arguments differ from those of rank 0, or that have an error.
    """
    own = [error is not None, *(0 if error else fingerprint(value) for value in arguments.values())]
    mine = torch.tensor(own, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    failed, *columns = torch.stack(every).cpu().T.tolist()
    if error is not None:
        raise error
    if any(failed):
        raise LoweringError(f"ranks {[rank for rank, bad in enumerate(failed) if bad]} of the group have an error; see theirs")
    for name, column in zip(arguments, columns, strict=True):
        others = [rank for rank, value in enumerate(column) if value != column[0]]
        if others:
            raise LoweringError(
                f"ranks {others} of the group differ from rank 0 in {name}; every rank must give the same arguments, and "
                "masks with the same data"
            )


def fingerprint(value: Any) -> int:
    """A number of 63 bits that is equal in all processes for equal masks, with equal data, or for values of equal text."""
    found: dict[int, str] = {}

    def content(part: Any) -> Any:
        if isinstance(part, tuple | list):
            return [*map(content, part)]
        if isinstance(part, Mask) and id(part) not in found:
            part = part.expand()
            for node in part.walk():
                parts = content(node._values())
                found[id(node)] = _digest([type(node).__name__, sorted(*parts) if isinstance(node, And | Or | Xor) else parts])
        if isinstance(part, Node):
            return found[id(part)]
        if isinstance(part, Tensor):
            data = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return str(part.dtype), list(part.shape), hashlib.sha256(data.numpy().tobytes()).hexdigest()
        if callable(part):
            code = getattr(part, "__code__", None)
            return getattr(part, "__module__", ""), getattr(part, "__qualname__", type(part).__qualname__), code and code.co_code
        return repr(part)

    return int(_digest(content(value))[:16], 16) >> 1


def _digest(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
