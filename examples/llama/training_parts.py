"""What the training scripts of examples/llama and examples/moe have in common: the text, the learning rate, and the loss over the whole batch."""

from __future__ import annotations

import math

import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
"""Schedules with one stage on each pipeline rank; others have two."""


def load_text(seq: int) -> torch.Tensor:
    """Python's documentation topics as bytes, [rows, seq]."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n\n".join(topics[name].strip() for name in sorted(topics)).encode()))
    return text[: len(text) // seq * seq].view(-1, seq)


def make_loader(seq: int, batch: int, seed: int) -> DataLoader:
    """Every data-parallel rank reads its own rows; tensor- and context-parallel ranks read the same."""
    rows = TensorDataset(load_text(seq))
    sampler = DistributedSampler(
        rows,
        num_replicas=parallel_state.get_data_parallel_size(),
        rank=parallel_state.get_data_parallel_rank(),
        shuffle=True,
        seed=seed,
        drop_last=True,
    )
    return DataLoader(rows, batch_size=batch, sampler=sampler, drop_last=True)


def warmup_cosine(step: int, steps: int) -> float:
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def global_mean(loss: torch.Tensor) -> torch.Tensor:
    """The loss over the whole batch."""
    groups = parallel_state.get_data_parallel_group(as_list=True)
    loss = xm.all_reduce("sum", loss, 1.0 / parallel_state.get_data_parallel_size(), groups=groups)
    if parallel_state.get_context_model_parallel_size() > 1:
        groups = parallel_state.get_context_model_parallel_group(as_list=True)
        loss = xm.all_reduce("sum", loss, 1.0 / parallel_state.get_context_model_parallel_size(), groups=groups)
    return loss
