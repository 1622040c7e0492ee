"""Which of FlexAttention's CUDA kernels torch takes for a call, by torch's own choice, which goes by sizes and needs no GPU.

The tile of the kernel for decoding holds the queries of all heads that share a key head. It must divide the block of queries, and
torch does not ask before it takes that kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import sympy  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexmask as fm
from flexmask import _sync
from flexmask.backends import choose_backend, flex
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.names import NAMES
from flexmask.intervals.bind import bind
from flexmask.plans.capture import lower
from flexmask.scores import softcap
from tests.support.examples import EXAMPLES, OWN_MASKS

LENGTHS, GROUPS = range(1, 131), (1, 2, 4, 8, 32)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last call of FlexAttention on CUDA was given, which is not run."""
    given: dict[str, Any] = {}

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        given.clear()
        given.update(options)
        return (query, SimpleNamespace(lse=query[..., 0])) if "return_aux" in options else query

    monkeypatch.setattr(flex, "_inference_only", lambda tensor: False)
    monkeypatch.setattr(flex, "_call", call)
    return given


def decodes(q_len: int, group: int, options: dict[str, Any]) -> bool:
    """Whether torch takes the kernel for decoding."""
    # The code generator takes seconds to import, which the processes that run other tests need not.
    from torch._inductor.kernel.flex.flex_decoding import _use_flex_decoding
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    mask = options["block_mask"]
    shapes = (2, group, q_len, 1), (1, 1, 1, 1) if mask is None else mask.kv_indices.shape, (2, 1, q_len, 1)
    query, indices, value = (SimpleNamespace(get_size=lambda shape=shape: [*map(sympy.Integer, shape)]) for shape in shapes)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        return bool(_use_flex_decoding(query, indices, value, options.get("kernel_options", {}), group > 1))


def check(q_len: int, mask: fm.Mask | BlockMask | None, block: int, options: dict[str, Any], **call: Any) -> None:
    """Asserts that calls decode where, and only where, their rows fit a tile."""
    for group in GROUPS:
        query, key = torch.empty(2, group, q_len, 1), torch.empty(2, 1, q_len, 1)
        fm.attention(query, key, key, mask, enable_gqa=True, backend="flex", **call)
        rows = max(16, 1 << (q_len * group - 1).bit_length())
        fits = q_len < 128 and rows <= 128 and block % rows == 0
        assert decodes(q_len, group, options) == fits, f"{q_len} queries, {group} heads"


def test_grouped_queries_of_every_length(options: dict[str, Any]) -> None:
    for q_len in LENGTHS:
        check(q_len, fm.causal().block_mask(q_len), 128, options)


def test_without_a_mask(options: dict[str, Any]) -> None:
    for q_len in LENGTHS:
        check(q_len, None, 128, options)


@pytest.mark.parametrize("block", [32, 64, 96, 256])
def test_blocks_of_other_sizes(block: int, options: dict[str, Any]) -> None:
    for q_len in (1, 9, 16, 17, 33, 64, 65, 127):
        made = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, q_len, q_len, device="cpu", BLOCK_SIZE=(block, 128))
        check(q_len, made, block, options)


def test_score_mods(options: dict[str, Any]) -> None:
    for q_len in (4, 70):
        check(q_len, fm.causal(), 128, options, score_mod=lambda score, b, h, q, kv: score + q)


def runs(blocks: Tensor) -> bool:
    """Whether the blocks of each row of ``bool[..., n]`` are one after another."""
    return all(
        len(at) == 0 or at == list(range(at[0], at[-1] + 1)) for at in (row.nonzero().flatten().tolist() for row in blocks)
    )


NAMED = {f"{name} {at}": (NAMES[name](**given), 4, 4) for name in OWN_MASKS for at, (given, _) in enumerate(EXAMPLES[name])}
OTHERS = {
    f"{name}, {q_len} x {kv_len}": (mask, q_len, kv_len)
    for q_len, kv_len in ((6, 6), (6, 9), (10, 7), (7, 7))
    for name, mask in {"causal": fm.causal(), "full": fm.full(), "window": fm.sliding_window(size=3)}.items()
}


