"""Batches as micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def cut(given: Mapping[str, Any], names: Sequence[str], read: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The micro-batches of a batch: equal parts along dim 0 of each input.

    given: what run_train was called with. names: the inputs that the model takes. read: those that its stages look at; the others are not touched. An input
    may be a list or tuple of tensors. Raises RuntimeError for other names and for a size that does not divide, ValueError for what is no tensor,
    AssertionError for sizes that differ.
    """
    if set(given) != set(names):
        raise RuntimeError(
            f"the model takes {', '.join(names)} by keyword, got {', '.join(given) or 'nothing'}: input_names says what run_train takes"
        )
    sizes: dict[str, int] = {}
    for name in read:
        found = _tensors(name, given[name])
        for k, t in enumerate(found):
            sizes[f"{name}[{k}]" if len(found) > 1 else name] = t.shape[0]
            if len(set(sizes.values())) > 1:
                raise AssertionError(f"inputs must have one batch size (dim 0), got {', '.join(f'{n}: {s}' for n, s in sizes.items())}")
    size = next(iter(sizes.values()), 0)
    if sizes and not size:
        raise RuntimeError(
            "the batch has no rows (dim 0 is 0), and a step needs some: leave out empty batches (drop_last=True in the loader)"
        )
    if size % count:
        raise RuntimeError(
            f"a batch of {size} cannot be cut into num_microbatches={count} equal parts: use a batch size that divides by {count}"
        )
    part = size // count
    return [{name: _part(given[name], k * part, part) if name in read else given[name] for name in names} for k in range(count)]


def _tensors(name: str, value: Any) -> list[torch.Tensor]:
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    for t in found:
        if not isinstance(t, torch.Tensor) or not t.dim():
            said = "a tensor without dims" if isinstance(t, torch.Tensor) else type(t).__name__
            raise ValueError(f"the input {name} must be a torch tensor with the batch along dim 0, got {said}")
        if t.device.type not in ("cpu", "xla"):
            raise ValueError(
                f"the input {name} is on {t.device}: give run_train tensors on the CPU (or on xla), each stage uploads those that it reads"
            )
    return found


def _part(value: Any, start: int, length: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_part(t, start, length) for t in value]
    part = value.narrow(0, start, length)
    return part.clone() if part.device.type == "xla" else part  # as a view, where it starts would be part of each stage's program
