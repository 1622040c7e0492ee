"""The backend ``flash``: which calls it takes on which GPUs, and what it gives FlexAttention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmask as fm
from flexmask import scores
from flexmask.backends import Call, backend, backend_names, choose_backend, flash, flex
from flexmask.backends.backend import get_backend
from flexmask.errors import LoweringError
from flexmask.lowering.flash import flash_block_size
from flexmask.lowering.triton import class_mod, joint_mod
from flexmask.scores.placed import placed_score

HOPPER, BLACKWELL = 9, 10
PADDED = fm.causal() & fm.key_padding(lengths=[100, 300])


def with_mod(mask_mod: Any) -> BlockMask:
    found = fm.causal().block_mask(8, 300)
    found.mask_mod = mask_mod
    return found


def tensors(q_len: int = 8, dims: tuple[int, int] = (64, 64), heads: int = 2, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, heads, q_len, dims[0]), (2, 2, 300, dims[0]), (2, 2, 300, dims[1])
    query, key, value = (torch.zeros(shape, dtype=torch.bfloat16, **options) for shape in shapes)
    return query, key, value


def reason(generation: int = HOPPER, *given: Any, **options: Any) -> str | None:
    """The reason against a call, of bfloat16 tensors unless others are given."""
    return flash.refusal(Call(*(given or tensors()), **options), generation)


# ---------------------------------------------------------------- refusals


def test_calls_that_it_takes() -> None:
    for generation in (HOPPER, BLACKWELL, 11):
        for mask in (None, fm.causal(), PADDED, fm.from_dense(torch.ones(8, 300, dtype=torch.bool))):
            assert reason(generation, mask=mask) is None
            assert reason(generation, *tensors(requires_grad=True), mask=mask, return_lse=True) is None
    assert reason(mask=fm.causal(), score_mod=placed_score("alibi() >> softcap(5)", 0), scale=0.2) is None


LEARNED = scores.alibi(slopes=nn.Parameter(torch.ones(2)))
WIDE = tensors(dims=(256, 256))


@pytest.mark.parametrize(
    ("generation", "given", "options", "message"),
    [
        (8, tensors(), {}, "compute capability 9, 10 and 11, this has 8"),
        (12, tensors(), {}, "compute capability 9, 10 and 11, this has 12"),
        (HOPPER, tensors(dims=(60, 60)), {}, "a multiple of 8 channels, got D=60 and D_v=60"),
        (HOPPER, tensors(dims=(64, 60)), {}, "a multiple of 8 channels, got D=64 and D_v=60"),
        (HOPPER, tensors(dims=(64, 128)), {}, "at most 256 channels and no more in the values, got D=64 and D_v=128"),
        (HOPPER, tensors(dims=(264, 264)), {}, "at most 256 channels"),
        (BLACKWELL, tensors(dims=(192, 192)), {}, r"\(192, 128\) and \(256, 256\) on Blackwell, got \(192, 192\)"),
        (HOPPER, tensors(), {"dropout_p": 0.1}, "no dropout_p"),
        (HOPPER, tensors(), {"kernel_options": {"BLOCK_M": 64}}, "no kernel_options"),
        (HOPPER, tensors(), {"scale": -1.0}, "a scale above 0, got -1.0"),
        (HOPPER, tensors(), {"score_mod": lambda score, *_: score}, "a function as score_mod"),
        (HOPPER, tensors(), {"score_mod": placed_score(LEARNED, 0)}, "no gradients of the tensors of a score"),
        (HOPPER, tensors(), {"mask": (fm.q - fm.kv) % 3 == 1}, r"\(q - kv\) % 3 is negative for negative numbers"),
        (HOPPER, tensors(), {"mask": fm.from_mask_mod(lambda b, h, q, kv: torch.sin(q) > 0)}, "operations of a traced function"),
        (
            HOPPER, tensors(), {"mask": create_block_mask(lambda b, h, q, kv: q >= kv, 2, 2, 8, 300, device="cpu")},
            r"the mask_mod of a BlockMask .* from mask.block_mask\(\)",
        ),
        (
            HOPPER, tensors(), {"mask": with_mod(class_mod(torch.zeros(1, 1, 8), torch.zeros(1, 1, 300)))},
            r"the mask_mod of a BlockMask .* from mask.block_mask\(\)",
        ),
        (
            HOPPER, tensors(), {"mask": with_mod(joint_mod([(((1, 0),), ((1, 1),))], 300, torch.device("cpu")))},
            r"the mask_mod of a BlockMask .* from mask.block_mask\(\)",
        ),
        (BLACKWELL, tensors(200), {"mask": fm.causal().block_mask(200, 300)}, r"takes blocks of \(256, 128\) here, and"),
        (BLACKWELL, tensors(200), {"mask": fm.plan("causal", 200, 300)()}, r"takes blocks of \(256, 128\) here, and"),
    ],
)  # fmt: skip
def test_calls_that_it_refuses(generation: int, given: Any, options: dict[str, Any], message: str) -> None:
    with torch.enable_grad():
        found = reason(generation, *given, **options)
    assert found is not None
    assert found.endswith("; use backend='flex'")
    with pytest.raises(LoweringError, match=message):
        raise LoweringError(found)


def test_backward_passes_that_it_refuses() -> None:
    training, wide = tensors(requires_grad=True), tensors(dims=(256, 256), requires_grad=True)
    whole = fm.causal().block_mask(8, 300, separate_full_blocks=False)
    assert "lists of their own" in (reason(HOPPER, *training, mask=whole) or "")
    assert reason(HOPPER, mask=whole) is None
    assert "no backward pass with a mask for heads of 256" in (reason(BLACKWELL, *wide, mask=fm.causal()) or "")
    assert (
        reason(BLACKWELL, *wide) is reason(HOPPER, *wide, mask=fm.causal()) is reason(BLACKWELL, *WIDE, mask=fm.causal()) is None
    )
    with torch.no_grad():
        assert reason(score_mod=placed_score(LEARNED, 0)) is None


@pytest.mark.skipif(torch.__version__ < "2.13", reason="no BlockMask has an order of writes")
def test_deterministic_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    training = tensors(requires_grad=True)
    ordered = fm.causal().block_mask(8, 300, compute_dq_write_order=True)
    torch.use_deterministic_algorithms(True)
    try:
        for generation, mask in ((HOPPER, fm.causal()), (HOPPER, ordered), (BLACKWELL, fm.causal())):
            assert "deterministic on Blackwell alone" in (reason(generation, *training, mask=mask) or "")
        assert reason(BLACKWELL, *training, mask=ordered) is reason(BLACKWELL, mask=fm.causal()) is None
        assert reason(HOPPER, *training) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_dtypes() -> None:
    x = torch.zeros(1, 1, 4, 64)
    assert "float16 and bfloat16, got torch.float32" in (reason(HOPPER, x, x, x) or "")


# ---------------------------------------------------------------- sizes of blocks


@pytest.mark.parametrize(
    ("generation", "q_len", "group", "dims", "wanted"),
    [
        (HOPPER, 1000, 1, (64, 64), (128, 128)),
        (HOPPER, 1, 8, (128, 128), (128, 128)),
        (HOPPER, 1000, 1, (192, 128), (128, 96)),
        (HOPPER, 1000, 1, (256, 256), (128, 64)),
        (BLACKWELL, 129, 1, (64, 64), (256, 128)),
        (BLACKWELL, 128, 1, (64, 64), (128, 128)),
        (BLACKWELL, 128, 2, (64, 64), (256, 128)),
        (BLACKWELL, 1000, 1, (192, 128), (256, 256)),
        (BLACKWELL, 1000, 1, (256, 256), (128, 128)),
    ],
)
def test_sizes_of_blocks(generation: int, q_len: int, group: int, dims: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert flash_block_size(generation, q_len, group, *dims) == wanted


# ---------------------------------------------------------------- calls


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last call of FlexAttention was given, on a Blackwell GPU that the CPU stands for; it is not run."""
    options: dict[str, Any] = {}

    def call(query: Tensor, key: Tensor, value: Tensor, **found: Any) -> Any:
        options.clear()
        options.update(found)
        lse = query[..., 0].float() if "return_aux" in found else None
        return query if lse is None else (query, torch.nn.attention.flex_attention.AuxOutput(lse=lse))

    for name, value in {
        "DEVICES": {"cpu"},
        "OLDEST": "2.11",
        "_is_installed": lambda: True,
        "_generation": lambda device: 10,
    }.items():
        monkeypatch.setattr(flash, name, value)
    monkeypatch.setattr(flex, "_inference_only", lambda tensor: False)
    monkeypatch.setattr(flex, "_call", call)
    return options


