"""The one place that chooses how updates and acting run: operation by operation, compiled, or as CUDA graphs.

    updates on a GPU with learner.capture
        replay on the device, gradients of this learner alone    GraphUpdate: the whole update as one CUDA graph
        otherwise, without learner.compile                       GraphGradient: loss and gradient as a CUDA graph
        otherwise                                                the given gradient function
    updates elsewhere                                            the given gradient function
    networks with learner.compile                                by torch.compile, also inside a GraphUpdate
    acting on a GPU                                              GraphPolicy, unless the agent evaluates its actions
    acting elsewhere                                             the given policy

Callers use what they get without asking which one it is.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal, Protocol

import torch
from torch import nn

from qfleet.accel.compiled import compile_if_possible
from qfleet.accel.graph_gradient import GraphGradient
from qfleet.accel.graph_policy import GraphPolicy
from qfleet.accel.graph_update import GraphUpdate
from qfleet.accel.protocols import ActingPolicy, DeviceOptimizer, EagerPolicy, FlatParams
from qfleet.core.env import EnvSpec
from qfleet.core.gradient import GradientFn, NetworkGradient
from qfleet.core.replay import Replay
from qfleet.replay.device_store import DeviceReplay

log = logging.getLogger(__name__)


class UpdateOptions(Protocol):
    """The options of `LearnerConfig` that the choice depends on."""

    @property
    def batch_size(self) -> int: ...
    @property
    def compile(self) -> bool: ...
    @property
    def has_own_optimizer(self) -> bool: ...
    @property
    def capture(self) -> bool | Literal["auto"]: ...


def resolve_capture(requested: bool | Literal["auto"], device: torch.device, overlapped: bool) -> bool:
    """Value of `learner.capture` on this device.

    `auto` captures unless gradients are `overlapped`: sent while the backward pass computes the others.
    """
    if device.type != "cuda":
        if requested is True:
            log.warning("learner.capture=true has no effect on a CPU: it captures CUDA graphs")
        return False
    return not overlapped if requested == "auto" else requested


def compile_networks(cfg: UpdateOptions, *nets: nn.Module) -> None:
    """Compile the networks at their first call, if requested."""
    if cfg.compile:
        compile_if_possible(*nets)


def gradient_fn_for(cfg: UpdateOptions, autograd: NetworkGradient) -> GradientFn:
    """`autograd`, or its CUDA graph."""
    return GraphGradient(autograd) if _captures_gradients(cfg, autograd.rng.device) else autograd


def graph_update_for(cfg: UpdateOptions, replay: Replay, autograd: NetworkGradient, flat: FlatParams,
                     optimizer: DeviceOptimizer | None, filters_outliers: bool) -> GraphUpdate | None:
    """Whole updates as one CUDA graph; None if they run in steps, with a warning where capture was requested.

    `optimizer` is None if its step needs other learners or the host.
    """
    device = flat.master.device
    if cfg.capture is not True or device.type != "cuda":
        return None
    why = why_not_whole(replay, flat, optimizer, filters_outliers)
    if cfg.has_own_optimizer:
        why = "an optimizer given as module:attribute steps operation by operation"
    if why is None and isinstance(replay, DeviceReplay) and optimizer is not None:
        return GraphUpdate(replay, autograd, flat, optimizer, cfg.batch_size)
    log.warning("learner.capture: updates are not recorded as one CUDA graph, because %s%s", why,
                "; their losses and gradients will be" if _captures_gradients(cfg, device) else "")
    return None


def why_not_whole(
    replay: object, flat: FlatParams, optimizer: DeviceOptimizer | None, filters_outliers: bool
) -> str | None:
    """Reason why an update cannot be one CUDA graph, or None."""
    if not isinstance(replay, DeviceReplay):
        return "the replay is not on the device (replay.store=host)"
    if optimizer is None:
        return "gradients are synchronised with other learners"
    if filters_outliers:
        return "loss outliers are dropped"
    if any(part.group.period > 1 for part in flat.param_slices):
        return "some parameter groups are frozen in some updates"
    return None


def acting_for(policy: EagerPolicy, spec: EnvSpec, lanes: int, columns: tuple[str, ...]) -> ActingPolicy:
    """What acts for so many lanes: the policy, or its CUDA graph, which is made once.

    Call it when all lanes start an episode, after the policy's `begin`. Of the agent's extra columns, those in
    `columns` are needed.
    """
    if not acts_captured(policy):
        return policy
    key = (lanes, columns)
    if key not in policy.graph_policies:
        policy.graph_policies[key] = GraphPolicy(policy, spec, lanes, columns)
    found: GraphPolicy = policy.graph_policies[key]
    found.begin()
    return found


def acts_captured(policy: EagerPolicy) -> bool:
    """True if `acting_for` returns a CUDA graph, which acts without waiting for queued updates."""
    if policy.device.type != "cuda":
        return False
    if policy.agent.evaluate_actions is not None:
        _warn("the agent evaluates its actions (evaluate_actions)")
        return False
    return True


def stores_in_turns(device: torch.device) -> bool:
    """True if the chunks of a learner's lanes should end at different steps.

    With a learner on a GPU the environments are the bottleneck, and they would be idle while the chunks of all lanes
    are stored at once.
    """
    return device.type == "cuda"


def _captures_gradients(cfg: UpdateOptions, device: torch.device) -> bool:
    return cfg.capture is True and not cfg.compile and device.type == "cuda"


@cache
def _warn(reason: str) -> None:
    """Warn once, independent of the number of actors and episodes."""
    log.warning("acting is not recorded as a CUDA graph, because %s; it runs operation by operation", reason)
