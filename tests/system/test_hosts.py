"""Two hosts for real: network namespaces and a cable between them that is pulled while they train."""

import os
import textwrap
import time
from contextlib import closing

import pytest
from fleet_runs import stored
from hosts_kit import SMALL, Cable, Watch, Yard, free_port, invitation, needs_namespaces
from real_runs import records

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_namespaces]

PARTITION_S = float(os.environ.get("QFLEET_PARTITION_S", "12"))
"""30 is what the fleet promises to survive, and what `make soak` tries."""

LEDGER = textwrap.dedent("""
    import random, time
    import gymnasium
    import numpy as np

    class Ledger(gymnasium.Env):
        '''Every observation is another: who saw it (a number drawn once), and how many came before.'''
        observation_space = gymnasium.spaces.Box(0, 2**24, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self):
            self.name, self.t = random.SystemRandom().randrange(1, 2**24), -1

        def see(self):
            self.t += 1
            return np.array([self.name, self.t], np.float32)

        def reset(self, *, seed=None, options=None):
            return self.see(), {}

        def step(self, action):
            time.sleep(0.001)
            return self.see(), 1.0, self.t % 50 == 0, False, {}
""")


@pytest.fixture
def cable():
    with closing(Cable()) as made:
        yield made


@pytest.fixture
def yard(tmp_path):
    with closing(Yard(tmp_path)) as made:
        yield made


def test_actors_of_another_host_come_go_and_come_back(yard, cable):
    """Joiners may be there first, may leave at any time and come back; they end well when the run does."""
    place = f"{cable.here}:{free_port(cable.here)}"
    early = yard.join(place, host=cable.host)
    early.until_said("no answer from .*yet")
    head = yard.run("train", "toy/Chain-v0", *SMALL, "total_steps=6000", "explore.epsilon=1", "explore.kind=constant",
                    "run.name=two", "learner.learning_rate=5e-3", "agent.gamma=0.9", "learner.batch_size=32",
                    "replay.samples_per_insert=8", "--listen", place, "--token-file", str(yard.token),
                    "--no-local-actors")
    words = invitation(head)
    assert words[3:] == ["join", place, "--token-file", str(yard.token)]
    with Watch(place, yard.token) as watch:
        head.until(lambda: watch.steps > 500)
        early.interrupt()
        early.ends(130)
        left = watch.pulse()
        assert [member.role for member in left.members] == ["evaluator"]  # it said good-bye
        time.sleep(1)
        assert watch.steps == left.steps
        again = yard.shell([*words, "--actors", "2"], host=cable.host)  # as it was printed
        head.until(lambda: watch.steps > left.steps)
    head.ends(0)
    assert "the run has ended" in again.ends(0, 30)
    assert api.evaluate(yard.folder / "runs" / "two", episodes=1).mean_reward == 1


def test_a_pulled_cable_loses_nothing_and_doubles_nothing(yard, cable):
    (yard.folder / "ledger.py").write_text(LEDGER)
    place = f"{cable.here}:{free_port(cable.here)}"
    head = yard.run("train", "ledger:Ledger", *SMALL, "total_steps=6000", "replay.capacity=20000", "run.name=cut",
                    "env.max_episode_steps=null", "--listen", place, "--token-file", str(yard.token),
                    "--no-local-actors")
    joiner = yard.join(place, "--trust", host=cable.host)  # as printed: the config names a module of ours
    assert "--trust" in invitation(head)
    with Watch(place, yard.token) as watch:
        head.until(lambda: watch.steps > 1000)
        for seconds, far in ((PARTITION_S, False), (4.0, True)):
            cable.pull(far)
            time.sleep(seconds)
            before = watch.steps if far else None  # our own end of the cable is our own address, too
            cable.plug()
            healed = time.monotonic()
            if before is None:
                head.until(lambda: watch.steps >= 0, 10)
                before = watch.steps
            head.until(lambda before=before: watch.steps > before + 50, 10)
            assert time.monotonic() - healed < 10
            joiner.until(watch.grows(200))
    head.ends(0)
    joiner.ends(0, 30)
    run = yard.folder / "runs" / "cut"
    seen, rows = stored(run)
    assert len(seen) == 2  # two lanes, and no actor that was started again
    for times in seen.values():
        assert sorted(times) == list(range(len(times)))  # none missing, none twice
    final = records(run)[-1]
    rest = final["step"] * 51 / 50 - sum(map(len, seen.values()))  # an episode of 50 steps has 51 observations
    assert -2 <= rest <= 2 * (rows + 2), final
    assert final["wire/retries"] > 0 and final.get("fault/bad_messages", 0) == 0
