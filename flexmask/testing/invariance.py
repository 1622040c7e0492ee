"""Batch invariance: a document gives the same bits in every packing (``assert_batch_invariant``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexmask import _sync
from flexmask._checks import check_flag, check_plain
from flexmask.catalogue import causal, per_document
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.mask import Mask
from flexmask.lowering.align import AlignedDocuments, align_documents
from flexmask.testing.influence import TWO_OUTPUTS, other_parameters, output_of
from flexmask.tracing.trace import MaskLike, as_mask

#: Parameters of a function under test.
GIVEN = ("mask", "documents")
NOTE = (
    "mask is the flexmask mask of the packed documents, documents their AlignedDocuments. For a model that takes another form: "
    "lambda x, mask: model(x, mask.dense(x.shape[1])), or lambda x, documents: model(x, documents.ids)"
)


def assert_batch_invariant(
    function: Callable[..., Any],
    x: Tensor,
    lengths: Sequence[int],
    *,
    mask: MaskLike | None = None,
    block_size: int | tuple[int, int] = 128,
    gradients: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Asserts that a document gives the same output, to the last bit, in every packing with other documents.

    Computes each document alone, then in one sequence with the others in order and in reverse, in two sequences, and in a batch
    with one document per sequence. Documents begin at blocks: see :func:`flexmask.lowering.align_documents`.

    ``function`` is called as ``function(x, mask=mask)`` with ``x`` ``[B, length, ...]`` and the mask of the packed documents,
    as ``function(x, documents=documents)`` with the :class:`flexmask.lowering.AlignedDocuments`, for ids and positions, or with
    both: it gets those of the two parameters that have no default. A parameter with a default stays as it is, since your code
    may leave it out. Wrap a function with other parameters, or with a default, in one that makes the call of your code::

        def function(x, mask):
            return model(x, mask.block_mask(x.shape[1], separate_full_blocks=False))

        assert_batch_invariant(function, torch.randn(700, 64), lengths=[300, 150, 250])

    Its output is ``[B, length, ...]``, or a tuple whose first item is. It must be deterministic: put modules with dropout into
    ``eval()``.

    Args:
        function: a module or function.
        x: the tokens of the documents, one document after the other, ``[tokens, ...]``, floating point or integers.
        lengths: the tokens of each document.
        mask: the mask within each document, with positions that start at 0 there, its text or a mask_mod; by default causal.
        block_size: the alignment of documents; 1 for none.
        gradients: whether to compare the gradients of ``x`` too.
        device: the device of the check, by default that of ``x``; ``x`` is moved there, and ``function`` if it is a module.

    Raises:
        AssertionError: a document gives different bits, or an output is not finite; the message has the document, the packing
            and the greatest difference.
        ExpressionError: the function gives two outputs for one input.
        LoweringError: fewer than two documents, or shapes that do not fit.
        OperandError: an argument or the output is of a wrong type, or the function fails.
    """
    __tracebackhide__ = True
    if not isinstance(x, Tensor) or not callable(function):
        raise OperandError(f"wanted a function and a tensor, got {type(function).__name__} and {type(x).__name__}")
    check_flag(gradients, "gradients")
    check_plain(x, "x")
    sizes = [tokens for tokens in align_documents(lengths).lengths[0] if tokens]
    if len(sizes) < 2 or not x.dim() or x.shape[0] != sum(sizes):
        raise LoweringError(
            f"x must be the tokens of two or more documents in a row; got {list(x.shape)} for the lengths {sizes}"
        )
    if gradients and not x.is_floating_point():
        raise OperandError(f"gradients=True needs floating point input, got {x.dtype}")
    where = x.device if device is None else _sync.resolve_device(device)
    _sync.check_values(where, "outputs are compared")
    inner = causal() if mask is None else as_mask(mask, device=where)
    if device is not None and isinstance(function, nn.Module):
        function.to(where)
    call = _Call(function, inner, x.detach().to(where).split(sizes), block_size, gradients)
    alone = [call([[number]])[number] for number in range(len(sizes))]
    for number, (out, *_) in enumerate(alone):
        if out.is_floating_point() and not out.isfinite().all():
            raise AssertionError(
                f"the output of document {number} alone is not finite; give inputs without NaN or inf in the output"
            )
    for found, wanted in zip(call([[0]])[0], alone[0], strict=True):
        if _differs(found, wanted).any():
            raise ExpressionError(TWO_OUTPUTS)
    for packing, sequences in _packings(len(sizes)):
        for number, found_parts in call(sequences).items():
            for what, found, wanted in zip(("output", "gradient"), found_parts, alone[number], strict=False):
                if _differs(found, wanted).any():
                    raise AssertionError(_difference(what, number, packing, block_size, found, wanted))


