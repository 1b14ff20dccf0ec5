"""Environments, wrappers and settings as Python arguments: what they become in a config, and what is refused."""

import functools
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import TransformReward

import qfleet
from qfleet.config import load_attribute, objects, parse_mapping, to_yaml, validate
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig, make
from qfleet.envs.prototype import Prototype
from qfleet.interface.arguments import require_importable, resolve_arguments, with_env
from qfleet.interface.env_arguments import env_settings
from qfleet.report.plots import group_runs, read_run
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.find import foreign_names

HERE = __name__


class Grid(gymnasium.Env):
    """Observes its size and the number of copies of it that were reset."""

    observation_space = spaces.Box(-99, 99, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, size=3, bonus=None):
        self.size, self.bonus, self.resets = size, bonus, 0

    @classmethod
    def small(cls):
        return cls(1)

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self.t = 0
        return np.array([self.size, self.resets], np.float32), {}

    def step(self, action):
        self.t += 1
        reward = 1.0 if self.bonus is None else float(self.bonus(action))
        return np.array([self.size, self.resets], np.float32), reward, self.t == self.size, False, {}


class Scale(gymnasium.RewardWrapper):
    def __init__(self, env, factor=1.0):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward


class Locked(Grid):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def section(env=None, wrappers=None):
    return env_settings(env, wrappers).get("env", {})


def config_of(*arguments, **settings):
    overrides = settings.pop("overrides", [])
    env, wrappers = settings.pop("env", None), settings.pop("wrappers", None)
    return resolve_arguments(arguments[0] if arguments else None, overrides, env, wrappers, settings).config


def rewards(config, steps=2):
    env = make(config.env, 1)
    env.reset([0])
    found = []
    for _ in range(steps):
        env.send(np.array([1]))
        found.append(float(env.recv().raw_reward[0]))
    return found


@pytest.mark.parametrize(("env", "expected"), [
    ("CartPole-v1", {"id": "CartPole-v1"}), (Grid, {"id": f"{HERE}:Grid"}), (Grid.small, {"id": f"{HERE}:Grid.small"}),
    (functools.partial(Grid, size=np.int64(4)), {"id": f"{HERE}:Grid", "kwargs": {"size": 4}}),
    ({"id": Grid, "kwargs": {"size": 4}, "lanes": 2}, {"lanes": 2, "id": f"{HERE}:Grid", "kwargs": {"size": 4}}),
    ({"id": functools.partial(Grid, size=4, bonus=None), "kwargs": {"size": 5}},
     {"id": f"{HERE}:Grid", "kwargs": {"size": 5, "bonus": None}}),
    ({"lanes": 3}, {"lanes": 3}), (None, {}), ({}, {}),
    ({"id": "CartPole-v1", "wrappers": [Scale]}, {"id": "CartPole-v1", "wrappers": [f"{HERE}:Scale"]}),
])
def test_what_can_be_named_is_named(env, expected):
    assert section(env) == expected


@pytest.mark.parametrize(("env", "name"), [
    (lambda: Grid(), "lambda"), (Grid(), "Grid"), (gymnasium.make("CartPole-v1"), "CartPole-v1"),
    (functools.partial(Grid, bonus=abs), "Grid"), (functools.partial(Grid, 4), "Grid"),
    ({"id": Grid, "kwargs": {"bonus": abs}}, "Grid"), (SyncVectorEnv([Grid] * 2), "SyncVectorEnv"),
])
def test_what_cannot_be_named_is_an_object_of_this_program(env, name):
    found = section(env)
    assert found["id"].startswith("object:") and objects.readable(found["id"]) == name and "kwargs" not in found
    assert EnvConfig(id=found["id"]).name == name
    built = load_attribute(found["id"])()
    assert isinstance(built, gymnasium.Env | gymnasium.vector.VectorEnv) and built is not env
    again = section(env)["id"]
    assert again == found["id"] or isinstance(env, dict)


