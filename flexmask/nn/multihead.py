"""Multi-head attention under any mask, as a module: ``[B, q_len, d_in]`` to ``[B, q_len, d_out]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Self, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexmask import _sync
from flexmask._checks import check_function, check_plain, checked_int, checked_number, kind_of, names_explained, not_plain_reason
from flexmask._transforms import autocast_dtype
from flexmask.backends.api import attend, check_kernel_options, checked_call
from flexmask.backends.backend import Call, check_backend, entered_parallel, refuse_in_parallel
from flexmask.backends.dropout import check_dropout
from flexmask.backends.weights import attention_weights
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.mask import Mask
from flexmask.nn.call_masks import RESERVED, bound_mask, module_mask, unplaced
from flexmask.nn.convert import NOT_LOADED, SIZES, is_linear, load_weights, sizes_from_torch, state_from_torch, to_torch
from flexmask.nn.kv_cache import KVCache
from flexmask.plans.lowered import LoweredMask
from flexmask.scores.placed import placed_score
from flexmask.scores.score import Score, ScoreLike, ScoreMod, as_score_mod
from flexmask.tracing.trace import MaskLike

#: Rotates queries or keys ``[B, H, length, d_head]`` by their positions, ``int[length]`` or ``int[B, length]``.
Rope: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class MultiheadFlexAttention(nn.Module):
    """Multi-head self-attention or cross-attention under any mask.

    In the mask True means attend. (In ``torch.nn.MultiheadAttention`` True means masked out: its ``key_padding_mask`` is
    ``key_padding(hide=key_padding_mask)`` here, its boolean ``attn_mask`` is ``~from_dense(attn_mask)``.)

    Under ``torch.compile(fullgraph=True)`` the module's mask, and every mask of :meth:`forward`, becomes a part of the graph
    (with a cache see :class:`flexmask.KVCache`). Its tensors are inputs: other values run without compiling again, and one graph
    serves all lengths, batch sizes and numbers of documents. Lists are data, too; another number compiles again, as in
    ``layer(x, w=6)``: give ``torch.tensor(6)``. A LoweredMask of :func:`flexmask.plan` serves all layers of a model.
    ``torch.export`` needs ``strict=False``.

    Args:
        d_in: width of the input, and of the context unless ``d_context`` is given.
        d_out: width of the output.
        n_heads: number of heads.
        bias: whether the projections of queries, keys and values have a bias.
        n_kv_heads: heads of the keys and values, a divisor of ``n_heads``, and ``n_heads`` by default: query head ``h`` uses key
            head ``h // (n_heads // n_kv_heads)``.
        d_head: width of a head, ``d_out / n_heads`` by default.
        d_context: width of the context where it differs from ``d_in``; the module is then for cross-attention.
        out_bias: whether the output projection has a bias.
        dropout: probability that an attention weight is dropped in training mode.
        mask: a mask, its text, or a ``mask_mod``, which is traced here, once, for calls of :meth:`forward` without one. A mask in
            the call replaces it: with ``mask="causal"``, ``layer(x, key_padding(lengths))`` is not causal. It moves with the
            module, and is not in its state: for a module made on ``meta`` its tensors name a device of their own.
        score_mod: what becomes of the scores, as ``"alibi() >> softcap(50.0)"``: see :func:`flexmask.attention`. With a cache
            the indices of a function are positions in the whole sequence. Tensors of a score move with the module, and its
            parameters are registered, as ``score_table`` (further ones ``score_table1``, ...).
        scale: factor of the scores; ``1 / sqrt(d_head)`` by default.
        rope: ``rope(x, positions) -> x`` rotates queries and keys, ``[B, heads, length, d_head]``. A module is registered.
        backend, kernel_options: see :func:`flexmask.attention`.
        device, dtype: of the weights.

    Attributes:
        in_proj: the stacked projections to queries, keys and values:
            ``Linear(d_in, (n_heads + 2 * n_kv_heads) * d_head)``. Where ``d_context`` differs from ``d_in`` there are
            ``q_proj`` and, for keys and values, ``kv_proj`` instead.
        out_proj: ``Linear(n_heads * d_head, d_out)``.

    Raises:
        OperandError: an argument of a wrong type.
        ExpressionError: sizes that do not divide, or a mask with a parameter named like an argument of :meth:`forward`.

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762; grouped queries: Ainslie et al., https://arxiv.org/abs/2305.13245
    """

    @names_explained(SIZES)
    def __init__(
        self,
        d_in: int,
        d_out: int,
        n_heads: int,
        bias: bool = False,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        d_context: int | None = None,
        out_bias: bool = True,
        dropout: float = 0.0,
        mask: MaskLike | None = None,
        score_mod: ScoreLike | None = None,
        scale: float | None = None,
        rope: Rope | None = None,
        backend: str = "auto",
        kernel_options: Mapping[str, object] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_backend(backend)
        check_dropout(dropout, "dropout")
        if scale is not None:
            checked_number(scale, "scale")
        check_kernel_options(kernel_options)
        for name, flag in (("bias", bias), ("out_bias", out_bias)):
            if not isinstance(flag, bool | int):
                raise OperandError(f"{name} must be True or False, got {kind_of(flag)}")
        if rope is not None:
            check_function(rope, "rope", "(x, positions) -> x")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OperandError(f"dtype must be a torch.dtype, got {kind_of(dtype)}")
        if device is not None:
            _sync.resolve_device(device)
        required = {"d_in": d_in, "d_out": d_out, "n_heads": n_heads}
        optional = {"n_kv_heads": n_kv_heads, "d_head": d_head, "d_context": d_context}
        given = required | {name: size for name, size in optional.items() if size is not None}
        for name, size in given.items():
            checked_int(size, name, least=None, most=2**31)
        if min(given.values()) < 1:
            raise ExpressionError(f"sizes must be at least 1; got {', '.join(f'{name}={size}' for name, size in given.items())}")
        if d_head is None and d_out % n_heads:
            raise ExpressionError(f"n_heads must divide d_out, got {d_out=}, {n_heads=}; give d_head= for heads of another width")
        if n_kv_heads is not None and n_heads % n_kv_heads:
            raise ExpressionError(f"n_kv_heads must divide n_heads, got {n_kv_heads=}, {n_heads=}")
        self.d_in, self.d_out, self.n_heads = d_in, d_out, n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.d_head = d_out // n_heads if d_head is None else d_head
        self.d_context = d_in if d_context is None else d_context
        self.dropout, self.scale, self.rope, self.backend = dropout, scale, rope, backend
        self.score_mod = as_score_mod(score_mod)
        self.kernel_options = kernel_options
        self._mask = module_mask(mask)
        self._identity = object()  # identifies the module in a KVCache
        inner, options = self.n_heads * self.d_head, {"device": device, "dtype": dtype}
        both = 2 * self.n_kv_heads * self.d_head
        if self.d_context == d_in:
            self.in_proj = nn.Linear(d_in, inner + both, bias=bias, **cast(Any, options))
        else:
            self.q_proj = nn.Linear(d_in, inner, bias=bias, **cast(Any, options))
            self.kv_proj = nn.Linear(self.d_context, both, bias=bias, **cast(Any, options))
        self.out_proj = nn.Linear(inner, d_out, bias=out_bias, **cast(Any, options))

    @property
    def mask(self) -> Mask | None:
        """The mask of calls without one, or None. A mask, its text, a ``mask_mod`` or None can be assigned, and is then read.

        ``layer.mask.params`` are the names of the parameters that a call gives values to: see :func:`flexmask.nn.call`.

        Raises:
            OperandError: something else is assigned.
            TextError: a text that is not a mask.
            ExpressionError: a mask with a parameter named like an argument of :meth:`forward`.
        """
        return self._mask

    @mask.setter
    def mask(self, mask: MaskLike | None) -> None:
        device = self._device
        found = module_mask(mask, device)
        self._mask = found if found is None or device.type == "meta" else found.to(device)

    @property
    def _device(self) -> torch.device:
        """Where the module is: torch's quantized projections, which have no tensors, are for the CPU."""
        return next((tensor.device for tensor in chain(self.parameters(), self.buffers())), torch.device("cpu"))

    @property
    def score_mod(self) -> Score | ScoreMod | None:
        """What becomes of the scores, or None. A score, its text, a function or None can be assigned, and is then read.

        Parameters that are tables of a score are those of the module, ``score_table``, ``score_table1`` and so on, where what
        replaces parameters finds them; the score that is read has these.

        Raises:
            OperandError: something else is assigned, or the module has other attributes of these names.
            TextError: a text that is not a score.
        """
        score = self._modules.get("score_mod", self._own_score)
        if not isinstance(score, Score) or not self._score_tables:
            return cast("ScoreMod | Score | None", score)
        names = self._score_tables
        return score.with_tensors(
            [getattr(self, names[place]) if place in names else own for place, own in enumerate(score.tensors)]
        )

    @score_mod.setter
    def score_mod(self, score_mod: ScoreLike | None) -> None:
        found = as_score_mod(score_mod)
        tensors = found.tensors if isinstance(found, Score) else ()
        places = [place for place, own in enumerate(tensors) if isinstance(own, nn.Parameter)]
        tables = {place: f"score_table{number or ''}" for number, place in enumerate(places)}
        before = set(self.__dict__.get("_score_tables", {}).values())
        taken = [name for name in tables.values() if name not in before and hasattr(self, name)]
        taken += [name for name in before if name not in self._parameters]
        if taken:
            raise OperandError(
                f"{', '.join(taken)} of the module is not a plain table of its score_mod: remove or rename it first"
            )
        for name in before:
            del self._parameters[name]
        self._modules.pop("score_mod", None)
        if isinstance(found, nn.Module):
            self._modules["score_mod"], found = found, None
        self._own_score, self._score_tables = found, tables
        for place, name in tables.items():
            self.register_parameter(name, cast(nn.Parameter, tensors[place]))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the properties, of which torch would register a module, as a ``mask_mod`` may be, as a part of this one."""
        if name in ("mask", "score_mod"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(
        self,
        x: Tensor,
        mask: MaskLike | LoweredMask | BlockMask | None = None,
        *others: Any,
        context: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        return_qk: bool = False,
        **parameters: Any,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Attends from each position of ``x`` to ``x``, or to ``context``.

        Args:
            x: ``[B, q_len, d_in]``.
            mask: a mask, its text, a ``mask_mod`` (which is traced at each call), what a :func:`flexmask.plan` gives, or a
                BlockMask. It replaces the module's own mask. None for the module's own mask, or no mask where it has none.
            others: must be empty. ``key`` and ``value`` of torch's module are ``context`` here.
            context: ``[B, kv_len, d_context]``, the source of keys and values in cross-attention. Not needed where ``cache``
                holds its keys.
            cache: the tokens before ``x``, to which those of ``x`` are appended: see :class:`flexmask.KVCache`. The mask is that
                of the whole sequence. A BlockMask or a LoweredMask is made with ``q_offset``, for the ``capacity`` of the cache
                or its tokens. Without ``q_offset`` it has the rows from position 0 on, which is not checked.
            positions: positions of the tokens of ``x`` for ``rope``, ``int[q_len]`` or ``int[B, q_len]``, e.g. where they restart
                in each document. By default they count from the start of the sequence. Those of a context always do.
            return_qk: whether to return the queries and keys as well, after ``rope``.
            parameters: the values of the mask's parameters, e.g. ``lengths=`` for ``"key_padding(lengths)"``.

        Returns:
            ``[B, q_len, d_out]``, a tensor and no pair as of torch's module; with ``return_qk`` also the queries
            ``[B, n_heads, q_len, d_head]`` and the keys ``[B, n_kv_heads, kv_len, d_head]``.

        Raises:
            ExpressionError: an unknown or missing parameter of the mask.
            LoweringError: shapes that do not fit, a mask that contradicts them, or a cache that is full, belongs to another
                layer, or has a window that the mask does not keep to.
            OperandError: an argument of a wrong type or dtype.
        """
        if others:
            raise OperandError(unplaced(others))
        self._check(x, context, cache, positions)
        parallel = entered_parallel()
        if cache is not None or context is not None:
            refuse_in_parallel("a cache" if context is None else "cross-attention")
        is_traced = torch.compiler.is_compiling() and parallel is None
        mask = bound_mask(self, mask, parameters, x.device, bind=parallel is not None or 0 not in x.shape)
        if positions is None and cache is not None and self.rope is not None:
            positions = cache.positions(x.shape[1], x.device)
        if positions is None and parallel is not None:
            positions = parallel.positions
        query, *new = self._heads(x, context, positions, keys=cache is None or not cache.holds_context)
        key, value = cast(tuple[Tensor, Tensor], new or (None, None))
        score_mod = self.score_mod
        q_offset: int | Tensor = 0
        if cache is None:
            score_mod = placed_score(score_mod, 0)
        else:
            step = cache.step(query, key, value, mask)
            if is_traced:  # dynamo drops writes to a new cache after FlexAttention
                step.commit()
            key, value, mask, score_mod, q_offset = step.key, step.value, step.mask, step.score_mod(score_mod), step.q_offset
        call = Call(
            query,
            key,
            value,
            score_mod=score_mod,
            scale=self.scale,
            enable_gqa=self.n_kv_heads != self.n_heads,
            q_offset=q_offset,
            dropout_p=self.dropout if self.training else 0.0,
            kernel_options=self.kernel_options,
        )
        heads, _ = attend(checked_call(call, mask), self.backend)
        if cache is not None and not is_traced:  # a call that fails must not change the cache
            step.commit()
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return (out, query, key) if return_qk else out

    @torch.no_grad()
    def attention_weights(
        self,
        x: Tensor,
        mask: MaskLike | None = None,
        *,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        **parameters: Any,
    ) -> Tensor:
        """The attention weights of a call with these arguments, before dropout: ``float[B, n_heads, q_len, kv_len]``.

        The arguments and errors are those of :meth:`forward`, except that the mask is not a BlockMask.
        :func:`flexmask.plotting.mpl.plot_scores` draws them.
        """
        self._check(x, context, None, positions)
        bound = bound_mask(self, mask, parameters, x.device, bind=True)
        if isinstance(bound, LoweredMask | BlockMask):
            raise OperandError(f"attention_weights takes a Mask, its text or a mask_mod, got a {type(bound).__name__}")
        query, key, _ = self._heads(x, context, positions, keys=True)
        return attention_weights(query, key, bound, scale=self.scale, score_mod=self.score_mod)

    # ---------------------------------------------------------------- torch's module

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, batch_first: bool = False, mask: MaskLike | None = None, backend: str = "auto"
    ) -> Self:
        """A module with copies of the weights of a ``torch.nn.MultiheadAttention``, in the same mode.

        Frozen weights, ``requires_grad=False``, stay frozen; where two become one, it is frozen if both are. Make an optimizer
        after this call, from the new weights.

        True means attend: for ``key_padding_mask=hidden`` and a boolean ``attn_mask`` of that module, give this one
        ``key_padding(hide=hidden) & ~from_dense(attn_mask)``. A fully masked row gives 0 before the output projection, not NaN.

        Args:
            module: torch's module. With ``kdim == vdim`` other than its width, the new module is for cross-attention.
            batch_first: must be True for a module with ``batch_first=False``, torch's default: here the batch always comes first,
                so that its calls change to ``x.transpose(0, 1)``.
            mask: see :class:`MultiheadFlexAttention`.
            backend: see :class:`MultiheadFlexAttention`.

        Raises:
            LoweringError: ``kdim`` and ``vdim`` that differ, ``add_bias_kv``, ``add_zero_attn``, or ``batch_first=False``.
        """
        made = cls(**sizes_from_torch(module, batch_first), mask=mask, backend=backend)
        load_weights(made, state_from_torch(module))
        return made.train(module.training)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """A ``torch.nn.MultiheadAttention`` with copies of the weights, in the same mode.

        It has no mask, see :meth:`from_torch`, and no hooks.

        Frozen weights stay frozen, as in :meth:`from_torch`.

        Args:
            batch_first: the order of the axes of its inputs.

        Raises:
            LoweringError: it has no counterpart: widths that differ, grouped queries, ``rope``, ``score_mod``, ``scale``; or a
                projection is not a plain ``Linear``, as one with an adapter or a quantized weight.
        """
        return to_torch(self, batch_first).train(self.training)

    # ---------------------------------------------------------------- parts of forward

    def _check(self, x: Tensor, context: Tensor | None, cache: KVCache | None, positions: Tensor | None) -> None:
        weight: Any = getattr(self.out_proj, "weight", None)  # a method of torch's quantized projections
        has_dtype = isinstance(weight, Tensor) and weight.is_floating_point()
        has_dtype = has_dtype and (weight.itemsize > 1 or is_linear(self.out_proj))  # else it is quantized
        for name, tensor, width in (("x", x, self.d_in), ("context", context, self.d_context)):
            if tensor is None and name == "context":
                continue
            if not isinstance(tensor, Tensor):
                raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
            check_plain(tensor, name)
            if has_dtype and tensor.dtype != weight.dtype and autocast_dtype(tensor) != autocast_dtype(weight):
                raise OperandError(f"{name} is {tensor.dtype}, the module {weight.dtype}; convert one with .to()")
            if tensor.dim() != 3 or tensor.shape[-1] != width:
                hint = "; of one sequence take tensor.unsqueeze(0)" if tensor.dim() == 2 and tensor.shape[1] == width else ""
                raise LoweringError(f"{name} must be [B, length, {width}], got {list(tensor.shape)}{hint}")
        if context is not None and context.shape[0] != x.shape[0]:
            raise LoweringError(f"x and context must have one batch, got {x.shape[0]} and {context.shape[0]} sequences")
        if cache is not None and not isinstance(cache, KVCache):
            raise OperandError(f"cache must be a flexmask.KVCache, got {type(cache).__name__}")
        if cache is not None:
            cache.claim(self._identity)
            if cache.is_context and context is None and not cache.holds_context:
                raise LoweringError(
                    "KVCache() is for the keys of a context: for self-attention give KVCache(capacity), for cross-attention "
                    "context= in the first call"
                )
            if context is not None and not cache.is_context:
                raise LoweringError(f"cross-attention needs a cache of its own, KVCache() without a capacity; got {cache!r}")
        if positions is not None:
            fits = isinstance(positions, Tensor) and not not_plain_reason(positions)
            fits = fits and not (positions.is_floating_point() or positions.dtype == torch.bool)
            if not fits or positions.shape not in ((x.shape[1],), (x.shape[0], x.shape[1])):
                wanted = f"int[{x.shape[1]}] or int[{x.shape[0]}, {x.shape[1]}]"
                raise LoweringError(f"positions must be {wanted}, got {kind_of(positions)}")
        held = cache.key if cache is not None and cache.holds_context else None
        if held is not None:
            given, kept = [x.shape[0], held.shape[2] if context is None else context.shape[1]], [held.shape[0], held.shape[2]]
            if given != kept:
                raise LoweringError(
                    f"the cache holds the keys of a context [B, kv_len] = {kept}, and the call has {given}: the first call with "
                    "a cache computes the keys, and all others read them. Call cache.reset() for another context"
                )
        if context is None and held is None and self.d_context != self.d_in:
            raise LoweringError(f"the module is made for cross-attention: give context=, [B, length, {self.d_context}]")

    def _heads(self, x: Tensor, context: Tensor | None, positions: Tensor | None, *, keys: bool) -> list[Tensor]:
        """As :meth:`_project`, with queries and keys rotated by ``rope``; by default positions count from 0."""
        heads = self._project(x, context, keys=keys)
        if self.rope is not None:
            own = torch.arange(x.shape[1], device=x.device) if positions is None else positions
            others = own if context is None else torch.arange(context.shape[1], device=x.device)
            heads[:2] = [self.rope(part, at).to(part.dtype) for part, at in zip(heads, (own, others), strict=False)]
        return heads

    def _project(self, x: Tensor, context: Tensor | None, *, keys: bool) -> list[Tensor]:
        """Queries, and with ``keys`` also keys and values, as ``[B, heads, length, d_head]``."""
        own, others = [self.n_heads], [self.n_kv_heads] * 2
        if self.d_context != self.d_in:
            projected = [(self.q_proj(x), own)]
            if keys:
                projected.append((self.kv_proj(context), others))
        elif context is None and keys:
            projected = [(self.in_proj(x), own + others)]
        else:
            inner = self.n_heads * self.d_head
            projected = [(self._part_of_in_proj(x, slice(inner)), own)]
            if keys:
                projected.append((self._part_of_in_proj(cast(Tensor, context), slice(inner, None)), others))
        # By view, as dynamo does not trace torch's unflatten under a default device.
        parted = [both.view(*both.shape[:2], sum(heads), self.d_head).split_with_sizes(heads, 2) for both, heads in projected]
        return [part.transpose(1, 2) for parts in parted for part in parts]

    def _part_of_in_proj(self, x: Tensor, part: slice) -> Tensor:
        """Some of the channels that ``in_proj`` gives."""
        linear = self.in_proj
        hooks = linear._forward_pre_hooks, linear._forward_hooks, linear._backward_pre_hooks, linear._backward_hooks
        if not is_linear(linear) or any(hooks):
            return cast(Tensor, linear(x))[..., part]  # adapters, offloading and hooks count only where it is called
        return F.linear(x, linear.weight[part], None if linear.bias is None else linear.bias[part])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: Any) -> None:
        """Says what to do with the weights of torch's module."""
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
        if strict and {f"{prefix}in_proj_weight", f"{prefix}q_proj_weight"} & set(state_dict):
            lists[-1].append(NOT_LOADED)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the mask's tensors with the weights."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._mask is not None:
            self._mask = self._mask.to(self._device)
        if isinstance(self._own_score, Score):
            self._own_score = self._own_score.to(self._device)
        return self

    def extra_repr(self) -> str:
        """The sizes, as the module prints them."""
        parts = [f"d_in={self.d_in}, d_out={self.d_out}, n_heads={self.n_heads}"]
        shown = {"n_kv_heads": self.n_kv_heads != self.n_heads, "d_head": self.d_head * self.n_heads != self.d_out}
        shown |= {"d_context": self.d_context != self.d_in, "dropout": self.dropout != 0}
        parts += [f"{name}={getattr(self, name)}" for name, is_shown in shown.items() if is_shown]
        if self.mask is not None:
            parts.append(f"mask={self.mask.brief()!r}")
        if isinstance(self.score_mod, Score):
            parts.append(f"score_mod={str(self.score_mod)!r}")
        return ", ".join(parts)


