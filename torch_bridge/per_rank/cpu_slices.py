"""`x[rank * n : (rank + 1) * n]` of a CPU tensor: each rank's own part, as a tensor that differs by rank.

Indexing a plain tensor is C++ from Python's bytecode on, and a `Tensor.__getitem__` in Python would make every tensor a sequence to C code. So the CPU's own
kernel of `aten::slice` is put aside in processes that have such numbers: 3 us a slice.
"""

from __future__ import annotations

import functools

import torch

from torch_bridge.mesh import rank_numbers
from torch_bridge.per_rank import rank_functions

_slice = torch.ops.aten.slice.Tensor
_PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)
"""A backend that nobody has: its kernel is torch's own for all, which the CPU's was."""


@functools.cache
def install() -> torch.library.Library:
    """Let slices of CPU tensors take numbers that differ by rank. The library holds the kernel for as long as it lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("slice.Tensor", _on_cpu, "CPU")
    return library


def _on_cpu(x: torch.Tensor, dim: int = 0, start: object = None, end: object = None, step: object = 1) -> torch.Tensor:
    if type(start) is type(end) is int or not (
        rank_numbers.is_ranked(start) or rank_numbers.is_ranked(end) or rank_numbers.is_ranked(step)
    ):
        return _plain(x, dim, start, end, step)
    if torch.is_inference_mode_enabled() and not x.is_inference():  # a view of a tensor from outside is none of that mode's either
        with torch.inference_mode(False), torch.no_grad():
            return _each(x, dim, start, end, step)
    return _each(x, dim, start, end, step)


def _each(x: torch.Tensor, dim: int, start: object, end: object, step: object) -> torch.Tensor:
    found: torch.Tensor = rank_functions.compute(_plain, (x, dim, start, end, step), {})
    return found


def _plain(x: torch.Tensor, dim: int, start: object, end: object, step: object) -> torch.Tensor:
    found: torch.Tensor = _slice.redispatch(_PLAIN, x, dim, start, end, step)
    return found
