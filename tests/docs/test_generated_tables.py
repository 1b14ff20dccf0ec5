"""The tables that the site's hook makes: every key of the configuration and every option of a command is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qfleet.cli.commands import COMMANDS
from qfleet.cli.parsing import make_parser
from qfleet.runconfig.describe import key_sections
from qfleet.runconfig.resumable import RESUMABLE

ROOT = Path(__file__).parents[2]
VISIBLE = [command.name for command in COMMANDS if not command.hidden]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generated_tables

    return generated_tables


def cells(table: str) -> list[list[str]]:
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|(?=(?:[^`]*`[^`]*`)*[^`]*$)", row)[1:-1]] for row in rows]


def test_every_key_is_in_the_reference_with_default_and_meaning(tables):
    page = tables.fill((ROOT / "docs/api/keys.md").read_text())
    found = {}
    for row in cells(page):
        found.setdefault(row[0].strip("`"), []).append(row)
    for section in key_sections():
        for key in section.keys:
            rows = [row for row in found[key.name] if row[2].replace("\\|", "|") == key.description
                    and row[1].strip("`") in (key.default, "the name")]
            assert rows, key
            if section.plugin:
                assert [row for row in rows if row[3] == "all" or section.plugin in row[3].split(", ")], key


def test_the_guide_lists_the_keys_that_a_resume_may_change():
    """A whole section as `eval.*`; keys of run that are fixed follow the word except."""
    guide = (ROOT / "docs/configuration.md").read_text().split("## Resuming")[1].split("With `run")[0]
    named = set(re.findall(r"`([\w.*]+)`", "".join(line for line in guide.splitlines() if line.startswith("| "))))
    keys = {key.name for section in key_sections() for key in section.keys}
    allowed = {key for key in keys if key in named or f"{key.rpartition('.')[0]}.*" in named}
    assert allowed - {f"run.{name}" for name in named} == RESUMABLE


def test_sections_of_the_reference_have_headings(tables):
    headings = re.findall(r"^## (.+)$", tables.keys(), re.M)
    assert headings == ["Top level", *dict.fromkeys(section.name for section in key_sections() if section.name)]


@pytest.mark.parametrize("name", VISIBLE)
def test_every_option_of_a_command_is_in_its_table(name, tables):
    [command] = [command for command in COMMANDS if command.name == name]
    table = tables.options(name)
    options = [option for action in make_parser(command)._actions for option in action.option_strings]
    assert set(re.findall(r"`(--?[A-Za-z][a-z-]*)", table)) == {*options} - {"-h", "--help"}
    assert all(row[2] for row in cells(table))


def test_the_page_of_commands_has_a_table_for_each(tables):
    page = (ROOT / "docs/cli.md").read_text()
    marked = re.findall(r"^## ([\w-]+)$(?:(?!^## ).)*?^<!-- generated: options ([\w-]+) -->$", page, re.M | re.S)
    assert [heading for heading, mark in marked if heading != mark] == []
    assert {heading for heading, _ in marked} == set(VISIBLE)


def test_every_mark_of_a_page_is_replaced(tables):
    for page in (ROOT / "docs").rglob("*.md"):
        assert "<!-- generated" not in tables.fill(page.read_text()), page
    with pytest.raises(ValueError):
        tables.fill("<!-- generated: options nothing -->")
    assert tables.fill("no mark") == "no mark"
