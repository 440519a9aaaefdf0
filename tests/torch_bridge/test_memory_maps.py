"""Programs are let go of before Linux has no memory mappings left for the machine code of others."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.torch_bridge.devices import python
from torch_bridge.config import memory_maps
from torch_bridge.config.memory_maps import EACH, MemoryMaps
from torch_bridge.runtime import executor, session


def test_mappings_of_this_process() -> None:
    assert memory_maps.allowed() > memory_maps.taken() > 100
    assert str(memory_maps.MAPS) == f"{memory_maps.taken()} of {memory_maps.allowed()} memory mappings"


def test_mappings_are_counted_where_they_may_run_out() -> None:
    taken, counted = 10 * EACH, 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return taken

    maps = MemoryMaps(count, lambda: 40 * EACH)
    assert not any(maps.are_scarce() for _ in range(20)) and counted == 1
    taken = 29 * EACH
    assert not any(maps.are_scarce() for _ in range(3)) and counted == 4
    taken = 31 * EACH
    assert maps.are_scarce() and maps.are_scarce()
    taken = 16 * EACH
    assert not any(maps.are_scarce() for _ in range(14)) and counted == 7


def test_systems_that_do_not_say() -> None:
    maps = MemoryMaps(lambda: 0, lambda: 0)
    assert not any(maps.are_scarce() for _ in range(3))


def test_half_of_the_programs_are_let_go_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    executor.clear_cache()
    taken = 0
    monkeypatch.setattr(memory_maps, "MAPS", MemoryMaps(lambda: taken, lambda: 40 * EACH))
    for n in range(1, 9):
        (torch.ones(n).to("xla") + n).cpu()
    kept = set(session.current().traces)
    assert len(kept) == 8
    taken = 31 * EACH
    memory_maps.MAPS._programs = 0
    with caplog.at_level(logging.WARNING):
        assert (torch.ones(9).to("xla") + 9).tolist() == [10.0] * 9
    left = list(session.current().traces)
    assert len(left) == 5 and len(kept.intersection(left)) == 4
    assert "31000 of 40000 memory mappings" in caplog.text and "vm.max_map_count" in caplog.text
    taken = 0
    for n in range(1, 9):
        assert (torch.ones(n).to("xla") + n).tolist() == [1.0 + n] * n


_MANY = """
import torch, torch_xla
from torch_bridge.config import memory_maps

def step(n):
    net = torch.nn.Sequential(*[torch.nn.Linear(4 + n, 4 + n) for _ in range(n)]).to("xla")
    net(torch.ones(n, 4 + n, device="xla")).softmax(-1).square().sum().backward()
    torch_xla.sync()

for n in range(1, 7):
    step(n)
before = memory_maps.taken()
memory_maps.MAPS = memory_maps.MemoryMaps(allowed=lambda: before)
step(7)
print("freed", before > memory_maps.taken(), before, memory_maps.taken())
"""


def test_machine_code_goes_with_its_program() -> None:
    assert "freed True" in python(_MANY)
