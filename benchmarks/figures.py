"""Writes the measured figures of README and docs from the committed results: tables and pictures.

    python benchmarks/figures.py [--check]

A table stands between two marks, <!--=FILE; NAME; table--> and <!--/-->, each alone on its line (tables.py says how to
add one). Inside a block that is indented, marks and table are indented as well. `--check` writes nothing and fails with
the list of what differs from benchmarks/results.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures
import tables
from tables import read

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(^ +)?<!--=\s*(.+?)\s*-->(.*?)<!--/-->", re.DOTALL | re.MULTILINE)
FORMAT = re.compile(r"[+]?,?(\.\d+)?[f%g]?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report what is not up to date")
    check = parser.parse_args().check
    old = [*numbers(check), *pictures.draw_all(check)]
    print("\n".join(old) or "all figures agree with the results")
    if check and old:
        sys.exit("figures differ from benchmarks/results: run `make figures`")


def marked() -> list[Path]:
    """The pages that have figures."""
    pages = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
    return [path for path in pages if "<!--=" in path.read_text()]


def numbers(check: bool) -> Iterator[str]:
    """The changes between the marks of all pages, which are written unless `check`."""
    for path in marked():
        text = path.read_text()
        for indent, source, shown in MARK.findall(text):
            if shown != filled(source, indent):
                yield changed(path, source, shown, filled(source, indent))
        if not check:
            path.write_text(renewed(text))


def changed(path: Path, source: str, old: str, new: str) -> str:
    """A line that says what changes; of a table only the rows that are new."""
    rows = [row for row in new.splitlines() if row.strip() and row not in old.splitlines()]
    what = f"{old} is now {new}" if "\n" not in new else "\n  ".join(["the table changes:", *(rows or ["fewer rows"])])
    return f"{path.relative_to(ROOT)}: {what} ({source})"


def renewed(text: str) -> str:
    """A page whose marks hold what the results say."""
    return MARK.sub(lambda match: f"{match[1] or ''}<!--={match[2]}-->{filled(match[2], match[1] or '')}<!--/-->", text)


def filled(source: str, indent: str) -> str:
    """What stands between two marks; a table has the indent of its marks."""
    found = figure(source)
    return textwrap.indent(found, indent) + indent if "\n" in found else found


def figure(source: str) -> str:
    """`FILE; KEY; ...; FORMAT` as it is printed: with a typographic minus, and a space before %."""
    file, *keys = source.split("; ")
    if keys[-1:] == ["table"] and (found := tables.find(file, "; ".join(keys[:-1]))) is not None:
        return f"\n\n{found}\n\n"
    spec = keys.pop() if keys and FORMAT.fullmatch(keys[-1]) else ""
    value: Any = read(file)
    for key in keys:
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError):
            known = ", ".join(value) if isinstance(value, dict) else f"a list of {len(value)}"
            sys.exit(f"{source}: there is no {key} in {file}, but {known}")
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not spec:
        sys.exit(f"{source} is {value}: say how many digits, with .1f as the last word")
    text = f"{value:{spec or ','}}"
    return text.replace("-", "−").replace("%", " %")


if __name__ == "__main__":
    main()
