"""Commands that print information: `recipes`, `config`, `check-env`, `doctor`, `version`; and `_env-host`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet import __version__
from qfleet.cli.output import clean_stdout, print_note, print_result, table

if TYPE_CHECKING:
    from qfleet.core.env import VectorEnv
    from qfleet.runs.directory import RunDirectory


def recipes(args: Namespace) -> int:
    """List the recipes, or those that contain all given words."""
    from qfleet.core.errors import UserError
    from qfleet.runconfig import resolution

    rows = resolution.list_recipes(args.words)
    if not rows:
        raise UserError(f"no recipe contains {' '.join(args.words)}: `qfleet recipes` lists all of them")
    width = max((len(name) for name, _ in rows), default=0)
    print_result(args, [f"{name:<{width}}  {description}" for name, description in rows],
                 [{"name": name, "description": description} for name, description in rows])
    return 0


def config(args: Namespace) -> int:
    """Show, explain or compare configurations, or print the JSON schema."""
    from qfleet.core.errors import UserError

    actions = {"show": (_config_show, 1), "explain": (_config_explain, 1), "schema": (_config_schema, 0),
               "diff": (_config_diff, 2)}
    action, *sources = args.words
    if action not in actions:
        raise UserError(f"config {action} is unknown: choose one of {', '.join(actions)}")
    function, needed = actions[action]
    if len(sources) != needed:
        wanted = ("no sources", "one source", "two sources")[needed]
        raise UserError(f"config {action} takes {wanted} (recipe, file, environment id or run), not {len(sources)}")
    function(args, [_source(args, source) for source in sources])
    return 0


def check_env(args: Namespace) -> int:
    """Test an environment and list the findings; exit code 1 if there are errors."""
    from qfleet.config import nest, validate
    from qfleet.envs import EnvConfig
    from qfleet.envs.check import check
    from qfleet.runconfig.resolution import recipe_names, resolve

    changes = [text.removeprefix("env.") for text in args.overrides]
    if args.words[0] in recipe_names():
        cfg = resolve(args.words[0], [f"env.{text}" for text in changes]).config.env
    else:
        cfg = validate(EnvConfig, {**nest(changes), "id": args.words[0]}, "command line")
    with clean_stdout(args):
        findings = check(cfg)
    lines = [f"{finding.level:<8} {finding.text}" for finding in findings]
    print_result(args, lines, [{"level": finding.level, "text": finding.text} for finding in findings])
    return 1 if any(finding.level == "error" for finding in findings) else 0


def doctor(args: Namespace) -> int:
    """Print the installation and, for a recipe, its plan; for a run its diagnosis."""
    from qfleet.core.errors import UserError
    from qfleet.report import doctor as checks

    plan, root = None, "."
    if args.words and not args.overrides and (run := _run(args, args.words[0])) is not None:
        report = checks.diagnose(run)
        print_result(args, checks.explain(report), report)
        return 0
    if args.words:
        from qfleet import api
        from qfleet.runconfig import resolution

        config = resolution.resolve(_source(args, args.words[0]), args.overrides).config
        with clean_stdout(args):
            plan, root = dict(api.plan(config)), config.run.root
    elif args.overrides:
        raise UserError(f"{args.overrides[0]} changes a recipe, and none is given: qfleet doctor RECIPE key=value")
    report = checks.examine(plan, root)
    print_result(args, [checks.render(report)], report)
    return 0


def version(args: Namespace) -> int:
    """Print the version."""
    print_result(args, [f"qfleet {__version__}"], {"version": __version__})
    return 0


def env_host(args: Namespace) -> int:
    """Host an environment for the process that started this one, until it closes the pipe."""
    from qfleet.envs import EnvConfig, make
    from qfleet.envs.isolated import serve_env

    def build(request: dict[str, Any]) -> VectorEnv:
        sys.path += [place for place in request["path"] if place not in sys.path]
        return make(EnvConfig(**request["env"]), request["lanes"], render=request["render"])

    return serve_env(build, sys.stdin, sys.stdout)


def _config_show(args: Namespace, sources: Sequence[str]) -> None:
    from qfleet.config import to_yaml
    from qfleet.runconfig import resolution

    resolved = resolution.resolve(sources[0], args.overrides)
    print_note(args, resolved)
    print_result(args, [to_yaml(resolved.config).rstrip()], resolved.config.model_dump(mode="json"))


def _config_explain(args: Namespace, sources: Sequence[str]) -> None:
    from qfleet.runconfig import describe, resolution

    resolved = resolution.resolve(sources[0], args.overrides)
    print_note(args, resolved)
    rows = describe.explain(resolved)
    lines = table([(row.key, row.value, row.source, f"no effect: {row.idle}" if row.idle else row.description)
                   for row in rows])
    print_result(args, lines, [{**asdict(row), "active": not row.idle} for row in rows])


def _config_schema(args: Namespace, sources: Sequence[str]) -> None:
    from qfleet.runconfig import describe

    schema = describe.schema()
    print_result(args, [json.dumps(schema, indent=2)], schema)


def _config_diff(args: Namespace, sources: Sequence[str]) -> None:
    from qfleet.runconfig import describe, resolution

    first, second = (resolution.resolve(source, args.overrides) for source in sources)
    rows = describe.diff(first.config, second.config)
    print_result(
        args,
        table([("key", *sources), *((row.key, row.a, row.b) for row in rows)]) if rows else ["no difference"],
        [asdict(row) for row in rows])


def _run(args: Namespace, word: str) -> RunDirectory | None:
    """Return the run that a word names, or None; a recipe of the same name takes precedence."""
    from qfleet.runconfig.resolution import recipe_names
    from qfleet.runs.directory import RunDirectory

    if word in recipe_names():
        return None
    path = _run_path(args, word)
    return RunDirectory(path) if (path / "config.yaml").is_file() else None


def _run_path(args: Namespace, word: str) -> Path:
    """Return the path of a run, or the word itself. Files and environment ids come before prefixes of run names."""
    from qfleet.runconfig.resolution import names_env
    from qfleet.runs.names import match_run, run_names

    if word in run_names(args.root):
        return Path(args.root, word).expanduser()
    path = Path(word).expanduser()
    if path.exists() or names_env(word):
        return path
    return match_run(word, args.root) or path


def _source(args: Namespace, word: str) -> str:
    """Return the source of a configuration; a run is replaced by its config.yaml, unless a recipe has that name.

    The config may name modules, which resolving imports: for a foreign run this needs --trust.
    """
    from qfleet.runconfig.resolution import recipe_names
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.find import require_trusted

    if word in recipe_names():
        return word
    path = _run_path(args, word)
    run = RunDirectory(path.parent if path.name == "config.yaml" else path)
    if not run.config.is_file():
        return word
    if not args.trust and (path != run.config or run.record.exists()):  # a config.yaml outside of a run is trusted
        require_trusted(run)
    return str(run.config)
