"""The keys and values ``[B, n_kv_heads, length, d_head]`` of the tokens so far, for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask import _sync
from flexmask._checks import checked_int, kind_of, not_plain_reason
from flexmask._transforms import autocast_dtype
from flexmask.catalogue.windows import full
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.data import as_table
from flexmask.expr.index import b, kv
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.expr.tables import Literal, TensorTable
from flexmask.nn.cache_masks import CallTokens, last_keys, mask_over_cache
from flexmask.nn.hidden_keys import check_later_keys, check_window, mask_over_places, padded_keys, trimmed
from flexmask.plans.capture import lower_in_graph
from flexmask.plans.lowered import LoweredMask
from flexmask.scores.placed import PlacedScore
from flexmask.scores.score import Score, ScoreMod
from flexmask.tracing.trace import MaskLike, as_mask

#: What a cache takes where a Mask is taken.
ALSO = "a LoweredMask, a BlockMask, None"


class KVCache:
    """The keys and values of one attention layer, so that each token is projected once.

    ``module(x, cache=cache)`` appends the tokens of ``x`` and attends from them: a prompt at once or in chunks, then one token at
    a time. With projections of your own write :meth:`step`. Each row of the output equals that of the whole sequence under the
    same mask. So a mask that shows a key after the tokens of the call is an error, also no mask: write ``mask & causal()``, or,
    where the first ``n`` tokens attend to each other, give these in one call and ``prefix_lm(n)`` in each. (Not checked: data on
    a device other than the CPU, or in compiled code, a BlockMask, a LoweredMask, and keys more than 1,024 positions after the
    call of a mask that is not separable in q and kv.) Data along keys, as ``keep=`` of ``key_padding``, has one value per token
    so far, the new ones included, or per token of the whole sequence, which ends with it; ``start=`` never changes. A mask that
    depends on ``kv_len`` or ``q_len`` is an error, since these change with each call. The first call allocates memory for its
    batch, heads, dtype and device.

    Sequences of different lengths: pad the prompts on the left and give ``key_padding(start=pad)``, the number of padding tokens
    of each, in every call. Or pad them on the right, give ``key_padding(lengths)`` with the prompt, and cut the padding with
    :meth:`truncate`; each sequence then has its own position and needs no ``key_padding``. Or give ``key_padding(keep=...)`` with
    a value for each token so far. A later mask that shows a key which was padding, by ``key_padding`` or by the documents of a
    mask, is an error. (Not checked: a BlockMask or a LoweredMask, and data on a device other than the CPU.)

    Documents: ``document(lengths=)`` and ``document(cu_seqlens=)`` may cover more tokens than there are so far, so that the last
    document may be as long as it can grow; ``document(ids)`` may have values for later tokens. In a plan and in compiled code,
    where each call attends to all places, documents cover ``capacity`` tokens, or fewer with ``padding=True``.

    Each layer needs a cache of its own; the cache of another layer is an error. A layer that is applied twice to each token, as
    where layers share their weights, needs one cache per application, which is not checked.

    In cross-attention the cache is ``KVCache()``: the first call computes the keys of the context, and all others read them. Call
    :meth:`reset` before another context or prompt: a context of another batch or length is an error, others are not read.

    Under ``torch.compile(fullgraph=True)`` a call attends to all ``capacity`` places, so that sizes do not change, and one graph
    serves all steps of one token. Calls with several tokens have the graphs of any compiled code whose sizes change. Data of the
    mask along keys has ``capacity`` values there, and what was padding is not checked. All layers share a LoweredMask:
    ``flexmask.plan(mask, 1, capacity)(q_offset=position)``. A cache with ``window`` is an error. Not checked: a BlockMask, or the
    LoweredMask of a plan, without ``q_offset`` has the rows from position 0 on.

    Calls with and without ``torch.autocast`` may alternate: where the dtypes of their keys differ, the cache holds the wider.

    The cache holds no gradients: those of a call reach its own tokens, not earlier ones.

    Args:
        capacity: tokens that fit. Optional with ``window``; without both the cache is for the keys of a context.
        window: the most keys that a query attends to, its own included, as in ``sliding_window(size=window)``. The cache drops
            older keys. A mask whose expression does not limit the distance to so many is an error, as ``sink_window`` and
            ``causal() & document(ids)`` are: write ``mask & sliding_window(size=window)``. (Not checked: a BlockMask and a
            LoweredMask.)

    Attributes:
        length: tokens so far, an int, or ``int64[B]`` once they differ between sequences.
        key: the keys, ``[B, n_kv_heads, capacity, d_head]``; with ``window`` or a context only those in use. None at first.
        value: the values, shaped as ``key``.
        is_context: whether the cache is for the keys of a context.
        start: the position of the first key, an int, or ``int64[B]``. Keys at positions below 0 are masked out.

    Raises:
        OperandError: a number that is not an integer.
        ExpressionError: a number less than 1.
    """

    def __init__(self, capacity: int | None = None, *, window: int | None = None) -> None:
        for name, number in (("capacity", capacity), ("window", window)):
            if number is not None:
                checked_int(number, f"KVCache: {name}")
        self.capacity, self.window = capacity, window
        self.is_context = capacity is None and window is None
        self.reset()

    def reset(self) -> None:
        """Empties the cache, for another sequence in any layer."""
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.length: int | Tensor = 0
        self.start: int | Tensor = 0
        self._owner: object = None
        self._padded: Tensor | None = None  # the keys that were padding, bool[B, length] on the CPU
        self._end = 0  # the greatest length, known without a host sync

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}  # a copy may continue in a copy of the layer

    def __copy__(self) -> KVCache:
        return deepcopy(self)  # both write to their memory

    def __repr__(self) -> str:
        length = self.length.tolist() if isinstance(self.length, Tensor) else self.length
        return f"KVCache(capacity={self.capacity}, window={self.window}, length={length})"

    @property
    def holds_context(self) -> bool:
        """Whether it holds the keys of a context."""
        return self.is_context and self.key is not None

    def positions(self, number: int, device: torch.device) -> Tensor:
        """The positions of the next tokens, ``int64[number]``, or ``int64[B, number]``."""
        ahead = torch.arange(number, device=device)
        return self.length[:, None] + ahead if isinstance(self.length, Tensor) else self.length + ahead

    # ---------------------------------------------------------------- tokens

    def claim(self, owner: object) -> None:
        """Ties the cache to one layer until :meth:`reset`.

        Args:
            owner: an object that identifies the layer.

        Raises:
            LoweringError: the cache holds keys of another layer.
        """
        if self._owner is not None and self._owner is not owner and (self._end > 0 or self.holds_context):
            raise LoweringError(
                "the cache holds keys of another layer: give each layer a KVCache of its own, e.g. "
                "caches = [KVCache(capacity) for _ in layers]; call reset() for another sequence, and copy.deepcopy(cache) to go "
                "on in a copy of the layer"
            )
        self._owner = owner

    def step(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: MaskLike | LoweredMask | BlockMask | None,
    ) -> Step:
        """One call: its tokens after those in the cache, and what to give to :func:`flexmask.attention`::

            step = cache.step(query, key, value, "causal")
            out = flexmask.attention(query, step.key, step.value, step.mask, q_offset=step.q_offset)
            step.commit()

        Args:
            query: ``[B, H, q_len, D]``.
            key: ``[B, H_kv, q_len, D]``, those of the same tokens. Of a context ``[B, H_kv, kv_len, D]`` in the first call, and
                None in later ones.
            value: ``[B, H_kv, q_len, D_v]``, as ``key``.
            mask: the mask of the whole sequence, or what it was lowered to for this call. None for no mask.

        Raises:
            LoweringError: too many tokens, shapes, a device or a dtype that differ from those of the tokens before, or a mask
                that :class:`KVCache` refuses.
        """
        if self.is_context:
            step = self._step_over_context(query, key, value)
        else:
            is_lowered = isinstance(mask, LoweredMask | BlockMask)
            whole = mask.shape[-1] == self.capacity if is_lowered else torch.compiler.is_compiling()  # type: ignore[union-attr]
            step = self._step_over_tokens(cast(Tensor, key), cast(Tensor, value), whole=whole)
        if isinstance(mask, LoweredMask | BlockMask):
            _check_cached_keys(mask, query, step.key, self.capacity)
            step.mask, step.q_offset = mask, 0
        elif torch.compiler.is_compiling():
            begin = torch.zeros((), dtype=torch.int64, device=query.device) + self.length  # a number would be one of the graph
            mask = full() if mask is None else as_mask(mask)
            places = mask_over_places(mask, None if self.is_context else begin + query.shape[2])
            step.mask, step.q_offset = lower_in_graph(places, query, step.key, begin), 0
        else:
            step._set_mask(ALL_CELLS if mask is None else as_mask(mask, also=ALSO, device=query.device), query.shape[1])
        return step

    def _step_over_context(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Step:
        if self.key is None or self.value is None:
            if key is None or value is None:
                raise LoweringError("KVCache() has no keys of a context yet: give them in the first call")
            return Step(self, query.shape[2], key, value, replaces=True)
        if key is not None:
            raise LoweringError("the cache holds the keys of a context: give no others, or call reset() before")
        self.widen(query, query)
        return Step(self, query.shape[2], self.key, self.value)

    def _step_over_tokens(self, key: Tensor, value: Tensor, *, whole: bool) -> Step:
        """A step without its mask; with ``whole`` over all ``capacity`` places."""
        number = key.shape[2]
        end = self._end + number
        if self.capacity is not None and end > self.capacity:
            other = "with window= for a sliding window" if self.window is None else "with window= alone, which drops old keys"
            raise LoweringError(
                f"the cache holds capacity={self.capacity} tokens, {int(self._end)} are taken and {int(number)} more do not fit: "
                f"make a KVCache with a greater capacity, {other}, or call reset() for another sequence"
            )
        self._check(key, value)
        self.widen(key, value)
        if self.window is not None:
            if torch.compiler.is_compiling():
                raise LoweringError(
                    "in code that torch.compile traces, the sizes of KVCache(window=...) change with each call: give "
                    "KVCache(capacity), and a mask with the window, such as sliding_window(size=...)"
                )
            key, value, start = self._shifted(key, value)
            return Step(self, number, key, value, start, replaces=True)
        shape = (*key.shape[:2], cast(int, self.capacity))
        if self.key is None:
            with torch.inference_mode(False):  # so that later calls may run in any mode
                self.key, self.value = (torch.zeros(*shape, n.shape[3], dtype=n.dtype, device=n.device) for n in (key, value))
        pair = []
        for held, new in ((self.key, key), (cast(Tensor, self.value), value)):
            self._write(held, new.detach())
            seen = held if whole else held[:, :, :end]
            if torch.is_grad_enabled():  # what is saved for the backward pass must not change
                seen = seen.clone()
                self._write(seen, new)
            pair.append(seen)
        return Step(self, number, pair[0], pair[1])

    def widen(self, key: Tensor, value: Tensor) -> None:
        """Converts what the cache holds where tokens are of a wider dtype, as after calls under autocast.

        Args:
            key: any of the dtype of new keys.
            value: any of that of new values.

        Raises:
            LoweringError: they are of a narrower dtype, and autocast does not cast both to one.
        """
        if self.key is None or self.value is None:
            return
        wanted = []
        for name, new, held in (("keys", key, self.key), ("values", value, self.value)):
            wanted.append(torch.promote_types(held.dtype, new.dtype))
            if wanted[-1] != new.dtype and autocast_dtype(held) != autocast_dtype(new):
                raise LoweringError(f"the cache holds {name} of {held.dtype}, got {new.dtype}; keep to one dtype, or reset() it")
        if wanted != [self.key.dtype, self.value.dtype]:
            with torch.inference_mode(False):
                self.key, self.value = self.key.to(wanted[0]), self.value.to(wanted[1])

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Drops the tokens after a length: padding of a prompt, or a sequence of drafts that were not accepted.

        Of a tree of drafts :meth:`accept` keeps one path.

        Args:
            lengths: tokens to keep, an int or ``int[B]``. Reading a tensor forces a host sync.

        Raises:
            LoweringError: more tokens than there are, or so few that the window before them is dropped.
        """
        if self.key is None:
            raise LoweringError("the cache is empty: there is nothing to cut")
        device, batch = self.key.device, self.key.shape[0]
        wanted = _integers(lengths, "truncate: lengths", "integers, one or a list or tensor of them", device)
        if isinstance(wanted, Tensor) and wanted.shape != (batch,):
            raise LoweringError(f"truncate: lengths must be an int or int[{batch}], got shape {list(wanted.shape)}")
        many, held = (torch.as_tensor(n, device=device).expand(batch).tolist() for n in (wanted, self.length))
        if any(not 0 <= n <= most for n, most in zip(many, held, strict=True)):
            raise LoweringError(f"truncate: lengths must lie between 0 and those of the cache, {held}; got {many}")
        if self.window is not None:
            start = torch.as_tensor(self.start, device=device).expand(batch).tolist()
            if any(n < most and begin > max(0, n - self.window + 1) for n, most, begin in zip(many, held, start, strict=True)):
                raise LoweringError(
                    f"truncate: a window of {self.window} before {many} is no longer there, the keys begin at {start}; "
                    "cut right after the call that added too much"
                )
        uniform = isinstance(wanted, int) and isinstance(self.length, int)
        self.length = wanted if uniform else torch.as_tensor(many, device=device)
        self._end = max(many, default=0)
        if self._padded is not None:
            kept = torch.arange(self._padded.shape[1], device="cpu") < torch.tensor(many, device="cpu")[:, None]
            self._padded = trimmed(self._padded & kept)

    def accept(self, path: Sequence[int] | Sequence[Sequence[int]] | Tensor, *, prefix: int | Sequence[int] | Tensor) -> None:
        """Keeps the prefix, and one path of the tree of drafts after it, moved to the places behind the prefix.

        ``cache.accept([0, 2, 5], prefix=20)`` leaves 23 tokens. Keys are moved as they are: with ``rope`` give the call of the
        tree ``positions=prefix + depth``, which are those of the accepted tokens.

        Args:
            path: the accepted nodes from a root down, ``int[n]`` or ``int[B, n]``. Node 0 is the first token after the prefix.
                Where fewer are accepted it ends with ``-1``, or is empty. Reading a tensor forces a host sync.
            prefix: tokens before the tree, an int or ``int[B]``.

        Raises:
            OperandError: a path or a prefix that is not of integers.
            LoweringError: a path that is not in increasing order, nodes or a prefix that the cache does not have, or a prefix so
                short that the window before the kept tokens is dropped.
        """
        if self.key is None or self.value is None:
            raise LoweringError("the cache is empty: there is nothing to accept")
        device, batch = self.key.device, self.key.shape[0]
        is_empty = path.numel() == 0 if isinstance(path, Tensor) else isinstance(path, Sequence) and not path
        nodes = _integers([-1] if is_empty else path, "accept: path", "a list or tensor of integers", device)
        before = _integers(prefix, "accept: prefix", "an integer, or a list or tensor of them", device)
        if not isinstance(nodes, Tensor) or nodes.dim() not in (1, 2) or (nodes.dim() == 2 and len(nodes) != batch):
            raise LoweringError(f"accept: path must be int[n] or int[{batch}, n], got {kind_of(path)}")
        if isinstance(before, Tensor) and before.shape != (batch,):
            raise LoweringError(f"accept: prefix must be an int or int[{batch}], got shape {list(before.shape)}")
        paths = nodes.expand(batch, -1).tolist()
        begins, held, start = (
            torch.as_tensor(n, device=device).expand(batch).tolist() for n in (before, self.length, self.start)
        )
        counts = [sum(node >= 0 for node in one) for one in paths]
        for one, count, begin, end in zip(paths, counts, begins, held, strict=True):
            if any(low >= high for low, high in pairwise(one[:count])) or min(one[:count], default=0) < 0:
                raise LoweringError(f"accept: a path has nodes in increasing order, and then -1 where it is shorter; got {one}")
            if begin < 0 or max(one, default=-1) >= end - begin:
                raise LoweringError(f"accept: path {one} after prefix={begin} is not within the {end} tokens of the cache")
        lengths = [begin + count for begin, count in zip(begins, counts, strict=True)]
        is_one = isinstance(before, int) and nodes.dim() == 1
        self.truncate(lengths[0] if is_one and batch else lengths)
        moves = [
            (sequence, begins[sequence] - start[sequence] + place, begins[sequence] - start[sequence] + node)
            for sequence in range(batch)
            for place, node in enumerate(paths[sequence][: counts[sequence]])
            if place != node
        ]
        if not moves:
            return
        sequences, to, at = torch.tensor(moves, device=device).T
        if self.window is not None:  # an earlier call may have saved these tensors for its backward pass
            self.key, self.value = self.key.clone(), self.value.clone()
        for tokens in (self.key, self.value):
            tokens[sequences, :, to] = tokens[sequences, :, at]

    def reorder(self, indices: Tensor) -> None:
        """Replaces sequence ``i`` by sequence ``indices[i]``, as in beam search. The batch may change.

        Args:
            indices: ``int[B]``, on the device of the keys.
        """
        if self.key is None or self.value is None:
            raise LoweringError("the cache is empty: there is nothing to reorder")
        is_index = isinstance(indices, Tensor) and indices.dim() == 1 and indices.dtype in (torch.int32, torch.int64)
        if not is_index or not_plain_reason(indices):
            raise OperandError(f"reorder: indices must be an integer tensor [B], got {kind_of(indices)}")
        if indices.device != self.key.device:
            raise LoweringError(f"reorder: indices are on {indices.device}, the keys on {self.key.device}; move them with .to()")
        if (
            not _sync.needs_sync(indices)
            and indices.numel()
            and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.key)
        ):
            raise LoweringError(f"reorder: indices must lie between 0 and {len(self.key) - 1}, got {indices.tolist()}")
        with torch.inference_mode(False):  # as where they are made
            self.key, self.value = self.key.index_select(0, indices), self.value.index_select(0, indices)
        if isinstance(self.length, Tensor):
            self.length = self.length.index_select(0, indices)
        if isinstance(self.start, Tensor):
            self.start = self.start.index_select(0, indices)
        if self._padded is not None:
            self._padded = trimmed(self._padded[indices.cpu()])

    # ---------------------------------------------------------------- memory

    def _check(self, key: Tensor, value: Tensor) -> None:
        if self.key is None or self.value is None:
            return
        for name, new, held in (("keys", key, self.key), ("values", value, self.value)):
            if (*new.shape[:2], new.shape[3]) != (*held.shape[:2], held.shape[3]):
                raise LoweringError(
                    f"the cache holds {name} [B, n_kv_heads, length, d_head] of {held.shape[0]} sequences and {held.shape[1]} "
                    f"heads of {held.shape[3]}, got {list(new.shape)}; reset() it for another batch"
                )
            if new.device != held.device:
                raise LoweringError(f"the cache holds {name} on {held.device}, got some on {new.device}; reset() it")

    def _write(self, room: Tensor, new: Tensor) -> None:
        if isinstance(self.length, int):
            room[:, :, self.length : self.length + new.shape[2]] = new
        else:
            sequences = torch.arange(new.shape[0], device=new.device)[:, None]
            room[sequences, :, self.positions(new.shape[2], new.device)] = new.transpose(1, 2)

    def _shifted(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int | Tensor]:
        """The last keys of the window followed by the new ones, and the position of the first."""
        number = min(cast(int, self.window) - 1, self._end)
        if self.key is None or self.value is None:
            return key, value, self.start
        begin: Any = self.length - number
        slots = begin - self.start
        if isinstance(slots, Tensor):
            at = (slots[:, None] + torch.arange(number, device=key.device)).clamp(min=0)
            at = at[:, None, :, None]
            old = [held.gather(2, at.expand(-1, held.shape[1], -1, held.shape[3])) for held in (self.key, self.value)]
        else:
            old = [held[:, :, slots : slots + number] for held in (self.key, self.value)]
        return torch.cat((old[0], key), 2), torch.cat((old[1], value), 2), begin