def _packings(count: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Ways to pack documents, as their numbers in each sequence."""
    numbers = list(range(count))
    yield "in one sequence", [numbers]
    yield "in one sequence in reverse", [numbers[::-1]]
    yield "in two sequences", [numbers[1::2], numbers[::2]]
    yield "as a batch of single documents", [[number] for number in numbers]


@dataclass
class _Call:
    """A function with the data for its calls."""

    function: Callable[..., Any]
    mask: Mask
    parts: Sequence[Tensor]
    block_size: int | tuple[int, int]
    gradients: bool

    def __post_init__(self) -> None:
        self.taken = [name for name, is_required in other_parameters(self.function).items() if is_required and name in GIVEN]
        if not self.taken:
            raise OperandError(
                "the function must have a parameter mask or documents without a default, so that it knows how documents are "
                "packed; wrap it in one that calls it as your code does, e.g. lambda x, mask: function(x, mask)"
            )

    def __call__(self, sequences: list[list[int]]) -> dict[int, tuple[Tensor, ...]]:
        """The output of each document in one packing, and with ``gradients`` the gradient of its tokens."""
        order = [number for sequence in sequences for number in sequence]
        documents = align_documents(
            [[self.parts[number].shape[0] for number in sequence] for sequence in sequences],
            self.block_size,
            device=self.parts[0].device,
        )
        x = documents.pack(torch.cat([self.parts[number] for number in order])).requires_grad_(self.gradients)
        given = {"mask": per_document(self.mask, documents.ids), "documents": documents}
        with torch.set_grad_enabled(self.gradients):
            out = output_of(self.function, x, {name: given[name] for name in self.taken}, NOTE)
        found = [documents.split(out.detach())]
        if self.gradients:
            found.append(documents.split(self.gradient(out, x, documents, order)))
        return dict(zip(order, zip(*found, strict=True), strict=True))

    def gradient(self, out: Tensor, x: Tensor, documents: AlignedDocuments, order: list[int]) -> Tensor:
        """The gradient of the input, for random weights of the output per document and 0 for padding."""
        weights = []
        for number in order:
            draw = torch.Generator().manual_seed(number)
            sizes = self.parts[number].shape[0], *out.shape[2:]
            weights.append(torch.randn(sizes, generator=draw, dtype=torch.float64, device="cpu"))
        weight = documents.pack(torch.cat(weights).to(out.device, out.dtype))
        return torch.autograd.grad(out, x, weight)[0]


def _differs(found: Tensor, wanted: Tensor) -> Tensor:
    """The numbers with different bits, ``bool[tokens, numbers]``."""
    bits, others = (part.reshape(part.shape[0], -1, 1).contiguous().view(torch.uint8) for part in (found, wanted))
    return (bits != others).any(-1)


def _difference(what: str, number: int, packing: str, block_size: int | tuple[int, int], found: Tensor, wanted: Tensor) -> str:
    wrong = _differs(found, wanted)
    apart = (found.double() - wanted.double()).abs().max()
    return (
        f"the {what} of document {number} ({wanted.shape[0]} tokens) depends on its packing: {packing}, {int(wrong.sum()):,} of "
        f"{wrong.numel():,} numbers differ from those of the document alone, the first at its token "
        f"{int(wrong.any(1).nonzero()[0])}, by at most {float(apart):.1e}. Documents begin at multiples of {block_size} here: "
        "align them to the blocks of the kernel, make the BlockMask with separate_full_blocks=False, and use kernels that do not "
        "depend on the size of the batch"
    )
