"""The weights that dropout keeps."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x45D9F3B % 2**32
    return x ^ (x >> 16)


def joined(state: int, number: int) -> int:
    return mixed((state + (number + 1) * 0x9E3779B1) % 2**32)


def is_kept(seed: int, p: float, b: int, h: int, row: int, column: int) -> bool:
    halves = seed % 2**32, seed % 2**64 // 2**32
    first, second, key = 0, 0x85EBCA6B, 0xC2B2AE35
    for number in (*halves, b, h, row):
        first, second = joined(first, number), joined(second, number)
    for number in (*halves, column):
        key = joined(key, number)
    first, second, key = first - first % 2, second | 1, key | 1
    x = (first * key * key + second * key) % 2**32
    return (x + 2**31) % 2**32 >= round(p * 2**32)


def kept_of(seed: int, p: float, *sizes: int) -> Tensor:
    cells = [is_kept(seed, p, *cell) for cell in product(*map(range, sizes))]
    return torch.tensor(cells).reshape(sizes)
