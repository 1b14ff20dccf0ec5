"""Acting by reflex is the policy's own, recorded or not."""

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_learners import AGENTS, CPU, CURIOUS, RECURRENT, SPEC

from qfleet.accel import graph_policy as reflexes
from qfleet.accel.graph_policy import GraphPolicy
from qfleet.actor.policy import Policy
from qfleet.algos import dqn, r2d2
from qfleet.algos.normalisation import NormaliseConfig, normalised
from qfleet.core.agent import ExplorationParams
from qfleet.core.errors import UserError
from qfleet.explore.pink import pink_noise
from qfleet.learner.weight_store import Mailbox


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
def test_reflexes_choose_as_the_policy_does(module, switches, scaled):
    """Episodes end in single lanes: stacks that are kept show what the environment shows, and what an agent remembers
    is what the policy remembers."""
    agent = module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], "hidden": [16],
                                                       **switches}), SPEC)
    agent = normalised(agent, NormaliseConfig(rewards=scaled), SPEC, 0.9)
    slow, quick = Policy(agent, 4, CPU), Policy(agent, 4, CPU)
    for policy in (slow, quick) if scaled else ():
        policy.flat.set_buffers({"row_count": torch.tensor(4), "row_square": torch.tensor([100])})
    wanted = (*agent.priority_inputs, *agent.stored_states, *agent.columns)
    reflex, rng = GraphPolicy(quick, SPEC, 3, wanted), np.random.default_rng(0)
    shown, arm = np.zeros((3, 2, 12, 12), np.uint8), ExplorationParams(torch.tensor([0.0, 0.3, 1.0]))
    for step in range(40):
        if step in (0, 30):  # all lanes start; the second time some things are remembered
            slow.begin(3)
            quick.begin(3)
            reflex.begin()
            shown[:] = 0
        else:
            over, reward = rng.random(3) < 0.3, rng.normal(size=3).astype(np.float32)
            shown[over] = 0
            slow.observe(reward, over)
            reflex.observe(reward, over)
        if step % 5 == 3:  # the learner goes on in mid-episode
            learnt = {name: value + 0.02 * name.endswith("weight") for name, value in slow.flat.state().items()}
            slow.load(learnt, step)
            quick.load(learnt, step)
        shown = np.concatenate([shown[:, 1:], rng.integers(0, 255, (3, 1, 12, 12)).astype(np.uint8)], 1)
        if agent.columns and step % 7:  # families of policies; else the one to win with
            arm = dataclasses.replace(arm, index=torch.from_numpy(rng.integers(4, size=3)), count=4)
        else:
            arm = dataclasses.replace(arm, index=None, count=0)
        arm = dataclasses.replace(arm, choice=torch.from_numpy(rng.random(3, np.float32)) if step >= 20 else None)
        action, hints = slow.act({"obs": shown}, arm)
        found, remembered = reflex.act({"obs": shown}, arm)
        np.testing.assert_array_equal(found, action)
        for name in wanted:
            np.testing.assert_array_equal(remembered[name], hints[name])
        assert_same(quick.persistent(), slow.persistent())
    assert_same(quick.state_dict()["memory"], slow.state_dict()["memory"])
    assert not slow.persistent() or slow.persistent()["distance.mean"] > 0


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_a_memory_that_does_not_stay_as_it_is_is_refused():
    agent = r2d2.build(r2d2.Config.model_validate({"algo": "r2d2", "hidden": [16], **RECURRENT[1]}), SPEC)

    def act(*args):
        found = agent.act(*args)
        return dataclasses.replace(found, memory=found.memory | {"state.h": found.memory["state.h"][:, :1]})

    reflex = GraphPolicy(Policy(dataclasses.replace(agent, act=act), 4, CPU), SPEC, 3, ())
    with pytest.raises(UserError, match=r"'state.h' was torch.float32 of \(3, 8\) and became .* of \(3, 1\)"):
        reflex.act({"obs": np.zeros((3, 2, 12, 12), np.uint8)}, ExplorationParams(torch.zeros(3)))


