"""Masks composed of other masks, and masks from dense tables."""

from __future__ import annotations

from collections.abc import Sequence

from flexmask import registry
from flexmask.catalogue.arguments import check_mask, int_or_index, lookup
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import Data, per_batch
from flexmask.expr.index import Index, as_index, b, h, kv, kv_len, maximum, q, q_len
from flexmask.expr.mask import Mask, PerHead
from flexmask.expr.names import describe_non_mask
from flexmask.expr.tables import Table

__all__ = ["coarse", "from_dense", "named", "paged", "per_head", "reorder", "shift", "transpose"]


@registry.named
def from_dense(table: Data) -> Mask:
    """A mask given cell by cell. :meth:`flexmask.Mask.recognize` finds the named masks that it is made of.

    Predicate: ``table[b, h, q, kv]``

    ``from_dense(table=[[True, False], [True, True]])`` at 2 x 2::

        ■ ⬚
        ■ ■

    ``from_dense(table=[[True, False], [True, True], [False, True]])`` at 3 x 2::

        ■ ⬚
        ■ ■
        ⬚ ■

    Args:
        table: ``bool[q_len, kv_len]``, ``bool[B, q_len, kv_len]`` or ``bool[B, H, q_len, kv_len]``, True for visible; or
            0 and 1. An axis B or H of size 1 is broadcast.

    Raises:
        OperandError: the table has values other than truth values, 0 and 1.
        ExpressionError: another number of axes.
    """
    places = ((q, kv), (b, q, kv), (b, h, q, kv))
    return lookup(table, "from_dense: table", "[Q, KV], [B, Q, KV] or [B, H, Q, KV]", *places, truth="visible") != 0


@registry.named
def per_head(masks: Sequence[Mask]) -> Mask:
    """One mask per head.

    Predicate: ``masks[h](b, h, q, kv)``

    ``per_head([full, causal])`` at 3 x 3 (head 0) and 3 x 3 (head 1)::

        ■ ■ ■     ■ ⬚ ⬚
        ■ ■ ■     ■ ■ ⬚
        ■ ■ ■     ■ ■ ■

    ``per_head([full, causal])`` at 3 x 4 (head 0) and 3 x 4 (head 1)::

        ■ ■ ■ ■     ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ⬚

    Args:
        masks: the mask of each head, in order.
    """
    if not isinstance(masks, list | tuple) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        strange = [mask for mask in masks if not isinstance(mask, Mask)] if isinstance(masks, list | tuple) else [masks]
        given = describe_non_mask(strange[0]) if strange else masks
        raise OperandError(f"per_head: wanted a list of masks, one for each head, got {given}")
    return PerHead(tuple(masks))


@registry.named
def named(mask: Mask, name: str) -> Mask:
    """The same mask with words for it, which pictures, explanations and errors have in place of its expression.

    :meth:`flexmask.Mask.named` makes it. It lowers and compares as the mask does.

    Predicate: ``mask(b, h, q, kv)``

    ``named(q - kv <= 1, name='near')`` at 3 x 3 and 3 x 4::

        ■ ■ ■     ■ ■ ■ ■
        ■ ■ ■     ■ ■ ■ ■
        ⬚ ■ ■     ⬚ ■ ■ ■

    Args:
        mask: a mask, or a part of one.
        name: the words.

    Raises:
        OperandError: a name that is no string, or has nothing to read or several lines.
    """
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise OperandError(f"named: name must be a line of text, such as 'same image', got {name!r}")
    return check_mask(mask, "named")


@registry.named
def shift(mask: Mask, *, q: Index | Data = 0, kv: Index | Data = 0) -> Mask:
    """A mask moved down by ``q`` rows and right by ``kv`` columns.

    Predicate: ``mask(b, h, q - rows[b], kv - columns[b])`` for ``shift(mask, q=rows, kv=columns)``

    ``shift(causal, kv=1)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■ ⬚
        ■ ■ ■ ■

    Args:
        mask: the mask to move. Where it looks up a table, the moved indices must stay inside.
        q: rows, an int or ``int[B]``, or an index expression; negative to move the mask up.
        kv: columns, an int or ``int[B]``, or an index expression; negative to move the mask left.

    Raises:
        ExpressionError: data with more axes than the batch.
    """
    moved = {
        name: position - (per_batch(by, f"shift: {name}", None, low=None) if isinstance(by, Table) else as_index(by))
        for name, position, by in (("q", _q, q), ("kv", _kv, kv))
    }
    return check_mask(mask, "shift").substitute(**moved)


