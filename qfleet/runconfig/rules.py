"""Cross-section rules: contradictions between settings, each with both values and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfleet.config import Config, plugin_module
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Window
from qfleet.envs import atari
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig

if TYPE_CHECKING:
    from qfleet.runconfig.run_config import RunConfig


MAX_PORT = 65535

EXACT_STEPS_PER_LANE = 1000
"""Smallest checkpoint period per lane for exact resume, which truncates every episode at a checkpoint: with a shorter
period too few episodes would end by themselves.
"""


def contradictions(cfg: RunConfig) -> list[str]:
    """Values that are valid individually but not together: one line each, with both values and the remedy."""
    found = _windows(cfg)
    if cfg.replay.min_steps < cfg.learner.batch_size:
        found.append(f"replay.min_steps={cfg.replay.min_steps} is below learner.batch_size={cfg.learner.batch_size}: "
                     "raise min_steps, so that there is enough data for the first batch")
    if cfg.total_steps <= cfg.replay.min_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins, replay.min_steps="
                     f"{cfg.replay.min_steps}: raise total_steps or lower min_steps")
    if cfg.total_steps <= cfg.total_lanes * cfg.replay.chunk_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins: the first chunks are full after "
                     f"{_all_lanes(cfg)} x replay.chunk_steps={cfg.replay.chunk_steps} steps; raise total_steps or "
                     "lower chunk_steps")
    arms, drawn = getattr(cfg.agent, "arms", None), getattr(cfg.explore, "arms", None)
    if arms is not None and drawn is not None and arms != drawn:
        found.append(f"explore.arms={drawn} differs from agent.arms={arms}: set both to the same number")
    schedules: dict[str, EvalConfig | CheckpointConfig] = {"eval": cfg.eval, "checkpoint": cfg.checkpoint}
    for name, section in schedules.items():
        if section.period_steps and section.period_updates:
            found.append(f"{name}.period_steps={section.period_steps} and {name}.period_updates="
                         f"{section.period_updates} are both set: set one of them to null")
    if cfg.stop_at is not None and not (cfg.eval.period_steps or cfg.eval.period_updates):
        found.append(f"stop_at={cfg.stop_at:g} is checked against evaluations, and there are none: "
                     "set eval.period_steps, or stop_at=null")
    if cfg.eval.from_return is not None and (cfg.has_driver or cfg.sync != "none"):
        found.append(f"eval.from_return={cfg.eval.from_return:g} needs a run with one learner that also acts: leave it "
                     "out, or set actors=0 learners=1 sync=none launcher=local")
    found += _noise_and_epsilon(cfg)
    found += _exploration_of_other_actions(cfg)
    found += _clipped_and_normalised(cfg)
    found += _topology(cfg)
    captured = cfg.learner.capture is True and not cfg.learner.compile
    if cfg.synchronous and cfg.allreduce.overlap and captured:
        found.append("allreduce.overlap=true with learner.capture=true: a captured update returns all gradients at "
                     "once; set learner.capture=false")
    if cfg.has_server:
        found += _server(cfg)
    return found + (_exact_resume(cfg) if cfg.run.exact_resume else [])


def _windows(cfg: RunConfig) -> list[str]:
    """Capacity and chunks of the replay against the windows that the agent learns from."""
    try:
        window = getattr(cfg.agent, "window", None) or Window(future=getattr(cfg.agent, "n_step", 1))
    except UserError as error:
        return [str(error)]
    return cfg.replay.problems(cfg.learner.batch_size, window, cfg.lanes)


def _topology(cfg: RunConfig) -> list[str]:
    """Numbers of processes and ways to start and connect them that do not fit together."""
    launcher = cfg.launcher_traits
    joinable = not cfg.learners_act and launcher.cluster is None
    found = cfg.fleet.problems() if joinable else []
    if cfg.learners > 1 and cfg.sync == "none":
        found.append(f"learners={cfg.learners} with sync=none: set sync=allreduce (synchronous average) or sync=server "
                     "(parameter server), so that they train one network")
    if launcher.elastic and cfg.learners > 1:
        found.append(f"ray.elastic=true with learners={cfg.learners}: a learner could lose its last actor; give the "
                     "number of actors")
    if 0 < cfg.actors < cfg.learners:
        found.append(f"actors={cfg.actors} with learners={cfg.learners}: a learner without an actor would have nothing "
                     "to learn from; set actors=0, so that the learners act, or at least as many actors")
    if cfg.eval.process is False and cfg.has_children:
        found.append("eval.process=false needs a run with one learner that also acts: leave it out, or set actors=0 "
                     "learners=1, without sync=server")
    address = cfg.fleet.address if joinable else None
    if address is not None and (last := address.port + cfg.services - 1) > MAX_PORT:
        found.append(f"fleet.listen={cfg.fleet.listen} with learners={cfg.learners}: the learners would listen at "
                     f"ports up to {last}, and {MAX_PORT} is the last; choose a lower one")
    if launcher.cluster is not None and cfg.device.startswith("cuda:") and cfg.device != "cuda:0":
        found.append(f"device={cfg.device} with launcher=ray: Ray assigns the GPU, and the learner sees no other; set "
                     "device=cuda")
    return found


def _server(cfg: RunConfig) -> list[str]:
    found, rule = [], cfg.parameter_server
    if cfg.total_steps <= cfg.learners * cfg.replay.min_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins: each of learners={cfg.learners} "
                     f"takes replay.min_steps={cfg.replay.min_steps} steps first; raise total_steps or lower min_steps")
    stale, pull, push = rule.max_staleness, rule.pull_period_updates, rule.push_period_updates
    own = -(-pull // push) - 1
    if stale is not None and stale < own:
        found.append(f"parameter_server.max_staleness={stale} with parameter_server.pull_period_updates={pull}: before "
                     f"a learner pulls again its weights are {own} of its own pushes old, so its gradients are "
                     "dropped; raise max_staleness or lower the period")
    return found


def _noise_and_epsilon(cfg: RunConfig) -> list[str]:
    """Check that noisy layers and ε are combined only on request, and that there is exploration without them."""
    noisy, key = getattr(cfg.agent, "noisy", None), getattr(cfg.explore, "epsilon_key", None)
    if noisy is None or (not noisy and key is None):
        return []
    explorer = plugin_module("qfleet.explore", cfg.explore.kind).build(cfg.explore, 1, 0, 1)
    schedule = getattr(explorer, "schedule", explorer)  # of ε, where `params` itself is random
    random = any(float(schedule.params(steps).epsilon.max()) > 0 for steps in (0, cfg.total_steps))
    if not noisy:
        return [] if random else [
            f"explore.kind={cfg.explore.kind} takes no random actions, and agent.noisy=false adds no noise: there "
            f"would be no exploration; raise explore.{key}, or set agent.noisy=true"]
    if random and not cfg.agent.noisy_epsilon:
        return [f"agent.noisy=true explores with learned noise, and explore.kind={cfg.explore.kind} adds random "
                "actions: set explore.kind=constant explore.epsilon=0, or agent.noisy_epsilon=true to use both"]
    if cfg.agent.noisy_epsilon and not random:
        return [f"agent.noisy_epsilon=true has no effect: explore.kind={cfg.explore.kind} takes no random actions; "
                "leave it out"]
    return []


def _exploration_of_other_actions(cfg: RunConfig) -> list[str]:
    """Reject action noise for discrete actions, and repeated random actions for continuous ones."""
    kind, algo, continuous = cfg.explore.kind, cfg.agent.algo, getattr(cfg.agent, "continuous", False)
    if continuous and getattr(cfg.explore, "discrete", False):
        return [f"explore.kind={kind} is for discrete actions, and agent.algo={algo} has continuous ones: set "
                "explore.kind=gaussian"]
    if continuous or not getattr(cfg.explore, "continuous", False):
        return []
    return [f"explore.kind={kind} adds noise to continuous actions, and agent.algo={algo} has discrete ones: set "
            "agent.algo=ddpg, or explore.kind=linear if the environment's actions are discrete"]


def _clipped_and_normalised(cfg: RunConfig) -> list[str]:
    """Reject rewards that are clipped to their sign before they are normalised."""
    clipped = cfg.env.clip_rewards
    if clipped is None:
        clipped = atari.claims(cfg.env.id)
    if not (clipped and cfg.normalise.rewards):
        return []
    default = " (the default of Atari games)" if cfg.env.clip_rewards is None else ""
    return [f"normalise.rewards=true with env.clip_rewards=true{default}: only the sign of a clipped reward is left to "
            "normalise; set env.clip_rewards=false, or leave normalise.rewards out"]


def action_mismatch(agent: Config, spec: EnvSpec) -> str | None:
    """Message if the environment's actions are discrete and the agent's continuous, or vice versa; else None."""
    algo, continuous = agent.algo, getattr(agent, "continuous", False)  # type: ignore[attr-defined]
    if spec.box is not None and not continuous:
        return (
            f"{spec.id} has continuous actions ({spec.action_text}), and agent.algo={algo} needs discrete "
            f"ones: use agent.algo=ddpg or d4pg with explore.kind=gaussian, or train the id itself: `qfleet train "
            f"{spec.id}`"
        )
    if spec.box is None and continuous:
        return (
            f"{spec.id} has {spec.action_text}, and agent.algo={algo} needs continuous ones (Box): use agent.algo=dqn "
            f"with explore.kind=linear, or train the id itself: `qfleet train {spec.id}`"
        )
    return None


def _exact_resume(cfg: RunConfig) -> list[str]:
    """Settings that prevent a resume bitwise equal to an uninterrupted run, or truncate too many episodes."""
    found = []
    if not cfg.learners_act or not cfg.is_local:
        value = f"actors={cfg.actors}" if not cfg.learners_act else f"launcher={cfg.launcher}"
        found.append(f"run.exact_resume=true with {value}: processes run asynchronously; set actors=0 launcher=local")
    if cfg.sync != "none":
        found.append(f"run.exact_resume=true with sync={cfg.sync}: learners run asynchronously, or hold batches that "
                     "are not saved; set sync=none")
    if cfg.device.startswith("cuda"):
        found.append(f"run.exact_resume=true with device={cfg.device}: only the CPU is exact; set device=cpu")
    if cfg.eval.process is True:
        found.append("run.exact_resume=true with eval.process=true: the time at which its results arrive is not "
                     "deterministic, nor is the end of the run; set eval.process=false")
    if not cfg.checkpoint.replay:
        found.append("run.exact_resume=true with checkpoint.replay=false: the replay must be saved, too; "
                     "set checkpoint.replay=true")
    steps = cfg.checkpoint.period_steps
    if updates := cfg.checkpoint.period_updates:
        steps = int(updates * cfg.learner.batch_size / cfg.replay.samples_per_insert)
    if not steps:
        return [*found, "run.exact_resume=true needs scheduled checkpoints: set checkpoint.period_steps"]
    least = 2 * cfg.env.max_episode_steps if cfg.env.max_episode_steps else EXACT_STEPS_PER_LANE
    if steps < least * cfg.lanes:
        found.append(f"run.exact_resume=true truncates every episode at a checkpoint, here after {steps // cfg.lanes} "
                     f"steps per lane, which is short for an episode: set checkpoint.period_steps to at least "
                     f"{least * cfg.lanes} ({least} per lane, {_all_lanes(cfg)})")
    return found


def _all_lanes(cfg: RunConfig) -> str:
    """The factors of the number of lanes, as text."""
    numbers = {"env.groups": cfg.env.groups, "actors": cfg.actors, "learners": cfg.learners * cfg.learners_act}
    return " x ".join([f"env.lanes={cfg.env.lanes}", *(f"{key}={n}" for key, n in numbers.items() if n > 1)])
