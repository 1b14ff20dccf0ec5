"""Code that exists only for speed: CUDA graphs, kernels, precision, threads."""
