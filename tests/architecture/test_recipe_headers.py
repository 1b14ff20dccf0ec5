"""A recipe that is a paper's says where it deviates and what to expect; what it says of clipping is what it does."""

from __future__ import annotations

import re

import pytest

from qfleet.runconfig.resolution import RECIPES, recipe_names, resolve

PAPER = re.compile(r"[A-Z][\w-]+ (?:et al\.|& [A-Z]\w+) (?:19|20)\d\d[a-z]?")
NEEDS_ID = {"atari", "control", "control-pixels", "pixels", "recurrent", "vector"}


def header(name: str) -> list[str]:
    """The description, and the comment lines before the first key of the config."""
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith(("description", "extends", "suits", "#")))
    return [line for line in lines[:first] if line.startswith(("description", "#"))]


def follows_a_paper(lines: list[str]) -> bool:
    """Cited in the description, or at the head of the comment; a setting borrowed further below makes no paper's
    recipe."""
    return any(PAPER.search(line) and (line.startswith("description") or PAPER.match(line, 2)) for line in lines)


FOLLOWING = [name for name in recipe_names() if follows_a_paper(header(name))]


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_papers_recipe_says_how_it_deviates_and_what_to_expect(name: str) -> None:
    comment = "\n".join(header(name))
    assert re.search(r"^# Deviations: \S", comment, re.M), "name them, or say that there are none"
    assert re.search(r"^# Expected: \S", comment, re.M), "a number, or that none is known"


@pytest.mark.parametrize("name", FOLLOWING)
def test_gradients_are_clipped_as_the_header_says(name: str) -> None:
    said = re.search(r"gradients\s(?:# )?(?:are )?clipped\s(?:# )?at\s(?:# )?(\d+)", "\n".join(header(name)))
    config = resolve(name, ["env.id=PongNoFrameskip-v4"] if name in NEEDS_ID else []).config
    assert config.learner.clip_norm == (float(said[1]) if said else 0), "say it in the header"


def test_papers_are_found() -> None:
    assert {"rainbow", "c51", "btr", "agent57", "apex", "fastdqn", "control", "atari"} <= set(FOLLOWING)
    assert {"pong", "catch", "vector"}.isdisjoint(FOLLOWING)
