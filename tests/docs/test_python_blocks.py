"""Every Python block of the pages is valid Python, and calls what `qfleet` has with arguments that it takes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import qfleet

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "examples/README.md"]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.M | re.S)
BLOCKS = [pytest.param(textwrap.dedent(block), id=f"{page.relative_to(ROOT)}-{number}") for page in PAGES
          for number, (_, block) in enumerate(BLOCK.findall(page.read_text()), 1)]


def member(node: ast.AST) -> str | None:
    """NAME of the expression `qfleet.NAME`; None for others."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "qfleet":
        return node.attr
    return None


def faults(code: str) -> list[str]:
    """What is wrong with the names of qfleet, and with the arguments of their calls."""
    tree, found = ast.parse(code), []
    for node in ast.walk(tree):
        if (name := member(node)) is not None and not hasattr(qfleet, name):
            found.append(f"qfleet.{name}")
        if not isinstance(node, ast.Call) or member(node.func) is None:
            continue
        name = member(node.func)
        called = getattr(qfleet, name, None)
        if called is None or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        try:
            inspect.signature(called).bind_partial(*node.args, **{each.arg: each for each in node.keywords if each.arg})
        except TypeError as error:
            found.append(f"qfleet.{name}: {error}")
    return found


@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_is_python_that_calls_what_qfleet_has(code):
    assert faults(code) == []


def test_there_are_blocks():
    assert len(BLOCKS) > 20


def test_a_wrong_name_argument_or_syntax_is_found():
    assert faults("qfleet.tran('cartpole')") == ["qfleet.tran"]
    assert faults("qfleet.load('x', whichever=1)") == ["qfleet.load: got an unexpected keyword argument 'whichever'"]
    with pytest.raises(SyntaxError):
        faults("qfleet.load(")
