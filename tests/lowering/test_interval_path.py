"""Torch's selector of its FLASH backend, asked on the CPU: it finds the intervals of each mask that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import flexmask as fm
from flexmask import _sync, q
from flexmask.backends import flex
from tests.support.examples import EXAMPLES, OWN_MASKS
from tests.support.exhaustive import each_run

if torch.__version__ < "2.15":
    pytest.skip("torch packs the intervals of a mask_mod from 2.15 on", allow_module_level=True)

#: Private to torch, so that versions differ in them.
PRIVATE = "torch._inductor.kernel.flex."
cpu, general, flash, packing = (
    cast(Any, import_module(PRIVATE + name))
    for name in ("flex_cpu", "flex_attention", "flex_flash_attention", "interval_mask_packing")
)
pytestmark = pytest.mark.slow

#: Named masks of which no example at 4 x 4 is separable.
CELL_BY_CELL = {"dilated_window", "from_dense", "random_cells"}
WINDOWS = fm.per_head([fm.causal(), fm.sliding_window(left=1, right=1)])
IDS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2, 2, 2]])
#: Masks that vary along other axes than the queries.
OTHERS = {
    "sequences": fm.key_padding([2, 3]),
    "sequences and queries": fm.causal() & fm.document(IDS, contiguous=True),
    "heads": fm.per_head([fm.full(), fm.kv < 3]),
    "heads and queries": WINDOWS,
    "sequences and heads": fm.per_head([fm.full(), fm.empty()]) & fm.key_padding([2, 3]),
    "all axes": WINDOWS & fm.key_padding([2, 3]),
    "4 intervals": ((q == 0) | (fm.kv % 2 == 0)) & fm.key_padding([7, 8]),
}


class Seen(Exception):  # noqa: N818 - it ends a compilation, after which there is nothing to do
    """Inductor would write the kernel now."""


@pytest.fixture
def intervals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int | None]]:
    """The number of intervals that torch finds in the mask of a call that is compiled, or None where it finds none."""
    found = SimpleNamespace(number=None)

    def asked(query: Any, key: Any, value: Any, score: Any, block_mask: Any, *rest: Any) -> None:
        score_buffers, mask_buffers = rest[-2:]
        symbols = flash.CuteDSLAuxScalarBindings(flash.collect_aux_scalar_symbols(score_buffers, mask_buffers)).symbol_codes()
        packed = packing.select_packed_mask_intervals(block_mask[-1].graph_module, mask_buffers, symbols)
        found.number = None if packed is None else len(packed)
        raise Seen

    for module in (cpu, general):
        monkeypatch.setattr(module, "lower_cpu", asked)
    monkeypatch.setattr(flex, "_inference_only", lambda tensor: False)  # as on a GPU, where calls may be in compiled code

    def intervals(call: Callable[[Tensor], Tensor], x: Tensor, *, dynamic: bool | None = None) -> int | None:
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(torch._inductor.exc.InductorError, match="Seen"):
            torch.compile(call, fullgraph=True, dynamic=dynamic)(x)
        number: int | None = found.number
        return number

    yield intervals
    torch._dynamo.reset()


def kind(mask_mod: Callable[..., Tensor]) -> Any:
    """What the code of an interval form depends on: the ends that it computes, its axes and how many intervals it tests."""
    names, cells = mask_mod.__code__.co_freevars, mask_mod.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if "intervals" not in held:
        return None
    ends = [
        tuple(tuple(place.axes if isinstance(place[0], Tensor) else place for place in end) for end in pair)
        for pair in held["intervals"]
    ]
    return (*ends, len(ends))


@pytest.fixture(params=each_run(["cpu", "elsewhere"], "elsewhere"))
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one kernel serves most masks, and where ends are computed, as on a GPU."""
    if request.param == "elsewhere":
        monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)


def attended(mask: BlockMask) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A call of FlexAttention, and its query."""
    batch, heads, q_len, _ = mask.shape
    return lambda x: flex_attention(x, x, x, block_mask=mask), torch.zeros(batch, heads, q_len, 16)


@pytest.mark.usefixtures("_device")
def test_named_masks(intervals: Callable[..., int | None]) -> None:
    kinds: dict[Any, BlockMask] = {}
    for name in OWN_MASKS:
        masks = [getattr(fm.masks, name)(**arguments).block_mask(4) for arguments, _ in EXAMPLES[name]]
        own = {kind(mask.mask_mod): mask for mask in masks if kind(mask.mask_mod)}
        assert bool(own) == (name not in CELL_BY_CELL), name
        kinds |= own
    for mask_kind, mask in kinds.items():
        assert intervals(*attended(mask)) == mask_kind[-1], mask_kind


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("name", OTHERS)
def test_other_axes(name: str, intervals: Callable[..., int | None]) -> None:
    mask = OTHERS[name].block_mask(8)
    assert intervals(*attended(mask)) == kind(mask.mask_mod)[-1]


@pytest.mark.parametrize("name", each_run(["sequences", "all axes", "4 intervals"], "all axes"))
def test_symbolic_sizes(name: str, intervals: Callable[..., int | None]) -> None:
    def attend(x: Tensor) -> Tensor:
        return fm.attention(x, x, x, OTHERS[name], backend="flex", kernel_options={"BACKEND": "FLASH"})

    found = intervals(attend, torch.zeros(2, 2, 8, 16), dynamic=True)
    assert found is not None
