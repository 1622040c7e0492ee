"""Masks that are made in compiled code: one graph for all data, and the library's own messages."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flexmask as fm
from flexmask import Mask, attention, kv, q
from flexmask.expr import form
from flexmask.expr.deferral import FUNCTIONS
from tests.support import oracle
from tests.support.exhaustive import each_run, exhaustive

LENGTH = 24
X = torch.randn(2, 2, LENGTH, 8)
CU = torch.tensor([[0, 5, LENGTH], [0, 20, LENGTH]])
WINDOW = fm.sliding_window(size=4)
PACKED = fm.document(cu_seqlens=CU)
PARSED = fm.parse("causal & key_padding(n)")

b_, h_, q_, kv_ = (torch.arange(size).view(-1, *[1] * axes) for size, axes in ((2, 3), (2, 2), (LENGTH, 1), (LENGTH, 0)))
CAUSAL = kv_ <= q_
DOCUMENTS = torch.searchsorted(CU[:, 1:].contiguous(), torch.arange(LENGTH).expand(2, -1).contiguous(), right=True)
SAME = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]

Predicate = Callable[[Tensor], Tensor]


def keys(lengths: Tensor) -> Tensor:
    return kv_ < lengths.view(-1, 1, 1, 1)


#: How a mask is made from lengths in compiled code, and its cells.
MADE: dict[str, tuple[Callable[[Tensor], Any], Predicate]] = {
    "text": (lambda n: "causal", lambda n: CAUSAL),
    "functions": (lambda n: fm.causal() & fm.key_padding(n), lambda n: CAUSAL & keys(n)),
    "operators": (
        lambda n: (fm.causal() - fm.key_padding(lengths=n)) ^ WINDOW | fm.sliding_window(left=1, right=1),
        lambda n: ((CAUSAL & ~keys(n)) ^ ((q_ - kv_ < 4) & CAUSAL)) | ((q_ - kv_).abs() <= 1),
    ),
    "no limit": (
        lambda n: fm.sliding_window(left=None, right=2) & fm.key_padding(n, keep=None),
        lambda n: (kv_ - q_ <= 2) & keys(n),
    ),
    "the complement before torch 2.14": (lambda n: fm.full() - fm.key_padding(n), lambda n: ~keys(n)),
    "a mask that is an input": (lambda n: PACKED & fm.key_padding(n), lambda n: SAME & keys(n)),
    "lists": (
        lambda n: fm.key_padding(lengths=[3, LENGTH]) & fm.per_head([fm.full(), fm.key_padding(n)]),
        lambda n: keys(torch.tensor([3, LENGTH])) & ((h_ == 0) | keys(n)),
    ),
    "parse": (lambda n: fm.parse("(kv <= q) & key_padding(n)", n=n), lambda n: CAUSAL & keys(n)),
    "bind": (lambda n: fm.parse("causal & key_padding(n)").bind(n=n), lambda n: CAUSAL & keys(n)),
    "where": (lambda n: fm.where(fm.causal(), fm.key_padding(n), WINDOW), lambda n: CAUSAL & keys(n)),
    "comparisons": (lambda n: (kv <= q) & (fm.table(n)[fm.b] > kv), lambda n: CAUSAL & keys(n)),
    "arithmetic": (
        lambda n: (abs(q - 2 * kv) // 3 + 1 - (q % 4) * 2 <= fm.maximum(-kv, 3 - kv)) | (kv < 7) & (kv != 3),
        lambda n: ((q_ - 2 * kv_).abs() // 3 + 1 - (q_ % 4) * 2 <= torch.maximum(-kv_, 3 - kv_)) | ((kv_ < 7) & (kv_ != 3)),
    ),
    "numbers by where": (
        lambda n: kv < fm.where(q < 9, fm.table(n)[fm.b], fm.minimum(q, 11)),
        lambda n: kv_ < torch.where(q_ < 9, n.view(-1, 1, 1, 1), q_.clamp(max=11)),
    ),
    "a parameter": (
        lambda n: (fm.param("n")[fm.b] > kv).bind(n=n) & fm.key_padding(fm.param("m")).bind(m=n),
        lambda n: keys(n),
    ),
    "heads": (lambda n: (kv <= q) | (fm.h == 1) & (kv < fm.table([3, 9])[fm.h]), lambda n: CAUSAL | (h_ == 1) & (kv_ < 9)),
    "lengths": (lambda n: (kv < fm.kv_len - 3) & (q < fm.q_len), lambda n: (kv_ < LENGTH - 3) & (q_ >= 0)),
    "per document": (
        lambda n: fm.per_document(fm.causal(), cu_seqlens=CU) & fm.key_padding(n),
        lambda n: SAME & CAUSAL & keys(n),
    ),
}


def dense(visible: Tensor) -> Tensor:
    return oracle.attention(X, X, X, visible).float()


@pytest.mark.parametrize(
    "name",
    each_run(
        MADE, "operators", "a mask that is an input", "comparisons", "arithmetic", "numbers by where", "a parameter", "heads"
    ),
)
def test_a_mask_made_in_compiled_code(name: str) -> None:
    torch._dynamo.reset()
    make, cells = MADE[name]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda n: attention(X, X, X, make(n)), fullgraph=True, backend=counter)
    for lengths in ([20, 24], [3, 0], [24, 7]):
        n = torch.tensor(lengths)
        torch.testing.assert_close(compiled(n), dense(cells(n)))
    assert counter.frame_count == 1


@pytest.mark.skipif(torch.__version__ < "2.14", reason="dynamo traces ~ of no object before torch 2.14")
def test_the_complement() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda n: attention(X, X, X, ~fm.key_padding(n)), fullgraph=True, backend="aot_eager")
    n = torch.tensor([20, 3])
    torch.testing.assert_close(compiled(n), dense(~keys(n)))


@pytest.mark.slow
def test_the_text_of_a_layer_with_its_parameters() -> None:
    torch._dynamo.reset()
    layer = fm.MultiheadFlexAttention(16, 16, 2)
    x = torch.randn(2, LENGTH, 16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda n: layer(x, "causal & key_padding(lengths=n)", n=n), fullgraph=True, backend=counter)
    for lengths in ([20, 24], [3, 0]):
        n = torch.tensor(lengths)
        found, wanted = compiled(n), layer(x, fm.from_dense(CAUSAL & keys(n)))
        torch.testing.assert_close(found, wanted)
        parameters = list(layer.parameters())
        for one, other in zip(
            torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters), strict=True
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


#: How compiled code binds the parameter of a text, outside the call of a layer.
BOUND: dict[str, Callable[[Tensor], Any]] = {
    "parse": lambda n: fm.parse("causal & key_padding(n)", n=n),
    "bind": lambda n: fm.parse("causal & key_padding(n)").bind(n=n),
    "an operand": lambda n: fm.causal() & fm.parse("key_padding(n)").bind(n=n),
    "a mask that is an input": lambda n: PARSED.bind(n=n),
    "a name that is an argument too": lambda n: fm.causal() & fm.parse("key_padding(lengths=lengths)", lengths=n),
}


@pytest.mark.parametrize("name", each_run(BOUND, "an operand", "a name that is an argument too"))
def test_a_layer_takes_a_text_that_is_bound(name: str) -> None:
    torch._dynamo.reset()
    layer, x = fm.MultiheadFlexAttention(16, 16, 2), torch.randn(2, LENGTH, 16)
    compiled = torch.compile(lambda n: layer(x, BOUND[name](n)), fullgraph=True, backend="eager")
    n = torch.tensor([20, 3])
    torch.testing.assert_close(compiled(n), layer(x, fm.from_dense(CAUSAL & keys(n))))


@pytest.mark.slow
def test_data_of_a_layer_that_is_no_tensor_is_a_part_of_the_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    layer, x = fm.MultiheadFlexAttention(16, 16, 2, mask="causal & key_padding(n) & (kv < m)"), torch.randn(2, LENGTH, 16)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n, m in (([20, 3], 7), (torch.tensor([20, 3]), 7), (torch.tensor([9, 4]), 7)):
        visible = fm.from_dense(CAUSAL & keys(torch.as_tensor(n)) & (torch.arange(LENGTH) < m))
        torch.testing.assert_close(compiled(x, n=n, m=m), layer(x, visible))
    assert counter.frame_count == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"two sizes of batch: 2 by the query .* and 3 by key_padding"):
        compiled(x, n=[20, 3, 4], m=7)


def test_a_parameter_that_is_not_bound_in_compiled_code_is_missed() -> None:
    torch._dynamo.reset()
    layer, x = fm.MultiheadFlexAttention(16, 16, 2), torch.randn(2, LENGTH, 16)
    compiled = torch.compile(
        lambda n: layer(x, fm.parse("key_padding(lengths=lengths) & query_padding(m)").bind(m=n)), fullgraph=True, backend="eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"not given: call the module with lengths=\.\.\."):
        compiled(torch.tensor([20, 3]))


def test_a_mask_of_other_values_that_are_no_tensors_is_another_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda size: attention(X, X, X, fm.sliding_window(size=size)), fullgraph=True, backend=counter)
    for size in (3, 5, 3):
        torch.testing.assert_close(compiled(size), dense(CAUSAL & (q_ - kv_ < size)))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_lists_are_data() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda n, m: attention(X, X, X, fm.document(lengths=n) & fm.key_padding(m)), fullgraph=True, backend=counter
    )
    for first in (3, 5, 20, 1, 9):
        n, m = [[first, LENGTH - first], [7, LENGTH - 7]], [first, 13]
        ids = torch.stack([torch.repeat_interleave(torch.arange(2), torch.tensor(row)) for row in n])
        torch.testing.assert_close(compiled(n, m), dense((ids[:, None, :, None] == ids[:, None, None]) & keys(torch.tensor(m))))
    assert counter.frame_count == 2


def _ids(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _same(lengths: list[int]) -> Tensor:
    return _ids(lengths)[:, None] == _ids(lengths)


#: How a mask is made of the lengths of two documents, and its cells.
OF_LISTS: dict[str, tuple[Callable[[list[int]], Mask], Callable[[list[int]], Tensor]]] = {
    "lengths": (lambda n: fm.causal() & fm.document(lengths=n), lambda n: CAUSAL & _same(n)),
    "offsets": (lambda n: fm.document(cu_seqlens=[[0, n[0], LENGTH]] * 2), lambda n: _same(n)),
    "of sequences": (lambda n: fm.causal() & fm.key_padding(n), lambda n: CAUSAL & keys(torch.tensor(n))),
    "a prefix": (fm.prefix_lm, lambda n: CAUSAL | keys(torch.tensor(n))),
    "of heads": (lambda n: kv < fm.table(n)[fm.h], lambda n: kv_ < torch.tensor(n)[h_]),
    "inside": (lambda n: fm.per_head([fm.causal(), ~fm.document(lengths=n)]), lambda n: torch.where(h_ == 0, CAUSAL, ~_same(n))),
    "two lists": (
        lambda n: (fm.document(lengths=n) & fm.key_padding([n[1], LENGTH])).named("packed"),
        lambda n: _same(n) & keys(torch.tensor([n[1], LENGTH])),
    ),
    "with a tensor": (lambda n: PACKED | fm.document(lengths=n), lambda n: SAME | _same(n)),
}


@pytest.fixture
def new_to_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmask.expr.deferred.TRACED", form.Kept(99))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("new_to_compiled_code")
@pytest.mark.parametrize("name", OF_LISTS)
def test_lists_of_a_mask_that_is_an_argument_are_data(name: str) -> None:
    """The first list is a constant of its graph, which a mask that stays the same needs; others are inputs of one more."""
    make, cells = OF_LISTS[name]
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda mask: attention(X, X, X, mask), fullgraph=True, backend=counter)
    for first in (3, 5, 20, 1, 9, 22, 7, 2, 12, 3):
        lengths = [first, LENGTH - first]
        torch.testing.assert_close(compiled(make(lengths)), dense(cells(lengths)))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.usefixtures("new_to_compiled_code")
def test_lists_of_the_mask_of_a_layer_are_data() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = fm.MultiheadFlexAttention(8, 8, 2), torch.randn(2, LENGTH, 8)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for lengths in ([3, 21], [5, 19], [20, 4], [8, 8, 8], [2, 10, 12], [24, 0, 0, 0]):
        layer.mask = fm.causal() & fm.document(lengths=lengths)
        found, wanted = (torch.autograd.grad(run(x).square().sum(), layer.in_proj.weight)[0] for run in (compiled, layer))
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count == 3  # with another number of documents torch makes one for each


@pytest.mark.slow
@pytest.mark.usefixtures("new_to_compiled_code")
def test_lists_along_the_tokens_are_a_part_of_the_graph() -> None:
    """As data their key intervals could not be counted in a graph."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda mask: attention(X, X, X, mask), fullgraph=True, backend=counter)
    for first in (3, 5, 20):
        lengths = [first, LENGTH - first]
        torch.testing.assert_close(compiled(fm.document(_ids(lengths).tolist())), dense(_same(lengths)))
    assert counter.frame_count == 3


