"""Any Gymnasium environment: a registered id, `module:Id`, or `module:callable` that returns one."""

from __future__ import annotations

import copy
import ctypes.util
import difflib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymSpec
from gymnasium.envs.registration import find_highest_version, load_env_creator

from qfleet.config import load_attribute
from qfleet.core.display import display_name
from qfleet.core.env import VectorEnv
from qfleet.core.errors import EnvFault, UserError
from qfleet.core.tracebacks import user_traceback
from qfleet.envs import EnvConfig
from qfleet.envs.lanes import EpisodeRules, GymLanes
from qfleet.envs.spaces import ImageFormat

log = logging.getLogger(__name__)

EnvFactory = Callable[[], gymnasium.Env[Any, Any]]

ATARI_ONLY = ("protocol", "frame_skip", "noop_max", "full_action_space", "sticky", "threads")
EXTRAS = {"mujoco": "qfleet[mujoco]", "ale_py": "qfleet[atari]", "cv2": "qfleet[atari]", "box2d": "gymnasium[box2d]",
          "pygame": "qfleet[video]", "minigrid": "minigrid"}


def claims(id: str) -> bool:
    return True


def inactive(cfg: EnvConfig) -> dict[str, str]:
    reasons = dict.fromkeys(ATARI_ONLY, f"{cfg.id} is not an Atari game")
    if cfg.frame_size is None:
        reasons["colour"] = "without env.frame_size images stay as they are"
    return reasons


def make(cfg: EnvConfig, lanes: int, render: bool) -> VectorEnv:
    build, limit = env_factory(cfg, render)
    view = ImageFormat(cfg.stack or 1, cfg.frame_size, cfg.colour == "grey")
    rules = EpisodeRules(limit or cfg.unlimited_episode_steps, bool(cfg.clip_rewards), bool(cfg.life_loss),
                         fallback_limit=limit is None)
    return GymLanes(build, cfg, lanes, view, rules)


def env_factory(cfg: EnvConfig, render: bool = False) -> tuple[EnvFactory, int | None]:
    """How to build one environment, wrapped as configured, and after how many steps its episodes are truncated."""
    target = load_attribute(cfg.id, None) if ":" in cfg.id else None
    name = cfg.id.partition(":")[2] or cfg.id  # registered, perhaps by importing the module just now
    if callable(target):
        build, limit = _from_callable(cfg, target, render), None
    else:
        if ":" in cfg.id and name not in gymnasium.registry:
            raise UserError(_not_found(cfg.id, target))
        build, limit = _from_registry(cfg, name, render)
    return with_wrappers(build, cfg), cfg.max_episode_steps or limit


def with_wrappers(build: EnvFactory, cfg: EnvConfig) -> EnvFactory:
    """The same environment inside the configured wrappers, the first of them innermost."""
    wrappers = [load_attribute(wrapper) for wrapper in cfg.wrappers]

    def build_wrapped() -> gymnasium.Env[Any, Any]:
        with explain_build_errors(cfg):
            env = build()
            for wrapper in wrappers:
                env = wrapper(env)
            if not isinstance(env, gymnasium.Env):
                kind = type(env)
                raise UserError(f"env.id={cfg.id} built a {kind.__module__}.{kind.__qualname__}; "
                                "a gymnasium.Env is needed")
            return env

    return build_wrapped


@contextmanager
def explain_build_errors(cfg: EnvConfig) -> Iterator[None]:
    """Whatever goes wrong while an environment is built, in terms of what the user can do about it."""
    try:
        yield
    except (UserError, EnvFault):
        raise
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UserError(f"{cfg.id} needs a package that is not installed: {error}{_remedy(str(error))}") from None
    except gymnasium.error.UnregisteredEnv as error:
        raise UserError(str(error)) from None
    except TypeError as error:
        if "argument" not in str(error):
            raise EnvFault(f"{cfg.id} could not be built:\n{user_traceback(error)}") from None
        raise UserError(f"{cfg.id} could not be built with env.kwargs={cfg.kwargs} and env.wrappers={cfg.wrappers}: "
                        f"{error}") from None
    except Exception as error:
        raise EnvFault(f"{cfg.id} could not be built:\n{user_traceback(error)}") from None


def close_matches(id: str) -> list[str]:
    """Registered ids that look like this one, whatever its namespace and case."""
    names: dict[str, str] = {}
    for known, spec in gymnasium.registry.items():
        if str(spec.entry_point).startswith("ale_py") and not known.startswith("ALE/"):
            continue  # older spellings of the same games
        names.setdefault(known.casefold(), known)
        names.setdefault(known.rpartition("/")[2].casefold(), known)
    wanted = id.casefold()
    near = difflib.get_close_matches(wanted, names, 6, 0.75)
    near += difflib.get_close_matches(wanted.rpartition("/")[2], names, 6, 0.75)
    return list(dict.fromkeys(names[name] for name in near))[:4]


