"""Every public function with every kind of wrong argument: it is taken, or refused with an error of the library's own.

A table has each function with arguments that are right, of which one after another is replaced by what is not. Nothing else
than a FlexmaskError may come out. What the messages say is tested with the functions.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask import distributed, lowering, packing, scores, testing
from flexmask.errors import FlexmaskError
from flexmask.expr.names import NAMES
from flexmask.plotting.mpl import plot_score_panels, plot_scores
from flexmask.registry import withdraw
from tests.support.examples import EXAMPLES, PADDED

# Any, since the tests misuse them on purpose
f: Any = fm
t: Any = testing

N, WIDTH = 6, 16
HEADS = torch.randn(2, 4, N, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(1))
ROWS: Any = packing.pack_prefixes([[1, 2], [1, 3]])
SHARDS: Any = distributed.shard_sequence("causal", 8, 2, block_size=2)
WEIGHTS = torch.rand(1, 2, N, N, generator=torch.Generator().manual_seed(2))


class Thing:
    """Nothing that any function takes."""


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def of_numbers(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return {0: True}[int(q)]


def unusual_tensors() -> dict[str, torch.Tensor]:
    parts = [torch.ones(2), torch.ones(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some kinds
        return {
            "sparse": torch.eye(4).bool().to_sparse(),
            "compressed": torch.eye(4).to_sparse_csr(),
            "nested": torch.nested.nested_tensor(parts),
            "jagged": torch.nested.nested_tensor(parts, layout=torch.jagged),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
            "complex": torch.zeros(4, dtype=torch.complex64),
            "meta": torch.ones(4, dtype=torch.bool, device="meta"),
        }


#: What is given in place of an argument.
WRONG: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "zero": 0,
    "a negative number": -1,
    "a huge number": 10**30,
    "a fraction": 2.5,
    "not a number": float("nan"),
    "True": True,
    "a complex number": 1j,
    "a text": "causal",
    "a misspelt text": "casual",
    "no text": "",
    "bytes": b"causal",
    "an empty list": [],
    "a list": [1],
    "a list of fractions": [0.5],
    "a list of texts": ["a"],
    "lists that end nowhere": [[]],
    "a dict": {},
    "a set": {1, 2},
    "an object": Thing(),
    "a class": Thing,
    "a mask that is not called": fm.causal,
    "a window that is not called": fm.sliding_window,
    "a mask of four arguments": fm.masks.sliding_tile,
    "a mask_mod": window,
    "a mask_mod of numbers": of_numbers,
    "a function of one": abs,
    "a score_mod": lambda score, b, h, q, kv: score,
    "a mask": fm.causal(),
    "a mask with a parameter": fm.parse("document(ids)"),
    "an index": fm.q,
    "a parameter": fm.param("n"),
    "a module": torch.nn.Linear(2, 2),
    "a dtype": torch.float32,
    "a BlockMask": create_block_mask(window, 1, 1, 128, 128, device="cpu"),
    "a tensor of floats": torch.zeros(2, 4),
    "a tensor of truth values": torch.ones(4, 4, dtype=torch.bool),
    "a tensor of integers": torch.tensor([1, 2]),
    "a tensor of one integer": torch.tensor(3),
    "an empty tensor": torch.zeros(0, dtype=torch.long),
    "an integer of NumPy": np.int64(3),
    "no number of NumPy": np.float32("nan"),
    "an array of texts": np.array(["a"]),
    "an array of objects": np.array([None]),
    "an array of floats": np.zeros((2, 4)),
    "a tensor with a gradient": torch.ones(2, 4, requires_grad=True),
    "a list of truth values": [True, False],
    "a list of negative numbers": [-3, -1],
    "a list of no numbers": [float("nan"), float("inf")],
    "lists of two lengths": [[1, 2], [3]],
    "no device": torch.device("meta"),
    "a module of Python": torch,
    "a module with a shape": np,
    "a tensor of one truth value": torch.tensor(True),
    **unusual_tensors(),
}
WRONG["lists that end nowhere"][0].append(WRONG["lists that end nowhere"])

Function = tuple[Callable[..., Any], dict[str, Any]]
LENGTHS: dict[str, Any] = {"q_len": 8, "kv_len": 8, "batch": None, "heads": None, "q_offset": 0, "device": None}


def module(**options: Any) -> Any:
    layer = f.MultiheadFlexAttention(**options)
    return layer(X.to(layer.out_proj.weight.device))  # which may be meta, as of a model that is initialized later


def layer(**options: Any) -> Any:
    torch.manual_seed(3)
    return fm.MultiheadFlexAttention(WIDTH, WIDTH, 4, **options).eval()


def cached(name: str, **options: Any) -> None:
    cache = fm.KVCache(8)
    layer()(X, "causal", cache=cache)
    getattr(cache, name)(**options)


def scored(define: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: define(**options).dense(4, heads=2)


#: Functions with arguments that are right.
FUNCTIONS: dict[str, Function] = {
    "parse": (lambda text: f.parse(text), {"text": "causal"}),
    "param": (f.param, {"name": "ids"}),
    "table": (f.table, {"data": [1]}),
    "named": (f.registry.named, {"define": None}),
    "minimum": (f.minimum, {"left": fm.q, "right": 3}),
    "maximum": (f.maximum, {"left": fm.q, "right": 3}),
    "where": (f.where, {"condition": fm.causal(), "a": fm.causal(), "b": fm.full()}),
    "document_ids": (f.expr.document_ids, {"lengths": [1, 2], "padding": False}),
    "document_starts": (f.expr.document_starts, {"ids": [0, 1]}),
    "from_mask_mod": (f.from_mask_mod, {"mask_mod": window, "strict": False, "device": "cpu"}),
    "explain": (f.explain, {"mask": fm.causal(), **LENGTHS, "block_size": 8, "kernel": False}),
    "attention": (
        f.attention,
        {
            "query": HEADS,
            "key": HEADS,
            "value": HEADS,
            "mask": fm.causal(),
            "score_mod": None,
            "scale": None,
            "q_offset": 0,
            "dropout_p": 0.0,
            "dropout_seed": None,
            "backend": "auto",
            "kernel_options": None,
        },
    ),
    "merge_attention": (f.merge_attention, {"outputs": [HEADS], "lses": [HEADS[..., 0]]}),
    "attention_weights": (
        f.backends.attention_weights,
        {"query": HEADS, "key": HEADS, "mask": fm.causal(), "scale": None, "score_mod": None, "q_offset": 0},
    ),
    "choose_backend": (f.backends.choose_backend, {"query": HEADS, "key": HEADS, "value": HEADS, "mask": None}),
    "create_block_mask": (
        f.create_block_mask,
        {
            "mask_mod": window,
            "B": 1,
            "H": 1,
            "Q_LEN": 128,
            "KV_LEN": 128,
            "device": "cpu",
            "BLOCK_SIZE": 128,
            "compute_dq_write_order": False,
        },
    ),
    "MultiheadFlexAttention": (
        module,
        {
            "d_in": WIDTH,
            "d_out": WIDTH,
            "n_heads": 4,
            "bias": False,
            "n_kv_heads": 4,
            "d_head": 4,
            "d_context": None,
            "out_bias": True,
            "dropout": 0.0,
            "mask": None,
            "score_mod": None,
            "scale": None,
            "rope": None,
            "backend": "auto",
            "device": "cpu",
            "dtype": torch.float32,
        },
    ),
    "module": (layer(), {"x": X, "mask": None, "context": None, "cache": None, "positions": None}),
    "module.attention_weights": (layer().attention_weights, {"x": X, "mask": None, "context": None, "positions": None}),
    "nn.call": (f.nn.call, {"layer": layer(), "x": X, "context": None, "positions": None}),
    "module.mask": (lambda mask: setattr(layer(), "mask", mask), {"mask": fm.causal()}),
    "Mask.named": (fm.causal().named, {"name": "a part"}),
    "registry.per_token": (lambda **given: f.registry.per_token(what="data", **given), {"data": [0, 1], "position": fm.q}),
    "from_torch": (
        f.MultiheadFlexAttention.from_torch,
        {"module": torch.nn.MultiheadAttention(8, 2, batch_first=True), "mask": None, "backend": "auto"},
    ),
    "MaskCache": (f.MaskCache, {"size": 3}),
    "MaskCache.get": (
        lambda **options: f.MaskCache().get(**options, setting=(), build=list),
        {"mask": fm.causal(), "q_offset": 0},
    ),
    "KVCache": (f.KVCache, {"capacity": 4, "window": 2}),
    "KVCache.truncate": (lambda lengths: cached("truncate", lengths=lengths), {"lengths": 3}),
    "KVCache.reorder": (lambda indices: cached("reorder", indices=indices), {"indices": torch.tensor([1, 0])}),
    "plot_scores": (plot_scores, {"weights": WEIGHTS, "mask": fm.causal(), "batch": 0, "head": 0, "ax": None, "title": None}),
    "plot_score_panels": (plot_score_panels, {"weights": WEIGHTS, "mask": fm.causal(), "batch": 0, "head": 0, "title": None}),
    "assert_equivalent": (
        t.assert_equivalent,
        {
            "mask": fm.causal(),
            **LENGTHS,
            "device": "cpu",
            "reference": None,
            "block_size": 8,
            "backends": ["sdpa"],  # the others compile a kernel for each length
            "dtypes": (torch.float32,),
            "tolerance": None,
        },
    ),
    "assert_subset": (t.assert_subset, {"mask": fm.causal(), "other": fm.causal(offset=1), **LENGTHS}),
    "assert_no_leak": (
        t.assert_no_leak,
        {
            "function": layer(mask="causal"),
            "mask": fm.causal(),
            "x": X,
            "context": None,
            "self_mask": None,
            "layers": 1,
            "embed": None,
            "heads": None,
            "device": None,
            "seed": 0,
        },
    ),
    "Mask.dense": (PADDED.dense, LENGTHS),
    "Mask.rows": (PADDED.rows, LENGTHS),
    "Mask.mask_mod": (PADDED.mask_mod, {**LENGTHS, "form": "auto"}),
    "Mask.block_mask": (PADDED.block_mask, {**LENGTHS, "block_size": 8, "form": "auto"}),
    "Mask.stats": (PADDED.stats, {**LENGTHS, "block_size": 8}),
    "Mask.equals": (PADDED.equals, {"other": fm.causal(), **LENGTHS}),
    "Mask.difference": (PADDED.difference, {"other": fm.causal(), **LENGTHS}),
    "Mask.to": (fm.document(torch.zeros(4, dtype=torch.long)).to, {"device": "cpu"}),
    "Mask.bind": (lambda ids: fm.parse("document(ids)").bind(ids=ids), {"ids": [0, 0, 1, 1]}),
    "Mask.bind a number": (lambda n: fm.parse("kv < n").bind(n=n), {"n": 3}),
    "Mask.substitute": (lambda q: PADDED.substitute(q=q), {"q": 3}),
    "Mask.plot": (
        PADDED.plot,
        {
            "q_len": 8,
            "kv_len": 8,
            "q_offset": 0,
            "block_size": None,
            "against": None,
            "tokens": None,
            "kv_tokens": None,
            "batch": 0,
            "head": 0,
            "title": None,
            "ax": None,
        },
    ),
    "Mask.plot_panels": (
        PADDED.plot_panels,
        {"q_len": 8, "kv_len": 8, "batch": "all", "head": "all", "title": None, "against": None},
    ),
    "Mask.plot_terms": (PADDED.plot_terms, {"q_len": 8, "kv_len": 8, "title": None}),
    "Mask.show": (
        PADDED.show,
        {"q_len": 8, "kv_len": 8, "console": None, "batch": 0, "head": 0, "against": None, "tokens": None},
    ),
    "Mask.html": (PADDED.html, {"q_len": 8, "kv_len": 8, "batch": "some", "head": "some", "against": None, "block_size": None}),
    "Mask.save_picture": (
        PADDED.save_picture,
        {
            "path": "mask.svg",
            "q_len": 8,
            "kv_len": 8,
            "batch": None,
            "head": None,
            "title": None,
            "width": None,
            "max_pixels": (8, 8),
            "max_blocks": (8, 8),
            "shards": None,
        },
    ),
    "Mask.to_bias": (PADDED.to_bias, {**LENGTHS, "dtype": torch.float32}),
    "Mask.varlen": (fm.document(lengths=[3, 5]).varlen, LENGTHS),
    "plan": (f.plan, {"mask": fm.causal(), "q_len": 8, "kv_len": 8, "batch": 1, "heads": 1, "device": "cpu", "block_size": 8}),
    "Plan": (fm.parse("causal & (kv < n)").plan(8), {"q_offset": 0, "n": 3}),
    "LoweredMask.to": (lambda **options: fm.causal().plan(8)().to(**options), {"device": "cpu", "non_blocking": False}),
    "LoweredMask[]": (lambda index: fm.causal().plan(8)()[index], {"index": 0}),
    "Index %": (lambda other: (fm.q % other, fm.q.__rmod__(other)), {"other": 3}),
    "Mask &": (lambda other: fm.causal() & other, {"other": fm.full()}),
    "as_mask": (f.tracing.as_mask, {"mask": fm.causal(), "device": "cpu"}),
    "pack_documents": (packing.pack_documents, {"lengths": [3, 2], "capacity": 8, "device": "cpu"}),
    "pack_prefixes": (packing.pack_prefixes, {"samples": [[1, 2], [1, 3]], "capacity": 8, "device": "cpu"}),
    "Packed.gather": (ROWS.gather, {"values": torch.ones(1, 3)}),
    "Packed.scatter": (ROWS.scatter, {"values": [[1.0, 2.0], [1.0, 3.0]], "fill": 0}),
    "Packed.to": (ROWS.to, {"device": "cpu"}),
    "align_documents": (lowering.align_documents, {"lengths": [3, 2], "block_size": 4, "length": 8, "device": "cpu"}),
    "shard_sequence": (
        distributed.shard_sequence,
        {"masks": fm.causal(), "seq_len": 8, "ranks": 2, "balance": "work", "batch": None, "heads": None, "block_size": 2},
    ),
    "Sharding.runs": (SHARDS.runs, {"rank": 0}),
    "Sharding.positions": (SHARDS.positions, {"rank": 0}),
    "Sharding.seen": (SHARDS.seen, {"rank": 0, "mask": None}),
    "alibi": (scored(scores.alibi), {"slopes": [0.5, 0.25]}),
    "softcap": (scored(scores.softcap), {"cap": 20.0}),
    "bias": (scored(scores.bias), {"table": torch.ones(2, 4, 4)}),
    "relative_bias": (scored(scores.relative_bias), {"table": torch.ones(8, 2), "max_distance": 16, "bidirectional": True}),
    "scores.parse": (scores.parse, {"text": "softcap(20.0)"}),
    "Score.dense": (
        scores.alibi().dense,
        {"q_len": 4, "kv_len": 4, "heads": 2, "batch": 1, "q_offset": 0, "device": "cpu"},
    ),
    "Score.__add__": (lambda other: scores.alibi() + other, {"other": scores.alibi()}),
    "Score.__rshift__": (lambda other: scores.alibi() >> other, {"other": scores.softcap(3.0)}),
    "Score.to": (scores.alibi().to, {"device": "cpu"}),
    "assert_batch_invariant": (
        t.assert_batch_invariant,
        {
            "function": lambda x, mask: 2 * x,
            "x": X[0],
            "lengths": [4, 2],
            "mask": None,
            "block_size": 8,
            "gradients": False,
            "device": None,
        },
    ),
    "KVCache.accept": (lambda **options: cached("accept", **options), {"path": [0, 1], "prefix": 3}),
    "registry.find": (f.registry.find, {"name": "causal"}),
    "registry.origin": (f.registry.origin, {"name": "causal"}),
}
for sign in ("and", "or", "xor", "sub"):
    FUNCTIONS[f"Mask.__{sign}__"] = (lambda other, sign=sign: getattr(PADDED, f"__{sign}__")(other), {"other": PADDED})
for sign in ("add", "floordiv", "lt", "eq"):
    FUNCTIONS[f"Index.__{sign}__"] = (lambda other, sign=sign: getattr(fm.q, f"__{sign}__")(other), {"other": fm.kv})

for name, examples in EXAMPLES.items():
    for number, (arguments, _) in enumerate(examples):
        FUNCTIONS[f"{name} {number}" if number else name] = (getattr(fm.masks, name), arguments)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    names = set(NAMES)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    withdraw(set(NAMES) - names)


def run(function: Callable[..., Any], arguments: dict[str, Any], lowers: bool = True) -> bool:
    """Whether a function takes its arguments, and a mask that it makes can be lowered."""
    found = function(**arguments)
    if isinstance(found, fm.Mask) and lowers and not found.params:
        return found.dense(4, 4).shape[2:] == found.block_mask(4, 4, block_size=2).seq_lengths
    return True


def foreign_error(name: str, argument: str, wrong: Any, lowers: bool) -> str:
    """What comes out that is no error of the library; nothing where the argument is taken, or refused as it should be."""
    function, right = FUNCTIONS[name]
    try:
        run(function, {**right, argument: wrong}, lowers)
    except FlexmaskError as error:
        return "" if 0 < len(str(error)) < 2500 else f"a message of {len(str(error))} characters"
    except AssertionError as error:  # a mask that is another than the reference
        return "" if name.startswith("assert_") else f"AssertionError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def labels_for(name: str, argument: str) -> list[str]:
    """Every third wrong value, or every eighth where many functions have the same argument: together they have all of them."""
    each = 8 if argument in LENGTHS else 3
    return list(WRONG)[(list(FUNCTIONS).index(name) + list(FUNCTIONS[name][1]).index(argument)) % each :: each]


def foreign_errors(name: str, labels: dict[str, list[str]]) -> list[str]:
    return [
        f"{argument}: {label}: {foreign}"
        for argument in FUNCTIONS[name][1]
        for label in labels[argument]
        if (foreign := foreign_error(name, argument, WRONG[label], lowers=label != "meta"))  # those are lowered in other tests
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_are_wrong_are_refused(name: str) -> None:
    found = foreign_errors(name, {argument: labels_for(name, argument) for argument in FUNCTIONS[name][1]})
    assert not found, "\n".join(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_arguments_that_are_wrong_are_refused(name: str) -> None:
    found = foreign_errors(name, {argument: list(WRONG) for argument in FUNCTIONS[name][1]})
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "named"])
def test_arguments_that_are_right_are_taken(name: str) -> None:
    """So that the test above is not one of functions that refuse everything."""
    function, right = FUNCTIONS[name]
    assert run(function, right)


def test_an_error_that_is_not_the_librarys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail."""
    monkeypatch.setitem(FUNCTIONS, "int", (lambda text: int(text), {"text": "3"}))
    assert foreign_error("int", "text", "three", lowers=True).startswith("ValueError: invalid literal")
    assert foreign_error("int", "text", "4", lowers=True) == ""
