"""Make the number of attention heads divide by the tensor-parallel size by adding heads of zeros.

A padded head computes zeros (its Q, K and V weights are zero) and adds nothing (so are the columns that read it), so the model's results stay what
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nxd_jax.tensor_parallel import layer_groups, parallel_groups
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.topology.hardware import hardware
from torch_bridge.collectives import functional
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

Hook = Callable[[torch.nn.Module, float], Any]


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add for `n_head` to divide by `tp_degree`. Raises ValueError for a `tp_degree` below 1."""
    if tp_degree < 1:
        raise ValueError(f"get_number_of_extra_heads(n_head={n_head}, tp_degree={tp_degree}): tp_degree is a number of ranks, at least 1")
    return -n_head % tp_degree


def pad_model(
    model: torch.nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Sequence[type] = (),
    pad_hook_fn: Hook | None = None,
) -> torch.nn.Module:
    """Pad the parallel linear layers of a model, in place, for `n_heads` heads to become a multiple of `tp_degree`; returns the model.

    wrapped_classes: only layers inside instances of these are padded (attention, usually); default: all layers, which also grows MLPs and a
    vocabulary-parallel head, so name the attention classes. pad_hook_fn: called with each instance of a wrapped class (without such classes with every
    module, the model last) and the ratio of padded to given heads, for attributes such as sizes of splits. The sharded dim of a `ColumnParallelLinear`
    (output) or `RowParallelLinear` (input) grows by that ratio; so does each of the `stride` pieces of a fused layer. Layers that gather their output or
    scatter their input are left alone: what is outside them is not padded.

    New heads come after the given ones in the whole weight, which is then cut anew: rank r holds whole heads, and pretrained weights keep their
    meaning (NxD appends to every rank's part, which breaks heads apart). Call it after the model is built, before its optimizer is.

    Raises ValueError if a layer's sharded size is not a multiple of `n_heads`, or `tp_degree` is not the tensor-parallel size.
    """
    extra = get_number_of_extra_heads(n_heads, tp_degree)
    if not extra:
        return model
    size = parallel_groups.size("tp")
    if size != tp_degree:
        raise ValueError(f"pad_model for tp_degree={tp_degree}: the model is divided over {size} tensor-parallel ranks")
    chosen = tuple(wrapped_classes)
    roots = [m for m in model.modules() if isinstance(m, chosen)] if chosen else [model]
    layers = {id(layer): (name, layer) for root in roots for name, layer in _layers(root)}
    for name, layer in layers.values():
        _pad_layer(name, layer, n_heads, n_heads + extra)
    if pad_hook_fn is not None:
        for module in roots if chosen else reversed(list(model.modules())):
            pad_hook_fn(module, (n_heads + extra) / n_heads)
    return model


