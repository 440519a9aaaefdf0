"""Experts shared out among ranks: tokens travel to them and back, and every rank gets what the same drop rule gives it by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.modules.moe import capacity
from nxd_jax.modules.moe.expert_mlps import ExpertMLPs
from nxd_jax.tensor_parallel import parallel_groups
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.by_hand import Rule, Weights, mix
from tests.nxd_jax.parallel_layers.parts import collectives_run, own, per_rank
from torch_bridge import metrics
from torch_bridge.runtime import executor

RANKS, E, H, I = 8, 8, 8, 12
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]


def make(k: int, factor: Any, **kwargs: Any) -> ExpertMLPs:
    torch.manual_seed(5)
    return ExpertMLPs(E, k, H, I, "silu", True, factor, **kwargs)


def undivided(mlps: ExpertMLPs) -> Weights:
    """All experts' weights, from the parts that ranks hold."""
    held = distribution(mlps)
    ep, tp = parallel_groups.lists("ep")[0], parallel_groups.lists("tp")

    def joined(p: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
        shards, found = per_rank(p), [torch.zeros(0)] * E
        for place, rank in enumerate(ep):
            group = next(g for g in tp if rank in g)
            blocks = [shards[r].chunk(stride, dim) for r in group]
            part = torch.cat([b[s] for s in range(stride) for b in blocks], dim)
            for expert, matrix in zip(held[place], part, strict=True):
                found[expert] = matrix
        return torch.stack(found).requires_grad_()

    op = mlps.mlp_op
    biases = () if op.down_proj.bias is None else (joined(op.gate_up_proj.bias, 1, 2), joined_copies(op.down_proj.bias, held))
    return Weights(joined(op.gate_up_proj.weight, 2, 2), joined(op.down_proj.weight, 1, 1), *biases)


def joined_copies(p: torch.Tensor, held: list[list[int]]) -> torch.Tensor:
    """The undivided bias that tensor parallel ranks hold alike."""
    shards, found = per_rank(p), [torch.zeros(0)] * E
    for place, rank in enumerate(parallel_groups.lists("ep")[0]):
        for expert, row in zip(held[place], shards[rank], strict=True):
            found[expert] = row
    return torch.stack(found).requires_grad_()


def distribution(mlps: ExpertMLPs) -> list[list[int]]:
    given = mlps.routed_experts_mlp_config.expert_distribution
    ep = parallel_groups.size("ep")
    return [list(own) for own in given] if given else [list(range(r * E // ep, (r + 1) * E // ep)) for r in range(ep)]


class Data:
    """Tokens of each data parallel rank: tensor parallel ranks have the same."""

    def __init__(self, k: int, tokens: int = 9, routing: str = "random", padded: bool = False, dtype: torch.dtype = torch.float32):
        torch.manual_seed(k)
        dp = parallel_groups.places("dp")
        count = parallel_groups.size("dp")
        logits = torch.randn(count, tokens, E)
        if routing == "one":
            logits = logits * 1e-3 + torch.arange(E) * 2.0
        if routing == "first rank":
            logits[..., E // 2 :] -= 100
        affinities = torch.softmax(logits, -1).to(dtype)
        hidden, grads = torch.randn(count, tokens, H).to(dtype), torch.randn(count, tokens, H).to(dtype)
        padding = torch.rand(count, tokens) > 0.3
        self.x, self.affinities = ([t[dp[r]].clone().requires_grad_() for r in range(RANKS)] for t in (hidden, affinities))
        self.index, self.grads = ([t[dp[r]] for r in range(RANKS)] for t in (affinities.topk(k, -1).indices, grads))
        self.padding = [padding[dp[r]] for r in range(RANKS)] if padded else None


def check(mlps: ExpertMLPs, data: Data, rule: Rule, rtol: float = 1e-4, atol: float = 2e-5, **kwargs: Any) -> None:
    """Outputs and gradients of hidden states, affinities and weights on every rank."""
    weights = undivided(mlps)
    x, affinities, index, grads = (own([t.detach() for t in values]) for values in (data.x, data.affinities, data.index, data.grads))
    x, affinities = x.requires_grad_(), affinities.requires_grad_()
    padding = None if data.padding is None else own(data.padding)
    out = mlps(x, affinities, index, **dict(seq_len=x.shape[0], padding_mask=padding) | kwargs)
    out.backward(grads)

    whole = sums_over("tp", out), per_rank(x.grad), sums_over("tp", affinities.grad)
    of_experts = [per_rank(p.grad) for p in mlps.mlp_op.parameters()]
    for members in parallel_groups.lists("ep"):
        parameters = [p for p in (weights.first, weights.first_bias, weights.second, weights.second_bias) if p is not None]
        for p in parameters:
            p.grad = None
        for r in members:
            data.x[r].grad = data.affinities[r].grad = None
            wanted = mix(weights, rule, data.x[r], data.affinities[r], data.index[r], data.padding and data.padding[r])
            wanted.backward(data.grads[r])
            for name, found, by_hand in zip(
                ("output", "hidden", "affinities"), whole, (wanted, data.x[r].grad, data.affinities[r].grad), strict=True
            ):
                torch.testing.assert_close(
                    found[r], by_hand, rtol=rtol, atol=atol, msg=lambda t, name=name, r=r: f"{name} of rank {r}: {t}"
                )
        for r in members:
            for (name, held), p in zip(mlps.mlp_op.named_parameters(), parameters, strict=True):
                found = of_experts[[n for n, _ in mlps.mlp_op.named_parameters()].index(name)][r]
                torch.testing.assert_close(
                    found, part(p.grad, name, held, r, mlps), rtol=rtol, atol=atol, msg=lambda t, name=name, r=r: f"{name} of rank {r}: {t}"
                )


def part(full: Any, name: str, held: torch.Tensor, rank: int, mlps: ExpertMLPs) -> torch.Tensor:
    """A rank's part of all experts' gradient."""
    mine = full[distribution(mlps)[parallel_groups.places("ep")[rank]]]
    if not getattr(held, "tensor_model_parallel", False):
        return mine
    tp, place = parallel_groups.size("tp"), parallel_groups.places("tp")[rank]
    dim = mine.dim() - 1 if name.startswith("gate_up") else 1
    blocks = mine.chunk(2 * tp if name.startswith("gate_up") else tp, dim)
    return torch.cat(blocks[place::tp], dim)


def sums_over(kind: str, t: Any) -> list[torch.Tensor]:
    """For each rank the sum of its group's values."""
    values = per_rank(t)
    groups = parallel_groups.lists(kind)
    return [torch.stack([values[m] for m in next(g for g in groups if r in g)]).sum(0) for r in range(RANKS)]


def rule_of(k: int, factor: Any, tokens: int = 9, **kwargs: Any) -> Rule:
    return Rule(capacity.expert_capacity(tokens, k, factor, E) if factor and factor > 0 else None, **kwargs)


@pytest.mark.thorough(keep=7)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("factor", [None, 0.0, 0.5, 1.0, 1.25])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("ep", "tp"), LAYOUTS)
def test_every_rank_gets_what_it_gets_by_hand(nxd: Nxd, ep: int, tp: int, k: int, factor: Any) -> None:
    nxd(RANKS, tp=tp, ep=ep)
    mlps = make(k, factor, normalize_top_k_affinities=k > 1).to("xla")
    check(mlps, Data(k), rule_of(k, factor, normalize=k > 1))


@pytest.mark.thorough(keep=3)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("routing", ["one", "first rank"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_all_tokens_to_few_ranks(nxd: Nxd, tokens: int, routing: str, factor: Any) -> None:
    nxd(RANKS, tp=2, ep=4)
    check(make(2, factor).to("xla"), Data(2, tokens, routing), rule_of(2, factor, tokens))


@pytest.mark.thorough(keep=5)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("option", ["padding", "early", "bias", "distribution"])
def test_options(nxd: Nxd, option: str, factor: Any) -> None:
    nxd(RANKS, tp=2, ep=2)
    kwargs: dict[str, Any] = {
        "early": dict(early_expert_affinity_modulation=True),
        "bias": dict(bias=True),
        "distribution": dict(expert_distribution=[[7, 0, 5, 2], [1, 6, 3, 4]]),
    }.get(option, {})
    mlps = make(2, factor, **kwargs).to("xla")
    if option == "bias":
        torch.manual_seed(3)
        for layer in (mlps.mlp_op.gate_up_proj, mlps.mlp_op.down_proj):
            layer.bias.data += torch.randn(layer.bias.shape[1]).to("xla")
    check(mlps, Data(2, padded=option == "padding"), rule_of(2, factor, early=option == "early"))


@pytest.mark.parametrize("mode", ["one token each", "many tokens"])
def test_eval(nxd: Nxd, mode: str) -> None:
    """A layer that sums over tensor parallel ranks has tokens of its own on each expert parallel rank, in eval mode, too, as in validation.

    One token per sequence drops none, with a capacity too; NxD refuses to generate with few tokens and expert parallelism.
    """
    nxd(RANKS, tp=1, ep=2)
    mlps = make(1, 1.0).to("xla").eval()
    mlps.summed_over(parallel_groups.group("tp"))
    seq_len, factor = (1, None) if mode == "one token each" else (3, 1.0)
    check(mlps, Data(1, 3, "one"), rule_of(1, factor, 3), seq_len=seq_len)


def test_bfloat16(nxd: Nxd) -> None:
    nxd(RANKS, tp=2, ep=2)
    check(make(2, None, dtype=torch.bfloat16).to("xla"), Data(2, dtype=torch.bfloat16), Rule(), rtol=5e-2, atol=5e-2)


def test_one_program_whatever_the_routing(nxd: Nxd) -> None:
    nxd(RANKS, tp=2, ep=4)
    for factor in (None, 1.0):
        mlps, before = make(2, factor).to("xla"), 0.0
        for k, routing in enumerate(["random", "one", "first rank"]):
            data = Data(2, 9, routing)
            mlps.zero_grad()
            x = own([t.detach() for t in data.x]).requires_grad_()
            mlps(x, *(own([t.detach() for t in v]) for v in (data.affinities, data.index)), 9).sum().backward()
            executor.sync()
            before = before if k else metrics.COUNTERS.get("UncachedCompile", 0)
        assert metrics.COUNTERS.get("UncachedCompile", 0) == before


@pytest.mark.parametrize(("factor", "moves"), [(1.0, {"all_to_all": 2}), (None, {"all_gather": 3, "reduce_scatter": 1})])
def test_collectives(nxd: Nxd, factor: Any, moves: dict[str, int]) -> None:
    """With a capacity slots go there and back; without, hidden states, weights and indices are gathered, and the results reduced and scattered."""
    nxd(RANKS, tp=2, ep=4)
    mlps, data = make(2, factor).to("xla"), Data(2)
    args = [own([t.detach() for t in values]) for values in (data.x, data.affinities, data.index)]
    executor.sync()
    with torch.no_grad():
        out = mlps(*args, 9)
    assert collectives_run() == moves
    assert out.shape == (9, H)


def test_experts_must_divide_by_ranks(nxd: Nxd) -> None:
    nxd(RANKS, ep=8)
    with pytest.raises(AssertionError, match="12 is not divisible by 8: .*num_experts over 8 expert parallel ranks"):
        ExpertMLPs(12, 2, H, I, "silu", True, None)
    with pytest.raises(ValueError, match=r"expert_distribution=\[\[0\]\] must have a list for each of the 8 expert parallel ranks"):
        ExpertMLPs(1, 1, H, I, "silu", True, None, expert_distribution=[[0]])
