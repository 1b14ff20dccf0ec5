"""Settings in TensorBoard: the HParams tab compares runs, and a resume repeats nothing."""

from __future__ import annotations

import errno
from functools import partial

import pytest

from qfleet.runs import metric_writers
from qfleet.runs.hparams import METRICS, hparam_summaries, hparam_values
from qfleet.runs.metric_writers import TensorBoardWriter

CONFIG = {"seed": 1, "agent": {"double": True, "hidden": [256, 256], "n_step": 3}, "replay": {"capacity": None},
          "learner": {"learning_rate": 1e-3}, "run": {"name": "x"}}
SOURCES = {"learner.learning_rate": "command line", "agent.n_step": "recipe vector", "seed": "default"}


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def plugin_data(folder):
    from tensorboard.plugins.hparams import metadata

    contents = accumulated(folder).PluginTagToContent("hparams")
    return (metadata.parse_experiment_plugin_data(contents[metadata.EXPERIMENT_TAG]),
            metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG]))


def test_settings_are_numbers_texts_and_booleans():
    assert hparam_values(CONFIG) == {"seed": 1, "agent.double": True, "agent.hidden": "[256, 256]", "agent.n_step": 3,
                                     "replay.capacity": "null", "learner.learning_rate": 1e-3}


def test_the_hparams_tab_has_the_settings_and_the_scores(tmp_path):
    writer = TensorBoardWriter(tmp_path, header=partial(hparam_summaries, CONFIG, SOURCES))
    writer.write({"step": 1, "eval/best_reward": 3.0})
    writer.close()
    experiment, session = plugin_data(tmp_path)
    names = [info.name for info in experiment.hparam_infos]
    assert names[:3] == ["learner.learning_rate", "agent.n_step", "agent.double"], "what the user has set is first"
    assert [metric.name.tag for metric in experiment.metric_infos] == list(METRICS)
    assert session.hparams["learner.learning_rate"].number_value == pytest.approx(1e-3)
    assert session.hparams["agent.double"].bool_value is True
    assert session.hparams["agent.hidden"].string_value == "[256, 256]"


def test_a_resume_declares_nothing_twice(tmp_path):
    calls = []

    def header():
        calls.append(1)
        return hparam_summaries(CONFIG, SOURCES)

    for resume in (None, 20, 20):
        writer = TensorBoardWriter(tmp_path, resume, header)
        writer.write({"step": 30, "train/loss": 1.0})
        writer.close()
    assert len(calls) == 1 and plugin_data(tmp_path)[1].hparams["seed"].number_value == 1


def test_settings_that_did_not_fit_on_a_full_disk_are_written_later(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(metric_writers.time, "monotonic", lambda: clock[0])
    writer = TensorBoardWriter(tmp_path, header=partial(hparam_summaries, CONFIG, SOURCES))
    with monkeypatch.context() as patch:
        patch.setattr(metric_writers._FullWrites, "write", no_space)
        writer.write({"step": 1, "train/loss": 1.0})
    for step in (2, 3):
        clock[0] += metric_writers.WARNING_PERIOD_S + 1
        writer.write({"step": step, "train/loss": 1.0})
    writer.close()
    assert plugin_data(tmp_path)[1].hparams["seed"].number_value == 1
    assert [point.step for point in accumulated(tmp_path).Scalars("train/loss")] == [2, 3]


def test_tensorboard_opens_on_the_return(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write({"step": 1, "actor/act_ms": 1.0, "eval/mean_reward": 2.0, "rollout/ep_rew_mean": 3.0})
    writer.close()
    tags = sorted(accumulated(tmp_path).Tags()["scalars"])
    assert tags[:2] == ["Return/evaluation", "Return/training"]
    assert {"eval/mean_reward", "rollout/ep_rew_mean"} <= set(tags), "the usual tags remain"
