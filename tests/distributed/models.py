"""What models compute over the ranks of a group, against one process. Functions of this module run in the processes of a test."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

import flexmask as fm
from flexmask.backends import choose_backend
from flexmask.backends.backend import ENTERED
from flexmask.distributed import ContextParallel
from flexmask.distributed.context_parallel import Strategy
from flexmask.errors import LoweringError, OperandError
from tests.distributed.equality import BATCH, EXACT, Checks, attention, document_of
from tests.support.flex import without_kernels
from tests.support.rope import turn

LENGTH, CHANNELS, HEADS = 53, 24, 4
CHANGED = torch.ones(LENGTH, dtype=torch.int64)


class Model(nn.Module):
    """Layers with a global mask and with a window in turn."""

    def __init__(self, *, kv_heads: int = 2, dropout: float = 0.0, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes: Any = {"n_kv_heads": kv_heads, "dropout": dropout, "rope": turn, "dtype": torch.float64}
        self.layers = nn.ModuleList(fm.MultiheadFlexAttention(CHANNELS, CHANNELS, HEADS, **sizes, **options) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, masks: list[fm.Mask]) -> Tensor:
        for layer, mask in zip(self.layers, [*masks, *masks], strict=False):
            x = x + (checkpoint(layer, x, mask, use_reentrant=False) if self.checkpointed else layer(x, mask))
        return x


def layers_of() -> list[fm.Mask]:
    return [fm.causal() & fm.document(document_of(LENGTH)), fm.sliding_window(left=4, right=1)]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and the gradient of the output, of the whole sequence, the same on each rank."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(BATCH, LENGTH, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, weight


def summed_gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of the weights, summed over the ranks."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
    return grads


def check_model(strategy: Any, compiler: str = "", **options: Any) -> None:
    """The output, and the gradients of the input and of the weights."""
    model, layers = Model(**options), layers_of()
    x, weight = batch()
    whole = x.clone().requires_grad_()
    reference = Model(**options | {"checkpointed": False})
    torch.manual_seed(5)
    wanted = reference(whole, layers)
    (wanted * weight).sum().backward()
    cp = ContextParallel(None, layers, LENGTH, strategy=strategy, block_size=8)
    own = cp.shard(x).requires_grad_()
    run = torch.compile(model, backend=compiler, fullgraph=True) if compiler else model
    torch.manual_seed(5 + dist.get_rank())  # rank 0 draws the seeds of dropout as one process does
    with cp:
        found = run(own, layers)
        (found * cp.shard(weight)).sum().backward()
    torch.testing.assert_close(cp.unshard(found.detach()), wanted.detach(), **EXACT)
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, cp.shard(whole.grad), **EXACT)
    for grad, parameter in zip(summed_gradients(model), reference.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, **EXACT)


def check_checkpoints() -> None:
    """A checkpointed layer is repeated with its exchange inside ``with``. Outside it would be without: torch raises."""
    layer, cp = fm.MultiheadFlexAttention(8, 8, 2), ContextParallel(None, "causal", LENGTH)
    x = torch.randn(1, len(cp.positions), 8, requires_grad=True)
    with cp:
        (wanted,) = torch.autograd.grad(layer(x, "causal").sum(), x)
        for reentrant in (True, False):
            x.grad = None
            cast(Tensor, checkpoint(layer, x, "causal", use_reentrant=reentrant)).sum().backward()
            torch.testing.assert_close(x.grad, wanted)
        loss = cast(Tensor, checkpoint(layer, x, "causal", use_reentrant=False)).sum()
    with pytest.raises(CheckpointError, match="different number of tensors"):
        loss.backward()


def check_calls(strategy: Any) -> None:
    """``score_mod`` and dropout at positions of the whole sequence, on both backends."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(BATCH, heads, LENGTH, 16, generator=generator) for heads in (4, 2, 2)]
    slope = torch.randn(4, generator=generator)
    mask = fm.causal() & fm.document(document_of(LENGTH))
    cp = ContextParallel(None, mask, LENGTH, strategy=strategy, block_size=16)
    own = [cp.shard(tensor, 2) for tensor in tensors]
    on_flex = [{"dropout_p": 0.4, "dropout_seed": 7, "backend": "flex"}] if strategy == "keys" else []  # which compiles a graph
    calls: list[dict[str, Any]] = [
        {"score_mod": lambda score, b, h, q, kv: score + slope[h] * (q - 2 * kv) / 50 + b},
        {"score_mod": fm.scores.alibi(slope) + fm.scores.bias(torch.randn(LENGTH, LENGTH, generator=generator))},
        {"dropout_p": 0.4, "dropout_seed": 7},
        *on_flex,
    ]
    for options in calls:
        given: dict[str, Any] = {"enable_gqa": True, **options}
        whole = attention(*tensors, mask, return_lse=True, **given | {"backend": "sdpa"})
        with cp, pytest.MonkeyPatch.context() as patch:
            without_kernels(patch)
            found = attention(*own, mask, return_lse=True, **given)
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(cp.unshard(one, 2), other)


