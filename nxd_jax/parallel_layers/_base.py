"""What all parallel layers have in common."""

from __future__ import annotations

import logging
from typing import Any

import torch

from nxd_jax.parallel_layers import _groups, _weights
from nxd_jax.parallel_layers._linear import LinearWithAsyncCommunication, linear_with_async_allreduce
from nxd_jax.parallel_layers._weights import Init, Partition
from nxd_jax.parallel_layers.utils import get_padding_length

logger = logging.getLogger("nxd_jax")


class BaseParallelLayer(_weights.Owner):
    """A layer whose weight the ranks of a group share out.

    Attributes: tensor_parallel_group (the process group), dtype, master_weight (the full weight in `dtype` on the CPU, with
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
        self.tensor_parallel_group = _groups.of_layer(group)
        ordering = None if rank_ordering is None else tuple(int(k) for k in rank_ordering)
        self._partition = Partition(_groups.ordered(self.tensor_parallel_group, ordering), dim, stride, ordering)
        self._partitions = {"weight": self._partition}
        self.dtype = dtype
        self.device = device
        self.stride = stride
        self.rank_ordering = rank_ordering
        self.arg_init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.master_weight: torch.Tensor | None = None

    # -- for subclasses ------------------------------------------------------------------------------

    def _full_shape(self) -> list[int]:
        """The shape of the full weight, without padding."""
        raise NotImplementedError

    def _padding(self) -> int:
        """Zeros at the end of the full weight's partitioned dim."""
        return 0

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
        if _weights.is_meta(self.device):
            shape = self._full_shape()
            shape[self._partition.dim] += self._padding()
            local = self._partition.local_shape(shape)
            self.weight = torch.nn.Parameter(torch.empty(local, dtype=self.dtype, device="meta"))
        else:
            self.register_parameter("weight", None)
            self._draw_weight()
        self._partition.mark(self.weight)

    def _make_bias(self, wanted: bool, size: int, sharded: bool) -> None:
        """A bias of `size` entries altogether, if it is wanted: shared out as the weight is, or held by all ranks."""
        self.register_parameter("bias", None)
        if not wanted:
            return
        self._bias_size = size
        partition = Partition(self._partition.group, 0, self._partition.stride, self._partition.rank_ordering) if sharded else None
        self._bias_partition = partition
        if partition is not None:
            self._partitions["bias"] = partition
        if _weights.is_meta(self.device):
            local = partition.local_shape([size]) if partition else [size]
            self.bias = torch.nn.Parameter(torch.empty(local, dtype=self.dtype, device="meta"))
        else:
            self._draw_bias()
        if partition is not None and self.bias is not None:
            partition.mark(self.bias)

    def _init_weight(self, weight: torch.Tensor) -> None:
        """Initialise a full weight."""
        (self.arg_init_method or _weights.default_init)(weight)

    def _init_bias(self, bias: torch.Tensor) -> None:
        """Initialise a full bias: as `torch.nn.Linear` does, or with zeros if the layer was given an `init_method`."""
        (torch.nn.init.zeros_ if self.arg_init_method else _weights.default_bias(self._fan_in()))(bias)

    def _draw_weight(self) -> None:
        full = _weights.padded(_weights.drawn(self._full_shape(), self._init_weight), self._partition.dim, self._padding())
        if self.keep_master_weight:
            self.master_weight = full.to(self.dtype)
        _weights.assign(self, "weight", _weights.place(full, self._partition, self.dtype, _home(self.device)))

    def _draw_bias(self) -> None:
        full = _weights.drawn([self._bias_size], self._init_bias)
        _weights.assign(self, "bias", _weights.place(full, self._bias_partition, self.dtype, _home(self.device)))

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
        count = self._padding()
        if not count or prefix not in model_state_dict:
            return
        partition = self._bias_partition if prefix.endswith("bias") else self._partition
        if partition is None:
            return
        full = model_state_dict[prefix]
        expected = self._full_shape()[self._partition.dim]
        if full.shape[partition.dim] != expected:
            raise RuntimeError(
                f"{prefix} has {full.shape[partition.dim]} entries along dim {partition.dim}, {type(self).__name__} with padding needs the {expected} "
                "that it has without"
            )
        model_state_dict[prefix] = _weights.padded(full, partition.dim, count)


def _home(device: Any) -> Any:
    """Where weights that are drawn now go."""
    return "cpu" if device is None or _weights.is_meta(device) else device


class BaseParallelLinear(BaseParallelLayer):
    """What the two linear layers have in common. `autograd_func_class`: the autograd function that multiplies."""

    autograd_func_class: Any = LinearWithAsyncCommunication
    pad: bool
    pad_size: int
    input_size: int
    output_size: int
    sequence_parallel_enabled: bool
    sequence_dimension: int | None
    reduce_dtype: torch.dtype | None

    def _padding(self) -> int:
        return self.pad_size

    def _pad_to(self, size: int, alignment: int = 1) -> int:
        return get_padding_length(size, self._partition.size * alignment) if self.pad else 0

    def _set_sequence_dimension(self, enabled: bool, dimension: int | None) -> None:
        if enabled and dimension is None:
            logger.warning("%s: sequence_dimension is not given, the sequence is taken to be dim 0 ([S, B, H])", type(self).__name__)
        self.sequence_parallel_enabled = enabled
        self.sequence_dimension = dimension or 0

    def _check_mode(self) -> None:
        if self.pad and self.training:
            raise RuntimeError(
                f"{type(self).__name__} with pad=True is for inference: call model.eval(), or make the layer without padding"
            )

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, all_reduce: bool, gather: bool) -> torch.Tensor:
        return linear_with_async_allreduce(
            input,
            weight,
            None,
            async_grad_allreduce=all_reduce,
            sequence_parallel_enabled=gather,
            sequence_dimension=self.sequence_dimension,
            autograd_func_class=self.autograd_func_class,
            process_group=self.tensor_parallel_group,
            reduce_dtype=self.reduce_dtype,
        )

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, tp={self._partition.size}"