@pytest.mark.parametrize(
    "mask",
    [
        kv * fm.table([1, 2])[fm.h] <= q * 3,
        fm.minimum(kv, fm.table([7, 9])[fm.h]) < q // 2,
        (kv + fm.table([3, 5])[fm.b]) % 64 < 32,
    ],
    ids=str,
)
def test_lists_whose_numbers_a_mask_is_solved_with_are_no_data(mask: Mask) -> None:
    assert mask.lifted is None


def test_lists_are_no_data_where_tensors_have_no_values() -> None:
    mask = fm.document(lengths=[3, 21])
    with FakeTensorMode():
        assert not hasattr(mask, "lifted")
    torch.func.vmap(lambda x: x * hasattr(mask, "lifted"))(torch.ones(2))
    assert type(mask.lifted.tensors[0]) is Tensor


def test_export_of_masks_with_lists() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, mask: Mask) -> None:
            super().__init__()
            self.mask = mask

        def forward(self, x: Tensor) -> Tensor:
            return attention(x, x, x, self.mask)

    for first in (3, 5):
        layer = Layer(fm.document(lengths=[first, LENGTH - first]))
        for _ in range(2):
            exported = torch.export.export(layer, (X,), strict=False)
            torch.testing.assert_close(exported.module()(X), dense(_same([first, LENGTH - first])))


