"""`torch_xla.experimental.gru`: torch's own GRU, whose steps are one loop of the compiled program here in any case."""

from __future__ import annotations

import torch


class GRU(torch.nn.GRU):
    """`torch_xla.experimental.gru.GRU`: `torch.nn.GRU`, with its weights and arguments. Both directions work, too."""
