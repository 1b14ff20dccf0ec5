"""An update made whole on a device is the learner's own, and acting by reflex is the policy's own."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import ListMetrics
from torch.utils._python_dispatch import TorchDispatchMode

from qfleet.agent import Arm
from qfleet.algos import agent57, c51, dqn, iqn, ngu, qr, r2d2
from qfleet.replay.chunker import Chunker
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device import DeviceReplay
from qfleet.replay.layout import Layout
from qfleet.roles import reflex as reflexes
from qfleet.roles import taped as tapes
from qfleet.roles.learner import Diverged, Learner, LearnerConfig
from qfleet.roles.policy import Policy
from qfleet.roles.reflex import Reflex
from qfleet.roles.taped import Taped
from qfleet.roles.weights import Mailbox
from qfleet.roles.whole import WARM_UP, Whole, obstacle
from qfleet.types import EnvSpec, Leaf

CPU = torch.device("cpu")
SPEC = EnvSpec("pictures", {"obs": Leaf((2, 12, 12), "uint8", "image", stack=2)}, actions=3)
AGENTS = [(dqn, {"dueling": True, "n_step": 3}), (c51, {"noisy": True, "atoms": 11}), (qr, {"quantiles": 7}),
          (iqn, {"munchausen": True, "n_step": 2})]
RECURRENT = (r2d2, {"burn_in": 2, "unroll": 4, "stride": 2, "n_step": 2, "features": [16], "units": 8})
WONDER = {"arms": 4, "embedding": 3, "episodic_capacity": 6, "neighbours": 2, "curious_hidden": [8]}
CURIOUS = [(ngu, RECURRENT[1] | WONDER), (agent57, RECURRENT[1] | WONDER), (agent57, WONDER | {"memory": "none"})]


def replay_of(agent, alpha=0.6, reward=1.0):
    layout = Layout(SPEC, agent.window, 8, agent.columns, agent.states, agent.marks)
    cfg = ReplayConfig(capacity=400, min_steps=0, samples_per_insert=1e9, chunk_steps=8, alpha=alpha)
    replay, chunker, rng = DeviceReplay(layout, cfg, 3, CPU), Chunker(layout, 2), np.random.default_rng(1)
    for step in range(150):
        obs = {"obs": rng.integers(0, 255, (2, 2, 12, 12)).astype(np.uint8)}
        last = np.array([step % 30 == 29, step % 50 == 49])
        extras = {name: (3 * rng.random((2, *shape))).astype(dtype)
                  for name, (shape, dtype) in {**agent.states, **agent.columns}.items()}
        row = (obs, rng.integers(3, size=2), reward * rng.random(2).astype(np.float32), 1.0 - last, last, extras)
        replay.tick(2)
        for _, chunk in chunker.append(*row):
            replay.add(chunk)
    return replay


def learner_of(module, switches, metrics=None, alpha=0.6, reward=1.0, **cfg):
    agent = module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], "hidden": [16],
                                                       **switches}), SPEC)
    config = LearnerConfig.model_validate({"batch_size": 16, "precision": "fp32", "learning_rate": 1e-3,
                                           "target_period_updates": 3, "metrics_period_updates": 2} | cfg)
    return Learner(agent, replay_of(agent, alpha, reward), Mailbox(), metrics or ListMetrics(), config, 5, CPU)


def in_one(learner):
    """What a GPU would do, operation by operation."""
    learner._whole = Whole(learner.replay, learner._eager[0], learner.flat, learner.gradients, learner.cfg.batch_size)
    return learner


@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_whole_updates_are_the_learners_own(module, switches, optimizer, alpha):
    one = learner_of(module, switches, alpha=alpha, optimizer=optimizer, optimizer_eps=1e-2, clip_norm=0.5)
    other = in_one(learner_of(module, switches, alpha=alpha, optimizer=optimizer, optimizer_eps=1e-2, clip_norm=0.5))
    for learner in (one, other):
        learner.burst = 7
        learner.step()
    assert one.updates == other.updates == 7
    torch.testing.assert_close(one.flat.master, other.flat.master, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(one.target.master, other.target.master, rtol=1e-5, atol=1e-7)
    first, second = one.replay.state_dict(), other.replay.state_dict()
    np.testing.assert_allclose(first["leaves"], second["leaves"], rtol=1e-4)
    assert first["priorities"]["largest"] == pytest.approx(second["priorities"]["largest"], rel=1e-4)
    assert first["pace"] == second["pace"] and torch.equal(first["rng"], second["rng"])
    other.replay.check_valid()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("works", [True, False])
def test_compiled_updates_are_the_learners_own_also_where_that_fails(caplog, works):
    from torch._inductor import config as inductor  # takes a second

    torch.compiler.reset()
    plain, other = (learner_of(dqn, {"dueling": True}, compile=it, optimizer_eps=1e-2) for it in (False, True))
    compiler = {} if works else {"cpp.cxx": ("no-such-compiler",)}
    with inductor.patch({"force_disable_caches": True} | compiler):
        for learner in (plain, other):
            learner.burst = 4
            learner.step()
    told = [record.message for record in caplog.records if "learner.compile" in record.message]
    assert len(told) == (0 if works else 1), told
    assert all("compiling failed" in message and "no-such-compiler" in message for message in told)
    assert all((net._compiled_call_impl is not None) == works for net in (other.flat.net, other.target.net))
    torch.testing.assert_close(plain.flat.master, other.flat.master, rtol=1e-4, atol=1e-6)


def test_figures_are_those_of_the_period_before():
    metrics = ListMetrics()
    learner = in_one(learner_of(*AGENTS[0], metrics=metrics))
    learner.burst = 6
    learner.step()
    tags = {"train/loss", "train/grad_norm", "train/q_mean", "train/priority", "train/learning_rate"}
    told = [values for values in metrics.values if "train/loss" in values]
    assert len(told) == 2 and all(tags <= set(values) for values in told)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_bad_batch_moves_nothing_and_many_end_the_run(optimizer):
    metrics = ListMetrics()
    learner = in_one(learner_of(*AGENTS[0], metrics=metrics, reward=np.nan, optimizer=optimizer, max_bad_updates=4))
    before, leaves = learner.flat.master.clone(), learner.replay.state_dict()["leaves"]
    learner.burst = 3
    learner.step()
    assert torch.equal(learner.flat.master, before)
    assert not learner.gradients.optimizer.mean.any() and float(learner.gradients.optimizer.steps) == 0
    np.testing.assert_array_equal(learner.replay.state_dict()["leaves"], leaves)
    learner.burst = 20
    with pytest.raises(Diverged, match="not finite in"):
        learner.step()
    assert torch.equal(learner.flat.master, before) and metrics.counts["fault/bad_updates"] > 0


def some_bad(learner, every):
    """Let the loss of every so many updates be NaN."""
    derive, calls = learner._whole.eager, itertools.count(1)

    def spoilt(sample):
        bad = torch.tensor(float("nan") if next(calls) % every == 0 else 1.0)
        return derive(dataclasses.replace(sample, weight=sample.weight * bad))

    learner._whole.eager = spoilt


def test_updates_count_what_moved_and_never_go_back():
    """Whenever it is asked, the count is that of the optimizer and of those that are still owed."""
    metrics = ListMetrics()
    learner = in_one(learner_of(*AGENTS[0], metrics=metrics, metrics_period_updates=4))
    some_bad(learner, 5)
    learner.burst, counts, made = 3, [], 0
    for turn in range(30):
        learner.step()
        made += 3
        counts.append(learner.updates)
        moved = int(learner.gradients.optimizer.steps)
        assert moved == made - made // 5
        if turn % 7 == 6:
            state = learner.state_dict()
            assert state["updates"] - state["owed"] == moved
            assert metrics.counts["fault/bad_updates"] == made // 5
    assert counts == sorted(counts)


def test_what_is_owed_is_remembered():
    learner = in_one(learner_of(*AGENTS[0], reward=np.nan))
    learner.burst = 3
    learner.step()
    state = learner.state_dict()
    assert (state["updates"], state["owed"]) == (3, 3)
    again = in_one(learner_of(*AGENTS[0]))
    again.load_state_dict(state)
    again.burst = 4
    again.step()
    assert again.updates == 4 and int(again.gradients.optimizer.steps) == 4
    assert again.state_dict()["owed"] == 0


class Replayed:
    """Like a CUDA graph of a derivative: a replay computes anew, and leaves its results where the recorded ones are."""

    def __init__(self, taped, derive):
        self.taped, self.derive = taped, derive
        rng = taped.eager.rng.get_state()
        derive()
        taped.eager.rng.set_state(rng)
        self.place = taped._found

    def replay(self):
        self.derive()
        fresh, self.taped._found = self.taped._found, self.place
        for kept, new in zip(tensors(self.place), tensors(fresh), strict=True):
            kept.copy_(new)


def tensors(found):
    return [found.total, found.per_item, found.priority, *(grad for grad in found.grads if grad is not None),
            *found.metrics.values(), *found.buffers.values()]


@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
def test_taped_derivatives_are_the_learners_own(monkeypatch, module, switches):
    """Where updates cannot be recorded whole: the batch is copied to where the first one lay."""
    one, other = (learner_of(module, switches) for _ in range(2))
    taped = other.derive = Taped(other._eager[0])
    aside, made = [], []
    monkeypatch.setattr(tapes, "aside", lambda do: aside.append(do()))
    monkeypatch.setattr(tapes, "swift", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(tapes, "recorded", lambda do, generators: made.append(generators) or Replayed(taped, do))
    for learner in (one, other):
        learner.burst = 8
        learner.step()
    assert len(aside) == WARM_UP and made == [[other.rng]] and taped.recorded
    assert torch.equal(one.flat.master, other.flat.master) and torch.equal(one.rng.get_state(), other.rng.get_state())
    assert all(torch.equal(a, b) for a, b in zip(one.flat.net.buffers(), other.flat.net.buffers(), strict=True))
    small = other.replay.sample(4)
    assert len(taped(small).per_item) == 4, "batches of another size are derived as they are"


def test_a_loss_that_cannot_be_taped_runs_as_it_is(monkeypatch, caplog):
    one, other = (learner_of(*AGENTS[0]) for _ in range(2))
    taped = other.derive = Taped(other._eager[0])

    def refuse(do, generators):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(tapes, "aside", lambda do: do())
    monkeypatch.setattr(tapes, "swift", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(tapes, "recorded", refuse)
    for learner in (one, other):
        learner.burst = 8
        learner.step()
    assert len(caplog.messages) == 1 and "not permitted when stream is capturing" in caplog.text
    assert not taped.recorded and torch.equal(one.flat.master, other.flat.master)


def test_what_stands_in_the_way_is_said():
    learner = learner_of(*AGENTS[0])
    assert obstacle(learner.replay, learner.gradients, False, learner.flat) is None
    assert "replay.store=host" in obstacle(object(), learner.gradients, False, learner.flat)
    assert "other learners" in obstacle(learner.replay, object(), False, learner.flat)
    assert "beyond belief" in obstacle(learner.replay, learner.gradients, True, learner.flat)


@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
def test_reflexes_choose_as_the_policy_does(module, switches):
    """Episodes end in single lanes: stacks that are kept show what the environment shows, and what an agent remembers
    is what the policy remembers."""
    agent = module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], "hidden": [16],
                                                       **switches}), SPEC)
    slow, quick = Policy(agent, 4, CPU), Policy(agent, 4, CPU)
    wanted = (*agent.hints, *agent.states, *agent.columns)
    reflex, rng = Reflex(quick, SPEC, 3, wanted), np.random.default_rng(0)
    shown, arm = np.zeros((3, 2, 12, 12), np.uint8), Arm(torch.tensor([0.0, 0.3, 1.0]))
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
        shown = np.concatenate([shown[:, 1:], rng.integers(0, 255, (3, 1, 12, 12)).astype(np.uint8)], 1)
        if agent.columns and step % 7:  # families of policies; else the one to win with
            arm = dataclasses.replace(arm, index=torch.from_numpy(rng.integers(4, size=3)), count=4)
        else:
            arm = dataclasses.replace(arm, index=None, count=0)
        action, hints = slow.act({"obs": shown}, arm)
        found, remembered = reflex.act({"obs": shown}, arm)
        np.testing.assert_array_equal(found, action)
        for name in wanted:
            np.testing.assert_array_equal(remembered[name], hints[name])
        assert_same(quick.kept(), slow.kept())
    assert_same(quick.state_dict()["memory"], slow.state_dict()["memory"])
    assert not slow.kept() or slow.kept()["distance.mean"] > 0
    assert Reflex.obstacle(quick) == "it is for GPUs"


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


class Tape:
    """Like a CUDA graph: recording it does nothing, and a replay leaves its results where the recorded ones are."""

    def __init__(self, reflex, choose):
        self.reflex, self.choose = reflex, choose
        held = [*reflex._seen.values(), *(reflex._memory or {}).values()]
        before, rng = [tensor.clone() for tensor in held], reflex.policy.rng.get_state()
        choose()
        reflex.policy.rng.set_state(rng)
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
        self.place = reflex._recorded

    def replay(self):
        self.choose()
        fresh, self.reflex._recorded = self.reflex._recorded, self.place
        self.place.action.copy_(fresh.action)
        for name, tensor in self.place.extras.items():
            tensor.copy_(fresh.extras[name])


@pytest.mark.parametrize(("module", "switches"), [AGENTS[0], RECURRENT, *CURIOUS])
def test_recorded_reflexes_choose_as_the_policy_does_whatever_the_arms(monkeypatch, module, switches):
    """Arms of one kind follow each other and are replayed; another kind is recorded anew."""
    agent = module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], "hidden": [16],
                                                       **switches}), SPEC)
    slow, quick, rng = Policy(agent, 4, CPU), Policy(agent, 4, CPU), np.random.default_rng(0)
    wanted = (*agent.hints, *agent.states, *agent.columns)
    reflex, rehearsed, made = Reflex(quick, SPEC, 3, wanted), [], []

    def record(do, generators, stream):
        made.append(reflex._kind)
        return Tape(reflex, do)

    monkeypatch.setattr(reflexes, "aside", lambda do: rehearsed.append(do()))
    monkeypatch.setattr(reflexes, "swift", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(reflexes, "recorded", record)
    monkeypatch.setattr(reflex, "_choose", lambda kind: Reflex._choose(reflex, kind) if reflex._kind == kind
                        else reflex._record(kind))
    plain, seen = Arm(torch.tensor([0.0, 0.3, 1.0])), np.zeros((3, 2, 12, 12), np.uint8)
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
        assert_same(quick.kept(), slow.kept())
    assert rehearsed and isinstance(reflex._graph, Tape)
    assert [kind.index for kind in made] == [False, True, False]


def test_choices_wait_for_new_weights_and_for_nothing_else(monkeypatch):
    """What a GPU's streams are told, on a tape: without a word nobody would wait, with too many everybody would."""
    agent = dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC)
    policy, tape, streams = Policy(agent, 4, CPU), [], []
    reflex = Reflex(policy, SPEC, 3, ())
    urgent = SimpleNamespace(wait_stream=lambda stream: tape.append(f"wait for {stream}"))
    monkeypatch.setattr(reflex, "_urgent", urgent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the usual one of {device}")

    @contextlib.contextmanager
    def on(stream):
        tape.append("on the urgent one" if stream is urgent else "on another")
        yield
        tape.append("off")

    def act():
        tape.clear()
        reflex.act({"obs": np.zeros((3, 2, 12, 12), np.uint8)}, Arm(torch.zeros(3)))
        return list(tape)

    monkeypatch.setattr(torch.cuda, "stream", on)
    waited = ["wait for the usual one of cpu", "on the urgent one", "off"]
    reflex.begin()
    assert [act(), act(), act()] == [waited, waited[1:], waited[1:]], "for what was made before the first one"
    policy.load(policy.flat.state(), 7)
    assert [act(), act()] == [waited, waited[1:]], "for new weights"
    reflex.begin()
    assert [act(), act()] == [waited, waited[1:]], "for what an evaluation may have changed"
    monkeypatch.setattr(reflexes, "aside", lambda do: do())
    monkeypatch.setattr(reflexes, "swift", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(reflexes, "recorded", lambda do, generators, stream: streams.append(stream) or Tape(reflex, do))
    reflex._record(reflexes.Kind(True, False, False, 1.0, 0))
    assert streams == [urgent], "a recording has the priority, and the workspace, of the stream that it was made on"


class NeverWaits(TorchDispatchMode):
    """Whatever would make the host wait for a GPU, or needs what only the host knows, is refused."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, wanted = func.overloadpacket.__name__, args[1] if len(args) > 1 else ()
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), name
        if name in ("index", "index_put", "index_put_"):
            assert not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in wanted), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
def test_nothing_that_is_recorded_waits_for_the_host(monkeypatch, module, switches):
    # Two that look at their numbers on a CPU alone.
    monkeypatch.setattr(ngu, "nearest", lambda keys, count, key, k: keys.square().sum(2)[:, :k])
    monkeypatch.setattr(torch.nn.functional, "one_hot",
                        lambda x, classes: (x.unsqueeze(-1) == torch.arange(classes)).long())
    learner = learner_of(module, switches)
    sample = learner.replay.draw(16)[1]
    policy = Policy(learner.agent, 4, CPU)
    policy.begin(3)
    memory = policy.memory
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NeverWaits():
        bool(torch.ones(()))
    shown, arm = {"obs": torch.zeros(3, 2, 12, 12, dtype=torch.uint8)}, Arm(torch.zeros(3))
    for one in (arm, dataclasses.replace(arm, index=torch.arange(3), count=4)):
        with torch.inference_mode(), NeverWaits():
            learner.agent.act(policy.flat.net, shown, memory, one, policy.rng)
    with NeverWaits():
        learner._eager[0](sample)


def test_why_a_gpu_does_not_act_by_reflex_is_said_once(caplog):
    reflexes._own_up.cache_clear()
    agent = SimpleNamespace(appraise=lambda net, obs, action: {}, recall=None)
    for device, said in ((CPU, 0), (torch.device("cuda"), 1), (torch.device("cuda"), 1)):
        assert reflexes.reflex_of(SimpleNamespace(device=device, agent=agent), SPEC, 3, ()) is None
        assert len(caplog.messages) == said
    assert "the agent appraises its actions" in caplog.text
    reflexes._own_up.cache_clear()


def test_a_recorded_policy_draws_as_a_plain_one(monkeypatch):
    """The rehearsals before a recording, which a GPU needs, take nothing from the generator."""
    agent = dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC)
    plain, quick = Policy(agent, 4, CPU), Policy(agent, 4, CPU)
    reflex, drawn = Reflex(quick, SPEC, 3, ()), []
    monkeypatch.setattr(reflexes, "aside", lambda do: drawn.append(do()))
    monkeypatch.setattr(reflexes, "swift", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(reflexes, "recorded", lambda do, generators, stream: SimpleNamespace(replay=do))
    monkeypatch.setattr(reflex, "_choose", lambda noise: reflex._record(noise))
    obs, arm = {"obs": np.zeros((3, 2, 12, 12), np.uint8)}, Arm(torch.tensor([1.0, 1.0, 0.5]))
    for _ in range(5):
        np.testing.assert_array_equal(reflex.act(obs, arm)[0], plain.act(obs, arm)[0])
    assert drawn and torch.equal(quick.rng.get_state(), plain.rng.get_state())


def test_new_weights_are_taken_on_the_stream_that_chooses(monkeypatch):
    """And on the usual one when that stream has yet to wait for what was done there."""
    module, switches = AGENTS[0]
    agent = module.build(module.Config.model_validate({"algo": "dqn", "hidden": [16], **switches}), SPEC)
    policy = Policy(agent, 1, CPU)
    reflex, mailbox, streams = Reflex(policy, SPEC, 3, ()), Mailbox(), ["usual"]

    @contextlib.contextmanager
    def stream(its):
        streams.append(its)
        yield
        streams.pop()

    taken = []
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(policy, "load", lambda state, version: (taken.append((version, streams[-1])),
                                                                setattr(policy, "version", version)))
    reflex._urgent = "urgent"
    for version in (1, 2, 3):
        mailbox.publish(policy.flat.state(), version)
        assert reflex.refresh(mailbox.complete) is not None
        reflex._version = policy.version if version == 1 else reflex._version  # as a choice leaves it
    assert taken == [(1, "usual"), (2, "urgent"), (3, "urgent")] and reflex._version == 3
    assert reflex.refresh(mailbox.complete) is None
    reflex.begin()
    mailbox.publish(policy.flat.state(), 4)
    reflex.refresh(mailbox.complete)
    assert taken[-1] == (4, "usual")