@registry.named
def transpose(mask: Mask) -> Mask:
    """A mask with queries and keys exchanged.

    Predicate: ``mask(b, h, kv, q)``

    ``transpose(causal)`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ■     ■ ■ ■ ■ ■
        ⬚ ■ ■ ■     ⬚ ■ ■ ■ ■
        ⬚ ⬚ ■ ■     ⬚ ⬚ ■ ■ ■
        ⬚ ⬚ ⬚ ■

    Args:
        mask: the mask to mirror at its diagonal.
    """
    return check_mask(mask, "transpose").substitute(q=kv, kv=q, q_len=kv_len, kv_len=q_len)


@registry.named
def coarse(mask: Mask, size: Index | int) -> Mask:
    """A mask on blocks of tokens: a cell is visible where its pair of blocks is.

    Predicate: ``mask(b, h, q // size, kv // size)``

    ``coarse(sliding_window(left=1, right=0), size=2)`` at 6 x 6 and 4 x 8::

        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■
        ⬚ ⬚ ■ ■ ■ ■

    Args:
        mask: the mask on block indices; ``q_len`` and ``kv_len`` are numbers of blocks there.
        size: tokens in a block.

    Raises:
        ExpressionError: a size below 1.
    """
    n = int_or_index(size, "coarse: size", 1)
    blocks = {"q": q // n, "kv": kv // n, "q_len": (q_len + n - 1) // n, "kv_len": (kv_len + n - 1) // n}
    return check_mask(mask, "coarse").substitute(**blocks)


@registry.named
def reorder(mask: Mask, *, q: Data | None = None, kv: Data | None = None) -> Mask:
    """A mask for permuted tokens: the mask is given on the original positions.

    Predicate: ``mask(b, h, positions[b, q], positions[b, kv])`` for ``reorder(mask, q=positions, kv=positions)``

    ``reorder(causal, q=[0, 3, 1, 2])`` at 4 x 4 and 3 x 4::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚

    ``reorder(causal, q=[0, 3, 1, 2], kv=[0, 3, 1, 2])`` at 4 x 4 and 3 x 4::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■
        ■ ⬚ ■ ⬚     ■ ⬚ ■ ⬚
        ■ ⬚ ■ ■

    Args:
        mask: the mask on the original positions.
        q: the original position of each query, ``[S]`` or ``[B, S]``; None if the queries are in order.
        kv: the original position of each key, ``[S]`` or ``[B, S]``. Rows have few key intervals if the keys are in order, as
            on a rank of context parallelism, which has all keys in order and some of the queries.

    Raises:
        ExpressionError: neither ``q`` nor ``kv``.

    Source: the permutations of ``generate_morton_natten`` of attention-gym, and of context parallelism.
    """
    given = {"q": q, "kv": kv}
    if q is None and kv is None:
        raise ExpressionError("reorder: give the original positions of the queries as q=, of the keys as kv=, or both")
    moved = {
        name: lookup(data, f"reorder: {name}", "[S] or [B, S]", (at,), (b, at))
        for (name, data), at in zip(given.items(), (_q, _kv), strict=True)
        if data is not None
    }
    return check_mask(mask, "reorder").substitute(**moved)


@registry.named
def paged(mask: Mask, pages: Data, *, page_size: Index | int) -> Mask:
    """A mask for keys in the pages of a cache.

    Predicate: ``(pages[b, kv // page_size] >= 0) & mask(b, h, q, pages[b, kv // page_size] * page_size + kv % page_size)``

    ``paged(causal, pages=[1, -1, 0], page_size=2)`` at 4 x 6 and 2 x 6::

        ⬚ ⬚ ⬚ ⬚ ■ ⬚     ⬚ ⬚ ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■     ⬚ ⬚ ⬚ ⬚ ■ ■
        ■ ⬚ ⬚ ⬚ ■ ■
        ■ ■ ⬚ ⬚ ■ ■

    Args:
        mask: the mask on the positions of the sequence; it must not use ``kv_len``, which is the size of the cache.
        pages: the part of the sequence that each page of the cache holds, ``[n]`` or ``[B, n]``, counted in pages; below 0
            for a page of another sequence. (It is the inverse of a block table, which has the page of each part.)
        page_size: tokens in a page.

    Raises:
        ExpressionError: a page size below 1.
        OperandError: the mask uses ``kv_len``.

    Source: PagedAttention, https://arxiv.org/abs/2309.06180; ``convert_logical_block_mask`` of attention-gym.
    """
    n = int_or_index(page_size, "paged: page_size", 1)
    if "kv_len" in check_mask(mask, "paged").symbols:
        raise OperandError(f"paged: {mask} uses kv_len, which is the size of the cache and not of the sequence")
    page = lookup(pages, "paged: pages", "[n] or [B, n]", (kv // n,), (b, kv // n))
    return (page >= 0) & mask.substitute(kv=maximum(page, 0) * n + kv % n)


_q, _kv = q, kv
