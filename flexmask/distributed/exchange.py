"""What ranks send each other: fingerprints of arguments, which are to agree, and tokens.

Tokens go by functional collectives, which autograd and ``torch.compile`` take. The gradient of an exchange is the reverse
exchange: what several ranks received adds up at the rank that sent it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexmask import _sync
from flexmask._checks import kind_of
from flexmask._transforms import is_transformed
from flexmask.distributed.query_units import KeyLists, sums
from flexmask.distributed.sharding import positions_of
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


# ---------------------------------------------------------------- tokens


#: From this share of the tokens of an all-gather on, one all-gather is used, which needs no copy of a token for each receiver.
GATHER_SHARE = 0.9

_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class TokenExchange:
    """Gives each rank the tokens of the sequence that it needs, in order, from those that hold them.

    Attributes:
        needed: the positions of the tokens that this rank gets, ``int64[m]``.
        gathers: whether every rank gets all tokens, of which it keeps these.
    """

    def __init__(self, held: KeyLists, needed: KeyLists, rank: int, group: Any, device: torch.device) -> None:
        """Works out what this rank sends and receives.

        Args:
            held: the tokens of each rank, on the CPU.
            needed: the tokens that each rank needs.
            rank: this rank.
            group: the process group.
            device: of the tokens.
        """
        sizes = held.sizes()
        self._group, self._most, ranks = group, int(sizes.max()), len(sizes)
        own, positions = positions_of(held.runs(rank)), positions_of(needed.runs(rank))
        sender, at = held.places(positions)
        first, last = torch.searchsorted(own, needed.lo), torch.searchsorted(own, needed.hi)
        self._sizes = sums(last - first, needed.unit, ranks).tolist(), sender.bincount(minlength=ranks).tolist()
        self._sent = positions_of(torch.stack((first, last), -1)).to(device)
        self.gathers = 0 < GATHER_SHARE * ranks * (ranks - 1) * self._most <= int(needed.beyond(held).sum())
        arrival = sender.argsort(stable=True).argsort()
        self._order = (sender * self._most + at if self.gathers else arrival).to(device)
        self.needed = positions.to(device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The needed tokens ``[m, ...]``, from those that this rank holds, ``[n, ...]``."""
        if self.gathers:
            padding = [0, 0] * (tokens.dim() - 1) + [0, self._most - tokens.shape[0]]
            arrived = _waited(_all_gather(_sendable(F.pad(tokens, padding)), 0, self._group))
        else:
            to_each, of_each = self._sizes
            arrived = _all_to_all(tokens.index_select(0, self._sent), of_each, to_each, self._group)
        needed: Tensor = arrived.index_select(0, self._order)
        return needed


class HeadExchange:
    """Gives each rank all tokens of a part of the heads, and back.

    Source: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
    """

    def __init__(self, held: KeyLists, rank: int, group: Any, device: torch.device) -> None:
        """As :class:`TokenExchange`."""
        positions = positions_of(held.intervals)
        self._group, self._sizes = group, held.sizes().tolist()
        self._own = [self._sizes[rank]] * len(self._sizes)
        self._place, self._order = positions.to(device), positions.argsort().to(device)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """All tokens of this rank's part of the heads, ``[B, heads / ranks, seq_len, D]``, from ``[B, heads, n, D]``, each."""
        ranks = len(self._sizes)
        rows = [tensor.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1) for tensor in tensors]
        widths = [row.shape[2] * row.shape[3] for row in rows]
        arrived = _all_to_all(torch.cat([row.flatten(2) for row in rows], -1), self._sizes, self._own, self._group)
        parts = arrived.index_select(0, self._order).split(widths, -1)
        return [part.unflatten(-1, row.shape[2:]).permute(1, 2, 0, 3) for part, row in zip(parts, rows, strict=True)]

    def scatter(self, tensor: Tensor) -> Tensor:
        """The tokens of this rank with all heads, ``[B, heads, n, D]``, from ``[B, heads / ranks, seq_len, D]``."""
        rows = tensor.permute(2, 0, 1, 3).index_select(0, self._place)
        arrived = _all_to_all(rows, self._own, self._sizes, self._group)
        heads: Tensor = arrived.unflatten(0, (len(self._sizes), self._own[0])).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return heads


def _all_to_all(rows: Tensor, of_each: list[int], to_each: list[int], group: Any) -> Tensor:
    """The rows that this rank gets, ``of_each`` rank so many, for those that it sends, ``to_each`` so many, in order."""
    return _waited(collectives.all_to_all_single_autograd(_sendable(rows), of_each, to_each, group))


def _sendable(rows: Tensor) -> Tensor:
    """The rows as collectives take them.

    Raises:
        LoweringError: they are transformed; collectives have no rules for that, and would give wrong values.
    """
    if is_transformed(rows):
        raise LoweringError(
            "tokens that ranks exchange take no transforms of torch.func (vmap, grad, jvp) and no forward-mode derivatives; use "
            "torch.autograd, and the batch in place of vmap"
        )
    return rows.contiguous()


def _waited(tensor: Tensor) -> Tensor:
    return cast(Tensor, collectives.wait_tensor(tensor))
