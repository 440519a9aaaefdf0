"""Channel-parallel convolutions against `torch.nn.Conv2d`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed
import pytest
import torch

from nxd_jax.parallel_layers.layers import BaseParallelConv, InputChannelParallelConv2d, OutputChannelParallelConv2d
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, joined, own, per_rank, tp_place
from torch_bridge.mesh import world

CASES: dict[str, dict[str, Any]] = {
    "plain": dict(kernel_size=3),
    "no bias": dict(kernel_size=3, bias=False),
    "geometry": dict(kernel_size=(3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    "same": dict(kernel_size=3, padding="same"),
    "valid": dict(kernel_size=3, padding="valid"),
    "reflect": dict(kernel_size=3, padding=1, padding_mode="reflect"),
    "replicate same": dict(kernel_size=(2, 3), padding="same", padding_mode="replicate"),
    "circular": dict(kernel_size=3, padding=(1, 2), padding_mode="circular"),
}
TP = 4


def pair(kind: Any, **kwargs: Any) -> tuple[torch.nn.Conv2d, Any]:
    native = {k: v for k, v in kwargs.items() if k not in ("gather_output", "input_is_parallel", "partition_pad", "keep_master_weight")}
    torch.manual_seed(3)
    dtype = native.pop("dtype", None)
    reference = torch.nn.Conv2d(**native).to(dtype)  # drawn in float32, as layers are
    torch.manual_seed(3)
    return reference, kind(**kwargs).to("xla")


def parted(x: torch.Tensor, dim: int) -> torch.Tensor:
    return own([x.chunk(TP, dim)[tp_place(r)] for r in range(world.size())], ["tp"])


@pytest.mark.thorough(keep=9)
@pytest.mark.core(keep=3)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_output_channels(nxd: Nxd, name: str, gather: bool) -> None:
    nxd(8, tp=TP)
    reference, layer = pair(OutputChannelParallelConv2d, in_channels=3, out_channels=8, gather_output=gather, **CASES[name])
    x = torch.randn(2, 3, 6, 7)
    expected, given = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    out = reference(expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    y = layer(given)
    torch.testing.assert_close(per_rank(y)[5] if gather else joined(y, 1), out.detach(), rtol=1e-4, atol=1e-5)
    y.backward(weights.to("xla") if gather else parted(weights, 1))
    close(given.grad, expected.grad, atol=1e-4)
    torch.testing.assert_close(joined(layer.weight.grad, 0), reference.weight.grad, rtol=1e-4, atol=1e-4)
    if layer.bias is not None:
        assert layer.bias.shape == (2,)  # shared out also if the output is gathered, as in NxD
        torch.testing.assert_close(joined(layer.bias.grad, 0), reference.bias.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough(keep=9)
@pytest.mark.core(keep=3)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_input_channels(nxd: Nxd, name: str, parallel: bool) -> None:
    nxd(8, tp=TP)
    reference, layer = pair(InputChannelParallelConv2d, in_channels=8, out_channels=3, input_is_parallel=parallel, **CASES[name])
    x = torch.randn(2, 8, 6, 7)
    expected = x.clone().requires_grad_()
    given = (parted(x, 1) if parallel else x.to("xla")).requires_grad_()
    out = reference(expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    y = layer(given)
    close(y, out.detach())
    y.backward(weights.to("xla"))
    torch.testing.assert_close(joined(given.grad, 1) if parallel else per_rank(given.grad)[3], expected.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(joined(layer.weight.grad, 1), reference.weight.grad, rtol=1e-4, atol=1e-4)
    if layer.bias is not None:
        close(layer.bias.grad, reference.bias.grad, atol=1e-4)


def test_channels_that_do_not_divide(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(AssertionError, match=r"6 is not divisible by 4: OutputChannelParallelConv2d's out_channels .*partition_pad=True"):
        OutputChannelParallelConv2d(3, 6, 3)
    with pytest.raises(AssertionError, match=r"InputChannelParallelConv2d's in_channels"):
        InputChannelParallelConv2d(6, 3, 3)
    x = torch.randn(2, 6, 5, 5)
    for kind in (OutputChannelParallelConv2d, InputChannelParallelConv2d):
        reference, layer = pair(kind, in_channels=6, out_channels=6, kernel_size=3, partition_pad=True, keep_master_weight=True)
        close(layer(x.to("xla")), reference(x).detach())
        layer(x.to("xla")).sum().backward()
        assert layer.weight.shape[layer.weight.partition_dim] == 2
        assert layer.master_weight.shape[layer.weight.partition_dim] == 8


def test_master_weights(nxd: Nxd) -> None:
    nxd(4, tp=4)
    for kind in (OutputChannelParallelConv2d, InputChannelParallelConv2d):
        reference, layer = pair(kind, in_channels=4, out_channels=8, kernel_size=3, keep_master_weight=True)
        assert torch.equal(layer.master_weight, reference.weight) and torch.equal(layer.master_bias, reference.bias)
        assert kind(4, 8, 3).master_bias is None and kind(4, 8, 3, bias=False, keep_master_weight=True).master_bias is None
        assert isinstance(layer, BaseParallelConv)


def test_a_checkpoint_with_a_bias_on_all_ranks(nxd: Nxd, tmp_path: Path) -> None:
    """As this project wrote it for a gathered output when every rank held the whole bias: arrays in a checkpoint are full ones."""
    nxd(4, tp=4)
    reference, layer = pair(OutputChannelParallelConv2d, in_channels=3, out_channels=8, kernel_size=3)
    state = {"weight": layer.weight.detach(), "bias": reference.bias.detach().to("xla")}
    neuronx_distributed.save_checkpoint(str(tmp_path), "before", model=state)
    torch.manual_seed(7)
    later = OutputChannelParallelConv2d(3, 8, 3).to("xla")
    neuronx_distributed.load_checkpoint(str(tmp_path), "before", model=later)
    torch.testing.assert_close(joined(later.bias, 0), reference.bias.detach())
    x = torch.randn(1, 3, 5, 5)
    close(later(x.to("xla")), reference(x).detach())


def test_one_image_and_bfloat16(nxd: Nxd) -> None:
    nxd(4, tp=4)
    for kind in (OutputChannelParallelConv2d, InputChannelParallelConv2d):
        reference, layer = pair(kind, in_channels=4, out_channels=4, kernel_size=1, dtype=torch.bfloat16)
        x = torch.randn(4, 3, 3).bfloat16()
        y = layer(x.to("xla"))
        assert y.dtype == torch.bfloat16
        close(y.float(), reference(x).detach().float(), rtol=3e-2, atol=3e-2)


def test_what_is_not_supported(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(NotImplementedError, match="groups=2 is not supported"):
        OutputChannelParallelConv2d(4, 8, 3, groups=2)
    with pytest.raises(ValueError, match="padding_mode must be one of 'zeros', 'reflect'"):
        InputChannelParallelConv2d(4, 8, 3, padding_mode="mirror")
