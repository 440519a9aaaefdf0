"""`XLAShardedTensor`s in files, and copies of them."""

from __future__ import annotations

import copy
import pathlib

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import nn

from tests.torch_bridge.spmd.test_annotations import placed


def test_files_have_whole_tensors(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    """Shared ones once; they load on the CPU, also by what checks files first."""
    host = torch.arange(64.0).view(8, 8)
    marked = xs.mark_sharding(host.to("xla"), mesh, ("data", "model"))
    torch.save({"a": marked, "b": marked.global_tensor}, tmp_path / "torch.pt")
    xm.save({"a": marked, "b": marked.global_tensor}, tmp_path / "xm.pt")
    for name in ("torch.pt", "xm.pt"):
        found = torch.load(tmp_path / name, map_location="cpu", weights_only=True)
        assert type(found["a"]) is torch.Tensor and torch.equal(found["a"], host) and torch.equal(found["b"], host)
    back = torch.load(tmp_path / "torch.pt", map_location="xla", weights_only=True)["a"]
    assert back.device.type == "xla" and torch.equal(back.cpu(), host)


def test_copies_lie_as_the_original(mesh: xs.Mesh) -> None:
    host = torch.arange(64.0).view(8, 8)
    marked = xs.mark_sharding(host.to("xla"), mesh, ("data", None))
    for made in (copy.deepcopy(marked), copy.deepcopy({"a": marked})["a"], marked.clone()):
        assert isinstance(made, xs.XLAShardedTensor) and made.sharding_spec == marked.sharding_spec
        assert made.global_tensor is not marked.global_tensor
        with torch.no_grad():
            made.add_(1)
        assert placed(made.global_tensor) == (2, 8) and torch.equal(made.cpu(), host + 1)
    assert torch.equal(marked.cpu(), host) and marked.tolist() == host.tolist()


def test_copies_of_what_was_computed(mesh: xs.Mesh) -> None:
    """Copied is the tensor, not what it was recorded in; a plain copy is the same memory."""
    host = torch.arange(64.0).view(8, 8)
    marked = xs.mark_sharding(host.to("xla"), mesh, ("data", None))
    marked += 1
    torch_xla.sync()
    made, same = copy.deepcopy({"a": marked, "b": marked}), copy.copy(marked)
    assert made["a"] is made["b"] and made["a"].sharding_spec == marked.sharding_spec
    made["a"].zero_()
    assert torch.equal(marked.cpu(), host + 1)
    same.zero_()
    assert not marked.any()
    layer = nn.Linear(8, 8).to("xla")
    layer.weight = nn.Parameter(xs.mark_sharding(layer.weight.data, mesh, ("data", None)))
    assert isinstance(copy.deepcopy(layer).weight, nn.Parameter)
