"""`torch_xla.distributed.parallel_loader`, known as `pl`: loaders that move batches to the device ahead of time and end steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from torch_bridge.recorder import prefetch
from torch_bridge.runtime import steps
from torch_bridge.torch_xla.debug import profiler
from torch_bridge.torch_xla.distributed import input_sharding as sharded_inputs


class PerDeviceLoader(Iterator[Any]):
    """`pl.PerDeviceLoader`: one pass over a loader.

    The step ends before the first batch, after every `batches_per_execution` batches and after the last.
    """

    def __init__(self, loader: ParallelLoader, device: torch.device):
        self._loader = loader
        self._device = device
        self._batches_yielded = 0
        self._prefetcher = loader._prefetcher(device)

    def __next__(self) -> Any:
        return self.next()

    def __len__(self) -> int:
        return self._loader.per_device_samples()

    def next(self) -> Any:
        """The next batch, on the device."""
        due = self._batches_yielded % self._loader.batches_per_execution == 0
        if profiler.get_tracer_marked_step():
            profiler.set_tracer_marked_step(False)
        elif due:
            steps.mark()
        try:
            batch = next(self._prefetcher)
        except StopIteration:
            if not due:
                steps.mark()
            raise
        self._batches_yielded += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()


class ParallelLoader:
    """`pl.ParallelLoader`: a loader whose batches go to `devices` (one per process) ahead of time.

    batches_per_execution: batches per step. loader_prefetch_size, device_prefetch_size: batches read ahead on the host, and moved ahead.
    host_to_device_transfer_threads: threads that move; the order of batches is kept. batchdim is accepted and not used. Loaders of accelerate, which say
    whether a batch is the last, are read batch by batch.
    input_sharding: with `xr.use_spmd`, an `xs.ShardingSpec` for the tensors of a batch that have as many dims, or a dict of them by key of the batch.
    """

    def __init__(
        self,
        cpu_loader: Iterable[Any],
        devices: Sequence[Any],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ):
        if len(devices) != 1:
            raise ValueError(f"a process has one xla device, so a loader feeds one; got {list(devices)}")
        if type(batches_per_execution) is not int or batches_per_execution < 1:
            raise ValueError(f"batches_per_execution must be a positive number, got {batches_per_execution!r}")
        self._cpu_loader = cpu_loader
        self._devices = [torch.device(d) for d in devices]
        self._batches_per_execution = batches_per_execution
        self._input_sharding = sharded_inputs.checked(input_sharding)
        self._sizes = (loader_prefetch_size, device_prefetch_size, host_to_device_transfer_threads)
        self._open: weakref.WeakSet[prefetch.Prefetcher] = weakref.WeakSet()
        prefetch.check_sizes(*self._sizes)

    @property
    def batches_per_execution(self) -> int:
        return self._batches_per_execution

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        """One pass over the batches for a device."""
        return PerDeviceLoader(self, torch.device(device))

    def per_device_samples(self) -> int:
        """Batches in a pass."""
        return len(self._cpu_loader)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop the threads of every pass."""
        for prefetcher in list(self._open):
            prefetcher.close()

    def _prefetcher(self, device: torch.device) -> prefetch.Prefetcher | prefetch.InStep:
        def move(batch: Any) -> Any:
            return sharded_inputs.move(batch, device, self._input_sharding)

        if prefetch.tells_where_it_is(self._cpu_loader):
            return prefetch.InStep(self._cpu_loader, move)
        prefetcher = prefetch.Prefetcher(self._cpu_loader, move, *self._sizes)
        self._open.add(prefetcher)
        return prefetcher


class MpDeviceLoader:
    """`pl.MpDeviceLoader`: iterate over `loader` with batches on `device`, ending a step for each. `kwargs` as for `ParallelLoader`.

    Attributes not found here (`dataset`, `batch_sampler`, `set_epoch`, ...) are the loader's; they can be set here without changing it.
    """

    def __init__(self, loader: Any, device: Any, **kwargs: Any):
        self._loader = loader
        self._device = torch.device(device)
        self._parallel_loader_kwargs = kwargs
        ParallelLoader(loader, [self._device], **kwargs)

    def __iter__(self) -> PerDeviceLoader:
        return ParallelLoader(self._loader, [self._device], **self._parallel_loader_kwargs).per_device_loader(self._device)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)
