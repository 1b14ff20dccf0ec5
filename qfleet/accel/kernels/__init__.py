"""Hand-written CUDA kernels and the layers that use them."""
