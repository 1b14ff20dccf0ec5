"""Tables of the pages: registered by file and name, written as Markdown."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    monkeypatch.setattr(tables, "_tables", {})
    monkeypatch.setattr(tables, "load_tables", lambda: None)
    monkeypatch.setattr(tables, "read", {"x.json": {"rows": {"a": 1620, "b": -3}}}.get)
    return tables


def test_a_registered_table_is_written_with_its_numbers_aligned_to_the_right(tables):
    @tables.table("x.json", "rates")
    def rates(data):
        yield "name", "steps", "gain"
        for name, steps in data["rows"].items():
            yield name, steps, tables.number(steps / 1000, 1)

    assert tables.find("x.json", "rates") == (
        "| name | steps | gain |\n|---|---:|---:|\n| a | 1,620 | 1.6 |\n| b | −3 | 0.0 |")
    assert tables.find("x.json", "other") is None and tables.names("x.json") == ["rates"]


def test_two_tables_of_one_name_are_refused(tables):
    tables.table("x.json", "rates")(lambda data: [])
    with pytest.raises(ValueError, match="two tables of this name"):
        tables.table("x.json", "rates")(lambda data: [])


def test_cells_say_how_many_digits_they_have_and_rows_are_complete(tables):
    assert tables.markdown([("a", "b"), ("x | y", None)]) == "| a | b |\n|---|---|\n| x \\| y |  |"
    with pytest.raises(TypeError, match="how many digits"):
        tables.markdown([("a",), (0.5,)])
    with pytest.raises(ValueError, match="has 1 cells, the header 2"):
        tables.markdown([("a", "b"), ("x",)])


def test_a_mark_is_filled_with_the_registered_table(tables, monkeypatch):
    import figures

    tables.table("x.json", "runs; short")(lambda data: [("a", "b"), ("x", 7)])
    assert figures.filled("x.json; runs; short; table", "") == "\n\n| a | b |\n|---|---:|\n| x | 7 |\n\n"
