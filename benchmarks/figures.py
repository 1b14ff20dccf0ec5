"""Writes every measured figure of README and docs from the committed results: numbers, docs/results.md and pictures.

    python benchmarks/figures.py [--check]

A number stands between two marks that no reader sees, <!--=FILE; KEY; KEY; FORMAT-->1,620<!--/-->: the file in
benchmarks/results, the way to the value in it, or in what derived.py makes of it, and how it is written, as Python's
format has it. `--check` writes nothing, and fails with the list of what is not what the results say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pictures
import results_page
import tables
from derived import document

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!--=\s*(.+?)\s*-->(.*?)<!--/-->", re.DOTALL)
FORMAT = re.compile(r"[+]?,?(\.\d+)?[f%g]?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is not up to date")
    check = parser.parse_args().check
    old = [*numbers(check), *page(check), *pictures.draw_all(check)]
    print("\n".join(old) or "all figures are what the results say")
    if check and old:
        sys.exit("figures that are not what benchmarks/results says: run `make figures`")


def marked() -> list[Path]:
    """The pages that have figures."""
    pages = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
    return [path for path in pages if "<!--=" in path.read_text()]


def numbers(check: bool) -> Iterator[str]:
    """What changes between the marks of all pages, as told; written unless only checked."""
    for path in marked():
        text = path.read_text()
        for source, shown in MARK.findall(text):
            if shown != figure(source):
                yield f"{path.relative_to(ROOT)}: {shown} is now {figure(source)} ({source})"
        if not check:
            path.write_text(renewed(text))


def renewed(text: str) -> str:
    """A page whose marks hold what the results say."""
    return MARK.sub(lambda match: f"<!--={match[1]}-->{figure(match[1])}<!--/-->", text)


def page(check: bool) -> Iterator[str]:
    if results_page.PAGE.read_text() != results_page.page():
        yield f"{results_page.PAGE.relative_to(ROOT)} is another now"
        if not check:
            results_page.PAGE.write_text(results_page.page())


def figure(source: str) -> str:
    """`FILE; KEY; ...; FORMAT` as it is printed: with a typographic minus, and a space before %."""
    file, *keys = source.split("; ")
    if keys[-1:] == ["table"] and (found := tables.find(file, "; ".join(keys[:-1]))) is not None:
        return f"\n\n{found}\n\n"
    spec = keys.pop() if keys and FORMAT.fullmatch(keys[-1]) else ""
    value: Any = document(file)
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
