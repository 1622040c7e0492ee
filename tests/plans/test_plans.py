"""Plans: the same mask as lowered eagerly, for other data than a graph was captured with, and one graph in compiled models."""

from __future__ import annotations

import io
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import flexmask as fm
from flexmask import Mask, _sync, attention, kv, q
from flexmask.errors import ExpressionError, LoweringError, OperandError, TraceError
from flexmask.expr import document_ids
from flexmask.plans import LoweredMask
from flexmask.plans.capture import GRAPHS
from tests.lowering.test_host_syncs import MASKS
from tests.support import oracle
from tests.support.block_lists import check_lists
from tests.support.exhaustive import exhaustive, one_in, slow
from tests.support.flex import without_kernels

LENGTH = 300


def check_equal(lowered: LoweredMask, mask: Mask, q_len: int, kv_len: int | None = None, **sizes: Any) -> None:
    """A plan against the eager lowering, list by list, and against the dense mask."""
    torch.testing.assert_close(lowered.dense(), mask.dense(q_len, kv_len, **sizes).expand(lowered.shape), rtol=0, atol=0)
    check_lists(lowered.block_mask, mask.block_mask(q_len, kv_len, **sizes))


@pytest.mark.parametrize("name", one_in(5, MASKS))
def test_each_named_mask(name: str) -> None:
    mask = MASKS[name](512, "cpu")
    check_equal(fm.plan(mask, 512)(), mask, 512)


def test_blocks_of_one_visible_cell() -> None:
    lowered = fm.plan("(q * kv == 35) & (q > 1)", 40, block_size=8)()
    assert lowered.cells is not None
    blocks = lowered.dense().view(1, 1, 5, 8, 5, 8).any(-1).any(3)
    assert blocks.sum() == 2
    assert torch.equal(lowered.block_mask.to_dense().bool(), blocks)


def documents(*lengths: int) -> Tensor:
    return torch.tensor([[0, *torch.tensor(lengths).cumsum(0).tolist()]])


TEXT = "causal & document(cu_seqlens=cu) & key_padding(lengths)"

DATA = [(documents(100, 120, 80), 300), (documents(1, 298, 1), 7), (documents(300, 0, 0), 0)]


def check_other_data(plan: fm.Plan) -> None:
    """For other data than it was captured with."""
    before = GRAPHS.captures
    for cu, length in DATA:
        lengths = torch.tensor([length])
        check_equal(plan(cu=cu, lengths=lengths), fm.parse(TEXT).bind(cu=cu, lengths=lengths), LENGTH)
    assert GRAPHS.captures <= before + 1


def test_other_data_than_it_was_captured_with() -> None:
    check_other_data(fm.plan(TEXT, LENGTH, batch=1))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_compiled_plan_takes_other_data_and_checks_its_values() -> None:
    """In one test, since it takes seconds to compile."""
    plan = fm.plan(TEXT, LENGTH, batch=1, compile=True)
    check_other_data(plan)
    for cu, length, message in WRONG.values():
        with pytest.raises(LoweringError, match=message):
            plan(cu=cu, lengths=torch.tensor([length]))


def test_the_method_of_a_mask() -> None:
    mask = fm.causal() & fm.key_padding(fm.param("lengths"))
    plan = mask.plan(5, 9, batch=2, block_size=(4, 2))
    assert plan.setting == fm.plan(mask, 5, 9, batch=2, block_size=(4, 2)).setting
    assert torch.equal(plan(lengths=[9, 3]).dense(), mask.bind(lengths=[9, 3]).dense(5, 9))


@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1, -1], [5, 5, 2, 9, 9, -1], [3, 3, 3, 3, 3, 3], [-1, -1, 4, 4, 1, 1]])
def test_contiguous_documents(ids: list[int]) -> None:
    table = torch.tensor([ids])
    plan = fm.plan("causal & document(ids, contiguous=True)", 6)
    lowered = plan(ids=table)
    assert lowered.cells is None
    check_equal(lowered, fm.causal() & fm.document(table), 6)


