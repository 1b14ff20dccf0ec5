"""How cost grows: steps/s, updates/s and memory by lanes, batch and replay size, one of them varied at a time.

    python benchmarks/cost.py [--seconds 2] [--only lanes batch replay] [--table]

CartPole (2 × 256) and Pong (Nature CNN, bfloat16 where the CPU has it), prioritised, one thread. Every cell is a
process of its own: actors alone, then the learner alone, for some seconds each, after the replay was filled to its
capacity with the chunks of a short real play, over and over. 10^7 steps of pixels are left out: they would take a
quarter of an hour to compress. Cells that are in --out already are not measured again. --table prints what is there as
Markdown, rates per second of CPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

from qfleet.bench import machine
from qfleet.bench.rates import repeated
from qfleet.bench.stage import Stage

OUT = Path(__file__).parent / "results" / "cost.json"
BASE = {"cartpole": {"lanes": 8, "batch": 64, "replay": 100_000}, "pong": {"lanes": 8, "batch": 32, "replay": 10_000}}
AXES = {"cartpole": {"lanes": (1, 16, 64, 256), "batch": (32, 512, 4096),
                     "replay": (10_000, 100_000, 1_000_000, 10_000_000)},
        "pong": {"lanes": (1, 16, 64, 256), "batch": (32, 512, 4096), "replay": (10_000, 100_000, 1_000_000)}}
PLAYED = 2_000


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cell(recipe: str, lanes: int, batch: int, replay: int, seconds: float) -> dict:
    """One measurement, in this process."""
    stage = Stage(recipe, [f"env.lanes={lanes}", f"learner.batch_size={batch}", f"replay.capacity={replay}",
                           f"replay.min_steps={max(PLAYED, batch)}", "replay.alpha=0.6", "run.threads=1",
                           *(["env.threads=1"] if recipe == "pong" else [])])
    empty, chunks, add = peak_mb(), [], stage.replay.add

    def keep(chunk, priority=None):
        chunks.append(chunk)
        return add(chunk, priority)

    stage.replay.add = keep
    stage.fill(PLAYED)
    stage.replay.add = add
    full, at = stage.replay.layout.chunk_steps, 0
    while (len(chunks) + at) * full < replay:
        add(chunks[at % len(chunks)])
        at += 1
    acting = repeated(stage.play, 1, seconds)
    stage.learn(1)
    learning = repeated(lambda: stage.learn(1), 2, seconds)
    return {"steps_per_s": acting.per_s, "steps_per_cpu_s": acting.per_cpu_s, "updates_per_s": learning.per_s,
            "updates_per_cpu_s": learning.per_cpu_s, "replay_mb": stage.replay.nbytes / 1e6,
            "stored": int(stage.replay.metrics()["replay/size"]), "peak_mb": peak_mb(),
            "grown_mb": peak_mb() - empty}


def point(recipe: str, axis: str, value: int) -> dict:
    """A cell; a replay holds at least a chunk of every lane, which of Pong has 64 steps."""
    found = {"recipe": recipe} | BASE[recipe] | {axis: value}
    return found | {"replay": max(found["replay"], 80 * found["lanes"])}


def cells(only: list[str]) -> list[dict]:
    """The base of each recipe, and from it along every axis."""
    found = []
    for recipe, axes in AXES.items():
        for axis in only:
            found += [point(recipe, axis, value) for value in axes[axis]]
    return [one for at, one in enumerate(found) if one not in found[:at]]


def table(results: list[dict], axis: str) -> str:
    """One axis as Markdown, the recipes side by side; rates per second of CPU."""
    columns = [f"{recipe}: {what}" for recipe in AXES for what in ("steps/s", "updates/s", "replay MB", "process MB")]
    lines = [" | ".join([f"| {axis}", *columns]) + " |", "|" + "---|" * (len(columns) + 1)]
    for value in sorted({value for recipe in AXES for value in (*AXES[recipe][axis], BASE[recipe][axis])}):
        cells = []
        for recipe in AXES:
            wish = point(recipe, axis, value)
            one = next((one for one in results if wish.items() <= one.items()), None)
            cells += ["", "", "", ""] if one is None else [
                f"{one['steps_per_cpu_s']:,.0f}", f"{one['updates_per_cpu_s']:,.3g}", f"{one['replay_mb']:,.1f}",
                f"{one['peak_mb']:,.0f}"]
        lines.append(" | ".join([f"| {value:,}", *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0,
                        help="of CPU for acting, and for learning, in every cell (default: 2)")
    parser.add_argument("--only", nargs="+", choices=["lanes", "batch", "replay"], default=["lanes", "batch", "replay"])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(cell(**json.loads(args.cell), seconds=args.seconds)))
        return
    results = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    if args.table:
        print("\n\n".join(table(results, axis) for axis in args.only))
        return
    for wish in cells(args.only):
        if any(wish.items() <= one.items() for one in results):
            continue
        done = subprocess.run([sys.executable, __file__, "--cell", json.dumps(wish), "--seconds", str(args.seconds)],
                              capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{wish} failed:\n{done.stderr}")
        results.append(wish | json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(results[-1]), flush=True)
        args.out.write_text(json.dumps({"machine": machine(), "seconds": args.seconds, "results": results}, indent=1)
                            + "\n")


if __name__ == "__main__":
    main()
