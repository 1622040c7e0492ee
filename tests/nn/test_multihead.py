"""The module in all its settings against dense masked softmax; copies, checkpoints, compilation and export."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flexmask as fm
from flexmask import MultiheadFlexAttention
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError
from tests.support import oracle
from tests.support.exhaustive import exhaustive
from tests.support.rope import turn

DOUBLE = torch.float64
TOLERANCE = {DOUBLE: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LENGTHS = torch.tensor([6, 3])


def random(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE).to(dtype)


def plain(
    module: MultiheadFlexAttention, x: Tensor, visible: Tensor, context: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The reference output in float64: projections, masked softmax of each head, projection."""
    weights = {name: weight.detach().double().cpu() for name, weight in module.named_parameters()}
    inner, others = module.n_heads * module.d_head, module.n_kv_heads * module.d_head
    x = x.detach().double().cpu()
    source = x if context is None else context.detach().double().cpu()
    if "in_proj.weight" in weights:
        parts = [weights["in_proj.weight"][:inner], weights["in_proj.weight"][inner:]]
        biases = [
            bias[:inner] if place == 0 else bias[inner:]
            for place, bias in enumerate([weights.get("in_proj.bias")] * 2)
            if bias is not None
        ]
    else:
        parts = [weights["q_proj.weight"], weights["kv_proj.weight"]]
        biases = [weights[name] for name in ("q_proj.bias", "kv_proj.bias") if name in weights]
    queries, both = x @ parts[0].T, source @ parts[1].T
    if biases:
        queries, both = queries + biases[0], both + biases[1]
    keys, values = both[..., :others], both[..., others:]
    heads = []
    visible = visible.expand(x.shape[0], module.n_heads, x.shape[1], source.shape[1])
    for head in range(module.n_heads):
        group = head // (module.n_heads // module.n_kv_heads)
        at, of_keys = (slice(n * module.d_head, (n + 1) * module.d_head) for n in (head, group))
        query, key = queries[..., at], keys[..., of_keys]
        if module.rope is not None:
            query, key = (turn(part[:, None], torch.arange(part.shape[1]))[:, 0] for part in (query, key))
        heads.append(
            oracle.attention(query[:, None], key[:, None], values[:, None, :, of_keys], visible[:, head : head + 1], scale)
        )
    out = torch.cat(heads, -1)[:, 0] @ weights["out_proj.weight"].T
    return out + weights["out_proj.bias"] if "out_proj.bias" in weights else out


def check_close(found: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.detach().double().cpu(), expected.detach().double(), rtol=bound, atol=bound)


def causal_and_padding(length: int = 6) -> Tensor:
    return torch.ones(length, length).tril().bool() & (torch.arange(length) < LENGTHS[:, None])[:, None, None]


# ---------------------------------------------------------------- sizes and options

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True},
    "no bias at all": {"out_bias": False},
    "grouped": {"n_kv_heads": 2},
    "one key head, biases": {"n_kv_heads": 1, "bias": True},
    "narrow heads": {"d_head": 2},
    "wide heads, grouped": {"d_head": 10, "n_kv_heads": 2},
    "rope": {"rope": turn},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_self_attention(name: str) -> None:
    module, x = MultiheadFlexAttention(6, 16, 4, dtype=DOUBLE, **SETTINGS[name]), random(2, 6, 6)
    mask = fm.causal() & fm.key_padding(LENGTHS)
    check_close(module(x, mask), plain(module, x, causal_and_padding(), scale=module.scale))
    out, query, key = module(x, mask, return_qk=True)
    assert out.shape == (2, 6, 16)
    assert query.shape == (2, 4, 6, module.d_head)
    assert key.shape == (2, module.n_kv_heads, 6, module.d_head)


@pytest.mark.parametrize("d_context", [None, 6, 9])
@pytest.mark.parametrize("name", SETTINGS)
def test_cross_attention(name: str, d_context: int | None) -> None:
    module = MultiheadFlexAttention(6, 16, 4, dtype=DOUBLE, d_context=d_context, **SETTINGS[name])
    x, context = random(2, 5, 6), random(2, 7, d_context or 6)
    assert hasattr(module, "in_proj") == (d_context != 9)
    visible = (torch.arange(7) < LENGTHS[:, None])[:, None, None]
    found = module(x, "key_padding(lengths)", context=context, lengths=LENGTHS)
    check_close(found, plain(module, x, visible, context, module.scale))
    again = MultiheadFlexAttention(6, 16, 4, dtype=DOUBLE, d_context=d_context, **SETTINGS[name])
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x, "key_padding(lengths)", context=context, lengths=LENGTHS), found)


