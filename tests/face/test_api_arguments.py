"""What a script passes wrongly is refused by name, before anything is looked for, built or written."""

from __future__ import annotations

import pytest

import qfleet
from qfleet import api
from qfleet.types import UserError


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
    ({"episodes": 0}, "episodes=0: must be a whole number of at least 1"),
    ({"episodes": -3}, "episodes=-3: must be"), ({"episodes": 2.5}, "episodes=2.5: must be"),
    ({"episodes": "5"}, "episodes='5': must be"), ({"episodes": True}, "episodes=True: must be"),
    ({"lanes": 0}, "lanes=0: must be"), ({"epsilon": 1.5}, "epsilon=1.5: must be a probability"),
    ({"epsilon": -0.1}, "epsilon=-0.1: must be"), ({"epsilon": float("nan")}, "epsilon=nan: must be"),
    ({"device": "gpu"}, "device='gpu' cannot be used here"),
    ({"which": "typo"}, "which='typo': must be best or latest"),
])
def test_how_an_evaluation_is_played(arguments, message):
    with pytest.raises(UserError, match=message):
        qfleet.evaluate("x", **arguments)


def test_which_weights_and_where():
    for call in (lambda: qfleet.load("x", which="newest"), lambda: api.export("x", "out", "newest"),
                 lambda: next(api.rollout("x", which="newest"))):
        with pytest.raises(UserError, match="which='newest': must be best or latest"):
            call()
    with pytest.raises(UserError, match="episodes=0"):
        next(api.rollout("x", episodes=0))
    with pytest.raises(UserError, match=r"device='gpu' cannot be used here.*use cpu, cuda or cuda:N"):
        qfleet.load("x", device="gpu")


def test_settings_that_cannot_be_right():
    for settings, message in (({1: 2, "env": {"id": "CartPole-v1"}}, "config: 1: Keys should be strings"),
                              ({"extends": "carpole"}, "config: extends: .*did you mean cartpole"),
                              ({"extends": "cartpole", "lerner": {}}, "config: lerner: unknown key")):
        with pytest.raises(UserError, match=message):
            qfleet.train(settings)
