"""The whole config of a run, and how a recipe, a file or an environment id becomes one.

Layers, later ones over earlier ones: the defaults of the sections, the recipe (and those it extends), the user's
file, the command line. `Resolved` remembers for every key which of them spoke last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from qfleet import envs
from qfleet.config import (
    DEFAULT,
    Config,
    Count,
    Layered,
    PositiveCount,
    Real,
    assemble,
    flatten,
    inactive_keys,
    kinds_of,
    nest,
    plugin,
    plugin_module,
    plugin_names,
    read_yaml,
    section_model,
    sections,
)
from qfleet.envs import EnvConfig
from qfleet.replay.config import ReplayConfig
from qfleet.roles.checkpointer import CheckpointConfig
from qfleet.roles.evaluator import EvalConfig
from qfleet.roles.learner import LearnerConfig
from qfleet.runs.directory import RunSection
from qfleet.runtime.isolate import isolated
from qfleet.types import EnvSpec, UserError, Window

RECIPES = Path(__file__).parent / "recipes"
COMMAND_LINE = "command line"

ALGO = plugin("qfleet.algos", "algo", "dqn")
EXPLORE = plugin("qfleet.explore", "kind", "linear")

RIVALS = (("eval.period_steps", "eval.period_updates"), ("checkpoint.period_steps", "checkpoint.period_updates"))
"""Two clocks for one schedule: naming one on the command line replaces the other of the recipe."""

HINTS = {
    "lr": "learner.learning_rate", "batch": "learner.batch_size", "max_grad_norm": "learner.clip_norm",
    "target_update_interval": "learner.target_period_updates", "tau": "learner.target_tau",
    "target_network_frequency": "learner.target_period_updates",
    "n_envs": "env.lanes", "num_envs": "env.lanes", "env_id": "env.id",
    "buffer_size": "replay.capacity", "learning_starts": "replay.min_steps", "prioritized": "replay.alpha",
    "replay_ratio": "replay.samples_per_insert", "train_freq": "replay.samples_per_insert",
    "timesteps": "total_steps", "total_timesteps": "total_steps", "steps": "total_steps", "n_timesteps": "total_steps",
    "exploration_fraction": "explore.steps", "exploration_final_eps": "explore.end", "frame_stack": "env.stack",
    "eval_freq": "eval.period_steps", "n_eval_episodes": "eval.episodes", "save_freq": "checkpoint.period_steps",
}
"""Names known from other libraries -> ours, for the did-you-mean."""

EXACT_STEPS_PER_LANE = 1000
"""Exact resume ends every episode at a checkpoint: below so many steps between two, too few would end by themselves."""


class RunConfig(Config):
    """Everything a run depends on. Sections lie beside the code that reads them."""

    seed: Count = Field(1, le=2**31 - 1, description="what all randomness of the run is drawn from")
    device: str = Field("auto", description="where the network is trained: auto, cpu, cuda or cuda:N")
    total_steps: PositiveCount = Field(100_000, description="environment steps of the whole run, over all lanes")
    total_updates: PositiveCount | None = Field(None, description="stop after so many updates, if that comes first")
    stop_at: Real | None = Field(None, description="stop when the mean return of an evaluation reaches this")
    init_from: str | None = Field(None, description="checkpoint or run whose trained weights the run starts from")
    placement: Literal["inline"] = Field("inline", description="where the roles live: inline = all in this process")
    env: EnvConfig
    agent: Annotated[Any, ALGO] = Field(default_factory=ALGO.make, description="what is learnt, as the algorithm says")
    explore: Annotated[Any, EXPLORE] = Field(default_factory=EXPLORE.make, description="how actions are tried out")
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunSection = RunSection()

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return device

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if found := contradictions(self):
            raise ValueError("\n".join(found))
        return self


def contradictions(cfg: RunConfig) -> list[str]:
    """Values that are fine one by one and not together: one line each, with both values and the remedy."""
    window = Window(future=getattr(cfg.agent, "n_step", 1))
    found = cfg.replay.problems(cfg.learner.batch_size, window, cfg.env.lanes)
    if cfg.replay.min_steps < cfg.learner.batch_size:
        found.append(f"replay.min_steps={cfg.replay.min_steps} is below learner.batch_size={cfg.learner.batch_size}: "
                     "raise min_steps, so that the first batch finds enough to draw from")
    if cfg.total_steps <= cfg.replay.min_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins, replay.min_steps="
                     f"{cfg.replay.min_steps}: raise total_steps or lower min_steps")
    if cfg.total_steps <= cfg.env.lanes * cfg.replay.chunk_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins: the first chunks are full after "
                     f"env.lanes={cfg.env.lanes} x replay.chunk_steps={cfg.replay.chunk_steps} steps; raise "
                     "total_steps or lower chunk_steps")
    schedules: dict[str, EvalConfig | CheckpointConfig] = {"eval": cfg.eval, "checkpoint": cfg.checkpoint}
    for name, section in schedules.items():
        if section.period_steps and section.period_updates:
            found.append(f"{name}.period_steps={section.period_steps} and {name}.period_updates="
                         f"{section.period_updates} are both set: choose one clock, set the other to null")
    if cfg.stop_at is not None and not (cfg.eval.period_steps or cfg.eval.period_updates):
        found.append(f"stop_at={cfg.stop_at:g} is judged by evaluations, and there are none: "
                     "set eval.period_steps, or stop_at=null")
    return found + (_exact_resume(cfg) if cfg.run.exact_resume else [])


def _exact_resume(cfg: RunConfig) -> list[str]:
    """What keeps resuming from being bitwise equal to no interruption, or would spoil the episodes."""
    found = []
    if cfg.device.startswith("cuda"):
        found.append(f"run.exact_resume=true with device={cfg.device}: only the CPU is exact; set device=cpu")
    if not cfg.checkpoint.replay:
        found.append("run.exact_resume=true with checkpoint.replay=false: the replay must be saved, too; "
                     "set checkpoint.replay=true")
    steps = cfg.checkpoint.period_steps
    if updates := cfg.checkpoint.period_updates:
        steps = int(updates * cfg.learner.batch_size / cfg.replay.samples_per_insert)
    if not steps:
        return [*found, "run.exact_resume=true needs scheduled checkpoints: set checkpoint.period_steps"]
    least = 2 * cfg.env.max_episode_steps if cfg.env.max_episode_steps else EXACT_STEPS_PER_LANE
    if steps < least * cfg.env.lanes:
        found.append(f"run.exact_resume=true cuts every episode at a checkpoint, here after {steps // cfg.env.lanes} "
                     f"steps per lane, which is short against the episodes: set checkpoint.period_steps to at least "
                     f"{least * cfg.env.lanes} ({least} for each of env.lanes={cfg.env.lanes})")
    return found


@dataclass(frozen=True)
class Recipe:
    """One YAML file: its data, what it stands on, and the environments it is chosen for."""

    source: str
    description: str
    extends: str | None
    suits: tuple[str, ...]
    data: dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A config, and for each dotted key where its value came from."""

    config: RunConfig
    provenance: Mapping[str, str]


