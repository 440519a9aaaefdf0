"""XLA FSDP in a world of one, and what SPMD, DTensor and FSDP say where they are not there yet."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch_neuronx.distributed.fsdp_mics import XlaFullyShardedDataParallelMiCS
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import always_wrap_policy

from torch_bridge.mesh import world


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


def trained(model: nn.Module, clip: Callable[..., Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for k in range(4):
        optimizer.zero_grad()
        x = torch.arange(15.0).view(5, 3).add(k).to(next(model.parameters()).device)
        loss = model(x).square().mean()
        loss.backward()
        clip(0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrapper", [FSDP, XlaFullyShardedDataParallelMiCS])
def test_in_a_world_of_one_the_module_runs_as_it_is(wrapper: Any) -> None:
    plain = net().to("xla")
    expected = trained(plain, lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most))
    inner = net()
    inner[2] = wrapper(inner[2])
    model = wrapper(
        inner, reshard_after_forward=False, flatten_parameters=True, auto_wrap_policy=always_wrap_policy, compute_dtype=torch.float32
    )
    assert next(model.parameters()).device.type == "xla"
    assert trained(model, model.clip_grad_norm_) == expected
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value)
    fresh = wrapper(copy.deepcopy(net()))
    assert not fresh.load_state_dict(plain.state_dict()).missing_keys
    assert not model.load_state_dict(plain.state_dict()).unexpected_keys
    assert torch.equal(model.state_dict()["2.0.weight"], plain[2][0].weight)
    with model.no_sync():
        assert model[0] is model.module[0]
    assert model.get_shard_metadata()["world_size"] == 1
    model.eval()
    assert not model.training and not inner.training


def test_checkpoints_inside() -> None:
    """The pattern of scripts: `FSDP(checkpoint_module(block))`."""
    expected = trained(net().to("xla"), lambda most: None)
    inner = net()
    inner[2] = FSDP(checkpoint_module(inner[2]))
    assert trained(FSDP(inner), lambda most: None) == pytest.approx(expected, rel=1e-4)


def test_options_that_would_change_numbers_or_are_unknown_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"compute_dtype=torch.bfloat16\).*module.to"):
        FSDP(net(), compute_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"unknown options reshard; it knows .*reshard_after_forward"):
        FSDP(net(), reshard=True)
    with pytest.raises(AttributeError, match="nothing"):
        FSDP(net()).nothing  # noqa: B018


@pytest.fixture
def two_ranks() -> Iterator[None]:
    world.configure(world.World(2))
    yield
    world.configure(None)


def test_what_is_not_there_yet_in_a_world_of_several_ranks(two_ranks: None) -> None:
    with pytest.raises(
        NotImplementedError, match=r"MiCS, .* is not there yet in a world of several ranks: use .*XlaFullyShardedDataParallel"
    ):
        XlaFullyShardedDataParallelMiCS(net())


DTENSOR = """
import torch, torch_xla, torch.distributed as dist, torch_xla.distributed.xla_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("xla", init_method="xla://")
mesh = init_device_mesh("xla", (1,))
for call in (
    lambda: parallelize_module(torch.nn.Linear(2, 2), mesh, ColwiseParallel())(torch.ones(1, 2, device="xla")),
    lambda: DTensor.from_local(torch.ones(4, device="xla"), mesh, [Replicate()]),
    lambda: fully_shard(torch.nn.Linear(2, 2).to("xla")),
    lambda: mesh.get_group(),
):
    try:
        call()
    except NotImplementedError as error:
        assert "distribute_tensor and distribute_module work there" in str(error), error
    else:
        raise SystemExit("no error")
assert not hasattr(mesh, "nothing")
whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
assert torch.equal(whole.cpu(), torch.ones(4, 4)) and whole.sharding_spec == "{replicated}"
assert distribute_module(torch.nn.Linear(2, 2), mesh).weight.device.type == "xla"
print("said", mesh.size())
"""


def test_dtensor_says_so() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DTENSOR], capture_output=True, text=True, env={**os.environ, "NEURON_RT_NUM_CORES": "1"}
    )
    assert found.stdout.strip() == "said 1", found.stderr
