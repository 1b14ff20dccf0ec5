"""A chain whose values are known, and the switches of DQN in rows that cover every pair of their settings.

Under uniformly random behaviour exploration cannot fail: a row that does not learn the chain is connected wrongly. Six
rows are enough for all four settings of every pair of up to ten switches (Kleitman and Spencer 1973: one row of zeros,
and a different 3-subset of the other five for each switch).
"""

from itertools import combinations, product

import numpy as np
import torch

from qfleet import api
from qfleet.core.agent import ExplorationParams
from qfleet.maths.value_rescaling import h, h_inverse

LENGTH, GAMMA = 6, 0.9
SWITCHES = {
    "double": ("agent.double=false", "agent.double=true"),
    "dueling": ("agent.dueling=false", "agent.dueling=true"),
    "n_step": ("agent.n_step=1", "agent.n_step=3 learner.learning_rate=1e-3 total_steps=12000"),  # noisier targets
    "priority": ("replay.alpha=0", "replay.alpha=0.6 replay.beta_start=1 replay.beta_end=1"),
    "rescale": ("agent.rescale=false", "agent.rescale=true"),
    "loss": ("agent.loss=mse", "agent.loss=huber"),
    "target": ("learner.target_period_updates=50", "learner.target_period_updates=0 learner.target_tau=0.05"),
    "optimizer": ("learner.optimizer=adam", "learner.optimizer=rmsprop learner.learning_rate=5e-4"),
    "norm": ("agent.norm=none", "agent.norm=layer"),
}
SUBSETS = list(combinations(range(1, 6), 3))
ROWS = [{switch: int(row in subset) for switch, subset in zip(SWITCHES, SUBSETS, strict=False)} for row in range(6)]
COMMON = ["env.lanes=8", f"env.kwargs={{length: {LENGTH}}}", f"agent.gamma={GAMMA}", "agent.hidden=[32]",
          "agent.n_step=1", "agent.norm=none", "explore.kind=constant", "explore.epsilon=1",
          "learner.learning_rate=5e-3", "learner.batch_size=32",
          "replay.samples_per_insert=8", "replay.capacity=2000", "eval.period_steps=null", "eval.episodes=1",
          "env.max_episode_steps=100", "total_steps=5000", "run.log_period_steps=1000"]


FAMILY = {
    "c51": "agent.algo=c51 agent.v_min=-0.5 agent.v_max=1.5",
    "hlgauss": "agent.algo=hlgauss agent.v_min=-0.5 agent.v_max=1.5",
    "qr": "agent.algo=qr agent.quantiles=16",
    "iqn": "agent.algo=iqn agent.policy_samples=8",
    "noisy": "agent.noisy=true agent.noisy_epsilon=true agent.noisy_sigma=0.1",
    "rainbow": "agent.algo=c51 agent.v_min=-0.5 agent.v_max=1.5 agent.dueling=true "
               "agent.noisy=true agent.noisy_sigma=0.1 agent.noisy_epsilon=true "
               "replay.alpha=0.5 replay.beta_start=1 replay.beta_end=1",
}
"""Members of the value family that arrive at the same values as DQN with one step; Munchausen has others by design."""

REMEMBERING = ["agent.algo=r2d2", f"env.kwargs={{length: {LENGTH}}}", "env.max_episode_steps=100",
               f"agent.gamma={GAMMA}", "agent.n_step=2", "agent.features=[16]", "agent.units=16", "agent.hidden=[16]",
               "agent.burn_in=4", "agent.unroll=8", "agent.stride=8", "agent.rescale=false", "explore.kind=constant",
               "explore.epsilon=1", "learner.learning_rate=3e-3",
               "learner.target_period_updates=50", "learner.batch_size=8", "replay.alpha=0.9", "replay.chunk_steps=8",
               "replay.min_steps=64", "replay.samples_per_insert=1",
               "eval.period_steps=null", "eval.episodes=4", "total_steps=8000"]
"""R2D2 under random behaviour."""


