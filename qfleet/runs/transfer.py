"""The weights of one network for another: which tensors fit, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qfleet.config import parse_mapping
from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import Checkpoint

LINES = 12
"""Differences that a message names before it only counts them."""


@dataclass(frozen=True)
class WeightTransfer:
    """Weights that can be taken over, by name, and a line for each tensor, here or there, that cannot."""

    taken: dict[str, torch.Tensor]
    unfit: list[str]


def match_weights(theirs: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> WeightTransfer:
    """What of `theirs` has a place of the same name and shape in `mine`."""
    there, here = ({name: tuple(value.shape) for name, value in weights.items()} for weights in (theirs, mine))
    fit = {name: value for name, value in theirs.items() if here.get(name) == there[name]}
    return WeightTransfer(fit, _differences(there, here))


def matching_weights(
    checkpoint: Checkpoint, mine: Mapping[str, torch.Tensor], config: str, partial: bool
) -> WeightTransfer:
    """The weights of a checkpoint for a network with the weights `mine`, of a run with this config (YAML).

    UserError unless all tensors fit or, with `partial`, some do; it names the tensors and the agent's keys that differ.
    """
    found = match_weights(checkpoint.policy(), mine)
    if found.taken and (partial or not found.unfit):
        return found
    keys = [_agent(text, str(checkpoint.path)) for text in (checkpoint.config_text, config)]
    problems = _shortened(found.unfit) + _differences(*keys)
    remedy = ("not one tensor fits: leave init_from out" if not found.taken else
              "the network must be the same, and all else may differ: set the agent's keys as they were there, or "
              "init_partial=true to take over the tensors that fit and begin the others anew")
    raise UserError("\n".join(["the network is another one", *problems, remedy]))


def _agent(config: str, origin: str) -> dict[str, Any]:
    """The agent's keys as written; nothing that they name is imported."""
    section = parse_mapping(config, origin).get("agent")
    return {f"agent.{key}": value for key, value in section.items()} if isinstance(section, dict) else {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line for each name with two values, or with one on one side only."""
    lines = []
    for name in dict.fromkeys([*here, *there]):
        if name not in here:
            lines.append(f"{name}: {there[name]} there, none here")
        elif name not in there:
            lines.append(f"{name}: none there, {here[name]} here")
        elif there[name] != here[name]:
            lines.append(f"{name}: {there[name]} there, {here[name]} here")
    return lines


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LINES else [*lines[:LINES], f"and {len(lines) - LINES} tensors more"]
