"""Tab completion: `qfleet completion SHELL` prints a script, which calls `qfleet __complete WORDS`.

`__complete` runs at every press of the key, so it imports neither torch nor pydantic. Config keys are read from
`config_keys.json`, which a test compares with the config.
"""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from qfleet.cli.output import print_line, print_result
from qfleet.cli.parsing import Command, make_parser

RUN_ARGUMENTS = ("resume", "top", "watch", "eval", "record", "play", "plot", "report", "export", "share", "rm")
"""Commands whose positional arguments are runs."""

BOTH_ARGUMENTS = ("doctor", "config", "submit")
"""Commands that take recipes and runs."""

FIRST_WORDS = {"config": ("show", "explain", "diff", "schema"), "submit": ("slurm",),
               "completion": ("bash", "zsh", "fish")}
STATES = ("running", "finished", "stopped", "interrupted", "failed", "crashed", "pruned")
PLUGINS = {"agent": ("algo", "dqn"), "explore": ("kind", "linear")}
"""Section -> the key that selects its keys, and the default."""

COMMON = ""
"""Name of the group of keys that every config has in config_keys.json."""

Candidates = Mapping[str, str]
"""Candidate -> its description, which may be empty."""


def completion(args: Namespace) -> int:
    """Print the completion script of a shell."""
    from qfleet.core.errors import UserError

    shell = args.words[0]
    if shell not in FIRST_WORDS["completion"]:
        raise UserError(f"there is no completion for {shell!r}: choose one of {', '.join(FIRST_WORDS['completion'])}")
    script = (files("qfleet.cli") / "completions" / f"qfleet.{shell}").read_text(encoding="utf-8").rstrip()
    print_result(args, [script], {"shell": shell, "script": script})
    return 0


def complete(arguments: Sequence[str], commands: Sequence[Command]) -> int:
    """Print candidates for the last word, one per line, each with a tab and its description if it has one.

    `--line LINE --breaks CHARACTERS` is how bash calls it: the words are those of a line, and candidates lack what
    readline keeps, up to the last break character.
    """
    words, breaks = list(arguments), ""
    if words[:1] == ["--line"]:
        breaks = words[3] if words[2:3] == ["--breaks"] else ""
        words = split_line(words[1])[1:]
    current = words[-1] if words else ""
    found = {word: text for word, text in candidates(words or [""], commands).items()
             if word.startswith(current)}
    kept = max((current.rfind(character) + 1 for character in "=:" if character in breaks), default=0)
    for word, text in found.items():
        print_line(f"{word[kept:]}\t{text}" if text else word[kept:])
    return 0


def split_line(line: str) -> list[str]:
    """Split a command line up to the cursor; the last word is empty after a space."""
    for closing in ("", '"', "'"):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        return [*words, ""] if not closing and line[-1:].isspace() else words
    return line.split()


def candidates(words: Sequence[str], commands: Sequence[Command]) -> Candidates:
    """Return all candidates in the place of the last word, also those that do not begin with it."""
    *before, current = words
    public = {command.name: command.summary for command in commands if not command.hidden}
    if not before:
        return public | {"help": "show the help of a command"} if not current.startswith("-") else _plain(
            ("--help", "--version"))
    if before[0] == "help":
        return public
    command = next((command for command in commands if command.name == before[0]), None)
    if command is None:
        return {}
    options = {option: action for action in make_parser(command)._actions for option in action.option_strings}
    taken = options.get(before[-1])
    if taken is not None and taken.nargs is None:
        return _plain(map(str, taken.choices or ()))
    if current.startswith("-"):
        return {option: (action.help or "").partition(" (default")[0] for option, action in options.items()}
    values = {after for word, after in pairwise(before)
              if word in options and options[word].nargs is None}
    plain = [word for word in before[1:] if not word.startswith("-") and "=" not in word and word not in values]
    root = _after(before, "--root") or "runs"
    found = _plain(_positionals(command, plain, root))
    if command.overrides and (plain or "." in current or "=" in current):
        found |= _plain(_config_words(current, command.name, plain, before, root))
    return found


def _plain(words: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(words, "")


def _after(words: Sequence[str], option: str) -> str | None:
    """Value of an option, as the next word or after `=`."""
    found = [after for word, after in pairwise(words) if word == option]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return found[-1] if found else None


def _positionals(command: Command, plain: Sequence[str], root: str) -> list[str]:
    """Recipes, runs or fixed words that a command takes next."""
    name = command.name
    if name in FIRST_WORDS and not plain:
        return list(FIRST_WORDS[name])
    if name == "ls":
        return list(STATES)
    several = name in ("plot", "report", "rm") or (name == "config" and plain[0] == "diff")
    if len(plain) > (name in FIRST_WORDS) and not several:
        return []
    runs = _runs(root) if name in (*RUN_ARGUMENTS, *BOTH_ARGUMENTS) else []
    return runs + (_recipes() if command.overrides and name not in RUN_ARGUMENTS else [])


def _recipes() -> list[str]:
    return sorted(path.stem for path in _recipe_folder().glob("*.yaml"))


def _recipe_folder() -> Path:
    return Path(__file__).parents[1] / "recipes"


def _runs(root: str) -> list[str]:
    from qfleet.runs.names import LAST, run_names

    try:
        names = run_names(root)
    except OSError:
        return []
    return [*names, *([LAST] if names else [])]


def _config_words(current: str, command: str, plain: Sequence[str], before: Sequence[str], root: str) -> list[str]:
    """Config keys, each with `=`; values after it; without a dot only sections, since there are too many keys."""
    groups: dict[str, dict[str, list[str]]] = json.loads(
        (files("qfleet.cli") / "config_keys.json").read_text(encoding="utf-8"))
    source = plain[-1] if plain else ""
    keys = dict(groups[COMMON])
    for section, (key, default) in PLUGINS.items():
        names = {name.partition("=")[2] for name in groups if name.startswith(f"{section}.{key}=")}
        chosen = _after(before, f"{section}.{key}") or _chosen(source, key, default, root)
        for name in sorted(names & {chosen} or names):
            keys |= {f"{section}.{inner}": values for inner, values in groups[f"{section}.{key}={name}"].items()}
        keys[f"{section}.{key}"] = sorted(names)
    if command == "check-env":
        keys = {key: values for key, values in keys.items() if key.startswith("env.")}
    if "=" in current:
        key = current.partition("=")[0]
        return [f"{key}={value}" for value in keys.get(key, ())]
    if "." in current:
        return [f"{key}=" for key in keys if "." in key]
    return list(dict.fromkeys(f"{key.partition('.')[0]}." if "." in key else f"{key}=" for key in keys))


def _chosen(source: str, key: str, default: str, root: str) -> str | None:
    """Algorithm or exploration of a recipe or run; None if it is unknown, as for an environment id."""
    run = Path(root, source, "config.yaml")
    path = _recipe_folder() / f"{source}.yaml"
    if not source or not (path.is_file() or run.is_file()):
        return None
    for _ in range(10):  # recipes extend one another
        try:
            text = (path if path.is_file() else run).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        if found := re.search(rf"^  {key}: (\S+)", text, re.M):
            return found[1]
        above = re.search(r"^extends: (\S+)", text, re.M)
        if above is None:
            return default
        path = _recipe_folder() / f"{above[1]}.yaml"
    return None
