"""Validation: every problem at once, in words that name origin, key, value and remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from qfleet.config import (
    Config,
    Count,
    Fraction,
    Layered,
    NonNegative,
    Positive,
    PositiveCount,
    Real,
    build_config,
    flatten,
    inactive_keys,
    parse_mapping,
    plugin,
    to_yaml,
    validate,
)
from qfleet.core.errors import UserError

PACKAGE = "zoo_of_shapes"


class Memory(Config):
    """A section with an idle key and a contradiction of its own."""

    size: PositiveCount = Field(100, description="items kept")
    alpha: NonNegative = Field(0.0, description="priority exponent")
    beta: Fraction = Field(0.4, description="importance exponent")

    def inactive(self) -> dict[str, str]:
        return {} if self.alpha > 0 else {"beta": "with memory.alpha=0"}

    @model_validator(mode="after")
    def _even(self) -> Memory:
        if self.size == 13:
            raise ValueError("size=13 brings bad luck: choose another")
        return self


class World(Config):
    """A section that must be given."""

    id: str = Field(min_length=1, description="which world")
    lanes: PositiveCount = Field(8, description="copies")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments")


SHAPE = plugin(PACKAGE, "shape", "round")


class Root(Config):
    """A small stand-in for the config of a run."""

    seed: Count = Field(1, description="randomness")
    rate: Positive = Field(1e-3, description="step size")
    shift: Real = Field(0.0, description="any number")
    fast: bool = Field(False, description="hurry")
    clip: bool | None = Field(None, description="clip, or as the world says")
    mode: Literal["huber", "mse"] = Field("huber", description="loss")
    width: tuple[PositiveCount, ...] = Field((64,), description="layers")
    limit: PositiveCount | Literal["auto"] = Field("auto", description="limit")
    name: str | None = Field(None, description="name")
    world: World
    memory: Memory = Memory()
    shape: Annotated[Config, SHAPE] = Field(default_factory=SHAPE.make)

    @model_validator(mode="after")
    def _consistent(self) -> Root:
        found = []
        if self.memory.size < self.world.lanes:
            found.append(f"memory.size={self.memory.size} is below world.lanes={self.world.lanes}: raise it")
        if self.seed == 666:
            found.append("seed=666 is taken: choose another")
        if found:
            raise ValueError("\n".join(found))
        return self


KIND = """
from typing import Literal
from pydantic import Field
from qfleet.config import Config as Section, Positive

class Config(Section):
    shape: Literal["{name}"] = "{name}"
    {field}: Positive = Field(1.0, description="how big")

def build(cfg):
    return cfg
