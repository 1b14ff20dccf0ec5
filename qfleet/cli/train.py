"""The commands `train` and `resume`, and what --show and --record do at the end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.cli.options import fleet_overrides
from qfleet.cli.output import clean_stdout, print_error, print_note, print_result
from qfleet.cli.parsing import changed
from qfleet.cli.play import RolloutFrames, describe_result, video_path, write_video
from qfleet.cli.seeds import summary
from qfleet.cli.smoke import SMOKE_ROOT, smoke, smoke_plan

if TYPE_CHECKING:
    from qfleet.api import TrainResult
    from qfleet.report.progress import ProgressView
    from qfleet.report.return_gap import ReturnGap
    from qfleet.runconfig.resolution import Resolved
    from qfleet.runconfig.run_config import RunConfig

SHOWN_EPISODES, SHOWN_SEED, SHOWN_FPS = 20, 1000, 30
SAVED_EXIT_CODES = (75, 130)
ENDINGS = {"total_steps": "all steps done", "total_updates": "all updates done",
           "stop_at": "solved: an evaluation reached stop_at", "interrupted": "interrupted",
           "preempted": "stopped by a signal", "stopped": "stopped by a callback or Run.stop"}


def train(args: Namespace) -> int:
    """Train one run, or one per seed; an interruption ends the series."""
    from qfleet.core.errors import UserError
    from qfleet.runconfig import resolution

    source = args.words[0]
    if args.jobs > args.seeds:
        raise UserError(f"--jobs {args.jobs} is more than --seeds {args.seeds}: "
                        + (f"use --jobs {args.seeds}" if args.seeds > 1 else f"pass --seeds {args.jobs} or more"))
    args = _with_fleet_options(args, source)
    if args.smoke and not args.dry_run:
        return smoke(args)
    plans = [smoke_plan(args, SMOKE_ROOT) if args.smoke else resolution.resolve(source, args.overrides)]
    args, restarted = _as_rank(args, plans[0].config.synchronous)
    print_note(args, plans[0])
    if args.seeds > 1:
        more = _per_seed(plans[0].config, args.seeds)
        plans = [resolution.resolve(source, [*args.overrides, *overrides]) for overrides in more]
    if args.dry_run:
        return _dry_run(args, plans)
    _require_finish(args)
    if not restarted:
        _require_free_names([plan.config for plan in plans])
    if args.jobs > 1:
        return _train_parallel(args, plans)
    return _train_in_turn(args, plans)


def _train_in_turn(args: Namespace, plans: Sequence[Resolved]) -> int:
    """Train one seed after the other, and print a summary."""
    documents: list[dict[str, Any]] = []
    worst = 0
    for number, plan in enumerate(plans, start=1):
        if len(plans) > 1 and not args.quiet:
            print_error(f"seed {plan.config.seed}, run {number} of {len(plans)}")
        code, document = _train_one(args, plan)
        documents.append(document)
        worst = max(worst, code, key=lambda each: (each == 1, each))
        if code in SAVED_EXIT_CODES:
            break
    if len(plans) > 1 and not args.quiet:
        scores = [document["score"]["mean"] for document in documents if document["score"] is not None]
        print_error(summary([document["best"] for document in documents], scores, len(plans), plans[0].config.stop_at))
    if args.json:
        print_result(args, [], documents if args.seeds > 1 else documents[0])
    return worst


def _train_parallel(args: Namespace, plans: Sequence[Resolved]) -> int:
    """Train several seeds in parallel processes, and print a summary."""
    from qfleet.cli.seeds import train_parallel

    code, results, failures = train_parallel(args, plans)
    shown = [_show(args, result.directory) if (args.show or args.record) and code == 0 else ([], {})
             for result in results]
    scores = [result.score.mean for result in results if result.score is not None]
    text = summary([result.best for result in results], scores, len(plans), plans[0].config.stop_at)
    lines = [line for (extra, _), result in zip(shown, results, strict=True)
             for line in (*extra, f"{result.directory}: {describe_ending(result)}")]
    directories = [str(result.directory) for result in results]
    plot = [f"plot       qfleet plot {' '.join(directories)}"] if directories else []
    print_result(args, [*lines, text, *plot, *directories[-1:]],
                 [*(_document(result) | extra for (_, extra), result in zip(shown, results, strict=True)), *failures])
    return code


def resume(args: Namespace) -> int:
    """Resume a run."""
    from qfleet import api
    from qfleet.config import parse_override, read_yaml
    from qfleet.report.progress import ProgressView
    from qfleet.report.status import RunGoal
    from qfleet.runconfig import resumable
    from qfleet.runs.directory import RunDirectory

    run = RunDirectory.open(args.words[0], args.root)
    resumable.require_current(run.config)
    args = _with_fleet_options(args, str(run.config))
    goal = read_yaml(run.config) | dict(parse_override(text) for text in args.overrides)
    args, _ = _as_rank(args, goal.get("sync", "none") not in ("none", "server"))
    _require_finish(args)
    view = ProgressView(RunGoal.from_settings(goal, _has_gpu()), mode=_mode(args))
    with clean_stdout(args), _closing_view(view):
        result = api.resume(run.path, args.overrides, sinks=[view], trust=args.trust)
    document = _finish(args, result)
    if args.json:
        print_result(args, [], document)
    return result.exit_code


def _with_fleet_options(args: Namespace, source: str) -> Namespace:
    """Return the arguments with the overrides that options of fleets stand for."""
    from qfleet.runconfig import resolution

    more = fleet_overrides(args, lambda given: resolution.resolve(source, given).config.has_children)
    return changed(args, overrides=[*args.overrides, *more])


def _as_rank(args: Namespace, averages: bool) -> tuple[Namespace, bool]:
    """Silence every rank but rank 0 under torchrun or srun. True after a restart of all ranks: then the run exists."""
    from qfleet.sync.process_group import RankInfo

    place = RankInfo.from_environment() if averages else None
    if place is not None and place.rank:
        args = changed(args, quiet=True, show=False, record=False)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return args, place is not None and place.attempt > 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0


def _train_one(args: Namespace, plan: Resolved) -> tuple[int, dict[str, Any]]:
    from qfleet import api
    from qfleet.report.progress import ProgressView
    from qfleet.report.status import RunGoal

    view = ProgressView(RunGoal.from_settings(plan.config.model_dump(mode="json"), _has_gpu()), mode=_mode(args))
    with clean_stdout(args), _closing_view(view):
        result = api.train(plan.config, sinks=[view], provenance=plan.provenance)
    return result.exit_code, _finish(args, result)


@contextlib.contextmanager
def _closing_view(view: ProgressView) -> Iterator[None]:
    """Close the view at the end; an exception gets a note with the last checkpoint and the command to resume."""
    from qfleet.core.errors import RunLost, UserError

    try:
        yield
    except Exception as error:
        started = view.run is not None and Path(view.run).is_dir()
        if view.run is not None and started and not isinstance(error, UserError | RunLost):
            saved = sorted(path.name for path in Path(view.run, "checkpoints").glob("step-*"))
            state = f"its last checkpoint is {saved[-1]}: qfleet resume {view.run}" if saved else (
                f"no checkpoint yet: qfleet resume {view.run} starts it again")
            error.add_note(f"the run is in {view.run}; {state}")
        raise
    finally:
        view.close()


def _finish(args: Namespace, result: TrainResult) -> dict[str, Any]:
    """Print how a training ended and the next commands; runs --show and --record."""
    from qfleet.report.return_gap import GAP_LABEL, REASON, REMEDY

    run, document = result.directory, _document(result)
    lines = [describe_ending(result), *_score_line(result)]
    if (gap := _return_gap(run)) is not None:
        document["return_gap"] = gap.to_json()
        lines.append(f"warning    {GAP_LABEL}: {gap.evidence}: {REASON}; {REMEDY}")
    if (args.show or args.record) and result.exit_code not in SAVED_EXIT_CODES:
        with clean_stdout(args):
            more, extra = _show(args, run)
        lines += more
        document |= extra
    commands = _next_commands(result) | ({} if "report" in document else {"report": f"qfleet report {run}"})
    lines += [
        f"{name:<10} {command}" for name, command in list(commands.items())[: 1 if result.already_finished else None]
    ]
    if not args.json:
        print_result(args, [*lines, str(run)], document)
    return document


def _document(result: TrainResult) -> dict[str, Any]:
    return {"directory": str(result.directory), "steps": result.steps, "updates": result.updates,
            "episodes": result.episodes, "seconds": result.seconds, "best": result.best, "reason": result.reason,
            "exit_code": result.exit_code, "saved_at": result.saved_at,
            "score": None if result.score is None else asdict(result.score)}


def _score_line(result: TrainResult) -> list[str]:
    from qfleet.report.status import format_score

    return [] if result.score is None else [f"score      {format_score(result.score)}"]


def _return_gap(run: Path) -> ReturnGap | None:
    """The difference, if the last evaluations returned far less than the training."""
    from qfleet.config import read_yaml
    from qfleet.report.return_gap import find_gap
    from qfleet.runs.metric_writers import read_metrics

    config = run / "config.yaml"
    return find_gap(read_metrics(run / "metrics.jsonl"), read_yaml(config)) if config.is_file() else None


def _next_commands(result: TrainResult) -> dict[str, str]:
    """Commands for the run, by label; those that need a checkpoint only if there is one."""
    run = result.directory
    saved = [] if result.saved_at is None else [("resume", f"qfleet resume {run}{_further(result)}")]
    policy = [("evaluate", f"qfleet eval {run}"), ("record", f"qfleet record {run}")]
    has_policy = bool(saved) or any(Path(run, "checkpoints").glob("best-*"))
    return dict([*saved, ("watch", f"tensorboard --logdir {run}"), *policy * has_policy,
                 ("plot", f"qfleet plot {run}")])


def _further(result: TrainResult) -> str:
    """Override that lets a finished run continue; an interrupted one needs none."""
    return {"total_steps": f" total_steps={float(f'{2 * result.steps:.2g}'):.0f}",
            "total_updates": f" total_updates={float(f'{2 * result.updates:.2g}'):.0f}",
            "stop_at": " stop_at=null"}.get(result.reason, "")


def _show(args: Namespace, run: Path) -> tuple[list[str], dict[str, Any]]:
    """Evaluate, plot, record and report a finished run; returns the lines to print and the same as data.

    A run whose best policy was scored at the end is not evaluated again.
    A step that fails, for example because the environment does not render, prints a message and is skipped.
    """
    from qfleet.runs.directory import RunDirectory

    lines: list[str] = []
    document: dict[str, Any] = {}
    video = {"film": ("video", _record_video)}
    scored = RunDirectory(run).final_score() is not None
    evaluation = {} if scored else {"evaluation": ("evaluation", _evaluate)}
    shown = {**evaluation, "curve": ("curve", _plot_curve), **video,
             "report": ("report", _write_report)}
    for key, (name, step) in (shown if args.show else video).items():
        try:
            texts, document[key] = step(run)
            lines += [f"{label:<10} {text}" for label, text in texts]
        except Exception as error:  # a completed training must not end in a traceback because of a video
            print_error(f"no {name}: {error or type(error).__name__}")
    return lines, document


def _evaluate(run: Path) -> tuple[list[tuple[str, str]], Any]:
    from qfleet import api

    result = api.evaluate(run, episodes=SHOWN_EPISODES, trust=True)  # training has just imported its modules
    return [("evaluation", describe_result(result)), ("checkpoint", str(result.checkpoint))], result.to_json()


def _plot_curve(run: Path) -> tuple[list[tuple[str, str]], Any]:
    from qfleet.report import plots

    path = str(plots.plot([run]))
    return [("curve", path)], path


def _record_video(run: Path) -> tuple[list[tuple[str, str]], Any]:
    path = video_path(run, "best", SHOWN_SEED)
    write_video(RolloutFrames(run, 1, SHOWN_SEED, "best", True), path, SHOWN_FPS)
    return [("video", str(path))], str(path)


def _write_report(run: Path) -> tuple[list[tuple[str, str]], Any]:
    from qfleet.report.run_report import report

    path = str(report([run]))
    return [("report", path)], path


def _dry_run(args: Namespace, plans: Sequence[Resolved]) -> int:
    from qfleet import api
    from qfleet.config import to_yaml

    first = plans[0].config
    if not first.learners_act:
        from qfleet.launch.driver import require_startable

        require_startable(first)
    recipes = sorted({source.removeprefix("recipe ") for source in plans[0].provenance.values()
                      if source.startswith("recipe ")})
    with clean_stdout(args):
        rows = {"recipes": ", ".join(recipes) or "none"} | dict(api.plan(first))
    width = max(len(name) for name in rows)
    print_result(args, [to_yaml(first).rstrip(), "", *(f"# {name:<{width}}  {text}" for name, text in rows.items())],
                 {"config": first.model_dump(mode="json"), "plan": rows, "seeds": [plan.config.seed for plan in plans]})
    return 0


def _per_seed(first: RunConfig, seeds: int) -> list[list[str]]:
    """Overrides for one run per seed; a name chosen by the user gets the seed as suffix.

    `init_from=last` is the same run for all seeds, not the seed before.
    """
    from qfleet.runs.names import settled_name

    name = first.run.name
    start = settled_name(first.init_from, first.run.root) if first.init_from else None
    return [[f"seed={seed}", *([f"run.name={name}-s{seed}"] if name else []),
             *([f"init_from={json.dumps(start)}"] if start != first.init_from else [])]
            for seed in range(first.seed, first.seed + seeds)]


def _require_free_names(configs: Sequence[RunConfig]) -> None:
    """Refuse existing run names before the first of several trainings starts."""
    from qfleet.core.errors import UserError

    paths = [Path(cfg.run.root, cfg.run.name).expanduser() for cfg in configs if cfg.run.name]
    taken = [str(path) for path in paths if path.exists()]
    if taken:
        raise UserError(f"{', '.join(taken)} exists already: resume it with `qfleet resume {taken[0]}`, "
                        "or choose another run.name")


def _require_finish(args: Namespace) -> None:
    """Refuse --show and --record before the training if their packages are missing."""
    from importlib.util import find_spec

    from qfleet.core.errors import UserError

    needs = {"video": "imageio_ffmpeg"} if args.record or args.show else {}
    needs |= {"plot": "matplotlib"} if args.show else {}
    missing = [extra for extra, module in needs.items() if find_spec(module) is None]
    if missing:
        raise UserError(f"--{'show' if args.show else 'record'} needs additional packages: "
                        f"pip install 'qfleet[{','.join(missing)}]'")


def _mode(args: Namespace) -> str:
    return "silent" if args.quiet else "auto"


def describe_ending(result: TrainResult) -> str:
    from qfleet.report.status import format_duration, format_number

    best = "" if result.best is None else f", best evaluation {format_number(result.best)}"
    ending = ENDINGS.get(result.reason, result.reason)
    if result.exit_code == 1:
        ending = f"{ending}, but the last checkpoint could not be saved: {_saved_text(result)}"
    elif result.exit_code in SAVED_EXIT_CODES:
        ending = f"{ending}, {_saved_text(result)}"
    if result.already_finished:
        ending = f"nothing to do, the run is finished, {ending}"
    return (f"{ending}: {result.steps:,} steps, {result.updates:,} updates, "
            f"{result.episodes:,} episodes in {format_duration(result.seconds)}{best}")


def _saved_text(result: TrainResult) -> str:
    """State that resume starts from: run.exact_resume saves only on schedule, and the disk may have been full."""
    if result.saved_at is None:
        return "there is no checkpoint to resume from"
    if result.saved_at == result.steps:
        return "the state is saved"
    return f"resume continues from the checkpoint at step {result.saved_at:,}"
