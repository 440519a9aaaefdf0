"""`torch_neuronx.xla_impl.hint`: hints to the Neuron runtime, without effect."""

from __future__ import annotations

import torch


class TransferWithStaticRing:
    """`hint.TransferWithStaticRing`: how a weight is to reach its core. `apply` gives the tensor back, with its gradient."""

    @staticmethod
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        return tensor