"""


@pytest.fixture(autouse=True)
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of two plugins and one file that is none."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "round.py").write_text(KIND.format(name="round", field="radius"))
    (folder / "four_cornered.py").write_text(KIND.format(name="four_cornered", field="side"))
    (folder / "draw.py").write_text("def build(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def problems(data: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        validate(Root, {"world": {"id": "w"}} | data, "f.yaml", **more)
    return str(caught.value).splitlines()


TABLE: list[tuple[dict[str, Any], str]] = [
    ({"seed": "many"}, "f.yaml: seed: must be a whole number (got 'many'); the default is 1"),
    ({"seed": 1.5}, "f.yaml: seed: must be a whole number (got 1.5); the default is 1"),
    ({"seed": -1}, "f.yaml: seed: must be at least 0 (got -1); the default is 1"),
    ({"seed": True}, "f.yaml: seed: a number is needed, not true or false (got true); the default is 1"),
    ({"seed": None}, "f.yaml: seed: must be a whole number (got null); the default is 1"),
    ({"seed": {"x": 3}}, "f.yaml: seed: is a single value, not a section; it must be a whole number (got {'x': 3}); "
                         "the default is 1"),
    ({"rate": 0}, "f.yaml: rate: must be greater than 0 (got 0); the default is 0.001"),
    ({"rate": "fast"}, "f.yaml: rate: must be a number (got 'fast'); the default is 0.001"),
    ({"rate": True}, "f.yaml: rate: a number is needed, not true or false (got true); the default is 0.001"),
    ({"rate": float("nan")}, "f.yaml: rate: must be a finite number (got nan); the default is 0.001"),
    ({"rate": float("inf")}, "f.yaml: rate: must be a finite number (got inf); the default is 0.001"),
    ({"shift": "nan"}, "f.yaml: shift: must be a finite number (got 'nan'); the default is 0.0"),
    ({"seed": "nan"}, "f.yaml: seed: must be a finite number (got nan); the default is 1"),
    ({"fast": "yes"}, "f.yaml: fast: true or false is needed (got 'yes'); the default is false"),
    ({"fast": 1}, "f.yaml: fast: true or false is needed (got 1); the default is false"),
    ({"clip": "off"}, "f.yaml: clip: true or false is needed (got 'off'); the default is null"),
    ({"mode": "hubr"}, "f.yaml: mode: must be huber or mse (got 'hubr'); did you mean huber?"),
    ({"mode": 3}, "f.yaml: mode: must be huber or mse (got 3); the default is 'huber'"),
    ({"width": 64}, "f.yaml: width: must be a list, such as [64, 64] (got 64); the default is (64,)"),
    ({"width": [64, 0]}, "f.yaml: width.1: must be at least 1 (got 0)"),
    ({"limit": "never"}, "f.yaml: limit: must be a whole number or auto (got 'never'); the default is 'auto'"),
    ({"name": 2024}, "f.yaml: name: must be text (got 2024); quote it: name='\"2024\"'"),
    ({"memory": 5}, "f.yaml: memory: must be a section (a mapping of keys) (got 5)"),
    ({"memory": {"beta": 2, "alpha": 1}}, "f.yaml: memory.beta: must be at most 1 (got 2); the default is 0.4"),
    ({"memory": {"size": 13}}, "f.yaml: memory: size=13 brings bad luck: choose another"),
    ({"memory": {"beta": 0.4}}, "f.yaml: memory.beta: has no effect with memory.alpha=0; remove it, or change that"),
    ({"memory": {"size": 4}}, "f.yaml: memory.size=4 is below world.lanes=8: raise it"),
    ({"world": {}}, "f.yaml: world.id: is required; set world.id=… (which world)"),
    ({"world": {"id": ""}}, "f.yaml: world.id: must be text of at least 1 characters (got '')"),
    ({"world": {"id": "w", "kwargs": 3}}, "f.yaml: world.kwargs: must be a mapping, such as {size: 5} (got 3)"),
    ({"sed": 3}, "f.yaml: sed: unknown key; did you mean seed?"),
    ({"lanes": 3}, "f.yaml: lanes: unknown key; did you mean world.lanes?"),
    ({"memory": {"lanes": 3}}, "f.yaml: memory.lanes: unknown key; did you mean world.lanes?"),
    ({"memory": {"sizes": 3}}, "f.yaml: memory.sizes: unknown key; did you mean memory.size?"),
    ({"memori": {"size": 3}}, "f.yaml: memori: unknown key; did you mean memory?"),
    ({"memory.size": 3},
     "f.yaml: memory.size: write it nested: the section as a key, and this key below it"),
    ({"memory": {"qqq": 3}}, "f.yaml: memory.qqq: unknown key; there are size, alpha, beta"),
    ({"shape": {"side": 3}}, "f.yaml: shape.side: unknown key; there are shape, radius"),
    ({"shape": {"radius": -1}}, "f.yaml: shape.radius: must be greater than 0 (got -1); the default is 1.0"),
    ({"shape": {"shape": "rund"}}, "f.yaml: shape.shape: 'rund' is not one of four_cornered, round, or "
                                   "module:attribute; did you mean round?"),
    ({"shape": {"shape": 3}}, "f.yaml: shape.shape: must name one of four_cornered, round, or "
                              "module:attribute (got 3)"),
    ({"shape": "round"}, "f.yaml: shape: must be a section (a mapping of keys) (got 'round')"),
]


@pytest.mark.parametrize(("data", "line"), TABLE, ids=lambda value: str(value)[:40] if isinstance(value, dict) else "")
def test_one_problem_one_line(data: dict[str, Any], line: str) -> None:
    assert problems(data) == [line]


def test_all_problems_at_once_contradictions_and_idle_keys_included() -> None:
    lines = problems({"seed": 666, "rate": -1, "memory": {"size": 4, "beta": 0.1}, "shape": {"radius": "big"}, "x": 1})
    assert [line.split(": ")[1] for line in lines] == [
        "rate", "shape.radius", "x", "memory.size=4 is below world.lanes=8", "seed=666 is taken", "memory.beta"]


def test_no_echo_of_a_problem_already_told() -> None:
    assert len(problems({"memory": {"size": -4}, "world": {"id": 3}})) == 2
    assert len(problems({"memory": {"alpha": "x", "beta": 0.3}})) == 1


def test_hints_know_the_names_of_other_libraries() -> None:
    told = problems({"n_envs": 3}, hints={"n_envs": "world.lanes"})
    assert told == ["f.yaml: n_envs: unknown key; did you mean world.lanes?"]


def test_hints_say_what_to_do_about_a_key_that_was_removed() -> None:
    told = problems({"world": {"id": "w", "size": 3}}, hints={"world.size": "was removed; delete it"})
    assert told == ["f.yaml: world.size: was removed; delete it"]


def test_a_missing_required_section_names_the_key_in_it() -> None:
    with pytest.raises(UserError, match=r"^f.yaml: world.id: is required"):
        validate(Root, {"seed": 1}, "f.yaml")


def test_every_line_blames_the_layer_that_spoke() -> None:
    layered = Layered().over({"world": {"id": "w"}, "memory": {"size": 9}, "rate": 0}, "recipe a").over(
        {"world": {"lanes": 10}, "sed": 1}, "command line")
    with pytest.raises(UserError) as caught:
        validate(Root, layered)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "recipe a", "command line", "recipe a and command line"]


def test_an_idle_key_is_refused_only_where_it_was_idle_when_set() -> None:
    recipe = Layered().over({"world": {"id": "w"}, "memory": {"alpha": 0.6, "beta": 0.2}}, "recipe")
    config, sources = build_config(Root, recipe.over({"memory": {"alpha": 0}}, "command line"), {})
    assert config.memory == Memory() and sources["memory.beta"] == "default"
    assert sources["memory.alpha"] == "command line" and sources["world.id"] == "recipe"
    assert sources["rate"] == "default"
    with pytest.raises(UserError, match=r"command line: memory.beta: has no effect"):
        validate(Root, recipe.over({"memory": {"alpha": 0, "beta": 0.3}}, "command line"))
    with pytest.raises(UserError, match=r"recipe: memory.beta: has no effect"):
        validate(Root, Layered().over({"world": {"id": "w"}, "memory": {"beta": 0.2}}, "recipe").over({"seed": 3}, "x"))


def test_numbers_as_people_write_them() -> None:
    data = parse_mapping("seed: 1e6\nrate: 3e-4\nwidth: [1e2, 2_000]\nworld: {id: w, lanes: '1e2'}\nlimit: 5\n", "f")
    config = validate(Root, data)
    assert (config.seed, config.rate, config.width) == (1_000_000, 3e-4, (100, 2000))
    assert (config.world.lanes, config.limit) == (100, 5)
    assert type(config.seed) is int and type(config.world.lanes) is int


WORDS = st.from_regex(r"[a-z]{1,5}", fullmatch=True)
CONFIGS = st.fixed_dictionaries(
    {"world": st.fixed_dictionaries({"id": st.text("abn:/- 1e6'\"é#", min_size=1)}, optional={
        "lanes": st.integers(1, 50), "kwargs": st.dictionaries(WORDS, st.none() | st.booleans())})},
    optional={"seed": st.integers(0, 600) | st.just(10**20), "rate": st.floats(1e-300, 1e300), "fast": st.booleans(),
              "name": st.none() | st.text("yesno1e6:# ", min_size=1), "width": st.lists(st.integers(1, 9)),
              "memory": st.fixed_dictionaries({}, optional={"size": st.integers(100, 200), "alpha": st.floats(0.1, 1)}),
              "shape": st.sampled_from([{"shape": "four-cornered", "side": 2}, {"radius": 3}])})


@settings(deadline=None, max_examples=60)
@given(CONFIGS)
def test_text_of_a_config_reads_back_as_the_same_config(data: dict[str, Any]) -> None:
    config = validate(Root, data)
    assert validate(Root, parse_mapping(to_yaml(config), "f")) == config


def test_flatten_and_idle_keys() -> None:
    config = validate(Root, {"world": {"id": "w", "kwargs": {"a": 1}}})
    flat = flatten(config)
    assert flat["world.kwargs"] == {"a": 1} and flat["shape.radius"] == 1.0 and flat["memory.beta"] == 0.4
    assert next(iter(flat)) == "seed" and "world" not in flat
    assert inactive_keys(config) == {"memory.beta": "with memory.alpha=0"}
    assert "beta" not in to_yaml(config)


class House(Config):
    """A section that knows when those inside of it lie idle."""

    open: bool = Field(True, description="whether anybody may come in")
    memory: Memory = Memory()
    world: World = World(id="w")

    def inactive(self) -> dict[str, str]:
        closed = ["memory.size", "memory.alpha", "memory.beta", "world.lanes"]
        return {} if self.open else dict.fromkeys(closed, "without open=true")


def test_a_section_speaks_for_those_inside() -> None:
    assert to_yaml(validate(House, {"open": False})) == "open: false\nworld:\n  id: w\n  kwargs: {}\n"
    assert inactive_keys(House(open=False))["world.lanes"] == "without open=true"
    with pytest.raises(UserError, match=r"config: world.lanes: has no effect without open=true"):
        validate(House, {"open": False, "world": {"id": "x", "lanes": 3}})
    layers = Layered().over({"world": {"id": "x", "lanes": 3}}, "recipe").over({"open": False}, "command line")
    assert validate(House, layers).world.lanes == 8, "a later layer took its effect away"
    assert validate(House, {"world": {"id": "x", "lanes": 3}}).world.lanes == 3


def test_sections_are_frozen_and_known_to_the_json_schema() -> None:
    config = validate(Root, {"world": {"id": "w"}})
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]
    kinds = Root.model_json_schema()["properties"]["shape"]["anyOf"]
    assert [(kind["title"], sorted(kind["properties"])) for kind in kinds] == [
        ("four_cornered", ["shape", "side"]), ("round", ["radius", "shape"]), ("module:attribute", ["shape"])]
