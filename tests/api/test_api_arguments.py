"""What a script passes wrongly is refused by name, before anything is looked for, built or written."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium
import pytest

import qfleet
from qfleet import api
from qfleet.core.errors import UserError
from qfleet.training.meter import as_sink


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overrides", ["seed=3", {"seed": 3}, [("seed", 3)], [3], (None,)])
def test_overrides_are_a_list_of_texts(overrides):
    for call in (lambda: qfleet.train("cartpole", overrides), lambda: qfleet.resume("x", overrides)):
        with pytest.raises(UserError, match=r'overrides=.*must be a list of key=value texts, such as \["seed=3"'):
            call()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"episodes": 0}, "episodes=0: must be an integer of at least 1"),
    ({"episodes": -3}, "episodes=-3: must be"), ({"episodes": 2.5}, "episodes=2.5: must be"),
    ({"episodes": "5"}, "episodes='5': must be"), ({"episodes": True}, "episodes=True: must be"),
    ({"lanes": 0}, "lanes=0: must be"), ({"epsilon": 1.5}, "epsilon=1.5: must be a probability"),
    ({"epsilon": -0.1}, "epsilon=-0.1: must be"), ({"epsilon": float("nan")}, "epsilon=nan: must be"),
    ({"seed": -1}, "seed=-1: must be an integer of at least 0"), ({"seed": 1.5}, "seed=1.5: must be an integer"),
    ({"device": "gpu"}, "device='gpu' is not available"),
    ({"which": "typo"}, "which='typo': must be best or latest"),
])
def test_how_an_evaluation_is_played(arguments, message):
    with pytest.raises(UserError, match=message):
        qfleet.evaluate("x", **arguments)


def test_a_rollout_checks_its_seed():
    with pytest.raises(UserError, match="seed=-1: must be an integer of at least 0"):
        next(qfleet.rollout("x", seed=-1))


def test_which_weights_and_where():
    for call in (lambda: qfleet.load("x", which="newest"), lambda: api.export("x", "out", "newest"),
                 lambda: next(api.rollout("x", which="newest"))):
        with pytest.raises(UserError, match="which='newest': must be best or latest"):
            call()
    with pytest.raises(UserError, match="episodes=0"):
        next(api.rollout("x", episodes=0))
    with pytest.raises(UserError, match=r"device='gpu' is not available.*use device='cpu'"):
        qfleet.load("x", device="gpu")


def test_settings_that_cannot_be_right():
    for settings, message in (({1: 2, "env": {"id": "CartPole-v1"}}, "config: 1: Keys should be strings"),
                              ({"extends": "carpole"}, "config: extends: .*did you mean cartpole"),
                              ({"extends": "cartpole", "lerner": {}}, "config: lerner: unknown key")):
        with pytest.raises(UserError, match=message):
            qfleet.train(settings)


class Whole:
    def write(self, record): ...
    def flush(self): ...
    def close(self): ...


class Partial:
    def write(self, record): ...
    def flush(self): ...


class Narrow(Whole):
    def write(self): ...


@pytest.mark.parametrize(("sinks", "message"), [
    ([Partial()], r"sinks: Partial has no method close: a sink has write\(record\), flush\(\) and close\(\)"),
    ([object()], "sinks: object has no method write and no flush and no close"),
    ([Whole], r"sinks: Whole is a class: pass an instance, such as Whole\(\)"),
    ([Narrow()], r"sinks: Narrow does not accept the call write\(record\)"),
    ([lambda: None], r"does not accept the call write\(record\)"),
    (Whole(), "sinks: must be a list"), (print, "sinks: must be a list"), ([3], "sinks: int has no method write"),
])
def test_a_sink_that_cannot_be_used_is_refused_before_anything_is_trained(sinks, message):
    for call in (lambda: qfleet.train("catch", sinks=sinks), lambda: qfleet.resume("x", sinks=sinks)):
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.parametrize("callbacks", [qfleet.Callback(), "m:Diary"])
@pytest.mark.parametrize("elsewhere", [[], ["actors=1"]])
def test_a_single_callback_is_refused(callbacks, elsewhere):
    with pytest.raises(UserError, match=r"callbacks: must be a list, such as \[MyCallback\(\)\]"):
        qfleet.train("catch", elsewhere, callbacks=callbacks)


def test_a_plain_function_is_a_sink():
    seen = []
    sink = as_sink(seen.append)
    sink.write({"step": 1})
    sink.flush()
    sink.close()
    assert seen == [{"step": 1}]
    whole = Whole()
    assert as_sink(whole) is whole


@pytest.mark.parametrize("override", ["actors=1", "env.isolate=true", "eval.process=true"])
def test_a_class_of_the_script_itself_is_refused_where_other_processes_must_import_it(override, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Mine", lambda: gymnasium.make("CartPole-v1"), raising=False)
    settings = {"extends": "cartpole", "env": {"id": "__main__:Mine"}}
    with pytest.raises(UserError, match=rf"__main__:Mine: .* {override} starts: put a class or .* my_module:Mine"):
        qfleet.train(settings, [override])


def test_tab_offers_what_there_is_and_types_are_published():
    assert set(dir(qfleet)) == set(qfleet.__all__) and "train" in dir(qfleet)
    assert Path(qfleet.__file__).with_name("py.typed").is_file()
