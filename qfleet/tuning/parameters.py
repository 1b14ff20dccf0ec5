"""Parameters of a search space: parsed from text, YAML or Python, and suggested by an Optuna trial."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Protocol

from qfleet.config import parse_override
from qfleet.core.errors import UserError

NUMBER = r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::(log|{NUMBER}))?")
EXAMPLE = "write LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP, or choices a,b,c"
ATTRIBUTES = ("low", "high", "log", "step", "choices", "type")
MOST_GRID_VALUES = 1000


class Suggesting(Protocol):
    """The methods of an Optuna trial that a parameter uses."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None,
                      log: bool = False) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


@dataclass(frozen=True)
class NumberRange:
    """Numbers from `low` to `high`, both included; whole numbers if `whole`."""

    key: str
    low: float
    high: float
    whole: bool = False
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise UserError(f"search space: {self.key}: {problem}")

    def _problem(self) -> str | None:
        numbers = [self.low, self.high, *([] if self.step is None else [self.step])]
        if not all(math.isfinite(number) for number in numbers):
            return "low, high and step must be finite numbers"
        if self.low >= self.high:
            return f"low={self.low:g} must be smaller than high={self.high:g}"
        if self.whole and not all(float(number).is_integer() for number in numbers):
            return f"takes whole numbers, so low, high and step must be whole (got {', '.join(map(str, numbers))})"
        if self.log and self.low <= 0:
            return f"log needs low > 0 (got {self.low:g})"
        if self.step is not None and self.step <= 0:
            return f"step={self.step:g} must be positive"
        return "has both log and step: choose one of them" if self.log and self.step is not None else None

    def suggest(self, trial: Suggesting) -> Any:
        high = self._last(self.step) if self.step else self.high
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.key, float(self.low), float(high), step=self.step, log=self.log)

    def _last(self, step: float) -> float:
        """Largest value that is reached in steps."""
        return self._at(self._steps(step), step)

    def _steps(self, step: float) -> int:
        """Number of steps from low to high. Decimal numbers have no rounding errors that would lose the last one."""
        return int((Decimal(str(self.high)) - Decimal(str(self.low))) / Decimal(str(step)))

    def _at(self, index: int, step: float) -> float:
        return float(Decimal(str(self.low)) + index * Decimal(str(step)))

    def probes(self) -> list[Any]:
        """Values that are checked before a study starts: both ends."""
        return [int(end) if self.whole else float(end) for end in (self.low, self.high)]

    def grid(self) -> list[Any] | None:
        """All values as Optuna stores them; None if there are too many."""
        step = self.step or (1 if self.whole else 0)
        if not step or (self.high - self.low) / step > MOST_GRID_VALUES:
            return None
        values = [self._at(index, step) for index in range(self._steps(step) + 1)]
        return [int(value) for value in values] if self.whole else values

    def to_data(self) -> dict[str, Any]:
        low, high = self.probes()
        step = {} if self.step is None else {"step": int(self.step) if self.whole else self.step}
        return {"type": "int" if self.whole else "float", "low": low, "high": high, "log": self.log} | step


@dataclass(frozen=True)
class ChoiceOf:
    """One of several values: numbers, true or false, text, null, or lists and mappings."""

    key: str
    choices: tuple[Any, ...]

    def __post_init__(self) -> None:
        labels = self._labels()
        if len(labels) < 2:
            raise UserError(f"search space: {self.key}: give at least two choices (got {len(labels)}); a single value "
                            f"is an override, {self.key}=VALUE")
        if len({(type(label), label) for label in labels}) < len(labels):
            raise UserError(f"search space: {self.key}: a choice is given twice ({', '.join(map(str, labels))})")

    def _labels(self) -> list[Any]:
        """Choices as Optuna can store them: lists and mappings as text."""
        return [choice if choice is None or isinstance(choice, bool | int | float | str) else repr(choice)
                for choice in self.choices]

    def suggest(self, trial: Suggesting) -> Any:
        return self.value(trial.suggest_categorical(self.key, self._labels()))

    def probes(self) -> list[Any]:
        return list(self.choices)

    def grid(self) -> list[Any] | None:
        return self._labels()

    def value(self, stored: Any) -> Any:
        matching = zip(self._labels(), self.choices, strict=True)
        return next(choice for label, choice in matching if label == stored and type(label) is type(stored))

    def to_data(self) -> dict[str, Any]:
        return {"choices": list(self.choices)}


