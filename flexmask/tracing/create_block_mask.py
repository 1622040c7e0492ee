"""A drop-in replacement for ``torch.nn.attention.flex_attention.create_block_mask``."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import BlockMask

from flexmask import _sync
from flexmask._checks import checked_int
from flexmask.catalogue import empty
from flexmask.expr.mask import Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.sizes import own_sizes
from flexmask.lowering.block_mask import add_write_order, block_mask, check_write_order
from flexmask.lowering.mask_mod import Form, MaskMod
from flexmask.tracing.trace import MaskLike, as_mask, trace_function


def create_block_mask(
    mask_mod: MaskLike,
    B: int | None,  # noqa: N803 - the names are torch's
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The same BlockMask as torch's ``create_block_mask``. The time depends on the key intervals, not on ``Q_LEN * KV_LEN``.

    Args:
        mask_mod: a function of ``(b, h, q_idx, kv_idx)``, which is traced (see :func:`flexmask.from_mask_mod`) and is the
            ``mask_mod`` of the result; or a mask or its text.
        B: sequences; None for 1, or for the batch of a mask's data. A function that reads ``ids[b, ...]`` needs it: with None
            all sequences get the blocks of the first.
        H: heads; None for 1, or for the heads of a mask's data.
        Q_LEN: queries.
        KV_LEN: keys.
        device: by default, as in torch, the current accelerator, else the CPU; for a mask, the device of its tensors.
        BLOCK_SIZE: tokens in a block, or the pair (queries, keys).
        _compile: ignored, since nothing is compiled.
        separate_full_blocks: whether full blocks have lists of their own, in which FlexAttention does not call ``mask_mod``.
        compute_dq_write_order: whether to add the write order of FlexAttention's deterministic backward pass, in time linear in
            the number of listed blocks (with one host sync on a GPU, to count them). From torch 2.13.
        dq_kv_order: the order of key blocks in it: True for descending, False for ascending.

    Raises:
        LoweringError: an argument that is not supported, or a captured tensor that is too short or on another device.
        OperandError: ``mask_mod`` is neither a mask nor a function of four indices.
        TraceError: the function does not return one truth value per cell.

    Warns:
        UserWarning: ``B`` or ``H`` is None, but the function indexes data of several sequences or heads by ``b`` or ``h``.

    Source: ``torch.nn.attention.flex_attention.create_block_mask``.
    """
    check_write_order(compute_dq_write_order, dq_kv_order)
    B, H = (None if n is None else checked_int(n, name, least=None) for name, n in (("B", B), ("H", H)))  # noqa: N806
    form: Form | MaskMod = "auto"
    if not callable(mask_mod):
        mask, where = as_mask(mask_mod, "mask_mod"), device
    else:
        where = _sync.resolve_device(torch.accelerator.current_accelerator() or "cpu" if device is None else device)
        mask = trace_function(mask_mod, device=where)
        _warn_of_first_only(mask, {"B": B, "H": H})
        form, B, H = mask_mod, 1 if B is None else B, 1 if H is None else H  # noqa: N806
    if 0 in (B, H):  # no cell, so any mask will do
        context = replace(bind(empty(), Q_LEN, KV_LEN, B or 1, H or 1, 0, where), full_batch=1 if B is None else B)
    else:
        context = bind(mask, Q_LEN, KV_LEN, B, H, 0, where)
    made = block_mask(context, BLOCK_SIZE, form, separate_full_blocks=separate_full_blocks, heads=H)
    if compute_dq_write_order:
        add_write_order(made, descending=dq_kv_order)
    return made


def _warn_of_first_only(mask: Mask, given: dict[str, int | None]) -> None:
    """Warns where a mask has data of several sequences or heads, of which only those of the first are computed."""
    for axis, size in own_sizes(mask).items():
        name, each = axis.upper(), "sequence" if axis == "b" else "head"
        if given[name] is None and size > 1:
            warnings.warn(
                f"mask_mod reads data of {size} {each}s by {axis}, but {name}=None computes the first {each} only, and all "
                f"others get its blocks: give {name}={size}",
                UserWarning,
                stacklevel=3,
            )
