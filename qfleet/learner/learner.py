"""Learner: samples batches, computes gradients, applies them, and updates the priorities."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.accel.choose import compile_networks, gradient_fn_for, graph_update_for
from qfleet.accel.graph_update import GraphUpdate, UpdateReport
from qfleet.config import Count, Fraction, PositiveCount
from qfleet.core.agent import Agent
from qfleet.core.clock import PhaseTimer, RunClock
from qfleet.core.compute import PRECISIONS, seeded_network, set_current_device
from qfleet.core.gradient import GradientFn, GradientResult
from qfleet.core.metrics import Metrics
from qfleet.core.replay import Replay, Sample
from qfleet.core.rng import restore_rng
from qfleet.core.seeds import seed_for
from qfleet.core.weights import WeightStore
from qfleet.optim.flat_params import Flat, is_finite
from qfleet.optim.optimizer import LearningRate
from qfleet.optim.optimizer_config import OptimizerConfig
from qfleet.optim.row_moments import RowMoments
from qfleet.sync.gradient_sync import GradientSync, Solo
from qfleet.sync.outlier_filter import OutlierFilter

log = logging.getLogger(__name__)

SAMPLE, UPDATE = "train/sample_ms", "train/update_ms"


class LearnerConfig(OptimizerConfig):
    """The learner section: batches, optimizer, target network and precision."""

    batch_size: PositiveCount = Field(
        32, description="items per update: transitions, or sequences for recurrent agents")
    target_period_updates: Count = Field(
        1000, description="updates between copies of the online network to the target network; 0 = soft updates "
                          "(target_tau)")
    target_tau: Fraction = Field(0.005, description="τ of the soft target update, applied after every update")
    publish_period_updates: PositiveCount = Field(
        1, description="updates between weight transfers to the actors; if equal to target_period_updates, actors use "
                       "the target network")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="precision of the network: fp32, bf16 or auto (bf16 for images on devices where it is "
                            "fast, else fp32)")
    compile: bool = Field(
        False, description="compile the networks with torch.compile; needs a C++ compiler, and the first update is "
                           "slow")
    capture: bool | Literal["auto"] = Field(
        "auto", description="record updates as CUDA graphs: whole updates if the replay is on the GPU and "
                            "sync=none, else loss and gradient; auto: on a GPU, unless allreduce.overlap is set; "
                            "no effect on a CPU")
    metrics_period_updates: PositiveCount = Field(16, description="updates between measurements of loss and Q-values")
    max_bad_updates: PositiveCount = Field(
        10, description="stop the run after this many consecutive updates with a non-finite loss or gradient")

    def inactive(self) -> dict[str, str]:
        idle = {"target_tau": "unless learner.target_period_updates=0"} if self.target_period_updates else {}
        return idle | super().inactive()


@dataclass(frozen=True)
class LearnerContext:
    """How a learner takes part in a run; the defaults are those of a single learner.

    `gradient_sync` None: `Solo`. `clock` counts the updates of the run; it may count those of other learners, too.
    `max_updates_per_step` bounds the updates of one call of `step`. `outlier_deviations`: items are dropped if their
    loss exceeds the running mean by so many standard deviations. `on_bad` receives batches with a non-finite loss.
    """

    clock: RunClock = field(default_factory=RunClock)
    gradient_sync: GradientSync | None = None
    max_updates: int | None = None
    max_updates_per_step: int | None = None
    outlier_deviations: float | None = None
    on_bad: Callable[[Sample, int], None] = lambda sample, update: None


class Autograd:
    """Weights and averages the loss, (weight · per_item).mean() + extra, and computes its gradient.

    No other code weights or averages losses. Items with a loss above `bound`, if set, get weight 0.
    """

    def __init__(self, agent: Agent, net: nn.Module, target: nn.Module, rng: torch.Generator,
                 bound: torch.Tensor | None = None) -> None:
        self.agent, self.net, self.target, self.rng = agent, net, target, rng
        parameters = list(net.parameters())
        self.trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        self.parameters = parameters
        self.bound = bound

    def __call__(self, sample: Sample) -> GradientResult:
        loss = self.agent.loss(self.net, self.target, sample, self.rng)
        per_item = loss.per_item.detach()
        weight = sample.weight if self.bound is None else sample.weight * (per_item <= self.bound)
        total = (weight * loss.per_item).mean()
        if loss.extra is not None:
            total = total + loss.extra
        found = torch.autograd.grad(total, [self.parameters[i] for i in self.trained], allow_unused=True)
        grads: list[torch.Tensor | None] = [None] * len(self.parameters)
        for i, grad in zip(self.trained, found, strict=True):
            grads[i] = grad
        return GradientResult(total.detach(), per_item, grads, loss.priority, dict(loss.metrics), dict(loss.buffers))


class Diverged(Exception):
    """Loss or gradient was non-finite in too many consecutive updates, or the weights are non-finite."""


class Learner:
    """Trains the network. `step` makes all updates that are due, at most `max_updates_per_step`."""

    def __init__(self, agent: Agent, replay: Replay, weights: WeightStore, metrics: Metrics, cfg: LearnerConfig,
                 seed: int, device: torch.device, context: LearnerContext | None = None) -> None:
        self.agent, self.replay, self.weights, self.metrics, self.cfg = agent, replay, weights, metrics, cfg
        context = context or LearnerContext()
        self.clock, self.on_bad = context.clock, context.on_bad
        self.max_updates, self.max_updates_per_step = context.max_updates, context.max_updates_per_step
        set_current_device(device)
        dtype = PRECISIONS[cfg.precision]
        network_seed = seed_for(seed, "network")
        self.flat = Flat(seeded_network(agent, network_seed).to(device), dtype, agent.param_groups)
        self.target = Flat(seeded_network(agent, network_seed).to(device).requires_grad_(False).eval(), dtype)
        compile_networks(cfg, self.flat.net, self.target.net)
        self.rate = LearningRate(cfg)
        self.gradient_sync = context.gradient_sync or Solo(cfg)
        self.gradient_sync.attach(self.flat)
        if context.gradient_sync is not None:  # it may have loaded other weights
            self.target.polyak_update(self.flat)
            self.clock.set_updates(self.gradient_sync.update_count(self.clock.updates, 0))
        self.row_moments = None if agent.row_values is None else RowMoments(
            agent.row_values, self.flat, exchanged=context.gradient_sync is not None)
        self.rng = torch.Generator(device).manual_seed(seed_for(seed, "learner"))
        deviations = context.outlier_deviations
        self._outlier_filter = None if deviations is None else OutlierFilter(deviations, device)
        self._autograds = list[Autograd]()
        self.gradient_fn: GradientFn = self._make_gradient_fn(agent)
        loss_when_frozen = agent.loss_when_frozen
        self._frozen_gradient_fn = (
            None if loss_when_frozen is None else self._make_gradient_fn(replace(agent, loss=loss_when_frozen))
        )
        self._graph_update: GraphUpdate | None = None
        self._graph_decided = False
        self.timer = PhaseTimer(metrics, (SAMPLE, UPDATE), cfg.metrics_period_updates)
        self._published_version = -1
        self._target_version = 0  # update count at the last copy to the target network
        self._last_finite = self.flat.master.clone()  # finite weights published last
        self._consecutive_bad = 0
        self._uncounted = 0  # updates counted that changed nothing: as many of the next are not counted
        self._held_sample: Sample | None = None  # sampled while other learners had no batch

    @property
    def updates(self) -> int:
        """Updates of the run."""
        return self.clock.updates

    def _count_update(self) -> int:
        """Count one more update of this learner; returns the count before."""
        before = self.clock.updates
        self.clock.set_updates(self.gradient_sync.update_count(before, 1))
        return before

    def _make_gradient_fn(self, agent: Agent) -> GradientFn:
        bound = None if self._outlier_filter is None else self._outlier_filter.bound
        autograd = Autograd(agent, self.flat.net, self.target.net, self.rng, bound)
        self._autograds.append(autograd)
        return gradient_fn_for(self.cfg, autograd)

    def step(self) -> bool:
        """Make all updates that are due and publish the weights if due; True if an update was made."""
        made, graph_update = 0, self._choose_graph_update()
        while (self.max_updates is None or self.updates < self.max_updates) and (
            self.max_updates_per_step is None or made < self.max_updates_per_step
        ):
            self.timer.start()
            if not (self._eager_step() if graph_update is None else self._graph_step(graph_update)):
                break
            self.timer.lap(UPDATE)
            self.timer.end_step()
            made += 1
        if self._publish_due and self.weights.has_reader:
            self.publish_for_actors()
        return made > 0

    @property
    def _actors_use_target(self) -> bool:
        """True if actors use the weights of the target network."""
        return self.cfg.publish_period_updates == self.cfg.target_period_updates

    @property
    def _publish_due(self) -> bool:
        if self._actors_use_target:
            return self._published_version < self._target_version
        return self._published_version < 0 or self.updates - self._published_version >= self.cfg.publish_period_updates

    def publish_for_actors(self) -> None:
        """Publish the weights for the actors: the online network's, or the target network's if actors use it.

        `step` may make several updates at once, so the current weights are seldom those last copied
        to the target network; its own weights are published instead.
        """
        if not self._actors_use_target:
            self.publish()
        elif self._published_version != self._target_version:
            self.weights.publish(self.finite_state(self.target), self._target_version)
            self._published_version = self._target_version

    def publish(self) -> None:
        """Publish the current weights unless they are published already."""
        if self._published_version != self.updates:
            self.weights.publish(self.finite_state(self.flat), self.updates)
            self._published_version = self.updates

    def finite_state(self, flat: Flat) -> dict[str, torch.Tensor]:
        """Copy of the weights and buffers of the online or target network; Diverged if they are non-finite.

        Full-update CUDA graphs run asynchronously: there the device substitutes the last finite
        weights, and the host learns of the failure from the loss of the next update.
        """
        if self._graph_update is None:
            self.require_finite(flat)
            self._last_finite = flat.master.clone()
        else:
            self._last_finite = torch.where(flat.master.sum().isfinite(), flat.master, self._last_finite)
        return flat.state(self._last_finite)

    def require_finite(self, flat: Flat) -> None:
        """Raise Diverged if weights are non-finite: a step can overflow although loss and gradient are finite."""
        if not is_finite(flat.master):
            raise Diverged(f"weights are not finite after {self.updates} update{'s' * (self.updates != 1)}; lower "
                           "learner.learning_rate")

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Initialise the online and target networks from trained weights."""
        self.flat.load(state)
        self.target.load(state)
        if self.row_moments is not None:
            self.row_moments.read_network()
        self._published_version = -1
        self.publish()

    def state_dict(self) -> dict[str, Any]:
        self.require_finite(self.flat)
        self._discount_bad(0 if self._graph_update is None else self._graph_update.unreported_bad())
        rows = {} if self.row_moments is None else self.row_moments.state_dict()
        return {"net": self.flat.state(), "target": self.target.state(), "gradients": self.gradient_sync.state_dict(),
                "rng": self.rng.get_state(), "updates": self.updates, "published": self._published_version,
                "moved": self._target_version, "owed": self._uncounted,
                **({"rows": rows} if rows else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.flat.load(state["net"])
        self.target.load(state["target"])
        self._last_finite = self.flat.master.clone()
        self.gradient_sync.load_state_dict(state["gradients"])
        if self.row_moments is not None:
            self.row_moments.load_state_dict(state.get("rows", {}))
        restore_rng(self.rng, state["rng"])
        self.clock.set_updates(self.gradient_sync.update_count(state["updates"], 0))
        self._published_version = state["published"]
        self._target_version = state.get("moved", max(0, self._published_version))
        self._uncounted = state.get("owed", 0)

    def _choose_graph_update(self) -> GraphUpdate | None:
        """Choose, when the first update is due, whether updates run as one CUDA graph."""
        if not self._graph_decided and self._graph_update is None:
            self._graph_decided = True
            self._graph_update = graph_update_for(
                self.cfg, self.replay, self._autograds[0], self.flat, self.gradient_sync.local_optimizer,
                self._outlier_filter is not None)
        return self._graph_update

    def _graph_step(self, graph_update: GraphUpdate) -> bool:
        """Launch one asynchronous update if the rate limiter allows it."""
        if not graph_update.claim():
            return False
        self._write_row_moments()
        with_metrics = self._uncounted == 0 and (self.updates + 1) % self.cfg.metrics_period_updates == 0
        graph_update.update(with_metrics)
        if self._uncounted:
            self._uncounted -= 1
            return True
        before = self._count_update()
        self._update_target(before)
        if with_metrics and (report := graph_update.report()) is not None:
            self.metrics.write(report.metrics | {"train/learning_rate": self.rate.at(before)})
            if report.bad:
                self._handle_bad(report)
        return True

    def _handle_bad(self, report: UpdateReport) -> None:
        self._discount_bad(report.bad)
        self._abort_if_diverged(report.max_bad_in_a_row, report.metrics["train/loss"])

    def _discount_bad(self, bad: int) -> None:
        """Correct the update count for non-finite updates, which change nothing.

        On a GPU they are reported late. The count never decreases, since it is the version of the
        weights; the next `_uncounted` updates are not counted instead.
        """
        if bad:
            self._uncounted += bad
            self.metrics.count("fault/bad_updates", bad)
            log.warning("loss or gradient was not finite in %d of the updates before %d; with learner.capture=false "
                        "the batches would be saved", bad, self.updates)

    def _eager_step(self) -> bool:
        """Sample and update if all learners have a batch."""
        sample = self._held_sample or self.replay.sample(self.cfg.batch_size)
        factor = self.gradient_sync.agree(None if sample is None else sample.max_weight)
        self._held_sample = sample if factor is None else None
        if sample is None or factor is None:
            return False
        self._write_row_moments()
        if factor != 1.0:
            sample = replace(sample, weight=sample.weight * factor)
        self.timer.lap(SAMPLE)
        self._update(sample)
        return True

    def _write_row_moments(self) -> None:
        """Let the next update and all later versions of the weights use the newest statistics."""
        if self.row_moments is not None:
            self.row_moments.write()

    def _update(self, sample: Sample) -> None:
        gradient_fn = (
            self.gradient_fn
            if self._frozen_gradient_fn is None or not self.gradient_sync.skips_frozen()
            else self._frozen_gradient_fn
        )
        result = gradient_fn(sample)
        loss = float(result.total)
        norm = self.gradient_sync.apply(result.grads if math.isfinite(loss) else None)
        if not math.isfinite(norm):
            self._skip_bad(sample, loss)
            return
        self._consecutive_bad = 0
        before = self._count_update()
        self.flat.set_buffers(result.buffers)
        self.replay.update(sample.keys, result.priority.cpu().numpy())
        self._update_target(before)
        if self._outlier_filter is not None and (dropped := self._outlier_filter.update(result.per_item)):
            self.metrics.count("server/outliers", dropped)
        if self._crossed(self.cfg.metrics_period_updates, before):
            self._write_metrics(result, loss, norm, before)

    def _update_target(self, before: int) -> None:
        """Update the target network by the run's update count, including updates of other learners.

        Several soft updates at once are one larger step.
        """
        tau, made = self.cfg.target_tau, self.updates - before
        if self.cfg.target_period_updates == 0:
            if made:
                self.target.polyak_update(self.flat, tau if made == 1 else 1 - (1 - tau) ** made)
        elif self._crossed(self.cfg.target_period_updates, before):
            self.target.polyak_update(self.flat)
            self._target_version = self.updates

    def _crossed(self, period: int, before: int) -> bool:
        return self.updates // period > before // period

    def _skip_bad(self, sample: Sample, loss: float) -> None:
        """Skip a bad batch: weights, priorities and the update count stay unchanged."""
        self._consecutive_bad += 1
        self.metrics.count("fault/bad_updates")
        self.on_bad(sample, self.updates)
        self._abort_if_diverged(self._consecutive_bad, loss)

    def _abort_if_diverged(self, consecutive: int, loss: float) -> None:
        if consecutive >= self.cfg.max_bad_updates:
            raise Diverged(
                f"loss or gradient was not finite in {consecutive} updates in a row (loss {loss}, after "
                f"{self.updates} good ones); lower learner.learning_rate, set learner.clip_norm, or check the rewards")

    def _write_metrics(self, result: GradientResult, loss: float, norm: float, before: int) -> None:
        values = {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": self.rate.at(before)}
        self.metrics.write(values | {tag: float(x.mean()) for tag, x in result.metrics.items()})
