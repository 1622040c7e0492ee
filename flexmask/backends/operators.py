"""Attention in tiles as operators for `torch.compile`, and as autograd functions for eager code and `torch.func.grad`.

The operators have their gradient registered. The functions can be differentiated again, which operators cannot; they call the
operators only where calls are recorded, as under FakeTensorMode. All take a `Problem` as its values, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from flexmask._sync import needs_sync
from flexmask._transforms import is_forward_mode, is_observed, is_transformed
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.score_mods import Unchanged
from flexmask.backends.tile_passes import (
    backward,
    empty_logsumexp,
    empty_output,
    forward,
    gradients,
    has_nonfinite,
    second_gradients,
)
from flexmask.lowering.mask_mod import MaskMod

#: The values of a Problem as arguments of an operator.
TYPES = *["Tensor"] * 4, "Tensor?", "float", "float", "Tensor?", "Tensor?", "bool", "Tensor?", "float?", "bool"
SCHEMA = ", ".join(f"{kind} {name}" for kind, name in zip(TYPES, Problem._fields, strict=True))
#: How many values a Problem has, and of these the number that are not query, key and value, and the place of the bias.
SIZE = len(Problem._fields)
CONSTANTS = SIZE - 3
BIAS = Problem._fields.index("bias")


def attend_tiles(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output, [B, H, Q, Dv], and the logsumexp, [B, H, Q] where the problem asks for it."""
    if torch.compiler.is_compiling() and not callable(problem.cells):
        found = _block_sdpa(*problem)
    elif _is_differentiated(*problem.tensors) or problem.learns_bias:
        if callable(problem.cells):
            problem = problem._replace(cells=Unchanged(problem.cells))
        found = _Attention.apply(*problem)  # type: ignore[no-untyped-call]
    else:
        found = _Attention.forward(*problem)
    return cast("tuple[Tensor, Tensor]", found)


def _is_differentiated(*tensors: Tensor) -> bool:
    """Whether autograd or a transform differentiates by tensors."""
    return (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)) or is_transformed(*tensors)


def _save(ctx: Any, tensors: tuple[Tensor | None, ...], problem: Problem) -> None:
    """Saves tensors, those of a problem and its other values for derivatives."""
    own = [value if isinstance(value, Tensor) else None for value in problem]
    ctx.plain = [value if tensor is None else None for value, tensor in zip(problem, own, strict=True)]
    ctx.save_for_backward(*tensors, *own)
    ctx.save_for_forward(*tensors, *own)


def _saved(ctx: Any) -> tuple[tuple[Any, ...], Problem]:
    saved = ctx.saved_tensors  # checkpoints give them once
    tensors, kept = saved[:-SIZE], saved[-SIZE:]
    return tensors, Problem(*(plain if tensor is None else tensor for tensor, plain in zip(kept, ctx.plain, strict=True)))


# ---------------------------------------------------------------- operators


