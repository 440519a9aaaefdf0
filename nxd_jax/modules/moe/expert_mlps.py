"""`neuronx_distributed.modules.moe.expert_mlps`: the experts of a mixture, by keyword."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from nxd_jax.modules.moe.model_utils import DEFAULT_LNC_SIZE, GLUType
from nxd_jax.modules.moe.moe_configs import BlockShardStrategy, BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from nxd_jax.tensor_parallel.sharded_weights import Init


class ExpertMLPs(ExpertMLPsV2):
    """`ExpertMLPsV2` as scripts of NxD 0.10 to 0.13 make it.

    num_experts, top_k, hidden_size, intermediate_size, hidden_act, glu_mlp, capacity_factor, normalize_top_k_affinities, bias, glu_type and the others of the
    configuration: see `RoutedExpertsMLPOpsConfig`. block_size to skip_dma_weight: see `BlockwiseMatmulConfig`. init_method, output_layer_init_method: of the
    first and the second projection. The rest is as in `ExpertMLPsV2`, and so is what is raised.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        sequence_parallel_enabled: bool = False,
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        bias: bool = False,
        glu_type: GLUType | str = GLUType.GLU,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        return_bias: bool = False,
        init_method: Init | None = torch.nn.init.kaiming_uniform_,
        output_layer_init_method: Init | None = torch.nn.init.kaiming_uniform_,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        tensor_model_parallel_group: Any = None,
        expert_model_parallel_group: Any = None,
        enable_spmd_rank: bool = False,
        blockwise_nki_autograd_cls: Any = None,
        use_torch_block_wise: bool = False,
        logical_nc_config: int = DEFAULT_LNC_SIZE,
        parallelize_token_to_block_mapping: bool = True,
        early_expert_affinity_modulation: bool = False,
        optimized_block_to_token_mapping: bool = True,
        use_block_parallel: bool = False,
        always_augment_inputs_for_blockwise_matmul: bool = False,
        block_sharding_strategy: Any = BlockShardStrategy.HI_LO,
        skip_dma_token: bool = False,
        skip_dma_weight: bool = False,
        expert_distribution: Any = None,
        is_prefill: bool = True,
        tkg_tensor_model_parallel_group: Any = None,
        tkg_expert_model_parallel_group: Any = None,
        cte_tensor_model_parallel_group: Any = None,
        cte_expert_model_parallel_group: Any = None,
    ):
        experts = RoutedExpertsMLPOpsConfig(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=top_k,
            hidden_act=hidden_act,
            glu_mlp=glu_mlp,
            bias=bias,
            glu_type=glu_type,
            hidden_act_scaling_factor=hidden_act_scaling_factor,
            hidden_act_bias=hidden_act_bias,
            gate_clamp_upper_limit=gate_clamp_upper_limit,
            gate_clamp_lower_limit=gate_clamp_lower_limit,
            up_clamp_upper_limit=up_clamp_upper_limit,
            up_clamp_lower_limit=up_clamp_lower_limit,
            normalize_top_k_affinities=normalize_top_k_affinities,
            early_expert_affinity_modulation=early_expert_affinity_modulation,
            input_layer_init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            capacity_factor=capacity_factor,
            enable_spmd_rank=enable_spmd_rank,
            expert_distribution=expert_distribution,
        )
        blocks = BlockwiseMatmulConfig.from_kwargs(
            block_size=block_size,
            logical_nc_config=logical_nc_config,
            use_torch_block_wise=use_torch_block_wise,
            blockwise_nki_autograd_cls=blockwise_nki_autograd_cls,
            parallelize_token_to_block_mapping=parallelize_token_to_block_mapping,
            optimized_block_to_token_mapping=optimized_block_to_token_mapping,
            use_block_parallel=use_block_parallel,
            always_augment_inputs_for_blockwise_matmul=always_augment_inputs_for_blockwise_matmul,
            block_sharding_strategy=block_sharding_strategy,
            skip_dma_token=skip_dma_token,
            skip_dma_weight=skip_dma_weight,
        )
        super().__init__(
            experts,
            blocks,
            return_bias=return_bias,
            dtype=dtype,
            sequence_parallel_enabled=sequence_parallel_enabled,
            device=device,
            tensor_model_parallel_group=tensor_model_parallel_group,
            expert_model_parallel_group=expert_model_parallel_group,
            tkg_tensor_model_parallel_group=tkg_tensor_model_parallel_group,
            tkg_expert_model_parallel_group=tkg_expert_model_parallel_group,
            cte_tensor_model_parallel_group=cte_tensor_model_parallel_group,
            cte_expert_model_parallel_group=cte_expert_model_parallel_group,
            is_prefill=is_prefill,
        )
