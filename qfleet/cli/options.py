"""Argparse options of every command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type: an integer of at least `least`."""
    def number(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: the minimum is {least}")
        return value
    return number


def port(text: str) -> int:
    """Argparse type: a TCP port; 0 is any free port."""
    value = at_least(0)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: the maximum is 65535")
    return value


def fraction(text: str) -> float:
    """Argparse type: a probability."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def age(text: str) -> float:
    """Argparse type: a duration such as 7d, in seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS_S or not number.isascii() or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: write a number and m, h, d or w, such as 7d")
    return float(int(number) * UNITS_S[unit])


def as_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout, and nothing else")


def which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--which", choices=("best", "latest"), default="best",
                        help="checkpoint of a run: the best by evaluation, or the latest (default: best)")


def trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true",
                        help="import modules named by a run, checkpoint or study that was not created on this machine")


def root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="DIR", default="runs",
                        help="directory in which runs are looked up by name (default: runs)")


def place(parser: argparse.ArgumentParser) -> None:
    root(parser)
    trust(parser)
    as_json(parser)


def seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), default=1000, help="seed of the episodes (default: 1000)")


def quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print results only, no progress")


def finish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true",
                        help="record a video of one episode of the best agent at the end")
    parser.add_argument("--show", action="store_true",
                        help="at the end evaluate 20 greedy episodes, plot the learning curve, record a video and "
                             "write a report")


def train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=at_least(1), default=1, metavar="N",
                        help="train N runs, with seed, seed+1, ... (default: 1)")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="M",
                        help="train M of the seeds at a time, in processes that share the cores (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration and the plan without training")
    parser.add_argument("--smoke", action="store_true",
                        help="run all stages with tiny numbers, in seconds and in a temporary directory, to check a "
                             "recipe or environment before a long run")
    fleet(parser)
    finish(parser)
    quiet(parser)
    as_json(parser)


def tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--space", metavar="FILE", help="YAML file with the search space")
    parser.add_argument("--trials", type=at_least(1), metavar="N",
                        help="trials of the whole study, pruned and failed ones included (default: 20)")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="M",
                        help="trials at a time, in processes that share the cores (default: 1)")
    parser.add_argument("--sampler", choices=("tpe", "random", "grid", "cmaes"),
                        help="how settings are chosen; grid tries every combination of choices and steps, cmaes needs "
                             "the package cmaes (default: tpe)")
    parser.add_argument("--pruner", choices=("median", "hyperband", "halving", "percentile", "none"),
                        help="which trials are stopped early, from the scores of their evaluations (default: median)")
    parser.add_argument("--objective", choices=("final", "last", "best", "mean"),
                        help="score of a run: mean of its last three evaluations, the last, the best, or the mean of "
                             "all (default: final)")
    parser.add_argument("--seeds-per-trial", type=at_least(1), metavar="K",
                        help="runs of a trial, with seed, seed+1, ...; their scores are averaged (default: 1)")
    parser.add_argument("--study", metavar="DIR", help="directory of the study (default: a new one in studies)")
    parser.add_argument("--resume", metavar="DIR", help="continue the study in this directory")
    trust(parser)
    quiet(parser)
    as_json(parser)


def resume(parser: argparse.ArgumentParser) -> None:
    fleet(parser)
    finish(parser)
    quiet(parser)
    place(parser)


def eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=at_least(1), default=20, help="number of full episodes (default: 20)")
    parser.add_argument("--epsilon", type=fraction, default=0.0,
                        help="probability of a random action (default: 0, greedy)")
    parser.add_argument("--lanes", type=at_least(1), default=None,
                        help="environments stepped together (default: the run's eval.lanes)")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: as in training, if available)")
    seed(parser)
    which(parser)
    place(parser)


def record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="video file, .mp4 or .gif (default: RUN/videos/...)")
    parser.add_argument("--gif", action="store_true", help="write a GIF instead of an MP4")
    parser.add_argument("--episodes", type=at_least(1), default=1, help="number of episodes to record (default: 1)")
    parser.add_argument("--fps", type=at_least(1), default=30, help="frames per second (default: 30)")
    seed(parser)
    which(parser)
    place(parser)


def play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=at_least(1), default=3, help="number of episodes to play (default: 3)")
    parser.add_argument("--fps", type=at_least(1), default=30, help="frames per second (default: 30)")
    seed(parser)
    which(parser)
    place(parser)


def plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--x", choices=("steps", "frames", "updates", "episodes", "time"), default="steps",
                        help="x axis (default: steps)")
    parser.add_argument("--y", action="append", metavar="TAG",
                        help="metric tag to plot; can be repeated (default: training and evaluation returns)")
    parser.add_argument("--smooth", type=at_least(1), default=5, metavar="K",
                        help="moving average over K records, drawn over the faint raw curve; 1 = none (default: 5)")
    parser.add_argument("--out", metavar="FILE", help="image file, .png, .svg or .pdf (default: RUN/plots/...)")
    root(parser)
    as_json(parser)


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", "-o", metavar="FILE", help="output file, .html (default: RUN/report.html)")
    parser.add_argument("--videos", "--films", dest="videos", type=at_least(0), metavar="N",
                        help="videos of each run to embed, newest first (default: about six in total)")
    root(parser)
    as_json(parser)