def check_mixed_precision(strategy: Any) -> None:
    """Dtypes that differ, as rotary embeddings give them under autocast; gradients in these dtypes."""
    generator = torch.Generator().manual_seed(1)
    dtypes = torch.float32, torch.float32, torch.bfloat16
    tensors = [torch.randn(BATCH, 2, LENGTH, 16, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]
    cp = ContextParallel(None, "causal", LENGTH, strategy=strategy, block_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        query, key, value = tensors
        whole = scaled_dot_product_attention(query, key, value, is_causal=True)
        with cp:
            found = cp.unshard(attention(*(cp.shard(tensor, 2) for tensor in tensors), "causal"), 2)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(found.float().sum(), tensors)
    assert [grad.dtype for grad in grads] == list(dtypes)


def check_compiled_once() -> None:
    """Another ContextParallel with the same sizes runs the same graph, with its own positions."""
    mask, (x, _) = (fm.q + 2 * fm.kv) % 3 == 0, batch()
    torch.manual_seed(3)
    layer: Any = fm.MultiheadFlexAttention(CHANNELS, CHANNELS, HEADS, dtype=torch.float64)
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    x = x[:1, :48]
    balances: list[Any] = ["head_tail", "contiguous"]
    every = [ContextParallel(None, mask, 48, balance=balance, block_size=1) for balance in balances]
    for cp, stance in zip(every, ("default", "fail_on_recompile"), strict=True):
        with cp, torch.compiler.set_stance(stance):
            found = compiled(cp.shard(x), mask)
        torch.testing.assert_close(cp.unshard(found.detach()), layer(x, mask).detach())


def check_compiled_flex() -> None:
    mask = fm.sliding_window(left=9, right=3)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, 2, 64, 16, generator=generator) for _ in range(3)]
    cp = ContextParallel(None, mask, 64, balance="contiguous", block_size=16)
    with cp:
        found = attention(*(cp.shard(tensor, 2) for tensor in tensors), mask, backend="flex")
    torch.testing.assert_close(cp.unshard(found, 2), attention(*tensors, mask))


class TorchAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Any:
        return flex_attention(query, key, value, block_mask=block_mask)


