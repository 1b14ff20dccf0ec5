"""Environment in a separate process: crashes, hangs, prints, forks and chdir cannot affect training.

    IsolatedEnv, in the trainer                  serve_env, in a fresh interpreter (never a fork of a torch process)
      make {request}                  ──▶          env = make(request)
                                      ◀──        ready {spec, lanes}
      reset {seeds}                   ──▶          env.reset
                                      ◀──        obs
      step [actions]: send returns    ──▶          env.send, env.recv           (concurrently with the caller)
                      recv waits      ◀──        outcome {faults}
      the pipe is closed              ──▶          env.close, exit

Every request has one answer, in order. A child that misses the deadline, exits, or sends an invalid answer is killed
with its descendants and replaced. A UserError or EnvFault raised in the child is raised again in the trainer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from qfleet.config.objects import require_names
from qfleet.core.env import OBS_PREFIX, EnvSpec, Obs, StepResult, VectorEnv
from qfleet.core.errors import BadOutput, EnvFault, UserError
from qfleet.core.seeds import seed_for
from qfleet.envs.env_process import ChildLost, PipeProcess
from qfleet.envs.pipe_frames import Frame, FrameDecoder, FrameError, encode

START_TIMEOUT_S = 120.0
"""Time to start: the environment's libraries are imported, possibly from a cold network disk."""

CLOSE_GRACE_S = 2.0
COLUMNS = ("reward", "discount", "last", "raw_reward", "aborted")
ERRORS: dict[str, type[Exception]] = {"UserError": UserError, "BadOutput": BadOutput, "EnvFault": EnvFault}

log = logging.getLogger(__name__)


