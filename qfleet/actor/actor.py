"""Actor: steps a vector environment with a policy and sends the experience to a replay.

    step k:    recv ─ newer weights ─ act ─ send ─ record the row of step k-1 ─ send the chunk if full
               (recording, and anything between two calls of `step`, overlaps with the environment)

The order of events is fixed, so a run is the same whether or not the environment steps in the
background.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qfleet.accel.choose import acting_for
from qfleet.actor.policy import Policy
from qfleet.core.agent import Agent
from qfleet.core.clock import PhaseTimer, StepClock
from qfleet.core.env import OBS_PREFIX, Obs, StepResult, VectorEnv
from qfleet.core.episode import Episode
from qfleet.core.exploration import AdaptiveExplorer, Explorer
from qfleet.core.metrics import Metrics
from qfleet.core.replay import Chunk, ExperienceSink
from qfleet.core.weights import WeightSource
from qfleet.replay.chunker import Chunker
from qfleet.replay.layout import Layout

ENV, ACT, STORE, WAIT = "actor/env_ms", "actor/act_ms", "actor/store_ms", "actor/wait_ms"
TIMED_STEPS = 32
"""Vector steps between two writes of the actor's timing metrics."""

ActOutput = tuple[np.ndarray, dict[str, np.ndarray]]
"""Actions [N, ...] and the extra columns of the agent."""


StepRow = tuple[Obs, ActOutput, np.ndarray, np.ndarray, np.ndarray]
"""Observation, act output, reward, discount and last of every lane."""


