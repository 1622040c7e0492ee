"""One compiled kernel serves every mask, and a compiled model every batch."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_leaves

import flexmask as fm
from flexmask import b, kv, q
from flexmask.errors import LoweringError
from tests.support.exhaustive import exhaustive
from tests.support.flex import without_kernels

L = 256

COMPOSITIONS: list[fm.Mask] = [
    fm.causal(),
    fm.full(),
    fm.empty(),
    fm.masks.transpose(fm.causal()),
    fm.sliding_window(size=40),
    fm.sliding_window(left=9, right=9),
    ~fm.sliding_window(left=9, right=9),
    fm.causal() & ((q - kv < 40) | (kv < 4)),
    fm.key_padding([200, 77]),
    fm.causal() & fm.key_padding([200, 77], side="left"),
    fm.query_padding([200, 77]) & fm.key_padding([200, 77]),
    fm.prefix_lm([20, 130]),
    fm.document([0] * 100 + [1] * 100 + [-1] * 56),
    fm.causal() & fm.document(lengths=[[100, 156], [255, 1]]) & fm.key_padding([250, 256]),
    fm.per_document(fm.prefix_lm(10), lengths=[100, 156]),
    fm.causal() | fm.document(lengths=[[100, 156], [255, 1]]),
    fm.masks.shift(fm.causal(), q=5),
    q // 64 == kv // 64,
    (q // 64 >= kv // 64) & (kv != q),
    fm.where(b == 0, fm.causal(), fm.full()),
]


@contextmanager
def one_graph() -> Iterator[None]:
    """Fails where more than one graph is compiled within."""
    torch.compiler.reset()
    counters.clear()
    yield
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


each_backend = pytest.mark.parametrize("backend", ["eager", *exhaustive(["inductor"])])


@pytest.mark.slow
@each_backend
def test_twenty_compositions_take_one_kernel(backend: str) -> None:
    assert len(set(COMPOSITIONS)) == 20
    query, key, value = (torch.randn(2, 2, L, 16) for _ in range(3))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, backend=backend)
    with torch.no_grad(), one_graph():
        compiled(query, key, value, block_mask=COMPOSITIONS[0].block_mask(L, batch=2))
        with torch.compiler.set_stance("fail_on_recompile"):
            for mask in COMPOSITIONS:
                found = compiled(query, key, value, block_mask=mask.block_mask(L, batch=2))
                torch.testing.assert_close(found, fm.attention(query, key, value, mask, backend="sdpa"))


@pytest.mark.slow
@pytest.mark.usefixtures("flex_compiler")
def test_the_library_takes_one_kernel_for_twenty_compositions() -> None:
    query = torch.randn(2, 2, L, 16)
    with torch.no_grad(), one_graph():
        for mask in COMPOSITIONS:
            found = fm.attention(query, query, query, mask, backend="flex")
            torch.testing.assert_close(found, fm.attention(query, query, query, mask, backend="sdpa"))


@pytest.mark.parametrize(
    ("mask", "tensors"),
    [
        (fm.causal(), 0),
        (fm.causal() & fm.masks.chunked(3), 0),
        (fm.causal() & fm.document(lengths=[3, 5]), 1),
        (fm.prefix_lm(3), 1),
        (fm.document(lengths=[3, 5]), 2),
    ],
)
def test_a_gpu_holds_the_ends_of_intervals_that_it_reads(mask: fm.Mask, tensors: int) -> None:
    def held(device: str) -> list[Tensor]:
        cells = [cell.cell_contents for cell in mask.mask_mod(8, device=device).__closure__ or ()]
        return [leaf for leaf in tree_leaves(cells) if isinstance(leaf, Tensor)]

    assert len(held("meta")) == tensors
    assert len(held("cpu")) == 4  # one kernel for both


class Decoder(nn.Module):
    """Two layers with a mask each."""

    def __init__(self, vocabulary: int, width: int, n_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(fm.MultiheadFlexAttention(width, width, n_heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, masks: tuple[BlockMask | fm.Mask, BlockMask | fm.Mask]) -> Tensor:
        x = self.embedding(tokens)
        for mask, layer, norm, mixer in zip(masks, self.layers, self.norms, self.mixers, strict=True):
            x = x + layer(norm(x), mask)
            x = x + mixer(x)
        logits: Tensor = self.head(x)
        return logits


def batches(number: int, sequences: int) -> Iterator[tuple[fm.Mask, fm.Mask]]:
    """The masks of batches with different documents and lengths."""
    draw = random.Random(0)
    for step in range(number):
        cuts = [sorted({0, L, *draw.sample(range(1, L), draw.randint(0, 5))}) for _ in range(sequences)]
        ids = torch.stack([torch.repeat_interleave(torch.tensor(cut).diff()) for cut in cuts])
        lengths = torch.tensor([draw.randint(1, L) for _ in range(sequences)])
        packed = fm.causal() & fm.document(ids) & fm.key_padding(lengths)
        yield packed, (packed & fm.sliding_window(size=draw.randint(1, 60))) if step % 2 else fm.prefix_lm(lengths)


@pytest.mark.slow
@each_backend
def test_a_model_takes_one_graph_for_all_batches(backend: str) -> None:
    model = Decoder(50, 32, 2)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    with torch.no_grad(), one_graph():
        for step, masks in enumerate(batches(8, 3)):
            tokens = torch.randint(0, 50, (3, L))
            lowered = tuple(mask.block_mask(L, batch=3) for mask in masks)
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                torch.testing.assert_close(compiled(tokens, lowered), model(tokens, masks))


def test_kernels_without_end_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setattr("flexmask.backends.flex.MAX_KERNELS", 1)
    torch.compiler.reset()
    with torch.no_grad():
        short, longer = torch.randn(1, 1, 16, 16), torch.randn(1, 1, 32, 16)
        fm.attention(short, short, short, fm.causal(), backend="flex")
        with pytest.raises(LoweringError, match="more than 1 kernels of different shapes"):
            fm.attention(longer, longer, longer, fm.causal(), backend="flex")


@pytest.mark.exhaustive
def test_the_library_needs_no_private_name_of_torch() -> None:
    code = "import torch._dynamo.exc as exc; del exc.FailOnRecompileLimitHit; import flexmask; flexmask.attention"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_check_can_fail() -> None:
    query = torch.randn(1, 1, L, 16)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, backend="eager")
    with torch.no_grad():
        compiled(query, query, query, block_mask=fm.causal().block_mask(L))
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            compiled(query[:, :, 1:], query, query, block_mask=fm.causal().block_mask(L - 1, L))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_other_lengths_compile_once_more_on_cuda() -> None:
    compiled = torch.compile(flex_attention, fullgraph=True)
    torch.compiler.reset()
    counters.clear()
    for length in (512, 640, 1024, 1152, 2048, 2176):
        query = torch.randn(1, 2, length, 64, device="cuda")
        mask = fm.causal() & fm.document(lengths=[length - 100, 100])
        found = compiled(query, query, query, block_mask=mask.block_mask(length, device="cuda"))
        torch.testing.assert_close(found, fm.attention(query, query, query, mask, backend="sdpa"), atol=2e-3, rtol=2e-3)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@each_backend
def test_more_intervals_take_other_kernels(backend: str) -> None:
    """Sizes do not change with the number of intervals: torch's CPU kernels do not compile with a dynamic size."""
    query, key, value = (torch.randn(1, 1, L, 16) for _ in range(3))
    compiled = torch.compile(flex_attention, backend=backend)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        for mask, graphs in ((fm.causal(), 1), (fm.causal() | (kv == 200) | (kv == 100), 2), (kv % 40 == 3, 3), (fm.full(), 3)):
            found = compiled(query, key, value, block_mask=mask.block_mask(L))
            torch.testing.assert_close(found, fm.attention(query, key, value, mask, backend="sdpa"))
            assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_flex_on_the_cpu_is_refused_in_compiled_code() -> None:
    """There torch's kernel reads wrong values for views of one tensor next to what the graph computes."""
    stacked, lowered = torch.randn(3, 1, 2, 20, 16), fm.plan("causal", 20)()

    def attend(mask: Any, backend: str) -> Tensor:
        return fm.attention(stacked[0] * 2, stacked[1] * 2, stacked[2], mask, backend=backend)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    wanted = F.scaled_dot_product_attention(stacked[0] * 2, stacked[1] * 2, stacked[2], is_causal=True)
    for mask in ("causal", lowered.block_mask):
        with pytest.raises(Exception, match=r"FlexAttention on the CPU reads wrong values in code .*; use backend='sdpa'"):
            compiled(mask, "flex")
        torch.testing.assert_close(compiled(mask, "auto"), wanted)
