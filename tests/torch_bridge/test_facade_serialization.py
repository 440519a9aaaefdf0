"""`torch_xla.utils.serialization`: the file layout that NxD and torch_xla read and write."""

from __future__ import annotations

import pathlib
import pickletools
import zipfile

import pytest
import torch
import torch_xla.utils.serialization as xser
from torch import nn


def test_round_trip(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(3, 2).to("xla")
    data = {"model": model.state_dict(), "cpu": torch.arange(3), "step": 4, "nest": [(model.weight * 2,), "x"]}
    path = str(tmp_path / "checkpoint.pt")
    xser.save(data, path)
    assert xser._get_tensors_folder(path) == path + ".tensors"
    assert sorted(p.name for p in (tmp_path / "checkpoint.pt.tensors").iterdir()) == ["tensor_0.pt", "tensor_1.pt", "tensor_2.pt"]
    assert xser._get_tensor_file(path + ".tensors", 1).endswith("checkpoint.pt.tensors/tensor_1.pt")
    raw = torch.load(path, weights_only=False)
    assert isinstance(raw["model"]["weight"], xser.TensorReference) and raw["model"]["weight"].tid == 0
    assert torch.load(path + ".tensors/tensor_0.pt").tolist() == model.weight.tolist()
    loaded = xser.load(path)
    assert loaded["step"] == 4 and loaded["nest"][1] == "x" and loaded["cpu"].tolist() == [0, 1, 2]
    assert loaded["model"]["weight"].device.type == "cpu"
    assert loaded["nest"][0][0].tolist() == (model.weight * 2).tolist()
    model.load_state_dict(loaded["model"])
    assert model.weight.device.type == "xla"


def test_pickled_class_path_is_torch_xla_s(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.pt"
    xser.save({"w": torch.ones(2, device="xla")}, path)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    names = {argument for op, argument, _ in pickletools.genops(pickled) if op.name in ("GLOBAL", "STACK_GLOBAL")}
    assert "torch_xla.utils.serialization TensorReference" in names


def test_saving_again_replaces_the_tensors(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.pt"
    xser.save([torch.ones(1, device="xla") * i for i in range(3)], path)
    xser.save([torch.full((2,), 9.0, device="xla")], path, master_only=False)
    assert [p.name for p in (tmp_path / "c.pt.tensors").iterdir()] == ["tensor_0.pt"]
    assert xser.load(path)[0].tolist() == [9.0, 9.0]


def test_a_tied_tensor_is_stored_once(tmp_path: pathlib.Path) -> None:
    w = torch.ones(4, device="xla")
    xser.save({"a": w, "b": w}, tmp_path / "c.pt")
    assert len(list((tmp_path / "c.pt.tensors").iterdir())) == 1
    loaded = xser.load(tmp_path / "c.pt")
    assert loaded["a"] is loaded["b"]


def test_optimizer_state(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device="xla")).sum().backward()
    optimizer.step()
    xser.save(optimizer.state_dict(), tmp_path / "o.pt")
    state = xser.load(tmp_path / "o.pt")
    torch.testing.assert_close(state["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"].cpu())
    optimizer.load_state_dict(state)
    assert optimizer.state[model.weight]["exp_avg"].device.type == "xla"


@pytest.mark.parametrize("kind", ["str", "path"])
def test_paths(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "x.pt"
    xser.save({"a": 1}, str(path) if kind == "str" else path)
    assert xser.load(str(path) if kind == "str" else path) == {"a": 1}