@pytest.mark.slow
@pytest.mark.usefixtures("new_to_compiled_code")
def test_a_mask_with_a_list_outlives_one_that_is_equal() -> None:
    first, second = fm.key_padding([3, 8]), fm.key_padding([3, 8])
    del first
    gc.collect()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, X, X, second), dense(keys(torch.tensor([3, 8]))))


def test_lists_as_data_are_moved_to_the_device() -> None:
    mask = fm.causal() & fm.document(lengths=[3, 21]) & fm.key_padding([24, 20])
    assert torch.equal(mask.lifted.dense(LENGTH), mask.dense(LENGTH))
    assert mask.lifted.rows(LENGTH, device="meta").upper.lo.is_meta
    assert fm.causal().lifted is fm.key_padding(torch.tensor([3])).lifted is None


@pytest.mark.slow
def test_a_graph_that_begins_with_a_transform() -> None:
    """In a process that has lowered no mask in compiled code."""
    code = """
import torch
from flexmask import attention, document
x, ids = torch.randn(3, 2, 2, 8, 8), torch.arange(8) // 3
run = lambda x, ids: torch.func.vmap(lambda x: attention(x, x, x, document(ids)))(x)
print(torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x, ids), run(x, ids)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "True\n", found.stderr


@pytest.mark.slow
def test_lists_that_are_no_data_are_a_part_of_the_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda n: attention(X, X, X, fm.masks.neighborhood(n, [1, 1])), fullgraph=True, backend=counter)
    for canvas in ([4, 6], [6, 4], [3, 8]):
        torch.testing.assert_close(compiled(canvas), dense(q_ == kv_))
    assert counter.frame_count == 3


PLAN = fm.plan("key_padding(n)", LENGTH)
ERRORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a text": (lambda n: "causl", "causl is not a named mask. Did you mean causal"),
    "an argument": (lambda n: fm.key_padding(lengthz=n), "unexpected keyword argument 'lengthz'. Did you mean lengths"),  # type: ignore[call-arg]
    "a dtype": (lambda n: fm.key_padding(n.float()), "key_padding: lengths must hold integers"),
    "a batch": (lambda n: fm.key_padding(n.expand(3, 2)[:, 0]), r"two sizes of batch: 2 by the query \(batch=2\) and 3 by"),
    "an unbound parameter": (lambda n: "key_padding(n)", "unbound parameters: give them with mask.bind"),
    "a mask_mod": (lambda n: lambda b, h, q, kv: kv < n[b], "the mask of a mask_mod cannot be made in code that torch.compile"),
    "a plan": (lambda n: fm.plan("causal", LENGTH)(), "a plan cannot be made in code that torch.compile traces"),
    "a lowering": (lambda n: fm.causal().block_mask(LENGTH), "where only flexmask's attention and modules take it"),
    "an index": (lambda n: kv < n, "an index expression is compared with|wanted an index expression or an integer, got Tensor"),  # type: ignore[operator]
    "parentheses": (lambda n: kv <= q & kv < 3, "comparisons bind less tightly than &"),
    "a division": (lambda n: kv / 2 < q, "/ does not give an integer"),
    "a truth value": (lambda n: fm.full() if kv else fm.causal(), "is an index expression, not a truth value"),
    "a chained comparison": (lambda n: 0 <= q - kv < 3, "has no single truth value"),
    "axes": (lambda n: fm.table(n)[fm.b, q] < kv, r"has 1 axis \[2\] but is looked up with 2 indices.*write \[q\]"),
    "no data": (lambda n: fm.table(n[:0])[fm.b] < kv, "holds no values; attention takes it for an empty batch"),
    "a name of a plan": (lambda n: PLAN(m=n), r"key_padding\(lengths=n\) has no parameter m; its parameters are n"),
    "an object": (lambda n: fm.key_padding({1, 2}), "made of tensors, numbers, lists, texts and masks, got "),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_library(name: str) -> None:
    torch._dynamo.reset()
    make, message = ERRORS[name]
    compiled = torch.compile(lambda n: attention(X, X, X, make(n)), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(torch.tensor([3, 4]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", *exhaustive(["aot_eager"])])
def test_masks_that_are_not_kept(backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda query, mask: fm.attention(query, query, query, mask), backend=backend, fullgraph=True)
    query = torch.randn(1, 2, 6, 8)
    for start in (3, 2, 5):
        mask = fm.causal() & fm.document(cu_seqlens=torch.tensor([0, start, 6]))
        found = compiled(query, mask)
        del mask
        gc.collect()
        document = torch.arange(6) >= start
        visible = torch.ones(6, 6, dtype=torch.bool).tril() & (document[:, None] == document)
        torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(query, query, query, visible))


def test_a_mask_that_leaves_its_graph() -> None:
    torch._dynamo.reset()
    made = torch.compile(lambda n: fm.causal() & fm.key_padding(n), fullgraph=True, backend="eager")(n := torch.tensor([20, 3]))
    assert isinstance(made, Mask)
    mask = fm.causal() & fm.key_padding(n)
    assert made == mask != WINDOW
    assert hash(made) == hash(mask)
    for found in (made, made & fm.full(), fm.per_head([made]), made - fm.empty(), ~~made):
        assert torch.equal(found.dense(LENGTH).cpu(), CAUSAL & keys(n))
    assert torch.equal(made.block_mask(LENGTH).to_dense(), mask.block_mask(LENGTH).to_dense())
    torch.testing.assert_close(attention(X, X, X, made), dense(CAUSAL & keys(n)))
    torch.testing.assert_close(attention(X, X, X, fm.plan(made, LENGTH)()), dense(CAUSAL & keys(n)))
    layer, x = fm.MultiheadFlexAttention(8, 8, 2, mask=made), torch.randn(2, LENGTH, 8)
    torch.testing.assert_close(layer(x, cache=fm.KVCache(LENGTH)), layer(x, mask))


@pytest.mark.parametrize("mask", [fm.causal(), fm.key_padding(torch.tensor([20, 3]))], ids=str)
def test_an_offset_below_0(mask: fm.Mask) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda mask: attention(X, X, X, mask, q_offset=-1), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="q_offset must be at least 0, got -1"):
        compiled(mask)


@pytest.fixture
def few_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is kept at first: behind a graph break the compiler follows each one that is, which takes seconds for a thousand."""
    monkeypatch.setattr(form, "MADE", form.Kept(99))


