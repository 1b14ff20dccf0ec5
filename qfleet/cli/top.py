"""The command `top`: status of a run that another process trains, or the last status of one that has ended."""

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
    """Show a run until it ends or Ctrl-C; the run is not affected."""
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.run_state import describe_state, run_state

    run = RunDirectory.open(args.words[0], args.root)
    if args.json or args.once:
        status, state = _status(run), run_state(run)
        print_result(
            args, [f"{run.path} {describe_state(run, state)}", *_lines(run, status, state)],
            _document(run, status, state))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(run)
    return 0


def _follow(run: RunDirectory) -> None:
    from qfleet.report.progress import ProgressView
    from qfleet.report.status import format_score
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
            state = run_state(run)  # before the records, so that those written before the end are still shown
            for record in tail.new_records():
                view.write(record)
    finally:
        view.close()
    if not may_be_running(state) and view.has_reader:
        print_line(f"{run.path} {describe_state(run, state)}")
        if (score := run.final_score()) is not None:
            print_line(f"score  {format_score(score)}")


def _status(run: RunDirectory) -> RunStatus:
    from qfleet.report.status import RunStatus
    from qfleet.runs.metric_writers import read_metrics

    status = RunStatus(_goal(run))
    for record in read_metrics(run.metrics):
        status.add(record)
    return status


def _goal(run: RunDirectory) -> Any:
    from qfleet.config import read_yaml
    from qfleet.report.status import RunGoal
    from qfleet.runs.safe_open import no_follow_opener

    return RunGoal.from_settings(read_yaml(run.config, no_follow_opener) if run.config.is_file() else {}, run.has_gpu())


def _lines(run: RunDirectory, status: RunStatus, state: RunState) -> Iterator[str]:
    """Yield the current status as plain lines."""
    from qfleet.report.return_gap import GAP_LABEL, REASON, REMEDY
    from qfleet.report.status import BY_ROLE, format_score
    from qfleet.runs.run_state import may_be_running

    if not status.latest:
        yield "no records yet"
        return
    yield status.headline(running=may_be_running(state))
    roles = status.roles()
    rows = [*roles, *(row for row in status.metrics() if not (roles and row[0] in BY_ROLE))]
    bottleneck = status.bottleneck()
    if bottleneck is not None:
        rows += [("limited by", f"{bottleneck.limit}: {bottleneck.evidence}"), ("advice", bottleneck.advice)]
    if (score := run.final_score()) is not None:
        rows.append(("score", format_score(score)))
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:<{width}}  {text}" for name, text in rows)
    if (gap := status.return_gap()) is not None:
        yield f"{GAP_LABEL}: {gap.evidence}: {REASON}; {REMEDY}"


def _document(run: RunDirectory, status: RunStatus, state: RunState) -> dict[str, Any]:
    from qfleet.runs.run_state import may_be_running

    steps_s, updates_s = status.rates()
    bottleneck, gap, score = status.bottleneck(), status.return_gap(), run.final_score()
    return {"run": str(run.path), "state": state, "fraction": status.goal.fraction(status.latest),
            "seconds_left": status.seconds_left() if may_be_running(state) else None, "steps_per_s": steps_s,
            "updates_per_s": updates_s, "samples_per_insert": status.goal.ratio,
            "limit": None if bottleneck is None else asdict(bottleneck),
            "score": None if score is None else asdict(score),
            "return_gap": None if gap is None else gap.to_json(), "latest": status.latest}
