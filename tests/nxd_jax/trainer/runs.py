"""The same small training run twice: wrapped for several ranks, and in plain torch on the combined batch."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import neuronx_distributed as nxd_api
import torch
from torch import nn

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.utils.full_weights import gather_full
from torch_bridge.recorder import sharded

WIDTH, HIDDEN, WORDS = 8, 12, 10
Class = Callable[..., torch.optim.Optimizer]


class Model(nn.Module):
    """Rows that do not divide by 4, a tensor of one row, one without dims, one that is used in even steps only, and a frozen one."""

    def __init__(self, parallel: bool, tied: bool = False):
        super().__init__()
        if parallel:
            self.embed: Any = ParallelEmbedding(WORDS, WIDTH)
            self.up: Any = ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False)
            self.down: Any = RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True)
        else:
            self.embed, self.up, self.down = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.again = nn.Linear(WIDTH, 5, bias=False)
        if tied:
            self.again.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((1, WIDTH), 0.1))
        self.sometimes = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((2, WIDTH), 0.2), requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, even: bool) -> torch.Tensor:
        x = self.embed(ids) + self.shift + self.frozen[0]
        x = self.norm(x + self.down(torch.tanh(self.up(x)))) * self.scale
        if even:
            x = x * self.sometimes.mean()
        logits = self.head(x) + self.again(x)
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


@dataclasses.dataclass
class Run:
    """What to train, and how. groups: leave vectors out of weight decay. accumulate: backward passes in a step. alternate: leave a
    parameter without gradient in odd steps. dtype: of weights."""

    optimizer: Class
    options: dict[str, Any]
    world: int = 4
    tp: int = 2
    cp: int = 1
    zero: bool = True
    clip: float | None = 0.5
    groups: bool = False
    scheduler: bool = False
    accumulate: int = 1
    tied: bool = False
    alternate: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 20

    @property
    def dp(self) -> int:
        return self.world // self.tp // self.cp

    def config(self) -> dict[str, Any]:
        options = {
            "zero_one_enabled": self.zero,
            "grad_clipping": self.clip is not None,
            **({"max_grad_norm": self.clip} if self.clip else {}),
        }
        return nxd_api.neuronx_distributed_config(tensor_parallel_size=self.tp, context_parallel_size=self.cp, optimizer_config=options)

    def parameters(self, model: nn.Module) -> Any:
        if not self.groups:
            return model.parameters()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        return [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1)) if self.scheduler else None

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each step: ids and labels, [backward passes, data-parallel ranks, context-parallel ranks, samples, length]."""
        draw = torch.Generator().manual_seed(1)
        shape = (self.accumulate, self.dp, self.cp, 2, 4)
        for _ in range(self.steps):
            yield torch.randint(0, WORDS, shape, generator=draw), torch.randint(0, 5, shape, generator=draw)


class Wrapped:
    """The run under `initialize_parallel_model` and `initialize_parallel_optimizer`."""

    def __init__(self, run: Run):
        self.run = run
        torch.manual_seed(0)
        config = run.config()
        self.model = nxd_api.initialize_parallel_model(config, lambda: Model(True, run.tied).to(run.dtype))
        self.optimizer = nxd_api.initialize_parallel_optimizer(config, run.optimizer, run.parameters(self.model), **run.options)
        self.scheduler = run.schedule(self.optimizer)
        self.count = 0

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Loss over the combined batch, and norm of the gradients."""
        dp, cp = parallel_state.get_data_parallel_rank(), parallel_state.get_context_model_parallel_rank()
        even = not self.run.alternate or self.count % 2 == 0
        self.count += 1
        self.optimizer.zero_grad()
        losses = []
        for x, y in zip(ids.to("xla"), labels.to("xla"), strict=True):
            loss = self.model(x[dp][cp], y[dp][cp], even)
            (loss / len(ids)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        every = sharded.shards(torch.stack(losses).mean())
        norm = self.optimizer.grad_norm
        return sum(v.item() for v in every) / len(every), 0.0 if norm is None else norm.item()

    def weights(self) -> dict[str, torch.Tensor]:
        for p in self.model.parameters():
            agree(p)
        return {n: gather_full(p).reshape(p.shape if not p.dim() else gather_full(p).shape) for n, p in self.model.named_parameters()}  # type: ignore[union-attr]


def agree(p: torch.Tensor) -> None:
    """Ranks that should hold the same value do."""
    groups = parallel_state.get_data_parallel_group(as_list=True)
    values = sharded.shards(p.detach())
    assert all(torch.equal(values[r], values[g[0]]) for g in groups for r in g)


class Plain:
    """The run in torch on the CPU. masters: float32 copies of the weights are what is updated."""

    def __init__(self, run: Run, weights: dict[str, torch.Tensor], masters: bool):
        self.run = run
        self.model = Model(False, run.tied).to(run.dtype)
        for name, p in self.model.named_parameters():
            p.data = weights[name].clone().reshape(p.shape)
        self.masters = copy_of(self.model) if masters else self.model
        self.optimizer = run.optimizer(run.parameters(self.masters), **run.options)
        self.scheduler = run.schedule(self.optimizer)
        self.count = 0

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        even = not self.run.alternate or self.count % 2 == 0
        self.count += 1
        self.optimizer.zero_grad()
        self.model.zero_grad()
        total = 0.0
        for x, y in zip(ids, labels, strict=True):
            loss = self.model(x.flatten(0, 2), y.flatten(0, 2), even) / len(ids)
            loss.backward()
            total += loss.item()
        if self.masters is not self.model:
            for p, q in zip(self.masters.parameters(), self.model.parameters(), strict=True):
                p.grad = None if q.grad is None else q.grad.float()
        norm = 0.0
        if self.run.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.masters.parameters(), self.run.clip).item()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.masters is not self.model:
            with torch.no_grad():
                for p, q in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                    p.copy_(q)
        return total, norm


def copy_of(model: nn.Module) -> nn.Module:
    """The same in float32."""
    return copy.deepcopy(model).float()


def compare(nxd: Any, run: Run, rtol: float = 1e-5, atol: float = 2e-6, masters: bool = False) -> Wrapped:
    """Train both ways; losses, norms and weights agree."""
    nxd(run.world, tp=run.tp, cp=run.cp)
    wrapped = Wrapped(run)
    plain = Plain(run, wrapped.weights(), masters)
    for ids, labels in run.batches():
        ours, theirs = wrapped.step(ids, labels), plain.step(ids, labels)
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=max(rtol, 1e-5), atol=atol)
    found = wrapped.weights()
    for name, p in plain.model.named_parameters():
        torch.testing.assert_close(
            found[name].reshape(p.shape), p.detach(), rtol=rtol, atol=atol, msg=functools.partial("{}: {}".format, name)
        )
    return wrapped
