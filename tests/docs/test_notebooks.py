"""The notebooks are converted with the command of their page and run from the first cell to the last."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
PAGE = ROOT / "docs/notebooks.md"
SMALL = {"STEPS": "1_200", "SEEDS": "(1, 2)"}
"""Settings at the top of a notebook and the values that replace them here."""

pytestmark = pytest.mark.timeout(120)


def short(source: str) -> str:
    """A notebook that trains for less time."""
    for name, value in SMALL.items():
        source = re.sub(rf"^{name} = .*$", f"{name} = {value}", source, flags=re.M)
    return source


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """The notebooks with small settings, converted by the command of the page."""
    folder = tmp_path_factory.mktemp("notebooks")
    for path in SOURCES:
        small = short(path.read_text())
        assert small != path.read_text(), f"{path.name} has no STEPS to replace"
        (folder / path.name).write_text(small)
    [command] = re.findall(r"^\$ jupytext (.*) examples/notebooks/\*\.py$", PAGE.read_text(), re.M)
    done = subprocess.run([sys.executable, "-m", "jupytext", *command.split(), *(path.name for path in SOURCES)],
                          cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def images(notebook) -> set[str]:
    """Image formats among the outputs."""
    return {kind for output in outputs(notebook) for kind in output.get("data", {}) if kind.startswith("image/")}


def printed(notebook) -> str:
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


SHOWN = {
    "01_quick_start": ({"image/png", "image/gif"}, r"score \d"),
    "02_custom_environment": ({"image/png"}, r"'comfort_mean': 0\.\d"),
    "03_compare_runs": ({"image/png"}, r"3 steps +\d+\.\d ± \d"),
    "04_use_a_policy": (set(), r"policy\.(onnx|pt)"),
}
"""Image formats that a notebook displays, and what it prints."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in SOURCES])
def test_a_notebook_runs_from_the_first_cell_to_the_last(name, notebooks, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(notebooks / "runtime"))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel sets its own
    notebook = nbformat.read(notebooks / f"{name}.ipynb", as_version=4)
    (notebooks / name).mkdir()
    client = nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(notebooks / name)}})
    client.execute()
    formats, text = SHOWN[name]
    assert images(notebook) == formats
    assert re.search(text, printed(notebook))


@pytest.mark.slow
def test_a_failing_cell_fails_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        nbclient.NotebookClient(notebook, timeout=60).execute()


def test_the_page_lists_every_notebook():
    linked = re.findall(r"\]\(\.\./examples/notebooks/(\w+)\.py\)", PAGE.read_text())
    assert linked == [path.stem for path in SOURCES] == sorted(SHOWN) and len(SOURCES) >= 4


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_source_is_short_text(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 110 and "# %% [markdown]" in text
    compile(text, path.name, "exec")
