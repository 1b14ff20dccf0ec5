"""Shared parts of the CUDA kernels: bfloat16 conversion, eight values at a time, and a sum over rows."""

from __future__ import annotations

from typing import Any

import torch

from qfleet.accel.kernels.kernel_compiler import BLOCK_SIZE, compile_kernel, custom_kernels_allowed

VECTOR_WIDTH = 8

BF16_HELPERS = f"#define BLOCK {BLOCK_SIZE}" + """
__device__ __forceinline__ float to_float(unsigned short value) { return __uint_as_float((unsigned)value << 16); }

__device__ __forceinline__ unsigned short to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;   // NaN: rounding could turn it into a number
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

__device__ __forceinline__ void load8(const unsigned short* from, float* values) {
    uint4 packed = *(const uint4*)from;
    unsigned pairs[4] = {packed.x, packed.y, packed.z, packed.w};
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        values[2 * k] = __uint_as_float(pairs[k] << 16);
        values[2 * k + 1] = __uint_as_float(pairs[k] & 0xFFFF0000);
    }
}

__device__ __forceinline__ void store8(unsigned short* to, const float* values) {
    unsigned pairs[4];
    #pragma unroll
    for (int k = 0; k < 4; k++) pairs[k] = to_bf16(values[2 * k]) | (unsigned)to_bf16(values[2 * k + 1]) << 16;
    uint4 packed;
    packed.x = pairs[0]; packed.y = pairs[1]; packed.z = pairs[2]; packed.w = pairs[3];
    *(uint4*)to = packed;
}
"""

SUM_ROWS_SOURCE = BF16_HELPERS + """
// Sum of float32 rows as bfloat16; a block has eight columns, a thread every 32nd row of one of them.
extern "C" __global__ void add_up(const float* rows, unsigned short* out, int items, int n) {
    __shared__ float shared[BLOCK];
    int column = blockIdx.x * 8 + threadIdx.x % 8;
    float sum = 0;
    if (column < n)
        for (int row = threadIdx.x / 8; row < items; row += BLOCK / 8) sum += rows[(size_t)row * n + column];
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 8 || column >= n) return;
    for (int k = 8; k < BLOCK; k += 8) sum += shared[threadIdx.x + k];
    out[column] = to_bf16(sum);
}
"""


def launch_kernel(name: str, source: str, threads: int, args: list[Any]) -> None:
    """Launch a kernel that is known to compile."""
    found = compile_kernel(name, source)
    assert found is not None
    found(threads, args)


def kernels_available(weight: torch.Tensor, source: str, *names: str) -> bool:
    """True if custom kernels can be used for these weights: bfloat16, on a GPU, and they compile."""
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and custom_kernels_allowed()
        and compile_kernel("add_up", SUM_ROWS_SOURCE) is not None
        and all(compile_kernel(name, source) is not None for name in names)
    )


def sum_rows_bf16(parts: torch.Tensor) -> torch.Tensor:
    """Sum float32 rows [N, ...] to bfloat16 [...]."""
    sums = torch.empty(parts.shape[1:], dtype=torch.bfloat16, device=parts.device)
    launch_kernel(
        "add_up", SUM_ROWS_SOURCE, -(-sums.numel() // VECTOR_WIDTH) * BLOCK_SIZE,
        [parts, sums, len(parts), sums.numel()])
    return sums
