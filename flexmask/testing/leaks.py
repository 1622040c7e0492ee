"""Leaks: outputs of a model that depend on positions that the mask hides (``assert_no_leak``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flexmask import _sync
from flexmask._checks import check_function, check_plain, checked_int, kind_of
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.mask import Mask
from flexmask.report.terms import terms
from flexmask.testing.influence import (
    Call,
    by_change,
    by_gradient,
    dependence,
    depends,
    missing_arguments,
    mixed_sequences,
    size_of_change,
    visible_pairs,
)
from flexmask.testing.settings import check_size, picture_around
from flexmask.tracing.trace import MaskLike, as_mask

REMEDY = "check fewer or shorter sequences"
#: The most layers that a message proposes.
MOST_LAYERS = 128


def assert_no_leak(
    function: Callable[..., Any],
    mask: MaskLike | Sequence[MaskLike],
    x: Any,
    *,
    context: Tensor | None = None,
    self_mask: MaskLike | None = None,
    layers: int = 1,
    embed: Callable[[Tensor], Tensor] | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> None:
    """Asserts that no output of a module or a whole model depends on a position that its mask hides from it.

    There are two exact checks. The gradient of each query's output with respect to every hidden position is 0. If a hidden
    position changes to large random values, the output stays the same to the last bit. Also, sequences of the batch must not
    influence each other.

    ``function`` is called as ``function(x)``, in cross-attention as ``function(x, context=context)``, and gets nothing else: the
    mask is what the outputs are compared with, and is not given to the function. So write the call of your code in a lambda,
    with the masks or lengths that it gives::

        assert_no_leak(lambda tokens: model(tokens, lengths), causal() & key_padding(lengths), tokens, layers=2)

    Of a tuple the first item counts. Its output is ``[B, length, ...]``, and the same for the same input: put modules with
    dropout into ``eval()``.

    In self-attention a position may always depend on itself, since its query comes from it. Integer tokens have no gradient:
    they are replaced by other tokens that occur in ``x``. With ``embed`` the model starts after its embedding:
    ``function(embed(x))`` is checked, gradients too. An output without a gradient gets the second check only.

    It costs a backward and a forward pass for each position that is hidden from some query.

    Args:
        function: a module or function.
        mask: what each query may see, a mask, its text, or a ``mask_mod``; a list of them for a model whose layers differ, the
            first layer's first.
        x: ``[B, length, ...]`` floating point, or integer tokens ``[B, length]``.
        context: ``[B, kv_len, ...]`` of cross-attention, which is what is checked then; ``mask`` is for it.
        self_mask: the mask of the self-attention that a model with ``context`` also has; then ``x`` is checked too.
        layers: the number of times that the masks are applied: 2 for a model of two layers, in which information may pass
            twice.
        embed: from integer tokens to ``[B, length, d]``.
        heads: number of heads, if the mask depends on them and its data does not determine it.
        device: where the check is done, by default where ``x`` is. The inputs are moved there, and ``function`` and ``embed``
            where they are modules; what a lambda holds is not.
        seed: the seed of random numbers.

    Raises:
        AssertionError: something leaks; the message names the first pair by batch, query and key, the term of the mask that
            should have hidden it, and shows a picture.
        ExpressionError: ``layers`` is less than 1, the function gives two outputs for one input, or no output depends on another
            position that the mask shows, so that nothing could leak.
        LoweringError: shapes that do not fit, more than 2**22 pairs, or inputs on ``meta``.
        OperandError: an argument or the output is of a wrong type, or the function fails.
    """
    __tracebackhide__ = True
    if not isinstance(x, Tensor) or not callable(function) or mask is None:
        kinds = f"{type(function).__name__}, {type(mask).__name__} and {type(x).__name__}"
        raise OperandError(f"wanted a function, a mask and a tensor, got {kinds}")
    where = x.device if device is None else _sync.resolve_device(device)
    _sync.check_values(where, "outputs are compared")
    masks = [as_mask(part, device=where) for part in (mask if isinstance(mask, list | tuple) else [mask])]
    if checked_int(layers, "layers", least=None) < 1 or not masks:
        raise ExpressionError(f"there must be at least 1 layer with a mask, got layers={layers!r} and {len(masks)} masks")
    if self_mask is not None and context is None:
        raise ExpressionError("self_mask is for a model with context=; in self-attention give the mask as mask")
    if context is not None and len(masks) > 1:
        raise ExpressionError(f"with context there is one mask for it, got {len(masks)}")
    for part in (function, embed):
        if device is not None and isinstance(part, nn.Module):
            part.to(where)
    draw = torch.Generator().manual_seed(checked_int(seed, "seed", least=0, most=2**63 - 1))
    if context is not None and not isinstance(context, Tensor):
        raise OperandError(f"context must be a tensor, got {kind_of(context)}")
    if embed is not None:
        check_function(embed, "embed", "(tokens) -> x")
    inputs = {"x": x} if context is None else {"x": x, "context": context}
    for name, value in inputs.items():
        check_plain(value, name)
        if value.is_meta:
            raise OperandError(f"{name} must be a tensor with values, got one on the device meta")
    inputs = {name: value.to(where) for name, value in inputs.items()}
    if embed is not None:
        try:
            inputs["x"] = embed(inputs["x"]).detach()
        except Exception as error:  # whatever a function of the user raises
            raise OperandError(f"embed fails where it is called as embed(x): {type(error).__name__}: {error}") from error
    for name, value in inputs.items():
        if value.dim() < 2 or not value.numel() or value.dtype == torch.bool:
            raise OperandError(
                f"{name} must be [B, length, ...] of floating point numbers or integer tokens, got {list(value.shape)}"
            )
    call = Call(function, inputs, draw, missing_arguments(function, [name for name in inputs if name != "x"]))
    call.check()
    for source, other in mixed_sequences(call):
        raise AssertionError(
            f"sequence {source} of the batch changes the output of sequence {other}; the sequences of a batch must be independent"
        )
    rules = [_Rule("x", masks, layers, heads)]
    if context is not None:
        around = None if self_mask is None else as_mask(self_mask, "self_mask", device=where)
        rules = [_Rule("context", masks, layers, heads, around)]
        rules += [] if around is None else [_Rule("x", [around], layers, heads)]
    for rule in rules:
        _check(call, rule)


@dataclass(frozen=True)
class _Rule:
    """The positions that an input may influence.

    Attributes:
        name: the input.
        masks: the masks of the layers.
        layers: how often they are applied.
        heads: number of heads, or None.
        around: of cross-attention, the mask of the queries among themselves.
    """

    name: str
    masks: list[Mask]
    layers: int
    heads: int | None
    around: Mask | None = None

    def allowed(self, call: Call) -> Tensor:
        """The positions that each query's output may depend on, ``bool[B, q_len, length]``."""
        for layers, found in enumerate(self.by_layers(call), 1):
            if layers == self.layers:
                return found
        return found

    def by_layers(self, call: Call) -> Iterator[Tensor]:
        """:meth:`allowed` for ``layers`` of 1, 2, 3, ..., until it stays the same."""
        q_len, length = call.inputs["x"].shape[1], call.inputs[self.name].shape[1]
        batch, device = call.inputs["x"].shape[0], call.inputs["x"].device
        shown = [visible_pairs(mask, batch, self.heads, q_len, length, device) for mask in self.masks]
        if self.name == "x":
            return dependence(shown)
        if self.around is None:
            return iter(shown)
        own = visible_pairs(self.around, batch, self.heads, q_len, q_len, device)
        return (reached.float() @ shown[0].float() > 0 for reached in dependence([own]))


