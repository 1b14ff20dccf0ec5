"""Recipe settings for the algorithm that the user has chosen instead of the recipe's.

Replay ratio, chunks, batch size, learning rate and exploration depend on what an algorithm learns from: two samples per
step are two transitions for DQN and two sequences of 64 steps for R2D2, and the learning rate of a table suits no
network. If the chosen algorithm learns from something other than the recipe's does, the sections `REPLACED` come from a
recipe for it. The environment, the length of the run and the schedules stay, as does everything that the user has set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from pydantic import ValidationError

from qfleet.algos import tabular
from qfleet.config import Layered, without
from qfleet.config.layers import Layer, leaves
from qfleet.core.errors import UserError
from qfleet.core.replay import Window
from qfleet.runconfig.run_config import ALGO, EXPLORE

REPLACED = ("agent", "explore", "replay", "learner")
KEPT = ("replay.capacity", "replay.min_steps")
"""Keys of these sections that count environment steps, and so suit every algorithm."""

SEQUENCES, TRANSITIONS, CONTINUOUS = "sequences", "transitions", "transitions with continuous actions"
TABLE = "transitions, for a table"
"""A table needs another optimizer and learning rate than a network."""


def name_of(agent: Mapping[str, Any]) -> str:
    """Name of the algorithm of an agent section."""
    return str(agent.get(ALGO.key, ALGO.default)).replace("-", "_")


def learns_from(agent: Mapping[str, Any]) -> str | None:
    """What the algorithm of an agent section learns from; None if that is unknown, as for one of the user's own."""
    model = ALGO.model(agent)
    if model is None or ":" in name_of(agent):
        return None
    try:
        config = model.model_validate(agent)
    except ValidationError:  # reported later, with all other mistakes
        config = model.model_validate({ALGO.key: name_of(agent)})
    if getattr(config, "continuous", False):
        return CONTINUOUS
    if isinstance(config, tabular.Config):
        return TABLE
    try:
        return SEQUENCES if getattr(config, "window", Window()).within_episode else TRANSITIONS
    except UserError:
        return SEQUENCES


@dataclass(frozen=True)
class AlgorithmChange:
    """Algorithm of a recipe, the one that the user has chosen, and what the latter learns from.

    `continuous` is true if the actions of the recipe are continuous.
    """

    old: str
    new: str
    data: str
    continuous: bool

    @classmethod
    def between(cls, recipe: Mapping[str, Any], chosen: Mapping[str, Any]) -> AlgorithmChange | None:
        """The change between two agent sections; None if the recipe's other settings suit both.

        The length of sequences differs between algorithms, so settings for one do not suit another.
        """
        old, new = learns_from(recipe), learns_from(chosen)
        if old is None or new is None or name_of(recipe) == name_of(chosen) or (old == new != SEQUENCES):
            return None
        return cls(name_of(recipe), name_of(chosen), new, old == CONTINUOUS)

    def apply(self, recipe: Layered, other: Layered, own: Layered) -> Layered:
        """The recipe with the sections `REPLACED` of another, under the layers of the user."""
        explored = own.merged().get("explore")
        sections = [name for name in REPLACED if name != "explore" or _fits(explored, other.merged().get("explore"))]
        kept = [(source, _only(data, sections, False)) for source, data in recipe.layers]
        given = [(source, _relabelled(_only(data, sections, True), self.new)) for source, data in _effective(other)]
        return replace(recipe, layers=(*kept, *given, *self._without_old_agent(own)))

    def _without_old_agent(self, own: Layered) -> list[Layer]:
        """The user's layers; those below the choice of the algorithm lose their agent keys, which are for another."""
        agents = [data["agent"] if isinstance(data.get("agent"), Mapping) else {} for _, data in own.layers]
        names = [name_of(agent) if ALGO.key in agent else "" for agent in agents]
        others = [index for index, name in enumerate(names) if name not in ("", self.new)]
        first = next((index for index, name in enumerate(names) if name and index > max(others, default=-1)), 0)
        return [(source, without(data, "agent") if index < first else data)
                for index, (source, data) in enumerate(own.layers)]

    def describe(self, recipe: Layered, names: Sequence[str], result: Layered, own: Layered) -> str:
        """One line: the recipe, the `names` of those that replace its settings, and the keys that have changed."""
        values, given = dict(leaves(result.merged())), own.sources()
        changed = [key for key, value in leaves(recipe.merged())
                   if key not in given and values.get(key, _ABSENT) != value]
        whole = [f"{name}.*" for name, (kind, _) in recipe.kinds.items()
                 if name == "agent" or f"{name}.{kind}" in changed]
        keys = [*whole, *(key for key in changed if f"{key.partition('.')[0]}.*" not in whole)]
        return (f"agent.algo={self.new}: {recipe.layers[-1][0]} is for {self.old}; settings of recipe"
                f"{'s' * (len(names) > 1)} {' and '.join(names)} replace its {', '.join(keys)}")


_ABSENT = object()


def _only(data: Mapping[str, Any], sections: Sequence[str], replaced: bool) -> dict[str, Any]:
    """The keys of a layer that are replaced, or those that are not."""
    return _without(data, [key for key, _ in leaves(data)
                           if (key.partition(".")[0] in sections and key not in KEPT) != replaced])


def _effective(layered: Layered) -> list[Layer]:
    """The layers without the values that later ones override or clear."""
    sources = layered.sources()
    return [(source, _without(data, [key for key, _ in leaves(data) if sources.get(key) != source]))
            for source, data in layered.layers]


def _without(data: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """A layer without some leaves, and without the sections that this empties: an empty one would clear."""
    left = reduce(without, keys, dict(data))
    return {name: value for name, value in left.items() if value or value == data[name]}


def _relabelled(data: Mapping[str, Any], algo: str) -> dict[str, Any]:
    """A layer whose agent section is that of another algorithm, without the keys that it lacks."""
    model = ALGO.model({ALGO.key: algo})
    if model is None or not data.get("agent"):
        return dict(data)
    agent = {key: value for key, value in data["agent"].items() if key in model.model_fields}
    return {**data, "agent": {**agent, ALGO.key: algo}}


def _fits(own: Any, section: Any) -> bool:
    """True if the explore keys that the user has set, without a kind, are keys of an explore section."""
    if not isinstance(own, Mapping) or EXPLORE.key in own:
        return True
    model = EXPLORE.model(section)
    return model is not None and set(own) <= set(model.model_fields)
