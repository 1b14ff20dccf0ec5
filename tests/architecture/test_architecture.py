"""Architecture rules, checked on the sources: the package graph, lengths, depth of inheritance, names.

The second half shows each rule a source that breaks it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architecture_rules import (
    PACKAGES,
    ROLES,
    RULES,
    SCRIPT_RULES,
    Source,
    bad_names,
    cyclic,
    imports,
    library,
    long_files,
    long_functions,
    misdirected,
    package_of,
    scripts,
    sections,
    shared_names,
    sources,
    too_deep,
    unconfined,
    undescribed,
    unfinished,
    unread,
    unsafe,
    unused_edges,
    wide_constructors,
)
from pydantic import Field

import qfleet
from qfleet.config import Config


@pytest.mark.parametrize("rule", RULES)
def test_the_library_keeps_the_rule(rule):
    assert rule(library()) == []


@pytest.mark.parametrize("rule", SCRIPT_RULES)
def test_the_scripts_that_compare_speed_keep_the_rule(rule):
    assert rule(scripts()) == []
    assert {"benchmarks.bench", "benchmarks.speed.peers"} <= {file.module for file in scripts()}


def test_the_library_does_not_import_scripts():
    folder = Path(qfleet.__file__).parents[1] / "benchmarks"
    names = {"benchmarks", "speed", *(path.stem for path in folder.glob("*.py"))}
    assert [(file.module, target) for file in library() for _, _, target in imports(file)
            if target.partition(".")[0] in names] == []


def test_every_config_field_is_described():
    assert undescribed(sections()) == []


def test_every_config_field_is_read():
    assert unread(library(), sections()) == []


def test_every_package_of_the_graph_exists():
    assert {package_of(file.module) for file in library()} == set(PACKAGES)
    assert len(sections()) >= 6


def test_the_graph_has_no_unused_edge():
    assert unused_edges(library()) == []


def test_the_graph_has_no_cycle():
    below = dict(PACKAGES)
    while below:
        leaves = {name for name, others in below.items() if not others & below.keys()}
        assert leaves, below
        below = {name: others for name, others in below.items() if name not in leaves}


def documented_graph() -> dict[str, set[str]]:
    """Package -> the packages that it may import, read from the block in docs/design.md."""
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    block = next(block for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) if block.startswith("cli "))
    graph: dict[str, set[str]] = {}
    above, _, below = re.sub(r"\(.*\)", "", block).partition("\n───")
    for part, shared in ((below.partition("\n")[2], {"core"}), (above, {"core", "config"})):
        for line in reversed(part.strip().splitlines()):  # from the bottom, so that what is referred to is known
            names, _, found = line.partition("──▶")
            inherited = re.findall(r"all that (\S+) may import", found)
            words = set(re.sub(r"and all.*|nothing else", "", found).replace(",", " ").split())
            words = (words - {"roles"} | ROLES if "roles" in words else words) | shared
            words |= {name for package in inherited for name in graph[package]}
            for name in names.replace(",", " ").split():
                graph[name] = words
    return graph


def test_the_design_page_shows_the_graph():
    assert documented_graph() == {name: PACKAGES[name] for name in PACKAGES if name not in ("", "__main__", "core")}


# ---- Each rule can fail ----

GOOD = sources(actor__actor="import numpy as np\nfrom qfleet.core.env import Leaf\nfrom qfleet.replay import layout\n"
                            "class Actor:\n    def __init__(self, a):\n        np.load('x', allow_pickle=False)\n")


@pytest.mark.parametrize("rule", RULES)
def test_rules_accept_what_is_right(rule):
    assert rule(GOOD) == []


@pytest.mark.parametrize("files", [
    sources(actor__actor="from qfleet.envs import make"), sources(actor__actor="from qfleet import envs"),
    sources(actor__actor="import qfleet.algos.dqn"),
    sources(actor__actor="def late():\n    from qfleet.report.video import write_mp4"),
    sources(actor__actor="from ..training import loop"),
    sources(envs__gym="from qfleet.replay.rate_limiter import RateLimiter"),
    sources(training__local_actors="from qfleet.report import video"),
    sources(runconfig__resolution="from qfleet.api import train"),
    sources(algos__dqn="from qfleet.algos import c51\nfrom qfleet.learner import learner"),
    sources(core__env="from qfleet.config import Config"),
    sources(accel__choose="from qfleet.optim.flat_params import Flat"),
    sources(sync__gradient_sync="from qfleet.accel import choose"),
    sources(networks__heads="from qfleet.accel.kernels.value_head import fused_head\nfrom qfleet.accel import threads"),
    sources(core__env="from qfleet import train"),
    sources(core__env="from qfleet.nets import heads"),
    sources(attic="x = 1"), sources(attic__box="x = 1")])
def test_misdirected_imports_are_found(files):
    assert len(misdirected(files)) == 1


def test_unused_edges_are_found():
    without = [file for file in library() if file.inner != "__main__"]
    assert unused_edges(without) == ["__main__: imports nothing of cli", "__main__: imports nothing of process"]


def test_circles_are_found():
    circle = sources(core__a="from qfleet.core.b import x", core__b="from qfleet.core import a", core__c="import os")
    assert cyclic(circle) == ["qfleet.core.a: imports in a circle", "qfleet.core.b: imports in a circle"]
    late = sources(core__a="from qfleet.core.b import x", core__b="def f():\n    from qfleet.core import a")
    assert cyclic(late) == []


def test_public_classes_that_share_a_name_are_found():
    same = "class Plan: ...\nclass _Own: ...\nclass Config: ..."
    assert shared_names(sources(core__a=same, replay__b=same)) == ["Plan: qfleet.core.a, qfleet.replay.b"]


@pytest.mark.parametrize("text", [
    "import subprocess", "from multiprocessing import shared_memory", "import ray.util", "import pickle as p",
    "def late():\n    import grpc", "from torch import distributed", "import torch.distributed as dist",
    "from torch.distributed import all_reduce",
])
def test_confined_modules_are_found_outside(text):
    assert len(unconfined(sources(actor__actor=text))) == 1


def test_confined_modules_are_free_at_home():
    text = "import subprocess, multiprocessing, ray, grpc"
    assert len(unconfined(sources(launch__ray_session=text))) == 1
    assert len(unconfined(sources(report__video=text))) == 4
    text = "import torch.distributed"
    assert unconfined(sources(sync__process_group=text)) == []
    assert len(unconfined(sources(sync__allreduce=text))) == 1
    assert len(unconfined(sources(transport__client="import pickle"))) == 1


@pytest.mark.parametrize("text", [
    "import torch\ntorch.load('x', weights_only=True)", "from torch import load\nload('x')",
    "import numpy as np\nnp.load('x')", "import numpy\nread = numpy.load", "import yaml\nyaml.load('x', Loader=L)",
    "eval('1')", "exec('1')", "import numpy as np\nnp.savez('x', allow_pickle=True)",
])
def test_unsafe_calls_are_found(text):
    assert len(unsafe(sources(runs__checkpoint=text))) == 1


def test_a_method_named_eval_is_not_unsafe():
    text = "net.eval()\ncfg.eval.episodes\nself.load('x')\nclass C:\n    eval: int = 1"
    assert unsafe(sources(actor__policy=text)) == []


def test_length_is_found():
    def body(lines: int) -> str:
        return 'def f():\n    """Two\n    lines."""\n' + "    x = 1\n" * lines

    assert long_functions(sources(actor__actor=body(38))) == []
    assert long_functions(sources(actor__actor=body(39))) == ["qfleet.actor.actor:1: f has 40 lines"]
    assert long_files(sources(actor__actor="\n" * 399)) == []
    assert long_files(sources(actor__actor="\n" * 400)) == ["qfleet.actor.actor: 400 lines"]


def test_wide_constructors_are_found():
    def constructor(arguments: str) -> tuple[Source, ...]:
        return sources(actor__actor=f"class A:\n    def __init__(self, {arguments}): ...")

    assert wide_constructors(constructor("a, b, c, d, e, f, *, g, h")) == []
    assert len(wide_constructors(constructor("a, b, c, d, e, f, *, g, h, i"))) == 1
    assert len(wide_constructors(constructor("a, b, c, d, e, f, g, *h, **i"))) == 1


@pytest.mark.parametrize("name", ["ReplayManager", "BaseAgent", "EnvHelper", "Utils", "StepMixin", "IOManager"])
def test_bad_names_are_found(name):
    assert len(bad_names(sources(actor__actor=f"class {name}: ..."))) == 1


def test_names_that_only_contain_the_letters_are_fine():
    assert bad_names(sources(actor__actor="class Database: ...\nclass Baseline: ...\nclass Mixture: ...")) == []
    assert len(bad_names(sources(learner__utils="", networks__base="", envs__gym_helpers=""))) == 3


def test_depth_is_found_across_files_and_reexports():
    chain = sources(config__schema="class Config(BaseModel): ...", config="from qfleet.config.schema import Config",
                    learner__a="from qfleet.config import Config as Section\nclass A(Section): ...",
                    learner__b="from qfleet.learner import a\nclass B(a.A): ...\nclass Free(list): ...")
    assert too_deep(chain) == []
    deeper = sources(learner__c="from qfleet.learner.b import B\nclass C(B): ...\nclass X: ...\nclass Y(X): ...\n"
                              "class Z(Y[int]): ...")
    assert too_deep([*chain, *deeper]) == ["qfleet.learner.c.C: depth 3", "qfleet.learner.c.Z: depth 3"]


def test_unfinished_work_is_found():
    assert len(unfinished(sources(actor__actor="x = 1  # TO" "DO later\n# FIX" "ME"))) == 2


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
    files = sources(learner__learner=text, runconfig__describe="def check(cfg): return cfg.validated")
    model = type("LearnerConfig", (), {"__module__": "qfleet.learner.learner"})
    assert [name.rpartition(".")[2] for name in unread(files, [model])] == ["idle", "validated", "choice"]