@pytest.mark.parametrize(
    ("stops", "lengths"), one_in(3, [[0, 2, 5], [[0, 2, 5], [0, 0, 3]], [[0, 1, 2], [0, 6, 6]]], [(6, 6), (4, 9), (9, 4)])
)
def test_keys_behind_the_last_document(stops: Any, lengths: tuple[int, int]) -> None:
    (q_len, kv_len), cu_seqlens = lengths, torch.tensor(stops)
    in_context = fm.masks.in_context(cu_seqlens=cu_seqlens, padding=True, test_start=torch.tensor([1, 3]))
    ids = document_ids(cu_seqlens=cu_seqlens, padding=True)
    hidden = fm.causal() & ~((ids[kv] if cu_seqlens.dim() == 1 else ids[fm.b, kv]) >= 0)
    total = cu_seqlens.view(-1, 3)[:, -1:].expand(2, 1)
    for mask, wanted in ((in_context, None), (hidden, (torch.arange(kv_len) >= total).view(2, 1, 1, kv_len))):
        lowered = fm.plan(mask, q_len, kv_len, batch=2)()
        assert lowered.cells is None
        assert torch.equal(lowered.dense(), mask.dense(q_len, kv_len, batch=2).expand(lowered.shape))
        if wanted is not None:
            causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
            assert torch.equal(lowered.dense(), wanted & causal)


def test_documents_that_are_not_contiguous() -> None:
    ids = torch.tensor([0, 1, 0])
    with pytest.raises(LoweringError, match="one run of equal ids"):
        fm.document(ids, contiguous=True).dense(3)
    with pytest.raises(LoweringError, match="one run of equal ids"):
        fm.plan("document(ids, contiguous=True)", 3)(ids=ids)


