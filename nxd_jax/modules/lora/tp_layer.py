"""`neuronx_distributed.modules.lora.tp_layer`: parallel layers with an adapter, of which tensor parallel ranks hold what fits their part of the base.

    base               A                           B
    column parallel    held by all [r, in]         column parallel [out / tp, r]
    row parallel       row parallel [r, in / tp]   held by all [out, r]
    GQA QKV            held by all [r, in]         GQA QKV, one for q, k and v

so that B A, added to the base's part, is that part of the full product, without communication; and an adapter's own communication is r wide.

With sequence parallelism the factor that all ranks hold sees only a rank's part of the sequence. It has `sequence_parallel_enabled` set, as norms have:
`grads.allreduce_sequence_parallel_gradients`, which optimizer wrappers call, sums its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.modules.lora.layer import ADAPTER_DTYPE, LoraEmbedding, LoraLayer, convolution, convolution_delta, linear, refuse, table
from nxd_jax.tensor_parallel.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear


class LoraParallelLinear(LoraLayer):
    """`lora.tp_layer.LoraParallelLinear`: `ColumnParallelLinear` or `RowParallelLinear` with an adapter, fused weights (`stride`) and padding included."""

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        return self._for_column() if isinstance(self.base_layer, ColumnParallelLinear) else self._for_row()

    def _for_column(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        a = linear(base.input_size, self.lora_rank, self._init_a, base.weight.device)
        b = ColumnParallelLinear(
            self.lora_rank,
            base.output_size - base.pad_size,
            bias=False,
            gather_output=base.gather_output,
            init_method=nn.init.zeros_,
            pad_alignment_size_per_rank=base.pad_alignment_size_per_rank,
            keep_padded_output=base.keep_padded_output,
            **_layout(base),
        )
        return _summed_over_sequence(a, base), b

    def _for_row(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        refuse(not base.reduce_output, "reduce_output=False", base, "B would be applied to partial sums")
        a = RowParallelLinear(
            base.input_size - base.pad_size,
            self.lora_rank,
            bias=False,
            input_is_parallel=base.input_is_parallel,
            init_method=self._init_a,
            **_layout(base),
        )
        return a, _summed_over_sequence(linear(self.lora_rank, base.output_size, nn.init.zeros_, base.weight.device), base)

    def _update(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Further arguments are for B: `slice_indices` chooses outputs, of the adapter too."""
        return self.lora_B(self.lora_A(self.lora_dropout(x.to(ADAPTER_DTYPE))) * self.scaling, *args, **kwargs)

    def _deltas(self) -> dict[str, torch.Tensor]:
        found = super()._deltas()
        usual = 0 if isinstance(self.base_layer, ColumnParallelLinear) else 1
        turned = self.base_layer.weight_partition_dim != usual  # the weight is held as [in, out], as `SharedExperts` can
        return {name: delta.t() for name, delta in found.items()} if turned else found

    def _added(self, base: Any, update: Any) -> Any:
        if self.base_layer.skip_bias_add:
            out, bias = base
            return super()._added(out, update), bias
        return super()._added(base, update)


