"""The command line: find the verb, sort its words, call it, and turn whatever it raised into an exit code.

Exit codes: 0 done, 1 failed, 2 misused, 75 stopped by the scheduler with its state saved, 130 interrupted by the user
with its state saved. Results go to stdout, everything else to stderr. Torch is imported only by verbs that need it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qfleet import __version__, verbs
from qfleet.verbs.telling import complain, say

OVERRIDE = re.compile(r"^[A-Za-z_][\w-]*(\.[\w-]+)*=")
SYNONYMS = {"enjoy": "play", "watch": "play", "evaluate": "eval", "test": "eval", "video": "record", "list": "recipes",
            "continue": "resume", "check": "check-env", "info": "doctor", "benchmark": "eval", "help": "--help"}
HABITS = {"--seed": "seed=", "--env": "env.id=", "--env-id": "env.id=", "--device": "device=", "--algo": "agent.algo=",
          "--total-timesteps": "total_steps=", "--timesteps": "total_steps=", "--steps": "total_steps=",
          "-n": "total_steps=", "--num-envs": "env.lanes=", "--n-envs": "env.lanes=",
          "--eval-freq": "eval.period_steps=", "--n-eval-episodes": "eval.episodes=",
          "--eval-episodes": "eval.episodes=",
          "--save-freq": "checkpoint.period_steps=", "-f": "run.root=", "--log-folder": "run.root=",
          "--name": "run.name=", "--learning-rate": "learner.learning_rate=", "--lr": "learner.learning_rate=",
          "--batch-size": "learner.batch_size=", "--gamma": "agent.gamma=", "--buffer-size": "replay.capacity=",
          "--learning-starts": "replay.min_steps=", "--track": "run.wandb=", "-i": "init_from=",
          "--trained-agent": "init_from="}
"""Options of other frameworks, and how the same wish is written here."""

Options = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Verb:
    """One thing that qfleet does; `words` is how many plain words it takes, at least and at most."""

    name: str
    summary: str
    usage: str
    words: tuple[int, int]
    run: Run
    examples: Sequence[str] = ()
    options: Options = lambda parser: None
    overrides: bool = False
    details: str = ""
    hidden: bool = False


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


def fraction(text: str) -> float:
    """A probability from the command line."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")


def _which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--which", choices=("best", "latest"), default="best",
                        help="which checkpoint of a run: best by evaluation, or the latest (default: best)")


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true",
                        help="let a run or checkpoint that was not made here import the modules that it names")


def _root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="DIR", default="runs", help="folder of runs given by name (default: runs)")


def _place(parser: argparse.ArgumentParser) -> None:
    _root(parser)
    _trust(parser)
    _json(parser)


def _seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), default=1000, help="seed of the episodes (default: 1000)")


def _quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress view, results only")


def _finish(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="film one episode of the best agent at the end")
    parser.add_argument("--show", action="store_true",
                        help="at the end evaluate 20 greedy episodes, draw the learning curve and film the agent")


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=at_least(1), default=1, metavar="N",
                        help="train N times, with seed, seed+1, ..., each into its own run (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="show the configuration and the plan, train nothing")
    _finish(parser)
    _quiet(parser)
    _json(parser)


def _resume(parser: argparse.ArgumentParser) -> None:
    _finish(parser)
    _quiet(parser)
    _place(parser)


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=at_least(1), default=20, help="how many whole episodes (default: 20)")
    parser.add_argument("--epsilon", type=fraction, default=0.0, help="share of random actions (default: 0, greedy)")
    parser.add_argument("--lanes", type=at_least(1), default=None, help="environments side by side (default: chosen)")
    _seed(parser)
    _which(parser)
    _place(parser)


def _record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="the film's name (default: RUN/videos/...)")
    parser.add_argument("--gif", action="store_true", help="write a GIF instead of an MP4")
    parser.add_argument("--episodes", type=at_least(1), default=1, help="how many episodes to film (default: 1)")
    parser.add_argument("--fps", type=at_least(1), default=30, help="pictures per second (default: 30)")
    _seed(parser)
    _which(parser)
    _place(parser)


