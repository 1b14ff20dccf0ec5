"""What can be read of a run, by callbacks and by the program that steps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from qfleet.replay.view import ReplayView
from qfleet.training.latest_metrics import LatestMetrics

if TYPE_CHECKING:
    from qfleet.training.learner_core import LearnerCore


class RunView(ABC):
    """Progress, metrics, replay and network of a run. Reading them does not affect the training."""

    @property
    @abstractmethod
    def _core(self) -> LearnerCore: ...

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._core.progress().steps

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._core.progress().updates

    @property
    def episodes(self) -> int:
        """Finished training episodes."""
        return self._core.meter.episodes

    @property
    def best(self) -> float | None:
        """Mean return of the best evaluation during the training; None before the first."""
        return self._core.best

    @property
    def replay(self) -> ReplayView:
        """Replay buffer; `replay.sample(8)` does not affect the training."""
        return ReplayView(self._core.replay)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Latest value of every metric, by tag. Records are written every `run.log_period_steps` steps."""
        return LatestMetrics(self._core.meter.latest, self._core.plan.log_period_steps)

    @property
    def network(self) -> nn.Module:
        """The learner's network. It is being trained: copy its weights to keep them."""
        return self._core.learner.flat.net
