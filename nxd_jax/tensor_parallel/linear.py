"""Linear layers whose weights tensor parallel ranks share out.

All of them draw the full weight from torch's CPU random state, so one seed gives the same model for every tensor parallel size. A process that
hosts several ranks makes the parts on xla at once (a CPU tensor cannot hold them all); `.to("xla")` then leaves them alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nxd_jax.tensor_parallel import layer_groups, parallel_groups, random, regions, sharded_weights
from nxd_jax.tensor_parallel.base_layer import BaseParallelLinear
from nxd_jax.tensor_parallel.partition import set_tensor_model_parallel_attributes
from nxd_jax.tensor_parallel.sharded_weights import Init


def create_local_weight(
    full_weight: torch.Tensor, partition_dim: int, per_partition_size: int, stride: int = 1, out_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """This tensor parallel rank's part of a full weight, `per_partition_size` entries along `partition_dim`.

    With a stride of s the full weight is s fused ones, and the part holds a part of each. Written into `out_weight` if it is given. In a process
    that hosts several ranks the result is an xla tensor that differs by rank (`out_weight` must be one too).
    """
    partition = sharded_weights.Partition(layer_groups.tensor_parallel(), partition_dim % full_weight.dim(), stride)
    local = sharded_weights.local(full_weight, partition, per_partition_size)
    if out_weight is None:
        return local
    with torch.no_grad():
        return out_weight.copy_(local)


def _initialize_parameter_cpu(
    param: torch.Tensor,
    partition_dim: int,
    num_partitions: int,
    init_method: Init,
    return_master_param: bool = False,
    *,
    param_dtype: torch.dtype = torch.float32,
    stride: int = 1,
) -> torch.Tensor | None:
    """Mark a parameter of one rank's shape as shared out, and fill it with this rank's part of a full one that `init_method` drew in float32.

    num_partitions: the tensor parallel size, or 1. In a process that hosts several ranks a CPU parameter, too, is each rank's own once it is moved to xla.
    Returns the full parameter in `param_dtype` with `return_master_param`, else None. Raises ValueError for another number of partitions.
    """
    count = parallel_groups.size("tp")
    if num_partitions not in (1, count):
        raise ValueError(f"num_partitions={num_partitions} must be the tensor parallel size {count}, or 1")
    dim = partition_dim % param.dim()
    part = param.shape[dim]
    set_tensor_model_parallel_attributes(param, True, dim, stride, num_partitions)
    shape = [n * num_partitions if d == dim else n for d, n in enumerate(param.shape)]
    master = sharded_weights.drawn(shape, init_method).to(param_dtype)
    rank = parallel_groups.rank("tp") if num_partitions > 1 else 0
    in_order = torch.cat([sharded_weights.cut(master, dim, part, stride, k, num_partitions) for k in range(num_partitions)], dim)
    with torch.no_grad():
        param.copy_(in_order.narrow(dim, rank * part, part))
    return master if return_master_param else None


def _initialize_affine_weight_neuron(
    weight: torch.Tensor, init_method: Init, partition_dim: int, num_partitions: int, stride: int = 1
) -> None:
    """Mark a parameter of one rank's shape as shared out, and let `init_method` fill it where it is: each tensor parallel rank draws its own part.

    Raises Exception before `model_parallel_xla_manual_seed`.
    """
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride, num_partitions)
    with random.get_xla_rng_tracker().fork(), torch.no_grad():
        init_method(weight)


class ColumnParallelLinear(BaseParallelLinear):
    """Y = X W^T + b with the rows of W (the outputs) shared out: each rank has W_i of shape [output_size / tp, input_size].

    input_size, output_size: of the full layer.
    bias: full-size with `gather_output`, else shared out as W is.
    gather_output: give all ranks the whole of Y; else each has its own part, [..., output_size / tp]. Not with sequence parallelism.
    dtype, device: of the weights; "meta" gives shapes only, until `init_weight_cpu()`.
    stride: fused weights along the output (gate and up: 2), each shared out by itself.
    init_method: called with the full float32 weight; default as `torch.nn.Linear`. With it the bias starts at zero.
    sequence_parallel_enabled, sequence_dimension: the input is this rank's part of the sequence (dim 0 if not given): gather it first.
    keep_master_weight: keep the full weight as `master_weight`.
    skip_bias_add: return (Y without the bias, bias).
    pad, pad_alignment_size_per_rank, keep_padded_output: pad W with rows of zeros to a multiple of tp * alignment; cut their outputs from a gathered Y
    again unless `keep_padded_output`. Their entries of the bias are the dtype's least number (`torch.finfo(dtype).min`): a padded vocabulary entry is
    never the likeliest. Without a bias these outputs are 0. Inference only: RuntimeError in training mode. `output_size` becomes the padded size.
    tensor_model_parallel_group: the ranks to share W out to; default the tensor parallel group.
    reduce_dtype: in which the input's gradient is summed.
    rank_ordering: member k of the group holds part `rank_ordering[k]`; a gathered Y is in the order of the parts.

    Raises AssertionError if the outputs do not divide by tp.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
        rank_ordering: Any = None,
    ):
        super().__init__(tensor_model_parallel_group, 0, dtype, device, stride, rank_ordering, init_method, keep_master_weight)
        self.input_size = input_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.pad = pad
        self.pad_alignment_size_per_rank = pad_alignment_size_per_rank
        self.keep_padded_output = keep_padded_output
        self.reduce_dtype = reduce_dtype
        self._set_sequence_dimension(sequence_parallel_enabled, sequence_dimension)
        self.pad_size = self._pad_to(output_size, pad_alignment_size_per_rank)
        self.output_size = output_size + self.pad_size
        self.output_size_per_partition = self._check_divides("output_size", self.output_size, "or pass pad=True (inference)")
        self.async_tensor_model_parallel_allreduce = not sequence_parallel_enabled and self._partition.size > 1
        self.add_bias = bias
        self.initialize_weight_and_bias()

    def set_weight_and_bias_config(self) -> None:
        self.weight_shape = (self.output_size_per_partition, self.input_size)
        self.weight_partition_dim = 0
        self.bias_shape = (self.output_size if self.gather_output else self.output_size_per_partition,) if self.add_bias else None

    def _shares_bias(self) -> bool:
        return not self.gather_output

    def _bias_padding(self) -> int:
        return self.pad_size

    def _bias_fill(self, dtype: torch.dtype) -> float:
        """The least number of the bias, also after a cast to the layer's dtype: a padded vocabulary entry is never the likeliest."""
        return max(torch.finfo(dtype).min, torch.finfo(self.dtype).min)

    def forward(self, input: torch.Tensor, slice_indices: torch.Tensor | None = None) -> Any:
        """input: [..., input_size]. slice_indices: compute only these outputs of each rank's own."""
        self._check_pad_false_for_training()
        if self.gather_output and self.sequence_parallel_enabled:
            raise AssertionError("ColumnParallelLinear: gather_output=True cannot be combined with sequence_parallel_enabled=True")
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if slice_indices is not None:
            weight = weight.index_select(0, slice_indices)
            bias = bias if bias is None or self.gather_output else bias.index_select(0, slice_indices)
        x = self._cpl_maybe_input_copy_to_tp_region(input)
        out = self._multiply(x, weight, self.async_tensor_model_parallel_allreduce, self.sequence_parallel_enabled)
        if slice_indices is None:
            out = self._cpl_maybe_gather_output(out)
            bias = bias if bias is None or not self.gather_output else self._without_padding(bias)
        elif self.gather_output:
            out = self._gathered(out)
        if self.skip_bias_add:
            return out, bias
        return out if bias is None else out + bias.to(out.dtype)

    def _cpl_maybe_input_copy_to_tp_region(self, input: torch.Tensor) -> torch.Tensor:
        """The input; if the product does not sum its gradient over the ranks, a copy that does."""
        if self.async_tensor_model_parallel_allreduce or self.sequence_parallel_enabled or self._partition.size == 1:
            return input
        return regions.copy_to_tensor_model_parallel_region(input, self.tensor_parallel_group)

    def _cpl_maybe_gather_output(self, output_parallel: torch.Tensor) -> torch.Tensor:
        """With `gather_output` the whole output, without padding unless it is to be kept."""
        return self._without_padding(self._gathered(output_parallel)) if self.gather_output else output_parallel

    def _gathered(self, out: torch.Tensor) -> torch.Tensor:
        """All parts in the order of the full weight's rows (NxD leaves those of fused weights interleaved by rank)."""
        count = self._partition.size
        whole = regions.gather(out, -1, self._partition.group)
        if self.stride == 1 or count == 1:
            return whole
        return whole.unflatten(-1, (count, self.stride, -1)).transpose(-3, -2).flatten(-3)

    def _without_padding(self, x: torch.Tensor) -> torch.Tensor:
        keep = not self.pad_size or self.keep_padded_output
        return x if keep else x.narrow(-1, 0, self.output_size - self.pad_size)


