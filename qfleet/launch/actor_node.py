"""Main function of an actor process: steps environments and sends transitions to its learner.

It is given only the endpoint of the learner; config and environment spec arrive in the learner's Welcome message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from qfleet.actor.actor import Actor, Recorder
from qfleet.core.exploration import AdaptiveExplorer
from qfleet.core.seeds import lane_seeds
from qfleet.core.weights import WeightSource
from qfleet.launch.endpoint import Endpoint
from qfleet.launch.fleet_client import FleetClient
from qfleet.runconfig.build import make_env, make_explorer, make_layout
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint_parts import pack_state
from qfleet.training.loop import Worker
from qfleet.transport.client import FleetConnection
from qfleet.transport.inbox import MAX_MEMBER_STATE_BYTES

STATE_PERIOD_S = 1.0


def run_actor(endpoint: Endpoint) -> int:
    """Main function of an actor: act until the run is over."""
    client = FleetClient(endpoint, "actor")
    config, connection = client.config, client.connection
    groups, lanes, first = config.env.groups, config.env.lanes, client.index * config.env.groups
    threads = config.env.threads or endpoint.cores
    with client.deregister_on_error(), _advise_on_oom(config), ExitStack() as stack:
        envs = [make_env(config.env.model_copy(update={"threads": threads}), lanes,
                         stall_timeout_s=config.run.stall_timeout_s) for _ in range(groups)]
        for env in envs:
            stack.callback(env.close)
        client.require_spec(envs[0].spec)
        layout = make_layout(config, envs[0].spec)
        replay, clock = connection.replay(layout, groups * lanes), connection.clock
        weights: WeightSource = SharedWeights(connection.weights) if groups > 1 else connection.weights
        explorers = [make_explorer(config, first + group) for group in range(groups)]
        actors = []
        for group, (env, explorer) in enumerate(zip(envs, explorers, strict=True)):
            policy = client.policy("actor", first + group, client.incarnation)
            recorder = Recorder(policy.agent, layout, lanes, replay, config.replay.alpha > 0)
            actors.append(Actor(policy, env, explorer, connection.metrics, weights, recorder, clock))
        workers: list[Worker] = [*actors]
        if adaptive := [explorer for explorer in explorers if isinstance(explorer, AdaptiveExplorer)]:
            saver = ExplorerStateSaver(connection, adaptive)
            client.restore_state(saver.load_state_dict)
            workers.append(saver)
        connection.start()
        for group, actor in enumerate(actors):
            actor.begin(lane_seeds(config.seed, lanes, "member", first + group, client.incarnation))
        return client.run(*workers)


class SharedWeights:
    """Weights for several actors of one process, received once."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._newest: tuple[int, dict[str, torch.Tensor]] | None = None

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        held = -1 if self._newest is None else self._newest[0]
        if (received := self._source.fetch(held)) is not None:
            self._newest = received
        if self._newest is None or self._newest[0] == newer_than:
            return None
        return self._newest


class ExplorerStateSaver:
    """Sends the states of adaptive explorers to the learner periodically; a restarted actor continues from them."""

    def __init__(self, connection: FleetConnection, explorers: Sequence[AdaptiveExplorer]) -> None:
        self.connection, self.explorers = connection, explorers
        self._sent_at, self._sent_state = time.monotonic(), b""

    def load_state_dict(self, state: Any) -> None:
        for explorer, explorer_state in zip(self.explorers, state, strict=True):
            explorer.load_state_dict(explorer_state)

    def step(self) -> bool:
        if time.monotonic() - self._sent_at >= STATE_PERIOD_S:
            self._sent_at = time.monotonic()
            state = pack_state([explorer.state_dict() for explorer in self.explorers])
            # A larger state would get the whole message rejected.
            if state != self._sent_state and len(state) <= MAX_MEMBER_STATE_BYTES:
                self._sent_state = state
                self.connection.metrics.set_member_state(state)
        return False


@contextmanager
def _advise_on_oom(config: RunConfig) -> Iterator[None]:
    """Add the config keys that determine an actor's memory to a MemoryError."""
    try:
        yield
    except MemoryError as error:
        error.add_note(f"lower env.lanes={config.env.lanes} or actors={config.actors}")
        raise