def test_grouped_heads_of_a_real_size() -> None:
    """3,072 wide, 24 heads of 128, 8 key heads."""
    module, x = MultiheadFlexAttention(3072, 3072, 24, n_kv_heads=8), random(1, 5, 3072, dtype=torch.float32)
    assert module.d_head == 128
    assert module.in_proj.weight.shape == (3072 + 2 * 1024, 3072)
    check_close(module(x, "causal"), plain(module, x, torch.ones(5, 5).tril().bool()))


class Adapted(nn.Module):
    """A projection with an adapter of low rank, as libraries for fine-tuning put it in the place of a Linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        self.to(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_cached", [False, True])
def test_an_adapter_of_a_projection_counts_in_cross_attention(bias: bool, is_cached: bool) -> None:
    module = MultiheadFlexAttention(12, 12, 4, bias, n_kv_heads=2, dtype=DOUBLE)
    merged = copy.deepcopy(module)
    adapter = Adapted(module.in_proj)
    module.add_module("in_proj", adapter)
    module.add_module("out_proj", nn.Sequential(module.out_proj))  # which has no weight of its own
    module.mask = None
    with torch.no_grad():
        merged.in_proj.weight += adapter.up.weight @ adapter.down.weight
    x, context = random(2, 5, 12), random(2, 7, 12)
    cache = fm.KVCache() if is_cached else None
    out = module(x, context=context, cache=cache)
    again = module(x[:, :3], cache=cache) if is_cached else out[:, :3]
    wanted = plain(merged, x, torch.tensor(True), context)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(again, wanted[:, :3], rtol=0, atol=1e-11)
    if not is_cached:
        out.sum().backward()
        assert adapter.up.weight.grad is not None
        assert adapter.down.weight.grad is not None


def replace_forward(linear: nn.Linear, seen: Callable[..., None]) -> None:
    """Replaces ``forward`` on the instance, as accelerate does to offload weights."""
    own = linear.forward

    def forward(x: Tensor) -> Tensor:
        seen()
        return own(x)

    linear.forward = forward  # type: ignore[method-assign,assignment]


def test_a_hook_of_a_projection_sees_it_as_a_whole() -> None:
    module, seen = MultiheadFlexAttention(12, 12, 4), []
    module.in_proj.register_forward_hook(lambda _, given, out: seen.append((tuple(given[0].shape), tuple(out.shape))))
    x, context = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    out = module(x, context=context)
    assert seen == [((2, 5, 12), (2, 5, 36)), ((2, 7, 12), (2, 7, 36))]
    torch.testing.assert_close(out.double(), plain(module, x, torch.tensor(True), context), rtol=0, atol=2e-5)


HOOKS: dict[str, Callable[[nn.Linear, Callable[..., None]], object]] = {
    "forward": lambda linear, seen: linear.register_forward_hook(seen),
    "before": lambda linear, seen: linear.register_forward_pre_hook(seen, with_kwargs=True),
    "backward": lambda linear, seen: linear.register_full_backward_hook(seen),
    "before backward": lambda linear, seen: linear.register_full_backward_pre_hook(seen),
    "another forward": replace_forward,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_each_kind_of_hook_of_a_projection_runs_in_cross_attention(hook: str) -> None:
    module, seen = MultiheadFlexAttention(12, 12, 4), []
    HOOKS[hook](module.in_proj, lambda *_: seen.append(hook))
    x, context = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 7, 12, requires_grad=True)
    out = module(x, context=context)
    out.sum().backward()
    assert seen == [hook] * 2
    torch.testing.assert_close(out.double(), plain(module, x, torch.tensor(True), context), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_compiled_code_calls_a_forward_that_is_replaced_later() -> None:
    module, x, context = MultiheadFlexAttention(12, 12, 4), torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    compiled(x, context=context)
    own = module.in_proj.forward
    module.in_proj.forward = lambda x: 2 * own(x)  # type: ignore[method-assign,assignment]
    torch.testing.assert_close(compiled(x, context=context), module(x, context=context))


class CausalMod(nn.Module):
    def forward(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q


def test_a_module_as_the_mask() -> None:
    module = MultiheadFlexAttention(12, 12, 4)
    module.mask = CausalMod()
    assert module.mask == fm.causal()
    assert [name for name, _ in module.named_children()] == ["in_proj", "out_proj"]
    with pytest.raises(OperandError, match="mask"):
        module.mask = nn.Parameter(torch.ones(2, 2))  # type: ignore[assignment]


class Quantized(nn.Module):
    """A Linear whose weight is held in another dtype, as a parameter or a buffer, with one scale."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, base: nn.Linear, dtype: torch.dtype, is_parameter: bool) -> None:
        super().__init__()
        self.register_buffer("bias", None if base.bias is None else base.bias.detach())
        self.scale = base.weight.detach().abs().max().item() / 64
        weight = (base.weight.detach() / self.scale).round().to(dtype)
        if is_parameter:
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_quantized_projections(dtype: torch.dtype, is_parameter: bool) -> None:
    module = MultiheadFlexAttention(16, 16, 4, mask=fm.key_padding(LENGTHS))
    x = torch.randn(2, 6, 16)
    wanted = module(x)
    for name in ("in_proj", "out_proj"):
        module.add_module(name, Quantized(getattr(module, name), dtype, is_parameter))
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=0.05)
    moved = module.to("meta").mask
    assert moved is not None
    assert {tensor.device.type for tensor in moved.tensors} == {"meta"}