class IsolatedEnv:
    """VectorEnv whose lanes run in a child process.

    `command` starts an interpreter that calls `serve_env`; `request` (JSON) describes the environment to make. A lost
    child is replaced: its lanes start new episodes, with seeds derived from the last reset and the number of restarts
    since, and StepResult marks them `aborted`. After `max_faults` losses without a completed episode an EnvFault is
    raised. A step may include a reset, so both have the same deadline.
    """

    def __init__(self, command: Sequence[str], request: Mapping[str, Any], lanes: int, step_timeout_s: float,
                 max_faults: int) -> None:
        self.lanes = lanes
        self._command, self._request = list(command), dict(request)
        self._timeout_s, self._max_faults = step_timeout_s, max_faults
        self._seeds: list[int] = []
        self._restarts = 0  # since the last reset
        self._consecutive_losses = 0  # losses since the last completed episode
        self._lost_episodes = 0  # episodes lost with earlier children
        self._child_faults = 0  # episodes lost inside the current child, as it reports them
        self._stepping = False
        self._step_result: StepResult | None = None
        self._child = PipeProcess(self._command)
        try:
            self.spec = self._handshake()
        except ChildLost as loss:
            # No retry: a failure before the first step would repeat, and the user is waiting for the message.
            self._child.terminate(loss.grace_s)
            raise EnvFault(f"the environment's process did not start: {loss}; {self._child.exit_report()}") from None
        except BaseException:
            self._child.terminate(0.0)
            raise

    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start new episodes in all lanes; waits for a step in flight and discards its result."""
        if len(seeds) != self.lanes:
            raise ValueError(f"{len(seeds)} seeds for {self.lanes} lanes")
        if self._stepping:
            self._await_step()
        self._step_result = None
        self._seeds, self._restarts = [int(seed) for seed in seeds], 0
        try:
            return self._first_obs(self._seeds)
        except ChildLost as loss:
            return self._replace(loss)

    def send(self, actions: np.ndarray) -> None:
        """Start a step and return at once. A lost child is detected in `recv`."""
        if not self._seeds or self._stepping or self._step_result is not None:
            raise RuntimeError("send() needs a reset() first, and a recv() after the previous send()")
        self._child.post(Frame("step", arrays={"actions": np.asarray(actions)}))
        self._stepping = True

    def recv(self) -> StepResult:
        """Result of the step; if the child was lost, all lanes are aborted."""
        if self._stepping:
            self._await_step()
        if self._step_result is None:
            raise RuntimeError("recv() was called without send()")
        result, self._step_result = self._step_result, None
        return result

    def render(self) -> np.ndarray | None:
        """Image of lane 0, after a step in flight has finished. None if the child is lost while rendering."""
        if self._stepping:
            self._await_step()
        try:
            return self._ask(Frame("render"), "picture", self._timeout_s).arrays.get("picture")
        except ChildLost as loss:
            self._child.terminate(loss.grace_s)  # the next step or reset replaces it
            return None

    def faults(self) -> int:
        """Lost episodes: each restart counts once per lane, plus the faults that the child reports."""
        return self._lost_episodes + self._child_faults

    def close(self) -> None:
        self._child.terminate(CLOSE_GRACE_S)

    def _await_step(self) -> None:
        """Wait for the result of the step in flight. An interrupt (Ctrl-C) leaves it in flight."""
        try:
            frame = self._answer("outcome", self._timeout_s)
            result = _decode_result(frame, self.spec, self.lanes)
        except ChildLost as loss:
            self._stepping = False
            obs = self._replace(loss)
            nothing, never = np.zeros(self.lanes, np.float32), np.zeros(self.lanes, bool)
            self._step_result = StepResult(obs, nothing, nothing.copy(), never, np.zeros(self.lanes), ~never)
        else:
            self._step_result = result
            if result.last.any():
                self._consecutive_losses = 0
            self._child_faults = int(frame.facts.get("faults", 0))

    def _replace(self, loss: ChildLost) -> Obs:
        """Start a new child in place of the lost one; returns the first observations of its lanes."""
        while True:
            self._child.terminate(loss.grace_s)
            self._lost_episodes, self._child_faults = self._lost_episodes + self._child_faults + self.lanes, 0
            self._consecutive_losses += 1
            if self._consecutive_losses >= self._max_faults:
                raise EnvFault(f"the process of {self.spec.id} was lost {self._consecutive_losses} times without "
                               f"completing an episode (env.max_faults={self._max_faults}): {loss}; "
                               f"{self._child.exit_report()}")
            self._restarts += 1
            log.warning("the environment's process is replaced, %d lanes start new episodes: %s", self.lanes, loss)
            try:
                self._child = PipeProcess(self._command)
                spec = self._handshake()
                if spec != self.spec:
                    raise EnvFault(f"the restarted environment has another spec: {spec} instead of {self.spec}")
                return self._first_obs([seed_for(seed, "restart", self._restarts) for seed in self._seeds])
            except ChildLost as again:
                loss = again

    def _handshake(self) -> EnvSpec:
        facts = self._ask(Frame("make", {"request": self._request}), "ready", START_TIMEOUT_S).facts
        try:
            lanes, spec = facts["lanes"], EnvSpec.from_json(facts["spec"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ChildLost(f"its first message is invalid: {dict(facts)}: {error!r}") from None
        if lanes != self.lanes:
            raise EnvFault(f"the environment's process made {lanes} lanes; {self.lanes} were requested")
        return spec

    def _first_obs(self, seeds: Sequence[int]) -> Obs:
        frame = self._ask(Frame("reset", {"seeds": list(seeds)}), "obs", self._timeout_s)
        return _obs(frame, self.spec, self.lanes)

    def _ask(self, question: Frame, answer: str, timeout_s: float) -> Frame:
        self._child.post(question)
        return self._answer(answer, timeout_s)

    def _answer(self, kind: str, timeout_s: float) -> Frame:
        frame = self._child.read(timeout_s)
        self._stepping = False
        if frame.kind == "error" and frame.facts.get("class") in ERRORS:
            error = ERRORS[frame.facts["class"]](frame.facts["message"])
            if frame.facts["cause"]:
                error.add_note("In the environment's process:\n" + frame.facts["cause"])
            raise error
        if frame.kind != kind:
            raise ChildLost(f"it answered {frame.kind!r} instead of {kind!r}")
        return frame


def make_isolated_env(section: Mapping[str, Any], lanes: int, step_timeout_s: float, max_faults: int,
                      render: bool = False) -> IsolatedEnv:
    """Build the environment of an env section (as JSON) in a fresh interpreter running this package."""
    require_names(section, "env.isolate=true")
    # The child uses the same module search path as this process, e.g. the directory of a script.
    request = {"env": dict(section), "lanes": lanes, "render": render, "path": [str(folder) for folder in sys.path]}
    return IsolatedEnv([sys.executable, "-m", "qfleet", "_env-host"], request, lanes, step_timeout_s, max_faults)


def _obs(frame: Frame, spec: EnvSpec, lanes: int) -> Obs:
    """Observation leaves of a frame, validated against the spec."""
    obs = {name[len(OBS_PREFIX):]: array for name, array in frame.arrays.items() if name.startswith(OBS_PREFIX)}
    found = {name: (array.shape, array.dtype) for name, array in obs.items()}
    expected = {name: ((lanes, *leaf.shape), np.dtype(leaf.dtype)) for name, leaf in spec.observation.items()}
    if found != expected:
        raise ChildLost(f"it sent the observations {found}; its spec says {expected}")
    return obs


def _decode_result(frame: Frame, spec: EnvSpec, lanes: int) -> StepResult:
    columns: dict[str, Any] = {name: frame.arrays[name] for name in COLUMNS if name in frame.arrays}
    shapes = {name: column.shape for name, column in columns.items()}
    if shapes != dict.fromkeys(COLUMNS, (lanes,)):
        raise ChildLost(f"it sent the columns {shapes}; {COLUMNS} of shape ({lanes},) were expected")
    try:
        info = {int(lane): {str(name): float(value) for name, value in values.items()}
                for lane, values in frame.facts.get("info", {}).items()}
    except (TypeError, ValueError, AttributeError):
        raise ChildLost(f"it sent the info metrics {frame.facts['info']!r:.100}") from None
    return StepResult(_obs(frame, spec, lanes), info=info, **columns)


def serve_env(make: Callable[[dict[str, Any]], VectorEnv], stdin: IO[Any], stdout: IO[Any]) -> int:
    """Serve one environment until `stdin` is closed; returns the exit status. Neither stream may have been used before.

    The process's fd 0 becomes empty and its fd 1 is redirected to stderr, so that reads and prints of the environment
    cannot disturb the frames.
    """
    requests, answers = os.dup(stdin.fileno()), os.dup(stdout.fileno())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, stdin.fileno())
    os.dup2(2, stdout.fileno())
    os.close(empty)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        with contextlib.ExitStack() as stack:
            decoder, envs = FrameDecoder(), list[VectorEnv]()
            while (frame := _next(requests, decoder)) is not None:
                answer = encode(_respond(frame, make, envs, stack))
                if not _write(answers, answer):
                    break
        return 0
    except Exception:
        traceback.print_exc()
        return 1


def _respond(frame: Frame, make: Callable[[dict[str, Any]], VectorEnv], envs: list[VectorEnv],
             stack: contextlib.ExitStack) -> Frame:
    """Answer to one request. `envs` holds the environment once it is made, `stack` closes it."""
    try:
        if frame.kind == "make":
            env = make(frame.facts["request"])
            envs.append(env)
            stack.callback(env.close)
            return Frame("ready", {"spec": env.spec.to_json(), "lanes": env.lanes})
        env = envs[0]
        if frame.kind == "reset":
            return Frame("obs", arrays=_leaves(env.reset(frame.facts["seeds"])))
        if frame.kind == "step":
            env.send(frame.arrays["actions"])
            result = env.recv()
            columns = {name: getattr(result, name) for name in COLUMNS}
            info = {str(lane): values for lane, values in result.info.items()}
            return Frame("outcome", {"faults": env.faults(), "info": info}, {**_leaves(result.obs), **columns})
        if frame.kind == "render":
            image = env.render()
            return Frame("picture", arrays={} if image is None else {"picture": image})
        raise FrameError(f"unknown request {frame.kind!r}")
    except (UserError, EnvFault) as error:
        name = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
        cause = "" if error.__cause__ is None else "".join(traceback.format_exception(error.__cause__))
        return Frame("error", {"class": name, "message": str(error), "cause": cause})


def _leaves(obs: Obs) -> dict[str, np.ndarray]:
    return {OBS_PREFIX + name: leaf for name, leaf in obs.items()}


def _next(fd: int, decoder: FrameDecoder) -> Frame | None:
    """Next request; None once the trainer has closed the pipe or exited."""
    while count := os.readv(fd, [decoder.buffer]):
        frame = decoder.advance(count)
        if frame is not None:
            return frame
    return None


def _write(fd: int, data: bytes) -> bool:
    """Write all of `data`; returns False if the reader has closed the pipe."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest):]
    except BrokenPipeError:
        return False
    return True
