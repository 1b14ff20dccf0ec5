"""Keeps of runs what their learning curves are drawn from, small enough to be committed.

    python benchmarks/curves.py RUN [RUN ...] --out benchmarks/results/cartpole_curve.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from speed import describe_machine

from qfleet.report.plots import RETURNS, RunCurve, read_run

CLOCKS = ("step", "frames", "updates", "episodes", "time_s")


def kept(directory: Path) -> dict[str, Any]:
    """Clocks and returns of a run, records without a return left out."""
    run = read_run(directory)
    rows = [[record.get(key) for key in (*CLOCKS, *RETURNS)] for record in run.records
            if any(record.get(tag) is not None for tag in RETURNS)]
    begun = json.loads((directory / "run.json").read_text())["attempts"][0]
    words = ["qfleet", *(word for word in begun["command"][1:] if not word.startswith("run.root="))]
    return {"name": run.name, "env_id": run.env_id, "command": " ".join(words), "started": begun["started"],
            "cpu": begun["hardware"]["cpu"], "versions": begun["versions"], "rows": rows}


def runs_of(document: dict[str, Any]) -> list[RunCurve]:
    """What was kept, as `qfleet plot` knows it: runs of one file are seeds of one configuration."""
    names = (*CLOCKS, *RETURNS)
    return [RunCurve(run["name"], run["env_id"], {}, [dict(zip(names, row, strict=True)) for row in run["rows"]])
            for run in document["runs"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    document = {"runs": [kept(run) for run in args.runs], "machine": describe_machine()}
    args.out.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
