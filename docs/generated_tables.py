"""mkdocs hook: tables of the reference pages, generated from the sources when the site is built.

A page holds a mark on a line of its own: `<!-- generated: keys -->` stands for the tables of all configuration keys,
`<!-- generated: options train -->` for the options of a command.
"""

import argparse
import re

from qfleet.cli.commands import COMMANDS
from qfleet.cli.parsing import make_parser
from qfleet.runconfig.describe import KeySection, key_sections
from qfleet.runconfig.run_config import ALGO, EXPLORE

MARK = re.compile(r"^<!-- generated: (\w+)(?: ([\w-]+))? -->$", re.M)
INTRODUCTIONS = {
    "": "Keys without a section: length, seed, device and processes of a run.",
    "agent": "The keys depend on `agent.algo`. The last column names the algorithms that have a key. Rows of "
             "the same key differ in default or meaning.",
    "explore": "The keys depend on `explore.kind`. The last column names the strategies that have a key."}
"""Text below the heading of a section; other sections have the docstring of their class."""


def on_page_markdown(markdown: str, **_: object) -> str:
    return fill(markdown)


def fill(markdown: str) -> str:
    """Replace the marks of a page."""
    return MARK.sub(lambda mark: keys() if mark[1] == "keys" else options(mark[2]), markdown)


def keys() -> str:
    """One heading and one table per section of the configuration."""
    found: dict[str, list[KeySection]] = {}
    for section in key_sections():
        found.setdefault(section.name, []).append(section)
    return "\n\n".join(_section(name, kinds) for name, kinds in found.items())


def _section(name: str, kinds: list[KeySection]) -> str:
    text = INTRODUCTIONS.get(name) or _introduction(kinds[0].summary)
    head = [f"## {name or 'Top level'}", "", text, ""]
    if len(kinds) == 1:
        rows = [f"| `{key.name}` | {_code(key.default)} | {_cell(key.description)} |" for key in kinds[0].keys]
        return "\n".join([*head, "| key | default | meaning |", "|---|---|---|", *rows])
    rows = _shared_rows(kinds)
    return "\n".join([*head, f"| key | default | meaning | {kinds[0].plugin_key} |", "|---|---|---|---|", *rows])


def _shared_rows(kinds: list[KeySection]) -> list[str]:
    """Rows of plugins: one for each key, default and meaning, with the plugins that have it."""
    kinds = sorted(kinds, key=lambda kind: kind.plugin not in (ALGO.default, EXPLORE.default))
    users: dict[str, dict[tuple[str, str], list[str]]] = {}
    for kind in kinds:
        for key in kind.keys:
            default = "the name" if key.name == f"{kind.name}.{kind.plugin_key}" else key.default
            users.setdefault(key.name, {}).setdefault((default, key.description), []).append(kind.plugin)
    all_plugins = [kind.plugin for kind in kinds]
    return [f"| `{name}` | {_code(default)} | {_cell(text)} | "
            f"{'all' if plugins == all_plugins else ', '.join(plugins)} |"
            for name, rows in users.items() for (default, text), plugins in rows.items()]


def options(name: str) -> str:
    """Usage of a command and table of its options."""
    [command] = [command for command in COMMANDS if command.name == name]
    rows = []
    for action in make_parser(command)._actions:
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS:
            text, _, default = str(action.help).partition(" (default: ")
            rows.append(f"| {_option(action)} | {_code(default.removesuffix(')'))} | {_cell(text)} |")
    head = [f"Usage: `qfleet {name} {command.usage}`", "", "| option | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def _option(action: argparse.Action) -> str:
    value = "|".join(action.choices or [action.metavar or action.dest.upper()])
    return ", ".join(f"`{option}`" if action.nargs == 0 else f"`{option} {value}`" for option in action.option_strings)


def _code(text: str) -> str:
    """A default as code, unless it is a phrase."""
    is_words = " " in text and text[0] not in "[{"
    return text if is_words or text in ("", "required") else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _introduction(summary: str) -> str:
    """First line of a docstring without the name of the section: `The eval section: evaluations ...`."""
    text = summary.partition(" section: ")[2] or summary
    return text[0].upper() + text[1:]