@pytest.mark.exhaustive
def test_documents_that_are_not_contiguous_in_a_compiled_plan() -> None:
    with pytest.raises(LoweringError, match="one run of equal ids"):
        fm.plan("document(ids, contiguous=True)", 3, compile=True)(ids=torch.tensor([0, 1, 0]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"lengths": [6]}, "promise of ids alone"),
        ({"ids": [0, 1], "kv_ids": [0, 1, 1]}, "promise of ids alone"),
    ],
)
def test_contiguous_goes_with_ids(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        fm.document(contiguous=True, **given)
    with pytest.raises(OperandError, match="contiguous must be True or False"):
        fm.document([0, 1], contiguous=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [3, torch.tensor([3, 9]), torch.tensor([0])])
def test_offsets(offset: int | Tensor) -> None:
    mask = fm.causal() & fm.sliding_window(left=4, right=0)
    lowered = fm.plan(mask, 2, 16, batch=2)(q_offset=offset)
    check_equal(lowered, mask, 2, 16, batch=2, q_offset=offset)


WRONG = {
    "documents that end too early": (documents(100, 100), 300, "cu_seqlens cover 200 of 300 tokens"),
    "documents that end too late": (documents(100, 201), 300, "cu_seqlens cover 301 tokens, but there are 300 positions"),
    "offsets that decrease": (
        torch.tensor([[0, 200, 100, 300]]),
        300,
        r"start with 0 and not decrease, got \[\[0, 200, 100, 300\]\]",
    ),
    "a length beyond the keys": (documents(100, 200), 301, "at most kv_len = 300, got 301"),
    "a length below 0": (documents(100, 200), -1, "at least 0, got -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_are_checked_on_the_cpu(name: str) -> None:
    cu, length, message = WRONG[name]
    with pytest.raises(LoweringError, match=message):
        fm.plan(TEXT, LENGTH, batch=1)(cu=cu, lengths=torch.tensor([length]))


def attend(length: int, **options: Any) -> Tensor:
    x = torch.zeros(1, 1, length, 4)
    out: Tensor = attention(x, x, x, **{"mask": fm.plan("causal", 9)(), **options})
    return out


IDS: Any = fm.param("ids")
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (lambda: fm.plan(TEXT, 9)(cu=documents(9)), ExpressionError, "not given: call the plan with lengths="),
    "unknown": (lambda: fm.plan("causal", 9)(ids=documents(9)), ExpressionError, "has no parameter ids; it has no parameters"),
    "name": (lambda: fm.plan("key_padding(q_offset)", 9), ExpressionError, "parameter q_offset, which a plan takes itself"),
    "length": (lambda: fm.plan("causal", 0), LoweringError, "q_len must be at least 1"),
    "batch": (lambda: fm.plan("causal", 9, batch="2"), OperandError, "batch must be an integer"),  # type: ignore[arg-type]
    "compile": (lambda: fm.plan("causal", 9, compile=1), OperandError, "compile must be True or False"),  # type: ignore[arg-type]
    "data": (lambda: fm.plan("key_padding(lengths)", 9)(lengths=[1.5]), OperandError, "lengths must hold"),
    "device": (
        lambda: fm.plan("key_padding(lengths)", 9, device="cpu")(lengths=torch.zeros(2, dtype=torch.long, device="meta")),
        LoweringError,
        "lengths is on meta, the plan on cpu",
    ),
    "cells": (lambda: fm.plan("(q * kv) % 3 == 0", 2**14)(), LoweringError, "not separable in q and kv, so a plan evaluates all"),
    "documents": (
        lambda: fm.plan("causal & document(ids)", 2**14)(ids=torch.zeros(2**14, dtype=torch.long)),
        LoweringError,
        r"so a plan evaluates all .* write document\(ids, contiguous=True\), or give its lengths= or cu_seqlens=",
    ),
    "documents and cells": (
        lambda: fm.plan("document(ids) & (kv % 2 == q % 3)", 2**14)(ids=torch.zeros(2**14, dtype=torch.long)),
        LoweringError,
        r"write document\(ids, contiguous=True\)",
    ),
    "other data": (
        lambda: fm.plan("((q * kv) % 3 == 0) & (kinds[kv] == 1)", 2**14)(kinds=torch.zeros(2**14, dtype=torch.long)),
        LoweringError,
        r"so a plan evaluates all .* at most \d+ are possible. Call mask.block_mask\(\) at each step instead",
    ),
    "overflow": (lambda: fm.plan("kv * 4611686018427387904 <= n[b]", 9)(n=[1, 2]), LoweringError, "beyond 64-bit integers"),
    "no name": (
        lambda: fm.plan("document(ids)", 9)(documents(9)),  # type: ignore[arg-type]
        OperandError,
        "a plan takes its data by name; call the plan with ids=",
    ),
    "a smaller batch": (
        lambda: fm.plan("document(ids)", 9, batch=2)(ids=torch.zeros(1, 9, dtype=torch.long)),
        LoweringError,
        "the plan is for batch=2, but the data is for batch=1; a plan made without batch= takes that of its data",
    ),
    "mask_mod": (
        lambda: cast(Any, fm.plan)(lambda b, h, q, kv: IDS[q] == IDS[kv], 9),
        TraceError,
        r"parameter ids is looked up by tensors, as in a mask_mod, which has no parameters.*ids\[flexmask.b, flexmask.q\]",
    ),
    "sizes": (
        lambda: attend(8),
        LoweringError,
        r"LoweredMask is for \[B, H, q_len, kv_len\] = \[1, 1, 9, 9\]",
    ),
    "offset": (
        lambda: attend(9, q_offset=2),
        LoweringError,
        "q_offset does not apply to a LoweredMask",
    ),
    "plan": (lambda: attend(9, mask=fm.plan("causal", 9)), OperandError, "mask is a plan: call it with the mask's data"),
    "plan in a module": (
        lambda: fm.MultiheadFlexAttention(4, 4, 2)(torch.zeros(1, 9, 4), fm.plan("key_padding(n)", 9), n=torch.tensor([3])),
        OperandError,
        r"mask is a plan: call it with the mask's data, as in module\(x, plan\(cu=cu\)\)",
    ),
    "negative offset": (lambda: fm.plan("causal", 9)(q_offset=-1), LoweringError, "q_offset must be at least 0"),
    "index": (lambda: fm.plan("causal", 9)()[1], LoweringError, "has 1 sequences, so there is none at 1"),
    "step": (lambda: fm.plan("causal", 9)()[::-1], OperandError, "a slice of a LoweredMask has integers as its ends and a step"),
    "slice": (lambda: fm.plan("causal", 9)()[0.5:], OperandError, r"a slice of a LoweredMask .* got slice\(0.5, None, None\)"),
    "list": (lambda: list(fm.plan("causal", 9)()), TypeError, "'LoweredMask' object is not iterable"),  # type: ignore[call-overload]
    "keyword": (lambda: plan_of(q_offset=3), OperandError, r"has no argument q_offset: give it to the call of the plan"),
    "torch's keyword": (lambda: plan_of(B=2), OperandError, "plan has no argument B: write batch="),
    "method": (lambda: cast(Any, fm.causal()).plan(9, q_offset=3), OperandError, "plan has no argument q_offset: give it to"),
    "sdpa": (
        lambda: sdpa(torch.zeros(1, 1, 9, 4), fm.plan("causal", 9)()),
        OperandError,
        r"torch's function scaled_dot_product_attention takes tensors, not a LoweredMask.*flexmask.attention.*lowered.dense\(\)",
    ),
    "checkpoint": (
        lambda: torch.compile(
            lambda x, lowered: checkpoint(sdpa, x, lowered, use_reentrant=False), backend="eager", fullgraph=True
        )(torch.zeros(1, 1, 9, 4), fm.plan("causal", 9)()),
        Exception,
        r"write checkpoint\(lambda x: layer\(x, lowered\), x\): it takes no LoweredMask as an argument",
    ),
    "explain": (lambda: fm.explain(cast(Any, fm.plan("causal", 9)()), 9), OperandError, "give the Mask of its plan, plan.mask"),
    "plot": (lambda: fm.plan("causal", 9)().plot(), AttributeError, "has no attribute 'plot'.*plan.mask is the Mask, to draw"),
    "dim": (lambda: fm.plan("causal", 9)().dim(), AttributeError, r"has no attribute 'dim'.*lowered.dense\(\), a tensor"),
}


def sdpa(x: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def plan_of(**options: Any) -> Any:
    return cast(Any, fm.plan)("causal", 9, **options)


def test_a_parameter_may_have_any_other_name() -> None:
    mask = fm.causal() & fm.key_padding(fm.param("self"))
    assert torch.equal(fm.plan(mask, 9)(self=[4]).dense(), mask.bind(self=[4]).dense(9))


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


# ---------------------------------------------------------------- the value


@pytest.fixture(params=["intervals", "cells"])
def lowered(request: pytest.FixtureRequest) -> LoweredMask:
    text = "key_padding(lengths) & causal" + (" & ((q + kv) % 3 != 0)" if request.param == "cells" else "")
    return fm.plan(text, 40)(lengths=[40, 3, 17])


def test_sequences_of_the_batch(lowered: LoweredMask) -> None:
    for index, part in ((1, slice(1, 2)), (-1, slice(2, 3)), (slice(0, 2), slice(0, 2))):
        assert torch.equal(lowered[index].dense(), lowered.dense()[part])
        assert lowered[index].block_mask.kv_indices.shape[0] == len(lowered.dense()[part])
    with pytest.raises(LoweringError, match="leaves none"):
        lowered[3:]


def test_it_is_a_pytree_that_can_be_saved(lowered: LoweredMask) -> None:
    copied = tree_map_only(Tensor, torch.clone, lowered)
    assert isinstance(copied, LoweredMask)
    lowered.block_mask  # noqa: B018  its function is kept, and cannot be saved
    file = io.BytesIO()
    torch.save(lowered, file)
    file.seek(0)
    for other in (copied, torch.load(file), lowered.to("cpu", non_blocking=True)):
        assert torch.equal(other.dense(), lowered.dense())
        assert other.shape == lowered.shape
    assert lowered.to("meta").device.type == "meta"
    with pytest.raises(OperandError, match="takes a torch"):
        lowered.to(torch.float32)  # type: ignore[arg-type]
    assert repr(lowered).startswith("LoweredMask(shape=(3, 1, 40, 40)")


def test_layers_share_the_function_of_a_lowered_mask(lowered: LoweredMask) -> None:
    kept = lowered.block_mask.mask_mod
    assert kept is lowered.block_mask.mask_mod
    with torch.inference_mode():  # whose tensors have no gradients elsewhere
        inference = lowered.block_mask.mask_mod
        assert inference is lowered.block_mask.mask_mod
    assert len({kept, inference, lowered.triton_block_mask.mask_mod}) == 3


def test_a_lowered_mask_of_inference_mode_has_gradients() -> None:
    with torch.inference_mode():
        lowered = fm.plan("causal & (q * kv % 5 != 2)", 8)()
    query = torch.randn(1, 1, 8, 4, requires_grad=True)
    found, wanted = (attention(query, query, query, mask) for mask in (lowered, "causal & (q * kv % 5 != 2)"))
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), query) for out in (found, wanted)))


