"""How updates and acting run is chosen in one place: by the device, the options, the replay and the synchronisation."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from image_learners import AGENTS, CPU, SPEC, learner_of

from qfleet.accel import choose
from qfleet.accel.graph_gradient import GraphGradient
from qfleet.accel.graph_policy import GraphPolicy
from qfleet.accel.graph_update import GraphUpdate
from qfleet.actor.policy import Policy
from qfleet.algos import dqn

GPU = torch.device("cuda")


def options(capture=True, compile=False, own_optimizer=False):
    return SimpleNamespace(batch_size=16, compile=compile, capture=capture, has_own_optimizer=own_optimizer)


def gradient_on(device):
    return SimpleNamespace(rng=SimpleNamespace(device=device), net=None)


@pytest.mark.parametrize(("device", "capture", "compile", "captured"), [
    (GPU, True, False, True), (GPU, True, True, False), (GPU, False, False, False), (GPU, "auto", False, False),
    (CPU, True, False, False)])
def test_gradients_are_captured_on_a_gpu_unless_networks_are_compiled(device, capture, compile, captured):
    autograd = gradient_on(device)
    found = choose.gradient_fn_for(options(capture, compile), autograd)
    assert isinstance(found, GraphGradient) if captured else found is autograd


def flat_on(device, learner, groups=()):
    return SimpleNamespace(master=SimpleNamespace(device=device), param_slices=groups, net=learner.flat.net,
                           data=learner.flat.data)


@pytest.mark.parametrize(("device", "capture", "compile", "whole"), [
    (GPU, True, False, True), (GPU, True, True, True), (GPU, False, False, False), (CPU, True, False, False)])
def test_whole_updates_are_captured_on_a_gpu(monkeypatch, caplog, device, capture, compile, whole):
    learner = learner_of(*AGENTS[0])
    monkeypatch.setattr(choose, "GraphUpdate", lambda *given: given)
    found = choose.graph_update_for(options(capture, compile), learner.replay, learner._autograds[0],
                                    flat_on(device, learner), learner.gradient_sync.local_optimizer, False)
    assert (found is not None) == whole and caplog.messages == []


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("obstacle", "why"), [
    ({"replay": object()}, "replay.store=host"), ({"optimizer": None}, "other learners"),
    ({"filters_outliers": True}, "loss outliers"),
    ({"groups": [SimpleNamespace(group=SimpleNamespace(period=2))]}, "frozen in some updates")])
def test_what_prevents_whole_updates_is_said_and_whether_gradients_are_captured(caplog, obstacle, why, compile):
    learner = learner_of(*AGENTS[0])
    given = {"replay": learner.replay, "optimizer": learner.gradient_sync.local_optimizer, "filters_outliers": False,
             "groups": ()} | obstacle
    flat = flat_on(GPU, learner, given.pop("groups"))
    assert choose.graph_update_for(options(compile=compile), autograd=learner._autograds[0], flat=flat, **given) is None
    assert why in caplog.text
    assert ("; their losses and gradients will be" in caplog.text) == (not compile)


def test_an_optimizer_of_torch_steps_after_captured_gradients(caplog):
    learner = learner_of(*AGENTS[0], optimizer="torch.optim:NAdam", optimizer_options={})
    assert learner.gradient_sync.local_optimizer is None and learner.cfg.has_own_optimizer
    found = choose.graph_update_for(options(own_optimizer=True), learner.replay, learner._autograds[0],
                                    flat_on(GPU, learner), learner.gradient_sync.local_optimizer, False)
    assert found is None and "module:attribute steps operation by operation; their losses and" in caplog.text


def test_a_learner_on_a_cpu_updates_in_steps_whatever_is_requested():
    learner = learner_of(*AGENTS[0], capture=True)
    learner.max_updates_per_step = 1
    learner.step()
    assert learner.updates == 1 and not isinstance(learner._graph_update, GraphUpdate)
    assert learner.gradient_fn is learner._autograds[0]


@pytest.mark.parametrize(("device", "requested", "overlapped", "captures"), [
    (GPU, "auto", False, True), (GPU, "auto", True, False), (GPU, True, True, True), (GPU, False, False, False),
    (CPU, "auto", False, False), (CPU, True, False, False), (CPU, False, False, False)])
def test_capture_is_resolved_by_the_device(caplog, device, requested, overlapped, captures):
    assert choose.resolve_capture(requested, device, overlapped) is captures
    assert ("no effect on a CPU" in caplog.text) == (device is CPU and requested is True)


def test_a_policy_on_a_cpu_acts_itself():
    policy = Policy(dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC), 4, CPU)
    assert choose.acting_for(policy, SPEC, 3, ()) is policy and not choose.acts_captured(policy)


def test_a_policy_on_a_gpu_is_captured_once_for_its_lanes_and_columns(monkeypatch):
    policy = Policy(dqn.build(dqn.Config.model_validate({"algo": "dqn", "hidden": [16]}), SPEC), 4, CPU)
    begun = []
    monkeypatch.setattr(choose, "acts_captured", lambda policy: True)
    monkeypatch.setattr(GraphPolicy, "begin", lambda self: begun.append(self))
    first, again, other = (choose.acting_for(policy, SPEC, lanes, ()) for lanes in (3, 3, 4))
    assert isinstance(first, GraphPolicy) and first is again and other is not first
    assert begun == [first, first, other]


def test_why_a_gpu_does_not_act_by_a_cuda_graph_is_said_once(caplog):
    choose._warn.cache_clear()
    agent = SimpleNamespace(evaluate_actions=lambda net, obs, action: {}, recurrent_state=None)
    for device, said in ((CPU, 0), (GPU, 1), (GPU, 1)):
        policy = SimpleNamespace(device=device, agent=agent)
        assert choose.acting_for(policy, SPEC, 3, ()) is policy
        assert len(caplog.messages) == said
    assert "the agent evaluates its actions" in caplog.text
    choose._warn.cache_clear()


def test_chunks_of_the_lanes_end_at_different_steps_beside_a_learner_on_a_gpu():
    assert choose.stores_in_turns(GPU) and not choose.stores_in_turns(CPU)


@pytest.fixture(autouse=True)
def all_messages(caplog):
    caplog.set_level(logging.INFO)
