"""The options of every verb, as argparse takes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from the command line that must not be smaller than `least`."""
    def number(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: the least is {least}")
        return value
    return number


def port(text: str) -> int:
    """A TCP port from the command line; 0 is any that is free."""
    value = at_least(0)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: the largest is 65535")
    return value


def fraction(text: str) -> float:
    """A probability from the command line."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def as_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")


def which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--which", choices=("best", "latest"), default="best",
                        help="which checkpoint of a run: best by evaluation, or the latest (default: best)")


def trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true",
                        help="let a run or checkpoint that was not made here import the modules that it names")


def root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="DIR", default="runs", help="folder of runs given by name (default: runs)")


def place(parser: argparse.ArgumentParser) -> None:
    root(parser)
    trust(parser)
    as_json(parser)


def seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), default=1000, help="seed of the episodes (default: 1000)")


def quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress view, results only")


def finish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="film one episode of the best agent at the end")
    parser.add_argument("--show", action="store_true",
                        help="at the end evaluate 20 greedy episodes, draw the learning curve, film the agent and "
                             "write a report")


def train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=at_least(1), default=1, metavar="N",
                        help="train N times, with seed, seed+1, ..., each into its own run (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="show the configuration and the plan, train nothing")
    fleet(parser)
    finish(parser)
    quiet(parser)
    as_json(parser)


def resume(parser: argparse.ArgumentParser) -> None:
    fleet(parser)
    finish(parser)
    quiet(parser)
    place(parser)


def eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=at_least(1), default=20, help="how many whole episodes (default: 20)")
    parser.add_argument("--epsilon", type=fraction, default=0.0, help="share of random actions (default: 0, greedy)")
    parser.add_argument("--lanes", type=at_least(1), default=None, help="environments side by side (default: chosen)")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: as in training, if it is here)")
    seed(parser)
    which(parser)
    place(parser)


def record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="the film's name (default: RUN/videos/...)")
    parser.add_argument("--gif", action="store_true", help="write a GIF instead of an MP4")
    parser.add_argument("--episodes", type=at_least(1), default=1, help="how many episodes to film (default: 1)")
    parser.add_argument("--fps", type=at_least(1), default=30, help="pictures per second (default: 30)")
    seed(parser)
    which(parser)
    place(parser)


def play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=at_least(1), default=3, help="how many episodes to watch (default: 3)")
    parser.add_argument("--fps", type=at_least(1), default=30, help="pictures per second (default: 30)")
    seed(parser)
    which(parser)
    place(parser)


def plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--x", choices=("steps", "frames", "updates", "episodes", "time"), default="steps",
                        help="what runs along the bottom (default: steps)")
    parser.add_argument("--y", action="append", metavar="TAG",
                        help="what to draw, as logged; may be repeated (default: returns in training and evaluation)")
    parser.add_argument("--smooth", type=at_least(1), default=5, metavar="K",
                        help="moving mean over K records, the raw curve stays faint behind it; 1 = none (default: 5)")
    parser.add_argument("--out", metavar="FILE", help=".png, .svg or .pdf (default: RUN/plots/...)")
    root(parser)
    as_json(parser)


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", "-o", metavar="FILE", help="the page, ending in .html (default: RUN/report.html)")
    parser.add_argument("--videos", "--films", dest="films", type=at_least(0), metavar="N",
                        help="how many videos of each run to put into the page, the newest first (default: about six "
                             "in all)")
    root(parser)
    as_json(parser)


def top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print where the run stands now, and leave")
    root(parser)
    as_json(parser)


def watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=port, metavar="N",
                        help="of this machine (default: 8420, or any that is free; 0 = any)")
    parser.add_argument("--listen", metavar="ADDR:PORT", help="let other machines look on, too, with a token")
    parser.add_argument("--token-file", metavar="FILE", help="holds the token for --listen (default: a fresh one)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    root(parser)
    as_json(parser)


def export(parser: argparse.ArgumentParser) -> None:
    which(parser)
    root(parser)
    as_json(parser)


def share(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", help="keep the folder that is uploaded, under this name")
    parser.add_argument("--private", action="store_true", help="a new repository is for its owner only")
    parser.add_argument("--dry-run", action="store_true", help="prepare the folder, NAME or --out, and upload nothing")
    parser.add_argument("--episodes", type=at_least(1), default=20, help="whole episodes to evaluate (default: 20)")
    seed(parser)
    which(parser)
    place(parser)


FLEET = {"listen": "fleet.listen", "token_file": "fleet.token_file", "restarts": "fleet.restarts"}
"""Options that are shorter than the keys they stand for."""


def fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", metavar="ADDR:PORT", help="let actors of other hosts join there (fleet.listen)")
    parser.add_argument("--token-file", metavar="FILE", help="what they must know (fleet.token_file)")
    parser.add_argument("--no-local-actors", action="store_true",
                        help="start no actors on this host, only others' join (fleet.local_actors=false)")
    parser.add_argument("--restarts", type=at_least(0), metavar="N",
                        help="resume a learner that died so often (fleet.restarts)")


def fleet_overrides(args: argparse.Namespace) -> list[str]:
    """What these options say, as overrides; they speak of a fleet, so the run becomes one."""
    given = {key: getattr(args, name) for name, key in FLEET.items()}
    found = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]  # [::1]:4440 is no list
    found += ["fleet.local_actors=false"] if args.no_local_actors else []
    placed = any(override.startswith(("placement=", "gradients=server")) for override in args.overrides)
    return ["placement=processes", *found] if found and not placed else found


def _line(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-ca", metavar="FILE", help="the fleet uses TLS: who signed its certificate, or itself")
    parser.add_argument("--tls-cert", metavar="FILE", help="our own certificate, if the fleet asks for one")
    parser.add_argument("--tls-key", metavar="FILE", help="and its key")
    parser.add_argument("--patience", type=float, default=600.0, metavar="S",
                        help="seconds to wait for a fleet that does not answer (default: 600)")
    parser.add_argument("--trust", action="store_true",
                        help="let the fleet name modules that are imported here, though no TLS proves who it is")


def join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", metavar="FILE", required=True, help="the token that the fleet was given")
    parser.add_argument("--actors", type=at_least(1), metavar="N", help="how many (default: one per core)")
    _line(parser)
    as_json(parser)


def submit(parser: argparse.ArgumentParser) -> None:
    one = at_least(1)
    parser.add_argument("--nodes", "-N", type=one, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--ntasks", "-n", type=one, metavar="N", help="tasks on all of them (default: one on each)")
    parser.add_argument("--ntasks-per-node", type=one, metavar="M", help="tasks on each")
    parser.add_argument("--cpus-per-task", "-c", type=one, default=1, metavar="K", help="CPUs of a task (default: 1)")
    parser.add_argument("--gpus-per-node", type=at_least(0), default=0, metavar="G", help="GPUs of a node (default: 0)")
    parser.add_argument("--partition", "-p", metavar="P", help="where to queue (default: the cluster's)")
    parser.add_argument("--time", "-t", metavar="T", help="time limit of one life, 04:00:00 for instance")
    parser.add_argument("--name", metavar="RUN", help="name of run and job (run.name)")
    parser.add_argument("--prefix", metavar="GROUP", help="a folder for runs that belong together, below run.root")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION",
                        help="a further option for sbatch, --sbatch=--account=NAME for instance; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("--local", action="store_true", help="run the same tasks on this machine, without Slurm")
    trust(parser)
    as_json(parser)


def member(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", default="")
    parser.add_argument("--claim-file", metavar="FILE", help="the secret behind the name of a member that joins")
    parser.add_argument("--videos", metavar="DIR", help="an evaluator's films go there")
    parser.add_argument("--siblings", type=at_least(1), default=1, help="actors that share the host's cores")
    _line(parser)
