"""Blocks: which blocks of a mask are empty, partial and full.

Takes key intervals and a block size; gives a grid ``[B', H', q_blocks, kv_blocks]`` or, where that is large, sets of blocks as
intervals. Blocks that the intervals leave open are decided by ranges of values, and the rest cell by cell.
"""
