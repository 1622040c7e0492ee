"""The masks that a ContextParallel was given, and which of them a call means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flexmask._sync import Stamp
from flexmask.distributed.exchange import TokenExchange
from flexmask.errors import FlexmaskError, LoweringError
from flexmask.expr.deferred import DeferredMask
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.parser import cached_mask, parse
from flexmask.plans.lowered import LoweredMask


@dataclass(frozen=True, eq=False)
class Declared:
    """A mask as this rank computes it.

    Attributes:
        mask: the mask of the whole sequence.
        sizes: the sequences and the query heads that a call must have; None where the mask is the same for all.
        lowered: the mask of the rank; None where it has no queries or no keys.
        keys: the exchange of keys; None where heads are exchanged.
        text: the text that makes an equal mask; None where it has tensors.
        stamp: of its tensors.
    """

    mask: Mask
    sizes: tuple[int | None, int | None]
    lowered: LoweredMask | None
    keys: TokenExchange | None
    text: str | None = field(init=False)
    stamp: Stamp = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _text_of(self.mask))
        object.__setattr__(self, "stamp", Stamp(self.mask.tensors))

    def check_unchanged(self) -> None:
        """Raises a LoweringError where the mask has other data since; not in compiled code, where it is a constant."""
        if not torch.compiler.is_compiling() and not self.stamp.holds(self.mask.tensors):
            raise LoweringError(
                f"the data of {self.mask.brief()} was changed after ContextParallel was made; make it again for other data"
            )


def find_declared(declared: Sequence[Declared], mask: Mask) -> Declared:
    """The declared mask that equals a mask, with the data that it had.

    Code that ``torch.compile`` traces compares no expressions: it finds the same object, or the text of an equal mask.

    Raises:
        LoweringError: there is none, or its data was changed.
    """
    is_traced = torch.compiler.is_compiling()
    for own in declared:
        if own.mask is mask or (_is_text_of(own, mask) if is_traced else own.mask == mask):
            own.check_unchanged()
            return own
    if is_traced:
        hint = "; in code that torch.compile traces, pass the declared mask itself, or write its text"
    elif any(own.mask.form.digest == mask.form.digest for own in declared):
        hint = "; its tensors are other objects, though the text is the same: use the declared mask"
    else:
        hint = ", with the same tensors"
    raise LoweringError(
        f"the mask {mask.brief()} is not declared: give it to ContextParallel(mesh, masks, seq_len), which has "
        f"{known(declared)}{hint}"
    )


def known(declared: Sequence[Declared]) -> str:
    """The declared masks, for messages."""
    return ", ".join(own.mask.brief() for own in declared)


def _text_of(mask: Mask) -> str | None:
    text = str(mask)
    try:
        return text if parse(text) == mask else None
    except FlexmaskError:
        return None


def _is_text_of(own: Declared, mask: Mask) -> bool:
    """Whether a mask that traced code makes of a text alone, or has by default, equals a declared one."""
    if isinstance(mask, DeferredMask):
        text = mask.args[0] if mask.call == "parse" and not mask.kwargs else None
    else:
        text = "full" if mask is ALL_CELLS else None
    return text is not None and own.text is not None and _are_equal(text, own.text)


def _are_equal(text: str, other: str) -> bool:
    return cached_mask(text) == cached_mask(other)


_are_equal._dynamo_marked_constant = True  # type: ignore[attr-defined] # texts are constants of traced code
