"""Blocks: which blocks of a mask are empty, partial and full.

Takes key intervals ``[B', H', q_len, K]`` and a block size; gives the partial and the full blocks as a grid
``bool[B', H', q_blocks, kv_blocks]`` or, where that is large, as intervals of key blocks for each block row. Blocks that the
intervals leave open are decided by value ranges, and the others by evaluating cells.
"""
