"""The families of policies of NGU and Agent57: arm j weighs intrinsic rewards by β_j and discounts by γ_j."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class MixtureTable:
    """A number for every arm. Devices have copies, made when they ask first: within a recording there is no copying."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = torch.tensor(values)
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def at(self, arm: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Those of the arms, where `like` is."""
        key = like.device, like.dtype
        if key not in self._copies:
            with torch.inference_mode(False):
                self._copies[key] = self._values.to(like)
        return self._copies[key][arm.long()]


def betas(arms: int, largest: float) -> list[float]:
    """β_0 = 0, β_{N−1} = β, between them β σ(10 (2j − (N − 2)) / (N − 2)) (Badia et al. 2020a)."""
    if arms < 3:
        return [0.0, largest][:arms]
    middle = [largest * _sigmoid(10 * (2 * j - (arms - 2)) / (arms - 2)) for j in range(1, arms - 1)]
    return [0.0, *middle, largest]


def gammas(arms: int, largest: float, smallest: float) -> list[float]:
    """γ_j = 1 − exp(((N − 1 − j) log(1 − γ_max) + j log(1 − γ_min)) / (N − 1)): the exploiting arm sees farthest."""
    return [1 - math.exp(_between(math.log(1 - largest), math.log(1 - smallest), j, arms - 1)) for j in range(arms)]


def agent57_gammas(arms: int, farthest: float, far: float, near: float) -> list[float]:
    """Agent57's (Badia et al. 2020b): γ_0, then by a sigmoid down to γ_1 at arm 7, then by logarithms down to γ_2.

    As printed, the formula rises where the text and its figure say that it falls; this one falls. It needs 10 arms;
    with fewer, all go by logarithms from γ_0 to γ_2.
    """
    if arms < 10:
        return gammas(arms, farthest, near)
    head = [farthest, *(farthest + (far - farthest) * _sigmoid(10 * (2 * j - 6) / 6) for j in range(1, 7)), far]
    logs = [_between(math.log(1 - far), math.log(1 - near), j - 8, arms - 9) for j in range(8, arms)]
    return head + [1 - math.exp(value) for value in logs]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _between(first: float, last: float, step: int, steps: int) -> float:
    return first if steps == 0 else ((steps - step) * first + step * last) / steps