def _check(call: Call, rule: _Rule) -> None:
    """Raises an AssertionError if positions of one input leak."""
    __tracebackhide__ = True
    batch, q_len, length = call.inputs["x"].shape[0], call.inputs["x"].shape[1], call.inputs[rule.name].shape[1]
    if call.inputs[rule.name].shape[0] != batch:
        raise LoweringError(f"x and context must have one batch, got {batch} and {call.inputs[rule.name].shape[0]} sequences")
    check_size((batch, q_len, length), REMEDY)
    hidden = ~rule.allowed(call)
    found = {"by gradient": by_gradient(call, rule.name, hidden), "by change": by_change(call, rule.name, hidden)}
    leaks = found["by gradient"] | found["by change"]
    if not leaks.any():
        others = ~hidden if rule.name == "context" else ~hidden & ~torch.eye(length, dtype=torch.bool, device=hidden.device)
        if others.any() and not depends(call, rule.name, others):
            raise ExpressionError(
                f"no output depends on another position of {rule.name} that the mask shows, so nothing could leak. Where weights "
                "start as zeros, as those of an output projection, give them random values first"
                + ("; leave self_mask out where there is no self-attention" if len(call.inputs) > 1 and rule.name == "x" else "")
            )
        return
    b, q, kv = leaks.nonzero()[0].tolist()
    ways = ", ".join(f"{int(part.sum()):,} {way}" for way, part in found.items() if part.any())
    what = "key" if rule.name == "context" or rule.layers * len(rule.masks) == 1 else "position"
    size = size_of_change(call, rule.name, kv, leaks[:, :, kv])
    marks = torch.where(leaks[b], 2, (~hidden[b]).int())
    legend = f"batch {b}: # may be seen   . hidden   ! leaks"
    picture = picture_around((q, kv), (q_len, length), lambda rows, columns: marks[rows, columns], ".#!", legend)
    raise AssertionError(
        f"{int(leaks.sum()):,} of {leaks.numel():,} pairs leak ({ways}): in batch {b} the output of query {q} depends on "
        f"{what} {kv} of {rule.name}{_hiding_terms(call, rule, b, q, kv)}{_enough_layers(call, rule, leaks)}\n"
        f"Where it leaks, a change of {what} {kv} changes the output by at most {size:.1e}.\n\n{picture}"
        + (f"\n\n{call.note}" if call.note else "")
    )


def _hiding_terms(call: Call, rule: _Rule, b: int, q: int, kv: int) -> str:
    """The terms of a mask that hide a pair, for a message."""
    parts = terms(rule.masks[0], None) if len(rule.masks) == 1 else ()
    hiding = [part.brief() for part in parts if not replace(rule, masks=[part]).allowed(call)[b, q, kv]]
    return f", which is hidden by {' and by '.join(hiding) or ' and '.join(mask.brief() for mask in rule.masks)}"


def _enough_layers(call: Call, rule: _Rule, leaks: Tensor) -> str:
    """With how many layers all leaks would be allowed, for a message; empty where no number is enough."""
    for layers, allowed in enumerate(islice(rule.by_layers(call), MOST_LAYERS), 1):
        if not (leaks & ~allowed).any():
            many, so = f"{layers} layers can pass on", f"has {layers}"
            if len(rule.masks) > 1:
                many, so = f"these {len(rule.masks)} layers can pass on {layers} times", f"applies them {layers} times"
            return (
                f".\nAll these pairs are within what {many}: if the model {so}, write layers={layers}; otherwise they are leaks"
            )
    return ""
