"""The command line: find the verb, sort its words, call it, and turn whatever it raised into an exit code.

Exit codes: 0 done, 1 failed, 2 misused, 75 stopped by the scheduler with its state saved, 130 interrupted by the user
with its state saved. Results go to stdout, everything else to stderr. Torch is imported only by verbs that need it.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qfleet import __version__, tracebacks, verbs
from qfleet.verbs import options
from qfleet.verbs.habits import unknown_options
from qfleet.verbs.telling import complain, say, unread

OVERRIDE = re.compile(r"^[A-Za-z_][\w-]*(\.[\w-]+)*=")
SYNONYMS = {"enjoy": "play", "live": "watch", "evaluate": "eval", "test": "eval", "video": "record", "list": "recipes",
            "continue": "resume", "check": "check-env", "info": "doctor", "benchmark": "bench", "profile": "bench"}

Options = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Verb:
    """One thing that qfleet does; `words` is how many plain words it takes, at least and at most.

    `needs` is the module that all its work goes through, imported before it begins.
    """

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
    needs: str = ""


SOURCES = "RECIPE is a recipe's name, a YAML file, or an environment id, for which a recipe is chosen. "
OVERRIDES = "key=value pairs override the recipe and may stand anywhere; `qfleet config explain RECIPE` lists all keys."
VERBS = (
    Verb("train", "train an agent", "RECIPE|ENV_ID|FILE [key=value ...] [options]", (1, 1), verbs.train,
         ("qfleet train cartpole", "qfleet train ALE/Pong-v5 total_steps=2e6 device=cuda",
          "qfleet train my_env:MyEnv agent.n_step=3 --seeds 5"), options.train, True,
         SOURCES + OVERRIDES + " The last line of stdout is the run directory.", needs="qfleet.api"),
    Verb("resume", "continue a run from its newest checkpoint", "RUN [key=value ...] [options]", (1, 1), verbs.resume,
         ("qfleet resume runs/my-run", "qfleet resume my-run total_steps=200000"), options.resume, True,
         "RUN is a run's path or name. Keys that would change what was learned are refused, with a list of those "
         "that may change.", needs="qfleet.api"),
    Verb("top", "look on while a run trains", "RUN [options]", (1, 1), verbs.top,
         ("qfleet top my-run", "qfleet top my-run --json"), options.top, False,
         "Shows the live view of a run that another process trains, until it ends or you press Ctrl-C; the run does "
         "not notice. Of a run that has ended it shows the last state. --json prints where it stands now, and leaves."),
    Verb("watch", "follow a run in the browser while it trains", "[RUN] [options]", (0, 1), verbs.watch,
         ("qfleet watch", "qfleet watch my-run", "qfleet watch my-run --listen 0.0.0.0:8420"), options.watch, False,
         "Serves a page with curves, the rate and health of every role, and the newest video, until you press Ctrl-C; "
         "the run does not notice. Without RUN the newest that is running is followed, or the newest of all if none "
         "is. Only this machine can open the page; --listen lets others, who need the token that stands in the "
         "address."),
    Verb("eval", "play whole episodes and report the mean return", "RUN|CHECKPOINT [options]", (1, 1), verbs.evaluate,
         ("qfleet eval my-run", "qfleet eval my-run --episodes 100 --which latest --json"), options.eval,
         needs="qfleet.api"),
    Verb("record", "film the agent", "RUN|CHECKPOINT [options]", (1, 1), verbs.record,
         ("qfleet record my-run", "qfleet record my-run --gif --episodes 3 --out agent.gif"), options.record,
         needs="qfleet.api"),
    Verb("play", "watch the agent in a window", "RUN|CHECKPOINT [options]", (1, 1), verbs.play,
         ("qfleet play my-run --episodes 5",), options.play),
    Verb("plot", "draw learning curves; seeds of one configuration become a band", "RUN [RUN ...] [options]", (1, 999),
         verbs.plot, ("qfleet plot my-run", "qfleet plot runs/dqn-s* runs/double-s* --x frames --out compare.png",
                  "qfleet plot my-run --y train/loss --y time/fps --smooth 20"), options.plot),
    Verb("report", "one page about runs: curves, scores, videos, speed, configuration", "RUN [RUN ...] [options]",
         (1, 999), verbs.report, ("qfleet report my-run", "qfleet report runs/dqn-s* runs/double-s* -o compare.html"),
         options.report, False,
         "Writes one HTML file that opens in any browser, offline. Runs that differ in nothing but their seed become "
         "one curve with a band; the interquartile mean of their scores comes with a bootstrap interval."),
    Verb("recipes", "list the recipes", "[WORD ...] [options]", (0, 99), verbs.recipes,
         ("qfleet recipes", "qfleet recipes atari", "qfleet recipes --json"), options.as_json, False,
         "With words, only the recipes that have all of them: in name, description, environment, algorithm or the name "
         "of a recipe that they extend.", needs="qfleet.recipe"),
    Verb("config", "show, explain or compare configurations",
         "show|explain SOURCE [key=value ...], schema, diff SOURCE SOURCE", (1, 3), verbs.config,
         ("qfleet config show cartpole seed=3", "qfleet config explain pong", "qfleet config diff pong runs/my-run",
          "qfleet config schema > qfleet.schema.json"), options.place, True,
         "SOURCE is a recipe, a YAML file, an environment id or a run. explain says for every key where its value "
         "came from and whether it has an effect.", needs="qfleet.recipe"),
    Verb("check-env", "find out whether an environment can be trained on",
         "ENV_ID|RECIPE [key=value ...] [options]", (1, 1), verbs.check_env,
         ("qfleet check-env CartPole-v1", "qfleet check-env my_env:MyEnv env.stack=4"), options.as_json, True,
         needs="qfleet.recipe"),
    Verb("doctor", "say what is installed, what a run would take, and what limits one", "[RECIPE|RUN [key=value ...]] "
         "[options]", (0, 1), verbs.doctor,
         ("qfleet doctor", "qfleet doctor pong replay.capacity=1e6", "qfleet doctor my-run"), options.place, True,
         "For a run it reads records and logs: what limits it and what to change, restarts, faults, pace and memory. "
         "With key=value pairs, and for a recipe, it says what training would take."),
    Verb("export", "write the policy alone, without replay and optimizer", "RUN|CHECKPOINT OUT [options]", (2, 2),
         verbs.export, ("qfleet export my-run my-policy",), options.export, needs="qfleet.api"),
    Verb("share", "put the policy on the Hugging Face hub, with a card and a film",
         "RUN|CHECKPOINT USER/NAME [options]", (2, 2), verbs.share,
         ("qfleet share my-run me/cartpole", "qfleet share my-run me/cartpole --dry-run"), options.share, False,
         "Evaluates and films the policy, writes a model card, and uploads all of it. --dry-run leaves the folder here "
         "and uploads nothing."),
    Verb("join", "add actors of this host to a fleet", "HOST:PORT --token-file FILE [options]", (1, 1), verbs.join,
         ("qfleet join learner.example:4440 --token-file token --actors 16",), options.join, False,
         "The fleet is started by `qfleet train ... placement=processes --listen ADDR:PORT --token-file FILE`, which "
         "prints this command. Actors may come and go at any time. Environments of your own must be importable here.",
         needs="qfleet.join"),
    Verb("submit", "hand a run to a cluster", "slurm RECIPE|ENV_ID|FILE|RUN [key=value ...] [options]", (2, 2),
         verbs.submit,
         ("qfleet submit slurm cartpole --name first --time 01:00:00",
          "qfleet submit slurm apex placement=processes --nodes 2 --ntasks 5 -c 8 --gpus-per-node 1 -p gpu --name a",
          "qfleet submit slurm pong gradients=allreduce --nodes 2 --gpus-per-node 8 --dry-run"), options.submit, True,
         "Writes an sbatch script and submits it. When its time is nearly up the job saves, is requeued and goes on by "
         "itself. A RUN is gone on with. " + OVERRIDES),
    Verb("bench", "measure speed beside other libraries, or where an update's time goes",
         "[WORKLOAD ...] [key=value ...] [options]", (0, 99), verbs.bench,
         ("qfleet bench", "qfleet bench cartpole pong --rounds 5 --peers sb3 tianshou --out results",
          "qfleet bench updates acting device=cuda --threads 16", "qfleet bench pong --profile learner.precision=fp32"),
         options.bench, True,
         "WORKLOAD is one of cartpole, pong (these by default), halfcheetah, halfcheetah-ddpg, acting, updates, "
         "updates-512. Everybody does the same work, though sb3 at updates does less; rounds alternate, each "
         "in a fresh process. A peer that is not installed or fails is named in the table. Of overrides all understand "
         "device=NAME, others are --profile's."),
    Verb("version", "print the version", "[options]", (0, 0), verbs.version, (), options.as_json),
    Verb("_member", "be a process of a fleet", "", (2, 3), verbs.member, options=options.member, hidden=True,
         needs="qfleet.crew"),
    Verb("_round", "measure one contender once", "", (1, 1), verbs.bench_round, hidden=True),
    Verb("_env-host", "host environments for another process", "", (0, 0), verbs.env_host, hidden=True,
         needs="qfleet.envs"),
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
    words = list(args.words)
    args.overrides = [word for word in words if OVERRIDE.match(word)]
    args.words = [word for word in words if not OVERRIDE.match(word)]
    least, most = verb.words
    if unknown:
        plain = len(args.words) + sum(not (word.startswith("-") or OVERRIDE.match(word)) for word in unknown)
        parser.error(unknown_options(parser, unknown, argv, most - plain, verb.overrides))
    if len(args.words) < least:
        parser.error(f"{verb.usage.split(' ')[least - 1]} is missing{_named_by_key(parser, argv, args.overrides)}")
    if len(args.words) > most:
        parser.error(f"{args.words[most]!r} is one word too many (an override is written key=value, without spaces)")
    if args.overrides and not verb.overrides:
        parser.error(f"{verb.name} takes no overrides such as {args.overrides[0]}")
    return args


def _named_by_key(parser: argparse.ArgumentParser, argv: Sequence[str], overrides: Sequence[str]) -> str:
    """The command that was meant where the environment is given as env.id=NAME only."""
    found = next((word for word in overrides if word.startswith("env.id=")), None)
    if found is None:
        return ""
    words = [word.removeprefix("env.id=") if word == found else word for word in argv]
    return f": write `{parser.prog} {shlex.join(words)}`"


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
        code = _dispatch(arguments, own=argv is None)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        complain("interrupted")
        code = 130
    except Exception as error:
        code = explain(error)
    return _flushed(code)


def _dispatch(arguments: Sequence[str], own: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        say(overview())
        return 0 if arguments else 2
    if arguments[0] == "help":
        return _dispatch([*arguments[1:2], "--help"], own)
    if arguments[0] in ("-V", "--version"):
        say(f"qfleet {__version__}")
        return 0
    verb = find_verb(arguments[0])
    args = parse(verb, arguments[1:])
    if own and verb.needs:
        _import_uncollected(verb.needs)
    return verb.run(args)


def _import_uncollected(name: str) -> None:
    """Import a module in a process that is this command's own, without looking for garbage in what it makes.

    Torch and its like make a million objects that stay. Collections while they are made, and every full one later,
    would go through all of them: a third of the time that a short command takes.
    """
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def explain(error: Exception) -> int:
    """Tell the user what went wrong, as loudly as it deserves, and return the exit code."""
    from qfleet.types import EnvFault, ProcessFault, UserError

    if isinstance(error, UserError):
        lines = str(error).splitlines()
        complain(f"error: {error}" if len(lines) < 2 else "\n  ".join(["errors:", *lines]))
        return 2
    if isinstance(error, ProcessFault):
        complain("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]))
        return 1
    import torch  # after the mistakes that need no torch to be told

    from qfleet.roles.learner import Diverged
    from qfleet.runtime.memory import shortage

    if isinstance(error, Diverged):
        complain("\n".join([f"training failed: {error}", *getattr(error, "__notes__", [])]))
    elif (lack := shortage(error)) or isinstance(error, torch.OutOfMemoryError | MemoryError):
        complain("\n".join([f"out of memory: {lack or error}", *getattr(error, "__notes__", [])]))
    elif isinstance(error, EnvFault):
        if error.__cause__ is not None:
            complain(tracebacks.of_user(error.__cause__))
        complain("\n".join([f"environment failed: {error}", *getattr(error, "__notes__", [])]))
    else:
        _surprised(error)
    return 1


def _surprised(error: Exception) -> None:
    """Show the traceback of an exception that has no words of its own, and say whose code it comes from."""
    frame, failed = tracebacks.user_frame(error)
    where = f"your code in {frame.filename}, line {frame.lineno}, in {frame.name}" if frame else ""
    if failed:
        complain(tracebacks.of_user(error))
        complain(f"error in {where}: {type(error).__name__}")
        return
    complain("".join(traceback.format_exception(error)).rstrip())
    complain(f"qfleet {__version__} failed unexpectedly{f', called by {where}' if frame else ''}; "
             + ("check what is passed there; if that is right, a" if frame else "a")
             + " report with the lines above is welcome")


def _flushed(code: int) -> int:
    """Empty stdout now, where a reader who left can be forgiven, rather than when the interpreter ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        reader_gone = unread(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there
        if not reader_gone and code == 0:
            complain(f"error: cannot write to stdout: {error.strerror}")
            return 1
    return code
