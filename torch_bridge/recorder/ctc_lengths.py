"""`ctc_loss` of xla tensors takes lengths on the CPU, as torch's does on any device: they are put beside the rest."""

from __future__ import annotations

import torch

from torch_bridge.recorder.dispatch import composite

aten = torch.ops.aten


def _beside(log_probs: torch.Tensor, targets: torch.Tensor, *lengths_and_rest: object) -> torch.Tensor:
    rest = [x.to(log_probs.device) if isinstance(x, torch.Tensor) else x for x in lengths_and_rest]
    return aten.ctc_loss.Tensor.decompose(log_probs, targets, *rest)


composite(aten.ctc_loss.Tensor, _beside)
