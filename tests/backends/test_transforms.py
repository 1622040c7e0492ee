"""Attention under torch's transforms: derivatives of every kind and order, vmap, tensors without values, captured graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexmask as fm
from flexmask import Mask, attention, h, kv, q
from flexmask.backends.dropout import dropout_cells
from flexmask.errors import LoweringError, OperandError
from tests.backends.tiled_cases import block_sdpa
from tests.support import oracle
from tests.support.exhaustive import each_run, exhaustive, one_in

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

BATCH, HEADS, Q_LEN, KV_LEN, WIDTH = 2, 2, 6, 7, 3
PACKED = [[0, 0, 1, 1, 1, 2, -1], [0, 0, 0, 0, 1, 1, -1]]
TABLE = torch.rand(BATCH, HEADS, Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(3)) < 0.5


def diagonals(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return (q - kv) % 3 == 0


def second_head(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return (q * kv) % 3 != 1 and h == 1 and q != 2


MASKS: dict[str, tuple[Mask | None, oracle.Predicate]] = {
    "none": (None, oracle.full()),
    "causal": (fm.causal(), oracle.causal()),
    "window": (fm.sliding_window(left=1, right=2), oracle.sliding_window(1, 2)),
    "documents": (fm.document(PACKED), oracle.document(PACKED)),
    "rows without a key": (fm.causal() & fm.key_padding([0, 5]), oracle.both(oracle.causal(), oracle.key_padding([0, 5]))),
    "per head": (fm.per_head([fm.causal(), fm.empty()]), oracle.per_head([oracle.causal(), oracle.empty()])),
    "dense": (fm.from_dense(TABLE), oracle.dense(TABLE.tolist())),
    "diagonals": ((q - kv) % 3 == 0, diagonals),
    "cells of one head": (((q * kv) % 3 != 1) & (h == 1) & (q != 2), second_head),
}

VARIANTS = ["plain", "score_mod", "dropout", "score_mod and dropout", "shared keys"]
SLOPES = torch.tensor([0.3, -0.7], dtype=torch.float64)


def tilt(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(score) * 2 + SLOPES[h] * (q_idx - kv_idx)


class Case:
    """The library's attention of query, key and value under a mask, and its reference: softmax over the dense scores."""

    def __init__(self, name: str, variant: str = "plain") -> None:
        self.mask, allowed = MASKS[name]
        self.visible = torch.tensor(oracle.table_of(allowed, Q_LEN, KV_LEN, batch=BATCH, heads=HEADS))
        self.options: dict[str, Any] = {}
        self.key_heads = 1 if variant == "shared keys" else HEADS
        if variant == "shared keys":
            self.options["enable_gqa"] = True
        if "score_mod" in variant:
            self.options["score_mod"] = tilt
        if "dropout" in variant:
            self.options |= {"dropout_p": 0.4, "dropout_seed": 5}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes = (HEADS, Q_LEN, WIDTH), (self.key_heads, KV_LEN, WIDTH), (self.key_heads, KV_LEN, 2)
        query, key, value = (torch.randn(BATCH, *size, dtype=torch.float64) for size in sizes)
        return query, key, value

    def actual(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = attention(query, key, value, self.mask, backend="sdpa", **self.options)
        return out

    def wanted(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = HEADS // self.key_heads
        scores = query @ key.repeat_interleave(group, 1).mT / math.sqrt(WIDTH)
        if "score_mod" in self.options:
            scores = torch.tanh(scores) * 2 + SLOPES[:, None, None] * (torch.arange(Q_LEN)[:, None] - torch.arange(KV_LEN))
        empty = ~self.visible.any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~self.visible, -math.inf).masked_fill(empty, 0), -1).masked_fill(empty, 0)
        if "dropout_p" in self.options:
            weights = weights * dropout_cells(5, 0.4, BATCH, HEADS, Q_LEN, KV_LEN) / 0.6
        return weights @ value.repeat_interleave(group, 1)


