"""How cost grows: steps/s, updates/s and memory by lanes, batch and replay size, one of them varied at a time.

    python benchmarks/cost.py [device=cpu] [--seconds 2] [--only lanes batch replay] [--table]
    python benchmarks/cost.py device=cuda  [--seconds 1] [--only lanes batch replay] [--table]

Without a device, a GPU is taken where there is one. Actors alone, then the learner alone, for some seconds each, on a
full replay, prioritised. Cells that are in --out already are not measured again; --table prints them as Markdown.

On a CPU: CartPole (2 × 256) and Pong (Nature CNN, bfloat16 where the CPU has it), one thread, rates per second of CPU.
Every cell is a process of its own; the replay is filled with the chunks of a short real play, over and over. 10^7 steps
of pixels are left out: they would take a quarter of an hour to compress.

On a GPU: `pong-fast` with two groups that have half of the lanes each, its replay raw on the GPU; rates by the clock,
memory as its most since the cell began. All cells are in one process, as a GPU takes seconds to begin. The replay is
filled with noise before anybody plays: 10^7 steps of the emulators would take minutes. As emulators take a tenth of a
second each to begin, one after the other, nobody plays where the batch is varied, of which actors do not know, and of
other replays than the usual one only beside the largest. Further overrides, key=value, are for every cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from speed import describe_machine
from speed.stage import BenchStage
from speed.throughput import measure_throughput

from qfleet.runconfig.auto import resolve_device

OUT = Path(__file__).parent / "results" / "cost.json"
BASE = {"cartpole": {"lanes": 8, "batch": 64, "replay": 100_000}, "pong": {"lanes": 8, "batch": 32, "replay": 10_000}}
AXES = {"cartpole": {"lanes": (1, 16, 64, 256), "batch": (32, 512, 4096),
                     "replay": (10_000, 100_000, 1_000_000, 10_000_000)},
        "pong": {"lanes": (1, 16, 64, 256), "batch": (32, 512, 4096), "replay": (10_000, 100_000, 1_000_000)}}
PLAYED = 2_000
GPU_OUT = Path(__file__).parent / "results" / "cost_gpu.json"
GPU_BASE = {"lanes": 64, "batch": 256, "replay": 100_000}
GPU_AXES = {"lanes": (1, 8, 64, 256), "batch": (32, 256, 512, 4096),
            "replay": (10_000, 100_000, 1_000_000, 10_000_000)}
BURST = 32
"""Updates that a GPU makes before somebody waits for it."""


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cell(recipe: str, lanes: int, batch: int, replay: int, seconds: float) -> dict:
    """One measurement, in this process."""
    stage = BenchStage(recipe, [f"env.lanes={lanes}", f"learner.batch_size={batch}", f"replay.capacity={replay}",
                           f"replay.min_steps={max(PLAYED, batch)}", "replay.alpha=0.6", "run.threads=1", "device=cpu",
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
    acting = measure_throughput(stage.play, 1, seconds)
    stage.learn(1)
    learning = measure_throughput(lambda: stage.learn(1), 2, seconds)
    return {"steps_per_s": acting.per_s, "steps_per_cpu_s": acting.per_cpu_s, "updates_per_s": learning.per_s,
            "updates_per_cpu_s": learning.per_cpu_s, "replay_mb": stage.replay.nbytes / 1e6,
            "stored": int(stage.replay.metrics()["replay/size"]), "peak_mb": peak_mb(),
            "grown_mb": peak_mb() - empty}


def gpu_cell(wish: dict, seconds: float, words: Sequence[str], played: bool) -> dict:
    """One measurement on a GPU, in this process, of what is `played`, or of the learner alone; by the clock."""
    from fast_speed import noise

    gc.collect()  # the cell before
    if gpu := torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin, lanes = time.perf_counter(), wish["lanes"] if played else 1
    groups = min(2, lanes)
    with closing(BenchStage("pong-fast", [
            f"env.groups={groups}", f"env.lanes={lanes // groups}", f"learner.batch_size={wish['batch']}",
            f"replay.capacity={wish['replay']}", f"replay.min_steps={wish['batch']}", "replay.alpha=0.6",
            "replay.store=device", *words])) as stage:
        stage.replay.clock.count_steps(wish["batch"])  # the warm-up is over
        chunk = noise(stage.replay.layout, stage.spec.num_actions)
        for _ in range(wish["replay"] // stage.replay.layout.chunk_steps):
            stage.replay.add(chunk)
        stage.fill(0)
        stage.wait()
        ready = time.perf_counter()
        found = {"ready_s": ready - begin}
        if played:
            measure_throughput(stage.play, 20 * lanes)  # in the first turns choices are recorded
            acting = measure_throughput(stage.play, 1, seconds, stage.wait, time.perf_counter)
            found["steps_per_s"] = acting.per_s

        def learn() -> int:
            made = stage.learn(BURST)
            stage.wait()
            return made

        learn()  # in the first updates one is recorded
        found["updates_per_s"] = measure_throughput(learn, 1, seconds, stage.wait, time.perf_counter).per_s
        found |= {"replay_mb": stage.replay.nbytes / 1e6, "stored": int(stage.replay.metrics()["replay/size"]),
                  "precision": stage.config.learner.precision, "capture": stage.config.learner.capture,
                  "measured_s": time.perf_counter() - ready}
    return found | ({"gpu_mb": torch.cuda.max_memory_allocated() / 1e6} if gpu else {})


def gpu_cells(only: list[str]) -> list[tuple[dict, bool]]:
    """The base, and from it along every axis; whether somebody plays there."""
    found: list[tuple[dict, bool]] = []
    for axis in only:
        for value in GPU_AXES[axis]:
            wish = GPU_BASE | {axis: value}
            if wish not in [one for one, _ in found]:
                found.append((wish, axis == "lanes" or wish["replay"] == GPU_AXES["replay"][-1] or wish == GPU_BASE))
    return found


def gpu_table(results: list[dict], axis: str) -> str:
    """One axis as Markdown; rates by the clock."""
    lines = [f"| {axis} | steps/s | updates/s | samples/s | replay, GB | GPU memory at most, GB |", "|" + "---|" * 6]
    for value in GPU_AXES[axis]:
        wish = GPU_BASE | {axis: value}
        for one in (one for one in results if wish.items() <= one.items()):
            steps = f"{one['steps_per_s']:,.0f}" if "steps_per_s" in one else ""
            lines.append(f"| {value:,} | {steps} | {one['updates_per_s']:,.0f} | "
                         f"{one['updates_per_s'] * one['batch']:,.0f} | {one['replay_mb'] / 1e3:,.2f} | "
                         f"{one.get('gpu_mb', 0) / 1e3:,.2f} |")
    return "\n".join(lines)


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
    parser.add_argument("overrides", nargs="*", help="device=NAME; on a GPU others, too", metavar="key=value")
    parser.add_argument("--seconds", type=float,
                        help="for acting, and for learning, in every cell: of CPU (default: 2), on a GPU by the clock "
                             "(default: 1)")
    parser.add_argument("--only", nargs="+", choices=["lanes", "batch", "replay"], default=["lanes", "batch", "replay"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    named = [word.removeprefix("device=") for word in args.overrides if word.startswith("device=")]
    gpu = resolve_device(named[-1] if named else "auto").type == "cuda"
    if not gpu and len(named) < len(args.overrides):
        parser.error("on a CPU cells are what they are: of overrides there is device=NAME")
    args.seconds = args.seconds or (1.0 if gpu else 2.0)
    if args.cell:
        print(json.dumps(cell(**json.loads(args.cell), seconds=args.seconds)))
        return
    args.out = args.out or (GPU_OUT if gpu else OUT)
    results = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    if args.table:
        shown = table if any("recipe" in one for one in results) else gpu_table
        print("\n\n".join(shown(results, axis) for axis in args.only))
        return
    played = gpu_cells(args.only) if gpu else [(wish, True) for wish in cells(args.only)]
    for wish, plays in played:
        if any(wish.items() <= one.items() for one in results):
            continue
        found = gpu_cell(wish, args.seconds, args.overrides, plays) if gpu else cell_alone(wish, args.seconds)
        results.append(wish | found)
        print(json.dumps(results[-1]), flush=True)
        document = {"machine": describe_machine(), "seconds": args.seconds, "results": results}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


def cell_alone(wish: dict, seconds: float) -> dict:
    """One measurement, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "device=cpu", "--cell", json.dumps(wish),
                           "--seconds", str(seconds)], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{wish} failed:\n{done.stderr}")
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
