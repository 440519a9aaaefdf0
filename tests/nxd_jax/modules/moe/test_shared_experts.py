"""Shared experts against the MLP written out: values, every gradient, initial weights, however the weights lie and are shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.modules.moe.model_utils import ACT2FN
from nxd_jax.modules.moe.shared_experts import SharedExperts
from nxd_jax.tensor_parallel import grads, regions
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, collectives_run, joined, own, per_rank, tp_place
from torch_bridge.mesh import world

H, I, N = 6, 8, 2
S, B = 4, 3

FORMS = {
    "plain": {},
    "fused": dict(fused_gate_up_projection=True),
    "transposed": dict(transpose_weights=True),
    "fused and transposed": dict(fused_gate_up_projection=True, transpose_weights=True),
}


def made(hidden_act: str = "silu", **kwargs: Any) -> SharedExperts:
    torch.manual_seed(5)
    return SharedExperts(H, I, N, hidden_act, **kwargs)


class Reference(torch.nn.Module):
    """The undivided MLP, with the weights that `made` draws."""

    def __init__(self, hidden_act: str = "silu", fused: bool = False):
        super().__init__()
        torch.manual_seed(5)
        self.act = ACT2FN[hidden_act]
        if fused:
            self.gate_up = torch.nn.Linear(H, 2 * I * N, bias=False)
        else:
            self.gate, self.up = torch.nn.Linear(H, I * N, bias=False), torch.nn.Linear(H, I * N, bias=False)
        self.down = torch.nn.Linear(I * N, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if hasattr(self, "gate_up") else (self.gate(x), self.up(x))
        return self.down(self.act(gate) * up)


def pairs(experts: Any, reference: Any) -> list[tuple[Any, torch.Tensor, int]]:
    """Each layer, the undivided weight, and its stride."""
    if hasattr(experts, "gate_up_proj"):
        first = [(experts.gate_up_proj, reference.gate_up.weight, 2)]
    else:
        first = [(experts.gate_proj, reference.gate.weight, 1), (experts.up_proj, reference.up.weight, 1)]
    return [*first, (experts.down_proj, reference.down.weight, 1)]


def whole(t: torch.Tensor, layer: Any, stride: int, turned: bool) -> torch.Tensor:
    """The undivided [out, in] tensor that ranks hold parts of."""
    found = joined(t, layer.weight.partition_dim, stride)
    return found.t() if turned else found


def hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_partial_sums(nxd: Nxd, name: str, tp: int) -> None:
    nxd(4, tp=tp)
    experts, reference = made(**FORMS[name]), Reference(fused="fused" in name)
    turned = "transposed" in name
    for layer, weight, stride in pairs(experts, reference):
        torch.testing.assert_close(whole(layer.weight.to("xla"), layer, stride, turned), weight.detach())
    x, scale = hidden(), torch.randn(S, B, H)
    expected = x.clone().requires_grad_()
    (reference(expected) * scale).sum().backward()

    given = x.to("xla").requires_grad_()
    y = regions.reduce_from_tensor_model_parallel_region(experts.to("xla")(given, S))
    close(y, reference(x).detach())
    (y * scale.to("xla")).sum().backward()
    assert expected.grad is not None and given.grad is not None
    close(given.grad, expected.grad)
    for layer, weight, stride in pairs(experts, reference):
        assert weight.grad is not None
        torch.testing.assert_close(whole(layer.weight.grad, layer, stride, turned), weight.grad, rtol=1e-4, atol=1e-5)


def test_nothing_is_reduced_forward(nxd: Nxd) -> None:
    nxd(4, tp=4)
    experts = made().to("xla")
    with torch.no_grad():
        parts = per_rank(experts(hidden().to("xla"), S))
        torch.testing.assert_close(sum(parts), Reference()(hidden()), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(parts[0], parts[1])
        y = experts(hidden().to("xla"), S)
        assert collectives_run() == {}
    assert y.shape == (S, B, H)


@pytest.mark.parametrize("act", ACT2FN)
def test_activations_alone(act: str, nxd: Nxd) -> None:
    nxd(1)
    experts = made(act)
    torch.testing.assert_close(experts(hidden(), S), Reference(act)(hidden()))
    torch.testing.assert_close(experts.to("xla")(hidden().to("xla"), S).cpu(), Reference(act)(hidden()), rtol=1e-4, atol=1e-5)


def test_bfloat16(nxd: Nxd) -> None:
    nxd(4, tp=2)
    experts, reference = made(dtype=torch.bfloat16), Reference().bfloat16()
    y = regions.reduce_from_tensor_model_parallel_region(experts.to("xla")(hidden(torch.bfloat16).to("xla"), S))
    assert y.dtype == torch.bfloat16
    close(y, reference(hidden(torch.bfloat16)).detach(), rtol=2e-2, atol=2e-2)


def test_attributes_and_names(nxd: Nxd) -> None:
    nxd(4, tp=2)
    shapes = {
        "plain": {"gate_proj": (8, H), "up_proj": (8, H), "down_proj": (H, 8)},
        "fused": {"gate_up_proj": (16, H), "down_proj": (H, 8)},
        "transposed": {"gate_proj": (H, 8), "up_proj": (H, 8), "down_proj": (8, H)},
        "fused and transposed": {"gate_up_proj": (H, 16), "down_proj": (8, H)},
    }
    for name, kwargs in FORMS.items():
        experts = made(**kwargs)
        assert {n.removesuffix(".weight"): tuple(p.shape) for n, p in experts.state_dict().items()} == shapes[name]
        for n, p in experts.named_parameters():
            out = 1 if "transposed" in name else 0
            assert p.tensor_model_parallel and p.num_partitions == 2
            assert (p.partition_dim, p.partition_stride) == (1 - out if "down" in n else out, 2 if "gate_up" in n else 1)


# -- all weights on every rank -----------------------------------------------------------------------


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("name", FORMS)
def test_sequence_parallel(nxd: Nxd, name: str) -> None:
    """Each rank takes its part of the sequence through all weights; their gradients add up over the ranks."""
    nxd(4, tp=2)
    experts, reference = made(sequence_parallel_enabled=True, **FORMS[name]), Reference(fused="fused" in name)
    assert all(p.sequence_parallel_enabled for p in experts.parameters())
    x, scale = hidden(), torch.randn(S, B, H)
    (reference(x) * scale).sum().backward()
    parts, scales = x.chunk(2), scale.chunk(2)
    given = own([parts[tp_place(r)] for r in range(world.size())], ["tp"])
    y = experts.to("xla")(given, S)
    for r, part in enumerate(per_rank(y)):
        torch.testing.assert_close(part, reference(parts[tp_place(r)]).detach(), rtol=1e-4, atol=1e-5)
    (y * own([scales[tp_place(r)] for r in range(world.size())], ["tp"])).sum().backward()
    grads.allreduce_sequence_parallel_gradients(torch.optim.SGD(experts.parameters(), lr=1.0))
    for layer, weight, _ in pairs(experts, reference):
        assert weight.grad is not None
        close(layer.weight.grad, weight.grad.t() if "transposed" in name else weight.grad)


@pytest.mark.parametrize("name", FORMS)
def test_one_token_by_parts_of_the_weights(nxd: Nxd, name: str) -> None:
    nxd(4, tp=2)
    experts = made(sequence_parallel_enabled=True, **FORMS[name]).eval().to("xla")
    x = hidden()[:1]
    with torch.no_grad():
        partial = experts(x.to("xla"), 1)
        parts = per_rank(partial)
        expected = Reference(fused="fused" in name)(x)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts[0], parts[2])
    assert not torch.allclose(parts[0], expected) and not torch.allclose(parts[0], parts[1])
    with torch.no_grad():
        close(experts(x.to("xla"), S), expected)
        close(experts.train()(x.to("xla"), 1), expected)


# -- full checkpoints --------------------------------------------------------------------------------


def test_a_full_checkpoint_is_turned(nxd: Nxd) -> None:
    nxd(1)
    for name in ("transposed", "fused and transposed"):
        reference = Reference(fused="fused" in name)
        experts = made(**FORMS[name])
        state = {f"moe.shared_experts.{n}_proj.weight": w.weight.detach() for n, w in reference.named_children()}
        experts.preshard_hook(state, "moe.shared_experts.weight")
        experts.load_state_dict({n.removeprefix("moe.shared_experts."): w for n, w in state.items()})
        torch.testing.assert_close(experts(hidden(), S), reference(hidden()))
    made().preshard_hook(plain := {"gate_proj.weight": torch.ones(2, 3)}, "weight")
    assert plain["gate_proj.weight"].shape == (2, 3)


def test_errors(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(ValueError, match="hidden_act='swish' is not one of gelu"):
        made("swish")
    for sizes, text in {(0, I, N): "hidden_size=0", (H, 0, N): "intermediate_size=0", (H, I, 0): "num_shared_experts=0"}.items():
        with pytest.raises(ValueError, match=f"SharedExperts: {text} must be at least 1"):
            SharedExperts(*sizes, "silu")
    with pytest.raises(AssertionError, match="6 is not divisible by 4: ColumnParallelLinear's output_size"):
        SharedExperts(H, 3, 2, "silu")


def test_the_reference_is_the_formula() -> None:
    reference = Reference()
    x = hidden()
    inner = F.silu(x @ reference.gate.weight.t()) * (x @ reference.up.weight.t())
    torch.testing.assert_close(reference(x), inner @ reference.down.weight.t())
