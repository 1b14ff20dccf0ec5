"""Speed of bfloat16 on this CPU, measured, since CPU flags do not show what libraries make of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch.nn import functional

ROUNDS = 6
MIN_GAIN = 1.2
"""Required speed-up: bfloat16 has only 8 bits of precision."""


@functools.cache
def bf16_gain() -> float:
    """Speed-up of bfloat16 over float32 on this CPU, for the layers of image networkloads.

    Measured in CPU time of one thread, as the best of a few alternating rounds, so that other
    processes do not matter.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            workloads = [_workload(torch.float32), _workload(torch.bfloat16)]
            times = [[_timed(workload) for workload in workloads] for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    fp32, bf16 = (min(column) for column in zip(*times, strict=True))
    return fp32 / bf16


def bf16_is_faster() -> bool:
    """True if bfloat16 is fast enough to be worth its lower precision."""
    return bf16_gain() >= MIN_GAIN


def bf16_is_fast_on(device: torch.device) -> bool:
    """True if bfloat16 is fast on this device; measured on a CPU."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bf16_is_faster()


def _workload(dtype: torch.dtype) -> Callable[[], object]:
    """Two convolutions and a matrix product of the Nature network, for a batch of 32."""
    image, first = torch.ones(32, 4, 84, 84, dtype=dtype), torch.ones(32, 4, 8, 8, dtype=dtype)
    second, features = torch.ones(64, 32, 4, 4, dtype=dtype), torch.ones(32, 3136, dtype=dtype)
    weight = torch.ones(512, 3136, dtype=dtype)

    def once() -> object:
        features_out = functional.conv2d(functional.conv2d(image, first, stride=4), second, stride=2)
        return features_out, functional.linear(features, weight)

    return once


def _timed(workload: Callable[[], object]) -> float:
    begin = time.thread_time()
    workload()
    return time.thread_time() - begin
