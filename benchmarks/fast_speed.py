"""How fast one GPU is kept busy: updates per second, steps per second beside them, and the time to solve Pong.

    python benchmarks/fast_speed.py updates  [--recipe r2d2] [--batch 32 512 ...] [--set agent.algo=c51 ...] [--profile]
    python benchmarks/fast_speed.py acting   [--recipe r2d2] [--seconds 20] [--set replay.samples_per_insert=8 ...]
    python benchmarks/fast_speed.py pong     [--seeds 1 2 3] [--recipe pong-fast] [--score 18] [--games 30]
    python benchmarks/fast_speed.py check    [--met] [--recipe pong-fast] [--algos dqn c51 qr]
    python benchmarks/fast_speed.py layers
    python benchmarks/fast_speed.py beside
    python benchmarks/fast_speed.py parity   [--seeds 1 2 3 4 5]

Every command appends a JSON record, with versions and hardware, to --out. `updates` times the learner alone, from the
draw to the priorities, on a replay full of noise; with `--met` as if gradients met those of others between. `acting`
plays random actions in the bare vector environment first, then trains the recipe, and gives the share that is left of
the first. `pong` starts `qfleet train` as a user would and counts from the start of the process to the snapshot that
scores 18, or SCORE, in 30 greedy games, that snapshot's own evaluation not counted; 30 games more, or GAMES, without
the limit of evaluations, are then played by it. `check` compares recorded updates with those made in pieces, and those
with each other, and fails where the first ones differ by more than TOLERANCE; `layers` compares the network of bfloat16
with kernels of our own behind its convolutions and without them with that of float32. `beside` compares what is chosen
while updates are under way with what is chosen while the GPU does nothing else, new weights arriving all the time.
`parity` learns Catch from pixels with both: the steps until 20 evaluation episodes reach 0.95, seed by seed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trials
from speed import describe_machine

TOLERANCE = {"fp32": 0.01, "bf16": 0.10}
"""How far the first updates, of which the last is recorded, may lie from those in pieces, over the way moved. They
compute the same by other kernels, which round otherwise; later ones differ by more, as every difference grows."""


def noise(layout: Any, actions: int) -> Any:
    """A chunk of nothing in particular, all of whose windows may be drawn."""
    import numpy as np

    from qfleet.core.replay import Chunk

    rng, columns = np.random.default_rng(0), {}
    for column in layout.columns:
        if column.dtype == "uint8":
            columns[column.name] = rng.integers(0, 255, (layout.rows, *column.shape)).astype(np.uint8)
        else:  # whole numbers are arms, of which there are four at least
            values = rng.normal(size=(layout.rows, *column.shape)).astype(column.dtype)
            columns[column.name] = abs(values) % 4 if values.dtype.kind == "i" else values
    columns |= {"action": rng.integers(actions, size=layout.rows).astype(np.int32),
                "discount": np.ones(layout.rows, np.float32), "last": np.zeros(layout.rows, bool)}
    states = (layout.starts, len(layout.state_rows))
    columns |= {column.name: np.zeros((*states, *column.shape), column.dtype) for column in layout.state_columns}
    return Chunk(columns, np.ones(layout.starts, bool))


def noise_spec() -> Any:
    from qfleet.core.env import EnvSpec, Leaf

    return EnvSpec("noise", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, 6)


def learner_of(recipe: str, batch: int, overrides: list[str], capacity: int, filled: int, met: bool = False) -> Any:
    """A learner of Pong on a replay of noise, and its settled config."""
    import torch

    from qfleet.core.clock import Progress, Schedule
    from qfleet.learner.learner import Learner, LearnerContext
    from qfleet.learner.weight_store import Mailbox
    from qfleet.replay.device_store import DeviceReplay
    from qfleet.replay.host_store import HostReplay
    from qfleet.runconfig.auto import resolve_auto
    from qfleet.runconfig.build import make_agent, make_layout
    from qfleet.runconfig.resolution import resolve
    from qfleet.sync.gradient_sync import Solo
    from qfleet.training.meter import Meter

    class Met(Solo):
        """Meets no other learner, but says that it may."""

        local_optimizer = None

    spec = noise_spec()
    config = resolve_auto(resolve(recipe, [f"learner.batch_size={batch}", f"replay.capacity={capacity}", "env.groups=1",
                                           "env.lanes=8", *overrides]).config, spec)
    torch.set_num_threads(config.run.threads or 1)
    device, layout, agent = torch.device(config.device), make_layout(config, spec), make_agent(config, spec)
    store = DeviceReplay if config.replay.store == "device" else HostReplay
    replay = store(layout, config.replay.model_copy(update={"samples_per_insert": 1e9}), 1, device)
    replay.clock.count_steps(10**9)
    chunk = noise(layout, spec.num_actions)
    for _ in range(filled // layout.chunk_steps):
        replay.add(chunk)
    replay.clock.count_steps(10**6)
    meter = Meter([], lambda: Progress(0, 0), 4, Schedule(None, None))
    context = LearnerContext(gradient_sync=Met(config.learner) if met else None)
    return Learner(agent, replay, Mailbox(), meter, config.learner, 1, device, context), config


def updates(args: argparse.Namespace) -> None:
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for batch in args.batch:
        learner, config = learner_of(args.recipe, batch, args.set, args.capacity, args.filled, args.met)
        begin = time.perf_counter()
        learner.max_updates_per_step = 20
        learner.step()
        wait()
        warm_s = time.perf_counter() - begin
        learner.max_updates_per_step = args.updates
        rates = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            learner.step()
            wait()
            rates.append(args.updates / (time.perf_counter() - begin))
        keep(args, {"kind": "updates", "recipe": args.recipe, "batch": batch, "set": args.set,
                    "precision": config.learner.precision, "store": config.replay.store,
                    "capture": config.learner.capture, "capacity": args.capacity, "alpha": config.replay.alpha,
                    "whole": learner._graph_update is not None,
                    "taped": getattr(learner.gradient_fn, "captured", False),
                    "warm_up_s": round(warm_s, 2), "updates_per_s": round(statistics.median(rates), 1),
                    "all": [round(rate, 1) for rate in rates],
                    "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if config.device != "cpu" else None})
        if args.profile:
            profile(learner, wait)
        del learner


def check(args: argparse.Namespace) -> None:
    """Does a recorded update move the weights as one in pieces does? Distance of both, over the way moved."""
    from qfleet.accel.graph_update import WARM_UP

    wrong = []
    for algo in args.algos:
        for precision in ("fp32", "bf16"):
            for alpha in ("0", "0.6"):
                trails, begin = [], None
                for capture in ("true", "false", "false"):  # the last as a control: what two runs in pieces differ by
                    words = [f"agent.algo={algo}", f"learner.precision={precision}", f"replay.alpha={alpha}",
                             f"learner.capture={capture}", "replay.store=device", *args.set]
                    learner, _ = learner_of(args.recipe, 64, words, 20_000, 10_000, args.met)
                    begin, trail = learner.flat.master.clone(), []
                    for burst in (WARM_UP + 1, 39 - WARM_UP):  # of the first ones the last is recorded
                        learner.max_updates_per_step = burst
                        learner.step()
                        trail.append(learner.flat.master.clone())
                    trails.append(trail)
                    whole = learner._graph_update is not None and bool(learner._graph_update._graphs)
                    taped = getattr(learner.gradient_fn, "captured", False)
                    assert (taped if args.met else whole) == (capture == "true"), f"{words}: recorded {whole}, {taped}"
                away, chance = (
                    [round(float((mine - its).norm() / (its - begin).norm()), 6)
                     for mine, its in zip(trail, trails[1], strict=True)] for trail in (trails[0], trails[2]))
                keep(args, {"kind": "check", "met": args.met, "algo": algo, "precision": precision, "alpha": alpha,
                            "updates": 40, "distance_early": away[0], "distance": away[1],
                            "distance_of_two_in_pieces": chance[1], "tolerance": TOLERANCE[precision]})
                if not away[0] <= TOLERANCE[precision]:  # so that NaN is wrong, too
                    wrong.append(f"{algo}, {precision}, alpha {alpha}: {away[0]:.2%}, not {TOLERANCE[precision]:.0%}")
    if wrong:
        sys.exit("recorded updates are not those in pieces:\n" + "\n".join(wrong))


def layers(args: argparse.Namespace) -> None:
    """How far torso and head in bfloat16 are from those in float32, gradients too: by our kernels, and by torch's."""
    import torch

    from qfleet.accel.kernels import bf16, conv_epilogue_source, images, kernel_compiler, value_head_source
    from qfleet.networks import heads
    from qfleet.networks.torsos import nature

    assert kernel_compiler.compile_kernel("lay") is not None, "no kernels of our own here"
    pictures = torch.randint(256, (512, 4, 84, 84), dtype=torch.uint8, device="cuda")
    features = torch.randn(512, 3136, device="cuda").relu()
    for part, norm in itertools.product(("torso", "head"), ("none", "layer")):
        torch.manual_seed(0)
        exact = nature.build((4, 84, 84), norm) if part == "torso" else heads.DuelingHead(3136, (512,), (6,), norm)
        exact = exact.cuda().to(memory_format=torch.channels_last)
        rounded, seen = copy.deepcopy(exact).bfloat16(), pictures if part == "torso" else features

        def results(net: Any, seen: Any = seen) -> list[Any]:
            given = seen if seen.dtype == torch.uint8 else seen.to(next(net.parameters()).dtype)
            out = net(given)
            slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
            grads = torch.autograd.grad(out, list(net.parameters()), slope)
            return [out.detach().float(), *(grad.float() for grad in grads)]

        wanted, found = results(exact), {}
        for way in ("kernels", "torch"):
            for module in (bf16, images):
                module.custom_kernels_allowed = lambda way=way: way == "kernels"
            for source, name in (
                (conv_epilogue_source.EPILOGUE_SOURCE, "finish"), (value_head_source.HEAD_SOURCE, "rate")):
                assert bf16.kernels_available(next(rounded.parameters()), source, name) == (way == "kernels"), (
                    way, name)
            found[way] = [round(float((mine - its).norm() / its.norm()), 5)
                          for mine, its in zip(results(rounded), wanted, strict=True)]
        keep(args, {"kind": "layers", "part": part, "norm": norm, "distance": found})
        if any(ours > 0.002 + 1.5 * torchs for ours, torchs in zip(*found.values(), strict=True)):
            sys.exit("our kernels are farther from float32 than torch's")


