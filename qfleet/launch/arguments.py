"""Arguments of the Python API: environments, settings, sinks and callbacks, converted to a config and checked."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from qfleet.config import load_attribute
from qfleet.config.layers import leaves
from qfleet.config.objects import import_name, is_object, reference_to
from qfleet.core.errors import UserError
from qfleet.envs.prototype import env_reference
from qfleet.report.progress import ProgressView
from qfleet.report.status import RunGoal
from qfleet.runconfig import resolution, resumable
from qfleet.runconfig.auto import reopen_auto
from qfleet.runconfig.resolution import Resolved
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.runs.find import StrPath, require_no_outside_links, require_trusted, texts_of
from qfleet.training.callbacks import CheckedCallback, check_callbacks
from qfleet.training.meter import Sink, as_sink

SHORTHAND = {"env": "id", "agent": "algo", "explore": "kind"}
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
        if env is not None:
            raise UserError(f"two environments are given, {config!r} and env={env!r}: pass one of them")
        config, env = None, config
    given = _given(env, wrappers, settings or {})
    named = given.get("env", {}).get("id")
    if config is None:
        if named is None:
            raise UserError("name a recipe, a YAML file or an environment id, or pass an environment as env=...")
        config = given["env"].pop("id")
        if not given["env"]:
            del given["env"]  # an empty section would clear that of the recipe
    elif isinstance(config, Mapping):
        config = _plain(config)
    elif named is not None and resolution.names_env(str(config)):
        raise UserError(f"two environments are given, {str(config)!r} and env={named!r}: pass one of them")
    return resolution.resolve(config if isinstance(config, Mapping) else str(config), pairs, settings=given)


def changed_config(run: StrPath, overrides: Sequence[str] = (), root: StrPath = "runs", trust: bool = False,
                   env: Any = None, wrappers: Sequence[Any] | None = None,
                   settings: Mapping[str, Any] | None = None) -> tuple[RunDirectory, RunConfig]:
    """Directory and config of a run that is resumed; UserError for changes of what is learned."""
    pairs = _check_overrides(overrides)
    directory = RunDirectory.open(run, root)
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
    given = _given(env, wrappers, {}).get("env", {})
    for key, value in given.items():
        was = getattr(config.env, key)
        if value != was and not any(is_object(text) or text.startswith("__main__:") for text in texts_of(was)):
            raise UserError(f"env.{key}={was!r} of the run can be found by its name, so it cannot be given anew as "
                            f"{value!r}; a new run with init_from=RUN can use another environment")
    return config.model_copy(update={"env": config.env.model_copy(update=given)}) if given else config


def require_importable(config: RunConfig) -> None:
    """Refuse names that only this process can import if other processes must import them."""
    others = [*config.process_settings(), *(["env.isolate=true"] if config.env.isolate else [])]
    names = [name for name in texts_of(config.model_dump(mode="json")) if name.startswith(("__main__:", "object:"))]
    if others and names:
        name = names[0].partition(":")[2]
        raise UserError(f"{', '.join(dict.fromkeys(names))}: definitions of a script or notebook, lambdas and "
                        f"instances cannot be imported by the other processes that {others[0]} starts: put a class or "
                        "a function into a file, my_module.py, and write "
                        f"my_module:{name if name.isidentifier() else 'make_env'}")


def assign_callbacks(config: RunConfig, callbacks: Sequence[Any],
                     elsewhere: bool = False) -> tuple[RunConfig, list[CheckedCallback]]:
    """Callbacks for this process; if the learner is `elsewhere`, they are added to the config by name."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise UserError("callbacks: must be a list, such as [MyCallback()]")
    if not elsewhere:
        return config, check_callbacks([load_attribute(each) if isinstance(each, str) else each for each in callbacks])
    names = [each if isinstance(each, str) else import_name(each) for each in callbacks]
    for name, callback in zip(names, callbacks, strict=True):
        if name is None or name.startswith("__main__:"):
            what = getattr(callback, "__qualname__", type(callback).__qualname__)
            raise UserError(f"callbacks: {what} cannot be passed to the learner, which {config.process_settings()[0]} "
                            "starts as another process: put its class into a file, my_module.py, and pass the class or "
                            f"\"my_module:{what if what.isidentifier() else 'MyCallback'}\"; it is created there, "
                            "without arguments")
    new = [name for name in names if name not in config.callbacks]  # a resumed run has them already
    return config.model_copy(update={"callbacks": (*config.callbacks, *new)}), []


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
    given = {name: {SHORTHAND[name]: value} if isinstance(value, str) and name in SHORTHAND else _plain(value)
             for name, value in settings.items()}
    if env is not None:
        given["env"] = _env_section(env)
    if wrappers is not None:
        if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
            raise UserError("wrappers: must be a list, such as [MyWrapper] or [(MyWrapper, {'factor': 0.5})]")
        given["env"] = given.get("env", {}) | {"wrappers": [_wrapper(wrapper) for wrapper in wrappers]}
    return given


def _env_section(env: Any) -> dict[str, Any]:
    if isinstance(env, Mapping):
        section = {name: value for name, value in env.items() if name not in ("id", "wrappers")}
        named = {} if env.get("id") is None else _env_section(env["id"])
        wrapped = {"wrappers": [_wrapper(each) for each in env["wrappers"]]} if "wrappers" in env else {}
        return named | _plain(section) | wrapped
    reference = env_reference(env)
    return {"id": reference} | ({"lanes": env.num_envs, "groups": 1} if isinstance(env, VectorEnv) else {})


def _wrapper(wrapper: Any) -> Any:
    """A wrapper as `env.wrappers` takes it: a name, or a name with keyword arguments."""
    if isinstance(wrapper, str | Mapping):
        return _plain(wrapper)
    if isinstance(wrapper, tuple) and len(wrapper) == 2 and isinstance(wrapper[1], Mapping):
        return {_wrapper(wrapper[0]): _plain(wrapper[1])}
    if isinstance(wrapper, functools.partial) and not wrapper.args and import_name(wrapper.func) is not None:
        return {reference_to(wrapper.func): _plain(wrapper.keywords)}
    if callable(wrapper):
        return reference_to(wrapper)
    raise UserError(f"wrappers: {wrapper!r} must be a wrapper class, a function of an environment, a name "
                    "module:attribute, or a pair of one of these and its keyword arguments")


def _plain(value: Any) -> Any:
    """A value as a YAML file could contain it; functions and classes become names."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return reference_to(value) if callable(value) else value