def test_every_part_of_an_arm_is_told_anew_at_every_step():
    agent, given = dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC), []

    def act(net, obs, memory, arm, rng):
        given.append(dataclasses.replace(
            arm, epsilon=arm.epsilon.clone(), sigma=arm.sigma.clone(), choice=arm.choice.clone()))
        return agent.act(net, obs, memory, arm, rng)

    reflex, process = GraphPolicy(Policy(dataclasses.replace(agent, act=act), 4, CPU), SPEC, 3, ()), pink_noise()
    for step in (1, 2):
        told = ExplorationParams(
            step * torch.tensor([0.1, 0.2, 0.3]), False, step * torch.arange(3), torch.full((3,), 0.5 * step), process,
            8, step * torch.tensor([0.1, 0.3, 0.4]))
        reflex.act({"obs": np.zeros((3, 2, 12, 12), np.uint8)}, told)
        found = given[-1]
        assert (found.network_noise, found.count) == (False, 8)
        assert torch.equal(found.process.decay, process.decay)
        assert found.index.tolist() == told.index.tolist()
        for name in ("epsilon", "sigma", "choice"):
            assert torch.equal(getattr(found, name), getattr(told, name)), name


class Tape:
    """Like a CUDA graph: recording it does nothing, and a replay leaves its results where the recorded ones are."""

    def __init__(self, reflex, choose):
        self.reflex, self.choose = reflex, choose
        held = [*reflex._obs.values(), *(reflex._memory or {}).values()]
        before, rng = [tensor.clone() for tensor in held], reflex.policy.rng.get_state()
        choose()
        reflex.policy.rng.set_state(rng)
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
        self.place = reflex._output

    def replay(self):
        self.choose()
        fresh, self.reflex._output = self.reflex._output, self.place
        self.place.action.copy_(fresh.action)
        for name, tensor in self.place.extras.items():
            tensor.copy_(fresh.extras[name])


