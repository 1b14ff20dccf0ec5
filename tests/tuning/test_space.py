"""Search spaces: parsed from text, YAML and Python, and refused before a study starts if the config refuses them."""

import optuna
import pytest

from qfleet.core.errors import UserError
from qfleet.runconfig.resolution import resolve
from qfleet.tuning.parameters import ChoiceOf, NumberRange, split_overrides
from qfleet.tuning.space import DeclaredSpace, TrialConfig, make_space
from qfleet.tuning.study_folder import recipe_of


@pytest.fixture(scope="module")
def config():
    return TrialConfig(recipe_of(resolve("cartpole")))


@pytest.mark.parametrize(("text", "expected"), [
    ("learner.learning_rate=1e-5..1e-2:log", NumberRange("learner.learning_rate", 1e-5, 1e-2, log=True)),
    ("learner.learning_rate=0.001..1", NumberRange("learner.learning_rate", 0.001, 1.0)),
    ("learner.learning_rate=1..2", NumberRange("learner.learning_rate", 1, 2)),
    ("agent.n_step=1..5", NumberRange("agent.n_step", 1, 5, whole=True)),
    ("replay.capacity=1e4..1e5", NumberRange("replay.capacity", 1e4, 1e5, whole=True)),
    ("replay.capacity=10_000..50_000:20_000", NumberRange("replay.capacity", 1e4, 5e4, whole=True, step=2e4)),
    ("learner.batch_size=32,64", ChoiceOf("learner.batch_size", (32, 64))),
    ("agent.hidden=[64],[64, 64]", ChoiceOf("agent.hidden", ([64], [64, 64]))),
    ("agent.double=true,false", ChoiceOf("agent.double", (True, False)))])
def test_words_of_the_command_line_are_parameters(config, text, expected):
    plain, space = split_overrides([text])
    assert plain == [] and DeclaredSpace.parse(space, config).parameters == [expected]


def test_other_words_stay_overrides():
    words = ["agent.hidden=[64, 64]", "run.root=../x", "seed=3", "env.id=CartPole-v1", "env.kwargs={a: 1, b: 2}"]
    assert split_overrides(words) == (words, {})


def test_yaml_and_python_declare_the_same_space(config, tmp_path):
    (tmp_path / "space.yaml").write_text(
        "learner:\n  learning_rate: {low: 1e-5, high: 1e-2, log: true}\n  batch_size: [32, 64]\n"
        "agent.n_step: {low: 1, high: 5, step: 2}\nagent.hidden: {choices: [[64], [64, 64]]}\n")
    from_python = {"learner.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True, "type": "float"},
                   "learner.batch_size": (32, 64), "agent.n_step": "1..5:2", "agent": {"hidden": [(64,), (64, 64)]}}
    read = make_space(tmp_path / "space.yaml", config)
    assert read.to_data() == make_space(from_python, config).to_data()
    assert make_space(read.to_data(), config).to_data() == read.to_data(), "what a study stores"


@pytest.mark.parametrize(("space", "text"), [
    ({"learner.learning_rat": "1..2"}, "unknown key; did you mean learner.learning_rate?"),
    ({"lr": "1e-4..1e-2"}, "did you mean learner.learning_rate?"),
    ({"learner.batch_size": [0, 64]}, "learner.batch_size: must be at least 1 (got 0)"),
    ({"agent.n_step": "1..2.5"}, "takes whole numbers"),
    ({"agent.n_step": {"low": 1, "hihg": 5}}, "'hihg' is unknown; did you mean high?"),
    ({"agent.n_step": {"low": 1}}, "high is missing"),
    ({"agent.n_step": {"low": 5, "high": 1}}, "low=5 must be smaller than high=1"),
    ({"learner.learning_rate": "0..1:log"}, "log needs low > 0"),
    ({"learner.learning_rate": {"low": 0.1, "high": 1, "log": True, "step": 0.1}}, "choose one of them"),
    ({"learner.batch_size": [32]}, "at least two choices"),
    ({"learner.batch_size": [32, 32]}, "given twice"),
    ({"learner.batch_size": 32}, "single value"), ({"learner.batch_size": "abc"}, "'abc' is not a range"),
    ({"learner.batch_size": {"choices": [1, 2], "low": 1}}, "cannot be combined with low"),
    ({"seed": "1..5"}, "compared on the same seeds"), ({"eval": {"episodes": [1, 2]}}, "evaluated in the same way"),
    ({"total_steps": [1000, 2000]}, "equal steps"), ({"run.name": ["a", "b"]}, "does not affect"),
    ({}, "no parameters")])