def curious(algo, explore):
    """NGU or Agent57 under random behaviour: every arm acts at random, the first one is what is judged."""
    return [f"agent.algo={algo}", "agent.memory=none", "agent.arms=3", "agent.embedding=8", "agent.curious_hidden=[16]",
            "agent.episodic_capacity=200", "agent.kernel_epsilon=0.1", f"agent.gamma={GAMMA}",
            f"agent.gamma_min={GAMMA}", "agent.n_step=2", f"env.kwargs={{length: {LENGTH}}}",
            "env.max_episode_steps=100", "agent.hidden=[32]", f"explore.kind={explore}", "explore.arms=3",
            "explore.epsilon=1", "explore.steepness=0", "learner.batch_size=32",
            "learner.learning_rate=2e-3", "learner.target_period_updates=50", "replay.samples_per_insert=8",
            "eval.period_steps=null", "eval.episodes=4", "total_steps=10000"]


def name_of(row):
    return "-".join(switch for switch, on in row.items() if on) or "plain"


def overrides_of(row):
    """What a row says, on top of COMMON."""
    return [word for switch, on in row.items() for word in SWITCHES[switch][on].split()]


def words_of(member):
    """What a member of the family says: the agent's part of COMMON again, since a change of kind begins anew."""
    kind, *rest = FAMILY[member].split()
    agent = [kind, *(word for word in COMMON if word.startswith("agent.")), *rest]
    return [*(word for word in COMMON if not word.startswith("agent.")), *SWITCHES["target"][0].split(), *agent]


def every_algorithm():
    """The settings of each algorithm by its name: DQN's rows, the family, and the agents that remember or are curious.

    Beyond the rows of DQN only the greedy policy is known, not the values.
    """
    munchausen = [*COMMON, *SWITCHES["target"][0].split(), "agent.munchausen=true"]
    return {**{name_of(row): [*COMMON, *overrides_of(row)] for row in ROWS},
            **{member: words_of(member) for member in FAMILY}, "munchausen": munchausen, "r2d2": REMEMBERING,
            "ngu": curious("ngu", "mixture"), "agent57": curious("agent57", "bandit")}


def expected(n_step, rescale):
    """What the values must become: a step taken, n - 1 random ones after it, and the best value from there."""
    learnt = np.zeros((LENGTH - 1, 2))
    forward, back = (h, h_inverse) if rescale else (lambda x: x, lambda x: x)
    for _ in range(200):
        best = back(torch.tensor(learnt.max(1)))
        learnt = np.array([[np.mean([float(forward(outcome(state, [action, *random], best)))
                                     for random in product((0, 1), repeat=n_step - 1)])
                            for action in (0, 1)] for state in range(LENGTH - 1)])
    return back(torch.tensor(learnt)).numpy()


def outcome(state, actions, best):
    """The discounted reward of some actions in a row, with the value of where they lead."""
    for taken, action in enumerate(actions):
        state = max(state + 2 * action - 1, 0)
        if state == LENGTH - 1:
            return torch.tensor(GAMMA**taken)
    return GAMMA ** len(actions) * best[state]


def values_of(run):
    """The network's values [states, actions], in a run's last checkpoint, of the states that can be left."""
    agent = api.load(run, which="latest")
    cfg = agent.config.agent
    states = {"obs": np.repeat(np.eye(LENGTH, dtype=np.float32)[:-1], 64, 0)}  # IQN's levels are random: many of them
    _, columns = agent.policy.act(states, ExplorationParams(torch.zeros(64 * (LENGTH - 1)), network_noise=False))
    distribution = torch.from_numpy(columns["distribution"]).unflatten(0, (LENGTH - 1, 64))
    if cfg.algo == "c51":
        q = (distribution.softmax(3) * torch.linspace(cfg.v_min, cfg.v_max, cfg.atoms)).sum(3)
    elif cfg.algo == "hlgauss":
        half = (cfg.v_max - cfg.v_min) / cfg.atoms / 2
        q = (distribution.softmax(3) * torch.linspace(cfg.v_min + half, cfg.v_max - half, cfg.atoms)).sum(3)
    else:
        q = distribution if cfg.algo == "dqn" else distribution.mean(3)
    return (h_inverse(q) if cfg.rescale else q).mean(1).numpy()


def assert_solved(run, row):
    """The greedy policy is the optimal one, and the values are those that this row must arrive at."""
    q = values_of(run)
    assert (q.argmax(1) == 1).all(), q
    np.testing.assert_allclose(q, expected(3 if row["n_step"] else 1, row["rescale"]), atol=0.08)