def check_torch_context_parallel() -> None:
    """torch's own context parallelism with these shards, several masks at once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    masks = [fm.causal() & fm.document(lengths=[100, 61, 95]), fm.sliding_window(left=40, right=3)]
    cp = ContextParallel(mesh, masks, 256, block_size=16)
    balancer, module = cp.load_balancer(), TorchAttention()
    _attention._ContextParallel(2, _attention._ContextParallel.AttentionType.FLEX)._apply(module, mesh)
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(2, 3, 256, 8, generator=generator) for _ in range(3)]
    own: Any = _attention._context_parallel_shard(mesh, whole, [2, 2, 2], balancer)
    assert torch.equal(own[0], cp.shard(whole[0], 2))
    for mask in masks:
        found = module(*own, cp.block_mask(mask))
        (out,) = _attention.context_parallel_unshard(mesh, [found], [2], balancer)
        torch.testing.assert_close(out, attention(*whole, mask))
    with pytest.raises(LoweringError, match="block_mask needs one of the masks that were given: causal"):
        cp.block_mask()
    with pytest.raises(LoweringError, match="is not declared"):
        cp.block_mask("causal")
    alone = ContextParallel(mesh, "causal", 256, block_size=16)
    assert alone.block_mask().seq_lengths == (256 // mesh.size(), 256)


def check_tokens() -> None:
    """Shards of any dtype and axis, and the gradients of both ways."""
    cp = ContextParallel(None, "causal", LENGTH)
    for x, dim in ((torch.arange(LENGTH * 2).view(LENGTH, 2), 0), (torch.rand(3, 1, LENGTH) < 0.5, -1), (batch()[0], 1)):
        dist.broadcast(x, 0)
        assert torch.equal(cp.shard(x, dim), x.index_select(dim, cp.positions))
        assert torch.equal(cp.unshard(cp.shard(x, dim), dim), x)
    x, weight = batch()
    x.requires_grad_()
    (cp.unshard(cp.shard(x)) * weight * (1 + dist.get_rank())).sum().backward()
    held = torch.zeros(LENGTH, dtype=torch.bool).index_fill(0, cp.positions, True)
    world = dist.get_world_size()
    torch.testing.assert_close(x.grad, weight * held[:, None] * (world * (world + 1) // 2))


# ---------------------------------------------------------------- bad input


def failing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask_mod with an error of its own."""
    raise KeyError("of this rank")


def check_errors() -> None:
    rank, group = dist.get_rank(), None
    make: Any = ContextParallel

    def refused(message: str, *args: Any, error: type[Exception] = LoweringError, **options: Any) -> None:
        with pytest.raises(error, match=message):
            make(*args, **options)

    ids = document_of(LENGTH) + (rank == 1) * (torch.arange(LENGTH) == 9)
    refused(r"ranks \[1\] of the group differ from rank 0 in masks;", group, fm.document(ids), LENGTH)
    refused(r"ranks \[1\] of the group differ from rank 0 in masks", group, ["causal", "full"][:: 1 - 2 * rank], LENGTH)
    refused(r"ranks \[1\] of the group differ from rank 0 in seq_len", group, "causal", LENGTH + rank)
    refused(r"ranks \[1\] of the group differ from rank 0 in strategy", group, "causal", LENGTH, strategy=("keys", "heads")[rank])
    refused(
        "seq_len must be at least 1, got 0" if rank else r"ranks \[1\] of the group have an error",
        group,
        "causal",
        LENGTH * (1 - rank),
    )
    refused("is on meta, not on cpu", group, fm.document(document_of(8).to("meta")), 8)
    refused("must be 'keys' or 'heads', got 'key'. Did you mean keys?", group, "causal", 8, error=OperandError, strategy="key")
    refused("a DeviceMesh of one dimension or a process group", [0, 1], "causal", 8, error=OperandError)
    if rank:
        refused("of this rank", group, failing, LENGTH, error=KeyError)
    else:
        refused(r"ranks \[1\] of the group have an error; see theirs", group, "causal", LENGTH)
    refused("depends on b: give batch=", group, (fm.q + fm.b) % 3 == 0, 8)
    refused("masks must be a Mask, its text, a list or a dict", group, 5, 8, error=OperandError)

    mask = fm.causal() & fm.document(CHANGED)
    cp = make(group, {mask: 2, "causal": 1}, LENGTH)
    x = [torch.randn(1, 2, len(cp.positions), 4)] * 3

    def misused(message: str, *args: Any, **options: Any) -> None:
        with cp, pytest.raises(LoweringError, match=message):
            attention(*args, **options)

    misused("the mask full is not declared: give it to ContextParallel", *x)
    misused("is not declared.* its tensors are other objects", *x, fm.causal() & fm.document(CHANGED.clone()))
    lowered: Any = fm.causal().block_mask(LENGTH), fm.plan("causal", LENGTH)()
    for given in lowered:
        misused(f"a {type(given).__name__} cannot be used inside .* has a part of the tokens; give the Mask", *x, given)
    misused("q_offset does not apply", *x, "causal", q_offset=3)
    misused("is self-attention over the .* tokens of this rank", *[torch.randn(1, 2, LENGTH, 4)] * 3, "causal")
    layer: Any = fm.MultiheadFlexAttention(8, 8, 2, mask=mask)
    own = torch.randn(1, len(cp.positions), 8)
    calls: dict[str, Callable[[], object]] = {
        "cross-attention": lambda: layer(own, context=own),
        "a cache": lambda: layer(own, cache=fm.KVCache(LENGTH)),
        "attention_weights": lambda: layer.attention_weights(own),
        "choose_backend": lambda: choose_backend(x[0], x[1], x[2], "causal"),
    }
    for name, call in calls.items():
        with cp, pytest.raises(LoweringError, match=f"{name} cannot be used inside"):
            call()
    with cp:
        CHANGED[-1] = 0
        with pytest.raises(LoweringError, match="was changed after ContextParallel was made"):
            attention(*x, mask)
    with pytest.raises(LoweringError, match="was changed after ContextParallel was made"), cp:
        pass  # compiled code reads no versions
    for bad in (x[0], torch.zeros(2, LENGTH + 1)):
        with pytest.raises(LoweringError, match=f"but the whole sequence has {LENGTH}"):
            cp.shard(bad, 1)
    with pytest.raises(LoweringError, match="but this rank has"):
        cp.unshard(torch.zeros(1, LENGTH))
    bare: Any = cp
    with pytest.raises(OperandError, match="x must be a tensor, got list"):
        bare.shard([1, 2])
    narrow = make(group, "causal", LENGTH, strategy="heads")
    with narrow, pytest.raises(LoweringError, match="needs heads that 2 ranks divide, got 3 of queries"):
        attention(*[torch.randn(1, 3, len(narrow.positions), 4)] * 3, "causal")
    check_other_sizes()
    check_transforms()
    assert f"rank {rank} of 2, {len(cp.positions)} tokens" in repr(cp)


