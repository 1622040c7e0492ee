"""Every function that takes a mask takes its text and a mask_mod too; anything else is the same error everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask import testing
from flexmask.errors import FlexmaskError, OperandError
from flexmask.plotting.mpl import plot_scores
from flexmask.plotting.raster import rasterize
from flexmask.plotting.sheet import panel_sheet
from flexmask.tracing.trace import as_mask
from tests.support.exhaustive import one_in

Use = Callable[[Any], Any]

N, WIDTH = 6, 8
X = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(2, 2, N, 16, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(2, 2, N, N, generator=torch.Generator().manual_seed(2))


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 3)


#: The same mask in each form in which it can be given.
FORMS: dict[str, Any] = {
    "mask": fm.sliding_window(left=2, right=0),
    "text": "sliding_window(left=2, right=0)",
    "mask_mod": window,
    "mask_mod of a mask": fm.sliding_window(size=3).mask_mod(N),
}


def module(**options: Any) -> fm.MultiheadFlexAttention:
    torch.manual_seed(3)
    return fm.MultiheadFlexAttention(WIDTH, WIDTH, 2, **options).eval()


def cached(mask: Any) -> tuple[str, int]:
    cache = fm.MaskCache()
    found = cache.get(mask, (), 0, lambda: "built")
    return found, len(cache)


def drawn(mask: Any, **options: Any) -> Any:
    return rasterize(mask, N, **options).shares.tolist()


def as_file(mask: Any, path: Path) -> bytes:
    fm.causal().save_picture(path, N, against=mask)
    return path.read_bytes()


def written(axes: Any) -> list[str]:
    """All texts of a figure, among them its legend with the counts of cells."""
    return [text.get_text() for text in axes.figure.findobj(Text)]


USES: dict[str, Use] = {
    "explain": lambda mask: fm.explain(mask, N).stats,
    "equals": lambda mask: fm.causal().equals(mask, N),
    "difference": lambda mask: fm.causal().difference(mask, N),
    "attention": lambda mask: fm.attention(HEADS, HEADS, HEADS, mask),
    "attention_weights": lambda mask: fm.backends.attention_weights(HEADS, HEADS, mask),
    "create_block_mask": lambda mask: fm.create_block_mask(mask, 1, 1, N, N, "cpu", 2).kv_num_blocks,
    "MaskCache.get": cached,
    "module": lambda mask: module(mask=mask)(X),
    "module's forward": lambda mask: module()(X, mask),
    "module's weights": lambda mask: module().attention_weights(X, mask),
    "from_torch": lambda mask: fm.MultiheadFlexAttention.from_torch(
        torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False), mask=mask
    ).mask.dense(N),  # type: ignore[union-attr]
    "assert_equivalent": lambda mask: testing.assert_equivalent(mask, N, reference=window),
    "reference": lambda mask: testing.assert_equivalent("sliding_window(size=3)", N, reference=mask),
    "assert_subset": lambda mask: testing.assert_subset(mask, "causal", N),
    "assert_subset of": lambda mask: testing.assert_subset("sliding_window(size=2)", mask, N),
    "assert_no_leak": lambda mask: testing.assert_no_leak(module(mask=window), mask, X),
    "assert_no_leak of two": lambda mask: testing.assert_no_leak(lambda x: module(mask=window)(x), [mask, "causal"], X),
    "picture": drawn,
    "picture against": lambda mask: rasterize(fm.causal(), N, against=mask).shares.tolist(),
    "sheet against": lambda mask: [one.shares.tolist() for one in panel_sheet(fm.causal(), N, against=mask).pictures],
    "plot against": lambda mask: written(fm.causal().plot(N, against=mask, title="one for all")),
    "html against": lambda mask: len(fm.causal().html(N, against=mask)) > 1000,
    "plot_scores": lambda mask: written(plot_scores(WEIGHTS, mask, title="one for all")),
}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize(("use", "form"), one_in(3, USES, ["text", "mask_mod", "mask_mod of a mask"]))
def test_every_form_of_a_mask_does(use: str, form: str) -> None:
    assert same(USES[use](FORMS[form]), USES[use](FORMS["mask"]))


def test_the_uses_tell_masks_apart() -> None:
    """Of what compares with a mask, so that the test above can fail."""
    asserting = {use for use in USES if use.startswith("assert_") or use == "reference"}
    for use in USES.keys() - asserting - {"MaskCache.get", "html against"}:
        assert not same(USES[use]("causal"), USES[use](FORMS["mask"])), use
    for use in ("assert_equivalent", "reference", "assert_subset of", "assert_no_leak"):
        with pytest.raises(AssertionError):
            USES[use]("sliding_window(size=1)")


def test_files_are_the_same(tmp_path: Path) -> None:
    files = [as_file(FORMS[form], tmp_path / f"{form}.svg") for form in ("mask", "text", "mask_mod")]
    assert files[0] == files[1] == files[2]
    assert as_file("full", tmp_path / "full.svg") != files[0]


def test_a_mask_stays_itself_and_a_text_is_read_once() -> None:
    mask = fm.causal()
    assert as_mask(mask) is mask
    assert as_mask("causal & full", device="cpu") is as_mask("causal & full", device="cpu")
    assert str(as_mask(window)) == "sliding_window(left=2, right=0)"


# ---------------------------------------------------------------- what is no mask

STRANGE: dict[str, tuple[Any, str]] = {
    "number": (3, "got int 3"),
    "mask that is not called": (fm.causal, r"the function causal: call it, causal\(\)"),
    "window that is not called": (
        fm.sliding_window,
        r"call it with its arguments, sliding_window\(\*, left=..., right=..., size=None\)",
    ),
    "mask of four arguments that is not called": (fm.masks.sliding_tile, r"call it with its arguments, sliding_tile\("),
    "misspelt text": ("casual", "Did you mean causal"),
    "boolean tensor": (torch.ones(N, N, dtype=torch.bool), r"Tensor bool\[6, 6\].*flexmask.from_dense\(tensor\).*hide=tensor"),
    "tensor of 0 and 1": (torch.ones(2, N), r"Tensor float32\[2, 6\].*flexmask.from_dense\(tensor == 0\)"),
    "tensor of integers": (torch.ones(2, N, dtype=torch.long), r"Tensor int64\[2, 6\].*flexmask.from_dense\(tensor != 0\)"),
    "list of masks": ([fm.causal(), fm.full()], r"flexmask.per_head\(\[...\]\)"),
    "index": (fm.q - fm.kv, r"Compare it to get a mask, e.g. \(q - kv == 0\)"),
    "parameter": (fm.param("ids"), r"\(ids == 0\)|\(param\('ids'\) == 0\)"),
    "class": (fm.Mask, "the class Mask; give an object"),
    "score_mod": (lambda score, b, h, q, kv: score, "score_mod="),
    "function of one": (lambda x: x, "b, h, q_idx, kv_idx"),
    "dict": ({}, "got dict"),
}
#: What takes one mask, of which some takes more than masks.
TAKES_ONE = [use for use in USES if use not in ("reference", "assert_no_leak of two")]
TAKES_NO_LIST = [use for use in TAKES_ONE if use != "assert_no_leak"]


@pytest.mark.parametrize("name", STRANGE)
def test_other_arguments_are_errors_everywhere(name: str) -> None:
    strange, wanted = STRANGE[name]
    for use in TAKES_NO_LIST if isinstance(strange, list) else TAKES_ONE:
        with pytest.raises(FlexmaskError) as caught:
            USES[use](strange)
        assert re.search(wanted, str(caught.value)), f"{use}: {caught.value}"


def test_a_block_mask_is_an_error_where_cells_are_needed() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 128, 128, device="cpu")
    for use in ("explain", "difference", "assert_subset", "picture", "plot_scores", "module", "module's weights"):
        with pytest.raises(OperandError, match="BlockMask"):
            USES[use](block_mask)


@pytest.mark.parametrize("sign", ["&", "|", "^", "-"])
def test_operators_join_masks_alone(sign: str) -> None:
    import operator

    join = {"&": operator.and_, "|": operator.or_, "^": operator.xor, "-": operator.sub}[sign]
    wanted = {
        "full": r"the text 'full': read it, flexmask.parse\('full'\)",
        window: r"the function window: if it is a mask_mod, trace it, flexmask.from_mask_mod\(window\)",
        fm.causal: r"the function causal: call it, causal\(\)",
        fm.document: r"the function document: call it with its arguments, document\(ids=None",
    }
    for other, message in wanted.items():
        with pytest.raises(OperandError, match=message):
            join(fm.full(), other)
