"""docs/values.md lists every option of the value family as the configs have it, and every paper that it cites."""

from __future__ import annotations

import re
from pathlib import Path

from qfleet.algos import c51, dqn, hlgauss, iqn, qr
from qfleet.algos.value_based import ValueBasedConfig
from qfleet.runconfig.describe import key_table

PAGE = (Path(__file__).parents[2] / "docs/values.md").read_text(encoding="utf-8")
OWN = {"dqn": dqn.Config, "c51": c51.Config, "hlgauss": hlgauss.Config, "qr": qr.Config, "iqn": iqn.Config}
PAPER = re.compile(r"(?:van )?[A-Z]\w+(?: et al\.| and [A-Z]\w+)? (?:19|20)\d\d[ab]?")


def rows_of(algo: str) -> dict[str, str]:
    """Key -> its row of the table in docs/configuration.md."""
    part = key_table().split(f"### agent.algo={algo}\n")[1].split("\n### ")[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| `agent\.(\w+)` .*$", part, re.M)}


def table() -> list[str]:
    """What all members share, then what is one's own."""
    shared = [name for name in ValueBasedConfig.model_fields if name != "algo"]
    rows = [rows_of("dqn")[name].replace("| ", "| all | ", 1) for name in shared]
    for algo, model in OWN.items():
        rows += [rows_of(algo)[name].replace("| ", f"| `{algo}` | ", 1)
                 for name in model.model_fields if name not in ValueBasedConfig.model_fields]
    return ["| of | key | default | meaning |", "|---|---|---|---|", *rows]


def test_the_options_are_those_of_the_configs():
    expected = "\n".join(table())
    assert expected in PAGE, f"the table of options in docs/values.md should be\n\n{expected}"


def test_every_paper_is_in_the_list():
    text, papers = PAGE.split("## Papers\n")
    listed = set(re.findall(r"^\| ([^|]+?) \| [^|]+ \| \[[^|]+\]\(https://[^|]+\) \|$", papers, re.M))
    cited = {match[0] for match in PAPER.finditer(text)}
    assert len(listed) >= 18 and cited <= listed, f"without a line under Papers: {sorted(cited - listed)}"
