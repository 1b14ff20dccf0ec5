"""Config section `replay`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qfleet.config import Config, Count, Fraction, NonNegative, PluginName, Positive, PositiveCount
from qfleet.core.replay import Window


class ReplayConfig(Config):
    """The replay section: capacity, memory, replay ratio and prioritisation."""

    capacity: PositiveCount = Field(
        100_000, description="capacity, environment steps; the oldest are dropped. sync=allreduce divides it "
                             "among the learners")
    store: Annotated[str, PluginName(None, ("auto", "host", "device"))] = Field(
        "auto", description="host (compressed in main memory), device (raw on the learner's device) or auto (device "
                            "on a GPU with enough free memory, else host); or your own, as module:attribute")
    max_bytes: PositiveCount | None = Field(
        None, description="memory limit of the replay, bytes; null = planned from the free memory")
    min_steps: Count = Field(1_000, description="environment steps before the first update")
    samples_per_insert: Positive = Field(
        8.0, description="replay ratio: items sampled per environment step. Updates per step = this / "
                         "learner.batch_size")
    chunk_steps: PositiveCount = Field(
        64, description="environment steps of a lane that are stored together; smaller chunks can be sampled sooner, "
                        "with more overhead")
    alpha: NonNegative = Field(0.0, description="priority exponent α; 0 = uniform sampling")
    beta_start: Fraction = Field(0.4, description="importance-sampling exponent β at the first step")
    beta_end: Fraction = Field(1.0, description="importance-sampling exponent β after beta_steps")
    beta_steps: PositiveCount = Field(
        1_000_000, description="environment steps over which β changes linearly from beta_start to beta_end")

    def inactive(self) -> dict[str, str]:
        if self.alpha > 0:
            return {}
        reason = "replay.alpha=0 samples uniformly, which needs no importance weights"
        return {"beta_start": reason, "beta_end": reason, "beta_steps": reason}

    def problems(self, batch_size: int, window: Window, lanes: int) -> list[str]:
        """Contradictions within the section or with the rest of the run; each message names value, limit and remedy."""
        found = []
        if batch_size > self.capacity:
            found.append(f"learner.batch_size={batch_size} exceeds replay.capacity={self.capacity}: "
                         "raise the capacity or lower the batch size")
        if self.min_steps > self.capacity:
            found.append(f"replay.min_steps={self.min_steps} exceeds replay.capacity={self.capacity}: "
                         "raise the capacity or lower min_steps")
        if window.future > self.chunk_steps:
            found.append(f"a look-ahead of {window.future} steps (agent.n_step) is longer than replay.chunk_steps="
                         f"{self.chunk_steps}: lower agent.n_step or raise replay.chunk_steps")
        if self.chunk_steps % window.stride:
            nearest = (self.chunk_steps // window.stride + 1) * window.stride
            found.append(f"replay.chunk_steps={self.chunk_steps} is not a multiple of {window.stride}, the distance "
                         f"between window starts: set it to {nearest}")
        if self.capacity < self.chunk_steps * lanes:
            found.append(f"replay.capacity={self.capacity} is below one chunk per lane, {lanes} lanes x "
                         f"replay.chunk_steps={self.chunk_steps}: raise the capacity or lower chunk_steps or env.lanes")
        return found
