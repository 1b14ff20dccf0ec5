"""Stable-Baselines3 and Tianshou at the same workloads, and peers given as `module:function`.

No peer is a dependency: each library is imported only by the process that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from qfleet.config import load_attribute
from qfleet.core.errors import UserError
from speed.throughput import Throughput, ThroughputMeter, measure_throughput
from speed.workloads import RoundSpec, Workload

Measure = Callable[[Workload, RoundSpec], Throughput]


@dataclass(frozen=True)
class Peer:
    """Another library: the module it needs, the package that installs it, and its measurements by unit."""

    name: str
    module: str
    package: str
    measures: Mapping[str, Measure]

    def problem(self, work: Workload) -> str | None:
        """Why this workload cannot be measured, or None."""
        if work.unit not in self.measures:
            return f"does not measure {work.unit}"
        return None if find_spec(self.module) else f"not installed: pip install {self.package}"

    def measure(self, work: Workload, spec: RoundSpec) -> Throughput:
        return self.measures[work.unit](work, spec)


def sb3(work: Workload, spec: RoundSpec) -> Throughput:
    """Stable-Baselines3, with settings that equal the workload."""
    import stable_baselines3 as library
    from stable_baselines3.common.callbacks import BaseCallback

    meter = ThroughputMeter()

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % work.mark == 0:
                meter.record(self.num_timesteps)
            return True

    cycle, updates = work.phase(spec.lanes)
    common = {"batch_size": work.batch, "learning_starts": work.starts, "gamma": 0.99, "device": spec.device,
              "train_freq": cycle // spec.lanes, "gradient_steps": updates, "verbose": 0}
    model = getattr(library, work.algo)(**_sb3_model(work, spec), **common)
    model.learn(spec.steps, callback=Watch())
    return meter.throughput(work.warm_up)


def sb3_updates(work: Workload, spec: RoundSpec) -> Throughput:
    """The learner of Stable-Baselines3 alone, on random images: float32, not double, dueling or prioritised."""
    import gymnasium
    import numpy as np
    import stable_baselines3 as library
    import torch

    class Noise(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        action_space = gymnasium.spaces.Discrete(6)

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 1.0, False, False, {}

    model = library.DQN("CnnPolicy", Noise(), learning_rate=1e-4, buffer_size=10_000, learning_starts=work.starts,
                        gamma=0.99, device=spec.device, verbose=0)
    model.learn(work.starts)

    def learn() -> int:
        model.train(5, work.batch)
        return 5

    learn()
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    return measure_throughput(learn, spec.steps, 2.0, wait)


def _sb3_model(work: Workload, spec: RoundSpec) -> dict[str, Any]:
    """Arguments that depend on the workload: environment, policy, exploration, sizes."""
    import numpy as np
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecFrameStack

    if work.extra == "atari":
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        return {"policy": "CnnPolicy", "env": VecFrameStack(make_atari_env(work.env_id, spec.lanes, seed=0), 4),
                "learning_rate": 1e-4, "buffer_size": 10_000, "target_update_interval": 2_000}
    env = make_vec_env(work.env_id, spec.lanes, seed=0)
    net = {"policy": "MlpPolicy", "env": env, "policy_kwargs": {"net_arch": [256, 256]}}
    if work.algo == "DQN":
        return net | {"learning_rate": 2.3e-3, "buffer_size": 100_000, "target_update_interval": 256,
                      "exploration_fraction": 0.16, "exploration_final_eps": 0.04}
    size = env.action_space.shape
    return net | {"learning_rate": 1e-3, "buffer_size": 1_000_000,
                  "action_noise": NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))}


def tianshou(work: Workload, spec: RoundSpec) -> Throughput:
    """Tianshou 2, with settings that equal the workload."""
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.trainer import OffPolicyTrainerParams

    meter = ThroughputMeter()
    env, algorithm, memory = _tianshou_dqn(work, spec) if work.algo == "DQN" else _tianshou_control(work, spec)
    collector = Collector(algorithm, env, VectorReplayBuffer(buffer_num=spec.lanes, **memory), exploration_noise=True)
    collector.reset()
    collector.collect(n_step=work.starts - work.starts % spec.lanes, random=True)
    cycle, updates = work.phase(spec.lanes)

    def note(epoch: int, step: int) -> None:
        if step % work.mark == 0:
            meter.record(work.starts + step)

    rest = spec.steps - work.starts
    algorithm.run_training(OffPolicyTrainerParams(
        training_collector=collector, max_epochs=1, epoch_num_steps=rest - rest % work.mark + work.mark,
        collection_step_num_env_steps=cycle, update_step_num_gradient_steps_per_sample=updates / cycle,
        batch_size=work.batch, training_fn=note, verbose=False, show_progress=False))
    return meter.throughput(work.warm_up)


def _tianshou_dqn(work: Workload, spec: RoundSpec) -> tuple[Any, Any, dict[str, Any]]:
    import gymnasium
    from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net

    if work.extra == "atari":
        import ale_py
        from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
        from tianshou.env.atari.atari_network import DQNet, ScaledObsInputActionReprNet

        gymnasium.register_envs(ale_py)
        # Tianshou's own wrappers ask numpy 2.4 for a dtype of np.integer, which is an error there.
        def make() -> Any:
            return FrameStackObservation(AtariPreprocessing(gymnasium.make(work.env_id)), 4)

        one = make()
        net: Any = ScaledObsInputActionReprNet(DQNet(4, 84, 84, one.action_space.n))
        rate, target = 1e-4, 500
        memory = {"total_size": 10_000, "ignore_obs_next": True, "save_only_last_obs": True, "stack_num": 4}
    else:
        def make() -> Any:
            return gymnasium.make(work.env_id)

        one = make()
        net = Net(state_shape=one.observation_space.shape, action_shape=one.action_space.n, hidden_sizes=[256, 256])
        rate, target, memory = 2.3e-3, 128, {"total_size": 100_000}
    policy = DiscreteQLearningPolicy(model=net.to(spec.device), action_space=one.action_space, eps_training=0.1)
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=rate), gamma=0.99, target_update_freq=target,
                    is_double=False).to(spec.device)
    return DummyVectorEnv([make] * spec.lanes), algorithm, memory


def _tianshou_control(work: Workload, spec: RoundSpec) -> tuple[Any, Any, dict[str, Any]]:
    import gymnasium
    from tianshou.algorithm import DDPG, TD3
    from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.env import DummyVectorEnv
    from tianshou.exploration import GaussianNoise
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousCritic

    def make() -> Any:
        return gymnasium.make(work.env_id)

    one = make()
    shapes = {"state_shape": one.observation_space.shape, "action_shape": one.action_space.shape}

    def critic() -> Any:
        net = Net(**shapes, hidden_sizes=[256, 256], concat=True)
        return ContinuousCritic(preprocess_net=net).to(spec.device)

    actor = ContinuousActorDeterministic(
        preprocess_net=Net(state_shape=shapes["state_shape"], hidden_sizes=[256, 256]),
        action_shape=shapes["action_shape"], max_action=float(one.action_space.high[0])).to(spec.device)
    policy = ContinuousDeterministicPolicy(actor=actor, action_space=one.action_space,
                                           exploration_noise=GaussianNoise(sigma=0.1))
    adam = AdamOptimizerFactory(lr=1e-3)
    common = {"policy": policy, "policy_optim": adam, "critic": critic(), "critic_optim": adam, "tau": 0.005}
    if work.algo == "TD3":
        common |= {"critic2": critic(), "critic2_optim": adam, "policy_noise": 0.2, "noise_clip": 0.5,
                   "update_actor_freq": 2}
    algorithm = {"TD3": TD3, "DDPG": DDPG}[work.algo](**common).to(spec.device)
    return DummyVectorEnv([make] * spec.lanes), algorithm, {"total_size": 1_000_000}


PEERS = {peer.name: peer for peer in (
    Peer("sb3", "stable_baselines3", "stable-baselines3", {"steps": sb3, "updates": sb3_updates}),
    Peer("tianshou", "tianshou", "tianshou", {"steps": tianshou}))}
ABSENT = {"cleanrl": "CleanRL is a collection of scripts, not a library: its newest package, 1.2.0, needs Python below "
                     "3.11, and 0.4.8, which pip takes instead, cannot be imported beside a present gym"}
"""Libraries that cannot be measured, and why."""


def peer_of(name: str) -> Peer:
    """A peer by name, or one given as `module:function`: a function of a Workload and a RoundSpec that returns a
    Throughput."""
    if name in PEERS:
        return PEERS[name]
    if ":" in name:
        module, measure = name.partition(":")[0], load_attribute(name)
        return Peer(name, module.partition(".")[0], module, {"steps": measure, "updates": measure})
    if name in ABSENT:
        raise UserError(f"--peers {name}: {ABSENT[name]}")
    raise UserError(f"--peers {name}: there are {', '.join(PEERS)}, and your own as module:function")
