"""Overlap: an environment that works in the background while the learner trains gives bitwise the same run."""

import threading

import pytest
import torch
from real_runs import TINY

from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Threaded:
    """Works from `send` on, in a thread; `recv` waits for it. It notes whether anything else ran meanwhile."""

    def __init__(self, env, working):
        self.env, self.working = env, working
        self.spec, self.lanes = env.spec, env.lanes
        self.thread = None

    def reset(self, seeds):
        return self.env.reset(seeds)

    def send(self, actions):
        self.env.send(actions)
        self.working.set()

        def work():
            self.outcome = self.env.recv()
        self.thread = threading.Thread(target=work)
        self.thread.start()

    def recv(self):
        self.thread.join()
        self.working.clear()
        return self.outcome

    def render(self):
        return self.env.render()

    def faults(self):
        return self.env.faults()

    def close(self):
        self.env.close()


class Scrambled(Threaded):
    """A wrong overlap: it acts on what it was told the step before, as a race would."""

    before = None

    def send(self, actions):
        late, self.before = (actions if self.before is None else self.before), actions
        super().send(late)


def trained(wrap, working=None):
    """Weights, replay state and the learner's view of whether the environment was at work."""
    config = resolve("cartpole", [*TINY, "total_steps=600", "replay.alpha=0.6", "agent.n_step=3"]).config
    env = make_env(config.env, config.env.lanes)
    config = resolve_auto(config, env.spec)
    cast = make_acting_setup(config, wrap(env))
    nothing = Hooks([], lambda snapshot: None, lambda *best: None, lambda *bad: None)
    run = LearnerRun(cast, make_plan(config), nothing)
    seen = []
    if working is not None:
        update = run.core.learner._update
        run.core.learner._update = lambda sample: (seen.append(working.is_set()), update(sample))
    assert run.run() == "total_steps"
    state = run.core.replay.state_dict()
    return run.core.learner.flat.master.clone(), state["leaves"], state["next"], seen


def test_overlap_equals_no_overlap_bit_by_bit():
    working = threading.Event()
    plain = trained(lambda env: env)
    threaded = trained(lambda env: Threaded(env, working), working)
    assert threaded[3] and all(threaded[3]), "every update was made while the environment was at work"
    assert torch.equal(plain[0], threaded[0]) and (plain[1] == threaded[1]).all() and plain[2] == threaded[2]
    assert not torch.equal(plain[0], trained(lambda env: Scrambled(env, working))[0]), "a race would show"
