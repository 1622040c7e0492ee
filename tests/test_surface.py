"""The top of the package: the names that it has, and what it says of names that are elsewhere or spelled otherwise."""

from __future__ import annotations

import inspect
import pickle
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import flexmask as fm
from flexmask._suggestions import GUESSES, PACKAGES
from flexmask.plotting import mpl
from tests.support.examples import OWN_MASKS
from tests.support.imports import HEAVY, loaded_after

SURFACE = [
    *("KVCache", "Mask", "MaskCache", "MultiheadFlexAttention", "attention", "b", "causal", "create_block_mask"),
    *("cross_length", "document", "empty", "errors", "explain", "from_dense", "from_mask_mod", "full", "h", "key_padding"),
    *(
        "kv",
        "kv_len",
        "masks",
        "maximum",
        "merge_attention",
        "minimum",
        "param",
        "parse",
        "per_document",
        "per_head",
        "plan",
        "prefix_lm",
    ),
    *("q", "q_len", "query_padding", "sliding_window", "table", "where"),
]
ELSEWHERE = {
    **{name: f"flexmask.masks.{name}" for name in OWN_MASKS},
    **{name: f"flexmask.{package}.{name}" for package in PACKAGES for name in import_module(f"flexmask.{package}").__all__},
}
#: What the code of a guess refers to.
NAMES = {
    "flexmask": fm,
    "torch": torch,
    "mask": fm.causal(),
    "a": fm.causal(),
    "b": fm.full(),
    "q_len": 8,
    "data": {},
    "query": torch.zeros(1, 1, 8, 8),
    "key": torch.zeros(1, 1, 8, 8),
    "value": torch.zeros(1, 1, 8, 8),
    "table": [[True]],
    "is_global": [True] * 8,
    "mask_mod": lambda b, h, q, kv: q >= kv,
}


def missing(name: str) -> str:
    """What is said of a name that is not there."""
    with pytest.raises(AttributeError, match=re.escape(f"module 'flexmask' has no attribute {name!r}")) as caught:
        getattr(fm, name)
    return str(caught.value).partition(repr(name))[2]


def test_names_at_the_top() -> None:
    assert fm.__all__ == SURFACE
    assert [name for name in SURFACE if not hasattr(fm, name)] == []
    assert set(SURFACE) <= set(dir(fm))


def test_arguments_are_listed_by_help() -> None:
    """A user finds every argument in the signature; only data by the names of a mask's parameters is taken by any name."""
    methods = {f"Mask.{name}": getattr(fm.Mask, name) for name in dir(fm.Mask) if not name.startswith("_")}
    drawing = {name: getattr(mpl, name) for name in mpl.__all__}
    found = {name: getattr(fm, name) for name in fm.__all__} | methods | drawing
    by_any_name = {
        name
        for name, value in found.items()
        if inspect.isroutine(value) and any(p.kind is p.VAR_KEYWORD for p in inspect.signature(value).parameters.values())
    }
    assert by_any_name == {"attention", "parse", "Mask.bind", "Mask.substitute"}
    for name, value in found.items():
        if inspect.isroutine(value):
            first = (inspect.getdoc(value) or "").partition("\n")[0]
            assert re.fullmatch(r"[A-Z`].*[.:]+", first), (name, first)


def test_star_import_gives_these_names() -> None:
    names: dict[str, object] = {}
    exec("from flexmask import *", names)
    assert sorted(name for name in names if not name.startswith("__")) == SURFACE


@pytest.mark.parametrize("name", sorted(set(ELSEWHERE) - set(SURFACE)))
def test_names_in_other_places_are_found(name: str) -> None:
    if name in GUESSES:
        pytest.skip("another library has a better-known meaning for it")
    said = missing(name)
    assert said == f". It is {ELSEWHERE[name]}"
    place, _, last = said.removeprefix(". It is ").rpartition(".")
    assert hasattr(import_module(place), last)


@pytest.mark.parametrize("name", GUESSES)
def test_guesses_are_answered_with_code_that_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not hasattr(fm, name)
    code = missing(name).removeprefix(". Write ")
    assert code == GUESSES[name]
    for alternative in code.split(" or "):
        assert eval(alternative, dict(NAMES)) is not NotImplemented


GUESSED = ["padding", "packed", "to_dense", "materialize", "and_masks", "flex_attention", "dilated", "longformer", "visualize"]


def test_names_that_people_guess() -> None:
    assert set(GUESSED) <= set(GUESSES)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("casual", "causal"),
        ("sliding_windows", "sliding_window"),
        ("create_blockmask", "create_block_mask"),
        ("sink_windows", "masks.sink_window"),
        ("LowerngError", "errors.LoweringError"),
        ("BlockRows", "intervals.Rows"),
        ("asert_no_leak", "testing.assert_no_leak"),
    ],
)
def test_a_typo_gets_the_nearest_name(name: str, place: str) -> None:
    assert missing(name) == f". Did you mean flexmask.{place}?"


def test_a_name_like_no_other_gets_no_hint() -> None:
    assert missing("xyzzy") == ""


def test_private_names_load_nothing() -> None:
    code = "import flexmask\nfor name in ('_hidden', '__wrapped__'):\n    assert not hasattr(flexmask, name)"
    assert loaded_after(code, {*HEAVY, "flexmask._suggestions", "importlib.metadata"}) == set()


@pytest.mark.slow
def test_two_plugins_with_one_name_are_no_other_error(tmp_path: Path) -> None:
    for package in ("one", "two"):
        (tmp_path / f"{package}.py").write_text(
            "import flexmask\n@flexmask.registry.named\ndef landmarks():\n    return flexmask.kv < 1\n"
        )
        (tmp_path / f"{package}-1.dist-info").mkdir()
        (tmp_path / f"{package}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (tmp_path / f"{package}-1.dist-info" / "entry_points.txt").write_text(f"[flexmask.masks]\nx = {package}\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r})\nimport flexmask\nassert not hasattr(flexmask, 'sliding_windoww')"
    assert loaded_after(code, {"flexmask._suggestions"}) == {"flexmask._suggestions"}


def test_masks_of_the_namespace() -> None:
    assert set(OWN_MASKS) <= set(dir(fm.masks))
    assert all(getattr(fm.masks, name).__name__ == name for name in OWN_MASKS)
    assert pickle.loads(pickle.dumps(fm.masks.sink_window)) is fm.masks.sink_window
    with pytest.raises(AttributeError, match=r"no named mask sink_windw\. Did you mean sink_window"):
        _ = fm.masks.sink_windw
