"""The directory of a new run: its name is free again if the run fails before it starts."""

import pytest

from qfleet.core.errors import ProcessFault, UserError
from qfleet.launch.new_run import new_run
from qfleet.runconfig.resolution import resolve
from qfleet.sync.process_group import RankLost


def fail(config, error, metrics=False):
    with pytest.raises(type(error)), new_run(config) as directory:
        if metrics:
            directory.metrics.touch()
        raise error
    return directory


@pytest.mark.parametrize("error", [UserError("wrong"), ValueError("wrong"), RankLost("lost"), KeyboardInterrupt()])
def test_a_run_that_fails_before_its_metrics_leaves_its_name_free(tmp_path, monkeypatch, error):
    monkeypatch.chdir(tmp_path)
    config = resolve("cartpole", ["run.name=x"]).config
    assert not fail(config, error).path.exists()
    with new_run(config) as directory:
        assert directory.path.name == "x"


def test_a_run_that_has_begun_or_whose_error_names_a_log_is_kept_and_unlocked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for error, metrics in ((ValueError("wrong"), True), (ProcessFault("its log"), False)):
        directory = fail(resolve("cartpole", []).config, error, metrics)
        assert directory.path.exists() and not (directory.path / "lock").exists()
