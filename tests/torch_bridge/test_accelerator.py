"""`torch.accelerator`, for scripts that name no device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import torch_bridge
from torch_bridge.telemetry import memory

torch_bridge.register()


def test_a_script_for_any_device() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert (device.type, torch.accelerator.device_count(), torch.accelerator.current_device_index()) == ("xla", 1, 0)
    before = torch.accelerator.memory_allocated()
    x = torch.ones(256, 1024, device=device) * 2
    torch.accelerator.synchronize()
    torch.accelerator.synchronize("xla:0")
    assert torch.accelerator.memory_allocated() - before >= x.nbytes
    assert torch.accelerator.max_memory_allocated() >= x.nbytes
    assert torch.accelerator.memory_reserved() >= x.nbytes
    assert torch.accelerator.max_memory_reserved() >= x.nbytes
    torch.accelerator.empty_cache()
    assert x.sum().item() == 2 * x.numel()


@pytest.mark.skipif(not hasattr(torch.accelerator, "get_memory_info"), reason="newer releases have it")
def test_free_and_total_memory() -> None:
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total == memory.usage()["bytes_limit"]


@pytest.mark.parametrize("name", ["memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats"])
def test_what_is_not_counted(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"torch.accelerator.{name} on xla: JAX owns the memory.*xla_model.get_memory_info"):
        getattr(torch.accelerator, name)()


def test_waiting_starts_nothing() -> None:
    code = "import sys, torch; torch.accelerator.synchronize(); print(torch.accelerator.memory_allocated(), 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["0", "False"]