@pytest.mark.parametrize(("wrapper", "expected"), [
    (Scale, f"{HERE}:Scale"), ("my:Scale", "my:Scale"), ((Scale, {"factor": 2}), {f"{HERE}:Scale": {"factor": 2}}),
    (("my:Scale", {"factor": np.float64(2)}), {"my:Scale": {"factor": 2.0}}),
    ({"my:Scale": {"factor": 2}}, {"my:Scale": {"factor": 2}}), ({Scale: {}}, {f"{HERE}:Scale": {}}),
    (functools.partial(Scale, factor=2), {f"{HERE}:Scale": {"factor": 2}}),
])
def test_wrappers_are_named_with_their_arguments(wrapper, expected):
    assert section(wrappers=[wrapper]) == {"wrappers": [expected]}


def test_wrappers_of_all_kinds_are_applied_from_the_inside_out():
    wrappers = [(Scale, {"factor": 3}), functools.partial(Scale, factor=5), lambda env: Scale(env, 7),
                (TransformReward, {"func": lambda reward: reward + 1}), {f"{HERE}:Scale": {"factor": 2}}]
    assert rewards(config_of(Grid, wrappers=wrappers)) == [212.0, 212.0]
    assert rewards(config_of(env={"id": Grid, "wrappers": wrappers[::-1]})) == [315.0, 315.0]


def test_wrappers_with_arguments_are_a_list_in_yaml_and_on_the_command_line():
    text = f"env: {{id: {HERE}:Grid, wrappers: [{{{HERE}:Scale: {{factor: 4}}}}]}}\nextends: vector\n"
    from_yaml = config_of(parse_mapping(text, "f"))
    from_line = config_of(f"{HERE}:Grid", overrides=[f"env.wrappers=[{{{HERE}:Scale: {{factor: 4}}}}]"])
    for config in (from_yaml, from_line):
        assert rewards(config) == [4.0, 4.0]
        assert validate(RunConfig, parse_mapping(to_yaml(config), "f")) == config
    with pytest.raises(UserError, match=r"Grid could not be built with .*factr.*unexpected keyword argument 'factr'"):
        config_of(Grid, wrappers=[(Scale, {"factr": 4})])


@pytest.mark.parametrize(("arguments", "message"), [
    ({"env": 3}, "env: int is neither an environment id, a gymnasium.Env or VectorEnv, its class, nor a function"),
    ({"env": Grid, "wrappers": Scale}, r"wrappers: must be a list, such as \[MyWrapper\]"),
    ({"env": Grid, "wrappers": "my:Scale"}, "wrappers: must be a list"),
    ({"env": Grid, "wrappers": [3]}, "wrappers: int is neither a wrapper class, a function of an environment, a name"),
    ({"env": Grid, "wrappers": ["Scale"]}, "'Scale': write module:attribute, such as my_module:MyClass"),
    ({"env": {"id": "CartPole-v1", "kwargs": {"f": abs}}},
     r"env.kwargs: f, a builtin_function_or_method, cannot be written .* env=lambda: MyEnv\(...\)"),
    ({"env": dict}, "built a builtins.dict; a gymnasium.Env or a gymnasium.vector.VectorEnv is needed"),
    ({"env": lambda: None}, "lambda built a builtins.NoneType"),
    ({"env": Locked()}, r"the environment Locked cannot be copied, and the run needs several, one of them for "
                        r"evaluations \(cannot pickle .*: pass its class or a function .* env=lambda: Locked\(\)"),
    ({}, "name a recipe, a YAML file or an environment id, or pass an environment as env=..."),
])
def test_what_is_no_environment_is_refused_with_what_would_be_one(arguments, message):
    with pytest.raises(UserError, match=message):
        config_of(**arguments)


