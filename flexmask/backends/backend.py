"""What a backend of attention is, the call that it runs, and the backends that are registered.

Where each process computes a part, :func:`flexmask.attention` calls something in place of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._checks import kind_of
from flexmask._sync import move_remedy
from flexmask.backends.dropout import Hashes, hashes_of, seed_tensor
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.mask import Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.context import Context
from flexmask.plans.lowered import LoweredMask
from flexmask.scores.score import ScoreMod

#: The output of a call, or a pair of it and the logsumexp.
Output: TypeAlias = Tensor | tuple[Tensor, Tensor]


class Call(NamedTuple):
    """The arguments of one call of :func:`flexmask.attention`, after its checks: shapes, dtypes and devices fit each other.

    Under autocast the tensors are cast already.

    Attributes:
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.
        value: ``[B, H_kv, kv_len, D_v]``.
        mask: a Mask, which is not lowered yet, a LoweredMask, a BlockMask, or None for no mask.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, or None. A score of :mod:`flexmask.scores` is one, too.
        scale: factor of the scores; None for ``1 / sqrt(D)``.
        enable_gqa: whether ``H_kv`` may be less than ``H``.
        q_offset: position of the first query, an int or ``int[B]``.
        dropout_p: probability that a weight is dropped.
        dropout_seed: as the caller gives it; see :meth:`hashes`.
        kernel_options: those of FlexAttention's kernels, or None. A backend that does not take them refuses the call;
            ``"auto"`` takes it nonetheless, for which they are advice.
        return_lse: whether the logsumexp is a result too.
        places: None, or where a call that is a part of another has its heads, queries and keys there: ``int64[H]``,
            ``int64[q_len]`` and ``int64[kv_len]``. The same weights are dropped as in the whole.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | LoweredMask | BlockMask | None = None
    score_mod: ScoreMod | None = None
    scale: float | None = None
    enable_gqa: bool = False
    q_offset: int | Tensor = 0
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    places: tuple[Tensor, Tensor, Tensor] | None = None
    kernel_options: Mapping[str, object] | None = None
    return_lse: bool = False

    def hashes(self) -> Hashes | None:
        """The hashes of dropout on the query's device; None without dropout."""
        if not self.dropout_p:
            return None
        device = self.query.device
        sizes = *self.query.shape[:3], self.key.shape[2]
        b, *rest = (torch.arange(size, device=device) for size in sizes)
        return hashes_of(seed_tensor(self.dropout_seed, device), b, *(self.places or rest))

    def bound(self, mask: Mask) -> Context:
        """A mask in the setting of the call."""
        (batch, heads, q_len, _), device = self.query.shape, self.query.device
        return bind(mask, q_len, self.key.shape[2], batch=batch, heads=heads, q_offset=self.q_offset, device=device)

    def needs_gradients(self) -> bool:
        """Whether autograd differentiates the output by query, key or value."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (self.query, self.key, self.value))


@dataclass(frozen=True, eq=False)
class Backend:
    """A way to compute attention.

    Args:
        name: what ``backend=`` takes.
        supports: gives None for a call that ``run`` can compute, else the reason why it cannot, as a sentence that says what to
            change.
        run: computes the output ``[B, H, q_len, D_v]``, 0 in fully masked rows, of a call that ``supports`` accepts; where its
            ``return_lse`` is True, a pair of it and the logsumexp ``[B, H, q_len]``. It runs without autocast.
        preferred_on: the types of devices, such as ``"cuda"``, on which ``backend="auto"`` tries it before the others.
        preferred_from: the fewest queries for which it does.
        automatic: whether ``backend="auto"`` may take it; else it is taken by its name alone.
    """

    name: str
    supports: Callable[[Call], str | None]
    run: Callable[[Call], Output]
    preferred_on: tuple[str, ...] = ()
    preferred_from: int = 1
    automatic: bool = True

    def reason_against(self, call: Call) -> str | None:
        """The answer of ``supports``.

        Raises:
            OperandError: it is neither None nor a text.
        """
        reason = self.supports(call)
        if reason is not None and not isinstance(reason, str):
            raise OperandError(
                f"supports of the backend {self.name!r} must return None for a call that it can run, else the reason why it "
                f"cannot, as a string; it returned {kind_of(reason)}"
            )
        return reason

    def is_preferred(self, call: Call) -> bool:
        """Whether ``backend="auto"`` tries it before the others."""
        on_device = call.query.device.type in self.preferred_on
        return on_device and (self.preferred_from == 1 or call.query.shape[2] >= self.preferred_from)

    def outputs(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """The output of a call, and the logsumexp where it is asked for.

        Raises:
            OperandError: ``run`` returns another number of tensors.
        """
        found = self.run(call)
        if isinstance(found, tuple) != call.return_lse:
            wanted = "the output and the logsumexp, as return_lse=True" if call.return_lse else "the output alone"
            raise OperandError(f"run of the backend {self.name!r} must return {wanted}, got {kind_of(found)}")
        return found if isinstance(found, tuple) else (found, None)


_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Makes a backend available as ``backend="NAME"`` of :func:`flexmask.attention` and to ``backend="auto"``.

    Raises:
        OperandError: it is not a Backend.
        ExpressionError: its name is taken.
    """
    if not isinstance(backend, Backend):
        raise OperandError(f"register_backend takes a flexmask.backends.Backend, got {kind_of(backend)}")
    if backend.name in ("auto", *_BACKENDS):
        raise ExpressionError(f"there is a backend {backend.name!r} already; give the new one another name")
    _BACKENDS[backend.name] = backend


