"""Comparable scores: human-normalised Atari scores, and the interquartile mean over seeds with an interval.

The interquartile mean (IQM) and its stratified bootstrap follow Agarwal et al. 2021: the mean of the middle half of all
scores, and its distribution when seeds are resampled with replacement within each environment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95

GAME = re.compile(r"(?:ALE/)?([A-Za-z]+?)(?:NoFrameskip|Deterministic)?-v\d+")

HUMAN: dict[str, tuple[float, float]] = {
    "Alien": (227.8, 7127.7), "Amidar": (5.8, 1719.5), "Assault": (222.4, 742.0), "Asterix": (210.0, 8503.3),
    "Asteroids": (719.1, 47388.7), "Atlantis": (12850.0, 29028.1), "BankHeist": (14.2, 753.1),
    "BattleZone": (2360.0, 37187.5), "BeamRider": (363.9, 16926.5), "Berzerk": (123.7, 2630.4),
    "Bowling": (23.1, 160.7), "Boxing": (0.1, 12.1), "Breakout": (1.7, 30.5), "Centipede": (2090.9, 12017.0),
    "ChopperCommand": (811.0, 7387.8), "CrazyClimber": (10780.5, 35829.4), "Defender": (2874.5, 18688.9),
    "DemonAttack": (152.1, 1971.0), "DoubleDunk": (-18.6, -16.4), "Enduro": (0.0, 860.5),
    "FishingDerby": (-91.7, -38.7), "Freeway": (0.0, 29.6), "Frostbite": (65.2, 4334.7), "Gopher": (257.6, 2412.5),
    "Gravitar": (173.0, 3351.4), "Hero": (1027.0, 30826.4), "IceHockey": (-11.2, 0.9), "Jamesbond": (29.0, 302.8),
    "Kangaroo": (52.0, 3035.0), "Krull": (1598.0, 2665.5), "KungFuMaster": (258.5, 22736.3),
    "MontezumaRevenge": (0.0, 4753.3), "MsPacman": (307.3, 6951.6), "NameThisGame": (2292.3, 8049.0),
    "Phoenix": (761.4, 7242.6), "Pitfall": (-229.4, 6463.7), "Pong": (-20.7, 14.6), "PrivateEye": (24.9, 69571.3),
    "Qbert": (163.9, 13455.0), "Riverraid": (1338.5, 17118.0), "RoadRunner": (11.5, 7845.0), "Robotank": (2.2, 11.9),
    "Seaquest": (68.4, 42054.7), "Skiing": (-17098.1, -4336.9), "Solaris": (1236.3, 12326.7),
    "SpaceInvaders": (148.0, 1668.7), "StarGunner": (664.0, 10250.0), "Surround": (-10.0, 6.5),
    "Tennis": (-23.8, -8.3), "TimePilot": (3568.0, 5229.2), "Tutankham": (11.4, 167.6), "UpNDown": (533.4, 11693.2),
    "Venture": (0.0, 1187.5), "VideoPinball": (16256.9, 17667.9), "WizardOfWor": (563.5, 4756.5),
    "YarsRevenge": (3092.9, 54576.9), "Zaxxon": (32.5, 9173.3),
}
"""Game -> mean returns of a random player and of a human tester, from up to 30 no-ops (Wang et al. 2016)."""


def human_normalised(env_id: str, score: float) -> float | None:
    """Scale a score to 0 for a random player and 1 for a human; None without a human reference score."""
    found = GAME.fullmatch(env_id)
    known = HUMAN.get(found[1]) if found else None
    return None if known is None else (score - known[0]) / (known[1] - known[0])


def iqm(scores: np.ndarray) -> np.ndarray:
    """Mean along the last axis without its lowest and highest quarter (rounded down)."""
    cut = scores.shape[-1] // 4
    ordered: np.ndarray = np.sort(scores, axis=-1)
    return ordered[..., cut:scores.shape[-1] - cut].mean(-1)


def iqm_interval(strata: Sequence[Sequence[float]], rng: np.random.Generator,
                 resamples: int = RESAMPLES) -> tuple[float, float, float]:
    """Return (IQM, low, high) of scores, one list per environment; 95 % of the resamples lie from low to high."""
    drawn = [rng.choice(np.asarray(scores, np.float64), (resamples, len(scores))) for scores in strata]
    spread = iqm(np.concatenate(drawn, axis=1))
    low, high = np.quantile(spread, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(iqm(np.concatenate([np.asarray(scores, np.float64) for scores in strata]))), float(low), float(high)
