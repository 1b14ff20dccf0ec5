"""A vector environment that misbehaves on request, and a script that hosts it (see test_isolated.py)."""

import importlib
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np


def without_torch():
    """Import the server with an empty torch: the toy needs no tensors, and a start then takes a tenth of the time."""
    sys.modules["torch"] = types.ModuleType("torch")
    try:
        importlib.import_module("qfleet.envs.isolated")
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.split(".")[0] in ("torch", "qfleet")]:
            del sys.modules[name]


if __name__ == "__main__":
    without_torch()

from qfleet.core.env import EnvSpec, Leaf, StepResult  # noqa: E402
from qfleet.core.errors import EnvFault, UserError  # noqa: E402
from qfleet.envs.isolated import serve_env  # noqa: E402
from qfleet.envs.pipe_frames import MAGIC, PREFIX  # noqa: E402

LEAVES = {"image": Leaf((2, 4, 4), "uint8", "image"), "speed": Leaf((3,), "float32", "vector")}


class Toy:
    """Random outcomes that follow from seeds and actions. At step `at` it does `what`, in its first `starts` lives.

    Episodes end at random, or every `length` steps.
    """

    def __init__(self, lanes, home, what="", at=0, starts=1, length=0):
        self.spec, self.lanes, self.home = EnvSpec("toy", LEAVES, 4), lanes, Path(home)
        life = len(list(self.home.glob("life-*")))
        (self.home / f"life-{life}").write_text(str(os.getpid()))
        self.what, self.at = (what if life < starts else ""), at
        self.count, self.length = 0, length
        if self.at == -1:
            self.misbehave()

    def reset(self, seeds):
        self.rng = [np.random.default_rng(seed) for seed in seeds]
        with open(self.home / "seeds", "a") as file:
            print(*seeds, file=file)
        if self.at == -2:
            self.misbehave()
        return self.obs()

    def send(self, actions):
        self.actions = np.array(actions)

    def recv(self):
        self.count += 1
        if self.count == self.at:
            self.misbehave()
        draw = np.array([rng.random(2) for rng in self.rng])
        score = (draw[:, 0] * self.actions).astype(np.float32)
        last = draw[:, 1] < 0.2 if not self.length else np.full(self.lanes, self.count % self.length == 0)
        return StepResult(
            self.obs(), np.sign(score), (~last).astype(np.float32), last, score, np.zeros(self.lanes, bool)
        )

    def obs(self):
        return {"image": np.array([rng.integers(0, 256, (2, 4, 4), np.uint8) for rng in self.rng]),
                "speed": np.array([rng.random(3, np.float32) for rng in self.rng])[:, ::1]}

    def render(self):
        if self.what == "no picture":
            os._exit(9)
        return np.full((5, 7, 3), self.count, np.uint8)

    def faults(self):
        return self.count // 2

    def close(self):
        (self.home / "closed").touch()
        if self.what == "stay":
            time.sleep(100)

    def misbehave(self):
        if self.what == "hang":
            time.sleep(100)
        if self.what == "family":  # hangs, with a process of its own
            game = subprocess.Popen(["sleep", "100"])
            (self.home / "game").write_text(str(game.pid))
            time.sleep(100)
        if self.what == "orphan":  # dies, and what it forked holds the pipes open
            if os.fork() == 0:
                time.sleep(100)
            os._exit(5)
        if self.what == "exit":
            print("farewell", flush=True)
            os._exit(7)
        if self.what == "sys.exit":
            sys.exit(3)
        if self.what == "raise":
            raise ZeroDivisionError("of the toy's")
        if self.what == "fault":
            raise EnvFault("beyond repair")
        if self.what == "user":
            raise UserError("no such level")
        if self.what == "garbage":
            os.write(self.leak(), b"x" * 100)
        if self.what == "half":
            os.write(self.leak(), MAGIC)
            os._exit(1)
        if self.what == "trickle":  # always about to answer
            os.write(self.leak(), PREFIX.pack(MAGIC, 16, 1 << 20))
            while True:
                os.write(self.leak(), b" ")
                time.sleep(0.05)
        if self.what == "noise":
            print("line\n" * 20000, end="")
            os.write(1, b"raw \xff bytes\n")
            subprocess.run(["sh", "-c", "echo from a child; cat"])  # cat would swallow the frames
            assert sys.stdin.read() == ""
            os.chdir("/")
            random.seed(0)
            np.random.seed(0)
        if self.what == "drift":
            self.spec = EnvSpec("toy", LEAVES, 4)
            self.obs = lambda: {"image": np.zeros((self.lanes, 1), np.uint8)}

    def leak(self):
        """The descriptor of the answers, as malice would find it."""
        return max(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
                   and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"))


def make(request):
    return Toy(**request)


if __name__ == "__main__":
    sys.exit(serve_env(make, sys.stdin, sys.stdout))
