"""The command `tune`: a hyperparameter search."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import clean_stdout, print_result, table

if TYPE_CHECKING:
    from qfleet.tuning.study import TuneResult

SHOWN_TRIALS = 10
NEW_ONLY = ("space", "sampler", "pruner", "objective", "seeds_per_trial", "study")
"""Options of a new study: a continued one keeps its own."""


def tune(args: Namespace) -> int:
    """Run a study, or continue one."""
    from qfleet.tuning.study import tune as run_study

    with clean_stdout(args):
        if args.resume is not None:
            _require_nothing_new(args)
            result = run_study(study=args.resume, resume=True, trials=args.trials, jobs=args.jobs,
                               progress=not args.quiet, trust=args.trust)
        else:
            result = _new_study(args, run_study)
    print_result(args, _lines(result), _document(result))
    return result.exit_code


def _new_study(args: Namespace, run_study: Any) -> TuneResult:
    from qfleet.config import read_yaml
    from qfleet.core.errors import UserError
    from qfleet.tuning.parameters import flatten_space, split_overrides

    if not args.words:
        raise UserError("name a recipe, a YAML file or an environment id to tune, or continue a study with "
                        "--resume DIR")
    plain, space = split_overrides(args.overrides)
    if args.space is not None:
        space = dict(flatten_space(read_yaml(args.space))) | space
    if twice := [key for key in (text.partition("=")[0] for text in plain) if key in space]:
        raise UserError(f"{twice[0]} is both in the search space and an override: remove one of them")
    if not space:
        raise UserError("no search space: write a range or choices, such as learner.learning_rate=1e-5..1e-2:log "
                        "learner.batch_size=32,64,128, or give a file with --space FILE.yaml")
    return run_study(args.words[0], plain, space=space, trials=args.trials, jobs=args.jobs, sampler=args.sampler,
                     pruner=args.pruner, objective=args.objective, seeds_per_trial=args.seeds_per_trial,
                     study=args.study, progress=not args.quiet)


def _require_nothing_new(args: Namespace) -> None:
    from qfleet.core.errors import UserError

    given = [f"--{name.replace('_', '-')}" for name in NEW_ONLY if getattr(args, name) is not None]
    if args.words or args.overrides or given:
        raise UserError(f"--resume {args.resume} continues a study with its own settings: leave out "
                        f"{', '.join([*args.words, *args.overrides, *given])}; --trials and --jobs can change")


def _lines(result: TuneResult) -> list[str]:
    from qfleet.tuning.results import ranked, table_rows

    states = [trial.state for trial in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    lines = table(table_rows(ranked(result.trials)[:SHOWN_TRIALS])) if result.trials else []
    lines += [f"{len(states)} trial{'s' * (len(states) != 1)}: {counts}"]
    if result.exit_code in (75, 130):
        lines += [f"continue   qfleet tune --resume {result.directory}"]
    if result.best_recipe is not None:
        lines += [f"best       qfleet train {result.best_recipe}"]
    lines += [f"plot       {path}" for path in result.plots]
    return [*lines, str(result.directory)]


def _document(result: TuneResult) -> dict[str, Any]:
    best = result.best
    return {"directory": str(result.directory), "best": None if best is None else asdict(best),
            "best_recipe": result.best_recipe and str(result.best_recipe),
            "trials": [asdict(trial) for trial in result.trials], "plots": [str(path) for path in result.plots],
            "reason": result.reason, "exit_code": result.exit_code}
