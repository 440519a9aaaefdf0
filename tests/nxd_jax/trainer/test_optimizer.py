"""A wrapped model and optimizer on several ranks equal plain torch on the combined batch; one program, few collectives, few recorded ops."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from neuronx_distributed import initialize_parallel_optimizer, neuronx_distributed_config
from torch import optim

import torch_bridge
from nxd_jax.trainer import trainer
from nxd_jax.trainer.optimizer import NxDOptimizer
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.trainer.runs import Run, Wrapped, compare
from torch_bridge import metrics
from torch_bridge.recorder import dispatch
from torch_bridge.runtime import executor, session

RUNS = {
    "everything": Run(optim.AdamW, {"lr": 1e-2}, groups=True, scheduler=True, accumulate=2, tied=True),
    "context": Run(optim.SGD, {"lr": 0.05, "momentum": 0.9}, cp=2, tp=1),
    "context-plain": Run(optim.SGD, {"lr": 0.05, "momentum": 0.9}, cp=2, tp=2, zero=False, groups=True),
    "alone": Run(optim.AdamW, {"lr": 1e-2}, world=1, tp=1, accumulate=2),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_equals_torch_on_the_combined_batch(nxd: Nxd, run: Run) -> None:
    compare(nxd, run)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", [optim.Adam, optim.NAdam, optim.RAdam], ids=lambda kind: kind.__name__)
def test_weight_decay_is_decoupled_where_the_class_does_that(nxd: Nxd, kind: type[optim.Optimizer], zero: bool) -> None:
    compare(nxd, Run(kind, {"lr": 1e-2, "weight_decay": 0.3, "decoupled_weight_decay": True}, world=2, tp=1, zero=zero))


def test_an_option_that_adamw_has_not_is_left_out(nxd: Nxd) -> None:
    """Its groups have `decoupled_weight_decay`, which scripts pass on."""
    nxd(2)

    class Mine(optim.Adam):
        def __init__(self, params: Any, **options: Any):
            super().__init__(params, **options)

    for kind, takes in (
        (optim.AdamW, False),
        (optim.SGD, False),
        (Mine, True),
        (lambda params, lr: optim.SGD(params, lr), False),
        (dict, False),
    ):
        assert trainer._takes(kind, "decoupled_weight_decay") is takes
    weight = torch.nn.Parameter(torch.ones(4, 2, device="xla"))
    made = initialize_parallel_optimizer(
        neuronx_distributed_config(), optim.AdamW, [weight], **optim.AdamW([weight], foreach=False).defaults
    )
    assert made.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
@pytest.mark.parametrize("zero", [False, True])
def test_one_program_and_few_collectives(nxd: Nxd, zero: bool) -> None:
    """A learning rate and a step count that change do not recompile; the optimizer adds a collective or two for each bucket."""
    run = Run(optim.AdamW, {"lr": 1e-2}, tp=1, zero=zero, scheduler=True)
    nxd(run.world)
    wrapped = Wrapped(run)
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    batches = run.batches()
    for _ in range(4):
        wrapped.step(*next(batches))
    assert metrics.COUNTERS.get("UncachedCompile", 0) - before == 1
    session.current().recent.clear()
    wrapped.step(*next(batches))
    text = torch_bridge.hlo()
    found = {name: len(re.findall(rf"stablehlo\.{name}\b", text)) for name in ("reduce_scatter", "all_gather", "all_reduce")}
    if zero:
        assert found["reduce_scatter"] == 1 and found["all_gather"] == 1 and found["all_reduce"] <= 3, found  # the norm's
    assert text.count("optimizer_step") and torch_bridge.hlo()


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
@pytest.mark.parametrize("zero, most", [(False, 1), (True, 3)])
def test_ops_recorded_by_a_step(nxd: Nxd, zero: bool, most: int) -> None:
    """However many parameters there are: the update, and with ZeRO-1 the two collectives."""
    nxd(2)
    run = Run(optim.AdamW, {"lr": 1e-2}, world=2, tp=1, zero=zero, clip=None)
    parameters = [torch.nn.Parameter(torch.ones(3, device="xla")) for _ in range(7)]
    optimizer = initialize_parallel_optimizer(run.config(), run.optimizer, parameters)
    counts = []
    for _ in range(2):
        optimizer.zero_grad()
        for p in parameters:
            p.grad = torch.ones(3, device="xla") * 1
        executor.sync()
        start = len(dispatch.STATE.session.current.nodes)
        optimizer.optimizer.step()
        counts.append(len(dispatch.STATE.session.current.nodes) - start)
        executor.sync()
    assert counts[1] <= most, counts


def test_is_an_optimizer(nxd: Nxd) -> None:
    """Schedulers, hooks, and reading what the one inside holds."""
    nxd(2)
    run = Run(optim.AdamW, {"lr": 1.0}, world=2, tp=1, zero=False)
    p = torch.nn.Parameter(torch.ones(3, device="xla"))
    optimizer = initialize_parallel_optimizer(run.config(), run.optimizer, [p], lr=1.0)
    assert isinstance(optimizer, NxDOptimizer) and isinstance(optimizer.optimizer, optim.AdamW) and isinstance(optimizer, optim.Optimizer)
    calls = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss = optimizer.step(lambda: _backward(p))
    scheduler.step()
    assert loss.item() == 3.0 and calls == ["step"] and optimizer.param_groups[0]["lr"] == 0.5 and optimizer.state[p]["step"] == 1
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor([3.0]).sqrt())  # type: ignore[union-attr]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[p]["step"] == 1 and optimizer.params == [p] and optimizer.defaults["lr"] == 1.0
    optimizer.param_groups[0]["foreach"] = True  # torch's own step, hooks still called once
    optimizer.step()
    assert calls == ["step"] * 2 and optimizer.state[p]["step"] == 2


def _backward(p: torch.Tensor) -> torch.Tensor:
    p.grad = None
    loss = (p * 1).sum()
    loss.backward()
    return loss


def test_gradients_that_a_step_reduces(nxd: Nxd) -> None:
    nxd(2, ep=2)
    plain, collected, expert, unused = (torch.nn.Parameter(torch.ones(2, device="xla")) for _ in range(4))
    optimizer = initialize_parallel_optimizer(
        neuronx_distributed_config(expert_parallel_size=2), optim.SGD, [plain, collected, expert, unused], lr=0.1
    )
    assert optimizer._fetch_gradients() == ([], [])
    plain.grad, expert.grad = torch.full((2,), 3.0, device="xla"), torch.full((2,), 5.0, device="xla")
    collected.main_grad = torch.full((2,), 4.0, device="xla")  # type: ignore[attr-defined]
    expert.expert_model_parallel = True  # type: ignore[attr-defined]
    others, experts = optimizer._fetch_gradients()
    assert [g.tolist() for g in others] == [[3, 3], [4, 4]] and [g.tolist() for g in experts] == [[5, 5]]


def test_what_a_step_averages_may_be_chosen(nxd: Nxd) -> None:
    """NxD's module tests let it fetch nothing, and reduce gradients themselves."""
    nxd(2)
    p = torch.nn.Parameter(torch.ones(2, device="xla"))
    optimizer = initialize_parallel_optimizer(
        neuronx_distributed_config(optimizer_config={"zero_one_enabled": False, "grad_clipping": False}), optim.SGD, [p], lr=1.0
    )
    optimizer._fetch_gradients = lambda: ([], [])
    p.grad = torch.full((2,), 3.0, device="xla")
    optimizer.step()
    assert p.tolist() == [-2, -2] and p.grad.tolist() == [3, 3]
