"""Validation with readable errors: all problems at once, each with source, key, value and remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from qfleet.config.layers import DEFAULT, Layered, without
from qfleet.config.objects import is_object, readable
from qfleet.config.plugins import section_model
from qfleet.config.schema import Config, flatten, join_key
from qfleet.core.errors import UserError

M = TypeVar("M", bound=Config)
Problem = tuple[str, str]
"""Dotted key (empty for the whole config) and a one-line message."""

_WORDS = {
    "missing": "is required",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "none_required": "must be null",
    "too_short": "must be a list of at least {min_length}",
    "too_long": "must be a list of at most {max_length}",
    "string_too_short": "must be text of at least {min_length} characters",
    "string_too_long": "must be text of at most {max_length} characters",
    "string_pattern_mismatch": "must be text of the form {pattern}",
}
_TYPES = {
    "int": "must be a whole number", "float": "must be a number", "bool": "must be true or false",
    "string": "must be text", "list": "must be a list, such as [64, 64]",
    "tuple": "must be a list, such as [64, 64]", "dict": "must be a mapping, such as {size: 5}",
    "mapping": "must be a mapping, such as {size: 5}", "model": "must be a section (a mapping of keys)",
}


def validate(model: type[M], data: Mapping[str, Any] | Layered, origin: str = "config",
             hints: Mapping[str, str] | None = None) -> M:
    """Build the typed config, or raise one UserError with every problem, one per line.

    `hints` maps names from other libraries to keys of the config, for the did-you-mean, and removed keys to a
    sentence about their replacement.
    """
    layered = data if isinstance(data, Layered) else Layered().over(data, origin)
    return build_config(model, layered, hints or {})[0]


def build_config(model: type[M], layered: Layered, hints: Mapping[str, str]) -> tuple[M, dict[str, str]]:
    """Build the typed config, and map each of its dotted keys to the source of its value.

    A key without effect is an error if it had none where it was set. If a later layer removed its effect (a recipe
    sets β, the command line disables prioritisation), it falls back to its default without a message.
    """
    values = _with_sections(model, layered.merged())
    valid, problems = _collect(model, values, hints, layered)
    inactive, superseded = _find_inactive(model, valid, layered)
    problems += [problem for problem in inactive if not _repeats(problem, problems)]
    if problems:
        raise UserError("\n".join(": ".join([_sources_of(layered, key, text), *filter(None, [key]), text])
                                  for key, text in problems))
    for key in superseded:
        values = without(values, key)
    built = model.model_validate(values)
    sources = {key: DEFAULT if key in superseded else layered.source(key) for key in flatten(built)}
    return built, sources


def _sources_of(layered: Layered, key: str, text: str) -> str:
    """Layers that a problem comes from; for a contradiction, those of the keys that it mentions."""
    given = layered.sources()
    keys = [key] if key else [word for word in re.findall(r"[a-z_][\w.]*", text) if word in given]
    found = dict.fromkeys(source for key in keys if (source := layered.source(key)) != DEFAULT)
    return " and ".join(found) or (layered.layers[-1][0] if layered.layers else "config")


def _collect(model: type[M], values: dict[str, Any], hints: Mapping[str, str],
             layered: Layered) -> tuple[dict[str, Any], list[Problem]]:
    """Validate repeatedly without the invalid keys, so that no problem hides another."""
    problems: list[Problem] = []
    rest = values
    while True:
        try:
            model.model_validate(rest)
            return rest, problems
        except ValidationError as error:
            found = _translate(error, rest, _known(model, rest), hints, layered)
            problems += [problem for problem in found if not _repeats(problem, problems)]
            before = rest
            for key, _ in found:
                rest = without(rest, key)
            if rest == before:
                return rest, problems


def _repeats(problem: Problem, problems: list[Problem]) -> bool:
    """True if a problem repeats an earlier one: of the same key, or of a key that it mentions."""
    key, text = problem
    return any(other and (key == other or re.search(rf"\b{re.escape(other)}\b", text)) for other, _ in problems)


def _with_sections(model: type[Config], values: dict[str, Any]) -> dict[str, Any]:
    """Add missing required sections as empty ones, so that messages name the key missing in them."""
    absent = [name for name, field in model.model_fields.items() if field.is_required() and section_model(field, None)]
    return {name: {} for name in absent} | values


def _known(model: type[Config], values: Any, path: str = "") -> dict[str, FieldInfo]:
    """All dotted keys of a model, sections included; plugin sections as selected by the values."""
    known: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        value = values.get(name) if isinstance(values, Mapping) else None
        known[join_key(path, name)] = field
        inner = section_model(field, value)
        if inner is not None:
            known |= _known(inner, value, join_key(path, name))
    return known


def _translate(error: ValidationError, data: Mapping[str, Any], known: Mapping[str, FieldInfo],
               hints: Mapping[str, str], layered: Layered) -> list[Problem]:
    """Problems by dotted key in plain words; the branches of a union become one problem."""
    grouped: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(_locate(item["loc"], data, known), []).append(item)
    return [(key, line) for key, items in grouped.items()
            for line in _describe(key, items, known, hints, layered).splitlines()]


def _locate(loc: Iterable[int | str], data: Any, known: Mapping[str, FieldInfo]) -> str:
    """Dotted key of an error, without pydantic's own markers (the branch of a union)."""
    path = ""
    for part in loc:
        inside = (isinstance(data, Mapping) and part in data) or (isinstance(data, list) and isinstance(part, int))
        if not inside and join_key(path, str(part)) not in known:
            break
        path = join_key(path, str(part))
        data = data[part] if inside else None
    return path


