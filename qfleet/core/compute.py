"""Precision and device of networks, and seeded network construction."""

from __future__ import annotations

import torch

from qfleet.core.agent import Agent

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def set_current_device(device: torch.device) -> None:
    """Make `device` the current GPU: streams, CUDA graphs and custom kernels use the current GPU,
    not that of their tensors.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def seeded_network(agent: Agent, seed: int) -> torch.nn.Module:
    """Build the agent's network with initial weights that depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return agent.network()
