"""What users of Stable-Baselines3 do every day, written for qfleet. Each test is named after what the user does."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformReward
from run_kit import TINY

import qfleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SMALL = [pair for pair in TINY if not pair.startswith(("env.", "run.threads"))]
"""Overrides that make a run take half a second, where the test is not about settings."""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that the tests which need one share."""
    root = str(tmp_path_factory.mktemp("runs"))
    return qfleet.train("CartPole-v1", SMALL, total_steps=200, agent={"hidden": [16]}, run={"root": root}).directory


def test_train_by_id():
    """DQN("MlpPolicy", "CartPole-v1").learn(200)"""
    result = qfleet.train("CartPole-v1", SMALL, total_steps=200)
    assert result.reason == "total_steps" and result.steps >= 200 and result.updates > 20


def test_train_on_an_environment_object():
    """DQN("MlpPolicy", env).learn(200)"""
    env = gymnasium.make("CartPole-v1", max_episode_steps=5)
    result = qfleet.train(env, SMALL, total_steps=200)
    assert result.best == 5 and result.episodes >= 200 // 5 - 8


def test_train_on_a_lambda():
    """make_vec_env(lambda: gym.make("CartPole-v1"), n_envs=3)"""
    made = []
    qfleet.train(env=lambda: made.append(1) or gymnasium.make("CartPole-v1"), overrides=["env.lanes=3", *SMALL],
                 total_steps=200)
    assert len(made) >= 3


