"""On a GPU, acting captured as CUDA graphs is the policy's own, also with recurrent state and beside queued updates.

The same library kernels run in both, so actions and stored columns are equal but for sums in another order: a captured
graph may choose a different split of a matrix product, and a sum of float32 then differs in the last bits (1e-4
allows for 1000 of them), one of bfloat16 features in the last of 8 bits.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_learners import EVERY_AGENT, GPU, PIXELS, VALUE_BASED, make_updates, named, same_kernels
from image_learners import agent_of, learner_of

from qfleet.accel.choose import acting_for, acts_captured
from qfleet.accel.graph_policy import GraphPolicy
from qfleet.actor.policy import Policy
from qfleet.algos import ngu
from qfleet.core.agent import ExplorationParams
from qfleet.explore.pink import pink_noise
from qfleet.learner.weight_store import Mailbox

__all__ = ["same_kernels"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
BOUND = {"fp32": 1e-4, "bf16": 0.02}
DISCRETE = [case for case in EVERY_AGENT if case[2].num_actions]


def restack(shown, leaf, over, rng):
    """The next observations [N, ...]: stacks shifted by a random frame, empty where an episode starts."""
    shown[over] = 0
    frames = rng.integers(1, 255, (len(shown), *leaf.frame_shape)).astype(leaf.dtype)
    return np.concatenate([shown[:, leaf.frame_shape[0]:], frames], 1)


def compare(found, wanted, names, bound):
    (action, columns), (its_action, its_columns) = found, wanted
    np.testing.assert_array_equal(action, its_action)
    for name in names:
        np.testing.assert_allclose(columns[name], its_columns[name], rtol=bound, atol=bound)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", DISCRETE, ids=lambda case: "-".join(named(part) for part in case))
def test_captured_policies_act_as_eager_ones(same_kernels, case, precision):
    """Episodes end in single lanes, weights change, and exploration changes its kind, which needs a second graph."""
    module, switches, spec = case
    agent, lanes, rng = agent_of(module, switches, spec), 5, np.random.default_rng(0)
    eager, captured = (Policy(agent, 4, GPU, precision) for _ in range(2))
    names = (*agent.priority_inputs, *agent.stored_states, *agent.columns)
    leaf, shown = spec.observation["obs"], np.zeros((lanes, *spec.observation["obs"].shape), np.uint8)
    params, over = ExplorationParams(torch.linspace(0, 1, lanes)), np.zeros(lanes, bool)
    for step in range(40):
        if step in (0, 30):  # all lanes start; some of the state persists
            eager.begin(lanes)
            captured.begin(lanes)
            acting = acting_for(captured, spec, lanes, names)
            assert isinstance(acting, GraphPolicy)
            over = np.ones(lanes, bool)
        else:
            over, reward = rng.random(lanes) < 0.3, rng.normal(size=lanes).astype(np.float32)
            eager.observe(reward, over)
            acting.observe(reward, over)
        if step % 9 == 5:
            learnt = {name: value + 0.02 * name.endswith("weight") for name, value in eager.flat.state().items()}
            for policy in (eager, captured):
                policy.load(learnt, step)
        shown = restack(shown, leaf, over, rng)
        if agent.columns and step % 7:
            params = dataclasses.replace(params, index=torch.from_numpy(rng.integers(4, size=lanes)), count=4)
        else:
            params = dataclasses.replace(params, index=None, count=0)
        repeats = torch.from_numpy(rng.random(lanes, np.float32)) if step >= 20 and not agent.columns else None
        params = dataclasses.replace(params, choice=repeats)
        compare(acting.act({"obs": shown}, params), eager.act({"obs": shown}, params), names, BOUND[precision])
    graphs = captured.graph_policies[lanes, names]._graphs
    assert len(graphs) == 2 and all(graph is not None for graph in graphs.values())
    assert eager.persistent().keys() == captured.persistent().keys()
    for name, value in eager.persistent().items():
        torch.testing.assert_close(captured.persistent()[name], value, rtol=10 * BOUND[precision], atol=1e-6)


def test_held_embeddings_are_those_of_the_eager_policy(same_kernels):
    """NGU keeps two versions of its embedding weights: both, which lane uses which, and the stored embeddings are equal
    after every step, though the weights change in the middle of episodes."""
    module, switches, spec = next(case for case in EVERY_AGENT if case[0] is ngu)
    agent, lanes, rng = agent_of(module, switches, spec), 4, np.random.default_rng(1)
    eager, captured = (Policy(agent, 4, GPU) for _ in range(2))
    eager.begin(lanes)
    captured.begin(lanes)
    acting, params = acting_for(captured, spec, lanes, ()), ExplorationParams(torch.zeros(lanes))
    leaf, shown, over = spec.observation["obs"], np.zeros((lanes, *spec.observation["obs"].shape), np.uint8), None
    used = set()
    for step in range(40):
        over = rng.random(lanes) < 0.2
        if step:
            reward = np.zeros(lanes, np.float32)
            eager.observe(reward, over)
            acting.observe(reward, over)
        if step % 3 == 2:
            learnt = {name: value + 0.05 * name.startswith("curiosity") for name, value in eager.flat.state().items()}
            for policy in (eager, captured):
                policy.load(learnt, step)
        shown = restack(shown, leaf, over, rng)
        compare(acting.act({"obs": shown}, params), eager.act({"obs": shown}, params), (), 0)
        for name in ("old", "new", "newer", "count", "keys"):
            torch.testing.assert_close(captured.memory[f"episodic.{name}"], eager.memory[f"episodic.{name}"],
                                       rtol=1e-4, atol=1e-5)
        used.add(tuple(eager.memory["episodic.newer"].tolist()))
    assert len(used) > 2, "lanes used different versions in some steps"


def test_queued_updates_do_not_change_what_is_chosen():
    """Actions come from a stream of their own, with new weights all the time: they wait for those, and for nothing
    else."""
    lanes, steps = 16, 60
    module, switches, spec = VALUE_BASED[0]
    learner = learner_of(module, switches, spec=spec, device=GPU, precision="bf16", capture=True, batch_size=256)
    policy = Policy(learner.agent, 1, GPU, "bf16")
    rng, versions = np.random.default_rng(1), itertools.count(1)
    seen = rng.integers(0, 255, (steps, lanes, 4, 84, 84), np.uint8)
    states = [{name: x + 0.02 * torch.randn_like(x) for name, x in policy.flat.state().items()} for _ in range(4)]

    def play(updates):
        policy.rng.manual_seed(3)
        acting, chosen = acting_for(policy, spec, lanes, ()), []
        for step in range(steps):
            if updates:
                make_updates(learner, updates)
            if step % 5 == 0:
                news = next(versions), states[step // 5 % len(states)]
                acting.refresh(SimpleNamespace(fetch=lambda newer_than, news=news: news))
            chosen.append(acting.act({"obs": seen[step]}, ExplorationParams(torch.full((lanes,), 0.1)))[0].copy())
        torch.cuda.synchronize()
        return np.stack(chosen)

    play(1)  # captures
    alone, busy = play(0), play(4)
    np.testing.assert_array_equal(alone, busy)
    assert len(np.unique(alone)) > 1


def test_an_actor_takes_weights_that_are_complete(same_kernels):
    """Those that a learner published are used by the next action after they were computed."""
    agent = agent_of(VALUE_BASED[0][0], VALUE_BASED[0][1], PIXELS)
    policy, mailbox = Policy(agent, 1, GPU), Mailbox()
    acting = acting_for(policy, PIXELS, 3, ())
    obs, params = {"obs": np.zeros((3, 4, 84, 84), np.uint8)}, ExplorationParams(torch.zeros(3))
    acting.act(obs, params)
    for version in (1, 2, 3):
        biased = {name: x * 0 for name, x in policy.flat.state().items()}
        name = next(name for name in biased if name.endswith("advantage.q.bias"))
        biased[name][version] = 1.0
        mailbox.publish(biased, version)
        torch.cuda.synchronize()
        assert acting.refresh(mailbox.completed) is not None
        assert acting.act(obs, params)[0].tolist() == [version] * 3


def test_agents_that_evaluate_their_actions_act_eagerly_on_a_gpu():
    module, switches, spec = EVERY_AGENT[-1]
    policy = Policy(agent_of(module, switches, spec), 1, GPU)
    assert not acts_captured(policy) and acting_for(policy, spec, 3, ()) is policy
    policy.begin(3)
    params = ExplorationParams(torch.zeros(3), sigma=torch.full((3,), 0.1), process=pink_noise())
    action, extras = policy.act({"obs": np.zeros((3, 3), np.float32)}, params, with_priority_inputs=True)
    assert action.shape == (3, 2) and np.isfinite(action).all() and {"taken", "best"} <= extras.keys()
