"""Experts on tensor and expert parallel ranks against loops over experts in eager torch: outputs and every gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nxd_jax.modules.moe.experts import Experts
from nxd_jax.modules.moe.model_utils import GLUType
from nxd_jax.tensor_parallel import parallel_groups, regions
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.expert_parts import LAYOUTS, by_expert_rank, held_by, of_expert_ranks, whole
from torch_bridge import metrics
from torch_bridge.runtime import executor

E, H, I, C = 8, 12, 24, 5
ACT = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}


@dataclasses.dataclass(frozen=True)
class Maths:
    """One form of the MLP."""

    hidden_act: str = "silu"
    glu_mlp: bool = True
    bias: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, **kwargs: Any) -> Experts:
        sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
        return Experts(**{**sizes, **kwargs}, hidden_act=self.hidden_act, glu_mlp=self.glu_mlp, bias=self.bias, **dict(self.options))

    def act(self, up_gate: torch.Tensor) -> torch.Tensor:
        option = dict(self.options)
        act = ACT[self.hidden_act]
        if not self.glu_mlp:
            return act(up_gate)
        gate, up = up_gate[..., :I], up_gate[..., I:]
        gate = (
            gate.clamp(option.get("gate_clamp_lower_limit"), option["gate_clamp_upper_limit"])
            if "gate_clamp_upper_limit" in option
            else gate
        )
        up = up.clamp(option["up_clamp_lower_limit"], option["up_clamp_upper_limit"]) if "up_clamp_upper_limit" in option else up
        up = up + option.get("hidden_act_bias", 0.0)
        out = act(gate * option.get("hidden_act_scaling_factor", 1.0)) * up
        return out * gate if option.get("glu_type") == GLUType.SWIGLU else out


GPT_OSS = (
    ("glu_type", GLUType.SWIGLU),
    ("hidden_act_scaling_factor", 1.702),
    ("hidden_act_bias", 1.0),
    ("gate_clamp_upper_limit", 0.4),
    ("up_clamp_upper_limit", 0.4),
    ("up_clamp_lower_limit", -0.3),
)
MATHS = {
    "mixtral": Maths(),
    "gpt-oss": Maths("sigmoid", bias=True, options=GPT_OSS),
    "plain": Maths("gelu", glu_mlp=False, bias=True),
    "glu with bias": Maths("silu", bias=True, options=(("hidden_act_bias", 0.5), ("hidden_act_scaling_factor", 2.0))),
}


class Model:
    """Experts on all ranks, and the same weights in eager torch."""

    def __init__(self, maths: Maths, dtype: torch.dtype = torch.float32, **kwargs: Any):
        torch.manual_seed(3)
        self.maths = maths
        self.experts = maths.make(dtype=dtype, init_method=_normal, output_layer_init_method=_normal, **kwargs)
        first = self.experts.gate_up_proj if maths.glu_mlp else self.experts.up_proj
        self.stride = 2 if maths.glu_mlp else 1
        self.parts: dict[str, tuple[torch.nn.Parameter, int | None, int]] = {"first": (first.weight, 2, self.stride)}
        self.parts["down"] = self.experts.down_proj.weight, 1, 1
        if maths.bias:
            for bias in (first.bias, self.experts.down_proj.bias):
                torch.nn.init.normal_(bias, std=0.3)
            self.parts["first bias"] = first.bias, 1, self.stride
            self.parts["down bias"] = self.experts.down_proj.bias, None, 1
        self.experts.to("xla")
        self.plain = {n: whole(p, dim, stride).requires_grad_() for n, (p, dim, stride) in self.parts.items()}

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        plain = self.plain
        first = x @ plain["first"][e]
        first = first + plain["first bias"][e] if self.maths.bias else first
        out = self.maths.act(first) @ plain["down"][e]
        return out + plain["down bias"][e] if self.maths.bias else out

    def compare_gradients(self, rtol: float, atol: float) -> None:
        for name, (p, dim, stride) in self.parts.items():
            assert p.grad is not None and p.grad.dtype == p.dtype
            close(whole(p.grad, dim, stride), self.plain[name].grad, rtol, atol, name)


def close(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float, name: str = "") -> None:
    """Entry by entry; in bfloat16, where sums cancel, the tensor as a whole."""
    if rtol < 1e-2:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error <= rtol, f"{name}: {error}"


def _normal(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(weight, std=0.3)


def reduced(partial: torch.Tensor) -> torch.Tensor:
    """What MoE does with partial sums."""
    return regions.reduce_from_tensor_model_parallel_region(partial)


def ends_of(ep: int, rows: int, e: int) -> torch.Tensor:
    """Where rows of an expert parallel rank's experts end: one has none, and some rows belong to nobody."""
    sizes = torch.rand(e, generator=torch.Generator().manual_seed(ep))
    sizes[ep % e] = 0 if e > 1 else sizes[ep % e]
    return (sizes.cumsum(0) / sizes.sum() * (rows - 7)).round().to(torch.int32)


