"""Whether a device has computed values that the host has queued."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def completion_event(values: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
    """An event that is complete once a GPU has computed these values; None if they are in main memory."""
    if all(value.device.type == "cpu" for value in values):
        return None
    done = torch.cuda.Event()
    done.record()
    return done
