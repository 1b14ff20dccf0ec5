"""A run that goes on on another kind of device decides anew what its user had left open, and nothing else."""

import pytest
import torch

from qfleet import api
from qfleet.accel import gpu_memory
from qfleet.runconfig import build
from qfleet.runconfig.auto import reopen_auto, resolve_auto
from qfleet.runconfig.build import make_env
from qfleet.runconfig.resolution import resolve
from qfleet.runconfig.run_config import RunConfig


@pytest.fixture
def gpu(monkeypatch):
    """Whether this machine claims to have a GPU."""
    found = {"there": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found["there"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(found["there"]))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: 80 << 30)
    return found


def begun(*words: str) -> RunConfig:
    """A config as it lies in a run's directory."""
    config = resolve("toy/Catch-v0", ["total_steps=20000", *words]).config
    env = make_env(config.env, 1)
    env.close()
    return resolve_auto(config, env.spec)


def resumed(old: RunConfig, **changes: str) -> RunConfig:
    env = make_env(old.env, 1)
    env.close()
    return resolve_auto(reopen_auto(old, old.model_copy(update=changes), list(changes)), env.spec)


def of(config: RunConfig) -> tuple[object, ...]:
    return config.device, config.replay.store, config.learner.capture


def test_from_a_gpu_to_none_and_back(gpu):
    first = begun("learner.capture=auto")
    assert of(first) == ("cuda", "device", True)
    gpu["there"] = False
    second = resumed(first)
    assert of(second) == ("cpu", "host", False) and second.run.settled == first.run.settled
    gpu["there"] = True
    assert of(resumed(second)) == of(first)


def test_on_the_same_kind_of_device_nothing_changes(gpu, monkeypatch):
    first = begun("learner.capture=auto")
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: 1 << 30)
    assert resumed(first) == first
    assert resumed(first, device="cuda:0").replay.store == "device"


def test_what_a_gpu_is_there_for_and_is_not_done_is_said(gpu, monkeypatch, caplog):
    begun("learner.capture=auto")
    assert not caplog.messages, "all is done on the GPU"
    for words in (["sync=server"], ["sync=allreduce"], ["replay.store=host"]):
        assert begun("learner.capture=auto", *words).learner.capture is True, "at least losses are recorded"
    assert begun("learner.capture=auto", "sync=allreduce", "allreduce.overlap=true").learner.capture is False
    assert begun("learner.capture=false", "sync=allreduce").learner.capture is False and not caplog.messages
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda device: 10_000_000)
    assert of(begun("learner.capture=auto")) == ("cuda", "host", True)
    (store,) = caplog.messages
    assert store.startswith("replay.store: ") and "more than half of the 10 MB free there;" in store
    caplog.clear()
    gpu["there"] = False
    assert of(begun("learner.capture=auto", "sync=allreduce")) == ("cpu", "host", False)
    assert not caplog.messages, "no GPU, nothing to explain"


def test_on_a_cpu_nothing_is_recorded_and_a_wish_for_it_is_answered(gpu, caplog):
    gpu["there"] = False
    assert begun("learner.capture=true").learner.capture is False
    (said,) = caplog.messages
    assert said == "learner.capture=true has no effect on a CPU: it captures CUDA graphs"


def test_what_the_user_said_stays(gpu):
    first = begun("replay.store=device", "learner.capture=false", "run.threads=3")
    gpu["there"] = False
    second = resumed(first)
    assert of(second) == ("cpu", "device", False) and second.run.threads == 3


def test_a_key_that_is_named_on_resume_is_the_users_from_then_on(gpu):
    gpu["there"] = False
    first = begun("learner.capture=auto")
    gpu["there"] = True
    second = resumed(first, device="cpu")
    assert of(second) == ("cpu", "host", False), "it said so before, and now the user does"
    assert resumed(second) == second


def test_a_device_that_the_user_chose_is_not_left_but_by_the_user(gpu):
    first = begun("device=cpu", "learner.capture=auto")
    assert of(resumed(first)) == ("cpu", "host", False), "a GPU is there, and not asked for"
    assert of(resumed(first, device="cuda")) == ("cuda", "device", True)


def test_an_exact_run_stays_on_the_cpu(gpu):
    first = begun("run.exact_resume=true", "checkpoint.period_steps=8000", "learner.capture=auto")
    assert of(first) == ("cpu", "host", False) and resumed(first) == first


def test_runs_of_before_are_gone_on_with_as_they_are(gpu):
    first = begun("learner.capture=auto")
    old = first.model_copy(update={"run": first.run.model_copy(update={"settled": ()})})
    assert reopen_auto(old, old, []) == old


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_from_a_gpu_goes_on_without_one(tmp_path, monkeypatch):
    """The file of a run says cuda, as if it had been written elsewhere."""
    monkeypatch.chdir(tmp_path)
    tiny = ["agent.hidden=[8]", "replay.min_steps=50", "learner.batch_size=8", "stop_at=null", "total_steps=200",
            "run.tensorboard=false", "eval.episodes=2"]
    run = api.train("catch", [*tiny, "run.name=x", "device=auto"])
    text = (run.directory / "config.yaml").read_text()
    assert "device: cpu" in text and "settled: [device" in text
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    (run.directory / "config.yaml").write_text(text.replace("device: cpu", "device: cuda", 1))
    more = api.resume("x", ["total_steps=300"])
    assert more.exit_code == 0 and more.steps >= 300
    assert "device: cpu" in (run.directory / "config.yaml").read_text()
