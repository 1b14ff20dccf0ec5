"""Acting on a GPU without waiting for Python: newest frames go there, stacks are kept there, and a recording chooses.

    host    newest frames, arms, rewards, which episodes are over ─▶ pinned memory ─▶   ┌─▶ actions, hints
    GPU                                             stack, memory ─ network ─ choice ───┘   one CUDA graph

An Atari lane sends 7 KB per step instead of 28. What an agent remembers is kept on the GPU, too; what is stored of it
comes back. All this happens on a stream of its own, before updates that are under way on the usual one:

    usual stream      update ─ update ─ copy of weights ─ update ─ update ─ ...
    urgent stream          choice     choice        └─▶ taken once complete ─ choice       nothing is waited for
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from qfleet.accel.graph_update import capture_graph, fast_math, first_line, on_side_stream
from qfleet.actor.policy import Policy
from qfleet.core.agent import Decision, ExplorationParams, Memory
from qfleet.core.env import EnvSpec, Obs
from qfleet.core.errors import UserError
from qfleet.core.weights import WeightSource

log = logging.getLogger(__name__)

WARM_UP = 2
STREAM_PRIORITY = -1
"""The priority of a stream whose kernels begin before those that wait on the usual one."""


@dataclass(frozen=True)
class GraphKey:
    """What is the same in every lane and at every step, and so may be recorded, of `Arm`: which parts it has, too."""

    noise: bool
    index: bool
    sigma: bool
    theta: float
    count: int


class GraphPolicy:
    """What `policy.act` does for N lanes, with observations stacked where the network is.

    `begin` when all lanes start; `observe` what a step brought [N], and the lanes [N] whose episode is over: the next
    observation is a first one there. Of what is told beside actions, only what is `wanted` comes back.
    """

    def __init__(self, policy: Policy, spec: EnvSpec, lanes: int, wanted: tuple[str, ...]) -> None:
        self.policy, self.spec, self.wanted = policy, spec, wanted
        device, gpu = policy.device, policy.device.type == "cuda"
        self._host, self._new, self._seen = {}, {}, {}
        for name, leaf in spec.observation.items():
            dtype = getattr(torch, leaf.dtype)
            self._host[name] = torch.zeros((lanes, *leaf.frame_shape), dtype=dtype, pin_memory=gpu)
            self._new[name] = torch.zeros((lanes, *leaf.frame_shape), dtype=dtype, device=device)
            self._seen[name] = torch.zeros((lanes, *leaf.shape), dtype=dtype, device=device)
        self._side_host = torch.zeros((5, lanes), pin_memory=gpu)  # ε, 1 for lanes that go on, rewards, index, σ
        self._side = torch.zeros((5, lanes), device=device)
        self._going, self._reward = np.zeros(lanes, bool), np.zeros(lanes, np.float32)
        self._recall = policy.agent.recurrent_state
        self._memory: Memory = None if self._recall is None else self._recall.initial(lanes, device)
        # Who waits for it keeps a core busy: a choice takes half a millisecond, and a thread that slept would then have
        # to wait until one of the emulators leaves its core.
        self._done = torch.cuda.Event() if gpu else None
        self._stream = torch.cuda.Stream(device, priority=STREAM_PRIORITY) if gpu else None
        # Of the weights that this stream knows to be complete. Who changes them without another version calls `begin`.
        self._version: int | None = None
        # By the kind of arms: a recording, and where it leaves what it chose; or None where that failed.
        self._recordings: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Decision] | None] = {}
        self._chosen: Decision | None = None

    @staticmethod
    def why_not_captured(policy: Policy) -> str | None:
        """Why a policy does not act by reflex, or None."""
        if policy.device.type != "cuda":
            return "it is for GPUs"
        if policy.agent.evaluate_actions is not None:
            return "the agent appraises its actions"
        return None

    def refresh(self, weights: WeightSource) -> int | None:
        """Take newer weights, which must be complete, on the stream that will choose with them."""
        if self._stream is None or self._version != self.policy.version:  # others may have used them on the usual one
            return self.policy.refresh(weights)
        with torch.cuda.stream(self._stream):
            gained = self.policy.refresh(weights)
        self._version = self.policy.version
        return gained

    @torch.inference_mode()
    def begin(self) -> None:
        """After the policy's: what outlives episodes is its own from here on, changed at every step."""
        self._going[:] = False
        self._version = None
        if self._recall is not None and self._memory is not None:
            for name, value in self.policy.persistent().items():
                self._memory[name].copy_(value)
            self.policy.memory = self._memory

    def observe(self, reward: np.ndarray, over: np.ndarray) -> None:
        self._reward[:] = reward
        self._going &= ~over

    @torch.inference_mode()
    def act(self, obs: Obs, arm: ExplorationParams) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [N] and the wanted columns, for observations {leaf: [N, ...]} of which the newest frames count."""
        if self._stream is None:
            return self._act(obs, arm)
        if self._version != self.policy.version:
            self._stream.wait_stream(torch.cuda.current_stream(self.policy.device))
            self._version = self.policy.version
        with torch.cuda.stream(self._stream):
            return self._act(obs, arm)

    def _act(self, obs: Obs, arm: ExplorationParams) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        for name, leaf in self.spec.observation.items():
            np.copyto(self._host[name].numpy(), obs[name] if leaf.stack == 1 else obs[name][:, -leaf.frame_shape[0]:])
            self._new[name].copy_(self._host[name], non_blocking=True)
        self._side_host[0].copy_(arm.epsilon)
        self._side_host[1].copy_(torch.from_numpy(self._going))
        self._side_host[2].copy_(torch.from_numpy(self._reward))
        for place, part in ((3, arm.index), (4, arm.sigma)):
            if part is not None:
                self._side_host[place].copy_(part)
        self._side.copy_(self._side_host, non_blocking=True)
        self._going[:] = True
        decision = self._choose(
            GraphKey(arm.network_noise, arm.index is not None, arm.sigma is not None, arm.theta, arm.count)
        )
        found = {"action": decision.action} | {name: decision.extras[name] for name in self.wanted}
        if self._done is not None:
            found = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                     for name, x in found.items()}
            self._done.record()
            self._done.synchronize()
        arrays = {name: x.numpy() for name, x in found.items()}
        return arrays.pop("action"), arrays

    def _choose(self, kind: GraphKey) -> Decision:
        if (recording := self._recordings.get(kind)) is not None:
            recording[0].replay()
            return recording[1]
        if self._done is None or kind in self._recordings:  # no GPU, or recording has failed
            return self._once(self._arm(kind))
        return self._record(kind)

    def _arm(self, kind: GraphKey) -> ExplorationParams:
        """Arms of this kind, as they were told last."""
        return ExplorationParams(self._side[0], kind.noise, self._side[3].long() if kind.index else None,
                                 self._side[4] if kind.sigma else None, kind.theta, kind.count)

    def _once(self, arm: ExplorationParams) -> Decision:
        """Stack the newest frames on those of the same episode, choose, and remember."""
        for name, leaf in self.spec.observation.items():
            if leaf.stack == 1:
                self._seen[name].copy_(self._new[name])
                continue
            seen, new = self._seen[name], self._new[name]
            going = self._side[1].view(-1, *[1] * (seen.ndim - 1)).to(seen.dtype)
            seen.copy_(torch.cat([seen[:, new.shape[1]:] * going, new], 1))
        decision = self._decide(arm)
        for name, held in (self._memory or {}).items():
            after = decision.memory[name]
            if after.shape != held.shape or after.dtype != held.dtype:
                raise UserError(f"the agent's memory {name!r} was {held.dtype} of {tuple(held.shape)} and became "
                                f"{after.dtype} of {tuple(after.shape)}: let it stay as Recall.begin makes it")
            held.copy_(after)
        return decision

    def _decide(self, arm: ExplorationParams) -> Decision:
        """What the policy would choose; a copy of the memory is given away, as choices and extras may be made of it."""
        policy, memory = self.policy, self._memory
        if self._recall is not None and memory is not None:
            memory = {name: held.clone() for name, held in memory.items()}
            memory = self._recall.reset(self._recall.observe(memory, self._side[2].clone()), self._side[1] == 0)
        return policy.agent.act(policy.flat.net, self._seen, memory, arm, policy.rng)

    def _warm_up(self, kind: GraphKey) -> None:
        """Choose a few times for nothing: libraries prepare in them. The generator is as it was, so that a policy draws
        alike whether or not it is recorded."""
        rng = self.policy.rng
        before = rng.get_state()
        try:
            for _ in range(WARM_UP):
                on_side_stream(lambda: self._decide(self._arm(kind)))
        finally:
            rng.set_state(before)

    def _record(self, kind: GraphKey) -> Decision:
        others = [recording[0] for recording in self._recordings.values() if recording is not None]
        self._recordings[kind] = None

        def choose() -> None:
            self._chosen = self._once(self._arm(kind))

        try:
            with fast_math(self.policy.flat.data.dtype == torch.bfloat16):
                self._warm_up(kind)
                graph = capture_graph(choose, [self.policy.rng], others[0] if others else None, self._stream)
                graph.replay()
            assert self._chosen is not None
            self._recordings[kind] = graph, self._chosen
            return self._chosen
        except RuntimeError as error:
            log.warning("this agent's acting cannot be recorded as a CUDA graph (%s); it runs operation by operation",
                        first_line(error))
            return self._once(self._arm(kind))


@cache
def _warn(why: str) -> None:
    """Once, however many actors there are and however often they begin."""
    log.warning("acting is not recorded as a CUDA graph, since %s; it runs operation by operation", why)


def graph_policy_for(policy: Policy, spec: EnvSpec, lanes: int, wanted: tuple[str, ...]) -> GraphPolicy | None:
    """The policy's reflex for so many lanes, made once; None where it acts as usual, which is said of a GPU."""
    if (why := GraphPolicy.why_not_captured(policy)) is not None:
        if policy.device.type == "cuda":
            _warn(why)
        return None
    key = (lanes, wanted)
    if key not in policy.graph_policies:
        policy.graph_policies[key] = GraphPolicy(policy, spec, lanes, wanted)
    found: GraphPolicy = policy.graph_policies[key]
    return found
