"""Descriptions of a configuration: explained keys, JSON schema, differences, table of all keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from qfleet.config import (
    DEFAULT,
    Config,
    flatten,
    inactive_keys,
    plugin_module,
    plugin_names,
    section_model,
    sections,
)
from qfleet.core.env import EnvSpec
from qfleet.runconfig.auto import symbols_of
from qfleet.runconfig.resolution import IMAGE_RECIPES, Resolved, env_spec_of
from qfleet.runconfig.run_config import ALGO, EXPLORE, RunConfig

SYMBOLS = "env.image_symbols"


@dataclass(frozen=True)
class ExplainedKey:
    """One key of a config: its value and source, and the reason if it has no effect."""

    key: str
    value: Any
    source: str
    idle: str
    description: str

    @property
    def active(self) -> bool:
        return not self.idle


def explain(resolved: Resolved) -> list[ExplainedKey]:
    """Every key in config order."""
    idle, docs = inactive_keys(resolved.config), descriptions(resolved.config)
    rejected, unchecked = _rejected_keys(resolved.config)
    idle |= rejected
    kinds = {key: "vectors" if key.startswith("normalise.") else "images" for key in unchecked}
    docs |= {key: f"{docs[key]} (only for {kind})" for key, kind in kinds.items()}
    if resolved.config.env.image_symbols == "auto" and SYMBOLS not in idle and _is_for_images(resolved):
        docs[SYMBOLS] += _found_symbols(resolved.config)
    return [ExplainedKey(key, value, resolved.provenance.get(key, DEFAULT), idle.get(key, ""), docs.get(key, ""))
            for key, value in flatten(resolved.config).items()]


def _is_for_images(resolved: Resolved) -> bool:
    """True if the recipe is one for images; otherwise the environment is not built to look for them."""
    return not {f"recipe {name}" for name in IMAGE_RECIPES}.isdisjoint(resolved.provenance.values())


def _found_symbols(config: RunConfig) -> str:
    """Text about the symbols that `auto` finds; empty if the environment cannot be built here or has no images."""
    with suppress(Exception):
        spec = env_spec_of(config.env)
        if any(leaf.kind == "image" for leaf in spec.observation.values()):
            symbols = ", ".join(f"{name}: {count}" for name, count in symbols_of(spec).items())
            return f" (here: {f'{{{symbols}}}' if symbols else 'null'})"
    return ""


def _rejected_keys(config: RunConfig) -> tuple[dict[str, str], list[str]]:
    """Keys of agent and normalise that this environment rejects, with the reason; and keys that cannot be checked.

    The environment is built only if a key depends on it; if it cannot be built here, these keys remain unchecked.
    """
    if not (unchecked := _unused_for(config, EnvSpec(config.env.id, {}, num_actions=1))):
        return {}, []
    try:
        spec = env_spec_of(config.env)
    except Exception:  # a missing extra or an error of the environment: the rest is still explained
        return {}, list(unchecked)
    return {key: f"{why} (a run would fail)" for key, why in _unused_for(config, spec).items()}, []


def _unused_for(config: RunConfig, spec: EnvSpec) -> dict[str, str]:
    """Keys that an environment with this spec rejects, with the reason."""
    unused_for = getattr(config.agent, "unused_for", None)  # a user's agent may lack it
    found = {"agent": unused_for(spec) if unused_for else {}, "normalise": config.normalise.unused_for(spec)}
    return {f"{section}.{name}": why for section, keys in found.items() for name, why in keys.items()}


def descriptions(config: Config) -> dict[str, str]:
    """Dotted key -> description."""
    return {f"{path}.{name}" if path else name: field.description or ""
            for path, section in sections(config) for name, field in type(section).model_fields.items()}


def schema() -> dict[str, Any]:
    """JSON schema of a config file; agent and explore are built-in plugins or a user's own."""
    return RunConfig.model_json_schema()


@dataclass(frozen=True)
class Difference:
    """A key with two values; None where a config lacks the key."""

    key: str
    a: Any
    b: Any


def diff(a: RunConfig, b: RunConfig) -> list[Difference]:
    """Keys with different values in two configs."""
    left, right = flatten(a), flatten(b)
    keys = [*left, *(key for key in right if key not in left)]
    return [Difference(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def key_choices() -> dict[str, dict[str, list[str]]]:
    """Every key with the words that are its values, if these are known: common keys under "", others by plugin."""
    plugins = {"agent": ALGO, "explore": EXPLORE}
    found = {"": _choices("", RunConfig)}
    for name, field in RunConfig.model_fields.items():
        if name in plugins:
            package, key = plugins[name].package, plugins[name].key
            found |= {f"{name}.{key}={kind}": _choices("", plugin_module(package, kind).Config)
                      for kind in plugin_names(package)}
        elif (model := section_model(field, None)) is not None:
            found[""] |= _choices(f"{name}.", model)
    return found


def _choices(prefix: str, model: type[Config]) -> dict[str, list[str]]:
    properties = model.model_json_schema()["properties"]
    return {f"{prefix}{name}": list(_words(properties[name])) for name, field in model.model_fields.items()
            if section_model(field, None) is None}


def _words(schema: dict[str, Any]) -> Iterator[str]:
    """Values that a JSON schema lists."""
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    yield from (_yaml_word(value) for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema
                                                                           else ())))
    for branch in schema.get("anyOf", ()):
        yield from _words(branch)
    if schema.get("type") == "null":
        yield "null"


@dataclass(frozen=True)
class DescribedKey:
    """A key with its default, as it is written in YAML, and its description."""

    name: str
    default: str
    description: str


@dataclass(frozen=True)
class KeySection:
    """Keys of a section, or of one plugin of a section: `plugin` is the value of `plugin_key`, such as dqn of algo."""

    name: str
    keys: tuple[DescribedKey, ...]
    summary: str
    plugin_key: str = ""
    plugin: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}.{self.plugin_key}={self.plugin}" if self.plugin else self.name or "the run"


def key_sections() -> list[KeySection]:
    """All keys, by section and plugin."""
    plugins = {"agent": ALGO, "explore": EXPLORE}
    found = [_key_section("", RunConfig)]
    for name, field in RunConfig.model_fields.items():
        if name in plugins:
            package, key = plugins[name].package, plugins[name].key
            found += [_key_section(name, plugin_module(package, kind).Config, key, kind)
                      for kind in plugin_names(package)]
        elif (model := section_model(field, None)) is not None:
            found.append(_key_section(name, model))
    return found


def _key_section(name: str, model: type[Config], plugin_key: str = "", plugin: str = "") -> KeySection:
    keys = [DescribedKey(f"{name}.{key}" if name else key, _default_of(field), field.description or "")
            for key, field in model.model_fields.items() if section_model(field, None) is None]
    return KeySection(name, tuple(keys), (model.__doc__ or "").partition("\n")[0], plugin_key, plugin)


def _default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else _yaml_word(field.get_default(call_default_factory=True))


def key_table() -> str:
    """Markdown tables of all keys with default and meaning, one per section and one per plugin."""
    return "\n\n".join("\n".join([
        f"### {section.title}", "", "| key | default | meaning |", "|---|---|---|",
        *(f"| `{key.name}` | {key.default} | {key.description} |" for key in section.keys)])
        for section in key_sections())


def _yaml_word(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_yaml_word, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), f"{value}")
