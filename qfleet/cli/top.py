"""The verb that looks on: `top` shows a run that another process trains, or the last state of one that has ended."""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import print_line, print_result

if TYPE_CHECKING:
    from qfleet.report.status import RunStatus
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.run_state import RunState

POLL_S = 0.25


def top(args: Namespace) -> int:
    """Show a run until it ends or the viewer leaves; the run does not notice either."""
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.run_state import describe_state, run_state

    run = RunDirectory.open(args.words[0], args.root)
    if args.json or args.once:
        tally, state = _tally(run), run_state(run)
        print_result(
            args, [f"{run.path} {describe_state(run, state)}", *_lines(tally, state)], _document(run, tally, state)
        )
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(run)
    return 0


def _follow(run: RunDirectory) -> None:
    from qfleet.report.progress import ProgressView
    from qfleet.runs.run_state import describe_state, may_be_running, run_state
    from qfleet.runs.tail import MetricsTail

    tail = MetricsTail(run.metrics, from_start=True)
    view = ProgressView(_goal(run), stream=sys.stdout)
    state = run_state(run)
    view.plan([("run", f"{run.path} {describe_state(run, state)}")])
    try:
        view.catch_up(tail.new_records())
        while may_be_running(state) and view.has_reader:
            time.sleep(POLL_S)
            state = run_state(run)  # first, so that whatever was written before the end is still shown
            for record in tail.new_records():
                view.write(record)
    finally:
        view.close()
    if not may_be_running(state) and view.has_reader:
        print_line(f"{run.path} {describe_state(run, state)}")


def _tally(run: RunDirectory) -> RunStatus:
    from qfleet.report.status import RunStatus
    from qfleet.runs.metric_writers import read_metrics

    tally = RunStatus(_goal(run))
    for record in read_metrics(run.metrics):
        tally.add(record)
    return tally


def _goal(run: RunDirectory) -> Any:
    from qfleet.config import read_yaml
    from qfleet.report.status import RunGoal
    from qfleet.runs.safe_open import no_follow_opener

    return RunGoal.from_settings(read_yaml(run.config, no_follow_opener) if run.config.is_file() else {}, run.has_gpu())


def _lines(tally: RunStatus, state: RunState) -> Iterator[str]:
    """The live view as it stands, without a terminal."""
    from qfleet.report.status import BY_ROLE
    from qfleet.runs.run_state import may_be_running

    if not tally.latest:
        yield "there is no record yet"
        return
    yield tally.headline(running=may_be_running(state))
    roles = tally.roles()
    rows = [*roles, *(row for row in tally.metrics() if not (roles and row[0] in BY_ROLE))]
    verdict = tally.bottleneck()
    if verdict is not None:
        rows += [("limited by", f"{verdict.limit}: {verdict.evidence}"), ("advice", verdict.advice)]
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:<{width}}  {text}" for name, text in rows)


def _document(run: RunDirectory, tally: RunStatus, state: RunState) -> dict[str, Any]:
    from qfleet.runs.run_state import may_be_running

    steps_s, updates_s = tally.rates()
    verdict = tally.bottleneck()
    return {"run": str(run.path), "state": state, "fraction": tally.goal.fraction(tally.latest),
            "seconds_left": tally.seconds_left() if may_be_running(state) else None, "steps_per_s": steps_s,
            "updates_per_s": updates_s, "samples_per_insert": tally.goal.ratio,
            "limit": None if verdict is None else asdict(verdict), "latest": tally.latest}