def check_same(transformed: Callable[[Attend], Any], case: Case) -> None:
    """A transform gives the same result for the library's attention as for the reference."""
    actual, wanted = (torch.utils._pytree.tree_leaves(transformed(attend)) for attend in (case.actual, case.wanted))
    assert len(actual) == len(wanted) > 0
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def total(tensors: Iterable[Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([function(tensor).sum() for tensor in tensors]).sum()


def penalty(attend: Attend, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradient of a gradient penalty."""
    tensors = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    out = attend(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return torch.autograd.grad(total(grads, torch.square), tensors)


def pairs(variants: list[str]) -> list[Any]:
    """Every mask as it is, and variants of a fused mask, one of intervals and one of cells, which each run takes in turn."""
    plain = [(name, "plain") for name in MASKS]
    return [*plain, *one_in(3, ["causal", "rows without a key", "cells of one head"], variants)]


PAIRS = pairs(VARIANTS[1:])


@pytest.mark.parametrize(("name", "variant"), PAIRS)
class TestDerivatives:
    def test_jvp(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        tensors, tangents = case.inputs(), case.inputs()
        check_same(lambda attend: jvp(attend, tensors, tangents), case)
        query, key, value = tensors
        check_same(lambda attend: jvp(lambda k: attend(query, k, value), (key,), tangents[1:2]), case)

    def test_forward_mode(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        tensors, tangents = case.inputs(), case.inputs()

        def derivatives(attend: Attend) -> Any:
            """Of the output, and of the gradients: forward over reverse mode."""
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            with forward_ad.dual_level():
                made = [forward_ad.make_dual(tensor, tangent) for tensor, tangent in zip(leaves, tangents, strict=True)]
                out = attend(*made)
                grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
                return [forward_ad.unpack_dual(tensor).tangent for tensor in (out, *grads)]

        check_same(derivatives, case)

    def test_one_dual_tensor(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        query, key, value = case.inputs()

        def tangents(attend: Attend) -> Any:
            with forward_ad.dual_level():
                outs = (
                    attend(forward_ad.make_dual(query, query), key, value),
                    attend(query, forward_ad.make_dual(key, key), value),
                    attend(query, key, forward_ad.make_dual(value, value)),
                )
                return [forward_ad.unpack_dual(out).tangent for out in outs]

        check_same(tangents, case)

    def test_reverse_over_forward(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        tensors, tangents = case.inputs(), case.inputs()
        check_same(lambda attend: grad(lambda *x: jvp(attend, x, tangents)[1].square().sum(), (0, 1, 2))(*tensors), case)

    def test_grad_and_vjp(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        tensors, weights = case.inputs(), torch.randn(BATCH, HEADS, Q_LEN, 2, dtype=torch.float64)
        check_same(lambda attend: grad(lambda *x: (attend(*x) * weights).sum(), (0, 1, 2))(*tensors), case)
        check_same(lambda attend: vjp(attend, *tensors)[1](weights), case)

    def test_second_and_third_derivative(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        tensors = tuple(tensor.requires_grad_() for tensor in case.inputs())

        def derivatives(attend: Attend) -> list[Tensor]:
            first = torch.autograd.grad(attend(*tensors).square().sum(), tensors, create_graph=True)
            second = torch.autograd.grad(total(first, torch.square), tensors, create_graph=True)
            third = torch.autograd.grad(total(second, torch.square), tensors)
            return [*first, *second, *third]

        check_same(derivatives, case)

    @pytest.mark.parametrize(
        "modes",
        [(jacrev, jacfwd), (jacfwd, jacrev), *exhaustive([[jacrev, jacrev], [jacfwd, jacfwd]])],
        ids=lambda modes: "-".join(mode.__name__ for mode in modes),
    )
    def test_hessian(self, name: str, variant: str, modes: tuple[Any, Any]) -> None:
        case = Case(name, variant)
        query, key, value = case.inputs()
        place = torch.tensor(1), torch.tensor(0), torch.tensor(3)

        def outputs(attend: Attend) -> Callable[[Tensor], Tensor]:
            return lambda x: attend(query.index_put(place, x), key, value.index_put(place, x[:2])).square().sum(-1)

        start = torch.randn(WIDTH, dtype=torch.float64)
        check_same(lambda attend: modes[0](modes[1](outputs(attend)))(start), case)

    @pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 0)], ids=str)
    def test_vmap(self, name: str, variant: str, in_dims: tuple[int | None, ...]) -> None:
        case = Case(name, variant)
        tensors = [
            tensor if dim is None else torch.stack([tensor, -tensor, 2 * tensor], dim)
            for tensor, dim in zip(case.inputs(), in_dims, strict=True)
        ]
        check_same(lambda attend: vmap(attend, in_dims)(*tensors), case)

    def test_vmap_of_vmap(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        query, key, value = case.inputs()
        queries, values = torch.stack([query, -query]), torch.stack([value, 3 * value, -value])
        check_same(lambda attend: vmap(lambda x: vmap(lambda y: attend(x, key, y))(values))(queries), case)

    def test_vmap_and_derivatives(self, name: str, variant: str) -> None:
        case = Case(name, variant)
        query, key, value = case.inputs()
        queries = torch.stack([query, -query, 2 * query])

        def gradients(attend: Attend) -> Any:
            return vmap(grad(lambda x, v: attend(x, key, v).square().sum(), (0, 1)), (0, None))(queries, value)

        check_same(gradients, case)
        check_same(lambda attend: vmap(lambda x: jvp(lambda y: attend(y, key, value), (x,), (x,)))(queries), case)
        check_same(lambda attend: jvp(lambda y: vmap(lambda x: attend(x, key, value))(y), (queries,), (queries,)), case)


class TestDropout:
    """A drawn seed follows the randomness that vmap is given, as torch's dropout does."""

    @staticmethod
    def weights(queries: Tensor, randomness: str) -> Tensor:
        """Where values are the unit matrix, the output is the weights."""
        eye = torch.eye(12, dtype=torch.float64).expand(1, 2, 12, 12)
        attend = lambda x: attention(x, x, eye, fm.document(lengths=[5, 7]), dropout_p=0.5)  # noqa: E731
        return vmap(attend, randomness=randomness)(queries)

    def test_randomness(self) -> None:
        queries = torch.randn(1, 1, 2, 12, 12, dtype=torch.float64).expand(6, -1, -1, -1, -1)
        same, different = self.weights(queries, "same"), self.weights(queries, "different")
        assert all(torch.equal(one, same[0]) for one in same)
        assert not any(torch.equal(one, different[0]) for one in different[1:])
        shares = (different > 0).double()[:, fm.document(lengths=[5, 7]).dense(12).expand(1, 2, -1, -1)]
        assert shares.mean().item() == pytest.approx(0.5, abs=0.05)
        with pytest.raises(RuntimeError, match="randomness"):
            self.weights(queries, "error")

    def test_gradients_drop_what_the_output_drops(self) -> None:
        """With seeds that differ along the mapped axis."""
        queries, key = torch.randn(4, 2, 2, 12, 8, dtype=torch.float64), torch.randn(2, 2, 12, 8, dtype=torch.float64)
        eye = torch.eye(12, dtype=torch.float64).expand(2, 2, 12, 12)
        seeds = torch.tensor([3, 4, 5, 6])

        def attend(query: Tensor, value: Tensor, seed: Tensor) -> Tensor:
            return attention(query, key, value, fm.document(lengths=[5, 7]), dropout_p=0.5, dropout_seed=seed)

        def gradient(query: Tensor, seed: Tensor) -> Tensor:
            found: Tensor = grad(lambda value: attend(query, value, seed).sum())(eye)
            return found

        for place, seed in enumerate(seeds.tolist()):
            whole = attend(queries[place], eye, torch.tensor(seed))
            torch.testing.assert_close(vmap(attend, (0, None, 0))(queries, eye, seeds)[place], whole)
            wanted = whole.sum(2).unsqueeze(-1).expand(-1, -1, -1, 12)
            torch.testing.assert_close(vmap(gradient)(queries, seeds)[place], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    case = Case("documents")
    tensors, tangents = case.inputs(), case.inputs()
    lower, ahead = (tuple(tensor.to(dtype) for tensor in some) for some in (tensors, tangents))
    found = jvp(case.actual, lower, ahead)[1], *penalty(case.actual, lower)
    wanted = jvp(case.wanted, tensors, tangents)[1], *penalty(case.wanted, tensors)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("name", ["causal", "rows without a key", "cells of one head"])
def test_autocast(name: str) -> None:
    case = Case(name)
    tensors, tangents = ([tensor.float() for tensor in case.inputs()] for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out, tangent = jvp(case.actual, tuple(tensors), tuple(tangents))[:2]
        second = penalty(case.actual, tuple(tensors))
    assert out.dtype == tangent.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in second} == {torch.float32}
    doubles = tuple(tensor.double() for tensor in tensors)
    for one, other in zip(second, penalty(case.wanted, doubles), strict=True):
        assert (one - other).abs().max() / other.abs().max() < 0.1


# ---------------------------------------------------------------- modules, masks and caches


class TestModules:
    @pytest.mark.parametrize("name", ["none", "causal", "rows without a key", "cells of one head"])
    def test_gradients_of_each_sample(self, name: str) -> None:
        mask = MASKS[name][0]
        mask = fm.causal() & fm.key_padding(5) if name == "rows without a key" else mask
        layer = fm.MultiheadFlexAttention(8, 8, 2, n_kv_heads=1).double()
        x = torch.randn(3, Q_LEN, 8, dtype=torch.float64)
        weights = dict(layer.named_parameters())

        def loss(weights: Mapping[str, Tensor], sample: Tensor) -> Tensor:
            out = functional_call(layer, dict(weights), (sample[None], mask))
            assert isinstance(out, Tensor)
            return out.square().sum()

        found = vmap(grad(loss), (None, 0))(weights, x)
        for place, sample in enumerate(x):
            loss(weights, sample).backward()
            for name, parameter in layer.named_parameters():
                torch.testing.assert_close(found[name][place], parameter.grad)
                parameter.grad = None

    def test_an_ensemble(self) -> None:
        layers = [fm.MultiheadFlexAttention(8, 8, 2, mask="causal & document(lengths=[2, 4])").double() for _ in range(3)]
        weights, buffers = torch.func.stack_module_state(layers)
        x = torch.randn(2, Q_LEN, 8, dtype=torch.float64)
        base = copy.deepcopy(layers[0]).to("meta")
        found = vmap(lambda w, b: functional_call(base, (w, b), (x, layers[0].mask)))(weights, buffers)
        for one, layer in zip(found, layers, strict=True):
            torch.testing.assert_close(one, layer(x))

    def test_hessian_vector_product(self) -> None:
        layer = fm.MultiheadFlexAttention(4, 4, 2).double()
        x = torch.randn(1, Q_LEN, 4, dtype=torch.float64)
        weights = dict(layer.named_parameters())
        ahead = {name: torch.randn_like(weight) for name, weight in weights.items()}

        def loss(weights: Mapping[str, Tensor]) -> Tensor:
            out: Tensor = functional_call(layer, dict(weights), (x, fm.document(lengths=[2, 4])))
            return out.square().sum()

        found = jvp(grad(loss), (weights,), (ahead,))[1]
        step = 1e-6
        up, down = (grad(loss)({n: w.detach() + s * ahead[n] for n, w in weights.items()}) for s in (step, -step))
        for name in weights:
            torch.testing.assert_close(found[name], (up[name] - down[name]) / (2 * step), rtol=1e-6, atol=1e-6)


class TestMasks:
    """Masks made and lowered within transforms."""

    def test_what_a_mask_keeps_can_be_used_later(self) -> None:
        x = torch.randn(2, 1, Q_LEN, 4)
        for mask in (fm.document(lengths=[2, 4]), fm.key_padding([1, 3]), fm.prefix_lm([2, 3]), fm.document([0, 0, 1, 1, 2, 2])):
            fresh = fm.parse(str(mask))
            grad(lambda y: attention(y, y, y, mask).sum())(x)  # noqa: B023
            vmap(lambda y: attention(y, x, x, mask))(x[None])  # noqa: B023
            assert torch.equal(attention(x, x, x, mask), attention(x, x, x, fresh))
            assert torch.equal(mask.dense(Q_LEN, batch=2), fresh.dense(Q_LEN, batch=2))

    def test_lowering_within(self) -> None:
        mask = fm.document(lengths=[2, 4])

        def loss(x: Tensor) -> Tensor:
            return x.masked_fill(~mask.dense(Q_LEN), 0).sum()

        x = torch.randn(1, 1, Q_LEN, Q_LEN)
        assert torch.equal(grad(loss)(x), mask.dense(Q_LEN).expand_as(x).to(x.dtype))
        assert mask.block_mask(Q_LEN).to_dense().all()

    def test_data_computed_within(self) -> None:
        ids = torch.tensor([0, 0, 2, 2, 4, 4])
        x = torch.randn(1, 1, Q_LEN, 4, dtype=torch.float64)

        def loss(x: Tensor, mask: Callable[[Tensor], Mask]) -> Tensor:
            return attention(x, x, x, mask(ids // 2)).square().sum()

        for mask in (fm.document, lambda ids: (q * kv) % 3 != fm.table(ids)[q], lambda ids: fm.from_dense(ids[:, None] == ids)):
            wanted = x.clone().requires_grad_()
            loss(wanted, mask).backward()
            torch.testing.assert_close(grad(loss)(x, mask), wanted.grad)
            with fm.MaskCache():
                torch.testing.assert_close(grad(loss)(x, mask), wanted.grad)
                torch.testing.assert_close(grad(loss)(x, mask), wanted.grad)

    def test_a_cache_serves_transforms(self) -> None:
        x = torch.randn(1, 1, Q_LEN, 4, dtype=torch.float64)
        mask = fm.document(torch.tensor([0, 0, 1, 1, 2, 2]))
        with fm.MaskCache() as cache:
            for _ in range(3):
                grad(lambda y: attention(y, y, y, mask).sum())(x)
            assert (cache.builds, cache.hits) == (1, 2)

    @pytest.mark.parametrize("offset", [False, True])
    def test_data_that_vmap_maps_over(self, offset: bool) -> None:
        x = torch.randn(3, 1, 1, Q_LEN, 4)
        data = torch.zeros(3, dtype=torch.long) if offset else torch.zeros(3, Q_LEN, dtype=torch.long)

        def attend(y: Tensor, data: Tensor) -> Tensor:
            if offset:
                return attention(y, y, y, fm.causal(), q_offset=data)
            return attention(y, y, y, fm.document(data))

        with pytest.raises(LoweringError, match=r"torch.vmap maps over .*; give a mask its batch as the first axis"):
            vmap(attend)(x, data)


@pytest.mark.parametrize("mask", [fm.causal(), fm.causal().block_mask(128)], ids=["mask", "BlockMask"])
def test_flexattention_says_what_it_cannot(mask: Mask | BlockMask) -> None:
    x = torch.randn(1, 1, 128, 16)

    def attend(y: Tensor) -> Tensor:
        return attention(y, x.to(y.device), x.to(y.device), mask, backend="flex")

    calls: list[Callable[[], Any]] = [
        lambda: jvp(attend, (x,), (x,)),
        lambda: vmap(attend)(x[None]),
        lambda: grad(lambda y: attend(y).sum())(x),
        *([lambda: attend(x.to("meta"))] if isinstance(mask, Mask) else []),
    ]
    for call in calls:
        with pytest.raises(LoweringError, match=r"no transforms of torch.func, .* backend='sdpa'"):
            call()
    with forward_ad.dual_level(), pytest.raises(LoweringError, match="no forward-mode derivatives"):
        attend(forward_ad.make_dual(x, x))


# ---------------------------------------------------------------- tensors without values, and graphs


@contextmanager
def tensors_without_values(kind: str) -> Iterator[Callable[..., Tensor]]:
    """A function that makes a tensor without values."""
    if kind == "meta":
        yield lambda *shape: torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
    else:
        with FakeTensorMode():
            yield lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("kind", ["meta", "cpu"])
class TestWithoutValues:
    @pytest.mark.parametrize(("name", "variant"), PAIRS)
    def test_attention(self, kind: str, name: str, variant: str) -> None:
        case = Case(name, variant)
        case.mask = fm.from_dense(TABLE.tolist()) if name == "dense" else case.mask
        options = {**case.options, **({"score_mod": lambda score, b, h, q, kv: score * 2 + h} if "score_mod" in variant else {})}
        sizes = [tensor.shape for tensor in case.inputs()]
        with tensors_without_values(kind) as make:
            tensors = query, key, value = make(*sizes[0]), make(*sizes[1]), make(*sizes[2])
            out = attention(query, key, value, case.mask, **options)
            assert (out.shape, out.dtype, out.device.type) == ((BATCH, HEADS, Q_LEN, 2), torch.bfloat16, tensors[0].device.type)
            grads = torch.autograd.grad(out.sum(), tensors)
        assert [(one.shape, one.dtype) for one in grads] == [(tensor.shape, tensor.dtype) for tensor in tensors]

    def test_module(self, kind: str) -> None:
        with tensors_without_values(kind) as make:
            device = make(1).device
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
            layer = fm.MultiheadFlexAttention(8, 8, 2, dropout=0.1, mask="causal & key_padding(lengths)", **options)
            out = layer(make(2, 6, 8), lengths=[3, 6])
            assert isinstance(out, Tensor)
            assert (out.shape, out.device) == ((2, 6, 8), device)
            with pytest.raises(OperandError, match=r"x is torch.float64, the module torch.bfloat16"):
                layer(make(2, 6, 8).double(), lengths=[3, 6])
            out.sum().backward()
            assert [p.grad.shape for p in layer.parameters() if p.grad is not None] == [p.shape for p in layer.parameters()]

    def test_errors_are_those_of_other_tensors(self, kind: str) -> None:
        with tensors_without_values(kind) as make:
            x = make(2, 1, 6, 8)
            with pytest.raises(LoweringError, match="unbound parameters"):
                attention(x, x, x, "document(ids)")
            with pytest.raises(LoweringError, match="5 values along"):
                attention(x, x, x, fm.document([0] * 5))
            with pytest.raises(LoweringError, match="must agree"):
                attention(x, x[:1], x, fm.causal())


class TestFakeTensors:
    @pytest.mark.parametrize(("name", "variant"), pairs(["dropout", "shared keys"]))
    def test_on_a_device_that_is_not_there(self, name: str, variant: str) -> None:
        """FlexAttention is not called: it would compile a kernel."""
        case = Case(name, variant)
        case.mask = fm.from_dense(TABLE.tolist()) if name == "dense" else case.mask
        sizes = [(HEADS, Q_LEN, 32), (case.key_heads, KV_LEN, 32), (case.key_heads, KV_LEN, 32)]
        with FakeTensorMode():
            query, key, value = (torch.empty(BATCH, *size, device="cuda") for size in sizes)
            out = attention(query, key, value, case.mask, **case.options)
            assert (out.shape, out.device) == (query.shape, query.device)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
    def test_masks_that_hold_tensors(self, dtype: torch.dtype) -> None:
        """Tensors made outside and inside the mode."""
        data = torch.zeros(6, dtype=dtype)
        with FakeTensorMode():
            x = torch.randn(1, 1, 6, 8)
            for held in (data, torch.zeros(6, dtype=dtype)):
                assert (
                    attention(x, x, x, fm.key_padding(keep=held) if dtype == torch.bool else fm.document(held)).shape == x.shape
                )

    def test_what_a_mask_keeps_can_be_used_later(self) -> None:
        x = torch.randn(1, 1, 6, 8)
        for mask in (fm.document(lengths=[2, 4]), fm.key_padding(4), fm.document([0, 0, 1, 1, 1, 2])):
            with FakeTensorMode(), fm.MaskCache():
                fake = torch.randn(1, 1, 6, 8)
                attention(fake, fake, fake, mask)
            assert torch.equal(attention(x, x, x, mask), attention(x, x, x, fm.parse(str(mask))))
            with FakeTensorMode():
                fake = torch.randn(1, 1, 6, 8)
                assert attention(fake, fake, fake, mask).shape == x.shape


class Layer(nn.Module):
    """A layer with a mask of its own."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.layer = fm.MultiheadFlexAttention(8, 8, 2, mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        assert isinstance(out, Tensor)
        return out


IN_GRAPHS = [
    fm.causal(),
    fm.sliding_window(left=2, right=1),
    fm.document(lengths=[2, 4]),
    (q - kv) % 3 == 0,
    fm.document(torch.tensor([0, 0, 1, 1, 2, 2])),
]


class Recorder(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class TestGraphs:
    @pytest.mark.parametrize("mask", each_run(IN_GRAPHS, *IN_GRAPHS[::2]), ids=str)
    def test_export(self, mask: Mask) -> None:
        layer, x = Layer(mask), torch.randn(1, 6, 8)
        exported = torch.export.export(layer, (x,), strict=False).module()
        other = torch.randn(1, 6, 8)
        torch.testing.assert_close(exported(other), layer(other))

    @pytest.mark.parametrize("mode", ["fake", "symbolic"])
    @pytest.mark.parametrize("mask", IN_GRAPHS[:-1], ids=str)  # make_fx takes no tensors but its inputs
    def test_make_fx(self, mask: Mask, mode: Any) -> None:
        x, other = torch.randn(2, 1, 2, 6, 8)
        graph = make_fx(lambda y: attention(y, y, y, mask), tracing_mode=mode)(x)
        torch.testing.assert_close(graph(other), attention(other, other, other, mask))

    def test_modes_record_one_operator(self) -> None:
        """So that selective checkpoints can keep its output."""
        case = Case("window")
        query, key, value = (tensor.requires_grad_() for tensor in case.inputs())
        wanted = torch.autograd.grad(case.actual(query, key, value).sum(), (query, key, value))
        with Recorder() as recorder:
            out = case.actual(query, key, value)
            out.sum().backward()
        assert [recorder.seen.count(f"flexmask.block_sdpa{end}.default") for end in ("", "_backward")] == [1, 1]

        def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
            kept = operator == torch.ops.flexmask.block_sdpa.default
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        out = checkpoint(
            lambda x: case.actual(x, key * 1, value * 1),
            query,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
        for found, other in zip(torch.autograd.grad(out.sum(), (query, key, value)), wanted, strict=True):
            torch.testing.assert_close(found, other)

    @pytest.mark.parametrize("learns", [False, True])
    def test_modes_take_masks_that_are_not_separable(self, learns: bool) -> None:
        """No operator takes their cells, which are a function."""
        x = torch.randn(1, 2, 6, 8, requires_grad=learns)
        mask = (q * kv) % 3 != 1
        wanted = attention(x, x, x, mask)
        with Recorder():
            torch.testing.assert_close(attention(x, x, x, mask), wanted)

    def test_a_lowering_without_values_computes_nothing(self) -> None:
        """Were it captured in a graph, it would raise where the graph runs."""
        from flexmask.backends.backend import Call
        from flexmask.backends.tiled_sdpa import _lower

        x, mask = torch.randn(1, 1, 6, 8), fm.document(lengths=[2, 4])
        _, visible = _lower(mask, Call(x, x, x, mask), plain=True, shapes_only=True)
        assert visible is not None
        with pytest.raises(LoweringError, match="interval outside"):
            block_sdpa(x, x, x, visible[0], cells=visible[1])
