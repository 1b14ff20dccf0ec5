"""TorchScript files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from qfleet.core.errors import ExportError
from qfleet.deploy.policy_graph import PolicyGraph
from qfleet.deploy.value_info import Arrays
from qfleet.deploy.verification import largest_difference

METADATA = "qfleet.json"
"""Extra file with the metadata, a JSON document."""


def write_torchscript(graph: PolicyGraph, path: Path, metadata: dict[str, Any]) -> float:
    """Write the traced graph, and return its largest difference from the policy."""
    example = graph.sample(2)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is deprecated, and its result is verified
        try:
            traced = torch.jit.trace(graph, tuple(torch.from_numpy(example[port.name]) for port in graph.inputs),
                                     check_trace=False)
            torch.jit.save(traced, str(path), _extra_files={METADATA: json.dumps(metadata)})
            loaded = torch.jit.load(str(path))
        except (RuntimeError, AttributeError) as error:
            raise ExportError(f"the policy cannot be exported to TorchScript: {str(error).strip().splitlines()[0]}"
                              ) from error

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            found = loaded(*(torch.from_numpy(inputs[port.name]) for port in graph.inputs))
        return {port.name: value.numpy() for port, value in zip(graph.outputs, found, strict=True)}

    return largest_difference(graph, run)
