"""Writes of what is made from other places of the same tensor: eager torch's values, and in place only where places match."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_xla
from torch import nn

import torch_bridge
from torch_bridge.compiler import overlapping_writes

torch_bridge.register()

X = torch.arange(24).reshape(3, 8)
TABLE = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0))


def _shifted(x: torch.Tensor) -> None:
    x[:, 1:] = x[:, :-1].clone()


def _wrapped(x: torch.Tensor) -> None:
    """As mBART's labels become the ids that its decoder reads."""
    last = x[:, -1].clone()
    x[:, 1:] = x[:, :-1].clone()
    x[:, 0] = last


def _scaled(x: torch.Tensor) -> None:
    x[1:] = x[:-1] * 2 + 1


def _turned(x: torch.Tensor) -> None:
    x[0] = x[0].flip(0)


def _one_row(x: torch.Tensor) -> None:
    x[1, 2:] = x[1, :-2].clone()


def _summed(x: torch.Tensor) -> None:
    x[:, 2] = x.sum(1)


def _later(x: torch.Tensor) -> None:
    """What is written is made from another write."""
    x[:, :4].mul_(2)
    x[:, 1:5] = (x[:, :4] * 3).clamp(max=90)


def _in_place(x: torch.Tensor) -> None:
    x[:, 1:3].mul_(2).add_(x[:, 1:3].abs())


def _from_elsewhere(x: torch.Tensor) -> None:
    x[:, 3:] = torch.ones(3, 5, dtype=x.dtype, device=x.device)
    x[0, 1:3] = 5


OVERLAP = [_shifted, _wrapped, _scaled, _turned, _one_row, _summed, _later]


@pytest.mark.parametrize("write", [*OVERLAP, _in_place, _from_elsewhere])
def test_reads_before_it_writes(write: Callable[[torch.Tensor], None]) -> None:
    """Of what was made in the same program, and of what is kept from step to step in memory that is used again. An embedding reads ids with a dim of size 1
    behind, which XLA gives them before the write."""

    def run(device: str) -> list[torch.Tensor]:
        table, kept, found = TABLE.to(device), X.clone().to(device), []
        for _ in range(3):
            new = kept + 1
            write(new)
            found.append(nn.functional.embedding(new, table))
            write(kept)
            found.append(nn.functional.embedding(kept, table))
            del new
            torch_xla.sync()
        return [t.cpu() for t in (*found, kept)]

    torch.testing.assert_close(run("xla"), run("cpu"), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("write", "apart"), [*((w, True) for w in OVERLAP), (_in_place, False), (_from_elsewhere, False)])
def test_copies_only_where_it_must(write: Callable[[torch.Tensor], None], apart: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        write(x)
        return x

    module = nn.Module()
    module.forward = forward
    graph = torch_bridge.capture(module, X.to("xla")).graph
    overlapping_writes.mark(graph)
    assert any(n.meta.get(overlapping_writes.APART) for n in graph.nodes) == apart
