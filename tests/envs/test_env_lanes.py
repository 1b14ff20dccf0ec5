"""The timeline of lanes: autoreset, truncation, life loss, and what happens when an environment breaks."""

import logging
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from qfleet.core.errors import BadOutput, EnvFault, UserError
from qfleet.envs import EnvConfig, make
from qfleet.envs.images import ImageFormat
from qfleet.envs.lanes import EpisodeRules, GymLanes, _warn_truncated

T, F = True, False


class Tape(gymnasium.Env):
    """Plays a written tape: one list per episode of (reward, terminated, truncated); observes [episode, t]."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, episodes, lives=None):
        self.episodes, self.lives, self.episode, self.calls = episodes, lives, -1, []

    def info(self):
        return {"lives": self.lives[self.t]} if self.lives else {}

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        self.calls.append(("reset", seed))
        return np.array([self.episode, 0], np.float32), self.info()

    def step(self, action):
        self.calls.append(("step", action))
        reward, terminated, truncated = self.episodes[self.episode][self.t]
        self.t += 1
        return np.array([self.episode, self.t], np.float32), reward, terminated, truncated, self.info()


def play(lanes, seeds, actions):
    """The first observation and then (obs, reward, discount, last, score, cut) of lane 0, step by step."""
    rows = [lanes.reset(seeds)["obs"][0].tolist()]
    for action in actions:
        lanes.send(np.full(lanes.lanes, action))
        out = lanes.recv()
        rows.append((out.obs["obs"][0].tolist(), float(out.reward[0]), float(out.discount[0]), bool(out.last[0]),
                     float(out.raw_reward[0]), bool(out.aborted[0])))
    return rows


def tape_lanes(episodes, limit=100, lives=None, **rules):
    env = Tape(episodes, lives)
    return env, GymLanes(lambda: env, EnvConfig(id="tape"), 1, ImageFormat(), EpisodeRules(limit, **rules))


def test_next_step_autoreset():
    env, lanes = tape_lanes([[(1, F, F), (2, T, F)], [(3, F, T)], [(4, F, F)]])
    assert play(lanes, [7], [0, 1, 2, 0, 1, 2]) == [
        [0, 0],
        ([0, 1], 1, 1, F, 1, F),
        ([0, 2], 2, 0, T, 2, F),  # terminated: the final observation, discount 0
        ([1, 0], 0, 0, F, 0, F),  # the action was ignored
        ([1, 1], 3, 1, T, 3, F),  # truncated: the final observation, bootstrapped from
        ([2, 0], 0, 0, F, 0, F),
        ([2, 1], 4, 1, F, 4, F),
    ]
    assert env.calls == [("reset", 7), ("step", 0), ("step", 1), ("reset", None), ("step", 0), ("reset", None),
                         ("step", 2)]


def test_our_time_limit_truncates_and_termination_wins():
    _, lanes = tape_lanes([[(1, F, F)] * 9, [(1, F, F), (1, T, F)]], limit=2)
    rows = play(lanes, [0], [0] * 5)
    assert [row[2:4] for row in rows[1:]] == [(1, F), (1, T), (0, F), (1, F), (0, T)]


def test_terminated_and_truncated_at_once_is_terminated():
    _, lanes = tape_lanes([[(1, T, T)]])
    assert play(lanes, [0], [0])[1][2:4] == (0, T)


def test_lost_life_ends_the_learners_episode_only():
    lives = [3, 3, 2, 2, 0]
    episode = [(0, F, F)] * 4
    _, lanes = tape_lanes([episode], lives=lives, life_loss=True)
    rows = play(lanes, [0], [0] * 4)
    assert [row[2] for row in rows[1:]] == [1, 0, 1, 1] and not any(row[3] for row in rows[1:])
    _, lanes = tape_lanes([episode], lives=lives)
    assert [row[2] for row in play(lanes, [0], [0] * 4)[1:]] == [1, 1, 1, 1]


def test_clipping_leaves_the_score_alone():
    _, lanes = tape_lanes([[(5, F, F), (-0.5, F, F), (0, F, F)]], clip=True)
    assert [(row[1], row[4]) for row in play(lanes, [0], [0] * 3)[1:]] == [(1, 5), (-1, -0.5), (0, 0)]


def test_outcomes_are_not_overwritten_by_later_steps():
    _, lanes = tape_lanes([[(1, F, F)] * 9])
    lanes.reset([0])
    lanes.send(np.array([0]))
    first = lanes.recv()
    lanes.send(np.array([0]))
    lanes.recv()
    assert first.obs["obs"][0].tolist() == [0, 1]


def test_order_of_calls_and_actions_are_checked():
    _, lanes = tape_lanes([[(1, F, F)] * 9])
    lanes.reset([0])
    with pytest.raises(RuntimeError, match="without send"):
        lanes.recv()
    for action in (3, -1):
        with pytest.raises(ValueError, match=rf"actions 0..2, not {action}"):
            lanes.send(np.array([action]))
    with pytest.raises(ValueError, match="1 lanes, not 2"):
        lanes.send(np.array([0, 0]))
    lanes.send(np.array([0]))
    with pytest.raises(RuntimeError, match="twice"):
        lanes.send(np.array([0]))
    lanes.reset([0])  # an unfinished step is forgotten
    lanes.send(np.array([0]))


def faulty(lanes=1, **cfg):
    kwargs = cfg.pop("kwargs")
    return make(EnvConfig(id="toy/Faulty-v0", kwargs=kwargs, **cfg), lanes)


def roll(env, steps, seeds=None):
    env.reset(seeds or list(range(env.lanes)))
    outs = []
    for _ in range(steps):
        env.send(np.ones(env.lanes, int))
        outs.append(env.recv())
    return outs


def test_a_raise_cuts_the_episode_and_the_lane_goes_on():
    env = faulty(kwargs={"raise_at": 8, "length": 5})
    outs = roll(env, 30)
    # 5 steps, reset, 2 steps, failure at the 8th step of the instance's life; then the new instance does the same.
    assert [t for t, out in enumerate(outs) if out.aborted[0]] == [8, 17, 26]
    assert [t for t, out in enumerate(outs) if out.last[0]] == [4, 13, 22]
    cut = outs[8]
    assert (cut.reward[0], cut.discount[0], cut.raw_reward[0], cut.last[0]) == (0, 0, 0, False)
    assert outs[9].discount[0] == 1 and env.faults() == 3
    assert not np.array_equal(outs[8].obs["obs"], outs[17].obs["obs"])  # every rebuild has a seed of its own


def test_failures_are_reproducible():
    one, other = (roll(faulty(2, kwargs={"raise_at": 8, "length": 5}), 30) for _ in range(2))
    assert all(np.array_equal(a.obs["obs"], b.obs["obs"]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("raise_at", [0, 3])
def test_endless_failure_stops_with_the_first_hand_traceback(raise_at):
    with pytest.raises(EnvFault, match=rf"(?s)toy/Faulty-v0 failed 3 times in lane 0.*set to fail at step {raise_at}"):
        roll(faulty(max_faults=3, kwargs={"raise_at": raise_at}), 50)


class OldGym(Tape):
    """Written for Gym before 0.26, as far as told."""

    def __init__(self, old="step", at=1):
        super().__init__([[(1, F, F)] * 9] * 99)
        self.old, self.at = old, at

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return (obs, reward, terminated, info) if self.old == "step" and self.t >= self.at else (
            None if self.old == "nothing" else (obs, reward, terminated, truncated, info))

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs if self.old == "reset" else (obs, info)


class OldSeed(OldGym):
    def reset(self):
        return np.zeros(2, np.float32)


class Peek(gymnasium.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, info


gymnasium.register("OldGym-v0", entry_point=OldGym)


@pytest.mark.parametrize("cfg, words", [
    ({"kwargs": {"old": "step"}}, "terminated, truncated, info.*a tuple of 4"),
    ({"kwargs": {"old": "step"}, "wrappers": [f"{__name__}:Peek"]}, "terminated, truncated, info.*a tuple of 4"),
    ({"id": "OldGym-v0", "wrappers": [f"{__name__}:Peek"]}, "terminated, truncated, info.*a tuple of 4"),
    ({"kwargs": {"old": "nothing"}}, "step must return.*a NoneType"),
    ({"kwargs": {"old": "reset"}}, "reset must return.*a ndarray"),
    ({"id": f"{__name__}:OldSeed"}, r"reset must take a seed, as in reset\(self, \*, seed=None"),
])
def test_an_environment_for_the_old_gym_is_told_from_a_failing_one(cfg, words, caplog):
    cfg = EnvConfig(**{"id": f"{__name__}:OldGym", "max_episode_steps": 9, **cfg})
    with pytest.raises(UserError, match=rf"{cfg.id} does not implement the Gymnasium API: .*{words}.*qfleet check-env"):
        roll(make(cfg, 2), 3)
    assert not caplog.records, "it was not rebuilt repeatedly"


def test_a_wrong_answer_in_some_corner_is_a_failure_like_others():
    env = make(EnvConfig(id=f"{__name__}:OldGym", kwargs={"at": 3}, max_episode_steps=9), 1)
    with pytest.raises(EnvFault, match="failed 5 times"):
        roll(env, 50)
    assert env.faults() == 5


def test_a_rebuild_that_fails_counts_too():
    built = []

    def build():
        if built:
            raise OSError("the licence server is gone")
        built.append(Tape([[]]))
        return built[0]

    lanes = GymLanes(build, EnvConfig(id="tape", max_faults=4), 1, ImageFormat(), EpisodeRules(9))
    lanes.reset([0])
    lanes.send(np.array([0]))
    with pytest.raises(EnvFault, match=r"failed 4 times(.|\n)*licence server"):
        lanes.recv()  # the empty tape raises


@pytest.mark.parametrize("kind", ["nan_at", "nan_reward_at"])
def test_nan_is_an_error_with_lane_and_step(kind):
    with pytest.raises(BadOutput, match=r"toy/Faulty-v0 gave .* in lane 0 at step 4 .*on_nan=drop_episode"):
        roll(faulty(2, kwargs={kind: 4}), 5)


@pytest.mark.parametrize("reward, words", [(1e300, r"1e\+300, which float32 cannot hold,"),
                                           (-1e39, r"-1e\+39, which .*,"),
                                           (10**400, "inf"), (-np.inf, "-inf")])
def test_a_reward_that_float32_cannot_hold_is_an_error_with_its_value(reward, words):
    lanes = tape_lanes([[(1, F, F), (reward, F, F)]])[1]
    with pytest.raises(BadOutput, match=rf"gave the reward {words} in lane 0 at step 2 .*on_nan=drop_episode"):
        play(lanes, [0], [0, 0])


def test_a_large_reward_may_be_clipped():
    rows = play(tape_lanes([[(1e300, F, F), (-1e300, T, F)]], clip=True)[1], [0], [0, 0])
    assert [row[1] for row in rows[1:]] == [1, -1] and [row[4] for row in rows[1:]] == [1e300, -1e300]


@pytest.mark.parametrize("reward, words", [
    (np.ones(1), r"a ndarray of shape \(1,\)"), ("1", "a str"), (None, "a NoneType"), ([1.0], "a list"),
    (1j, "a complex"), (np.complex64(1), "a complex64")])
@pytest.mark.parametrize("at", [0, 3])
def test_a_reward_that_is_no_number_is_the_users_to_mend_whenever_it_comes(reward, words, at):
    _, lanes = tape_lanes([[*[(1, F, F)] * at, (reward, F, F)]])
    with pytest.raises(UserError, match=rf"(?s)the reward as one number, not {words}"):
        play(lanes, [0], [0] * (at + 1))
    assert lanes.faults() == 0


@pytest.mark.parametrize("reward", [True, 2, np.float32(2), np.int8(2), np.bool_(True), np.array(2.0),
                                    torch.tensor(2.0), Fraction(4, 2)])
def test_whatever_is_one_number_is_a_reward(reward):
    rows = play(tape_lanes([[(reward, T, F)]])[1], [0], [0])
    assert rows[1][1] == float(reward)


@pytest.mark.parametrize("kind", ["nan_at", "nan_reward_at"])
def test_nan_can_drop_the_episode(kind):
    env = faulty(kwargs={kind: 8, "length": 5}, on_nan="drop_episode")
    outs = roll(env, 12)
    assert [t for t, out in enumerate(outs) if out.aborted[0]] == [8] and env.faults() == 1
    assert all(np.isfinite(out.obs["obs"]).all() and np.isfinite(out.reward).all() for out in outs)
    assert (outs[8].raw_reward[0], outs[8].discount[0]) == (0, 0) and outs[9].discount[0] == 1


def test_nan_in_the_final_observation_is_no_end():
    env = faulty(kwargs={"nan_at": 5, "length": 5}, on_nan="drop_episode")
    outs = roll(env, 6)
    assert outs[4].aborted[0] and not outs[4].last[0]
    assert outs[5].discount[0] == 1  # the next action is played, not ignored


def test_nan_in_every_final_observation_ends_the_run():
    with pytest.raises(EnvFault, match="failed 5 times in lane 0 without completing an episode"):
        roll(faulty(kwargs={"nan_at": 5, "length": 5}, on_nan="drop_episode"), 50)


def test_seeds_of_rebuilds_follow_from_the_last_reset():
    cfg = {"kwargs": {"raise_at": 8, "length": 5}}
    env = faulty(2, **cfg)
    roll(env, 30)
    for lane in env._lanes:
        lane.env = env._build()  # as after a resume: nothing but the count of rebuilds is left of what was before
    again, fresh = roll(env, 30, [5, 6]), roll(faulty(2, **cfg), 30, [5, 6])
    assert any(out.aborted.any() for out in fresh) and env.faults() == 2 * 2 * 3
    assert all(np.array_equal(a.obs["obs"], b.obs["obs"]) for a, b in zip(again, fresh, strict=True))


def test_nan_for_ever_ends_the_run():
    with pytest.raises(EnvFault, match="failed 5 times"):
        faulty(kwargs={"nan_at": 0}, on_nan="drop_episode").reset([0])


def test_wrong_shape_stops_with_both_shapes():
    with pytest.raises(BadOutput, match=r"lane 0, step 3.*\(4,\).*\(5,\)"):
        roll(faulty(kwargs={"shape_at": 3}), 5)


def test_an_env_that_never_ends_is_truncated_by_config():
    outs = roll(faulty(kwargs={"length": 0}, max_episode_steps=20), 45)
    assert [t for t, out in enumerate(outs) if out.last[0]] == [19, 40]
    assert all(outs[t].discount[0] == 1 for t in (19, 40))


def test_an_env_that_has_no_limit_is_truncated_where_it_must_end(caplog):
    _warn_truncated.cache_clear()
    with caplog.at_level(logging.WARNING, "qfleet.envs"):
        outs = roll(faulty(kwargs={"length": 0}, unlimited_episode_steps=20), 45)
    assert [t for t, out in enumerate(outs) if out.last[0]] == [19, 40]
    assert all(outs[t].discount[0] == 1 for t in (19, 40))
    assert len(caplog.records) == 1 and "truncated after 20 steps" in caplog.text
    assert "env.max_episode_steps" in caplog.text and "eval.max_episode_steps" in caplog.text
    outs = roll(faulty(kwargs={"length": 0}, unlimited_episode_steps=20, max_episode_steps=30), 45)
    assert [t for t, out in enumerate(outs) if out.last[0]] == [29], "a limit of its own is the one that counts"
    assert len(caplog.records) == 1


def test_an_environment_without_a_limit_whose_episodes_end_is_not_warned_of(caplog):
    _warn_truncated.cache_clear()
    with caplog.at_level(logging.WARNING, "qfleet.envs"):
        outs = roll(faulty(kwargs={"length": 9}), 45)
    assert sum(bool(out.last[0]) for out in outs) == 4 and not caplog.records


def test_null_lets_episodes_go_on(caplog):
    with caplog.at_level(logging.WARNING, "qfleet.envs"):
        outs = roll(faulty(kwargs={"length": 0}, unlimited_episode_steps=None), 45)
    assert not any(out.last[0] for out in outs) and not caplog.records


class Liar(Tape):
    observation_space = spaces.Box(0, 1, (2,), np.float32)


def test_observations_out_of_bounds_are_warned_of_once(caplog):
    lanes = GymLanes(lambda: Liar([[(0, F, F)] * 9]), EnvConfig(id="liar"), 1, ImageFormat(), EpisodeRules(99))
    with caplog.at_level(logging.WARNING, "qfleet.envs"):
        play(lanes, [0], [0] * 5)
    assert len(caplog.records) == 1 and "0..2" in caplog.text


class Film(gymnasium.Env):
    """Frames that count 1, 2, 3 ... in every episode of four steps."""

    observation_space = spaces.Box(0, 255, (3, 3), np.uint8)
    action_space = spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        self.t = 1
        return np.full((3, 3), 1, np.uint8), {}

    def step(self, action):
        self.t += 1
        return np.full((3, 3), self.t, np.uint8), 0, self.t == 4, False, {}


def test_frames_are_stacked_with_zeros_before_the_first():
    lanes = GymLanes(Film, EnvConfig(id="film"), 2, ImageFormat(stack=3), EpisodeRules(99))
    assert lanes.spec.observation["obs"].shape == (3, 3, 3) and lanes.spec.observation["obs"].stack == 3
    seen = [lanes.reset([0, 1])["obs"][1, :, 0, 0].tolist()]
    for _ in range(5):
        lanes.send(np.zeros(2, int))
        seen.append(lanes.recv().obs["obs"][1, :, 0, 0].tolist())
    assert seen == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 0, 1], [0, 1, 2]]


class Blind(Tape):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")


def test_a_missing_drawing_library_is_named():
    lanes = GymLanes(lambda: Blind([[]]), EnvConfig(id="blind"), 1, ImageFormat(), EpisodeRules(9))
    with pytest.raises(UserError, match=r"qfleet\[video\]"):
        lanes.render()


def test_lanes_do_not_mix():
    """Each lane alone behaves as it does in company."""
    cfg = {"kwargs": {"raise_at": 8, "length": 5}}
    company = roll(faulty(3, **cfg), 25, [5, 6, 7])
    for lane, seed in enumerate([5, 6, 7]):
        alone = roll(faulty(1, **cfg), 25, [seed])
        for a, b in zip(company, alone, strict=True):
            assert (a.obs["obs"][lane] == b.obs["obs"][0]).all()
            assert (a.raw_reward[lane], a.last[lane], a.aborted[lane]) == (b.raw_reward[0], b.last[0], b.aborted[0])


def test_failures_are_heard_of_but_never_flood(caplog):
    env = make(EnvConfig(id="toy/Faulty-v0", kwargs={"raise_at": 3, "length": 2}, max_faults=99), 1)
    env.reset([0])
    with caplog.at_level("WARNING"):
        while env.faults() < 9:
            env.send(np.zeros(1, np.int64))
            env.recv()
    lines = [record.getMessage() for record in caplog.records if "was rebuilt" in record.getMessage()]
    assert [int(line.split("(")[1].split()[0]) for line in lines] == [1, 2, 4, 8]
    env.close()


def test_an_environment_that_cannot_draw_says_so():
    class Undrawn(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

    env = GymLanes(Undrawn, EnvConfig(id="my:Undrawn"), 1, ImageFormat(), EpisodeRules(10))
    env.reset([0])
    with pytest.raises(UserError, match=r"my:Undrawn has no render\(\)"):
        env.render()
