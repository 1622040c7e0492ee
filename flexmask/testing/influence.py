"""Which positions of its input each position of an output depends on, found by gradients and by changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmask.errors import ExpressionError
from flexmask.testing.calls import output_of

#: The size of the values that a hidden position is changed to.
LARGE = {torch.float16: 1e2}
USUAL = 1e4


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
            raise ExpressionError(
                "the function gives two outputs for one input; put modules into eval(), and seed its random numbers"
            )

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
        sizes = out.shape[0], out.shape[2]
        weight = torch.randn(sizes, generator=call.draw, dtype=torch.float64, device="cpu").to(out.dtype).to(out.device)
        sums = (out * weight.unsqueeze(1)).sum((0, 2))  # of each query; no sequence of the batch knows another
    for q in hidden.any(2).any(0).nonzero().flatten().tolist():
        (gradient,) = torch.autograd.grad(sums[q], leaf, retain_graph=True, allow_unused=True)
        if gradient is not None:
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
