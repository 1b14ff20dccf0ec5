"""The cells of suite.py: tasks, contenders, the settings of each, and the training and scoring of one cell.

A cell is one run: a task, a contender and a seed. Its settings are complete, so that a process can train it without
further files, and their digest tells whether a record belongs to the settings that a contender has now.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinks import Evaluations

import qfleet
from qfleet.config import flatten, read_yaml
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig
from qfleet.runconfig.resolution import env_spec_of, recipe_for, resolve

TASKS = Path(__file__).with_name("suite.yaml")
DEFAULT, RECIPE, SB3, ZOO = "default", "recipe", "sb3", "sb3-zoo"
CONTENDERS = (DEFAULT, RECIPE, SB3, ZOO)
FRESH_LANES = 20
FRESH_SEEDS = 10_000
"""Added to the seed of a run: the seed of the episodes that score its best policy."""

PLACES = ("run.", "seed")
"""Keys, or the beginnings of keys, that differ between the cells of one contender."""


class Absent(Exception):
    """A cell that cannot be trained here, or that does not exist, with the reason."""


@dataclass(frozen=True)
class Task:
    """An environment, the steps of training, and what the fresh episodes of a policy must return on average."""

    name: str
    steps: int
    threshold: float | None
    episodes: int = 100
    cost: float = 1.0
    needs: Sequence[str] = ()
    ids: Sequence[str] = ()

    def solved(self, score: float) -> bool | None:
        return None if self.threshold is None else score >= self.threshold

    def env_id(self) -> str:
        """Id of the environment; raises `Absent` if a module that it needs is not installed."""
        if missing := [module for module in self.needs if find_spec(module) is None]:
            raise Absent(f"{', '.join(missing)} is not installed")
        return self._registered() if self.ids else self.name

    def _registered(self) -> str:
        import gymnasium

        found = [name for name in self.ids if name in gymnasium.registry]
        if not found:
            raise Absent(f"gymnasium {gymnasium.__version__} has none of {', '.join(self.ids)}")
        return found[0]


@cache
def tasks() -> dict[str, Task]:
    """The suite, in its order."""
    rows: dict[str, dict[str, Any]] = read_yaml(TASKS)["tasks"]
    return {name: Task(name, **row) for name, row in rows.items()}


def tuned(task: str) -> dict[str, Any] | None:
    """Tuned settings of Stable-Baselines3 for a task, and their source; None if there are none."""
    data = read_yaml(TASKS)
    return next(({"settings": group["settings"], "source": data["sources"][group["source"]]}
                 for group in data["tuned"] if task in group["tasks"]), None)


def read_candidates(path: Path | None) -> dict[str, list[str]]:
    """Candidates by name: key=value settings over the default."""
    found = {} if path is None else read_yaml(path)
    for name, words in found.items():
        if name in CONTENDERS:
            raise UserError(f"{path}: {name} is the name of a contender; choose another one")
        if not isinstance(words, list) or not all(isinstance(word, str) and "=" in word for word in words):
            raise UserError(f"{path}: {name}: must be a list of key=value settings (got {words!r})")
    return found


def settings_of(task: Task, contender: str, candidates: Mapping[str, Sequence[str]], steps: int) -> dict[str, Any]:
    """Complete settings of a contender at a task, except the seed, and their digest. Raises `Absent`."""
    env = task.env_id()
    if contender in (SB3, ZOO):
        found = _peer_settings(task, env, contender, steps)
    elif contender != RECIPE:
        found = _ours(*default_recipe(env), steps, candidates.get(contender, ()))
    elif recipe_for(env):
        found = _ours(env, [], steps)
    else:
        raise Absent(f"no packaged recipe suits {env}")
    found |= {"total_steps": steps, "threshold": task.threshold, "episodes": task.episodes}
    values = json.dumps(found | found.pop("config", {}), sort_keys=True, default=str)
    return found | {"digest": hashlib.sha256(values.encode()).hexdigest()[:12]}


@cache
def default_recipe(env: str) -> tuple[str, tuple[str, ...]]:
    """What `qfleet train ENV_ID` trains, without the recipes that are made for some environments by their ids.

    Where such a recipe exists, it is the recipe that the spaces of the environment call for.
    """
    if recipe_for(env) is None:
        return env, ()
    name = recipe_for("", env_spec_of(EnvConfig(id=env)))
    assert name is not None
    return name, (f"env.id={env}",)


def _ours(source: str, words: Sequence[str], steps: int, over: Sequence[str] = ()) -> dict[str, Any]:
    """Settings of qfleet, and as `config` all of them, so that a changed recipe gives another digest."""
    words = [*words, *over, f"total_steps={steps}"]
    try:
        config = resolve(source, words).config
    except UserError as error:
        if over:
            raise Absent(f"does not apply: {error}") from None
        raise
    values = {key: value for key, value in flatten(config).items() if not key.startswith(PLACES)}
    return {"library": "qfleet", "source": source, "overrides": words, "config": values}


def _peer_settings(task: Task, env: str, contender: str, steps: int) -> dict[str, Any]:
    """Settings of Stable-Baselines3, evaluated as often and in as many episodes as the default of qfleet."""
    if find_spec("stable_baselines3") is None:
        raise Absent("stable_baselines3 is not installed")
    found = tuned(task.name) if contender == ZOO else {"settings": {}, "source": "defaults of Stable-Baselines3"}
    if found is None:
        raise Absent(f"rl-zoo3 has no settings of DQN or TD3 for {task.name}")
    source, words = default_recipe(env)
    watch = resolve(source, words).config.eval
    return {"library": "stable-baselines3", "env": env, **found, "eval_period_steps": watch.period_steps or steps,
            "eval_episodes": watch.episodes}


@dataclass(frozen=True)
class Cell:
    """One run: a task, a contender, a seed, and the settings of the contender."""

    task: Task
    contender: str
    seed: int
    settings: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.task.name, self.contender, self.seed, self.settings["digest"]

    @property
    def cost(self) -> float:
        return self.task.cost * self.settings["total_steps"]

    def header(self) -> dict[str, Any]:
        """What every record of the cell begins with."""
        return {"task": self.task.name, "contender": self.contender, "seed": self.seed, "settings": dict(self.settings)}


@dataclass(frozen=True)
class Trained:
    """Result of a training: the best policy's fresh returns, evaluations, and the time of the training alone."""

    returns: Sequence[float]
    curve: Sequence[tuple[int, float]]
    steps: int
    cpu_s: float
    wall_s: float


