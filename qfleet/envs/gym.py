"""Generic suite for Gymnasium environments: a registered id, `module:Id`, or `module:callable` that returns one."""

from __future__ import annotations

import ctypes.util
import dataclasses
import difflib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymSpec
from gymnasium.envs.registration import find_highest_version, load_env_creator

from qfleet.config import defined_in_script, load_attribute
from qfleet.config.objects import readable
from qfleet.core.display import display_name
from qfleet.core.env import VectorEnv
from qfleet.core.errors import EnvFault, UserError
from qfleet.core.tracebacks import user_traceback
from qfleet.envs import EnvConfig
from qfleet.envs.envpool import EnvPoolVectorEnv, is_envpool
from qfleet.envs.images import ImageFormat
from qfleet.envs.lanes import EpisodeRules, GymLanes
from qfleet.envs.packages import missing_package, quiet, register_package
from qfleet.envs.symbols import find_symbols
from qfleet.envs.vector import VectorEnvLanes

log = logging.getLogger(__name__)

EnvFactory = Callable[..., Any]
"""Creates a gymnasium.Env, or a gymnasium.vector.VectorEnv, for a seed if it takes one."""

ATARI_ONLY = ("protocol", "frame_skip", "noop_max", "full_action_space", "sticky", "threads")


def claims(id: str) -> bool:
    return True


def inactive(cfg: EnvConfig) -> dict[str, str]:
    reasons = dict.fromkeys(ATARI_ONLY, f"{cfg.name} is not an Atari game")
    if cfg.frame_size is None:
        reasons["colour"] = "without env.frame_size images are not converted"
    return reasons


def make(cfg: EnvConfig, lanes: int, render: bool) -> VectorEnv:
    build, limit = env_factory(cfg, render, lanes)
    first = build()
    if isinstance(first, gymnasium.vector.VectorEnv):
        try:
            return VectorEnvLanes(first, cfg, lanes, image_format(cfg), build if takes_seed(cfg) else None)
        except BaseException:
            first.close()  # its processes and threads
            raise
    if limit is None and first.spec is not None:  # a callable may use gymnasium.make, which limits episodes itself
        limit = first.spec.max_episode_steps
    rules = EpisodeRules(limit or cfg.unlimited_episode_steps, bool(cfg.clip_rewards), bool(cfg.life_loss),
                         fallback_limit=limit is None)
    return GymLanes(build, cfg, lanes, _tried_format(cfg, build, first), rules, first)


def image_format(cfg: EnvConfig) -> ImageFormat:
    """Preprocessing of images, without a trial of the environment."""
    return ImageFormat(cfg.stack or 1, cfg.frame_size, cfg.colour == "grey", cfg.image_symbols)


def _tried_format(cfg: EnvConfig, build: EnvFactory, env: gymnasium.Env[Any, Any]) -> ImageFormat:
    """Preprocessing of images, with the symbols that a trial finds."""
    found = image_format(cfg)
    if cfg.image_symbols != "auto":
        return found
    return replace(found, symbols=find_symbols(build, env.observation_space, found))


