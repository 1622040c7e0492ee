"""Which positions of its input each position of an output depends on, found by gradients and by changes; and which it may.

With the calls of the functions that users check, and what to write where a call fails or lacks an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.mask import Mask

#: The size of the values that a hidden position is changed to.
LARGE = {torch.float16: 1e2}
USUAL = 1e4
#: The kinds of parameters that stand for any number of arguments.
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
TWO_OUTPUTS = "the function gives two outputs for one input; put modules into eval(), and seed its random numbers"
#: Names of parameters for masks, here and in other libraries.
MASKS = {"mask", "attn_mask", "attention_mask", "attn_bias", "src_mask", "tgt_mask", "block_mask", "is_causal"}


@dataclass(frozen=True, eq=False)
class Call:
    """A function with its inputs.

    Attributes:
        function: takes ``x``, and the others by name.
        inputs: ``x``, and ``context`` in cross-attention.
        draw: where random numbers come from.
        note: what to write instead, for error messages; may be empty.
    """

    function: Callable[..., Any]
    inputs: dict[str, Tensor]
    draw: torch.Generator
    note: str = ""

    def __call__(self, **changed: Tensor) -> Tensor:
        """The output ``[B, length, ...]`` with some inputs changed."""
        __tracebackhide__ = True
        inputs = {**self.inputs, **changed}
        x = inputs.pop("x")
        out = output_of(self.function, x, inputs, self.note)
        return out.reshape(*out.shape[:2], -1)

    def check(self) -> None:
        """Refuses a function that cannot be checked.

        Raises:
            ExpressionError: two calls give two outputs.
            LoweringError: the output has other sequences or another length than ``x``.
            OperandError: it fails, or gives no tensor.
            AssertionError: the output is not finite.
        """
        __tracebackhide__ = True
        with torch.no_grad():
            first = self()
            again = self()
        if not first.isfinite().all():
            b, q = (~first.isfinite()).any(-1).nonzero()[0].tolist()
            raise AssertionError(
                f"the output is not finite in batch {b} at query {q}; give inputs without NaN or inf in the output"
            )
        if not torch.equal(first, again):
            raise ExpressionError(TWO_OUTPUTS)

    def changed(self, name: str) -> Tensor:
        """An input with every position changed: to large numbers, or to other tokens that occur in it."""
        value = self.inputs[name]
        if value.is_floating_point():
            numbers = LARGE.get(value.dtype, USUAL) * torch.randn(value.shape, generator=self.draw, device="cpu")
            return value.detach() + numbers.to(value)
        tokens, place = value.unique(return_inverse=True)
        if tokens.numel() < 2:
            raise ExpressionError(
                f"{name} holds only the token {int(tokens[0])}; give tokens that differ, to replace one by another"
            )
        step = torch.randint(1, tokens.numel(), value.shape, generator=self.draw, device="cpu").to(value.device)
        other: Tensor = tokens[(place + step) % tokens.numel()]
        return other


def by_gradient(call: Call, name: str, hidden: Tensor) -> Tensor:
    """The hidden positions that have a gradient, ``bool[B, q_len, length]``; none where there are no gradients.

    Args:
        call: the function and its inputs.
        name: the input that the gradients are of.
        hidden: the positions that should have none for each query.
    """
    leaks = torch.zeros_like(hidden)
    if not call.inputs[name].is_floating_point():
        return leaks
    leaf = call.inputs[name].detach().clone().requires_grad_()
    with torch.enable_grad():
        out = call(**{name: leaf})
        if not out.requires_grad:
            return leaks
        weight = torch.randn(out.shape[0], 1, out.shape[2], generator=call.draw, dtype=torch.float64, device="cpu").to(out)
        sums = (out * weight).sum((0, 2))  # of each query; no sequence of the batch knows another
    for q in hidden.any(2).any(0).nonzero().flatten().tolist():
        (gradient,) = torch.autograd.grad(sums[q], leaf, retain_graph=True, materialize_grads=True)
        leaks[:, q] = (gradient != 0).flatten(2).any(-1) & hidden[:, q]
    return leaks


def by_change(call: Call, name: str, hidden: Tensor) -> Tensor:
    """The hidden positions whose change changes the output, ``bool[B, q_len, length]``; arguments as for gradients."""
    leaks = torch.zeros_like(hidden)
    value, other = call.inputs[name], call.changed(name)
    with torch.no_grad():
        out = call()
        for place in hidden.any(1).any(0).nonzero().flatten().tolist():
            changed = value.clone()
            changed[:, place] = other[:, place]
            leaks[:, :, place] = (call(**{name: changed}) != out).any(-1) & hidden[:, :, place]
    return leaks


def size_of_change(call: Call, name: str, place: int, leaks: Tensor) -> float:
    """By how much a change of one position changes the output of the queries ``bool[B, q_len]`` at most."""
    changed = call.inputs[name].clone()
    changed[:, place] = call.changed(name)[:, place]
    with torch.no_grad():
        outs = [out[leaks].to(torch.complex128) for out in (call(**{name: changed}), call())]
    return float((outs[0] - outs[1]).abs().max())


def depends(call: Call, name: str, pairs: Tensor) -> bool:
    """Whether any output depends on a position of the input, of pairs ``bool[B, q_len, length]``."""
    places = pairs.any(1).any(0).nonzero().flatten().tolist()
    columns = torch.arange(pairs.shape[2], device=pairs.device)
    return any(bool(by_change(call, name, pairs & (columns == place)).any()) for place in places)


def mixed_sequences(call: Call) -> Iterator[tuple[int, int]]:
    """The pairs of sequences of the batch of which the first changes the output of the second."""
    others = {name: call.changed(name) for name in call.inputs}
    with torch.no_grad():
        out = call()
        for source in range(out.shape[0] if out.shape[0] > 1 else 0):
            changed = {name: value.clone() for name, value in call.inputs.items()}
            for name, value in changed.items():
                value[source] = others[name][source]
            differs = (call(**changed) != out).flatten(1).any(-1)
            for b in differs.nonzero().flatten().tolist():
                if b != source:
                    yield source, b


def output_of(function: Callable[..., Any], x: Tensor, given: Mapping[str, Any], note: str = "") -> Tensor:
    """The output ``[B, length, ...]`` of ``function(x, name=value, ...)``; of a tuple the first item.

    Args:
        function: a module or function.
        x: ``[B, length, ...]``.
        given: its other arguments, by name.
        note: what to write, for the message where the function fails.

    Raises:
        LoweringError: the output has other sequences or another length than ``x``.
        OperandError: the function fails, or gives no tensor.
    """
    __tracebackhide__ = True
    try:
        out = function(x, **given)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a function of the user raises
        raise OperandError(
            f"the function fails where it is called as {call_text(given)}: {type(error).__name__}: {error}\n"
            f"{note or 'If your code calls it in another way, write that call as a lambda'}"
        ) from error
    if isinstance(out, tuple):
        out = out[0]
    if not isinstance(out, Tensor):
        raise OperandError(f"the function must give a tensor [B, length, ...], got {type(out).__name__}")
    if out.shape[:2] != x.shape[:2]:
        raise LoweringError(f"the output must be [B, length, ...] = {[*x.shape[:2]]} and more, got {list(out.shape)}")
    return out


def call_text(names: Iterable[str]) -> str:
    """A call as code, e.g. ``function(x, context=context)``."""
    return f"function({', '.join(['x', *(f'{name}={name}' for name in names)])})"


def missing_arguments(function: Callable[..., Any], given: Collection[str]) -> str:
    """The required parameters of a function, and the first one for a mask, that a call lacks, and how to give them.

    Empty where there are none. A module with a mask of its own needs no other.
    """
    others = {name: is_required for name, is_required in other_parameters(function).items() if name not in given}
    own = isinstance(function, nn.Module) and getattr(function, "mask", None) is not None
    masks = [] if own else [name for name in others if name in MASKS][:1]
    names = [name for name, is_required in others.items() if is_required or name in masks]
    if not names:
        return ""
    wrapped = f"lambda {', '.join(['x', *given])}: {call_text([*given, *names])}"
    lines = [
        f"The check calls {call_text(given)}, without {', '.join(names)}: it gives the function no mask and no other argument.",
        f"Write the call of your code: assert_no_leak({wrapped}, ...)",
    ]
    if masks:
        lines.append(
            f"with {masks[0]} as your code gives it: a flexmask mask, the tensor of a tokenizer, or cells. Where True means "
            "visible, as in scaled_dot_product_attention, these are mask.dense(length)[0, 0]; where True means hidden, as in "
            "torch.nn.MultiheadAttention and TransformerEncoderLayer, ~mask.dense(length)[0, 0]"
        )
    return "\n".join(lines)


def other_parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """The names of the parameters after the first, and whether a call must give each; none of a function in C."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:
        return {}
    others = [*signature.parameters.values()][1:]
    return {other.name: other.default is other.empty and other.kind not in VARIABLE for other in others}


def visible_pairs(mask: Mask, batch: int, heads: int | None, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The keys that each query attends to in any head, ``bool[B, q_len, kv_len]``."""
    cells = mask.to(device).dense(q_len, kv_len, batch=batch, heads=heads, device=device)
    return cells.any(1).expand(batch, -1, -1)


def dependence(shown: Sequence[Tensor]) -> Iterator[Tensor]:
    """The positions of the input that each position of the output may depend on, ``bool[B, length, length]``.

    Gives them where the layers are applied once, twice, and so on, until nothing more can be reached.

    Args:
        shown: the visible pairs of each layer in order; a layer's output also depends on its input at the same position.
    """
    own = torch.eye(shown[0].shape[-1], dtype=torch.bool, device=shown[0].device)
    steps = [(cells | own).float() for cells in shown]
    found, before = own.float().expand_as(steps[0]), None
    while before is None or not torch.equal(found, before):
        before = found
        for step in steps:
            found = (step @ found > 0).float()
        yield found > 0
