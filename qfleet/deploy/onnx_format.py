"""ONNX files."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet.core.errors import ExportError, UserError
from qfleet.core.extras import require_module
from qfleet.deploy.policy_graph import PolicyGraph
from qfleet.deploy.value_info import Arrays
from qfleet.deploy.verification import largest_difference

OPSET = 18
"""The lowest version that both of PyTorch's exporters support; onnxruntime 1.14 and later read it."""

METADATA = "qfleet"
"""Key of the metadata, a JSON document, in the file's metadata_props."""

BATCH = "batch"


def write_onnx(graph: PolicyGraph, path: Path, metadata: dict[str, Any]) -> float | None:
    """Write the graph, and return its largest difference from the policy; None without onnxruntime.

    PyTorch has two exporters: the older one traces and is faster, the newer one (dynamo) needs onnxscript. The second
    is tried if the first fails or its file computes something else.
    """
    onnx = require_module("onnx", "onnx", "ONNX files")
    failures = []
    for export in (_export_traced, _export_dynamo):
        try:
            with _quiet():
                export(graph, path)
            model = onnx.load(str(path))
            onnx.helper.set_model_props(model, {METADATA: json.dumps(metadata)})
            onnx.checker.check_model(model)
            onnx.save(model, str(path))
            return _difference(graph, path)
        except Exception as error:  # of torch, onnx or onnxruntime, which all have their own
            failures.append(_first_line(error))
    raise ExportError(f"the policy cannot be exported to ONNX: {failures[0]}; with the other exporter: {failures[1]}")


def _export_traced(graph: PolicyGraph, path: Path) -> None:
    axes = {info.name: {0: BATCH} for info in (*graph.inputs, *graph.outputs) if info.batched}
    torch.onnx.export(graph, _example(graph), str(path), dynamo=False, dynamic_axes=axes, **_names(graph))


def _export_dynamo(graph: PolicyGraph, path: Path) -> None:
    require_module("onnxscript", "onnx", "PyTorch's newer ONNX exporter")
    batch = torch.export.Dim(BATCH)
    shapes = tuple({0: batch} if info.batched else None for info in graph.inputs)
    torch.onnx.export(graph, _example(graph), str(path), dynamo=True, dynamic_shapes=(shapes,), external_data=False,
                      verbose=False, **_names(graph))


def _names(graph: PolicyGraph) -> dict[str, Any]:
    return {"input_names": [info.name for info in graph.inputs], "opset_version": OPSET,
            "output_names": [info.name for info in graph.outputs]}


def _example(graph: PolicyGraph) -> tuple[torch.Tensor, ...]:
    inputs = graph.sample(2)  # one lane could be taken for an axis of size one
    return tuple(torch.from_numpy(inputs[info.name]) for info in graph.inputs)


def _difference(graph: PolicyGraph, path: Path) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [info.name for info in graph.outputs]

    def run(inputs: Arrays) -> Arrays:
        found: list[np.ndarray] = session.run(names, {info.name: inputs[info.name] for info in graph.inputs})
        return dict(zip(names, found, strict=True))

    return largest_difference(graph, run)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' progress and their warnings: what they warn about is verified afterwards."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _first_line(error: Exception) -> str:
    kind = "" if isinstance(error, ExportError | UserError) else f"{type(error).__name__}: "
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()  # without colours
    return kind + next((line.strip() for line in lines if line.strip()), "no message")
