"""Parameters of a divided model whose gradients are given, not computed: what an optimizer makes of them, against plain torch on whole tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import neuronx_distributed as nxd_api
import torch

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

Parameters = dict[str, torch.nn.Parameter]

WHOLE: dict[str, tuple[tuple[int, ...], int | None]] = {
    "rows": ((6, 4), 0),
    "columns": ((5, 8), 1),
    "filters": ((4, 3, 2), 0),
    "bias": ((6,), 0),
    "matrix": ((7, 3), None),
    "single": ((1, 5), None),
    "vector": ((5,), None),
    "number": ((), None),
}
"""Shapes, and the dim that tensor-parallel ranks share out. With 4 data-parallel ranks no number of rows divides."""

SELDOM, FROZEN = "vector", "single"


@dataclasses.dataclass
class Case:
    """An optimizer, its options, and the ranks. groups: vectors in a group of their own; seldom: a parameter without gradient in every other step."""

    optimizer: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    world: int = 4
    tp: int = 2
    zero: bool = True
    clip: float | None = 1.0
    groups: bool = False
    scheduler: bool = False
    seldom: bool = False
    dtype: torch.dtype = torch.float32
    masters: bool = True
    steps: int = 20

    @property
    def dp(self) -> int:
        return self.world // self.tp

    def config(self, **precision: bool) -> dict[str, Any]:
        options = {
            "zero_one_enabled": self.zero,
            "grad_clipping": self.clip is not None,
            **({"max_grad_norm": self.clip} if self.clip else {}),
        }
        return nxd_api.neuronx_distributed_config(
            tensor_parallel_size=self.tp, optimizer_config=options, mixed_precision_config=precision or None
        )

    def parameters(self, given: Parameters) -> Any:
        if not self.groups:
            return list(given.values())
        return [
            {"params": [p for n, p in given.items() if len(WHOLE[n][0]) > 1], "weight_decay": 0.1},
            {"params": [p for n, p in given.items() if len(WHOLE[n][0]) <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]

    def gradients(self, step: int) -> dict[str, list[torch.Tensor]]:
        """Of whole tensors, by data-parallel rank."""
        draw = torch.Generator().manual_seed(100 + step)
        found = {
            n: [torch.randn(shape, generator=draw).to(self.dtype) for _ in range(self.dp)] for n, (shape, _) in WHOLE.items() if n != FROZEN
        }
        if self.seldom and step % 2:
            del found[SELDOM]
        return found


def start() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=draw) for n, (shape, _) in WHOLE.items()}


def place(kind: str, rank: int) -> int:
    groups = {"tp": parallel_state.get_tensor_model_parallel_group, "dp": parallel_state.get_data_parallel_group}[kind](as_list=True)
    return next(g.index(rank) for g in groups if rank in g)


def part(by_dp: list[torch.Tensor], dim: int | None, tp: int, rank: int) -> torch.Tensor:
    """What a rank holds of the whole tensor that its data-parallel rank has."""
    whole = by_dp[place("dp", rank)]
    return whole if dim is None or tp == 1 else whole.chunk(tp, dim)[place("tp", rank)].contiguous()


def joined(t: torch.Tensor, dim: int | None, tp: int) -> torch.Tensor:
    """The whole tensor; ranks that should agree do."""
    held = sharded.shards(t.detach())
    parts = [next(v for r, v in enumerate(held) if place("tp", r) == k) for k in range(tp)]
    assert all(torch.equal(v, parts[place("tp", r)]) for r, v in enumerate(held))
    if dim is None:
        assert all(torch.equal(p, parts[0]) for p in parts)
        return parts[0]
    return torch.cat(parts, dim)


class Divided:
    """The parameters on xla, and the wrapped optimizer."""

    def __init__(self, case: Case, **precision: bool):
        self.case = case
        self.parameters: Parameters = {}
        for name, whole in start().items():
            dim = WHOLE[name][1] if case.tp > 1 else None
            axes = ("tp",) if dim is not None else ()
            of = whole.to(case.dtype)
            p = torch.nn.Parameter(sharded.from_ranks(functools.partial(part, [of] * case.dp, dim, case.tp), axes, dim or 0))
            if dim is not None:
                set_tensor_model_parallel_attributes(p, True, dim, 1, case.tp)
            p.requires_grad_(name != FROZEN)
            self.parameters[name] = p
        config = case.config(**precision)
        self.optimizer = nxd_api.initialize_parallel_optimizer(config, case.optimizer, case.parameters(self.parameters), **case.options)

    def give(self, gradients: dict[str, list[torch.Tensor]]) -> None:
        self.optimizer.zero_grad()
        tp = self.case.tp
        for name, of in gradients.items():
            dim = WHOLE[name][1] if tp > 1 else None
            axes = ("dp", "tp") if dim is not None else ("dp",)
            self.parameters[name].grad = sharded.from_ranks(functools.partial(part, of, dim, tp), axes, dim or 0)

    def whole(self) -> dict[str, torch.Tensor]:
        return {n: joined(p, WHOLE[n][1] if self.case.tp > 1 else None, self.case.tp) for n, p in self.parameters.items()}


class Plain:
    """Whole parameters in torch, in the dtype that they are updated in."""

    def __init__(self, case: Case, dtype: torch.dtype):
        self.case = case
        self.dtype = dtype
        self.parameters = {n: torch.nn.Parameter(t.to(case.dtype).to(dtype), requires_grad=n != FROZEN) for n, t in start().items()}
        self.optimizer = case.optimizer(case.parameters(self.parameters), **case.options)

    def step(self, gradients: dict[str, list[torch.Tensor]]) -> float:
        self.optimizer.zero_grad()
        for name, of in gradients.items():
            self.parameters[name].grad = (sum(g.to(self.dtype) for g in of) / len(of)).to(self.dtype)  # type: ignore[union-attr]
        given = list(self.parameters.values())
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in given if p.grad is not None])
        if self.case.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(given, self.case.clip, norm)
        self.optimizer.step()
        return norm.item()


def compare(nxd: Any, case: Case, rtol: float = 1e-5, atol: float = 1e-6) -> Divided:
    """Norms and weights agree after every step (norms) and at the end (weights)."""
    nxd(case.world, tp=case.tp)
    ours = Divided(case)
    theirs = Plain(case, torch.float32 if case.zero else case.dtype)
    schedulers = (
        [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 4)) for o in (ours.optimizer, theirs.optimizer)]
        if case.scheduler
        else []
    )
    for step in range(case.steps):
        gradients = case.gradients(step)
        ours.give(gradients)
        ours.optimizer.step()
        executor.sync()
        norm = theirs.step(gradients)
        for scheduler in schedulers:
            scheduler.step()
        if case.clip is not None and step % 10 == 0:
            torch.testing.assert_close(ours.optimizer.grad_norm, torch.tensor([norm]).to("xla"), rtol=max(rtol, 1e-5), atol=atol)
    for name, found in ours.whole().items():
        expected = theirs.parameters[name].detach().to(case.dtype)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=functools.partial("{}: {}".format, name))
    return ours