@pytest.mark.parametrize("context", [False, True])
def test_torchs_quantized_projections(context: bool) -> None:
    module = MultiheadFlexAttention(16, 16, 4, n_kv_heads=2, mask=None if context else fm.causal() & fm.key_padding(LENGTHS))
    x, others = torch.randn(2, 6, 16), torch.randn(2, 7, 16) if context else None
    wanted = module(x, context=others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantized = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    quantized.mask = quantized.mask
    torch.testing.assert_close(quantized.to("cpu")(x, context=others), wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("d_head", [3, 6, 24, 128, 192])
def test_head_sizes_and_dtypes(d_head: int, dtype: torch.dtype) -> None:
    module, x = MultiheadFlexAttention(8, 2 * d_head, 2, dtype=dtype), random(2, 6, 8, dtype=dtype)
    out = module(x, fm.causal() & fm.key_padding(LENGTHS))
    assert out.dtype == dtype
    check_close(out, plain(module, x, causal_and_padding()))
    out.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())


def test_score_mod() -> None:
    slope = torch.tensor([0.5, 0.1])
    module = MultiheadFlexAttention(6, 6, 2, dtype=DOUBLE, score_mod=lambda s, b, h, q, kv: s - slope[h] * (q - kv))
    x = random(2, 6, 6)
    out, query, key = module(x, "causal", return_qk=True)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    scores = query @ key.mT / 3**0.5 - slope[:, None, None] * distance
    value = (x @ module.in_proj.weight[12:].T).unflatten(-1, (2, 3)).transpose(1, 2)
    heads = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value
    check_close(out, module.out_proj(heads.transpose(1, 2).flatten(2)))


def test_positions_of_rope() -> None:
    """Positions that restart in each document give what the documents give alone."""
    module, x = MultiheadFlexAttention(6, 8, 2, rope=turn, dtype=DOUBLE), random(2, 7, 6)
    starts = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = module(x, "causal & document(position_ids=p)", p=starts[0], positions=starts.expand(2, -1))
    check_close(packed, torch.cat((module(x[:, :3], "causal"), module(x[:, 3:], "causal")), 1))
    check_close(module(x, "causal", positions=torch.arange(7) + 9), module(x, "causal"))


def test_dropout_drops_in_training_only() -> None:
    module, x = MultiheadFlexAttention(6, 8, 2, dropout=0.5, mask="causal", dtype=DOUBLE), random(2, 30, 6)
    whole = MultiheadFlexAttention(6, 8, 2, mask="causal", dtype=DOUBLE)
    whole.load_state_dict(module.state_dict())
    torch.manual_seed(0)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(module(x), first)
    check_close(module.eval()(x), whole(x))
    _, query, key = whole(x, return_qk=True)
    value = (x @ whole.in_proj.weight[16:].T).unflatten(-1, (2, 4)).transpose(1, 2)
    torch.manual_seed(5)
    dropped = fm.attention(query, key, value, "causal", dropout_p=0.5)
    torch.manual_seed(5)
    check_close(module.train()(x), whole.out_proj(dropped.transpose(1, 2).flatten(2)))


# ---------------------------------------------------------------- masks of the module


def test_a_mask_of_its_own_is_bound_in_each_call() -> None:
    x = random(2, 6, 6)
    for mask in ("causal & key_padding(lengths)", fm.causal() & fm.key_padding(fm.param("lengths"))):
        module = MultiheadFlexAttention(6, 8, 2, mask=mask, dtype=DOUBLE)
        for lengths in (LENGTHS, LENGTHS.tolist(), torch.tensor([2, 5])):
            check_close(module(x, lengths=lengths), module(x, fm.causal() & fm.key_padding(lengths)))
        check_close(module(x, "causal"), module(x, fm.causal()))
        check_close(module(x, "document(ids)", ids=[0] * 6), module(x, "full"))


def test_the_mask_moves_with_the_weights() -> None:
    ids = torch.arange(6) // 2
    module = MultiheadFlexAttention(6, 8, 2, mask=fm.causal() & fm.document(ids))
    assert module.mask == fm.causal() & fm.document(ids)
    assert module.double().mask == module.mask
    assert set(module.state_dict()) == {"in_proj.weight", "out_proj.weight", "out_proj.bias"}
    moved = copy.deepcopy(module).to("meta").mask
    assert moved is not None
    with pytest.raises(LoweringError, match="on meta, not on cpu"):
        moved.dense(6, device="cpu")


def test_it_prints_its_sizes() -> None:
    module = MultiheadFlexAttention(6, 8, 2, n_kv_heads=1, d_head=6, d_context=5, dropout=0.1, mask="causal")
    assert "d_in=6, d_out=8, n_heads=2, n_kv_heads=1, d_head=6, d_context=5, dropout=0.1, mask='causal'" in repr(module)


# ---------------------------------------------------------------- what models do with modules


@pytest.mark.parametrize("shape", [(0, 6, 6), (2, 0, 6), (2, 1, 6)])
def test_no_sequence_no_token_one_token(shape: tuple[int, ...]) -> None:
    module = MultiheadFlexAttention(6, 8, 2, n_kv_heads=1, mask="causal & key_padding(lengths)", dtype=DOUBLE)
    x = torch.ones(shape, dtype=DOUBLE, requires_grad=True)
    out = module(x, lengths=torch.ones(shape[0], dtype=torch.int64))
    assert out.shape == (*shape[:2], 8)
    out.sum().backward()
    assert x.grad is not None
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())
    if shape[1] == 1:
        check_close(out, plain(module, x, torch.ones(1, 1).bool()))


