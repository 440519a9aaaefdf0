"""Training steps of several ranks: the numbers of separate eager ranks, one compilation, and buffers that are reused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

from tests.torch_bridge.ranks import eager, exchanges
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

TP, DP = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
}


class Reduce(torch.autograd.Function):
    """All-reduce over tp in the forward pass (a row-parallel layer's output)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return xm.all_reduce("sum", x, groups=TP)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Copy(torch.autograd.Function):
    """All-reduce over tp in the backward pass (a column-parallel layer's input)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return xm.all_reduce("sum", grad, groups=TP)


class ShardedMlp(torch.nn.Module):
    """A tensor-parallel MLP with a shared bias and a norm."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.up = torch.nn.Parameter(sharded.from_ranks(lambda r: up.chunk(2, 0)[r % 2].clone(), ("tp",)))
        self.down = torch.nn.Parameter(sharded.from_ranks(lambda r: down.chunk(2, 1)[r % 2].clone(), ("tp",), dim=1))
        self.bias = torch.nn.Parameter(bias.clone().to("xla"))
        self.norm = torch.nn.LayerNorm(up.shape[1]).to("xla")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(Copy.apply(self.norm(x)) @ self.up.t())
        return Reduce.apply(hidden @ self.down.t()) + self.bias


class WholeMlp(torch.nn.Module):
    def __init__(self, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.up, self.down, self.bias = (torch.nn.Parameter(t.clone()) for t in (up, down, bias))
        self.norm = torch.nn.LayerNorm(up.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x) @ self.up.t()) @ self.down.t() + self.bias


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_of_a_tensor_and_data_parallel_mlp(hosted: Hosted, name: str) -> None:
    hosted(4, dp=2, tp=2)
    weights = torch.randn(8, 4), torch.randn(3, 8), torch.randn(3)
    ours, whole = ShardedMlp(*weights), WholeMlp(*weights)
    optimizer, reference = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](whole.parameters())
    compiled = []
    for step in range(10):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        y = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 + step))
        own_x, own_y = (sharded.from_ranks(lambda r, t=t: t.chunk(2)[r // 2].clone(), ("dp",)) for t in (x, y))
        optimizer.zero_grad()
        loss = (ours(own_x) - own_y).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer, groups=DP)
        xm.mark_step()
        reference.zero_grad()
        expected = (whole(x) - y).square().mean()
        expected.backward()
        reference.step()
        compiled.append(_compilations())
        eager.same(xm.all_reduce("sum", loss.detach(), 0.5, groups=DP), expected.detach(), 1e-4, 1e-5)
    assert 0 < compiled[2] == compiled[-1]
    eager.same(ours.up, [whole.up.detach().chunk(2, 0)[r % 2] for r in range(4)], 1e-4, 1e-5)
    eager.same(ours.down, [whole.down.detach().chunk(2, 1)[r % 2] for r in range(4)], 1e-4, 1e-5)
    eager.same(ours.bias, whole.bias.detach(), 1e-4, 1e-5)
    eager.same(ours.norm.weight, whole.norm.weight.detach(), 1e-4, 1e-5)
    assert sharded.varying(ours.bias).axes == () and sharded.varying(ours.down).global_shape == (3, 8)


def _compilations() -> int:
    return met.counter_value("UncachedCompile") or 0


def test_ranks_with_nothing_in_common(hosted: Hosted) -> None:
    """Every rank trains a model of its own: 4 eager runs."""
    hosted(4, dp=4)
    start = [torch.randn(3, 2, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    data = [[torch.randn(5, 2, generator=torch.Generator().manual_seed(10 * s + r)) for r in range(4)] for s in range(6)]
    w = torch.nn.Parameter(eager.on_xla(start))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        (eager.on_xla(batch) @ w.t()).square().sum().backward()
        optimizer.step()
        xm.mark_step()
    alone = []
    for r in range(4):
        own = torch.nn.Parameter(start[r].clone())
        opt = torch.optim.AdamW([own], lr=0.1)
        for batch in data:
            opt.zero_grad()
            (batch[r] @ own.t()).square().sum().backward()
            opt.step()
        alone.append(own.detach())
    eager.same(w, alone, 1e-4, 1e-5)


def test_gradient_accumulation_and_clipping(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)
    w = torch.nn.Parameter(torch.ones(3, device="xla"))
    whole = torch.nn.Parameter(torch.ones(3))
    optimizer, reference = torch.optim.SGD([w], lr=0.5), torch.optim.SGD([whole], lr=0.5)
    for step in range(4):
        for micro in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + micro))
            own = sharded.from_ranks(lambda r, x=x: x[r // 2].clone(), ("dp",))
            ((own * w).sum() ** 2 / 3).backward()
            (((x * whole).sum(1) ** 2).mean() / 3).backward()
            xm.mark_step()
        xm.reduce_gradients(optimizer, groups=DP)
        norm = torch.nn.utils.clip_grad_norm_([w], 1.0)
        eager.same(norm, torch.nn.utils.clip_grad_norm_([whole], 1.0), 1e-4, 1e-5)
        optimizer.step()
        reference.step()
        optimizer.zero_grad(set_to_none=False)
        reference.zero_grad(set_to_none=False)
    eager.same(w, whole.detach(), 1e-4, 1e-5)


def test_a_changing_number_for_each_rank_does_not_recompile(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)
    w = torch.nn.Parameter(torch.ones(3, device="xla") * (world.rank() + 1))
    optimizer = torch.optim.SGD([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
    counts = []
    for _ in range(6):
        optimizer.zero_grad()
        (w**2).sum().backward()
        optimizer.step()
        schedule.step()
        xm.mark_step()
        counts.append(_compilations())
    assert 0 < counts[1] == counts[-1]


def test_buffers_are_reused(hosted: Hosted) -> None:
    """A value that only the program holds is updated where it is."""
    hosted(4, dp=2, tp=2)
    x = sharded.from_ranks(lambda r: torch.full((1000,), float(r)))
    for _ in range(2):
        x += 1
        xm.mark_step()
    before = [s.data.unsafe_buffer_pointer() for s in x._storage.array.addressable_shards]  # type: ignore[attr-defined]
    old = x._storage.array  # type: ignore[attr-defined]
    del old
    x += 1
    xm.mark_step()
    after = [s.data.unsafe_buffer_pointer() for s in x._storage.array.addressable_shards]  # type: ignore[attr-defined]
    assert before == after
    eager.same(x, eager.each(lambda r: torch.full((1000,), r + 3.0)))


def test_a_failed_step_keeps_the_values(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)
    x = sharded.from_ranks(lambda r: torch.full((2,), float(r)))
    with pytest.raises(Exception, match="shape|size"):
        xm.all_gather(x, 0, output=torch.zeros(3, device="xla"))
    eager.same(x, eager.each(lambda r: torch.full((2,), float(r))))


def test_copies_of_modules(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)
    model = ShardedMlp(torch.randn(8, 4), torch.randn(3, 8), torch.randn(3))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.up.zero_()
    assert sharded.varying(twin.down).spec == sharded.varying(model.down).spec
    values = sharded.shards(twin.up.detach())
    assert not torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    fresh = ShardedMlp(torch.zeros(8, 4), torch.zeros(3, 8), torch.zeros(3))
    fresh.load_state_dict(twin.state_dict())
    eager.same(fresh.up, values)
    on_cpu = {k: v.cpu() for k, v in twin.state_dict().items()}
    other = ShardedMlp(torch.zeros(8, 4), torch.zeros(3, 8), torch.zeros(3))
    other.load_state_dict(on_cpu)
    eager.same(other.up, values)
    eager.same(other.down, sharded.shards(twin.down.detach()))
    half = twin.to(torch.bfloat16)
    assert half.up.dtype == torch.bfloat16 and sharded.varying(half.down).global_shape == (3, 8)
    eager.same(half.up, [v.to(torch.bfloat16) for v in values])


def test_exchanges_of_the_reference() -> None:
    """The plain Python collectives that the tests compare with."""
    values = [torch.tensor([float(r), 10.0 * r]) for r in range(4)]
    assert [t.tolist() for t in exchanges.reduce_scatter("sum", values, TP, 0)] == [[1.0], [10.0], [5.0], [50.0]]
    assert [t.tolist() for t in exchanges.all_to_all(values, DP, 0, 0)] == [[0.0, 2.0], [1.0, 3.0], [0.0, 20.0], [10.0, 30.0]]
