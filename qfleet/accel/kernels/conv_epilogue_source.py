"""CUDA source of the convolution epilogue: bias, optional LayerNorm and ReLU in one pass over memory.

    finish     x ─▶ v = scale · x + bias ─▶ ReLU(v), or ReLU(weight · (v − mean) / deviation + shift)
    unfinish   its gradient: of x, and per image a partial sum for bias, weight and shift

A block processes one bfloat16 image, channels-last. A thread processes eight elements at a time,
always of the same eight channels, so that per-channel values stay in its registers.
"""

from __future__ import annotations

from qfleet.accel.kernels.bf16 import BF16_HELPERS, VECTOR_WIDTH
from qfleet.accel.kernels.kernel_compiler import BLOCK_SIZE

NORM, PLANAR, BIAS = 1, 2, 4
"""Flags: with LayerNorm; channels-first output, as dense layers expect it; with bias."""

EPILOGUE_SOURCE = BF16_HELPERS + f"""
#define NORM {NORM}
#define PLANAR {PLANAR}
#define BIAS {BIAS}
""" + """
// Sum over all threads of a block: 16 threads add 16 values each, then every thread adds their sums.
__device__ float block_sum(float value, float* shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    float sum = 0;
    if (threadIdx.x < 16) for (int k = threadIdx.x; k < BLOCK; k += 16) sum += shared[k];
    __syncthreads();
    if (threadIdx.x < 16) shared[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (int k = 0; k < 16; k++) sum += shared[k];
    __syncthreads();
    return sum;
}

// Parameters of a thread's eight channels.
struct Channels {
    float bias[8], weight[8], shift[8], scale;

    __device__ Channels(const unsigned short* b, const unsigned short* w, const unsigned short* s, int flags, int c,
                        double scale) : scale(scale) {
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            bias[k] = flags & BIAS ? to_float(b[c + k]) : 0;
            weight[k] = flags & NORM ? to_float(w[c + k]) : 1;
            shift[k] = flags & NORM ? to_float(s[c + k]) : 0;
        }
    }

    __device__ __forceinline__ void read(const unsigned short* from, float* v) const {
        load8(from, v);
        #pragma unroll
        for (int k = 0; k < 8; k++) v[k] = v[k] * scale + bias[k];
    }
};

extern "C" __global__ void finish(const unsigned short* x, unsigned short* out, const unsigned short* bias,
                                  const unsigned short* weight, const unsigned short* shift, float* stats,
                                  int channels, int pixels, int flags, double scale, double eps) {
    __shared__ float shared[BLOCK];
    int norm = flags & NORM, planar = flags & PLANAR, n = channels * pixels, stride = blockDim.x * 8;
    int first = threadIdx.x * 8, c = first % channels;
    const Channels own(bias, weight, shift, flags, c, scale);
    const unsigned short* image = x + (size_t)blockIdx.x * n;
    unsigned short* result = out + (size_t)blockIdx.x * n;
    float v[8], mean = 0, inverse = 1;
    if (norm) {
        float sum = 0;
        for (int i = first; i < n; i += stride) {
            own.read(image + i, v);
            for (int k = 0; k < 8; k++) sum += v[k];
        }
        mean = block_sum(sum, shared) / n;
        sum = 0;
        for (int i = first; i < n; i += stride) {
            own.read(image + i, v);
            for (int k = 0; k < 8; k++) sum += (v[k] - mean) * (v[k] - mean);
        }
        inverse = 1 / sqrtf(block_sum(sum, shared) / n + (float)eps);
        if (threadIdx.x == 0) { stats[2 * blockIdx.x] = mean; stats[2 * blockIdx.x + 1] = inverse; }
    }
    for (int i = first; i < n; i += stride) {
        own.read(image + i, v);
        for (int k = 0; k < 8; k++) {
            float y = (v[k] - mean) * inverse * own.weight[k] + own.shift[k];
            v[k] = y < 0 ? 0 : y;   // NaN stays NaN and is detected
        }
        if (planar) for (int k = 0; k < 8; k++) result[(c + k) * pixels + i / channels] = to_bf16(v[k]);
        else store8(result + i, v);
    }
}

extern "C" __global__ void unfinish(const unsigned short* dy, const unsigned short* x, unsigned short* dx, float* parts,
                                    const unsigned short* bias, const unsigned short* weight,
                                    const unsigned short* shift, const float* stats, int channels, int pixels,
                                    int flags, double scale) {
    __shared__ float shared[8 * BLOCK];
    int norm = flags & NORM, planar = flags & PLANAR, n = channels * pixels, stride = blockDim.x * 8;
    int first = threadIdx.x * 8, c = first % channels;
    const Channels own(bias, weight, shift, flags, c, scale);
    const unsigned short* image = x + (size_t)blockIdx.x * n;
    const unsigned short* grad_out = dy + (size_t)blockIdx.x * n;
    float mean = norm ? stats[2 * blockIdx.x] : 0, inverse = norm ? stats[2 * blockIdx.x + 1] : 1;
    float v[8], g[8], sums[3][8] = {}, level = 0, slope = 0;

    auto load = [&](int i) {   // v: normalised value, g: gradient before the ReLU
        own.read(image + i, v);
        if (planar) for (int k = 0; k < 8; k++) g[k] = to_float(grad_out[(c + k) * pixels + i / channels]);
        else load8(grad_out + i, g);
        for (int k = 0; k < 8; k++) {
            v[k] = (v[k] - mean) * inverse;
            if (v[k] * own.weight[k] + own.shift[k] <= 0) g[k] = 0;
        }
    };
    if (norm) {
        for (int i = first; i < n; i += stride) {
            load(i);
            for (int k = 0; k < 8; k++) { level += g[k] * own.weight[k]; slope += g[k] * own.weight[k] * v[k]; }
        }
        level = block_sum(level, shared) / n;
        slope = block_sum(slope, shared) / n;
    }
    for (int i = first; i < n; i += stride) {
        load(i);
        for (int k = 0; k < 8; k++) {
            float d = (g[k] * own.weight[k] - level - v[k] * slope) * inverse;
            sums[0][k] += d;
            sums[1][k] += g[k] * v[k];
            sums[2][k] += g[k];
            v[k] = d * own.scale;
        }
        store8(dx + (size_t)blockIdx.x * n + i, v);
    }
    // Per channel, the sum over the threads that processed it.
    int rows = norm ? 3 : 1;
    for (int row = 0; row < rows; row++) {
        __syncthreads();
        for (int k = 0; k < 8; k++) shared[first + k] = sums[row][k];
        __syncthreads();
        for (int j = threadIdx.x; j < channels; j += blockDim.x) {
            float sum = 0;
            for (int at = j; at < stride; at += channels) sum += shared[at];
            parts[((size_t)blockIdx.x * rows + row) * channels + j] = sum;
        }
    }
}
"""


def channels_supported(channels: int) -> bool:
    """True if a thread always processes the same eight channels."""
    return channels % VECTOR_WIDTH == 0 and (VECTOR_WIDTH * BLOCK_SIZE) % channels == 0
