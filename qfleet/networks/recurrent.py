"""A core with a memory: an LSTM over sequences that may begin before their episode and end after it.

Shapes: B items, T rows, F features, H units.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F

# All parameters of an agent are one vector, in which cuDNN does not find the LSTM's alone: it copies them, every time.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")

LSTMState = tuple[torch.Tensor, torch.Tensor]
"""Hidden and cell state, [B, H] each. A lane that remembers nothing has zeros."""


class LSTMCore(nn.Module):
    """(features [B, T, F], real [B, T], state) -> (outputs [B, T, H], state after the last row).

    The bias is the weight of an input that is 1. Where a row is not real all inputs are 0, that one included: then the
    candidate is tanh(0) = 0, and a state of zeros stays zeros, exactly. So padding before an episode needs neither a
    loop over rows nor packed sequences.
    """

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features + 1, units, bias=False, batch_first=True)
        with torch.no_grad():  # gates lie in the order input, forget, cell, output
            self.lstm.get_parameter("weight_ih_l0")[units:2 * units, -1] = 1.0  # forget slowly (Gers et al. 2000)

    def forward(self, x: torch.Tensor, real: torch.Tensor, state: LSTMState) -> tuple[torch.Tensor, LSTMState]:
        inputs = F.pad(x, (0, 1), value=1.0) * real.unsqueeze(2)
        out, (h, c) = self.lstm(inputs, (state[0][None].to(x.dtype), state[1][None].to(x.dtype)))
        return out, (h[0], c[0])
