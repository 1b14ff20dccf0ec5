"""Vector environments of the user: what the agent sees equals plain lanes, and what cannot be used is refused."""

import logging
from functools import partial

import numpy as np
import pytest
import vector_kit as kit
from fake_envpool import NewPool, OldPool
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from qfleet.config.objects import reference_to
from qfleet.core.errors import BadOutput, EnvFault, UserError
from qfleet.envs import EnvConfig, make, make_space_adapter
from qfleet.envs.check import check
from qfleet.envs.lanes import GymLanes
from qfleet.envs.vector import VectorEnvLanes, _warn_mode_unknown

METRICS = ["success", "sum(cost)", "mean(bonus)", "min(stats.left)"]
FIELDS = ("reward", "discount", "last", "raw_reward", "aborted")


def lanes_of(target, lanes=3, **settings):
    return make(EnvConfig(id=target if isinstance(target, str) else reference_to(target), **settings), lanes)


def roll(env, steps=60, seeds=None, seed=0):
    """First observation and results of random actions."""
    rng = np.random.default_rng(seed)
    rows = [env.reset(seeds or [100 + lane for lane in range(env.lanes)])]
    for _ in range(steps):
        env.send(rng.integers(env.spec.num_actions, size=env.lanes) if env.spec.box is None
                 else rng.uniform(-1, 1, (env.lanes, *env.spec.box.shape)).astype(np.float32))
        rows.append(env.recv())
    return rows


def assert_equal(one, other):
    assert len(one) == len(other)
    for name, leaf in one[0].items():
        np.testing.assert_array_equal(leaf, other[0][name])
    for a, b in zip(one[1:], other[1:], strict=True):
        for field in FIELDS:
            left, right = getattr(a, field), getattr(b, field)
            np.testing.assert_array_equal(left, right, field)
            assert left.dtype == right.dtype
        assert a.obs.keys() == b.obs.keys() and a.info == b.info
        for name, leaf in a.obs.items():
            np.testing.assert_array_equal(leaf, b.obs[name])
            assert leaf.dtype == b.obs[name].dtype


@pytest.mark.parametrize("kind", [kit.Walk, kit.DictWalk, kit.PairWalk, kit.GearWalk, kit.ContinuousWalk])
def test_a_vector_environment_is_plain_lanes_to_the_bit(kind):
    plain, vector = lanes_of(kind, info_metrics=METRICS), lanes_of(
        lambda num_envs: SyncVectorEnv([kind] * num_envs), info_metrics=METRICS)
    assert isinstance(plain, GymLanes) and isinstance(vector, VectorEnvLanes)
    rows = roll(plain)
    assert_equal(rows, roll(vector))
    assert any(row.last.any() for row in rows[1:]) and plain.spec.observation == vector.spec.observation
    assert (plain.spec.num_actions, plain.spec.box) == (vector.spec.num_actions, vector.spec.box)
    assert any(row.info for row in rows[1:])


@pytest.mark.parametrize(("settings", "field"), [({"clip_rewards": True}, "reward"), ({"stack": 3}, "obs")])
def test_preprocessing_is_that_of_plain_lanes(settings, field):
    plain, vector = lanes_of(kit.DictWalk, **settings), lanes_of(
        lambda num_envs: SyncVectorEnv([kit.DictWalk] * num_envs), **settings)
    assert_equal(roll(plain), roll(vector))


def test_processes_of_their_own_give_the_same():
    vector = lanes_of(lambda num_envs: AsyncVectorEnv([kit.DictWalk] * num_envs), 2, info_metrics=METRICS)
    assert_equal(roll(lanes_of(kit.DictWalk, 2, info_metrics=METRICS)), roll(vector))
    vector.send(np.zeros(2, int))  # a step in flight is forgotten
    assert_equal(roll(lanes_of(kit.DictWalk, 2, info_metrics=METRICS)), roll(vector))
    vector.close()
    vector.close()


def test_environments_beyond_the_lanes_change_nothing():
    plain, vector = lanes_of(kit.Walk, 2, info_metrics=METRICS), lanes_of(kit.four, 2, info_metrics=METRICS)
    assert_equal(roll(plain), roll(vector))


def test_wrappers_of_a_vector_environment_are_stepped():
    plain, vector = lanes_of(kit.asynchronous, 2), lanes_of(kit.doubled, 2)
    for one, other in zip(roll(plain)[1:], roll(vector)[1:], strict=True):
        np.testing.assert_array_equal(2 * one.raw_reward, other.raw_reward)
    plain.close()
    vector.close()