def read_recipe(path: Path, source: str) -> Recipe:
    """A recipe file: the config's keys and, beside them, `description`, `extends` and `suits`."""
    data = read_yaml(path)
    description, extends, suits = data.pop("description", ""), data.pop("extends", None), data.pop("suits", [])
    if not isinstance(description, str):
        raise UserError(f"{source}: description: must be text (got {description!r})")
    if extends is not None and not isinstance(extends, str):
        raise UserError(f"{source}: extends: must name one recipe or file (got {extends!r})")
    if not isinstance(suits, list) or not all(isinstance(pattern, str) for pattern in suits):
        raise UserError(f"{source}: suits: must be a list of patterns such as ['ALE/*'] (got {suits!r})")
    return Recipe(source, description, extends, tuple(suits), data)


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def list_recipes() -> list[tuple[str, str]]:
    """Name and one-line description of every recipe that comes with the package."""
    return [(name, _packaged(name).description) for name in recipe_names()]


def _packaged(name: str) -> Recipe:
    return read_recipe(RECIPES / f"{name}.yaml", f"recipe {name}")


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or (Path(name).is_file() and name not in recipe_names())


def _chain(name: str, folder: Path, above: tuple[str, ...] = ()) -> list[Recipe]:
    """A recipe or file by name and all that it extends, lowest first; `folder` is where relative files lie."""
    if _is_file(name):
        path = folder / Path(name).expanduser()
        recipe, folder = read_recipe(path, name), path.parent
    else:
        recipe = _packaged(_known_recipe(name, above))
    if recipe.source in above:
        raise UserError(f"{recipe.source}: extends itself ({' -> '.join([*above, recipe.source])}); break the circle")
    below = _chain(recipe.extends, folder, (*above, recipe.source)) if recipe.extends else []
    return [*below, recipe]


