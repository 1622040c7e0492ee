"""attention-gym's mask generators as named masks of flexmask, and its picture of attention scores for any mask.

The masks are in :mod:`flexmask_attention_gym.masks`, which ``flexmask.masks`` and text find by themselves. Neither attention-gym
nor torch is imported before the first mask is made.
"""

from flexmask_attention_gym.pictures import visualize_attention_scores

__all__ = ["visualize_attention_scores"]

__version__ = "0.1.0"