def test_gymnasiums_statistics_of_episodes_are_metrics():
    vector = lanes_of(lambda num_envs: RecordEpisodeStatistics(kit.sync(num_envs)), info_metrics=["episode.r"])
    total, found = np.zeros(3), []
    for row in roll(vector)[1:]:
        total += row.raw_reward
        for lane, info in row.info.items():
            found.append((info["episode.r"], total[lane]))
        total[row.last] = 0
    assert len(found) > 5
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


def test_a_key_of_info_may_begin_with_an_underscore():
    class Hidden(kit.Walk):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info | {"_price": info["cost"]}

    metrics = ["sum(_price)", "_price"]
    rows = roll(lanes_of(lambda num_envs: SyncVectorEnv([Hidden] * num_envs), info_metrics=metrics))
    assert_equal(roll(lanes_of(Hidden, info_metrics=metrics)), rows)
    assert {name for row in rows[1:] for info in row.info.values() for name in info} == {"_price_sum", "_price"}


def test_the_info_of_the_last_step_is_that_of_the_environment():
    plain, vector = roll(lanes_of(kit.Walk)), roll(lanes_of(kit.sync))
    for one, other in zip(plain[1:], vector[1:], strict=True):
        assert one.final_info == other.final_info


@pytest.mark.parametrize(("target", "settings", "message"), [
    (kit.same_step, {}, r"has autoreset_mode=.*SAME_STEP: create it with AutoresetMode.NEXT_STEP"),
    (kit.four, {"lanes": 5}, r"four has 4 environments, and 5 are needed: set env.lanes and eval.lanes to at most 4, "
                             "or pass a function with a parameter num_envs"),
    (kit.sync, {"wrappers": ["gymnasium.wrappers:TimeAwareObservation"]}, "sync is a vector environment; wrap the"),
    (kit.sync, {"max_episode_steps": 9}, "max_episode_steps=9: .* limit episodes where it is created"),
    (kit.sync, {"on_nan": "drop_episode"}, "on_nan=drop_episode: .* cannot be rebuilt"),
])
def test_what_cannot_be_used_is_refused_with_a_remedy(target, settings, message):
    with pytest.raises(UserError, match=message):
        lanes_of(target, **{"lanes": 3} | {name: value for name, value in settings.items()})


def test_one_that_does_not_say_when_it_resets_is_taken_with_a_warning_and_one_seed(caplog):
    _warn_mode_unknown.cache_clear()
    made = []
    vector = lanes_of(lambda num_envs: made.append(kit.Silent(num_envs)) or made[-1])
    roll(vector, 3, seeds=[5 * (2**31 - 1) + 7, 8, 9])
    assert made[0].seeds == [7] and caplog.text.count("autoreset_mode") == 1


@pytest.mark.parametrize(("target", "kind", "message"), [
    (partial(SyncVectorEnv, [kit.Failing] * 3), EnvFault, "failed in step.*cannot be rebuilt(?s:.*)gripper is stuck"),
    (partial(SyncVectorEnv, [lambda: kit.Broken("reward")] * 3), BadOutput, "gave the rewards .*inf"),
    (partial(SyncVectorEnv, [lambda: kit.Broken("obs")] * 3), BadOutput, "NaN or infinity in lane 0, 1, 2"),
])
def test_failures_name_the_environment_and_the_cause(target, kind, message):
    with pytest.raises(kind, match=message):
        roll(lanes_of(target))


def test_order_of_calls_and_actions_are_checked():
    lanes = lanes_of(kit.sync)
    lanes.reset([0, 1, 2])
    with pytest.raises(RuntimeError, match="without send"):
        lanes.recv()
    for action in (3, -1):
        with pytest.raises(ValueError, match=rf"actions 0..2, not {action}"):
            lanes.send(np.array([action] * 3))
    lanes.send(np.zeros(3, int))
    with pytest.raises(RuntimeError, match="twice"):
        lanes.send(np.zeros(3, int))
    assert lanes.faults() == 0


