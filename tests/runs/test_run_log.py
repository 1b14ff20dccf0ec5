"""The text log of a run: what is in it, and that warnings still reach the terminal."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from qfleet.runs.run_log import TAIL_BYTES, RunLog, log_names, log_tail

log = logging.getLogger("qfleet.somewhere")


@pytest.fixture
def run_log(tmp_path):
    made = RunLog(tmp_path)
    yield made
    made.close()


def lines(folder, most=20):
    """Lines without their times."""
    return [line[21:] for line in log_tail(folder, "run", most)]


def test_starts_evaluations_and_warnings_are_logged(run_log, tmp_path):
    run_log.write({"step": 1000, "rollout/ep_rew_mean": 3.0})
    run_log.write({"step": 2000, "eval/mean_reward": 12.345, "eval/best_reward": 12.345})
    log.warning("disk %s", "full")
    run_log.flush()
    run_log.close()
    log.warning("after the end")
    RunLog(tmp_path, "step-000000002000").close()
    assert lines(tmp_path) == ["started", "step 2,000: evaluation 12.35, best so far 12.35", "warning: disk full",
                               "resumed from step-000000002000"]


def test_only_the_end_of_a_log_is_read(run_log, tmp_path):
    for step in range(3000):
        run_log.append(f"line {step}")
    assert lines(tmp_path, 2) == ["line 2998", "line 2999"] and len(log_tail(tmp_path, "run", 10**6)) < 1000


def test_of_a_line_longer_than_what_is_read_the_end_is_shown(run_log, tmp_path):
    run_log.append("x" * 2 * TAIL_BYTES + " end")
    [line] = log_tail(tmp_path, "run", 9)
    assert line.endswith("x end") and len(line) == TAIL_BYTES - 1


def test_the_log_of_the_run_is_the_first_and_links_are_not_read(run_log, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "logs" / "actor-0.log").write_text("x")
    (tmp_path / "logs" / "link.log").symlink_to(tmp_path / "secret")
    assert log_names(tmp_path) == ["run", "actor-0", "link"] and log_tail(tmp_path, "link", 9) == []
    assert log_names(tmp_path / "nothing") == [] and log_tail(tmp_path, "../secret", 9) == []


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "logs").write_text("not a folder")
    made = RunLog(tmp_path)
    log.warning("x")
    made.write({"step": 1, "eval/mean_reward": 1.0})
    made.close()
    assert (tmp_path / "logs").read_text() == "not a folder"


def test_nothing_is_written_through_a_link(tmp_path):
    """A resumed run may come from elsewhere: a link in it could lead to any file of this user."""
    (tmp_path / "private").write_text("mine")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "run.log").symlink_to(tmp_path / "private")
    RunLog(tmp_path / "run").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").symlink_to(tmp_path)
    RunLog(tmp_path / "other").close()
    assert (tmp_path / "private").read_text() == "mine" and not (tmp_path / "run.log").exists()


@pytest.mark.parametrize("configured", [False, True])
def test_warnings_appear_once_on_the_terminal(tmp_path, configured):
    program = f"""
import logging
from pathlib import Path
from qfleet.runs.run_log import RunLog
if {configured}: logging.basicConfig()
logs = [RunLog(Path({str(tmp_path)!r}) / name) for name in "ab" if not (Path({str(tmp_path)!r}) / name).mkdir()]
logging.getLogger("qfleet.x").warning("seen")
for each in logs: each.close()
logging.getLogger("qfleet.x").warning("later")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("seen") == 1 == done.stderr.count("later"), done.stderr
