"""Quantized layers of experts, on tensor and expert parallel ranks, against a loop over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.modules.moe.expert_mlps import ExpertMLPs
from nxd_jax.modules.moe.experts import Experts
from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantization_layers import QuantizedExpertFusedColumnParallel, QuantizedExpertFusedRowParallel
from nxd_jax.quantization.quantize import convert
from nxd_jax.tensor_parallel import full_weights, parallel_groups
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.expert_parts import by_expert_rank, held_by, whole
from tests.nxd_jax.parallel_layers.parts import close, joined, own, per_rank, tp_place
from torch_bridge.mesh import world

E, IN, OUT = 4, 8, 12
LAYERS: dict[Any, Any] = {
    ExpertFusedColumnParallelLinear: QuantizedExpertFusedColumnParallel,
    ExpertFusedRowParallelLinear: QuantizedExpertFusedRowParallel,
}
EXPERT_WISE: Any = config.get_default_expert_wise_per_channel_custom_qconfig_dict()
SCHEMES: dict[str, Any] = {
    "tensor": config.get_default_custom_qconfig_dict(),
    "channel": config.get_default_per_channel_custom_qconfig_dict(),
    "expert wise": EXPERT_WISE,
    "blocks": {**config.get_default_blockwise_custom_qconfig_dict(), "block_axis": [1, 2], "block_size": [4, 6]},
}
SCALES = {"tensor": (1,), "channel": (1, 1, OUT), "expert wise": (E, 1, OUT), "blocks": (E, 2, 2)}


def made(kind: Any, name: str, **kwargs: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The quantized layer, and the dequantized weights and the biases of all experts."""
    torch.manual_seed(5)
    float_layer = kind(E, IN, OUT, bias=True, **kwargs).to("xla")
    layer = LAYERS[kind].from_float(float_layer, SCHEMES[name], quantize_weights=True)
    weight, bias = full_weights.gather_full(float_layer.weight), full_weights.gather_full(float_layer.bias)
    assert isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor)
    numbers, scale = layer._scheme.quantize(weight)
    assert tuple(scale.shape) == SCALES[name]
    return layer, layer._scheme.dequantize(numbers, scale, torch.float32), bias


def inputs(x: torch.Tensor, cut: bool) -> torch.Tensor:
    """What each rank gets of tokens [E, ..., IN]: its experts', and in a row layer its part of their last dim."""
    ep, tp = parallel_groups.places("ep"), parallel_groups.size("tp")

    def part(rank: int) -> torch.Tensor:
        mine = x[held_by(ep[rank], E)]
        return (mine.chunk(tp, -1)[tp_place(rank)] if cut else mine).contiguous()

    return own([part(r) for r in range(world.size())])


GRID = [
    (kind, name, tp, ep)
    for kind in LAYERS
    for name in SCHEMES
    for tp, ep in ((2, 2), (4, 1), (1, 4), (1, 1))
    if not (name == "blocks" and tp == 4 and kind is ExpertFusedRowParallelLinear)  # parts of 2, blocks of 4: see test_layers.py
]


