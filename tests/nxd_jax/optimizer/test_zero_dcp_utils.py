"""`zero_dcp_utils`: a ZeRO-1 optimizer's state dict comes back bit for bit, with other numbers of ranks too."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.optimizer.zero_dcp_utils import get_dcp_aux_infos, load_optim_state_dict, save_optim_state_dict
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import move_all_tensor_to_cpu
from torch import nn

from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.conftest import Nxd
from torch_bridge.collectives import object_collectives


class Rows(nn.Module):
    """Of sizes that 4 ranks do and do not divide."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in zip("abcd", (10, 15, 16, 20), strict=True):
            setattr(self, name, nn.Parameter(torch.randn(rows, 10)))


def made(seed: int = 0, **options: Any) -> tuple[nn.Module, NeuronZero1Optimizer]:
    torch.manual_seed(seed)
    model = Rows().to("xla")
    optimizer = NeuronZero1Optimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=0.01,
        sharding_groups=parallel_state.get_data_parallel_replica_groups(),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
        **options,
    )
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.detach().clone() / 100
    optimizer.step()
    optimizer.zero_grad()
    xm.mark_step()


def of_all_ranks(optimizer: Any) -> list[Any]:
    return copy.deepcopy(object_collectives.each_ranks(optimizer.state_dict()))  # steps are counted in place


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_state_comes_back(nxd: Nxd, tmp_path: pathlib.Path, on_cpu: bool) -> None:
    nxd(8, tp=2)
    model, optimizer = made()
    aux = get_dcp_aux_infos(model, optimizer)
    assert aux["optim_pid_to_pnames"] == dict(enumerate("abcd")) and aux["shape_info"][1] == (15, 10)
    assert aux["optim_pid_to_params"][3] is model.d
    before = of_all_ranks(optimizer)
    state = optimizer.state_dict()
    state = move_all_tensor_to_cpu(state) if on_cpu else state
    save_optim_state_dict(tmp_path / "ckpts", state, aux, False)
    save_optim_state_dict(str(tmp_path / "ckpts"), state, aux)  # in the place of the first
    weights = [p.detach().cpu() for p in model.parameters()]
    step(model, optimizer)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    load_optim_state_dict(tmp_path / "ckpts", optimizer, aux, False)
    same(of_all_ranks(optimizer), before)
    nxd_api.load_checkpoint(tmp_path / "ckpts", "zero1_optim", optimizer=optimizer)
    same(of_all_ranks(optimizer), before)
    step(model, optimizer)
    assert optimizer.state_dict()["base_state"][0]["step"] == 2


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("world", "tp", "fuse"), [(2, 2, False), (1, 1, True), (8, 4, True)])
def test_other_numbers_of_ranks(nxd: Nxd, tmp_path: pathlib.Path, world: int, tp: int, fuse: bool) -> None:
    """Also of parameters that tensor-parallel ranks share out, two groups, fused q, k and v."""
    nxd(4, tp=2)
    model, optimizer, _ = first = job.build(2, zero1=True)
    job.train(first, 0, 2)
    before = job.moments(model, optimizer)
    save_optim_state_dict(tmp_path, move_all_tensor_to_cpu(optimizer.state_dict()), get_dcp_aux_infos(model, optimizer))
    nxd(world, tp=tp)
    model, optimizer, _ = job.build(tp, zero1=True, fuse=fuse, seed=3)
    load_optim_state_dict(tmp_path, optimizer, get_dcp_aux_infos(model, optimizer))
    assert job.differing(job.moments(model, optimizer), before) == []
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_master_weights(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4)
    model, optimizer = made(save_master_weights=True)
    aux = get_dcp_aux_infos(model, optimizer)
    before = of_all_ranks(optimizer)
    save_optim_state_dict(tmp_path, move_all_tensor_to_cpu(optimizer.state_dict()), aux)
    step(model, optimizer)
    load_optim_state_dict(tmp_path, optimizer, aux)
    same(of_all_ranks(optimizer), before)


def test_what_does_not_fit(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4)
    model, optimizer = made()
    aux = get_dcp_aux_infos(model, optimizer)
    with pytest.raises(TypeError, match=r"needs a ZeRO-1 optimizer .*, got SGD: for others use neuronx_distributed.save_checkpoint"):
        get_dcp_aux_infos(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"parameters 0, 1, 2, 3 of the optimizer are not of the model"):
        get_dcp_aux_infos(Rows(), optimizer)
    with pytest.raises(ValueError, match="not a ZeRO-1 optimizer's state: it has no base_state, shape_info, only state, param_groups"):
        save_optim_state_dict(tmp_path, {"state": {}, "param_groups": []}, aux)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="the state is of 3 parameters, and not of the 4 of the optimizer"):
        save_optim_state_dict(tmp_path, {**state, "shape_info": {k: state["shape_info"][k] for k in range(3)}}, aux)
    changed = move_all_tensor_to_cpu(state)
    changed["base_state"][0]["exp_avg"] = torch.ones(changed["base_state"][0]["exp_avg"].shape)
    with pytest.raises(
        ValueError, match=r"exp_avg/a on the CPU is rank 0's, and ranks have different ones: .* Give optimizer.state_dict\(\)"
    ):
        save_optim_state_dict(tmp_path, changed, aux)
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint 'zero1_optim'"):
        load_optim_state_dict(tmp_path, optimizer, aux)
    (tmp_path / ".metadata").touch()
    with pytest.raises(NotImplementedError, match="holds files of torch.distributed.checkpoint, .* use_zero1_dcp=False"):
        load_optim_state_dict(tmp_path, optimizer, aux)


def test_files_beside_it_stay(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    model, optimizer = made()
    (tmp_path / "mine.txt").touch()
    save_optim_state_dict(tmp_path, optimizer.state_dict(), get_dcp_aux_infos(model, optimizer))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.txt", "zero1_optim"]
