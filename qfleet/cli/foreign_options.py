"""Options of other frameworks and their qfleet equivalents, for error messages."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence

FOREIGN_OPTIONS = {
    "--seed": "seed=", "--env": "env.id=", "--env-id": "env.id=", "--device": "device=",
    "--algo": "agent.algo=", "--total-timesteps": "total_steps=", "--timesteps": "total_steps=",
    "--steps": "total_steps=", "-n": "total_steps=", "--num-envs": "env.lanes=", "--n-envs": "env.lanes=",
    "--eval-freq": "eval.period_steps=", "--n-eval-episodes": "eval.episodes=",
    "--eval-episodes": "eval.episodes=", "--save-freq": "checkpoint.period_steps=", "-f": "run.root=",
    "--log-folder": "run.root=", "--name": "run.name=", "--learning-rate": "learner.learning_rate=",
    "--lr": "learner.learning_rate=", "--batch-size": "learner.batch_size=", "--gamma": "agent.gamma=",
    "--buffer-size": "replay.capacity=", "--learning-starts": "replay.min_steps=", "--track": "run.wandb=",
    "-i": "init_from=", "--trained-agent": "init_from="}
"""Option -> equivalent override."""

WITHOUT_VALUE = {"--track": "run.wandb=true", "--capture-video": "--record"}
PLAIN = ("--env", "--env-id", "--search", "--filter")
"""Options whose value is a positional argument here, if the command takes one more."""


def unknown_options(parser: argparse.ArgumentParser, unknown: Sequence[str], argv: Sequence[str], free: int,
                    overrides: bool) -> str:
    """Return the error message for all unknown options at once and, if known, the command line that works.

    `free` is the number of positional arguments that the command still takes, counting values of unknown options as
    positional; `overrides` is True if it takes key=value pairs.
    """
    known = [option for action in parser._actions for option in action.option_strings]
    flags = [word for word in unknown if re.match("--?[A-Za-z]", word)] or list(unknown)
    values = {flag: _value(flag, argv) for flag in flags}
    free += sum(value is not None and "=" not in flag for flag, value in values.items())
    ours = {flag: _translated(_name(flag), value, known, free > 0, overrides) for flag, value in values.items()}
    if None in ours.values() or (len(ours) == 1 and ours[flags[0]] != values[flags[0]]):
        return "; ".join(_single(parser, _name(flag), text, known) for flag, text in ours.items())
    names = [_name(flag) for flag in ours]
    are = "is not an option" if len(names) == 1 else "are not options"
    return f"{', '.join(names)} {are} here: write `{_command(parser, argv, values, ours)}`"


def _name(flag: str) -> str:
    return flag.partition("=")[0]


def _value(flag: str, argv: Sequence[str]) -> str | None:
    """Value of an option, after `=` or as the next argument."""
    name, equals, value = flag.partition("=")
    if equals or name in WITHOUT_VALUE or flag not in argv:
        return value or None
    return next((word for word in argv[argv.index(flag) + 1:][:1] if not word.startswith("-")), None)


def _translated(name: str, value: str | None, known: Sequence[str], free: bool, overrides: bool) -> str | None:
    """Return the qfleet equivalent of an option; None if there is none."""
    if FOREIGN_OPTIONS.get(name) == "run.root=" and "--root" in known:
        return "--root DIR"
    if name in PLAIN and free and value:
        return value
    if not overrides:
        return None
    return WITHOUT_VALUE.get(name) or (
        f"{FOREIGN_OPTIONS[name]}{value or 'VALUE'}" if name in FOREIGN_OPTIONS else None
    )


def _single(parser: argparse.ArgumentParser, name: str, ours: str | None, known: Sequence[str]) -> str:
    if ours is not None:
        return f"{name} is not an option here: write {ours}"
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown option {name}" + (f": did you mean {near[0]}?" if near else f" (see {parser.prog} --help)")


def _command(parser: argparse.ArgumentParser, argv: Sequence[str], values: Mapping[str, str | None],
             ours: Mapping[str, str | None]) -> str:
    """Return the command line with every unknown option and its value replaced."""
    words, rest = [parser.prog], list(argv)
    while rest:
        word = rest.pop(0)
        words.append(ours.get(word) or shlex.quote(word))
        if word in ours and "=" not in word and rest and values[word] == rest[0]:
            rest.pop(0)
    return " ".join(words)