def test_a_kept_function_is_not_used_for_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)  # a GPU has more functions that copy the ends
    plan = fm.plan("causal & key_padding(n)", 8, batch=2)
    lowered, other = (plan(n=torch.tensor(n)) for n in ([3, 8], [5, 2]))
    at = torch.meshgrid(torch.arange(2), torch.arange(8), torch.arange(8), indexing="ij")

    def cells(mask: LoweredMask) -> Tensor:
        return mask.triton_block_mask.mask_mod(at[0], at[0] * 0, at[1], at[2])

    assert torch.equal(cells(lowered), lowered.dense()[:, 0])
    lowered.bounds.copy_(other.bounds)
    assert torch.equal(cells(lowered), other.dense()[:, 0])


def test_no_function_is_kept_that_serves_there_alone(lowered: LoweredMask) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = lowered.triton_block_mask.mask_mod
    transformed = []

    def transform(x: Tensor) -> Tensor:
        transformed.append(lowered.triton_block_mask.mask_mod)
        return x

    torch.func.grad(transform)(torch.tensor(1.0))
    assert lowered.triton_block_mask.mask_mod not in (fake, *transformed)


@pytest.mark.slow
def test_a_compiled_plan_of_tensors_without_values() -> None:
    plan, lengths = fm.plan("causal & key_padding(n)", 24, device="cpu", compile=True), torch.tensor([20])
    wanted = plan(n=lengths)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = plan(n=mode.from_tensor(lengths))
    assert isinstance(found.bounds, FakeTensor)
    assert found.bounds.shape == wanted.bounds.shape


