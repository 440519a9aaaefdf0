"""`torch_neuronx.contexts`: blocks that say what the Neuron runtime is to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def disable_nrt_load() -> Iterator[None]:
    """`contexts.disable_nrt_load`: models that `torch.jit.load` reads in the block are not put on a device. Here none is before its first call."""
    yield


@contextlib.contextmanager
def lazy_load(enable_lazy_load: bool = True) -> Iterator[None]:
    """`contexts.lazy_load`: models that are read in the block go to their device with their first call, as all do here."""
    yield
