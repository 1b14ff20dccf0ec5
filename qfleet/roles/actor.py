"""The actor: steps an environment with a policy and ships what happened.

    step k:    recv ─ newer weights ─ act ─ send ─ row of step k-1 is recorded ─ chunk shipped if full
               (recording, and whoever runs between two steps, happens while the environment computes)

The order of events is fixed, so a run is the same whether or not the environment works in the background.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qfleet.agent import Agent, Arm
from qfleet.explore import Chooser, Explorer
from qfleet.replay.chunker import Chunker
from qfleet.replay.layout import Layout
from qfleet.roles.laps import Laps
from qfleet.roles.policy import Policy
from qfleet.roles.reflex import Reflex, reflex_of
from qfleet.types import OBS, Chunk, Experience, Metrics, Obs, Outcome, Published, VectorEnv

ENV, ACT, STORE, WAIT = "actor/env_ms", "actor/act_ms", "actor/store_ms", "actor/wait_ms"
TIMED_STEPS = 32
"""Vector steps between two reports of where an actor's time goes."""

Choice = tuple[np.ndarray, dict[str, np.ndarray]]
"""Actions [N, ...] and the extra columns that the agent remembers of them."""


Row = tuple[Obs, Choice, np.ndarray, np.ndarray, np.ndarray]
"""Of every lane the observation, what was chosen there, and reward, discount and end that it brought."""