@pytest.mark.usefixtures("few_forms")
def test_a_mask_made_before_and_after_a_graph_break() -> None:
    torch._dynamo.reset()
    n = torch.tensor([20, 3])
    made = torch.compile(lambda n: (kv <= q) & fm.key_padding(n), backend="eager")(n)
    torch.testing.assert_close(attention(X, X, X, made), dense(CAUSAL & keys(n)))
    made = torch.compile(lambda n: fm.causal() & ~fm.key_padding(n), backend="eager")(n)
    torch.testing.assert_close(attention(X, X, X, made), dense(CAUSAL & ~keys(n)))
    torch.testing.assert_close(attention(X, X, X, pickle.loads(pickle.dumps(made))), dense(CAUSAL & ~keys(n)))


@pytest.mark.slow
@pytest.mark.usefixtures("few_forms")
def test_a_mask_prints_as_outside_of_compiled_code(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()

    def printed(n: Tensor) -> None:
        mask = fm.causal() & fm.key_padding(n)
        print(mask)

    printed(n := torch.tensor([20, 3]))
    torch.compile(printed, backend="eager")(n)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == "causal & key_padding(lengths=<int64[2]>)"


def test_the_brief_text_of_a_mask_in_compiled_code() -> None:
    torch._dynamo.reset()

    def texts(n: Tensor) -> str:
        return ((fm.causal() | fm.parse("kv < 3")) & fm.key_padding(n)).brief()

    text = torch.compile(texts, fullgraph=True, backend="eager")(torch.tensor([20, 3]))
    assert text == "(causal | (kv < 3)) & key_padding(...)"


@pytest.mark.slow
def test_masks_after_a_graph_break_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    torch._dynamo.reset()
    ids = torch.tensor([0, 0, 1, 1])
    made = torch.compile(lambda ids: fm.causal() & ~(fm.table(ids)[q] == fm.table(ids)[kv]), backend="eager")(ids)
    assert torch.equal(made.dense(4)[0, 0], torch.ones(4, 4, dtype=torch.bool).tril() & (ids[:, None] != ids))
    assert [str(warning.message) for warning in recwarn if "lru_cache" in str(warning.message)] == []


def test_every_function_that_makes_a_mask_can_be_deferred() -> None:
    named = {function.__name__ for function in FUNCTIONS.values()}
    assert {"causal", "document", "per_head", "bind", "where", "parse", "_combine", "__invert__"} <= named
