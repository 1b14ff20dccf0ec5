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
    """What looks measured outside of marks and code."""
    text = re.sub(r"^```.*?^```|^    .*?$|<!--=.*?<!--/-->|`[^`]+`", "", unfolded(text),
                  flags=re.M | re.S)
    return {match[0] for match in MEASURED.finditer(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_stands_there_without_data(page):
    allowed = set(SETTINGS.get(page.name, "").split(", ")) - {""}
    found = unmarked(page.read_text())
    assert found <= allowed, f"mark where {found - allowed} come from (benchmarks/figures.py), or name them as settings"
    assert allowed <= found, f"{allowed - found} are named as settings of {page.name}, which does not have them"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_a_mark(page):
    """It would begin a block of HTML, and end the paragraph or the table; a whole table is meant to be apart."""
    assert not re.search(r"^ {0,3}<!--=[^>]*-->(?!\n\n\|)", page.read_text(), re.M)


def test_figures_without_data_are_found():
    assert unmarked("It makes 1,620 steps/s, 2.4× theirs, on 5 of 5 seeds.") == {"1,620 steps/s", "2.4×", "5 of 5"}
    assert unmarked("!!! note\n    It takes 7 ms.\n\n        9 ms\n") == {"7 ms"}, "folded text is text"
    assert unmarked("It takes <!--=per.json; ratio; .1f-->4.7<!--/--> ms, `wait 3 s`, and\n```\n9 ms\n```\n") == set()


def test_a_changed_result_makes_a_page_old(figures, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| a <!--=x.json; rate; ,.0f-->1,620<!--/--> | **<!--=x.json; runs; 1; .1%-->9.0 %<!--/-->** |")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    data = {"rate": 1620.4, "runs": [0.5, 0.09]}
    monkeypatch.setattr(figures, "read", lambda file: data)
    assert list(figures.numbers(check=True)) == []
    data |= {"rate": 1700.0, "runs": [0.5, -0.12]}
    old = page.read_text()
    assert list(figures.numbers(check=True)) == ["page.md: 1,620 is now 1,700 (x.json; rate; ,.0f)",
                                                 "page.md: 9.0 % is now −12.0 % (x.json; runs; 1; .1%)"]
    assert page.read_text() == old
    list(figures.numbers(check=False))
    assert re.sub(r"<!--.*?-->", "", page.read_text()) == "| a 1,700 | **−12.0 %** |"
    assert list(figures.numbers(check=True)) == []


def test_a_table_has_the_indent_of_its_marks(figures, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("??? note\n\n    <!--=x.json; rates; table-->\n\n    <!--/-->\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures.tables, "find", lambda file, name: "| a |\n|---|\n| 1 |")
    assert list(figures.numbers(check=True)) == [
        "page.md: the table changes:\n      | a |\n      |---|\n      | 1 | (x.json; rates; table)"]
    list(figures.numbers(check=False))
    assert page.read_text().splitlines()[2:] == ["    <!--=x.json; rates; table-->", "", "    | a |", "    |---|",
                                                 "    | 1 |", "", "    <!--/-->"]
    assert list(figures.numbers(check=True)) == []


def test_a_mark_that_leads_nowhere_is_refused(figures, monkeypatch):
    monkeypatch.setattr(figures, "read", lambda file: {"rate": 0.5})
    with pytest.raises(SystemExit, match=r"there is no ratio in x\.json, but rate"):
        figures.figure("x.json; ratio; .1f")
    with pytest.raises(SystemExit, match="say how many digits"):
        figures.figure("x.json; rate")


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