def test_one_environment_is_given_once():
    with pytest.raises(UserError, match=r"as the first argument and as env=\.\.\.: pass one of them"):
        config_of(Grid, env=Grid)
    with pytest.raises(UserError, match=f"CartPole-v1 and env={HERE}:Grid: pass one of them"):
        config_of("CartPole-v1", env=Grid)
    assert config_of("cartpole", env=Grid).env.id == f"{HERE}:Grid"  # a recipe on another environment
    assert config_of("cartpole", env={"lanes": 3}).env.lanes == 3
    own = config_of(Grid, env={"lanes": 3, "kwargs": {}}).env
    assert (own.id, own.lanes) == (f"{HERE}:Grid", 3)
    with pytest.raises(UserError, match="pass one of them"):
        config_of(Grid, env={"id": "CartPole-v1"})
    with pytest.raises(UserError, match="a RunConfig is already complete"):
        config_of(config_of("cartpole"), env=Grid)


@pytest.mark.parametrize(("settings", "message"), [
    ({"lerner": {}}, "keyword: lerner: unknown key; did you mean learner"),
    ({"learner": {"learningrate": 1e-3}}, "keyword: learner.learningrate: unknown key; did you mean learner.learn"),
    ({"learning_rate": 1e-3}, "keyword: learning_rate: unknown key; did you mean learner.learning_rate"),
    ({"total_timesteps": 9}, "keyword: total_timesteps: unknown key; did you mean total_steps"),
    ({"agent": "dqm"}, "keyword: agent.algo: 'dqm' is not one of "),
    ({"learner": 3}, r"keyword: learner: must be a section"),
    ({"total_steps": "many"}, r"keyword: total_steps: must be a whole number"),
    ({"eval": 3, "env": SyncVectorEnv([Grid] * 2)}, "keyword: eval: must be a section"),
    ({"env": {"id": Grid, "lains": 3}}, "env.lains: unknown key; did you mean env.lanes"),
    ({"env": {"id": Grid, "info_metrics": ["median(x)"]}}, r"env.info_metrics: .*write a key of info, or sum\(key\)"),
])
def test_wrong_keywords_are_named_with_a_guess(settings, message):
    name = () if "env" in settings else ("cartpole",)
    with pytest.raises(UserError, match=message):
        config_of(*name, **settings)


def test_keywords_lie_over_the_recipe_and_under_overrides():
    config = config_of("CartPole-v1", agent="dqn", total_steps=np.int64(200_000), seed=3, explore="linear",
                       learner={"learning_rate": np.float32(0.5), "batch_size": 8}, overrides=["learner.batch_size=16"])
    assert (config.agent.algo, config.total_steps, config.seed, config.explore.kind) == ("dqn", 200_000, 3, "linear")
    assert (config.learner.learning_rate, config.learner.batch_size) == (0.5, 16)
    resolved = resolve_arguments("cartpole", [], None, None, {"seed": 3})
    assert resolved.provenance["seed"] == "keyword"


def test_nested_settings_can_hold_an_environment():
    for env in (Grid, {"id": Grid}, Grid(3)):
        config = config_of({"env": env, "extends": "vector", "agent": "c51"})
        assert config.env.name.endswith("Grid") and config.agent.algo == "c51"
    assert config_of({"env": "CartPole-v1", "extends": "vector"}).env.id == "CartPole-v1"


@pytest.mark.parametrize("name", ["PongNoFrameskip-v4", "BreakoutDeterministic-v4", "CartPole-v1"])
def test_the_recipe_of_an_object_depends_on_its_spaces_not_on_its_name(name, monkeypatch):
    mine = Grid()
    monkeypatch.setattr(Grid, "spec", gymnasium.envs.registration.EnvSpec(name, f"{HERE}:Grid"))
    config = config_of(mine)
    assert config.env.id.endswith(f":{name}") and (config.env.stack, config.env.protocol) == (None, None)
    assert config.model_copy(update={"env": None}) == config_of(lambda: Grid()).model_copy(update={"env": None})


def test_a_vector_environment_sets_the_lanes_of_training_and_evaluation():
    vector = SyncVectorEnv([Grid] * 3)
    config = config_of(vector)
    assert (config.env.lanes, config.env.groups, config.eval.lanes) == (3, 1, 3)
    config = config_of(vector, eval={"lanes": 2, "episodes": 5}, overrides=["env.lanes=1"])
    assert (config.env.lanes, config.eval.lanes, config.eval.episodes) == (1, 2, 5)


