"""What a network takes is counted before it is built, and one that cannot fit is refused with figures."""

import pytest
import torch

from qfleet.cli.commands import main
from qfleet.core.errors import UserError
from qfleet.learner.footprint import LARGE, footprint
from qfleet.replay import memory_plan
from qfleet.runconfig import resolution
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_agent, make_env


def agent_of(source, *overrides):
    config = resolution.resolve(source, list(overrides)).config
    env = make_env(config.env, 1)
    env.close()
    return config, env.spec, make_agent(config, env.spec)


@pytest.mark.parametrize("source", ["cartpole", "catch", "hidden-cartpole", "pendulum"])
def test_it_counts_what_the_network_has_and_draws_nothing(source):
    _, _, agent = agent_of(source)
    before = torch.random.get_rng_state()
    counted = footprint(agent).elements
    assert torch.equal(torch.random.get_rng_state(), before)
    net = agent.network()
    assert counted == sum(tensor.numel() for tensor in [*net.parameters(), *net.buffers()]) > 0


def test_large_layers_are_counted_without_being_allocated():
    _, _, agent = agent_of("cartpole", "agent.hidden=[10000000,10000000]")
    assert footprint(agent).elements == 5 * 10**7 + 10**14 + 10**7 + 2 * 10**7 + 2 > LARGE


def test_the_replay_has_what_the_network_leaves(monkeypatch):
    config, spec, agent = agent_of("cartpole", "agent.hidden=[2000,2000]", "device=cpu")
    networks = 9 * 4 * footprint(agent).elements  # six copies to learn, one published, an actor's and an evaluator's
    assert 144_000_000 < networks < 145_000_000
    monkeypatch.setattr(memory_plan, "available_memory", lambda: networks + 5_000_000)
    with pytest.raises(UserError, match=r"replay.capacity=100000 needs about 5.9 MB .* but may take 4 MB"):
        resolve_auto(config, spec)
    monkeypatch.setattr(memory_plan, "available_memory", lambda: networks - 1)
    with pytest.raises(UserError, match=r"has 4,016,002 parameters: .* about 145 MB in main memory, and 145 MB"):
        resolve_auto(config, spec)


def test_a_dry_run_refuses_a_network_that_fits_nowhere(capsys):
    assert main(["train", "cartpole", "agent.hidden=[10000000,10000000]", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "100,000,080,000,002 parameters" in err and "3.6 PB in main memory" in err and "agent.hidden" in err
