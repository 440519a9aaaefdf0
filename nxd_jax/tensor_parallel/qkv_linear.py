"""The Q, K and V projections of grouped-query attention, for more ranks than there are K/V heads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import kv_groups, layer_groups, matmul, regions, sharded_weights
from nxd_jax.tensor_parallel.partition import set_tensor_model_parallel_attributes
from nxd_jax.tensor_parallel.sharded_weights import Init, Partition
from torch_bridge.mesh import groups, world
from torch_bridge.mesh.groups import GroupLike

_PARTS = ("q", "k", "v")


class GQAQKVColumnParallelLinear(sharded_weights.Owner):
    """Q, K and V projections of one input, with their outputs shared out over tensor parallel ranks; K and V are held `kv_size_multiplier` times.

    input_size: of the input. output_sizes: (outputs of Q, outputs of K and of V), of the full layer.
    kv_size_multiplier: with fewer K/V heads than ranks, groups of that many ranks (`parallel_state.get_kv_shared_group`) hold the same K/V
    heads. On trn1 (`get_platform_target`) the heads go round the ranks (K0 K1 K0 K1), on trn2 copies stand side by side (K0 K0 K1 K1).
    Gradients of the copies are summed over the group, so that they stay equal to the gradient of one full K or V projection.
    fuse_qkv: one weight `weight_qkv` of shape [(Q + 2 * multiplier * KV) / tp, input_size], rows of q, then k, then v; else `weight_q`, `weight_k`,
    `weight_v`. All have their tensor parallel attributes (NxD's fused weight loses them); those of K and V have `num_partitions = tp / multiplier`.
    `weight_qkv.qkv_partition` is (rows of q, rows of k, multiplier).
    bias: `bias_qkv`, or `bias_q`, `bias_k`, `bias_v`, shared out like the weights (NxD's code for it does not run).
    gather_output: all ranks' outputs side by side; those of K and V then hold every head `multiplier` times. Not with sequence parallelism.
    init_method: called with the full float32 weight of each of Q, K, V; default as `torch.nn.Linear`. With it biases start at zero.
    keep_master_weight: keep full weights as `master_weight_q`, `master_weight_k`, `master_weight_v`.
    dtype, device, sequence_parallel_enabled, sequence_dimension, reduce_dtype: as in `ColumnParallelLinear`.

    forward(input) returns (q, k, v). Raises AssertionError for sizes that do not divide.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        init_method: Init | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        sequence_dimension: int | None = None,
    ):
        super().__init__()
        self.tensor_parallel_group = layer_groups.of_layer()
        self.input_size = input_size
        self.output_sizes = list(output_sizes)
        self.use_bias = bias
        self.gather_output = gather_output
        self.dtype = dtype
        self.device = device
        self.arg_init_method = init_method
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.keep_master_weight = keep_master_weight
        self.kv_size_multiplier = kv_size_multiplier
        self.fuse_qkv = fuse_qkv
        self.reduce_dtype = reduce_dtype
        self._divide()
        self.async_tensor_model_parallel_allreduce = not sequence_parallel_enabled and layer_groups.size(self.tensor_parallel_group) > 1
        names = [*self._names("weight"), *self._names("bias")]
        self._partitions = dict.fromkeys(names, Partition(self.tensor_parallel_group, 0))
        for name in names:
            self.register_parameter(name, None)
        self.initialize_weight_biases(meta=sharded_weights.is_meta(device))

    def _divide(self) -> None:
        tp, times = layer_groups.size(self.tensor_parallel_group), self.kv_size_multiplier
        q, kv = self.output_sizes
        if tp % times:
            raise AssertionError(f"{tp} is not divisible by {times}: kv_size_multiplier must divide the tensor parallel size")
        if q % tp:
            raise AssertionError(f"{q} is not divisible by {tp}: the outputs of Q over {tp} tensor parallel ranks")
        if (kv * times) % tp:
            raise AssertionError(
                f"{kv * times} is not divisible by {tp}: the outputs of K ({kv}) times kv_size_multiplier={times} over {tp} tensor parallel ranks"
            )
        self.q_output_size_per_partition = q // tp
        self.kv_output_size_per_partition = kv * times // tp
        if times > 1:
            kv_groups.initialize(times)

    def _names(self, kind: str) -> list[str]:
        return [f"{kind}_qkv"] if self.fuse_qkv else [f"{kind}_{part}" for part in _PARTS]

    # -- weights -----------------------------------------------------------------------------------------

    def initialize_weight_biases(self, meta: bool = False) -> None:
        """Draw weights and biases (or, with `meta`, make their shapes only), keeping parameters that exist the same objects."""
        sizes = [self.output_sizes[0], self.output_sizes[1], self.output_sizes[1]]
        weights = (
            []
            if meta
            else [sharded_weights.drawn([n, self.input_size], self.arg_init_method or sharded_weights.default_init) for n in sizes]
        )
        if self.keep_master_weight:
            for part, full in zip(_PARTS, weights, strict=False):
                setattr(self, f"master_weight_{part}", full.to(self.dtype))
        self._place("weight", weights, [self.input_size])
        if self.use_bias:
            init = torch.nn.init.zeros_ if self.arg_init_method else sharded_weights.default_bias(self.input_size)
            self._place("bias", [] if meta else [sharded_weights.drawn([n], init) for n in sizes], [])

    def init_weight_cpu(self) -> None:
        """Draw weights and biases from torch's CPU random state; gives a layer made on "meta" its values."""
        self.initialize_weight_biases()

    def _place(self, kind: str, full: list[torch.Tensor], inner: list[int]) -> None:
        """Cut the full q, k and v, and make the parts this layer's parameters. Without any: parameters on "meta"."""
        q, kv = self.q_output_size_per_partition, self.kv_output_size_per_partition
        members: list[tuple[int, ...]] = [(0, 1, 2)] if self.fuse_qkv else [(0,), (1,), (2,)]
        for name, parts in zip(self._names(kind), members, strict=True):
            rows = [(q, kv, kv)[p] for p in parts]
            if not full:
                setattr(self, name, torch.nn.Parameter(torch.empty(sum(rows), *inner, dtype=self.dtype, device="meta")))
            else:
                sharded_weights.assign(self, name, self._part([full[p] for p in parts], parts))
            self._mark(getattr(self, name), parts)

    def _part(self, full: list[torch.Tensor], parts: tuple[int, ...]) -> torch.Tensor:
        """The rank's rows of full tensors, fused; each rank's own if this process hosts several."""
        partition = Partition(self.tensor_parallel_group, 0)

        def of(rank: int, full: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([self._rows(t, p, rank) for t, p in zip(full, parts, strict=True)]).to(self.dtype)

        device = sharded_weights.home(self.device)
        if partition.hosts_several():
            differ = any(map(sharded_weights.differs, full))
            return sharded_weights.from_parts(lambda r: of(r, [sharded_weights.own(t, r) for t in full]), partition, device, differ)
        return sharded_weights.placed_alone(of(world.first(), full), partition, device)

    def _rows(self, full: torch.Tensor, part: int, rank: int) -> torch.Tensor:
        if part == 0:
            index, rows = layer_groups.place_of(self.tensor_parallel_group, rank), self.q_output_size_per_partition
        else:
            index, rows = self._kv_part_of(rank), self.kv_output_size_per_partition
        return full[index * rows : (index + 1) * rows]

    def _kv_part_of(self, rank: int) -> int:
        """Which part of K and V a rank of the world holds: the place of its K/V group among those of its tensor parallel group."""
        if self.kv_size_multiplier == 1:
            return layer_groups.place_of(self.tensor_parallel_group, rank)
        peers = groups.resolve(self.tensor_parallel_group).of(rank)
        sharing = [g for g in kv_groups.lists() if g[0] in peers]
        return next(k for k, g in enumerate(sharing) if rank in g)

    def _mark(self, parameter: torch.Tensor, parts: tuple[int, ...]) -> None:
        if hasattr(parameter, "tensor_model_parallel"):
            return
        tp = layer_groups.size(self.tensor_parallel_group)
        copies = self.kv_size_multiplier if 0 not in parts else 1
        set_tensor_model_parallel_attributes(parameter, True, 0, 1, num_partitions=tp // copies)
        if len(parts) == 3:
            parameter.qkv_partition = (  # type: ignore[attr-defined]
                self.q_output_size_per_partition,
                self.kv_output_size_per_partition,
                self.kv_size_multiplier,
            )

    # -- forward -----------------------------------------------------------------------------------------

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """input: [..., input_size]. Returns q [..., Q / tp] and k, v [..., multiplier * KV / tp], or the gathered ones."""
        if self.gather_output and self.sequence_parallel_enabled:
            raise AssertionError("GQAQKVColumnParallelLinear: gather_output=True cannot be combined with sequence_parallel_enabled=True")
        q, k, v = gqa_qkv_linear_with_async_allreduce(
            input,
            getattr(self, "weight_q", None),
            getattr(self, "weight_k", None),
            getattr(self, "weight_v", None),
            getattr(self, "bias_q", None),
            getattr(self, "bias_k", None),
            getattr(self, "bias_v", None),
            async_grad_allreduce=self.async_tensor_model_parallel_allreduce,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            kv_size_multiplier=self.kv_size_multiplier,
            weight_qkv=getattr(self, "weight_qkv", None),
            bias_qkv=getattr(self, "bias_qkv", None),
            fuse_qkv=self.fuse_qkv,
            output_size_q=self.q_output_size_per_partition,
            output_size_kv=self.kv_output_size_per_partition,
            reduce_dtype=self.reduce_dtype,
            sequence_dimension=self.sequence_dimension,
            process_group=self.tensor_parallel_group,
        )
        if not self.gather_output:
            return q, k, v
        q, k, v = (regions.gather(t, -1, self.tensor_parallel_group) for t in (q, k, v))
        return q, k, v

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, output_sizes={self.output_sizes}, kv_size_multiplier={self.kv_size_multiplier}, fuse_qkv={self.fuse_qkv}"


def gqa_qkv_linear_with_async_allreduce(
    input: torch.Tensor,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    weight_v: torch.Tensor | None,
    bias_q: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    kv_size_multiplier: int = 1,
    weight_qkv: torch.Tensor | None = None,
    bias_qkv: torch.Tensor | None = None,
    fuse_qkv: bool = False,
    output_size_q: int | None = None,
    output_size_kv: int | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    sequence_dimension: int | None = 0,
    process_group: GroupLike = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) of a rank from its weights: three of them, or with `fuse_qkv` one whose outputs are cut at `output_size_q` and `output_size_kv`.

    The input is gathered (sequence parallelism), and its gradient reduced in `reduce_dtype`, once for all three. Gradients of K's and V's weights and
    biases are summed over the ranks that hold copies of them.
    """
    if fuse_qkv:
        if weight_qkv is None or output_size_q is None or output_size_kv is None:
            raise ValueError("fuse_qkv=True needs weight_qkv, output_size_q and output_size_kv")
        start: int = output_size_q
        weights, biases = [_shared(weight_qkv, kv_size_multiplier, start, reduce_dtype)], [bias_qkv]
        biases = [b if b is None else _shared(b, kv_size_multiplier, start, reduce_dtype) for b in biases]
    else:
        if weight_q is None or weight_k is None or weight_v is None:
            raise ValueError("fuse_qkv=False needs weight_q, weight_k and weight_v")
        weights = [weight_q, *(_shared(w, kv_size_multiplier, 0, reduce_dtype) for w in (weight_k, weight_v))]
        biases = [bias_q, *(b if b is None else _shared(b, kv_size_multiplier, 0, reduce_dtype) for b in (bias_k, bias_v))]
    outs = matmul.several(input, weights, async_grad_allreduce, sequence_parallel_enabled, sequence_dimension, process_group, reduce_dtype)
    outs = tuple(out if b is None else out + b.to(out.dtype) for out, b in zip(outs, biases, strict=True))
    if fuse_qkv:
        outs = outs[0].split([start, output_size_kv or 0, output_size_kv or 0], dim=-1)
    return outs[0], outs[1], outs[2]


def _shared(weight: torch.Tensor, copies: int, start: int, dtype: torch.dtype | None) -> torch.Tensor:
    """A weight of which the ranks of a K/V group hold the same rows from `start` on: the gradient of those is summed over the group."""
    if copies == 1:
        return weight
    back = functools.partial(_sum_rows, start=start, dtype=dtype)
    return regions.region(weight, kv_groups.group(), regions.same, back)


def _sum_rows(grad: torch.Tensor, process_group: GroupLike, start: int, dtype: torch.dtype | None) -> torch.Tensor:
    own, copied = grad[:start], grad[start:]
    total = regions.reduce(copied if dtype is None else copied.to(dtype), process_group=process_group).to(grad.dtype)
    return torch.cat([own, total]) if start else total