def call(layer: MultiheadFlexAttention, x: Tensor, **given: Any) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Calls a layer with a mask of its own, without the values of parameters that this mask does not have.

    For a model whose layers have different masks, which takes the data of all of them: ``call(layer, x, ids=ids, lengths=n)``
    gives ``lengths`` only to the layers with ``lengths`` among ``layer.mask.params``. A parameter that a mask has and that is not
    given is an error, so a misspelt name is one, too.

    Args:
        layer: the layer.
        x: as for :meth:`flexmask.MultiheadFlexAttention.forward`.
        given: the other arguments of ``forward`` but ``mask``, and values by the names of parameters.

    Raises:
        OperandError: ``layer`` is another module, or there is a ``mask`` among the arguments: call the layer with it.
        ExpressionError: a missing parameter of the layer's mask.
    """
    if not isinstance(layer, MultiheadFlexAttention):
        raise OperandError(f"layer must be a flexmask.MultiheadFlexAttention, got {kind_of(layer)}")
    if "mask" in given:
        raise OperandError("call takes the layer's own mask, which is set as layer.mask = ...; with another one call the layer")
    own = () if layer.mask is None else layer.mask.params
    out: Tensor | tuple[Tensor, Tensor, Tensor] = layer(x, **{k: v for k, v in given.items() if k in RESERVED or k in own})
    return out
