"""All roles in one process, one after the other: plain method calls, and on a CPU bitwise reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qfleet.agent import Agent
from qfleet.explore import Explorer
from qfleet.replay.host import HostReplay
from qfleet.replay.layout import Layout
from qfleet.roles.actor import Actor, Recorder
from qfleet.roles.checkpointer import Checkpointer, Snapshot
from qfleet.roles.evaluator import Evaluator, Score
from qfleet.roles.learner import Learner
from qfleet.roles.metrics import Meter, Sink
from qfleet.roles.policy import Policy
from qfleet.roles.schedule import Progress
from qfleet.roles.seeds import lane_seeds, seed_for
from qfleet.roles.weights import Mailbox
from qfleet.runtime.plan import Plan, Stop, drive
from qfleet.types import Sample, VectorEnv


@dataclass(frozen=True)
class Outside:
    """What a run needs of the world around it: where figures, checkpoints and bad batches go."""

    sinks: Sequence[Sink]
    save: Callable[[Snapshot], Any]
    save_best: Callable[[Score, Progress, dict[str, torch.Tensor]], bool]
    on_bad: Callable[[Sample, int], None]


@dataclass(frozen=True)
class Cast:
    """Who plays: the agent, the environment it learns in, the one it is judged in, and how it explores."""

    agent: Agent
    env: VectorEnv
    eval_env: VectorEnv
    explorer: Explorer


class Inline:
    """Builds the roles, runs them, and knows their common state."""

    def __init__(self, cast: Cast, plan: Plan, outside: Outside) -> None:
        self.plan, self.outside, self.cast = plan, outside, cast
        seed, device = plan.seed, plan.device
        self.weights = Mailbox()
        layout = Layout(cast.env.spec, cast.agent.window, plan.replay.chunk_steps, cast.agent.columns)
        self.replay = HostReplay(layout, plan.replay, seed_for(seed, "replay"), device)
        self.stop = Stop(plan, self.progress)
        self.best: float | None = None
        self.meter = Meter(outside.sinks, self.progress, cast.env.spec.frames_per_step, plan.log_schedule,
                           [self.replay.metrics, self._exploration])
        torch.manual_seed(seed_for(seed, "torch"))  # for layers that draw from torch's own generator, as dropout does
        self.learner = Learner(cast.agent, self.replay, self.weights, self.meter, plan.learner, seed, device,
                               outside.on_bad)
        self.learner.limit = plan.total_updates
        self.learner.publish()
        policy = Policy(cast.agent, seed_for(seed, "actor", 0), device, plan.learner.precision)
        self.actor = Actor(policy, cast.env, cast.explorer, self.meter, self.weights,
                           Recorder(layout, cast.env.lanes, self.replay))
        judge = Policy(cast.agent, seed_for(seed, "evaluator"), device, plan.learner.precision)
        self.evaluator = Evaluator(judge, cast.eval_env, self.weights, plan.eval, seed, self.progress, self._judged,
                                   lambda: self.stop.told)
        self.checkpointer = Checkpointer(self.snapshot, outside.save, plan.checkpoint, self.progress, self.meter,
                                         self._cut if plan.exact_resume else None)
        self._begin: tuple[str, int] = ("begin", 0)

    def progress(self) -> Progress:
        return Progress(self.replay.pace.steps, self.learner.updates)

    def run(self) -> str:
        """Train to the end, evaluate and save; returns why it ended."""
        self.actor.begin(lane_seeds(self.plan.seed, self.cast.env.lanes, *self._begin))
        # The actor has sent its actions when the learner's turn comes: the emulators work while it trains.
        try:
            drive([self.actor, self.learner, self.meter, self.evaluator, self.checkpointer], self.stop)
            if self.stop.reason in ("total_steps", "total_updates"):
                self.learner.publish()
                self.evaluator.judge()
            # An exact run goes on from its last scheduled checkpoint: one taken anywhere else would not be exact.
            if not (self.plan.exact_resume and self.stop.told and self.checkpointer.saved_at):
                self.checkpointer.save()
        finally:
            self.meter.finish()
        return self.stop.reason or "total_steps"

    def snapshot(self) -> Snapshot:
        keep = self.plan.checkpoint.replay
        state = {"actor": self.actor.state_dict(), "learner": self.learner.state_dict(),
                 "weights": self.weights.state_dict(), "evaluator": self.evaluator.state_dict(),
                 "meter": self.meter.state_dict(), "best": self.best, "begin": list(self._begin),
                 "torch_rng": torch.get_rng_state(),
                 "replay": self.replay.state_dict() if keep else None, "clock": self.replay.pace.state_dict()}
        return Snapshot(self.progress(), self.learner.flat.state(), state, self.replay.segments() if keep else [])

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a snapshot; exactly so, if it was taken at a scheduled episode boundary."""
        if state["replay"] is not None:
            self.replay.load_state_dict(state["replay"])
            self.replay.load_segments(segments)
        else:
            self.replay.pace.start_anew(state["clock"]["steps"])
        self.learner.load_state_dict(state["learner"])
        self.weights.load_state_dict(state["weights"])
        self.actor.load_state_dict(state["actor"])
        self.evaluator.load_state_dict(state["evaluator"])
        self.checkpointer.resume()
        self.meter.load_state_dict(state["meter"])
        self.best = state["best"]
        if self.best is not None:
            self.stop.score(self.best)
        torch.set_rng_state(state["torch_rng"])
        purpose, index = state["begin"]
        self._begin = (purpose, index) if state["actor"]["fresh"] else ("resume", self.progress().steps)

    def _cut(self, index: int) -> None:
        self._begin = ("exact", index)
        self.actor.cut(lane_seeds(self.plan.seed, self.cast.env.lanes, *self._begin))

    def _judged(self, score: Score, weights: dict[str, torch.Tensor]) -> None:
        better = self.best is None or score.mean > self.best
        if better and self.outside.save_best(score, self.progress(), weights):
            self.best = score.mean  # not before it is on the disk: what could not be saved can still be beaten
        best = {} if self.best is None else {"eval/best_reward": self.best}
        self.meter.emit({"eval/mean_reward": score.mean, "eval/std_reward": score.std, **best,
                         "eval/mean_ep_length": sum(score.lengths) / len(score.lengths)})
        self.stop.score(score.mean)

    def _exploration(self) -> dict[str, float]:
        arm = self.cast.explorer.arms(self.actor.steps)
        return {"rollout/exploration_rate": float(arm.epsilon.mean())}
