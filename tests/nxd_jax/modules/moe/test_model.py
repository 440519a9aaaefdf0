"""The whole layer: transformers' Mixtral block, what it returns, sequence parallelism, padding, shared experts, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from nxd_jax.modules.moe import ExpertMLPs, MoE, RouterTopK, SharedExperts
from nxd_jax.modules.rms_norm import RMSNorm
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import parallel_groups
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import collectives_run, own, per_rank
from torch_bridge.runtime import executor

E, H, I = 4, 8, 12

pytestmark = pytest.mark.filterwarnings("ignore:a parallel layer was made before")


def make(k: int = 2, factor: float | None = None, router: dict[str, Any] | None = None, **kwargs: Any) -> MoE:
    torch.manual_seed(1)
    sequence = {name: kwargs[name] for name in ("sequence_parallel_enabled",) if name in kwargs}
    experts = ExpertMLPs(
        num_experts=E,
        top_k=k,
        hidden_size=H,
        intermediate_size=I,
        hidden_act="silu",
        glu_mlp=True,
        capacity_factor=factor,
        normalize_top_k_affinities=k > 1,
        **sequence,
    )
    return MoE(RouterTopK(E, k, H, **router or {}), experts, **kwargs)


# -- transformers' block -------------------------------------------------------------------------------


def mixtral(k: int) -> MixtralSparseMoeBlock:
    torch.manual_seed(2)
    config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=k)
    block = MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.5)
    return block


def take(layer: MoE, block: MixtralSparseMoeBlock) -> None:
    """The same weights; transformers' matrices are [out, in]."""
    with torch.no_grad():
        layer.router.linear_router.weight.copy_(block.gate.weight)
        layer.expert_mlps.mlp_op.gate_up_proj.weight.copy_(block.experts.gate_up_proj.transpose(1, 2))
        layer.expert_mlps.mlp_op.down_proj.weight.copy_(block.experts.down_proj.transpose(1, 2))


@pytest.mark.core(keep=6)
@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("factor", [None, 0.0, "all but nothing"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_equals_transformers(k: int, factor: Any, device: str) -> None:
    """Output, logits and every gradient. NxD takes the affinities' norm over the chosen experts, as Mixtral does; for k = 1 it refuses that."""
    factor = E / k - 1e-6 if factor == "all but nothing" else factor
    block, layer = mixtral(k), make(k, factor, return_router_logits=True)
    take(layer, block)
    layer = layer.to(device)
    x = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(3))
    given, wanted_x = x.clone().to(device).requires_grad_(), x.clone().requires_grad_()
    out, logits = layer(given)
    wanted = block(wanted_x)
    weights = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(4))
    (out * weights.to(device)).sum().backward()
    (wanted * weights).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out.cpu(), wanted, **close)
    torch.testing.assert_close(logits.cpu(), block.gate(wanted_x.reshape(-1, H))[0], **close)
    experts = layer.expert_mlps.mlp_op
    for found, expected in (
        (given.grad, wanted_x.grad),
        (layer.router.linear_router.weight.grad, block.gate.weight.grad),
        (experts.gate_up_proj.weight.grad.transpose(1, 2), block.experts.gate_up_proj.grad),
        (experts.down_proj.weight.grad.transpose(1, 2), block.experts.down_proj.grad),
    ):
        torch.testing.assert_close(found.cpu(), expected, **close)


# -- what it returns -----------------------------------------------------------------------------------


def test_the_tuple() -> None:
    x = torch.randn(2, 5, H)
    assert [t.shape for t in make()(x)] == [(2, 5, H)]
    layer = make(return_router_logits=True, return_expert_index=True)
    assert [tuple(t.shape) for t in layer(x, residual=x)] == [(2, 5, H), (10, E), (10, 2), (2, 5, H)]
    layer = make()
    layer.is_test = True
    assert [tuple(t.shape) for t in layer(x)] == [(2, 5, H), (10, 2)]


