"""CUDA source of the value head: from features to action values, with a state value if dueling.

    rate      a = Wₐ h + bₐ; if dueling, v = Wᵥ h′ + bᵥ and q = v + a − mean a; optional ReLU of h, h′
    unrate    per item: dh, dh′ and the gradient of every output
    weigh     gradients of weights and biases, one partial sum per ITEMS_PER_PARTIAL_SUM items

Outputs are few and batches small: a library launches a dozen kernels, most of which convert data.
Here features and weights are bfloat16, and all sums are float32.
"""

from __future__ import annotations

from qfleet.accel.kernels.bf16 import BF16_HELPERS

ITEMS_PER_PARTIAL_SUM = 32
MAX_ACTIONS = 31

HEAD_SOURCE = BF16_HELPERS + """
__device__ __forceinline__ float rectified(float x, int relu) { return relu && x < 0 ? 0 : x; }

// One warp per item: each thread takes eight features of every 256, for all outputs, then sums one output. The output
// after the actions is the state value.
extern "C" __global__ void rate(const unsigned short* h, const unsigned short* h2, const unsigned short* wa,
                                const unsigned short* ba, const unsigned short* wv, const unsigned short* bv, float* q,
                                int items, int width, int actions, int dueling, int relu) {
    __shared__ float parts[BLOCK][33];   // 33: avoids bank conflicts
    __shared__ float found[BLOCK];
    int lane = threadIdx.x % 32, first = threadIdx.x - lane, item = blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    if (item < items) for (int output = 0; output < actions + dueling; output++) {
        int state = output == actions;
        const unsigned short* from = (state ? h2 : h) + (size_t)item * width;
        const unsigned short* by = state ? wv : wa + (size_t)output * width;
        float sum = 0, x[8], w[8];
        for (int k = 8 * lane; k < width; k += 256) {
            load8(from + k, x);
            load8(by + k, w);
            for (int j = 0; j < 8; j++) sum += rectified(x[j], relu) * w[j];
        }
        parts[first + output][lane] = sum;
    }
    __syncthreads();
    float value = 0;
    if (item < items && lane < actions + dueling) {
        for (int k = 0; k < 32; k++) value += parts[threadIdx.x][k];
        value += to_float(lane == actions ? bv[0] : ba[lane]);
    }
    found[threadIdx.x] = value;
    __syncthreads();
    if (item >= items || lane >= actions) return;
    if (dueling) {
        float mean = 0;
        for (int a = 0; a < actions; a++) mean += found[first + a];
        value += found[first + actions] - mean / actions;
    }
    q[(size_t)item * actions + lane] = value;
}

// One thread per eight features of an item. `d_out` [items, actions + dueling] is the gradient of the outputs.
extern "C" __global__ void unrate(const float* dq, const unsigned short* h, const unsigned short* h2,
                                  const unsigned short* wa, const unsigned short* wv, unsigned short* dh,
                                  unsigned short* dh2, float* d_out, int items, int width, int actions, int dueling,
                                  int relu) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, item = i / (width / 8), k = i % (width / 8) * 8;
    if (item >= items) return;
    const float* dq_item = dq + (size_t)item * actions;
    float state = 0, sum[8] = {}, w[8], x[8];
    for (int a = 0; a < actions; a++) state += dq_item[a];
    for (int a = 0; a < actions; a++) {
        float g = dq_item[a] - (dueling ? state / actions : 0);
        if (k == 0) d_out[(size_t)item * (actions + dueling) + a] = g;
        load8(wa + (size_t)a * width + k, w);
        for (int j = 0; j < 8; j++) sum[j] += g * w[j];
    }
    load8(h + (size_t)item * width + k, x);
    for (int j = 0; j < 8; j++) if (relu && x[j] <= 0) sum[j] = 0;
    store8(dh + (size_t)item * width + k, sum);
    if (!dueling) return;
    if (k == 0) d_out[(size_t)item * (actions + 1) + actions] = state;
    load8(wv + k, w);
    load8(h2 + (size_t)item * width + k, x);
    for (int j = 0; j < 8; j++) sum[j] = relu && x[j] <= 0 ? 0 : state * w[j];
    store8(dh2 + (size_t)item * width + k, sum);
}

// One thread per weight, then per bias, and group of `share` items.
extern "C" __global__ void weigh(const float* d_out, const unsigned short* h, const unsigned short* h2, float* parts,
                                 int items, int width, int actions, int dueling, int relu, int share) {
    int outputs = actions + dueling, n = outputs * (width + 1), i = blockIdx.x * blockDim.x + threadIdx.x;
    int part = i / n, j = i % n, first = part * share, bias = j >= outputs * width;
    if (first >= items) return;
    int output = bias ? j - outputs * width : j / width, k = bias ? 0 : j % width;
    const unsigned short* from = (output == actions ? h2 : h) + k;
    float sum = 0;
    for (int item = first; item < first + share && item < items; item++)
        sum += d_out[(size_t)item * outputs + output]
               * (bias ? 1 : rectified(to_float(from[(size_t)item * width]), relu));
    parts[i] = sum;
}
"""
