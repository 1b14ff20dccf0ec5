"""A run goes on with its replay in another store: checkpoints of both are the same."""

import pytest
from real_runs import train

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("first", "second"), [("device", "device"), ("device", "host"), ("host", "device")])
def test_a_run_goes_on_in_another_store(tmp_path, monkeypatch, first, second):
    monkeypatch.chdir(tmp_path)
    run = train("catch", f"replay.store={first}", "replay.alpha=0.6", "total_steps=600", "run.name=x")
    more = api.resume(run.directory, [f"replay.store={second}", f"total_steps={run.steps + 200}"])
    assert more.steps >= run.steps + 200 and more.updates > run.updates and more.exit_code == 0
