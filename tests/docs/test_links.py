"""The documentation against the sources: links lead somewhere, and what it names exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import unfolded

from qfleet.cli import commands
from qfleet.cli.parsing import make_parser
from qfleet.runconfig import describe

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SECTIONS = "env|agent|explore|replay|learner|eval|checkpoint|run|fleet"

SHOWN_MISTAKES = {"learner.lerning_rate", "learner.learning_rat", "agent.n_stp"}
"""Keys that the documentation misspells to show the answer."""

EXAMPLE_KEYS = {"agent.gap"}
"""Keys of algorithms in examples/."""

SHOWN_WRONG_OPTIONS = {("train", "--seed"), ("train", "--env"), ("train", "--algo")}
REMOVED_KEYS = {"learner.parts", "run.share_cores", "eval.beside", "fleet.restarts", "fleet.max_restarts",
                "fleet.patience_s", "explore.base", "explore.alpha", "agent.normalise"}
"""Keys that only the changelog may name."""

REMOVED_TAGS = {"fleet/held_share", "time/intake_share", "train/bonus"}
"""Tags that only the changelog may name."""

OTHER_NAMES = {"run.json", "fleet.json", "exits.json", "learner.log",
               *(f"run.{name}" for name in ("agent", "log", "metrics", "network", "replay"))}
"""Look like keys and are none: files, and members of qfleet.Run and RunControl."""

TAG = re.compile(r"\b(?:rollout|eval|train|time|replay|actor|fault|wire|fleet)/[a-z_]+\b")


def by_name(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def fences(text: str) -> Iterator[tuple[str, str]]:
    """(language, body) of every fenced block; indented blocks count as console."""
    text = unfolded(text)
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    yield "console", "\n".join(line.strip() for line in plain.splitlines() if line.startswith("    "))


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", unfolded(text), flags=re.M | re.S)


def inline_code(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def command_text(text: str) -> str:
    """Everything that may hold a command: blocks that are not code of another language, and inline code."""
    blocks = [body for language, body in fences(text) if language in ("", "console")]
    return "\n".join([*blocks, *inline_code(text)])


def slug(heading: str) -> str:
    """The anchor that is made of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page.read_text()), re.M)}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


def unknown_verbs(text: str, past: bool = False) -> list[str]:
    """Verbs that are not there. A text about the `past` may name those that became scripts."""
    known = {verb.name for verb in commands.COMMANDS} | (commands.MOVED.keys() if past else set())
    return [verb for verb in re.findall(r"(?<![\w./-])qfleet ([a-z][\w-]*)", command_text(text)) if verb not in known]


def unknown_options(text: str) -> list[tuple[str, str]]:
    unknown = []
    for verb, rest in re.findall(r"(?<![\w./-])qfleet ([a-z][\w-]*)([^#\n]*)", command_text(text)):
        if verb in commands.MOVED:
            continue  # whose options are those of a script
        parser = make_parser(commands.find_command(verb))
        known = {option for action in parser._actions for option in action.option_strings}
        unknown += [(verb, option) for option in re.findall(r"(?<!\S)\[?(--[a-z][a-z-]*)", rest) if option not in known]
    return unknown


def unknown_keys(text: str, past: bool = False) -> list[str]:
    """Keys that are not there. A text about the `past` may name those that were removed."""
    known = set(re.findall(r"^\| `([\w.]+)`", describe.key_table(), re.M)) | SHOWN_MISTAKES | EXAMPLE_KEYS | OTHER_NAMES
    known |= REMOVED_KEYS if past else set()
    set_somewhere = re.findall(rf"(?<![\w.])((?:{SECTIONS})\.[a-z_]+)(?:\.\w+)?=", text)
    named = [code for code in inline_code(text) if re.fullmatch(rf"(?:{SECTIONS})\.[a-z_]+", code)]
    return [key for key in [*set_somewhere, *named] if key not in known]


def missing_paths(text: str) -> list[str]:
    named = re.findall(r"\b(?:qfleet|tests|benchmarks|examples|docs)/[\w/.-]*\w\.(?:py|md|yaml)\b", text)
    return [path for path in named if not (ROOT / path).exists()]


def missing_imports(text: str) -> list[str]:
    """Names that Python code of a page imports from the package and that are not there."""
    code = "".join(body for language, body in fences(text) if language == "python")
    named = [(module, name.split()[0]) for module, names in re.findall(r"^from (qfleet[\w.]*) import (.+)$", code, re.M)
             for name in names.split(",")]
    return [f"{module}.{name}" for module, name in named if not hasattr(importlib.import_module(module), name)]