def top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    root(parser)
    as_json(parser)


def watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=port, metavar="N",
                        help="local port (default: 8420, or a free one; 0 = any free port)")
    parser.add_argument("--listen", metavar="ADDR:PORT", help="serve the page to other machines, protected by a token")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token for --listen (default: a new token)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    root(parser)
    as_json(parser)


def export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("safetensors", "onnx", "torchscript"),
                        help="safetensors (a checkpoint of the policy alone), or onnx or torchscript (a file for other "
                             "runtimes) (default: by the suffix of OUT, .onnx or .pt, else safetensors)")
    which(parser)
    place(parser)


def share(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", help="keep the uploaded folder at this path")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--dry-run", action="store_true", help="write the folder (NAME or --out) without uploading")
    parser.add_argument("--episodes", type=at_least(1), default=20, help="full episodes to evaluate (default: 20)")
    seed(parser)
    which(parser)
    place(parser)


FLEET = {"listen": "fleet.listen", "token_file": "fleet.token_file", "restarts": "fleet.learner_restarts"}
"""Option -> the config key that it abbreviates."""


def ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sort", choices=("age", "score", "size", "name"), default="age",
                        help="age: the newest start or resume first; score: the highest score of the best "
                             "policy first, or the best evaluation of a run without a score; size: the largest "
                             "first; name (default: age)")
    parser.add_argument("--all", action="store_true", help="list all runs also in a terminal, not only the first 30")
    root(parser)
    as_json(parser)


def rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--failed", action="store_true", help="only runs that failed or crashed")
    parser.add_argument("--older-than", type=age, metavar="AGE",
                        help="only runs without a new record for this long, such as 12h, 7d or 4w")
    parser.add_argument("--keep-best", action="store_true",
                        help="remove only checkpoints, and keep the best policy, metrics and report; such a run cannot "
                             "be resumed")
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    root(parser)
    as_json(parser)


def fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDR:PORT",
                        help="address where actors on other hosts can join (fleet.listen)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token needed to join (fleet.token_file)")
    parser.add_argument("--no-local-actors", action="store_true",
                        help="start no actors on this host (fleet.local_actors=false)")
    parser.add_argument("--restarts", type=at_least(0), metavar="N",
                        help="restart a learner that died up to N times (fleet.learner_restarts)")


def fleet_overrides(args: argparse.Namespace, has_children: Callable[[list[str]], bool]) -> list[str]:
    """Return these options as overrides, with actors=1 if the run starts no other processes without them."""
    given = {key: getattr(args, name) for name, key in FLEET.items()}
    # Quoted as JSON: [::1]:4440 would be parsed as a list.
    found = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    found += ["fleet.local_actors=false"] if args.no_local_actors else []
    others = [override for override in args.overrides if not override.startswith("fleet.")]
    return found if not found or has_children(others) else ["actors=1", *found]


def _connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-ca", metavar="FILE", help="use TLS; PEM file with the fleet's certificate or its CA")
    parser.add_argument("--tls-cert", metavar="FILE", help="client certificate, if the fleet requires one")
    parser.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert")
    parser.add_argument("--patience", type=float, default=600.0, metavar="S",
                        help="seconds to wait for a fleet that does not answer (default: 600)")
    parser.add_argument("--trust", action="store_true",
                        help="import modules named by the fleet even if TLS does not authenticate it")


def join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", metavar="FILE", required=True, help="file with the token of the fleet")
    parser.add_argument("--actors", type=at_least(1), metavar="N", help="number of actors (default: one per core)")
    _connection(parser)
    as_json(parser)


def submit(parser: argparse.ArgumentParser) -> None:
    one = at_least(1)
    parser.add_argument("--nodes", "-N", type=one, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--ntasks", "-n", type=one, metavar="N", help="tasks in total (default: one per node)")
    parser.add_argument("--ntasks-per-node", type=one, metavar="M", help="tasks per node")
    parser.add_argument("--cpus-per-task", "-c", type=one, default=1, metavar="K", help="CPUs per task (default: 1)")
    parser.add_argument("--gpus-per-node", type=at_least(0), default=0, metavar="G", help="GPUs per node (default: 0)")
    parser.add_argument("--partition", "-p", metavar="P", help="partition (default: the cluster's)")
    parser.add_argument("--time", "-t", metavar="T",
                        help="time limit of the job before it is requeued, for example 04:00:00")
    parser.add_argument("--name", metavar="RUN", help="name of the run and the job (run.name)")
    parser.add_argument("--prefix", metavar="GROUP", help="subdirectory of run.root that groups runs")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION",
                        help="additional sbatch option, for example --sbatch=--account=NAME; can be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the script without submitting it")
    parser.add_argument("--local", action="store_true", help="run the same tasks on this machine, without Slurm")
    trust(parser)
    as_json(parser)


def member(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", default="")
    parser.add_argument("--claim-file", metavar="FILE",
                        help="file with the secret that proves the name of a joined process")
    parser.add_argument("--videos", metavar="DIR", help="directory for the evaluator's videos")
    parser.add_argument("--siblings", type=at_least(1), default=1,
                        help="number of actors that share the cores of the host")
    _connection(parser)
