"""Every measured figure of README and docs is what the committed results say, and none stands there without any."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import unfolded

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]

MEASURED = re.compile(
    r"(?<![\w.,/])[−-]?\d[\d,.]*(?:th)?\s?(?:×(?! ?\d)|steps/s|updates/s|µs|ms\b|[KMG]B\b|s\b|min\b|%)"
    r"|\b\d+ of \d+\b|\b(?:one|two|three|four|five|six|nine) of (?:two|three|four|five|ten)\b")
"""What looks like something measured: a number with a unit, or so many of so many."""

SETTINGS = {
    "fast.md": "7.8 KB, 7.8 GB",
    "fleet.md": "0.5 s, 1 s, 2 s, 8 s",
    "report.md": "95 %, 64 MB",
    "slurm.md": "30 s, 10 ×",
}
"""Numbers with units that nobody measured: aims, limits, settings, sizes that follow from a layout, others' claims."""


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import figures

    return figures


def test_all_figures_are_what_the_results_say():
    done = subprocess.run([sys.executable, "benchmarks/figures.py", "--check"], cwd=ROOT, capture_output=True,
                          text=True, timeout=170, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def unmarked(text: str) -> set[str]:
    """What looks measured outside of generated tables and code."""
    text = re.sub(r"^```.*?^```|^    .*?$|<!--=.*?<!--/-->|`[^`]+`", "", unfolded(text),
                  flags=re.M | re.S)
    return {match[0] for match in MEASURED.finditer(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_stands_there_without_data(page):
    allowed = set(SETTINGS.get(page.name, "").split(", ")) - {""}
    found = unmarked(page.read_text())
    assert found <= allowed, f"show {found - allowed} in a table (benchmarks/tables.py), or name them as settings"
    assert allowed <= found, f"{allowed - found} are named as settings of {page.name}, which does not have them"


def test_figures_without_data_are_found():
    assert unmarked("It makes 1,620 steps/s, 2.4× theirs, on 5 of 5 seeds.") == {"1,620 steps/s", "2.4×", "5 of 5"}
    assert unmarked("!!! note\n    It takes 7 ms.\n\n        9 ms\n") == {"7 ms"}, "folded text is text"
    assert unmarked("`wait 3 s`, and\n```\n9 ms\n```\n<!--=per.json; table-->\n\n| 4.7 ms |\n\n<!--/-->\n") == set()


@pytest.fixture
def page(figures, monkeypatch, tmp_path):
    """A page with a table in a fold, and the cells of the table."""
    cells = ["1"]
    path = tmp_path / "page.md"
    path.write_text("??? note\n\n    <!--=x.json; rates; table-->\n\n    <!--/-->\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures.tables, "find", lambda file, name: f"| a |\n|---|\n| {cells[0]} |"
                        if (file, name) == ("x.json", "rates") else None)
    monkeypatch.setattr(figures.tables, "names", lambda file: ["rates", ""])
    return path, cells


def test_a_changed_result_makes_a_page_old(figures, page):
    path, cells = page
    list(figures.tables_of(check=False))
    assert path.read_text().splitlines()[2:] == ["    <!--=x.json; rates; table-->", "", "    | a |", "    |---|",
                                                 "    | 1 |", "", "    <!--/-->"], "with the indent of the marks"
    assert list(figures.tables_of(check=True)) == []
    cells[0], old = "2", path.read_text()
    assert list(figures.tables_of(check=True)) == ["page.md: x.json; rates; table changes:\n      | 2 |"]
    assert path.read_text() == old
    list(figures.tables_of(check=False))
    assert "| 2 |" in path.read_text() and list(figures.tables_of(check=True)) == []


@pytest.mark.parametrize("text", ["It makes <!--=x.json; rate; .1f-->1.5<!--/--> steps.",
                                  "<!--=x.json; rates; table--> | a |\n<!--/-->\n",
                                  "<!--=x.json; rates; table-->\n\nprose\n\n<!--/-->\n"])
def test_a_mark_in_a_line_is_refused(figures, page, text):
    page[0].write_text(f"`<!--=x.json; a-->` is code.\n\n{text}")
    with pytest.raises(SystemExit, match=r"page\.md: <!--=x\.json; rate.*does not enclose a table"):
        list(figures.tables_of(check=True))


def test_a_table_that_nothing_registers_is_refused(figures, page):
    page[0].write_text("<!--=x.json; speeds; table-->\n\n<!--/-->\n")
    with pytest.raises(SystemExit, match=r"no such table; tables of x\.json: x\.json; rates, x\.json"):
        list(figures.tables_of(check=True))


def test_every_picture_has_data_or_is_a_screenshot(figures):
    import pictures

    shown = {(page.parent / path).resolve().relative_to(ROOT).as_posix() for page in PAGES
             for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())}
    kept = {path.relative_to(ROOT).as_posix() for folder in ("docs/assets", "benchmarks/results")
            for ending in ("png", "gif") for path in (ROOT / folder).rglob(f"*.{ending}")}
    assert shown <= kept == {*pictures.PICTURES, *pictures.SCREENSHOTS, *pictures.RECORDINGS}
    for script, names in (("screenshots.py", pictures.SCREENSHOTS), ("gifs.py", pictures.RECORDINGS)):
        text = (ROOT / "tests/report" / script).read_text()
        assert all(Path(name).stem in text for name in names)


def test_a_picture_is_drawn_anew_when_its_data_changes(figures, monkeypatch, tmp_path):
    import pictures
    from trials import blank

    curve = {"rows": [[1, 0.1], [2, 0.2]]}
    (tmp_path / "c.json").write_text(json.dumps(curve))
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    monkeypatch.setattr(pictures, "PICTURES", {"c.png": ("c.json", lambda document: blank(2, 2))})
    assert list(pictures.draw_all(check=True)) == ["c.png is not drawn from c.json as it is"]
    assert not (tmp_path / "c.png").exists()
    list(pictures.draw_all(check=False))
    assert list(pictures.draw_all(check=True)) == []
    (tmp_path / "c.json").write_text(json.dumps(curve | {"more": 1}))
    assert list(pictures.draw_all(check=True)) == ["c.png is not drawn from c.json as it is"]
