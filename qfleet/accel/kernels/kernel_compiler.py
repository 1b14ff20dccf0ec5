"""CUDA kernels for operations where a chain of library kernels is limited by memory bandwidth.

Compiled at first use by NVRTC, which comes with torch (about a second); no other compiler is
needed. If that fails, `compile_kernel` warns once and returns None, and the chain of library
kernels runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

log = logging.getLogger(__name__)

BLOCK_SIZE = 256
MAX_RESIDENT_THREADS = 132 * 8 * BLOCK_SIZE
"""Threads that a large GPU runs at once; a grid-stride loop needs no more."""

SPACE_TO_DEPTH_SOURCE = """
// Bytes [B, C, H, W] -> bfloat16 [B, H/s, W/s, C, s, s], s = 4: one thread per patch and channel.
extern "C" __global__ void lay(const unsigned char* x, unsigned short* out, int n, int channels, int height,
                               int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int c = i % channels, rest = i / channels;
    int w = rest % (width / 4); rest /= width / 4;
    int h = rest % (height / 4), b = rest / (height / 4);
    const unsigned char* corner = x + ((size_t)(b * channels + c) * height + h * 4) * width + w * 4;
    uint4 packed[2];
    unsigned* pairs = (unsigned*)packed;
    #pragma unroll
    for (int dy = 0; dy < 4; dy++) {   // integers below 256 are exact in bfloat16
        uchar4 four = *(const uchar4*)(corner + dy * width);
        pairs[2 * dy] = __float_as_uint((float)four.x) >> 16 | (__float_as_uint((float)four.y) & 0xFFFF0000);
        pairs[2 * dy + 1] = __float_as_uint((float)four.z) >> 16 | (__float_as_uint((float)four.w) & 0xFFFF0000);
    }
    ((uint4*)out)[2 * (size_t)i] = packed[0];
    ((uint4*)out)[2 * (size_t)i + 1] = packed[1];
}
"""

ADAM_SOURCE = """
// Adam with clipping, skipped for non-finite gradients; also writes rounded weights to the network.
struct Rule { float scale, size, root, beta1, beta2, rest1, rest2, eps; };

__device__ __forceinline__ void move(const Rule& rule, float gradient, float& mean, float& square, float& weight) {
    float g = gradient * rule.scale;
    mean = rule.beta1 * mean + rule.rest1 * g;
    square = rule.beta2 * square + rule.rest2 * g * g;
    weight = weight - rule.size * mean / (sqrtf(square) / rule.root + rule.eps);
}

