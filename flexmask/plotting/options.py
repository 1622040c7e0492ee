"""What is asked of a picture: what it shows, and the labels around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from flexmask._checks import checked_int
from flexmask.plotting.tokens import Tokens, labels_of, split
from flexmask.report.lengths import lengths_of

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.expr.mask import Mask
    from flexmask.tracing.as_mask import MaskLike

__all__ = ["Contents", "Labelling", "Options", "key_labels", "lengths_with"]


class Labelling(TypedDict, total=False):
    """The labels around a picture; each as an argument of :func:`flexmask.plotting.raster.picture`."""

    q_offset: int | Tensor
    tokens: Tokens | None
    kv_tokens: Tokens | None
    bands: bool


class Contents(Labelling, total=False):
    """What a picture shows of whichever sequence and head; each as an argument of :func:`flexmask.plotting.raster.picture`."""

    block_size: int | tuple[int, int] | None
    why: bool
    against: MaskLike | None
    max_pixels: tuple[int, int]
    max_blocks: tuple[int, int]


class Options(Contents, total=False):
    """What a picture shows; each as an argument of :func:`flexmask.plotting.raster.picture`."""

    batch: int
    head: int


def lengths_with(mask: Mask, q_len: int | None, kv_len: int | None, options: Labelling) -> tuple[int, int]:
    """The lengths as given, ``kv_len`` being ``q_len`` as in every lowering; else as the tokens say, or as the mask does."""
    tokens, kv_tokens, offset = options.get("tokens"), options.get("kv_tokens"), options.get("q_offset", 0)
    keys = tokens if kv_tokens is None else kv_tokens
    if kv_len is None and keys is not None:
        kv_len = len(split(keys))
    if q_len is None and tokens is not None:
        q_len = len(split(tokens)) - (offset if isinstance(offset, int) else 0)
    q_len, kv_len = (n if n is None else checked_int(n, name, least=None) for name, n in (("q_len", q_len), ("kv_len", kv_len)))
    if q_len is None:
        return lengths_of(mask, None, kv_len)
    return q_len, q_len if kv_len is None else kv_len


def key_labels(kv_len: int, tokens: Tokens | None, kv_tokens: Tokens | None) -> tuple[str, ...] | None:
    """The labels of the keys: their own, else those of all positions."""
    if kv_tokens is not None:
        return labels_of(kv_tokens, kv_len, "kv_tokens")
    return None if tokens is None else labels_of(tokens, kv_len, "tokens")
