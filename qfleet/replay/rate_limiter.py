"""Rate limiter of a replay, after Reverb's SampleToInsertRatio: arithmetic on two counters, without locks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qfleet.core.clock import RunClock


class RateLimiter:
    """Keeps the number of samples close to `samples_per_insert` times the local steps of the clock.

    Counting begins at `min_steps`, or when a window can first be sampled if that is later, so that no burst follows the
    warm-up. Sampling is refused when the budget is used up; inserting is refused while more than `error_buffer` samples
    of the budget are unused (None = never). An error buffer of 0 is lock-step.
    """

    def __init__(self, samples_per_insert: float, min_steps: int, error_buffer: float | None = None,
                 clock: RunClock | None = None) -> None:
        self.clock = RunClock() if clock is None else clock
        self.samples_per_insert = samples_per_insert
        self.min_steps = min_steps
        self.error_buffer = error_buffer
        self.samples = 0
        self._origin: tuple[int, int] | None = None

    @property
    def steps(self) -> int:
        """Local environment steps, counted when they are taken, not when their chunk is inserted."""
        return self.clock.local_steps

    def limit_inserts(self, error_buffer: float) -> None:
        """Refuse inserts while more than this many samples of the budget are unused."""
        self.error_buffer = error_buffer

    def end_warmup_at(self, steps: int) -> None:
        """Set the steps before the first sample."""
        self.min_steps = steps

    def restart_at(self, steps: int) -> None:
        """Resume the step clock with an empty store: sampling starts after another `min_steps` steps."""
        self.clock.set_local_steps(steps)
        self.min_steps += steps

    def resume_share(self, steps: int, samples: int, counting: bool) -> None:
        """Resume with part of the counts of a run with another number of learners; the budget starts from here."""
        self.clock.set_local_steps(steps)
        self.samples = samples
        self._origin = (max(steps, self.min_steps), samples) if counting else None

    def start_counting(self) -> None:
        """Start the budget after the warm-up, once a window can be sampled. Later calls have no effect."""
        if self._origin is None:
            self._origin = (max(self.steps, self.min_steps), 0)

    def count_samples(self, n: int) -> None:
        self.samples += n

    @property
    def budget(self) -> float:
        """Total number of samples allowed so far."""
        if self._origin is None:
            return 0.0
        steps, samples = self._origin
        return samples + max(0, self.steps - steps) * self.samples_per_insert

    @property
    def ratio(self) -> float:
        """Samples per step since counting began."""
        if self._origin is None or self.steps <= self._origin[0]:
            return 0.0
        return (self.samples - self._origin[1]) / (self.steps - self._origin[0])

    def may_sample(self, n: int) -> bool:
        return self._origin is not None and self.steps >= self._origin[0] and self.samples + n <= self.budget

    def batches_allowed(self, n: int) -> int:
        """Number of batches of n samples allowed before the next step."""
        ready = self._origin is not None and self.steps >= self._origin[0]
        count, budget = 0, self.budget
        while ready and self.samples + (count + 1) * n <= budget:
            count += 1
        return count

    def may_insert(self) -> bool:
        return self.error_buffer is None or self.budget - self.samples <= self.error_buffer

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "samples": self.samples, "origin": list(self._origin) if self._origin else None,
                "samples_per_insert": self.samples_per_insert}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clock.set_local_steps(int(state["steps"]))
        self.samples = int(state["samples"])
        origin = state["origin"]
        self._origin = None if origin is None else (int(origin[0]), int(origin[1]))
        if self._origin is not None and state["samples_per_insert"] != self.samples_per_insert:
            # A ratio changed on resume applies to later steps only: applied to the past it would stall or burst.
            self._origin = (max(self.steps, self._origin[0]), self.samples)
