"""Time of an update by section, compared with the peak rates of this machine.

The functions that a learner calls are timed in place while it learns from real experience. The roof of a section is the
time that its arithmetic would take at the rate of a large matrix product, or its bytes at the rate of a copy.
On a GPU, where an update may be a single CUDA graph, the profile also lists its kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from qfleet.accel.graph_gradient import GraphGradient
from qfleet.core.compute import PRECISIONS
from qfleet.replay.host_store import HostReplay
from speed import gpu_kernels
from speed.stage import BenchStage

SAMPLE, GATHER, FORWARD, BACKWARD = "sample", "gather, decode", "forward, loss", "backward"
RECORDED, WHOLE = "forward, loss, backward (recorded as one)", "the whole update (recorded as one)"
OPTIMIZER, PRIORITIES, TARGET, PUBLISH, REST = "optimizer", "priorities", "target network", "publish", "the rest"
SIDE, COPY_BYTES, PROBE_S, COUNTED = 512, 1 << 26, 0.5, 8
GPU_SIDE, GPU_COPY_BYTES, LAUNCHES = 8192, 1 << 30, 10
"""Sizes for a GPU, where a product as small as on a CPU takes less time than its launch."""
OBSERVED = 20
"""Updates whose kernels are traced."""
ADAM_PASSES = 7
"""Weights, gradient and two moments are read; all but the gradient are written."""


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of the machine, per second of CPU time or of GPU time."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True)
class ProfileRow:
    """Milliseconds per update of one section: wall clock, CPU time, and the time at the machine's peak rate.

    On a CPU the peak is compared with CPU time, since other processes lengthen the wall clock; on a GPU with the wall
    clock.
    """

    name: str
    ms: float
    cpu_ms: float
    roof_ms: float | None = None
    on_gpu: bool = False

    @property
    def cost_ms(self) -> float:
        """The time that is compared with the roof."""
        return self.ms if self.on_gpu else self.cpu_ms

    @property
    def distance(self) -> float | None:
        """Time divided by the time at the peak rate."""
        return self.cost_ms / self.roof_ms if self.roof_ms else None


@dataclass(frozen=True)
class Profile:
    """An update as rows, in the order in which its sections run, and their sum."""

    updates_per_s: float
    updates_per_cpu_s: float
    rows: Sequence[ProfileRow]
    rates: PeakRates
    settings: dict[str, Any]
    kernels: Sequence[gpu_kernels.KernelGroup] = ()

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        del document["rows"]  # "parts" in the file
        return document | {"parts": [asdict(row) | {"distance": row.distance} for row in self.rows],
                           "kernels": [asdict(group) | {"distance": group.distance} for group in self.kernels]}


class NestedTimer:
    """Wall and CPU time by name. Timed calls may nest: the time of an inner call is not counted for the outer one."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.spent: dict[str, tuple[float, float]] = {}
        self._wait = wait
        self._inner = [(0.0, 0.0)]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **named: Any) -> Any:
            self._wait()
            self._inner.append((0.0, 0.0))
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return call(*args, **named)
            finally:
                self._wait()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                inner, before = self._inner.pop(), self.spent.get(name, (0.0, 0.0))
                self.spent[name] = (before[0] + wall - inner[0], before[1] + cpu - inner[1])
                outer = self._inner[-1]
                self._inner[-1] = (outer[0] + wall, outer[1] + cpu)
        return inside


