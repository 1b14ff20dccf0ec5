"""On a GPU, updates captured as CUDA graphs, or compiled, are the eager ones, and their failures are noticed.

Updates are compared by the distance of the weights over the way that they moved: 0 for equal ones, about 1.4 for
unrelated ones. With the same library kernels a captured gradient is the eager one, bit by bit. A whole update also
differs in the optimizer's kernel (fused, with another rounding of the norm): in the last bits of float32 at first. In
bfloat16 runs the weights are rounded to 8 bits after every step, which turns a difference in the last bit into one of
2**-8 for the few weights at a rounding border. Every later update amplifies the difference, by ReLUs that switch,
greedy actions that change, and priorities: bounds after the first captured update are tighter than those after more.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from fakes import ListMetrics
from gpu_learners import CONTROL, EVERY_AGENT, GPU, PIXELS, VALUE_BASED, distance, make_updates, named, same_kernels
from image_learners import learner_of

from qfleet.accel.cuda_graph import WARM_UP
from qfleet.accel.graph_gradient import GraphGradient
from qfleet.algos import c51, ddpg, dqn
from qfleet.learner.learner import Diverged
from qfleet.sync.gradient_sync import Solo

__all__ = ["same_kernels"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
FIRST = {"fp32": 1e-3, "bf16": 0.02}
LATER = {"fp32": 0.01, "bf16": 0.10}
"""Bounds of the distance after the first captured update and after some more. The second also hold for the first
update with the kernels that libraries find fastest, which round to TF32 (10 bits) in other orders."""


def learner_on_gpu(case, precision, **options):
    module, switches, spec = case
    return learner_of(module, switches, spec=spec, device=GPU, precision=precision, optimizer_eps=1e-2, **options)


def moved(learner, updates):
    """Weights before and after."""
    begin = learner.flat.master.clone()
    make_updates(learner, updates)
    return begin, learner.flat.master.clone()


def assert_near(one, other, begin, bound):
    found = distance(one, other, begin)
    print(f"distance {found:.2e}, bound {bound:.0e}")  # shown by pytest -rA
    assert found <= bound  # NaN is not


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", EVERY_AGENT, ids=lambda case: "-".join(named(part) for part in case))
def test_captured_updates_are_the_eager_ones(same_kernels, monkeypatch, case, precision):
    eager, whole = (learner_on_gpu(case, precision, capture=it) for it in (False, True))
    begin, first = moved(eager, WARM_UP + 1)
    assert_near(moved(whole, WARM_UP + 1)[1], first, begin, FIRST[precision])
    one, other = eager.replay.state_dict(), whole.replay.state_dict()
    near = {"fp32": {"rtol": 0.01, "atol": 1e-3}, "bf16": {"rtol": 0.05, "atol": 0.02}}[precision]
    np.testing.assert_allclose(other["leaves"], one["leaves"], **near)
    assert one["pace"] == other["pace"]
    _, later = moved(eager, 4)
    assert_near(moved(whole, 4)[1], later, begin, LATER[precision])
    assert_near(whole.target.master, eager.target.master, begin, LATER[precision])
    whole.replay.check_valid()
    assert eager.updates == whole.updates == WARM_UP + 5
    assert eager._graph_update is None and len(whole._graph_update._graphs) == 2

    monkeypatch.setattr(Solo, "local_optimizer", None)  # as if gradients were synchronised
    parts = learner_on_gpu(case, precision, capture=True)
    assert torch.equal(moved(parts, WARM_UP + 5)[1], later)
    assert parts._graph_update is None and parts.gradient_fn.captured
    assert not isinstance(eager.gradient_fn, GraphGradient)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", [VALUE_BASED[0], VALUE_BASED[2], CONTROL[0]],
                         ids=lambda case: "-".join(named(part) for part in case))
def test_captured_updates_stay_near_the_eager_ones_with_the_fastest_kernels(case, precision):
    eager, whole = (learner_on_gpu(case, precision, capture=it) for it in (False, True))
    begin, wanted = moved(eager, WARM_UP + 1)
    assert_near(moved(whole, WARM_UP + 1)[1], wanted, begin, LATER[precision])


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_captured_updates_follow_the_schedule(same_kernels, optimizer):
    options = {"optimizer": optimizer, "schedule": "cosine", "warmup_updates": 2, "schedule_updates": 8}
    eager, whole = (learner_on_gpu(VALUE_BASED[0], "fp32", capture=it, **options) for it in (False, True))
    begin, wanted = moved(eager, WARM_UP + 5)
    assert_near(moved(whole, WARM_UP + 5)[1], wanted, begin, LATER["fp32"])
    constant = learner_on_gpu(VALUE_BASED[0], "fp32", capture=True, optimizer=optimizer)
    assert distance(moved(constant, WARM_UP + 5)[1], wanted, begin) > LATER["fp32"]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_captured_updates_clip_and_step_as_eager_ones(same_kernels, optimizer):
    eager, whole = (learner_on_gpu(VALUE_BASED[0], "fp32", capture=it, optimizer=optimizer, clip_norm=0.01)
                    for it in (False, True))
    begin, wanted = moved(eager, WARM_UP + 1)
    assert_near(moved(whole, WARM_UP + 1)[1], wanted, begin, FIRST["fp32"])


def test_delayed_policies_are_captured_in_both_kinds_of_update(same_kernels, caplog):
    case = (ddpg, {"twin": True, "smoothing": 0.2, "policy_delay": 2}, CONTROL[0][2])
    eager, captured = (learner_on_gpu(case, "fp32", capture=it, clip_norm=0) for it in (False, True))
    begin, wanted = moved(eager, 2 * WARM_UP + 6)
    assert torch.equal(moved(captured, 2 * WARM_UP + 6)[1], wanted) and not torch.equal(begin, wanted)
    assert captured._graph_update is None and "frozen in some updates" in caplog.text
    assert captured.gradient_fn.captured and captured._frozen_gradient_fn.captured


@pytest.mark.parametrize(("capture", "precision", "bound"), [(False, "fp32", 0.01), (True, "bf16", 0.1)])
def test_compiled_updates_are_the_plain_ones_alone_and_inside_a_graph(same_kernels, capture, precision, bound, caplog):
    """The compiler sums in other orders and keeps float32 between operations that it fuses."""
    torch.compiler.reset()
    plain, compiled = (learner_on_gpu(VALUE_BASED[0], precision, capture=capture and it, compile=it)
                       for it in (False, True))
    begin, wanted = moved(plain, WARM_UP + 2)
    assert_near(moved(compiled, WARM_UP + 2)[1], wanted, begin, bound)
    assert compiled.flat.net._compiled_call_impl is not None and "compiling failed" not in caplog.text
    assert (compiled._graph_update is not None) == capture


def test_metrics_of_captured_updates_are_those_of_eager_ones_a_period_late(same_kernels):
    """With a period of two, updates 2, 4, 6 and 8 are measured, and read at 4, 6 and 8."""
    found = {}
    for capture in (False, True):
        metrics = ListMetrics()
        make_updates(learner_on_gpu(VALUE_BASED[0], "fp32", capture=capture, metrics=metrics), 8)
        found[capture] = [values for values in metrics.values if "train/loss" in values]
    assert len(found[False]) == 4 and len(found[True]) == 3
    for late, early in zip(found[True], found[False], strict=False):
        assert late.keys() == early.keys()
        assert late == pytest.approx(early, rel=0.01, abs=1e-4)


# Failures.

def spoil(learner, every):
    """Let the loss of every so many updates be NaN, decided on the device, as in a captured update."""
    autograd, counter = learner._graph_update.autograd, torch.zeros((), device=GPU)

    class Spoilt:
        net, rng = autograd.net, autograd.rng

        def __call__(self, sample):
            counter.add_(1)
            bad = torch.where(counter % every == 0, torch.nan, 1.0)
            return autograd(dataclasses.replace(sample, weight=sample.weight * bad))

    learner._graph_update.autograd = Spoilt()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bad_batch_changes_nothing_inside_a_graph_either(precision):
    metrics = ListMetrics()
    learner = learner_on_gpu(VALUE_BASED[0], precision, capture=True, metrics=metrics)
    assert learner._choose_graph_update() is not None
    spoil(learner, 5)
    moves = []
    for _ in range(WARM_UP + 12):
        begin, end = moved(learner, 1)
        moves.append(not torch.equal(begin, end))
        assert torch.isfinite(end).all()
    assert moves == [(made + 1) % 5 > 0 for made in range(WARM_UP + 12)]
    assert len(learner._graph_update._graphs) == 2
    state = learner.state_dict()
    assert state["updates"] - state["owed"] == int(learner.gradient_sync.optimizer.steps) == sum(moves)
    assert metrics.counts["fault/bad_updates"] == 3


def test_many_bad_batches_end_the_run():
    learner = learner_on_gpu(VALUE_BASED[0], "bf16", capture=True, reward=np.nan, max_bad_updates=6)
    before = learner.flat.master.clone()
    with pytest.raises(Diverged, match="not finite in"):
        make_updates(learner, 40)
    assert torch.equal(learner.flat.master, before) and learner._graph_update is not None


def test_the_last_finite_weights_are_published_beside_captured_updates():
    """The step overflows although loss and gradient are finite; the host learns of it later."""
    learner = learner_on_gpu(VALUE_BASED[0], "fp32", capture=True, optimizer="rmsprop", learning_rate=1e38)
    before = learner.flat.master.clone()
    make_updates(learner, 1)
    assert learner._graph_update is not None and not torch.isfinite(learner.flat.master).all()
    version, state = learner.weights.fetch(-1)
    assert version == 1 and torch.equal(torch.cat([state[name].flatten() for name in learner.flat.shapes]), before)
    with pytest.raises(Diverged, match="weights are not finite"):
        learner.state_dict()


def test_weights_that_become_infinite_later_are_replaced_by_the_last_finite_ones():
    learner = learner_on_gpu((c51, {"atoms": 11}, PIXELS), "fp32", capture=True)
    make_updates(learner, WARM_UP + 3)
    assert learner._graph_update._graphs
    learner.publish()
    good = {name: value.clone() for name, value in learner.weights.fetch(-1)[1].items()}
    learner.flat.master[7] = torch.inf
    kept = learner.finite_state(learner.flat)
    assert all(torch.equal(kept[name], good[name]) for name in learner.flat.shapes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_published_target_weights_are_those_of_the_target_network(precision):
    learner = learner_on_gpu((dqn, {}, PIXELS), precision, capture=True, target_period_updates=4,
                             publish_period_updates=4)
    for updates in itertools.accumulate([3, 2, 1, 5]):
        make_updates(learner, updates - learner.updates)
        version, state = learner.weights.fetch(-1)
        assert version == updates // 4 * 4
        for name, value in learner.target.state().items():
            assert torch.equal(state[name], value), name
    assert learner._graph_update._graphs


def test_weights_are_complete_once_the_device_has_computed_them():
    learner = learner_on_gpu(VALUE_BASED[0], "bf16", capture=True)
    for _ in range(10):
        make_updates(learner, 3)
    torch.cuda.synchronize()
    version, state = learner.weights.completed.fetch(-1)
    assert version == learner.updates == 30
    assert all(torch.equal(state[name], value) for name, value in learner.flat.state().items())


def test_a_resumed_learner_goes_on_as_the_saved_one(same_kernels):
    """Weights, optimizer and generator return to where they were; a graph is captured anew."""
    one, other = (learner_on_gpu(VALUE_BASED[0], "bf16", capture=True, alpha=0.0) for _ in range(2))
    make_updates(one, WARM_UP + 3)
    other.load_state_dict(one.state_dict())
    other.replay.rng.set_state(one.replay.rng.get_state())
    begin = one.flat.master.clone()
    assert torch.equal(other.flat.master, begin)
    assert all(torch.equal(mine, its) for mine, its in zip(other.flat.parameters, one.flat.parameters, strict=True))
    make_updates(one, WARM_UP + 2)
    make_updates(other, WARM_UP + 2)
    assert_near(other.flat.master, one.flat.master, begin, LATER["bf16"])