def test_train_on_a_class_with_wrappers():
    """DQN("MlpPolicy", TransformReward(MyEnv(), lambda reward: 2 * reward))"""
    class Steps(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 1, (1,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.age = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.age += 1
            return np.zeros(1, np.float32), 1.0, self.age == 10, False, {}

    result = qfleet.train(env=Steps, wrappers=[lambda env: TransformReward(env, lambda reward: 2 * reward)],
                          overrides=SMALL, total_steps=200)
    assert result.best == 20


def test_set_hyper_parameters_by_keyword():
    """DQN(policy, env, learning_rate=3e-4, batch_size=16, buffer_size=5000, gamma=0.9, seed=7)"""
    run = qfleet.Run("CartPole-v1", agent={"algo": "c51", "gamma": 0.9, "hidden": [16]}, seed=7,
                     learner={"learning_rate": 3e-4, "batch_size": 16}, replay={"capacity": 5_000})
    run.close()
    config = run.config
    assert (config.agent.algo, config.agent.gamma, config.seed, config.replay.capacity) == ("c51", 0.9, 7, 5_000)
    assert (config.learner.learning_rate, config.learner.batch_size) == (3e-4, 16)


class Scaled(torch.nn.Module):
    """An encoder: {leaf: [B, 4]} -> features [B, width]."""

    def __init__(self, observation, width=8):
        super().__init__()
        self.layer = torch.nn.Linear(observation["obs"].shape[0], width)

    def forward(self, obs):
        return self.layer(obs["obs"]).relu()


def halved(progress):
    return 1.0 if progress < 0.5 else 0.5


def test_use_a_feature_extractor():
    """policy_kwargs=dict(features_extractor_class=Scaled, features_extractor_kwargs=dict(width=6))"""
    result = qfleet.train("CartPole-v1", SMALL, total_steps=200,
                          agent={"encoder": Scaled, "encoder_kwargs": {"width": 6}, "hidden": [16]})
    network = qfleet.load(result.directory, trust=True).network
    assert [module.layer.out_features for module in network.modules() if isinstance(module, Scaled)] == [6]


def test_use_another_optimizer_with_a_schedule():
    """DQN(policy, env, learning_rate=lambda left: ..., policy_kwargs=dict(optimizer_class=torch.optim.NAdam))"""
    rates = []
    qfleet.train("CartPole-v1", SMALL, total_steps=400, sinks=[lambda record: rates.append(record)],
                 learner={"optimizer": torch.optim.NAdam, "learning_rate": 1e-3, "schedule": halved})
    found = [record["train/learning_rate"] for record in rates if "train/learning_rate" in record]
    assert found[0] == pytest.approx(1e-3) and found[-1] == pytest.approx(5e-4)


def test_export_a_policy_for_another_runtime(trained, tmp_path):
    """torch.onnx.export(OnnxableSB3Policy(model.policy), ...)"""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(qfleet.export(trained, tmp_path / "policy.onnx"))
    obs = np.array([[0.1, 0.2, -0.1, 0.3], [0.0, -1.0, 0.1, 0.0]], np.float32)
    assert session.run(["action"], {"obs": obs})[0].tolist() == qfleet.load(trained).act(obs).tolist()


def test_mistype_a_hyper_parameter():
    """A TypeError there; here the key that was meant."""
    with pytest.raises(qfleet.UserError, match=r"did you mean learner\.learning_rate"):
        qfleet.train("CartPole-v1", learner={"learning_rat": 3e-4})


def test_predict(trained):
    """model.predict(obs, deterministic=True)"""
    agent, env = qfleet.load(trained), gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    assert env.action_space.contains(agent.act(obs))
    assert agent.act(np.stack([obs] * 3)).shape == (3,)


def test_save_and_load(trained):
    """model.save("policy"); DQN.load("policy")"""
    obs = np.array([0.1, 0.2, -0.1, 0.3], np.float32)
    qfleet.export(trained, "policy")
    assert np.array_equal(qfleet.load("policy").q_values(obs), qfleet.load(trained).q_values(obs))


def test_evaluate_a_policy(trained):
    """evaluate_policy(model, env, n_eval_episodes=5, return_episode_rewards=True)"""
    result = qfleet.evaluate(trained, episodes=5)
    assert len(result.returns) == len(result.lengths) == 5
    assert (result.mean_reward, result.std_reward) == (np.mean(result.returns), np.std(result.returns))


def test_continue_training():
    """model.learn(100, reset_num_timesteps=False)"""
    first = qfleet.train("CartPole-v1", SMALL, total_steps=100)
    assert qfleet.resume(first.directory, total_steps=200).steps >= 200


def test_log_a_value_from_a_callback():
    """self.logger.record("success", x) in BaseCallback._on_step"""
    class Success(qfleet.Callback):
        def on_episode(self, run, episode):
            run.log({"success": episode.length > 15})

    records = []
    qfleet.train("CartPole-v1", SMALL, total_steps=200, callbacks=[Success()], sinks=[records.append])
    assert any(0 <= record["success"] <= 1 for record in records if "success" in record)


def test_stop_training_from_a_callback():
    """return False in BaseCallback._on_step"""
    class Enough(qfleet.Callback):
        def on_step(self, run):
            if run.episodes >= 5:
                run.stop()

    result = qfleet.train("CartPole-v1", SMALL, total_steps=100_000, callbacks=[Enough()])
    assert result.reason == "stopped" and 5 <= result.episodes <= 12


def test_stop_at_a_reward_threshold():
    """StopTrainingOnRewardThreshold(reward_threshold=1)"""
    settings = {"episodes": 2, "period_steps": 100}
    pairs = [pair for pair in SMALL if not pair.startswith(("stop_at", "eval"))]
    assert qfleet.train("CartPole-v1", pairs, stop_at=1.0, eval=settings).reason == "stop_at"


def test_prune_a_trial_after_a_bad_evaluation():
    """TrialEvalCallback of Optuna's examples"""
    class Prune(qfleet.Callback):
        def on_evaluation(self, run, evaluation):
            if evaluation.mean_reward < 1_000:
                run.stop()

    pairs = [pair for pair in SMALL if not pair.startswith("eval")]
    result = qfleet.train("CartPole-v1", pairs, eval={"episodes": 1, "period_steps": 100}, callbacks=[Prune()])
    assert result.reason == "stopped" and result.steps < 120


def test_look_into_the_replay_buffer_and_the_network():
    """model.replay_buffer.sample(8); model.q_net(obs)"""
    with qfleet.Run("CartPole-v1", SMALL, total_steps=1_000) as run:
        run.step(200)
        batch = run.replay.sample(8)
        assert batch.obs(0)["obs"].shape == (8, 4)
        assert run.network(batch.obs(0)).shape == run.agent.q_values(batch.obs(0)["obs"].numpy()).shape == (8, 2)


def test_show_the_progress(capsys):
    """model.learn(200, progress_bar=True)"""
    qfleet.train("CartPole-v1", SMALL, total_steps=200, progress=True)
    assert "/ 200 steps  100%" in capsys.readouterr().err