Parameter = NumberRange | ChoiceOf


def parse_parameter(key: str, value: Any, whole: bool | None) -> Parameter:
    """Parameter from its YAML or Python form; `whole` says whether the key takes whole numbers, None if unknown."""
    if isinstance(value, list | tuple):
        return ChoiceOf(key, tuple(_as_list(choice) for choice in value))
    if isinstance(value, str):
        return _parse_range(key, value, whole)
    if not isinstance(value, Mapping):
        raise UserError(f"search space: {key}: {value!r} is a single value: {EXAMPLE}, or give it as an override")
    for name in value:
        if name not in ATTRIBUTES:
            near = get_close_matches(str(name), ATTRIBUTES, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ATTRIBUTES)}"
            raise UserError(f"search space: {key}: {name!r} is unknown; {hint}")
    return _choices(key, value) if "choices" in value else _number_range(key, value, whole)


def _choices(key: str, value: Mapping[str, Any]) -> ChoiceOf:
    others = [name for name in value if name not in ("choices", "type")]
    if others or value.get("type", "categorical") != "categorical":
        raise UserError(f"search space: {key}: choices cannot be combined with {', '.join(others) or 'this type'}")
    if not isinstance(value["choices"], list | tuple):
        raise UserError(f"search space: {key}: choices must be a list, such as [32, 64, 128]")
    return ChoiceOf(key, tuple(_as_list(choice) for choice in value["choices"]))


def _as_list(value: Any) -> Any:
    """A tuple as the list that a YAML file would contain."""
    return [_as_list(inner) for inner in value] if isinstance(value, list | tuple) else value


def _number_range(key: str, value: Mapping[str, Any], whole: bool | None) -> NumberRange:
    if missing := [name for name in ("low", "high") if name not in value]:
        raise UserError(f"search space: {key}: {' and '.join(missing)} is missing; give low and high, or choices")
    for name in ("low", "high", "step"):
        number = value.get(name, 0)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise UserError(f"search space: {key}: {name} must be a number (got {number!r})")
    if not isinstance(value.get("log", False), bool):
        raise UserError(f"search space: {key}: log must be true or false (got {value['log']!r})")
    kind = value.get("type")
    if kind not in (None, "float", "int"):
        raise UserError(f"search space: {key}: type must be float, int or categorical (got {kind!r}); "
                        "categorical needs choices")
    if kind is None:
        literal = isinstance(value["low"], int) and isinstance(value["high"], int)
        kind = "int" if (literal if whole is None else whole) else "float"
    return NumberRange(key, value["low"], value["high"], kind == "int", value.get("log", False), value.get("step"))


def _parse_range(key: str, text: str, whole: bool | None) -> Parameter:
    found = RANGE.fullmatch(text.strip())
    if found is None:
        raise UserError(f"search space: {key}: {text!r} is not a range: {EXAMPLE}")
    low, high = (float(part.replace("_", "")) for part in found.group(1, 2))
    suffix = found[3]
    if whole is None:
        whole = not re.search(r"[.eE]", found[1] + found[2])
    step = None if suffix in (None, "log") else float(suffix.replace("_", ""))
    return NumberRange(key, low, high, whole, suffix == "log", step)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate overrides of the command line from parameters, written `key=LOW..HIGH` or `key=a,b,c`."""
    plain: list[str] = []
    space: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if RANGE.fullmatch(value.strip()):
            space[key] = value.strip()
        elif "," in value and len(choices := parse_override(f"{key}=[{value}]")[1]) > 1:
            space[key] = choices
        else:
            plain.append(text)
    return plain, space


def _is_parameter(value: Mapping[str, Any]) -> bool:
    """True for `{low: 1, high: 5}` or `{choices: [...]}`, also if misspelt; False for a section with parameters."""
    known = set(value) & {"low", "high", "choices"}
    return bool(known) or all(isinstance(each, int | float) for each in value.values())


def flatten_space(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and parameter of a search space, whose keys may be dotted or nested in sections."""
    for name, value in data.items():
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value and not _is_parameter(value):
            yield from flatten_space(value, key)
        else:
            yield key, value
