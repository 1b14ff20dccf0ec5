"""Policy families of NGU and Agent57: arm j weighs intrinsic rewards by β_j and discounts by γ_j."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class MixtureTable:
    """One value per arm. Copies on other devices are made at first use: a CUDA graph cannot capture them."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = torch.tensor(values)
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def at(self, arm: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Values of the arms, with the device and dtype of `like`."""
        key = like.device, like.dtype
        if key not in self._copies:
            with torch.inference_mode(False):
                self._copies[key] = self._values.to(like)
        return self._copies[key][arm.long()]


def betas(arms: int, largest: float) -> list[float]:
    """β_0 = 0, β_{N−1} = β, and β σ(10 (2j − (N − 2)) / (N − 2)) between (Badia et al. 2020a)."""
    if arms < 3:
        return [0.0, largest][:arms]
    middle = [largest * _sigmoid(10 * (2 * j - (arms - 2)) / (arms - 2)) for j in range(1, arms - 1)]
    return [0.0, *middle, largest]


def gammas(arms: int, largest: float, smallest: float) -> list[float]:
    """γ_j = 1 − exp(((N − 1 − j) log(1 − γ_max) + j log(1 − γ_min)) / (N − 1)): γ_0 is the largest."""
    return [1 - math.exp(_interpolate(math.log(1 - largest), math.log(1 - smallest), j, arms - 1)) for j in range(arms)]


def agent57_gammas(arms: int, gamma_0: float, gamma_1: float, gamma_2: float) -> list[float]:
    """Discounts of Agent57 (Badia et al. 2020b): γ_0, a sigmoid down to γ_1 at arm 7, then logarithms to γ_2.

    As printed, the formula increases where the text and its figure say that it decreases; this one
    decreases. It needs 10 arms; with fewer, all are spaced logarithmically from γ_0 to γ_2.
    """
    if arms < 10:
        return gammas(arms, gamma_0, gamma_2)
    head = [gamma_0, *(gamma_0 + (gamma_1 - gamma_0) * _sigmoid(10 * (2 * j - 6) / 6) for j in range(1, 7)), gamma_1]
    logs = [_interpolate(math.log(1 - gamma_1), math.log(1 - gamma_2), j - 8, arms - 9) for j in range(8, arms)]
    return head + [1 - math.exp(value) for value in logs]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _interpolate(first: float, last: float, step: int, steps: int) -> float:
    return first if steps == 0 else ((steps - step) * first + step * last) / steps
