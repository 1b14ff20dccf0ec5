"""What agents that remember cost: R2D2's updates beside a bare PyTorch loop, and acting with and without curiosity.

    python benchmarks/memory_speed.py [--seconds 10] [--out benchmarks/results/memory_speed.json]

One thread. The bare loop trains the same network (dense torso, LSTM 512, dueling head of 512) by plain autograd and
torch.optim.Adam on sequences of the same shape that are at hand already: forward of online and target network, n-step
target, backward, clip, step. Ours adds sampling from a full replay, priorities, and the learner around it. Acting is a
policy on 16 lanes of a vector of 64 numbers, environments left out. Contenders take turns, in rounds; CPU time counts,
so that other processes on the machine matter less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from speed import describe_machine

from qfleet.actor.policy import Policy
from qfleet.algos import ngu, r2d2
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Leaf
from qfleet.learner.learner import Learner, LearnerConfig
from qfleet.learner.weight_store import Mailbox
from qfleet.maths.bellman import n_step
from qfleet.maths.value_rescaling import h, h_inverse
from qfleet.replay.chunker import Chunker
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.training.evaluation import EpisodeCounter

SPEC = EnvSpec("bench", {"obs": Leaf((64,), "float32", "vector")}, num_actions=6)
CPU = torch.device("cpu")
LANES, BATCH = 16, 32


def filled(agent: r2d2.Agent, episode: int = 400, steps: int = 2_000) -> HostReplay:
    """A replay full of random episodes."""
    layout = Layout(SPEC, agent.window, 160, agent.columns, agent.stored_states, agent.state_rows)
    cfg = ReplayConfig(capacity=LANES * steps, min_steps=0, samples_per_insert=1e9, chunk_steps=160, alpha=0.9)
    replay, chunker, rng = HostReplay(layout, cfg, 0, CPU), Chunker(layout, LANES), np.random.default_rng(0)
    for t in range(steps):
        last = np.full(LANES, t % episode == episode - 1)
        row = {name: (0.1 * rng.normal(size=(LANES, *shape))).astype(dtype)
               for name, (shape, dtype) in agent.stored_states.items()}
        obs = {"obs": rng.normal(size=(LANES, 64)).astype(np.float32)}
        replay.clock.count_steps(LANES)
        action, reward = rng.integers(6, size=LANES), rng.normal(size=LANES)
        for _, chunk in chunker.append(obs, action, reward, 1.0 * ~last, last, row):
            replay.add(chunk)
    return replay


def ours(cfg: r2d2.Config, seconds: float) -> float:
    """Sequences per second of a learner."""
    agent = r2d2.build(cfg, SPEC)
    learner = Learner(agent, filled(agent), Mailbox(), EpisodeCounter(0, 1), LearnerConfig(
        batch_size=BATCH, precision="fp32", clip_norm=40), 0, CPU)
    learner.max_updates_per_step = 1
    return BATCH * rate(learner.step, seconds)


def bare(cfg: r2d2.Config, seconds: float) -> float:
    """Sequences per second of a loop around the same network."""
    agent = r2d2.build(cfg, SPEC)
    net, target = agent.network(), agent.network()
    optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=True)
    batch = filled(agent).sample(BATCH)
    side, rows = r2d2.window_last_action_reward(batch.rows, 6), batch.rows

    def update() -> None:
        q = r2d2.unroll_q(net, batch, side, cfg)
        with torch.no_grad():
            wanted = r2d2.unroll_q(target, batch, side, cfg)
            v = wanted.gather(2, q.argmax(2, keepdim=True)).squeeze(2)
            reward, discount, last = (rows[name][:, cfg.burn_in:] for name in ("reward", "discount", "last"))
            step = n_step(reward, discount, last, cfg.gamma, cfg.n_step)
            y = h(step.ret + step.discount * h_inverse(v.gather(1, step.row)))
        loss = (r2d2.q_of_actions(rows, q, cfg) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 40)
        optimizer.step()

    return BATCH * rate(update, seconds)


def acting(agent: r2d2.Agent, arms: int | None, seconds: float, memories: int = 0) -> float:
    """Steps per second of a policy on all lanes; with so many memories of the episode already."""
    policy = Policy(agent, 0, CPU)
    policy.begin(LANES)
    if memories:
        with torch.inference_mode():
            policy.memory["episodic.keys"].normal_()
            policy.memory["episodic.count"].fill_(memories)
    rng, over = np.random.default_rng(0), np.zeros(LANES, bool)
    arm = ExplorationParams(torch.full((LANES,), 0.1), index=None if arms is None else torch.arange(LANES) % arms,
                            count=arms or 0)
    obs = {"obs": rng.normal(size=(LANES, 64)).astype(np.float32)}
    reward = rng.normal(size=LANES).astype(np.float32)

    def step() -> None:
        policy.act(obs, arm)
        policy.observe(reward, over)

    return LANES * rate(step, seconds)


def nearest_alone(cfg: ngu.Config, seconds: float, memories: int) -> float:
    """Searches of nearest neighbours, lanes times calls per second."""
    keys, count = torch.randn(LANES, cfg.episodic_capacity, cfg.embedding), torch.full((LANES,), memories)
    return LANES * rate(
        lambda: ngu.knn_squared_distances(keys, count, torch.randn(LANES, cfg.embedding), cfg.neighbours), seconds
    )


def rate(do, seconds: float) -> float:
    for _ in range(3):
        do()
    calls, begun = 0, time.process_time()
    while time.process_time() - begun < seconds:
        do()
        calls += 1
    return calls / (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU time of every measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cfg, curious = r2d2.Config(), ngu.Config()
    plain, wondering = r2d2.build(cfg, SPEC), ngu.build(curious, SPEC)
    contenders = {
        "R2D2 learner, sequences/s": lambda: ours(cfg, args.seconds),
        "bare loop, sequences/s": lambda: bare(cfg, args.seconds),
        "R2D2 acting, steps/s": lambda: acting(plain, None, args.seconds),
        "NGU acting, steps/s": lambda: acting(wondering, 32, args.seconds, 500),
        "NGU acting, 5,000 memories, steps/s": lambda: acting(wondering, 32, args.seconds, 5_000),
        "nearest of 500 memories, lanes/s": lambda: nearest_alone(curious, args.seconds, 500),
        "nearest of 5,000 memories, lanes/s": lambda: nearest_alone(curious, args.seconds, 5_000),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
            print(f"{name:40} {found[name][-1]:10.1f}", flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(json.dumps(medians, indent=1))
    if args.out:
        document = {"medians": medians, "rounds": found, "machine": describe_machine()}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
