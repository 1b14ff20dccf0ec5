"""Environments that fail or take their time only in a fleet's own processes: whoever starts them looks at one first,
and all is well."""

import random
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

from qfleet.envs.toy import Faulty

ACTING = "_member" in sys.argv and "actor" in sys.argv


class Breaks(Faulty):
    """Cannot be made by an actor."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        if ACTING:
            raise OSError("the licence server is on holiday")


class Exhausts(Faulty):
    """After so many steps of an actor asks for more memory than there is."""

    after = 200

    def step(self, action):
        if ACTING and self.age > self.after:
            np.zeros(1 << 60, np.uint8)
        return super().step(action)


class Rich(Faulty):
    """After so many steps pays what float32 can just hold: no sum of it is finite."""

    after = 400

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, 3e38 if ACTING and self.age > self.after else reward, *rest


class Lists(Faulty):
    """Pays a list of one number."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, [reward] if ACTING and self.age > 60 else reward, *rest


class Elsewhere(Faulty):
    """On the actor's side there are more actions, as with another version of the game."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        if ACTING:
            self.action_space = type(self.action_space)(3)


class Gentle(gymnasium.Wrapper):
    """A game that leaves the cores to others; whoever judges need not wait for it."""

    def step(self, action):
        if "evaluator" not in sys.argv:
            time.sleep(0.002)
        return self.env.step(action)


class Ledger(gymnasium.Env):
    """Every observation is another: who saw it (a number drawn once), and how many came before.

    Its actors take their time until the file `gate` exists.
    """

    observation_space = gymnasium.spaces.Box(0, 2**24, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episode = 50

    def __init__(self, gate: str | None = None) -> None:
        self.gate = None if gate is None else Path(gate)
        self.name, self.t = random.SystemRandom().randrange(1, 2**24), -1

    def see(self):
        self.t += 1
        return np.array([self.name, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        return self.see(), {}

    def step(self, action):
        if ACTING:
            time.sleep(0.002 if self.gate is None or self.gate.exists() else 0.1)
        return self.see(), 1.0, self.t % self.episode == 0, False, {}


class Slow(Faulty):
    """A game that takes its time."""

    def step(self, action):
        if ACTING:
            time.sleep(0.002)
        return super().step(action)