def _not_found(id: str, target: Any) -> str:
    """What is wrong with `module:name` where the module can be imported: nothing has that name, or nothing callable."""
    module, _, name = id.partition(":")
    if target is not None:
        return f"{id} is neither an environment nor a function that makes one"
    there = vars(sys.modules[module])
    own = [key for key, value in there.items()
           if isinstance(value, type) and issubclass(value, gymnasium.Env) and value.__module__ == module]
    own += [key for key, spec in gymnasium.registry.items() if str(spec.entry_point).partition(":")[0] == module]
    near = difflib.get_close_matches(name, {*own, *there}, 3, 0.7)
    hint = _hint([f"{module}:{key}" for key in near])
    if not near and own:
        hint = f"; it has {', '.join(f'{module}:{key}' for key in own[:4])}"
    return f"{module} has no {name!r}, neither as an attribute nor as an environment that it registers{hint}"


def _from_callable(cfg: EnvConfig, target: Callable[..., Any], render: bool) -> EnvFactory:
    kwargs = dict(cfg.kwargs)
    if render and "render_mode" in inspect.signature(target).parameters:
        kwargs.setdefault("render_mode", "rgb_array")
    return lambda: target(**kwargs)


def _from_registry(cfg: EnvConfig, name: str, render: bool) -> tuple[EnvFactory, int | None]:
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error:
        _register_atari()
        raise UserError(f"no environment '{name}' is registered{_hint(close_matches(name))} "
                        "(your own: env.id=module:Class, or module:Id if importing the module registers it)") from None
    _warn_outdated(spec)
    limit = cfg.max_episode_steps or spec.max_episode_steps
    spec = copy.deepcopy(spec)
    spec.disable_env_checker, spec.max_episode_steps = True, limit
    if not cfg.wrappers:
        # GymLanes keeps order and time itself; two wrappers fewer are 7 % of a CartPole step.
        spec.order_enforce, spec.max_episode_steps = False, None
    kwargs = dict(cfg.kwargs)
    if render and _draws(cfg, spec):
        kwargs.setdefault("render_mode", "rgb_array")
    if "mujoco" in str(spec.entry_point):
        if not _prepare_mujoco() and render:
            raise UserError(f"{cfg.id} cannot be drawn: there is no screen, and no EGL library to draw without one; "
                            "apt install libegl1, or set DISPLAY, or MUJOCO_GL=osmesa")
        if render:
            return lambda: _with_tracking_camera(gymnasium.make(spec, **kwargs), kwargs), limit
    return lambda: gymnasium.make(spec, **kwargs), limit


def _warn_outdated(spec: GymSpec) -> None:
    """Say once what gymnasium.make says of an id, and does not of a spec: that there is a newer version."""
    newest = find_highest_version(spec.namespace, spec.name)
    if spec.version is not None and newest is not None and newest > spec.version:
        _tell_outdated(spec.id, spec.id.removesuffix(f"-v{spec.version}") + f"-v{newest}")


@functools.cache
def _tell_outdated(id: str, newest: str) -> None:
    log.warning("%s is out of date: %s is its newest version", id, newest)


def _prepare_mujoco() -> bool:
    """Left alone, MuJoCo needs a screen to draw, and writes warnings into MUJOCO_LOG.TXT of the working directory.
    Whether it could draw."""
    if display_name() is None and ctypes.util.find_library("EGL"):  # without it, not even importing would work
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when it is imported
    with suppress(ImportError):  # said where the environment is built
        import mujoco

        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(lambda text: _tell(text.partition("Time =")[0].strip()))
    return display_name() is not None or bool(os.environ.get("MUJOCO_GL"))


def _with_tracking_camera(env: gymnasium.Env[Any, Any], kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Pictures by the model's camera that follows the body, where it has one: otherwise a cheetah runs out of them."""
    import mujoco

    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is not None and not {"camera_id", "camera_name", "default_camera_config"} & kwargs.keys():
        camera = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        renderer.camera_id = camera if camera >= 0 else renderer.camera_id
    return env


@functools.cache
def _tell(text: str) -> None:
    """Once each; what is deprecated in Gymnasium's models is no matter of their users."""
    log.log(logging.DEBUG if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)


def _draws(cfg: EnvConfig, spec: GymSpec) -> bool:
    with explain_build_errors(cfg):
        maker = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    return "rgb_array" in getattr(maker, "metadata", {}).get("render_modes", [])


def _register_atari() -> None:
    """Atari ids, if they can be had, belong among the close matches."""
    try:
        importlib.import_module("ale_py")
    except ImportError:
        return


def _hint(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _remedy(text: str) -> str:
    wanted = next((extra for module, extra in EXTRAS.items() if module in text.casefold()), None)
    return f"; pip install '{wanted}'" if wanted else ""
