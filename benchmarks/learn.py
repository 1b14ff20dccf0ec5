"""The learning matrix: recipes and their variants over seeds, reported as k of n solved.

    python benchmarks/learn.py [--seeds 5] [--only cartpole] [--jobs 1] [--out benchmarks/results/learn.json]
    python benchmarks/learn.py --commands [--only cartpole]

A run counts as solved when the mean of 20 fresh greedy episodes of its best policy, played after training, reaches the
threshold within the recipe's step budget. Rows are saved as they come; runs already in OUT are not repeated.

The rows called chain are the wiring matrix: every algorithm and row of switches in every place, under uniformly random
behaviour. On the chain a greedy policy returns 1 exactly if it is the optimal one.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from speed import describe_machine

import qfleet
from qfleet.runs.metric_writers import read_metrics
from qfleet.transport.security import write_token

sys.path.append(str(Path(__file__).parents[1] / "tests" / "system"))
from chain_rows import every_algorithm  # the switches are defined once, there

PROCESSES = ["actors=2", "env.lanes=4"]
RAY = ["launcher=ray", "actors=2", "env.lanes=4"]
SERVER = ["sync=server", "learners=3", "parameter_server.shards=2"]
COMPENSATED = ["parameter_server.max_staleness=20", "parameter_server.compensation=constant",
               "parameter_server.compress=bf16"]
JOINED = "joined"
"""Stands for the overrides of a fleet that has no actors but one that joins over TCP and TLS."""

FAMILY = ["agent.hidden=[256,256]", "agent.n_step=3"]
"""What the cartpole recipe says of its agent, for members of another kind: a change of kind begins anew."""
NOISY = ["agent.noisy=true", "explore.kind=constant", "explore.epsilon=0"]
C51 = ["agent.algo=c51", *FAMILY, "agent.v_min=0", "agent.v_max=100"]
HLGAUSS = ["agent.algo=hlgauss", *FAMILY, "agent.v_min=0", "agent.v_max=100"]
ZOO = ["learner.learning_rate=2.3e-3", "learner.target_period_updates=128"]
QUANTILES = ["agent.hidden=[256,256]", *ZOO]
"""As rl-zoo3 has them: one step, a copied target. With three steps and a soft target these learn too slowly."""
SURE = "stop_at=490"
"""Where the first evaluation of 475 was luck in some run: the policy is judged by episodes of its own afterwards."""
PER = ["replay.alpha=0.5", "replay.beta_steps=50000"]
BTR = ["agent.algo=iqn", "agent.hidden=[128,128]", "agent.n_step=3", "agent.policy_samples=8", "agent.munchausen=true",
       "agent.dueling=true", "agent.noisy=true", "agent.noisy_epsilon=true", "replay.alpha=0.2",
       "replay.beta_steps=50000"]
"""What the recipe btr switches on, less what is for pictures; its γ of 0.997 is for longer games. The row has LayerNorm
besides, which btr has not."""

TORSOS = {"mlp": 8, "small": 8, "impala": 8, "efficient": 25, "nature": 36}
"""Every torso, and the side of the smallest picture that suits it."""
HEADS = {"dqn": [], "c51": ["agent.v_min=-1.5", "agent.v_max=1.5"], "qr": ["agent.quantiles=32"],
         "iqn": ["agent.policy_samples=8", "stop_at=0.99"]}
"""IQN's policy draws its levels at random: 98 of 100 are not yet 20 of 20."""
PIXELS = ["agent.hidden=[64]", "learner.batch_size=32", "replay.samples_per_insert=8", "explore.steps=3000",
          "eval.period_steps=1000", "eval.episodes=100", "eval.lanes=20", "learner.precision=fp32",
          "total_steps=20000"]
"""Judged by 100 episodes: 20 of 20 were luck in one run, which then stopped too early and caught 17 of 20."""


def pictures(torso: str, algo: str) -> list[str]:
    """A small Catch seen by a torso and valued by a head."""
    size = f"env.kwargs={{pixels: true, rows: 6, columns: 5, side: {TORSOS[torso]}}}"
    return [size, f"agent.algo={algo}", f"agent.torso={torso}", *HEADS[algo], *PIXELS]


PLACES = {"inline": [], "processes": PROCESSES, "tcp+tls": [JOINED]}
"""In the learner's process, in processes of the run, or joined: the names are those of rows that were recorded."""

CUE = ["env.id=toy/MemoryCue-v0", "total_steps=50000", "stop_at=0.95", "eval.period_steps=5000", "eval.episodes=40",
       "eval.lanes=8"]
