"""The kernels' sources do on a CPU (see `emulated`) what torch does."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from kernel_emulator import compiled
from torch.fx.experimental.proxy_tensor import make_fx

from qfleet.accel.kernels import kernel_compiler
from qfleet.accel.kernels.aligned import scatter_index
from qfleet.accel.kernels.gradients import concat_bf16, contiguous_piece
from qfleet.accel.kernels.images import space_to_depth
from qfleet.accel.kernels.kernel_compiler import SOURCES
from qfleet.optim.flat_params import Flat

BLOCK, GRID = 32, 3
EACH = f"""
    pthread_barrier_init(&barrier, nullptr, 1);
    gridDim.x = {GRID}; blockDim.x = {BLOCK};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
"""
CALLS = {
    "adam": """extern "C" void call(float* w, float* g, float* m, float* v, float* steps, float* norm, bool* sound,
        unsigned short* data, int* places, int n, int rounding, double rate, double b1, double b2, double eps,
        double clip) {
        EACH adam(w, g, m, v, steps, norm, sound, data, places, n, rounding, rate, b1, b2, eps, clip); }""",
    "lay": """extern "C" void call(unsigned char* x, unsigned short* out, int n, int channels, int high, int wide) {
        EACH lay(x, out, n, channels, high, wide); }"""}


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """A kernel by its name, as a function of tensors and numbers."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    folder = tmp_path_factory.mktemp("kernels")
    return {name: compiled(folder, name, text, CALLS[name].replace("EACH", EACH)) for name, text in SOURCES.items()}


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e3])
@pytest.mark.parametrize("shapes", [[(32, 4, 2, 2), (32,), (6, 7), (6,)], [(3,)], [(5, 2, 1, 2), (2,), (400,)]])
def test_adam_moves_and_rounds_as_torch_does(called, shapes, clip):
    torch.manual_seed(0)
    places = scatter_index([torch.Size(shape) for shape in shapes])
    n = len(places)
    weights, mean, square = torch.randn(n), torch.zeros(n), torch.zeros(n)
    twin = [each.clone() for each in (weights, mean, square)]
    data = torch.full((int(places.max()) + 9,), 7, dtype=torch.bfloat16)
    for number in range(1, 5):
        gradient, steps = torch.randn(n), torch.tensor(float(number))
        norm = gradient.norm()
        called["adam"](weights, gradient, mean, square, steps, norm, torch.tensor(True), data, places, n, 1, 1e-2, 0.9,
                       0.999, 1e-5, clip)
        clipped = gradient * min(1.0, clip / (float(norm) + 1e-6)) if clip else gradient
        torch._fused_adam_([twin[0]], [clipped], [twin[1]], [twin[2]], [], [steps], amsgrad=False, lr=1e-2, beta1=0.9,
                           beta2=0.999, weight_decay=0.0, eps=1e-5, maximize=False, grad_scale=None, found_inf=None)
    for mine, its, least in zip((weights, mean, square), twin, (1e-6, 1e-7, 1e-10), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=least)
    assert torch.equal(data[places.long()], weights.bfloat16())
    beyond = np.setdiff1d(np.arange(len(data)), places.numpy())
    assert (data[beyond] == 7).all()


def test_nothing_moves_where_a_gradient_is_not_sound(called):
    weights, zeros = torch.arange(10.0), torch.zeros(10)
    called["adam"](weights, zeros + 1, zeros, zeros, torch.tensor(1.0), torch.tensor(1.0), torch.tensor(False), weights,
                   weights, 10, 0, 1e-2, 0.9, 0.999, 1e-5, 0.0)
    assert torch.equal(weights, torch.arange(10.0)) and not zeros.any()


def test_pictures_are_laid_out_in_patches(called):
    pictures = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    room = torch.zeros(2, 2, 2, 48, dtype=torch.bfloat16)
    found, threads = room[:1], pictures.numel() // 16
    assert threads < BLOCK * GRID
    called["lay"](pictures, found, threads, 3, 8, 8)
    assert not room[1].any()
    assert torch.equal(found.permute(0, 3, 1, 2), space_to_depth(pictures, 4).bfloat16())


