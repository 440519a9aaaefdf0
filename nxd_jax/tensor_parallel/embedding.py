"""The embedding whose table tensor parallel ranks share out, by rows or by columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init

from nxd_jax.tensor_parallel import layer_groups, regions
from nxd_jax.tensor_parallel.base_layer import BaseParallelLayer
from nxd_jax.tensor_parallel.partition import EmbeddingUtility, get_padding_length
from nxd_jax.tensor_parallel.sharded_weights import Init
from nxd_jax.tensor_parallel.spmd_rank import SPMDRank
from torch_bridge.collectives import functional
from torch_bridge.recorder import expected_indices


class ParallelEmbedding(BaseParallelLayer):
    """`torch.nn.Embedding` with the vocabulary (or, with `shard_across_embedding`, the embedding) shared out.

    num_embeddings, embedding_dim: of the full table. padding_idx, max_norm, norm_type, scale_grad_by_freq: as in `torch.nn.Embedding`, also for
    row 0 (NxD takes `padding_idx=0` for None). sparse: NotImplementedError, gradients on xla are dense.
    init_method: called with the full float32 table.
    shard_across_embedding: each rank has all rows and [num_embeddings, embedding_dim / tp]; results are gathered along the last dim.
    pad: pad the shared dim with zeros to a multiple of tp; the result has `embedding_dim` columns again.
    sequence_parallel_enabled, sequence_dimension: ids are [B, S]; give each rank its part of the sequence, as [S / tp, B, H] (dimension None or
    0) or [B, S / tp, H] (1, where NxD returns the rank's partial result without the sum).
    collect_output: False returns the rank's own part: rows of other ranks zero, or its columns.
    tensor_model_parallel_group, rank_ordering, dtype, device: as in `ColumnParallelLinear`. use_spmd_rank: hold an `SPMDRank` as `rank_util`.
    tile_cc: a hint to the Neuron compiler, without effect.

    Attributes: weight, num_embeddings_per_partition, embedding_dim_per_partition, start_index, end_index (the rows held; each rank's own),
    tensor_model_parallel_group, sequence_dim.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Init = init.normal_,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        use_spmd_rank: bool = False,
        sequence_dimension: int | None = None,
        tile_cc: bool = False,
        rank_ordering: Any = None,
        collect_output: bool = True,
    ):
        if sparse:
            raise NotImplementedError("ParallelEmbedding(sparse=True): gradients on xla are dense; use sparse=False and a dense optimizer")
        dim = 1 if shard_across_embedding else 0
        super().__init__(tensor_model_parallel_group, dim, dtype, device, rank_ordering=rank_ordering, init_method=init_method)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _row(padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.shard_across_embedding = shard_across_embedding
        self.pad = pad
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.tile_cc = tile_cc
        self.collect_output = collect_output
        self.rank_util = SPMDRank(world_size=self._partition.size) if use_spmd_rank else None
        self._divide_table()
        self._make_weight()

    @property
    def tensor_model_parallel_group(self) -> Any:
        """NxD's name of `tensor_parallel_group`."""
        return self.tensor_parallel_group

    @property
    def tensor_model_parallel_size(self) -> int:
        """How many ranks share the table out."""
        return self._partition.size

    @property
    def weight_partition_dim(self) -> int:
        """The dim of the weight that is cut: 0 (rows), or 1 with `shard_across_embedding`."""
        return self._partition.dim

    @property
    def per_partition_size(self) -> int:
        """Entries of that dim on one rank."""
        return self.embedding_dim_per_partition if self.shard_across_embedding else self.num_embeddings_per_partition

    @property
    def init_method(self) -> Init | None:
        """NxD's name of `arg_init_method`."""
        return self.arg_init_method

    @property
    def sequence_dim(self) -> int | None:
        """NxD's name of `sequence_dimension`."""
        return self.sequence_dimension

    def _divide_table(self) -> None:
        count = self._partition.size
        shared = self._full_shape()[self._partition.dim]
        self.pad_size = get_padding_length(shared, count) if self.pad else 0
        self.num_embeddings_per_partition = self.num_embeddings
        self.embedding_dim_per_partition = self.embedding_dim
        self.start_index, self.end_index = 0, self.num_embeddings
        if self.shard_across_embedding:
            self.embedding_dim_per_partition = self._check_divides("embedding_dim", shared + self.pad_size, "or pass pad=True")
            return
        self.num_embeddings_per_partition = self._check_divides("num_embeddings", shared + self.pad_size, "or pass pad=True")
        self.start_index, self.end_index = EmbeddingUtility.range_from_per_partition_vocab_size(
            self.num_embeddings_per_partition, layer_groups.rank(self._partition.group), count
        )

    def _full_shape(self) -> list[int]:
        return [self.num_embeddings, self.embedding_dim]

    def _padding(self) -> int:
        return self.pad_size

    def _init_weight(self, weight: torch.Tensor) -> None:
        super()._init_weight(weight)
        if self.padding_idx is not None:
            weight[self.padding_idx].zero_()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """input_: ids of any shape (with sequence parallelism [B, S]), the same on all tensor parallel ranks."""
        expected_indices.expect("ParallelEmbedding", input_, self.num_embeddings, f"the {self.num_embeddings} rows of the full table")
        out = self._own_part(input_)
        if self.padding_idx is not None:
            out = torch.where((input_ == self.padding_idx).unsqueeze(-1), out.detach(), out)
        if not self.collect_output:
            return out
        if self.shard_across_embedding:
            whole = regions.gather(out, -1, self._partition.group)
            return self._split_sequence(whole if not self.pad_size else whole.narrow(-1, 0, self.embedding_dim))
        return self._sum_of_parts(out)

    # -- the rank's own part ---------------------------------------------------------------------------

    def _own_part(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows looked up, with zeros where another rank holds them."""
        if self.shard_across_embedding or self._partition.size == 1:
            return self._look_up(ids, ids)
        rows = ids - self.start_index
        count = self.num_embeddings_per_partition
        outside = (rows < 0) | (rows >= count)
        out = self._look_up(rows.masked_fill(outside, 0), rows.masked_fill(outside, count))
        return out.masked_fill(outside.unsqueeze(-1), 0.0)

    def _look_up(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the weight. slots: the same rows, but a number past the last where another rank holds the row."""
        if self.max_norm is not None:
            self._renormalize(self._counts(slots) > 0)
        out = F.embedding(rows, self.weight)
        return _ScaleGradient.apply(out, 1.0 / self._counts(slots)[slots].unsqueeze(-1)) if self.scale_grad_by_freq else out

    def _counts(self, slots: torch.Tensor) -> torch.Tensor:
        """How often each row of this rank (and, in the last place, any other row) is looked up."""
        flat = slots.reshape(-1).long()
        ones = torch.ones(flat.shape, dtype=torch.float32, device=flat.device)
        return torch.zeros(self.num_embeddings_per_partition + 1, dtype=torch.float32, device=flat.device).index_add(0, flat, ones)

    def _renormalize(self, used: torch.Tensor) -> None:
        """Shrink the rows that are looked up to `max_norm`, in place."""
        with torch.no_grad():
            assert self.max_norm is not None
            norms = self._row_norms()
            scale = torch.where(used[:-1] & (norms > self.max_norm), self.max_norm / (norms + 1e-7), torch.ones_like(norms))
            self.weight.mul_(scale.unsqueeze(-1).to(self.weight.dtype))

    def _row_norms(self) -> torch.Tensor:
        weight = self.weight.float()
        if not self.shard_across_embedding or self._partition.size == 1:
            return torch.linalg.vector_norm(weight, self.norm_type, dim=-1)
        if self.norm_type == float("inf"):
            return functional.all_reduce("max", weight.abs().amax(-1), groups=self.tensor_parallel_group)
        powers = functional.all_reduce("sum", weight.abs().pow(self.norm_type).sum(-1), groups=self.tensor_parallel_group)
        return powers.pow(1.0 / self.norm_type)

    # -- what the ranks make of their parts ----------------------------------------------------------------

    def _sum_of_parts(self, out: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel_enabled:
            return regions.reduce_from_tensor_model_parallel_region(out, self.tensor_parallel_group)
        laid, dim = self._with_sequence(out)
        return regions.reduce_scatter_to_sequence_parallel_region(laid, dim, self.tensor_parallel_group)

    def _split_sequence(self, out: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel_enabled:
            return out
        laid, dim = self._with_sequence(out)
        return regions.scatter_to_sequence_parallel_region(laid, dim, self.tensor_parallel_group)

    def _with_sequence(self, out: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[S, B, H] and 0, or [B, S, H] and the dim to cut."""
        if self.sequence_dimension:
            return out, self.sequence_dimension
        return out.transpose(0, 1).contiguous(), 0

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self._partition.size}"


def _row(index: int | None, count: int) -> int | None:
    """A padding row counted from the start, None for none."""
    if index is None:
        return None
    if not -count <= index < count:
        raise AssertionError(f"padding_idx={index} must be within num_embeddings={count}")
    return index % count


class _ScaleGradient(torch.autograd.Function):
    """x; its gradient times `scale`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * ctx.saved_tensors[0]).to(grad.dtype), None