MATRIX: dict[str, tuple[str, float, list[str]]] = {
    "cartpole": ("cartpole", 475, []),
    "cartpole one-step": ("cartpole", 475, ["agent.n_step=1", "learner.learning_rate=5e-4", SURE]),
    "cartpole single": ("cartpole", 475, ["agent.double=false"]),
    "cartpole dueling": ("cartpole", 475, ["agent.dueling=true"]),
    "cartpole prioritised": ("cartpole", 475, ["replay.alpha=0.6", "replay.beta_steps=50000", SURE]),
    "cartpole ladder": ("cartpole", 475, ["explore.kind=ladder", "explore.warmup_steps=5000"]),
    "cartpole hard target": ("cartpole", 475, ["learner.target_period_updates=250", "learner.learning_rate=5e-4"]),
    "cartpole mse": ("cartpole", 475, ["agent.loss=mse"]),
    "cartpole rescaled": ("cartpole", 475, ["agent.rescale=true"]),
    "cartpole layer norm": ("cartpole", 475, ["agent.norm=layer"]),
    "cartpole rmsprop": ("cartpole", 475, ["learner.optimizer=rmsprop", "learner.optimizer_eps=1e-2"]),
    "cartpole noisy": ("cartpole", 475, [*NOISY, "agent.n_step=1", *ZOO]),
    "cartpole munchausen": ("cartpole", 475, ["agent.munchausen=true"]),
    "cartpole c51": ("cartpole", 475, C51),
    "cartpole hlgauss": ("cartpole", 475, HLGAUSS),
    "cartpole qr": ("cartpole", 475, ["agent.algo=qr", *QUANTILES, "agent.quantiles=10"]),
    "cartpole iqn": ("cartpole", 475, ["agent.algo=iqn", *QUANTILES, "agent.policy_samples=8"]),
    "cartpole rainbow": ("cartpole", 475, [*C51, "agent.dueling=true", *NOISY, *PER]),
    "cartpole btr": ("cartpole", 475, [*BTR, "agent.norm=layer", *ZOO, SURE]),
    "catch": ("catch", 0.95, []),
    "catch pixels": ("catch", 0.95, ["env.kwargs={pixels: true, side: 12}", "learner.precision=fp32"]),
    "catch pixels bf16": ("catch", 0.95, ["env.kwargs={pixels: true, side: 12}", "learner.precision=bf16"]),
    "memory cue 10, recurrent": ("recurrent", 0.9, [*CUE, "env.kwargs={delay: 10}"]),
    "memory cue 40, recurrent": ("recurrent", 0.9, [*CUE, "env.kwargs={delay: 40}"]),
    "memory cue 40": ("memory-cue", 0.9, []),  # 95 % of the answers
    "memory cue 40, dqn": ("vector", 0.9, ["env.id=toy/MemoryCue-v0", "env.kwargs={delay: 40}", "total_steps=50000"]),
    "t-maze": ("tmaze", 0.95, []),
    "t-maze, dqn": ("vector", 0.95, ["env.id=toy/TMaze-v0", "total_steps=60000"]),
    "hidden cartpole": ("hidden-cartpole", 450, []),
    "hidden cartpole, dqn": ("cartpole", 450, ["env.id=toy/HiddenCartPole-v0"]),
    "pendulum": ("pendulum", -200, []),
    "pendulum td3": ("pendulum", -200, ["agent.twin=true", "agent.smoothing=0.2", "agent.policy_delay=2"]),
    "pendulum d4pg": ("pendulum-d4pg", -200, []),
    "mountain car continuous": ("mountaincar-continuous", 90, []),
    "deep sea 20": ("deep-sea", 0.9, []),
    "deep sea 20, dqn": ("vector", 0.9, ["env.id=toy/DeepSea-v0", "env.kwargs={size: 20, mapping_seed: 1}"]),
    "cartpole processes": ("cartpole", 475, PROCESSES),
    "cartpole ray": ("cartpole", 475, RAY),
    "catch processes": ("catch", 0.95, PROCESSES),
    "cartpole 2 ranks": ("cartpole", 475, ["sync=allreduce", "learners=2"]),
    "cartpole server": ("cartpole", 475, SERVER),
    "cartpole server compensated": ("cartpole", 475, [*SERVER, *COMPENSATED]),
    "cartpole server outliers": ("cartpole", 475, [*SERVER, "parameter_server.outlier_deviations=6"]),
} | {f"catch {torso} {algo}": ("catch", 0.95, pictures(torso, algo)) for torso in TORSOS for algo in HEADS
} | {f"chain {name} {place}": ("toy/Chain-v0", 1, [*words, *where])
     for name, words in every_algorithm().items() for place, where in PLACES.items()}


