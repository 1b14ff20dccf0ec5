"""Atari through the C++ emulators: protocols, lives, scores, seeds, and the Python game that can be drawn."""

import hashlib
import os
import sys

import numpy as np
import pytest

from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig, make
from qfleet.envs.atari import AtariLanes, claims, games, rules_of

pytest.importorskip("ale_py")


def roll(env, steps, seeds, rng_seed=0):
    rng = np.random.default_rng(rng_seed)
    obs, outs = env.reset(seeds), []
    for _ in range(steps):
        env.send(rng.integers(env.spec.num_actions, size=env.lanes))
        outs.append(env.recv())
    return obs, outs


def digest(obs, outs):
    state = hashlib.sha256(obs["obs"].tobytes())
    for out in outs:
        for array in (out.obs["obs"], out.reward, out.discount, out.last, out.raw_reward):
            state.update(array.tobytes())
    return state.hexdigest()


def column(outs, name, lane=0):
    return np.array([getattr(out, name)[lane] for out in outs])


def test_protocols_by_id():
    classic, sticky = rules_of(EnvConfig(id="PongNoFrameskip-v4")), rules_of(EnvConfig(id="ALE/MsPacman-v5"))
    assert (classic.rom, classic.protocol, classic.sticky, classic.noop_max) == ("pong", "classic", 0, 30)
    assert (sticky.rom, sticky.protocol, sticky.sticky, sticky.noop_max) == ("ms_pacman", "sticky", 0.25, 0)
    assert classic.life_loss and not sticky.life_loss
    assert sticky.full_action_space and not classic.full_action_space
    assert classic.clip_rewards and sticky.clip_rewards and classic.max_frames == sticky.max_frames == 108_000
    assert rules_of(EnvConfig(id="ALE/Pong-v5", protocol="classic")) == classic
    mixed = rules_of(EnvConfig(id="ALE/Pong-v5", sticky=0, noop_max=5, clip_rewards=False, max_episode_steps=10))
    assert (mixed.sticky, mixed.noop_max, mixed.clip_rewards, mixed.max_frames) == (0, 5, False, 40)


@pytest.mark.parametrize("id, words", [
    ("PongDeterministic-v4", "use PongNoFrameskip-v4"), ("Pong-v4", "use PongNoFrameskip-v4"),
    ("PongNoFrameskip-v0", "ALE/Pong-v5"), ("ALE/Pnog-v5", "did you mean ALE/Pong-v5"),
    ("ALE/Pong-ram-v5", "ALE/Pong-v5"), ("ALE/Joust-v5", "no Atari game 'Joust'"),
])
def test_ids_that_mean_no_protocol_are_refused_with_the_right_ones(id, words):
    assert claims(id)
    with pytest.raises(UserError, match=words):
        make(EnvConfig(id=id), 1)


def test_other_ids_are_not_claimed():
    assert not claims("CartPole-v0") and not claims("mine:PongNoFrameskip-v4") and not claims("LakeDeterministic-v4")


def test_spec():
    env = make(EnvConfig(id="PongNoFrameskip-v4"), 2)
    leaf = env.spec.observation["obs"]
    assert isinstance(env, AtariLanes) and (leaf.shape, leaf.stack, leaf.kind) == ((4, 84, 84), 4, "image")
    assert env.spec.num_actions == 6 and env.spec.frames_per_step == 4
    assert make(EnvConfig(id="ALE/Pong-v5"), 1).spec.num_actions == 18
    colour = make(EnvConfig(id="ALE/Pong-v5", colour="rgb", frame_size=40, stack=2, frame_skip=2), 1)
    assert colour.spec.observation["obs"].shape == (6, 40, 40) and colour.spec.frames_per_step == 2
    assert colour.reset([0])["obs"].shape == (1, 6, 40, 40)


def test_stack_is_zero_before_the_first_frame_and_newest_last():
    obs, outs = roll(make(EnvConfig(id="BreakoutNoFrameskip-v4"), 1), 250, [5])
    assert not obs["obs"][0, :3].any() and obs["obs"][0, 3].any()
    for before, after in zip([obs, *(out.obs for out in outs)], outs, strict=False):
        if not (after.discount[0] == 0 and not after.obs["obs"][0, :3].any()):
            assert (before["obs"][0, 1:] == after.obs["obs"][0, :-1]).all()
    begun = np.flatnonzero(column(outs, "last")) + 1
    assert len(begun) and all(not outs[t].obs["obs"][0, :3].any() for t in begun)


@pytest.mark.slow
def test_breakout_lives_and_games():
    cfg = {"id": "BreakoutNoFrameskip-v4"}
    _, classic = roll(make(EnvConfig(**cfg), 1), 400, [7])
    _, whole = roll(make(EnvConfig(**cfg, life_loss=False), 1), 400, [7])
    last = column(classic, "last")
    assert last.sum() == 2 and (column(whole, "last") == last).all()
    assert all((a.obs["obs"] == b.obs["obs"]).all() for a, b in zip(classic, whole, strict=True))
    ends = np.flatnonzero(last)
    # Five lives: four losses within a game, then its end, then the reset row.
    assert (column(classic, "discount")[: ends[0] + 1] == 0).sum() == 5
    assert (column(whole, "discount")[: ends[0] + 1] == 0).sum() == 1
    for end in ends:
        row = classic[end + 1]
        assert (row.discount[0], row.reward[0], row.raw_reward[0], row.last[0]) == (0, 0, 0, False)
    assert not column(classic, "aborted").any()


