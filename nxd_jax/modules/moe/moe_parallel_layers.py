"""`neuronx_distributed.modules.moe.moe_parallel_layers`: one linear layer for each expert, in one weight [experts, in, out].

Expert parallel ranks share out the experts, tensor parallel ranks a part of each. The full weight of all experts is drawn, then cut: one seed gives the same
experts for any numbers of ranks, and every expert parallel rank has experts of its own (NxD gives all of them the same values).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nxd_jax.modules.moe.grouped_product import grouped_product
from nxd_jax.tensor_parallel import layer_groups, parallel_groups, regions, sharded_weights
from nxd_jax.tensor_parallel.base_layer import BaseParallelLinear
from nxd_jax.tensor_parallel.casting import cast_if_autocast_enabled
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.matmul import without_autocast
from nxd_jax.tensor_parallel.sharded_weights import Entries, Init

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

Distribution = Sequence[Sequence[int]]
"""For each expert parallel rank the numbers of its experts."""


class ExpertFusedLinearWithAsyncCommunication(torch.autograd.Function):
    """The product of every expert's tokens with its weight: e...h, ehi -> e...i; the input's gradient is summed over the tensor parallel ranks.

    input: [e, ..., h], or [1, ..., h] for tokens that all experts get; weight: [e, h, i]. The arguments are those of `LinearWithAsyncCommunication`.

    Raises NotImplementedError for a bias or sequence parallelism, RuntimeError if input and weight have different numbers of experts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None = 0,
        save_for_backward: bool = True,
        process_group: GroupLike = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> torch.Tensor:
        if bias is not None:
            raise NotImplementedError(
                "the fused product of experts takes no bias: add it to the result, as ExpertFusedColumnParallelLinear does"
            )
        if sequence_parallel_enabled:
            raise NotImplementedError(
                "the fused product of experts knows no sequence parallelism: experts get whole tokens, gather them first (MoE does)"
            )
        if input.shape[0] not in (1, weight.shape[0]):
            raise RuntimeError(
                f"the input has the tokens of {input.shape[0]} experts, the weight is of {weight.shape[0]}: give [{weight.shape[0]}, ..., hidden], or "
                "[1, ..., hidden] for tokens that all experts get"
            )
        ctx.reduced = functools.partial(_reduced, process_group=process_group, dtype=reduce_dtype) if async_grad_allreduce else None
        if save_for_backward:
            ctx.save_for_backward(input, weight)
        return torch.einsum("e...h,ehi->e...i", input, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = torch.einsum("e...i,ehi->e...h", grad, weight)
            if input.shape[0] != weight.shape[0]:
                grad_input = grad_input.sum(0, keepdim=True)
            grad_input = grad_input if ctx.reduced is None else ctx.reduced(grad_input)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.einsum("e...h,e...i->ehi", input.expand(weight.shape[0], *input.shape[1:]), grad)
        return grad_input, grad_weight, None, None, None, None, None, None, None


def _reduced(grad: torch.Tensor, process_group: GroupLike, dtype: torch.dtype | None) -> torch.Tensor:
    """A gradient summed over the ranks, in `dtype`."""
    wide = grad if dtype is None else grad.to(dtype)
    return regions.reduce(wide, process_group=process_group).to(grad.dtype)


class ExpertFusedLinear(BaseParallelLinear):
    """What the two layers have in common: which experts a rank holds, and their initial values.

    num_experts: of the whole layer. expert_distribution: a list for each expert parallel rank with the numbers of its experts; None: equal runs. is_prefill:
    a mark for inference, kept on the weights.

    Weights have the attribute `expert_model_parallel` if expert parallel ranks share them out, with `expert_distribution` and `is_prefill`.
    """

    autograd_func_class = ExpertFusedLinearWithAsyncCommunication
    num_experts: int
    expert_distribution: list[list[int]] | None
    is_prefill: bool
    _entries: Entries
    _n_local_experts: int

    # -- for subclasses ------------------------------------------------------------------------------

    def _set_experts(
        self, num_experts: int, tensor_group: Any, expert_group: Any, distribution: Distribution | None, is_prefill: bool
    ) -> None:
        """What must be known before the constructor of a linear layer draws weights."""
        layer_groups.of_layer(tensor_group)
        expert_group = parallel_groups.group("ep") if expert_group is None else expert_group
        count = layer_groups.size(expert_group)
        held = _runs(num_experts, count, type(self).__name__) if distribution is None else _checked(distribution, num_experts, count)
        self.num_experts = num_experts
        self.expert_distribution = None if distribution is None else [list(own) for own in held]
        self.is_prefill = is_prefill
        self._entries = Entries(expert_group, held)
        self._n_local_experts = num_experts // count

    def initialize_weight_and_bias(self) -> None:
        self._partition = dataclasses.replace(self._partition, entries=self._entries)
        super().initialize_weight_and_bias()
        if len(self._entries.held) > 1:
            for parameter in self.parameters(recurse=False):
                parameter.expert_model_parallel = True  # type: ignore[attr-defined]
                parameter.expert_distribution = self.expert_distribution  # type: ignore[attr-defined]
                parameter.is_prefill = self.is_prefill  # type: ignore[attr-defined]

    def _drawn_weight(self) -> torch.Tensor:
        """One expert's [in, out] after the other (by `kaiming_uniform_` with a = sqrt(5) if there is no init method, as in NxD)."""
        _, *shape = self._full_shape()
        slices = (sharded_weights.drawn(shape, self._init_weight) for _ in range(self.num_experts))
        first = next(slices)
        if sharded_weights.differs(first):
            return torch.stack([first, *slices])
        full = first.new_empty([self.num_experts, *shape])
        for place, one in zip(full, itertools.chain([first], slices), strict=True):
            place.copy_(one)
        return full

    def _fan_in(self) -> int:
        return self.input_size

    # -- running -------------------------------------------------------------------------------------

    def _chosen(self, t: torch.Tensor, expert_indices: torch.Tensor | None) -> torch.Tensor:
        return t if expert_indices is None else t.index_select(0, expert_indices)

    def _product(self, x: torch.Tensor, expert_indices: torch.Tensor | None, all_reduce: bool) -> torch.Tensor:
        """x times the weights of all of this rank's experts, or of the chosen ones."""
        return self._multiply(x, self._chosen(self.weight, expert_indices), all_reduce, gather=False)

    def _grouped(self, x: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x, weight, bias = cast_if_autocast_enabled(x, self.weight, bias)
        with without_autocast():
            return grouped_product(x, weight, ends, bias)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {super().extra_repr()}, ep={len(self._entries.held)}"


class ExpertFusedColumnParallelLinear(ExpertFusedLinear, ColumnParallelLinear):
    """Every expert's outputs shared out: a rank has [num_experts / ep, input_size, output_size / tp], and a bias [num_experts / ep, output_size / tp].

    num_experts, input_size, output_size: of the whole layer. stride: weights fused along the output (gate and up: 2). init_method: called with one expert's
    float32 [input_size, output_size] after the other; with it the bias starts at zero. keep_master_weight: keep the whole layer's weight on the CPU as
    `master_weight`. tensor_model_parallel_group, expert_model_parallel_group: the ranks to share out to. expert_distribution, is_prefill: see
    `ExpertFusedLinear`. dtype, device, reduce_dtype: as in `ColumnParallelLinear`.

    Raises AssertionError if experts do not divide by ep, or outputs by tp; ValueError for an expert_distribution that does not name each expert once.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Init | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: Any = None,
        expert_model_parallel_group: Any = None,
        expert_distribution: Distribution | None = None,
        is_prefill: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ):
        self._set_experts(num_experts, tensor_model_parallel_group, expert_model_parallel_group, expert_distribution, is_prefill)
        ColumnParallelLinear.__init__(
            self,
            input_size,
            output_size,
            bias=bias,
            gather_output=False,
            dtype=dtype,
            device=device,
            stride=stride,
            init_method=init_method,
            keep_master_weight=keep_master_weight,
            tensor_model_parallel_group=tensor_model_parallel_group,
            reduce_dtype=reduce_dtype,
        )

    def set_weight_and_bias_config(self) -> None:
        self.weight_shape = (self._n_local_experts, self.input_size, self.output_size_per_partition)
        self.weight_partition_dim = 2
        self.bias_shape = (self._n_local_experts, self.output_size_per_partition) if self.add_bias else None

    def forward(self, input: torch.Tensor, expert_indices: torch.Tensor | None = None, sum_gradient: bool = True) -> torch.Tensor:
        """[e, ..., input_size] -> [e, ..., output_size / tp]; an input [1, ..., input_size] goes to all experts.

        expert_indices: [n] numbers among this rank's experts; the input is then [n, ..., input_size], for these experts. sum_gradient: the input's gradient is
        summed over the tensor parallel ranks; False leaves that to the caller (`entering`).
        """
        out = self._product(input, expert_indices, sum_gradient and self.async_tensor_model_parallel_allreduce)
        return out if self.bias is None else out + _beside(self._chosen(self.bias, expert_indices), out)

    def rows(self, x: torch.Tensor, ends: torch.Tensor, sum_gradient: bool = True) -> torch.Tensor:
        """[m, input_size], sorted by expert, -> [m, output_size / tp]. ends: [e] where each expert's rows end; rows behind the last end give zeros.

        sum_gradient: as in `forward`.
        """
        return self._grouped(self.entering(x) if sum_gradient else x, ends, self.bias)

    def entering(self, x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
        """x as it is, whose gradient is summed over the tensor parallel ranks, or those of another group."""
        summed = functools.partial(_reduced, dtype=self.reduce_dtype)
        return regions.region(x, self.tensor_parallel_group if group is None else group, regions.same, summed)


class ExpertFusedRowParallelLinear(ExpertFusedLinear, RowParallelLinear):
    """Every expert's inputs shared out: a rank has [num_experts / ep, input_size / tp, output_size], and a bias [num_experts / ep, output_size].

    reduce_output: sum the tensor parallel ranks' partial results. Without it, of the bias, which they all hold, each adds its share, so that the sum that
    somebody makes later has it once. (NxD expects biases to be divided by tp before they are loaded.) input_is_parallel: the input is this rank's part
    already. The others are as in `ExpertFusedColumnParallelLinear`, and so is what is raised.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        reduce_output: bool = True,
        input_is_parallel: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Init | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: Any = None,
        expert_model_parallel_group: Any = None,
        expert_distribution: Distribution | None = None,
        is_prefill: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ):
        self._set_experts(num_experts, tensor_model_parallel_group, expert_model_parallel_group, expert_distribution, is_prefill)
        RowParallelLinear.__init__(
            self,
            input_size,
            output_size,
            bias=bias,
            input_is_parallel=input_is_parallel,
            dtype=dtype,
            device=device,
            stride=stride,
            init_method=init_method,
            keep_master_weight=keep_master_weight,
            reduce_output=reduce_output,
            tensor_model_parallel_group=tensor_model_parallel_group,
            reduce_dtype=reduce_dtype,
        )

    def set_weight_and_bias_config(self) -> None:
        self.weight_shape = (self._n_local_experts, self.input_size_per_partition, self.output_size)
        self.weight_partition_dim = 1
        self.bias_shape = (self._n_local_experts, self.output_size) if self.add_bias else None

    def forward(self, input: torch.Tensor, expert_indices: torch.Tensor | None = None) -> torch.Tensor:
        """[e, ..., input_size / tp] -> [e, ..., output_size], summed over the ranks with `reduce_output`, else partial.

        expert_indices: as in the column layer.
        """
        out = self._product(self._rpl_maybe_scatter_input(input), expert_indices, all_reduce=False)
        if self.bias is None:
            return self._rpl_maybe_reduce_output(out)
        bias = _beside(self._chosen(self.bias, expert_indices), out)
        return self._reduced(out) + bias if self.reduce_output else out + self._share(bias)

    def rows(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[m, input_size / tp], sorted by expert, -> [m, output_size], summed with `reduce_output`. ends: as in the column layer."""
        bias = None if self.bias is None else self._share(self.bias)
        return self._rpl_maybe_reduce_output(self._grouped(self._rpl_maybe_scatter_input(x), ends, bias))

    def _share(self, bias: torch.Tensor) -> torch.Tensor:
        """What a rank adds of a bias that all ranks hold, so that the sum over them has it once; each rank's copy gets the whole gradient."""
        return regions.region(bias, self.tensor_parallel_group, _divided, regions.same)


def _divided(x: torch.Tensor, process_group: GroupLike) -> torch.Tensor:
    return x / layer_groups.size(process_group)


def _beside(bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A bias [e, o] in the shape and dtype that is added to a result [e, ..., o]."""
    return bias.reshape(bias.shape[0], *[1] * (out.dim() - 2), bias.shape[1]).to(out.dtype)


# -- who holds which experts -------------------------------------------------------------------------


def _runs(num_experts: int, count: int, layer: str) -> tuple[tuple[int, ...], ...]:
    """Equal runs of experts, one for each of `count` ranks."""
    if num_experts % count:
        raise AssertionError(
            f"{num_experts} is not divisible by {count}: {layer}'s num_experts over {count} expert parallel ranks; choose another "
            "expert_model_parallel_size"
        )
    size = num_experts // count
    return tuple(tuple(range(k * size, (k + 1) * size)) for k in range(count))


def _checked(distribution: Distribution, num_experts: int, count: int) -> tuple[tuple[int, ...], ...]:
    held = tuple(tuple(int(e) for e in own) for own in distribution)
    sizes = {len(own) for own in held}
    if len(held) != count or len(sizes) != 1 or sorted(e for own in held for e in own) != list(range(num_experts)):
        raise ValueError(
            f"expert_distribution={[list(own) for own in held]} must have a list for each of the {count} expert parallel ranks, all of one length, which name "
            f"each of the experts 0..{num_experts - 1} once"
        )
    return held
