"""Rules for messages by the sender's role, and validation of evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from qfleet.core.evaluation import Score
from qfleet.transport.fleet_pb2 import ExchangeRequest
from qfleet.transport.registry import ACTOR, EVALUATOR, LEARNER

MAX_TAGS = 1000
"""Most metrics and counters that the members of a run may send, and most of one message."""

MAX_COUNT = 1 << 53
MAX_VALUE = 1e100
"""Largest magnitude of returns and metrics: sums of many stay finite."""

Expected = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of every weight, by name."""


def expected_weights(state: Mapping[str, torch.Tensor]) -> Expected:
    return {name: (value.shape, value.dtype) for name, value in state.items()}


def require_allowed(message: ExchangeRequest, role: str, max_steps: int) -> None:
    """ValueError if a message contains something its sender's role must not send, or impossible counts.

    `max_steps` limits the steps of an actor in one message. Workers (LEARNER), which the run starts itself, act
    without that limit.
    """
    if message.judgements and role != EVALUATOR:
        raise ValueError(f"an evaluation by a member whose role is {role or 'unknown'}")
    if message.HasField("part") and role != LEARNER:
        raise ValueError(f"a part of a checkpoint by a member whose role is {role or 'unknown'}")
    if role not in (ACTOR, LEARNER) and (message.steps or message.parcels or message.episodes):
        raise ValueError(f"experience of a member whose role is {role or 'unknown'}")
    if role == ACTOR and message.steps > max_steps:
        raise ValueError(f"{message.steps} steps in one message, above {max_steps}")
    if len(message.figures) + len(message.counters) > MAX_TAGS:
        raise ValueError(f"{len(message.figures) + len(message.counters)} metrics and counters in one message")
    for metric in message.figures:
        if abs(metric.sum) > MAX_VALUE or metric.count > MAX_COUNT:
            raise ValueError(f"metric {metric.tag[:100]}: {metric.sum} in {metric.count} measurements")
    for counter in message.counters:
        if not 0 <= counter.by <= MAX_COUNT:
            raise ValueError(f"counter {counter.tag[:100]} moves by {counter.by}")
    for tag in (*(metric.tag for metric in message.figures), *(counter.tag for counter in message.counters)):
        if tag.startswith("eval/"):
            raise ValueError(f"{tag[:100]} is reserved for evaluations")
    if any(abs(episode.ret) > MAX_VALUE for episode in message.episodes):
        raise ValueError(f"an episode whose return is beyond {MAX_VALUE:g}")
    for info in (*(episode.info for episode in message.episodes), *(score.info for score in message.judgements)):
        if len(info) > MAX_TAGS or any(abs(metric.sum) > MAX_VALUE for metric in info):
            raise ValueError(f"{len(info)} metrics from info, or one beyond {MAX_VALUE:g}")


def require_sound(score: Score, weights: Mapping[str, torch.Tensor], expected: Expected) -> None:
    """ValueError unless the weights of an evaluation match the learner's, and everything is finite."""
    if not (math.isfinite(score.mean) and math.isfinite(score.std)):
        raise ValueError(f"an evaluation with a mean of {score.mean} and a deviation of {score.std}")
    if differ := sorted(expected.keys() ^ weights.keys()):
        raise ValueError(f"weights of an evaluation differ from the learner's in {', '.join(differ)[:200]}")
    for name, value in weights.items():
        if (value.shape, value.dtype) != expected[name]:
            raise ValueError(f"weights of {name} are {value.dtype} {tuple(value.shape)}, the learner's "
                             f"{expected[name][1]} {tuple(expected[name][0])}")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"weights of {name} are not finite")
