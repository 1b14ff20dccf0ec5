"""What the checkpoint tests share: one small run to save, and a forger of manifests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Segment
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints

SPEC = EnvSpec("CartPole-v1", {"obs": Leaf((4,), "float32", "vector")}, 2)
META = CheckpointMeta("seed: 1\nenv: {id: CartPole-v1}\n", SPEC, {"eval/mean_reward": 487.5})
POLICY = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2, dtype=torch.bfloat16)}
STATE = {"updates": 7, "rng": np.random.default_rng(3).bit_generator.state, "priorities": np.arange(5.0),
         "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
         "net": POLICY, "published": {"state": POLICY, "old": torch.arange(5.0, dtype=torch.float64)}}


def segment(name: str, data: bytes = b"0123456789" * 20, calls: list | None = None) -> Segment:
    def blocks():
        if calls is not None:
            calls.append(name)
        return [data[:50], data[50:]]
    return Segment(name, blocks)


def save(checkpoints: Checkpoints, step: int, names=("replay-0-3", "replay-4-7"), calls: list | None = None) -> Path:
    return checkpoints.save(step, step // 2, POLICY, {**STATE, "step": step},
                            [segment(name, name.encode() * 30, calls) for name in names], META)


def rewrite_manifest(path: Path, change) -> None:
    """Forge: change the manifest and make its own hash right again."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"sha256": digest, **body}))


def forge_file(path: Path, name: str, data: bytes) -> None:
    """Forge: put other contents into a file, with the hashes to match."""
    (path / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(path, lambda body: body["files"].update({name: entry}))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
