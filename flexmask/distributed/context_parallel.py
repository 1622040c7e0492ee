"""Attention over a sequence whose tokens are distributed over the ranks of a process group."""

from __future__ import annotations

from functools import cached_property, partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from flexmask import _sync
from flexmask._checks import checked_int, kind_of, lengths_text, nearest
from flexmask._transforms import is_observed
from flexmask.backends.backend import ENTERED, Call, Run, check_sizes
from flexmask.distributed.exchange import HeadExchange, TokenExchange, check_agreement, device_of, group_of
from flexmask.distributed.query_units import KeyLists
from flexmask.distributed.rank_mask import Declared, find_declared, known, mask_of_heads, mask_of_queries, text_of
from flexmask.distributed.sharding import Balance, Masks, Sharding, layers_of, shard_sequence
from flexmask.distributed.torch_context_parallel import gathered_block_mask, load_balancer
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.lowering.block_mask import block_sizes
from flexmask.scores.score import ScoreMod
from flexmask.tracing.trace import MaskLike, as_mask

#: What the ranks exchange: see :class:`ContextParallel`.
Strategy: TypeAlias = Literal["keys", "heads"]


class ContextParallel:
    """A sequence whose tokens are distributed over the ranks of a process group, for self-attention under some masks::

        cp = ContextParallel(mesh["cp"], mask, seq_len=1_000_000)  # the same on each rank
        tokens, targets = cp.shard(tokens, dim=1), cp.shard(targets, dim=1)
        with cp:  # around forward and backward
            loss = cross_entropy(model(tokens, mask).transpose(1, 2), targets, reduction="sum") / 1_000_000
            loss.backward()

    Inside ``with``, :func:`flexmask.attention` and :class:`flexmask.MultiheadFlexAttention` take the tokens of this rank and give
    its part of the output, as one process computes it for the whole sequence: masks, ``score_mod`` and ``rope`` see positions in
    the whole sequence, and dropout drops the same weights, by a seed that rank 0 draws or that is given, the same on each rank.
    They run on every backend, and under ``torch.compile``. Cross-attention and caches are errors there.

    All gradients are those of the sum of the losses of all ranks. A rank has the gradients of its own tensors, so the gradients
    of weights are to be summed over the group. DistributedDataParallel and FSDP average them: multiply the loss by the number of
    ranks.

    Where layers are checkpointed, call ``backward()`` inside ``with`` as well, since it runs them again. Outside, torch raises a
    CheckpointError with ``use_reentrant=False``; with ``use_reentrant=True`` gradients are wrong there, without an error.
    ``torch.compile`` compiles again for a ContextParallel with other sizes: the tokens of this rank, or those that it sends and
    receives.

    Every layer calls collectives, so all ranks run the same layers in the same order, also those that hold no token. The first
    calls, one for each layer of ``masks``, are compared: where masks, sizes, dtypes or dropout differ, every rank raises. Calls
    in code that ``torch.compile`` traces are not compared. If a rank fails later, the others raise the process group's error
    after its time-out.

    Args:
        mesh: a one-dimensional DeviceMesh, such as ``mesh["cp"]``, or a process group; None for the group of all processes.
        masks: the mask of all layers; a list, one for each layer; or a dict from masks to the number of layers that have them.
            Every mask of a call inside ``with`` must be one of them, with the same tensors; under ``torch.compile`` the
            same object or text. None is no mask.
        seq_len: tokens of the sequence; any number.
        balance: how the tokens are distributed: see :func:`shard_sequence`.
        strategy: ``"keys"`` sends each rank the keys and values that its queries attend to. ``"heads"`` gives each rank the whole
            sequence of ``heads / ranks`` heads; then the number of ranks must divide the heads of keys.
        batch: sequences; needed where a mask depends on them without data for each.
        heads: query heads; needed where a mask depends on them without a part for each.
        block_size: tokens in a block of the kernel, or the pair (queries, keys).
        device: of the tokens; by default that of the mesh, and for a process group of nccl the current CUDA device, else the CPU.

    Attributes:
        group: the process group.
        rank: this process in the group.
        sharding: which rank holds which tokens.
        positions: the positions of the tokens of this rank in order, ``int64[n]``; n may be 0.

    Raises:
        OperandError: an argument of another type.
        LoweringError: a mesh that is not one-dimensional, ranks that give different arguments, a mask that cannot be lowered,
            or its data on another device. In calls: another mask, other sizes, changed data, or transforms of ``torch.func``.

    Source: context parallelism, Dubey et al., https://arxiv.org/abs/2407.21783, section 3.3.2; heads: Jacobs et al., DeepSpeed
    Ulysses, https://arxiv.org/abs/2309.14509
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup | None,
        masks: Masks | None,
        seq_len: int,
        *,
        balance: Balance = "work",
        strategy: Strategy = "keys",
        batch: int | None = None,
        heads: int | None = None,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> None:
        self.group = group_of(mesh)
        self.device = device_of(mesh, self.group) if device is None else _sync.resolve_device(device)
        self._sizes: Any = {"batch": batch, "heads": heads, "block_size": block_size}
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        counts: dict[Mask, int] = {}
        error: Exception | None = None
        given = {"balance": balance, **self._sizes}
        try:  # the error of one rank is one of all: those that have none would wait in the first layer
            counts, _ = layers_of(masks, self.device)
            if strategy not in get_args(Strategy):
                hint = nearest(str(strategy), get_args(Strategy))
                raise OperandError(f"strategy must be 'keys' or 'heads', got {strategy!r}.{hint}")
            self.strategy: Strategy = strategy
            self.seq_len = checked_int(seq_len, "seq_len", most=MAX_LENGTH, kind=LoweringError)
            contexts = [self._context(mask) for mask in counts]
            self.sharding: Sharding = shard_sequence(counts, self.seq_len, self.world_size, **given)
            self._held = self.sharding._held
            self.positions = self.sharding.positions(self.rank).to(self.device)
            self._declared = [self._declare(*parts) for parts in zip(counts, contexts, self.sharding._seen, strict=True)]
            self._heads = HeadExchange(self._held, self.rank, self.group, self.device)
        except Exception as found:
            error = found
        arguments = {"seq_len": seq_len, "strategy": strategy, **given}
        arguments |= {"masks": list(counts), "number of layers": list(counts.values())}
        check_agreement(arguments, error, self.group, self.device)
        self._uncompared = sum(counts.values())

    def _context(self, mask: Mask) -> Context:
        return bind(mask, self.seq_len, None, self._sizes["batch"], self._sizes["heads"], 0, self.device)

    def _declare(self, mask: Mask, context: Context, seen: KeyLists) -> Declared:
        lowered, keys, sizes = None, None, block_sizes(self._sizes["block_size"])
        if self.strategy == "heads":
            lowered = mask_of_heads(context, _part_of(context.heads, self.rank, self.world_size), sizes)
        else:
            keys = self._exchange(seen)
            if len(self.positions) and len(keys.needed):
                lowered = mask_of_queries(context, self.sharding.runs(self.rank), keys.needed, sizes)
        symbols = context.mask.symbols
        fixed = context.full_batch if self._sizes["batch"] or "b" in symbols else None, context.heads if "h" in symbols else None
        return Declared(mask, fixed, lowered, keys, text_of(mask), _sync.Stamp(mask.tensors))

    # ---------------------------------------------------------------- tokens

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of this rank: labels, positions, or anything that has the whole sequence along an axis.

        Args:
            x: a tensor with ``seq_len`` values along ``dim``, the same on each rank.
            dim: the axis of the sequence.

        Returns:
            The values at :attr:`positions`. The gradient of ``x`` is 0 at other positions.

        Raises:
            OperandError: ``x`` is not a tensor.
            LoweringError: it has another length.
        """
        self._check_length(x, dim, self.seq_len, "the whole sequence")
        return x.index_select(dim, self.positions)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of all ranks in order. Every rank must call this.

        Args:
            x: the tokens of this rank along ``dim``.
            dim: the axis of the sequence.

        Returns:
            The values at all positions, on each rank. Its gradients are summed over the ranks, so a loss that each rank computes
            from the whole counts once for each.

        Raises:
            OperandError: ``x`` is not a tensor.
            LoweringError: it has another length.
        """
        self._check_length(x, dim, len(self.positions), "this rank")
        return self._everything(x.movedim(dim, 0)).movedim(0, dim)

    @cached_property
    def _everything(self) -> TokenExchange:
        every, start = torch.arange(self.world_size, device="cpu"), torch.zeros(self.world_size, dtype=torch.int64, device="cpu")
        return self._exchange(KeyLists.union(self.world_size, every, start, start + self.seq_len))

    def _exchange(self, needed: KeyLists) -> TokenExchange:
        return TokenExchange(self._held, needed, self.rank, self.group, self.device)

    def _check_length(self, x: Tensor, dim: int, length: int, where: str) -> None:
        if not isinstance(x, Tensor):
            raise OperandError(f"x must be a tensor, got {kind_of(x)}")
        checked_int(dim, "dim", -x.dim(), x.dim() - 1, LoweringError)
        if x.shape[dim] != length:
            raise LoweringError(f"x has {x.shape[dim]} tokens along axis {dim}, but {where} has {length}; got {list(x.shape)}")

    # ---------------------------------------------------------------- torch's own context parallelism

    def load_balancer(self) -> Any:
        """These shards for torch's own context parallelism, ``torch.distributed.tensor.experimental._context_parallel``.

        Where torch's own ``_PTRRLoadBalancer`` counts the blocks of one mask, all masks count.

        Returns:
            A ``_LoadBalancer``, for ``_context_parallel_shard`` and ``context_parallel_unshard``.

        Raises:
            LoweringError: ranks have different numbers of tokens, or this version of torch has no such class.
        """
        return load_balancer(self.sharding, self.device)

    def block_mask(self, mask: MaskLike | None = None) -> BlockMask:
        """The BlockMask of this rank there: its queries, by the keys of all ranks in the order of their shards.

        What torch's ``_create_cp_block_mask`` makes, for any block size, and without the cells of the mask.

        Args:
            mask: one of the masks that were given; by default the only one.

        Raises:
            LoweringError: another mask, or none of several; ranks with different numbers of tokens, or blocks that are divided
                between ranks.
        """
        if mask is None and len(self._declared) > 1:
            raise LoweringError(f"block_mask needs one of the masks that were given: {known(self._declared)}")
        wanted = self._declared[0].mask if mask is None else as_mask(mask, device=self.device)
        context = self._context(find_declared(self._declared, wanted).mask)
        return gathered_block_mask(self.sharding, context, self.rank, self._sizes["block_size"])

    # ---------------------------------------------------------------- attention

    def __enter__(self) -> Self:
        for declared in self._declared:  # compiled code has constants of its own
            declared.check_unchanged()
        ENTERED.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del ENTERED[len(ENTERED) - 1 - ENTERED[::-1].index(self)]  # the innermost entry of it

    def attend(self, call: Call, run: Run) -> tuple[Tensor, Tensor | None]:
        """The output of a call of :func:`flexmask.attention` inside ``with``, which has the tokens of this rank.

        Args:
            call: its arguments.
            run: computes a call in this process.
        """
        declared = self._agreed(call)
        call = call._replace(dropout_seed=self._seed(call))
        if declared.keys is not None:
            return self._attend_to_keys(call, declared, declared.keys, run)
        return self._attend_by_heads(call, declared, run)

    def _attend_to_keys(self, call: Call, declared: Declared, exchange: TokenExchange, run: Run) -> tuple[Tensor, Tensor | None]:
        tokens = torch.cat((call.key, call.value), -1).permute(2, 0, 1, 3)
        needed = exchange(tokens).permute(1, 2, 0, 3)
        key, value = needed.split((call.key.shape[3], call.value.shape[3]), -1)
        heads = torch.arange(call.query.shape[1], device=self.device)
        places = heads, self.positions, exchange.needed
        return run(self._local(call, declared, call.query, key, value, places))

    def _attend_by_heads(self, call: Call, declared: Declared, run: Run) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._heads.gather(call.query, call.key, call.value)
        heads = _part_of(call.query.shape[1], self.rank, self.world_size)
        whole = torch.arange(self.seq_len, device=self.device)
        places = torch.arange(heads.start, heads.stop, device=self.device), whole, whole
        out, lse = run(self._local(call, declared, query, key, value, places))
        return self._heads.scatter(out), None if lse is None else self._heads.scatter(lse.unsqueeze(-1)).squeeze(-1)

    def _local(
        self, call: Call, declared: Declared, query: Tensor, key: Tensor, value: Tensor, places: tuple[Tensor, Tensor, Tensor]
    ) -> Call:
        """The call that this process computes."""
        if declared.lowered is not None:
            check_sizes(declared.lowered, query, key, 0)
        score_mod = None if call.score_mod is None else partial(_score_at, call.score_mod, places)
        return call._replace(query=query, key=key, value=value, mask=declared.lowered, score_mod=score_mod, places=places)

    def _seed(self, call: Call) -> int | Tensor | None:
        """The seed of a call: the given one, or one that rank 0 draws, as one process does."""
        if not call.dropout_p or call.dropout_seed is not None:
            return call.dropout_seed
        drawn = torch.randint(2**62, (), device=self.device)
        seed: Tensor = collectives.wait_tensor(collectives.broadcast(drawn, 0, self.group))
        return seed

    def _agreed(self, call: Call) -> Declared:
        """The declared mask of a call. In the first calls, one for each declared layer, the ranks compare their calls.

        Raises:
            LoweringError: the call fits no declared mask, that of another rank does not, or the ranks differ.
        """
        if is_observed(call.query) or not self._uncompared:
            return self._find(call)
        self._uncompared -= 1
        declared, error = None, None
        try:
            declared = self._find(call)
        except LoweringError as found:
            error = found
        (batch, heads, _, head), (_, kv_heads, _, v_head) = call.query.shape, call.value.shape
        seed = call.dropout_seed.tolist() if isinstance(call.dropout_seed, Tensor) else call.dropout_seed
        given: dict[str, Any] = {"mask": declared and self._declared.index(declared), "batch": batch}
        given |= {"heads": (heads, kv_heads), "head sizes": (head, v_head), "dtype": call.query.dtype}
        given |= {"dropout_p": call.dropout_p, "dropout_seed": seed}
        check_agreement({f"the {name} of a call": value for name, value in given.items()}, error, self.group, self.device)
        assert declared is not None, "else there is an error"
        return declared

    def _find(self, call: Call) -> Declared:
        """The declared mask of a call, which fits it."""
        declared = find_declared(self._declared, call.mask if isinstance(call.mask, Mask) else ALL_CELLS)
        (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = call.query.shape, call.key.shape
        for name, wanted, given in zip(("batch", "heads"), declared.sizes, (batch, heads), strict=True):
            if wanted not in (None, given):
                raise LoweringError(f"{declared.mask.brief()} was declared for {name}={wanted}, got {name}={given} in query")
        own = len(self.positions)
        if (q_len, kv_len) != (own, own):
            raise LoweringError(
                f"inside ContextParallel attention is self-attention over the {own} tokens of this rank, from cp.shard(x); got "
                f"{lengths_text(q_len, kv_len, 'and')}"
            )
        if isinstance(call.q_offset, Tensor) or call.q_offset:
            raise LoweringError("q_offset does not apply inside ContextParallel, which has the positions of the queries")
        if call.query.device != self.device:
            raise LoweringError(f"query is on {call.query.device}, ContextParallel on {self.device}; give it device=")
        if self.strategy == "heads" and (heads % self.world_size or kv_heads % self.world_size):
            raise LoweringError(
                f"strategy='heads' needs heads that {self.world_size} ranks divide, got {heads} of queries and {kv_heads} of keys"
                "; use strategy='keys'"
            )
        return declared

    def __repr__(self) -> str:
        return (
            f"ContextParallel([{known(self._declared)}], seq_len={self.seq_len}, balance={self.sharding.balance!r}, "
            f"strategy={self.strategy!r}, rank {self.rank} of {self.world_size}, {len(self.positions)} tokens, {self.device})"
        )


def _score_at(
    score_mod: ScoreMod, places: tuple[Tensor, Tensor, Tensor], score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    """A ``score_mod`` at the indices of the whole sequence."""
    heads, queries, keys = places
    return score_mod(score, b, heads[h], queries[q], keys[kv])


def _part_of(heads: int, rank: int, ranks: int) -> range:
    """The heads of a rank."""
    each = heads // ranks
    return range(rank * each, (rank + 1) * each)
