"""`torch_neuronx.xla_impl.ops`: operators that the original has kernels for, a memory hint, and NKI kernels, which are not provided."""

from __future__ import annotations

from typing import Any

import torch


class RmsNorm:
    """`ops.RmsNorm.apply(x, weight, eps, dim)`: x over the root of the mean of its squares along a dim (in float32), times `weight`; in x's dtype."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, dim: int = -1) -> torch.Tensor:
        """The normalised tensor."""
        wide = x.to(torch.float32)
        found = (wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)).to(x.dtype)
        shape = [1] * x.dim()
        shape[dim] = -1
        return found * weight.reshape(shape).to(x.dtype)


class Softmax:
    """`ops.Softmax.apply(x, dim)`: `torch.softmax`."""

    @staticmethod
    def apply(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The probabilities, in x's dtype."""
        return torch.softmax(x, dim)


class Argmax:
    """`ops.Argmax.apply(x, dim, keepdim)`: `torch.argmax`."""

    @staticmethod
    def apply(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        """int64 indices."""
        return torch.argmax(x, dim, keepdim)


class TopK:
    """`ops.TopK.apply(x, k, dim)`: `torch.topk`."""

    @staticmethod
    def apply(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and int64 indices, largest first."""
        found = torch.topk(x, k, dim)
        return found.values, found.indices


class ConcatenateOp:
    """`ops.ConcatenateOp.apply(*tensors, dim)`: `torch.cat`, also of float8 tensors."""

    @staticmethod
    def apply(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The tensors one behind the other."""
        return torch.cat(tensors, dim)


def set_unload_prior_neuron_models_mode(value: bool) -> None:
    """`ops.set_unload_prior_neuron_models_mode`: whether a core drops programs that ran before. Accepted without effect."""


def nki_jit(*args: object, **kwargs: object) -> Any:
    """`ops.nki_jit`: raises NotImplementedError."""
    raise NotImplementedError(
        "torch_neuronx.nki_jit compiles NKI kernels for Neuron hardware. For attention there is neuronx_distributed.kernels; write other kernels in "
        "JAX: torch.library.custom_op and @torch_bridge.lowerings.lowering."
    )