class RowParallelLinear(BaseParallelLinear):
    """Y = X W^T + b with the columns of W (the inputs) shared out: each rank has W_i of shape [output_size, input_size / tp].

    The ranks' partial results are summed in `reduce_dtype`, then the bias, which all ranks hold, is added.

    input_is_parallel: X is this rank's part already ([..., input_size / tp], as a column-parallel layer leaves it); else it is cut here.
    sequence_parallel_enabled, sequence_dimension: give each rank its part of the sequence (dim 0 if not given) of the sum. Needs
    `input_is_parallel` (RuntimeError). The bias then has `sequence_parallel_enabled` set: its gradient is summed over the ranks with the norms'.
    reduce_output: False leaves Y the rank's partial result, without the sum.
    pad: pad the inputs with zeros to a multiple of tp; inference only. `input_size` becomes the padded size.
    tile_cc: a hint to the Neuron compiler, without effect.
    The others are as in `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
        tile_cc: bool = False,
        rank_ordering: Any = None,
    ):
        if sequence_parallel_enabled and not input_is_parallel:
            raise RuntimeError("RowParallelLinear: to enable sequence_parallel_enabled, input_is_parallel must be True")
        device = None if device is False else device  # the API guide gives False as the default
        super().__init__(tensor_model_parallel_group, 1, dtype, device, stride, rank_ordering, init_method, keep_master_weight)
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.pad = pad
        self.reduce_output = reduce_output
        self.reduce_dtype = reduce_dtype
        self.tile_cc = tile_cc
        self._set_sequence_dimension(sequence_parallel_enabled, sequence_dimension)
        self.pad_size = self._pad_to(input_size)
        self.input_size = input_size + self.pad_size
        self.input_size_per_partition = self._check_divides("input_size", self.input_size, "or pass pad=True (inference)")
        self.add_bias = bias
        self.initialize_weight_and_bias()
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def set_weight_and_bias_config(self) -> None:
        self.weight_shape = (self.output_size, self.input_size_per_partition)
        self.weight_partition_dim = 1
        self.bias_shape = (self.output_size,) if self.add_bias else None

    def forward(self, input: torch.Tensor) -> Any:
        """input: [..., input_size / tp], or [..., input_size] without `input_is_parallel`."""
        self._check_pad_false_for_training()
        out = self._multiply(self._rpl_maybe_scatter_input(input), self.weight, all_reduce=False, gather=False)
        out = self._rpl_maybe_reduce_output(out)
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _rpl_maybe_scatter_input(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of the input, padded before if the layer is."""
        if self.input_is_parallel:
            return input
        return self._scattered(F.pad(input, (0, self.pad_size)) if self.pad_size else input)

    def _rpl_maybe_reduce_output(self, output: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' partial results, unless `reduce_output` is off."""
        return self._reduced(output) if self.reduce_output else output

    def _scattered(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the last dim; parts of each of `stride` fused blocks, as the weight's columns are."""
        group = self._partition.group
        if self.stride == 1 or self._partition.size == 1:
            return regions.scatter(x, -1, group)
        blocks = x.unflatten(-1, (self.stride, -1))
        return regions.scatter(blocks, -1, group).flatten(-2)

    def _reduced(self, out: torch.Tensor) -> torch.Tensor:
        group = self.tensor_parallel_group
        if self._partition.size == 1:
            return out
        if self.sequence_parallel_enabled:
            return regions.reduce_scatter_to_sequence_parallel_region(out, self.sequence_dimension, group, self.reduce_dtype)
        wide = out if self.reduce_dtype is None else out.to(self.reduce_dtype)
        return regions.reduce_from_tensor_model_parallel_region(wide, group).to(out.dtype)