class Recorder:
    """Turns an actor's rows into chunks with priorities and holds them until the replay takes them."""

    def __init__(self, agent: Agent, layout: Layout, lanes: int, replay: Experience, prioritised: bool = False,
                 padding: Sequence[int] = ()) -> None:
        self.lanes, self.replay = lanes, replay
        self.priority = agent.priority if prioritised else None
        hints = agent.hints if self.priority is not None else {}
        self.layout = replace(layout, extras={**layout.extras, **hints})
        self._extras = [*self.layout.extras, *layout.states]
        self.chunker = Chunker(self.layout, lanes, padding)
        self.outbox: deque[tuple[Chunk, np.ndarray | None]] = deque()
        self._shipped = [column.name for column in layout.columns + layout.marked]
        self._narrow = [column.name for column in self.layout.columns if not column.name.startswith(OBS)]

    def deliver(self) -> bool:
        """Ship what waits; False while the replay says: wait."""
        while self.outbox:
            if self.replay.add(*self.outbox[0]) is None:
                return False
            self.outbox.popleft()
        return True

    def row(self, obs: Obs, choice: Choice, reward: np.ndarray, discount: np.ndarray, last: np.ndarray) -> None:
        """Record one row per lane: the observation, what was chosen there, and what leaving it brought."""
        action, extras = choice
        self._pack(self.chunker.append(obs, action, reward, discount, last, extras))

    def end(self, obs: Obs) -> None:
        """Make the observations the final rows of their episodes, and ship the unfinished chunks, too.

        Nothing was chosen there: arm, hints and all else that the agent adds to a row are those of the row before.
        """
        before = self.chunker.newest()
        zeros = np.zeros(self.lanes, np.float32)
        shape, dtype = self.layout.spec.action
        nothing = np.zeros((self.lanes, *shape), dtype)
        self.row(obs, (nothing, {name: before[name] for name in self._extras}), zeros, zeros, np.ones(self.lanes, bool))
        self._pack(self.chunker.flush())

    def _pack(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        for _, chunk in chunks:
            columns = {name: chunk.columns[name] for name in self._shipped}
            self.outbox.append((Chunk(columns, chunk.valid), self._judge(chunk)))
        self.deliver()

    def _judge(self, chunk: Chunk) -> np.ndarray | None:
        """Priorities [S] of the chunk's starts, in the actor's own eyes (Horgan et al. 2018)."""
        if self.priority is None:
            return None
        window = self.layout.window
        first = self.layout.context + np.arange(self.layout.starts) * window.stride
        rows = first[:, None] + np.arange(window.length)
        with torch.inference_mode():
            found = self.priority({name: torch.from_numpy(chunk.columns[name][rows]) for name in self._narrow}).numpy()
        sane = np.isfinite(found)
        if sane.all():
            return found
        # A reward that is not finite must not make its window the most urgent of all: drawn again and again, it would
        # spoil every update. It is as urgent as its neighbours, and the learner skips it.
        return np.where(sane, found, found[sane].max(initial=1.0))


class Actor:
    """Plays all lanes of one vector environment. Without a recorder it only plays (an evaluator)."""

    def __init__(
        self,
        policy: Policy,
        env: VectorEnv,
        explorer: Explorer,
        metrics: Metrics,
        weights: Published | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.policy, self.env, self.explorer, self.metrics = policy, env, explorer, metrics
        self.weights, self.recorder = weights, recorder
        self._hinted = recorder is not None and recorder.priority is not None
        self.steps = 0
        self.laps = Laps(metrics, (ENV, ACT, STORE, WAIT), TIMED_STEPS)
        self._sent: Choice | None = None
        self._row: Row | None = None  # complete, and not recorded yet
        self._fresh = True
        self._faults = 0

    def begin(self, seeds: Sequence[int]) -> None:
        """Start an episode in every lane."""
        self._obs = self.env.reset(seeds)
        self._last = np.zeros(self.env.lanes, bool)
        self._return = np.zeros(self.env.lanes)
        self._length = np.zeros(self.env.lanes, np.int64)
        self._sent, self._row, self._fresh = None, None, True
        self.policy.begin(self.env.lanes)
        wanted = () if self.recorder is None else (*self.recorder.layout.extras, *self.recorder.layout.states)
        self._reflex: Reflex | None = reflex_of(self.policy, self.env.spec, self.env.lanes, wanted)
        if self._reflex is not None:
            self._reflex.begin()

    def step(self) -> bool:
        """Finish the step under way and start the next one; False while the replay does not take our chunks."""
        self.laps.start()
        if self.recorder is not None and not self.recorder.deliver():
            self.laps.pause(WAIT)
            return False
        self.land()
        self._refresh()
        arm = self.explorer.arms(self.recorder.replay.steps if self.recorder is not None else self.steps)
        self._sent, self._fresh = self._choose(arm), False
        self.laps.lap(ACT)
        self.env.send(self._sent[0])
        self.laps.lap(ENV)
        self._record()
        self.laps.lap(STORE)
        taken = self.env.lanes - int(np.count_nonzero(self._last))
        self.steps += taken
        if self.recorder is not None:
            self.recorder.replay.tick(taken)
        if self.laps.turn():
            self.metrics.write({"rollout/exploration_rate": float(arm.epsilon.mean())})
            if arm.index is not None:
                self.metrics.write({"rollout/arm": float(arm.index.float().mean()), **followed(arm.index, arm.count)})
            if arm.sigma is not None:
                self.metrics.write({"rollout/action_noise": float(arm.sigma.mean())})
        return True

    def _choose(self, arm: Arm) -> Choice:
        if self._reflex is not None:
            return self._reflex.act(self._obs, arm)
        return self.policy.act(self._obs, arm, self._hinted)

    def land(self) -> None:
        """Receive the outcome of the step under way, if there is one: it makes a row complete."""
        if self._sent is None:
            return
        out = self.env.recv()
        self.laps.lap(ENV)
        final = self._last | out.cut
        if self.recorder is not None:
            alive = ~final
            self._row = (self._obs, self._sent, out.reward * alive, out.discount * alive, final)
        (self._reflex or self.policy).observe(out.reward, final)
        self._tally(out, final)
        self.laps.lap(STORE)
        self._obs, self._last, self._sent = out.obs, out.last, None

    def cut(self, seeds: Sequence[int]) -> None:
        """Break all episodes off here, as truncations, ship everything, and start anew from given seeds."""
        self.land()
        self._record()
        self._finish_rows()
        self.begin(seeds)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, "policy": self.policy.state_dict(), "fresh": self._fresh,
                                 "obs": self._obs}
        if self.recorder is not None:
            state["chunker"] = self.recorder.chunker.state_dict()
        if isinstance(self.explorer, Chooser):
            state["explorer"] = self.explorer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; episodes that were running end, truncated, at the last observation seen. `begin` must follow."""
        self.steps = state["steps"]
        self.policy.load_state_dict(state["policy"])
        if isinstance(self.explorer, Chooser) and "explorer" in state:
            self.explorer.load_state_dict(state["explorer"])
        if self.recorder is not None:
            self.recorder.chunker.load_state_dict(state["chunker"])
            self._obs, self._fresh = state["obs"], state["fresh"]
            self._finish_rows()

    def _record(self) -> None:
        if self.recorder is not None and self._row is not None:
            row, self._row = self._row, None
            self.recorder.row(*row)

    def _finish_rows(self) -> None:
        if self.recorder is not None and not self._fresh:
            self.recorder.end(self._obs)

    def _tally(self, out: Outcome, final: np.ndarray) -> None:
        if final.any():
            if isinstance(self.explorer, Chooser):
                for lane in final.nonzero()[0].tolist():
                    self.explorer.episode(lane, float(self._return[lane]) if self._last[lane] else None)
            self._return[final] = 0
            self._length[final] = 0
        self._return += out.score
        self._length += ~final
        for lane in out.last.nonzero()[0].tolist():
            self.metrics.episode(lane, float(self._return[lane]), int(self._length[lane]))
        if out.cut.any():
            self.metrics.count("fault/env_rebuilds", self.env.faults() - self._faults)
            self._faults = self.env.faults()

    def _refresh(self) -> None:
        lag = (self._reflex or self.policy).refresh(self.weights) if self.weights is not None else None
        if lag is not None:
            self.metrics.write({"actor/policy_lag": lag})


def followed(index: torch.Tensor, count: int) -> dict[str, float]:
    """By tag, what part of the lanes follows each of `count` policies; nothing where their number is not known."""
    shares = torch.bincount(index, minlength=count) / len(index)
    return {f"arms/{arm:02d}": share for arm, share in enumerate(shares.tolist())} if count else {}