def _describe(key: str, items: list[ErrorDetails], known: Mapping[str, FieldInfo], hints: Mapping[str, str],
              layered: Layered) -> str:
    first, field = items[0], known.get(key)
    if first["type"] == "extra_forbidden":
        return _unknown(key, known, hints)
    if first["type"] == "missing":
        return f"is required; set {key}=…" + (f" ({field.description})" if field and field.description else "")
    words, *more = dict.fromkeys(_phrase(item) for item in items)
    if field is not None and field.examples:
        words = words.replace("[64, 64]", field.examples[0])
    text = " or ".join([words, *(word.removeprefix("must be ") for word in more)])
    whole = isinstance(first["input"], (Mapping, Config))
    if first["type"] == "plugin" or (first["type"] == "value_error" and whole):
        return text
    if whole and "section" not in text and "mapping" not in text:
        text = f"is a single value, not a section; it {text}"
    return f"{text} (got {_show(first['input'])}){_remedy(key, first, known, layered)}"


def _phrase(item: ErrorDetails) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind in ("value_error", "plugin"):
        return str(context.get("error", context.get("text")))
    if kind in _WORDS:
        return _WORDS[kind].format(**context).replace("'", "")
    return _TYPES.get(kind.partition("_")[0], item["msg"])


def _remedy(key: str, item: ErrorDetails, known: Mapping[str, FieldInfo], layered: Layered) -> str:
    value, field = item["input"], known.get(key)
    if is_object(value) and key.endswith("learning_rate"):
        return f"; use {key.removesuffix('learning_rate')}schedule for a rate that changes"
    if item["type"].startswith("model") and f"{key}s" in known:
        return f"; did you mean {key}s={_show(value)}?"
    if item["type"] == "literal_error" and isinstance(value, str):
        choices = item["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        if close := get_close_matches(value, choices, 1, 0.6):
            return f"; did you mean {close[0]}?"
    if item["type"] == "string_type" and isinstance(value, (int, float)):
        return f"; quote it: {key}='\"{_show(value)}\"'"
    if beneath := layered.beneath(key):
        return f"; in {beneath[0]} it is {_show(beneath[1])}"
    if field is None or field.default is PydanticUndefined or isinstance(field.default, Config):
        return ""
    return f"; the default is {_show(field.default)}"


def _show(value: Any) -> str:
    text = {"True": "true", "False": "false", "None": "null"}.get(repr(value), readable(repr(value)))
    return text if len(text) <= 60 else text[:57] + "…"


def _unknown(key: str, known: Mapping[str, FieldInfo], hints: Mapping[str, str]) -> str:
    section, _, name = key.rpartition(".")
    if key in known:
        return "write it nested: the section as a key, and this key below it"
    if " " in hints.get(key, ""):
        return hints[key]
    by_name: dict[str, list[str]] = {}
    for other in known:
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    siblings = [other for other, paths in by_name.items() if join_key(section, other) in paths]
    near = [join_key(section, close) for close in get_close_matches(name, siblings, 2, 0.65)]
    far = [path for close in get_close_matches(name, by_name, 2, 0.8) for path in by_name[close]]
    hinted = [hints[name]] if hints.get(name) in known else []
    found = hinted or by_name.get(name) or near or far
    if found:
        return f"unknown key; did you mean {' or '.join(found[:3])}?"
    return f"unknown key; there are {', '.join(siblings)}"


def _find_inactive(model: type[Config], valid: Mapping[str, Any],
                    layered: Layered) -> tuple[list[Problem], list[str]]:
    """Keys set without effect, with the reason; and keys whose effect a later layer removed."""
    given = layered.sources()
    rejected: list[Problem] = []
    superseded: list[str] = []
    for path, section in _valid_sections(model, valid):
        for name, reason in section.inactive().items():
            key = join_key(path, name)
            leaf = next((leaf for leaf in given if leaf == key or leaf.startswith(key + ".")), None)
            if leaf is None or attrgetter(name)(section) is None:  # null requests nothing, so nothing is ignored
                continue
            if _was_active(type(section), path, name, layered.upto(leaf)):
                superseded.append(key)
            else:
                rejected.append((key, f"has no effect{_with_reason(reason)}; remove it, or change that"))
    return rejected, superseded


def _with_reason(reason: str) -> str:
    return f" {reason}" if reason.partition(" ")[0] in ("with", "without", "unless", "while", "when") else f": {reason}"


def _valid_sections(model: type[Config], values: Any, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every section that is valid by itself, even if the whole config is not."""
    with contextlib.suppress(ValidationError):
        yield path, model.model_validate(values)
    for name, field in model.model_fields.items():
        inner = section_model(field, values.get(name))
        if inner is not None and isinstance(values.get(name), Mapping):
            yield from _valid_sections(inner, values[name], join_key(path, name))


def _was_active(model: type[Config], path: str, name: str, layered: Layered) -> bool:
    data: Any = layered.merged()
    for part in path.split(".") if path else []:
        data = data.get(part, {})
    try:
        return name not in model.model_validate(data).inactive()
    except ValidationError:
        return False
