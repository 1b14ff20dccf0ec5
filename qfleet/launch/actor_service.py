"""What a learner serves to actors in other processes: published state, registry and inbox."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from qfleet.config import to_yaml
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.launch.topology import actor_assignment
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.remote_actors import RemoteActorsSetup
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry

LEAVE_TIMEOUT_S = 3.0
"""Seconds that a finished learner waits for its members to receive STOP."""


class ActorService:
    """Service of learner `index` for its actors. `setup` is the run's side, a `Serving` answers their calls from it.

    `takes_experience`: the number of steps that may wait in the inbox is limited.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, index: int = 0, takes_experience: bool = True) -> None:
        fleet, assignment = config.fleet, actor_assignment(config)
        if not takes_experience:
            assignment = replace(assignment, learners=1)
        self.config, self.spec = config, spec
        own_actors = assignment.actors_per_learner  # they share the rate at which members send
        self.published = PublishedState(to_yaml(config), json.dumps(spec.to_json()), own_actors)
        self.registry = Registry(assignment.actors, fleet.heartbeat_timeout_s, fleet.max_members, index,
                                 assignment.learners)
        waiting = [config.waiting_steps(config.env.lanes)] if takes_experience else []
        self.inbox = Inbox(fleet.inbox_messages, *waiting)

    def setup(self, agent: Agent, ends_members: bool = True) -> RemoteActorsSetup:
        return RemoteActorsSetup(agent, self.spec, self.published, self.registry, self.inbox, ends_members)

    def end(self) -> None:
        """Tell members that the run is over, unless joined actors wait for it to be resumed; wait until they know."""
        if not self.config.fleet.lasting:
            self.published.stop()
        ended = time.monotonic()
        while time.monotonic() - ended < LEAVE_TIMEOUT_S:
            members = self.registry.members()
            if all(member.heard > ended or ended - member.heard > LEAVE_TIMEOUT_S for member in members):
                return
            time.sleep(0.05)
