"""The whole update, from the draw to the priorities, as operations of one device: the host only starts it.

    draw ─ windows ─ loss ─ gradient ─ norm ─ clip ─ optimizer ─ rounding ─ priorities           one CUDA graph

On a GPU the first updates are made as they are, then one is recorded as a CUDA graph, which starts all its kernels at
once. Nothing is read back but a few figures, and those a period later, so that host and GPU never wait for each other.
A batch whose loss or gradient is not finite moves nothing, as ever; the host hears of it a period later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from qfleet.learner.flat_params import Flat
from qfleet.learner.gradient import Autograd
from qfleet.replay.device_store import DeviceReplay
from qfleet.sync.gradient_sync import GradientSync, Solo

log = logging.getLogger(__name__)

WARM_UP = 3
"""Updates before one is recorded: libraries choose their kernels and allocate their workspaces in them."""


@dataclass(frozen=True)
class UpdateReport:
    """What updates have brought since the last report: figures of the newest, bad ones, and most of those in a row."""

    metrics: dict[str, float]
    bad: int
    max_bad_in_a_row: int


class GraphUpdate:
    """`update` makes one update, its figures `noted` or not. `report` says what those brought that were made before the
    last report."""

    def __init__(self, replay: DeviceReplay, eager: Autograd, flat: Flat, solo: Solo, batch_size: int) -> None:
        self.replay, self.eager, self.flat, self.batch_size = replay, eager, flat, batch_size
        self.optimizer = solo.optimizer
        self.device = flat.master.device
        self.tags: list[str] = []
        self._figures = torch.zeros(0, device=self.device)
        self._bad = torch.zeros(3, device=self.device).unbind()  # all, most in a row, in a row now
        self._made = 0
        self._graphs: tuple[torch.cuda.CUDAGraph, ...] = ()  # without figures, and with them
        self._told: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None] | None = None
        self._bad_told = 0

    def update(self, with_metrics: bool) -> None:
        self.replay.prepare()
        if self._graphs:
            self._graphs[with_metrics].replay()
        elif self.device.type != "cuda":
            self.run_eagerly()
        else:
            self._warm(with_metrics)
        self._made += 1

    def report(self) -> UpdateReport | None:
        """None the first time: figures are read back without waiting, when the next are asked for."""
        told, self._told = self._told, self._ask()
        if told is None:
            return None
        figures, bad, ready = told
        if ready is not None:
            ready.synchronize()
        new, self._bad_told = int(bad[0]) - self._bad_told, int(bad[0])
        return UpdateReport(dict(zip(self.tags, figures.tolist(), strict=True)), new, int(bad[1]))

    def unreported_bad(self) -> int:
        """Bad updates that no report has told of, and none will; waits for the device."""
        before, self._bad_told, self._told = self._bad_told, int(self._bad[0]), None
        return self._bad_told - before

    def run_eagerly(self, with_metrics: bool = True) -> None:
        """One update, operation by operation; its figures are `noted`, or not if nobody is going to ask."""
        at, sample, _ = self.replay.draw(self.batch_size)
        found = self.eager(sample)
        with torch.no_grad():
            gradient = self.flat.gather(found.grads)
            norm = torch.dot(gradient, gradient).sqrt()
            sound = torch.isfinite(norm) & torch.isfinite(found.total)
            if not self.optimizer.step_if(sound, gradient, norm, self.flat.bf16_target):
                self.flat.copy_to_network()
            self.flat.set_buffers({name: torch.where(sound, value, self.flat.buffer(name))
                                   for name, value in found.buffers.items()})
            self.replay.priorities.update_async(at, found.priority, sound)
            wrong, (bad, most, row) = ~sound, self._bad
            bad += wrong
            row.add_(1).mul_(wrong)
            torch.maximum(most, row, out=most)
            if with_metrics:
                self._note({"train/loss": found.total, "train/grad_norm": norm,
                            **{tag: value.mean() for tag, value in found.metrics.items()}})

    def _note(self, figures: dict[str, torch.Tensor]) -> None:
        if not self.tags:
            self.tags = list(figures)
            self._figures = torch.zeros(len(figures), device=self.device)
        self._figures.copy_(torch.stack([value.float() for value in figures.values()]))

    def _ask(self) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return self._figures.clone(), torch.stack(self._bad), None
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                  for x in (self._figures, torch.stack(self._bad))]
        ready = torch.cuda.Event()
        ready.record()
        return copies[0], copies[1], ready

    def _warm(self, noted: bool) -> None:
        """One of the first updates, or the recording of all that follow; it is an update, too."""
        with fast_math(self.flat.data.dtype == torch.bfloat16):
            if self._made < WARM_UP:
                on_side_stream(self.run_eagerly)
                return
            generators = [self.replay.rng, self.eager.rng]
            try:
                plain = capture_graph(lambda: self.run_eagerly(False), generators)
                self._graphs = (plain, capture_graph(self.run_eagerly, generators, plain))
                self._graphs[noted].replay()
                log.info("learner.capture: the update is recorded as one CUDA graph")
            except RuntimeError as error:
                log.warning("learner.capture: this agent's update cannot be recorded as a CUDA graph (%s); it runs "
                            "operation by operation", first_line(error))
                self._made = -1 << 60  # never again
                self.run_eagerly()


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One for all: libraries keep a workspace of megabytes for every stream that they have seen."""
    return torch.cuda.Stream(device)


def on_side_stream(do: Callable[[], object]) -> None:
    """Do something on a stream of its own, as a recording will be made on one."""
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        do()
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def fast_math(rounded: bool) -> Iterator[None]:
    """Let libraries try which of their kernels is fastest. Where weights are bfloat16 (`rounded`), products of float32
    may take the matrix units, too: their numbers are those of bfloat16, which TF32 holds without loss."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or rounded
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def capture_graph(do: Callable[[], object], generators: list[torch.Generator],
                  share_pool_with: torch.cuda.CUDAGraph | None = None,
                  stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """What `do` does on a GPU, ready to be replayed; every replay goes on with the generators. Two recordings `beside`
    each other share their memory, as they never run at once; one that runs while another does is made on a `stream` of
    its own, since libraries keep a workspace for each, and has that stream's priority ever after."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    kept = [generator.clone_state() for generator in generators]
    try:
        with torch.cuda.graph(graph, pool=None if share_pool_with is None else share_pool_with.pool(), stream=stream,
                              capture_error_mode="thread_local"):  # other threads, as NCCL's, may ask about their own
            do()
    except BaseException:
        for generator, state in zip(generators, kept, strict=True):
            generator.graphsafe_set_state(state)  # a recording that failed leaves them as if it still went on
        raise
    return graph


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)


def why_not_captured(replay: object, gradients: GradientSync, doubted: bool, flat: Flat) -> str | None:
    """Why an update cannot be made whole on the device, or None."""
    if not isinstance(replay, DeviceReplay):
        return "the replay is not on the device (replay.store=host)"
    if type(gradients) is not Solo:
        return "gradients meet those of other learners"
    if doubted:
        return "losses beyond belief are left out one by one"
    if any(part.group.period > 1 for part in flat.param_slices):
        return "a part of the network rests in some updates"
    return None
