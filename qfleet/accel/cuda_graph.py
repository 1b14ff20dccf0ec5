"""Capture of CUDA graphs, and what surrounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

WARM_UP = 3
"""Updates before the capture, in which libraries choose kernels and allocate workspaces."""


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One stream shared by all uses: libraries keep a workspace of megabytes per stream."""
    return torch.cuda.Stream(device)


def on_side_stream(function: Callable[[], object]) -> None:
    """Call `function` on a side stream, as CUDA graph capture does."""
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def fast_math(bf16: bool) -> Iterator[None]:
    """Let libraries benchmark their kernels and use TF32.

    With bfloat16 weights, float32 products may use tensor cores too: their operands are bfloat16
    values, which TF32 represents exactly.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or bf16
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def capture_graph(function: Callable[[], object], generators: list[torch.Generator],
                  share_pool_with: torch.cuda.CUDAGraph | None = None,
                  stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """Capture the GPU work of `function` as a CUDA graph; every replay advances the generators.

    Graphs that never run at the same time can share memory (`share_pool_with`). A graph that runs
    concurrently with another is captured on its own `stream`, since libraries keep a workspace per
    stream, and keeps that stream's priority.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    states = [generator.clone_state() for generator in generators]
    try:
        with torch.cuda.graph(graph, pool=None if share_pool_with is None else share_pool_with.pool(), stream=stream,
                              capture_error_mode="thread_local"):  # other threads, such as NCCL's, may query events
            function()
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            generator.graphsafe_set_state(state)  # a failed capture leaves them in capture mode
        raise
    return graph