@contextmanager
def joiner(folder: Path) -> Iterator[list[str]]:
    """Overrides of a fleet that is joined by an actor, which waits for it already."""
    cert, key, token = (folder / name for name in ("fleet.pem", "fleet.key", "token"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-subj", "/CN=fleet", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
                   check=True, capture_output=True, timeout=60)
    write_token(token)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    actor = subprocess.Popen([sys.executable, "-m", "qfleet", "join", place, "--token-file", token, "--tls-ca", cert,
                              "--actors", "1"], stderr=subprocess.DEVNULL)
    try:
        yield ["actors=1", "fleet.local_actors=false", f"fleet.listen={place}", f"fleet.token_file={token}",
               f"fleet.tls_cert={cert}", f"fleet.tls_key={key}"]
    finally:
        actor.terminate()
        actor.wait(60)


def train(recipe: str, goal: float, overrides: list[str], seed: int) -> dict:
    """One run; `found_at` is the step of its first evaluation that reached the goal, if one did."""
    with tempfile.TemporaryDirectory() as root:
        if JOINED in overrides:
            with joiner(Path(root)) as fleet:
                return train(recipe, goal, [*(word for word in overrides if word != JOINED), *fleet], seed)
        result = qfleet.train(recipe, [*overrides, f"seed={seed}", f"run.root={root}", "run.tensorboard=false"])
        score = qfleet.evaluate(result.directory, episodes=20, seed=10_000 + seed)
        found = next(({"found_at": record["step"]} for record in read_metrics(result.directory / "metrics.jsonl")
                      if record.get("eval/mean_reward", -math.inf) >= goal), {})
    return {"seed": seed, "steps": result.steps, "updates": result.updates, "seconds": round(result.seconds, 1),
            "reason": result.reason, "mean_reward": score.mean_reward, "std_reward": score.std_reward, **found,
            **{key: value for key, value in describe_machine().items() if key in ("cpu", "date", "commit")}}


def train_apart(name: str, seed: int) -> dict:
    """In a process of its own, as a user would."""
    done = subprocess.run([sys.executable, __file__, "--one", name, str(seed)], stdout=subprocess.PIPE, text=True,
                          check=True)
    return json.loads(done.stdout.splitlines()[-1])


def command_of(name: str) -> str:
    """The command that trains a row. A fleet whose only actor joins needs that actor as well."""
    recipe, _, words = MATRIX[name]
    joining = "actors=1 --no-local-actors --listen 127.0.0.1:4440 --token-file token"
    return " ".join(["qfleet train", recipe, *(joining if word == JOINED else shlex.quote(word) for word in words)])


def report(rows: dict[str, list[dict]]) -> str:
    lines, width = [], max(len(name) for name in rows)
    for name, runs in rows.items():
        goal = MATRIX[name][1]
        solved = [run["steps"] for run in runs if run["mean_reward"] >= goal]
        median = f"{statistics.median(solved):,.0f}" if solved else "-"
        lines.append(f"{name:{width}}  {len(solved)} of {len(runs)} reach {goal:g}, median steps {median}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(MATRIX), choices=list(MATRIX))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learn.json"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "SEED"), help="train only this, and print what came of it")
    parser.add_argument("--commands", action="store_true", help="print the command of each row, and train nothing")
    args = parser.parse_args()
    if args.commands:
        print("\n".join(f"{name}: {command_of(name)}" for name in args.only))
        return
    if args.one:
        recipe, goal, overrides = MATRIX[args.one[0]]
        print(json.dumps(train(recipe, goal, overrides, int(args.one[1]))))
        return
    before = json.loads(args.out.read_text()) if args.out.exists() else {}  # with notes, perhaps
    saved = before.get("rows", {})
    rows: dict[str, list[dict]] = {name: saved.get(name, []) for name in MATRIX if name in saved or name in args.only}
    todo = [(name, seed) for name in args.only for seed in range(1, args.seeds + 1)
            if all(run["seed"] != seed for run in rows[name])]
    failed = []
    with ThreadPoolExecutor(args.jobs) as pool:
        under_way = {pool.submit(train_apart, name, seed): (name, seed) for name, seed in todo}
        for done in as_completed(under_way):
            name, seed = under_way[done]
            if (problem := done.exception()) is not None:
                failed.append(f"{name}, seed {seed}: {problem}")
                continue
            rows[name] = sorted([*rows[name], done.result()], key=lambda run: run["seed"])
            print(name, done.result(), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(before | {"rows": rows, "machine": describe_machine()}, indent=1) + "\n")
    print(report({name: rows[name] for name in args.only}))
    if failed:
        sys.exit("\n".join(["runs that failed:", *failed]))


if __name__ == "__main__":
    main()
