"""Labels along the axes of a picture, and the options that every picture takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from flexmask._checks import checked_int
from flexmask.errors import OperandError, RenderError
from flexmask.report.lengths import resolve_lengths

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.distributed.sharding import Sharding
    from flexmask.expr.mask import Mask
    from flexmask.tracing.as_mask import MaskLike

#: Labels: a list, or a text whose words are the labels.
Tokens: TypeAlias = str | Sequence[str]


class LabelOptions(TypedDict, total=False):
    """Options of labels; each is an argument of :func:`flexmask.plotting.raster.rasterize`."""

    q_offset: int | Tensor
    tokens: Tokens | None
    kv_tokens: Tokens | None
    bands: bool


class ContentOptions(LabelOptions, total=False):
    """Options of any number of pictures; each is an argument of :func:`flexmask.plotting.raster.rasterize`."""

    block_size: int | tuple[int, int] | None
    why: bool
    against: MaskLike | None
    shards: Sharding | None
    max_pixels: tuple[int, int]
    max_blocks: tuple[int, int]


class FrameOptions(TypedDict, total=False):
    """What is around the cells of a file; each is an argument of :meth:`flexmask.Mask.save_picture`."""

    title: str | None
    legend: bool
    width: float | None


class PictureOptions(ContentOptions, total=False):
    """Options of one picture; each is an argument of :func:`flexmask.plotting.raster.rasterize`."""

    batch: int
    head: int


def _split(tokens: Tokens, what: str = "tokens") -> tuple[str, ...]:
    """Tokens as a tuple; a text is split at blanks.

    Raises:
        OperandError: they are neither a text nor a list of texts, or there are none.
    """
    found = tokens.split() if isinstance(tokens, str) else tokens
    if not isinstance(found, Sequence) or not found or not all(isinstance(token, str) for token in found):
        raise OperandError(f"{what} must be a string or a list of strings, at least one, got {tokens!r}")
    return tuple(found)


def _labels(tokens: Tokens, length: int, what: str) -> tuple[str, ...]:
    """The labels of positions, one for each.

    Raises:
        OperandError: ``tokens`` is neither a text nor a list of texts, or is empty.
        RenderError: there are not as many tokens as positions.
    """
    found = _split(tokens, what)
    if len(found) != length:
        raise RenderError(f"{what} must label each of the {length} positions, got {len(found)}")
    return found


def query_labels(tokens: Tokens, q_len: int, kv_len: int, offset: int) -> tuple[str, ...]:
    """The labels of the queries from position ``offset`` on: of tokens that label each key theirs, else one for each.

    Raises:
        OperandError: ``tokens`` is neither a text nor a list of texts, or is empty.
        RenderError: there are not as many tokens as positions.
    """
    found = _split(tokens)
    if len(found) == kv_len and offset + q_len <= kv_len:
        return found[offset : offset + q_len]
    return _labels(found, q_len, "tokens")


def key_labels(kv_len: int, tokens: Tokens | None, kv_tokens: Tokens | None) -> tuple[str, ...] | None:
    """The labels of the keys: ``kv_tokens``, else ``tokens``."""
    if kv_tokens is not None:
        return _labels(kv_tokens, kv_len, "kv_tokens")
    return None if tokens is None else _labels(tokens, kv_len, "tokens")


def picture_lengths(mask: Mask, q_len: int | None, kv_len: int | None, options: LabelOptions) -> tuple[int, int]:
    """The lengths: as given, with ``kv_len=q_len`` by default; else from the tokens; else from the mask's data."""
    tokens, kv_tokens, offset = options.get("tokens"), options.get("kv_tokens"), options.get("q_offset", 0)
    keys = tokens if kv_tokens is None else kv_tokens
    if kv_len is None and keys is not None:
        kv_len = len(_split(keys))
    if q_len is None and tokens is not None:
        q_len = len(_split(tokens)) - (offset if isinstance(offset, int) else 0)
    q_len, kv_len = (n if n is None else checked_int(n, name, least=None) for name, n in (("q_len", q_len), ("kv_len", kv_len)))
    if q_len is None:
        return resolve_lengths(mask, kv_len=kv_len)
    return q_len, q_len if kv_len is None else kv_len
