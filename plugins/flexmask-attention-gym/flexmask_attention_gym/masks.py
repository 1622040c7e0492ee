"""All of attention-gym's masks; importing this module registers them."""

from flexmask_attention_gym.documents import (
    gym_batchify,
    gym_causal_document,
    gym_document,
    gym_prefix_lm,
    gym_shared_prefix,
)
from flexmask_attention_gym.drafts import gym_block_diffusion, gym_jetspec_training, gym_jetspec_tree
from flexmask_attention_gym.vision import (
    gym_flamingo,
    gym_morton_natten,
    gym_natten,
    gym_sta,
    gym_svg_spatial,
    gym_svg_temporal,
    gym_tiled_natten,
    gym_vsa,
)
from flexmask_attention_gym.windows import gym_causal, gym_dilated_window, gym_global_window, gym_sliding_window

__all__ = [
    "gym_batchify",
    "gym_block_diffusion",
    "gym_causal",
    "gym_causal_document",
    "gym_dilated_window",
    "gym_document",
    "gym_flamingo",
    "gym_global_window",
    "gym_jetspec_training",
    "gym_jetspec_tree",
    "gym_morton_natten",
    "gym_natten",
    "gym_prefix_lm",
    "gym_shared_prefix",
    "gym_sliding_window",
    "gym_sta",
    "gym_svg_spatial",
    "gym_svg_temporal",
    "gym_tiled_natten",
    "gym_vsa",
]