def _play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=at_least(1), default=3, help="how many episodes to watch (default: 3)")
    parser.add_argument("--fps", type=at_least(1), default=30, help="pictures per second (default: 30)")
    _seed(parser)
    _which(parser)
    _place(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--x", choices=("steps", "frames", "updates", "episodes", "time"), default="steps",
                        help="what runs along the bottom (default: steps)")
    parser.add_argument("--y", action="append", metavar="TAG",
                        help="what to draw, as logged; may be repeated (default: returns in training and evaluation)")
    parser.add_argument("--smooth", type=at_least(1), default=5, metavar="K",
                        help="moving mean over K records, the raw curve stays faint behind it; 1 = none (default: 5)")
    parser.add_argument("--out", metavar="FILE", help=".png, .svg or .pdf (default: RUN/plots/...)")
    _root(parser)
    _json(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    _which(parser)
    _root(parser)
    _json(parser)


SOURCES = "RECIPE is a recipe's name, a YAML file, or an environment id, for which a recipe is chosen. "
OVERRIDES = "key=value pairs override the recipe and may stand anywhere; `qfleet config explain RECIPE` lists all keys."
VERBS = (
    Verb("train", "train an agent", "RECIPE|ENV_ID|FILE [key=value ...] [options]", (1, 1), verbs.train,
         ("qfleet train cartpole", "qfleet train ALE/Pong-v5 total_steps=2e6 device=cuda",
          "qfleet train my_env:MyEnv agent.n_step=3 --seeds 5"), _train, True,
         SOURCES + OVERRIDES + " The last line of stdout is the run directory."),
    Verb("resume", "continue a run from its newest checkpoint", "RUN [key=value ...] [options]", (1, 1), verbs.resume,
         ("qfleet resume runs/my-run", "qfleet resume my-run total_steps=200000"), _resume, True,
         "RUN is a run's path or name. Keys that would change what was learned are refused, with a list of those "
         "that may change."),
    Verb("eval", "play whole episodes and report the mean return", "RUN|CHECKPOINT [options]", (1, 1), verbs.evaluate,
         ("qfleet eval my-run", "qfleet eval my-run --episodes 100 --which latest --json"), _eval),
    Verb("record", "film the agent", "RUN|CHECKPOINT [options]", (1, 1), verbs.record,
         ("qfleet record my-run", "qfleet record my-run --gif --episodes 3 --out agent.gif"), _record),
    Verb("play", "watch the agent in a window", "RUN|CHECKPOINT [options]", (1, 1), verbs.play,
         ("qfleet play my-run --episodes 5",), _play),
    Verb("plot", "draw learning curves; seeds of one configuration become a band", "RUN [RUN ...] [options]", (1, 999),
         verbs.plot, ("qfleet plot my-run", "qfleet plot runs/dqn-s* runs/double-s* --x frames --out compare.png",
                  "qfleet plot my-run --y train/loss --y time/fps --smooth 20"), _plot),
    Verb("recipes", "list the recipes", "[options]", (0, 0), verbs.recipes,
         ("qfleet recipes", "qfleet recipes --json"), _json),
    Verb("config", "show, explain or compare configurations",
         "show|explain SOURCE [key=value ...], schema, diff SOURCE SOURCE", (1, 3), verbs.config,
         ("qfleet config show cartpole seed=3", "qfleet config explain pong", "qfleet config diff pong runs/my-run",
          "qfleet config schema > qfleet.schema.json"), _place, True,
         "SOURCE is a recipe, a YAML file, an environment id or a run. explain says for every key where its value "
         "came from and whether it has an effect."),
    Verb("check-env", "find out whether an environment can be trained on", "ENV_ID [key=value ...] [options]", (1, 1),
         verbs.check_env, ("qfleet check-env CartPole-v1", "qfleet check-env my_env:MyEnv env.stack=4"), _json, True),
    Verb("doctor", "say what is installed and what a run would take", "[RECIPE [key=value ...]] [options]", (0, 1),
         verbs.doctor, ("qfleet doctor", "qfleet doctor pong replay.capacity=1e6"), _place, True),
    Verb("export", "write the policy alone, without replay and optimizer", "RUN|CHECKPOINT OUT [options]", (2, 2),
         verbs.export, ("qfleet export my-run my-policy",), _export),
    Verb("version", "print the version", "[options]", (0, 0), verbs.version, (), _json),
    Verb("_env-host", "host environments for another process", "", (0, 0), verbs.env_host, hidden=True),
)


def overview() -> str:
    """What `qfleet --help` prints."""
    rows = [f"  {verb.name:<10} {verb.summary}" for verb in VERBS if not verb.hidden]
    return "\n".join(["usage: qfleet VERB [words] [key=value ...] [options]", "", "Deep Q-learning agents: train, "
                      "evaluate, resume and show them.", "", *rows, "", "Start with: qfleet train cartpole",
                      "Details:    qfleet VERB --help"])


def parser_of(verb: Verb) -> argparse.ArgumentParser:
    """The verb's own parser: any number of plain words, sorted and counted afterwards."""
    examples = "\n".join(f"  {line}" for line in verb.examples)
    parser = argparse.ArgumentParser(
        prog=f"qfleet {verb.name}", usage=f"qfleet {verb.name} {verb.usage}", allow_abbrev=False,
        description=_description(verb),
        epilog=f"examples:\n{examples}" if examples else None, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    verb.options(parser)
    return parser


def _description(verb: Verb) -> str:
    width = min(shutil.get_terminal_size().columns, 100) - 2
    details = textwrap.fill(verb.details, max(width, 20))
    return "\n\n".join(filter(None, [f"qfleet {verb.name}: {verb.summary}.", details]))


def parse(verb: Verb, argv: Sequence[str]) -> argparse.Namespace:
    """Options, plain words (`args.words`) and overrides (`args.overrides`), however they were mixed."""
    parser = parser_of(verb)
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        parser.error(_unknown(parser, unknown[0], argv))
    words = list(args.words)
    args.overrides = [word for word in words if OVERRIDE.match(word)]
    args.words = [word for word in words if not OVERRIDE.match(word)]
    least, most = verb.words
    if len(args.words) < least:
        parser.error(f"{verb.usage.split(' ')[least - 1]} is missing")
    if len(args.words) > most:
        parser.error(f"{args.words[most]!r} is one word too many (an override is written key=value, without spaces)")
    if args.overrides and not verb.overrides:
        parser.error(f"{verb.name} takes no overrides such as {args.overrides[0]}")
    return args


def _unknown(parser: argparse.ArgumentParser, flag: str, argv: Sequence[str]) -> str:
    """The message for an option that does not exist: how to write it here, or the nearest that does."""
    name, _, value = flag.partition("=")
    known = [option for action in parser._actions for option in action.option_strings]
    if HABITS.get(name) == "run.root=" and "--root" in known:
        return f"{name} is not an option here: write --root DIR"
    if name in HABITS:
        following = argv[argv.index(flag) + 1:][:1] if flag in argv and not value else []
        value = value or next((word for word in following if not word.startswith("-")), "VALUE")
        return f"{name} is not an option here: write {HABITS[name]}{'true' if name == '--track' else value}"
    if name == "--capture-video":
        return "--capture-video is not an option here: write --record"
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown option {name}" + (f": did you mean {near[0]}?" if near else f" (see {parser.prog} --help)")


def find_verb(name: str) -> Verb:
    """The verb of that name, or exit 2 with the nearest."""
    for verb in VERBS:
        if verb.name == name:
            return verb
    names = [verb.name for verb in VERBS if not verb.hidden]
    near = [SYNONYMS[name]] if name in SYNONYMS else difflib.get_close_matches(name, names, 1, 0.5)
    hint = f"did you mean `qfleet {near[0]}`?" if near else f"choose one of {', '.join(names)}"
    complain(f"qfleet: {name!r} is not a verb: {hint}")
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        complain("interrupted")
        code = 130
    except Exception as error:
        code = explain(error)
    return _flushed(code)


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        say(overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        say(f"qfleet {__version__}")
        return 0
    verb = find_verb(arguments[0])
    args = parse(verb, arguments[1:])
    return verb.run(args)


def explain(error: Exception) -> int:
    """Tell the user what went wrong, as loudly as it deserves, and return the exit code."""
    from qfleet.types import EnvFault, UserError

    if isinstance(error, UserError):
        lines = str(error).splitlines()
        complain(f"error: {error}" if len(lines) < 2 else "\n  ".join(["errors:", *lines]))
        return 2
    from qfleet.roles.learner import Diverged  # after the mistakes that need no torch to be told

    if isinstance(error, Diverged):
        complain("\n".join([f"training failed: {error}", *getattr(error, "__notes__", [])]))
    elif isinstance(error, EnvFault):
        if error.__cause__ is not None:
            complain("".join(traceback.format_exception(error.__cause__)).rstrip())
        complain("\n".join([f"environment failed: {error}", *getattr(error, "__notes__", [])]))
    else:
        complain("".join(traceback.format_exception(error)).rstrip())
        complain(f"qfleet {__version__} failed unexpectedly; a report with the lines above is welcome")
    return 1


def _flushed(code: int) -> int:
    """Empty stdout now, where a reader who left can be forgiven, rather than when the interpreter ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there
        if not isinstance(error, BrokenPipeError) and code == 0:
            complain(f"error: cannot write to stdout: {error.strerror}")
            return 1
    return code