def test_norm_and_residual() -> None:
    """The sum of input and residual is normed, and comes back as it was."""
    x, before = torch.randn(2, 5, H), torch.randn(2, 5, H)
    layer, norm = make(), RMSNorm(H)
    nn.init.normal_(norm.weight)
    (wanted,) = layer(norm(x + before))
    layer.rmsnorm = norm
    out, residual = layer(x, residual=before)
    assert torch.equal(residual, x + before)
    torch.testing.assert_close(out, wanted)


def test_shared_experts_take_every_token() -> None:
    torch.manual_seed(5)
    shared = SharedExperts(H, I, 2, "silu")
    x = torch.randn(2, 5, H)
    torch.testing.assert_close(make(shared_experts=shared)(x)[0], make()(x)[0] + shared(x))


@pytest.mark.parametrize("factor", [None, 0.5])
def test_padding_takes_no_slot(factor: float | None) -> None:
    """Tokens before padding get what they get without it."""
    x = torch.randn(1, 6, H)
    layer = make(factor=factor)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = layer(x, padding_mask=mask)[0]
    assert not padded[:, :2].any()
    if factor is None:
        torch.testing.assert_close(padded[:, 2:], layer(x[:, 2:])[0])
    else:  # the capacity is that of 6 tokens, 2
        layer.expert_mlps.routed_experts_mlp_config.capacity_factor = 0.5 * 6 / 4
        torch.testing.assert_close(padded[:, 2:], layer(x[:, 2:])[0])


def test_proposals_are_not_dropped() -> None:
    layer = make(k=1, factor=0.25).eval()
    x = torch.randn(1, 1, H).expand(1, 4, H)
    dropped, kept = layer(x)[0], layer(x, is_speculative_decoding=True)[0]
    assert kept.ne(0).all() and dropped[0, 0].ne(0).all() and not dropped[0, 1:].any()


# -- sequence parallelism ------------------------------------------------------------------------------


def own_parts(x: torch.Tensor) -> torch.Tensor:
    """Each rank's part of [S, B, H]."""
    tp, place = parallel_groups.size("tp"), parallel_groups.places("tp")
    return own([x.chunk(tp)[place[r]] for r in range(len(place))])


@pytest.mark.thorough(keep=4)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("router_sp", [False, True])
@pytest.mark.parametrize("shared", ["none", "partial", "replicated"])
@pytest.mark.parametrize(("factor", "batch"), [(None, 3), (0.5, 1)])
def test_sequence_parallelism(nxd: Nxd, factor: float | None, batch: int, shared: str, router_sp: bool) -> None:
    """Outputs and gradients are those without: for a batch of one with drops, too, whose tokens come in one order in both."""

    def build(enabled: bool) -> MoE:
        torch.manual_seed(6)
        of_shared = (
            SharedExperts(H, I, 1, "silu", sequence_parallel_enabled=enabled and shared == "replicated") if shared != "none" else None
        )
        router = {"sequence_parallel_enabled": True, "sequence_dimension": 0} if enabled and router_sp else None
        return make(2, factor, router, shared_experts=of_shared, sequence_parallel_enabled=enabled).to("xla")

    x = torch.randn(8, batch, H, generator=torch.Generator().manual_seed(7))
    g = torch.randn(8, batch, H, generator=torch.Generator().manual_seed(8))
    nxd(1)
    plain, flat = build(False), x.to("xla").requires_grad_()
    plain(flat)[0].backward(g.to("xla"))
    wanted = {name: p.grad.cpu() for name, p in plain.named_parameters()}
    output, hidden = plain(flat)[0].cpu(), flat.grad.cpu()
    nxd(2, tp=2)
    layer, parts = build(True), own_parts(x).requires_grad_()
    out = layer(parts)[0]
    out.backward(own_parts(g))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(per_rank(out)), output, **close)
    torch.testing.assert_close(torch.cat(per_rank(parts.grad)), hidden, **close)
    for name, p in layer.named_parameters():
        shards = per_rank(p.grad)
        if getattr(p, "sequence_parallel_enabled", False):
            torch.testing.assert_close(torch.stack(shards).sum(0), wanted[name], **close)
        elif getattr(p, "tensor_model_parallel", False):
            blocks = [s.chunk(p.partition_stride, p.partition_dim) for s in shards]
            full = torch.cat([b[k] for k in range(p.partition_stride) for b in blocks], p.partition_dim)
            torch.testing.assert_close(full, wanted[name], **close)
        else:
            for shard in shards:
                torch.testing.assert_close(shard, wanted[name], **close)


