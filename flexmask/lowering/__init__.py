"""The lowerings: a mask as a dense tensor, a mask_mod, a BlockMask, and in figures."""
