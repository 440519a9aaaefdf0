"""What `rank_numbers` asks of the floors above it (`rank_numbers.Hooks`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch_bridge.per_rank import rank_torch_draws
from torch_bridge.recorder import rank_array, rank_random
from torch_bridge.script import rank_branches, rank_environment, rank_file_names, rank_indexing, rank_memory_reads

apply_ufunc, array_function = rank_array.apply_ufunc, rank_array.on_each
text_asked = rank_file_names.note
bytes_asked = rank_branches.note_bytes
became_plain = rank_branches.note
taken_as_index = rank_indexing.note
float_read = rank_memory_reads.note
seed, get_state, set_state = rank_random.seed, rank_random.get_state, rank_random.set_state


def prepare() -> None:
    """Put in place what loaders, libraries of the host and torch's functions do with such numbers."""
    from torch_bridge.per_rank import (
        cpu_slices,
        imported_names,
        rank_clipping,
        rank_functions,
        rank_host_libraries,
        rank_host_metrics,
        rank_loaders,
        rank_math,
        rank_tensor_pieces,
        rank_writes,
        torchmetrics_checks,
        typed_tensors,
    )

    with imported_names.bound_anew():
        rank_loaders.install()
        rank_math.install()
        rank_tensor_pieces.install()
        rank_functions.install()
        typed_tensors.install()
        cpu_slices.install()
        rank_writes.install()
        rank_clipping.install()
        rank_torch_draws.install()
        rank_host_libraries.install()
        rank_host_metrics.install()
        torchmetrics_checks.install()
    rank_environment.note()


def torch_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], original: Callable[..., Any] | None = None
) -> Any:
    """A torch function of one."""
    from torch_bridge.per_rank import rank_ops

    return rank_ops.call(func, args, kwargs, original)


def tensor_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of a CPU tensor that differs by rank."""
    from torch_bridge.per_rank import rank_writes

    return rank_writes.call(func, args, kwargs)


def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An aten op on xla tensors with one among its arguments."""
    from torch_bridge.per_rank import rank_ops

    return rank_ops.record(func, args, kwargs)


def filled_like(base: Any, size: Sequence[int], value: Any, dtype: Any) -> Any:
    """A tensor on xla full of each rank's own number."""
    from torch_bridge.per_rank import rank_ops

    return rank_ops.filled_like(base, size, value, dtype)
