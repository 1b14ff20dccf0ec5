"""The rules of the house, checked on the sources: who may import whom, how long, how deep, how named.

The second half shows each rule a source that breaks it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture_rules import (
    RULES,
    SCRIPT_RULES,
    Source,
    bad_names,
    house,
    imports,
    long_files,
    long_functions,
    misdirected,
    scripts,
    sections,
    sources,
    too_deep,
    unconfined,
    undescribed,
    unfinished,
    unread,
    unsafe,
    wide_constructors,
)
from pydantic import Field

import qfleet
from qfleet.config import Config


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(rule):
    assert rule(house()) == []


@pytest.mark.parametrize("rule", SCRIPT_RULES)
def test_the_scripts_that_compare_speed_keep_the_rule(rule):
    assert rule(scripts()) == []
    assert {"benchmarks.bench", "benchmarks.speed.peers"} <= {file.module for file in scripts()}


def test_the_library_does_not_import_scripts():
    folder = Path(qfleet.__file__).parents[1] / "benchmarks"
    names = {"benchmarks", "speed", *(path.stem for path in folder.glob("*.py"))}
    assert [(file.module, target) for file in house() for _, _, target in imports(file)
            if target.partition(".")[0] in names] == []


def test_every_config_field_is_described():
    assert undescribed(sections()) == []


def test_every_config_field_is_read():
    assert unread(house(), sections()) == []


def test_the_house_is_not_empty():
    rooms = {file.room for file in house()}
    assert rooms >= {"", "cli", "api", "types", "roles", "replay", "runtime", "envs", "algos"}
    assert len(sections()) >= 6


# ---- Each rule can fail ----

GOOD = sources(roles__actor="import numpy as np\nfrom qfleet.core.types import Row\nfrom qfleet.replay import pace\n"
                            "class Actor:\n    def __init__(self, a):\n        np.load('x', allow_pickle=False)\n")


@pytest.mark.parametrize("rule", RULES)
def test_rules_accept_what_is_right(rule):
    assert rule(GOOD) == []


@pytest.mark.parametrize("files", [
    sources(roles__actor="from qfleet.envs import make"),
    sources(roles__actor="from qfleet import envs"),
    sources(roles__actor="import qfleet.algos.dqn"),
    sources(roles__actor="def late():\n    from qfleet.report.video import film"),
    sources(roles__actor="from ..runtime import plan"),
    sources(envs__gym="from qfleet.replay.rate_limiter import Pace"),
    sources(runtime__inline="from qfleet.runs import video"),
    sources(recipe="from qfleet.api import train"),
    sources(algos__dqn="from qfleet.algos import c51\nfrom qfleet.roles import learner"),
    sources(types="from qfleet.config import Config"),
    sources(attic="x = 1"),
])
def test_misdirected_imports_are_found(files):
    assert len(misdirected(files)) == 1


@pytest.mark.parametrize("text", [
    "import subprocess", "from multiprocessing import shared_memory", "import ray.util", "import pickle as p",
    "def late():\n    import grpc", "from torch import distributed", "import torch.distributed as dist",
    "from torch.distributed import all_reduce",
])
def test_confined_modules_are_found_outside(text):
    assert len(unconfined(sources(roles__actor=text))) == 1


def test_confined_modules_are_free_at_home():
    text = "import subprocess, multiprocessing, ray, grpc"
    assert unconfined(sources(runtime__ray=text)) == []
    assert len(unconfined(sources(runs__video=text))) == 3
    text = "import torch.distributed"
    assert unconfined(sources(runtime__ranks=text, roles__gradients=text)) == []
    assert len(unconfined(sources(runtime__wire=text))) == 1
    assert len(unconfined(sources(runtime__wire="import pickle"))) == 1


@pytest.mark.parametrize("text", [
    "import torch\ntorch.load('x', weights_only=True)", "from torch import load\nload('x')",
    "import numpy as np\nnp.load('x')", "import numpy\nread = numpy.load", "import yaml\nyaml.load('x', Loader=L)",
    "eval('1')", "exec('1')", "import numpy as np\nnp.savez('x', allow_pickle=True)",
])
def test_unsafe_calls_are_found(text):
    assert len(unsafe(sources(runs__checkpoint=text))) == 1


def test_a_method_named_eval_is_not_unsafe():
    text = "net.eval()\ncfg.eval.episodes\nself.load('x')\nclass C:\n    eval: int = 1"
    assert unsafe(sources(roles__policy=text)) == []


def test_length_is_found():
    def body(lines: int) -> str:
        return 'def f():\n    """Two\n    lines."""\n' + "    x = 1\n" * lines

    assert long_functions(sources(roles__actor=body(38))) == []
    assert long_functions(sources(roles__actor=body(39))) == ["qfleet.actor.actor:1: f has 40 lines"]
    assert long_files(sources(roles__actor="\n" * 399)) == []
    assert long_files(sources(roles__actor="\n" * 400)) == ["qfleet.actor.actor: 400 lines"]


def test_wide_constructors_are_found():
    def constructor(arguments: str) -> tuple[Source, ...]:
        return sources(roles__actor=f"class A:\n    def __init__(self, {arguments}): ...")

    assert wide_constructors(constructor("a, b, c, d, e, f, *, g, h")) == []
    assert len(wide_constructors(constructor("a, b, c, d, e, f, *, g, h, i"))) == 1
    assert len(wide_constructors(constructor("a, b, c, d, e, f, g, *h, **i"))) == 1


@pytest.mark.parametrize("name", ["ReplayManager", "BaseAgent", "EnvHelper", "Utils", "StepMixin", "IOManager"])
def test_bad_names_are_found(name):
    assert len(bad_names(sources(roles__actor=f"class {name}: ..."))) == 1


def test_names_that_only_contain_the_letters_are_fine():
    assert bad_names(sources(roles__actor="class Database: ...\nclass Baseline: ...\nclass Mixture: ...")) == []
    assert len(bad_names(sources(roles__utils="", nets__base="", envs__gym_helpers=""))) == 3


def test_depth_is_found_across_files_and_reexports():
    chain = sources(config__sections="class Config(BaseModel): ...", config="from qfleet.config.schema import Config",
                    roles__a="from qfleet.config import Config as Section\nclass A(Section): ...",
                    roles__b="from qfleet.roles import a\nclass B(a.A): ...\nclass Free(list): ...")
    assert too_deep(chain) == []
    deeper = sources(roles__c="from qfleet.roles.b import B\nclass C(B): ...\nclass X: ...\nclass Y(X): ...\n"
                              "class Z(Y[int]): ...")
    assert too_deep([*chain, *deeper]) == ["qfleet.roles.c.C: depth 3", "qfleet.roles.c.Z: depth 3"]


def test_unfinished_work_is_found():
    assert len(unfinished(sources(roles__actor="x = 1  # TO" "DO later\n# FIX" "ME"))) == 2


class Sloppy(Config):
    """A section for the self-tests."""

    told: int = Field(1, description="has a line")
    silent: int = 2


def test_undescribed_fields_are_found():
    assert [name.rpartition(".")[2] for name in undescribed([Sloppy])] == ["silent"]


def test_unread_fields_are_found():
    text = ("class LearnerConfig(Config):\n    used: int\n    got: int\n    idle: int\n    validated: int\n"
            "    start: int\n    only: Literal['one']\n    choice: Literal['one', 'two']\n"
            "    def inactive(self): return self.idle\n"
            "    def schedule(self): return self.start\n"
            "def step(cfg): return cfg.used + getattr(cfg, 'got') + cfg.schedule()\n"
            "def write(cfg): cfg.idle = 1\n")
    files = sources(roles__learner=text, recipe="def check(cfg): return cfg.validated")
    model = type("LearnerConfig", (), {"__module__": "qfleet.learner.learner"})
    assert [name.rpartition(".")[2] for name in unread(files, [model])] == ["idle", "validated", "choice"]
