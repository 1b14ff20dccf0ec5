"""Precision and device of networks, and networks with reproducible initial weights."""

from __future__ import annotations

import torch

from qfleet.core.agent import Agent

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def set_current_device(device: torch.device) -> None:
    """Streams, recordings and kernels of our own belong to the current GPU, whatever the tensors are on."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def seeded_network(agent: Agent, seed: int) -> torch.nn.Module:
    """The agent's network with initial weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return agent.network()
