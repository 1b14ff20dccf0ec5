"""The coordinator of a parameter server, without processes: checkpoints of learners that come and go, clocks."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from qfleet.config import to_yaml
from qfleet.core.errors import UserError
from qfleet.core.evaluation import Score
from qfleet.launch.coordinator import Coordinator
from qfleet.launch.shard_node import ShardSnapshotter
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_agent, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.runs.checkpoint_parts import pack_state
from qfleet.sync.ps_shard import Push, Shard
from qfleet.training.checkpointer import Snapshot
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_part import saved_steps
from qfleet.training.remote_actors import RemoteActors, RemoteActorsSetup
from qfleet.transport.fleet_pb2 import ExchangeRequest, Figure, Part
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry
from qfleet.transport.shard_pb2 import LookReply

pytestmark = [pytest.mark.timeout(60)]
TINY = ["agent.hidden=[8]", "env.lanes=2", "replay.chunk_steps=4", "replay.min_steps=32", "learner.batch_size=8",
        "sync=server", "learners=2", "parameter_server.shards=2", "run.threads=1", "total_steps=1000",
        "eval.period_steps=100"]


class ShardClient:
    """A shard that is in this process, as the coordinator sees those that are not."""

    def __init__(self, config):
        self.config, self.shard, self.wait = config, None, time.sleep

    def load(self, state):
        self.shard = Shard("shard", state["weights"], self.config.learner, self.config.parameter_server)
        self.shard.load_state_dict(state)

    def copy(self):
        return self.shard.state_dict()

    def status(self):
        shard = self.shard
        return shard and LookReply(version=shard.version, staleness=dict(shard.staleness), stale=shard.stale,
                                   refused=shard.refused)

    def push_pull(self, worker, push, pull):
        return self.shard.push_pull(worker, push, pull)


class World:
    """A bureau and what it wrote."""

    def __init__(self, folder, *overrides):
        config = resolve("cartpole", [*TINY, *overrides]).config
        env = make_env(config.env, 1)
        self.spec = env.spec
        env.close()
        config = resolve_auto(config, self.spec)
        self.records, self.saved, self.failing = [], [], False
        self.published = PublishedState(to_yaml(config), json.dumps(self.spec.to_json()), 1)
        self.registry, self.inbox = Registry(1, 30.0), Inbox(4)
        outside = Hooks([self], self.save, lambda *best: True, lambda *bad: None)
        setup = RemoteActorsSetup(
            make_agent(config, self.spec), self.spec, self.published, self.registry, self.inbox)
        self.shard_clients = [ShardClient(config) for _ in range(config.parameter_server.shards)]
        self.bureau = Coordinator(
            setup, make_plan(config), outside, lambda wait: self.shard_clients, config.learners, folder / "parts")
        self.core, self.places = self.bureau.core, {}

    def write(self, record):
        self.records.append(record)

    def flush(self): ...

    def save(self, snapshot):
        if self.failing:
            raise OSError(28, "No space left on device")
        self.saved.append(snapshot)

    def hello(self, index, session):
        self.places[index] = [*self.registry.hello(f"learner/{index}", "learner", "here", 1, session), 0]

    def tell(self, index, **content):
        place, incarnation, sequence = self.places[index]
        self.places[index][2] = sequence + 1
        self.inbox.offer(ExchangeRequest(index=place, incarnation=incarnation, sequence=sequence + 1, **content))
        self.bureau.acting.message_handler.step()
        self.bureau.acting.serve(0)

    def give(self, index, steps, segments=("replay-1",), save=None):
        state = {"actors": [], "replay": {"learner": index}, "clock": {"steps": steps}, "begin": ["begin", 0],
                 "torch_rng": torch.get_rng_state(),
                 "learner": {"rng": torch.Generator().manual_seed(index).get_state()}}
        self.tell(index, part=Part(save=self.published.status.save if save is None else save, state=pack_state(state),
                                   segments=segments))

    def push(self, value=1.0):
        for shelf in self.shard_clients:
            weights = shelf.shard.pull("w")
            shelf.shard.push(Push("w", weights.version + 1, weights.epoch, weights.version, 1.0,
                                  torch.full_like(weights.weights, value)))


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    world.bureau._load()
    return world


def answering(world, *gifts):
    """Learners that give their parts as soon as they are asked to."""
    left = list(gifts)

    def turn(nap_s):
        RemoteActors.serve(world.bureau.acting, 0)
        if world.published.status.save and left:
            world.give(*left.pop(0))

    world.bureau.acting.serve = turn


def test_a_checkpoint_is_of_all_cells_and_shards_at_one_moment(world):
    for index in (0, 1):
        world.hello(index, f"s{index}")
        world.tell(index, steps=50 + index)
    world.push()
    answering(world, (0, 50, ["replay-0"]), (1, 51, ["rank0001-replay-1"]))
    world.bureau.checkpoints.save(world.bureau)
    snapshot: Snapshot = world.saved[0]
    assert snapshot.progress == (101, 1) and snapshot.state["steps"] == 101
    assert snapshot.state["replay"] == {"learner": 0} and snapshot.state["ranks"][0]["replay"] == {"learner": 1}
    assert torch.equal(snapshot.state["learner"]["rng"], torch.Generator().manual_seed(0).get_state())
    assert [segment.name for segment in snapshot.segments] == ["replay-0", "rank0001-replay-1"]
    held = torch.cat([shelf.shard.weights for shelf in world.shard_clients])
    assert torch.equal(torch.cat([value.flatten() for value in snapshot.policy.values()]), held)
    assert (world.published.status.save, world.published.status.saved) == (0, {0: 1, 1: 1}), "and everybody goes on"


def test_who_does_not_answer_is_not_waited_for_and_keeps_what_it_gave(world):
    for index in (0, 1):
        world.hello(index, f"s{index}")
        world.tell(index, steps=40)
    answering(world, (0, 40), (1, 40))
    world.bureau.checkpoints.save(world.bureau)
    world.tell(0, steps=10)
    world.tell(1, steps=10)
    member = world.registry._members[1]
    world.registry._members[1] = type(member)(**{**vars(member), "heard": time.monotonic() - 60})
    answering(world, (0, 50))
    world.bureau.checkpoints.save(world.bureau)
    state = world.saved[1].state
    assert (state["clock"]["steps"], state["ranks"][0]["clock"]["steps"], saved_steps(state)) == (50, 40, 100)
    assert world.published.status.saved == {0: 2, 1: 1}
    world.give(1, 50, save=2)
    assert world.bureau.parts[1][0]["clock"]["steps"] == 40, "too late"


def test_a_learner_that_never_gave_anything_has_an_empty_part_and_others_restore_it(world, tmp_path):
    world.hello(0, "s0")
    world.tell(0, steps=40)
    answering(world, (0, 40))
    world.bureau.checkpoints.save(world.bureau)
    state = world.saved[0].state
    assert state["ranks"] == [{"replay": None, "actors": [], "clock": {"steps": 0}}]
    again = World(tmp_path / "again")
    again.bureau.restore(state, [])
    assert again.core.progress() == (40, 0) and again.bureau.parts[1][0]["replay"] is None
    other = World(tmp_path / "other", "learners=3", "parameter_server.shards=5")
    other.bureau.restore(state, [])
    other.bureau._load()
    assert other.bureau.parts == {} and len(other.shard_clients) == 5
    assert torch.equal(
        torch.cat([shelf.shard.weights for shelf in other.shard_clients]), world.core.learner.flat.master
    )


def test_a_full_disk_is_known_to_the_cells_and_holds_nobody(world):
    world.hello(0, "s0")
    world.tell(0, steps=40)
    answering(world, (0, 40))
    world.failing = True
    world.bureau.checkpoints.save(world.bureau)
    assert (world.published.status.save, world.published.status.saved) == (0, {}) and world.bureau.checkpoints.failed
    world.failing = False
    answering(world, (0, 41))
    world.bureau.checkpoints.save(world.bureau)
    assert world.published.status.saved == {0: 2}


def test_a_part_that_cannot_be_read_spoils_nothing(world, caplog):
    world.hello(0, "s0")
    world.bureau._request, world.bureau._collecting = 1, True
    world.tell(0, part=Part(save=1, state=b"rubbish", segments=[]))
    assert world.bureau.parts == {} and "cannot be read" in caplog.text
    world.tell(0, part=Part(save=1, state=b"", segments=["../../etc/passwd"]))
    assert world.core.meter.counters["fault/bad_messages"] == 1


def test_everybody_hears_of_the_others_and_evaluations_find_fresh_weights(world):
    for index in (0, 1):
        world.hello(index, f"s{index}")
    world.tell(0, steps=30)
    world.tell(1, steps=80)
    facts = world.published.status
    assert (facts.steps, facts.remote_steps(0), facts.remote_steps(1)) == (110, 80, 30)
    assert world.published.weights.version == 0
    world.push()
    world.push()
    world.bureau.step()
    assert world.published.weights.version == 2 == world.core.learner.updates, "an evaluation is due after 100 steps"
    held = torch.cat([shelf.shard.weights for shelf in world.shard_clients])
    assert torch.equal(torch.cat([value.flatten() for value in world.published.weights.state.values()]), held)
    world.core.meter.emit()
    record = world.records[-1]
    assert record["server/learners"] == 2 and record["server/staleness_0"] == 4 and record["server/staleness_1"] == 0


def test_the_actors_of_all_live_learners_are_in_a_record(world):
    for index in (0, 1):
        world.hello(index, f"s{index}")
    for actors, lag in ((1.0, 9.0), (2.0, 4.0)):  # the last report counts, not the mean
        world.tell(0, figures=[figure("fleet/actors", actors), figure("fleet/inbox", 1.0),
                               figure("fleet/policy_lag", lag)])
    world.tell(1, figures=[figure("fleet/actors", 2.0), figure("fleet/inbox", 2.0), figure("fleet/policy_lag", 8.0)])
    world.core.meter.emit()
    record = world.records[-1]
    assert (record["fleet/actors"], record["fleet/inbox"], record["fleet/policy_lag"]) == (4.0, 3.0, 6.0)
    world.registry.deregister(1, 1)
    world.core.meter.emit()
    assert world.records[-1]["fleet/actors"] == 2.0


def figure(tag, value):
    return Figure(tag=tag, sum=value, count=1)


def test_without_remote_actors_a_record_names_none(world):
    world.hello(0, "s0")
    world.core.meter.emit()
    assert "fleet/actors" not in world.records[-1]


def test_a_shard_that_is_behind_does_not_turn_the_clock_back(world):
    world.push()
    world.bureau.step()
    state = world.shard_clients[0].copy()
    world.push()
    world.bureau._polled_at = 0.0
    world.bureau.step()
    assert world.core.learner.updates == 2
    world.shard_clients[0].load(state)
    world.bureau._polled_at = 0.0
    world.bureau.step()
    assert world.core.learner.updates == 2


def test_the_arm_that_an_evaluator_found_is_saved_whatever_the_learners_say(tmp_path):
    """Running figures of the network are the first learner's; what an evaluator noted is not: they have none."""
    world = World(tmp_path, "agent.algo=agent57", "agent.memory=none", "agent.arms=3", "agent.curious_hidden=[8]",
                  "agent.embedding=4", "agent.n_step=2", "explore.kind=bandit", "explore.arms=3")
    world.bureau._load()
    weights = world.core.learner.flat.state()
    world.core.record_evaluation(Score([1.0], [1], 0), weights | {"arm": torch.tensor(2)})
    buffers = {name: value + 1 for name, value in world.core.learner.flat.net.named_buffers() if name != "arm"}
    world.shard_clients[0].shard.buffers = buffers | {"arm": torch.tensor(0)}
    world.bureau.checkpoints.save(world.bureau)
    saved = world.saved[-1].policy
    assert int(saved["arm"]) == 2 and int(saved["kept.surprise.count"]) == 0
    assert int(saved["curiosity.normaliser.count"]) == 1


def test_a_shard_whose_weights_are_not_finite_keeps_the_copy_before():
    config = resolve("cartpole", TINY).config
    kept = []
    shard = Shard("shard", torch.zeros(4), config.learner, config.parameter_server)
    copier = ShardSnapshotter(SimpleNamespace(shard=shard), 2, kept.append)
    for version in range(1, 7):
        copier.step()
        shard.version = version
        if version == 5:
            shard.weights.fill_(float("inf"))
    copier.step()
    assert [state.version for state in kept] == [2, 4]


def test_callbacks_are_told_that_the_replay_is_elsewhere(tmp_path):
    replay = World(tmp_path).bureau.callbacks.control.replay
    assert len(replay) == 0
    with pytest.raises(UserError, match=r"run\.replay is empty in a callback: with sync=server every learner has a"):
        replay.sample(8)
