"""Where a value came from: layers of nested data, later ones over earlier ones, each with the name of its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from qfleet.config.schema import join_key
from qfleet.config.strict_yaml import parse_override
from qfleet.core.errors import UserError

DEFAULT = "default"


@dataclass(frozen=True)
class Layered:
    """Nested data in layers, lowest first.

    A section merges key by key with the layers below; an empty one, `{}`, clears what lies below. A section named
    in `kinds` (section -> the key that names its kind, and the default) starts anew where a layer changes the kind:
    the settings of one kind mean nothing to another. Of two `rivals`, two ways to say one thing, a layer that gives
    one clears the other below.
    """

    kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    exclusive_keys: tuple[tuple[str, str], ...] = ()
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def over(self, data: Mapping[str, Any], source: str) -> Layered:
        """The same with one more layer on top."""
        return replace(self, layers=(*self.layers, (source, data)))

    def upto(self, key: str) -> Layered:
        """Without the layers above the one that gave `key` its value."""
        index = self._origins.get(key, len(self.layers) - 1)
        return replace(self, layers=self.layers[: index + 1])

    def merged(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _, data in self.layers:
            values = _merge(self._cleared(values, data), data)
        return values

    def sources(self) -> dict[str, str]:
        """Dotted leaf key -> source, for every value that some layer gave."""
        return {key: self.layers[index][0] for key, index in self._origins.items()}

    def source(self, key: str) -> str:
        """The source of a value; of a free dict the sources of its entries; `default` where no layer spoke."""
        found = [source for leaf, source in self.sources().items() if leaf == key or leaf.startswith(key + ".")]
        return ", ".join(dict.fromkeys(found)) or DEFAULT

    def beneath(self, key: str) -> tuple[str, Any] | None:
        """The source and the value that a key would have without the layer that gave its value."""
        index = self._origins.get(key, len(self.layers))
        under = replace(self, layers=self.layers[:index])
        found = dict(leaves(under.merged()))
        return (under.source(key), found[key]) if key in found else None

    @cached_property
    def _origins(self) -> dict[str, int]:
        """Dotted leaf key -> index of the layer that gave its value."""
        origins: dict[str, int] = {}
        values: dict[str, Any] = {}
        for index, (_, data) in enumerate(self.layers):
            values = _merge(self._cleared(values, data), data)
            given = {key for key, _ in leaves(data)}
            origins = {key: index if key in given else origins[key] for key, _ in leaves(values)}
        return origins

    def _cleared(self, below: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
        """What is below, without what a new layer makes meaningless."""
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
                loser = pair[0] if pair[1] in given else pair[1]
                kept = without(kept, loser)
        return kept


def leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not a non-empty mapping."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, join_key(path, name))
        else:
            yield join_key(path, name), value


def without(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy that lacks a dotted key; of an entry of a list the whole list goes."""
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
    """`a.b=c` texts as nested data; of equal keys the last wins. All malformed ones are reported at once."""
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
