"""Lowerings: what kernels take.

Takes a mask with the lengths it is lowered at; gives a dense ``bool[B, H, q_len, kv_len]``, a ``mask_mod`` or a ``BlockMask``.
`align_documents` lays documents out so that each begins at a block.
"""

from flexmask.lowering.align import AlignedDocuments, align_documents

__all__ = ["AlignedDocuments", "align_documents"]
