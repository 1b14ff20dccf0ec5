"""A batch that is learnt in parts gives the gradient of the whole, and the same bits whoever is ready first."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from fakes import linear_agent, sample_of
from torch import nn

from qfleet.agent import Loss
from qfleet.algos import agent57, c51, d4pg, ddpg, dqn, iqn, ngu, qr, r2d2
from qfleet.maths.hands import Hands
from qfleet.roles.derive import Eager
from qfleet.roles.flat import Flat
from qfleet.roles.gradients import OptimizerConfig, Solo
from qfleet.roles.learner import Learner, LearnerConfig
from qfleet.roles.parted import Parted
from qfleet.types import Box, EnvSpec, Leaf, Sample, UserError

VECTOR = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, actions=4)
IMAGE = EnvSpec("toy", {"obs": Leaf((1, 36, 36), "uint8", "image")}, actions=4)
CONTROL = EnvSpec("toy", VECTOR.observation, 0, box=Box((1,), (-1.0,), (1.0,)))


class Reversed(Hands):
    """Whoever comes last is ready first."""

    def __call__(self, jobs):
        return [job() for job in reversed(jobs)][::-1]


def batch(seed, rows=4, items=32, spec=VECTOR, **states):
    rng = torch.Generator().manual_seed(seed)
    last = torch.rand(items, rows, generator=rng) < 0.2
    shape = spec.observation["obs"].shape
    obs = (torch.randn(items, rows, *shape, generator=rng) if spec is VECTOR else
           torch.randint(256, (items, rows, *shape), generator=rng, dtype=torch.uint8))
    return Sample(np.arange(items), torch.rand(items, generator=rng), {
        "obs.obs": obs, "last": last, "action": torch.randint(4, (items, rows), generator=rng, dtype=torch.int32),
        "reward": torch.randn(items, rows, generator=rng) * ~last, "discount": 1.0 * ~last, **states})


def networks(agent, dtype=torch.float32):
    torch.manual_seed(0)
    return Flat(agent.network(), dtype), Flat(agent.network().requires_grad_(False), dtype)


def parted(agent, flat, target, hands, seed=0):
    return Parted(lambda rng: Eager(agent, flat.net, target.net, rng), flat, torch.Generator().manual_seed(seed), hands)


AGENTS = {
    "plain": (dqn, {"double": False}), "double, dueling": (dqn, {"dueling": True}), "squared": (dqn, {"loss": "mse"}),
    "rescaled": (dqn, {"rescale": True}), "munchausen": (dqn, {"munchausen": True}),
    "c51": (c51, {"v_min": -5.0, "v_max": 5.0, "dueling": True}), "qr": (qr, {"quantiles": 8})}


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(("items", "count"), [(32, 2), (33, 2), (50, 3)])
def test_the_parts_of_a_batch_add_up_to_it(name, items, count):
    algo, options = AGENTS[name]
    agent = algo.build(algo.Config(hidden=(8,), n_step=3, **options), VECTOR)
    flat, target = networks(agent)
    sample = batch(3, items=items)
    whole = Eager(agent, flat.net, target.net, torch.Generator())(sample)
    found = parted(agent, flat, target, Hands(count))(sample)
    torch.testing.assert_close(found.per_item, whole.per_item)
    torch.testing.assert_close(found.priority, whole.priority)
    torch.testing.assert_close(found.total, whole.total)
    for mine, its in zip(found.grads, whole.grads, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
    assert found.metrics.keys() == whole.metrics.keys()
    for tag, value in found.metrics.items():
        torch.testing.assert_close(value.mean(), whole.metrics[tag].mean())


def test_sequences_with_a_memory_do_so_too():
    cfg = r2d2.Config(hidden=(8,), units=8, burn_in=2, unroll=3, n_step=2, stride=3)
    agent = r2d2.build(cfg, VECTOR)
    flat, target = networks(agent)
    states = {name: torch.zeros(32, 1, *shape, dtype=getattr(torch, dtype))
              for name, (shape, dtype) in agent.states.items()}
    sample = batch(3, rows=agent.window.length, **states)
    whole = Eager(agent, flat.net, target.net, torch.Generator())(sample)
    found = parted(agent, flat, target, Hands(2))(sample)
    torch.testing.assert_close(found.priority, whole.priority)
    for mine, its in zip(found.grads, whole.grads, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", [dqn, iqn])
def test_who_is_ready_first_changes_no_bit(algo, dtype):
    agent = algo.build(algo.Config(hidden=(16,), torso="nature", noisy=True), IMAGE)
    ends = []
    for hands in (Hands(2), Hands(2), Reversed(2)):
        flat, target = networks(agent, dtype)
        derive, solo = parted(agent, flat, target, hands), Solo(OptimizerConfig(learning_rate=1e-3))
        solo.attach(flat)
        solo.divide(hands)
        for seed in range(3):
            solo.apply(derive(batch(seed, rows=2, spec=IMAGE)).grads)
        ends.append(flat.master.clone())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_what_is_drawn_depends_on_the_generator_alone_and_differs_between_parts_and_batches():
    def loss(net, target, sample, rng):
        drawn = torch.rand(len(sample.weight), generator=rng)
        return Loss(net(sample.rows["obs.obs"][:, 0]).sum(1), drawn)

    agent = linear_agent(loss)
    flat = Flat(agent.network())
    derive = parted(agent, flat, flat, Hands(2), seed=5)
    sample = sample_of([1.0] * 32)
    kept = derive.rng.get_state()
    first, second = derive(sample).priority, derive(sample).priority
    derive.rng.set_state(kept)
    assert torch.equal(derive(sample).priority, first), "as a run that is resumed"
    assert len(set(torch.cat([first, second]).tolist())) > 60, "no part repeats what another has drawn"


def test_a_parameter_without_a_part_has_zeros_and_gradients_are_not_copied_again():
    def loss(net, target, sample, rng):
        value = net[0](sample.rows["obs.obs"][:, 0]).sum(1)
        return Loss(value, value.detach())

    agent = dataclasses.replace(linear_agent(loss), network=lambda: nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 3)))
    flat = Flat(agent.network())
    flat.grad.fill_(7.0)
    found = parted(agent, flat, flat, Hands(2))(sample_of([1.0, 2.0]))
    assert flat.gather(found.grads) is flat.grad and flat.grad[6:].eq(0).all() and not flat.grad[:6].eq(7).any()
    assert flat.grad[:6].eq(1).all(), "both items show a 1"


class Replay:
    """Gives the same batch again and again."""

    steps = 0

    def __init__(self, sample):
        self.given, self.told = sample, []

    def sample(self, n):
        return self.given

    def update(self, keys, priority):
        self.told.append((keys, priority))


class Nobody:
    wanted = False

    def publish(self, state, version):
        pass

    def write(self, values):
        pass

    def count(self, name, by=1):
        pass


def learner(agent, sample):
    return Learner(agent, Replay(sample), Nobody(), Nobody(), LearnerConfig(capture=False, precision="fp32"), 0,
                   torch.device("cpu"))


@pytest.mark.parametrize("first", ["divide", "doubt"])
def test_a_learner_doubts_every_part(first):
    made = learner(dqn.build(dqn.Config(hidden=(8,)), VECTOR), batch(0, rows=2))
    for each in sorted(["divide", "doubt"], key=lambda each: each != first):
        made.doubt(6.0) if each == "doubt" else made.divide(2)
    assert all(eager.bound is made._doubt.bound for eager in made._eager) and len(made._eager) == 3


def test_a_divided_learner_learns_what_an_undivided_one_does():
    ends = []
    for parts in (1, 2):
        made = learner(dqn.build(dqn.Config(hidden=(8,)), VECTOR), batch(0, rows=2))
        if parts > 1:
            made.divide(parts)
        made.limit = 5
        assert made.step() and made.updates == 5
        ends.append((made.flat.master.clone(), made.replay.told[-1][1]))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ends[0][1], ends[1][1], rtol=1e-3)


def test_a_loss_that_is_not_finite_in_one_part_moves_nothing():
    sample = batch(0, rows=2)
    sample.rows["reward"][30] = float("nan")
    sample.rows["last"][30] = False
    made = learner(dqn.build(dqn.Config(hidden=(8,)), VECTOR), sample)
    made.divide(2)
    before, made.limit, made.burst = made.flat.master.clone(), 1, 1
    made.step()
    assert made.updates == 0 and torch.equal(made.flat.master, before)


OTHERS, WRITES = "makes of an item may depend on others or on chance", "network may write to .* when it computes"


@pytest.mark.parametrize(("algo", "options", "why"), [
    (dqn, {}, None), (dqn, {"torso": "impala"}, None), (c51, {}, None), (qr, {}, None), (iqn, {}, None),
    (r2d2, {}, None),
    (dqn, {"torso": "impala", "spectral_norm": True}, WRITES),  # what passes know of singular vectors
    (dqn, {"torso": "qfleet.nets.torsos.nature:build"}, OTHERS),  # who knows what a user's own does
    (ngu, {}, OTHERS), (agent57, {}, OTHERS), (ddpg, {}, OTHERS), (d4pg, {}, OTHERS)])
def test_what_passes_write_or_compare_is_left_whole(algo, options, why):
    spec = CONTROL if algo in (ddpg, d4pg) else IMAGE
    agent = algo.build(algo.Config(**({} if algo in (ddpg, d4pg) else {"hidden": (8,)}), **options), spec)
    made = learner(agent, None)
    if why is None:
        made.divide(2)
        assert isinstance(made.derive, Parted)
    else:
        with pytest.raises(UserError, match=f"learner.parts=2: .*{why}; set learner.parts=1"):
            made.divide(2)


def test_an_agent_that_says_so_wrongly_is_told():
    def loss(net, target, sample, rng):
        value = net(sample.rows["obs.obs"][:, 0]).sum(1)
        return Loss(value, value.detach(), buffers={"seen": torch.ones(())})

    agent = linear_agent(loss)
    flat = Flat(agent.network())
    with pytest.raises(ValueError, match="whose loss writes seen is not itemwise"):
        parted(agent, flat, flat, Hands(2))(sample_of([1.0, 2.0]))


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_hands_work_at_once_with_their_own_threads_and_answer_in_order(threads):
    meeting = threading.Barrier(3, timeout=30)

    def job(name):
        meeting.wait()  # which needs all three
        return name, torch.get_num_threads(), threading.current_thread().name

    before = torch.get_num_threads()
    found = Hands(3, threads)([lambda name=name: job(name) for name in "abc"])
    assert [name for name, *_ in found] == ["a", "b", "c"]
    assert [each for _, each, _ in found] == [before, threads, threads] and found[0][2] == "MainThread"


def test_nobody_is_left_at_work_after_a_failure():
    done = []

    def slow():
        threading.Event().wait(0.2)
        done.append(1)

    def fails():
        raise RuntimeError("no")

    for jobs in ([fails, slow], [slow, fails]):
        done.clear()
        with pytest.raises(RuntimeError, match="no"):
            Hands(2)(jobs)
        assert done == [1]