def backend_names() -> tuple[str, ...]:
    """The names of the registered backends."""
    return tuple(_BACKENDS)


def get_backend(name: object) -> Backend:
    """The backend of a name.

    Raises:
        ExpressionError: there is none.
    """
    if not isinstance(name, str) or name not in _BACKENDS:
        names = ", ".join(map(repr, _BACKENDS))
        raise ExpressionError(f"no backend has the name {name!r}; the registered backends are {names}, of which 'auto' picks one")
    return _BACKENDS[name]


def check_backend(name: object) -> None:
    """Raises an ExpressionError unless ``name`` is that of a registered backend, or ``"auto"``."""
    if not isinstance(name, str) or name != "auto":
        get_backend(name)


def ordered_backends(call: Call) -> list[Backend]:
    """The backends in the order in which ``backend="auto"`` tries them: those that prefer the query's device come first."""
    automatic = [backend for backend in _BACKENDS.values() if backend.automatic]
    first = [backend for backend in automatic if backend.is_preferred(call)]  # in a graph a symbol, which does not sort
    return first + [backend for backend in automatic if backend not in first]


def select(call: Call, name: str = "auto") -> Backend:
    """The backend of a name, or the first that supports the call.

    Raises:
        LoweringError: it does not support the call, or none does.
    """
    if name != "auto":
        chosen = _BACKENDS[name]
        if reason := chosen.reason_against(call):
            raise LoweringError(reason)
        return chosen
    reasons = []
    if call.kernel_options:
        call = call._replace(kernel_options=None)
    for backend in ordered_backends(call):
        reason = backend.reason_against(call)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise LoweringError(f"no backend supports this call. {'. '.join(reasons)}")


def check_sizes(mask: LoweredMask | BlockMask, query: Tensor, key: Tensor, q_offset: int | Tensor) -> None:
    """Checks that a mask was lowered for a query and a key: kernels would read beyond the tensors of one that does not fit.

    Raises:
        LoweringError: it has other sizes or is on another device, or a ``q_offset`` is given as well.
    """
    name = type(mask).__name__ if isinstance(mask, LoweredMask) else "BlockMask"
    if isinstance(q_offset, Tensor) or q_offset:
        raise LoweringError(
            f"q_offset does not apply to a {name}, which has the positions of its queries; give it to mask.block_mask() or to "
            "the plan instead"
        )
    wanted = (*query.shape[:2], query.shape[2], key.shape[2])
    shape = tuple(mask.shape)
    fits = [given in (1, size) for given, size in zip(shape[:2], wanted[:2], strict=False)]
    if len(shape) != 4 or not all(fits) or shape[2:] != wanted[2:]:
        raise LoweringError(
            f"the {name} is for [B, H, q_len, kv_len] = {list(shape)}, but there are {list(wanted)} (B and H may be 1 in it)"
        )
    device = mask.device if isinstance(mask, LoweredMask) else mask.kv_indices.device
    if device != query.device:
        raise LoweringError(f"the {name} is on {device}, the query on {query.device}; {move_remedy(device, query.device)}")


# ---------------------------------------------------------------- attention of which each process computes a part

#: Computes a call in this process.
Run: TypeAlias = Callable[[Call], tuple[Tensor, Tensor | None]]


class Parallel(Protocol):
    """What :class:`flexmask.distributed.ContextParallel` is for the layers below it."""

    @property
    def positions(self) -> Tensor:
        """The positions of the tokens of this process in the whole sequence, ``int64[n]``."""
        ...

    def attend(self, call: Call, run: Run) -> tuple[Tensor, Tensor | None]:
        """The output and the logsumexp of a call whose query, key and value have the tokens of this process alone."""
        ...


#: What was entered, the innermost last. It is not local to a thread: autograd repeats checkpointed layers in threads of its own.
#: ``torch.compile`` guards on a list, and traces no context variable.
ENTERED: list[Parallel] = []


def entered_parallel() -> Parallel | None:
    """The innermost that was entered, or None."""
    return ENTERED[-1] if ENTERED else None


def refuse_in_parallel(what: str, instead: str = "") -> None:
    """Raises a LoweringError if one was entered, for what has no meaning there."""
    if ENTERED:
        raise LoweringError(
            f"{what} cannot be used inside `with ContextParallel(...)`, where a process has a part of the tokens{instead}"
        )
