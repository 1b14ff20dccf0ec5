"""The verb that looks on: `top` shows a run that another process trains, or the last state of one that has ended."""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qfleet.verbs.telling import outcome, say

if TYPE_CHECKING:
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.state import State
    from qfleet.runs.tally import Tally

POLL_S = 0.25


def top(args: Namespace) -> int:
    """Show a run until it ends or the viewer leaves; the run does not notice either."""
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.state import state_of, words_of

    run = RunDirectory.open(args.words[0], args.root)
    if args.json or args.once:
        tally, state = _tally(run), state_of(run)
        outcome(args, [f"{run.path} {words_of(run, state)}", *_lines(tally, state)], _document(run, tally, state))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(run)
    return 0


def _follow(run: RunDirectory) -> None:
    from qfleet.runs.progress import ProgressView
    from qfleet.runs.state import going_on, state_of, words_of
    from qfleet.runs.tail import Tail

    tail = Tail(run.metrics, from_start=True)
    view = ProgressView(_goal(run), stream=sys.stdout)
    state = state_of(run)
    view.plan([("run", f"{run.path} {words_of(run, state)}")])
    try:
        view.catch_up(tail.news())
        while going_on(state) and view.watched:
            time.sleep(POLL_S)
            state = state_of(run)  # first, so that whatever was written before the end is still shown
            for record in tail.news():
                view.write(record)
    finally:
        view.close()
    if not going_on(state) and view.watched:
        say(f"{run.path} {words_of(run, state)}")


def _tally(run: RunDirectory) -> Tally:
    from qfleet.runs.tally import Tally
    from qfleet.runs.writers import read_metrics

    tally = Tally(_goal(run))
    for record in read_metrics(run.metrics):
        tally.add(record)
    return tally


def _goal(run: RunDirectory) -> Any:
    from qfleet.config import read_yaml
    from qfleet.runs.plain import no_link
    from qfleet.runs.tally import Goal

    return Goal.of(read_yaml(run.config, no_link) if run.config.is_file() else {}, run.has_gpu())


def _lines(tally: Tally, state: State) -> Iterator[str]:
    """The live view as it stands, without a terminal."""
    from qfleet.runs.state import going_on
    from qfleet.runs.tally import BY_ROLE

    if not tally.latest:
        yield "there is no record yet"
        return
    yield tally.headline(running=going_on(state))
    roles = tally.roles()
    rows = [*roles, *(row for row in tally.figures() if not (roles and row[0] in BY_ROLE))]
    verdict = tally.verdict()
    if verdict is not None:
        rows += [("limited by", f"{verdict.limit}: {verdict.evidence}"), ("advice", verdict.advice)]
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:<{width}}  {text}" for name, text in rows)


def _document(run: RunDirectory, tally: Tally, state: State) -> dict[str, Any]:
    from qfleet.runs.state import going_on

    steps_s, updates_s = tally.rates()
    verdict = tally.verdict()
    return {"run": str(run.path), "state": state, "fraction": tally.goal.fraction(tally.latest),
            "seconds_left": tally.seconds_left() if going_on(state) else None, "steps_per_s": steps_s,
            "updates_per_s": updates_s, "samples_per_insert": tally.goal.ratio,
            "limit": None if verdict is None else asdict(verdict), "latest": tally.latest}