@pytest.mark.parametrize(("module", "switches"), [AGENTS[0], RECURRENT, *CURIOUS])
def test_recorded_reflexes_choose_as_the_policy_does_whatever_the_arms(monkeypatch, module, switches):
    """Arms of one kind follow each other and are replayed; another kind has a recording of its own beside the first."""
    agent = module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], "hidden": [16],
                                                       **switches}), SPEC)
    slow, quick, rng = Policy(agent, 4, CPU), Policy(agent, 4, CPU), np.random.default_rng(0)
    wanted = (*agent.priority_inputs, *agent.stored_states, *agent.columns)
    reflex, rehearsed, made = GraphPolicy(quick, SPEC, 3, wanted), [], []

    def record(do, generators, beside, stream):
        made.append(beside)
        return Tape(reflex, do)

    monkeypatch.setattr(reflexes, "on_side_stream", lambda do: rehearsed.append(do()))
    monkeypatch.setattr(reflexes, "fast_math", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(reflexes, "capture_graph", record)
    monkeypatch.setattr(reflex, "_choose", lambda kind: GraphPolicy._choose(reflex, kind) if kind in reflex._graphs
                        else reflex._capture(kind))
    plain, seen = ExplorationParams(torch.tensor([0.0, 0.3, 1.0])), np.zeros((3, 2, 12, 12), np.uint8)
    quick.begin(3)
    reflex.begin()
    for step in range(24):
        if step:
            outcome = rng.normal(size=3).astype(np.float32), rng.random(3) < 0.3
            slow.observe(*outcome)
            reflex.observe(*outcome)
            seen[outcome[1]] = 0
        index = torch.from_numpy(rng.integers(4, size=3))
        arm = dataclasses.replace(plain, index=index, count=4) if 8 <= step < 16 else plain
        seen = np.concatenate([seen[:, 1:], rng.integers(0, 255, (3, 1, 12, 12)).astype(np.uint8)], 1)
        (action, told), (found, remembered) = slow.act({"obs": seen}, arm), reflex.act({"obs": seen}, arm)
        np.testing.assert_array_equal(found, action)
        for name in wanted:
            np.testing.assert_array_equal(remembered[name], told[name])
        assert_same(quick.persistent(), slow.persistent())
    assert rehearsed and [kind.index for kind in reflex._graphs] == [False, True]
    assert [beside is None for beside in made] == [True, False], "they share their memory"


def test_choices_wait_for_new_weights_and_for_nothing_else(monkeypatch):
    """What a GPU's streams are told, on a tape: without a word nobody would wait, with too many everybody would."""
    agent = dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC)
    policy, tape, streams = Policy(agent, 4, CPU), [], []
    reflex = GraphPolicy(policy, SPEC, 3, ())
    urgent = SimpleNamespace(wait_stream=lambda stream: tape.append(f"wait for {stream}"))
    monkeypatch.setattr(reflex, "_stream", urgent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the usual one of {device}")

    @contextlib.contextmanager
    def on(stream):
        tape.append("on the urgent one" if stream is urgent else "on another")
        yield
        tape.append("off")

    def act():
        tape.clear()
        reflex.act({"obs": np.zeros((3, 2, 12, 12), np.uint8)}, ExplorationParams(torch.zeros(3)))
        return list(tape)

    monkeypatch.setattr(torch.cuda, "stream", on)
    waited = ["wait for the usual one of cpu", "on the urgent one", "off"]
    reflex.begin()
    assert [act(), act(), act()] == [waited, waited[1:], waited[1:]], "for what was made before the first one"
    policy.load(policy.flat.state(), 7)
    assert [act(), act()] == [waited, waited[1:]], "for new weights"
    reflex.begin()
    assert [act(), act()] == [waited, waited[1:]], "for what an evaluation may have changed"
    monkeypatch.setattr(reflexes, "on_side_stream", lambda do: do())
    monkeypatch.setattr(reflexes, "fast_math", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(reflexes, "capture_graph",
                        lambda do, generators, beside, stream: streams.append(stream) or Tape(reflex, do))
    reflex._capture(reflexes.GraphKey(True, False, False, 1.0, 0, False))
    assert streams == [urgent], "a recording has the priority, and the workspace, of the stream that it was made on"


def test_a_recorded_policy_draws_as_a_plain_one(monkeypatch):
    """The rehearsals before a recording, which a GPU needs, take nothing from the generator."""
    agent = dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC)
    plain, quick = Policy(agent, 4, CPU), Policy(agent, 4, CPU)
    reflex, drawn = GraphPolicy(quick, SPEC, 3, ()), []
    monkeypatch.setattr(reflexes, "on_side_stream", lambda do: drawn.append(do()))
    monkeypatch.setattr(reflexes, "fast_math", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(reflexes, "capture_graph", lambda do, generators, beside, stream: SimpleNamespace(replay=do))
    monkeypatch.setattr(reflex, "_choose", lambda noise: reflex._capture(noise))
    obs, arm = {"obs": np.zeros((3, 2, 12, 12), np.uint8)}, ExplorationParams(torch.tensor([1.0, 1.0, 0.5]))
    for _ in range(5):
        np.testing.assert_array_equal(reflex.act(obs, arm)[0], plain.act(obs, arm)[0])
    assert drawn and torch.equal(quick.rng.get_state(), plain.rng.get_state())


def test_new_weights_are_taken_on_the_stream_that_chooses(monkeypatch):
    """And on the usual one when that stream has yet to wait for what was done there."""
    module, switches = AGENTS[0]
    agent = module.build(module.Config.model_validate({"algo": "dqn", "hidden": [16], **switches}), SPEC)
    policy = Policy(agent, 1, CPU)
    reflex, mailbox, streams = GraphPolicy(policy, SPEC, 3, ()), Mailbox(), ["usual"]

    @contextlib.contextmanager
    def stream(its):
        streams.append(its)
        yield
        streams.pop()

    taken = []
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(policy, "load", lambda state, version: (taken.append((version, streams[-1])),
                                                                setattr(policy, "version", version)))
    reflex._stream = "urgent"
    for version in (1, 2, 3):
        mailbox.publish(policy.flat.state(), version)
        assert reflex.refresh(mailbox.completed) is not None
        reflex._version = policy.version if version == 1 else reflex._version  # as a choice leaves it
    assert taken == [(1, "usual"), (2, "urgent"), (3, "urgent")] and reflex._version == 3
    assert reflex.refresh(mailbox.completed) is None
    reflex.begin()
    mailbox.publish(policy.flat.state(), 4)
    reflex.refresh(mailbox.completed)
    assert taken[-1] == (4, "usual")
