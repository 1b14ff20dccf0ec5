"""`train --smoke`: every stage of a run within seconds, to check a recipe or an environment before a long run."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import clean_stdout, print_error, print_line, print_note, print_result

if TYPE_CHECKING:
    from qfleet.api import TrainResult
    from qfleet.runconfig.resolution import Resolved

STAGES = ("start", "updates", "evaluation", "checkpoint", "final evaluation", "policy")
WIDTH = max(map(len, STAGES)) + 2
PREFIX = "qfleet-smoke-"
SMOKE_ROOT = Path(tempfile.gettempdir(), f"{PREFIX}...")
"""What --dry-run shows as the root of the run."""


class StageView:
    """Metric sink that prints a line as soon as a stage is reached, with the seconds since the last one."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.stages: list[dict[str, Any]] = []
        self._since = self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def reached(self) -> set[str]:
        return {stage["stage"] for stage in self.stages}

    def reach(self, stage: str, text: str, passed: bool = True) -> None:
        if stage in self.reached:
            return
        now = time.monotonic()
        self.stages.append({"stage": stage, "passed": passed, "seconds": round(now - self._since, 2), "text": text})
        if not self.silent:
            print_line(f"{stage:<{WIDTH}}{'ok' if passed else 'failed':<8}{now - self._since:5.1f} s  {text}")
        self._since = now

    def fail(self) -> None:
        """The next stage was not reached."""
        if all(stage["passed"] for stage in self.stages):
            self.reach(next((stage for stage in STAGES if stage not in self.reached), STAGES[-1]), "", passed=False)

    def plan(self, rows: Sequence[tuple[str, str]]) -> None:
        known = dict(rows)
        if "environment" in known:
            self.reach("start", f"{known['environment']}; {known.get('agent', '')}")

    def write(self, record: Mapping[str, Any]) -> None:
        if record.get("updates", 0) > 0 and record.get("train/loss") is not None:
            self.reach("updates", f"loss {record['train/loss']:.3g} after {record['updates']} updates")
        if record.get("eval/mean_reward") is not None:
            self.reach("evaluation", f"mean return {record['eval/mean_reward']:g} at step {record['step']}")

    def flush(self) -> None:
        """Lines are printed at once."""

    def close(self) -> None:
        """Nothing is open."""


def smoke_plan(args: Namespace, folder: Path) -> Resolved:
    """Return the shortened config of a run in `folder`.

    Sizes and directory that the user has set are replaced, too, so that the option can be added to the command of a
    long run.
    """
    from qfleet.core.errors import UserError
    from qfleet.runconfig import resolution
    from qfleet.runconfig.smoke import smoke_overrides
    from qfleet.runs.names import absolute_name

    if args.seeds > 1 or args.show or args.record:
        raise UserError("--smoke makes one short run: leave out --seeds, --show and --record")
    config = resolution.resolve(args.words[0], args.overrides).config
    overrides = [*args.overrides, *smoke_overrides(config), f"run.root={json.dumps(str(folder))}", "run.name=smoke"]
    if config.init_from:  # the root is another one now
        overrides.append(f"init_from={json.dumps(absolute_name(config.init_from, config.run.root))}")
    return resolution.resolve(args.words[0], overrides)


def smoke(args: Namespace) -> int:
    """Run all stages in a temporary directory, which stays only if one fails; exit code 1 then."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    view = StageView(args.json)
    passed = False
    try:
        plan = smoke_plan(args, folder)
        print_note(args, plan)
        try:
            passed = _run_stages(args, plan, view)
        finally:
            if not passed:
                view.fail()
    finally:
        if not passed and any(folder.glob("*/run.json")):
            print_error(f"the run is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    line = f"smoke test passed in {view.seconds:.1f} s" if passed else "smoke test failed"
    print_result(args, [line], {"passed": passed, "seconds": round(view.seconds, 1), "stages": view.stages})
    return 0 if passed else 1


def _run_stages(args: Namespace, plan: Resolved, view: StageView) -> bool:
    from qfleet import api

    with clean_stdout(args):
        result = api.train(plan.config, sinks=[view], provenance=plan.provenance)
        if "evaluation" not in view.reached or not result.updates or result.exit_code:
            return False
        return _check_result(result, view) and _check_policy(result, view)


def _check_result(result: TrainResult, view: StageView) -> bool:
    """Check what the run has left: scheduled and final checkpoints, and an evaluation of the last weights."""
    from qfleet.core.units import format_bytes
    from qfleet.report.doctor import FAULTS
    from qfleet.runs.disk_space import disk_usage
    from qfleet.runs.metric_writers import read_metrics

    records = read_metrics(result.directory / "metrics.jsonl")
    if faults := {tag: record[tag] for record in records for tag in record if tag.startswith("fault/") and record[tag]}:
        view.reach("updates", ", ".join(f"{tag} {count:g}" for tag, count in faults.items()), passed=False)
        print_error("; ".join(f"{tag}: {FAULTS[tag]}" for tag in faults if tag in FAULTS))
        return False
    view.reach("updates", f"{result.updates} updates")
    saved = sorted(result.directory.glob("checkpoints/step-*"))
    if not saved or result.saved_at is None:
        return False
    view.reach("checkpoint", f"{saved[-1].name}, {format_bytes(disk_usage(saved[-1]).bytes)}")
    scores = [record for record in records if "eval/mean_reward" in record]
    if result.best is None or not scores or scores[-1]["step"] < result.steps:
        return False
    view.reach("final evaluation", f"mean return {scores[-1]['eval/mean_reward']:g} after {result.updates} updates and "
                                   f"{result.steps} steps")
    return True


def _check_policy(result: TrainResult, view: StageView) -> bool:
    """Load the policy from disk and play an episode."""
    from qfleet import api

    score = api.evaluate(result.directory, episodes=1, which="latest", trust=True)
    view.reach("policy", f"loaded from {Path(str(score.checkpoint)).name}, return {score.mean_reward:g} in "
                         f"{score.lengths[0]} steps")
    return True