def test_scores_are_unclipped():
    _, outs = roll(make(EnvConfig(id="ALE/SpaceInvaders-v5"), 1), 200, [0])
    score, reward = column(outs, "raw_reward"), column(outs, "reward")
    assert score.max() >= 5 and (reward == np.sign(score)).all() and reward.dtype == np.float32
    _, outs = roll(make(EnvConfig(id="ALE/SpaceInvaders-v5", clip_rewards=False), 1), 200, [0])
    assert (column(outs, "reward") == score).all()


@pytest.mark.slow
@pytest.mark.parametrize("id", ["ALE/Breakout-v5", "PongNoFrameskip-v4"])
def test_seeds_fix_everything_and_differ_by_lane(id):
    env = make(EnvConfig(id=id), 2)
    one = digest(*roll(env, 40, [3, 4]))
    assert digest(*roll(env, 40, [3, 4])) == one == digest(*roll(make(EnvConfig(id=id, threads=1), 2), 40, [3, 4]))
    assert digest(*roll(env, 40, [4, 3])) != one
    assert digest(*roll(env, 40, [2**40 + 3, 4])) == one  # seeds are folded into 31 bits


def test_the_frame_cap_is_a_truncation():
    _, outs = roll(make(EnvConfig(id="ALE/Pong-v5", max_episode_steps=10), 1), 24, [1])
    assert np.flatnonzero(column(outs, "last")).tolist() == [9, 20]
    assert outs[9].discount[0] == 1 and outs[10].discount[0] == 0


@pytest.mark.timeout(20)
def test_invalid_actions_are_refused_before_they_hang_the_emulators():
    env = make(EnvConfig(id="PongNoFrameskip-v4"), 2)
    env.reset([0, 1])
    for bad in ([0, 6], [-1, 0], [0]):
        with pytest.raises(ValueError, match=r"2 actions 0..5"):
            env.send(np.array(bad))
    with pytest.raises(RuntimeError, match="without send"):
        env.recv()
    env.send(np.array([0, 5]))
    with pytest.raises(RuntimeError, match="twice"):
        env.send(np.array([0, 5]))
    assert env.recv().obs["obs"].shape == (2, 4, 84, 84)


def test_reset_in_the_middle_of_a_step_starts_anew():
    env = make(EnvConfig(id="PongNoFrameskip-v4"), 2)
    expected = digest(*roll(env, 20, [1, 2]))
    env.send(np.array([0, 0]))
    assert digest(*roll(env, 20, [1, 2])) == expected
    env.send(np.array([0, 0]))
    env.close()


def test_close_ends_the_threads_of_the_emulators():
    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    env = make(EnvConfig(id="PongNoFrameskip-v4"), 2)
    env.reset([1, 2])
    assert threads() == before + 2
    env.close()
    env.close()
    assert threads() == before


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [
    {"id": "BreakoutNoFrameskip-v4"}, {"id": "ALE/Breakout-v5"}, {"id": "ALE/Seaquest-v5", "max_episode_steps": 30},
    {"id": "QbertNoFrameskip-v4", "colour": "rgb", "frame_size": 50, "stack": 2, "frame_skip": 3},
])
def test_the_visible_game_is_the_very_same_game(cfg):
    hidden, visible = make(EnvConfig(**cfg), 1), make(EnvConfig(**cfg), 1, render=True)
    assert hidden.spec == visible.spec
    assert digest(*roll(hidden, 200, [123_456])) == digest(*roll(visible, 200, [123_456]))
    assert visible.render().shape == (210, 160, 3) and visible.render().dtype == np.uint8
    assert hidden.render() is None


def test_wrappers_work_on_atari(tmp_path, monkeypatch):
    (tmp_path / "atari_wrap.py").write_text(
        "import gymnasium\nclass Tenfold(gymnasium.RewardWrapper):\n    def reward(self, r):\n        return 10 * r\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    cfg = {"id": "ALE/SpaceInvaders-v5"}
    _, plain = roll(make(EnvConfig(**cfg), 1), 120, [0])
    _, wrapped = roll(make(EnvConfig(**cfg, wrappers=["atari_wrap:Tenfold"]), 1), 120, [0])
    before, after = column(plain, "raw_reward"), column(wrapped, "raw_reward")
    assert before.any() and (after == 10 * before).all()


def test_kwargs_are_refused():
    with pytest.raises(UserError, match=r"env\.kwargs"):
        make(EnvConfig(id="ALE/Pong-v5", kwargs={"mode": 1}), 1)


def test_work_between_send_and_recv_changes_nothing():
    env = make(EnvConfig(id="PongNoFrameskip-v4"), 2)
    expected = digest(*roll(env, 15, [1, 2]))
    rng = np.random.default_rng(0)
    obs, outs = env.reset([1, 2]), []
    for _ in range(15):
        actions = rng.integers(env.spec.num_actions, size=2)
        env.send(actions)
        actions[:] = -1  # the caller's array may be used again
        np.linalg.svd(np.ones((60, 60)))
        outs.append(env.recv())
    assert digest(obs, outs) == expected


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    games.cache_clear()
    monkeypatch.setitem(sys.modules, "ale_py", None)
    try:
        for id in ("ALE/Pong-v5", "PongNoFrameskip-v4"):
            with pytest.raises(UserError, match=r"pip install 'qfleet\[atari\]'"):
                make(EnvConfig(id=id), 1)
        assert not claims("Pong-v4") and not claims("CartPole-v0")
    finally:
        games.cache_clear()


def test_pictures_without_opencv_name_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r"qfleet\[atari\]"):
        make(EnvConfig(id="ALE/Pong-v5"), 1, render=True)
    with pytest.raises(UserError, match=r"qfleet\[atari\]"):
        make(EnvConfig(id="toy/Catch-v0", kwargs={"pixels": True}, frame_size=42), 1)
