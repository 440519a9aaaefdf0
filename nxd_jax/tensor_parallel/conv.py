"""2-d convolutions whose channels tensor parallel ranks share out (in NxD part of `parallel_layers.layers`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.utils import _pair

from nxd_jax.tensor_parallel import regions
from nxd_jax.tensor_parallel.base_layer import BaseParallelLayer
from nxd_jax.tensor_parallel.partition import get_padding_length
from nxd_jax.tensor_parallel.sharded_weights import Init

_MODES = ("zeros", "reflect", "replicate", "circular")


def as_tuple2(arg: int | tuple[int, int]) -> tuple[int, int]:
    """`layers._as_tuple2`: a size of both dims of an image. Raises TypeError for what is neither a number nor a tuple."""
    if isinstance(arg, tuple):
        return arg
    if isinstance(arg, int):
        return arg, arg
    raise TypeError(f"a size must be an int or a tuple of two, got {type(arg).__name__}")


def conv2d_with_weight_grad_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int | tuple[int, int],
    padding: int | tuple[int, int],
    allreduce_weight_grad: bool,
) -> torch.Tensor:
    """`layers.conv2d_with_weight_grad_allreduce`: torch's convolution for layers of your own. allreduce_weight_grad: the ranks of the tensor parallel group
    compute parts of the output channels from one input, whose gradient (NxD's name notwithstanding) is summed over them."""
    x = regions.copy_to_tensor_model_parallel_region(input) if allreduce_weight_grad else input
    return F.conv2d(x, weight, bias, stride, padding)


class BaseParallelConv(BaseParallelLayer):
    """What the two convolutions have in common: `torch.nn.Conv2d`'s arguments, and padding of the shared channels (`partition_pad`)."""

    def __init__(self, dim: int, arguments: dict[str, Any]):
        a = arguments
        super().__init__(
            a["tensor_model_parallel_group"],
            dim,
            a["dtype"],
            a["device"],
            init_method=a["init_method"],
            keep_master_weight=a["keep_master_weight"],
        )
        if a["groups"] != 1:
            raise NotImplementedError(
                f"{type(self).__name__}: groups={a['groups']} is not supported, channels are shared out among ranks; use groups=1"
            )
        if a["padding_mode"] not in _MODES:
            raise ValueError(f"padding_mode must be one of {', '.join(map(repr, _MODES))}, got {a['padding_mode']!r}")
        self.in_channels = a["in_channels"]
        self.out_channels = a["out_channels"]
        self.kernel_size = _pair(a["kernel_size"])
        self.stride = _pair(a["stride"])
        self.dilation = _pair(a["dilation"])
        self.padding = a["padding"] if isinstance(a["padding"], str) else _pair(a["padding"])
        self.groups = a["groups"]
        self.padding_mode = a["padding_mode"]
        self.partition_pad = a["partition_pad"]
        shared = (self.out_channels, self.in_channels)[dim]
        self.partition_pad_size = get_padding_length(shared, self._partition.size) if self.partition_pad else 0
        name = ("out_channels", "in_channels")[dim]
        self.channels_per_partition = self._check_divides(name, shared + self.partition_pad_size, "or pass partition_pad=True")

    @property
    def partition_dim(self) -> int:
        """The dim of the weight that is cut: 0 (output channels) or 1 (input channels)."""
        return self._partition.dim

    @property
    def keep_master_params(self) -> bool:
        """NxD's name of `keep_master_weight`."""
        return self.keep_master_weight

    def _full_shape(self) -> list[int]:
        return [self.out_channels, self.in_channels, *self.kernel_size]

    def _padding(self) -> int:
        return int(self.partition_pad_size)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        if self.padding_mode == "zeros":
            return F.conv2d(x, self.weight, None, self.stride, self.padding, self.dilation)
        return F.conv2d(F.pad(x, self._edges(), mode=self.padding_mode), self.weight, None, self.stride, 0, self.dilation)

    def _edges(self) -> list[int]:
        """What to add left, right, above and below."""
        if self.padding == "valid":
            return [0, 0, 0, 0]
        if self.padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [e for t in reversed(total) for e in (t // 2, t - t // 2)]
        return [e for p in reversed(self.padding) for e in (p, p)]  # type: ignore[misc]

    def _with_bias(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.bias is None else out + self.bias.to(out.dtype).reshape(-1, 1, 1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, tp={self._partition.size}"


class OutputChannelParallelConv2d(BaseParallelConv):
    """`torch.nn.Conv2d` with the output channels shared out: each rank has [out_channels / tp, in_channels, *kernel_size] and that part of the bias.

    gather_output: give all ranks all channels; else each has its own.
    partition_pad: pad the output channels with zeros to a multiple of tp; a gathered result has `out_channels` again.
    groups: 1 only (NotImplementedError). padding_mode, init_method, keep_master_weight, dtype, device: as in `torch.nn.Conv2d` and
    `ColumnParallelLinear`. Input [N, in_channels, H, W] or [in_channels, H, W], the same on all ranks.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | str | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        init_method: Init | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        tensor_model_parallel_group: Any = None,
    ):
        super().__init__(0, locals())
        self.gather_output = gather_output
        self.out_channels_per_partition = self.channels_per_partition
        self._make_weight()
        self._make_bias([self.out_channels + self.partition_pad_size] if bias else None, sharded=True)

    def _bias_padding(self) -> int:
        return int(self.partition_pad_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., C, H, W] to [..., out_channels (or / tp), H', W']."""
        group = self._partition.group
        out = self._with_bias(self._convolve(regions.copy_to_tensor_model_parallel_region(input, group)))
        if not self.gather_output:
            return out
        whole = regions.gather(out, -3, group)
        return whole.narrow(-3, 0, self.out_channels) if self.partition_pad_size else whole


class InputChannelParallelConv2d(BaseParallelConv):
    """`torch.nn.Conv2d` with the input channels shared out: each rank has [out_channels, in_channels / tp, *kernel_size], and results are summed.

    input_is_parallel: the input has this rank's channels alone; else they are taken from the whole input. partition_pad: pad the input
    channels with zeros to a multiple of tp. The bias is held by all ranks. The others are as in `OutputChannelParallelConv2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | str | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        init_method: Init | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        tensor_model_parallel_group: Any = None,
    ):
        super().__init__(1, locals())
        self.input_is_parallel = input_is_parallel
        self.in_channels_per_partition = self.channels_per_partition
        self._make_weight()
        self._make_bias([out_channels] if bias else None, sharded=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_channels (or / tp), H, W] to [..., out_channels, H', W']."""
        group = self._partition.group
        if not self.input_is_parallel:
            whole = F.pad(input, (0, 0, 0, 0, 0, self.partition_pad_size)) if self.partition_pad_size else input
            input = regions.scatter_input_channels_to_tensor_model_parallel_region(whole, group)
        return self._with_bias(regions.reduce_from_tensor_model_parallel_region(self._convolve(input), group))
