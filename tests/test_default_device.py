"""A default device serves the tensors of its user: those that the library makes for itself are where its data is.

``torch.set_default_device("meta")`` is how deferred initialization makes modules without memory. What lands there has no values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

import flexmask as fm
from flexmask import KVCache, Mask, MultiheadFlexAttention, attention
from flexmask.distributed import shard_sequence
from flexmask.errors import LoweringError
from flexmask.expr.names import NAMES
from flexmask.testing import assert_batch_invariant, assert_equivalent, assert_no_leak
from tests.support.examples import EXAMPLES
from tests.support.exhaustive import each_run
from tests.support.pages import run_page

ROOT = Path(__file__).parent.parent
#: The package and its plugins.
PACKAGES = [ROOT / "flexmask", *(path for path in ROOT.glob("plugins/*/flexmask_*") if path.is_dir())]
#: The functions of torch that make a tensor on the default device.
FACTORIES = {function.__name__: function for function in _device_constructors()}


def calls_without_device(code: str) -> list[int]:
    """The lines that call a function of torch which makes a tensor, without ``device=``."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_tensor_names_its_device(package: Path) -> None:
    modules = sorted(package.rglob("*.py"))
    found = {str(path.relative_to(ROOT)): calls_without_device(path.read_text()) for path in modules}
    assert len(modules) > 5
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_tensor_without_a_device_is_found() -> None:
    code = "torch.arange(3)\ntorch.zeros(3, device=x.device)\nx.new_zeros(3)\ntorch.as_tensor(x, dtype=torch.int32)\n"
    assert calls_without_device(code) == [1, 4]


