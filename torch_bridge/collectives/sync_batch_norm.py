"""Batch norm over the batches of several ranks: `xf.SyncBatchNorm`, and what `torch.nn.SyncBatchNorm` calls for xla tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import batchnorm

from torch_bridge.collectives import functional
from torch_bridge.mesh import world

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike


class _Mean(torch.autograd.Function):
    """The mean over a group of ranks, whose gradient is the mean of their gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, count: int, groups: GroupLike) -> torch.Tensor:
        ctx.arguments = 1 / count, groups
        return functional.all_reduce("sum", value, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return functional.all_reduce("sum", grad, *ctx.arguments), None, None


class SyncBatchNorm(torch.nn.Module):
    """`xf.SyncBatchNorm`: batch norm over the batches of all ranks together.

    num_features: size of dim 1 of inputs of 2 to 5 dims. Weights, biases, running means and variances are [num_features]. As in torch_xla, `running_var`
    follows the biased variance, unlike torch's, and the variance is E[x^2] - E[x]^2. Raises ValueError for other inputs.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = torch.nn.Parameter(torch.ones(num_features))
        self.bias = torch.nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not 2 <= batch.ndim <= 5 or batch.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) takes 2 to 5 dims, dim 1 of size {self.num_features}; got {list(batch.shape)}"
            )
        mean, var = self._statistics(batch) if self.training else (self.running_mean, self.running_var)
        scale = (var + self.eps).rsqrt() * self.weight
        return ((batch - _channels(mean, batch)) * _channels(scale, batch) + _channels(self.bias, batch)).to(batch.dtype)

    def _statistics(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = _others(batch)
        own = torch.stack([batch.mean(dims), (batch * batch).mean(dims)])
        mean, square = _Mean.apply(own, world.size(), None).unbind()
        var = square - mean * mean
        _follow(self.running_mean, mean, self.momentum)
        _follow(self.running_var, var, self.momentum)
        return mean, var

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


def synchronized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    eps: float,
    momentum: float,
    count: int,
    groups: GroupLike,
) -> torch.Tensor:
    """What `torch.nn.SyncBatchNorm` computes in training, over the `count` ranks of a group.

    Ranks of one process have batches of one size. Those of several may not (a last batch): their sums are counted.
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = _others(x)
    n: Any = x.numel() // x.shape[1]
    if world.process_count() == 1:
        mean = _Mean.apply(wide.mean(dims), count, groups)
        centred = wide - _channels(mean, x)
        var = _Mean.apply((centred * centred).mean(dims), count, groups)
        n *= count
    else:
        sums = _Mean.apply(torch.cat([wide.sum(dims), wide.new_full((1,), n)]), 1, groups)
        n = sums[-1].detach()
        mean = sums[:-1] / n
        centred = wide - _channels(mean, x)
        var = _Mean.apply((centred * centred).sum(dims) / n, 1, groups)
    for running, now in ((running_mean, mean), (running_var, var * (n / (n - 1)))):
        if running is not None:
            _follow(running, now, momentum)
    out = centred * _channels((var + eps).rsqrt(), x)
    out = out if weight is None else out * _channels(weight, x)
    return (out if bias is None else out + _channels(bias, x)).to(x.dtype)


def _others(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _channels(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return v.reshape(1, -1, *[1] * (x.ndim - 2))


def _follow(running: torch.Tensor, now: torch.Tensor, momentum: float) -> None:
    with torch.no_grad():
        running.copy_((1 - momentum) * running + momentum * now)


_torchs = batchnorm.sync_batch_norm


class _OnAnyDevice:
    """Stands where torch has the autograd function of `nn.SyncBatchNorm`."""

    @staticmethod
    def apply(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.device.type != "xla":
            return _torchs.apply(x, *args)
        weight, bias, running_mean, running_var, eps, momentum, group, count = args
        return synchronized(x, weight, bias, running_mean, running_var, eps, momentum, count, group._groups().members)


def install() -> None:
    """Have `torch.nn.SyncBatchNorm` use `synchronized` for xla tensors."""
    batchnorm.sync_batch_norm = _OnAnyDevice  # type: ignore[assignment,misc]
