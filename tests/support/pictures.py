"""Masks that pictures are drawn of."""

import torch

import flexmask as fm

STRIDED = fm.causal() & ((fm.q - fm.kv) % 3 == 0)  # its rows are only bounds


def packed(tokens: int, mean: int) -> list[int]:
    """Document ids of ``tokens`` tokens in documents of 1 to ``2 * mean`` tokens."""
    lengths = torch.randint(1, 2 * mean, (4 * tokens // mean + 1,), generator=torch.Generator().manual_seed(0))
    return torch.arange(len(lengths)).repeat_interleave(lengths)[:tokens].tolist()
