"""Attention in tiles as operators for `torch.compile`, and as autograd functions for eager code and `torch.func`.

The operators have their gradient registered. The functions have a rule for each transform, which operators cannot have; they call
the operators only where calls are recorded, as under FakeTensorMode.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from flexmask._sync import needs_sync
from flexmask._transforms import is_observed, is_transformed, outer_tangents, without_tangent
from flexmask.backends.fused_kernel import has_fused_kernel
from flexmask.backends.tile import Cells
from flexmask.backends.tile_derivatives import hessian_product, tangent
from flexmask.backends.tile_passes import backward, empty_logsumexp, empty_output, forward
from flexmask.backends.tile_weights import DropoutState, has_nonfinite
from flexmask.backends.unchanged import Unchanged

__all__ = ["attend_tiles", "fused_with_tiles"]


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Cells,
    scale: float,
    dropout_p: float,
    rows: Tensor | None,
    keys: Tensor | None,
) -> Tensor:
    """The output, [B, H, Q, Dv]. Arguments as for `block_sdpa`; ``rows`` and ``keys`` are the hashes of `DropoutState`."""
    arguments = query, key, value, bounds, cells, scale, dropout_p, rows, keys
    if torch.compiler.is_compiling() and (cells is None or isinstance(cells, Tensor)):
        out, _ = _block_sdpa(*arguments)
    elif _is_differentiated(query, key, value):
        own = cells if cells is None or isinstance(cells, Tensor) else Unchanged(cells)
        out, _ = _Attention.apply(query, key, value, bounds, own, *arguments[5:])  # type: ignore[no-untyped-call]
    else:
        out, _ = _Attention.forward(*arguments)
    return cast(Tensor, out)


def fused_with_tiles(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | bool,
    scale: float,
    fully_masked: Tensor | None = None,
) -> Tensor:
    """The output of torch's fused kernel, with its gradient computed in tiles where that is differentiated again.

    The kernels have no second derivative, so with ``create_graph=True`` their own gradient is not used.

    Args:
        out: the output of the kernel for the others.
        query: [B, H, Q, D].
        key: [B, H_kv, KV, D].
        value: [B, H_kv, KV, Dv].
        bounds: the key intervals, int [B', H', Q', K, 2]; True for a causal mask, False for none.
        scale: factor of the scores.
        fully_masked: which rows the kernel was given as fully masked, bool [B', H', Q', 1], or None.
    """
    return cast(Tensor, _Fused.apply(out, query, key, value, bounds, scale, fully_masked))  # type: ignore[no-untyped-call]


def _is_differentiated(*tensors: Tensor) -> bool:
    """Whether autograd or a transform differentiates by tensors."""
    return (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)) or is_transformed(*tensors)


# ---------------------------------------------------------------- operators


@torch.library.custom_op("flexmask::block_sdpa", mutates_args=())
def _block_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Tensor | None,
    scale: float,
    dropout_p: float,
    rows: Tensor | None,
    keys: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return forward(query, key, value, _own(bounds), cells, scale, DropoutState.make(dropout_p, rows, keys))


@torch.library.custom_op("flexmask::block_sdpa_backward", mutates_args=())
def _block_sdpa_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bounds: Tensor,
    cells: Tensor | None,
    scale: float,
    dropout_p: float,
    rows: Tensor | None,
    keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    drop = DropoutState.make(dropout_p, rows, keys)
    return backward(grad, query, key, value, out, logsumexp, _own(bounds), cells, scale, drop)


def _own(bounds: Tensor) -> Tensor:
    """The bounds in memory to which a graph writes nothing else later, where `shared_tiling` compares no values."""
    return bounds.clone() if needs_sync(bounds) else bounds


@_block_sdpa.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    is_fused = rest[-1] is None and has_fused_kernel(query, key, value)
    return empty_output(query, value), empty_logsumexp(query, is_fused=is_fused)


@_block_sdpa_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_output(query, query), empty_output(key, key), empty_output(value, value)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, cells, ctx.scale, ctx.dropout_p, rows, keys = inputs
    ctx.save_for_backward(query, key, value, *output, bounds, cells, rows, keys)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, rows, keys = ctx.saved_tensors
    return (*_block_sdpa_backward(grad, *tensors, ctx.scale, ctx.dropout_p, rows, keys), *[None] * 6)


_block_sdpa.register_autograd(_differentiate, setup_context=_save_inputs)


# ---------------------------------------------------------------- functions


class _Saved:
    """What both functions save for their derivatives: tensors in torch's way, and the other arguments."""

    @staticmethod
    def save(ctx: Any, tensors: tuple[Tensor, ...], bounds: Tensor, cells: Cells, scale: float, p: float, *hashes: Any) -> None:
        ctx.scale, ctx.p = scale, p
        ctx.cells_function = None if cells is None or isinstance(cells, Tensor) else cells
        kept = *tensors, bounds, (cells if ctx.cells_function is None else None), *hashes
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def restore(ctx: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
        """The tensors, and the arguments from ``bounds`` on."""
        *tensors, bounds, cells, rows, keys = ctx.saved_tensors
        return tensors, (bounds, cells if ctx.cells_function is None else ctx.cells_function, ctx.scale, ctx.p, rows, keys)


def _derivative_arguments(
    bounds: Tensor, cells: Cells, scale: float, p: float, rows: Tensor | None, keys: Tensor | None
) -> tuple[Any, ...]:
    """The last arguments of `tangent` and `hessian_product`."""
    return bounds, cells, scale, DropoutState.make(p, rows, keys)


class _Attention(Function):
    """Attention in tiles: the output, and the logsumexp for the gradient."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        query, key, value, bounds, cells, scale, p, rows, keys = arguments
        if (cells is None or isinstance(cells, Tensor)) and is_observed(query):
            return cast("tuple[Tensor, Tensor]", _block_sdpa(*arguments))
        return forward(query, key, value, bounds, cells, scale, DropoutState.make(p, rows, keys))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *rest = inputs
        ctx.mark_non_differentiable(output[1])
        _Saved.save(ctx, (query, key, value, *output), *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        tensors, rest = _Saved.restore(ctx)
        compute = _Gradient.apply if _is_differentiated(grad, *tensors) else _Gradient.forward
        return (*compute(grad, *tensors, *rest), *[None] * 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        (*tensors, _, _), rest = _Saved.restore(ctx)
        with outer_tangents():
            tensors = [without_tangent(tensor) for tensor in tensors]
            return tangent(tensors, tangents[:3], *_derivative_arguments(*rest)), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        outputs = _Attention.apply(*_fold_mapped(info.batch_size, in_dims, arguments, 3))  # type: ignore[no-untyped-call]
        return tuple(_unfold_mapped(output, info.batch_size) for output in outputs), (0, 0)


class _Gradient(Function):
    """The gradient of attention in tiles by query, key and value, as a function of the output's gradient and of these."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value, out, logsumexp, bounds, cells, scale, p, rows, keys = arguments
        if (cells is None or isinstance(cells, Tensor)) and is_observed(query):
            return cast("tuple[Tensor, Tensor, Tensor]", _block_sdpa_backward(*arguments))
        return backward(grad, query, key, value, out, logsumexp, bounds, cells, scale, DropoutState.make(p, rows, keys))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad, query, key, value, _, _, *rest = inputs
        _Saved.save(ctx, (grad, query, key, value), *rest)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        (grad, *tensors), rest = _Saved.restore(ctx)
        arguments = _derivative_arguments(*rest)
        # The output is a function of the others, so it has no gradient of its own.
        return (
            tangent(tensors, tangents, *arguments),
            *hessian_product(grad, tensors, tangents, *arguments),
            *[None] * 8,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        (grad, *tensors), rest = _Saved.restore(ctx)
        to_grad, *of_tensors = tangents[:4]
        with outer_tangents():
            grad, *tensors = (without_tangent(tensor) for tensor in (grad, *tensors))
            outputs = _Attention.apply(*tensors, *rest)  # type: ignore[no-untyped-call]
            linear = _Gradient.apply(to_grad, *tensors, *outputs, *rest)  # type: ignore[no-untyped-call]
            curved = hessian_product(grad, tensors, of_tensors, *_derivative_arguments(*rest))
        return tuple(one + other for one, other in zip(linear, curved, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _Gradient.apply(*_fold_mapped(info.batch_size, in_dims, arguments, 6))  # type: ignore[no-untyped-call]
        return tuple(_unfold_mapped(grad, info.batch_size) for grad in grads), (0, 0, 0)


class _Fused(Function):
    """See `fused_with_tiles`."""

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
        rest = empty_logsumexp(query, is_fused=False), bounds, None, ctx.scale, 0.0, None, None
        grads = _Gradient.apply(grad, query, key, value, out, *rest)  # type: ignore[no-untyped-call]
        return None, *grads, None, None, None


def _plain_bounds(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """The key intervals of causal or no masking: int32[1, 1, 1 or Q, 1, 2]."""
    kv_len = key.size(2)
    stop = torch.arange(1, query.size(2) + 1, device=query.device, dtype=torch.int32).clamp(max=kv_len)
    stop = stop if is_causal else torch.full_like(stop[:1], kv_len)
    return torch.stack((torch.zeros_like(stop), stop), -1)[None, None, :, None]


# ---------------------------------------------------------------- vmap: the mapped axis becomes a part of the batch


def _fold_mapped(size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The arguments with the mapped axis and the batch as one axis, the mapped axis outermost.

    Args:
        size: of the mapped axis.
        in_dims: the mapped axis of each argument; None where it has none.
        arguments: `count` tensors of the batch, then ``bounds, cells, scale, dropout_p, rows, keys``.
        count: how many tensors of the batch there are.
    """
    mapped = [_mapped_first(tensor, dim, size) for tensor, dim in zip(arguments[:count], in_dims, strict=False)]
    batch = mapped[0].size(1)
    bounds, cells, scale, p, rows, keys = arguments[count:]
    bounds_dim, cells_dim, _, _, rows_dim, keys_dim = in_dims[count:]
    if isinstance(cells, Tensor):
        cells = _broadcast(cells, cells_dim, size, batch)
    elif cells is not None:
        cells = _RepeatedCells(cells, batch)
    if rows is not None:
        rows, keys = _mapped_first(rows, rows_dim, size).flatten(0, 1), _broadcast(keys, keys_dim, size, batch)
    tensors = (*(tensor.flatten(0, 1) for tensor in mapped), _broadcast(bounds, bounds_dim, size, batch))
    return *tensors, cells, scale, p, rows, keys


def _unfold_mapped(tensor: Tensor, size: int) -> Tensor:
    """The first axis of a result as two: the mapped axis and the batch."""
    return tensor.reshape(size, tensor.size(0) // max(size, 1), *tensor.shape[1:])


def _mapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with the mapped axis first."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(size, *tensor.shape)


def _broadcast(tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """[B', ...] with B' 1 or B -> [1 or size * B, ...]."""
    if dim is None and tensor.size(0) == 1:
        return tensor
    whole = _mapped_first(tensor, dim, size)
    return whole.expand(size, batch, *whole.shape[2:]).flatten(0, 1)


class _RepeatedCells:
    """Cells over a batch of `size * B`, from those over B."""

    def __init__(self, cells: Any, batch: int) -> None:
        self.cells, self.batch = cells, batch

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cast(Tensor, self.cells(b % self.batch, h, q_idx, kv_idx))