def test_contiguous_blocks_and_safe_rows(options: dict[str, Any]) -> None:
    """The kernel options are given where each list of the mask is one run and each row sees the first key that is visited."""
    given = set()
    for name, (mask, q_len, kv_len) in (NAMED | OTHERS).items():
        lowered = lower(bind(mask, q_len, kv_len), (2, 2))
        query, key = (torch.empty(*lowered.shape[:2], length, 1) for length in (q_len, kv_len))
        fm.attention(query, key, key, lowered, backend="flex")
        if options["kernel_options"].get("BLOCKS_ARE_CONTIGUOUS"):
            given.add(name)
            cells = (
                F.pad(mask.dense(q_len, kv_len)[0, 0], (0, kv_len % 2, 0, q_len % 2)).unflatten(1, (-1, 2)).unflatten(0, (-1, 2))
            )
            touched, full = cells.any(3).any(1), cells.all(3).all(1)
            assert all(map(runs, (touched & ~full, full, (touched & ~full).mT, full.mT))), name
            assert options["kernel_options"]["ROWS_GUARANTEED_SAFE"]
            visited = torch.where((touched & ~full).any(1), (touched & ~full).int().argmax(1), full.int().argmax(1)) * 2
            assert bool(mask.dense(q_len, kv_len)[0, 0].gather(1, visited.repeat_interleave(2).view(-1, 1)).all()), name
    assert given >= {"causal 0", "full 0", *(name for name in OTHERS if "window" not in name and ", 7 x" not in name)}
    assert not any("window" in name or ", 7 x" in name for name in given)


