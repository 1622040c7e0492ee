"""What is measured, in sections: each row of a section compares flexmask with its peers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexmask
from benchmarks.compiled import compiled_training
from benchmarks.gym import generated, same_blocks
from benchmarks.huggingface import DOCUMENT, HEADS, IMPLEMENTATIONS, LAYERS, make_lowered, training_step
from benchmarks.kernels import attention_kernels
from benchmarks.measuring import Measurement, measure, wait
from benchmarks.pictures import drawings
from benchmarks.plans import decoding_by_plan, lowering_by_plan
from benchmarks.rows import Row, Section
from benchmarks.steps import decoding_step, dropout, named_scores, short_sequences
from benchmarks.workloads import Workload, causal_work, even_work, packed_work, window_work, workloads
from flexmask import Mask, attention, causal, document, key_padding, kv, prefix_lm, q, sliding_window
from flexmask.lowering.mask_mod import MaskMod

__all__ = ["sections"]

#: Cells of a mask up to which torch's own create_block_mask is measured, as it is (beyond, it takes more memory than a large
#: machine has) and compiled (beyond, a run takes half a minute).
MOST_EAGER, MOST_COMPILED = 2**30, 2**34
#: Attention implementations of transformers that train on the CPU.
TRAINED = ("flexmask", "sdpa")


def sections(device: str, *, quick: bool) -> dict[str, Callable[[], Section]]:
    """What makes each section for a device, by its title; ``quick`` ones take about a minute."""
    found: dict[str, Callable[[], Section]] = {"BlockMask": partial(_block_masks, device, quick)}
    if find_spec("attn_gym") and not quick:
        found["attention-gym"] = partial(_generators, device)
    found |= {
        "Decoding": partial(_decoding, device),
        "Attention": partial(_attention, device, quick),
        "BlockMask by plan": partial(lowering_by_plan, device, quick=quick),
        "Decoding by plan": partial(decoding_by_plan, device),
        "Short sequences": partial(short_sequences, device, quick=quick),
        "Dropout": partial(dropout, device, quick=quick),
        "Scores by name": partial(named_scores, device, quick=quick),
        "A decoding step": partial(decoding_step, device),
    }
    if not quick and device == "cpu":
        found["A compiled training step"] = compiled_training
        if find_spec("flexmask_transformers"):
            found |= {"Masks in Transformers": _model_masks, "A training step in Transformers": _training}
    if not quick:
        found["Kernels"] = partial(_kernels, device)
    if device == "cpu":
        return found | {"Pictures": partial(_pictures, quick)}
    return found | {"Attention kernels": partial(attention_kernels, device), "262,144 packed tokens": partial(_long, device)}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


# ---------------------------------------------------------------- block masks


def _block_masks(device: str, quick: bool) -> Section:
    rows = [Row(work.name, work.length, _makers(work, device)) for work in workloads(device, quick=quick)]
    text = (
        "From a mask with its tensors to the finished `BlockMask` with its `q_*` lists. Each run gets a new mask, made before "
        "its time starts. `create_block_mask` is torch's, as it is (up to 2**30 cells, where it takes 10 GiB) and under "
        "`torch.compile` after its compilation (up to 2**34 cells, where it takes seconds)."
    )
    return Section("BlockMask", text, "flexmask", rows)


def _makers(work: Workload, device: str) -> dict[str, Callable[[], Measurement]]:
    sizes = work.batch, work.heads, work.length, work.length
    cells = work.length**2 * (work.batch or 1) * (work.heads or 1)

    def peer(create: Callable[..., Any]) -> Measurement:
        return measure(lambda _: create(work.mask_mod, *sizes, device=device), device=device)

    def ours(mask: Mask) -> object:
        return mask.block_mask(work.length, batch=work.batch, heads=work.heads, device=device)

    candidates: dict[str, Callable[[], Measurement]] = {"flexmask": lambda: measure(ours, work.mask, device=device)}
    if cells <= MOST_EAGER:
        candidates["create_block_mask"] = lambda: peer(create_block_mask)
    if cells <= MOST_COMPILED:
        candidates["compiled create_block_mask"] = lambda: peer(_compiled(create_block_mask))
    return candidates


# ---------------------------------------------------------------- attention-gym


def _generators(device: str) -> Section:
    rows = []
    for one in generated(device):
        sizes = 1, one.heads, one.q_len, one.kv_len
        exact = flexmask.from_mask_mod(one.mask_mod, device=device).rows(*sizes[2:], batch=1, heads=one.heads).exact
        name = one.name if exact else f"{one.name} (does not separate)"
        makers = {"flexmask": flexmask.create_block_mask, "create_block_mask": create_block_mask}
        if not same_blocks(*(make(one.mask_mod, *sizes, device=device) for make in makers.values())):
            raise AssertionError(f"{one.name}: other blocks than torch's")
        candidates: dict[str, Callable[[], Measurement]] = {
            of: partial(_made, make, one.mask_mod, sizes, device) for of, make in makers.items()
        }
        rows.append(Row(name, one.kv_len, candidates))
    text = (
        "`flexmask.create_block_mask` and torch's own on the `mask_mod` of attention-gym's generators, tracing included; "
        "checked before that both list the same blocks. Where a mask does not separate, some cells are evaluated."
    )
    return Section("attention-gym", text, "flexmask", rows)


def _made(make: Callable[..., BlockMask], mask_mod: MaskMod, sizes: tuple[int, ...], device: str) -> Measurement:
    return measure(lambda _: make(mask_mod, *sizes, device=device), device=device)


# ---------------------------------------------------------------- transformers


def _model_masks() -> Section:
    rows = [Row("causal & document", length, _made_by(length)) for length in (8192, 32768)]
    text = (
        f"What a forward of a decoder of Transformers makes of packed documents of {DOCUMENT} tokens, for each "
        "`attn_implementation`: a BlockMask, and for `sdpa` the table of all cells. flexmask traces the function of transformers "
        "each time. `flex_attention` compiles `create_block_mask`; its compilation is not counted."
    )
    return Section("Masks in Transformers", text, "flexmask", rows)


def _made_by(length: int) -> dict[str, Callable[[], Measurement]]:
    return {name: partial(_measured_model, make_lowered, name, length) for name in IMPLEMENTATIONS}


def _training() -> Section:
    rows = [
        Row(
            f"{LAYERS} layers, {hidden} channels",
            4096,
            {name: partial(_measured_model, training_step, name, 4096, hidden) for name in TRAINED},
        )
        for hidden in (128, 256, 512)
    ]
    text = (
        f"Loss and gradients of a Llama of {LAYERS} layers and {HEADS} heads in Transformers, on packed documents of {DOCUMENT} "
        "tokens. The wider the model, the more of the time is in its linear layers, which are the same for both."
    )
    return Section("A training step in Transformers", text, "flexmask", rows)


def _measured_model(make: Callable[..., Callable[[Any], object]], *arguments: Any) -> Measurement:
    return measure(make(*arguments), seconds=6.0)


# ---------------------------------------------------------------- decoding


def _decoding(device: str) -> Section:
    length = 2**17
    offset = torch.tensor([length - 1], device=device)
    ids = packed_work(length, device).mask()
    masks = {
        "causal": causal(),
        "window of 256": sliding_window(size=256),
        "causal & document(lengths=[...])": causal() & document(lengths=[512] * (length // 512)),
        "causal & document(ids) & key_padding, tensors": ids,
    }
    rows = []
    for name, mask in masks.items():
        for kind, place in (("an int", length - 1), ("a tensor", offset)):
            run = partial(_step, mask, length, place, device)
            rows.append(Row(f"{name}, q_offset {kind}", length, {"flexmask": partial(measure, run, device=device)}))
    text = "The `BlockMask` of one query behind 131,072 keys, as each step of decoding needs it. The mask stays the same value."
    return Section("Decoding", text, "flexmask", rows)


def _step(mask: Mask, length: int, place: int | Tensor, device: str, _: None) -> object:
    return mask.block_mask(1, length, q_offset=place, device=device)


# ---------------------------------------------------------------- kernels

LENGTH = 1024


def _kernels(device: str) -> Section:
    base = [causal(), sliding_window(size=100), prefix_lm(300), document(lengths=[400, 624]), key_padding([900])]
    twenty: list[Mask] = [*base, *(base[0] & mask for mask in base[1:]), *(~mask for mask in base)]
    twenty += [*(mask | (kv < 4) for mask in base), q // 64 == kv // 64]
    ids = (torch.arange(LENGTH, device=device) >= 400).long()
    closures: list[MaskMod] = [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: (q >= kv) & (q - kv < 100),
        lambda b, h, q, kv: (q >= kv) | (kv < 300),
        lambda b, h, q, kv: ids[q] == ids[kv],
        lambda b, h, q, kv: kv < 900,
    ]

    def ours(masks: list[Mask]) -> Measurement:
        return _in_turn([mask.block_mask(LENGTH, device=device) for mask in masks], device)

    def by_hand() -> Measurement:
        return _in_turn([create_block_mask(mod, None, None, LENGTH, LENGTH, device=device) for mod in closures], device)

    rows = [
        Row("5 masks", LENGTH, {"flexmask": partial(ours, base), "hand-written": by_hand}),
        Row("20 masks", LENGTH, {"flexmask": partial(ours, twenty)}),
    ]
    text = "Masks in turn through one compiled FlexAttention (4 heads of 64), starting uncompiled: all calls together."
    return Section("Kernels", text, "flexmask", rows)


def _in_turn(block_masks: list[BlockMask], device: str) -> Measurement:
    query = torch.randn(1, 4, LENGTH, 64, device=device)
    compiled = _compiled(flex_attention)
    torch.compile(torch.sin)(query)  # the compiler itself is loaded once
    counters.clear()
    wait(device)
    start = time.perf_counter()
    without_caches = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    with warnings.catch_warnings(), torch.no_grad(), without_caches:
        warnings.simplefilter("ignore")  # torch says what it does without caches
        for block_mask in block_masks:
            compiled(query, query, query, block_mask=block_mask)
    wait(device)
    graphs = counters["stats"]["unique_graphs"]
    return Measurement(time.perf_counter() - start, 1, None, f"{graphs} {'graph' if graphs == 1 else 'graphs'}")


# ---------------------------------------------------------------- attention


def _attention(device: str, quick: bool) -> Section:
    length = 1024 if quick else 4096
    query, key, value = (torch.randn(1, 8, length, 64, device=device) for _ in range(3))
    inputs = query, key, value
    work = [window_work(length), even_work(length, device), causal_work(length)]
    rows = [Row(f"{one.name}, forward", length, _forward(one, inputs, device)) for one in work]
    rows += [Row(f"{one.name}, forward and backward", length, _backward(one, inputs, device)) for one in work[:2]]
    text = (
        "8 heads of 64, float32, batch 1. `flex` counts without its BlockMask, as in a model that shares one among its layers; "
        "it has no gradients on the CPU. Only causal attention has a fused kernel."
    )
    return Section("Attention", text, "flexmask sdpa", rows)


Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _forward(work: Workload, inputs: Inputs, device: str) -> dict[str, Callable[[], Measurement]]:
    length, mask = work.length, work.mask()

    def timed(run: Callable[[], object]) -> Measurement:
        with torch.no_grad():
            return measure(lambda _: run(), device=device)

    def dense() -> Measurement:
        cells = mask.dense(length, device=device)
        return timed(lambda: F.scaled_dot_product_attention(*inputs, attn_mask=cells))

    def flex(block_mask: BlockMask) -> Measurement:
        compiled = _compiled(flex_attention)
        return timed(lambda: compiled(*inputs, block_mask=block_mask))

    def by_hand() -> Measurement:
        return flex(create_block_mask(work.mask_mod, None, None, length, length, device=device))

    candidates: dict[str, Callable[[], Measurement]] = {
        "flexmask sdpa": lambda: timed(lambda: attention(*inputs, mask, backend="sdpa")),
        "flexmask flex": lambda: flex(mask.block_mask(length, device=device)),
        "hand-written flex": by_hand,
        "dense SDPA": dense,
    }
    if str(mask) == "causal":
        candidates["fused is_causal"] = lambda: timed(lambda: F.scaled_dot_product_attention(*inputs, is_causal=True))
    return candidates


def _backward(work: Workload, inputs: Inputs, device: str) -> dict[str, Callable[[], Measurement]]:
    mask = work.mask()
    cells = mask.dense(work.length, device=device)

    def trained(run: Callable[..., Tensor]) -> Measurement:
        query, key, value = (tensor.clone().requires_grad_() for tensor in inputs)
        return measure(lambda _: torch.autograd.grad(run(query, key, value).sum(), (query, key, value)), device=device)

    return {
        "flexmask sdpa": lambda: trained(lambda q, k, v: attention(q, k, v, mask, backend="sdpa")),
        "dense SDPA": lambda: trained(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=cells)),
    }


# ---------------------------------------------------------------- pictures


def _pictures(quick: bool) -> Section:
    rows = []
    for length in [2**12] if quick else [2**12, 2**14, 2**17, 2**20]:
        for name, runs in drawings(packed_work(length, "cpu")):
            rows.append(Row(name, length, {of: partial(measure, _drawn(run)) for of, run in runs.items()}))
    text = "From a packed mask (causal & document & key_padding) to the written file."
    return Section("Pictures", text, "flexmask", rows)


def _drawn(run: Callable[[], object]) -> Callable[[None], object]:
    return lambda _: run()


# ---------------------------------------------------------------- long sequences on a GPU


def _long(device: str) -> Section:
    """The cost of building the mask, compared with one attention over it."""
    length = 2**18
    work = packed_work(length, device)
    query, key, value = (torch.randn(1, 16, length, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    mask = work.mask()

    def forward() -> Measurement:
        compiled, block_mask = _compiled(flex_attention), mask.block_mask(length, device=device)
        with torch.no_grad():
            return measure(lambda _: compiled(query, key, value, block_mask=block_mask), device=device)

    rows = [
        Row("its BlockMask", length, {"flexmask": lambda: measure(lambda m: m.block_mask(length), work.mask, device=device)}),
        Row("attention forward, 16 heads of 64, bfloat16", length, {"flexmask": forward}),
    ]
    return Section("262,144 packed tokens", "", "flexmask", rows)
