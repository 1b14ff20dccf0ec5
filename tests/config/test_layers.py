"""Merging layers, and knowing where each value came from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.config import Layered, nest
from qfleet.config.layers import leaves, without
from qfleet.core.errors import UserError

NAMES = st.sampled_from("abcd")
LEAVES = st.integers(0, 9) | st.none()
VALUES = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)
DATA = st.dictionaries(NAMES, VALUES, max_size=4)


def naive(layers: list[dict[str, Any]]) -> dict[str, tuple[Any, int]]:
    """Leaf by leaf: a value removes what it stands on and what stands on it, an empty mapping included."""
    flat: dict[str, tuple[Any, int]] = {}
    for index, data in enumerate(layers):
        for key, value in leaves(data):
            parts = key.split(".")
            above = {".".join(parts[:n]) for n in range(1, len(parts))}
            flat = {old: kept for old, kept in flat.items()
                    if old != key and old not in above and not old.startswith(key + ".")}
            flat[key] = (value, index)
    return flat


@settings(deadline=None, max_examples=60)
@given(st.lists(DATA, max_size=4))
def test_values_and_sources_equal_the_naive_twin(datas: list[dict[str, Any]]) -> None:
    layered = Layered()
    for index, data in enumerate(datas):
        layered = layered.over(data, f"layer {index}")
    expected = naive(datas)
    assert dict(leaves(layered.merged())) == {key: value for key, (value, _) in expected.items()}
    assert layered.sources() == {key: f"layer {index}" for key, (_, index) in expected.items()}


@settings(deadline=None, max_examples=60)
@given(st.lists(DATA, max_size=3))
def test_merging_changes_no_layer(datas: list[dict[str, Any]]) -> None:
    before = json.dumps(datas)
    layered = Layered()
    for data in datas:
        layered = layered.over(data, "x")
    layered.merged()
    assert json.dumps(datas) == before


def test_sources_of_free_dicts_and_of_defaults() -> None:
    layered = Layered().over({"env": {"kwargs": {"size": 3}}}, "recipe")
    layered = layered.over({"env": {"kwargs": {"seed": 1}}}, "command line")
    assert layered.source("env.kwargs") == "recipe, command line"
    assert layered.source("env.kwargs.size") == "recipe"
    assert layered.source("env.lanes") == "default"


def test_a_section_starts_anew_when_its_kind_changes() -> None:
    recipe = Layered({"explore": ("kind", "linear")}).over({"explore": {"end": 0.1}}, "recipe")
    assert recipe.over({"explore": {"kind": "ladder"}}, "x").merged() == {"explore": {"kind": "ladder"}}
    assert recipe.over({"explore": {"kind": "linear"}}, "x").merged() == {"explore": {"end": 0.1, "kind": "linear"}}
    assert recipe.over({"explore": {"start": 1}}, "x").merged() == {"explore": {"end": 0.1, "start": 1}}


def test_of_two_rivals_the_later_layer_wins() -> None:
    recipe = Layered(exclusive_keys=(("e.steps", "e.updates"),)).over({"e": {"steps": 5, "n": 1}}, "recipe")
    assert recipe.over({"e": {"updates": 7}}, "x").merged() == {"e": {"n": 1, "updates": 7}}
    assert recipe.over({"e": {"updates": None}}, "x").merged() == {"e": {"steps": 5, "n": 1, "updates": None}}
    assert recipe.over({"e": {"updates": 7, "steps": 6}}, "x").merged() == {"e": {"steps": 6, "n": 1, "updates": 7}}


def test_upto_forgets_the_layers_above() -> None:
    layered = Layered().over({"a": 1}, "one").over({"b": 2}, "two").over({"a": 3}, "three")
    assert layered.upto("b").merged() == {"a": 1, "b": 2}
    assert layered.upto("a").merged() == {"a": 3, "b": 2}


def test_without_removes_one_key_from_a_copy() -> None:
    data = {"a": {"b": 1, "c": [1, 2]}}
    assert without(data, "a.b") == {"a": {"c": [1, 2]}}
    assert without(data, "a.c.1") == {"a": {"b": 1}}
    assert without(data, "a.x.y") == data == {"a": {"b": 1, "c": [1, 2]}}


def test_overrides_nest_and_the_last_of_equal_keys_wins() -> None:
    nested = nest(["a.b=1", "a.c={d: 2}", "a.c.e=3", "seed=1", "seed=2"])
    assert nested == {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "seed": 2}


def test_all_malformed_overrides_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        nest(["seed", "a.b=1", "x=[1"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["'seed'", "'x=[1'"]
