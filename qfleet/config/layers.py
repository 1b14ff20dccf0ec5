"""Layered config data: later layers override earlier ones, and every value keeps the name of its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from qfleet.config.schema import join_key
from qfleet.config.strict_yaml import parse_override
from qfleet.core.errors import UserError

DEFAULT = "default"

Layer = tuple[str, Mapping[str, Any]]
"""Source of a layer, and its nested data."""


@dataclass(frozen=True)
class Layered:
    """Nested data in layers, lowest first.

    A section merges key by key with the layers below; an empty one, `{}`, clears them. A plugin section, listed in
    `kinds` (section -> the key that names the plugin, and its default), is cleared where a layer changes the plugin,
    since the options of one plugin do not apply to another. Of two `exclusive_keys`, a layer that sets one clears the
    other below.
    """

    kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    exclusive_keys: tuple[tuple[str, str], ...] = ()
    layers: tuple[Layer, ...] = ()

    def over(self, data: Mapping[str, Any], source: str) -> Layered:
        """Copy with one more layer on top."""
        return replace(self, layers=(*self.layers, (source, data)))

    def upto(self, key: str) -> Layered:
        """Copy without the layers above the one that set `key`."""
        index = self._origins.get(key, len(self.layers) - 1)
        return replace(self, layers=self.layers[: index + 1])

    def split(self, index: int) -> tuple[Layered, Layered]:
        """The lowest `index` layers, and the others."""
        return replace(self, layers=self.layers[:index]), replace(self, layers=self.layers[index:])

    def merged(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _, data in self.layers:
            values = _merge(self._cleared(values, data), data)
        return values

    def sources(self) -> dict[str, str]:
        """Dotted leaf key -> source, for every value set by a layer."""
        return {key: self.layers[index][0] for key, index in self._origins.items()}

    def source(self, key: str) -> str:
        """Source of a value; for a free dict the sources of its entries; `default` if no layer set it."""
        found = [source for leaf, source in self.sources().items() if leaf == key or leaf.startswith(key + ".")]
        return ", ".join(dict.fromkeys(found)) or DEFAULT

    def beneath(self, key: str) -> tuple[str, Any] | None:
        """Source and value that a key would have without the layer that set it; None if there are none."""
        index = self._origins.get(key, len(self.layers))
        under = replace(self, layers=self.layers[:index])
        found = dict(leaves(under.merged()))
        return (under.source(key), found[key]) if key in found else None

    @cached_property
    def _origins(self) -> dict[str, int]:
        """Dotted leaf key -> index of the layer that set its value."""
        origins: dict[str, int] = {}
        values: dict[str, Any] = {}
        for index, (_, data) in enumerate(self.layers):
            values = _merge(self._cleared(values, data), data)
            given = {key for key, _ in leaves(data)}
            origins = {key: index if key in given else origins[key] for key, _ in leaves(values)}
        return origins

    def _cleared(self, below: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
        """The values below, without those that a new layer invalidates."""
        def changes(section: str) -> bool:
            key, default = self.kinds.get(section, ("", ""))
            old, new = below[section], data.get(section)
            if not isinstance(old, Mapping) or not isinstance(new, Mapping) or key not in new:
                return False
            return bool(old.get(key, default) != new[key])

        kept = {name: value for name, value in below.items() if not changes(name)}
        given = {key for key, value in leaves(data) if value is not None}
        for pair in self.exclusive_keys:
            if len(given.intersection(pair)) == 1:
                cleared = pair[0] if pair[1] in given else pair[1]
                kept = without(kept, cleared)
        return kept


def leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not a non-empty mapping."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, join_key(path, name))
        else:
            yield join_key(path, name), value


def without(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Copy without a dotted key; for an entry of a list the whole list is removed."""
    name, _, rest = key.partition(".")
    if name not in data:
        return dict(data)
    value = data[name]
    if rest and isinstance(value, Mapping):
        return {**data, name: without(value, rest)}
    return {other: value for other, value in data.items() if other != name}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping) and value:
            under = merged.get(name)
            value = _merge(under if isinstance(under, Mapping) else {}, value)
        merged[name] = value
    return merged


def nest(overrides: Iterable[str]) -> dict[str, Any]:
    """`a.b=c` strings as nested data; the last of equal keys wins. All malformed ones are reported at once."""
    nested: dict[str, Any] = {}
    problems: list[str] = []
    for text in overrides:
        try:
            key, value = parse_override(text)
        except UserError as error:
            problems.append(str(error))
            continue
        for part in reversed(key.split(".")):
            value = {part: value}
        nested = _merge(nested, value)
    if problems:
        raise UserError("\n".join(problems))
    return nested