@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 1, "bias": True}, {"d_context": 6}, {"rope": turn}])
def test_autocast(options: dict[str, Any]) -> None:
    module, x = MultiheadFlexAttention(6, 8, 2, **options), random(2, 6, 6, dtype=torch.float32)
    context = x if "d_context" in options else None
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, fm.causal() & fm.key_padding(LENGTHS), context=context)
    assert out.dtype == torch.bfloat16
    check_close(out, plain(module, x, causal_and_padding(), context))
    out.float().sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in module.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("mask", ["causal & key_padding(lengths)", "((q - kv) % 3 == 0) & (kv < lengths[b])"])
def test_checkpoint(mask: str, dropout: float) -> None:
    module, x = MultiheadFlexAttention(6, 8, 2, mask=mask, dropout=dropout, dtype=DOUBLE), random(2, 6, 6).requires_grad_()
    found = []

    def again(x: Tensor, **data: Any) -> Any:
        return checkpoint(module, x, use_reentrant=False, **data)

    for call in (module, again):
        torch.manual_seed(3)
        out = call(x, lengths=LENGTHS)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])))
    for one, other in zip(*found, strict=True):
        check_close(one, other)


def test_copies_and_pickles() -> None:
    mask = fm.causal() & fm.document(torch.arange(6) // 2) & fm.key_padding(fm.param("lengths"))
    module, x = MultiheadFlexAttention(6, 8, 2, n_kv_heads=1, rope=turn, mask=mask), random(2, 6, 6, dtype=torch.float32)
    expected = module(x, lengths=LENGTHS)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(x, lengths=LENGTHS), expected)


def test_a_module_as_rope_is_part_of_it() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return x + self.by * positions[:, None]

    module = MultiheadFlexAttention(6, 8, 2, rope=Shift())
    module(random(2, 6, 6, dtype=torch.float32), "causal").sum().backward()
    assert "rope.by" in module.state_dict()
    assert module.get_parameter("rope.by").grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", *exhaustive(["inductor"])])
