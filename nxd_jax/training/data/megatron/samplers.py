"""Which samples a data-parallel rank reads (`nemo...megatron_batch_samplers`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class MegatronBatchSampler(Sampler[list[int]]):
    """Lists of numbers of samples: those of one rank in each global batch, from sample `consumed_samples` on.

    drop_last: leave out what fills no global batch at the end. pad_samples_to_global_batch_size: fill the last one with the number -1, if it is not left out.

    Raises ValueError for a batch that the ranks cannot share, and for fewer samples than a batch has. (The original raises RuntimeError.)
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: Any,
        data_parallel_size: int,
        drop_last: bool = True,
        pad_samples_to_global_batch_size: bool = False,
    ):
        unit = micro_batch_size * data_parallel_size
        if unit < 1 or global_batch_size % unit or global_batch_size < 1:
            raise ValueError(
                f"data.global_batch_size={global_batch_size} must be a multiple of data.micro_batch_size={micro_batch_size} times {data_parallel_size} "
                "data-parallel ranks"
            )
        if bool(data_parallel_rank >= data_parallel_size):
            raise ValueError(f"rank {data_parallel_rank} is none of {data_parallel_size} data-parallel ranks")
        if total_samples < (global_batch_size if drop_last else 1):
            raise ValueError(f"there are {total_samples} samples, and a step needs data.global_batch_size={global_batch_size}")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.drop_last = drop_last
        self.pad_samples_to_global_batch_size = pad_samples_to_global_batch_size

    def __len__(self) -> int:
        """Batches of a whole pass."""
        batches = self.total_samples // self.global_batch_size
        return batches if self.drop_last else -(-self.total_samples // self.global_batch_size)


class MegatronPretrainingBatchSampler(MegatronBatchSampler):
    """`dataloader_type: single`: in order; rank r takes every data_parallel_size-th of a global batch, from the r-th on.

    Without drop_last the set must fill its batches, or be padded: ValueError. (The original stops there in the model.)
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if not self.drop_last and not self.pad_samples_to_global_batch_size and self.total_samples % self.global_batch_size:
            raise ValueError(
                f"data.validation_drop_last: False leaves a batch of {self.total_samples % self.global_batch_size} samples at the end of {self.total_samples}, "
                f"and a step needs data.global_batch_size={self.global_batch_size}: set data.pad_samples_to_global_batch_size: True"
            )

    def __iter__(self) -> Iterator[list[int]]:
        size, step, rank = self.global_batch_size, self.data_parallel_size, self.data_parallel_rank
        if self.total_samples - self.consumed_samples < (size if self.drop_last else 1):
            raise ValueError(
                f"{self.consumed_samples} of {self.total_samples} samples were trained on, and the next step needs {size}: trainer.max_steps times "
                "data.global_batch_size must be more than that"
            )
        for begin in range(self.consumed_samples, self.total_samples, size):
            end = begin + size
            if end > self.total_samples and self.drop_last:
                return
            yield [k if k < self.total_samples else -1 for k in range(begin + rank, end, step)]


class MegatronPretrainingRandomBatchSampler(MegatronBatchSampler):
    """`dataloader_type: cyclic`: each rank has a part of the set of its own, shuffled anew in each epoch (torch's randperm with the seed `seed` + epoch).

    What a rank reads depends on how many there are. Raises ValueError without drop_last (but for batches of one sample), with padding, and for a place within
    an epoch where no micro-batch of these sizes begins.
    """

    def __init__(self, *args: Any, seed: int = 0, **options: Any):
        super().__init__(*args, **options)
        if (not self.drop_last and self.global_batch_size > 1) or self.pad_samples_to_global_batch_size:
            key = "data.pad_samples_to_global_batch_size: True" if self.pad_samples_to_global_batch_size else "data.drop_last: False"
            raise ValueError(f"{key} is not for data.dataloader_type: cyclic; use single")
        self.seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        unit = self.micro_batch_size * self.data_parallel_size
        epoch, within = divmod(self.consumed_samples, len(self) * self.global_batch_size)
        if within % unit:
            raise ValueError(
                f"{self.consumed_samples} samples were trained on, {within} of them in this epoch, where no micro-batch begins: with data.dataloader_type: "
                f"cyclic they must be a multiple of data.micro_batch_size={self.micro_batch_size} times {self.data_parallel_size} data-parallel ranks"
            )
        part = self.total_samples // unit * self.micro_batch_size
        own = self.global_batch_size // self.data_parallel_size
        order = torch.randperm(part, generator=torch.Generator().manual_seed(self.seed + epoch))[within // self.data_parallel_size :]
        numbers = [self.data_parallel_rank * part + k for k in order.tolist()]
        for begin in range(0, len(numbers) - own + 1, own):
            yield numbers[begin : begin + own]