class Stopwatch:
    """CPU and wall seconds of this process and its finished children since the start."""

    def __init__(self) -> None:
        self._cpu, self._wall = self._cpu_now(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return round(self._cpu_now() - self._cpu, 2), round(time.perf_counter() - self._wall, 2)

    @staticmethod
    def _cpu_now() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)


def train(cell: Cell) -> dict[str, Any]:
    """Train and score a cell in this process; the rest of its record."""
    if cell.settings["library"] == "qfleet":
        found = train_ours(cell)
    else:
        from suite_sb3 import train_peer  # not needed where only qfleet is trained

        found = train_peer(cell)
    score = sum(found.returns) / len(found.returns)
    spread = (sum((each - score) ** 2 for each in found.returns) / len(found.returns)) ** 0.5
    threshold = cell.task.threshold
    reached = None if threshold is None else next((step for step, mean in found.curve if mean >= threshold), None)
    return {"status": "done", "score": round(score, 4), "std": round(spread, 4), "episodes": len(found.returns),
            "solved": cell.task.solved(score), "reached_at": reached, "steps": found.steps, "cpu_s": found.cpu_s,
            "wall_s": found.wall_s, "curve": [[step, round(mean, 4)] for step, mean in found.curve]}


class TimedEvaluations(Evaluations):
    """Also keeps the time at the newest record: the end of the training, without what follows it, such as a score."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = Stopwatch()
        self.cpu_s, self.wall_s = self._clock.read()

    def write(self, record: Mapping[str, Any]) -> None:
        super().write(record)
        self.cpu_s, self.wall_s = self._clock.read()


def train_ours(cell: Cell) -> Trained:
    with tempfile.TemporaryDirectory() as root:
        watch = TimedEvaluations()
        result = qfleet.train(cell.settings["source"], [*cell.settings["overrides"], f"seed={cell.seed}",
                                                        f"run.root={root}"], sinks=[watch])
        if result.exit_code:
            raise UserError(f"the training ended early: {result.reason}, after {result.steps:,} steps")
        fresh = qfleet.evaluate(result.directory, episodes=cell.task.episodes, seed=FRESH_SEEDS + cell.seed,
                                lanes=min(FRESH_LANES, cell.task.episodes))
    return Trained([float(each) for each in fresh.returns], watch.curve, result.steps, watch.cpu_s, watch.wall_s)


def one_thread() -> dict[str, str]:
    """Environment of the process of a cell: one thread, no GPU."""
    return {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            "CUDA_VISIBLE_DEVICES": ""}
