"""Layers that users derive from the linear ones, as upstream's mixture of experts and LoRA do, and what such layers call."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.parallel_layers import layers, parallel_state, random
from nxd_jax.parallel_layers.layers import BaseParallelLinear, ColumnParallelLinear, RowParallelLinear, linear_with_async_allreduce
from nxd_jax.tensor_parallel import base_layer
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, joined
from torch_bridge.recorder import sharded

EXPERTS, TP = 3, 2


class Experts(ColumnParallelLinear):
    """A weight for each expert: [experts, in, out / tp]."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any):
        self.num_experts = EXPERTS
        super().__init__(input_size, output_size, gather_output=False, **kwargs)

    def set_weight_and_bias_config(self) -> None:
        self.weight_shape = (self.num_experts, self.input_size, self.output_size_per_partition)
        self.weight_partition_dim = 2
        self.bias_shape = (self.num_experts, self.output_size_per_partition) if self.add_bias else None

    def _init_weight(self, weight: torch.Tensor) -> None:
        for expert in weight:
            nn.init.normal_(expert)

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        x = self._cpl_maybe_input_copy_to_tp_region(x)
        return torch.einsum("eti,eio->eto", x, self.weight) + self.bias.unsqueeze(1)


def test_a_weight_for_each_expert(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    torch.manual_seed(0)
    layer = Experts(4, 6).to("xla")
    layer.async_tensor_model_parallel_allreduce = False  # einsum does not sum the input's gradient over the ranks: the copy is to
    assert (layer.weight.shape, layer.weight.partition_dim, layer.bias.shape, layer.bias.partition_dim) == ((3, 4, 3), 2, (3, 3), 1)
    torch.manual_seed(0)
    weight = torch.stack([torch.randn(4, 6) for _ in range(EXPERTS)])
    torch.testing.assert_close(joined(layer.weight, 2), weight)
    x = torch.randn(EXPERTS, 5, 4)
    expected, given = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    out = torch.einsum("eti,eio->eto", expected, weight) + joined(layer.bias, 1).unsqueeze(1)
    y = layer(given)
    torch.testing.assert_close(joined(y, 2), out.detach(), rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    y.square().sum().backward()
    close(given.grad, expected.grad, atol=1e-4)


def test_on_meta_it_has_the_same_shapes(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    layer = Experts(4, 6, device="meta")
    assert (layer.weight.shape, layer.weight.partition_dim, layer.bias.shape) == ((3, 4, 3), 2, (3, 3)) and layer.weight.is_meta
    layer.init_weight_cpu()
    assert joined(layer.weight.to("xla"), 2).shape == (3, 4, 6)


def test_shapes_are_attributes(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    column, row = ColumnParallelLinear(4, 6, gather_output=False), RowParallelLinear(4, 6, bias=False)
    assert (column.weight_shape, column.bias_shape, column.weight_partition_dim) == ((3, 4), (3,), 0)
    assert (row.weight_shape, row.bias_shape, row.weight_partition_dim) == ((6, 2), None, 1)
    padded = ColumnParallelLinear(16, 15, pad=True, pad_alignment_size_per_rank=12, keep_padded_output=True)
    assert (padded.weight_shape, padded.bias_shape) == ((12, 16), (24,))


class Scaled(RowParallelLinear):
    """The product with a function of the layer's own, and the steps around it."""

    def forward(self, x: torch.Tensor) -> Any:
        part = self._rpl_maybe_scatter_input(x)
        product = self._forward_impl(
            input=part,
            weight=self.weight * 2,
            bias=None,
            async_grad_allreduce=False,
            sequence_parallel_enabled=False,
            sequence_dimension=self.sequence_dimension,
            autograd_func_class=self.autograd_func_class,
            process_group=self.tensor_parallel_group,
            reduce_dtype=self.reduce_dtype,
        )
        return self._rpl_maybe_reduce_output(product)


def test_the_steps_of_forward(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    torch.manual_seed(3)
    layer = Scaled(4, 6, bias=False).to("xla")
    x = torch.randn(2, 5, 4)
    close(layer(x.to("xla")), x @ (2 * joined(layer.weight, 1)).T)
    column = ColumnParallelLinear(4, 6, bias=False).to("xla")
    product = linear_with_async_allreduce(x.to("xla"), column.weight, None, True, False)
    close(column._cpl_maybe_gather_output(product), x @ joined(column.weight, 0).T)


def test_a_convolution_of_ones_own(nxd: Nxd) -> None:
    """Made of the pieces that NxD's own convolutions are made of: parts of the output channels, one input gradient."""
    nxd(4, tp=TP)
    torch.manual_seed(2)
    full, x = nn.Conv2d(2, 4 * TP, 3, padding=1), torch.randn(2, 2, 5, 5)
    weight = layers.create_local_weight(full.weight.detach().to("xla"), layers.CONV_KERNEL_OUTPUT_CHANNEL_DIMENSION, 4, 1)
    bias = layers.create_local_weight(full.bias.detach().to("xla"), 0, 4, 1)
    given, expected = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    out = layers.conv2d_with_weight_grad_allreduce(given, weight, bias, layers._as_tuple2(1), layers._as_tuple2((1, 1)), True)
    torch.testing.assert_close(joined(out, 1), full(expected).detach())
    out.square().sum().backward()
    full(expected).square().sum().backward()
    assert given.grad is not None and expected.grad is not None
    close(given.grad, expected.grad)
    with pytest.raises(TypeError, match="a size must be an int or a tuple of two, got list"):
        layers._as_tuple2([1, 1])  # type: ignore[arg-type]


def test_each_rank_draws_its_part(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    parameters = [nn.Parameter(torch.empty(3, 4, device="xla")) for _ in range(2)]
    for parameter in parameters:
        random.model_parallel_xla_manual_seed(5)
        layers._initialize_affine_weight_neuron(parameter, nn.init.normal_, partition_dim=0, num_partitions=TP)
    ours, again = (sharded.shards(p) for p in parameters)
    assert not torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[TP]) and torch.equal(ours[1], again[1])
    assert parameters[0].tensor_model_parallel and parameters[0].partition_dim == 0 and parameters[0].num_partitions == TP


class Own(BaseParallelLinear):
    """Nothing but the base class."""

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        count = parallel_state.get_tensor_model_parallel_size()
        self.weight = nn.Parameter(torch.empty(output_size // count, input_size))
        self.master_weight = layers._initialize_parameter_cpu(self.weight, 0, count, self._init_weight, return_master_param=True)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_impl(x, self.weight, None, True, False)


def test_the_base_class_without_arguments(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    empty = BaseParallelLinear()
    assert list(empty.parameters()) == [] and repr(empty) == "BaseParallelLinear()"
    with pytest.raises(NotImplementedError, match="BaseParallelLinear.set_weight_and_bias_config: derive from ColumnParallelLinear"):
        empty.initialize_weight_and_bias()
    empty.pad = True
    with pytest.raises(RuntimeError, match=r"BaseParallelLinear with pad=True is for inference: call model.eval\(\)"):
        empty._check_pad_false_for_training()
    empty.eval()._check_pad_false_for_training()
    torch.manual_seed(3)
    layer = Own(4, 6).to("xla")
    torch.manual_seed(3)
    reference = nn.Linear(4, 6, bias=False)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(joined(layer(x.to("xla")), 2), reference(x).detach())
    assert torch.equal(layer.master_weight, reference.weight)
    layer.bias = nn.Parameter(torch.full((3,), 5.0))
    layer._init_bias()
    assert layer.bias.abs().max() <= 4**-0.5 and len(set(layer.bias.tolist())) == 3


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (-1, 1), (0, 2)])
def test_a_parameter_of_each_ranks_own(nxd: Nxd, dim: int, stride: int, device: str) -> None:
    nxd(4, tp=TP)
    param = nn.Parameter(torch.empty((2, 4) if dim == 0 else (4, 2), device=device))

    def count_up(weight: torch.Tensor) -> None:
        assert weight.dtype == torch.float32
        weight.copy_(torch.arange(16.0).reshape(weight.shape) if weight.numel() == 16 else torch.zeros(()))

    master = layers._initialize_parameter_cpu(param, dim, TP, count_up, return_master_param=True, param_dtype=torch.bfloat16, stride=stride)
    assert master is not None and master.dtype == torch.bfloat16
    assert (param.tensor_model_parallel, param.partition_dim, param.partition_stride, param.num_partitions) == (True, dim % 2, stride, TP)  # type: ignore[attr-defined]
    holder = nn.Module()
    holder.weight = param
    torch.testing.assert_close(joined(holder.to("xla").weight, dim % 2, stride), master.float())


def test_a_parameter_of_one_part_and_of_too_many(nxd: Nxd) -> None:
    nxd(4, tp=TP)
    param = nn.Parameter(torch.empty(2, 2))
    assert layers._initialize_parameter_cpu(param, 0, 1, nn.init.ones_) is None
    assert param.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(ValueError, match="num_partitions=4 must be the tensor parallel size 2, or 1"):
        layers._initialize_parameter_cpu(nn.Parameter(torch.empty(2, 2)), 0, 4, nn.init.ones_)


def test_a_sequence_without_a_dimension_is_said_once_for_a_class(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(4, tp=TP)
    base_layer._say_sequence_dimension.cache_clear()
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        for _ in range(3):
            ColumnParallelLinear(4, 4, gather_output=False, sequence_parallel_enabled=True)
            RowParallelLinear(4, 4, input_is_parallel=True, sequence_parallel_enabled=True)
            ColumnParallelLinear(4, 4, gather_output=False, sequence_parallel_enabled=True, sequence_dimension=1)
    assert caplog.messages == [
        f"{name}: sequence_dimension is not given, the sequence is taken to be dim 0 ([S, B, H])"
        for name in ("ColumnParallelLinear", "RowParallelLinear")
    ]