@pytest.mark.parametrize("options", [{"n_kv_heads": 2, "rope": turn}, {"d_context": 7}])
def test_compiles_whole_with_a_block_mask(options: dict[str, Any], backend: str) -> None:
    torch.compiler.reset()
    module, x = MultiheadFlexAttention(6, 64, 4, **options), torch.randn(2, 130, 6)
    context = torch.randn(2, 130, 7) if "d_context" in options else None
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    with torch.no_grad():
        for step, mask in enumerate((fm.causal() & fm.key_padding([130, 40]), fm.document(lengths=[[30, 100], [120, 10]]))):
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                found = compiled(x, mask.block_mask(130), context=context)
            torch.testing.assert_close(found, module(x, mask, context=context), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, "causal"])
def test_exports(mask: str | None) -> None:
    module, x = MultiheadFlexAttention(6, 8, 2, n_kv_heads=1, rope=turn, mask=mask).eval(), torch.randn(2, 9, 6)
    exported = torch.export.export(module, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), module(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2, "rope": turn}, {"dropout": 0.2}])
def test_trains_on_cuda(options: dict[str, Any], compiled: bool) -> None:
    torch.compiler.reset()
    module = MultiheadFlexAttention(32, 64, 4, device="cuda", **options)
    x, mask = torch.randn(2, 150, 32, device="cuda"), fm.causal() & fm.key_padding([150, 20])
    run = torch.compile(module, fullgraph=True) if compiled else module
    out = run(x, mask.block_mask(150, batch=2, device="cuda") if compiled else mask)
    out.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())
    visible = mask.dense(150, batch=2)
    torch.testing.assert_close(module.eval()(x, mask).cpu().double(), plain(module, x, visible), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------- what is refused

X = torch.ones(2, 5, 6)


def make(**options: Any) -> Callable[[], object]:
    return lambda: MultiheadFlexAttention(6, 8, 2, **options)


def call(mask: Any = None, given: Any = None, /, **options: Any) -> Callable[[], object]:
    return lambda: MultiheadFlexAttention(6, 8, 2, mask=mask)(X, given, **options)


PADDED = "causal & key_padding(lengths)"
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "key heads": (lambda: MultiheadFlexAttention(6, 8, 4, n_kv_heads=3), ExpressionError, "n_kv_heads=3, n_heads=4"),
    "no key heads": (make(n_kv_heads=0), ExpressionError, "at least 1.*n_kv_heads=0"),
    "float": (make(d_head=4.0), OperandError, r"d_head.*4\.0"),
    "heads that do not divide": (lambda: MultiheadFlexAttention(6, 9, 2), ExpressionError, "d_out=9.*d_head="),
    "dropout": (make(dropout=1.5), FlexmaskError, "1.5"),
    "text": (make(mask="casual"), FlexmaskError, "causal"),
    "tensor as mask": (make(mask=torch.ones(5, 5).bool()), OperandError, "mask.*Tensor"),
    "BlockMask of its own": (make(mask=fm.causal().block_mask(5)), OperandError, "BlockMask; give it to forward"),
    "taken name": (make(mask="document(ids=context)"), ExpressionError, "parameter context.*rename"),
    "missing": (call(PADDED), ExpressionError, r"key_padding\(lengths=lengths\).*not given.*lengths=\.\.\."),
    "misspelt": (
        call(PADDED, lenghts=[5, 3]),
        ExpressionError,
        r"no argument lenghts, and the parameters of the mask .* are lengths\. Did you mean lengths\?$",
    ),
    "unknown": (
        call("causal", ids=[0] * 5),
        ExpressionError,
        "no argument ids, and the mask causal has no parameters; data goes",
    ),
    "no mask": (
        call(lengths=[5, 3]),
        ExpressionError,
        r'no argument lengths, and no mask is given; .* as in module\(x, "key_padding\(n\)", n=n\)\.$',
    ),
    "of the mask that is not used": (
        call(PADDED, "causal", lengths=[5, 3]),
        ExpressionError,
        "no argument lengths, and the mask causal has no parameters; data goes",
    ),
    "misspelt argument": (call("causal", contex=X), ExpressionError, r"no argument contex, .*\. Did you mean context\?$"),
    "BlockMask with data": (call(None, fm.causal().block_mask(5), ids=[0]), ExpressionError, "ids.*BlockMask"),
    "data that does not fit": (call(PADDED, lengths=[5, 3, 4]), LoweringError, "batch.*2.*3"),
    "missing in text": (call(None, "document(ids)"), ExpressionError, r"ids=\.\.\."),
    "mask that is not called": (call(None, fm.causal), OperandError, r"the function causal: call it, causal\(\)"),
    "q_offset": (
        call(q_offset=3),
        ExpressionError,
        "q_offset: cache= has the position of the first query.*positions=",
    ),
    "is_causal": (
        call(is_causal=True),
        ExpressionError,
        "no argument is_causal.*is_causal: write mask='causal'",
    ),
    "attn_mask": (
        call(attn_mask=torch.ones(5, 5).bool()),
        ExpressionError,
        r"True is for hidden, ~flexmask.from_dense\(attn_mask\).*True is for visible, flexmask.from_dense\(attn_mask\)",
    ),
    "key_padding_mask": (
        call("causal", key_padding_mask=torch.zeros(2, 5).bool()),
        ExpressionError,
        r"its True is for padding: mask=flexmask.key_padding\(hide=key_padding_mask\)",
    ),
    "attention_mask": (call(attention_mask=X), ExpressionError, r"its 1 is for a real token.*keep=attention_mask"),
    "need_weights": (call(need_weights=False), ExpressionError, r"leave it out.*module.attention_weights\(x, mask\)"),
    "a cache by position": (
        lambda: MultiheadFlexAttention(6, 8, 2)(X, "causal", fm.KVCache(8)),
        OperandError,
        "MultiheadFlexAttention.forward .* as cache=$",
    ),
    "a cache as the mask": (call(None, fm.KVCache(8)), OperandError, r"mask is a KVCache: .* module\(x, mask, cache=cache\)"),
    "a state of torch's module": (
        lambda: nn.Sequential(fm.MultiheadFlexAttention(16, 16, 2)).load_state_dict(
            nn.Sequential(nn.MultiheadAttention(16, 2)).state_dict()
        ),
        RuntimeError,
        r"Missing key.*in_proj.weight.*MultiheadFlexAttention.from_torch\(module\)",
    ),
    "several of torch's module": (
        call(need_weights=False, key_padding_mask=None, ids=[0]),
        ExpressionError,
        "ids, key_padding_mask, need_weights.*\n  key_padding_mask: .*\n  need_weights: ",
    ),
    "query, key, value": (
        lambda: MultiheadFlexAttention(6, 8, 2)(X, X, X),
        OperandError,
        r"got 1 more.*module\(x, context=key\).*nn.TransformerEncoderLayer, cannot",
    ),
    "a context as the mask": (
        lambda: MultiheadFlexAttention(6, 8, 2)(X, X),
        OperandError,
        r"mask is Tensor float32\[2, 5, 6\]: .*module\(x, mask, context=tensor\)",
    ),
    "one sequence": (lambda: MultiheadFlexAttention(6, 8, 2)(X[0]), LoweringError, r"\[5, 6\]; .*unsqueeze\(0\)"),
    "sparse input": (
        lambda: MultiheadFlexAttention(6, 8, 2)(X.to_sparse()),
        OperandError,
        r"x must be a plain tensor.*to_dense",
    ),
    "no context": (lambda: MultiheadFlexAttention(6, 8, 2, d_context=4)(X), LoweringError, r"give context=.*length, 4"),
    "width of the context": (
        lambda: MultiheadFlexAttention(6, 8, 2, d_context=4)(X, context=X),
        LoweringError,
        r"context must be \[B, length, 4\].*\[2, 5, 6\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name: str) -> None:
    attempt, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        attempt()


def test_no_error_is_about_axes_that_the_module_makes() -> None:
    layer = fm.MultiheadFlexAttention(6, 8, 4)  # as many heads as the data has values
    with pytest.raises(LoweringError, match=r"has 4 values along q, but q_len is 5") as caught:
        layer(X, fm.document([0] * 4))
    assert "transpose" not in str(caught.value)


def test_rope_in_float32_under_autocast() -> None:
    def rope(x: Tensor, positions: Tensor) -> Tensor:
        return x * torch.cos(positions.float())[:, None]

    layer, x = fm.MultiheadFlexAttention(16, 16, 2, rope=rope), torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x, fm.causal())
    torch.testing.assert_close(found.float(), layer(x, fm.causal()), rtol=3e-2, atol=3e-2)


def test_names_that_forward_takes() -> None:
    layer, x = fm.MultiheadFlexAttention(8, 8, 2), torch.randn(1, 3, 8)
    for text in ("kv < self", "kv < context"):
        with pytest.raises(ExpressionError, match="which forward takes itself"):
            layer(x, text)
    with pytest.raises(OperandError, match="mask must be a Mask"):
        layer(x, torch.ones(3, 3, dtype=torch.bool), cache=fm.KVCache(4))
    assert fm.parse("kv < text", **{"text": 3}) == fm.parse("kv < 3")