@torch.library.custom_op("flexmask::block_sdpa", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def _block_sdpa(*values: Any) -> tuple[Tensor, Tensor]:
    return forward(_with_own_bounds(Problem(*values)))


@torch.library.custom_op(
    "flexmask::block_sdpa_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor logsumexp, {SCHEMA}) -> Tensor[]",
)
def _block_sdpa_backward(grad: Tensor, grad_lse: Tensor | None, out: Tensor, logsumexp: Tensor, *values: Any) -> list[Tensor]:
    return backward(grad, grad_lse, out, logsumexp, _with_own_bounds(Problem(*values)))


def _with_own_bounds(problem: Problem) -> Problem:
    """With bounds in memory to which a graph writes nothing else later, where `shared_tiling` compares no values."""
    return problem._replace(bounds=problem.bounds.clone()) if needs_sync(problem.bounds) else problem


@_block_sdpa.register_fake
def _(*values: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*values)
    is_kept = problem.is_fused or problem.with_lse
    return empty_output(problem.query, problem.value), empty_logsumexp(problem.query, is_kept=is_kept)


@_block_sdpa_backward.register_fake
def _(*values: Any) -> list[Tensor]:
    problem = Problem(*values[-SIZE:])
    by_bias = [torch.empty_like(bias, dtype=precise_dtype(bias)) for bias in problem.learned]
    return [*(empty_output(tensor, tensor) for tensor in problem.tensors), *by_bias]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _save(ctx, output, Problem(*inputs))


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _all_gradients(_block_sdpa_backward(*_backward_values(ctx, *grads)))


def _all_gradients(found: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of all values of a problem, from those of query, key and value, and of a bias that has one."""
    every: list[Tensor | None] = [*found[:3], *[None] * CONSTANTS]
    if len(found) > 3:
        every[BIAS] = found[3]
    return tuple(every)


def _backward_values(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """The arguments of the gradient, for those of the output and the logsumexp that there are."""
    (out, logsumexp), problem = _saved(ctx)
    grad = torch.zeros_like(out) if grad is None else grad
    return grad, grad_lse if problem.with_lse else None, out, logsumexp, *problem


_block_sdpa.register_autograd(_differentiate, setup_context=_save_inputs)


# ---------------------------------------------------------------- functions


class _Attention(Function):
    """Attention in tiles: the output, and the logsumexp for the gradient."""

    @staticmethod
    def forward(*values: Any) -> tuple[Tensor, Tensor]:
        problem = Problem(*values)
        if not callable(problem.cells) and is_observed(problem.query):
            return cast("tuple[Tensor, Tensor]", _block_sdpa(*values))
        return forward(problem)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if not Problem(*inputs).with_lse:
            ctx.mark_non_differentiable(output[1])
        _save_inputs(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        values = _backward_values(ctx, *grads)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if is_forward_mode(*tensors):
            return _all_gradients(gradients(Problem(*values[-SIZE:]), *values[:2]))
        compute = _Gradient.apply if _is_differentiated(*tensors) else _Gradient.forward
        return _all_gradients(compute(*values))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        outputs = _Attention.apply(*_fold_mapped(info.batch_size, in_dims, values))  # type: ignore[no-untyped-call]
        return tuple(_unfold_mapped(output, info.batch_size) for output in outputs), (0, 0)


class _Gradient(Function):
    """The gradients of attention in tiles, as a function of the outputs' gradients and of what these are computed from."""

    @staticmethod
    def forward(*values: Any) -> tuple[Tensor, ...]:
        grad, grad_lse, out, logsumexp, *rest = values
        problem = Problem(*rest)
        if not callable(problem.cells) and is_observed(problem.query):
            return tuple(_block_sdpa_backward(*values))
        return tuple(backward(grad, grad_lse, out, logsumexp, problem))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs[:2], Problem(*inputs[4:]))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        (grad, grad_lse), problem = _saved(ctx)
        by_grad, by_lse, *by_tensors = second_gradients(problem, grad, grad_lse, tangents)
        # The outputs are functions of the others, so they have no gradient of their own.
        return by_grad, by_lse, None, None, *_all_gradients(by_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _Gradient.apply(*_fold_mapped(info.batch_size, in_dims, values))  # type: ignore[no-untyped-call]
        return tuple(_unfold_mapped(grad, info.batch_size) for grad in grads), (0,) * len(grads)


class FusedWithTiles(Function):
    """The output of torch's fused kernel, with its gradient computed in tiles where that is differentiated again.

    The kernels have no second derivative, so with ``create_graph=True`` their own gradient is not used. It is applied to the
    output of the kernel, to query, key and value, to the key intervals, int [B', H', Q', K, 2], or None and whether the mask is
    causal or none, to the factor of the scores, and to which rows the kernel was given as fully masked, bool [B', H', Q', 1] or
    None.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        bounds, ctx.is_causal, ctx.scale, ctx.fully_masked = rest
        ctx.save_for_backward(query, key, value, out, bounds)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            if ctx.fully_masked is not None and has_nonfinite(grad):
                grad = grad.masked_fill(ctx.fully_masked, 0)  # the kernel multiplies it by weights of 0
            return grad, *[None] * 7
        query, key, value, out, bounds = ctx.saved_tensors
        bounds = _plain_bounds(query, key, ctx.is_causal) if bounds is None else bounds
        problem = Problem(query, key, value, bounds, None, ctx.scale)
        logsumexp = empty_logsumexp(query, is_kept=False)
        grads = _Gradient.apply(grad, None, out, logsumexp, *problem)  # type: ignore[no-untyped-call]
        return None, *grads, *[None] * 4


def _plain_bounds(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """The key intervals of causal or no masking: int32[1, 1, 1 or Q, 1, 2]."""
    kv_len = key.size(2)
    stop = torch.arange(1, query.size(2) + 1, device=query.device, dtype=torch.int32).clamp(max=kv_len)
    stop = stop if is_causal else torch.full_like(stop[:1], kv_len)
    return torch.stack((torch.zeros_like(stop), stop), -1)[None, None, :, None]


# ---------------------------------------------------------------- vmap: the mapped axis becomes a part of the batch


def _fold_mapped(size: int, in_dims: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the mapped axis and the batch as one axis, the mapped axis outermost.

    Args:
        size: of the mapped axis.
        in_dims: the mapped axis of each argument; None where it has none.
        values: tensors of the batch, then those of a problem.
    """
    tensors = [
        None if tensor is None else _mapped_first(tensor, dim, size).flatten(0, 1)
        for tensor, dim in zip(values[:-CONSTANTS], in_dims, strict=False)
    ]
    problem, dims = Problem(*values[-SIZE:]), Problem(*in_dims[-SIZE:])
    batch = _mapped_first(problem.query, dims.query, size).size(1)
    bounds, cells, rows, keys = _broadcast(problem.bounds, dims.bounds, size, batch), problem.cells, problem.rows, problem.keys
    if isinstance(cells, Tensor):
        cells = _broadcast(cells, dims.cells, size, batch)
    elif cells is not None:
        cells = partial(_repeated, cells, batch)
    if rows is not None and keys is not None:
        rows, keys = _mapped_first(rows, dims.rows, size).flatten(0, 1), _broadcast(keys, dims.keys, size, batch)
    return *tensors, *problem._replace(bounds=bounds, cells=cells, rows=rows, keys=keys)[-CONSTANTS:]


def _unfold_mapped(tensor: Tensor, size: int) -> Tensor:
    """The first axis of a result as two: the mapped axis and the batch."""
    return tensor.reshape(size, tensor.size(0) // max(size, 1), *tensor.shape[1:])


def _mapped_first(tensor: Tensor, dim: Any, size: int) -> Tensor:
    """A tensor with the mapped axis first."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(size, *tensor.shape)


def _broadcast(tensor: Tensor, dim: Any, size: int, batch: int) -> Tensor:
    """[B', ...] with B' 1 or B -> [1 or size * B, ...]."""
    if dim is None and tensor.size(0) == 1:
        return tensor
    whole = _mapped_first(tensor, dim, size)
    return whole.expand(size, batch, *whole.shape[2:]).flatten(0, 1)


def _repeated(cells: MaskMod, batch: int, b: Tensor, *others: Tensor) -> Tensor:
    """Cells over a batch of `size * B`, from those over B."""
    return cells(b % batch, *others)
