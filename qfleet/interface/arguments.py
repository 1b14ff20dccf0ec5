"""Arguments of the Python API: environments, settings, sinks and callbacks, converted to a config and checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from qfleet.config import load_attribute
from qfleet.config.layers import leaves
from qfleet.config.objects import import_name, is_local, readable, require_names, texts_of
from qfleet.core.errors import UserError
from qfleet.interface.env_arguments import CONSTRUCTED, env_settings, plain
from qfleet.report.progress import ProgressView
from qfleet.report.status import RunGoal
from qfleet.runconfig import resolution, resumable
from qfleet.runconfig.auto import reopen_auto
from qfleet.runconfig.resolution import Resolved
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import StrPath, require_no_outside_links, require_trusted
from qfleet.training.callbacks import CheckedCallback, check_callbacks
from qfleet.training.meter import Sink, as_sink

log = logging.getLogger(__name__)

SHORTHAND = {"agent": "algo", "explore": "kind"}
"""Section -> the key that is meant if the section is given as text: agent="c51"."""

SectionSettings = Mapping[str, Any]


class Settings(TypedDict, total=False):
    """Keyword arguments for config keys. A section is a mapping; `agent` and `explore` can be a name."""

    seed: int
    device: str
    total_steps: int
    total_updates: int | None
    stop_at: float | None
    init_from: str | None
    init_partial: bool
    actors: int | Literal["auto"]
    learners: int
    sync: str
    launcher: str
    agent: str | SectionSettings
    explore: str | SectionSettings
    normalise: SectionSettings
    replay: SectionSettings
    learner: SectionSettings
    eval: SectionSettings
    checkpoint: SectionSettings
    run: SectionSettings
    fleet: SectionSettings
    allreduce: SectionSettings
    parameter_server: SectionSettings
    ray: SectionSettings


def resolve_arguments(config: Any, overrides: Sequence[str] = (), env: Any = None,
                      wrappers: Sequence[Any] | None = None, settings: Mapping[str, Any] | None = None,
                      provenance: Mapping[str, str] | None = None) -> Resolved:
    """Config of the arguments of `train`: recipe, then environment and keywords, then overrides, the last on top."""
    pairs = _check_overrides(overrides)
    if isinstance(config, RunConfig):
        if pairs or settings or env is not None or wrappers is not None:
            raise UserError("a RunConfig is already complete: overrides, env, wrappers and other settings need a "
                            "recipe, file or environment id")
        return Resolved(config, provenance or {})
    if config is not None and not isinstance(config, str | Path | Mapping):
        if env is not None and not (isinstance(env, Mapping) and "id" not in env):
            raise UserError("two environments are given, as the first argument and as env=...: pass one of them")
        config, env = None, config if env is None else {**env, "id": config}
    given = _given(env, wrappers, settings or {})
    named = given.get("env", {}).get("id")
    if config is None:
        if named is None:
            raise UserError("name a recipe, a YAML file or an environment id, or pass an environment as env=...")
        config = given["env"].pop("id")
        if not given["env"]:
            del given["env"]  # an empty section would clear that of the recipe
    elif isinstance(config, Mapping):
        config = _given(config.get("env"), None, {name: value for name, value in config.items() if name != "env"})
    elif named is not None and resolution.names_env(str(config)):
        raise UserError(f"two environments are given, {config} and env={readable(named)}: pass one of them")
    resolved = resolution.resolve(config if isinstance(config, Mapping) else str(config), pairs, settings=given)
    if resolved.note:
        log.warning("%s", resolved.note)
    return resolved


def changed_config(run: StrPath, overrides: Sequence[str] = (), root: StrPath = "runs", trust: bool = False,
                   env: Any = None, wrappers: Sequence[Any] | None = None,
                   settings: Mapping[str, Any] | None = None) -> tuple[RunDirectory, RunConfig]:
    """Directory and config of a run that is resumed; UserError for changes of what is learned."""
    pairs = _check_overrides(overrides)
    directory = RunDirectory.open(os.fspath(run), os.fspath(root))
    if not trust:
        require_trusted(directory)
        require_no_outside_links(directory)
    resumable.require_current(directory.config)
    given = _given(None, None, settings or {})
    old = resolution.resolve(str(directory.config), []).config
    new = resolution.resolve(str(directory.config), pairs, settings=given).config
    resumable.changed_on_resume(old, new)
    new = reopen_auto(old, new, [*(pair.partition("=")[0] for pair in pairs), *(key for key, _ in leaves(given))])
    return directory, with_env(new, env, wrappers)


def with_env(config: RunConfig, env: Any = None, wrappers: Sequence[Any] | None = None) -> RunConfig:
    """Config of a run with its environment given anew, because it was an object of another program."""
    section = env_settings(env, wrappers).get("env", {})
    if isinstance(env, Mapping):  # a vector environment adds its number of lanes
        _require_same_settings(config, {key: section[key] for key in env if key not in CONSTRUCTED})
    given = {key: value for key, value in section.items() if key in CONSTRUCTED}
    for key, value in given.items():
        was = getattr(config.env, key)
        if value != was and not any(map(is_local, texts_of(was))):
            found = ", ".join(texts_of(was)) or "empty"
            raise UserError(f"env.{key} of the run is {found}, which needs no object of this program, so it cannot be "
                            "given anew; a new run with init_from=RUN can use another environment")
    return config.model_copy(update={"env": config.env.model_copy(update=given)}) if given else config


def _require_same_settings(config: RunConfig, settings: Mapping[str, Any]) -> None:
    was = config.env.model_dump(mode="json")
    for key, value in settings.items():
        if key not in was or was[key] != value:
            found = f"is {was[key]} in the run" if key in was else "is no setting of the run"
            raise UserError(f"env: {key}={value} is given and {found}; only {', '.join(CONSTRUCTED)} can be given "
                            f"anew: leave {key} out")


def require_importable(config: RunConfig) -> None:
    """Refuse names that only this process can import if other processes must import them."""
    others = [*config.process_settings(), *(["env.isolate=true"] if config.env.isolate else [])]
    if others:
        require_names(config.model_dump(mode="json"), others[0])


def assign_callbacks(config: RunConfig, callbacks: Sequence[Any],
                     elsewhere: bool = False) -> tuple[RunConfig, list[CheckedCallback]]:
    """Callbacks for this process; if the learner is `elsewhere`, they are added to the config by name.

    Those that the config has already, because it is that of a resumed run, are left out.
    """
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise UserError("callbacks: must be a list, such as [MyCallback()]")
    named = [(each if isinstance(each, str) else import_name(each), each) for each in callbacks]
    new = [(name, callback) for name, callback in named if name not in config.callbacks]
    if not elsewhere:
        return config, check_callbacks([load_attribute(each) if isinstance(each, str) else each for _, each in new])
    for name, callback in new:
        if name is None or name.startswith("__main__:"):
            what = getattr(callback, "__qualname__", type(callback).__qualname__)
            raise UserError(f"callbacks: {what} cannot be passed to the learner, which {config.process_settings()[0]} "
                            "starts as another process: put its class into a file, my_module.py, and pass the class or "
                            f"\"my_module:{what if what.isidentifier() else 'MyCallback'}\"; it is created there, "
                            "without arguments")
    return config.model_copy(update={"callbacks": (*config.callbacks, *(name for name, _ in new))}), []


def check_sinks(sinks: Sequence[Any]) -> list[Sink]:
    """All sinks, checked before anything is built; a single sink instead of a list raises UserError."""
    if callable(sinks) or hasattr(sinks, "write"):
        raise UserError("sinks: must be a list, such as [print]")
    return [as_sink(sink) for sink in sinks]


def progress_view(config: RunConfig) -> ProgressView:
    """The view of the command line: a live panel in a terminal, lines elsewhere."""
    return ProgressView(RunGoal.from_settings(config.model_dump(mode="json"), torch.cuda.device_count() > 0))


def _check_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides as a list. A single text or a mapping, which would iterate wrongly, raises UserError."""
    pairs = [overrides] if isinstance(overrides, str | Mapping) else list(overrides)
    if isinstance(overrides, str | Mapping) or not all(isinstance(pair, str) for pair in pairs):
        raise UserError(f"overrides={overrides!r}: must be a list of key=value texts, such as "
                        '["seed=3", "learner.learning_rate=3e-4"]')
    return pairs


def _given(env: Any, wrappers: Sequence[Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as nested settings."""
    given = {name: plain(value) for name, value in settings.items()}
    given = {name: {SHORTHAND[name]: value} if isinstance(value, str) and name in SHORTHAND else value
             for name, value in given.items()}
    for section, values in env_settings(env, wrappers).items():
        above = given.get(section, {})
        given[section] = values | above if isinstance(above, Mapping) else above
    return given