def test_the_order_of_tokens_says_whose_are_dropped(nxd: Nxd) -> None:
    """With sequence parallelism tokens are in order (s, b), without in order (b, s): for several sequences others are dropped, as in NxD."""
    x = torch.randn(8, 2, H, generator=torch.Generator().manual_seed(9))
    nxd(2, tp=2)
    parallel = torch.cat(per_rank(make(1, 0.5, sequence_parallel_enabled=True).to("xla")(own_parts(x))[0]))
    nxd(1)
    layer = make(1, 0.5).to("xla")
    torch.testing.assert_close(parallel, layer(x.to("xla"))[0].cpu(), rtol=1e-4, atol=1e-5)
    batch_first = layer(x.transpose(0, 1).to("xla"))[0].cpu().transpose(0, 1)
    assert not torch.equal(parallel.ne(0), batch_first.ne(0))


def test_one_reduction_for_routed_and_shared_experts(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer, x = make(shared_experts=SharedExperts(H, I, 1, "silu")).to("xla"), torch.randn(2, 4, H).to("xla")
    executor.sync()
    with torch.no_grad():
        out = layer(x)[0]
    assert collectives_run() == {"all_reduce": 1}
    assert out.shape == x.shape


# -- mistakes ------------------------------------------------------------------------------------------


def shared_with_sp(enabled: bool = False) -> None:
    make(shared_experts=SharedExperts(H, I, 1, "silu", sequence_parallel_enabled=True))(torch.randn(2, 4, H))


def shuffled_padding() -> None:
    make(token_shuffle_group_size=2).to("xla")(torch.randn(2, 4, H).to("xla"), padding_mask=torch.ones(2, 4).to("xla"))


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "experts that differ": (
        lambda: MoE(RouterTopK(8, 2, H), make().expert_mlps),
        ValueError,
        r"Inconsistent num_experts across the router and expert_mlps: 8 in the router, 4 in the experts",
    ),
    "another k": (
        lambda: MoE(RouterTopK(E, 1, H), make().expert_mlps),
        ValueError,
        "Inconsistent top_k .* 1 in the router, 2 in the experts",
    ),
    "another size": (lambda: MoE(RouterTopK(E, 2, 16), make().expert_mlps), ValueError, "Inconsistent hidden_size .* 16 in the router"),
    "a router alone with sequence parallelism": (
        lambda: make(router={"sequence_parallel_enabled": True}),
        ValueError,
        "the router has sequence_parallel_enabled=True and MoE has not",
    ),
    "another dim": (
        lambda: make(router={"sequence_parallel_enabled": True, "sequence_dimension": 1}, sequence_parallel_enabled=True),
        ValueError,
        "Inconsistent sequence_dimension across the router and MoE: 1 in the router, 0 in MoE",
    ),
    "shared experts alone with it": (shared_with_sp, ValueError, "the shared experts have sequence_parallel_enabled=True and MoE has not"),
    "a mask of another shape": (
        lambda: make()(torch.randn(2, 4, H), padding_mask=torch.ones(4, 2)),
        ValueError,
        r"padding_mask has shape \[4, 2\]: it must be \[batch, sequence\] of the whole sequence, \[2, 4\]",
    ),
    "a mask with a shuffle": (shuffled_padding, NotImplementedError, "padding_mask with token_shuffle_group_size > 1"),
    "groups that do not divide": (
        lambda: make(token_shuffle_group_size=3),
        RuntimeError,
        "token_shuffle_group_size=3 must divide the data parallel size 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(nxd: Nxd, name: str) -> None:
    nxd(2)
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()
    if parallel_groups.is_defined("token_shuffle"):
        parallel_state.destroy_token_shuffle_group()
