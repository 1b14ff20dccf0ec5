"""Finding environments by id, module:Id and module:callable, and saying what is wrong when that fails."""

import json
import os
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from qfleet.core.env import Box, EnvSpec
from qfleet.core.errors import EnvFault, UserError
from qfleet.envs import EnvConfig, make
from qfleet.envs.gym import env_factory

MODULE = '''
import gymnasium, numpy as np
from gymnasium import spaces

class Mine(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {{"render_modes": ["rgb_array"]}}
    def __init__(self, gain=1.0, render_mode=None):
        self.gain, self.render_mode = gain, render_mode
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {{}}
    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), self.gain * action, self.t == 3, False, {{}}
    def render(self):
        return np.full((4, 4, 3), 7, np.uint8) if self.render_mode else None

class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * reward

class PlusOne(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward + 1

class Shelf:
    Mine, Doubled = Mine, Doubled

def factory(**kwargs):
    return Mine(**kwargs)

def wrong():
    return "not an env"

def broken():
    raise RuntimeError("no such level")

gymnasium.register("{name}/Mine-v0", entry_point=Mine, max_episode_steps=2)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a new name in a new working directory."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)
    gymnasium.registry.pop(f"{name}/Mine-v0", None)


def scores(cfg, steps):
    env = make(cfg, 1)
    env.reset([0])
    out = []
    for _ in range(steps):
        env.send(np.array([1]))
        step = env.recv()
        out.append((float(step.raw_reward[0]), float(step.discount[0]), bool(step.last[0])))
    return out


def test_a_class_in_the_working_directory(module):
    cfg = EnvConfig(id=f"{module}:Mine", kwargs={"gain": 3})
    assert scores(cfg, 3) == [(3, 1, False), (3, 1, False), (3, 0, True)]


def test_a_function_and_dotted_names(module):
    assert scores(EnvConfig(id=f"{module}:factory", kwargs={"gain": 2}), 1) == [(2, 1, False)]
    shelf = f"{module}:Shelf"
    assert scores(EnvConfig(id=f"{shelf}.Mine", wrappers=[f"{shelf}.Doubled"]), 1) == [(2, 1, False)]


def test_an_id_that_importing_the_module_registers(module):
    assert scores(EnvConfig(id=f"{module}:{module}/Mine-v0"), 2) == [(1, 1, False), (1, 1, True)]  # truncated at 2


def test_config_overrides_the_registered_limit(module):
    cfg = EnvConfig(id=f"{module}:{module}/Mine-v0", max_episode_steps=9)
    assert scores(cfg, 3)[-1] == (1, 0, True)


def test_wrappers_go_from_the_inside_out(module):
    both = [f"{module}:Doubled", f"{module}:PlusOne"]
    assert scores(EnvConfig(id=f"{module}:Mine", wrappers=both), 1)[0][0] == 3
    assert scores(EnvConfig(id=f"{module}:Mine", wrappers=both[::-1]), 1)[0][0] == 4


def test_wrappers_see_the_time_limit(module):
    build, limit = env_factory(EnvConfig(id="CartPole-v1", wrappers=[f"{module}:Doubled"], max_episode_steps=3))
    env = build()
    env.reset(seed=0)
    assert limit == 3 and [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_render_gives_pictures(module):
    for id in (f"{module}:Mine", f"{module}:{module}/Mine-v0"):
        env = make(EnvConfig(id=id), 2, render=True)
        env.reset([0, 1])
        assert (env.render() == np.full((4, 4, 3), 7)).all()
        assert make(EnvConfig(id=id), 1).render() is None


@pytest.mark.parametrize("id, words", [
    ("Cartpole-v1", "did you mean CartPole-v1"),
    ("Pong-v5", "did you mean ALE/Pong-v5"),
    ("toy/Cach-v0", "did you mean toy/Catch-v0"),
    ("NothingLikeIt-v7", "no environment 'NothingLikeIt-v7' is registered"),
    ("no_such_module:Env", "no module 'no_such_module'"),
    (":Env", "write module:attribute"),
    ("HalfCheetah-v5", r"qfleet\[mujoco\]"),
])
def test_ids_that_are_not_there(id, words, monkeypatch):
    if id == "HalfCheetah-v5":
        monkeypatch.setitem(sys.modules, "mujoco", None)
        for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
            monkeypatch.delitem(sys.modules, name)  # another test has imported what this one must not find
    if "ALE" in words:
        pytest.importorskip("ale_py")
    with pytest.raises(UserError, match=words):
        make(EnvConfig(id=id), 1)


def test_mujoco_warns_in_the_log_and_not_in_a_file_of_the_working_directory(tmp_path, monkeypatch, caplog):
    mujoco = pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    caplog.set_level("DEBUG")
    before = mujoco.get_mju_user_warning()
    try:
        mujoco.set_mju_user_warning(None)
        make(EnvConfig(id="HalfCheetah-v5"), 1).close()
        for text in ("a huge value. Time = 0.1.", "a huge value. Time = 0.2."):
            mujoco.get_mju_user_warning()(text)
        mine = print
        mujoco.set_mju_user_warning(mine)
        make(EnvConfig(id="HalfCheetah-v5"), 1).close()
        assert mujoco.get_mju_user_warning() is mine
    finally:
        mujoco.set_mju_user_warning(before)
    assert not list(tmp_path.iterdir())
    assert [record.levelname for record in caplog.records if "a huge value" in record.message] == ["WARNING"]


@pytest.mark.parametrize(("screen", "words", "camera", "way"), [
    ("", {}, "track", "egl"), (":0", {}, "track", None), ("", {"camera_id": -1}, None, "egl")])
def test_mujoco_is_filmed_without_a_screen_by_a_camera_that_follows(monkeypatch, screen, words, camera, way):
    mujoco = pytest.importorskip("mujoco")
    for name in ("MUJOCO_GL", "WAYLAND_DISPLAY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    build, _ = env_factory(EnvConfig(id="HalfCheetah-v5", kwargs=words), render=True)
    env = build()
    found = env.unwrapped.mujoco_renderer
    assert mujoco.mj_id2name(env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, found.camera_id) == camera
    assert os.environ.get("MUJOCO_GL") == way
    env.close()


def test_where_nothing_can_draw_mujoco_plays_and_is_not_filmed(monkeypatch):
    pytest.importorskip("mujoco")
    for name in ("MUJOCO_GL", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    make(EnvConfig(id="HalfCheetah-v5"), 1).close()
    assert "MUJOCO_GL" not in os.environ
    with pytest.raises(UserError, match=r"HalfCheetah-v5 cannot be rendered: .* apt install libegl1"):
        env_factory(EnvConfig(id="HalfCheetah-v5"), render=True)


def test_mistakes_in_the_users_module(module, tmp_path):
    with pytest.raises(UserError, match="has no 'Mien', neither as an attribute nor as an environment"):
        make(EnvConfig(id=f"{module}:Mien"), 1)
    with pytest.raises(UserError, match=r"a gymnasium\.Env or a gymnasium\.vector\.VectorEnv is needed"):
        make(EnvConfig(id=f"{module}:wrong"), 1)
    with pytest.raises(UserError, match=r"env.kwargs=\{'gian': 3\}"):
        make(EnvConfig(id=f"{module}:Mine", kwargs={"gian": 3}), 1)
    with pytest.raises(EnvFault, match=r"(?s)could not be built.*no such level"):
        make(EnvConfig(id=f"{module}:broken"), 1)
    with pytest.raises(UserError, match="has no attribute 'Dobuled'; did you mean Doubled"):
        make(EnvConfig(id=f"{module}:Mine", wrappers=[f"{module}:Dobuled"]), 1)
    with pytest.raises(UserError, match="write module:attribute"):
        make(EnvConfig(id=f"{module}:Mine", wrappers=["Doubled"]), 1)
    (tmp_path / "torn.py").write_text("x = (\n")
    with pytest.raises(UserError, match=r"(?s)importing torn failed.*torn.py"):
        make(EnvConfig(id="torn:Env"), 1)
    (tmp_path / "needy.py").write_text("import a_package_nobody_has\n")
    with pytest.raises(UserError, match="a_package_nobody_has"):
        make(EnvConfig(id="needy:Env"), 1)


def test_continuous_actions_are_scaled_to_the_bounds():
    env = make(EnvConfig(id=f"{__name__}:Echo"), 2)
    assert env.spec.box == Box((2,), (-2.0, 0.0), (4.0, 1.0)) and env.spec.num_actions == 0
    assert EnvSpec.from_json(json.loads(json.dumps(env.spec.to_json()))) == env.spec
    env.reset([1, 2])
    env.send(np.array([[-1, -1], [0.5, 1]], np.float32))
    assert env.recv().obs["obs"].tolist() == [[-2, 0], [2.5, 1]]
    for wrong in ([[0, 1.1], [0, 0]], [[0, np.nan], [0, 0]], [[0], [0]]):
        with pytest.raises(ValueError, match=r"actions of shape \(2,\) within ±1"):
            env.send(np.array(wrong, np.float32))


class Echo(gymnasium.Env):
    """Shows the action it was given."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(np.array([-2, 0], np.float32), np.array([4, 1], np.float32))

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert action.dtype == np.float32 and self.action_space.contains(action)
        return action, 0.0, False, False, {}


def test_cartpole_equals_gymnasium_itself():
    ours, theirs = make(EnvConfig(id="CartPole-v1"), 2), [gymnasium.make("CartPole-v1") for _ in range(2)]
    seeds, rng = [3, 4], np.random.default_rng(0)
    obs = ours.reset(seeds)["obs"]
    expected = [env.reset(seed=seed)[0] for env, seed in zip(theirs, seeds, strict=True)]
    over = [False, False]
    for _ in range(300):
        assert (obs == np.array(expected)).all()
        actions = rng.integers(2, size=2)
        ours.send(actions)
        out = ours.recv()
        obs = out.obs["obs"]
        for i, env in enumerate(theirs):
            if over[i]:
                expected[i], over[i] = env.reset()[0], False
                assert (out.raw_reward[i], out.discount[i], out.last[i]) == (0, 0, False)
            else:
                expected[i], reward, terminated, truncated, _ = env.step(int(actions[i]))
                over[i] = terminated or truncated
                assert (out.raw_reward[i], out.discount[i], out.last[i]) == (reward, not terminated, over[i])
