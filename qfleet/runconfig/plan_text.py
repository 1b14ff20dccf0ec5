"""Plan of a run as text, shown before the first step."""

from __future__ import annotations

from pathlib import Path

from qfleet.core.env import EnvSpec
from qfleet.learner.footprint import footprint
from qfleet.optim.optimizer import LearningRate
from qfleet.replay import memory_plan
from qfleet.runconfig.build import expected_updates, make_agent, make_layout
from qfleet.runconfig.resource_check import describe_disk, network_bytes, replay_memory
from qfleet.runconfig.run_config import RunConfig


def describe_plan(config: RunConfig, spec: EnvSpec, where: Path | None = None) -> list[tuple[str, str]]:
    """(name, text) pairs that describe a run with resolved auto values: environment, agent, steps, memory, disk.

    Logs a warning if the disk of `where` is too small for the run's checkpoints.
    """
    layout, network, learners = make_layout(config, spec), footprint(make_agent(config, spec)), config.learners
    memory, total = replay_memory(config, layout, network), config.total_steps
    updates = expected_updates(config)
    return [
        ("environment", f"{spec.id}, {_lanes(config)}, {spec.action_text}, observes {spec.observation_text}"),
        ("agent", f"{config.agent.algo} on {config.device}, {config.learner.precision}, threads {config.run.threads}"),
        ("steps", f"{total:,} steps = {total * spec.frames_per_step:,} frames, about {updates:,.0f} updates"),
        (
            "memory",
            f"about {memory_plan.format_bytes(memory.total)} for replay of {config.replay.capacity:,} steps"
            + (f" on {config.device}" if config.replay.store == "device" else "")
            + (" in each learner" if learners > 1 else "")
            + f", {memory_plan.format_bytes(max(network_bytes(config, network)))} for {network.elements:,} parameters"
            + (f", {memory_plan.format_bytes(memory.available)} left" if memory.available else ""),
        ),
        ("disk", describe_disk(config, layout, network, where or Path(config.run.root))),
        *_learning_rate(config),
        *_ranks(config),
        *_servers(config),
    ]


def _learning_rate(config: RunConfig) -> list[tuple[str, str]]:
    """The schedule of the learning rate, unless it is constant."""
    learner = config.learner
    parts = [f"{learner.learning_rate:g}"]
    if learner.warmup_updates:
        parts.append(f"reached after a warm-up of {learner.warmup_updates:,} updates")
    if learner.schedule_updates is not None:
        factor = LearningRate(learner).factor(1.0)
        parts.append(f"{learner.schedule} to {learner.learning_rate * factor:g} at update {learner.schedule_updates:,}")
    return [("learning rate", ", ".join(parts))] if len(parts) > 1 else []


def _ranks(config: RunConfig) -> list[tuple[str, str]]:
    if not config.synchronous:
        return []
    learner, learners = config.learner, config.learners
    text = (f"{learners} with a batch of {learner.batch_size} each, {learners * learner.batch_size} together, learning "
            f"rate {learner.learning_rate:g}")
    return [("learners", text + (", optimizer sharded" if config.allreduce.shard_optimizer else ""))]


def _servers(config: RunConfig) -> list[tuple[str, str]]:
    if not config.has_server:
        return []
    rule, learners = config.parameter_server, config.learners
    stale = rule.max_staleness
    guards = [f"gradients older than {stale} updates are dropped" if stale is not None else "",
              f"losses beyond {rule.outlier_deviations:g} deviations are left out" if rule.outlier_deviations else "",
              f"{rule.compensation} delay compensation" if rule.compensation != "none" else ""]
    numbers = f"{rule.shards} shard{'s' * (rule.shards > 1)}, {learners} learner{'s' * (learners > 1)}"
    return [("server", "; ".join([numbers, *filter(None, guards)]))]


def _lanes(config: RunConfig) -> str:
    numbers = ((config.env.groups, "groups"), (config.actors, "actors"))
    return " of ".join([*(f"{n} {what}" for n, what in reversed(numbers) if n > 1), f"{config.env.lanes} lanes"])
