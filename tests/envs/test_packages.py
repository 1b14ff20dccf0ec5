"""Environments of other packages: found by their id alone, and a missing package is named with its extra."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from qfleet.core.env import Leaf
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig, make
from qfleet.envs.packages import EXTRAS, PACKAGES, missing_package
from qfleet.report.doctor import EXTRAS as DOCTOR

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(("id", "observation"), [
    ("MinAtar/Breakout-v1", {"obs": Leaf((4, 10, 10), "uint8", "image", largest=1.0)}),
    ("MinAtar/Seaquest-v1", {"obs": Leaf((10, 10, 10), "uint8", "image", largest=1.0)}),
    ("MiniGrid-Empty-8x8-v0", {"direction": Leaf((1,), "int32", "category", (4,)),
                               "image": Leaf((3, 7, 7), "uint8", "image", symbols=16)}),
    ("BabyAI-GoToRedBall-v0", {"direction": Leaf((1,), "int32", "category", (4,)),
                               "image": Leaf((3, 7, 7), "uint8", "image", symbols=16)}),
    ("LunarLander-v3", {"obs": Leaf((8,), "float32", "vector")})])
def test_a_package_is_imported_for_its_ids(id, observation, capsys):
    env = make(EnvConfig(id=id), 2)
    try:
        assert env.spec.observation == observation
        first = env.reset([1, 2])
        again = env.reset([1, 2])
        assert all(np.array_equal(first[name], again[name]) for name in first), "a seed repeats an episode"
        for seed in range(20):
            env.reset([seed, seed])
    finally:
        env.close()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("id", "module", "extra"), [
    ("MinAtar/Breakout-v1", "minatar.gym", "minatar"), ("MiniGrid-Empty-8x8-v0", "minigrid", "minigrid"),
    ("BabyAI-GoToRedBall-v0", "minigrid", "minigrid"), ("LunarLander-v3", "Box2D", "box2d"),
    ("CarRacing-v3", "pygame", "video")])
def test_a_missing_package_is_named_with_its_extra(id, module, extra, monkeypatch):
    for package in PACKAGES:
        for known in [known for known in gymnasium.registry if known.startswith(package.prefixes)]:
            monkeypatch.delitem(gymnasium.registry, known)
    for name in [name for name in sys.modules if name.partition(".")[0] == module.partition(".")[0]
                 or name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as error:
        make(EnvConfig(id=id), 1)
    assert str(error.value).endswith(f"which is not installed: pip install 'qfleet[{extra}]'"), str(error.value)
    assert "gymnasium[" not in str(error.value)


def test_rendering_without_its_package_names_the_extra(monkeypatch):
    env = make(EnvConfig(id="CartPole-v1"), 1, render=True)
    env.reset([1])
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(UserError, match=r"rendering CartPole-v1 needs pygame, .*: pip install 'qfleet\[video\]'"):
        env.render()


def test_a_package_without_an_extra_is_reported_as_it_is():
    assert missing_package("x:Y", ModuleNotFoundError("No module named 'foo'", name="foo")).endswith("'foo'")


def test_the_extras_exist():
    extras = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {extra for _, extra in EXTRAS.values()} <= set(extras)
    assert set(DOCTOR) == set(extras) - {"docs", "dev", "all"}
