"""Configurations, activations and the names of both."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.modules.moe import model_utils
from nxd_jax.modules.moe.model_utils import ACT2FN, ACTFunc, GLUType
from nxd_jax.modules.moe.moe_configs import (
    BlockShardStrategy,
    BlockwiseMatmulConfig,
    MoEFusedTKGConfig,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    to_torch_dtype,
)


def experts(**kwargs: Any) -> RoutedExpertsMLPOpsConfig:
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=8, intermediate_size=16, top_k=2, hidden_act="silu", glu_mlp=True)
    return RoutedExpertsMLPOpsConfig(**(sizes | kwargs))


def test_activations() -> None:
    x = torch.linspace(-3, 3, 13)
    functions = dict(gelu=F.gelu, leaky_relu=F.leaky_relu, relu=F.relu, sigmoid=F.sigmoid, silu=F.silu, tanh=torch.tanh)
    assert set(functions) == set(ACT2FN) == {m.value for m in ACTFunc}
    for name, function in functions.items():
        torch.testing.assert_close(model_utils.activation(name)(x), function(x))
    with pytest.raises(ValueError, match="hidden_act='swish' is not one of gelu, leaky_relu, relu, sigmoid, silu, tanh"):
        model_utils.activation("swish")


def test_members_by_value_and_name() -> None:
    assert GLUType.validate(GLUType.SWIGLU) is GLUType.validate("swiglu") is GLUType.validate("SWIGLU") is GLUType.SWIGLU
    assert ACTFunc.validate("silu") is ACTFunc.SILU
    for strange in ("geglu", None, 1):
        with pytest.raises(ValueError, match=f"GLUType: {strange!r} is not one of glu, swiglu"):
            GLUType.validate(strange)
    assert (model_utils.DEFAULT_BLOCK_SIZE, model_utils.DEFAULT_SELECTIVE_LOADING_THRESHOLD) == (512, 1.0)


def test_router() -> None:
    assert RouterConfig() == RouterConfig.from_kwargs() == RouterConfig("softmax", torch.float32)
    named = RouterConfig.from_kwargs(router_act_fn="sigmoid", router_dtype="bfloat16", hidden_size=8)
    assert named == RouterConfig.from_kwargs(router_act_fn="sigmoid", router_dtype=torch.bfloat16)
    assert (named.act_fn, named.dtype) == ("sigmoid", torch.bfloat16)
    assert to_torch_dtype("torch.float16") is torch.float16
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32, float16, bfloat16, float64"):
        RouterConfig.from_kwargs(router_dtype="int8")


def test_routed_experts() -> None:
    config = experts(glu_type="swiglu")
    assert config.glu_type is GLUType.SWIGLU
    assert (config.bias, config.hidden_act_scaling_factor, config.hidden_act_bias, config.capacity_factor) == (False, 1.0, 0.0, None)
    assert config.local_redudancy_degree is None
    assert experts(glu_mlp=False, glu_type="none").glu_type == "none"
    with pytest.raises(ValueError, match="GLUType: 'none' is not one of glu, swiglu"):
        experts(glu_type="none")


def test_expert_distribution() -> None:
    assert experts(expert_distribution=[[0, 1, 1], [2, 3, 1]]).local_redudancy_degree == [[1, 2, 0, 0], [0, 1, 1, 1]]
    with pytest.raises(ValueError, match=r"expert_distribution names experts \[-1, 4\]; there are 0\.\.3"):
        experts(expert_distribution=[[0, 4], [2, -1]])
    with pytest.raises(ValueError, match=r"expert_distribution leaves out experts \[3\] of 4: every expert needs a rank"):
        experts(expert_distribution=[[0, 1], [2, 2]])


def test_blockwise(caplog: pytest.LogCaptureFixture) -> None:
    assert BlockwiseMatmulConfig.default() == BlockwiseMatmulConfig.from_kwargs(block_size=None) == BlockwiseMatmulConfig()
    config = BlockwiseMatmulConfig.from_kwargs(block_size=128, block_sharding_strategy="PING_PONG", use_torch_block_wise=True)
    assert (config.block_size, config.block_sharding_strategy, config.use_torch_block_wise) == (128, BlockShardStrategy.PING_PONG, True)
    kernels = object()
    assert BlockwiseMatmulConfig.from_kwargs(block_sharding_strategy=kernels).block_sharding_strategy is kernels
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert BlockwiseMatmulConfig.from_kwargs(block_size=64, blok=1, other=2).block_size == 64
    assert "BlockwiseMatmulConfig has no blok, other: left out" in caplog.text


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_block_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match=f"block_size={size} must be a positive number of tokens"):
        BlockwiseMatmulConfig(block_size=size)


def test_sharding_strategies() -> None:
    with pytest.raises(ValueError, match="block_sharding_strategy='ROUND' is not one of HI_LO, PING_PONG"):
        BlockwiseMatmulConfig.from_kwargs(block_sharding_strategy="ROUND")


def test_decode_kernels() -> None:
    config = MoEFusedTKGConfig(quantized=False, moe_fused_kernel_enabled=True)
    assert (config.quantized, config.moe_fused_kernel_enabled, config.norm_topk_prob) == (False, True, False)
