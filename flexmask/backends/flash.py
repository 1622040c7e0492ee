"""The backend ``flash``: FlexAttention's kernels of FlashAttention 4, for Hopper and Blackwell."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from flexmask.backends.backend import Backend, Call, Output
from flexmask.backends.flex import FLEX, run_flex
from flexmask.expr.mask import Mask
from flexmask.lowering import mask_mod
from flexmask.lowering.flash import TILE, WIDEST, flash_block_size, flash_refusal
from flexmask.plans import lowered
from flexmask.plans.lowered import LoweredMask
from flexmask.scores.placed import PlacedScore

#: What has kernels.
DEVICES, DTYPES, GENERATIONS = {"cuda"}, {torch.float16, torch.bfloat16}, (9, 10, 11)
#: The first torch whose kernels take blocks of key intervals as bits and have gradients of the logsumexp.
OLDEST = "2.15"
#: The modules whose functions test key intervals and tables, which every kernel computes alike.
KNOWN_MODS = {mask_mod.__name__, lowered.__name__}


def _supports(call: Call) -> str | None:
    device = call.query.device
    if device.type not in DEVICES:
        return f"FlashAttention 4 takes tensors on CUDA, got {device.type}; use backend='sdpa'"
    if torch.__version__ < OLDEST:
        return f"FlashAttention 4 takes torch {OLDEST} or newer, this is {torch.__version__}"
    if not _is_installed():
        return "FlashAttention 4 is not installed: pip install --pre flash-attn-4"
    return FLEX.reason_against(call) or refusal(call, _generation(device))


def refusal(call: Call, generation: int) -> str | None:
    """The reason why the kernels for a generation of GPUs do not compute a call, as of ``supports`` of a Backend.

    Args:
        call: the call.
        generation: 9 for Hopper, 10 and 11 for Blackwell.
    """
    use = "use backend='flex'"
    if generation not in GENERATIONS:
        return f"FlashAttention 4 takes masks on GPUs of compute capability 9, 10 and 11, this has {generation}; {use}"
    if call.query.dtype not in DTYPES:
        return f"FlashAttention 4 takes float16 and bfloat16, got {call.query.dtype}; {use}"
    if reason := _head_refusal(call.query.shape[-1], call.value.shape[-1], generation):
        return f"FlashAttention 4 {reason}; {use}"
    if unused := [name for name in ("dropout_p", "kernel_options") if getattr(call, name)]:
        return f"FlashAttention 4 has no {unused[0]}; {use}"
    if call.scale is not None and call.scale <= 0:
        return f"FlashAttention 4 takes a scale above 0, got {call.scale}; {use}"
    reason = _function_refusal(call) or _block_refusal(call, generation) or _gradient_refusal(call, generation)
    return f"{reason}; {use}" if reason else None


def _head_refusal(width: int, value_width: int, generation: int) -> str | None:
    if width % 8 or value_width % 8:
        return f"takes heads of a multiple of 8 channels, got D={width} and D_v={value_width}"
    if generation == 9 and not value_width <= width <= WIDEST:
        return f"takes heads with at most {WIDEST} channels and no more in the values, got D={width} and D_v={value_width}"
    if generation > 9 and max(width, value_width) > 128 and (width, value_width) not in ((192, 128), (WIDEST, WIDEST)):
        return f"takes heads of (D, D_v) up to (128, 128), (192, 128) and (256, 256) on Blackwell, got ({width}, {value_width})"
    return None


def _function_refusal(call: Call) -> str | None:
    """The reason against functions that FlashAttention 4 may compute otherwise than PyTorch, as % of negative numbers."""
    mask, change = call.mask, call.score_mod
    if change is not None and not isinstance(change, PlacedScore):
        return "a function as score_mod may have operations that are others in FlashAttention 4, so it takes flexmask.scores"
    if isinstance(mask, BlockMask) and mask.mask_mod.__module__ not in KNOWN_MODS:
        return (
            "the mask_mod of a BlockMask may have operations that are others in FlashAttention 4, so it takes BlockMasks of "
            "masks with at most 8 key intervals in a row, from mask.block_mask()"
        )
    if isinstance(mask, Mask) and not torch.compiler.is_compiling():  # where it is key intervals or a table of cells
        return flash_refusal(mask)
    return None


def _block_refusal(call: Call, generation: int) -> str | None:
    mask, wanted = call.mask, _block_size(call, generation)
    if not isinstance(mask, LoweredMask | BlockMask):
        return None
    size = mask.block_size if isinstance(mask, LoweredMask) else mask.BLOCK_SIZE
    if size == wanted:
        return None
    return f"FlashAttention 4 takes blocks of {wanted} here, and the mask has blocks of {size}: give it block_size={wanted}"


def _gradient_refusal(call: Call, generation: int) -> str | None:
    mask, change = call.mask, call.score_mod
    learned = isinstance(change, PlacedScore) and any(tensor.requires_grad for tensor in change.score.tensors)
    if torch.is_grad_enabled() and learned:
        return "FlashAttention 4 has no gradients of the tensors of a score"
    if mask is None or not call.needs_gradients():
        return None
    if generation > 9 and call.value.shape[-1] == WIDEST:
        return f"FlashAttention 4 has no backward pass with a mask for heads of {WIDEST} channels on Blackwell"
    if isinstance(mask, BlockMask) and mask.full_q_num_blocks is None:
        return "the backward pass of FlashAttention 4 takes full blocks as lists of their own: leave separate_full_blocks out"
    if torch.are_deterministic_algorithms_enabled() and (generation == 9 or getattr(mask, "dq_write_order", None) is None):
        return (
            "the backward pass of FlashAttention 4 with a mask is deterministic on Blackwell alone, with a BlockMask that has "
            "compute_dq_write_order=True"
        )
    return None


def _run(call: Call) -> Output:
    size = _block_size(call, _generation(call.query.device))
    return run_flex(call._replace(kernel_options={"BACKEND": "FLASH"}), size)


def _block_size(call: Call, generation: int) -> tuple[int, int]:
    query, key = call.query, call.key
    group = query.shape[1] // key.shape[1]
    return flash_block_size(generation, query.shape[2], group, query.shape[3], call.value.shape[3])


def _generation(device: torch.device) -> int:
    """The first number of the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)[0]


def _is_installed() -> bool:
    return _has_module("flash_attn.cute")


@cache
def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of its package
        return False


_known: Any
for _known in (_generation, _is_installed):  # torch.compiler.assume_constant_result, without an import of the compiler
    _known._dynamo_marked_constant = True

#: For fewer queries FlexAttention has a kernel that splits the keys of a head over programs, which FlashAttention here does not.
FLASH = Backend("flash", supports=_supports, run=_run, preferred_on=("cuda",), preferred_from=TILE)
