"""What one of several processes with annotations says, without the others (`test_processes` has them)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from torch_bridge.mesh import processes, world


class Store(dict[str, str]):
    """What processes share, as one of them sees it."""

    def check(self, keys: list[str]) -> bool:
        return all(k in self for k in keys)

    def set(self, key: str, value: Any) -> None:
        self[key] = value
        if key.startswith("programs of ") and key.endswith("/1"):
            self[f"{key[:-1]}0"] = self["the other's program"]

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(super().get(key, "0")) + amount)
        return int(self[key])


@pytest.fixture
def shared(mesh: xs.Mesh, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process as the second of two, with all devices."""
    found = Store()
    monkeypatch.setattr(world.current(), "process", (1, 2))
    monkeypatch.setattr(processes, "store", lambda: found)
    monkeypatch.setattr(processes, "_counts", {})
    return found


def test_numbers(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (xr.process_index(), xr.process_count(), xr.global_ordinal(), xr.local_ordinal(), xr.world_size()) == (1, 2, 1, 3, 1)
    assert xm.get_ordinal() == 1 and not xm.is_master_ordinal() and not xm.is_master_ordinal(local=False)


def test_another_process_runs_another_program(shared: Store) -> None:
    shared["the other's program"] = json.dumps([("aten.sub.Tensor() -> float32[8]", "b.py:7")])
    text = (
        r"the operations of program \d+ differ among processes.*Number 1 is: process 1 aten.add.Tensor\(\) -> float32\[8\] \(.*test_several_processes.py:"
        r"\d+\), process 0 aten.sub.Tensor\(\) -> float32\[8\] \(b.py:7\). All processes must run the same operations.*xr.process_index\(\)"
    )
    with pytest.raises(processes.ProgramsDiffer, match=text):
        (torch.ones(8).to("xla") + 2).cpu()


def test_parts_that_do_not_lie_one_after_the_other(shared: Store, mesh: xs.Mesh) -> None:
    spec = xs.ShardingSpec(mesh, (None, "data"), minibatch=True)
    text = (
        r"each of 2 processes gives 8 rows of 16, and .* puts rows 0 to 16 on a device of process 1, which has rows 8 to 16. Divide dim 0"
    )
    with pytest.raises(ValueError, match=text):
        xm.send_cpu_data_to_device(torch.ones(8, 4), "xla", input_sharding=spec)
