"""Statistics of masks that follow from their blocks. That they match the cells is tested with the lowerings."""

import flexmask as fm


def test_operations_of_partial_and_full_blocks() -> None:
    stats = fm.causal().stats(256, block_size=128)
    assert (stats.partial_blocks, stats.full_blocks, stats.empty_blocks) == (2, 1, 1)
    assert stats.flops(d_head=64) == 3 * 2 * (2 * 128 * 128 * 64)
