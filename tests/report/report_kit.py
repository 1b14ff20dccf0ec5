"""Run directories to be reported on: written by the tests, with everything that a page can show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><b>&amp;'"


def records(seed: int, points: int = 24, gain: float = 1.0) -> list[dict]:
    rows = []
    for i in range(1, points + 1):
        row = {"step": 500 * i, "frames": 2000 * i, "updates": 200 * i, "episodes": 4 * i, "time_s": 1.5 * i,
               "rollout/ep_rew_mean": gain * i * 4 + seed, "rollout/exploration_rate": 1 / i,
               "rollout/ep_len_mean": 30.0 + i, "rollout/arm": i % 3, "time/fps": 300.0 + seed + i % 5,
               "time/updates_per_s": 100.0 + i % 3, "train/loss": math.exp(-i / 9), "train/priority": 1 / i,
               "train/q_mean": float(i), "replay/samples_per_insert": 7.8 - 1 / i, "replay/size": 50.0 * i,
               "replay/bytes": 1e6, "replay/beta": 0.4 + i / 99, "fleet/actors": 2.0,
               "fleet/policy_lag": 20.0 + seed + i % 2 / 5,
               "fleet/backpressure_share": 0.6, "actor/env_ms": 1.0, "actor/act_ms": 2.0, "actor/wait_ms": 7.0,
               "train/sample_ms": 0.5, "train/update_ms": 2.0, "time/learner_share": 0.9, "time/idle_share": 0.04}
        rows.append(row)
        if i % 6 == 0:
            rows.append({key: row[key] for key in ("step", "frames", "updates", "episodes", "time_s")} |
                        {"eval/mean_reward": gain * i + seed, "eval/std_reward": 1.0})
    return rows


def scattered(seed: int, points: int = 60) -> list[dict]:
    """Returns that jump up and down, a schedule with a corner, and a count with a step."""
    rng = np.random.default_rng(seed)
    return [{"step": 100 * i + 7 * seed, "updates": 10 * i, "time_s": float(i),
             "rollout/ep_rew_mean": float(i + rng.normal(0, 20)), "rollout/exploration_rate": max(0.1, 1 - i / 20),
             "replay/clamped_priorities": float(i > 30)}
            for i in range(1, points + 1)]


def limited(points: int = 24) -> list[dict]:
    """Short of experience at first, in records that follow each other fast, and of updates later."""
    rows, clock = [], {"step": 0, "time_s": 0.0}
    for i in range(points):
        early = i < points // 2
        clock = {"step": clock["step"] + (100 if early else 1000), "time_s": clock["time_s"] + (9.0 if early else 1.0)}
        rows.append(clock | {"updates": 10 * i, "frames": clock["step"], "fleet/actors": 2.0, "actor/env_ms": 9.0,
                             "actor/act_ms": 1.0, "actor/wait_ms": 0.0 if early else 50.0, "train/sample_ms": 0.5,
                             "train/update_ms": 2.0, "fleet/backpressure_share": 0.0 if early else 0.9,
                             "time/learner_share": 0.2 if early else 0.9, "time/idle_share": 0.8 if early else 0.05})
    return rows


def write_run(root: Path, name: str, seed: int = 1, *, gain: float = 1.0, env: str = "ALE/Pong-v5", double: bool = True,
              rows: list[dict] | None = None) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    settings = {"seed": seed, "total_steps": 12000, "env": {"id": env, "kwargs": {"title": EVIL}},
                "agent": {"double": double, "n_step": 3}, "replay": {"samples_per_insert": 8.0}, "run": {"name": name}}
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    attempt = {"command": ["/usr/bin/qfleet", "train", "pong", f"run.name={name}"],
               "started": "2026-11-15T10:00:00+00:00",
               "directory": "/home/me", "python": "3.11.7", "platform": "Linux", "versions": {"qfleet": "0.1.0"},
               "hardware": {"cpu": EVIL, "cores": 2, "memory_bytes": 8 * 10**9, "gpus": []},
               "git": {"commit": "c0ffee", "dirty": True}}
    (folder / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    lines = [json.dumps(row) for row in (records(seed, gain=gain) if rows is None else rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_film(folder: Path, name: str = "step-000000012000.mp4", pictures: int = 90) -> Path:
    """Three seconds of a moving square."""
    from qfleet.report.video import write_mp4

    def frames():
        for i in range(pictures):
            picture = np.full((64, 96, 3), 40, np.uint8)
            picture[20:40, i % 76:i % 76 + 20] = (230, 120, 40)
            yield picture

    write_mp4(frames(), folder / "videos" / name)
    return folder / "videos" / name