def check_other_sizes() -> None:
    """Calls with another batch or number of heads than their mask has, where a rank's part of it would be broadcast."""
    by_head, by_batch = fm.per_head([fm.causal(), fm.full()]), (fm.q + fm.b + fm.h) % 3 == 0
    for mask, sizes, strategy, given, message in (
        (by_head, {}, "heads", (1, 4), "declared for heads=2, got heads=4"),
        (by_head, {}, "keys", (1, 4), "declared for heads=2, got heads=4"),
        (by_batch, {"batch": 1, "heads": 2}, "keys", (3, 2), "declared for batch=1, got batch=3"),
        (by_batch, {"batch": 2, "heads": 1}, "keys", (2, 4), "declared for heads=1, got heads=4"),
        (fm.document(document_of(LENGTH)[None]), {}, "keys", (2, 2), "declared for batch=1, got batch=2"),
        (fm.causal(), {"batch": 2}, "keys", (1, 2), "declared for batch=2, got batch=1"),
    ):
        cp = ContextParallel(None, mask, LENGTH, strategy=cast(Any, strategy), **cast(Any, sizes))
        with cp, pytest.raises(LoweringError, match=message):
            attention(*[torch.randn(*given, len(cp.positions), 4)] * 3, mask)


def check_transforms() -> None:
    """Collectives under vmap and in forward mode would give wrong values."""
    for strategy in get_args(Strategy):
        cp = ContextParallel(None, "causal", LENGTH, strategy=strategy)
        x = torch.randn(3, 1, 2, len(cp.positions), 4)

        def run(one: Tensor) -> Tensor:
            out: Tensor = attention(one, one, one, "causal")
            return out.sum()

        transformed: list[Callable[[], object]] = [
            partial(torch.func.vmap(run), x),
            partial(torch.func.grad(run), x[0]),
            partial(torch.func.jvp, run, (x[0],), (x[1],)),
            partial(torch.func.vmap(partial(cp.unshard, dim=2)), x),
        ]
        for call in transformed:
            with cp, pytest.raises(LoweringError, match=r"take no transforms of torch\.func"):
                call()


