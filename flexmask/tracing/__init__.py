"""Tracing: from the functions that FlexAttention takes to masks.

Takes any ``mask_mod``, or a mask's text; gives the expression that it computes, with named masks where they are recognised and
calls where an operation has no expression. `create_block_mask` is a drop-in for torch's.
"""
