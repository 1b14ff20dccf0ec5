"""The pages that describe the code: classes, their attributes, constants and files that they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/concepts.md", "docs/design.md", "docs/kubernetes.md",
         *sorted(f"docs/decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md")))
FOREIGN = {"None", "Config", "TorchScript", "Dockerfile"}

CLASS = re.compile(r"(?<![\w/.-])([A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+)(?:\.(\w+))?\b")
"""A class name of two words or more and an attribute, such as HostReplay.add. Names of one word are only read where
they stand alone."""

CONSTANT = re.compile(r"\b[A-Z]+(?:_[A-Z]+)+\b")
FILE = re.compile(r"(?<![\w./-])((?:\w+/)+[\w.]+\.py)\b")


def defined() -> set[str]:
    """Names of classes, functions, fields, attributes and variables of the library, and arguments of the Dockerfile."""
    names = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.M))
    for path in (ROOT / "qfleet").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def missing(text: str) -> list[str]:
    """Names and files in code of a page that are not there."""
    names = defined()
    code = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S))
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    code += "\n".join(inline)
    words = {word for found in CLASS.findall(code) for word in found if word} | set(CONSTANT.findall(code))
    words |= {word for word in inline if re.fullmatch("[A-Z][a-z]+", word)}
    files = [path for path in FILE.findall(code) if not any((ROOT / place / path).exists() for place in ("", "qfleet"))]
    return sorted(words - names - FOREIGN) + files


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    assert missing((ROOT / page).read_text()) == []


def test_what_does_not_exist_is_found():
    text = ("`Checkpointer` `Actor` `HostReplays` `HostReplay.add` `HostReplay.adds` `NAP_S`\n"
            "```\nlaunch/nothing.py launch/driver.py\n```\n")
    assert missing(text) == ["Checkpointer", "HostReplays", "NAP_S", "adds", "launch/nothing.py"]