__device__ __forceinline__ unsigned short rounded(float weight) {
    unsigned int bits = __float_as_uint(weight);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

extern "C" __global__ void adam(float* weights, const float* gradient, float* mean, float* square, const float* steps,
                                const float* norm, const bool* ok, unsigned short* data, const int* indices, int n,
                                int rounding, double rate, double beta1, double beta2, double eps, double clip) {
    __shared__ Rule shared;
    if (!*ok) return;
    if (threadIdx.x == 0) {
        double shrink = clip / ((double)*norm + 1e-6);
        shared.scale = clip > 0 && shrink < 1 ? shrink : 1;
        shared.size = rate / (1 - pow(beta1, (double)*steps));
        shared.root = sqrt(1 - pow(beta2, (double)*steps));
        shared.beta1 = beta1; shared.rest1 = 1 - beta1;
        shared.beta2 = beta2; shared.rest2 = 1 - beta2;
        shared.eps = eps;
    }
    __syncthreads();
    const Rule rule = shared;
    int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    for (int i = first; i < n / 4; i += stride) {   // four at a time, to wait for memory once
        float4 g = ((const float4*)gradient)[i], m = ((float4*)mean)[i], v = ((float4*)square)[i];
        float4 w = ((float4*)weights)[i];
        move(rule, g.x, m.x, v.x, w.x);
        move(rule, g.y, m.y, v.y, w.y);
        move(rule, g.z, m.z, v.z, w.z);
        move(rule, g.w, m.w, v.w, w.w);
        ((float4*)mean)[i] = m; ((float4*)square)[i] = v; ((float4*)weights)[i] = w;
        if (rounding) {
            int4 at = ((const int4*)indices)[i];
            ushort4 four;
            four.x = rounded(w.x); four.y = rounded(w.y); four.z = rounded(w.z); four.w = rounded(w.w);
            if (at.x % 4 == 0 && at.y == at.x + 1 && at.z == at.x + 2 && at.w == at.x + 3) {
                *(ushort4*)(data + at.x) = four;
            } else {   // channels-last weights, or the border of two parameters
                data[at.x] = four.x; data[at.y] = four.y; data[at.z] = four.z; data[at.w] = four.w;
            }
        }
    }
    for (int i = n / 4 * 4 + first; i < n; i += stride) {
        move(rule, gradient[i], mean[i], square[i], weights[i]);
        if (rounding) data[indices[i]] = rounded(weights[i]);
    }
}
"""

SOURCES = {"lay": SPACE_TO_DEPTH_SOURCE, "adam": ADAM_SOURCE}
ELEMENTS_PER_THREAD = 8
"""Elements that a thread of `join` copies."""

TensorLayout = tuple[int, int, int]
"""Elements of a tensor; channels and pixels per channel if it is channels-last, else 1 and 1."""


def concat_bf16_source(layouts: tuple[TensorLayout, ...]) -> str:
    """Source of a kernel that concatenates bfloat16 tensors of these layouts into a float32 vector.

    A block processes elements of one tensor, so that its threads do not diverge. Channels-last
    tensors are converted to channels-first.
    """
    rows, first, block = [], 0, 0
    for i, (size, channels, pixels) in enumerate(layouts):
        last = block + block_count((layouts[i],))
        rows.append(f"if (block < {last}) move(p{i}, out + {first}, {size}, block - {block}, {channels}, {pixels});")
        first, block = first + size, last
    arguments = ", ".join(f"const unsigned short* p{i}" for i in range(len(layouts)))
    return f"""
// {ELEMENTS_PER_THREAD} elements per thread, all loads issued before the first is used.
__device__ __forceinline__ void move(const unsigned short* from, float* out, int n, int block, int channels,
                                     int pixels) {{
    unsigned int found[{ELEMENTS_PER_THREAD}];
    int first = block * {ELEMENTS_PER_THREAD} * {BLOCK_SIZE} + threadIdx.x;
    #pragma unroll
    for (int k = 0; k < {ELEMENTS_PER_THREAD}; k++) {{
        int i = first + k * {BLOCK_SIZE};
        int image = i / (channels * pixels), c = i / pixels % channels, pixel = i % pixels;
        found[k] = i < n ? from[channels > 1 ? (image * pixels + pixel) * channels + c : i] : 0;
    }}
    #pragma unroll
    for (int k = 0; k < {ELEMENTS_PER_THREAD}; k++) {{
        int i = first + k * {BLOCK_SIZE};
        if (i < n) out[i] = __uint_as_float(found[k] << 16);
    }}
}}

extern "C" __global__ void join({arguments}, float* out) {{
    int block = blockIdx.x;
    {" else ".join(rows)}
}}
"""


def block_count(layouts: tuple[TensorLayout, ...]) -> int:
    """Number of blocks of the kernel `join` for tensors of these layouts."""
    return sum(-(-size // (ELEMENTS_PER_THREAD * BLOCK_SIZE)) for size, _, _ in layouts)


def custom_kernels_allowed() -> bool:
    """False while torch compiles or traces: compilers fuse operations themselves, and tracing does
    not see the writes of a custom kernel.
    """
    return not torch.compiler.is_compiling() and get_proxy_mode() is None


@cache
def compile_kernel(name: str, source: str | None = None) -> Callable[[int, list[Any]], None] | None:
    """Compile a kernel from SOURCES or from `source`; None if that fails.

    The result is called with the number of threads and the kernel's arguments.
    """
    try:
        compiled: Any = torch.cuda._compile_kernel(source or SOURCES[name], name)
    except Exception as error:  # library kernels do the same
        log.warning("the kernel %s cannot be compiled (%s); slower library kernels are used", name, error)
        return None

    def launch(threads: int, args: list[Any]) -> None:
        compiled(grid=(-(-threads // BLOCK_SIZE), 1, 1), block=(BLOCK_SIZE, 1, 1), args=args)

    return launch
