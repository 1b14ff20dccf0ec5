"""Transfer of weights between networks: the tensors that fit, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qfleet.config import parse_mapping
from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import Checkpoint

LINES = 12
"""Number of differences that a message lists; further ones are only counted."""


@dataclass(frozen=True)
class WeightTransfer:
    """Weights that can be copied, by name, and a line for each tensor on either side that cannot."""

    taken: dict[str, torch.Tensor]
    unfit: list[str]


def match_weights(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> WeightTransfer:
    """Select the tensors of `source` that have the same name and shape in `target`."""
    there, here = ({name: tuple(value.shape) for name, value in weights.items()} for weights in (source, target))
    fit = {name: value for name, value in source.items() if here.get(name) == there[name]}
    return WeightTransfer(fit, _differences(there, here))


def matching_weights(
    checkpoint: Checkpoint, target: Mapping[str, torch.Tensor], config: str, partial: bool
) -> WeightTransfer:
    """Select the weights of a checkpoint for a network with the weights `target`, of a run with this config (YAML).

    UserError unless all tensors fit or, with `partial`, at least one; it names the differing tensors and agent keys.
    """
    found = match_weights(checkpoint.policy(), target)
    if found.taken and (partial or not found.unfit):
        return found
    keys = [_agent(text, str(checkpoint.path)) for text in (checkpoint.config_text, config)]
    problems = _shortened(found.unfit) + _differences(*keys)
    remedy = ("no tensor fits: leave out init_from" if not found.taken else
              "the network must be the same, everything else may differ: set the keys of agent and normalise as in the "
              "checkpoint, or init_partial=true to copy the tensors that fit and initialise the others randomly")
    raise UserError("\n".join(["the networks differ", *problems, remedy]))


def _agent(config: str, origin: str) -> dict[str, Any]:
    """Return the agent's keys as text from the config; nothing that they name is imported."""
    section = parse_mapping(config, origin).get("agent")
    return {f"agent.{key}": value for key, value in section.items()} if isinstance(section, dict) else {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """One line per name whose values differ or that exists on one side only."""
    lines = []
    for name in dict.fromkeys([*here, *there]):
        if name not in here:
            lines.append(f"{name}: {there[name]} in the checkpoint, none here")
        elif name not in there:
            lines.append(f"{name}: none in the checkpoint, {here[name]} here")
        elif there[name] != here[name]:
            lines.append(f"{name}: {there[name]} in the checkpoint, {here[name]} here")
    return lines


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LINES else [*lines[:LINES], f"and {len(lines) - LINES} more tensors"]
