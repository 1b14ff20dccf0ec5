"""The learner: samples, derives the agent's loss, lets the gradient be applied, hands priorities back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field

from qfleet.accel.graph_gradient import GraphGradient
from qfleet.accel.graph_update import GraphUpdate, UpdateReport, first_line, why_not_captured
from qfleet.config import Count, Fraction, PositiveCount
from qfleet.core.agent import Agent
from qfleet.core.compute import PRECISIONS, seeded_network, set_current_device
from qfleet.core.metrics import Metrics
from qfleet.core.replay import Replay, Sample
from qfleet.core.rng import restore_rng
from qfleet.core.seeds import seed_for
from qfleet.core.timers import PhaseTimer
from qfleet.core.weights import WeightStore
from qfleet.learner.flat_params import Flat, is_finite
from qfleet.learner.gradient import Autograd, GradientFn, GradientResult
from qfleet.learner.optimizer import OptimizerConfig
from qfleet.replay.device_store import DeviceReplay
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
                            "gradients=solo, else loss and gradient; auto: on a GPU, unless allreduce.overlap is set; "
                            "no effect on a CPU")
    metrics_period_updates: PositiveCount = Field(16, description="updates between measurements of loss and Q-values")
    max_bad_updates: PositiveCount = Field(
        10, description="stop the run after this many consecutive updates with a non-finite loss or gradient")

    def inactive(self) -> dict[str, str]:
        return {"target_tau": "unless learner.target_period_updates=0"} if self.target_period_updates else {}


class Diverged(Exception):
    """Loss or gradient was not finite, again and again, or the weights are not."""


class Learner:
    """`step` makes all updates that are due, or `burst` of them. `updates` is the run's second clock.

    `meet` puts another gradient rule in the place of `Solo`, before the first update. `advance` says how many updates
    there are after one more, where others make some, too.
    """

    _outlier_filter: OutlierFilter | None

    def __init__(self, agent: Agent, replay: Replay, weights: WeightStore, metrics: Metrics, cfg: LearnerConfig,
                 seed: int, device: torch.device,
                 on_bad: Callable[[Sample, int], None] = lambda sample, update: None) -> None:
        self.agent, self.replay, self.weights, self.metrics, self.cfg = agent, replay, weights, metrics, cfg
        self.on_bad = on_bad
        set_current_device(device)
        dtype = PRECISIONS[cfg.precision]
        first = seed_for(seed, "network")
        self.flat = Flat(seeded_network(agent, first).to(device), dtype, agent.param_groups)
        self.target = Flat(seeded_network(agent, first).to(device).requires_grad_(False).eval(), dtype)
        if cfg.compile:
            compile_if_possible(self.flat.net, self.target.net)
        self.set_sync(Solo(cfg))
        self.rng = torch.Generator(device).manual_seed(seed_for(seed, "learner"))
        self._outlier_filter, self._autograds = None, list[Autograd]()
        self.gradient_fn: GradientFn = self._make_gradient_fn(agent)
        loss_when_frozen = agent.loss_when_frozen
        self._frozen_gradient_fn = (
            None if loss_when_frozen is None else self._make_gradient_fn(replace(agent, loss=loss_when_frozen))
        )
        self._whole: GraphUpdate | None = None
        self._decided = False
        self.next_update_count: Callable[[int], int] = lambda updates: updates + 1
        self.updates = 0
        self.max_updates: int | None = None
        self.max_updates_per_step: int | None = None
        self.timer = PhaseTimer(metrics, (SAMPLE, UPDATE), cfg.metrics_period_updates)
        self._published = -1
        self._moved = 0  # the update after which the target network was copied last
        self._finite = self.flat.master.clone()  # the weights that were handed out last
        self._bad = 0
        self._uncounted = 0  # updates that were counted and have moved nothing: so many more are made that do not count
        self._held: Sample | None = None  # drawn, while others had nothing to draw yet

    def set_sync(self, gradients: GradientSync) -> None:
        gradients.attach(self.flat)
        self.gradient_sync = gradients

    def filter_outliers(self, deviations: float) -> None:
        """From now on leave out losses that are beyond belief."""
        self._outlier_filter = OutlierFilter(deviations, self.flat.master.device)
        for eager in self._autograds:
            eager.bound = self._outlier_filter.bound

    def _make_gradient_fn(self, agent: Agent) -> GradientFn:
        eager = Autograd(agent, self.flat.net, self.target.net, self.rng)
        self._autograds.append(eager)
        taped = self.cfg.capture is True and not self.cfg.compile and self.rng.device.type == "cuda"
        return GraphGradient(eager) if taped else eager

    def step(self) -> bool:
        made, whole = 0, self._decide()
        while (self.max_updates is None or self.updates < self.max_updates) and (
            self.max_updates_per_step is None or made < self.max_updates_per_step
        ):
            self.timer.start()
            if not (self._eager_step() if whole is None else self._graph_step(whole)):
                break
            self.timer.lap(UPDATE)
            self.timer.end_step()
            made += 1
        if self._due and self.weights.has_reader:
            self.publish_for_actors()
        return made > 0

    @property
    def _by_target(self) -> bool:
        """Whether actors use the weights of the target network."""
        return self.cfg.publish_period_updates == self.cfg.target_period_updates

    @property
    def _due(self) -> bool:
        if self._by_target:
            return self._published < self._moved
        return self._published < 0 or self.updates - self._published >= self.cfg.publish_period_updates

    def publish_for_actors(self) -> None:
        """Publish what actors use from now on. Several updates may be made at a time, so that the present weights are
        seldom those that were copied to the target network: where actors follow it, they get its own."""
        if not self._by_target:
            self.publish()
        elif self._published != self._moved:
            self.weights.publish(self.finite_state(self.target), self._moved)
            self._published = self._moved

    def publish(self) -> None:
        """Put the present weights into the mailbox, unless they are there already."""
        if self._published != self.updates:
            self.weights.publish(self.finite_state(self.flat), self.updates)
            self._published = self.updates

    def finite_state(self, flat: Flat) -> dict[str, torch.Tensor]:
        """A copy of weights and buffers, the online or the target network's, to be handed out; Diverged if the weights
        are not finite.

        Whole updates on a GPU are not waited for: there the device itself puts the last finite weights in their place,
        and the loss of the next update tells the host."""
        if self._whole is None:
            self.require_finite(flat)
            self._finite = flat.master.clone()
        else:
            self._finite = torch.where(flat.master.sum().isfinite(), flat.master, self._finite)
        return flat.state(self._finite)

    def require_finite(self, flat: Flat) -> None:
        """A step can overflow although loss and gradient were finite. Such weights are useless."""
        if not is_finite(flat.master):
            raise Diverged(f"weights are not finite after {self.updates} update{'s' * (self.updates != 1)}; lower "
                           "learner.learning_rate")

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin from trained weights, online and target alike."""
        self.flat.load(state)
        self.target.load(state)
        self._published = -1
        self.publish()

    def state_dict(self) -> dict[str, Any]:
        self.require_finite(self.flat)
        self._discount_bad(0 if self._whole is None else self._whole.unreported_bad())
        return {"net": self.flat.state(), "target": self.target.state(), "gradients": self.gradient_sync.state_dict(),
                "rng": self.rng.get_state(), "updates": self.updates, "published": self._published,
                "moved": self._moved, "owed": self._uncounted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.flat.load(state["net"])
        self.target.load(state["target"])
        self._finite = self.flat.master.clone()
        self.gradient_sync.load_state_dict(state["gradients"])
        restore_rng(self.rng, state["rng"])
        self.updates, self._published = state["updates"], state["published"]
        self._moved = state.get("moved", max(0, self._published))
        self._uncounted = state.get("owed", 0)

    def _decide(self) -> GraphUpdate | None:
        """Whether updates are made whole on the GPU; found out when the first is due, and said."""
        if self._decided or self.cfg.capture is not True or self.flat.master.device.type != "cuda":
            return self._whole
        self._decided = True
        why = why_not_captured(self.replay, self.gradient_sync, self._outlier_filter is not None, self.flat)
        if isinstance(self.replay, DeviceReplay) and isinstance(self.gradient_sync, Solo) and why is None:
            self._whole = GraphUpdate(
                self.replay, self._autograds[0], self.flat, self.gradient_sync, self.cfg.batch_size
            )
        else:
            log.warning("learner.capture: updates are not recorded as one CUDA graph, since %s%s", why,
                        "; their losses and gradients will be" if isinstance(self.gradient_fn, GraphGradient) else "")
        return self._whole

    def _graph_step(self, whole: GraphUpdate) -> bool:
        """Start an update that nobody waits for, if it is time for one."""
        if not whole.replay.claim(self.cfg.batch_size):
            return False
        telling = self._uncounted == 0 and (self.updates + 1) % self.cfg.metrics_period_updates == 0
        whole.update(with_metrics=telling)
        if self._uncounted:
            self._uncounted -= 1
            return True
        before, self.updates = self.updates, self.next_update_count(self.updates)
        self._follow(before)
        if telling and (report := whole.report()) is not None:
            self.metrics.write(report.metrics | {"train/learning_rate": self.cfg.learning_rate})
            if report.bad:
                self._handle_bad(report)
        return True

    def _handle_bad(self, report: UpdateReport) -> None:
        self._discount_bad(report.bad)
        self._abort_if_diverged(report.max_bad_in_a_row, report.metrics["train/loss"])

    def _discount_bad(self, bad: int) -> None:
        """Bad batches have moved nothing, and are not counted as updates. When they are heard of, others have been
        counted; a count that went back would show old weights as the newest, so the next ones are made for them."""
        if bad:
            self._uncounted += bad
            self.metrics.count("fault/bad_updates", bad)
            log.warning("loss or gradient was not finite in %d of the updates before %d; with learner.capture=false "
                        "the batches would be kept", bad, self.updates)

    def _eager_step(self) -> bool:
        """Sample, then update, if there is something to sample everywhere."""
        sample = self._held or self.replay.sample(self.cfg.batch_size)
        factor = self.gradient_sync.agree(None if sample is None else sample.max_weight)
        self._held = sample if factor is None else None
        if sample is None or factor is None:
            return False
        if factor != 1.0:
            sample = replace(sample, weight=sample.weight * factor)
        self.timer.lap(SAMPLE)
        self._update(sample)
        return True

    def _update(self, sample: Sample) -> None:
        derive = (
            self.gradient_fn
            if self._frozen_gradient_fn is None or not self.gradient_sync.skips_frozen()
            else self._frozen_gradient_fn
        )
        found = derive(sample)
        value = float(found.total)
        norm = self.gradient_sync.apply(found.grads if math.isfinite(value) else None)
        if not math.isfinite(norm):
            self._skip(sample, value)
            return
        self._bad = 0
        before, self.updates = self.updates, self.next_update_count(self.updates)
        self.flat.set_buffers(found.buffers)
        self.replay.update(sample.keys, found.priority.cpu().numpy())
        self._follow(before)
        if self._outlier_filter is not None and (dropped := self._outlier_filter.update(found.per_item)):
            self.metrics.count("server/outliers", dropped)
        if self._passed(self.cfg.metrics_period_updates, before):
            self._measure(found, value, norm)

    def _follow(self, before: int) -> None:
        """By the run's updates, whoever made them: several soft steps at once are one longer step."""
        tau, more = self.cfg.target_tau, self.updates - before
        if self.cfg.target_period_updates == 0:
            if more:
                self.target.polyak_update(self.flat, tau if more == 1 else 1 - (1 - tau) ** more)
        elif self._passed(self.cfg.target_period_updates, before):
            self.target.polyak_update(self.flat)
            self._moved = self.updates

    def _passed(self, period: int, before: int) -> bool:
        return self.updates // period > before // period

    def _skip(self, sample: Sample, value: float) -> None:
        """A bad batch moves nothing: no weights, no priorities, no counter but its own."""
        self._bad += 1
        self.metrics.count("fault/bad_updates")
        self.on_bad(sample, self.updates)
        self._abort_if_diverged(self._bad, value)

    def _abort_if_diverged(self, in_a_row: int, value: float) -> None:
        if in_a_row >= self.cfg.max_bad_updates:
            raise Diverged(
                f"loss or gradient was not finite in {in_a_row} updates in a row (loss {value}, after "
                f"{self.updates} good ones); lower learner.learning_rate, set learner.clip_norm, or check the rewards")

    def _measure(self, found: GradientResult, value: float, norm: float) -> None:
        figures = {"train/loss": value, "train/grad_norm": norm, "train/learning_rate": self.cfg.learning_rate}
        self.metrics.write(figures | {tag: float(x.mean()) for tag, x in found.metrics.items()})


def compile_if_possible(*nets: torch.nn.Module) -> None:
    """Calls of the networks are compiled at the first of them; if that fails all are called as they are ever after.

    What a call itself does wrong is raised again by the call that is not compiled.
    """

    def compiled(net: torch.nn.Module) -> Callable[..., Any]:
        net.compile()
        swift = net._compiled_call_impl
        assert swift is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return swift(*args, **kwargs)
            except RuntimeError as error:
                log.warning("learner.compile: compiling failed (%s); networks run as they are. Without a C++ compiler: "
                            "apt install g++, or learner.compile=false", first_line(error))
                for other in nets:
                    other._compiled_call_impl = None
                return net(*args, **kwargs)

        return call

    for net in nets:
        net._compiled_call_impl = compiled(net)
