"""docs/values.md lists every option of the value-based agents with its default, and links every paper that it cites."""

from __future__ import annotations

import re
from pathlib import Path

from qfleet.algos import c51, dqn, hlgauss, iqn, qr
from qfleet.algos.value_based import ValueBasedConfig
from qfleet.runconfig.describe import key_table

PAGE = (Path(__file__).parents[2] / "docs/values.md").read_text(encoding="utf-8")
OWN = {"dqn": dqn.Config, "c51": c51.Config, "hlgauss": hlgauss.Config, "qr": qr.Config, "iqn": iqn.Config}
NAME = r"(?:van )?[A-Z]\w+(?: et al\.| and [A-Z]\w+)? (?:19|20)\d\d[ab]?"


def defaults(algo: str) -> dict[str, str]:
    """Key -> default, as the generated reference of all keys has it."""
    part = key_table().split(f"### agent.algo={algo}\n")[1].split("\n### ")[0]
    return dict(re.findall(r"^\| `agent\.(\w+)` \| (\S.*?) \|", part, re.M))


def options() -> set[tuple[str, str, frozenset[str]]]:
    """Key, default, and the algorithms that have it; no algorithm for what all share."""
    found = {(name, defaults("dqn")[name], frozenset()) for name in ValueBasedConfig.model_fields if name != "algo"}
    own = [(algo, name) for algo, model in OWN.items() for name in model.model_fields
           if name not in ValueBasedConfig.model_fields]
    for algo, name in own:
        found.add((name, defaults(algo)[name], frozenset(each for each, other in own if other == name)))
    return found


def listed() -> set[tuple[str, str, frozenset[str]]]:
    """The same, as the page lists it: the algorithms stand before a colon."""
    section = PAGE.split("## Keys\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `agent\.(\w+)` \| (\S.*?) \| (?:((?:`\w+`(?:, )?)+): )?\S.* \|$", section, re.M)
    return {(key, default, frozenset(re.findall(r"\w+", algos))) for key, default, algos in rows}


def test_the_options_are_those_of_the_configs():
    assert listed() == options()


def test_every_paper_is_linked():
    linked = set(re.findall(rf"\[({NAME})\]\(https://[^)]+\)", PAGE))
    cited = set(re.findall(NAME, PAGE))
    assert len(linked) >= 18 and cited <= linked, f"without a link: {sorted(cited - linked)}"