@pytest.mark.parametrize("pool", [OldPool, NewPool])
class TestEnvPool:
    def test_it_is_seeded_when_it_is_created_and_gives_what_plain_lanes_give(self, pool):
        made = []

        def create(num_envs, seed):
            made.append(pool(num_envs, seed=seed, max_steps=19))
            return made[-1]

        vector = lanes_of(create)
        rows = roll(vector, seeds=[5, 6, 7])
        assert_equal(rows, roll(lanes_of("CartPole-v1", max_episode_steps=19), seeds=[5, 6, 7]))
        assert any(row.last.any() for row in rows[1:])
        assert_equal(roll(vector, seeds=[5, 6, 7]), rows)  # another evaluation with the same seed
        assert [one.config["seed"] for one in made] == [0, 5, 5] and [one.closed for one in made] == [True, True, False]
        vector.send(np.zeros(3, int))  # a step in flight is received before the pool is closed
        vector.close()
        assert made[-1].closed

    def test_a_seed_of_its_own_is_kept(self, pool, recwarn):
        vector = lanes_of(lambda num_envs: pool(num_envs, seed=5, max_steps=19))
        roll(vector, seeds=[1, 2, 3])
        first = roll(lanes_of(lambda num_envs: pool(num_envs, seed=5, max_steps=19)), seeds=[9, 9, 9])
        assert_equal(first, roll(lanes_of("CartPole-v1", max_episode_steps=19), seeds=[5, 6, 7]))
        assert not [warning for warning in recwarn if "EnvPool seeds" in str(warning.message)]

    def test_images_are_stacked_and_lost_lives_are_terminal(self, pool):
        vector = lanes_of(lambda num_envs: pool(num_envs, image=True, max_steps=25), 2, stack=4, life_loss=True,
                          info_metrics=["elapsed_step", "lives"])
        assert vector.spec.observation["obs"].shape == (4, 24, 24) and vector.spec.observation["obs"].stack == 4
        rows = roll(vector, 80)[1:]
        lengths = np.zeros(2, int)
        for row, before in zip(rows, [None, *rows], strict=False):
            fresh = before.last if before is not None else np.zeros(2, bool)
            lengths = np.where(fresh, 0, lengths + 1)
            for lane in range(2):
                lost = lengths[lane] in (10, 20) and not fresh[lane]
                assert not lost or row.discount[lane] == 0
                assert fresh[lane] or lost or row.last[lane] or row.discount[lane] == 1
                if row.last[lane]:
                    assert row.info[lane] == {"elapsed_step": lengths[lane], "lives": 3 - lengths[lane] // 10}
        assert any((row.discount == 0).any() and not row.last.any() for row in rows)

    def test_batches_of_some_environments_are_refused(self, pool):
        with pytest.raises(UserError, match="returns batches of 2 of its 3 environments: leave batch_size out"):
            lanes_of(lambda num_envs: pool(num_envs, batch_size=2))

    def test_it_is_rendered_if_it_was_created_for_that(self, pool):
        def create(num_envs, render_mode=None):
            return pool(num_envs, render_mode=render_mode)

        cfg = EnvConfig(id=reference_to(create))
        with pytest.raises(UserError, match=r'create cannot be rendered: .*create it with render_mode="rgb_array"'):
            lanes_of(create).render()
        pytest.importorskip("pygame")
        env = make(cfg, 1, render=True)
        env.reset([0])
        assert env.render().shape[2] == 3


def test_an_envpool_in_a_gymnasium_wrapper():
    vector = lanes_of(lambda num_envs, seed: VectorWrapper(NewPool(num_envs, seed=seed, max_steps=19)))
    with pytest.warns(UserWarning, match="EnvPool seeds are fixed"):
        rows = roll(vector, seeds=[5, 6, 7])
    assert_equal(rows, roll(lanes_of("CartPole-v1", max_episode_steps=19), seeds=[5, 6, 7]))


def test_trained_agents_and_check_env_read_the_spaces_of_one_environment(monkeypatch):
    adapter = make_space_adapter(EnvConfig(id=reference_to(kit.sync)))
    obs, single = adapter.encode(np.zeros(2, np.float32))
    assert single and obs["obs"].shape == (1, 2) and adapter.actions.decode(0) == -1
    findings = check(EnvConfig(id=reference_to(kit.sync)))
    texts = [finding.text for finding in findings]
    assert "vector environment, num_envs=1" in texts
    assert {finding.level for finding in findings} == {"info"}, texts


def test_a_vector_environment_can_be_isolated():
    from qfleet.envs.isolated import make_isolated_env

    cfg = EnvConfig(id="vector_kit:sync", info_metrics=METRICS)
    env = make_isolated_env(cfg.model_dump(mode="json"), 2, 30, 2)
    try:
        assert_equal(roll(lanes_of(kit.Walk, 2, info_metrics=METRICS), 20), roll(env, 20))
    finally:
        env.close()


def test_spaces_that_no_agent_sees_close_the_environment(caplog):
    closed = []

    class Noted(SyncVectorEnv):
        def close_extras(self, **kwargs):
            closed.append(True)

    with pytest.raises(UserError):
        lanes_of(lambda: Noted([kit.Walk] * 2), 3)
    assert closed == [True]
    assert caplog.records == [] or all(record.levelno <= logging.WARNING for record in caplog.records)