@pytest.mark.thorough(keep=16)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("kind, name, tp, ep", GRID)
def test_a_loop_over_experts(nxd: Nxd, kind: Any, name: str, tp: int, ep: int) -> None:
    row = kind is ExpertFusedRowParallelLinear
    nxd(4, tp=tp, ep=ep)
    layer, weight, bias = made(kind, name, **({"reduce_output": True} if row else {}))
    x = torch.randn(E, 3, 2, IN)
    expected = torch.stack([x[e] @ weight[e] + bias[e] for e in range(E)])
    y = layer(inputs(x, cut=row))
    torch.testing.assert_close(whole(y, None if row else 3), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("name", SCHEMES)
def test_chosen_experts(nxd: Nxd, name: str) -> None:
    nxd(2, tp=2)
    index, x = torch.tensor([3, 1, 3]), torch.randn(3, 2, IN)
    for kind in LAYERS:
        row = kind is ExpertFusedRowParallelLinear
        layer, weight, bias = made(kind, name, **({"reduce_output": True} if row else {}))
        expected = torch.stack([x[k] @ weight[e] + bias[e] for k, e in enumerate(index.tolist())])
        y = layer(own([x.chunk(2, -1)[tp_place(r)] for r in range(2)]) if row else x.to("xla"), index.to("xla"))
        torch.testing.assert_close(per_rank(y)[0] if row else joined(y, -1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("name", ["expert wise", "channel"])
def test_rows_of_experts(nxd: Nxd, name: str) -> None:
    """The dropless path: rows sorted by expert; nothing behind the last end."""
    nxd(2, tp=2)
    ends, sizes = torch.tensor([2, 2, 5, 6]), [2, 0, 3, 1]
    x = torch.randn(8, IN)
    layer, weight, bias = made(ExpertFusedRowParallelLinear, name, reduce_output=True)
    expected = torch.cat([p @ weight[e] + bias[e] for e, p in enumerate(x[:6].split(sizes))])
    y = layer.rows(own([x.chunk(2, -1)[tp_place(r)] for r in range(2)]), ends.to("xla"))
    close(y[:6], expected)
    close(y[6:], torch.zeros(2, OUT))


@pytest.mark.parametrize("tp, ep", [(2, 1), (1, 2), (2, 2)])
def test_state(nxd: Nxd, tp: int, ep: int) -> None:
    nxd(4, tp=tp, ep=ep)
    for kind, quantized in LAYERS.items():
        column = kind is ExpertFusedColumnParallelLinear
        shapes = {
            "tensor": (1,),
            "channel": (1, 1, OUT // tp if column else OUT),
            "expert wise": (E // ep, 1, OUT // tp if column else OUT),
            "blocks": (E // ep, 2 if column else 2 // tp, 2 // tp if column else 2),
        }
        for name, q_config in SCHEMES.items():
            layer = quantized.from_float(kind(E, IN, OUT), q_config)
            state = layer.state_dict()
            assert list(state) == ["weight", "scale"] and tuple(state["scale"].shape) == shapes[name]
            assert sum(t.numel() * t.element_size() for t in state.values()) == E * IN * OUT // tp // ep + 4 * layer.scale.numel()
            shared = ep > 1 and name in ("expert wise", "blocks")
            assert getattr(layer.scale, "expert_model_parallel", False) is shared
            assert getattr(layer.weight, "expert_model_parallel", False) is (ep > 1)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("glu", [True, False])
def test_a_whole_mixture(nxd: Nxd, glu: bool) -> None:
    """`ExpertMLPs` after `convert` gives what it gave with the dequantized weights."""
    nxd(4, tp=2, ep=2)
    torch.manual_seed(0)
    options: Any = dict(num_experts=E, top_k=2, hidden_size=8, intermediate_size=16, hidden_act="silu", glu_mlp=glu, capacity_factor=None)
    model = ExpertMLPs(**options, normalize_top_k_affinities=True).to("xla").eval()
    quantized = convert(model, SCHEMES["expert wise"], quantize_weights=True).eval()
    first, second = ("gate_up_proj" if glu else "up_proj"), "down_proj"
    assert isinstance(getattr(quantized.mlp_op, first), QuantizedExpertFusedColumnParallel)
    assert isinstance(quantized.mlp_op.down_proj, QuantizedExpertFusedRowParallel)
    for name in (first, second):
        with torch.no_grad():
            getattr(model.mlp_op, name).weight.copy_(getattr(quantized.mlp_op, name).dequantized_weight())
    x = by_expert_rank(lambda e: torch.full((6, 8), 1.0 + e) * torch.linspace(-1, 1, 48).reshape(6, 8))
    affinities = torch.rand(6, E).softmax(-1)
    index = affinities.topk(2).indices
    with torch.no_grad():
        outs = [m(x, affinities.to("xla"), index.to("xla"), 6) for m in (model, quantized)]
    expected, found = (o[0] if isinstance(o, tuple) else o for o in outs)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.cpu(), expected.cpu(), atol=1e-5, rtol=1e-5)


def test_distribution(nxd: Nxd) -> None:
    """Experts that are not equal runs keep their scales."""
    nxd(4, ep=2)
    held = [[3, 0], [1, 2]]
    layer, weight, bias = made(ExpertFusedColumnParallelLinear, "expert wise", expert_distribution=held)
    x = torch.randn(E, 2, IN)
    y = layer(by_expert_rank(lambda e: x[held[e]]))
    expected = torch.stack([x[e] @ weight[e] + bias[e] for e in range(E)])
    torch.testing.assert_close(whole(y, None, distribution=held), expected, atol=1e-5, rtol=1e-5)


def test_mistakes(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(1)
    for kind, quantized in LAYERS.items():
        with pytest.raises(AssertionError, match=f"{kind.__name__} expected, got Linear"):
            quantized.from_float(torch.nn.Linear(2, 2))
        with pytest.raises(AssertionError, match="Only per_channel_axis=2 supported.*got 0"):
            quantized(E, IN, OUT, quantization_type="expert_wise_per_channel_symmetric", quantization_per_channel_axis=0)
        with pytest.raises(AssertionError, match="a weight of 3 dims has different axes from -3 to 2"):
            quantized(E, IN, OUT, quantization_type="blockwise_symmetric", block_axis=[3], block_size=[2])
        with pytest.raises(AssertionError, match=r"experts \(dim 0\) do not share blocks; name dims 1 and 2 only"):
            quantized(E, IN, OUT, quantization_type="blockwise_symmetric", block_axis=[0, 1], block_size=[2, 2])
        with pytest.raises(NotImplementedError, match="does not take rank_ordering"):
            quantized(E, IN, OUT, rank_ordering=[0])
        quantized.from_float(kind(E, IN, OUT), {**EXPERT_WISE, "activation_quantization_type": "dynamic"})
    assert caplog.text.count("inputs of experts are not quantized, activation_quantization_type=dynamic has no effect") == 2
    assert isinstance(
        convert(Experts(num_experts=E, hidden_size=8, intermediate_size=8, hidden_act="silu", glu_mlp=True), EXPERT_WISE), Experts
    )
