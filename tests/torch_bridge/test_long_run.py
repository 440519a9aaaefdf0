"""Thousands of steps of a tiny model: memory, arrays and caches stay flat, and no step compiles."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import pytest
import torch
from torch import nn

import torch_bridge
from torch_bridge import metrics
from torch_bridge.runtime import executor, session

torch_bridge.register()

WARM, STEPS = 1_000, 5_000
GROWTH_MB = 3.0  # 3/4 KB a step


def resident_mb() -> float:
    """Memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_memory_stays_flat_over_thousands_of_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.001 * step))
    batches = torch.Generator().manual_seed(0)

    def state() -> tuple[float, int, int, int]:
        executor.sync(wait=True)
        gc.collect()
        return resident_mb(), len(jax.live_arrays()), len(session.current().traces), metrics.COUNTERS["UncachedCompile"]

    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        x = torch.randn(2, 4, generator=batches).to("xla")
        loss = nn.functional.dropout(model(x), 0.1).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        executor.sync()
        if step % 500 == 0:
            assert loss.isfinite().item()
        if step == WARM:
            before = state()
    after = state()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < GROWTH_MB, f"grew from {before[0]:.1f} to {after[0]:.1f} MiB"