def _known_recipe(name: str, above: tuple[str, ...]) -> str:
    names = recipe_names()
    plain = name.lower().replace("_", "-")
    if plain in names:
        return plain
    where = f"{above[-1]}: extends: " if above else ""
    if name and Path(name).is_dir():
        raise UserError(f"{where}{name!r} is a directory; name a recipe, a YAML file or an environment id, "
                        "or go on with a run by `qfleet resume`")
    close = get_close_matches(plain, names, 3, 0.6)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"{where}{name!r} is no recipe, YAML file or environment id; {guess}`qfleet recipes` lists the "
                    "recipes; an environment id looks like CartPole-v1, ALE/Pong-v5 or module:Class")


def is_env_id(name: str) -> bool:
    """Whether a name can only be an environment's: a version at its end, or a namespace or module before it."""
    return bool(re.search(r"-v\d+$", name) or ":" in name or ("/" in name and not Path(name).is_dir()))


def recipe_for(env_id: str, spec: EnvSpec | None = None) -> str | None:
    """The recipe that suits an environment: by its id, else by what it shows; None if only the spec could tell."""
    for name in recipe_names():
        if any(fnmatchcase(env_id, pattern) for pattern in _packaged(name).suits):
            return name
    if spec is None:
        return None
    return "pixels" if any(leaf.kind == "image" for leaf in spec.observation.values()) else "vector"


def _suited_recipe(env_id: str, user: Mapping[str, Any]) -> str:
    if name := recipe_for(env_id):
        return name
    try:
        cfg = EnvConfig.model_validate({**(user.get("env") or {}), "id": env_id})
    except (ValidationError, TypeError):
        return "vector"  # the whole config is checked next, and names this mistake together with all others
    # What may hang while it trains may hang while it is looked at.
    env = (isolated(cfg.model_dump(mode="json"), 1, cfg.step_timeout_s, cfg.max_faults) if cfg.isolate
           else envs.make(cfg, 1))
    try:
        return recipe_for(env_id, env.spec) or "vector"
    finally:
        env.close()


def resolve(name: str, overrides: Iterable[str] = (), file: str | Path | None = None) -> Resolved:
    """The config that a recipe, a YAML file or an environment id means, under a further file and `key=value` pairs."""
    user = nest(overrides)
    layered = Layered(kinds_of(RunConfig), RIVALS)
    named: dict[str, Any] = {}
    if is_env_id(name) and not _is_file(name):
        named = {"env": {"id": name}}
        name = _suited_recipe(name, user)
    recipes = _chain(name, Path())
    if file is not None:
        recipes += _chain(str(file), Path())
    for recipe in recipes:
        layered = layered.over(recipe.data, recipe.source)
    if named:
        layered = layered.over(named, COMMAND_LINE)
    if user:
        layered = layered.over(user, COMMAND_LINE)
    return Resolved(*assemble(RunConfig, layered, HINTS))


