"""Protocols for the transfer of weights from a learner to actors and evaluators."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Read access to a learner's weights. A version is the number of updates behind the weights."""

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None: ...


class WeightStore(WeightSource, Protocol):
    """Publishes a learner's weights to its readers."""

    @property
    def has_reader(self) -> bool:
        """False if no reader would fetch newer weights, so that no copy needs to be made."""

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None: ...