def check_forward(model: Model, dtype: torch.dtype = torch.float32, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    x, weights = torch.randn(E, 2, C, H).to(dtype), torch.randn(E, 2, C, H).to(dtype)
    given = by_expert_rank(lambda e: x[held_by(e, E)]).requires_grad_()
    out = reduced(model.experts(given))
    assert out.dtype == dtype
    (out * by_expert_rank(lambda e: weights[held_by(e, E)])).sum().backward()

    plain = x.clone().requires_grad_()
    expected = torch.stack([model.expert(e, plain[e]) for e in range(E)])
    (expected * weights).sum().backward()
    close(torch.cat(of_expert_ranks(out)), expected.detach(), rtol, atol)
    close(torch.cat(of_expert_ranks(given.grad)), plain.grad, rtol, atol)
    model.compare_gradients(rtol, atol)


def check_rows(
    model: Model, dtype: torch.dtype = torch.float32, rtol: float = 1e-4, atol: float = 1e-5, call: Any = None, rows: int = 40
) -> None:
    count = parallel_groups.size("ep")
    x, weights = torch.randn(count, rows, H).to(dtype), torch.randn(count, rows, H).to(dtype)
    ends = [ends_of(e, rows, E // count) for e in range(count)]
    given = by_expert_rank(lambda e: x[e]).requires_grad_()
    out = reduced((call or model.experts.rows)(given, by_expert_rank(lambda e: ends[e])))
    assert out.dtype == dtype
    (out * by_expert_rank(lambda e: weights[e])).sum().backward()

    plain = x.clone().requires_grad_()
    expected = []
    for e in range(count):
        stops = [0, *ends[e].tolist()]
        parts = [model.expert(k, plain[e, a:b]) for k, a, b in zip(held_by(e, E), stops[:-1], stops[1:], strict=True)]
        expected.append(torch.cat([*parts, x.new_zeros(rows - stops[-1], H)]))
    (torch.stack(expected) * weights).sum().backward()
    for e, value in enumerate(of_expert_ranks(out)):
        close(value, expected[e].detach(), rtol, atol)
        assert not value[int(ends[e][-1]) :].any()
    close(torch.stack(of_expert_ranks(given.grad)), plain.grad, rtol, atol)
    model.compare_gradients(rtol, atol)


@pytest.mark.thorough(keep=4)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("tp, ep", LAYOUTS)
def test_every_layout(nxd: Nxd, tp: int, ep: int) -> None:
    nxd(8, tp=tp, ep=ep)
    check_forward(Model(MATHS["gpt-oss"]))
    check_rows(Model(MATHS["gpt-oss"]))


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("name", MATHS)
def test_every_form(nxd: Nxd, name: str) -> None:
    nxd(4, tp=2, ep=2)
    check_forward(Model(MATHS[name]))
    check_rows(Model(MATHS[name]))


@pytest.mark.parametrize("kind", ["forward", "rows"])
def test_bfloat16(nxd: Nxd, kind: str) -> None:
    nxd(4, tp=2, ep=2)
    check = {"forward": check_forward, "rows": check_rows}[kind]
    check(Model(MATHS["glu with bias"], dtype=torch.bfloat16), dtype=torch.bfloat16, rtol=1.5e-2)


def test_autocast(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    model = Model(MATHS["glu with bias"])

    def call(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        with torch.autocast("xla", dtype=torch.bfloat16):
            out = model.experts.rows(x, ends)
        assert out.dtype == torch.bfloat16
        return out.float()

    check_rows(model, rtol=1.5e-2, call=call)


def test_activation_checkpoint(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    model = Model(MATHS["gpt-oss"])
    check_rows(model, call=lambda x, ends: checkpoint(model.experts.rows, x, ends, use_reentrant=False))


def test_one_program_whatever_the_routing(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    model = Model(MATHS["mixtral"])

    def step(ends: list[list[int]]) -> None:
        x = by_expert_rank(lambda e: torch.randn(40, H)).requires_grad_()
        reduced(model.experts.rows(x, by_expert_rank(lambda e: torch.tensor(ends[e], dtype=torch.int32)))).sum().backward()
        executor.sync()
        model.experts.zero_grad()

    step([[10, 20, 30, 40], [0, 0, 0, 40]])
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    for ends in ([[0, 0, 0, 0], [0, 0, 0, 0]], [[40, 40, 40, 40], [1, 2, 3, 4]]):
        step(ends)
    assert metrics.COUNTERS.get("UncachedCompile", 0) == before


def test_tokens_that_all_experts_get(nxd: Nxd) -> None:
    nxd(4, tp=2)
    model, x = Model(MATHS["gpt-oss"]), torch.randn(1, C, H)
    given, plain = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    out = reduced(model.experts(given))
    expected = torch.stack([model.expert(e, plain[0]) for e in range(E)])
    torch.testing.assert_close(of_expert_ranks(out)[0], expected.detach(), rtol=1e-4, atol=1e-5)
    weights = torch.randn(E, C, H)
    (out * weights.to("xla")).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(of_expert_ranks(given.grad)[0], plain.grad, rtol=1e-4, atol=1e-5)
    model.compare_gradients(1e-4, 1e-5)


def test_chosen_experts_alone(nxd: Nxd) -> None:
    """What decoding does with few tokens: [n, ..., H] for n of the experts, named by a tensor."""
    nxd(4, tp=2)
    model, x, chosen = Model(MATHS["gpt-oss"]), torch.randn(3, C, H), torch.tensor([5, 0, 5])
    out = reduced(model.experts(x.to("xla"), chosen.to("xla")))
    expected = torch.stack([model.expert(e, x[k]) for k, e in enumerate(chosen.tolist())]).detach()
    torch.testing.assert_close(of_expert_ranks(out)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_the_cpu(nxd: Nxd, dtype: torch.dtype) -> None:
    """A world of one rank without xla; torch's own grouped product leaves rows behind the last end as they are, and takes no float64."""
    nxd(1)
    torch.manual_seed(0)
    experts = MATHS["gpt-oss"].make(dtype=dtype)
    x, ends = torch.randn(20, H, dtype=dtype, requires_grad=True), torch.tensor([3, 3, 3, 9, 9, 9, 9, 13], dtype=torch.int32)
    out = experts.rows(x, ends)
    expected = torch.zeros_like(out)
    for e, a, b in ((0, 0, 3), (3, 3, 9), (7, 9, 13)):
        expected[a:b] = experts(x[a:b].expand(E, b - a, H))[e]
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert x.grad is not None and not x.grad[13:].any() and x.grad[:13].any(1).all()


def test_the_configuration_is_left_alone(nxd: Nxd) -> None:
    """NxD moves the limits of up by the bias, in the configuration that it was given: a second model has them moved twice."""
    nxd(1)
    options = dict(GPT_OSS)
    first, second = (MATHS["gpt-oss"].make() for _ in range(2))
    assert first.up_limits == second.up_limits == (options["up_clamp_lower_limit"], options["up_clamp_upper_limit"])


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(hidden_act="softplus"), "hidden_act='softplus' is not one of gelu, leaky_relu, relu, sigmoid, silu, tanh"),
        (dict(glu_type="geglu"), "'geglu' is not one of glu, swiglu"),
        (
            dict(glu_mlp=False, hidden_act_bias=1.0, up_clamp_upper_limit=7.0),
            r"hidden_act_bias, up_clamp_\*_limit: of gated linear units only",
        ),
        (dict(glu_mlp=False, glu_type=GLUType.SWIGLU), r"glu_type=GLUType.SWIGLU: of gated linear units only; pass glu_mlp=True"),
    ],
)
def test_errors(nxd: Nxd, options: dict[str, Any], text: str) -> None:
    nxd(1)
    with pytest.raises(ValueError, match=text):
        Experts(**{"num_experts": E, "hidden_size": H, "intermediate_size": I, "hidden_act": "silu", "glu_mlp": True, **options})
