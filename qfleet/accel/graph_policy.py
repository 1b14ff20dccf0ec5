"""Acting on a GPU as one CUDA graph: only the newest frames are sent, and stacks are kept on the GPU.

    host    newest frames, exploration, rewards, ends ─▶ pinned memory ─▶    ┌─▶ actions, extra columns
    GPU                       frame stack, recurrent state ─ network ─ action ┘   one CUDA graph

An Atari lane sends 7 KB per step instead of 28. Recurrent state is kept on the GPU too; stored
states are copied back. A high-priority stream is used, ahead of updates queued on the default
stream:

    default stream         update ─ update ─ copy of weights ─ update ─ update ─ ...
    high-priority stream        act        act      └─▶ loaded once complete ─ act       without waiting
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from qfleet.accel.cuda_graph import capture_graph, fast_math, on_side_stream
from qfleet.accel.protocols import EagerPolicy
from qfleet.core.agent import Decision, ExplorationParams, Memory, NoiseProcess
from qfleet.core.env import EnvSpec, Obs
from qfleet.core.errors import UserError
from qfleet.core.tracebacks import first_line
from qfleet.core.weights import WeightSource

log = logging.getLogger(__name__)

WARM_UP = 2
STREAM_PRIORITY = -1
"""Stream priority whose kernels start before those queued on the default stream."""


@dataclass(frozen=True)
class GraphKey:
    """Properties of `ExplorationParams` that are constants of a graph: which fields are set, and the rest.

    `process` is on the policy's device.
    """

    noise: bool
    index: bool
    sigma: bool
    process: NoiseProcess
    count: int
    choice: bool


class GraphPolicy:
    """`Policy.act` for N lanes as a CUDA graph, with frame stacks on the network's device.

    `begin` starts an episode in all lanes; `observe` takes the rewards [N] of a step and the lanes
    [N] whose episode ended: their next observation is the first of an episode. Of the extra
    columns, only those named in `columns` are returned.
    """

    def __init__(self, policy: EagerPolicy, spec: EnvSpec, lanes: int, columns: tuple[str, ...]) -> None:
        self.policy, self.spec, self.columns = policy, spec, columns
        device, gpu = policy.device, policy.device.type == "cuda"
        self._host, self._newest, self._obs = {}, {}, {}
        for name, leaf in spec.observation.items():
            dtype = getattr(torch, leaf.dtype)
            self._host[name] = torch.zeros((lanes, *leaf.frame_shape), dtype=dtype, pin_memory=gpu)
            self._newest[name] = torch.zeros((lanes, *leaf.frame_shape), dtype=dtype, device=device)
            self._obs[name] = torch.zeros((lanes, *leaf.shape), dtype=dtype, device=device)
        self._inputs_host = torch.zeros((6, lanes), pin_memory=gpu)  # ε, 1 if continuing, reward, index, σ, choice
        self._inputs = torch.zeros((6, lanes), device=device)
        self._processes: dict[NoiseProcess, NoiseProcess] = {}  # on the host -> on the device
        self._continuing, self._reward = np.zeros(lanes, bool), np.zeros(lanes, np.float32)
        self._recurrent = policy.agent.recurrent_state
        self._memory: Memory = None if self._recurrent is None else self._recurrent.initial(lanes, device)
        # Waiting for this event spins: acting takes half a millisecond, and a sleeping thread would
        # then have to wait for an emulator to release its core.
        self._done = torch.cuda.Event() if gpu else None
        self._stream = torch.cuda.Stream(device, priority=STREAM_PRIORITY) if gpu else None
        # Version of the weights that are complete on this stream. `begin` must follow a change of the
        # weights that keeps the version.
        self._version: int | None = None
        # Graph and its static output by key; None if the capture failed.
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Decision] | None] = {}
        self._output: Decision | None = None

    def refresh(self, weights: WeightSource) -> int | None:
        """Load newer weights, which must be complete, on the stream that uses them."""
        if self._stream is None or self._version != self.policy.version:  # may be in use on the default stream
            return self.policy.refresh(weights)
        with torch.cuda.stream(self._stream):
            lag = self.policy.refresh(weights)
        self._version = self.policy.version
        return lag

    @torch.inference_mode()
    def begin(self) -> None:
        """Start episodes, after the policy's `begin`; shares the persistent state with the policy from then on."""
        self._continuing[:] = False
        self._version = None
        if self._recurrent is not None and self._memory is not None:
            for name, value in self.policy.persistent().items():
                self._memory[name].copy_(value)
            self.policy.share_memory(self._memory)

    def observe(self, reward: np.ndarray, over: np.ndarray) -> None:
        """Take rewards [N] and episode ends [N] of a step."""
        self._reward[:] = reward
        self._continuing &= ~over

    @torch.inference_mode()
    def act(
        self, obs: Obs, params: ExplorationParams, with_priority_inputs: bool = False
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [N] and extra columns for observations {leaf: [N, ...]}, of which only the newest frames are used.

        `with_priority_inputs` has no effect: `columns` names the columns that are returned.
        """
        if self._stream is None:
            return self._act(obs, params)
        if self._version != self.policy.version:
            self._stream.wait_stream(torch.cuda.current_stream(self.policy.device))
            self._version = self.policy.version
        with torch.cuda.stream(self._stream):
            return self._act(obs, params)

    def _act(self, obs: Obs, params: ExplorationParams) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        for name, leaf in self.spec.observation.items():
            np.copyto(self._host[name].numpy(), obs[name] if leaf.stack == 1 else obs[name][:, -leaf.frame_shape[0]:])
            self._newest[name].copy_(self._host[name], non_blocking=True)
        self._inputs_host[0].copy_(params.epsilon)
        self._inputs_host[1].copy_(torch.from_numpy(self._continuing))
        self._inputs_host[2].copy_(torch.from_numpy(self._reward))
        for row, value in ((3, params.index), (4, params.sigma), (5, params.choice)):
            if value is not None:
                self._inputs_host[row].copy_(value)
        self._inputs.copy_(self._inputs_host, non_blocking=True)
        self._continuing[:] = True
        has_index, has_sigma = params.index is not None, params.sigma is not None
        has_choice = params.choice is not None
        if params.process not in self._processes:
            self._processes[params.process] = params.process.to(self.policy.device)
        decision = self._choose(GraphKey(params.network_noise, has_index, has_sigma, self._processes[params.process],
                                         params.count, has_choice))
        found = {"action": decision.action} | {name: decision.extras[name] for name in self.columns}
        if self._done is not None:
            found = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                     for name, x in found.items()}
            self._done.record()
            self._done.synchronize()
        arrays = {name: x.numpy() for name, x in found.items()}
        return arrays.pop("action"), arrays

    def _choose(self, key: GraphKey) -> Decision:
        if (captured := self._graphs.get(key)) is not None:
            captured[0].replay()
            return captured[1]
        if self._done is None or key in self._graphs:  # no GPU, or the capture failed
            return self._step(self._params(key))
        return self._capture(key)

    def _params(self, key: GraphKey) -> ExplorationParams:
        """Exploration parameters with these properties, from the current inputs."""
        return ExplorationParams(self._inputs[0], key.noise, self._inputs[3].long() if key.index else None,
                                 self._inputs[4] if key.sigma else None, key.process, key.count,
                                 self._inputs[5] if key.choice else None)

    def _step(self, params: ExplorationParams) -> Decision:
        """Stack the newest frames on those of the same episode, act, and update the recurrent state."""
        for name, leaf in self.spec.observation.items():
            if leaf.stack == 1:
                self._obs[name].copy_(self._newest[name])
                continue
            stack, newest = self._obs[name], self._newest[name]
            continuing = self._inputs[1].view(-1, *[1] * (stack.ndim - 1)).to(stack.dtype)
            stack.copy_(torch.cat([stack[:, newest.shape[1]:] * continuing, newest], 1))
        decision = self._agent_act(params)
        for name, held in (self._memory or {}).items():
            after = decision.memory[name]
            if after.shape != held.shape or after.dtype != held.dtype:
                raise UserError(f"recurrent state {name!r} was {held.dtype} of {tuple(held.shape)} and became "
                                f"{after.dtype} of {tuple(after.shape)}: shape and dtype must stay those of "
                                "RecurrentState.initial")
            held.copy_(after)
        return decision

    def _agent_act(self, params: ExplorationParams) -> Decision:
        """Call the agent's `act` with a copy of the recurrent state, since its results may be views of it."""
        policy, memory = self.policy, self._memory
        if self._recurrent is not None and memory is not None:
            memory = {name: held.clone() for name, held in memory.items()}
            memory = self._recurrent.observe(memory, self._inputs[2].clone())
            memory = self._recurrent.reset(memory, self._inputs[1] == 0)
        return policy.agent.act(policy.flat.net, self._obs, memory, params, policy.rng)

    def _warm_up(self, key: GraphKey) -> None:
        """Act a few times without effect, so that libraries initialise.

        The generator is restored: a policy draws the same numbers whether or not it is captured.
        """
        rng = self.policy.rng
        before = rng.get_state()
        try:
            for _ in range(WARM_UP):
                on_side_stream(lambda: self._agent_act(self._params(key)))
        finally:
            rng.set_state(before)

    def _capture(self, key: GraphKey) -> Decision:
        others = [captured[0] for captured in self._graphs.values() if captured is not None]
        self._graphs[key] = None

        def step() -> None:
            self._output = self._step(self._params(key))

        try:
            with fast_math(self.policy.flat.data.dtype == torch.bfloat16):
                self._warm_up(key)
                graph = capture_graph(step, [self.policy.rng], others[0] if others else None, self._stream)
                graph.replay()
            assert self._output is not None
            self._graphs[key] = graph, self._output
            return self._output
        except RuntimeError as error:
            log.warning("this agent's acting cannot be recorded as a CUDA graph (%s); it runs operation by operation",
                        first_line(error))
            return self._step(self._params(key))
