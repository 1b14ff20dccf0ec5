"""Search spaces: the keys that a study varies, checked against the config before it starts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

from qfleet.config import Config, Layered, build_config, kinds_of, read_yaml
from qfleet.config.layers import leaves
from qfleet.core.errors import UserError
from qfleet.runconfig.key_hints import HINTS, REMOVED
from qfleet.runconfig.resolution import EXCLUSIVE_KEYS, Resolved
from qfleet.runconfig.run_config import RunConfig
from qfleet.tuning.parameters import Parameter, flatten_space, parse_parameter

FIXED = {
    "seed": "trials are compared on the same seeds; --seeds-per-trial sets their number",
    "total_steps": "trials are compared at equal steps: set one value, total_steps=N",
    "total_updates": "trials are compared at equal length: set one value, total_updates=N",
    "stop_at": "trials are compared at equal steps",
    "eval": "all trials are evaluated in the same way: set one value",
    "run": "it does not affect what is learned", "checkpoint": "it does not affect what is learned",
    "callbacks": "set one value",
}
"""Keys and sections that a study cannot vary, and why."""

DRAWS = 20
MOST_GRID_POINTS = 10_000
BASE, SPACE = "base.yaml", "search space"
"""Names of the layers in messages."""


class TrialConfig:
    """The config that all trials share, and the settings of one trial on top of it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._layered = Layered(kinds_of(RunConfig), EXCLUSIVE_KEYS).over(data, BASE)
        self.base = self.resolve({}).config

    def resolve(self, settings: Mapping[str, Any], source: str = SPACE) -> Resolved:
        """Config with these settings, by dotted key; UserError if they are not valid."""
        layered = self._layered.over(nested(settings), source) if settings else self._layered
        return Resolved(*build_config(RunConfig, layered, HINTS | REMOVED))

    def is_whole(self, key: str) -> bool | None:
        """True for a key that takes whole numbers only; None if the shared config has no such key."""
        section: Any = self.base
        *path, name = key.split(".")
        for part in path:
            section = getattr(section, part, None)
        field = type(section).model_fields.get(name) if isinstance(section, Config) else None
        if field is None:
            return None
        types = set(_types(field.annotation))
        return int in types and float not in types


def _types(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [found for part in inner for found in _types(part)] if inner else [annotation]


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as nested sections."""
    data: dict[str, Any] = {}
    for key, value in settings.items():
        section = data
        *path, name = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return data


class SearchSpace(Protocol):
    """What a study varies."""

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Settings by dotted key that an Optuna trial suggests."""

    def grid(self) -> list[dict[str, Any]]:
        """All points, as parameters of Optuna by name."""

    def to_data(self) -> dict[str, Any] | None:
        """The space as YAML data; None if it is a function."""


class DeclaredSpace:
    """Search space that lists its parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)

    @staticmethod
    def parse(data: Mapping[str, Any], config: TrialConfig) -> DeclaredSpace:
        """Space from YAML or Python data, checked: every problem is reported at once."""
        parameters, problems = [], []
        for key, value in flatten_space(data):
            try:
                refuse_fixed(key)
                parameters.append(parse_parameter(key, value, config.is_whole(key)))
            except UserError as error:
                problems.append(str(error))
        space = DeclaredSpace(parameters)
        problems += space._refused(config)
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))
        if not parameters:
            raise UserError("search space: it has no parameters; name at least one, such as "
                            "learner.learning_rate=1e-5..1e-2:log")
        return space

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {parameter.key: parameter.suggest(trial) for parameter in self.parameters}

    def grid(self) -> list[dict[str, Any]]:
        columns = []
        points = 1
        for parameter in self.parameters:
            values = parameter.grid()
            if values is None:
                raise UserError(f"sampler=grid needs a finite list of values, and {parameter.key} has a range: give "
                                f"choices, {parameter.key}=a,b,c, or a step, {parameter.key}=LOW..HIGH:STEP")
            columns.append(values)
            points *= len(values)
        if points > MOST_GRID_POINTS:
            raise UserError(f"sampler=grid: the grid has {points:,} points, and the limit is {MOST_GRID_POINTS:,}: "
                            "give fewer values, or use sampler=random")
        keys = [parameter.key for parameter in self.parameters]
        return [dict(zip(keys, point, strict=True)) for point in itertools.product(*columns)]

    def to_data(self) -> dict[str, Any] | None:
        return {parameter.key: parameter.to_data() for parameter in self.parameters}

    def _refused(self, config: TrialConfig) -> list[str]:
        """Messages for values that the config refuses, alone and together with every draw of the other parameters."""
        rng = random.Random(0)
        draws = [{parameter.key: rng.choice(parameter.probes()) for parameter in self.parameters}
                 for _ in range(DRAWS)]
        problems = []
        for parameter in self.parameters:
            for value in parameter.probes():
                alone = {parameter.key: value}
                errors = (_error(config, settings) for settings in (alone, *(draw | alone for draw in draws)))
                first = next(errors)
                if first is not None and all(error is not None for error in errors):
                    problems += first.splitlines()
        if not problems and all(_error(config, draw) for draw in draws):
            problems += str(_error(config, draws[0])).splitlines()
        return problems


def _error(config: TrialConfig, settings: Mapping[str, Any]) -> str | None:
    try:
        config.resolve(settings)
    except UserError as error:
        return str(error)
    return None


def refuse_fixed(key: str) -> None:
    """UserError for a key that a study cannot vary."""
    why = FIXED.get(key) or FIXED.get(key.partition(".")[0])
    if why is not None:
        raise UserError(f"search space: {key}: cannot be varied: {why}")


class FunctionSpace:
    """Search space defined by a function of an Optuna trial that returns settings."""

    def __init__(self, function: Callable[[Any], Mapping[str, Any]]) -> None:
        self.function = function

    @staticmethod
    def checked(function: Callable[[Any], Any], config: TrialConfig) -> FunctionSpace:
        """Space whose function was called a few times; UserError if the config refuses what it returns each time."""
        import optuna

        space = FunctionSpace(function)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        errors = []
        for _ in range(DRAWS):
            trial = study.ask()
            error = _error(config, space.suggest(trial))
            if error is None:
                return space
            errors.append(error)
        raise UserError(errors[0])

    def suggest(self, trial: Any) -> dict[str, Any]:
        found = self.function(trial)
        if not isinstance(found, Mapping) or not found:
            raise UserError("search space: the function must return settings, such as "
                            f"{{'learner.learning_rate': trial.suggest_float(...)}} (got {found!r})")
        settings = dict(leaves(found))
        for key in settings:
            refuse_fixed(key)
        return settings

    def grid(self) -> list[dict[str, Any]]:
        raise UserError("sampler=grid needs a declared search space, not a function: choose another sampler")

    def to_data(self) -> dict[str, Any] | None:
        return None


def make_space(space: Any, config: TrialConfig) -> SearchSpace:
    """Search space from a mapping, the path of a YAML file or a function of a trial."""
    if isinstance(space, str | Path):
        space = read_yaml(Path(space).expanduser())
    if isinstance(space, Mapping):
        return DeclaredSpace.parse(space, config)
    if callable(space):
        return FunctionSpace.checked(space, config)
    raise UserError("search space: pass a mapping of config keys to ranges or choices, the path of a YAML file, or a "
                    f"function of a trial (got {space!r})")