def test_a_plan_is_printed_as_it_is_made() -> None:
    plan = fm.plan("causal", 9, batch=2)
    written = "plan('causal', q_len=9, kv_len=9, batch=2, block_size=(128, 128), device={}, compile=False)"
    assert repr(plan) == written.format(None)
    assert eval(repr(plan), {"plan": fm.plan}).setting == plan.setting
    assert repr(fm.plan("causal", 9, batch=2, device="cpu")) == written.format("'cpu'")


@pytest.mark.parametrize("compiled", [False, *slow([True])])
def test_a_plan_is_where_its_data_is(compiled: bool) -> None:
    there = torch.zeros(2, dtype=torch.long, device="meta")
    plan = fm.plan("causal & key_padding(lengths) & document(cu_seqlens=cu)", 9)

    def device_of(**data: Any) -> torch.device:
        return plan(**data).block_mask.kv_indices.device

    run = torch.compile(device_of, fullgraph=True, backend="eager") if compiled else device_of
    assert run(lengths=there, cu=torch.zeros(2, 2, dtype=torch.long, device="meta")).type == "meta"
    assert run(lengths=torch.tensor([3, 9]), cu=torch.tensor([[0, 9], [0, 9]])).type == "cpu"
    with pytest.raises(LoweringError, match="cu is on cpu, the plan on meta"):
        plan(lengths=there, cu=torch.tensor([[0, 9], [0, 9]]))
    assert fm.plan("causal", 9)(q_offset=torch.zeros(1, dtype=torch.long, device="meta")).device.type == "meta"
    assert fm.plan("causal & key_padding(lengths)", 9)(lengths=[3, 9]).device.type == "cpu"


@pytest.mark.parametrize("of_keys", ["(kv % 7 != 3)", "(kv % 5 != 0)", "(kv % 7 != 3) & (kv <= q)"])
def test_keys_of_more_intervals_than_are_listed(of_keys: str) -> None:
    """The parts that depend on the query have at most 64 intervals, all parts together have more."""
    rows, keys = torch.arange(300)[:, None], torch.arange(300)
    wanted = (keys % 5 != rows % 5) & ((keys % 5 != 0) if "% 5" in of_keys else (keys % 7 != 3))
    if "<=" in of_keys:
        wanted &= keys <= rows
    lowered = fm.plan(f"(kv % 5 != q % 5) & {of_keys}", 300)()
    assert torch.equal(lowered.dense()[0, 0], wanted)
    blocks = F.pad(wanted, (0, 84, 0, 84)).view(3, 128, 3, 128).any(3).any(1)
    assert torch.equal(lowered.block_mask.to_dense()[0, 0].bool(), blocks)


