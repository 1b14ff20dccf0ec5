"""`check-env`: tries an environment with random actions and reports its properties and API violations."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np

from qfleet.core.env import Leaf, VectorEnv
from qfleet.core.errors import EnvFault, UserError
from qfleet.envs import EnvConfig, atari, gym, make, suite, toy
from qfleet.envs.gym import env_factory
from qfleet.envs.gym_api import fault_of_call, fault_of_reset, fault_of_reward, fault_of_step
from qfleet.envs.lanes import GymLanes

STEPS = 500
"""Random steps to try: enough to reach the end of an episode in most environments, usually within a second."""

SEED = 1234


@dataclass(frozen=True)
class Finding:
    """One line of the report: a property (info), a possible problem (warning) or an obstacle to training (error)."""

    level: Literal["info", "warning", "error"]
    text: str


def check(cfg: EnvConfig) -> list[Finding]:
    """All findings about an environment, errors last. Errors of the environment are reported, not raised."""
    findings: list[Finding] = []
    try:
        if atari.claims(cfg.id):
            findings += _describe_protocol(cfg)
        elif suite(cfg.id) in (gym, toy):  # other suites need not use Gymnasium environments
            findings += _check_api(cfg)
        findings += _check_lanes(cfg)
    except (UserError, EnvFault) as error:
        reported = [finding.text for finding in findings if finding.level == "error"]
        if not any(text in str(error) for text in reported):  # the lanes may report the same problem
            findings.append(Finding("error", str(error)))
    order = {"info": 0, "warning": 1, "error": 2}
    return sorted(findings, key=lambda finding: order[finding.level])


def _describe_protocol(cfg: EnvConfig) -> list[Finding]:
    rules = atari.rules_of(cfg)
    return [Finding("info", f"Atari game {rules.rom}, protocol {rules.protocol}: sticky actions {rules.sticky:g}, "
                            f"{rules.noop_max or 'no'} no-ops, {'all 18' if rules.full_action_space else 'minimal'} "
                            f"actions, life loss {'ends' if rules.life_loss else 'does not end'} the learner's "
                            f"episode, training reward {'clipped' if rules.clip_rewards else 'unclipped'}, "
                            f"at most {rules.max_frames} frames per episode")]


def _check_api(cfg: EnvConfig) -> list[Finding]:
    """Check the environment itself against the Gymnasium API."""
    toy.register()
    env = env_factory(cfg)[0]()
    if isinstance(env, gymnasium.vector.VectorEnv):
        with closing(env):
            return [Finding("info", f"vector environment, num_envs={env.num_envs}"),
                    Finding("info", f"observation space {env.single_observation_space}"),
                    Finding("info", f"action space {env.single_action_space}")]
    findings = [Finding("info", f"observation space {env.observation_space}"),
                Finding("info", f"action space {env.action_space}")]
    try:
        findings += _check_return_types(env)
    except Exception as error:
        findings.append(Finding("error", fault_of_call(error) or
                                f"reset or step raised {type(error).__name__}: {error}"))
    finally:
        env.close()
    return findings


def _check_return_types(env: gymnasium.Env[Any, Any]) -> list[Finding]:
    """Check the types that one reset and one step return."""
    answer: Any = env.reset(seed=SEED)
    if fault := fault_of_reset(answer):
        return [Finding("error", fault)]
    findings = _check_in_space(env, answer[0], "reset")
    env.action_space.seed(SEED)
    step: Any = env.step(env.action_space.sample())
    if fault := fault_of_step(step):
        return [*findings, Finding("error", fault)]
    observation, reward, terminated, truncated, info = step
    findings += _check_in_space(env, observation, "step")
    if fault := fault_of_reward(reward):
        findings.append(Finding("error", fault))
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, (bool, np.bool_)):
            findings.append(Finding("warning", f"{name} is a {type(value).__name__}, not a bool"))
    if not isinstance(info, dict):
        findings.append(Finding("error", f"info is a {type(info).__name__}, not a dict"))
    return findings


def _check_in_space(env: gymnasium.Env[Any, Any], observation: Any, call: str) -> list[Finding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inside = env.observation_space.contains(observation)
    got = f"{observation.dtype} {observation.shape}" if isinstance(observation, np.ndarray) else repr(observation)[:80]
    return [] if inside else [Finding("warning", f"the observation of {call} is not in its space: {got} "
                                                 f"against {env.observation_space}")]


def _check_lanes(cfg: EnvConfig) -> list[Finding]:
    """Properties seen by an agent: leaves, actions, rewards, episodes, speed, and reproducibility under one seed."""
    env = make(cfg, 1)
    try:
        findings = [Finding("info", _describe(name, leaf)) for name, leaf in env.spec.observation.items()]
        findings.append(Finding("info", f"the agent chooses among {env.spec.action_text}" if env.spec.box is None
                                else f"the agent outputs {env.spec.action_text}"))
        start = time.perf_counter()
        first = _roll(env, STEPS)
        findings.append(Finding("info", f"{STEPS / (time.perf_counter() - start):.0f} steps/s in one lane"))
        findings += _check_rewards(first)
        if isinstance(env, GymLanes) and not env.has_time_limit:
            findings += _check_end(cfg, first)
        if env.faults():
            findings.append(Finding("warning", f"it failed and was rebuilt {env.faults()} times in {STEPS} steps"))
        if not _equal(first, _roll(env, STEPS)):
            findings.append(Finding("warning", "two rollouts with the same seed differ: results cannot be reproduced; "
                                               "draw all randomness from self.np_random"))
        return findings
    finally:
        env.close()


Trace = list[tuple[dict[str, np.ndarray], float, float, bool]]


def _roll(env: VectorEnv, steps: int) -> Trace:
    """(observation, raw reward, discount, last) of `steps` random steps."""
    rng = np.random.default_rng(SEED)
    trace: Trace = [(env.reset([SEED]), 0.0, 1.0, False)]
    for _ in range(steps):
        env.send(rng.integers(env.spec.num_actions, size=1) if env.spec.box is None
                 else rng.uniform(-1, 1, (1, *env.spec.box.shape)).astype(np.float32))
        out = env.recv()
        trace.append((out.obs, float(out.raw_reward[0]), float(out.discount[0]), bool(out.last[0])))
    return trace


def _check_rewards(trace: Trace) -> list[Finding]:
    taken = [row for before, row in itertools.pairwise(trace) if not before[3]]  # the row after a `last` is a reset
    rewards = [reward for _, reward, _, _ in taken]
    ended = sum(last for *_, last in trace)
    findings = [Finding("info", f"{ended} episodes ended in {STEPS} random steps; rewards {min(rewards):g} to "
                                f"{max(rewards):g} per step")]
    largest = max(map(abs, rewards))
    if largest == 0:
        findings.append(Finding("warning", f"no reward in {STEPS} random steps: exploration will be hard"))
    elif largest > 100 or math.log10(largest) < -3:
        findings.append(Finding("warning", f"rewards reach {largest:g}; scale them to about 1, or set "
                                           "env.clip_rewards=true or agent.rescale=true"))
    return findings


def _check_end(cfg: EnvConfig, trace: Trace) -> list[Finding]:
    """Warn if no episode of an environment without a time limit ended."""
    if any(last for *_, last in trace):
        return []
    steps = cfg.unlimited_episode_steps
    cut = f"are truncated after {steps:,} steps" if steps else "that never end are never scored in training"
    return [Finding("warning", f"no time limit, and no episode ended in {STEPS} random steps: episodes {cut}; "
                               "to change the limit set env.max_episode_steps")]


def _equal(one: Trace, other: Trace) -> bool:
    return all(a[1:] == b[1:] and all(np.array_equal(a[0][name], b[0][name]) for name in a[0])
               for a, b in zip(one, other, strict=True))


def _describe(name: str, leaf: Leaf) -> str:
    text = f"the agent sees '{name}': {leaf.kind} {leaf.dtype} {leaf.shape}"
    if leaf.stack > 1:
        text += f", {leaf.stack} frames"
    if leaf.symbols:
        text += (f" of {leaf.symbols} symbols, one plane per symbol (env.image_symbols=null: values divided by "
                 f"{leaf.divisor:g})")
    elif leaf.kind == "image" and leaf.divisor != 1:
        text += f", values divided by {leaf.divisor:g}"
    return text + (f", {sum(leaf.sizes)} categories, one-hot for a network" if leaf.sizes else "")
