"""The API reference: every object that it shows is documented, and the examples in its docstrings run."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import itertools
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest

import qfleet
import qfleet.interface.user_types
from qfleet.config import Config
from qfleet.runconfig import resolution

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.M)
PAGES = sorted((ROOT / "docs/api").glob("*.md"))


def found_at(path: str) -> Any:
    """The object with a dotted path; modules are imported on the way."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise LookupError(path)


def shown() -> dict[str, tuple[Any, list[str] | None]]:
    """Path -> object of every directive of the API pages, and the members that it lists; None: all public ones."""
    found = {}
    for page in PAGES:
        for path, options in DIRECTIVE.findall(page.read_text() + "\n"):
            listed = re.search(r"^ +members: (?:false|\[(.*)\])$", options, re.M)
            members = None if listed is None else (listed[1] or "").split(", ")
            found[path] = (found_at(path), members)
    return found


SHOWN = shown()


def sections(docstring: str) -> dict[str, list[str]]:
    """Google style: section -> the names that it describes."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if heading := re.fullmatch(r"([A-Z][a-z]+):", line):
            names = found.setdefault(heading[1], [])
        elif name := re.match(r" {4}\*{0,2}([\w.]+): ", line):
            names.append(name[1])
    return found


def is_described(path: str) -> bool:
    """True if a string follows the assignment of a module's name."""
    module, _, name = path.rpartition(".")
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    return any(isinstance(first, ast.Assign) and first.targets[0].id == name and isinstance(after, ast.Expr)
               for first, after in itertools.pairwise(body))


