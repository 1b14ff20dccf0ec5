"""Registry of the tables that figures.py writes into the pages, and the functions that format them.

A page shows a table between two marks, each alone on its line:

    <!--=spread.json; actors; table-->

    | actors | steps/s |
    |---|---|
    ...

    <!--/-->

`spread.json` is a file of benchmarks/results (or a folder of results of bench.py), `actors` the name of the table. To
add a table:

1. Write a function in a module `benchmarks/tables_*.py`. Modules with such a name are found and imported automatically.
2. Decorate it with the file and the name. It takes the parsed file and yields rows; the first row is the header.

       from tables import number, read, table

       @table("spread.json", "actors")
       def actors(data):
           yield "actors", "steps/s", "speed-up"
           for count, row in data["rows"].items():
               yield count, row["steps"], number(row["gain"], 1)

   A cell is a string, an integer (written with thousands separators) or None (an empty cell). Floats are refused,
   because a table must say how many digits it shows: use `number`. `read("other.json")` returns other files.
3. Put the two marks into the page, a blank line between them, and run `python benchmarks/figures.py`.

Columns of numbers are aligned to the right.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NUMERIC = re.compile(r"[*`~]*[+−]?[\d][\d,.]*(?: ?[%×])?[*`]*")

Cell = str | int | None
Rows = Callable[[Any], Iterable[Sequence[Cell]]]
_tables: dict[tuple[str, str], Rows] = {}


def table(file: str, name: str = "") -> Callable[[Rows], Rows]:
    """Register a function as the table `name` of a result file; `name` may have several parts, joined by `; `."""
    def register(rows: Rows) -> Rows:
        if (file, name) in _tables:
            raise ValueError(f"{file}; {name}: there are two tables of this name")
        _tables[file, name] = rows
        return rows
    return register


@functools.cache
def load_tables() -> None:
    """Import all modules that register tables."""
    for path in sorted(HERE.glob("tables_*.py")):
        importlib.import_module(path.stem)


def find(file: str, name: str) -> str | None:
    """The Markdown of a registered table; None if there is none of this name."""
    load_tables()
    rows = _tables.get((file, name))
    return None if rows is None else markdown(rows(read(file)))


def names(file: str) -> list[str]:
    """Names of the registered tables of a file."""
    load_tables()
    return [name for each, name in _tables if each == file]


@functools.cache
def read(file: str) -> Any:
    """A parsed file of benchmarks/results; a list of records for .jsonl, and for a folder its results by workload."""
    path = RESULTS / file
    if path.is_dir():
        return {each.parent.name: json.loads(each.read_text()) for each in sorted(path.glob("*/bench.json"))}
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)


def markdown(rows: Iterable[Sequence[Cell]]) -> str:
    """A Markdown table; the first row is the header."""
    header, *body = [[_text(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {row}")
    lines = [header, [_rule(column) for column in zip(*body, strict=True)] or ["---"] * len(header), *body]
    return "\n".join([f"| {' | '.join(line)} |" if number != 1 else f"|{'|'.join(line)}|"
                      for number, line in enumerate(lines)])


def number(value: float | None, digits: int = 0, missing: str = "–") -> str:
    """A number with thousands separators, a fixed number of digits and a typographic minus."""
    return missing if value is None else f"{value:z,.{digits}f}".replace("-", "−")


def percent(value: float, digits: int = 0) -> str:
    """A share as a percentage."""
    return f"{value:z.{digits}%}".replace("-", "−").replace("%", " %")


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        raise TypeError(f"{cell}: say how many digits a table shows, with number()")
    return number(cell) if isinstance(cell, int) else (cell or "").replace("|", "\\|")


def _rule(column: Sequence[str]) -> str:
    filled = [cell for cell in column if cell not in ("", "–", "-")]
    return "---:" if filled and all(NUMERIC.fullmatch(cell) for cell in filled) else "---"
