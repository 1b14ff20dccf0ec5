"""An isolated environment is the same environment, bit by bit, and whatever it does wrong ends in its own process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_host

from qfleet.core.env import EnvSpec, Leaf, StepResult, VectorEnv
from qfleet.core.errors import EnvFault, UserError
from qfleet.envs import isolated
from qfleet.envs.isolated import IsolatedEnv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60),
              pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX pipes")]

LANES = 3
REASONS = {"hang": "did not answer within 1 s", "family": "did not answer within 1 s",
           "exit": "it ended", "sys.exit": "it ended",
           "orphan": "it exited", "raise": "it ended", "garbage": "invalid data: not a frame", "drift": "its spec says",
           "half": "it ended in the middle of an answer", "trickle": "did not answer within 1 s"}
TOY = Path(toy_host.__file__)


@pytest.fixture
def toy(tmp_path):
    """Makes isolated toys, and closes them."""
    made: list[IsolatedEnv] = []

    def start(timeout_s: float = 20.0, max_faults: int = 3, lanes: int = LANES, **request: Any) -> IsolatedEnv:
        request = {"lanes": LANES, "home": str(tmp_path), **request}
        made.append(IsolatedEnv([sys.executable, str(TOY)], request, lanes, timeout_s, max_faults))
        return made[-1]

    yield start
    for env in made:
        env.close()


def twin(tmp_path: Path, **request: Any) -> VectorEnv:
    """The same toy in this process."""
    home = tmp_path / "twin"
    home.mkdir()
    return toy_host.make({"lanes": LANES, "home": str(home), **request})


def step(env: VectorEnv, seed: int = 0) -> StepResult:
    env.send(np.random.default_rng(seed).integers(0, 4, LANES))
    return env.recv()


def assert_same(a: StepResult, b: StepResult) -> None:
    same_obs(a.obs, b.obs)
    same_obs(columns(a), columns(b))
    assert a.info == b.info


def columns(result: StepResult) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(result).items() if isinstance(value, np.ndarray)}


def same_obs(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape, a[name].tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes())


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody reaps does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process and what they lead to."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def children_of(parent: int) -> set[int]:
    """The processes that `parent` has to answer for, zombies among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1].split()
            if int(rest[1]) == parent:
                found.add(pid)
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def pid_of(tmp_path: Path, life: int = 0) -> int:
    return int((tmp_path / f"life-{life}").read_text())


def test_equals_the_same_environment_in_process_bit_by_bit(toy, tmp_path):
    env, other = toy(), twin(tmp_path)
    assert env.spec == other.spec == EnvSpec.from_json(other.spec.to_json())
    assert env.spec.observation["image"] == Leaf((2, 4, 4), "uint8", "image")
    for seeds in ([1, 2, 3], [2**31 - 1, 0, 7]):
        same_obs(env.reset(seeds), other.reset(seeds))
        for i in range(20):
            assert_same(step(env, i), step(other, i))
            assert env.faults() == other.faults()
    np.testing.assert_array_equal(env.render(), other.render())


def test_send_returns_while_the_step_runs(toy, tmp_path):
    env = toy(what="hang", at=1, timeout_s=0.5)
    env.reset([1, 2, 3])
    env.send(np.zeros(LANES, np.int64))  # would block for 100 s if it waited
    assert alive(pid_of(tmp_path))
    assert env.recv().aborted.all()


@pytest.mark.parametrize("what", REASONS)
def test_a_lost_child_is_replaced_and_its_episodes_are_cut(toy, tmp_path, what, caplog):
    timeout_s = 1.0 if "within 1 s" in REASONS[what] else 20.0
    env = toy(what=what, at=3, timeout_s=timeout_s)
    env.reset([1, 2, 3])
    whole = [step(env, i) for i in range(2)]
    assert not any(out.aborted.any() for out in whole)
    out = step(env)
    assert out.aborted.all() and not out.last.any()
    assert not (out.reward.any() or out.discount.any() or out.raw_reward.any())
    assert env.faults() == LANES + 1  # the toy counted one itself, in two steps
    assert REASONS[what] in caplog.text
    assert not alive(pid_of(tmp_path, 0))
    assert what != "family" or within(5, lambda: not alive(int((tmp_path / "game").read_text())))
    # The lanes that came back are those of the seeds that follow from the first ones, and they go on.
    rows = [[int(seed) for seed in row.split()] for row in (tmp_path / "seeds").read_text().splitlines()]
    assert rows[0] == [1, 2, 3] and len(set(rows[1])) == LANES and rows[1] != rows[0]
    other = twin(tmp_path)
    same_obs(out.obs, other.reset(rows[1]))
    for i in range(3):
        assert_same(step(env, i), step(other, i))


