"""MLflow, the real library with a local store: one MLflow run per run, and no training that depends on a server."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading

import pytest

pytest.importorskip("mlflow")
from mlflow.tracking import MlflowClient

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.runs import mlflow_writer as module
from qfleet.runs.directory import RunDirectory, RunSection
from qfleet.runs.metric_writers import read_metrics
from qfleet.runs.mlflow_writer import (
    ATTEMPTS,
    MAX_PARAM_CHARACTERS,
    SETTINGS,
    MlflowWriter,
    flat,
    metric_name,
    short_reason,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CONFIG = {"seed": 1, "total_steps": 900, "env": {"id": "CartPole-v1", "kwargs": {}, "wrappers": ["a" * 900]},
          "agent": {"algo": "dqn"}}


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A new SQLite store: its creation takes seconds."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", *SETTINGS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")


def new_directory(name="x"):
    return RunDirectory.create(RunSection(root="runs", name=name), name)


def stored(store, experiment="qfleet"):
    return store.search_runs([store.get_experiment_by_name(experiment).experiment_id])


def test_params_metrics_and_tags_are_stored_and_a_resume_continues_the_same_run(store):
    directory = new_directory()
    writer = MlflowWriter(directory, CONFIG)
    directory.add_attempt({})
    writer.write({"step": 10, "updates": 2, "train/loss": 0.5, "eval/mean_reward": math.inf, "rollout/x": None})
    writer.close()
    writer.close()
    writer.write({"step": 11})
    [run] = stored(store)
    assert run.info.run_name == "x" and run.info.status == "FINISHED"
    assert run.data.params["env.id"] == "CartPole-v1" and run.data.params["total_steps"] == "900"
    assert len(run.data.params["env.wrappers"]) == MAX_PARAM_CHARACTERS
    assert run.data.tags["qfleet.agent.algo"] == "dqn" and run.data.tags["qfleet.directory"].endswith("runs/x")
    assert run.data.metrics == {"updates": 2.0, "train/loss": 0.5}, "values that are not finite are left out"

    writer = MlflowWriter(directory, CONFIG | {"total_steps": 2000})
    assert store.get_run(run.info.run_id).info.status == "RUNNING"
    writer.write({"step": 20, "train/loss": 0.25})
    writer.close()
    [run] = stored(store)
    assert [(point.step, point.value) for point in store.get_metric_history(run.info.run_id, "train/loss")] == [
        (10, 0.5), (20, 0.25)]
    assert run.data.params["total_steps"] == "900" and run.data.tags["resumed.total_steps"] == "2000"


def test_a_run_of_another_store_is_a_new_run_here(store, monkeypatch):
    directory = new_directory()
    (directory.path / "mlflow.json").write_text(json.dumps({"run_id": "0" * 32, "tracking_uri": "http://elsewhere"}))
    directory.add_attempt({})
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    MlflowWriter(directory, CONFIG).close()
    assert len(stored(store, "mine")) == 1


def test_a_training_that_fails_is_stored_as_failed(store):
    directory = new_directory()
    writer = MlflowWriter(directory, CONFIG)
    try:
        raise ValueError
    except ValueError:
        writer.close()
    assert stored(store)[0].info.status == "FAILED"


@pytest.mark.parametrize(("uri", "why"), [
    ("nonsense://x", ".*nonsense.*"), ("sqlite:////proc/none/x.db", "No such file or directory"),
    ("http://127.0.0.1:9", "Connection refused")])
def test_a_store_that_cannot_be_used_is_refused_before_the_training(store, monkeypatch, uri, why):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match=rf"run.mlflow=true: {uri} cannot be used \({why}\): set MLFLOW_TRACKING_URI"):
        MlflowWriter(new_directory(), CONFIG)


@pytest.mark.parametrize("uri", ["sqlite:////proc/none/x.db", "http://127.0.0.1:9"])
def test_a_store_that_is_gone_at_a_resume_is_a_warning(store, monkeypatch, caplog, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    directory = new_directory()
    directory.add_attempt({})
    writer = MlflowWriter(directory, CONFIG)
    writer.write({"step": 1})
    writer.close()
    assert caplog.text.count("training continues") == 1


def test_a_server_that_fails_costs_records_and_one_warning_and_no_time(store, monkeypatch, caplog):
    writer = MlflowWriter(new_directory(), CONFIG)
    calls, answered = [], threading.Event()

    def gone(*args, **kwargs):
        calls.append(args)
        answered.wait(20)
        raise ConnectionError("the server is gone\nin many words")

    monkeypatch.setattr(writer._client, "log_batch", gone)
    monkeypatch.setattr(writer._client, "set_terminated", gone)
    for step in range(50):
        writer.write({"step": step, "train/loss": 1.0})
    assert len(calls) <= 1, "the training does not wait for the server"
    answered.set()
    writer.close()
    assert len(calls) == ATTEMPTS + 1 and caplog.text.count("training continues") == 1
    assert "record lost (the server is gone)" in caplog.text


def test_a_server_that_hangs_delays_the_end_only_for_a_moment(store, monkeypatch, caplog):
    writer = MlflowWriter(new_directory(), CONFIG)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.2)
    release = threading.Event()
    monkeypatch.setattr(writer._client, "log_batch", lambda *args, **kwargs: release.wait(30))
    for step in range(3):
        writer.write({"step": step, "train/loss": 1.0})
    writer.close()
    release.set()
    assert "does not answer" in caplog.text


def test_a_record_that_fails_once_is_sent_again(store, monkeypatch, caplog):
    writer = MlflowWriter(new_directory(), CONFIG)
    send, failures = writer._client.log_batch, [OSError("database is locked")]

    def locked_once(*args, **kwargs):
        if failures:
            raise failures.pop()
        send(*args, **kwargs)

    monkeypatch.setattr(writer._client, "log_batch", locked_once)
    for step in range(3):
        writer.write({"step": step, "train/loss": 1.0})
    writer.close()
    [run] = stored(store)
    assert len(store.get_metric_history(run.info.run_id, "train/loss")) == 3 and caplog.text == ""


def test_a_run_ends_also_if_its_queue_is_full(store, monkeypatch):
    monkeypatch.setattr(module, "WAITING_RECORDS", 1)
    writer = MlflowWriter(new_directory(), CONFIG)
    sending, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(writer, "_send", lambda record: (sending.set(), go_on.wait(20)))
    writer.write({"step": 1})
    assert sending.wait(20)
    writer.write({"step": 2})
    threading.Timer(0.2, go_on.set).start()
    writer.close()
    assert stored(store)[0].info.status == "FINISHED"


def test_another_run_may_create_the_experiment_meanwhile(store, monkeypatch):
    asked = []

    def not_yet(client, name, look_up=MlflowClient.get_experiment_by_name):
        asked.append(name)
        if len(asked) == 1:
            store.create_experiment(name)
            return None
        return look_up(client, name)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_experiment_by_name", not_yet)
        MlflowWriter(new_directory(), CONFIG).close()
    assert len(stored(store)) == 1


def test_a_password_is_neither_stored_nor_shown(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 cannot be used") as caught:
        MlflowWriter(new_directory(), CONFIG)
    assert "secret" not in str(caught.value)
    assert short_reason(ValueError("request to http://me:secret@h/api failed")) == "request to http://h/api failed"
    monkeypatch.setattr(module, "_connect", lambda address: store)
    directory = new_directory("y")
    for _ in range(2):
        MlflowWriter(directory, CONFIG).close()
        assert len(stored(store)) == 1, "the second continues the first"
    assert json.loads((directory.path / "mlflow.json").read_text())["tracking_uri"] == "http://127.0.0.1:9"


def test_a_missing_mlflow_names_the_extra(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"pip install 'qfleet\[mlflow\]'"):
        MlflowWriter(new_directory(), CONFIG)


def test_names_and_values_are_what_mlflow_allows():
    assert metric_name("time/a b%(c)") == "time/a b__c_"
    assert dict(flat({"a": {"b": [1, None]}, "c": {}, "d": "x", "e": True})) == {
        "a.b": "[1, null]", "c": "{}", "d": "x", "e": "true"}


def test_a_training_and_its_resume_log_every_record(store):
    words = ["total_steps=300", "env.lanes=2", "agent.hidden=[16]", "replay.chunk_steps=8", "replay.min_steps=64",
             "learner.batch_size=8", "replay.samples_per_insert=2", "eval.period_steps=100", "eval.episodes=1",
             "stop_at=null", "run.log_period_steps=50", "run.name=x", "run.mlflow=true", "run.threads=1",
             "run.tensorboard=false"]
    result = api.train("cartpole", words)
    api.resume("last", ["total_steps=500"])
    assert api.load("x").config.total_steps == api.load("last").config.total_steps
    [run] = stored(store)
    records = [record for record in read_metrics(result.directory / "metrics.jsonl") if "eval/mean_reward" in record]
    points = store.get_metric_history(run.info.run_id, "eval/mean_reward")
    assert sorted((point.step, point.value) for point in points) == [
        (record["step"], record["eval/mean_reward"]) for record in records]
    assert run.data.tags["resumed.total_steps"] == "500" and os.listdir("runs").count("mlruns") == 0
