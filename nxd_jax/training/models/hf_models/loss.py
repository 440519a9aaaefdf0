"""The loss of next tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.cross_entropy import parallel_cross_entropy
from nxd_jax.utils.batch_utils import IGNORED
from torch_bridge.collectives import functional


class CausalLMLoss(nn.Module):
    """Mean cross-entropy over the labels that count: logits [batch, length, vocabulary / tp], labels [batch, length].

    Labels of -100 do not count (upstream: they do, as padding of the vocabulary's first entry); without a label that counts the loss is 0. Labels stand at
    their tokens and are shifted here, unless ranks hold parts of the sequence (context parallelism), whose labels are shifted before they are cut. There the
    loss is cp times this rank's share, so that the mean over the ranks is the mean over the whole sequence's labels.
    """

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        cp = parallel_groups.size("cp")
        if cp == 1:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        losses = parallel_cross_entropy(logits, labels, ignore_index=IGNORED)
        count = (labels != IGNORED).sum().to(losses.dtype)
        if cp > 1:
            count = functional.all_reduce("sum", count, groups=parallel_groups.group("cp"))
        return losses.sum() * cp / count.clamp(min=1)