def test_restarts_are_reproducible(toy, tmp_path):
    seen = []
    for _ in range(2):
        for file in tmp_path.glob("life-*"):
            file.unlink()
        env = toy(what="exit", at=2, starts=2)
        first = env.reset([5, 6, 7])
        seen.append([first, *(step(env, i).obs for i in range(6))])
        env.close()
    for a, b in zip(*seen, strict=True):
        same_obs(a, b)
    rows = (tmp_path / "seeds").read_text().splitlines()
    assert rows[:3] == rows[3:] and len(set(rows)) == 3


def test_a_child_that_never_completes_a_step_is_given_up(toy):
    env = toy(what="exit", at=1, starts=99, max_faults=3)
    env.reset([1, 2, 3])
    assert step(env).aborted.all() and step(env).aborted.all()
    with pytest.raises(EnvFault, match=r"toy was lost 3 times without completing an episode \(env\.max_faults=3\)"
                                       r"(?s:.*)exit code 7(?s:.*)farewell"):
        step(env)


def test_completed_steps_do_not_renew_the_patience(toy):
    env = toy(what="exit", at=3, starts=99, length=99, max_faults=2)
    env.reset([1, 2, 3])
    assert [bool(step(env).aborted.all()) for _ in range(5)] == [False, False, True, False, False]
    with pytest.raises(EnvFault, match="lost 2 times"):
        step(env)


def test_a_completed_episode_renews_the_patience(toy):
    env = toy(what="exit", at=3, starts=99, length=2, max_faults=2)
    env.reset([1, 2, 3])
    assert [bool(step(env).aborted.all()) for _ in range(9)] == [False, False, True] * 3


def test_a_child_that_cannot_reset_is_given_up(toy):
    env = toy(what="hang", at=-2, starts=99, max_faults=2, timeout_s=0.5)
    with pytest.raises(EnvFault, match=r"lost 2 times(?s:.*)did not answer within 0\.5 s"):
        env.reset([1, 2, 3])


def test_a_lost_reset_is_repeated_with_other_seeds(toy, tmp_path):
    env = toy(what="exit", at=-2)
    obs = env.reset([1, 2, 3])
    rows = (tmp_path / "seeds").read_text().splitlines()
    assert len(rows) == 2 and env.faults() == LANES
    same_obs(obs, twin(tmp_path).reset([int(seed) for seed in rows[1].split()]))


def test_a_start_that_fails_says_why_at_once(toy, tmp_path):
    with pytest.raises(EnvFault, match=r"did not start(?s:.*)exit code 1(?s:.*)ZeroDivisionError: of the toy's"):
        toy(what="raise", at=-1, starts=99)
    assert len(list(tmp_path.glob("life-*"))) == 1


def test_a_start_that_hangs_ends(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "START_TIMEOUT_S", 2.0)
    with pytest.raises(EnvFault, match="did not answer within 2 s"):
        toy(what="hang", at=-1)
    assert all(not alive(int(file.read_text())) for file in tmp_path.glob("life-*"))


@pytest.mark.parametrize(("what", "kind", "message"), [("fault", EnvFault, "beyond repair"),
                                                       ("user", UserError, "no such level")])
@pytest.mark.parametrize("at", [-1, 1])
def test_errors_for_the_user_come_back_as_they_were_raised(toy, what, kind, message, at):
    with pytest.raises(kind) as caught:
        env = toy(what=what, at=at)
        env.reset([1, 2, 3])
        step(env)
    assert str(caught.value) == message
    assert not hasattr(caught.value, "__notes__"), "the message says it all, as it does in one process"


def test_prints_reads_and_global_seeds_stay_in_the_child(toy, tmp_path, capsys):
    env, other = toy(what="noise", at=1), twin(tmp_path)
    same_obs(env.reset([1, 2, 3]), other.reset([1, 2, 3]))
    where, state = os.getcwd(), np.random.get_state()[1].tobytes()
    assert_same(step(env), step(other))
    assert env.faults() == 0 and os.getcwd() == where and np.random.get_state()[1].tobytes() == state
    env.close()
    heard = capsys.readouterr().err
    assert heard.count("line\n") == 20000 and "raw \ufffd bytes" in heard and "from a child" in heard


def test_a_wrong_number_of_lanes_is_refused(toy):
    with pytest.raises(EnvFault, match="made 3 lanes; 5 were requested"):
        toy(lanes=5)


def test_calls_out_of_order_are_refused(toy):
    env = toy()
    with pytest.raises(RuntimeError, match=r"needs a reset\(\) first"):
        env.send(np.zeros(LANES, int))
    with pytest.raises(ValueError, match="2 seeds for 3 lanes"):
        env.reset([1, 2])
    env.reset([1, 2, 3])
    with pytest.raises(RuntimeError, match=r"recv\(\) was called without send\(\)"):
        env.recv()
    env.send(np.zeros(LANES, int))
    with pytest.raises(RuntimeError, match=r"recv\(\) after the previous send"):
        env.send(np.zeros(LANES, int))


def test_reset_and_render_may_come_while_a_step_is_in_flight(toy, tmp_path):
    env, other = toy(), twin(tmp_path)
    env.reset([1, 2, 3])
    env.send(np.zeros(LANES, int))
    same_obs(env.reset([4, 5, 6]), other.reset([4, 5, 6]))
    env.send(np.zeros(LANES, int))
    assert (env.render() == 2).all()
    other.send(np.zeros(LANES, int))
    assert_same(env.recv(), other.recv())


def test_an_interrupted_recv_can_be_repeated(toy, tmp_path, monkeypatch):
    env, other = toy(), twin(tmp_path)
    same_obs(env.reset([1, 2, 3]), other.reset([1, 2, 3]))
    env.send(np.zeros(LANES, int))

    def interrupt(timeout_s):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env._child, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.recv()
    other.send(np.zeros(LANES, int))
    assert_same(env.recv(), other.recv())
    assert_same(step(env), step(other))


def test_a_picture_that_kills_the_child_costs_only_the_episodes(toy):
    env = toy(what="no picture")
    env.reset([1, 2, 3])
    assert env.render() is None
    assert step(env).aborted.all()
    assert not step(env).aborted.any()


def test_a_frame_larger_than_the_pipe_does_not_block(toy):
    env = toy(what="hang", at=1, timeout_s=1.0)
    env.reset([1, 2, 3])
    env.send(np.zeros(LANES, int))
    env._child.post(isolated.Frame("step", arrays={"actions": np.zeros(1 << 20, np.int64)}))  # not read
    assert env.recv().aborted.all()


def test_close_leaves_nothing_behind(toy, tmp_path):
    toy().close()  # whatever is opened once, lazily, is open now
    files, children = open_files(), children_of(os.getpid())
    env = toy(what="exit", at=1, starts=2)
    env.reset([1, 2, 3])
    step(env)
    step(env)
    env.close()
    env.close()
    assert (tmp_path / "closed").exists()
    assert open_files() <= files and children_of(os.getpid()) <= children
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("life-*"))


def test_close_does_not_wait_for_a_child_that_will_not_go(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "CLOSE_GRACE_S", 0.5)
    env = toy(what="stay")
    env.close()  # a close that waited would wait for 100 s
    assert not alive(pid_of(tmp_path))


def test_close_during_a_step_asks_before_it_kills(toy, tmp_path):
    env = toy()
    env.reset([1, 2, 3])
    env.send(np.zeros(LANES, int))
    env.close()
    assert (tmp_path / "closed").exists() and not alive(pid_of(tmp_path))


@pytest.mark.parametrize("what", ["", "family"])
def test_the_child_dies_with_its_parent(toy, tmp_path, what):
    """Killed with -9, with the child idle, or hanging beside a process of its own."""
    parent = tmp_path / "parent.py"
    parent.write_text(textwrap.dedent(f"""
        import sys, time
        import numpy as np
        from qfleet.envs.isolated import IsolatedEnv
        request = {{"lanes": 3, "home": {str(tmp_path)!r}, "what": {what!r}, "at": 1}}
        env = IsolatedEnv([sys.executable, {str(TOY)!r}], request, 3, 50.0, 1)
        env.reset([1, 2, 3])
        if {what!r}:
            env.send(np.zeros(3, int))
        print("ready", flush=True)
        time.sleep(100)
        """))
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            pids = [pid_of(tmp_path)]
            if what == "family":
                assert within(20, lambda: (tmp_path / "game").exists() and (tmp_path / "game").read_text() != "")
                pids.append(int((tmp_path / "game").read_text()))
            assert all(alive(pid) for pid in pids)
        finally:
            process.send_signal(signal.SIGKILL)
    assert within(5, lambda: not any(alive(pid) for pid in pids))
