"""The names of the package, and that tab completion finds them."""

from __future__ import annotations

import importlib

import neuronx_distributed.modules as modules
import pytest
from neuronx_distributed.modules import moe

OURS = ("assignment", "blockwise", "blockwise_kernels", "expert_ranks", "capacity", "dropless", "grouped_product", "load", "router_base")
"""Submodules that NxD has not under these names, or only with kernels."""


def test_names() -> None:
    assert modules.moe is moe
    assert set(moe.__all__) >= {"MoE", "ExpertMLPs", "RouterTopK", "RouterSinkhorn", "load_balancing_loss_func", "ACT2FN"}
    assert set(moe.__all__) == set(moe._FROM)
    assert {*moe.__all__, *moe._SUBMODULES} <= set(dir(moe))
    for name in moe.__all__:
        assert getattr(moe, name) is getattr(importlib.import_module(f"neuronx_distributed.modules.moe.{moe._FROM[name]}"), name)
    namespace: dict[str, object] = {}
    exec("from neuronx_distributed.modules.moe import *", namespace)
    assert set(moe.__all__) <= set(namespace)


def test_submodules() -> None:
    for name in moe._SUBMODULES:
        module = importlib.import_module(f"neuronx_distributed.modules.moe.{name}")
        assert getattr(moe, name) is module
        assert module.__doc__
        if name not in OURS:
            assert module.__doc__.startswith(f"`neuronx_distributed.modules.moe.{name}`"), name


NAMES = {
    "blockwise": "BlockShardStrategy ExpertAffinityScaleMode SkipMode TorchBlockwiseTraining can_use_blockwise_matmul_nki "
    "check_blockwise_mm_kernel_compatibility",
    "expert_mlps": "ExpertMLPs ExpertMLPsV2",
    "expert_mlps_v2": "ExpertMLPsV2",
    "experts": "Experts",
    "loss_function": "load_balancing_loss_func",
    "model": "MoE MoEFusedTKGConfig",
    "model_utils": "ACT2FN ACTFunc GLUType DEFAULT_BLOCK_SIZE DEFAULT_LNC_SIZE DEFAULT_PADDING_VALUE DEFAULT_SELECTIVE_LOADING_THRESHOLD DEFAULT_SKIP_MODE "
    "DEFAULT_HIDDEN_ACT_SCALING_FACTOR get_kernel_activation_func_id",
    "moe_config_validator": "MoeConfigValidator",
    "moe_configs": "BlockShardStrategy BlockwiseMatmulConfig MoEFusedTKGConfig RoutedExpertsMLPOpsConfig RouterConfig to_torch_dtype",
    "moe_fused_tkg": "MoEFusedTKG MoEFusedTKGConfig",
    "moe_fused_tkg_mx": "MoEFusedTKGMX",
    "moe_parallel_layers": "ExpertFusedColumnParallelLinear ExpertFusedRowParallelLinear ExpertFusedLinear ExpertFusedLinearWithAsyncCommunication",
    "moe_process_group": "destroy_moe_model_parallel get_moe_ep_group get_moe_tp_ep_group init_tensor_expert_parallel_moe_process_groups",
    "routing": "GroupLimitedRouter RouterBase RouterSinkhorn RouterTopK",
    "shared_experts": "SharedExperts",
    "token_shuffling": "token_shuffle token_unshuffle",
}
"""What scripts and upstream's tests import, by submodule."""
METHODS = (
    "allocate_token_blocks forward_all_experts forward_blockwise forward_capacity_factor forward_selective_loading generate_local_expert_mask_with_redundancy "
    "get_block_conditions get_blockwise_expert_and_token_mapping get_expert_affinities_masked get_expert_mask get_mlp_op get_spmd_rank"
)


@pytest.mark.parametrize("submodule", NAMES)
def test_names_that_scripts_import(submodule: str) -> None:
    module = importlib.import_module(f"neuronx_distributed.modules.moe.{submodule}")
    assert [name for name in NAMES[submodule].split() if not hasattr(module, name)] == []


def test_methods_that_scripts_call() -> None:
    assert [name for name in METHODS.split() if not callable(getattr(moe.ExpertMLPs, name, None))] == []


def test_the_decode_kernel_says_what_to_use() -> None:
    for kernel in (moe.moe_fused_tkg.MoEFusedTKG, moe.moe_fused_tkg_mx.MoEFusedTKGMX):
        with pytest.raises(
            NotImplementedError, match=f"{kernel.__name__} is a kernel of Neuron's: call MoE itself .*init_tkg_module=True, tkg_config"
        ):
            kernel(None, None, config=None)
        assert kernel._can_use_nki_kernel(None, "moe_fused", None) is False


def test_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'nxd_jax.modules.moe' has no attribute 'nothing'"):
        _ = moe.nothing