def test_what_cannot_be_searched_is_refused_with_a_reason(config, space, text):
    with pytest.raises(UserError) as caught:
        make_space(space, config)
    assert text in str(caught.value) and "search space" in str(caught.value)


def test_all_problems_are_reported_at_once(config):
    with pytest.raises(UserError) as caught:
        make_space({"learner.learning_rat": "1..2", "learner.batch_size": [0, 64], "seed": [1, 2]}, config)
    assert len(str(caught.value).splitlines()) == 3


def test_a_key_that_needs_another_choice_is_accepted(config):
    space = make_space({"explore.kind": ["linear", "constant"], "explore.epsilon": "0.01..0.1"}, config)
    assert len(space.parameters) == 2
    with pytest.raises(UserError, match="unknown key"):
        make_space({"explore.epsilon": "0.01..0.1"}, config)


def test_suggestions_are_values_of_the_config(config):
    space = make_space({"agent.hidden": [[64], [64, 64]], "agent.n_step": "1..6:2",
                        "replay.max_bytes": [None, 10_000_000]}, config)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [space.suggest(study.ask()) for _ in range(30)]
    assert {str(each["agent.hidden"]) for each in found} == {"[64]", "[64, 64]"}
    assert {each["agent.n_step"] for each in found} == {1, 3, 5}
    assert {each["replay.max_bytes"] for each in found} == {None, 10_000_000}
    assert config.resolve(found[0]).config.agent.hidden == tuple(found[0]["agent.hidden"])


def test_a_grid_has_every_combination_and_refuses_ranges(config):
    space = make_space({"agent.n_step": "1..3", "agent.double": [True, False]}, config)
    points = [tuple(point.values()) for point in space.grid()]
    assert len(points) == 6 and set(points) == {(n, d) for n in (1, 2, 3) for d in (True, False)}
    with pytest.raises(UserError, match=r"sampler=grid .* learner.learning_rate has a range"):
        make_space({"learner.learning_rate": "0.1..1"}, config).grid()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("text", "values"), [
    ("0.0..0.9:0.3", [0.0, 0.3, 0.6, 0.9]), ("0.1..0.3:0.1", [0.1, 0.2, 0.3]), ("0.1..0.35:0.1", [0.1, 0.2, 0.3])])
def test_steps_have_no_rounding_errors(config, text, values):
    space = make_space({"explore.end": text}, config)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = {space.suggest(study.ask())["explore.end"] for _ in range(60)}
    assert sorted(found) == pytest.approx(values)
    assert values == [point["explore.end"] for point in space.grid()]


def test_a_function_is_called_before_the_study_starts(config):
    space = make_space(lambda trial: {"agent": {"n_step": trial.suggest_int("n", 1, 3)}}, config)
    assert space.to_data() is None and set(space.suggest(optuna.create_study().ask())) == {"agent.n_step"}
    with pytest.raises(UserError, match=r"learner.lr: unknown key; did you mean learner.learning_rate"):
        make_space(lambda trial: {"learner.lr": trial.suggest_float("rate", 1e-4, 1e-2)}, config)
    with pytest.raises(UserError, match="must return settings"):
        make_space(lambda trial: None, config)
    with pytest.raises(UserError, match="pass a mapping"):
        make_space(3, config)


def test_the_recipe_of_a_config_is_that_config():
    for name, overrides in (("cartpole", ["agent.hidden=[32]"]), ("pong", ["seed=4"]), ("pendulum", []), ("catch", [])):
        resolved = resolve(name, overrides)
        assert TrialConfig(recipe_of(resolved)).base == resolved.config
