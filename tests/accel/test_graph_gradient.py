"""Losses and gradients that are recorded by themselves are the learner's own, and nothing recorded asks the host."""

import contextlib
import dataclasses

import pytest
import torch
from image_learners import AGENTS, CPU, CURIOUS, RECURRENT, learner_of
from torch.utils._python_dispatch import TorchDispatchMode

from qfleet.accel import graph_gradient as tapes
from qfleet.accel.cuda_graph import WARM_UP
from qfleet.accel.graph_gradient import GraphGradient
from qfleet.actor.policy import Policy
from qfleet.algos import novelty
from qfleet.core.agent import ExplorationParams
from qfleet.maths.policy_family import MixtureTable


class Replayed:
    """Like a CUDA graph of a derivative: a replay computes anew, and leaves its results where the recorded ones are."""

    def __init__(self, taped, derive):
        self.taped, self.derive = taped, derive
        rng = taped.autograd.rng.get_state()
        derive()
        taped.autograd.rng.set_state(rng)
        self.place = taped._result

    def replay(self):
        self.derive()
        fresh, self.taped._result = self.taped._result, self.place
        for kept, new in zip(tensors(self.place), tensors(fresh), strict=True):
            kept.copy_(new)


def tensors(found):
    return [found.total, found.per_item, found.priority, *(grad for grad in found.grads if grad is not None),
            *found.metrics.values(), *found.buffers.values()]


@pytest.mark.parametrize(("module", "switches"), [*AGENTS, RECURRENT, *CURIOUS])
def test_taped_derivatives_are_the_learners_own(monkeypatch, module, switches):
    """Where updates cannot be recorded whole: the batch is copied to where the first one lay."""
    one, other = (learner_of(module, switches) for _ in range(2))
    taped = other.gradient_fn = GraphGradient(other._autograds[0])
    aside, made = [], []
    monkeypatch.setattr(tapes, "on_side_stream", lambda do: aside.append(do()))
    monkeypatch.setattr(tapes, "fast_math", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(tapes, "capture_graph", lambda do, generators: made.append(generators) or Replayed(taped, do))
    for learner in (one, other):
        learner.max_updates_per_step = 8
        learner.step()
    assert len(aside) == WARM_UP and made == [[other.rng]] and taped.captured
    assert torch.equal(one.flat.master, other.flat.master) and torch.equal(one.rng.get_state(), other.rng.get_state())
    assert all(torch.equal(a, b) for a, b in zip(one.flat.net.buffers(), other.flat.net.buffers(), strict=True))
    small = other.replay.sample(4)
    assert len(taped(small).per_item) == 4, "batches of another size are derived as they are"


def test_a_loss_that_cannot_be_taped_runs_as_it_is(monkeypatch, caplog):
    one, other = (learner_of(*AGENTS[0]) for _ in range(2))
    taped = other.gradient_fn = GraphGradient(other._autograds[0])

    def refuse(do, generators):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(tapes, "on_side_stream", lambda do: do())
    monkeypatch.setattr(tapes, "fast_math", lambda rounded: contextlib.nullcontext())
    monkeypatch.setattr(tapes, "capture_graph", refuse)
    for learner in (one, other):
        learner.max_updates_per_step = 8
        learner.step()
    assert len(caplog.messages) == 1 and "not permitted when stream is capturing" in caplog.text
    assert not taped.captured and torch.equal(one.flat.master, other.flat.master)


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
    # Three that look at their numbers on a CPU alone.
    monkeypatch.setattr(novelty, "avoid_sync", lambda tensor: True)
    monkeypatch.setattr(novelty, "knn_squared_distances", lambda keys, count, key, k: keys.square().sum(2)[:, :k])
    monkeypatch.setattr(torch.nn.functional, "one_hot",
                        lambda x, classes: (x.unsqueeze(-1) == torch.arange(classes)).long())
    learner = learner_of(module, switches)
    sample = learner.replay.draw(16)[1]
    policy = Policy(learner.agent, 4, CPU)
    policy.begin(3)
    memory = policy.memory
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NeverWaits():
        bool(torch.ones(()))
    shown, arm = {"obs": torch.zeros(3, 2, 12, 12, dtype=torch.uint8)}, ExplorationParams(torch.zeros(3))
    for one in (arm, dataclasses.replace(arm, index=torch.arange(3), count=4)):
        with torch.inference_mode(), NeverWaits():
            learner.agent.act(policy.flat.net, shown, memory, one, policy.rng)
    with NeverWaits():
        learner._autograds[0](sample)


def test_a_table_is_copied_once_for_a_device_and_a_dtype():
    """A copy within a recording would fail on a GPU; here it is another dtype that needs one."""
    table, arm, like = MixtureTable([0.5, 2.0]), torch.tensor([1, 0, 1]), torch.zeros(1, dtype=torch.float64)
    with torch.inference_mode():
        assert table.at(arm, like).tolist() == [2.0, 0.5, 2.0]
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            copies.append(func.overloadpacket.__name__ == "_to_copy")
            return func(*args, **(kwargs or {}))

    with Copies():
        found = table.at(arm, like)
    assert copies and not any(copies) and found.dtype == torch.float64 and not found.is_inference()