def source_tags() -> set[str]:
    text = "".join(path.read_text() for path in (ROOT / "qfleet").rglob("*.py"))
    return {tag for quoted in re.findall(r'"([^"\n]+)"', text) for tag in TAG.findall(quoted) if tag == quoted}


@pytest.mark.parametrize("page", by_name(PAGES))
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", by_name(PAGES))
def test_commands_exist(page):
    assert unknown_verbs(page.read_text(), past=page.name == "CHANGELOG.md") == []
    assert set(unknown_options(page.read_text())) <= SHOWN_WRONG_OPTIONS


@pytest.mark.parametrize("page", by_name(PAGES))
def test_keys_exist(page):
    assert unknown_keys(page.read_text(), past=page.name == "CHANGELOG.md") == []


@pytest.mark.parametrize("page", by_name(PAGES))
def test_files_that_are_named_exist(page):
    assert missing_paths(page.read_text()) == []


@pytest.mark.parametrize("page", by_name(PAGES))
def test_imports_that_are_shown_work(page):
    assert missing_imports(page.read_text()) == []


def test_the_design_page_and_its_decisions_are_short():
    decisions = list(ROOT.glob("docs/decisions/*.md"))
    assert decisions and len((ROOT / "docs/design.md").read_text().splitlines()) <= 150
    assert [page.name for page in decisions if len(page.read_text().splitlines()) >= 40] == []


def test_every_verb_has_a_section():
    headings = set(re.findall(r"^## ([\w-]+)$", (ROOT / "docs/cli.md").read_text(), re.M))
    assert {verb.name for verb in commands.COMMANDS if not verb.hidden} <= headings


def test_metric_tags_are_those_of_the_sources():
    documented = set(re.findall(r"^\| `([^`]+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    documented = {tag for tag in documented if TAG.fullmatch(tag)}
    assert documented == source_tags()
    assert len(documented) > 15


def test_metric_tags_in_prose_exist():
    for page in PAGES:
        named = {code for code in inline_code(page.read_text()) if TAG.fullmatch(code)}
        past = REMOVED_TAGS if page.name == "CHANGELOG.md" else set()
        assert named <= source_tags() | past, page


# ---- Each check can fail ----

def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title, twice\n[good](page.md#a-title-twice) [web](https://example.org/x)")
    assert broken_links(page, page.read_text()) == []
    assert broken_links(page, "[a](gone.md) [b](page.md#gone) ![c](#none)") == ["gone.md", "page.md#gone", "#none"]
    assert broken_links(page, "```\n[a](gone.md)\n```") == []


def test_folded_text_is_prose_and_its_code_is_code():
    folded = ('??? note "Commands"\n\n    Then qfleet is run.\n\n    ```console\n    $ qfleet trian x\n    ```\n\n'
              "It is good.\n")
    assert unknown_verbs(folded) == ["trian"]
    assert unfolded("!!! note\n    one\n\n        two\nthree") == "one\n\n    two\nthree\n"


def test_unknown_names_are_found():
    block = "```console\n$ qfleet trian cartpole\n$ qfleet train cartpole --sedes 3   # --no\n```\n"
    assert unknown_verbs(block) == ["trian"]
    assert unknown_options(block.replace("trian", "train")) == [("train", "--sedes")]
    assert unknown_verbs("qfleet trains agents") == []
    assert unknown_verbs("`qfleet bench`") == ["bench"] and unknown_verbs("`qfleet bench`", past=True) == []
    assert unknown_verbs("see `qfleet\nevaluate x`, or\n\n    qfleet gaze x") == ["gaze", "evaluate"]
    assert unknown_keys("set `replay.alhpa`, agent.n_step=3 env.kwargs.size=5 env.kwarg.size=5") == \
        ["env.kwarg", "replay.alhpa"]
    assert unknown_keys("`run.share_cores`") == ["run.share_cores"]
    assert unknown_keys("`run.share_cores`", past=True) == []
    code = "```python\nfrom qfleet.config import Config as Section, Typo\n```\n"
    assert missing_imports(code) == ["qfleet.config.Typo"]
    assert missing_paths("see qfleet/core/agent.py and qfleet/typos.py") == ["qfleet/typos.py"]
