"""What quantized layers hold and how it is loaded, and mistakes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.tensor_parallel import full_weights, sharded_weights
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close
from tests.nxd_jax.quantization.layers import CHANNEL, IN, LAYERS, OUT, SCHEMES, linear


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("name", SCHEMES)
def test_state_and_its_size(nxd: Nxd, name: str) -> None:
    """Zeros until a checkpoint is loaded; a byte for each number of the weight, four (or one) for each scale, four for each bias."""
    nxd(4, tp=2)
    column = QuantizedColumnParallel(IN, OUT, gather_output=False, **SCHEMES[name])
    row = QuantizedRowParallel(IN, OUT, bias=False, **SCHEMES[name])
    scales = {
        "blocks": (6 * 4, 12 * 2),
        "blocks that ranks share": (1 * 2, 2 * 1),
        "blocks of a row, int8, exponents": (12 * 4, 24 * 2),
    }.get(name, (12, 24) if "channel" in name else (1, 1))
    for layer, bias, count in zip((column, row), (12, 0), scales, strict=True):
        state = layer.state_dict()
        assert list(state) == (["weight", "bias", "scale"] if bias else ["weight", "scale"])
        assert not state["weight"].float().any() and all(not p.requires_grad for p in layer.parameters())
        each = state["scale"].element_size()
        assert (state["scale"] == (1.0 if each == 4 else 127)).all() and state["scale"].numel() == count
        assert sum(t.numel() * t.element_size() for t in state.values()) == IN * OUT // 2 + count * each + bias * 4
        for parameter in layer.parameters():
            assert callable(parameter.get_tensor_from_state_dict)
        assert callable(layer.weight.set_tensor_to_state_dict)


def test_one_rank_on_the_cpu(nxd: Nxd) -> None:
    nxd(1)
    torch.manual_seed(0)
    float_layer = ColumnParallelLinear(IN, OUT, keep_master_weight=True)
    layer = QuantizedColumnParallel.from_float(float_layer, {**CHANNEL, "quantized_dtype": torch.float8_e4m3fn}, quantize_weights=True)
    assert {p.device.type for p in layer.parameters()} == {"cpu"} and layer.master_weight.dtype is torch.float8_e4m3fn
    x = torch.randn(2, IN)
    expected = F.linear(x, layer.weight.float() * layer.scale, float_layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.dequantized_weight(), layer.weight.float() * layer.scale)
    other = QuantizedColumnParallel(IN, OUT, quantization_type="per_channel_symmetric", quantized_dtype=torch.float8_e4m3fn)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    close(copy.deepcopy(other).to("xla")(x.to("xla")), layer(x))


def test_casts_leave_numbers_and_scales_alone(nxd: Nxd) -> None:
    nxd(2, tp=2)
    layer = QuantizedRowParallel(IN, OUT, activation_quantization_type="static", quantized_dtype=torch.float8_e5m2)
    weight = layer.weight
    layer.to(torch.bfloat16).to("xla").half()
    dtypes = {name: p.dtype for name, p in layer.named_parameters()}
    assert dtypes == {"weight": torch.float8_e5m2, "scale": torch.float32, "input_scale": torch.float32, "bias": torch.float16}
    assert layer.weight is weight and layer.weight.device.type == "xla"


def test_meta(nxd: Nxd) -> None:
    nxd(4, tp=2)
    with sharded_weights.shapes_only():
        layer = QuantizedColumnParallel(IN, OUT, activation_quantization_type="static", keep_master_weight=True)
    assert {p.device.type for p in layer.parameters()} == {"meta"} and layer.weight.partition_dim == 0
    weight = layer.weight
    layer.init_weight_cpu()
    layer.to("xla")
    assert (
        layer.weight is weight
        and weight.device.type == "xla"
        and not weight.float().any()
        and layer.scale.item() == layer.input_scale.item() == 1
    )
    from_meta = QuantizedRowParallel.from_float(RowParallelLinear(IN, OUT, device="meta"), CHANNEL)
    assert from_meta.weight.device.type == from_meta.scale.device.type == "meta" and from_meta.weight.dtype is torch.int8
    with pytest.raises(RuntimeError, match="on 'meta' has no values yet"):
        QuantizedRowParallel.from_float(RowParallelLinear(IN, OUT, device="meta"), CHANNEL, quantize_weights=True)


@pytest.mark.parametrize("kind, shape", [(ColumnParallelLinear, (IN, 22)), (RowParallelLinear, (14, OUT))])
def test_padding(nxd: Nxd, kind: Any, shape: tuple[int, int]) -> None:
    """A whole checkpoint without padding, through the hook that `shard_checkpoint` calls."""
    nxd(4, tp=4)
    torch.manual_seed(0)
    reference = torch.nn.Linear(*shape)
    layer = LAYERS[kind].from_float(kind(*shape, pad=True), CHANNEL)
    layer.eval()
    numbers, scale = layer._scheme.quantize(reference.weight)
    state = {"a.weight": numbers, "a.scale": scale.flatten(), "a.bias": reference.bias.detach()}
    for name in ("a.weight", "a.bias"):
        layer.preshard_hook(state, name)
    for name in ("weight", "scale", "bias"):
        full_weights.scatter_full(getattr(layer, name), state[f"a.{name}"])
    x = torch.randn(2, shape[0])
    close(layer(x.to("xla")), F.linear(x, numbers.float() * scale, reference.bias), rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"a\.weight has \d+ entries along dim \d, Quantized\w+ with padding needs the \d+"):
        layer.preshard_hook(state, "a.weight")


def test_scales_of_checkpoints(nxd: Nxd) -> None:
    """One block that ranks share is repeated for each; what has the right shape stays; what does not belong is refused."""
    nxd(4, tp=4)
    layer = QuantizedColumnParallel(IN, OUT, **SCHEMES["blocks that ranks share"])
    state = {"weight": torch.zeros(OUT, IN, dtype=torch.float8_e4m3fn), "scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    layer.preshard_hook(state, "weight")
    assert state["scale"].tolist() == [[1.0, 2.0]] * 2 + [[3.0, 4.0]] * 2
    layer.preshard_hook(state, "weight")
    assert state["scale"].shape == (4, 2)
    for wrong in (torch.ones(5, 2), torch.ones(7), torch.ones(1, 2)):
        with pytest.raises(
            ValueError, match=r"a scale of shape \[.*\] does not belong to a weight of shape \[24, 16\], which needs \[2, 2\]"
        ):
            layer.preshard_hook({"weight": state["weight"], "scale": wrong}, "weight")


# -- mistakes ----------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": (
        dict(quantization_type="scalar"),
        AssertionError,
        r"scalar quantization is not supported currently. Specify from \['per_tensor_symm",
    ),
    "dtype": (
        dict(quantized_dtype=torch.float16),
        AssertionError,
        r"torch.float16 quantization is not supported.*torch.int8.*\(QuantizedDtype\)",
    ),
    "scale's dtype": (dict(scale_dtype=torch.float16), AssertionError, r"torch.float16 quantization is not supported.*\(ScaleDtype\)"),
    "axis": (
        dict(quantization_type="per_channel_symmetric", quantization_per_channel_axis=1),
        AssertionError,
        "Only per_channel_axis=0 supported.*got 1",
    ),
    "no blocks": (dict(quantization_type="blockwise_symmetric"), AssertionError, "blockwise quantization needs block_axis and block_size"),
    "axis of blocks": (
        dict(quantization_type="blockwise_symmetric", block_axis=[2], block_size=[2]),
        AssertionError,
        r"block_axis=\[2\] with block_size=\[2\]: a weight of 2 dims has different axes from -2 to 1",
    ),
    "two blocks on an axis": (
        dict(quantization_type="blockwise_symmetric", block_axis=[1, -1], block_size=[2, 2]),
        AssertionError,
        "has different axes",
    ),
    "packed": (
        dict(quantized_dtype=torch.uint16),
        NotImplementedError,
        "does not take F4E2M1FN_X4, four numbers packed in one.*blockwise_scale_deq",
    ),
    "keys": (dict(quantization_type="per_key_symmetric"), NotImplementedError, "which is for KV caches: use per_channel_symmetric"),
    "experts": (
        dict(quantization_type="expert_wise_per_channel_symmetric"),
        NotImplementedError,
        "has no experts.*quantize.convert's `include`",
    ),
    "activations": (dict(activation_quantization_type="some"), ValueError, "'some' is not a valid ActivationQuantizationType"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(nxd: Nxd, name: str) -> None:
    nxd(1)
    kwargs, kind, text = MISTAKES[name]
    for layer in LAYERS.values():
        with pytest.raises(kind, match=text):
            layer(IN, OUT, **kwargs)


def test_blocks_that_do_not_fit_the_ranks(nxd: Nxd) -> None:
    nxd(4, tp=4)
    text = "blocks of 4 entries along dim 0 do not fit the 6 that each of 4 ranks has: choose another block_size or tensor parallel size"
    with pytest.raises(AssertionError, match=text):
        QuantizedColumnParallel(IN, OUT, quantization_type="blockwise_symmetric", block_axis=[0], block_size=[4])
    with pytest.raises(AssertionError, match="do not fit the 3 that each of 4 ranks has of each of 2 fused weights"):
        QuantizedColumnParallel(IN, OUT, stride=2, quantization_type="blockwise_symmetric", block_axis=[0], block_size=[6])


def test_other_mistakes(nxd: Nxd) -> None:
    nxd(2, tp=2)
    with pytest.raises(AssertionError, match="RowParallelLinear expected, got ColumnParallelLinear: a layer that derives"):
        QuantizedRowParallel.from_float(linear(ColumnParallelLinear))
    with pytest.raises(AssertionError, match="ColumnParallelLinear expected, got Linear"):
        QuantizedColumnParallel.from_float(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="input_is_parallel must be True"):
        QuantizedRowParallel(IN, OUT, sequence_parallel_enabled=True)
    with pytest.raises(ValueError, match="unknown: axis, missing: quantized_dtype. get_default_custom_qconfig_dict"):
        QuantizedColumnParallel.from_float(linear(ColumnParallelLinear), {"quantization_type": "per_tensor_symmetric", "axis": 0})
    layer = QuantizedColumnParallel(IN, OUT, sequence_parallel_enabled=True, sequence_dimension=0)
    with pytest.raises(AssertionError, match="gather_output=True cannot be combined with sequence_parallel_enabled=True"):
        layer(torch.zeros(2, IN, device="xla"))
    with pytest.raises(NotImplementedError, match="computes all of its outputs: leave out slice_indices"):
        layer(torch.zeros(2, IN, device="xla"), torch.tensor([0]))
