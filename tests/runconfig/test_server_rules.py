"""What a parameter server's settings must not say, and which of them have no effect."""

import pytest

from qfleet.config import inactive_keys
from qfleet.core.errors import UserError
from qfleet.runconfig.resolution import resolve
from qfleet.runconfig.resumable import changed_on_resume

SERVER = ["gradients=server", "cells=3", "server.shards=2"]


@pytest.mark.parametrize("overrides,message", [
    (["placement=processes"], "every learner runs its own actors; set placement=inline"),
    (["run.exact_resume=true", "checkpoint.period_steps=100000"], "exact_resume=true with gradients=server"),
    (["total_steps=3000", "replay.min_steps=1000"], "each of cells=3 takes replay.min_steps=1000 steps first"),
    (["server.max_staleness=2", "server.pull_period_updates=4"], "3 of its own pushes old"),
    (["server.max_staleness=0", "server.pull_period_updates=4", "server.push_period_updates=2"], "1 of its own"),
    (["server.compensation_lambda=1"], "with server.compensation=none"),
    (["server.compensation=constant", "server.compensation_decay=0.5"], "unless server.compensation=adaptive"),
    (["server.shards=0"], "server.shards"),
    (["fleet.listen=127.0.0.1:4440"], "with gradients=server every learner runs its own actors"),
    (["allreduce.timeout_s=5"], "unless gradients=allreduce"),
    (["gradients=solo", "cells=1"], "unless gradients=server"),
])
def test_what_has_no_effect_or_contradicts_itself_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        resolve("cartpole", [*SERVER, *overrides])


def test_what_holds_for_all_processes_holds_here():
    allowed = ["fleet.heartbeat_timeout_s=5", "fleet.restarts=2", "fleet.max_restarts=1", "fleet.patience_s=9",
               "server.max_staleness=3", "server.pull_period_updates=4"]
    idle = inactive_keys(resolve("cartpole", [*SERVER, *allowed]).config)
    assert "server.shards" not in idle and "cells" not in idle and "fleet.restarts" not in idle
    assert "fleet.listen" in idle and "allreduce.batch" in idle


def test_cells_and_shards_may_change_when_a_run_goes_on_and_the_rule_may_not():
    old = resolve("cartpole", SERVER).config
    changed_on_resume(old, resolve("cartpole", ["gradients=server", "cells=1", "server.shards=5"]).config)
    with pytest.raises(UserError, match=r"server\.max_staleness"):
        changed_on_resume(old, resolve("cartpole", [*SERVER, "server.max_staleness=9"]).config)