def single_spaces(env: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Observation and action space of an environment, or of one of a vector environment."""
    if isinstance(env, gymnasium.vector.VectorEnv):
        return env.single_observation_space, env.single_action_space
    return env.observation_space, env.action_space


def env_factory(cfg: EnvConfig, render: bool = False, lanes: int = 1) -> tuple[EnvFactory, int | None]:
    """Factory of an environment with the configured wrappers, and the step limit of its episodes.

    A callable with a parameter `num_envs`, which creates a vector environment, is given the number of lanes. If it
    has a parameter `seed`, too, the factory takes a seed.
    """
    target = _target(cfg)
    name = cfg.id.partition(":")[2] or cfg.id  # may have been registered by importing the module
    if callable(target):
        build, limit = _from_callable(cfg, target, render, lanes), None
    else:
        if ":" in cfg.id and name not in gymnasium.registry:
            raise UserError(_not_found(cfg.id, target))
        build, limit = _from_registry(cfg, name, render)
    return with_wrappers(build, cfg), cfg.max_episode_steps or limit


def takes_seed(cfg: EnvConfig) -> bool:
    """True for a callable that creates a vector environment for a seed, such as an EnvPool."""
    target = _target(cfg)
    return callable(target) and "seed" not in cfg.kwargs and {"num_envs", "seed"} <= _parameters(target)


def takes_num_envs(cfg: EnvConfig) -> bool:
    """True for a callable that creates a vector environment of the wanted size."""
    target = _target(cfg)
    return callable(target) and "num_envs" not in cfg.kwargs and "num_envs" in _parameters(target)


def _target(cfg: EnvConfig) -> Any:
    """The object that a `module:attribute` or an object's name stands for, or None."""
    return load_attribute(cfg.id, None) if ":" in cfg.id else None


def _parameters(target: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(target).parameters)
    except ValueError:  # some builtins have no signature
        return set()


def with_wrappers(build: EnvFactory, cfg: EnvConfig) -> EnvFactory:
    """Factory that applies the configured wrappers, the first of them innermost."""
    named = [wrapper for each in cfg.wrappers for wrapper in ({each: {}} if isinstance(each, str) else each).items()]
    wrappers = [(load_attribute(name), kwargs) for name, kwargs in named]

    def build_wrapped(*seed: int) -> Any:
        with explain_build_errors(cfg):
            env = build(*seed)
            if is_envpool(env):
                return EnvPoolVectorEnv(env)
            if isinstance(env, gymnasium.vector.VectorEnv):
                return env
            for wrapper, kwargs in wrappers:
                env = wrapper(env, **kwargs)
            if not isinstance(env, gymnasium.Env):
                kind = type(env)
                raise UserError(f"{cfg.name} built a {kind.__module__}.{kind.__qualname__}; "
                                "a gymnasium.Env or a gymnasium.vector.VectorEnv is needed")
            for name in ("observation_space", "action_space"):
                if not isinstance(getattr(env, name, None), spaces.Space):
                    raise UserError(f"{cfg.name} has no {name}: set it to one of gymnasium.spaces in the constructor")
            return env

    return build_wrapped


@contextmanager
def explain_build_errors(cfg: EnvConfig) -> Iterator[None]:
    """Convert errors raised while an environment is built to UserError or EnvFault with a remedy."""
    try:
        yield
    except (UserError, EnvFault):
        raise
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UserError(missing_package(cfg.name, error)) from None
    except gymnasium.error.UnregisteredEnv as error:
        raise UserError(str(error)) from None
    except TypeError as error:
        if "argument" not in str(error):
            raise EnvFault(f"{cfg.name} could not be built:\n{user_traceback(error)}") from None
        given = readable(f"env.kwargs={cfg.kwargs} and env.wrappers={cfg.wrappers}")
        raise UserError(f"{cfg.name} could not be built with {given}: {error}") from None
    except Exception as error:
        raise EnvFault(f"{cfg.name} could not be built:\n{user_traceback(error)}") from None


def close_matches(id: str) -> list[str]:
    """Registered ids similar to this one, ignoring namespace and case."""
    names: dict[str, str] = {}
    for known, spec in gymnasium.registry.items():
        if str(spec.entry_point).startswith("ale_py") and not known.startswith("ALE/"):
            continue  # older ids of the same games
        names.setdefault(known.casefold(), known)
        names.setdefault(known.rpartition("/")[2].casefold(), known)
    wanted = id.casefold()
    near = difflib.get_close_matches(wanted, names, 6, 0.75)
    near += difflib.get_close_matches(wanted.rpartition("/")[2], names, 6, 0.75)
    return list(dict.fromkeys(names[name] for name in near))[:4]


def _not_found(id: str, target: Any) -> str:
    """Message for `module:name` if the module can be imported but has no such name, or the object is not callable."""
    module, _, name = id.partition(":")
    if target is not None:
        return f"{id} is neither an environment nor a function that returns one"
    if module == "__main__":
        return defined_in_script(name)
    members = vars(sys.modules[module])
    own = [key for key, value in members.items()
           if isinstance(value, type) and issubclass(value, gymnasium.Env) and value.__module__ == module]
    own += [key for key, spec in gymnasium.registry.items() if str(spec.entry_point).partition(":")[0] == module]
    near = difflib.get_close_matches(name, {*own, *members}, 3, 0.7)
    hint = _hint([f"{module}:{key}" for key in near])
    if not near and own:
        hint = f"; it has {', '.join(f'{module}:{key}' for key in own[:4])}"
    return f"{module} has no {name!r}, neither as an attribute nor as an environment that it registers{hint}"


def _from_callable(cfg: EnvConfig, target: Callable[..., Any], render: bool, lanes: int) -> EnvFactory:
    kwargs, parameters = dict(cfg.kwargs), _parameters(target)
    if render and "render_mode" in parameters:
        kwargs.setdefault("render_mode", "rgb_array")
    if "num_envs" in parameters:
        kwargs.setdefault("num_envs", lanes)
    if takes_seed(cfg):
        return lambda seed=0: target(**kwargs, seed=seed)
    return lambda: target(**kwargs)


def _from_registry(cfg: EnvConfig, name: str, render: bool) -> tuple[EnvFactory, int | None]:
    register_package(name)
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error:
        _register_atari()
        raise UserError(f"no environment '{name}' is registered{_hint(close_matches(name))} "
                        "(your own: env.id=module:Class, or module:Id if importing the module registers it)") from None
    _warn_outdated(spec)
    limit = cfg.max_episode_steps or spec.max_episode_steps
    # GymLanes enforces order and time limit itself; two wrappers fewer save 7 % of a CartPole step.
    ordered = spec.order_enforce and bool(cfg.wrappers)
    spec = dataclasses.replace(spec, disable_env_checker=True, order_enforce=ordered,
                               max_episode_steps=limit if cfg.wrappers else None)
    kwargs = dict(cfg.kwargs)
    if render and _can_render(cfg, spec):
        kwargs.setdefault("render_mode", "rgb_array")
    if "mujoco" in str(spec.entry_point):
        if not _prepare_mujoco() and render:
            raise UserError(f"{cfg.name} cannot be rendered: there is no display, and no EGL library for headless "
                            "rendering; apt install libegl1, set DISPLAY, or set MUJOCO_GL=osmesa")
        if render:
            return lambda: _with_tracking_camera(gymnasium.make(spec, **kwargs), kwargs), limit
    return lambda: quiet(name, gymnasium.make(spec, **kwargs)), limit


def _warn_outdated(spec: GymSpec) -> None:
    """Warn once about an id with a newer version; gymnasium.make warns for ids only, not for specs."""
    newest = find_highest_version(spec.namespace, spec.name)
    if spec.version is not None and newest is not None and newest > spec.version:
        _log_outdated(spec.id, spec.id.removesuffix(f"-v{spec.version}") + f"-v{newest}")


@functools.cache
def _log_outdated(id: str, newest: str) -> None:
    log.warning("%s is out of date: %s is its newest version", id, newest)


def _prepare_mujoco() -> bool:
    """Configure MuJoCo for headless rendering and log its warnings; returns True if it can render.

    By default MuJoCo needs a display to render, and writes warnings to MUJOCO_LOG.TXT in the working directory.
    """
    if display_name() is None and ctypes.util.find_library("EGL"):  # without EGL the import itself would fail
        os.environ.setdefault("MUJOCO_GL", "egl")  # read on import
    with suppress(ImportError):  # reported when the environment is built
        import mujoco

        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(lambda text: _log_mujoco(text.partition("Time =")[0].strip()))
    return display_name() is not None or bool(os.environ.get("MUJOCO_GL"))


def _with_tracking_camera(env: gymnasium.Env[Any, Any], kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Render with the model's tracking camera if it has one; otherwise HalfCheetah, for example, leaves the image."""
    import mujoco

    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is not None and not {"camera_id", "camera_name", "default_camera_config"} & kwargs.keys():
        camera = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        renderer.camera_id = camera if camera >= 0 else renderer.camera_id
    return env


@functools.cache
def _log_mujoco(text: str) -> None:
    """Log a MuJoCo warning once; deprecations inside Gymnasium's models only at debug level."""
    log.log(logging.DEBUG if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)


def _can_render(cfg: EnvConfig, spec: GymSpec) -> bool:
    with explain_build_errors(cfg):
        maker = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    return "rgb_array" in getattr(maker, "metadata", {}).get("render_modes", [])


def _register_atari() -> None:
    """Import ale_py, if installed, so that Atari ids are among the close matches."""
    try:
        importlib.import_module("ale_py")
    except ImportError:
        return


def _hint(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