class LoraGQAQKVParallelLinear(LoraLayer):
    """`lora.tp_layer.LoraGQAQKVParallelLinear`: `GQAQKVColumnParallelLinear` with an adapter whose A q, k and v share."""

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        device = base.weight_qkv.device if base.fuse_qkv else base.weight_q.device
        a = linear(base.input_size, self.lora_rank, self._init_a, device)
        b = GQAQKVColumnParallelLinear(
            self.lora_rank,
            base.output_sizes,
            bias=False,
            gather_output=base.gather_output,
            dtype=ADAPTER_DTYPE,
            device=device,
            init_method=nn.init.zeros_,
            sequence_parallel_enabled=base.sequence_parallel_enabled,
            kv_size_multiplier=base.kv_size_multiplier,
            fuse_qkv=base.fuse_qkv,
            reduce_dtype=base.reduce_dtype,
            sequence_dimension=base.sequence_dimension,
        )
        return _summed_over_sequence(a, base), b

    def get_qkv(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A rank's weights of q, k and v in a GQA layer, fused or not: `base_layer`, or `lora_B`, [q outputs / tp, r] and two of [k outputs / tp, r]."""
        if not layer.fuse_qkv:
            return layer.weight_q, layer.weight_k, layer.weight_v
        q, kv = layer.q_output_size_per_partition, layer.kv_output_size_per_partition
        return layer.weight_qkv.split([q, kv, kv])

    def get_delta_weight(self) -> tuple[torch.Tensor, ...]:
        """What merging adds to q, k and v."""
        return tuple(b @ self.lora_A.weight * self.scaling for b in self.get_qkv(self.lora_B))

    def _added(self, base: Any, update: Any) -> Any:
        return tuple(super(LoraGQAQKVParallelLinear, self)._added(b, u) for b, u in zip(base, update, strict=True))

    def merged_names(self) -> list[str]:
        """The base's weights that merging changes."""
        return [name for name, _ in self.lora_B.named_parameters()]

    def _deltas(self) -> dict[str, torch.Tensor]:
        return {name: w @ self.lora_A.weight * self.scaling for name, w in self.lora_B.named_parameters()}


class LoraParallelEmbedding(LoraEmbedding):
    """`ParallelEmbedding` with an adapter: the table A is shared out as the base's vocabulary is; or B as its embedding, with `shard_across_embedding`."""

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        refuse(base.max_norm is not None, "max_norm", base, "merged and separate rows would be shrunk differently")
        refuse(not base.collect_output, "collect_output=False", base, "B would be applied to partial results")
        return self._by_columns() if base.shard_across_embedding else self._by_rows()

    def _by_rows(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        options = ("padding_idx", "scale_grad_by_freq", "pad", "sequence_parallel_enabled", "sequence_dimension", "rank_ordering")
        rows = ParallelEmbedding(
            base.num_embeddings,
            self.lora_rank,
            init_method=nn.init.zeros_,
            device=base.weight.device,
            tensor_model_parallel_group=base.tensor_parallel_group,
            **{k: getattr(base, k) for k in options},
        )
        return rows, _summed_over_sequence(linear(self.lora_rank, base.embedding_dim, nn.init.normal_, base.weight.device), base)

    def _by_columns(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        refuse(base.sequence_parallel_enabled, "shard_across_embedding and sequence_parallel_enabled", base, "that is not written")
        refuse(base.pad, "shard_across_embedding and pad", base, "that is not written")
        b = ColumnParallelLinear(
            self.lora_rank,
            base.embedding_dim,
            bias=False,
            init_method=nn.init.normal_,
            device=base.weight.device,
            tensor_model_parallel_group=base.tensor_parallel_group,
            rank_ordering=base.rank_ordering,
        )
        return table(base, self.lora_rank), b


class LoraParallelConv2d(LoraLayer):
    """`OutputChannelParallelConv2d` or `InputChannelParallelConv2d` with an adapter, as in `LoraConv2d`: the factor with the shared channels is shared out."""

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        how = {k: getattr(base, k) for k in ("stride", "padding", "dilation", "padding_mode")}
        shared = {
            "bias": False,
            "device": base.weight.device,
            "partition_pad": base.partition_pad,
            "tensor_model_parallel_group": base.tensor_parallel_group,
        }
        r, device = self.lora_rank, base.weight.device
        if isinstance(base, OutputChannelParallelConv2d):
            a = convolution(base.in_channels, r, base.kernel_size, self._init_a, device, **how)
            return a, OutputChannelParallelConv2d(
                r, base.out_channels, 1, gather_output=base.gather_output, init_method=nn.init.zeros_, **shared
            )
        one = InputChannelParallelConv2d(
            base.in_channels,
            r,
            base.kernel_size,
            input_is_parallel=base.input_is_parallel,
            init_method=self._init_a,
            **how,
            **shared,
        )
        return one, convolution(r, base.out_channels, 1, nn.init.zeros_, device)

    def _deltas(self) -> dict[str, torch.Tensor]:
        return {"weight": convolution_delta(self.lora_A.weight, self.lora_B.weight) * self.scaling}


def _layout(base: Any) -> dict[str, Any]:
    """How a linear layer lies among the ranks."""
    names = ("stride", "sequence_parallel_enabled", "sequence_dimension", "pad", "reduce_dtype", "rank_ordering")
    return {
        **{name: getattr(base, name) for name in names},
        "dtype": ADAPTER_DTYPE,
        "device": base.weight.device,
        "tensor_model_parallel_group": base.tensor_parallel_group,
    }


def _summed_over_sequence(layer: nn.Linear, base: Any) -> nn.Linear:
    """Mark a factor that all ranks hold: whether its gradient is to be summed over the parts of the sequence."""
    layer.weight.sequence_parallel_enabled = base.sequence_parallel_enabled  # type: ignore[attr-defined]
    return layer
