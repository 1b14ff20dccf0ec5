"""What a parameter server's settings must not say, and which of them have no effect."""

import pytest

from qfleet.config import inactive_keys
from qfleet.core.errors import UserError
from qfleet.runconfig.resolution import resolve
from qfleet.runconfig.resumable import changed_on_resume

SERVER = ["sync=server", "learners=3", "parameter_server.shards=2"]


@pytest.mark.parametrize("overrides,message", [
    (["actors=2"], "actors=2 with learners=3: a learner without an actor"),
    (["run.exact_resume=true", "checkpoint.period_steps=100000"], "exact_resume=true with sync=server"),
    (["total_steps=3000", "replay.min_steps=1000"], "each of learners=3 takes replay.min_steps=1000 steps first"),
    (["parameter_server.max_staleness=2", "parameter_server.pull_period_updates=4"], "3 of its own pushes old"),
    (["parameter_server.max_staleness=0", "parameter_server.pull_period_updates=4",
      "parameter_server.push_period_updates=2"], "1 of its own"),
    (["parameter_server.compensation_lambda=1"], "with parameter_server.compensation=none"),
    (["parameter_server.compensation=constant", "parameter_server.compensation_decay=0.5"],
     "unless parameter_server.compensation=adaptive"),
    (["parameter_server.shards=0"], "parameter_server.shards"),
    (["fleet.listen=127.0.0.1:4440"], "with actors=0: every learner steps its own environments"),
    (["allreduce.timeout_s=5"], "unless sync=allreduce"),
    (["sync=none", "learners=1"], "unless sync=server"),
])
def test_what_has_no_effect_or_contradicts_itself_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        resolve("cartpole", [*SERVER, *overrides])


def test_what_holds_for_all_processes_holds_here():
    allowed = ["fleet.heartbeat_timeout_s=5", "fleet.learner_restarts=2", "fleet.actor_restarts=1",
               "fleet.reconnect_timeout_s=9", "parameter_server.max_staleness=3",
               "parameter_server.pull_period_updates=4"]
    idle = inactive_keys(resolve("cartpole", [*SERVER, *allowed]).config)
    assert "parameter_server.shards" not in idle and "learners" not in idle and "fleet.learner_restarts" not in idle
    assert "fleet.listen" in idle and "allreduce.batch" in idle


def test_learners_and_shards_may_change_when_a_run_goes_on_and_the_rule_may_not():
    old = resolve("cartpole", SERVER).config
    changed_on_resume(old, resolve("cartpole", ["sync=server", "learners=1", "parameter_server.shards=5"]).config)
    with pytest.raises(UserError, match=r"parameter_server\.max_staleness"):
        changed_on_resume(old, resolve("cartpole", [*SERVER, "parameter_server.max_staleness=9"]).config)
