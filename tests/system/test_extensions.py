"""A replay store, a gradient synchronisation, a launcher and an encoder of the user, each used by its name alone."""

from pathlib import Path

import pytest
import torch
from real_runs import train
from torch import nn

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.launch.local_launcher import LocalLauncher
from qfleet.replay.host_store import HostReplay
from qfleet.runconfig.resolution import resolve
from qfleet.sync.allreduce import AllReduce

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

QUICK = ["total_steps=600", "replay.min_steps=100", "eval.episodes=1",
         "eval.period_steps=null", "checkpoint.period_steps=null", "env.max_episode_steps=50",
         "learner.batch_size=16", "run.name=own"]


def note(line):
    """Lines that the extensions below write in whichever process they are used."""
    with Path("noted").open("a") as file:
        file.write(line + "\n")


def noted():
    return set(Path("noted").read_text().splitlines())


class CountingStore(HostReplay):
    """A store that knows how often it was sampled."""

    def __init__(self, layout, cfg, seed, device, threads, clock):
        super().__init__(layout, cfg, seed, device, threads, clock)
        self.samples = 0

    def sample(self, n):
        self.samples += 1
        if self.samples == 100:
            note("sampled 100 times")
        return super().sample(n)


def halving_allreduce(optimizer, link):
    """All-reduce of gradients halved before they are sent."""

    class Halving(AllReduce):
        def apply(self, grads):
            note(f"rank {link.peers.rank} of {link.peers.size}")
            return super().apply(None if grads is None else [None if grad is None else grad / 2 for grad in grads])

    return Halving(optimizer, link)


class NotingLauncher(LocalLauncher):
    """The local launcher, with a list of what it starts."""

    def start(self, node, attempt, now, may_start):
        note(f"start {node.name}")
        return super().start(node, attempt, now, may_start)


class Doubled(nn.Module):
    """An encoder with a parameter and a buffer, which both have to reach every process."""

    def __init__(self, observation, width=8):
        super().__init__()
        note(f"encoder of {', '.join(observation)}")
        self.layer = nn.Linear(4, width)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, obs):
        return self.layer(obs["obs"] * self.factor).relu()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with this file as a module, so that all processes of a run can import it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_extensions.py").symlink_to(__file__)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")  # for real_runs
    monkeypatch.syspath_prepend(tmp_path)


def test_a_replay_store_by_name():
    result = train("cartpole", *QUICK, "replay.store=my_extensions:CountingStore")
    assert result.updates > 100 and "sampled 100 times" in noted()


def test_something_that_is_no_store_is_refused():
    with pytest.raises(UserError, match="which is not a subclass of"):
        train("cartpole", *QUICK, "replay.store=my_extensions:dict_store")
    assert not Path("runs/own").exists()


@pytest.mark.parametrize("words,message", [
    (["launcher=my_extensions:dict_store", "actors=1"], "it has no method require and no open"),
    (["launcher=my_extensions:QUICK", "actors=1"], "it has no method"),
    (["sync=my_extensions:QUICK", "learners=2"], "this is a list; name a class or function")])
def test_a_launcher_or_synchronisation_of_another_kind_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        train("cartpole", *QUICK, *words)
    assert not Path("runs/own").exists()


def dict_store(*arguments):
    return {}


def test_a_gradient_synchronisation_by_name():
    result = train("cartpole", *QUICK, "sync=my_extensions:halving_allreduce", "learners=2")
    assert result.updates > 50 and {"rank 0 of 2", "rank 1 of 2"} <= noted()


def test_a_launcher_by_name():
    result = train("cartpole", *QUICK, "launcher=my_extensions:NotingLauncher", "actors=1")
    assert result.reason == "total_steps" and noted() == {"start learner", "start actor/0", "start evaluator"}


def test_an_encoder_by_name_acts_in_other_processes_and_is_resumed():
    own = ["agent.encoder=my_extensions:Doubled", "agent.encoder_kwargs.width=6", "agent.dueling=true",
           "agent.n_step=3", "agent.noisy=true", "explore.kind=constant", "explore.epsilon=0", "replay.alpha=0.6"]
    result = train("cartpole", *QUICK, *own, "actors=2")
    assert result.reason == "total_steps" and result.updates > 50 and noted() == {"encoder of obs"}
    assert api.resume(result.directory, ["total_steps=900"]).updates > result.updates
    loaded = api.load(result.directory, which="latest")
    weights = dict(loaded.policy.flat.net.named_parameters())
    assert weights["encoder.module.layer.weight"].shape == (6, 4)


@pytest.mark.parametrize("words", [["replay.store=hots"], ["sync=allredcue"], ["launcher=locla"]])
def test_an_unknown_name_gets_a_suggestion(words):
    with pytest.raises(UserError, match="did you mean") as caught:
        resolve("cartpole", words)
    assert "module:attribute" in str(caught.value)