def test_rows_of_more_intervals_than_are_listed() -> None:
    """The complement of 64 intervals has 65, which are bounded."""
    mask = ~((kv % 4 == 0) & (kv < 256) & (q >= 0))
    lowered = mask.plan(260)()
    assert torch.equal(lowered.dense(), mask.dense(260))
    check_lists(lowered.block_mask, mask.block_mask(260))


@pytest.mark.parametrize(
    ("lowered", "backend"),
    [*product(["intervals", "cells"], ["sdpa", "flex"]), *exhaustive(product(["intervals", "cells"], ["flex, with kernels"]))],
    indirect=["lowered"],
)
def test_attention(lowered: LoweredMask, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "flex":
        without_kernels(monkeypatch)
    query, key, value = torch.randn(3, 3, 2, 40, 16)
    visible = lowered.dense()
    wanted = oracle.attention(query, key, value, visible)
    torch.testing.assert_close(attention(query, key, value, lowered, backend=backend.split(",")[0]), wanted.float())


def test_distances_are_data() -> None:
    plan = fm.plan("causal & sliding_window(left=w, right=0) | sink_window(2, size=s)", 12)
    rows, keys = torch.arange(12)[:, None], torch.arange(12)
    before = GRAPHS.captures
    for w, s in ((2, 1), (5, 3), (0, torch.tensor(4))):
        window, sinks = (keys <= rows) & (rows - keys <= w), (keys <= rows) & ((rows - keys < s) | (keys < 2))
        assert torch.equal(plan(w=w, s=s).dense()[0, 0], window | sinks)
    assert GRAPHS.captures == before + 1
    for w, s, message in ((-1, 3, "left must be at least 0"), (1, 0, "size must be at least 1")):
        with pytest.raises(LoweringError, match=message):
            plan(w=w, s=s)
    with pytest.raises(OperandError, match="left must be a number of tokens or None, got <w: int64"):
        plan(w=[1, 2], s=1)


def test_queries_behind_the_data() -> None:
    padded = fm.plan("document(lengths=n, padding=True) & (q * kv % 3 == 0)", 4, 10)
    with pytest.raises(LoweringError, match="data ends before the queries do, at q_offset"):
        padded(n=torch.tensor([4, 3]), q_offset=7)
    for text in ("document(ids)", "document(ids, contiguous=True)"):
        with pytest.raises(LoweringError, match=r"has 8 values along q, but the queries reach position 10 \(q_offset"):
            fm.plan(text, 4, 8)(ids=torch.zeros(1, 8, dtype=torch.int64), q_offset=6)


# ---------------------------------------------------------------- torch.compile


class Decoder(nn.Module):
    """Two layers on packed tokens, whose mask is made in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        mask = "causal & document(cu_seqlens=cu)" if way == "parameter" else None
        self.layers = nn.ModuleList(fm.MultiheadFlexAttention(16, 16, 2, mask=mask) for _ in range(2))
        self.plan = fm.plan("causal & document(cu_seqlens=cu)", 48, batch=2)

    def forward(self, x: Tensor, mask: Any, cu: Tensor) -> Tensor:
        if self.way == "plan inside":
            mask = self.plan(cu=cu)
        for layer in self.layers:
            x = x + (layer(x, cu=cu) if self.way == "parameter" else layer(x, mask))
        return x


WAYS = ["mask", "parameter", "plan inside", "plan outside", "cells"]


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        *slow([("parameter", "aot_eager")]),
        *exhaustive([("cells", "aot_eager")]),  # as in test_model of tests/backends/test_compile.py
        *exhaustive((way, "inductor") for way in WAYS),
    ],
)
def test_a_compiled_model_has_one_graph(way: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder(way)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for number in range(3):
        cu = torch.tensor([[0, 5 + number, 30, 48], [0, 20, 47 - number, 48]])
        ids = torch.bucketize(torch.arange(48), cu[0, 1:-1], right=True).expand(2, -1)
        masks: dict[str, Any] = {
            "mask": fm.causal() & fm.document(cu_seqlens=cu),
            "plan outside": model.plan(cu=cu),
            "cells": fm.causal() & fm.document(ids.contiguous()),
        }
        x = torch.randn(2, 48, 16)
        found, wanted = (call(x, masks.get(way), cu) for call in (compiled, model))
        torch.testing.assert_close(found, wanted)
        parameters = list(model.parameters())
        for one, other in zip(
            torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters), strict=True
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_another_structure_is_another_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    x = torch.randn(1, 1, 12, 8)
    compiled = torch.compile(lambda mask: attention(x, x, x, mask), fullgraph=True, backend=counter)
    for mask in (fm.causal(), fm.sliding_window(left=2, right=0), fm.sliding_window(left=3, right=0), fm.causal()):
        torch.testing.assert_close(compiled(mask), attention(x, x, x, mask))
    assert counter.frame_count == 3


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["flexmask", "torch"])
def test_a_block_mask_trains_in_a_graph_on_the_cpu(made_by: str) -> None:
    torch._dynamo.reset()
    if made_by == "flexmask":
        block_mask = fm.causal().block_mask(24)
    else:
        block_mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx + kv_idx) % 3 != 0), None, None, 24, 24, "cpu", BLOCK_SIZE=8
        )
    tensors = [torch.randn(2, 2, 24, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda x, y, z: attention(x, y, z, block_mask), fullgraph=True, backend="aot_eager")
    found, wanted = (call(*tensors) for call in (compiled, lambda x, y, z: attention(x, y, z, block_mask)))
    torch.testing.assert_close(found, wanted)
    for one, other in zip(torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(wanted.sum(), tensors), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_offsets_in_a_graph() -> None:
    torch._dynamo.reset()
    plan = fm.plan("causal", 1, 32, batch=2)
    query, key = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 32, 8)

    def attend(offset: Any) -> Tensor:
        return attention(query, key, key, plan(q_offset=offset))

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for offset in (3, 7, torch.tensor([5, 2])):  # a number, the same as a dynamic one, and a tensor are a graph each
        torch.testing.assert_close(compiled(offset), attention(query, key, key, fm.causal(), q_offset=offset))


def test_a_mask_mod_is_read_at_each_call() -> None:
    ids, width = torch.tensor([0, 0, 1, 1]), 4
    q, kv = torch.arange(4)[:, None], torch.arange(4)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[q] == ids[kv]) & (q - kv < width)

    plan = fm.plan(mask_mod, 4)
    assert torch.equal(plan().dense()[0, 0], ids[:, None] == ids)
    ids = torch.tensor([0, 1, 1, 1])
    assert torch.equal(plan().dense()[0, 0], ids[:, None] == ids)
    width = 1
    assert torch.equal(plan().dense()[0, 0], (ids[:, None] == ids) & (q - kv < 1))


#: Masks and data with an index below 0, which torch takes for one from the end of the table.
BELOW: dict[str, tuple[str, dict[str, list[int]]]] = {
    "of a key": ("shift(key_padding(keep=keep), kv=by)", {"keep": [0, 1, 1, 1], "by": [2]}),
    "of a query": ("t[n[q]] == 1", {"t": [1, 0, 1, 1], "n": [0, 1, -2, 1]}),
    "of an order": ("reorder(causal & document(ids), q=p, kv=p)", {"ids": [0, 0, 1, 1], "p": [2, 0, -1, 1]}),
}


@pytest.mark.parametrize("name", BELOW)
@pytest.mark.parametrize("lengths", [(4,), ()])
def test_an_index_below_0_leaves_the_table(name: str, lengths: tuple[int, ...]) -> None:
    text, data = BELOW[name]
    given = {key: torch.tensor(values) for key, values in data.items()}
    with pytest.raises(LoweringError, match=r"the index .* ranges from -\d to \d, but the table has 4 values"):
        fm.plan(text, *lengths)(*([] if lengths else [4]), **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", BELOW)
def test_an_index_below_0_leaves_the_table_in_compiled_code(name: str) -> None:
    torch._dynamo.reset()
    text, data = BELOW[name]
    given = {key: torch.tensor(values) for key, values in data.items()}
    x = torch.randn(1, 1, 4, 8)
    compiled = torch.compile(lambda x, given: attention(x, x, x, fm.parse(text, **given)), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="leaves the table"):
        compiled(x, given)