def profile(recipe: str, overrides: Sequence[str], updates: int, fill: int) -> Profile:
    """Play `fill` steps of a recipe, then time `updates` updates by section, in bursts as long as in a run."""
    with closing(BenchStage(recipe, [*overrides, f"replay.min_steps={fill}"])) as stage:
        stage.fill(fill)
        burst = stage.burst()
        for _ in range(max(1, 20 // burst)):
            stage.learn(burst)
        flops, sample_bytes = _work(stage)
        on_gpu = stage.config.device.startswith("cuda")
        traced = gpu_kernels.trace_kernels(stage.learn, stage.wait, OBSERVED) if on_gpu else []
        timer = NestedTimer(stage.wait)
        _wrap(stage, timer)
        learn, made = timer.timed(REST, stage.learn), 0
        while made < updates:
            made += learn(burst)
        config = stage.config
        weights = stage.learner.flat.master.numel() * 4
        rates = measure(torch.device(config.device), PRECISIONS[config.learner.precision])
    roofs = {FORWARD: flops[0] / rates.flops, BACKWARD: flops[1] / rates.flops, RECORDED: sum(flops) / rates.flops,
             WHOLE: sum(flops) / rates.flops, GATHER: 2 * sample_bytes / rates.bytes_per_s,
             OPTIMIZER: ADAM_PASSES * weights / rates.bytes_per_s,
             PUBLISH: 2 * weights / rates.bytes_per_s / max(burst, config.learner.publish_period_updates)}
    rows = [ProfileRow(name, 1e3 * wall / made, 1e3 * cpu / made, 1e3 * roofs[name] if name in roofs else None,
                       on_gpu)
            for name, (wall, cpu) in sorted(timer.spent.items(), key=lambda item: ORDER.index(item[0]))]
    settings = {"recipe": recipe, "overrides": [*overrides], "device": config.device, "updates": made, "burst": burst,
                "precision": config.learner.precision, "batch_size": config.learner.batch_size,
                "threads": config.run.threads, "parameters": weights // 4, "gflop": sum(flops) / 1e9,
                "batch_mb": sample_bytes / 1e6}
    return Profile(1e3 / sum(row.ms for row in rows), 1e3 / sum(row.cpu_ms for row in rows), rows, rates,
                   settings, gpu_kernels.grouped(traced, OBSERVED, 1e3 * sum(flops) / rates.flops))


ORDER = (SAMPLE, GATHER, FORWARD, BACKWARD, RECORDED, WHOLE, OPTIMIZER, PRIORITIES, TARGET, PUBLISH, REST)


def _wrap(stage: BenchStage, timer: NestedTimer) -> None:
    """Time every function that an update calls."""
    learner, replay = stage.learner, stage.replay
    patches: list[tuple[Any, str, str]] = [
        (learner.gradient_sync, "apply", OPTIMIZER), (replay, "update", PRIORITIES),
        (learner, "_update_target", TARGET), (learner, "publish", PUBLISH), (replay, "sample", SAMPLE)]
    if isinstance(replay, HostReplay):
        patches.append((replay._gatherer, "windows", GATHER))
    if learner._graph_update is not None:
        patches.append((learner._graph_update, "update", WHOLE))
    for owner, name, section in patches:
        setattr(owner, name, timer.timed(section, getattr(owner, name)))
    for name in ("gradient_fn", "_frozen_gradient_fn"):
        derive = getattr(learner, name)
        if derive is not None:
            recorded = isinstance(derive, GraphGradient) and derive.captured
            setattr(learner, name, timer.timed(RECORDED if recorded else BACKWARD, derive))
    for eager in learner._autograds:
        eager.agent = replace(eager.agent, loss=timer.timed(FORWARD, eager.agent.loss))


def _work(stage: BenchStage) -> tuple[tuple[float, float], int]:
    """Floating point operations of an update, forward and backward, and the bytes of a batch."""
    sample = stage.replay.sample(stage.config.learner.batch_size)
    assert sample is not None, "the rate limit of a filled stage is lifted"
    learner, agents, forward = stage.learner, [eager.agent for eager in stage.learner._autograds], [0.0]

    def counted(loss: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any) -> Any:
            before = counter.get_total_flops()
            found = loss(*args)
            forward[0] += counter.get_total_flops() - before
            return found
        return inside

    for eager in learner._autograds:
        eager.agent = replace(eager.agent, loss=counted(eager.agent.loss))
    derive, loss_when_frozen = (
        learner.gradient_fn, learner._frozen_gradient_fn)  # a CUDA graph is not seen by the counter
    learner.gradient_fn = derive.autograd if isinstance(derive, GraphGradient) else derive
    learner._frozen_gradient_fn = (
        loss_when_frozen.autograd if isinstance(loss_when_frozen, GraphGradient) else loss_when_frozen
    )
    with FlopCounterMode(display=False) as counter:
        if learner._graph_update is None:
            made = stage.learn(COUNTED)  # several, since some agents do not update all parameters every time
        else:
            made = 1
            learner._autograds[0](sample)
    learner.gradient_fn, learner._frozen_gradient_fn = derive, loss_when_frozen
    for eager, agent in zip(learner._autograds, agents, strict=True):
        eager.agent = agent
    total = float(counter.get_total_flops())
    batch_bytes = sum(value.numel() * value.element_size() for value in sample.rows.values())
    return (forward[0] / made, (total - forward[0]) / made), batch_bytes


def measure(device: torch.device, dtype: torch.dtype) -> PeakRates:
    """The fastest of many matrix products, and of many copies larger than any cache."""
    gpu = device.type == "cuda"
    side, copied = (GPU_SIDE, GPU_COPY_BYTES) if gpu else (SIDE, COPY_BYTES)
    a = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    fastest = partial(_fastest_launches, device) if gpu else _fastest
    product = fastest(lambda: torch.mm(a, a, out=out))
    copy = fastest(lambda: target.copy_(source))
    return PeakRates(2 * side**3 / product, 2 * copied / copy)


def _fastest(call: Callable[[], Any]) -> float:
    """CPU seconds of the fastest of many calls: disturbances only make calls slower."""
    best, until = float("inf"), time.perf_counter() + PROBE_S
    call()
    while time.perf_counter() < until or best == float("inf"):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best


def _fastest_launches(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds of a call by CUDA events, over consecutive launches that keep the GPU busy; the fastest of many."""
    best, until = float("inf"), time.perf_counter() + PROBE_S
    with torch.cuda.device(device):
        call()
        while time.perf_counter() < until or best == float("inf"):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(LAUNCHES):
                call()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return best


def lines(found: Profile) -> list[str]:
    """The profile as text."""
    settings, rates, total = found.settings, found.rates, sum(row.cost_ms for row in found.rows)
    table = [["part", "ms", "CPU ms", "share", "at best", "distance"]]
    for row in found.rows:
        table.append([row.name, f"{row.ms:.3f}", f"{row.cpu_ms:.3f}", f"{100 * row.cost_ms / total:.0f} %",
                      "" if row.roof_ms is None else f"{row.roof_ms:.3f}",
                      "" if row.distance is None else f"{row.distance:.1f} ×"])
    return [f"{settings['recipe']}: batch {settings['batch_size']}, {settings['precision']}, {settings['device']}, "
            f"{settings['threads']} thread{'s' * (settings['threads'] != 1)}; {settings['gflop']:.3g} GFLOP and "
            f"{settings['batch_mb']:.3g} MB a batch, {settings['parameters']:,} parameters",
            *gpu_kernels.aligned(table), *gpu_kernels.lines(found.kernels),
            f"  {found.updates_per_s:,.0f} updates/s, {found.updates_per_cpu_s:,.0f} per CPU second; this machine "
            f"multiplies at {rates.flops / 1e9:,.0f} GFLOP/s and copies at {rates.bytes_per_s / 1e9:.1f} GB/s"]