def beside(args: argparse.Namespace) -> None:
    """Is the same chosen beside updates, which have a stream of their own, as without them? And how soon."""
    import numpy as np
    import torch

    from qfleet.accel.graph_policy import GraphPolicy
    from qfleet.actor.policy import Policy
    from qfleet.core.agent import ExplorationParams

    lanes, steps = 64, 400
    learner, config = learner_of(args.recipe, 512, args.set, 20_000, 10_000)
    policy = Policy(learner.agent, 1, torch.device(config.device), config.learner.precision)
    reflex = GraphPolicy(policy, noise_spec(), lanes, ())
    rng = np.random.default_rng(1)
    seen = rng.integers(0, 255, (steps, lanes, 4, 84, 84), np.uint8)
    states = [{name: x + 0.02 * torch.randn_like(x) for name, x in policy.flat.state().items()} for _ in range(8)]
    versions = itertools.count(1)

    def play(updates: int) -> tuple[np.ndarray, float]:
        policy.rng.manual_seed(3)
        reflex.begin()
        chosen, spent = [], []
        learner.max_updates_per_step = updates
        for step in range(steps):
            if updates:
                learner.step()
            if step % 5 == 0:
                news = next(versions), states[step // 5 % len(states)]
                reflex.refresh(SimpleNamespace(fetch=lambda newer_than, news=news: news))
            begin = time.perf_counter()
            chosen.append(reflex.act({"obs": seen[step]}, ExplorationParams(torch.full((lanes,), 0.1)))[0].copy())
            spent.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return np.stack(chosen), 1000 * statistics.median(spent)

    play(1)  # records
    (alone, alone_ms), (busy, busy_ms) = play(0), play(4)
    keep(args, {"kind": "beside", "recipe": args.recipe, "set": args.set, "lanes": lanes, "choices": int(alone.size),
                "different": int((alone != busy).sum()), "distinct": len(np.unique(alone)),
                "alone_ms": round(alone_ms, 3), "beside_updates_ms": round(busy_ms, 3)})
    if (alone != busy).any():
        sys.exit("other choices were made beside updates")


def parity(args: argparse.Namespace) -> None:
    """Is as much learnt by recorded updates as by those in pieces?"""
    import qfleet

    for capture in ("true", "false"):
        steps = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as root:
                run = qfleet.train("catch", [
                    "env.kwargs={pixels: true, side: 12}", "stop_at=0.95", "eval.period_steps=500", "eval.episodes=20",
                    "replay.store=device", f"learner.capture={capture}", f"seed={seed}", f"run.root={root}",
                    "run.tensorboard=false", "checkpoint.period_steps=null", *args.set])
            steps.append(run.steps if run.reason == "stop_at" else None)
        keep(args, {"kind": "parity", "set": args.set, "capture": capture, "seeds": args.seeds, "solved_at": steps})


def profile(learner: Any, wait: Any) -> None:
    """Where an update's time goes on the GPU, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    learner.max_updates_per_step = 20
    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        learner.step()
        wait()
    rows = [(event.self_device_time_total / 20, event.count / 20, event.key) for event in seen.key_averages()
            if event.self_device_time_total > 0]
    rows.sort(reverse=True)
    print(f"{sum(row[0] for row in rows):8.1f} us of kernels, {sum(row[1] for row in rows):.0f} kernels per update")
    for spent, count, name in rows[:45]:
        print(f"{spent:8.1f} us  {count:5.1f} x  {name[:110]}")


def bare(lanes: int, seconds: float) -> float:
    """Steps per second of the vector environment under random actions."""
    import numpy as np
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("pong", lanes, num_threads=len(os.sched_getaffinity(0)), noop_max=30)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        env.send(rng.integers(6, size=lanes))
        env.recv()
        steps += lanes
    return steps / (time.perf_counter() - begin)


def acting(args: argparse.Namespace) -> None:
    roof = bare(args.lanes, min(8.0, args.seconds))
    with tempfile.TemporaryDirectory() as root:
        steps = int(args.seconds * 25_000)
        words = [args.recipe, f"env.lanes={args.lanes // 2}", "env.groups=2", f"total_steps={steps}", "stop_at=null",
                 "eval.period_steps=null", "eval.from_return=null", "eval.episodes=1", "eval.lanes=1",
                 "eval.max_episode_steps=100", "checkpoint.period_steps=null", "checkpoint.replay=false"]
        command = train(root, [*words, *args.set])
        subprocess.run(command, check=True, timeout=120 + 20 * args.seconds, stdout=subprocess.DEVNULL)
        records = trials.records_of(Path(root) / "x" / "metrics.jsonl")
    late = [record for record in records if record["step"] > steps / 3 and "time/fps" in record]
    keep(args, {"kind": "acting", "recipe": args.recipe, "set": args.set, "seconds": args.seconds,
                "random_steps_per_s": round(roof), "lanes": args.lanes,
                "steps_per_s": round(statistics.median(record["time/fps"] for record in late)),
                "updates_per_s": round(statistics.median(record["time/updates_per_s"] for record in late), 1),
                "share": round(statistics.median(record["time/fps"] for record in late) / roof, 3),
                "ms": {tag: round(late[-1][tag], 3) for tag in late[-1] if tag.endswith("_ms")}})


def train(root: str, words: list[str]) -> list[str]:
    return [sys.executable, "-m", "qfleet", "train", *words, f"run.root={root}", "run.name=x"]


def pong(args: argparse.Namespace) -> None:
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as root:
            begin = time.time()
            words = [args.recipe, f"seed={seed}", f"stop_at={args.score:g}", *args.set]
            running = subprocess.Popen(train(root, words), stdout=subprocess.DEVNULL)
            found, metrics = None, Path(root) / "x" / "metrics.jsonl"
            while found is None and running.poll() is None and time.time() - begin < args.limit:
                time.sleep(0.1)
                now = time.time()
                found = next((record for record in trials.records_of(metrics)
                              if record.get("eval/mean_reward", -99) >= args.score), None)
            try:
                running.wait(20 if found else 0.1)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            records = trials.records_of(metrics)
            games = full_games(Path(root) / "x", args.games) if found is not None and args.games else None
        curve = [[round(record["time_s"], 1), record["step"], round(record.get("rollout/ep_rew_mean", -21), 1)]
                 for record in records]
        judged = [[round(x["time_s"], 1), x["step"], round(x["eval/mean_reward"], 2), round(x["eval/seconds"], 1),
                   round(x["eval/mean_ep_length"])] for x in records if "eval/seconds" in x]
        solved = None if found is None else round(now - begin - found["eval/seconds"], 1)
        keep(args, {"kind": "pong", "recipe": args.recipe, "seed": seed, "set": args.set, "aim": args.score,
                    "solved_s": solved, "score": found and found["eval/mean_reward"], "games": games,
                    "steps": records[-1]["step"] if records else 0,
                    "updates": records[-1]["updates"] if records else 0, "judged": judged,
                    "curve": curve[::max(1, len(curve) // 60)]})


def full_games(run: Path, games: int) -> dict[str, Any] | str:
    """Games of a run's best policy, or why there are none: the run that was timed counts all the same."""
    try:
        return trials.played(run, games, timeout_s=120)
    except subprocess.SubprocessError as error:
        return f"{error} {getattr(error, 'stderr', None) or ''}"[-400:]


def keep(args: argparse.Namespace, record: dict[str, Any]) -> None:
    record = describe_machine() | record
    print(json.dumps(record), flush=True)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["updates", "acting", "pong", "check", "layers", "beside", "parity"])
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--updates", type=int, default=300, help="per measurement")
    parser.add_argument("--algos", nargs="+", default=["dqn", "c51", "qr"], help="that are checked")
    parser.add_argument("--met", action="store_true", help="as if gradients met others': these alone are recorded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--filled", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--lanes", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--score", type=float, default=18.0, help="at which Pong counts as solved, and the run ends")
    parser.add_argument("--games", type=int, default=30, help="that each policy that was found plays then")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which a run is given up")
    parser.add_argument("--recipe", default="pong-fast")
    parser.add_argument("--set", nargs="*", default=[], help="overrides, key=value")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"updates": updates, "acting": acting, "pong": pong, "check": check, "layers": layers,
     "beside": beside, "parity": parity}[args.what](args)


if __name__ == "__main__":
    main()
