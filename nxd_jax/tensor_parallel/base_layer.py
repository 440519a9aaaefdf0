"""What all parallel layers have in common."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nxd_jax.tensor_parallel import layer_groups, sharded_weights
from nxd_jax.tensor_parallel.matmul import LinearWithAsyncCommunication, linear_with_async_allreduce
from nxd_jax.tensor_parallel.partition import get_padding_length
from nxd_jax.tensor_parallel.sharded_weights import Init, Partition

logger = logging.getLogger("nxd_jax")


class BaseParallelLayer(sharded_weights.Owner):
    """A layer whose weight the ranks of a group share out.

    Attributes: tensor_parallel_group (the process group), dtype, master_weight and master_bias (full-size, in `dtype` on the CPU, with
    `keep_master_weight`; else None).
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        group: Any,
        dim: int,
        dtype: torch.dtype,
        device: Any,
        stride: int = 1,
        rank_ordering: Any = None,
        init_method: Init | None = None,
        keep_master_weight: bool = False,
    ):
        super().__init__()
        self.tensor_parallel_group = layer_groups.of_layer(group)
        ordering = None if rank_ordering is None else tuple(int(k) for k in rank_ordering)
        self._partition = Partition(layer_groups.ordered(self.tensor_parallel_group, ordering), dim, stride, ordering)
        self._partitions = {"weight": self._partition}
        self.dtype = dtype
        self.device = device
        self.stride = stride
        self.rank_ordering = rank_ordering
        self.arg_init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.master_weight: torch.Tensor | None = None
        self.master_bias: torch.Tensor | None = None

    # -- for subclasses ------------------------------------------------------------------------------

    def _full_shape(self) -> list[int]:
        """The shape of the full weight, without padding."""
        raise NotImplementedError

    def _padding(self) -> int:
        """Zeros at the end of the full weight's partitioned dim."""
        return 0

    def _bias_padding(self) -> int:
        """Entries at the end of the full bias that belong to no output."""
        return 0

    def _bias_fill(self, dtype: torch.dtype) -> float:
        """What those entries hold."""
        return 0.0

    def _fan_in(self) -> int:
        shape = self._full_shape()
        return int(torch.Size(shape[1:]).numel())

    def _check_divides(self, name: str, n: int, remedy: str) -> int:
        count = self._partition.size
        if n % count:
            raise AssertionError(
                f"{n} is not divisible by {count}: {type(self).__name__}'s {name} over {count} tensor parallel ranks; {remedy}"
            )
        return n // count

    # -- weights -------------------------------------------------------------------------------------

    def _make_weight(self) -> None:
        """Draw the weight (with `device="meta"`, its shape only) and mark it."""
        if sharded_weights.is_meta(self.device):
            shape = self._full_shape()
            shape[self._partition.dim] += self._padding()
            local = self._partition.local_shape(shape)
            self.weight = torch.nn.Parameter(torch.empty(local, dtype=self.dtype, device="meta"))
        else:
            self.register_parameter("weight", None)
            self._draw_weight()
        self._partition.mark(self.weight)

    def _make_bias(self, shape: Sequence[int] | None, sharded: bool) -> None:
        """A bias of this full shape with its padding (None: no bias): the last dim shared out as the weight is, or held by all ranks."""
        self.register_parameter("bias", None)
        if shape is None:
            return
        self._full_bias_shape = list(shape)
        dim = len(shape) - 1
        partition = self._partition_of_bias(dim, sharded)
        self._bias_partition = partition
        if partition is not None:
            self._partitions["bias"] = partition
        if sharded_weights.is_meta(self.device):
            local = partition.local_shape(shape) if partition else shape
            self.bias = torch.nn.Parameter(torch.empty(*local, dtype=self.dtype, device="meta"))
        else:
            self._draw_bias()
        if partition is not None and self.bias is not None:
            partition.mark(self.bias)

    def _partition_of_bias(self, dim: int, sharded: bool) -> Partition | None:
        """How ranks share out a bias whose last dim is `dim`; None if all hold all of it."""
        if sharded:
            return dataclasses.replace(self._partition, dim=dim)
        return None if self._partition.entries is None else dataclasses.replace(self._partition, group=None, dim=dim, stride=1)

    def _init_weight(self, weight: torch.Tensor) -> None:
        """Initialise a full weight."""
        (self.arg_init_method or sharded_weights.default_init)(weight)

    def _init_bias(self, bias: torch.Tensor | None = None) -> None:
        """Initialise a full bias (None: the layer's own): as `torch.nn.Linear` does, or with zeros if the layer was given an `init_method`."""
        target = self.bias if bias is None else bias
        assert target is not None
        with torch.no_grad():
            (torch.nn.init.zeros_ if self.arg_init_method else sharded_weights.default_bias(self._fan_in()))(target)

    def _drawn_weight(self) -> torch.Tensor:
        """A full weight in float32 on the CPU, without padding."""
        return sharded_weights.drawn(self._full_shape(), self._init_weight)

    def _draw_weight(self) -> None:
        full = sharded_weights.padded(self._drawn_weight(), self._partition.dim, self._padding())
        if self.keep_master_weight:
            self.master_weight = full.to(self.dtype)
        sharded_weights.assign(self, "weight", sharded_weights.place(full, self._partition, self.dtype, sharded_weights.home(self.device)))

    def _draw_bias(self) -> None:
        *others, last = self._full_bias_shape
        full = self._padded_bias(sharded_weights.drawn([*others, last - self._bias_padding()], self._init_bias))
        if self.keep_master_weight:
            self.master_bias = full.to(self.dtype)
        sharded_weights.assign(
            self, "bias", sharded_weights.place(full, self._bias_partition, self.dtype, sharded_weights.home(self.device))
        )

    def _padded_bias(self, full: torch.Tensor) -> torch.Tensor:
        count = self._bias_padding()
        return F.pad(full, (0, count), value=self._bias_fill(full.dtype)) if count else full

    def init_weight_cpu(self) -> None:
        """Draw the weight and the bias from torch's CPU random state; also what gives a layer made on "meta" its values.

        If this process hosts several ranks, weights that they share out go to xla.
        """
        self._draw_weight()
        if getattr(self, "bias", None) is not None:
            self._draw_bias()

    reset_parameters = init_weight_cpu

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the full weight or bias `prefix` of a state dict to the layer's padded size.

        Raises RuntimeError if its size is not the layer's without padding.
        """
        is_bias = prefix.rpartition(".")[2] == "bias"
        count = self._bias_padding() if is_bias else self._padding()
        if not count or prefix not in model_state_dict:
            return
        full = model_state_dict[prefix]
        dim = full.dim() - 1 if is_bias else self._partition.dim
        expected = self._full_shape()[self._partition.dim]
        if full.shape[dim] != expected:
            raise RuntimeError(
                f"{prefix} has {full.shape[dim]} entries along dim {dim}, {type(self).__name__} with padding needs the {expected} that it has without"
            )
        model_state_dict[prefix] = self._padded_bias(full) if is_bias else sharded_weights.padded(full, dim, count)


class BaseParallelLinear(BaseParallelLayer):
    """What the two linear layers have in common, and what linear layers of your own derive from.

    Derive from `ColumnParallelLinear` or `RowParallelLinear` to change the shape of what they hold: `set_weight_and_bias_config` sets `weight_shape` and
    `bias_shape` (one rank's part; no bias: None) and `weight_partition_dim`; `initialize_weight_and_bias` draws them, with `_init_weight(full_weight)`.
    `BaseParallelLinear()` without arguments has none of it: set sizes and parameters yourself.

    autograd_func_class: the autograd function that multiplies. `_forward_impl`: `linear_with_async_allreduce`.
    """

    autograd_func_class: Any = LinearWithAsyncCommunication
    _forward_impl: Any = staticmethod(linear_with_async_allreduce)
    weight_shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None = None
    weight_partition_dim: int
    pad: bool = False
    pad_size: int = 0
    input_size: int
    output_size: int
    sequence_parallel_enabled: bool = False
    sequence_dimension: int | None = 0
    reduce_dtype: torch.dtype | None = torch.float32
    arg_init_method: Init | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        if args or kwargs:
            super().__init__(*args, **kwargs)
        else:
            torch.nn.Module.__init__(self)
            self._partitions = {}

    # -- weights -------------------------------------------------------------------------------------

    def set_weight_and_bias_config(self) -> None:
        """Set weight_shape, weight_partition_dim and bias_shape."""
        raise NotImplementedError(
            f"{type(self).__name__}.set_weight_and_bias_config: derive from ColumnParallelLinear or RowParallelLinear, or set weight_shape, "
            "weight_partition_dim and bias_shape here"
        )

    def initialize_weight_and_bias(self) -> None:
        """Draw the weight and the bias (on "meta": make their shapes), of the shapes that `set_weight_and_bias_config` says."""
        self.set_weight_and_bias_config()
        self._partition = dataclasses.replace(self._partition, dim=self.weight_partition_dim % len(self.weight_shape))
        self._partitions = {"weight": self._partition}
        self._make_weight()
        shape, sharded = self.bias_shape, self._shares_bias()
        partition = None if shape is None else self._partition_of_bias(len(shape) - 1, sharded)
        self._make_bias(shape if shape is None or partition is None else partition.full_shape(shape), sharded)

    def _shares_bias(self) -> bool:
        """Whether the last dim of the bias is shared out."""
        return False

    def _full_shape(self) -> list[int]:
        if "_partition" not in self.__dict__:  # BaseParallelLinear()
            return list(self.weight.shape)
        shape = self._partition.full_shape(self.weight_shape)
        shape[self._partition.dim] -= self._padding()
        return shape

    def _padding(self) -> int:
        return self.pad_size

    def _pad_to(self, size: int, alignment: int = 1) -> int:
        return get_padding_length(size, self._partition.size * alignment) if self.pad else 0

    def _set_sequence_dimension(self, enabled: bool, dimension: int | None) -> None:
        if enabled and dimension is None:
            _say_sequence_dimension(type(self).__name__)
        self.sequence_parallel_enabled = enabled
        self.sequence_dimension = dimension or 0

    # -- running -------------------------------------------------------------------------------------

    def _check_pad_false_for_training(self) -> None:
        """Raise RuntimeError in training mode if the layer is padded."""
        if self.pad and self.training:
            raise RuntimeError(
                f"{type(self).__name__} with pad=True is for inference: call model.eval(), or make the layer without padding"
            )

    def _multiply(self, input: torch.Tensor, weight: torch.Tensor, all_reduce: bool, gather: bool) -> torch.Tensor:
        return self._forward_impl(
            input=input,
            weight=weight,
            bias=None,
            async_grad_allreduce=all_reduce,
            sequence_parallel_enabled=gather,
            sequence_dimension=self.sequence_dimension,
            autograd_func_class=self.autograd_func_class,
            process_group=self.tensor_parallel_group,
            reduce_dtype=self.reduce_dtype,
        )

    def extra_repr(self) -> str:
        if "_partition" not in self.__dict__:  # BaseParallelLinear()
            return ""
        return f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, tp={self._partition.size}"


@functools.cache
def _say_sequence_dimension(name: str) -> None:
    """Once for a class."""
    logger.warning("%s: sequence_dimension is not given, the sequence is taken to be dim 0 ([S, B, H])", name)
