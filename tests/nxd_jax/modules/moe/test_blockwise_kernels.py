"""For which sizes upstream has kernels, and their products in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.modules.moe import blockwise
from nxd_jax.modules.moe.model_utils import ACTFunc, GLUType, get_kernel_activation_func_id
from nxd_jax.utils.model_utils import LogicalNCConfig
from tests.nxd_jax.modules.moe.by_hand import Rule, Weights, mix

XLA, CPU = torch.device("xla"), torch.device("cpu")


@pytest.mark.parametrize(
    ("hidden", "intermediate", "block", "glu", "rest", "wanted"),
    [
        (4096, 2048, 512, True, (False, XLA, 2), True),
        (4096, 2048, 512, True, (False, XLA, LogicalNCConfig.LNC_2, False), True),
        (4096, 2048, 512, True, (GLUType.GLU, False, XLA, 2), True),
        (4096, 2048, 512, True, ("swiglu", False, XLA, 2), True),
        (512, 16, 128, True, (False, XLA, 2), True),
        (8192, 16, 1024, True, (False, XLA, 2), True),
        (4096, 2048, 512, True, (False, CPU, 2), False),
        (4096, 2048, 512, True, (True, XLA, 2), False),
        (4096, 2048, 512, False, (False, XLA, 2), False),
        (4096, 2048, 512, True, (False, XLA, 1), False),
        (4096, 2048, 16, True, (False, XLA, 2), False),
        (10240, 2048, 512, True, (False, XLA, 2), False),
        (5122, 2048, 512, True, (False, XLA, 2), False),
        (4096, 2040, 512, True, (False, XLA, 2), False),
    ],
)
def test_which_sizes_have_a_kernel(hidden: int, intermediate: int, block: int, glu: bool, rest: Any, wanted: bool) -> None:
    assert blockwise.can_use_blockwise_matmul_nki(hidden, intermediate, block, glu, *rest) is wanted


def test_the_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nxd_jax"):
        assert not blockwise.can_use_blockwise_matmul_nki(4096, 2048, 512, True, device="xla", logical_nc_config=2, act_fn="gelu")
    assert (
        "NxD's blockwise kernel would not run: Neuron's blockwise kernel knows SILU for GLU, SIGMOID for SWIGLU, not ACTFunc.GELU"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((4096, 64, 16), "block_size=64 must be one of 128, 256, 512, 1024"),
        ((256, 128, 16), "hidden_size=256 must be a multiple of 512 from 512 to 8192"),
        ((512, 128, 24), "intermediate_size_tp=24 must be a multiple of 16"),
    ],
)
def test_sizes_without_a_kernel(sizes: tuple[int, int, int], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        blockwise.check_blockwise_mm_kernel_compatibility(*sizes)


def test_numbers_of_activations() -> None:
    assert get_kernel_activation_func_id(ACTFunc.SILU, GLUType.GLU) == 0
    assert get_kernel_activation_func_id(ACTFunc.SIGMOID, GLUType.SWIGLU) == 3
    with pytest.raises(ValueError, match="knows SILU for GLU, SIGMOID for SWIGLU, not ACTFunc.TANH for GLUType.GLU"):
        get_kernel_activation_func_id(ACTFunc.TANH, GLUType.GLU)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_products_of_blocks(device: str) -> None:
    """Equal a loop over experts, with all gradients."""
    torch.manual_seed(0)
    tokens, experts, hidden, inner, size = 13, 4, 8, 12, 4
    first, second = torch.randn(experts, hidden, 2 * inner) * 0.3, torch.randn(experts, inner, hidden) * 0.3
    x, affinities, grad = torch.randn(tokens, hidden), torch.rand(tokens, experts), torch.randn(tokens, hidden)
    index = affinities.topk(2, 1).indices
    given = [t.clone().to(device).requires_grad_() for t in (x, affinities, first, second)]
    mask = blockwise.get_expert_mask(index.to(device), experts)
    maps = blockwise.get_blockwise_expert_and_token_mapping(tokens, blockwise.block_count(tokens, 2, experts, size), mask, block_size=size)
    masked = blockwise.get_expert_affinities_masked(given[1], mask, False)
    out = blockwise.TorchBlockwiseTraining.apply(given[0], masked, maps[1], maps[0], *given[2:])
    out.backward(grad.to(device))
    wanted = [t.clone().requires_grad_() for t in (x, affinities, first, second)]
    expected = mix(Weights(*wanted[2:]), Rule(), wanted[0], wanted[1], index)
    expected.backward(grad)
    torch.testing.assert_close(out.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
