"""The kernels' sources are C++ but for a few words: here they are compiled for the CPU, and do what torch does.

Threads take turns here, one after the other, unless they wait for each other; then they are threads of the CPU. That a
barrier is missing might not be noticed. Reads and writes of four numbers at a time end the process where they do not
begin at a multiple of their size, as on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from qfleet.accel.kernels import bf16
from qfleet.accel.kernels.kernel_compiler import BLOCK_SIZE

ADD_UP = {"add_up": "float* rows, unsigned short* out, int items, int n"}
WORDS = """
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
static pthread_barrier_t barrier;
#define __syncthreads() pthread_barrier_wait(&barrier)
template <class T> struct Four {   // a GPU refuses what does not begin at a multiple of its size
    T x, y, z, w;
    Four() = default;
    Four(const Four& from) { from.check(); *this = from; }
    Four& operator=(const Four& from) {
        check(); x = from.x; y = from.y; z = from.z; w = from.w;
        return *this;
    }
    void check() const { if ((unsigned long long)this % sizeof(Four)) std::abort(); }
};
struct alignas(16) float4 : Four<float> {};
struct alignas(16) int4 : Four<int> {};
struct alignas(16) uint4 : Four<unsigned> {};
struct alignas(4) uchar4 : Four<unsigned char> {};
struct alignas(8) ushort4 : Four<unsigned short> {};
static struct { int x; } blockDim, gridDim;
static thread_local struct { int x; } threadIdx, blockIdx;
static unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
"""

def compiled(folder, name, text, caller):
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(WORDS + text + caller)
    options = ["-O1", "-ffp-contract=off", "-pthread", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, source, "-o", library], check=True, timeout=100)
    function = ctypes.CDLL(str(library)).call

    def call(*args):
        kinds = {int: ctypes.c_int, float: ctypes.c_double}
        function(*(ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else kinds[type(arg)](arg)
                   for arg in args))

    return call


def together(folder, source, signatures):
    """Kernels by name whose threads wait for each other: functions of a number of threads and arguments, as on a GPU.
    `signatures` are their arguments in C; the sum of parts, which all of them need, is there, too."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    found = {}
    for name, given in (signatures | ADD_UP).items():
        passed = ", ".join(word.split()[-1] for word in given.replace("*", "").split(","))
        caller = f"""extern "C" void call({given}, int blocks) {{
            blockDim.x = {BLOCK_SIZE};
            pthread_barrier_init(&barrier, nullptr, {BLOCK_SIZE});
            std::vector<std::thread> threads;   // they go through all blocks together
            for (int i = 0; i < {BLOCK_SIZE}; i++) threads.emplace_back([=] {{
                threadIdx.x = i;
                for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {{ {name}({passed}); __syncthreads(); }}
            }});
            for (auto& thread : threads) thread.join(); }}"""
        found[name] = launcher(compiled(folder, name, bf16.SUM_ROWS_SOURCE if name in ADD_UP else source, caller))
    return found


def launcher(call):
    def launch(threads, args):
        for arg in args:
            assert not isinstance(arg, torch.Tensor) or arg.is_contiguous() or arg.is_contiguous(
                memory_format=torch.channels_last)
        call(*args, -(-threads // BLOCK_SIZE))

    return launch
