"""Which numbers a CPU computes faster with: measured, as its flags do not tell what libraries make of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch.nn import functional

ROUNDS = 6
WORTH = 1.2
"""So many times as fast has bfloat16 to be: its numbers have 8 bits."""


@functools.cache
def bf16_gain() -> float:
    """How many times as fast as in float32 this CPU computes in bfloat16 what networks for pictures consist of.

    By CPU time of one thread, the best of a few rounds in turn, so that it does not matter who else computes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            works = [_work(torch.float32), _work(torch.bfloat16)]
            spent = [[_timed(work) for work in works] for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    single, half = (min(times) for times in zip(*spent, strict=True))
    return single / half


def bf16_is_faster() -> bool:
    return bf16_gain() >= WORTH


def _work(dtype: torch.dtype) -> Callable[[], object]:
    """Two convolutions and a product of the Nature network, for a batch of 32."""
    picture, first = torch.ones(32, 4, 84, 84, dtype=dtype), torch.ones(32, 4, 8, 8, dtype=dtype)
    second, features = torch.ones(64, 32, 4, 4, dtype=dtype), torch.ones(32, 3136, dtype=dtype)
    weight = torch.ones(512, 3136, dtype=dtype)

    def once() -> object:
        seen = functional.conv2d(functional.conv2d(picture, first, stride=4), second, stride=2)
        return seen, functional.linear(features, weight)

    return once


def _timed(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin
