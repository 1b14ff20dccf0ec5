"""The driver with a launcher of the test's: it needs nothing but the protocol, and starts what the topology lists."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from qfleet.core.errors import ProcessFault, UserError
from qfleet.launch.driver import RESIZE_S, Driver, ElasticActors
from qfleet.process.handle import ChildSpec, LocalProcess
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_env
from qfleet.runconfig.resolution import resolve
from qfleet.runs.directory import RunDirectory

pytestmark = pytest.mark.timeout(120)
TINY = ["agent.hidden=[8]", "env.lanes=2", "replay.min_steps=64", "learner.batch_size=8", "device=cpu", "run.name=x",
        "run.threads=1"]
FOREVER = "import time; time.sleep(600)"


class ScriptLauncher:
    """Starts a Python script for each node; `scripts` maps a role to its text."""

    def __init__(self, folder, rooms=(), **scripts):
        self.folder, self.scripts, self.rooms = folder, scripts, list(rooms)
        self.started, self.released, self.opened, self.closed = [], [], [], 0
        self.folder.mkdir()

    def open(self, run_request, nodes):
        self.opened = [node.name for node in nodes]

    def start(self, node, attempt, now, may_start):
        self.started.append((node.name, attempt))
        script = f"attempt, index = {attempt}, {node.index}\n{self.scripts.get(str(node.role), FOREVER)}"
        return LocalProcess(ChildSpec(node.name, [sys.executable, "-c", script], {}, Path(f"{node.index}.log")),
                            attempt, now)

    def release(self, node):
        self.released.append(node.name)

    def room(self):
        return None if not self.rooms else self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0]

    def has_started(self):
        return bool(self.started)

    def result(self):
        file = self.folder / "result"
        return file.read_text() if file.exists() else None

    def invitation(self):
        return []

    def close(self):
        self.closed += 1
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def driver_of(launcher, *overrides):
    config = resolve("cartpole", [*TINY, *overrides]).config
    env = make_env(config.env, 1)
    env.close()
    config = resolve_auto(config, env.spec)
    directory = RunDirectory.create(config.run, "x")
    return Driver(config, env.spec, directory, (), {}, launcher)


def finish(folder, reason="total_steps", code=0):
    result = {"directory": "x", "steps": 7, "updates": 3, "episodes": 1, "seconds": 1.0, "best": None,
              "reason": reason, "exit_code": code, "saved_at": 7}
    return f"import pathlib; pathlib.Path({str(folder / 'result')!r}).write_text({json.dumps(result)!r})"


def test_every_node_is_started_and_the_first_one_ends_the_run(tmp_path):
    launcher = ScriptLauncher(tmp_path / "own")
    launcher.scripts["learner"] = "import time; time.sleep(1); " + finish(launcher.folder)
    result = driver_of(launcher, "actors=2").run()
    assert (result.steps, result.reason, result.exit_code) == (7, "total_steps", 0)
    assert launcher.opened == ["learner", "actor/0", "actor/1", "evaluator"]
    assert launcher.started == [(name, 1) for name in launcher.opened] and launcher.closed


def test_a_group_is_one_child_whose_members_are_started_together_again(tmp_path):
    launcher = ScriptLauncher(tmp_path / "own")
    launcher.scripts["learner"] = (f"import time\nif attempt == 2: {finish(launcher.folder)}\n"
                                   "elif index == 1: raise SystemExit(4)\nelse: time.sleep(600)")
    driver = driver_of(launcher, "sync=allreduce", "learners=2", "allreduce.max_restarts=3")
    assert driver.main_child == "learners" and driver.supervisor.names == ["learners", "evaluator"]
    assert driver.run().steps == 7
    learners = [each for each in launcher.started if each[0] != "evaluator"]
    assert learners == [("learner/0", 1), ("learner/1", 1), ("learner/0", 2), ("learner/1", 2)]


@pytest.mark.parametrize("code,error,said", [
    (2, UserError, "learner cannot continue"), (70, ProcessFault, "learner cannot continue"),
    (1, ProcessFault, "learner ended with exit code 1;")])
def test_a_failed_learner_ends_the_run(tmp_path, code, error, said):
    launcher = ScriptLauncher(tmp_path / "own", learner=f"raise SystemExit({code})")
    with pytest.raises(error, match=said):
        driver_of(launcher, "actors=1").run()
    assert launcher.closed


def test_a_signal_is_passed_on_and_names_the_reason(tmp_path):
    launcher = ScriptLauncher(tmp_path / "own")
    launcher.scripts["learner"] = (
        "import signal, sys, time, pathlib\n"
        f"def stop(*_): {finish(launcher.folder, 'preempted', 75)}; sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); pathlib.Path('ready').touch(); time.sleep(600)")

    def interrupt():
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    result = driver_of(launcher, "actors=1").run()
    assert (result.reason, result.exit_code, result.steps) == ("interrupted", 130, 7)


def test_the_number_of_actors_follows_the_room(tmp_path):
    launcher = ScriptLauncher(tmp_path / "own", rooms=[2, 3, 1])
    driver = driver_of(launcher, "launcher=ray", "actors=auto")
    assert driver.config.actors == 2 and "actors: 2" in Path("runs/x/config.yaml").read_text()
    assert driver.supervisor.names == ["learner", "actor/0", "actor/1", "evaluator"]
    elastic = ElasticActors(driver)
    elastic.step()
    assert len(driver.supervisor.names) == 4, "not asked yet"
    for expected in (["actor/0", "actor/1", "actor/2"], ["actor/0"]):
        elastic._resized_at -= RESIZE_S
        elastic.step()
        assert [name for name in driver.supervisor.names if name.startswith("actor")] == expected
    assert launcher.released == ["actor/1", "actor/2"], "they were not running"
    launcher.close()


def test_a_launcher_that_cannot_open_is_closed(tmp_path):
    launcher = ScriptLauncher(tmp_path / "own")

    def refuse(run_request, nodes):
        raise UserError("no room")

    launcher.open = refuse
    with pytest.raises(UserError, match="no room"):
        driver_of(launcher, "actors=1")
    assert launcher.closed and not launcher.folder.exists()