def test_gradients_are_joined_in_the_order_of_the_weights(called, tmp_path, monkeypatch):
    """As on a GPU: bfloat16, of convolutions with channels last, one with gaps, and more numbers than a block has."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Conv2d(5, 4, 1), torch.nn.Linear(7, 6),
                              torch.nn.Linear(61, 70))
    flat = Flat(net)
    torch.manual_seed(0)
    shapes = [parameter.shape for parameter in net.parameters()]
    grads = [torch.randn(shape).bfloat16() for shape in shapes]
    grads[0] = grads[0].to(memory_format=torch.channels_last)
    grads[4] = torch.randn(6, 14).bfloat16()[:, ::2]
    assert [contiguous_piece(grad)[1] for grad in grads][:3] == [(60, 3, 4), (5, 1, 1), (20, 1, 1)]
    assert (
        grads[6].numel()
        > 2 * kernel_compiler.ELEMENTS_PER_THREAD * kernel_compiler.BLOCK_SIZE
        > kernel_compiler.ELEMENTS_PER_THREAD * kernel_compiler.BLOCK_SIZE
        > grads[0].numel()
    )

    pieces = tuple(contiguous_piece(grad)[1] for grad in grads)
    given = ", ".join(f"unsigned short* p{i}" for i in range(len(pieces)))
    passed = ", ".join(f"p{i}" for i in range(len(pieces)))

    def kernel(name, source):
        caller = f"""extern "C" void call({given}, float* out) {{
            for (blockIdx.x = 0; blockIdx.x < {kernel_compiler.block_count(pieces)}; blockIdx.x++)
                for (threadIdx.x = 0; threadIdx.x < {kernel_compiler.BLOCK_SIZE}; threadIdx.x++)
                    {name}({passed}, out); }}"""
        function = compiled(tmp_path, name, source, caller)

        def launch(threads, args):
            assert threads == kernel_compiler.block_count(pieces) * kernel_compiler.BLOCK_SIZE
            function(*args)

        return launch

    monkeypatch.setattr("qfleet.accel.kernels.gradients.compile_kernel", kernel)
    flat.grad = torch.full((len(flat.grad) + 9,), 7.0)
    concat_bf16(grads, list(flat.shapes.values()), flat.grad)
    wanted = torch.cat([grad.float().reshape(-1) for grad in grads])
    assert torch.equal(flat.grad[:-9], wanted) and (flat.grad[-9:] == 7).all()


def test_gradients_are_joined_by_the_library_where_there_is_no_kernel(monkeypatch):
    flat = Flat(torch.nn.Linear(3, 2))
    monkeypatch.setattr("qfleet.accel.kernels.gradients.compile_kernel", lambda name, source: None)
    grads = [torch.randn(2, 3).bfloat16(), torch.randn(2).bfloat16()]
    concat_bf16(grads, list(flat.shapes.values()), flat.grad)
    assert torch.equal(flat.grad, torch.cat([grad.float().reshape(-1) for grad in grads]))


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3), (2,), (5,)], [(3, 2), (2, 5)]])
def test_a_kernel_is_not_given_gradients_of_other_shapes(monkeypatch, shapes):
    def kernel(name, source):
        raise AssertionError("it would write beyond the end, or leave old numbers")

    monkeypatch.setattr("qfleet.accel.kernels.gradients.compile_kernel", kernel)
    with pytest.raises(RuntimeError, match="size"):
        flat = Flat(torch.nn.Linear(3, 2))
        concat_bf16([torch.zeros(shape).bfloat16() for shape in shapes], list(flat.shapes.values()), flat.grad)


def test_no_kernel_is_started_while_operations_are_recorded():
    seen = []
    make_fx(lambda x: seen.append(kernel_compiler.custom_kernels_allowed()) or x + 1)(torch.zeros(2))
    assert seen == [False] and kernel_compiler.custom_kernels_allowed()