@dataclass(frozen=True)
class Explained:
    """One key of a config: its value, where that came from, and why it lies idle, if it has no effect."""

    key: str
    value: Any
    source: str
    idle: str
    description: str

    @property
    def active(self) -> bool:
        return not self.idle


def explain(resolved: Resolved) -> list[Explained]:
    """Every key in the order of the config."""
    idle = inactive_keys(resolved.config)
    docs = descriptions(resolved.config)
    return [Explained(key, value, resolved.provenance.get(key, DEFAULT), idle.get(key, ""), docs.get(key, ""))
            for key, value in flatten(resolved.config).items()]


def descriptions(config: Config) -> dict[str, str]:
    """Dotted key -> its line of documentation."""
    return {f"{path}.{name}" if path else name: field.description or ""
            for path, section in sections(config) for name, field in type(section).model_fields.items()}


def schema() -> dict[str, Any]:
    """The JSON schema of a config file; agent and explore are any of the kinds that come with the package."""
    return RunConfig.model_json_schema()


@dataclass(frozen=True)
class Difference:
    """A key with two values; one that a config does not have is None there."""

    key: str
    a: Any
    b: Any


def diff(a: RunConfig, b: RunConfig) -> list[Difference]:
    """The keys in which two configs differ."""
    left, right = flatten(a), flatten(b)
    keys = [*left, *(key for key in right if key not in left)]
    return [Difference(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


RESUMABLE = frozenset({
    "total_steps", "total_updates", "stop_at", "device", "replay.max_bytes",
    *(f"eval.{name}" for name in EvalConfig.model_fields),
    *(f"checkpoint.{name}" for name in CheckpointConfig.model_fields),
    *(f"run.{name}" for name in RunSection.model_fields if name not in ("exact_resume", "root", "name")),
})
"""Keys that may change when a run goes on: how long, how judged, how kept and shown, but not what is learnt."""

EXACT = frozenset({
    "device", "replay.max_bytes", "run.threads", "checkpoint.period_steps", "checkpoint.period_updates",
    "checkpoint.replay",
})
"""Of those, the ones that an exact resume must keep: they change the numbers, or where episodes are cut."""


def changed_on_resume(old: RunConfig, new: RunConfig) -> list[Difference]:
    """What a resumed run changes, all of it allowed; UserError with every key that may not change."""
    allowed = RESUMABLE - EXACT if old.run.exact_resume else RESUMABLE
    changes = diff(old, new)
    refused = [f"{change.key}: is {change.b!r}, but the run was started with {change.a!r}"
               for change in changes if change.key not in allowed]
    if refused:
        exact = " (the run promises run.exact_resume)" if old.run.exact_resume else ""
        remedy = "for anything else start a new run, with init_from=RUN to keep the weights"
        may = f"a resumed run{exact} may change {', '.join(sorted(allowed))}; {remedy}"
        raise UserError("\n".join([*refused, may]))
    return changes


def key_table() -> str:
    """Markdown: every key with its default and meaning, one table per section, and per kind where there are several."""
    plugins = {"agent": ALGO, "explore": EXPLORE}
    parts = [_table("", RunConfig)]
    for name, field in RunConfig.model_fields.items():
        if name in plugins:
            package, key = plugins[name].package, plugins[name].key
            parts += [_table(name, plugin_module(package, kind).Config, f"{name}.{key}={kind}")
                      for kind in plugin_names(package)]
        elif (model := section_model(field, None)) is not None:
            parts.append(_table(name, model))
    return "\n\n".join(parts)


def _table(path: str, model: type[Config], title: str = "") -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if section_model(field, None) is None:
            default = "required" if field.is_required() else _yaml_word(field.get_default(call_default_factory=True))
            rows.append(f"| `{path + '.' if path else ''}{name}` | {default} | {field.description or ''} |")
    return "\n".join([f"### {title or path or 'the run'}", "", *rows])


def _yaml_word(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_yaml_word, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), f"{value}")
