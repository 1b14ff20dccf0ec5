"""Files that people and services look for: citation, issue forms, pull request template, and the pages they name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from qfleet import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


def form_errors(form: dict) -> list[str]:
    """Violations of GitHub's format of issue forms, by which a form would not be offered."""
    errors = [f"no {key}" for key in ("name", "description", "body") if not form.get(key)]
    fields = form.get("body") or []
    errors += [f"unknown type {field.get('type')}" for field in fields if field.get("type") not in FIELDS]
    asked = [field for field in fields if field.get("type") != "markdown"]
    errors += [f"no label: {field}" for field in asked if not field.get("attributes", {}).get("label")]
    names = [field.get("id") for field in asked]
    errors += ["ids are missing or not unique"] * (len(set(names) - {None}) < len(names))
    errors += ["nothing to fill in"] * (not asked)
    return errors


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem)
def test_issue_forms_are_valid(path):
    assert form_errors(yaml.safe_load(path.read_text())) == []


def test_invalid_issue_forms_are_found():
    box = {"type": "textarea", "id": "a", "attributes": {"label": "A"}}
    good = {"name": "Bug", "description": "d", "body": [box]}
    assert form_errors(good) == []
    assert form_errors(good | {"name": ""}) == ["no name"]
    assert form_errors(good | {"body": [box, box]}) == ["ids are missing or not unique"]
    assert form_errors(good | {"body": [{"type": "text", "id": "a", "attributes": {"label": "A"}}]}) == [
        "unknown type text"]
    assert form_errors(good | {"body": [{"type": "markdown"}]}) == ["nothing to fill in"]


def test_there_are_forms_for_bugs_features_and_questions():
    assert {"bug", "feature", "question"} <= {path.stem for path in FORMS}


def test_a_bug_report_requires_the_output_of_doctor():
    body = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())["body"]
    [asked] = [field for field in body if "qfleet doctor" in field["attributes"]["label"]]
    assert asked["validations"]["required"] is True


def test_pages_and_targets_that_the_templates_name_exist():
    texts = [path.read_text() for path in [*FORMS, ROOT / ".github/PULL_REQUEST_TEMPLATE.md"]]
    named = {name for text in texts for name in re.findall(r"\b(?:docs/)?[\w-]+\.md\b", text)}
    assert named and [name for name in named if not (ROOT / name).exists()] == []
    targets = re.findall(r"`make (\w+)`", "".join(texts))
    assert targets and set(targets) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))


def test_the_citation_says_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "what its schema requires"
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] == PROJECT["name"] and citation["abstract"] == PROJECT["description"]
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_changelog_is_one_unreleased_section_and_one_per_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0].startswith("Unreleased") and __version__ in headings[1:]
    assert [heading for heading in headings[1:] if not re.fullmatch(r"\d+\.\d+\.\d+", heading)] == []
