"""Protocols of weights that travel from a learner to actors and evaluators."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    """What those who act read of a learner's weights. A version is the number of updates behind it."""

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None: ...


class WeightStore(WeightSource, Protocol):
    """The mailbox between a learner and those who act."""

    @property
    def has_reader(self) -> bool:
        """Whether somebody would read newer weights: a copy that nobody takes need not be made."""

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None: ...
