"""`block_sdpa` in compiled code, as an operator, with values that are not finite, and what it refuses."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from flexmask.backends.dropout import hashes_of
from flexmask.errors import LoweringError
from tests.backends.tiled_cases import (
    MASKS,
    block_sdpa,
    causal,
    check_attention,
    inputs,
    intervals,
    lengths,
    middle_rows_only,
    past,
    ragged_noise,
    unchanged,
    window,
)
from tests.support import oracle
from tests.support.exhaustive import one_in


@pytest.fixture
def compiling() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiling")
class TestCompile:
    def test_bounds_that_change_do_not_recompile(self) -> None:
        tensors = inputs(torch.float32, q_len=200, kv_len=200)

        def loss(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
            return block_sdpa(query * 2, key, value, bounds).square().sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for number, mask in enumerate((causal(200, 200), window(200, 200, 9, 0), middle_rows_only(200))):
            bounds = intervals(mask)
            with torch.compiler.set_stance("fail_on_recompile") if number else contextlib.nullcontext():
                grads = torch.autograd.grad(compiled(*tensors, bounds), tensors)
            for actual, wanted in zip(grads, torch.autograd.grad(loss(*tensors, bounds), tensors), strict=True):
                assert torch.equal(actual, wanted)

    def test_lengths_that_change(self) -> None:
        compiled = torch.compile(block_sdpa, fullgraph=True, backend="aot_eager", dynamic=True)
        for number, length in enumerate((150, 70, 200)):
            tensors = inputs(torch.float32, q_len=length, kv_len=length)
            mask = causal(length, length)
            with torch.compiler.set_stance("fail_on_recompile") if number else contextlib.nullcontext():
                check_attention(partial(compiled, bounds=intervals(mask)), tensors, mask)


class TestOperator:
    @pytest.mark.parametrize(("dropout_p", "with_cells", "transposed"), one_in(2, [0.0, 0.5], [False, True], [False, True]))
    def test_opcheck(self, with_cells: bool, transposed: bool, dropout_p: float) -> None:
        query, key, value = inputs(q_len=20, kv_len=20, value_dim=5)
        if transposed:
            query, key, value = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
        cells = ragged_noise(0.5, 1, 1, 20, 20) if with_cells else None
        bounds = intervals(causal(20, 20))
        sizes = *query.shape[:3], key.shape[2]
        hashes = hashes_of(torch.tensor(3), *map(torch.arange, sizes)) if dropout_p else (None, None)
        arguments = (query, key, value, bounds, cells, 0.5, dropout_p, *hashes, False, None, None, False)
        checks = torch.library.opcheck(torch.ops.flexmask.block_sdpa.default, arguments)
        assert set(checks.values()) == {"SUCCESS"}

    def test_opcheck_backward(self) -> None:
        query, key, value = (tensor.detach() for tensor in inputs(q_len=20, kv_len=20))
        bounds = intervals(causal(20, 20))
        outputs = torch.ops.flexmask.block_sdpa(query, key, value, bounds, None, 0.5, 0.0, None, None, False, None, None, False)
        arguments = (query, None, *outputs, query, key, value, bounds, None, 0.5, 0.0, None, None, False, None, None, False)
        operator = torch.ops.flexmask.block_sdpa_backward.default
        checks = torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checks.values()) == {"SUCCESS"}

    @pytest.mark.parametrize("cells", [None, past], ids=["operator", "callable"])
    def test_gradcheck(self, cells: Callable[..., Tensor] | None, small_tiles: None) -> None:
        """Derivatives of both modes and of second order, against differences, in tiles of several runs."""
        tensors = inputs(batch=1, heads=2, key_heads=1, q_len=18, kv_len=20, dim=1, value_dim=1)
        bounds = intervals(window(18, 20, 3, 1) | (torch.arange(20) == 17))
        attend = partial(block_sdpa, bounds=bounds, cells=cells, scale=0.7)
        torch.autograd.gradcheck(attend, tensors, check_forward_ad=True)
        torch.autograd.gradgradcheck(attend, tensors, check_fwd_over_rev=True, fast_mode=True)


BROKEN = (math.nan, math.inf, -math.inf)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of each row to only the keys that it attends to, in float64, without products of weight 0."""
    group = query.size(1) // key.size(1)
    rows = []
    for b, h, i in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        seen = mask[b if mask.size(0) > 1 else 0, h if mask.size(1) > 1 else 0, i]
        k, v = (tensor[b, h // group][seen].double() for tensor in (key, value))
        scores = k @ query[b, h, i].double() / math.sqrt(query.size(3))
        weights = torch.softmax(scores, 0)
        used = (weights != 0) & ~torch.all(scores == -math.inf)
        rows.append(weights[used] @ v[used])
    return torch.stack(rows).view(*query.shape[:3], value.size(3))


HASHES = hashes_of(torch.tensor(1), *map(torch.arange, (2, 4, 50, 50)))


class TestNonfiniteValues:
    """NaN and inf in keys and values reach the rows that attend to them, and no other."""

    ATTENDS: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {  # noqa: RUF012
        "rows": lambda mask: partial(block_sdpa, bounds=intervals(mask)),
        "cells": lambda mask: partial(block_sdpa, bounds=intervals(mask | causal(50, 50)), cells=mask.expand(2, 4, 50, 50)),
        "callable": lambda mask: partial(
            block_sdpa,
            bounds=intervals(torch.ones(1, 1, 1, 50, dtype=torch.bool)),
            cells=lambda b, h, q_idx, kv_idx: mask.expand(2, 4, 50, 50)[b, h, q_idx, kv_idx],
        ),
        "score_mod": lambda mask: partial(block_sdpa, bounds=intervals(mask), score_mod=unchanged),
        "dropout": lambda mask: partial(block_sdpa, bounds=intervals(mask), dropout_p=1e-9, hashes=HASHES),
    }

    @pytest.mark.parametrize(
        ("name", "how", "where"),
        one_in(
            3,
            ["window", "documents of two lengths", "per head and batch", "rows alike, per batch", "few cells"],
            ATTENDS,
            ["keys", "values", "both"],
        ),
    )
    def test_only_rows_that_attend_to_them(self, name: str, how: str, where: str, small_tiles: None) -> None:
        mask = MASKS[name]()
        mask = mask.expand(-1, -1, 50, -1)
        query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
        for tensor, kind in ((key, "keys"), (value, "values")):
            if where in (kind, "both"):
                for number, broken in enumerate(BROKEN):
                    tensor[number % 2, number % 2, [7 + number, 33 - number, 49], number] = broken
        wanted = row_by_row(query, key, value, mask)
        tensors = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
        out = self.ATTENDS[how](mask)(*tensors)
        torch.testing.assert_close(out.double(), wanted, equal_nan=True, rtol=1e-5, atol=1e-5)
        self.check_gradients(out, tensors, mask)

    @staticmethod
    def check_gradients(out: Tensor, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> None:
        """Of a loss of the rows that attend to no NaN or inf, those that no other row has a part in."""
        _, key, value = tensors
        broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1)).repeat_interleave(2, 1)
        touched = (mask & broken.unsqueeze(2)).any(-1)
        assert touched.any()
        weight = torch.randn_like(out).masked_fill(touched.unsqueeze(-1), 0)
        grads = torch.autograd.grad(out, tensors, weight)
        q, k, v = (tensor.detach().nan_to_num(0, 0, 0).double().requires_grad_() for tensor in tensors)
        wanted = torch.autograd.grad(oracle.attention(q, k, v, mask & ~touched.unsqueeze(-1)), (q, k, v), weight.double())
        apart = ~(mask & touched.unsqueeze(-1)).any(2).unflatten(1, (2, 2)).any(2)  # keys that no touched row sees
        for found, other, clean in zip(grads, wanted, (~touched, apart, apart), strict=True):
            torch.testing.assert_close(found[clean].double(), other[clean], rtol=1e-4, atol=1e-5)

    def test_padding_of_nothing_but_nan(self) -> None:
        mask = lengths(300, 300, 170) & causal(300, 300)
        query, key, value = (tensor.detach() for tensor in inputs(torch.float32, q_len=300, kv_len=300))
        whole = block_sdpa(query, key, value, intervals(mask))
        key[1, :, 170:], value[1, :, 170:] = math.nan, math.inf
        tensors = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
        out = block_sdpa(*tensors, intervals(mask))
        torch.testing.assert_close(out, whole)
        grads = torch.autograd.grad(out.square().sum(), tensors)
        assert all(grad.isfinite().all() for grad in grads)

    @pytest.mark.parametrize("length", [16, 300])
    def test_gradients_of_fully_masked_rows_count_as_0(self, length: int) -> None:
        mask = causal(length, length)
        mask[..., -3:, :] = False
        tensors = inputs(torch.float32, q_len=length, kv_len=length, key_heads=4)
        out = block_sdpa(*tensors, intervals(mask))
        weight = torch.randn_like(out)
        weight[:, :, -3:] = 0
        wanted = torch.autograd.grad(out, tensors, weight, retain_graph=True)
        weight[:, :, -3:] = math.nan
        for found, other in zip(torch.autograd.grad(out, tensors, weight), wanted, strict=True):
            torch.testing.assert_close(found, other)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("masked", [[0], [3, 7], [*range(16)]])
    def test_fully_masked_rows_in_one_call(self, masked: list[int], dtype: torch.dtype) -> None:
        """They are 0 with gradients of 0, also where all other rows attend to all keys, and where a query of theirs is NaN."""
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
        mask[:, :, masked] = False
        query, key, value = (torch.randn(2, 2, 16, 8, dtype=dtype) for _ in range(3))
        wanted = oracle.attention(query, key, value, mask).to(dtype)
        for broken in (False, True):
            if broken:
                query[1, :, masked[0]] = math.nan
            q, k, v = (tensor.clone().requires_grad_() for tensor in (query, key, value))
            out = block_sdpa(q, k, v, intervals(mask))
            torch.testing.assert_close(out, wanted)
            assert not out[:, :, masked].any()
            of_query, of_key, of_value = torch.autograd.grad(out.square().sum(), (q, k, v))
            assert not of_query[:, :, masked].any()
            assert of_key[0].isfinite().all()  # those of the sequence with NaN are NaN, as documented
            assert of_value.isfinite().all()

    @pytest.mark.parametrize("number", BROKEN)
    @pytest.mark.parametrize("where", ["key", "value"])
    def test_one_call_of_all_cells(self, where: str, number: float) -> None:
        """A masked-out key of -inf, with the score -inf, leaves the output of torch's kernel as it is, but not its gradient."""
        query, key, value = (torch.rand(1, 2, 16, 8) + 0.1 for _ in range(3))
        mask = window(16, 16, 2, 0)
        clean = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        {"key": key, "value": value}[where][:, :, 12] = number
        tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
        rows = torch.tensor([*range(12), 15])  # which do not attend to the key
        attend: Callable[..., Tensor] = partial(block_sdpa, bounds=intervals(mask))
        wanted, out = (attend(*every)[:, :, rows] for every in (clean, tensors))
        torch.testing.assert_close(out, wanted)
        grads, of_clean = torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(wanted.sum(), clean)
        for found, other in zip(grads, of_clean, strict=True):
            torch.testing.assert_close(found[:, :, :10], other[:, :, :10])
            assert found[:, :, 15].isfinite().all()


@pytest.mark.parametrize("ends", [(0, 51), (-1, 5)])
def test_intervals_outside_the_keys(ends: tuple[int, int]) -> None:
    with pytest.raises(LoweringError, match=r"outside 0..50; wanted 0 <= lo and hi <= 50 keys"):
        block_sdpa(*inputs(), torch.tensor([[[[ends]]]]))