class Recorder:
    """Assembles rows into chunks with initial priorities and holds them until the replay accepts them."""

    def __init__(self, agent: Agent, layout: Layout, lanes: int, replay: ExperienceSink, prioritised: bool = False,
                 padding: Sequence[int] = ()) -> None:
        self.lanes, self.replay = lanes, replay
        self.priority = agent.priority if prioritised else None
        inputs = agent.priority_inputs if self.priority is not None else {}
        self.layout = replace(layout, extras={**layout.extras, **inputs})
        self._extras = [*self.layout.extras, *layout.stored_states]
        self.chunker = Chunker(self.layout, lanes, padding)
        self.outbox: deque[tuple[Chunk, np.ndarray | None]] = deque()
        self._stored_columns = [column.name for column in layout.columns + layout.state_columns]
        self._priority_columns = [
            column.name for column in self.layout.columns if not column.name.startswith(OBS_PREFIX)
        ]

    def deliver(self) -> bool:
        """Send all pending chunks; False if the replay does not accept one."""
        while self.outbox:
            if self.replay.add(*self.outbox[0]) is None:
                return False
            self.outbox.popleft()
        return True

    def record_row(
        self, obs: Obs, output: ActOutput, reward: np.ndarray, discount: np.ndarray, last: np.ndarray
    ) -> None:
        """Record one row per lane: observation, action, extras, and the reward and discount that followed."""
        action, extras = output
        self._enqueue(self.chunker.append(obs, action, reward, discount, last, extras))

    def end_episodes(self, obs: Obs) -> None:
        """Record `obs` as the final rows of their episodes and send unfinished chunks too.

        No action is taken there, so the agent's extra columns are copied from the previous row.
        """
        previous = self.chunker.last_rows()
        zeros = np.zeros(self.lanes, np.float32)
        shape, dtype = self.layout.spec.action_spec
        no_action = np.zeros((self.lanes, *shape), dtype)
        self.record_row(
            obs, (no_action, {name: previous[name] for name in self._extras}), zeros, zeros, np.ones(self.lanes, bool)
        )
        self._enqueue(self.chunker.flush())

    def _enqueue(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        for _, chunk in chunks:
            columns = {name: chunk.columns[name] for name in self._stored_columns}
            self.outbox.append((Chunk(columns, chunk.valid), self._initial_priorities(chunk)))
        self.deliver()

    def _initial_priorities(self, chunk: Chunk) -> np.ndarray | None:
        """Priorities [S] of the chunk's windows, computed by the actor (Horgan et al. 2018)."""
        if self.priority is None:
            return None
        window = self.layout.window
        first = self.layout.context + np.arange(self.layout.starts) * window.stride
        rows = first[:, None] + np.arange(window.length)
        with torch.inference_mode():
            columns = {name: torch.from_numpy(chunk.columns[name][rows]) for name in self._priority_columns}
            priority = self.priority(columns).numpy()
        finite = np.isfinite(priority)
        if finite.all():
            return priority
        # A non-finite priority would make its window the most likely one, and the bad batch would be
        # sampled again and again. It gets the priority of its neighbours; the learner skips it.
        return np.where(finite, priority, priority[finite].max(initial=1.0))


class Actor:
    """Steps all lanes of one vector environment. Without a recorder nothing is stored (evaluation)."""

    def __init__(
        self,
        policy: Policy,
        env: VectorEnv,
        explorer: Explorer,
        metrics: Metrics,
        weights: WeightSource | None = None,
        recorder: Recorder | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.policy, self.env, self.explorer, self.metrics = policy, env, explorer, metrics
        self.weights, self.recorder, self.clock = weights, recorder, clock
        self._with_priority_inputs = recorder is not None and recorder.priority is not None
        self.steps = 0
        self.timer = PhaseTimer(metrics, (ENV, ACT, STORE, WAIT), TIMED_STEPS)
        self._pending: ActOutput | None = None
        self._row: StepRow | None = None  # complete but not recorded yet
        self._at_start = True
        self._faults = 0

    def begin(self, seeds: Sequence[int]) -> None:
        """Start an episode in every lane."""
        self._obs = self.env.reset(seeds)
        self._last = np.zeros(self.env.lanes, bool)
        self._return = np.zeros(self.env.lanes)
        self._length = np.zeros(self.env.lanes, np.int64)
        self._pending, self._row, self._at_start = None, None, True
        self.policy.begin(self.env.lanes)
        layout = None if self.recorder is None else self.recorder.layout
        columns = () if layout is None else (*layout.extras, *layout.stored_states)
        self._acting = acting_for(self.policy, self.env.spec, self.env.lanes, columns)

    def step(self) -> bool:
        """Finish the pending step and start the next; False while the replay does not accept chunks."""
        self.timer.start()
        if self.recorder is not None and not self.recorder.deliver():
            self.timer.pause(WAIT)
            return False
        self.receive_step()
        self._refresh()
        params = self.explorer.params(self.steps if self.clock is None else self.clock.steps)
        self._pending = self._acting.act(self._obs, params, self._with_priority_inputs)
        self._at_start = False
        self.timer.lap(ACT)
        self.env.send(self._pending[0])
        self.timer.lap(ENV)
        self._record()
        self.timer.lap(STORE)
        taken = self.env.lanes - int(np.count_nonzero(self._last))
        self.steps += taken
        if self.clock is not None:
            self.clock.count_steps(taken)
        if self.timer.end_step():
            self.metrics.write({"rollout/exploration_rate": float(params.epsilon.mean())})
            if params.index is not None:
                shares = arm_shares(params.index, params.count)
                self.metrics.write({"rollout/arm": float(params.index.float().mean()), **shares})
            if params.sigma is not None:
                self.metrics.write({"rollout/action_noise": float(params.sigma.mean())})
        return True

    def receive_step(self) -> None:
        """Receive the result of the pending step, if there is one; this completes its row."""
        if self._pending is None:
            return
        out = self.env.recv()
        self.timer.lap(ENV)
        final = self._last | out.aborted
        if self.recorder is not None:
            alive = ~final
            self._row = (self._obs, self._pending, out.reward * alive, out.discount * alive, final)
        self._acting.observe(out.reward, final)
        self._count_episodes(out, final)
        self.timer.lap(STORE)
        self._obs, self._last, self._pending = out.obs, out.last, None

    def running_episodes(self) -> list[Episode]:
        """The episodes that have begun and not ended, with their returns so far."""
        return [Episode(float(self._return[lane]), int(self._length[lane]), lane)
                for lane in range(self.env.lanes) if self._length[lane] and not self._last[lane]]

    def truncate_episodes(self, seeds: Sequence[int]) -> None:
        """Truncate all episodes, send all rows, and start new episodes from the given seeds."""
        self.receive_step()
        self._record()
        self._end_rows()
        self.begin(seeds)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, "policy": self.policy.state_dict(), "fresh": self._at_start,
                                 "obs": self._obs}
        if self.recorder is not None:
            state["chunker"] = self.recorder.chunker.state_dict()
        if isinstance(self.explorer, AdaptiveExplorer):
            state["explorer"] = self.explorer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Episodes that were running are truncated at their last observation;
        `begin` must follow.
        """
        self.steps = state["steps"]
        self.policy.load_state_dict(state["policy"])
        if isinstance(self.explorer, AdaptiveExplorer) and "explorer" in state:
            self.explorer.load_state_dict(state["explorer"])
        if self.recorder is not None:
            self.recorder.chunker.load_state_dict(state["chunker"])
            self._obs, self._at_start = state["obs"], state["fresh"]
            self._end_rows()

    def _record(self) -> None:
        if self.recorder is not None and self._row is not None:
            row, self._row = self._row, None
            self.recorder.record_row(*row)

    def _end_rows(self) -> None:
        if self.recorder is not None and not self._at_start:
            self.recorder.end_episodes(self._obs)

    def _count_episodes(self, out: StepResult, final: np.ndarray) -> None:
        if final.any():
            if isinstance(self.explorer, AdaptiveExplorer):
                for lane in final.nonzero()[0].tolist():
                    self.explorer.end_episode(lane, float(self._return[lane]) if self._last[lane] else None)
            self._return[final] = 0
            self._length[final] = 0
        self._return += out.raw_reward
        self._length += ~final
        for lane in out.last.nonzero()[0].tolist():
            info = out.info.get(lane, {})
            self.metrics.episode(Episode(float(self._return[lane]), int(self._length[lane]), lane, info=info,
                                         final_info=out.final_info.get(lane)))
            if info:
                self.metrics.write({f"rollout/info/{name}": value for name, value in info.items()})
        if out.aborted.any():
            self.metrics.count("fault/env_rebuilds", self.env.faults() - self._faults)
            self._faults = self.env.faults()

    def _refresh(self) -> None:
        lag = self._acting.refresh(self.weights) if self.weights is not None else None
        if lag is not None:
            self.metrics.write({"actor/policy_lag": lag})


def arm_shares(index: torch.Tensor, count: int) -> dict[str, float]:
    """Fraction of lanes that follow each of `count` policies, by metric tag; empty if `count` is 0."""
    shares = torch.bincount(index, minlength=count) / len(index)
    return {f"arms/{arm:02d}": share for arm, share in enumerate(shares.tolist())} if count else {}
