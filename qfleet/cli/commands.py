"""Entry point of the command line: finds the command, parses its arguments, runs it and maps errors to exit codes.

Exit codes: 0 success, 1 failure, 2 usage error, 75 stopped by the scheduler with the state saved, 130 interrupted by
the user with the state saved. Results go to stdout, everything else to stderr. Only commands that need torch import it.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from qfleet import __version__
from qfleet.cli import completion, hub, info, join, options, pages, play, runs, seeds, submit, top, train, tune
from qfleet.cli.output import is_reader_gone, print_error, print_line
from qfleet.cli.parsing import Command, parse
from qfleet.core import tracebacks

SYNONYMS = {"enjoy": "play", "live": "watch", "evaluate": "eval", "test": "eval", "video": "record", "list": "recipes",
            "continue": "resume", "check": "check-env", "info": "doctor", "runs": "ls", "delete": "rm", "remove": "rm"}
MOVED = dict.fromkeys(("bench", "benchmark", "profile"),
                      "speed is measured by a script of the source tree, `python benchmarks/bench.py`")
"""Commands of earlier versions, and their synonyms, with their replacement."""

SOURCES = "RECIPE is the name of a recipe, a YAML file, or an environment id, for which a recipe is chosen. "
OVERRIDES = "key=value pairs override the recipe, in any position; `qfleet config explain RECIPE` lists all keys."
HUB = "hf:USER/NAME or hf:USER/NAME@REVISION names a policy on the Hugging Face Hub."
COMMANDS = (
    Command("train", "train an agent", "RECIPE|ENV_ID|FILE [key=value ...] [options]", (1, 1), train.train,
        ("qfleet train cartpole", "qfleet train ALE/Pong-v5 total_steps=2e6 device=cuda",
         "qfleet train my_env:MyEnv agent.n_step=3 --seeds 5 --jobs 5"), options.train, True,
        SOURCES + OVERRIDES + " The last line of stdout is the run directory.", source=0),
    Command("resume", "resume a run from its newest checkpoint", "RUN [key=value ...] [options]", (1, 1), train.resume,
        ("qfleet resume runs/my-run", "qfleet resume my-run total_steps=200000"), options.resume, True,
        "RUN is the path or name of a run. Keys that affect what is learned cannot change; the error message lists "
        "those that can."),
    Command("tune", "search for good settings with Optuna",
        "RECIPE|ENV_ID|FILE [key=LOW..HIGH[:log|:STEP] | key=a,b,c | key=value ...] [options]", (0, 1), tune.tune,
        ("qfleet tune CartPole-v1 learner.learning_rate=1e-5..1e-2:log agent.n_step=1..5 total_steps=20_000 --jobs 4",
         "qfleet tune cartpole --space space.yaml --trials 50 --pruner hyperband --study studies/first",
         "qfleet tune --resume studies/first --trials 100"), options.tune, True,
        "Trains trials with settings from a search space, each as a run in a process of its own, and writes the best "
        "settings as a recipe, best.yaml, into the directory of the study. key=LOW..HIGH is a range, with :log on a "
        "logarithmic scale; key=a,b,c are choices; key=value holds for all trials, and total_steps=N is their length. "
        "Ctrl-C leaves a study that --resume continues. The last line of stdout is the directory of the study."),
    Command("ls", "list runs with state, score, age and size", "[WORD ...] [options]", (0, 99), runs.ls,
        ("qfleet ls", "qfleet ls cartpole --sort score", "qfleet ls running --json"), options.ls, False,
        "Lists the runs under --root, the newest first. With words, lists only runs that contain all of them in their "
        "name, environment, agent or state: running, finished, stopped (by the program or a callback), interrupted, "
        "failed (by an error), crashed (without a record of why), pruned, or elsewhere (locked by another host). The "
        "best score is that of an evaluation during training."),
    Command("rm", "remove runs, or their checkpoints", "[RUN ...] [options]", (0, 999), runs.rm,
        ("qfleet rm my-run", "qfleet rm --failed --older-than 7d", "qfleet rm my-run --keep-best --yes"),
        options.rm, False,
        "Asks before it removes anything. Without RUN it selects runs under --root by --failed and --older-than; with "
        "RUN these options restrict the selection. Running runs and directories that are not runs are refused, and "
        "links are not followed."),
    Command("top", "show the status of a run in the terminal", "RUN [options]", (1, 1), top.top,
        ("qfleet top my-run", "qfleet top my-run --json"), options.top, False,
        "Shows the live view of a run that another process trains, until the run ends or you press Ctrl-C. The run is "
        "not affected. For a run that has ended it shows the last state. --json prints the current state and exits."),
    Command("watch", "show a run in the browser while it trains", "[RUN] [options]", (0, 1), pages.watch,
        ("qfleet watch", "qfleet watch my-run", "qfleet watch my-run --listen 0.0.0.0:8420"), options.watch, False,
        "Serves a page with learning curves, throughput and health of all processes, and the newest video, until you "
        "press Ctrl-C. The run is not affected. Without RUN it shows the newest run in progress, or the newest run if "
        "none is in progress. The page is available on this machine only; --listen makes it available to other "
        "machines, protected by a token in the address."),
    Command("eval", "evaluate a policy on full episodes and report the mean return", "RUN|CHECKPOINT [options]", (1, 1),
        play.evaluate, ("qfleet eval my-run", "qfleet eval my-run --episodes 100 --which latest --json",
                        "qfleet eval hf:me/cartpole"),
        options.eval, False, HUB),
    Command("record", "record a video of the agent", "RUN|CHECKPOINT [options]", (1, 1), play.record,
        ("qfleet record my-run", "qfleet record my-run --gif --episodes 3 --out agent.gif"), options.record, False,
        HUB),
    Command("play", "watch the agent in a window", "RUN|CHECKPOINT [options]", (1, 1), play.play,
        ("qfleet play my-run --episodes 5",), options.play, False, HUB),
    Command("plot", "plot learning curves; runs that differ only in seed become one band", "RUN [RUN ...] [options]",
        (1, 999), play.plot,
        ("qfleet plot my-run", "qfleet plot runs/dqn-s* runs/double-s* --x frames --out compare.png",
         "qfleet plot my-run --y train/loss --y time/fps --smooth 20"), options.plot),
    Command("report", "write an HTML report: curves, scores, videos, speed, configuration", "RUN [RUN ...] [options]",
        (1, 999), pages.report, ("qfleet report my-run", "qfleet report runs/dqn-s* runs/double-s* -o compare.html"),
        options.report, False,
        "Writes one self-contained HTML file. Runs that differ only in seed become one curve with a band; the "
        "interquartile mean of their scores has a bootstrap confidence interval."),
    Command("recipes", "list the recipes", "[WORD ...] [options]", (0, 99), info.recipes,
        ("qfleet recipes", "qfleet recipes atari", "qfleet recipes --json"), options.as_json, False,
        "With words, lists only recipes that contain all of them in their name, description, environment, algorithm "
        "or the names of the recipes they extend."),
    Command("config", "show, explain or compare configurations",
        "show|explain SOURCE [key=value ...], schema, diff SOURCE SOURCE", (1, 3), info.config,
        ("qfleet config show cartpole seed=3", "qfleet config explain pong", "qfleet config diff pong runs/my-run",
         "qfleet config schema > qfleet.schema.json"), options.place, True,
        "SOURCE is a recipe, a YAML file, an environment id or a run. explain prints for every key its value, where "
        "the value comes from, and its meaning or why it has no effect."),
    Command("check-env", "check whether an agent can be trained on an environment",
        "ENV_ID|RECIPE [key=value ...] [options]", (1, 1), info.check_env,
        ("qfleet check-env CartPole-v1", "qfleet check-env my_env:MyEnv env.stack=4"), options.as_json, True, source=0),
    Command("doctor", "check the installation, plan a run or diagnose one", "[RECIPE|RUN [key=value ...]] [options]",
        (0, 1), info.doctor,
        ("qfleet doctor", "qfleet doctor pong replay.capacity=1e6", "qfleet doctor my-run"), options.place, True,
        "For a run it reports from metrics and logs the bottleneck, what to change, restarts, faults, replay ratio "
        "and memory. For a recipe, or a run with key=value pairs, it prints the plan: threads, memory and disk."),
    Command("export", "export the policy: a checkpoint without replay, ONNX or TorchScript",
        "RUN|CHECKPOINT OUT [options]", (2, 2), play.export,
        ("qfleet export my-run my-policy", "qfleet export my-run policy.onnx"), options.export, False,
        "An ONNX or TorchScript file maps observations to greedy actions without qfleet. It is compared with the "
        "policy before it is written."),
    Command("share", "upload the policy to the Hugging Face Hub, with a model card and a video",
        "RUN|CHECKPOINT USER/NAME [options]", (2, 2), hub.share,
        ("qfleet share my-run me/cartpole", "qfleet share my-run me/cartpole --dry-run"), options.share, False,
        "Evaluates the policy, records a video, writes a model card and uploads all of it. --dry-run writes the "
        "folder and uploads nothing."),
    Command("join", "run actors on this host for a fleet on another host", "HOST:PORT --token-file FILE [options]",
        (1, 1), join.join, ("qfleet join learner.example:4440 --token-file token --actors 16",), options.join, False,
        "Start the fleet with `qfleet train ... actors=8 --listen ADDR:PORT --token-file FILE`, which "
        "prints this command. Actors can join and leave at any time. Your own environments must be importable here."),
    Command("submit", "submit a run to a Slurm cluster", "slurm RECIPE|ENV_ID|FILE|RUN [key=value ...] [options]",
        (2, 2), submit.submit,
        ("qfleet submit slurm cartpole --name first --time 01:00:00",
         "qfleet submit slurm apex --nodes 2 --ntasks 5 -c 8 --gpus-per-node 1 -p gpu --name a",
         "qfleet submit slurm pong sync=allreduce --nodes 2 --gpus-per-node 8 --dry-run"), options.submit, True,
        "Writes an sbatch script and submits it. Shortly before its time limit the job saves a checkpoint, is "
        "requeued and resumes. Pass an existing RUN to resume it. " + OVERRIDES),
    Command("completion", "print the tab completion script of a shell", "bash|zsh|fish", (1, 1), completion.completion,
        ("qfleet completion bash > ~/.local/share/bash-completion/completions/qfleet",
         "qfleet completion fish > ~/.config/fish/completions/qfleet.fish"),
        options.as_json, False,
        "Completes commands, options, recipes, runs and config keys. For zsh put `eval \"$(qfleet completion zsh)\"` "
        "into ~/.zshrc, after compinit."),
    Command("version", "print the version", "[options]", (0, 0), info.version, (), options.as_json),
    Command("_member", "run one process of a fleet", "", (2, 4), join.run_member, options=options.member, hidden=True),
    Command("_run-order", "train one run of several", "", (1, 1), seeds.run_order, hidden=True),
    Command("_env-host", "host environments for another process", "", (0, 0), info.env_host, hidden=True),
)

IMPORTS = {**dict.fromkeys(("train", "tune", "resume", "eval", "record", "export"), "qfleet.api"),
           **dict.fromkeys(("recipes", "config", "check-env"), "qfleet.runconfig.resolution"),
           "join": "qfleet.launch.join", "_member": "qfleet.launch.rank_node", "_run-order": "qfleet.api",
           "_env-host": "qfleet.envs"}
"""Command -> the module that it imports first. Its import loads torch and most of the package."""


def overview() -> str:
    """Text of `qfleet --help`."""
    rows = [f"  {command.name:<10} {command.summary}" for command in COMMANDS if not command.hidden]
    return "\n".join(["usage: qfleet COMMAND [arguments] [key=value ...] [options]", "", "Train, evaluate and "
                      "inspect deep Q-learning agents.", "", *rows, "", "Start with: qfleet train cartpole",
                      "Details:    qfleet COMMAND --help"])


def find_command(name: str) -> Command:
    """Return the command of that name, or exit with 2 and suggest the nearest."""
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS if not command.hidden]
    near = [SYNONYMS[name]] if name in SYNONYMS else difflib.get_close_matches(name, names, 1, 0.5)
    hint = f"did you mean `qfleet {near[0]}`?" if near else f"choose one of {', '.join(names)}"
    print_error(f"qfleet: {name!r} is not a command: {MOVED.get(name, hint)}")
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments, own=argv is None)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        print_error("interrupted")
        code = 130
    except Exception as error:
        code = report_error(error)
    return _flushed(code)


def _dispatch(arguments: Sequence[str], own: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print_line(overview())
        return 0 if arguments else 2
    if arguments[0] == "help":
        return _dispatch([*arguments[1:2], "--help"], own)
    if arguments[0] == "__complete":
        return completion.complete(arguments[1:], COMMANDS)
    if arguments[0] in ("-V", "--version"):
        print_line(f"qfleet {__version__}")
        return 0
    command = find_command(arguments[0])
    args = parse(command, arguments[1:])
    if own and command.name in IMPORTS:
        _import_uncollected(IMPORTS[command.name])
    return command.run(args)


def _import_uncollected(name: str) -> None:
    """Import a module with the garbage collector off, and exclude the objects that it creates from later collections.

    Torch and its dependencies create about a million permanent objects. Scanning them takes a third of the time of a
    short command.
    """
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def report_error(error: Exception) -> int:
    """Print an error, with a traceback only if it is unexpected, and return the exit code."""
    from qfleet.core.errors import CallbackError, EnvFault, ExportError, ProcessFault, UserError

    if isinstance(error, UserError):
        lines = str(error).splitlines()
        print_error(f"error: {error}" if len(lines) < 2 else "\n  ".join(["errors:", *lines]))
        return 2
    if isinstance(error, ProcessFault | ExportError):
        print_error("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]))
        return 1
    import torch  # only for errors that need it

    from qfleet.learner.learner import Diverged
    from qfleet.process.memory import out_of_memory_text

    if isinstance(error, Diverged):
        print_error("\n".join([f"training failed: {error}", *getattr(error, "__notes__", [])]))
    elif (lack := out_of_memory_text(error)) or isinstance(error, torch.OutOfMemoryError | MemoryError):
        print_error("\n".join([f"out of memory: {lack or error}", *getattr(error, "__notes__", [])]))
    elif isinstance(error, EnvFault | CallbackError):
        if error.__cause__ is not None:
            print_error(tracebacks.user_traceback(error.__cause__))
        what = "error" if isinstance(error, CallbackError) else "environment failed"
        print_error("\n".join([f"{what}: {error}", *getattr(error, "__notes__", [])]))
    else:
        _report_unexpected(error)
    return 1


def _report_unexpected(error: Exception) -> None:
    """Print the traceback of an unexpected exception, and whether user code or qfleet raised it."""
    frame, failed = tracebacks.user_frame(error)
    where = f"your code in {frame.filename}, line {frame.lineno}, in {frame.name}" if frame else ""
    if failed:
        print_error(tracebacks.user_traceback(error))
        print_error(f"error in {where}: {type(error).__name__}")
        return
    print_error("".join(traceback.format_exception(error)).rstrip())
    print_error(f"qfleet {__version__} failed unexpectedly{f', called by {where}' if frame else ''}; "
                + ("check the values passed there; if they are correct, please" if frame else "please")
                + " report a bug with the lines above")


def _flushed(code: int) -> int:
    """Flush stdout now, where a closed reader can be ignored, rather than when the interpreter exits."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        reader_gone = is_reader_gone(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards the rest of the buffer
        if not reader_gone and code == 0:
            print_error(f"error: cannot write to stdout: {error.strerror}")
            return 1
    return code
