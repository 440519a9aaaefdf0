"""The op of usual experts: as product by product, also for gradients of gradients and where only some are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla

from nxd_jax import inspect
from nxd_jax.modules.moe import grouped_mlp as module
from nxd_jax.modules.moe.experts import Experts
from nxd_jax.modules.moe.grouped_mlp import ACTIVATIONS, grouped_mlp
from nxd_jax.modules.moe.grouped_product import grouped_product
from nxd_jax.modules.moe.model_utils import ACT2FN
from tests.nxd_jax.conftest import Nxd
from torch_bridge.lowerings.grouped_mlp import ACTIVATIONS as LOWERED

M, H, I, E = 24, 8, 12, 3
ENDS = torch.tensor([9, 9, 20])


def draw(device: str = "xla") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(device).requires_grad_() for s in ((M, H), (E, H, 2 * I), (E, I, H))]


def by_products(act: str, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = grouped_product(x, gate_up, ENDS.to(x.device)).chunk(2, -1)
    return grouped_product(ACT2FN[act](gate) * up, down, ENDS.to(x.device))


def at_once(act: str, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return grouped_mlp(x, gate_up, down, ENDS.to("xla"), act, M // E)


def test_activations_are_those_of_the_op() -> None:
    assert set(ACTIVATIONS) == set(LOWERED) <= set(ACT2FN)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradients(act: str) -> None:
    found: list[Any] = []
    for fn, device in ((at_once, "xla"), (by_products, "cpu")):
        given = draw(device)
        out = fn(act, *given)
        out.square().sum().backward()
        found.append([out.detach().cpu(), *(t.grad.cpu() for t in given)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_gradients_of_gradients() -> None:
    found: list[Any] = []
    for fn, device in ((at_once, "xla"), (by_products, "cpu")):
        given = draw(device)
        grads = torch.autograd.grad(fn("silu", *given).square().sum(), given, create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        found.append([*(g.detach().cpu() for g in grads), *(t.grad.cpu() for t in given)])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("trained", range(3))
def test_only_one_is_trained(trained: int, create_graph: bool) -> None:
    given, wanted = draw(), draw("cpu")
    for k in set(range(3)) - {trained}:
        given[k].requires_grad_(False)
    (grad,) = torch.autograd.grad(at_once("silu", *given).sum(), given[trained], create_graph=create_graph)
    (expected,) = torch.autograd.grad(by_products("silu", *wanted).sum(), wanted[trained])
    torch.testing.assert_close(grad.detach().cpu(), expected, rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit() -> None:
    x, gate_up, down = draw()
    with pytest.raises(ValueError, match=r"a grouped product takes rows \[m, k\].*rows \[24, 7\]"):
        grouped_mlp(x[:, :7], gate_up, down, ENDS.to("xla"), "silu", 8)
    with pytest.raises(ValueError, match=r"rows \[24, 12\], weight \[3, 11, 8\]"):
        grouped_mlp(x, gate_up, down[:, :11], ENDS.to("xla"), "silu", 8)


def test_which_experts_use_it(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of the usual form go through the op, others do not."""
    nxd(1)
    calls: list[str] = []
    monkeypatch.setattr("nxd_jax.modules.moe.experts.grouped_mlp", lambda x, *rest: calls.append(rest[3]) or module.grouped_mlp(x, *rest))
    for options in ({}, {"bias": True}, {"hidden_act_scaling_factor": 2.0}, {"gate_clamp_upper_limit": 1.0}, {"glu_mlp": False}):
        usual: dict[str, Any] = {
            "num_experts": E,
            "hidden_size": H,
            "intermediate_size": I,
            "hidden_act": "silu",
            "glu_mlp": True,
            **options,
        }
        out = Experts(**usual).to("xla").rows(torch.ones(M, H, device="xla"), ENDS.to("xla"))
        assert out.shape == (M, H) and len(calls) == 1
    assert calls == ["silu"]


def test_flops_are_those_of_all_rows(nxd: Nxd) -> None:
    """However they are cut: forward, and each of the two products of backward."""
    nxd(1)
    given = draw()
    at_once("silu", *given).square().sum().backward()
    torch_xla.sync()
    found = inspect.look().costs
    assert all(t.grad is not None for t in given)
    assert found.flops == 3 * 2 * M * (H * 2 * I + I * H) and found.complete
