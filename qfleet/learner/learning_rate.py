"""Schedule of the learning rate: a warm-up, then a function of the progress of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

from qfleet.config import load_attribute
from qfleet.core.errors import UserError
from qfleet.learner.optimizer_config import OptimizerConfig

ScheduleFn = Callable[[float], float]
"""Progress from 0 to 1 -> factor of the learning rate."""


class LearningRate:
    """Learning rate of an optimizer by the number of steps that it has made.

    `warmup_updates` steps rise linearly to the full rate; the schedule's progress is 0 until then, and 1 from step
    `schedule_updates` on.
    """

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg, self.peak = cfg, cfg.learning_rate
        self.is_constant = cfg.schedule == "constant" and cfg.warmup_updates == 0
        if cfg.schedule != "constant" and cfg.schedule_updates is None:
            raise UserError(f"learner.schedule={cfg.schedule} needs the number of updates over which the learning rate "
                            "changes: set learner.schedule_updates")

    def at(self, steps: int) -> float:
        """Learning rate of the step after `steps` steps."""
        if self.is_constant:
            return self.peak
        return self.peak * min(1.0, (steps + 1) / max(1, self.cfg.warmup_updates)) * self.factor(self.progress(steps))

    def progress(self, steps: int) -> float:
        warmup, end = self.cfg.warmup_updates, self.cfg.schedule_updates
        return 0.0 if end is None else min(1.0, max(0.0, (steps - warmup) / max(1, end - warmup)))

    def factor(self, progress: float) -> float:
        """Value of the schedule; UserError if it is not a finite number of at least 0."""
        found = self._function(progress)
        if not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise UserError(f"learner.schedule={self.cfg.schedule}: returned {found} at progress {progress:g}; it must "
                            "return a factor of the learning rate, a number of at least 0")
        return float(found)

    @cached_property
    def _function(self) -> ScheduleFn:
        final = self.cfg.final_rate_fraction
        match self.cfg.schedule:
            case "constant":
                return lambda progress: 1.0
            case "linear":
                return lambda progress: 1 - (1 - final) * progress
            case "cosine":
                return lambda progress: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
        function: ScheduleFn = load_attribute(self.cfg.schedule)
        if not callable(function):
            raise UserError(f"learner.schedule={self.cfg.schedule}: must be a function of the progress from 0 to 1")
        return function
