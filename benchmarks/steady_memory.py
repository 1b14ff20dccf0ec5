"""Does memory stay as it is? The process of a long run, looked at every so many steps after its replay is full.

    python benchmarks/steady_memory.py [--recipe pong] [--steps 1000000] [--out FILE] [key=value ...]

Everything lives in one process: emulators, actors, replay, learner, evaluations and checkpoints. The replay is a tenth
of the run, so that it is written over nine times. Where frames are compressed its own size goes up and down with what
is played, and is taken off. `mb_per_million` is the slope of the straight line that fits best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replay_memory import resident
from sinks import Sink
from speed import describe_machine

from qfleet import api

LOOKS = 200


class Watch(Sink):
    """A metrics sink that notes steps, the size of the process, and that of its replay."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.seen.append((record["step"], resident() / 1e6, record["replay/bytes"] / 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="pong")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "steady_memory.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    watch, full = Watch(), args.steps // 10
    with tempfile.TemporaryDirectory() as root:
        api.train(args.recipe, [
            f"total_steps={args.steps}", "stop_at=null", "device=cpu", f"replay.capacity={full}",
            f"eval.period_steps={full}", "eval.episodes=5", "eval.max_episode_steps=2000",
            f"checkpoint.period_steps={full}", f"run.root={root}", f"run.log_period_steps={args.steps // LOOKS}",
            *args.overrides], sinks=[watch])
    after = [(step, process - replay) for step, process, replay in watch.seen if step > full]
    steps, sizes = zip(*after, strict=True)
    slope = statistics.linear_regression(steps, sizes).slope * 1e6
    half = next(size for step, size in after if step >= args.steps / 2)
    row = {"machine": describe_machine(), "recipe": args.recipe, "steps": args.steps, "overrides": args.overrides,
           "capacity": full, "first_mb": round(sizes[0], 1), "half_mb": round(half, 1), "last_mb": round(sizes[-1], 1),
           "most_mb": round(max(sizes), 1), "mb_per_million": round(slope, 2),
           "seen": [[step, round(process, 1), round(replay, 1)] for step, process, replay in watch.seen]}
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    args.out.write_text(json.dumps({"rows": rows | {args.recipe: row}}, indent=1) + "\n")
    print(f"{args.recipe}: {row['first_mb']:,.0f} MB beside the replay when it was full, {row['half_mb']:,.0f} at "
          f"half-time, {row['last_mb']:,.0f} in the end; {row['mb_per_million']:+.1f} MB per million steps")


if __name__ == "__main__":
    main()