def undocumented(path: str, found: Any, members: list[str] | None = None) -> Iterator[str]:
    """What a function or class lacks: a docstring, Args for each parameter, Returns, Attributes for each field."""
    if not inspect.isclass(found):
        if inspect.isfunction(found):
            yield from undocumented_call(path, found)
        elif not is_described(path):
            yield f"{path} has no description"
        return
    own = vars(found).get("__doc__")
    fields = [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else \
        getattr(found, "_fields", ())
    if not own or own.startswith(f"{found.__name__}("):  # the latter is written by dataclasses
        yield f"{path} has no docstring"
    elif fields:
        described = sections(own).get("Attributes", [])
        yield from (f"{path}: Attributes lack {field}" for field in fields if field not in described)
    elif "__init__" in vars(found) and not getattr(found, "_is_protocol", False):
        yield from undocumented_call(f"{path}.__init__", found.__init__)
    for name, member in public_members(found, members):
        if name in fields:
            continue  # with a function as default
        if isinstance(member, property):
            if not inspect.getdoc(member):
                yield f"{path}.{name} has no docstring"
        else:
            yield from undocumented_call(f"{path}.{name}", member)


def public_members(found: type, listed: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that qfleet defines, or the listed ones of them."""
    for owner in found.__mro__:
        if not owner.__module__.startswith("qfleet") or (owner is Config and found is not Config):
            continue
        for name, member in vars(owner).items():
            member = getattr(member, "__func__", member)
            wanted = not name.startswith("_") and (listed is None or name in listed)
            if wanted and (isinstance(member, property) or inspect.isfunction(member)):
                yield name, member


def undocumented_call(path: str, function: Any) -> Iterator[str]:
    docstring = function.__doc__
    if not docstring:
        yield f"{path} has no docstring"
        return
    described = sections(docstring)
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    yield from (f"{path}: Args lack {name}" for name in parameters if name not in described.get("Args", []))
    yield from (f"{path}: Args name {name}, which is no parameter" for name in described.get("Args", [])
                if name not in parameters)
    if inspect.signature(function).return_annotation not in ("None", None) and "Returns" not in described:
        yield f"{path} has no Returns"


@pytest.mark.parametrize("path", SHOWN)
def test_what_the_reference_shows_is_documented(path):
    assert list(undocumented(path, *SHOWN[path])) == []


def test_the_reference_shows_every_public_name():
    assert {f"qfleet.{name}" for name in qfleet.__all__ if name != "__version__"} <= set(SHOWN)


def test_what_is_not_documented_is_found():
    assert list(undocumented("qfleet.interface.user_types.EnvLike", qfleet.interface.user_types.EnvLike)) == []
    assert list(undocumented("qfleet.api.__all__", None)) == ["qfleet.api.__all__ has no description"]

    class Poor:
        """A class."""

        def run(self, steps: int, *, fast: bool = False) -> int:
            """Run.

            Args:
                steps: Number of steps.
                slow: Not there.
            """

        @property
        def name(self) -> str: ...

    Poor.__module__ = "qfleet.poor"
    assert list(undocumented("Poor", Poor)) == [
        "Poor.run: Args lack fast", "Poor.run: Args name slow, which is no parameter", "Poor.run has no Returns",
        "Poor.name has no docstring"]

    @dataclasses.dataclass
    class Bare:
        """A result.

        Attributes:
            steps: Steps.
        """

        steps: int
        best: float

    assert list(undocumented("Bare", Bare)) == ["Bare: Attributes lack best"]


# ---- Examples

TINY = ("total_steps=320", "env.lanes=2", "agent.hidden=[8]", "replay.chunk_steps=8", "replay.min_steps=64",
        "learner.batch_size=8", "replay.samples_per_insert=1", "eval.period_steps=160", "eval.episodes=1",
        "eval.final_episodes=1", "eval.max_episode_steps=50", "checkpoint.period_steps=160", "stop_at=null",
        "run.tensorboard=false")
NEEDS = {"tune(": "optuna", "onnx": "onnxscript"}
"""Text of an example -> the package of an extra that it needs."""

MODEL = """
from qfleet.algos import qr
from qfleet.algos.value_based import *
from qfleet.algos.value_based import QNetwork, gather_actions, target_values, unscale
from qfleet.config import Fraction
from qfleet.core.agent import *
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Window
from pydantic import Field
import torch

cfg, spec = qr.Config(), EnvSpec("my_env", {"obs": Leaf((4,), "float32", "vector")}, 2)
logits, support = torch.zeros(3, 2, 51), torch.linspace(-1, 1, 51)
predict = read_prediction = td_loss = lambda *arguments: None
"""
"""Names that examples of the value family use."""


class MyEnv(gymnasium.Wrapper):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))


class Scale(gymnasium.wrappers.TransformReward):
    def __init__(self, env: gymnasium.Env, factor: float) -> None:
        super().__init__(env, lambda reward: factor * reward)


def checked_search(config, *, space, trials, jobs):
    """Stands for `qfleet.tune`, which starts processes: checks the arguments and trains nothing."""
    from qfleet.interface.arguments import resolve_arguments
    from qfleet.tuning.space import TrialConfig, make_space
    from qfleet.tuning.study_folder import recipe_of

    make_space(space, TrialConfig(recipe_of(resolve_arguments(config))))
    assert jobs <= trials
    return SimpleNamespace(best_recipe=config)


def examples() -> list[doctest.DocTest]:
    """Examples of everything that the API pages show, a class with its methods."""
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    found = {test.name: test for path, (target, _) in SHOWN.items()
             if inspect.isclass(target) or inspect.isfunction(target)
             for test in finder.find(target, path, module=False, globs={})}
    return [test for test in found.values() if test.examples]


EXAMPLES = examples()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A working directory with a short run, and the names that examples use; every training is short."""
    genuine = resolution.resolve

    def short(source, pairs=(), **more):
        return genuine(source, [*pairs, *TINY], **more)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        patch.setattr(resolution, "resolve", short)
        patch.setattr(qfleet, "tune", checked_search, raising=False)
        qfleet.train("CartPole-v1", run={"name": "my-run"})
        env = stack.enter_context(gymnasium.make("CartPole-v1"))
        run = stack.enter_context(qfleet.Run("CartPole-v1", run={"name": "stepped"}))
        run.step(160)
        names = {"qfleet": qfleet, "env": env, "run": run, "MyEnv": MyEnv, "Scale": Scale,
                 "agent": qfleet.load("my-run")}
        exec(MODEL, names)
        yield names


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_examples_of_the_reference_run(test, workplace):
    source = "".join(example.source for example in test.examples)
    for text, package in NEEDS.items():
        if text in source:
            pytest.importorskip(package)
    for path in Path().glob("*policy*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    test.globs = workplace | {"obs": workplace["env"].reset(seed=1)[0]}
    printed: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append, clear_globs=False)
    assert not failed, "".join(printed)


def test_examples_are_found():
    assert {"qfleet.train", "qfleet.Run", "qfleet.tune", "qfleet.TrainedAgent.act"} <= {each.name for each in EXAMPLES}
