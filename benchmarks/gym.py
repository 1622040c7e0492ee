"""attention-gym's generators at 4,096 tokens, each with arguments of the size that its paper or its demo has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

from flexmask.lowering.mask_mod import MaskMod

__all__ = ["Generated", "generated", "same_blocks"]

LENGTH = 4096
#: Lengths of the packed documents.
DOCUMENTS = [300, 900, 128, 1000, 700, 1068]


@dataclass(frozen=True)
class Generated:
    """A ``mask_mod`` of attention-gym, and the sizes that it is made for."""

    name: str
    mask_mod: MaskMod
    q_len: int = LENGTH
    kv_len: int = LENGTH
    heads: int = 1


def generated(device: str) -> Iterator[Generated]:
    """Every generator that gives a ``mask_mod``."""
    import attn_gym.masks as gym

    offsets = torch.tensor([0, *DOCUMENTS], device=device).cumsum(0).int()
    is_global = torch.zeros(LENGTH, dtype=torch.bool, device=device)
    is_global[[*range(8), 1000]] = True
    images = torch.tensor([[60 * i, 60 * i + 900] for i in range(16)], device=device)
    nodes = 512
    ancestors = gym.build_tree_ancestor_matrix([-1, *((i - 1) // 2 for i in range(1, nodes))], device=device)
    draw = torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 64, (1, 4, 64, 8), generator=draw).to(device)

    yield Generated("causal_mask", gym.causal_mask)
    yield Generated("sliding_window, 256", gym.generate_sliding_window(256))
    yield Generated("dilated_sliding_window, 256 by 4", gym.generate_dilated_sliding_window(256, 4))
    yield Generated("prefix_lm_mask, 512", gym.generate_prefix_lm_mask(512))
    yield Generated("doc_mask_mod of causal_mask, 6 documents", gym.generate_doc_mask_mod(gym.causal_mask, offsets))
    yield Generated("packed_causal_doc_mask_mod, 6 documents", gym.generate_packed_causal_doc_mask_mod(offsets))
    yield Generated("batchify_mask_mod of causal_mask, 512", gym.batchify_mask_mod(gym.causal_mask, 512))
    yield Generated("global_sliding_window, 128, 9 global", gym.generate_global_sliding_window(128, is_global))
    yield Generated("vision_cross_attention_mask_mod, 16 x 256", gym.generate_vision_cross_attention_mask_mod(images, 256))
    yield Generated("natten, 64 x 64, kernel 13", gym.generate_natten(64, 64, 13, 13))
    yield Generated("tiled_natten, 64 x 64, kernel 13, tile 8", gym.generate_tiled_natten(64, 64, 13, 13, 8, 8))
    yield Generated("morton_natten, 64 x 64, kernel 13", gym.generate_morton_natten(64, 64, 13, 13))
    yield Generated("sta_mask_mod_2d, 64 x 60 and 256 of text", gym.generate_sta_mask_mod_2d((64, 60), (24, 20), (8, 4), 256))
    yield Generated(
        "sta_mask_mod_3d, 15 x 16 x 16 and 256 of text",
        gym.generate_sta_mask_mod_3d((15, 16, 16), (9, 12, 12), (3, 4, 4), 256),
    )
    yield Generated("spatial_head_mask_mod, 10 x 387", gym.generate_spatial_head_mask_mod(226, 10, 387, 2, True, 128))
    yield Generated("temporal_head_mask_mod, 10 x 387", gym.generate_temporal_head_mask_mod(226, 10, 387, 2))
    yield Generated("block_diffusion_mask, blocks of 32", gym.generate_block_diffusion_mask(LENGTH // 2, 32))
    yield Generated("jetspec_training_mask_mod, blocks of 16", gym.generate_jetspec_training_mask_mod(1024, 16), LENGTH - 1024)
    tree = gym.generate_jetspec_tree_causal_mask_mod(LENGTH - nodes, ancestors)
    yield Generated(f"jetspec_tree_causal_mask_mod, {nodes} nodes", tree, nodes)
    prefixes = torch.tensor([0, 0, 0, 3, 3, 3], device=device)
    yield Generated("shared_prefix_mask_mod, 6 documents", gym.generate_shared_prefix_mask_mod(offsets, prefixes))
    yield Generated("vsa_mask_mod, 8 of 64 tiles, 4 heads", gym.generate_vsa_mask_mod(tiles, 64), heads=4)


def same_blocks(left: BlockMask, right: BlockMask) -> bool:
    """Whether two BlockMasks list the same blocks; what stands behind the last entry of a list means nothing."""
    for kind in ("kv", "full_kv", "q", "full_q"):
        numbers = [getattr(one, f"{kind}_num_blocks") for one in (left, right)]
        indices = [getattr(one, f"{kind}_indices") for one in (left, right)]
        if not torch.equal(*numbers) or indices[0].shape != indices[1].shape:
            return False
        listed = torch.arange(indices[0].shape[-1], device=numbers[0].device) < numbers[0].unsqueeze(-1)
        if not torch.equal(indices[0][listed], indices[1][listed]):
            return False
    return True