def _layers(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in root.named_modules():
        column = isinstance(module, ColumnParallelLinear) and not module.gather_output
        row = isinstance(module, RowParallelLinear) and module.input_is_parallel
        if column or row:
            yield name, module


_SIZES = ("output_size", "output_size_per_partition", "input_size", "input_size_per_partition")


def _pad_layer(name: str, layer: Any, heads: int, padded_heads: int) -> None:
    dim = layer.weight.partition_dim
    stride = getattr(layer.weight, "partition_stride", 1)
    group = layer_groups.ordered(layer.tensor_parallel_group, getattr(layer.weight, "rank_ordering", None))
    pieces = layer.weight.shape[dim] * layer_groups.size(group) // stride
    if pieces % heads:
        raise ValueError(
            f"pad_model: '{name}' ({type(layer).__name__}) has a sharded size of {pieces}, no multiple of n_heads={heads}; name the attention classes in "
            "wrapped_classes so that other layers are left alone"
        )
    for key, param in list(layer.named_parameters(recurse=False)):
        if getattr(param, "tensor_model_parallel", False):
            padded = _padded(param, group, stride, heads, padded_heads)
            setattr(layer, key, _like(param, padded))
    for key in _SIZES[:2] if dim == 0 else _SIZES[2:]:
        if hasattr(layer, key):
            setattr(layer, key, getattr(layer, key) * padded_heads // heads)


def _like(old: torch.nn.Parameter, value: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with the attributes that were set on another one."""
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    for key, found in vars(old).items():
        if not key.startswith("_"):
            setattr(new, key, found)
    return new


def _padded(param: Any, group: GroupLike, stride: int, heads: int, padded_heads: int) -> torch.Tensor:
    """This rank's part of the whole weight with zeros for the new heads at the end of each of its `stride` pieces."""
    dim = param.partition_dim
    if param.device.type == "meta":
        size = list(param.shape)
        size[dim] = size[dim] * padded_heads // heads
        return torch.empty(size, dtype=param.dtype, device="meta")
    part = param.shape[dim] // stride
    new_part = part * padded_heads // heads
    with torch.no_grad():
        parts = [_with_zeros(param.detach().narrow(dim, k * part, part), dim, new_part, group) for k in range(stride)]
        padded = torch.cat(parts, dim).to(param.device)
    if padded.device.type == "xla":
        sharded.expect(padded, sharded.axes_of(group), dim)
    return padded


def _with_zeros(part: torch.Tensor, dim: int, new_part: int, group: GroupLike) -> torch.Tensor:
    """This rank's part of a piece that is put together, lengthened and cut again: on xla, as ranks exchange nothing on the CPU."""
    whole = functional.all_gather(part.to("xla"), dim, group)
    missing = layer_groups.size(group) * new_part - whole.shape[dim]
    padded = F.pad(whole, [0, 0] * (whole.dim() - 1 - dim) + [0, missing])
    return padded.narrow(dim, layer_groups.rank(group) * new_part, new_part)


def generate_padding_mask(
    num_heads: int, num_heads_with_pad: int, num_kv_heads: int, tp_degree: int, tp_rank: Any, hardware_type: Any = None
) -> torch.Tensor:
    """Which query heads of a rank are real: a bool tensor of `num_heads_with_pad / tp_degree` elements, False for padded ones.

    Query heads that share a K/V head stay together, padded at the end of their group to `num_heads_with_pad / num_kv_heads`. With fewer K/V heads than
    ranks, these are repeated: on trn1 (default) as a whole, so that rank r holds K/V head r % num_kv_heads and that group's part number
    r // num_kv_heads; on trn2 one by one, so that groups lie on neighbouring ranks. On the CPU; for a `tp_rank` that differs among the ranks that this
    process hosts, on xla with each rank's own.

    hardware_type: a name or a member of `utils.utils.hardware`; None: trn1.

    Raises ValueError for numbers that do not divide, and RuntimeError for hardware of which no layout is known.
    """
    adjacent = _repeats_one_by_one(hardware_type)
    for what, number in (("num_heads", num_heads), ("num_heads_with_pad", num_heads_with_pad)):
        if number % num_kv_heads:
            raise ValueError(f"{what}={number} must be a multiple of num_kv_heads={num_kv_heads}")
    if num_heads_with_pad % tp_degree or num_heads_with_pad < num_heads:
        raise ValueError(
            f"num_heads_with_pad={num_heads_with_pad} must be a multiple of tp_degree={tp_degree}, and at least num_heads={num_heads}"
        )
    group = torch.arange(num_heads_with_pad // num_kv_heads) < num_heads // num_kv_heads
    strided = num_kv_heads < tp_degree and not adjacent
    if strided and tp_degree % num_kv_heads:
        raise ValueError(f"tp_degree={tp_degree} must be a multiple of num_kv_heads={num_kv_heads}")
    local = num_heads_with_pad // tp_degree

    def of(rank: int) -> torch.Tensor:
        start = rank // num_kv_heads * local if strided else rank * local
        return group.repeat(num_kv_heads)[start : start + local].clone()

    places = _per_rank(tp_rank)
    if len(set(places)) == 1:
        return of(int(tp_rank))
    return sharded.from_ranks(lambda r: of(places[r]), world.axes_of_table(places))


def _repeats_one_by_one(hardware_type: object) -> bool:
    """Whether copies of a K/V head lie on neighbouring ranks."""
    if hardware_type is None:
        return False
    try:
        return hardware(getattr(hardware_type, "value", str(hardware_type).lower())) is hardware.TRN2
    except ValueError:
        raise RuntimeError(
            f"Unexpected hardware_type {hardware_type!r} in generate_padding_mask; use one of {', '.join(h.value for h in hardware)}"
        ) from None


def _per_rank(number: Any) -> list[int]:
    from torch_bridge.mesh import rank_numbers

    return [int(n) for n in rank_numbers.per_rank(number)]


__all__ = ["generate_padding_mask", "get_number_of_extra_heads", "pad_model"]
