"""Tensor parallelism written by hand, as user code does it: the rank in masks, offsets and slices, torch.distributed for the exchanges."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
from torch import nn

from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.conftest import Nxd
from torch_bridge.passes import check_replicas
from torch_bridge.recorder import sharded

VOCAB, HIDDEN, INNER, ROWS = 24, 8, 16, 6


class Copy(torch.autograd.Function):
    """The same input for all; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def own_rows(full: torch.Tensor, dim: int = 0) -> nn.Parameter:
    """This rank's part of a full tensor that is on xla."""
    rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    part = full.shape[dim] // tp
    own = full[rank * part : (rank + 1) * part] if dim == 0 else full[:, rank * part : (rank + 1) * part]
    return nn.Parameter(own.clone())


class Model(nn.Module):
    def __init__(self, full: dict[str, torch.Tensor]):
        super().__init__()
        self.rank = parallel_state.get_tensor_model_parallel_rank()
        self.part = VOCAB // parallel_state.get_tensor_model_parallel_size()
        self.embedding = own_rows(full["embedding"])
        self.up = own_rows(full["up"])
        self.down = own_rows(full["down"], dim=1)
        self.norm = nn.Parameter(full["norm"].clone())
        self.head = own_rows(full["head"])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        start = self.rank * self.part
        outside = (ids < start) | (ids >= start + self.part)
        rows = (ids - start).masked_fill(outside, 0)
        out = F.embedding(rows, self.embedding).masked_fill(outside.unsqueeze(-1), 0.0)
        return Sum.apply(out)

    def cross_entropy(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        top = logits.detach().amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
        logits = logits - top.unsqueeze(-1)
        local = target - self.rank * self.part
        inside = (local >= 0) & (local < self.part)
        right = logits.gather(-1, local.clamp(0, self.part - 1).unsqueeze(-1)).squeeze(-1) * inside
        return (Sum.apply(logits.exp().sum(-1)).log() - Sum.apply(right)).mean()

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        hidden = Copy.apply(x)
        x = x + Sum.apply(F.linear(torch.tanh(F.linear(hidden, self.up)), self.down))
        x = x * self.norm
        return self.cross_entropy(F.linear(Copy.apply(x), self.head), target)


def weights() -> dict[str, torch.Tensor]:
    shapes = {"embedding": (VOCAB, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,), "head": (VOCAB, HIDDEN)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def unsharded(full: dict[str, torch.Tensor], ids: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    own = {name: w.clone().requires_grad_() for name, w in full.items()}
    x = F.embedding(ids, own["embedding"])
    x = (x + F.linear(torch.tanh(F.linear(x, own["up"])), own["down"])) * own["norm"]
    loss = F.cross_entropy(F.linear(x, own["head"]), target)
    loss.backward()
    return loss.detach(), {name: w.grad for name, w in own.items() if w.grad is not None}


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2), (4, 4), (8, 4), (8, 2), (8, 8), (64, 8)])
def test_right_on_every_rank(world: int, tp: int, nxd: Nxd) -> None:
    nxd(world, tp=tp)
    dp = world // tp
    full, ids, target = weights(), torch.randint(0, VOCAB, (dp * ROWS,)), torch.randint(0, VOCAB, (dp * ROWS,))
    want, grads = unsharded(full, ids, target)
    model = Model({name: w.to("xla") for name, w in full.items()})
    dp_rank = parallel_state.get_data_parallel_rank()
    rows = slice(dp_rank * ROWS, (dp_rank + 1) * ROWS)
    loss = model(ids.to("xla")[rows], target.to("xla")[rows])
    loss.backward()
    xm.all_reduce("sum", [p.grad for p in model.parameters()], 1 / dp, groups=parallel_state.get_data_parallel_group(as_list=True))
    mean = xm.all_reduce("sum", loss.detach(), 1 / dp, groups=parallel_state.get_data_parallel_group(as_list=True))
    for own in sharded.shards(mean):
        torch.testing.assert_close(own, want)
    for name, parameter in model.named_parameters():
        dim = 1 if name == "down" else 0
        for rank, own in enumerate(sharded.shards(parameter.grad)):
            part = grads[name] if name == "norm" else grads[name].chunk(tp, dim)[rank % tp]
            torch.testing.assert_close(own, part, rtol=1e-4, atol=1e-6, msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}")


def step(model: Model, reduce: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = parallel_state.get_data_parallel_rank()
    ids = torch.arange(ROWS, device="xla") + rank
    model(ids, ids).backward()
    if reduce:
        xm.reduce_gradients(optimizer, groups=parallel_state.get_data_parallel_group(as_list=True))
    optimizer.step()
    xm.mark_step()


@pytest.mark.parametrize("strict", [False, True])
def test_a_missing_reduction_over_dp_is_noticed(strict: bool, nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_replicas, "_reported", set())
    monkeypatch.setenv("NXD_JAX_STRICT_REPLICAS", "1" if strict else "0")
    nxd(4, tp=2)
    full = {name: w.to("xla") for name, w in weights().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        step(Model(full), reduce=True)
    text = r"parameter 'norm' is shared by 2 dp ranks.*not reduced over dp.*xm\.reduce_gradients"
    if strict:
        with pytest.raises(check_replicas.ReplicaDriftError, match=text):
            step(Model(full), reduce=False)
    else:
        with pytest.warns(UserWarning, match=text):
            step(Model(full), reduce=False)


def test_a_missing_reduction_over_tp_is_noticed(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `Copy` before the head, every rank adds only its own part of the vocabulary to the gradient of what is shared."""
    monkeypatch.setattr(check_replicas, "_reported", set())
    monkeypatch.setattr(Copy, "apply", lambda x: x)
    nxd(2, tp=2)
    with pytest.warns(UserWarning, match=r"parameter 'norm' is shared by 2 tp ranks.*not reduced over tp"):
        step(Model({name: w.to("xla") for name, w in weights().items()}), reduce=True)
