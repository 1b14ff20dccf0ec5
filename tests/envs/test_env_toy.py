"""The toys: their best returns are what their docstrings say."""

import gymnasium
import numpy as np
import pytest

from qfleet.envs import EnvConfig, make
from qfleet.envs.toy import LQR, Catch, Chain, DeepSea, Faulty, HiddenCartPole, MemoryCue, TMaze


def play(env, policy, seed):
    obs, _ = env.reset(seed=seed)
    ret, steps, over = 0.0, 0, False
    while not over:
        assert env.observation_space.contains(obs)
        obs, reward, over, _, _ = env.step(policy(obs))
        ret, steps = ret + reward, steps + 1
    assert env.observation_space.contains(obs)
    return ret, steps


def follow(board):
    ball = int(board[:-1].sum(0).argmax()) if board[:-1].any() else int(board[-1].argmax())
    paddle = int(board[-1].argmax())
    return 1 + int(np.sign(ball - paddle))


def test_catch_is_won_by_following_the_ball():
    assert all(play(Catch(), follow, seed) == (1.0, 9) for seed in range(20))


def test_catch_random_return():
    rng = np.random.default_rng(0)
    returns = [play(Catch(), lambda obs: int(rng.integers(3)), seed)[0] for seed in range(1000)]
    assert abs(np.mean(returns) + 0.6) < 4 * 0.8 / np.sqrt(1000)


def test_catch_pictures_show_the_board():
    board, picture = Catch(), Catch(pixels=True, side=20)
    for env in (board, picture):
        env.reset(seed=3)
    for action in (0, 2, 2, 1):
        seen, shown = board.step(action)[0], picture.step(action)[0]
        assert shown.dtype == np.uint8
        assert (shown[::2, ::4] == seen * 255).all() and (shown[1::2, 3::4] == seen * 255).all()
    assert board.render().shape == (84, 84, 3)


@pytest.mark.parametrize("mapping_seed", [None, 5])
def test_deep_sea_pays_only_the_straight_dive(mapping_seed):
    env = DeepSea(size=6, mapping_seed=mapping_seed)
    right = env.right.copy()
    ret, steps = play(env, lambda obs: right[np.unravel_index(obs.argmax(), obs.shape)], 0)
    assert ret == pytest.approx(0.99) and steps == 6
    left, _ = play(env, lambda obs: 1 - right[np.unravel_index(obs.argmax(), obs.shape)], 0)
    assert left == 0
    if mapping_seed is not None:
        assert 0 < right.mean() < 1


def test_memory_cue_needs_memory():
    cues = set()

    def remember():
        cue = []
        def policy(obs):
            if obs[0]:
                cue.append(int(obs[0] > 0))
            cues.add(cue[0])
            return cue[0]
        return policy

    assert all(play(MemoryCue(delay=4), remember(), seed) == (1.0, 5) for seed in range(10)) and cues == {0, 1}
    env = MemoryCue(delay=4)
    env.reset(seed=0)
    last = [env.step(0)[0].tolist() for _ in range(4)]
    assert [obs[0] for obs in last] == [0] * 4 and [obs[1] for obs in last] == [0, 0, 0, 1]
    assert np.mean([play(MemoryCue(), lambda obs: 0, seed)[0] for seed in range(400)]) == pytest.approx(0, abs=0.2)


def test_t_maze_needs_memory():
    signs = []

    def remember(obs):
        signs.extend([obs[0]] if obs[1] else [])
        return 0 if not obs[2] else (1 if signs[-1] > 0 else 2)

    assert all(play(TMaze(length=5), remember, seed) == (1.0, 6) for seed in range(10)) and set(signs) == {-1, 1}
    blind = [play(TMaze(length=5), lambda obs: 1 if obs[2] else 0, seed)[0] for seed in range(400)]
    assert np.mean(blind) == pytest.approx(0.5, abs=0.1)
    env = TMaze(length=2)
    env.reset(seed=0)
    assert [env.step(2)[3] for _ in range(8)] == [False] * 7 + [True], "who never arrives is stopped"


def test_hidden_cartpole_is_cartpole_without_velocities():
    hidden, whole = HiddenCartPole(), gymnasium.make("CartPole-v1").unwrapped
    assert np.array_equal(hidden.reset(seed=3)[0], whole.reset(seed=3)[0][[0, 2]])
    for action in (0, 1, 1, 0):
        seen, shown = whole.step(action), hidden.step(action)
        assert np.array_equal(shown[0], seen[0][[0, 2]]) and shown[1:4] == seen[1:4]
        assert hidden.observation_space.contains(shown[0])


@pytest.mark.parametrize("length, gamma", [(2, 0.9), (5, 0.9), (7, 0.99)])
def test_chain_values_are_the_fixed_point_of_bellman(length, gamma):
    env = Chain(length)
    q = np.zeros((length - 1, 2))
    for _ in range(2000):
        new = np.zeros_like(q)
        for state in range(length - 1):
            for action in range(2):
                env.state = state
                obs, reward, over, _, _ = env.step(action)
                new[state, action] = reward + (0 if over else gamma * q[int(obs.argmax())].max())
        q = new
    np.testing.assert_allclose(Chain.optimal_q(length, gamma), q, atol=1e-9)
    assert play(env, lambda obs: 1, 0) == (1.0, length - 1)


def test_faulty_is_sane_until_told_otherwise():
    assert play(Faulty(length=7), lambda obs: 1, 0) == (7.0, 7)
    with pytest.raises(TypeError, match="crash_at"):
        Faulty(crash_at=3)


def test_the_best_return_of_lqr_is_that_of_the_best_linear_policy():
    """Against a search: no gain does better, and the best one does as well."""
    def returns(gain, length=20):
        env, total = LQR(length), 0.0
        env.reset(seed=3)
        start, over = env.x, False
        while not over:
            _, reward, terminated, over, _ = env.step(np.clip(-env.x @ gain, -2, 2)[None])
            total += reward
            assert not terminated
        return total / LQR.optimal_return(start, length)

    ratios = [returns(np.array([a, b])) for a in np.linspace(-0.5, 1, 16) for b in np.linspace(0.5, 2, 16)]
    assert 1 <= min(ratios) < 1.001 and returns(np.zeros(2)) > 2
    assert LQR.optimal_return(np.array([1.0, 0]), 1) == -1


@pytest.mark.parametrize("id", ["toy/Catch-v0", "toy/DeepSea-v0", "toy/MemoryCue-v0", "toy/Chain-v0", "toy/Faulty-v0",
                                "toy/TMaze-v0", "toy/HiddenCartPole-v0", "toy/LQR-v0"])
def test_every_toy_is_made_by_id_and_is_deterministic(id):
    traces = []
    for _ in range(2):
        env = make(EnvConfig(id=id), 3)
        rng = np.random.default_rng(0)
        trace = [env.reset([1, 2, 3])["obs"]]
        for _ in range(60):
            env.send(rng.integers(env.spec.num_actions, size=3) if env.spec.box is None else rng.uniform(-1, 1, (3, 1)))
            trace.append(env.recv().obs["obs"])
        traces.append(np.stack(trace))
    assert np.array_equal(*traces)