def test_what_flexattention_is_given(given: dict[str, Any]) -> None:
    query, key, value = tensors(200, heads=4)
    for mask in (PADDED, fm.plan(PADDED, 200, 300, batch=2, block_size=(256, 128))(), None):
        out = fm.attention(query, key, value, mask, backend="flash", enable_gqa=True, scale=0.3)
        assert isinstance(out, Tensor)
        assert given["kernel_options"] == {"BACKEND": "FLASH"}
        assert (given["scale"], given["enable_gqa"]) == (0.3, True)
        assert mask is None or given["block_mask"].BLOCK_SIZE == (256, 128)
    out, lse = fm.attention(query, key, value, PADDED, backend="flash", enable_gqa=True, return_lse=True, score_mod="alibi()")
    assert lse.shape == query.shape[:3]
    x = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    fm.MultiheadFlexAttention(64, 64, 1, mask="causal", backend="flash").bfloat16()(x)
    assert given["block_mask"].BLOCK_SIZE == (128, 128)


def test_backends_share_no_block_mask(given: dict[str, Any]) -> None:
    query, key, value = tensors(200)
    with fm.MaskCache() as cache:
        for backend, size in (("flash", (256, 128)), ("flex", (128, 128)), ("flash", (256, 128))):
            fm.attention(query, key, value, PADDED, backend=backend)
            assert size == given["block_mask"].BLOCK_SIZE
    assert (cache.builds, cache.hits) == (2, 1)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="dynamo does not trace it, and the backend takes newer versions of torch")
