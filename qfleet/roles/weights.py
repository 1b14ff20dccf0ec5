"""The mailbox between a learner and those who act, inside one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Mailbox:
    """Keeps the newest weights only; a reader says which version it has and gets a newer one or nothing."""

    def __init__(self) -> None:
        self._version = -1
        self._state: dict[str, torch.Tensor] = {}

    @property
    def wanted(self) -> bool:
        return True

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        self._version, self._state = version, state

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        return (self._version, self._state) if self._version > newer_than else None

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version, "state": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._version, self._state = state["version"], dict(state["state"])
