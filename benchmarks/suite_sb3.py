"""Stable-Baselines3's side of suite.py: DQN, or TD3 where actions are continuous.

Observations are converted as the library's users convert them. Of MiniGrid's Dict it sees the image alone, flattened
and not divided by 255, since its entries are small integers. Tuples are flattened, with categories one-hot. MinAtar's
boards are seen by the network of the MinAtar paper (a convolution of 16 filters of 3 x 3, 128 hidden units), with
default settings as well: the library's own CNN needs images of at least 36 x 36, and its MLP does not know which cells
are neighbours.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.wrappers import FlattenObservation, TimeLimit
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from suite_cells import FRESH_LANES, FRESH_SEEDS, Cell, Stopwatch, Trained

UNLIMITED_EVAL_STEPS = 10_000
"""Limit of episodes in evaluations where the environment has none, as in qfleet: some policies never end one."""

EVAL_SEEDS = 20_000
NOISES = {"normal": NormalActionNoise, "ornstein-uhlenbeck": OrnsteinUhlenbeckActionNoise}


class BoardFeatures(BaseFeaturesExtractor):
    """The convolution of the MinAtar paper: 16 filters of 3 x 3 over a board [H, W, C]."""

    def __init__(self, observation_space: Box) -> None:
        rows, columns, channels = observation_space.shape
        super().__init__(observation_space, 16 * (rows - 2) * (columns - 2))
        self.convolution = torch.nn.Conv2d(channels, 16, kernel_size=3)

    def forward(self, board: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolution(board.movedim(-1, 1))).flatten(1)


def make_env(env_id: str, limited: bool = False) -> gymnasium.Env[Any, Any]:
    """An environment with observations that the library accepts; `limited` if its episodes must end."""
    if env_id.startswith("MinAtar/"):
        import minatar.gym

        if env_id not in gymnasium.registry:
            minatar.gym.register_envs()
    elif env_id.startswith("MiniGrid-"):
        import minigrid  # noqa: F401 (registers its environments)
    env = gymnasium.make(env_id)
    if limited and env.spec is not None and env.spec.max_episode_steps is None:
        env = TimeLimit(env, UNLIMITED_EVAL_STEPS)
    if isinstance(env.observation_space, Dict) and env_id.startswith("MiniGrid-"):
        from minigrid.wrappers import ImgObsWrapper

        env = ImgObsWrapper(env)
        return FlattenObservation(env)
    return FlattenObservation(env) if isinstance(env.observation_space, Tuple) else env


def arguments(env: gymnasium.Env[Any, Any], settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Arguments of DQN or TD3 for settings with the names of rl-zoo3 and of the MinAtar paper."""
    found = dict(settings)
    policy: dict[str, Any] = {}
    if (net := found.pop("net_arch", None)) is not None:
        policy["net_arch"] = net
    if isinstance(env.observation_space, Box) and len(env.observation_space.shape) == 3:
        policy |= {"features_extractor_class": BoardFeatures, "net_arch": [128]}
    if (rmsprop := found.pop("centered_rmsprop", None)) is not None:
        policy |= {"optimizer_class": torch.optim.RMSprop, "optimizer_kwargs": {"centered": True, **rmsprop}}
    if (decay := found.pop("exploration_steps", None)) is not None:
        found["exploration_fraction"] = min(1.0, decay / steps)
    if (noise := found.pop("noise_type", None)) is not None:
        size = env.action_space.shape
        found["action_noise"] = NOISES[noise](np.zeros(size), found.pop("noise_std") * np.ones(size))
    return found | ({"policy_kwargs": policy} if policy else {})


def train_peer(cell: Cell) -> Trained:
    settings = cell.settings
    env_id, steps = settings["env"], settings["total_steps"]
    torch.set_num_threads(1)
    clock = Stopwatch()
    env = make_env(env_id)
    watched = make_vec_env(make_env, seed=EVAL_SEEDS + cell.seed, env_kwargs={"env_id": env_id, "limited": True})
    algorithm = stable_baselines3.DQN if isinstance(env.action_space, Discrete) else stable_baselines3.TD3
    with tempfile.TemporaryDirectory() as folder:
        watch = EvalCallback(watched, n_eval_episodes=settings["eval_episodes"], verbose=0, log_path=folder,
                             eval_freq=settings["eval_period_steps"], best_model_save_path=folder)
        model = algorithm("MlpPolicy", env, seed=cell.seed, device="cpu", verbose=0,
                          **arguments(env, settings["settings"], steps))
        model.learn(steps, callback=watch)
        cpu_s, wall_s = clock.read()
        best = Path(folder, "best_model.zip")
        judged = algorithm.load(best, device="cpu") if best.exists() else model
    curve = [(int(step), float(np.mean(returns)))
             for step, returns in zip(watch.evaluations_timesteps, watch.evaluations_results, strict=True)]
    fresh = make_vec_env(make_env, min(FRESH_LANES, cell.task.episodes), seed=FRESH_SEEDS + cell.seed,
                         env_kwargs={"env_id": env_id, "limited": True})
    returns, _ = evaluate_policy(judged, fresh, cell.task.episodes, deterministic=True, return_episode_rewards=True)
    return Trained([float(each) for each in returns], curve, int(model.num_timesteps), cpu_s, wall_s)
