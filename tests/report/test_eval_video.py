"""Films of evaluations while a run trains: when, where, and what goes wrong spoils nothing."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from qfleet import api
from qfleet.actor.policy import Policy
from qfleet.core import extras
from qfleet.core.errors import UserError
from qfleet.report import eval_video, video
from qfleet.report.eval_video import EvalVideoRecorder
from qfleet.runconfig.build import make_agent, make_env
from qfleet.runconfig.resolution import resolve

TINY = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.tensorboard=false", "run.log_period_steps=100",
        "run.threads=1", "stop_at=null", "total_steps=300", "eval.period_steps=100"]


@pytest.fixture
def filming(tmp_path, monkeypatch):
    """Films and the policy they show; `written` are the names and numbers of pictures."""
    config = resolve("catch", ["eval.video_period=2"]).config
    env = make_env(config.env, 1)
    env.close()
    policy = Policy(make_agent(config, env.spec), 0, torch.device("cpu"))
    written = []

    def write(frames, path):
        written.append((path.name, sum(1 for _ in frames)))

    monkeypatch.setattr(eval_video, "write_mp4", write)
    return EvalVideoRecorder(config, tmp_path / "videos"), policy, written


def test_the_first_evaluation_is_filmed_and_every_so_many_after_it(filming):
    movies, policy, written = filming
    for index in range(5):
        movies.record(policy, index, 1000 * (index + 1), lambda: False)
    assert [name for name, _ in written] == [f"step-{step:012d}.mp4" for step in (1000, 3000, 5000)]
    assert all(pictures == 10 for _, pictures in written), "a ball falls through ten rows of Catch"


def test_the_policy_is_as_it_was_afterwards(filming):
    movies, policy, _ = filming
    policy.memory = "its own"
    weights = {name: value.clone() for name, value in policy.flat.state().items()}
    movies.record(policy, 0, 1, lambda: False)
    assert policy.memory == "its own"
    assert all(torch.equal(weights[name], value) for name, value in policy.flat.state().items())


def test_a_film_can_be_broken_off(filming, caplog):
    movies, policy, written = filming
    asked = iter([False, False, True])
    with caplog.at_level(logging.WARNING):
        movies.record(policy, 0, 1, lambda: next(asked))
    assert written == [] and caplog.text == "", "that is no fault"
    movies.record(policy, 2, 1, lambda: False)
    assert len(written) == 1, "the next one is filmed again"


@pytest.mark.parametrize(("error", "again"), [(UserError("it has no render()"), False), (OSError("disk full"), True),
                                              (video.EncodingFailed("the encoder was killed"), True),
                                              (RuntimeError("of the environment's"), True)])
def test_what_goes_wrong_is_told_and_a_mistake_is_not_repeated(filming, monkeypatch, caplog, error, again):
    movies, policy, _ = filming
    tries = []

    def fail(frames, path):
        tries.append(path)
        raise error

    monkeypatch.setattr(eval_video, "write_mp4", fail)
    with caplog.at_level(logging.WARNING):
        for index in (0, 2):
            movies.record(policy, index, 7, lambda: False)
    assert len(tries) == 1 + again and str(error) in caplog.text and ("nor of later" in caplog.text) is not again


def test_nothing_is_filmed_unless_asked_for(tmp_path):
    EvalVideoRecorder(resolve("catch", []).config, tmp_path).record(None, 0, 0, lambda: False)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_found_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for actors in (0, 1):
        with pytest.raises(UserError, match=r"pip install 'qfleet\[video\]', or set eval.video_period=0"):
            api.train("catch", [*TINY, "eval.video_period=1", f"actors={actors}"])
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_films_of_a_run_in_one_process_change_nothing_else(tmp_path, monkeypatch):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    monkeypatch.chdir(tmp_path)
    runs = [api.train("catch", [*TINY, f"eval.video_period={period}", f"run.name=v{period}"]) for period in (0, 2)]
    assert [(run.reason, run.updates) for run in runs] == [("total_steps", runs[0].updates)] * 2, "both ended"
    weights = [api.load(run.directory, which="latest").checkpoint.policy() for run in runs]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    filmed = sorted((runs[1].directory / "videos").iterdir())
    assert len(filmed) == 2 and not (runs[0].directory / "videos").exists()
    pictures = list(imageio_ffmpeg.read_frames(str(filmed[0])))[1:]
    assert len(pictures) == 10 and len(np.unique(np.frombuffer(pictures[0], np.uint8))) > 1


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_fleet_films_and_tells_what_limits_it(tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.chdir(tmp_path)
    result = api.train("catch", [*TINY, "total_steps=3000", "eval.period_steps=1000", "eval.video_period=1",
                                 "actors=2", "run.name=fleet"])
    assert result.reason == "total_steps"
    said = [path.read_text()[-2000:] for path in (result.directory / "logs").glob("evaluator*")]
    assert list((result.directory / "videos").glob("step-*.mp4")), said
    from qfleet.report.doctor import diagnose
    from qfleet.runs.directory import RunDirectory

    found = diagnose(RunDirectory(result.directory))
    assert found["limit"]["limit"] in ("learner", "decode", "env", "inference", "wire", "pace") and found["actors"] == 2
    assert sum(found["actor_time"].values()) == pytest.approx(1)
    assert 0.5 < sum(found["loop_time"].values()) <= 1.05 and found["restarts"] == {} and found["faults"] == {}
    assert found["samples_per_insert"] == {"measured": pytest.approx(4, rel=0.1), "configured": 4}
