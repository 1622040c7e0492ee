"""FlexAttention's CUDA kernels for masks of this library, without a GPU; see `virtual_gpu`."""