class OnTheCPU(ast.NodeTransformer):
    """Names the CPU in the calls of a user's code that make tensors and modules."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called in {*(f"torch.{name}" for name in FACTORIES), "MultiheadFlexAttention", "torch.nn.Embedding"}:
            node.keywords.append(ast.keyword("device", ast.Constant("cpu")))
        return node


@pytest.mark.slow
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        run_page(ROOT / "README.md", lambda code: ast.unparse(OnTheCPU().visit(ast.parse(code))))


# ---------------------------------------------------------------- each named mask, all that a mask is for

X = torch.randn(2, 4, 16)
QUERY, KEY, VALUE = torch.randn(3, 2, 1, 4, 8)
INDICES = torch.arange(4)


def lowered(mask: Mask) -> Iterator[Any]:
    yield mask.dense(4, device="cpu")
    yield mask.to_bias(4, device="cpu")
    yield mask.rows(4, device="cpu").upper.bounds
    for size in (2, 128):
        yield mask.block_mask(4, device="cpu", block_size=size).to_dense()
    yield mask.mask_mod(4, device="cpu")(*(torch.zeros_like(INDICES), torch.zeros_like(INDICES), INDICES, INDICES))
    yield mask.stats(4, device="cpu")
    yield mask.difference("causal", 4, device="cpu")


def attended(mask: Mask) -> Iterator[Any]:
    query, key, value = (tensor.clone().requires_grad_() for tensor in (QUERY, KEY, VALUE))
    out = attention(query, key, value, mask)
    yield out
    yield from torch.autograd.grad(out.square().sum(), (query, key, value))
    yield attention(query, key, value, mask, score_mod=lambda score, b, h, q, kv: score + q - kv)
    yield attention(query, key, value, mask, dropout_p=0.5)


def planned(mask: Mask) -> Iterator[Any]:
    lowered = mask.plan(4, device="cpu")()
    yield lowered.dense()
    yield attention(QUERY, KEY, VALUE, lowered)


USES: dict[str, Callable[[Mask], Iterator[Any]]] = {"lowered": lowered, "attended": attended, "planned": planned}


def results(use: Callable[[Mask], Iterator[Any]], name: str, arguments: dict[str, Any]) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(use(NAMES[name](**arguments)))


@pytest.mark.parametrize(
    ("name", "number", "use"),
    each_run(
        ((name, number, use) for name in EXAMPLES for number in range(len(EXAMPLES[name])) for use in USES),
        *((name, place % len(EXAMPLES[name]), list(USES)[place % 3]) for place, name in enumerate(EXAMPLES)),
    ),
)
def test_named_masks(name: str, number: int, use: str) -> None:
    """Each is lowered, attended with or planned, in turn."""
    arguments, _ = EXAMPLES[name][number]
    wanted = results(USES[use], name, arguments)
    with torch.device("meta"):
        found = results(USES[use], name, arguments)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# ---------------------------------------------------------------- modules, caches, traced functions, checks, shards


def opaque(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (torch.sin(q * 1.0) < 0.9) & (q >= kv)


def layer(**options: Any) -> MultiheadFlexAttention:
    torch.manual_seed(0)
    return MultiheadFlexAttention(16, 16, 2, device="cpu", **options)


def decode(cache: KVCache, mask: str) -> Iterator[Tensor]:
    module = layer(mask=mask)
    yield module(X, cache=cache)
    for token in X[:, :2].split(1, 1):
        yield module(token, cache=cache)


def padded_decode() -> Iterator[Tensor]:
    cache, module = KVCache(8), layer()
    yield module(X, fm.causal() & fm.key_padding([4, 2]), cache=cache)
    cache.truncate([4, 2])
    yield module(X[:, :1], "causal", cache=cache)
    cache.reorder(INDICES[:2])
    yield module(X[:, :1], "causal", cache=cache)


def sharded() -> Iterator[Any]:
    sharding = shard_sequence(fm.causal() & fm.document(lengths=[40, 88, 128]), 256, ranks=4, block_size=16)
    for rank in range(4):
        yield sharding.positions(rank)
        yield sharding.seen(rank)
    yield sharding.received


def checked() -> Iterator[Any]:
    assert_equivalent(fm.causal() & fm.document(lengths=[1, 3]), 4, device="cpu")
    assert_no_leak(lambda x: layer()(x, "causal"), fm.causal(), X)
    assert_batch_invariant(lambda x, mask: layer()(x, mask), X[0], [1, 3], mask="causal", gradients=True)
    yield True


CASES: dict[str, Callable[[], Iterator[Any]]] = {
    "module": lambda: iter([layer()(X, "causal"), layer(dropout=0.5)(X, "causal & key_padding(n)", n=[2, 4])]),
    "module, scores": lambda: iter(layer()(X, "causal", return_qk=True)),
    "cache": lambda: decode(KVCache(8), "causal"),
    "cache with a window": lambda: decode(KVCache(8), "sliding_window(left=2, right=0)"),
    "cache with padding": padded_decode,
    "traced": lambda: lowered(fm.from_mask_mod(lambda b, h, q, kv: torch.where(q.new_ones(()) > 0, kv <= q, kv < q))),
    "opaque": lambda: lowered(fm.from_mask_mod(opaque)),
    "opaque attention": lambda: attended(fm.from_mask_mod(opaque)),
    "shards": sharded,
    "checks": checked,
}


@pytest.mark.parametrize("name", CASES)
def test_other_parts(name: str) -> None:
    torch.manual_seed(0)
    wanted = list(CASES[name]())
    torch.manual_seed(0)
    with torch.device("meta"):
        found = list(CASES[name]())
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# ---------------------------------------------------------------- deferred initialization


def test_a_module_made_on_meta_runs_once_it_has_weights() -> None:
    ready = layer(mask="causal & key_padding(lengths=[4, 2])")
    with torch.device("meta"):
        module = MultiheadFlexAttention(16, 16, 2, mask="causal & key_padding(lengths=[4, 2])")
    module.to_empty(device="cpu").load_state_dict(ready.state_dict())
    assert torch.equal(module(X), ready(X))


REMEDY = r"data on meta has no values: make it again .* torch.tensor\(data, device='cpu'\)"


def mask_on_meta() -> Mask:
    with torch.device("meta"):
        return fm.key_padding(torch.tensor([4, 2]))


def test_weights_for_a_module_whose_mask_is_on_meta() -> None:
    with torch.device("meta"):
        module = MultiheadFlexAttention(16, 16, 2, mask=fm.causal() & mask_on_meta())
    with pytest.raises(LoweringError, match=rf"causal & key_padding\(lengths=<int64\[2\]>\) is on meta.* cpu; {REMEDY}"):
        module.to_empty(device="cpu")


USED_ON_THE_CPU: dict[str, Callable[[Mask], Any]] = {
    "dense": lambda mask: mask.dense(4, device="cpu"),
    "block_mask": lambda mask: mask.block_mask(4, device="cpu"),
    "plan": lambda mask: mask.plan(4, device="cpu")(),
    "attention": lambda mask: attention(QUERY, KEY, VALUE, mask),
    "module": lambda mask: layer()(X, mask),
}


@pytest.mark.parametrize("name", USED_ON_THE_CPU)
def test_a_mask_on_meta_is_named(name: str) -> None:
    with pytest.raises(LoweringError, match=rf"key_padding\(lengths=<int64\[2\]>\) is on meta, not on cpu; {REMEDY}"):
        USED_ON_THE_CPU[name](mask_on_meta())


WITHOUT_A_DEVICE: dict[str, Callable[[Mask], Any]] = {
    "dense": lambda mask: mask.dense(4),
    "rows": lambda mask: mask.rows(4),
    "block_mask": lambda mask: mask.block_mask(4),
    "mask_mod": lambda mask: mask.mask_mod(4),
    "stats": lambda mask: mask.stats(4),
    "difference": lambda mask: mask.difference("causal", 4),
    "show": lambda mask: mask.show(4),
    "shards": lambda mask: shard_sequence(mask, 4, ranks=2, block_size=2),
}


@pytest.mark.parametrize("name", WITHOUT_A_DEVICE)
def test_a_mask_on_meta_is_lowered_there_only_where_that_is_asked_for(name: str) -> None:
    with pytest.raises(LoweringError, match=rf"key_padding\(lengths=<int64\[2\]>\) is on meta; {REMEDY}"):
        WITHOUT_A_DEVICE[name](mask_on_meta())


def test_the_view_of_a_mask_on_meta_says_why_it_is_empty() -> None:
    assert "is on meta; data on meta has no values" in mask_on_meta()._repr_html_()
