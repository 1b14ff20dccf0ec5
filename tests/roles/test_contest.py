"""The faster precision is the one whose updates take less of the CPU, and a tie is float32."""

import pytest
import torch

from qfleet import assemble
from qfleet.algos import dqn, r2d2
from qfleet.recipe import resolve
from qfleet.replay.layout import Layout
from qfleet.roles import contest
from qfleet.roles.contest import faster_precision
from qfleet.types import EnvSpec, Leaf

SPEC = EnvSpec("pictures", {"obs": Leaf((2, 12, 12), "uint8", "image", stack=2)}, actions=3)


def agent_and_layout(module=dqn, **switches):
    agent = module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], **switches}), SPEC)
    return agent, Layout(SPEC, agent.window, 8, agent.columns, agent.states, agent.marks)


@pytest.fixture
def clock(monkeypatch):
    """CPU seconds that an update takes, by precision: the clock moves by them when one is made."""
    now, costs = [0.0], {"fp32": 1.0, "bf16": 1.0}
    derive = contest.Eager.__call__

    def update(self, sample):
        rounded = next(self.net.parameters()).dtype == torch.bfloat16
        now[0] += costs["bf16" if rounded else "fp32"]
        return derive(self, sample)

    monkeypatch.setattr(contest.Eager, "__call__", update)
    monkeypatch.setattr(contest, "process_time", lambda: now[0])
    return costs


@pytest.mark.parametrize(("rounded", "winner"), [(0.5, "bf16"), (0.95, "fp32"), (1.0, "fp32"), (2.0, "fp32")])
def test_bfloat16_must_be_clearly_faster(clock, rounded, winner):
    clock["bf16"] = rounded
    before, state = torch.get_num_threads(), torch.get_rng_state()
    assert faster_precision(*agent_and_layout(hidden=[16]), batch_size=4, threads=1) == winner
    assert torch.get_num_threads() == before and torch.equal(torch.get_rng_state(), state)


def test_agents_with_a_memory_are_tried_out_too(clock):
    clock["bf16"] = 0.1
    found = agent_and_layout(r2d2, units=8, features=[8], burn_in=2, unroll=4, stride=2)
    assert faster_precision(*found, batch_size=2, threads=1) == "bf16"


@pytest.mark.parametrize("winner", ["bf16", "fp32"])
def test_the_choice_is_written_down_and_made_once(monkeypatch, winner):
    tried = []
    monkeypatch.setattr(assemble, "_fast_bf16", lambda device: True)
    monkeypatch.setattr(assemble, "faster_precision", lambda *args: (tried.append(args), winner)[1])
    spec = EnvSpec("ALE/Pong-v5", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, 6)
    words = ["device=cpu", "replay.capacity=5000", "replay.min_steps=1000"]
    settled = assemble.settle(resolve("pong", words).config, spec)
    assert settled.learner.precision == winner and len(tried) == 1
    assert assemble.settle(settled, spec).learner.precision == winner and len(tried) == 1
    chosen = assemble.settle(resolve("pong", [*words, "learner.precision=fp32"]).config, spec)
    assert chosen.learner.precision == "fp32" and len(tried) == 1, "what the user says is not tried out"