def _integers(value: Any, what: str, wanted: str, device: torch.device) -> int | Tensor:
    """An argument of integers, an int or ``int64`` on the device."""
    try:
        table = as_table(value, what)
    except OperandError:
        table = None
    if table is None or table.boolean:
        raise OperandError(f"{what} must be {wanted}, got {kind_of(value)}")
    if isinstance(table, Literal) and not table.size:
        return cast(int, table.tolist())
    return table.to_tensor().to(device, torch.int64)


class Step:
    """One call with a :class:`KVCache`, from :meth:`KVCache.step`.

    Attributes:
        key: the keys to attend to, ``[B, H_kv, kv_len, D]``. Of one query whose mask without data is a window, those in it.
        value: their values.
        mask: the mask over these keys; None where the queries attend to all of them.
        q_offset: position of the first query for the mask, an int or ``int64[B]``; 0 for a mask that is lowered.
    """

    def __init__(
        self, cache: KVCache, number: int, key: Tensor, value: Tensor, start: int | Tensor = 0, *, replaces: bool = False
    ) -> None:
        self.key, self.value = key, value
        self.mask: Mask | LoweredMask | BlockMask | None = None
        self.q_offset = self._begin = cache.length
        self._cache, self._number, self._start, self._padded = cache, number, start, cache._padded
        self._held = (key.detach(), value.detach(), start) if replaces else None  # by the cache, once the call is counted in

    def commit(self) -> None:
        """Counts the tokens of the call in. Without it the next step takes their place, as after a call that fails."""
        cache = self._cache
        if self._held is not None:
            cache.key, cache.value, cache.start = self._held
        cache._padded = self._padded
        cache.length = self._begin + self._number
        cache._end += self._number

    def score_mod(self, score_mod: Score | ScoreMod | None) -> ScoreMod | None:
        """A ``score_mod`` over positions in the whole sequence as one over the queries and keys of this call."""
        if score_mod is None:
            return None
        if isinstance(score_mod, Score):
            return PlacedScore(score_mod, self._begin, self._start)
        batch, device = self.key.shape[0], self.key.device
        rows, columns = (torch.as_tensor(n, device=device).expand(batch) for n in (self._begin, self._start))

        def shifted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score_mod(score, b, h, q_idx + rows[b], kv_idx + columns[b])

        return shifted

    def _set_mask(self, mask: Mask, heads: int) -> None:
        """Sets the mask from that of the whole sequence, where it hides all that the call must not see."""
        cache, end = self._cache, self._cache._end + self._number
        sizes = self.key.shape[0], self._number
        tokens = CallTokens(*sizes, self._begin, end, self._start, self.key.device, cache.is_context)
        last = last_keys(mask, tokens)
        own = mask_over_cache(mask, tokens) if last is None else ALL_CELLS
        hides_later = check_later_keys(mask, tokens, heads, cache.capacity)
        if not cache.is_context:
            self._padded = padded_keys(mask, tokens, cache._padded, heads)
            if cache.window is not None and (cache.capacity is None or cache.capacity > cache.window):
                check_window(mask, cache.window)
            if cache.window is None and isinstance(self._begin, Tensor) and not hides_later:
                own = own & (kv < TensorTable(self._begin + self._number)[b])
        if last is not None and last < self.key.shape[2]:
            self._start = cast(int, self._begin) + 1 - last
            self.key, self.value = self.key[:, :, -last:], self.value[:, :, -last:]
        self.mask = None if own is ALL_CELLS else own


def _check_cached_keys(mask: LoweredMask | BlockMask, query: Tensor, key: Tensor, capacity: int | None) -> None:
    """Raises a LoweringError where a mask is lowered for another number of keys than a call with a cache has."""
    kv_len, wanted = mask.shape[-1], key.shape[2]
    if kv_len == wanted:
        return
    hint = ""
    if capacity is not None:
        hint = f", or once for its capacity: flexmask.plan(mask, {query.shape[2]}, {capacity}), called with q_offset=cache.length"
    raise LoweringError(
        f"the {type(mask).__name__} is for kv_len={kv_len}, but the call attends to {wanted} keys, those in the cache after it. "
        f"Make the mask for kv_len={wanted}{hint}"
    )
