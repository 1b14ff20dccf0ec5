"""Builds the replay store that a config names."""

from __future__ import annotations

from typing import Any

import torch

from qfleet.config import load_attribute
from qfleet.core.clock import RunClock
from qfleet.core.errors import UserError
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device_store import DeviceReplay
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.replay.store import ReplayStore


def make_store(layout: Layout, cfg: ReplayConfig, seed: int, device: torch.device, threads: int,
               clock: RunClock) -> ReplayStore[Any]:
    """The store of `cfg.store`, whose auto value is resolved. A user's store takes these arguments, too."""
    if cfg.store == "device":
        return DeviceReplay(layout, cfg, seed, device, clock)
    if ":" not in cfg.store:
        return HostReplay(layout, cfg, seed, device, threads, clock)
    store = load_attribute(cfg.store)(layout, cfg, seed, device, threads, clock)
    if not isinstance(store, ReplayStore):
        raise UserError(f"replay.store={cfg.store}: it made a {type(store).__name__}, which is not a subclass of "
                        "qfleet.replay.store.ReplayStore")
    return store
