"""Export of a policy to a file, with a JSON document that describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from qfleet.core.errors import UserError
from qfleet.deploy.onnx_format import write_onnx
from qfleet.deploy.policy_graph import PolicyGraph
from qfleet.deploy.torchscript_format import write_torchscript
from qfleet.deploy.value_info import ValueInfo
from qfleet.runs.atomic_file import atomic_file

GraphFormat = Literal["onnx", "torchscript"]
ExportFormat = Literal["safetensors", "onnx", "torchscript"]
SUFFIXES: dict[str, ExportFormat] = {".onnx": "onnx", ".pt": "torchscript", ".ts": "torchscript"}
"""Suffix of a file -> its format, if none is named."""

WRITERS: dict[str, Callable[[PolicyGraph, Path, dict[str, Any]], float | None]] = {
    "onnx": write_onnx, "torchscript": write_torchscript}

METADATA_VERSION = 1


@dataclass(frozen=True)
class ExportedPolicy:
    """A policy as a file for another runtime.

    Attributes:
        path: The file.
        format: `onnx` or `torchscript`.
        inputs: Name, shape and type of each input.
        outputs: Name, shape and type of each output.
        difference: Largest difference from the policy on random observations; None if nothing could run the file.
    """

    path: Path
    format: GraphFormat
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    difference: float | None


def chosen_format(out: str | Path, format: str | None) -> ExportFormat:
    """The format named by the user, else that of the suffix, else safetensors."""
    if format is None:
        return SUFFIXES.get(Path(out).suffix, "safetensors")
    if format not in get_args(ExportFormat):
        raise UserError(f"format={format!r}: must be one of {', '.join(get_args(ExportFormat))}")
    return format  # type: ignore[return-value]


def chosen_graph_format(out: str | Path, format: str | None) -> GraphFormat:
    """The format of a file for another runtime: the one named by the user, else that of the suffix, else onnx."""
    chosen = chosen_format(out, format)
    if chosen != "safetensors":
        return chosen
    if format is not None:
        raise UserError(f"format={format!r} is a checkpoint: use qfleet.export for it, or one of "
                        f"{', '.join(get_args(GraphFormat))}")
    return "onnx"


def require_absent(out: str | Path) -> Path:
    """Path of a new file; UserError if it exists."""
    target = Path(out).expanduser()
    if target.exists():
        raise UserError(f"{target} exists already: choose another path, or delete it")
    return target


def write_policy(graph: PolicyGraph, out: str | Path, format: GraphFormat,
                 description: Mapping[str, Any]) -> ExportedPolicy:
    """Write the graph with its description and verify the file. It appears only if it computes what the policy does."""
    target = require_absent(out)
    with atomic_file(target) as partial:
        difference = WRITERS[format](graph, partial, {**description, **_interface(graph)})
    return ExportedPolicy(target, format, tuple(graph.inputs), tuple(graph.outputs), difference)


def _interface(graph: PolicyGraph) -> dict[str, Any]:
    """Inputs, outputs and recurrent state; initial values that are not listed are 0."""
    initial = {name: value[0].tolist() if value.ndim else value.item()
               for name, value in graph.initial_state(1).items() if value.any()}
    return {"version": METADATA_VERSION, "inputs": [info.to_json() for info in graph.inputs],
            "outputs": [info.to_json() for info in graph.outputs],
            "state": {"names": list(graph.state_names), "initial": initial,
                      "zero_at_episode_start": graph.episodic_state()}}
