"""Operands of different dtypes that torch's CPU kernels refuse, products above all: without these checks a forgotten cast would go unnoticed.

torch's meta kernels let them through, and a lowering would give a number in one dtype or the other. See `checks`.
"""

from __future__ import annotations

import torch

from torch_bridge.recorder.argument_checks import checks, index_tensors, one_dtype, written_values

aten = torch.ops.aten
Tensor = torch.Tensor


@checks(aten.mm.default)
def _mm(self: Tensor, mat2: Tensor) -> None:
    one_dtype("mm", self, mat2)


@checks(aten.bmm.default)
def _bmm(self: Tensor, mat2: Tensor) -> None:
    one_dtype("bmm", self, mat2)


@checks(aten.mv.default)
def _mv(self: Tensor, vec: Tensor) -> None:
    one_dtype("mv", self, vec)


@checks(aten.dot.default, aten.vdot.default)
def _dot(self: Tensor, tensor: Tensor) -> None:
    one_dtype("dot", self, tensor)


@checks(aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default)
def _add_product(self: Tensor, first: Tensor, second: Tensor, **scales: object) -> None:
    one_dtype("a sum with a matrix product", self, first, second)


@checks(aten.index_copy.default)
def _index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    one_dtype("index_copy", self, source)
    if index.dtype != torch.int64:
        raise RuntimeError(f"index_copy_(): Expected a long tensor for index, but got {index.dtype}: convert it with .long()")
    if source.dim() and self.dim() == source.dim() and -self.dim() <= dim < self.dim() and index.numel() != source.shape[dim]:
        raise IndexError(f"index_copy_(): Number of indices ({index.numel()}) should be equal to source.size(dim) ({source.shape[dim]})")


@checks(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> None:
    index_tensors(self, indices)
    one_dtype("index_put", self, values)
    written_values(self, indices, values)


@checks(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)
def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *stats: object) -> None:
    """Weights and averages of a batch norm may be float32 beside 16-bit inputs, as with mixed precision."""
    of_channels = [t for t in (weight, bias, *stats) if isinstance(t, Tensor)]
    if x.dtype not in (torch.float16, torch.bfloat16) or any(t.dtype not in (x.dtype, torch.float32) for t in of_channels):
        one_dtype("batch_norm", x, *of_channels)


@checks(aten.binary_cross_entropy.default)
def _binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> None:
    one_dtype("binary_cross_entropy", self, target, weight)


@checks(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    *rest: object,
) -> None:
    one_dtype("embedding_bag", weight, per_sample_weights)