@pytest.mark.parametrize("settings", [{}, {"eval": {"episodes": 5}}, {"env": {"lanes": 9}}])
def test_too_few_environments_are_noticed_before_training(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {"id": lambda: SyncVectorEnv([Grid] * 2), "lanes": 2} | settings.pop("env", {})
    with pytest.raises(UserError, match=r"lambda has 2 environments, and [459] are needed: set env.lanes and eval"):
        qfleet.train(env=env, **settings)
    assert list(tmp_path.rglob("metrics.jsonl")) == []


class NoSpaces(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return 0, {}


class OldReset(Grid):
    def reset(self, *, seed=None):
        return np.zeros(2, np.float32)


class OldStep(Grid):
    def step(self, action):
        return super().step(action)[:4]


class Raises(Grid):
    def __init__(self):
        raise RuntimeError("no display")


@pytest.mark.parametrize(("env", "message"), [
    (NoSpaces, "NoSpaces has no observation_space: set it to one of gymnasium.spaces in the constructor"),
    (OldReset, r"OldReset does not implement the Gymnasium API: reset must return \(observation, info dict\)"),
    (lambda: OldStep(), r"^lambda does not implement the Gymnasium API: step must return .* old Gym$"),
    (OldStep(), r"^OldStep does not implement the Gymnasium API: (?!.*check-env)"),
])
def test_an_environment_that_fails_its_check_is_refused_before_the_first_update(env, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    with pytest.raises(UserError, match=message):
        qfleet.train(env, total_steps=5000, sinks=[seen.append])
    assert all(record["updates"] == 0 for record in seen)


@pytest.mark.slow
def test_a_script_shows_its_progress_as_lines_if_it_asks_for_them(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    settings = {"total_steps": 300, "agent": {"hidden": [8]}, "replay": {"min_steps": 64}, "eval": {"episodes": 2}}
    qfleet.train(Grid, **settings)
    assert "steps" not in "".join(capfd.readouterr())
    qfleet.train(Grid, **settings, progress=True)
    lines = "".join(capfd.readouterr()).splitlines()
    assert any(line.startswith("environment  ") and "Grid" in line for line in lines)
    assert any("/ 300 steps" in line and "eval" in line for line in lines) and not any("\x1b" in line for line in lines)


def test_the_users_traceback_is_shown_if_the_constructor_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=r"Raises could not be built:(?s:.*)no display"):
        qfleet.train(Raises)
    assert list(tmp_path.iterdir()) == []


# ---- instances


def test_lanes_are_copies_of_an_instance_as_it_was_when_it_was_given():
    mine = Grid(5)
    config = config_of(mine)
    mine.size = 1
    env = make(config.env, 2)
    np.testing.assert_array_equal(env.reset([0, 1])["obs"], [[5, 1], [5, 1]])  # each was reset once
    assert mine.resets == 0
    assert make(config_of(mine).env, 1).reset([0])["obs"][0, 0] == 1  # given again, it is what it is now


def test_an_instance_with_processes_is_not_copied():
    env = AsyncVectorEnv([Grid])
    with pytest.raises(UserError, match=r"AsyncVectorEnv cannot be copied.*it has processes of its own.*"
                                        r"env=lambda num_envs: \.\.\."):
        Prototype(env)
    env.reset()  # still works
    env.close()


def test_a_registered_instance_that_cannot_be_copied_is_made_again(caplog):
    env = gymnasium.make("CartPole-v1", max_episode_steps=7)
    env.unwrapped.lock = threading.Lock()
    prototype = Prototype(env)
    made = prototype()
    assert made.spec.max_episode_steps == 7 and not hasattr(made.unwrapped, "lock")
    assert "created by gymnasium.make" in caplog.text
    with pytest.raises(UserError, match="cannot be copied"):
        Prototype(Scale(env, 2.0))  # gymnasium.make does not know how to wrap it again


# ---- other processes and programs


@pytest.mark.parametrize("override", ["actors=1", "env.isolate=true", "eval.process=true", "sync=allreduce"])
@pytest.mark.parametrize(("env", "names"), [(lambda: Grid(), "lambda: .*my_module:make_env"),
                                            (Grid(), "Grid: .*my_module:Grid")])
def test_what_other_processes_cannot_import_is_refused_with_the_remedy(override, env, names):
    with pytest.raises(UserError, match=names.replace(": ", rf": .* {override} starts: put a class or a function ")):
        require_importable(config_of(env, overrides=[override]))
    with pytest.raises(UserError, match="lambda: definitions of a script or notebook, lambdas and instances cannot"):
        require_importable(config_of(Grid, overrides=[override], wrappers=[lambda env: env]))
    require_importable(config_of(env))


def test_a_run_of_an_object_needs_it_again_in_another_program(monkeypatch):
    mine = Grid(2)
    config = config_of(mine, wrappers=[lambda env: Scale(env, 2)])
    monkeypatch.setattr(objects, "_named", {})
    monkeypatch.setattr(objects, "PROGRAM", "another")
    reference = objects.reference_to(lambda: Grid(9), base="Grid")
    assert reference != config.env.id
    with pytest.raises(UserError, match=r"(Grid|lambda) was an object of the Python program that started the run, and "
                                        r"no other program knows it: pass it again, as env=... or wrappers=\[...\] of "
                                        "qfleet.resume, evaluate, load or rollout"):
        make(config.env, 1)
    given = with_env(config, Grid(2), [(Scale, {"factor": 3})])
    assert rewards(given) == [3.0, 3.0] and given.env.lanes == config.env.lanes
    assert with_env(config, SyncVectorEnv([Grid] * 64)).env.lanes == config.env.lanes


def test_a_definition_of_a_script_is_named_if_another_script_lacks_it():
    with pytest.raises(UserError, match=r"NoSuchEnv was defined in the script or notebook that started .*env=\.\.\."):
        load_attribute("__main__:NoSuchEnv")
    with pytest.raises(UserError, match=r"^NoSuchEnv was defined in the script or notebook that started .*env=\.\.\."):
        make(EnvConfig(id="__main__:NoSuchEnv"), 1)


def test_a_run_keeps_an_environment_that_has_a_name():
    config = config_of("cartpole")
    for arguments in ({"env": Grid}, {"wrappers": [Scale]}):
        with pytest.raises(UserError, match=r"env\.(id|wrappers) of the run is (CartPole-v1|empty), which needs no"):
            with_env(config, **arguments)
    assert with_env(config, "CartPole-v1", []) == config == with_env(config)


def test_other_settings_of_an_environment_are_not_given_anew():
    given = {"id": Grid(2), "lanes": 3, "info_metrics": ["cost"]}
    config = config_of(env=given)
    assert with_env(config, given) == config
    assert with_env(config, {"id": SyncVectorEnv([Grid] * 8), "lanes": 3}).env.lanes == 3
    for settings, message in (({"lanes": 2}, "env: lanes=2 is given and is 3 in the run; only id, kwargs, wrappers"),
                              ({"lains": 2}, "lains=2 is given and is no setting of the run; only .*: leave lains")):
        with pytest.raises(UserError, match=message):
            with_env(config, {"id": Grid(2), **settings})


def test_runs_of_several_programs_are_seeds_of_one_group(tmp_path):
    runs = []
    for program in ("aaa-1", "bbb-2"):
        folder = tmp_path / program
        folder.mkdir()
        text = f"env: {{id: 'object:{program}:Grid', wrappers: ['object:{program}:lambda', {{'a:b': {{c: 1}}}}]}}\n"
        (folder / "config.yaml").write_text(text)
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        runs.append(read_run(folder))
    assert len(group_runs(runs)) == 1 and runs[0].env_id == "Grid"


def test_which_names_only_this_process_knows():
    assert objects.import_name(Grid) == f"{HERE}:Grid" and objects.import_name(Grid()) is None
    assert objects.is_local("__main__:Mine") and objects.is_local("object:a-1:b") and not objects.is_local("a:b")
    assert foreign_names({"env": {"id": "object:a-1:b", "wrappers": ["a:b"]}}) == ["a:b"]