@pytest.mark.parametrize("mask", ["causal", "full", "sliding_window(size=300)", "causal & key_padding(lengths=[100])"])
@pytest.mark.parametrize("q_len", [256, 257])
def test_a_mask_that_is_not_lowered_yet(mask: str, q_len: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has them where a GPU has a kernel for it alone, not on the CPU, where one serves most masks."""
    x, none = torch.empty(1, 1, q_len, 1), {"FORCE_USE_FLEX_ATTENTION": True}
    fm.attention(x, x, x, mask, backend="flex")
    assert options["kernel_options"] == none
    monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
    known = mask in {"causal", "full"} and q_len == 256
    runs, safe = ({name: True} if known else {} for name in ("BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE"))
    with fm.MaskCache():
        for _ in range(2):
            fm.attention(x, x, x, mask, backend="flex")
            assert options["kernel_options"] == none | runs | safe
        fm.attention(x, x, x, mask, backend="flex", q_offset=1)
        assert options["kernel_options"] == (none if mask == "causal" else none | runs | safe)
        fm.attention(x, x, x, mask, backend="flex", dropout_p=0.5)
        assert options["kernel_options"] == none | runs


def test_a_mask_that_is_causal_for_its_lengths(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
    query, key = torch.empty(1, 1, 256, 1), torch.empty(1, 1, 300, 1)
    for other, is_known in ((query, True), (key, False)):
        fm.attention(query, other, other, fm.causal("lower_right"), backend="flex")
        assert ("BLOCKS_ARE_CONTIGUOUS" in options["kernel_options"]) == is_known
        lines = dict(fm.explain(fm.causal("lower_right"), 256, other.shape[2], kernel=True).kernel)
        assert ("BLOCKS_ARE_CONTIGUOUS" in lines["lists"]) == is_known


def test_rows_are_not_safe_where_a_function_may_hide_their_first_key(options: dict[str, Any]) -> None:
    lowered, x = lower(bind(fm.causal(), 128), (128, 128)), torch.empty(1, 1, 128, 1)
    for scores in ({"score_mod": lambda score, b, h, q, kv: score.masked_fill(kv == 0, -torch.inf)}, {"dropout_p": 0.5}):
        fm.attention(x, x, x, lowered, backend="flex", **cast(Any, scores))
        assert options["kernel_options"] == {"FORCE_USE_FLEX_ATTENTION": True, "BLOCKS_ARE_CONTIGUOUS": True}
    query = x[:, :, :16]
    fm.attention(query, x, x, lower(bind(fm.causal(), 16, 128), (16, 128)), backend="flex")
    assert options["kernel_options"] == {"BLOCKS_ARE_CONTIGUOUS": True}  # the decoding kernel begins at several keys


class TestKernelOptions:
    QUERY = torch.empty(1, 2, 200, 8)

    def test_they_reach_the_kernels(self, options: dict[str, Any]) -> None:
        """With the choice of the kernel for prompts, unless they choose one."""
        given = {"BLOCK_M": 64, "bwd_BLOCK_N1": 32, "PRESCALE_QK": True}
        fm.attention(self.QUERY, self.QUERY, self.QUERY, fm.causal(), backend="flex", kernel_options=given)
        assert options["kernel_options"] == {"FORCE_USE_FLEX_ATTENTION": True, **given}
        for backend in ("TRITON", "FLASH"):
            fm.attention(self.QUERY, self.QUERY, self.QUERY, backend="flex", kernel_options={"BACKEND": backend})
            assert options["kernel_options"] == {"BACKEND": backend}
        fm.attention(self.QUERY[:, :, :1], self.QUERY, self.QUERY, backend="flex")
        assert "kernel_options" not in options

    def test_of_a_module(self, options: dict[str, Any]) -> None:
        module = fm.MultiheadFlexAttention(16, 16, 2, backend="flex", mask="causal", kernel_options={"num_stages": 2})
        module(torch.zeros(1, 3, 16))
        assert options["kernel_options"] == {"num_stages": 2}

    @pytest.mark.slow
    @pytest.mark.exhaustive
    def test_a_kernel_with_them(self) -> None:
        x = torch.randn(1, 2, 40, 32)
        found = fm.attention(x, x, x, fm.causal(), backend="flex", kernel_options={"BLOCK_M": 64, "num_warps": 4})
        torch.testing.assert_close(found, fm.attention(x, x, x, fm.causal(), backend="sdpa"))

    def test_without_effect_where_sdpa_is_chosen(self) -> None:
        x = torch.randn(1, 2, 8, 4)
        wanted = fm.attention(x, x, x, fm.causal())
        assert torch.equal(fm.attention(x, x, x, fm.causal(), kernel_options={"num_warps": 4}), wanted)
        assert choose_backend(x, x, x, kernel_options={"num_warps": 4}) == "sdpa"
        with pytest.raises(LoweringError, match="kernel_options are those of FlexAttention; use backend='flex', or 'auto'"):
            fm.attention(x, x, x, fm.causal(), backend="sdpa", kernel_options={"num_warps": 4})
        module = fm.MultiheadFlexAttention(4, 4, 2, kernel_options={"num_warps": 4})
        assert module(torch.zeros(1, 3, 4)).shape == (1, 3, 4)

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            (
                {"BLOCKM": 64},
                ExpressionError,
                r"has no kernel option 'BLOCKM'. Did you mean BLOCK_M\? It has BACKEND, BLOCKS_ARE",
            ),
            ({"fwd_fwd_BLOCK_M": 64}, ExpressionError, "has no kernel option 'fwd_fwd_BLOCK_M'"),
            ({1: 64}, ExpressionError, "has no kernel option 1"),
            ({"BLOCK_M": [64]}, OperandError, "the kernel option BLOCK_M must be a number, a truth value or a text, got list"),
            (64, OperandError, "kernel_options must be a dictionary, as {'BLOCK_M': 64}, got int 64"),
        ],
    )
    def test_others(self, given: Any, error: type[Exception], message: str) -> None:
        for backend in ("auto", "flex"):
            with pytest.raises(error, match=message):
                fm.attention(self.QUERY, self.QUERY, self.QUERY, backend=backend, kernel_options=given)
        with pytest.raises(error, match=message):
            fm.MultiheadFlexAttention(8, 8, 2, kernel_options=given)

    def test_others_in_compiled_code(self) -> None:
        torch.compiler.reset()
        compiled = torch.compile(lambda x: fm.attention(x, x, x, kernel_options={"BLOCKM": 64}), fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="no kernel option 'BLOCKM'"):
            compiled(torch.zeros(1, 1, 3, 4))
        compiled = torch.compile(lambda x: fm.attention(x, x, x, kernel_options={"BLOCK_M": 64}), fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1, 1, 3, 4)).shape == (1, 1, 3, 4)


@pytest.mark.slow  # so that the newest torch runs it, which took the second number for a variable
def test_other_numbers_in_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where kernels may be for all lengths."""
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex, "_compiled", lambda device: compiled)
    x = torch.randn(1, 2, 9, 32)
    with torch.no_grad():
        for cap in (5.0, 3.0, 1.0):
            found, wanted = (
                fm.attention(x, x, x, fm.causal(), score_mod=softcap(cap), backend=backend) for backend in ("flex", "sdpa")
            )
            torch.testing.assert_close(found, wanted)
