"""Attention in tiles as operators for `torch.compile`, and as autograd functions for eager code and `torch.func.grad`.

The operators have their gradient registered. The functions can be differentiated again, which operators cannot; they call the
operators only where calls are recorded, as under FakeTensorMode. All take a `Problem` as its values, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from flexmask._sync import needs_sync
from flexmask._transforms import is_observed, is_transformed
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.score_mods import Unchanged
from flexmask.backends.tile_passes import backward, empty_logsumexp, empty_output, forward
from flexmask.backends.tile_weights import gradients, has_nonfinite, second_gradients

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
    return empty_output(problem.query, problem.value), empty_logsumexp(
        problem.query, is_kept=problem.is_fused or problem.with_lse
    )


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
        if is_transformed(*tensors, beyond_gradients=True):
            return _all_gradients(gradients(Problem(*values[-SIZE:]), *values[:2]))
        compute = _Gradient.apply if _is_differentiated(*tensors) else _Gradient.forward
        return _all_gradients(compute(*values))


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


class FusedWithTiles(Function):
    """The output of torch's fused kernel, with its gradient computed in tiles where that is differentiated again.

    The kernels have no second derivative, so with ``create_graph=True`` their own gradient is not used. It is applied to the
    output of the kernel, to query, key and value, to the key intervals, int [B', H', Q', K, 2] (or True for a causal mask, False
    for none), to the factor of the scores, and to which rows the kernel was given as fully masked, bool [B', H', Q', 1] or None.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        bounds, ctx.scale, ctx.fully_masked = rest
        ctx.is_causal = None if isinstance(bounds, Tensor) else bounds
        ctx.save_for_backward(query, key, value, out, bounds if ctx.is_causal is None else None)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            if ctx.fully_masked is not None and has_nonfinite(grad):
                grad = grad.masked_fill(ctx.fully_masked, 0)  # the kernel multiplies it by weights of 0
            return grad, *[None] * 6
        query, key, value, out, bounds = ctx.saved_tensors
        bounds = _plain_bounds(query, key, ctx.is_causal) if bounds is None else bounds
        problem = Problem(query, key, value, bounds, None, ctx.scale)
        logsumexp = empty_logsumexp(query, is_kept=False)
        grads = _Gradient.apply(grad, None, out, logsumexp, *problem)  # type: ignore[no-untyped-call]
        return None, *grads, None, None, None


def _plain_bounds(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """The key intervals of causal or no masking: int32[1, 1, 1 or Q, 1, 2]."""
    kv_len = key.size(2)
    stop = torch.arange(1, query.size(2) + 1, device=query.device, dtype=torch.int32).clamp(max=kv_len)
    stop = stop if is_causal else torch.full_like(stop[:1], kv_len)
    return torch.stack((torch.zeros_like(stop), stop), -1)[None, None, :, None]
