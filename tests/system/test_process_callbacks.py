"""Callbacks of runs with several processes: they are called where the learner, rank 0 or the coordinator is."""

from __future__ import annotations

import json
import os

import process_callbacks
import pytest
from fleet_runs import PATHS, SMALL
from real_runs import newest, qfleet, records

from qfleet import CallbackError, UserError, api
from qfleet.interface.arguments import assign_callbacks
from qfleet.runconfig.resolution import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

LONG = [*SMALL, "env.max_episode_steps=50", "eval.period_steps=null", "checkpoint.period_steps=null",
        "total_steps=1_000_000", "run.name=x"]
RUNS = {"actors": ["actors=2"], "allreduce": ["learners=2", "sync=allreduce"],
        "server": ["learners=1", "sync=server", "parameter_server.shards=1"]}


def diary(run):
    return [json.loads(line) for line in (run / "diary.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", RUNS)
def test_callbacks_run_in_the_learners_process(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    result = api.train("cartpole", [*LONG, *RUNS[kind]], callbacks=[process_callbacks.Diary])
    assert (result.reason, result.exit_code) == ("stopped", 0)
    pids, entries = {pid for pid, *_ in diary(result.directory)}, [words for _, *words in diary(result.directory)]
    assert len(pids) == 1 and os.getpid() not in pids, "one process, and another one"
    assert entries[0] == ["start"] and entries[-1] == ["end", "stopped"]
    assert {entry[0] for entry in entries} == {"start", "episode", "evaluation", "checkpoint", "end"}
    episodes = [entry for entry in entries if entry[0] == "episode"]
    assert all(reward == length > 0 for _, reward, length, _ in episodes)
    if kind == "actors":
        assert {actor for *_, actor in episodes} <= {0, 1}
    evaluation = next(entry for entry in entries if entry[0] == "evaluation")
    assert evaluation[2] > 0, "weights of the time of the request"
    assert any("callback/steps" in record for record in records(result.directory))
    checkpoints = [entry for entry in entries if entry[0] == "checkpoint"]
    # The run stops when the requested one exists. The last one is another, unless no step was taken in between.
    assert checkpoints[0][1] >= 300 and checkpoints[-1][2] == newest(result.directory).path.name
    assert checkpoints[-1][1] == result.steps and len({step for _, step, _ in checkpoints}) == len(checkpoints)


def test_a_run_ends_with_its_evaluation_although_a_callback_asks_for_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    result = api.train("cartpole", [*LONG, *RUNS["actors"], "total_steps=3000"],
                       callbacks=[process_callbacks.Insatiable])
    assert (result.reason, result.exit_code) == ("total_steps", 0)
    scored = json.loads((result.directory / "scored.json").read_text())
    assert scored == sorted(set(scored)) and len(scored) >= 2 and scored[-1] == result.updates


def test_an_exception_in_a_callback_ends_the_run_once_with_a_checkpoint(tmp_path, monkeypatch):
    """The learner is not restarted: the callback would fail again."""
    done = qfleet("train", "cartpole", *LONG, *RUNS["actors"], "callbacks=[process_callbacks:Broken]", "--quiet",
                  cwd=tmp_path, PYTHONPATH=PATHS)
    assert done.returncode == 1
    assert "callback Broken.on_step (" in done.stderr and "process_callbacks.py, line" in done.stderr
    assert "raised ValueError: out of luck; the run was stopped at step" in done.stderr
    run = tmp_path / "runs" / "x"
    assert newest(run).manifest.updates > 20
    log = "".join(path.read_text() for path in (run / "logs").glob("learner*.log"))
    assert 'raise ValueError("out of luck")' in log and "start 2" not in log
    monkeypatch.setenv("PYTHONPATH", PATHS)
    with pytest.raises(CallbackError, match=r"callback Broken.on_step \(.* raised ValueError: out of luck"):
        api.resume(run)


def test_a_resumed_run_does_not_get_the_callbacks_of_its_configuration_twice():
    config = resolve("cartpole", [*LONG, "actors=2", "callbacks=[process_callbacks:Broken]"]).config
    changed, here = assign_callbacks(config, [process_callbacks.Broken, process_callbacks.Diary], elsewhere=True)
    assert changed.callbacks == ("process_callbacks:Broken", "process_callbacks:Diary") and here == []
    mine = process_callbacks.Broken()
    for again in (process_callbacks.Broken, "process_callbacks:Broken"):  # resumed with actors=0
        same, here = assign_callbacks(config, [again, process_callbacks.Diary, mine])
        assert same is config and [each.name for each in here] == ["Diary", "Broken"]


@pytest.mark.parametrize(("callback", "message"), [
    (process_callbacks.Diary(), "Diary cannot be passed to the learner, which actors=2 starts as another process: put "
                                "its class into a file, .* pass the class or \"my_module:Diary\""),
    ("process_callbacks:Dairy", "has no attribute 'Dairy'"),
    ("process_callbacks:json", "module has none of the methods on_start")])
def test_callbacks_that_another_process_cannot_create_are_refused(callback, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        api.train("cartpole", [*LONG, "actors=2"], callbacks=[callback])
    assert not (tmp_path / "runs" / "x").exists()
