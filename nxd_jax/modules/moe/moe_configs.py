"""`neuronx_distributed.modules.moe.moe_configs`: what the router, the experts and their dropless path are made from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from nxd_jax.modules.moe.model_utils import DEFAULT_BLOCK_SIZE, DEFAULT_LNC_SIZE, DEFAULT_SKIP_MODE, GLUType

logger = logging.getLogger("nxd_jax")

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def to_torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16" or "torch.bfloat16". Raises ValueError for others than float dtypes of models."""
    found = _DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return found


class BlockShardStrategy(Enum):
    """How Neuron's kernel shares blocks out to the two halves of a logical core; without effect here."""

    HI_LO = "HI_LO"
    PING_PONG = "PING_PONG"


@dataclasses.dataclass
class BlockwiseMatmulConfig:
    """How the dropless path multiplies.

    block_size: tokens in a block, of one expert each. The other fields steer Neuron's kernels; they are kept, and have no effect.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    use_block_parallel: bool = False
    block_sharding_strategy: Any = BlockShardStrategy.HI_LO
    skip_dma_token: bool = DEFAULT_SKIP_MODE[0]
    skip_dma_weight: bool = DEFAULT_SKIP_MODE[1]
    logical_nc_config: int = DEFAULT_LNC_SIZE
    blockwise_nki_autograd_cls: Any = None
    use_torch_block_wise: bool = False
    parallelize_token_to_block_mapping: bool = True
    optimized_block_to_token_mapping: bool = True
    always_augment_inputs_for_blockwise_matmul: bool = False
    use_shard_on_intermediate_dynamic_while: bool = False
    use_shard_on_block_dynamic_while: bool = False
    num_static_blocks: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size={self.block_size!r} must be a positive number of tokens")
        if isinstance(self.block_sharding_strategy, str):
            names = [s.value for s in BlockShardStrategy]
            if self.block_sharding_strategy not in names:
                raise ValueError(f"block_sharding_strategy={self.block_sharding_strategy!r} is not one of {', '.join(names)}")
            self.block_sharding_strategy = BlockShardStrategy(self.block_sharding_strategy)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> BlockwiseMatmulConfig:
        """A configuration of the arguments that are its fields; None for block_size is the default. Others are named in a warning and left out."""
        known = {f.name for f in dataclasses.fields(cls)}
        strange = sorted(set(kwargs) - known)
        if strange:
            logger.warning("BlockwiseMatmulConfig has no %s: left out", ", ".join(strange))
        given = {name: value for name, value in kwargs.items() if name in known}
        if given.get("block_size", 0) is None:
            del given["block_size"]
        return cls(**given)

    @classmethod
    def default(cls) -> BlockwiseMatmulConfig:
        """All defaults."""
        return cls()


@dataclasses.dataclass
class RoutedExpertsMLPOpsConfig:
    """The routed experts: their sizes, their maths, and which tokens they take.

    num_experts: of all ranks. top_k: experts of a token. hidden_size, intermediate_size: of one expert, undivided.
    hidden_act: a key of `ACT2FN`. glu_mlp: gate and up projections (`glu_type` says how they are joined) in place of an up projection alone.
    bias: both projections have biases.
    hidden_act_scaling_factor, hidden_act_bias: see `GLUType`. gate_clamp_*_limit, up_clamp_*_limit: bounds of the projections' results (None: none).
    normalize_top_k_affinities: the weights of a token's experts are made to add up to 1; for top_k > 1.
    early_expert_affinity_modulation: weigh the experts' inputs in place of their outputs; for top_k == 1.
    input_layer_init_method, output_layer_init_method: fill the weights of gate and up, and of down.
    capacity_factor: None keeps all tokens, a positive number bounds the tokens of an expert, others mean dropless.
    expert_distribution: the experts of each expert-parallel rank, all of them covered; default equal runs.
    is_prefill, enable_spmd_rank, use_index_calc_kernel, hidden_size_actual, intermediate_size_actual, is_*_dim_shuffled are kept for inference scripts.

    Raises ValueError for a glu_type that does not exist, and for an expert_distribution with other experts than 0..num_experts-1 or without some of them.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    hidden_act: str
    glu_mlp: bool
    bias: bool = False
    glu_type: GLUType | str = GLUType.GLU
    hidden_act_scaling_factor: float = 1.0
    hidden_act_bias: float = 0.0
    hidden_size_actual: int | None = None
    intermediate_size_actual: int | None = None
    is_hidden_dim_shuffled: bool | None = None
    is_intermediate_dim_shuffled: bool | None = None
    use_index_calc_kernel: bool = True
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    normalize_top_k_affinities: bool = False
    early_expert_affinity_modulation: bool = False
    input_layer_init_method: Any = None
    output_layer_init_method: Any = None
    capacity_factor: float | None = None
    enable_spmd_rank: bool = False
    is_prefill: bool | None = None
    expert_distribution: Sequence[Sequence[int]] | None = None
    local_redudancy_degree: list[list[int]] | None = dataclasses.field(default=None, init=False)
    """How often each expert-parallel rank holds each expert, [ep][num_experts], with an expert_distribution (spelt as NxD does)."""

    def __post_init__(self) -> None:
        if self.glu_mlp:
            self.glu_type = GLUType.validate(self.glu_type)
        if self.expert_distribution:
            self.local_redudancy_degree = self.bincount_2d(self.expert_distribution, self.num_experts)
            missing = [e for e in range(self.num_experts) if not any(row[e] for row in self.local_redudancy_degree)]
            if missing:
                raise ValueError(f"expert_distribution leaves out experts {missing} of {self.num_experts}: every expert needs a rank")

    @staticmethod
    def bincount_2d(expert_distribution: Sequence[Sequence[int]], num_experts: int) -> list[list[int]]:
        """How often each row names each of the experts 0..num_experts-1. Raises ValueError for other numbers."""
        strange = sorted({e for row in expert_distribution for e in row if not 0 <= e < num_experts})
        if strange:
            raise ValueError(f"expert_distribution names experts {strange}; there are 0..{num_experts - 1}")
        return [[list(row).count(e) for e in range(num_experts)] for row in expert_distribution]


@dataclasses.dataclass
class RouterConfig:
    """The router's activation ("softmax" or "sigmoid") and the dtype of its weights."""

    act_fn: str = "softmax"
    dtype: torch.dtype = torch.float32

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> RouterConfig:
        """From `router_act_fn` and `router_dtype` (a dtype or its name) among a model's settings; others are not the router's."""
        dtype = kwargs.get("router_dtype", torch.float32)
        return cls(kwargs.get("router_act_fn", "softmax"), to_torch_dtype(dtype) if isinstance(dtype, str) else dtype)


@dataclasses.dataclass
class MoEFusedTKGConfig:
    """Which of Neuron's kernels generate a token. They are kept, and have no effect: one program serves all.

    norm_topk_prob: whether those kernels normalise the weights of a token's experts.
    """

    quantized: bool
    moe_fused_kernel_enabled: bool | None = None
    router_topk_kernel_enabled: bool | None = None
    expert_mlp_kernel_enabled: bool | None = None
    shared_mlp_kernel_enabled: bool | None = None
    norm_topk_prob: bool = False
    is_mxfp4_compute: bool | None = None
