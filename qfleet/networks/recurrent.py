"""Recurrent core: an LSTM over sequences that may include padding before and after their episode.

Shapes: B items, T rows, F features, H units.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F

# An agent's parameters are views of one vector, so the LSTM's are not one chunk: cuDNN copies them on every call.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")

LSTMState = tuple[torch.Tensor, torch.Tensor]
"""Hidden and cell state, [B, H] each; zeros at the start of an episode."""


class LSTMCore(nn.Module):
    """(features [B, T, F], real [B, T], state) -> (outputs [B, T, H], state after the last row).

    The bias is the weight of a constant input 1. In rows that are not real all inputs are 0, including that one: the
    candidate is tanh(0) = 0, and a zero state stays exactly zero. So padding before an episode needs neither a loop
    over rows nor packed sequences.
    """

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features + 1, units, bias=False, batch_first=True)
        with torch.no_grad():  # gate order: input, forget, cell, output
            self.lstm.get_parameter("weight_ih_l0")[units:2 * units, -1] = 1.0  # forget-gate bias 1 (Gers et al. 2000)

    def forward(self, x: torch.Tensor, real: torch.Tensor, state: LSTMState) -> tuple[torch.Tensor, LSTMState]:
        inputs = F.pad(x, (0, 1), value=1.0) * real.unsqueeze(2)
        out, (h, c) = self.lstm(inputs, (state[0][None].to(x.dtype), state[1][None].to(x.dtype)))
        return out, (h[0], c[0])
