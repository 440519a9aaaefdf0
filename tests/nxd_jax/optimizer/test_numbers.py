"""20 steps of every known optimizer, divided among ranks, equal plain torch on whole parameters and the mean of all gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from torch import optim

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.optimizer.by_hand import Case, compare
from torch_bridge.recorder import sharded


class Signs(optim.Optimizer):
    """A home-made optimizer (Lion)."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(state["moment"].lerp(p.grad, 0.1)), alpha=-group["lr"])
                state["moment"].lerp_(p.grad, 0.01)


DIVIDED = [
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, scheduler=True),
    Case(optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    Case(optim.SGD, {"lr": 0.05}, world=2, tp=1, clip=None),
    Case(optim.Adam, {"lr": 1e-2, "weight_decay": 0.01, "amsgrad": True}, tp=1),
    Case(optim.AdamW, {"lr": 1e-2}, groups=True, scheduler=True, seldom=True),
    Case(optim.AdamW, {"lr": 1e-2}, tp=1, clip=None),
    Case(optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0, "foreach": False}),
    Case(optim.AdamW, {"lr": 1e-2}, world=1, tp=1),
    Case(optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}, groups=True),
    Case(AdamW_FP32OptimParams, {"lr": 1e-2, "weight_decay": 0.01}),
    Case(optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.01}),
    Case(optim.Adafactor, {"lr": 1e-2, "eps": (1e-5, 1e-3), "d": 1.5}, tp=1, clip=None),
    Case(optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    Case(optim.NAdam, {"lr": 1e-2}),
    Case(Signs, {"weight_decay": 0.1}),
]


def name_of(case: Case) -> str:
    return f"{case.optimizer.__name__}-dp{case.dp}-tp{case.tp}"


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize("case", DIVIDED, ids=name_of)
def test_equals_torch(nxd: Nxd, case: Case, zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.optimizer is optim.Adafactor:  # op by op it is refused where ranks hold parts
        monkeypatch.delenv("NXD_JAX_FUSED_OPTIMIZERS", raising=False)
    compare(nxd, dataclasses.replace(case, zero=zero))


@pytest.mark.parametrize("optimizer", [optim.Adafactor, optim.AdamW])
def test_equals_torch_op_by_op(nxd: Nxd, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the parameters is a number, whose state is made on the device, one for each rank."""
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "0")
    compare(nxd, Case(optimizer, {"lr": 1e-2}, tp=1, clip=None, zero=False, steps=5))


@pytest.mark.parametrize("optimizer, options", [(optim.AdamW, {"lr": 0.05}), (optim.SGD, {"lr": 0.05, "momentum": 0.9})])
def test_bfloat16_weights(nxd: Nxd, optimizer: Any, options: dict[str, Any]) -> None:
    """With ZeRO-1: float32 weights are updated, and rounded for the model. Without: what torch does in bfloat16."""
    case = Case(optimizer, options, world=2, tp=1, clip=None, dtype=torch.bfloat16)
    compare(nxd, case, rtol=0.005, atol=1e-6)  # the nearest bfloat16, or its neighbour where a float32 was half-way
    compare(nxd, dataclasses.replace(case, zero=False, steps=5), rtol=0.04, atol=0.02)


def test_experts(nxd: Nxd) -> None:
    """Experts are averaged over all tokens, by the ranks that hold the same ones; the norm counts every expert once."""
    for zero in (False, True):
        nxd(4, ep=2)
        config = nxd_api.neuronx_distributed_config(
            expert_parallel_size=2, optimizer_config={"zero_one_enabled": zero, "max_grad_norm": 1.0}
        )
        gradients = [torch.randn(5, 2, generator=torch.Generator().manual_seed(r)) for r in range(8)]
        group = parallel_state.get_expert_model_parallel_group(as_list=True)
        expert_of = [next(g.index(r) for g in group if r in g) for r in range(4)]
        shared = torch.nn.Parameter(torch.ones(5, 2, device="xla"))
        starts = [torch.full((5, 2), 1.0 + e) for e in expert_of]
        expert = torch.nn.Parameter(sharded.from_ranks(starts.__getitem__))
        expert.expert_model_parallel = True  # type: ignore[attr-defined]
        optimizer = nxd_api.initialize_parallel_optimizer(config, optim.SGD, [shared, expert], lr=1.0)
        shared.grad = sharded.from_ranks(gradients[:4].__getitem__)
        expert.grad = sharded.from_ranks(gradients[4:].__getitem__)
        optimizer.step()
        mean = torch.stack(gradients[:4]).mean(0)
        means = [torch.stack([g for g, of in zip(gradients[4:], expert_of, strict=True) if of == e]).sum(0) / 4 for e in range(2)]
        norm = torch.stack([mean, *means]).norm()
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm.cpu(), norm.reshape(1))
        for r in range(4):
            torch.testing.assert_close(sharded.shards(shared.detach())[r], 1.0 - mean * factor)
            torch.testing.assert_close(sharded.shards(expert.detach())[r], starts[r] - means[expert_of[r]] * factor)


def test_the_halves_of_a_step_with_experts(nxd: Nxd) -> None:
    """As the original's checkpoint tests make state: reduce, then update experts and the rest by themselves."""
    nxd(4, ep=2)
    config = nxd_api.neuronx_distributed_config(expert_parallel_size=2, optimizer_config={"zero_one_enabled": True})
    shared, expert = (torch.nn.Parameter(torch.ones(4, device="xla")) for _ in range(2))
    expert.expert_model_parallel = True  # type: ignore[attr-defined]
    zero = nxd_api.initialize_parallel_optimizer(config, optim.SGD, [shared, expert], lr=1.0).optimizer
    shared.grad, expert.grad = torch.full_like(shared, 2.0), torch.full_like(expert, 2.0)
    zero._reduce_gradients()

    def parts() -> list[float]:
        return [zero.shard_of[p].detach().cpu()[0].item() for p in (shared, expert)]

    zero.ep_zero_optimizer.base_optimizer.step()
    assert parts() == [1.0, 0.0]  # an expert's gradient is the sum over its two ranks, divided by all four
    zero.non_ep_zero_optimizer.base_optimizer.step()
    assert parts()[0] == -1.0


def test_sequence_parallel(nxd: Nxd) -> None:
    """Tensor-parallel ranks saw different parts of the sequence: their gradients are added up before data-parallel ranks are averaged."""
    for zero in (False, True):
        nxd(4, tp=2)
        config = nxd_api.neuronx_distributed_config(
            tensor_parallel_size=2, sequence_parallel=True, optimizer_config={"zero_one_enabled": zero, "max_grad_norm": 1.0}
        )
        gradients = [torch.randn(3, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        norm_weight = torch.nn.Parameter(torch.ones(3, device="xla"))
        norm_weight.sequence_parallel_enabled = True  # type: ignore[attr-defined]
        optimizer = nxd_api.initialize_parallel_optimizer(config, optim.SGD, [norm_weight], lr=1.0)
        norm_weight.grad = sharded.from_ranks(gradients.__getitem__)
        optimizer.step()
        mean = torch.stack(gradients).sum(0) / 2
        for found in sharded.shards(norm_weight.detach()):
            torch.testing.assert_close(found, 1.0 - mean * (1.0 / (mean.norm() + 1e-6)).clamp(max=1.0))