@pytest.mark.slow
def test_in_compiled_code(given: dict[str, Any]) -> None:
    query, key, value = tensors(200)
    torch.compiler.reset()
    attend = torch.compile(
        lambda mask: fm.attention(query, key, value, mask, backend="flash", score_mod=scores.softcap(3.0)),
        fullgraph=True,
        backend="eager",
    )
    for mask in (fm.causal(), (fm.q - fm.kv) % 3 == 1, fm.causal().block_mask(200, 300, block_size=(256, 128))):
        attend(mask)
        assert given["block_mask"].BLOCK_SIZE == (256, 128)


def test_the_choice(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backends for CUDA come first, as there."""
    there = [replace(one, preferred_on=tuple("cpu" for _ in one.preferred_on)) for one in map(get_backend, backend_names())]
    monkeypatch.setattr(backend, "_BACKENDS", {one.name: one for one in there})
    query, key, value = tensors(200)
    chosen = choose_backend(query, key, value, PADDED)
    assert chosen == "flash"
    assert chosen.reasons["flex"] == "flash comes first on cpu"
    fm.attention(query, key, value, PADDED, kernel_options={"num_stages": 2})
    assert given["kernel_options"] == {"BACKEND": "FLASH"}
    assert choose_backend(query[:, :, :127], key, value, PADDED) == "flex", "which splits the keys of few queries"
    assert choose_backend(query[:, :, :128], key, value, PADDED) == "flash"
    chosen = choose_backend(query, key, value, PADDED, dropout_p=0.5)
    assert chosen == "flex"
    assert chosen.reasons["flash"] == "FlashAttention 4 has no dropout_p; use backend='flex'"


def test_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors()
    for changed, message in (
        ({}, "takes tensors on CUDA, got cpu"),
        ({"DEVICES": {"cpu"}, "OLDEST": "9.0"}, r"takes torch 9\.0 or newer, this is 2"),
        ({"DEVICES": {"cpu"}, "OLDEST": "2.0", "_is_installed": lambda: False}, "not installed: pip install --pre flash-attn-4"),
    ):
        with monkeypatch.context() as patch:
            for name, changed_value in changed.items():
                patch.setattr(flash, name, changed_value)
            with pytest.raises(LoweringError, match=message):
                fm.attention(query, key, value, "causal", backend="flash")
