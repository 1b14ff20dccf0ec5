"""What varies per lane and per episode while acting.

A file here is a kind of exploration: `Config` and `build(cfg, lanes, first, total)`.

An explorer answers `arms(steps) -> Arm` for its lanes; `first` and `total` place them among all lanes of the run.
"""

from __future__ import annotations

from typing import Protocol

from qfleet.agent import Arm


class Explorer(Protocol):
    def arms(self, steps: int) -> Arm: ...
