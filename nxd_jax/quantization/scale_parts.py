"""Which part of a weight's scale a rank holds, and whole scales of checkpoints in the shape that ranks share out. (NxD has no such functions.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nxd_jax.quantization.quantization_config import QuantizationType
from nxd_jax.quantization.schemes import Scheme
from nxd_jax.tensor_parallel import sharded_weights
from nxd_jax.tensor_parallel.sharded_weights import Partition


def blocks_of(axes: Sequence[int], sizes: Sequence[int], dims: int) -> tuple[tuple[int, int], ...]:
    """(dim, entries of a block) for each of `block_axis`; negative dims count from the end. Raises AssertionError for dims and sizes that cannot be."""
    found = tuple((axis + dims if axis < 0 else axis, size) for axis, size in zip(axes, sizes, strict=True))
    if len({axis for axis, _ in found}) < len(found) or any(not 0 <= axis < dims or size < 1 for axis, size in found):
        raise AssertionError(
            f"block_axis={list(axes)} with block_size={list(sizes)}: a weight of {dims} dims has different axes from {-dims} to {dims - 1}, and blocks of at "
            "least 1 entry"
        )
    if dims == 3 and dict(found).get(0, 1) > 1:
        raise AssertionError(
            f"block_axis={list(axes)} with block_size={list(sizes)}: experts (dim 0) do not share blocks; name dims 1 and 2 only"
        )
    return found


def local_shape(scheme: Scheme, weight_shape: Sequence[int], partition: Partition, layer: str) -> list[int]:
    """The shape of a rank's part of the scale. weight_shape: of its part of the weight.

    Ranks whose parts are smaller than a block have a scale each, equal for those that share the block. Raises AssertionError if blocks and parts do not fit.
    """
    shape = scheme.scale_shape(weight_shape)
    size = dict(scheme.blocks).get(partition.dim)
    if size is None or partition.size == 1:
        return shape
    part = weight_shape[partition.dim]
    piece = part // partition.stride
    if piece % size and (partition.stride > 1 or size % piece):
        raise AssertionError(
            f"{layer}: blocks of {size} entries along dim {partition.dim} do not fit the {piece} that each of {partition.size} ranks has"
            f"{f' of each of {partition.stride} fused weights' if partition.stride > 1 else ''}: choose another block_size or tensor parallel size"
        )
    shape[partition.dim] = max(1, part // size)
    return shape


def partition_of(scheme: Scheme, weight: Partition) -> Partition | None:
    """How ranks share out the scale: along the dims of the weight that they share out and along which it has more than one number. None: all have all of it."""
    if scheme.kind is QuantizationType.PER_TENSOR_SYMMETRIC:
        return None
    entries = None if scheme.kind is QuantizationType.PER_CHANNEL_SYMMETRIC else weight.entries
    if scheme.is_blockwise or scheme.channel_axis == weight.dim:
        return dataclasses.replace(weight, entries=entries)
    return None if entries is None else dataclasses.replace(weight, group=None, stride=1, rank_ordering=None, entries=entries)


def spread(
    scale: torch.Tensor, scheme: Scheme, weight_shape: Sequence[int], padding: tuple[int, int], full_shape: Sequence[int]
) -> torch.Tensor:
    """A whole weight's scale in the shape that ranks share out: with zeros for what padding added, and blocks as often as ranks share them.

    weight_shape: of the whole weight without padding. padding: (dim, entries) of the weight's. full_shape: what is asked for; a scale that has it is
    returned as it is. Dims of one entry may be missing ([out] for [out, 1]). Raises ValueError for a scale that does not belong to such a weight.
    """
    padded = [n + padding[1] if d == padding[0] else n for d, n in enumerate(weight_shape)]
    needed, wider = scheme.scale_shape(weight_shape), scheme.scale_shape(padded)
    found = scale
    for shape in (full_shape, wider, needed):
        if list(scale.shape) == list(shape) or (scale.dim() != len(shape) and _long(scale.shape) == _long(shape)):
            found = scale.reshape(list(shape))
            break
    else:
        raise ValueError(
            f"a scale of shape {list(scale.shape)} does not belong to a weight of shape {list(weight_shape)}, which needs {needed}"
        )
    if found.shape == torch.Size(full_shape):
        return found
    for d, n in enumerate(wider):
        found = sharded_weights.padded(found, d, n - found.shape[d]).repeat_interleave(full_shape[d] // n, d)
    return found


def _long(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n > 1]
