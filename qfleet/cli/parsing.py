"""Parsing of a command's options, positional arguments and overrides; everything that is wrong is reported at once."""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from qfleet.cli.foreign_options import unknown_options

OVERRIDE = re.compile(r"^[A-Za-z_][\w-]*(\.[\w-]+)*=")

Options = Callable[[argparse.ArgumentParser], None]
CommandFunction = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    """A command. `words` is the minimum and maximum number of positional arguments."""

    name: str
    summary: str
    usage: str
    words: tuple[int, int]
    run: CommandFunction
    examples: Sequence[str] = ()
    options: Options = lambda parser: None
    overrides: bool = False
    details: str = ""
    hidden: bool = False
    source: int | None = None
    """Index of the positional argument that names a recipe, file or environment, for commands that take no run there;
    `env.id=NAME` can replace it."""


class CommandParser(argparse.ArgumentParser):
    """Parser that collects invalid values of options instead of exiting at the first one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.problems: list[str] = []

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        several = message.startswith("\n")
        self.exit(2, f"{self.prog}: {'errors:' if several else 'error: '}{message}\n")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.problems.append(str(error))
            return action.default


def make_parser(command: Command) -> CommandParser:
    """Return the parser of a command. It takes any number of positional arguments; `parse` checks them."""
    examples = "\n".join(f"  {line}" for line in command.examples)
    parser = CommandParser(
        prog=f"qfleet {command.name}", usage=f"qfleet {command.name} {command.usage}", allow_abbrev=False,
        description=_description(command),
        epilog=f"examples:\n{examples}" if examples else None, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    command.options(parser)
    return parser


def _description(command: Command) -> str:
    width = min(shutil.get_terminal_size().columns, 100) - 2
    details = textwrap.fill(command.details, max(width, 20))
    return "\n\n".join(filter(None, [f"qfleet {command.name}: {command.summary}.", details]))


def parse(command: Command, argv: Sequence[str]) -> argparse.Namespace:
    """Parse options, positional arguments (`args.words`) and overrides (`args.overrides`), in any order.

    Everything that is wrong is reported at once, wrong config keys included. If a command that needs the source of a
    config gets none, but `env.id=NAME`, that environment is the source.
    """
    parser = make_parser(command)
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    overrides = [word for word in (*args.words, *unknown) if OVERRIDE.match(word)]
    words = [word for word in args.words if not OVERRIDE.match(word)]
    if command.source is not None and len(words) == command.source:
        words += [word.partition("=")[2] for word in overrides if word.startswith("env.id=")][-1:]
    args = changed(args, words=words, overrides=overrides)
    problems = [*parser.problems, *_misplaced(command, parser, args, unknown, argv)]
    if problems and command.source is not None:
        problems += _config_problems(command.source, args, unknown, argv)
    if problems:
        parser.error("\n  ".join(["", *problems]) if len(problems) > 1 else problems[0])
    return args


def changed(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """Return a copy of parsed arguments with other values."""
    return argparse.Namespace(**vars(args) | values)


def _misplaced(command: Command, parser: CommandParser, args: argparse.Namespace, unknown: Sequence[str],
               argv: Sequence[str]) -> list[str]:
    """Messages about unknown options and about positional arguments that are missing or too many."""
    least, most = command.words
    found = []
    if unknown:
        plain = len(args.words) + sum(not (word.startswith("-") or OVERRIDE.match(word)) for word in unknown)
        found.append(unknown_options(parser, unknown, argv, most - plain, command.overrides))
    elif len(args.words) < least:
        found.append(f"{command.usage.split(' ')[least - 1]} is missing")
    elif len(args.words) > most:
        found.append(f"unexpected argument {args.words[most]!r} (an override is written key=value, without spaces)")
    if args.overrides and not command.overrides:
        key, _, value = args.overrides[0].partition("=")
        option = f"--{key.rpartition('.')[2].replace('_', '-')}"
        known = any(option in action.option_strings for action in parser._actions)
        found.append(f"{command.name} takes no overrides such as {args.overrides[0]}"
                     + f": write {option} {value}" * known)
    return found


def _config_problems(index: int, args: argparse.Namespace, unknown: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Messages about the configuration of a command that is refused for other reasons, too.

    The value of an unknown option may be among the positional arguments.
    """
    from qfleet.core.errors import UserError
    from qfleet.runconfig.resolution import resolve

    values = {after for word, after in itertools.pairwise(argv) if word in unknown and word.startswith("-")}
    words = [word for word in args.words if word not in values] or list(args.words)
    try:
        resolve(words[index], args.overrides)
    except UserError as error:
        return str(error).splitlines()
    except Exception:  # an environment that cannot be built, or no source: reported once the command is right
        return []
    return []
