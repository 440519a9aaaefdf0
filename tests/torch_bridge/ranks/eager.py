"""What every rank would compute alone, in eager torch: the reference for programs that run once for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

Values = torch.Tensor | Sequence[torch.Tensor]
"""A tensor that all ranks share, or one for each rank."""


def on_xla(value: Values) -> torch.Tensor:
    """The value as an xla tensor, each rank's own if there are several."""
    if isinstance(value, torch.Tensor):
        return value.clone().to("xla")
    return sharded.from_ranks(lambda r: value[r].clone())


def of_rank(value: Values, rank: int) -> torch.Tensor:
    """A fresh copy of what a rank holds."""
    return (value if isinstance(value, torch.Tensor) else value[rank]).clone()


def each(make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """A value for each rank of the world."""
    return [make(r) for r in range(world.size())]


def same(actual: torch.Tensor, expected: Values, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Every rank holds what is expected of it: value, shape and dtype."""
    found = sharded.shards(actual.detach())
    assert len(found) == world.size()
    for rank, got in enumerate(found):
        torch.testing.assert_close(
            got, of_rank(expected, rank), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, rank=rank: f"rank {rank}: {m}"
        )


def agree(fn: Callable[..., Any], *inputs: Values, rtol: float = 1e-5, atol: float = 1e-6) -> Any:
    """`fn(rank, *tensors)` run once on xla gives each rank the values and gradients that eager torch gives it alone. Returns the xla result."""
    return _compare(fn, inputs, *_recorded(fn, inputs), rtol, atol)


def agree_all(programs: dict[str, Callable[..., Any]], *inputs: Values, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """`agree` for many programs, all recorded before anything runs: they compile together."""
    recorded = {}
    failed = []
    for name, fn in programs.items():
        try:
            recorded[name] = _recorded(fn, inputs)
        except Exception as error:
            failed.append(f"{name}: {error!r}")
    for name, found in recorded.items():
        try:
            _compare(programs[name], inputs, *found, rtol, atol)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)


def _recorded(fn: Callable[..., Any], inputs: Sequence[Values]) -> tuple[list[torch.Tensor], Any]:
    """The program on xla: its inputs and its result, after a backward pass."""
    ours = [_leaf(on_xla(v)) for v in inputs]
    out = fn(world.rank(), *ours)
    _backward(out)
    return ours, out


def _compare(fn: Callable[..., Any], inputs: Sequence[Values], ours: list[torch.Tensor], out: Any, rtol: float, atol: float) -> Any:
    expected: list[Any] = []
    for rank in range(world.size()):
        alone = [_leaf(of_rank(v, rank)) for v in inputs]
        made = fn(rank, *alone)
        _backward(made)
        expected.append((_tensors(made), [t.grad for t in alone]))
    results = _tensors(out)
    for k, t in enumerate(results):
        same(t, [e[0][k].detach() for e in expected], rtol, atol)
    for k, t in enumerate(ours):
        if expected[0][1][k] is not None:
            assert t.grad is not None, f"input {k} got no gradient"
            same(t.grad, [e[1][k] for e in expected], rtol, atol)
    return out


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.requires_grad_(t.is_floating_point())


def _tensors(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _backward(out: Any) -> None:
    """Gradients with a different weight for every element."""
    losses = []
    for t in _tensors(out):
        if t.requires_grad:
            weights = torch.linspace(0.5, 2.0, t.numel()).reshape(t.shape).to(t.device, t.dtype)
            losses.append((t * weights).sum())
    if losses:
        sum(losses[1:], losses[0]).backward()