def check_rank_with_an_error() -> None:
    """An error of one rank alone in the middle of a forward: the others raise within the time-out of the group."""
    group, last = dist.new_group(timeout=timedelta(seconds=3)), dist.get_world_size() - 1
    cp = ContextParallel(group, "causal", LENGTH)
    x = [torch.randn(1, 2, len(cp.positions), 4)] * 3

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if dist.get_rank() == last:
            raise MemoryError("of this rank")
        return score

    def forward() -> None:
        for _ in range(2):
            attention(*x, "causal", score_mod=score_mod)

    expected: Any = MemoryError if dist.get_rank() == last else RuntimeError
    with pytest.raises(expected, match=r"of this rank|[Tt]im|closed|reset"), cp:
        forward()
    assert not ENTERED
    dist.barrier()


# ---------------------------------------------------------------- other dimensions of a mesh


def check_data_parallel(mesh: DeviceMesh, kind: str) -> None:
    """Two sequences in each of two groups of ranks: a step equals one of one process on all four."""
    layers = layers_of()
    samples = [batch(seed) for seed in range(mesh["dp"].size())]
    reference = Model()
    for x, weight in samples:
        (reference(x, layers) * weight).sum().backward()
    model: nn.Module = Model(checkpointed=kind == "fsdp")
    if kind == "fsdp":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["dp", "cp"]._flatten("all"))
        fully_shard(model, mesh=mesh["dp", "cp"]._flatten("all"))
    else:
        model = DistributedDataParallel(model)
    cp = ContextParallel(mesh["cp"], layers, LENGTH)
    x, weight = samples[mesh["dp"].get_local_rank()]
    with cp:
        loss = (model(cp.shard(x), layers) * cp.shard(weight)).sum()
        (loss * mesh.size()).backward()  # which average the gradients over all ranks
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        grad: Any = parameter.grad
        torch.testing.assert_close(grad.full_tensor() if kind == "fsdp" else grad, other.grad, **EXACT)


def check_meshes(checks: Checks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))

    def whole_mesh() -> None:
        with pytest.raises(LoweringError, match=r"must have one dimension, got 2 of sizes \[2, 2\]; take mesh\['cp'\]"):
            ContextParallel(mesh, "causal", LENGTH)

    checks("a mesh of two dimensions", whole_mesh)
    checks("DDP", check_data_parallel, mesh, "ddp")
    checks("FSDP2", check_data_parallel, mesh, "fsdp")


def check_calls_that_differ() -> None:
    """Every rank raises in the first call, and goes on with the next ContextParallel."""
    rank = dist.get_rank()

    def refused(message: str, declared: Any, masks: Any, batch: int = 1, heads: int = 2, **options: Any) -> None:
        cp = ContextParallel(None, declared, 9)
        x = torch.randn(batch, heads, len(cp.positions), 4)
        with pytest.raises(LoweringError, match=message), cp:
            list(map(partial(attention, x, x, x, **options), masks))

    every = ["causal", "full"]
    differ = r"ranks \[1\] of the group differ from rank 0 in the {} of a call"
    refused(differ.format("batch"), "causal", ["causal"], batch=1 + rank)
    refused(differ.format("heads"), "causal", ["causal"], heads=2 + rank)
    refused(differ.format("heads"), "causal", ["causal"], heads=3 - rank)
    refused(differ.format("mask"), every, every[:: 1 - 2 * rank])
    refused(differ.format("mask"), ["causal", *every], ["causal", every[rank]])
    refused(differ.format("dropout_seed"), "causal", ["causal"], dropout_p=0.5, dropout_seed=rank or None)
    refused(r"ranks \[1\] of the group have an error" if rank == 0 else "is not declared", "causal", every[rank : rank + 1])
