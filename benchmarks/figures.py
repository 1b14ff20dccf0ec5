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

import pictures
import tables

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^( *)<!--=([^>\n]+; table)-->((?:\n(?: *\|.*| *))*)<!--/-->$", re.MULTILINE)
"""Indent, source and table between two marks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report what is not up to date")
    check = parser.parse_args().check
    old = [*tables_of(check), *pictures.draw_all(check)]
    print("\n".join(old) or "all figures agree with the results")
    if check and old:
        sys.exit("figures differ from benchmarks/results: run `make figures`")


def marked() -> list[Path]:
    """The pages that have figures."""
    pages = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
    return [path for path in pages if "<!--=" in path.read_text()]


def tables_of(check: bool) -> Iterator[str]:
    """The changes of the tables of all pages, which are written unless `check`."""
    for path in marked():
        text = path.read_text()
        if lines := inline(text):
            sys.exit(f"{path.relative_to(ROOT)}: {lines[0]} does not enclose a table: figures are shown in tables, "
                     "between two marks alone on their lines, the first ending with `; table` (benchmarks/tables.py)")
        for indent, source, shown in MARK.findall(text):
            if shown != filled(source, indent):
                yield changed(path, source, shown, filled(source, indent))
        if not check:
            path.write_text(renewed(text))


def inline(text: str) -> list[str]:
    """Marks, except in code, that do not enclose a table on lines of their own."""
    rest = re.sub(r"`[^`\n]*`", "", MARK.sub("", text))
    return re.findall(r"<!--=.*?-->|<!--/-->", rest)


def changed(path: Path, source: str, old: str, new: str) -> str:
    """A line that names the table, and its rows that are new."""
    rows = [row for row in new.splitlines() if row.strip() and row not in old.splitlines()]
    return "\n  ".join([f"{path.relative_to(ROOT)}: {source} changes:", *(rows or ["fewer rows"])])


def renewed(text: str) -> str:
    """A page whose tables show what the results say."""
    return MARK.sub(lambda match: f"{match[1]}<!--={match[2]}-->{filled(match[2], match[1])}<!--/-->", text)


def filled(source: str, indent: str) -> str:
    """The lines between two marks: the table of `FILE; NAME; table` with their indent."""
    file, *name = source.split("; ")
    found = tables.find(file, "; ".join(name[:-1]))
    if found is None:
        known = ", ".join(f"{file}; {each}" if each else file for each in tables.names(file)) or "none"
        sys.exit(f"<!--={source}-->: no such table; tables of {file}: {known} (benchmarks/tables.py)")
    return textwrap.indent(f"\n\n{found}\n\n", indent) + indent


if __name__ == "__main__":
    main()
