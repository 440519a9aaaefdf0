"""Meshes of several shapes in one script: inputs, weights and results each on their own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

from tests.torch_bridge.spmd.test_annotations import placed, spec_of
from torch_bridge.mesh import spmd


def test_a_mesh_after_programs_without_one(mesh: xs.Mesh) -> None:
    """What ran before any mesh was made has all devices on one axis; nothing says how these results lie."""
    early = torch.randn(4, 4, device="xla") @ torch.randn(4, 4).to("xla")
    torch_xla.sync()
    y = torch.ones(4, 8, device="xla") + torch.ones(8, device="xla")
    xs.mark_sharding(y, mesh, ("data", "model"))
    doubled = y * 2
    torch_xla.sync()
    assert spec_of(doubled) == "{devices=[4,2]0,1,2,3,4,5,6,7}" and torch.equal(doubled.cpu(), torch.full((4, 8), 4.0))
    assert placed(early) == (4, 4)


@pytest.mark.parametrize("shapes", list(itertools.permutations([(8,), (4, 2), (2, 2, 2)], 2)))
def test_values_on_two_meshes(mesh: xs.Mesh, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Of inputs, and of a value in between that no input says anything of."""
    one, two = (xs.Mesh(range(8), shape) for shape in shapes)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    x, w = a.to("xla"), b.to("xla")
    xs.mark_sharding(x, one, (0, None))
    xs.mark_sharding(w, two, (None, len(shapes[1]) - 1))
    y = x @ w
    xs.mark_sharding(y, two, (0, 1 if len(shapes[1]) > 1 else None))
    z = y.t() + 1
    torch_xla.sync()
    assert torch.allclose(z.cpu(), (a @ b).t() + 1, atol=1e-5) and torch.equal(x.cpu(), a)
    first = (x + 1) * 2
    xs.mark_sharding(first, two, (None, len(shapes[1]) - 1))
    assert torch.allclose(first.t().cpu(), ((a + 1) * 2).t())


def test_training_on_two_meshes(mesh: xs.Mesh) -> None:
    """Compiled once, with the weights' memory used again."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model = copy.deepcopy(reference).to("xla")
    xs.mark_sharding(model[0].weight, mesh, ("data", "model"))
    batches = xs.get_1d_mesh("batch")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    torch_xla.sync()
    before = met.counter_value("UncachedCompile") or 0
    memory = set()
    for _ in range(4):
        host = torch.randn(8, 16)
        x = host.to("xla")
        xs.mark_sharding(x, batches, ("batch", None))
        for m, given, optimizer in ((reference, host, optimizers[0]), (model, x, optimizers[1])):
            optimizer.zero_grad()
            m(given).square().mean().backward()
            optimizer.step()
        assert placed(model[0].weight) == (8, 8)
        memory.add(model[0].weight._storage.held.addressable_shards[0].data.unsafe_buffer_pointer())
    assert (met.counter_value("UncachedCompile") or 0) - before <= 2 and len(memory) <= 2
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q.cpu(), rtol=1e-4, atol=1e-6)


MESHES: list[tuple[dict[str, int], tuple[Any, ...], tuple[int, ...]]] = [
    ({"a": 8}, ("a",), (2, 2, 2)),
    ({"a": 4, "b": 2}, ("b", "a"), (8,)),
    ({"a": 2, "b": 1, "c": 4}, (("c", "a"), None), (4, 2)),
    ({"a": 4, "b": 2}, (None, "a"), (2, 4)),
]


@pytest.mark.parametrize(("axes", "spec", "other"), MESHES)
def test_refined(mesh: xs.Mesh, axes: dict[str, int], spec: tuple[Any, ...], other: tuple[int, ...]) -> None:
    devices = np.array(spmd.devices())
    given = NamedSharding(jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), PartitionSpec(*spec))
    found = spmd.refined(given, [given.mesh, jax.sharding.Mesh(devices.reshape(other), tuple(f"x{k}" for k in range(len(other))))])
    assert found.is_equivalent_to(given, len(spec)) and found.mesh.devices.shape == (2, 2, 2)


def test_meshes_whose_axes_do_not_fit_stay_as_they_are(mesh: xs.Mesh) -> None:
    devices = np.array(spmd.devices())[:6]
    two, three = (jax.sharding.Mesh(devices.reshape(shape), ("a", "b")) for shape in ((2, 3), (3, 2)))
    given = NamedSharding(two, PartitionSpec("a"))
    assert spmd.refined(given, [two, three]) is given
    alone = NamedSharding(jax.sharding.Mesh(devices[:1], ("a",)), PartitionSpec("a"))
    assert spmd.refined(alone, [alone.mesh]) is alone
