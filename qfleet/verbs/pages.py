"""Verbs that make pages for a browser: `report` of runs that were trained, `watch` of one that trains."""

from __future__ import annotations

from argparse import Namespace

from qfleet.verbs.telling import outcome


def report(args: Namespace) -> int:
    """Write one page about some runs."""
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.report import report as write

    runs = [RunDirectory.open(word, args.root).path for word in args.words]
    path = write(runs, args.out, args.films)
    outcome(args, [str(path)], {"path": str(path), "runs": [str(run) for run in runs], "bytes": path.stat().st_size})
    return 0
