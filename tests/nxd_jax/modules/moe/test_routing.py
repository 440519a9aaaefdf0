"""Routers against formulas written out token by token, against transformers' routers, and under ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch_xla.debug.metrics as met

from nxd_jax.modules.moe.routing import GroupLimitedRouter, RouterBase, RouterSinkhorn, RouterTopK
from nxd_jax.tensor_parallel import grads
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, collectives_run, own, per_rank, tp_place
from torch_bridge.mesh import world

E, H, S, B = 8, 12, 6, 2
DEVICES = ("cpu", "xla")


def hidden(dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(kind: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return kind(E, *args, **kwargs)


def routed(router: Any, x: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, affinities, index = router.to(device)(x.to(device))
    assert not index.requires_grad and index.dtype == torch.int64
    return logits.detach().cpu(), affinities.detach().cpu(), index.cpu()


def weight_of(router: Any) -> torch.Tensor:
    return router.linear_router.weight.detach().cpu()


# -- top k -------------------------------------------------------------------------------------------


def top_k_by_hand(router: Any, x: torch.Tensor, k: int, act_fn: str, over_top_k: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Affinities and the set of chosen experts of each token, one token after the other."""
    bias = 0 if router.linear_router.bias is None else router.linear_router.bias.detach().cpu()
    affinities, chosen = torch.zeros(S * B, E, dtype=torch.float64), []
    for t, token in enumerate(x.reshape(-1, H)):
        logits = (weight_of(router) @ token.to(weight_of(router).dtype) + bias).double()
        best = sorted(range(E), key=lambda e: -logits[e])[:k]
        among = best if over_top_k else list(range(E))
        total = sum(logits[e].exp() for e in among)
        for e in among:
            affinities[t, e] = logits[e].exp() / total if act_fn == "softmax" else 1 / (1 + (-logits[e]).exp())
        chosen.append(best)
    return affinities, torch.tensor(chosen)


@pytest.mark.core(keep=8)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("over_top_k", [False, True])
@pytest.mark.parametrize("act_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_top_k(k: int, act_fn: str, over_top_k: bool, device: str) -> None:
    router = made(RouterTopK, k, H, bias=True, act_fn=act_fn, apply_act_fn_over_topk=over_top_k)
    x = hidden()
    expected, chosen = top_k_by_hand(router, x, k, act_fn, over_top_k)
    logits, affinities, index = routed(router, x, device)
    torch.testing.assert_close(affinities, expected.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(index, chosen)
    assert logits.shape == (S * B, E) and affinities.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_dtypes(device: str) -> None:
    """Logits have the weight's dtype, affinities the input's; float64 in between."""
    x = hidden(torch.bfloat16)
    router = made(RouterTopK, 2, H)
    logits, affinities, index = routed(router, x, device)
    assert logits.dtype == torch.float32 and affinities.dtype == torch.bfloat16
    expected, chosen = top_k_by_hand(router, x, 2, "softmax", False)
    torch.testing.assert_close(affinities, expected.to(torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(index, chosen)
    narrow = made(RouterTopK, 2, H, dtype=torch.bfloat16)
    logits, affinities, _ = routed(narrow, hidden(), device)
    assert logits.dtype == torch.bfloat16 and affinities.dtype == torch.float32
    torch.testing.assert_close(affinities, logits.double().softmax(-1).float())


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_leaves_the_routers_dtype(device: str) -> None:
    router = made(RouterTopK, 2, H).to(device)
    with torch.autocast(device, torch.bfloat16):
        logits, *_ = router(hidden().to(device))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.detach().cpu(), hidden().reshape(-1, H) @ weight_of(router).t(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("over_top_k", [False, True])
def test_gradients(over_top_k: bool, device: str) -> None:
    """Of the affinities and of the logits, against autograd through the formula."""
    router = made(RouterTopK, 2, H, apply_act_fn_over_topk=over_top_k)
    weight, x = weight_of(router).double().requires_grad_(), hidden().double().requires_grad_()
    logits = x.reshape(-1, H) @ weight.t()
    kept = torch.zeros(S * B, E, dtype=torch.bool).scatter(1, logits.topk(2).indices, True)
    affinities = (logits.masked_fill(~kept, -torch.inf) if over_top_k else logits).softmax(-1)
    scale = torch.randn(S * B, E)
    ((affinities * scale).sum() + logits.square().sum()).backward()

    given = hidden().to(device).requires_grad_()
    found = router.to(device)(given)
    ((found[1] * scale.to(device)).sum() + found[0].square().sum()).backward()
    assert x.grad is not None and weight.grad is not None and given.grad is not None
    torch.testing.assert_close(given.grad.cpu(), x.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(router.linear_router.weight.grad.cpu(), weight.grad.float(), rtol=1e-4, atol=1e-5)


def test_as_mixtral() -> None:
    """transformers' router normalises the chosen affinities; ours leaves that to the experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    theirs = MixtralTopKRouter(MixtralConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=2))
    router = made(RouterTopK, 2, H)
    theirs.weight = router.linear_router.weight
    logits, affinities, index = router(hidden())
    their_logits, their_weights, their_index = theirs(hidden())
    chosen = affinities.gather(1, index)
    torch.testing.assert_close(logits, their_logits)
    torch.testing.assert_close(index, their_index)
    torch.testing.assert_close(chosen / chosen.sum(-1, keepdim=True), their_weights)


def test_jitter_leaves_the_callers_tensor() -> None:
    router = made(RouterTopK, 2, H, jitter_eps=0.1)
    x = hidden()
    for device in DEVICES:
        given = x.to(device)
        noisy, *_ = router.to(device)(given)
        torch.testing.assert_close(given.cpu(), x, rtol=0, atol=0)
        plain, *_ = router.eval()(given)
        router.train()
        torch.testing.assert_close(plain.detach().cpu(), x.reshape(-1, H) @ weight_of(router).t(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(noisy, plain)
        bound = x.abs().reshape(-1, H) @ weight_of(router).abs().t() * 0.1
        assert bool(((noisy - plain).detach().cpu().abs() <= bound + 1e-5).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("over_top_k", [False, True])
def test_a_balancing_bias_changes_the_choice_only(over_top_k: bool, act_fn: str, device: str) -> None:
    router = made(RouterTopK, 2, H, act_fn=act_fn, apply_act_fn_over_topk=over_top_k, balancing_bias=True)
    plain = made(RouterTopK, 2, H, act_fn=act_fn)
    assert list(router.state_dict()) == ["e_score_correction_bias", "linear_router.weight"]
    assert plain.e_score_correction_bias is None and list(plain.state_dict()) == ["linear_router.weight"]
    logits, affinities, index = routed(plain, hidden(), "cpu")
    torch.testing.assert_close(routed(router, hidden(), device)[2], index)
    router.to(device).e_score_correction_bias[5] += 2.0  # more than any affinity: everybody goes there first
    found = routed(router, hidden(), device)
    assert bool((found[2][:, 0] == 5).all())
    rest = affinities.index_fill(1, torch.tensor(5), -1.0).argmax(-1)
    torch.testing.assert_close(found[2][:, 1], rest)
    if over_top_k:
        over = logits.double().gather(1, found[2])
        over = over.softmax(-1) if act_fn == "softmax" else over.sigmoid()
        affinities = torch.zeros(S * B, E, dtype=torch.float64).scatter(1, found[2], over).float()
    torch.testing.assert_close(found[1], affinities, rtol=1e-4, atol=1e-6)


def test_the_correction_stays_float32() -> None:
    router = made(RouterTopK, 2, H, balancing_bias=True)
    router.e_score_correction_bias[0] = 1.001
    for moved in (router.to(torch.bfloat16), router.to("xla", torch.bfloat16), router.to("cpu").double()):
        assert moved.e_score_correction_bias.dtype == torch.float32
        assert moved.e_score_correction_bias.cpu()[0] == torch.tensor(1.001)
    assert router.linear_router.weight.dtype == torch.float64
    plain = made(RouterTopK, 2, H)
    plain.e_score_correction_bias = torch.eye(E)[4] * 9  # may be assigned
    assert bool((plain(hidden())[2][:, 0] == 4).all())


@pytest.mark.parametrize("device", DEVICES)
def test_nan_gives_experts_that_exist(device: str) -> None:
    x = hidden()
    x[0] = torch.nan
    routers = [made(RouterTopK, 2, H), made(RouterTopK, 2, H, apply_act_fn_over_topk=True, balancing_bias=True)]
    routers += [made(RouterSinkhorn, 1, H), made(GroupLimitedRouter, 2, H, n_group=4, topk_group=2)]
    for router in routers:
        _, affinities, index = routed(router, x, device)
        assert bool(((index >= 0) & (index < E)).all())
        assert bool(affinities[:B].isnan().any(-1).all()), "a NaN loss says so"
        assert not affinities[B:].isnan().any()


# -- Sinkhorn ----------------------------------------------------------------------------------------


def sinkhorn_by_hand(cost: torch.Tensor, rounds: int) -> torch.Tensor:
    """Rows and columns scaled in turn, in float64."""
    found = cost.double().exp()
    for _ in range(rounds):
        found = found / found.sum(1, keepdim=True) / len(found)
        found = found / found.sum(0, keepdim=True) / found.shape[1]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounds", [1, 3, 30])
def test_sinkhorn(rounds: int, device: str) -> None:
    cost = torch.randn(24, E, generator=torch.Generator().manual_seed(0)) * 2
    found = RouterSinkhorn._sinkhorn(cost.to(device), num_iters=rounds).cpu()
    torch.testing.assert_close(found, sinkhorn_by_hand(cost, rounds).float(), rtol=1e-3, atol=1e-7)
    if rounds == 30:
        torch.testing.assert_close(found.sum(1), torch.full((24,), 1 / 24), rtol=1e-3, atol=0)
        torch.testing.assert_close(found.sum(0), torch.full((E,), 1 / E), rtol=1e-3, atol=0)
    assert RouterSinkhorn._sinkhorn(cost, num_iters=0) is cost


def test_sinkhorn_of_large_logits() -> None:
    """exp(200) is more than float32 holds."""
    cost = torch.randn(24, E, generator=torch.Generator().manual_seed(0))
    raised = RouterSinkhorn._sinkhorn(cost + torch.linspace(-200, 200, 24)[:, None], num_iters=30)
    torch.testing.assert_close(raised, RouterSinkhorn._sinkhorn(cost, num_iters=30), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tolerance_ends_the_rounds(device: str) -> None:
    cost = (torch.randn(24, E, generator=torch.Generator().manual_seed(0)) * 2).to(device)
    each = [RouterSinkhorn._sinkhorn(cost, num_iters=n).cpu() for n in range(1, 8)]
    loose = RouterSinkhorn._sinkhorn(cost, num_iters=30, tol=1e9).cpu()
    torch.testing.assert_close(loose, each[0])
    between = RouterSinkhorn._sinkhorn(cost, num_iters=30, tol=1e-1).cpu()
    assert any(torch.allclose(between, e, rtol=1e-6, atol=0) for e in each[1:]), "some rounds, not all"
    tight = RouterSinkhorn._sinkhorn(cost, num_iters=30, tol=0.0).cpu()
    torch.testing.assert_close(tight, RouterSinkhorn._sinkhorn(cost, num_iters=30).cpu())
    router = made(RouterSinkhorn, 1, H, sinkhorn_tol=1e9).to(device)
    x = hidden()
    expected = sinkhorn_by_hand(x.reshape(-1, H) @ weight_of(router).t(), 1).argmax(-1, keepdim=True)
    torch.testing.assert_close(routed(router, x, device)[2], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act_fn", ["sigmoid", "softmax"])
def test_sinkhorn_router(act_fn: str, device: str) -> None:
    """Training balances, eval does not; affinities come from the logits as they are, in both."""
    router = made(RouterSinkhorn, 1, H, act_fn=act_fn)
    assert router.sinkhorn_iterations == RouterSinkhorn.DEFAULT_SINKHORN_ITERS == 30
    with torch.no_grad():
        router.linear_router.weight[0] = 0.0
        router.linear_router.weight[:, 0] = torch.tensor([40.0, *[0.0] * (E - 1)])
    x = hidden()
    x[..., 0] = 0.2  # expert 0 is everybody's favourite
    expected = x.reshape(-1, H) @ weight_of(router).t()
    logits, affinities, index = routed(router, x, device)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(affinities, expected.sigmoid() if act_fn == "sigmoid" else expected.softmax(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(index, sinkhorn_by_hand(expected, 30).argmax(-1, keepdim=True))
    assert len(index.unique()) > E // 2
    router.eval()
    assert bool((routed(router, x, device)[2] == 0).all())


# -- limited groups ----------------------------------------------------------------------------------

GROUPS = {
    "plain": dict(n_group=4, topk_group=2),
    "one group": dict(n_group=1, topk_group=1),
    "all groups": dict(n_group=4, topk_group=4),
    "groups of one": dict(n_group=8, topk_group=3),
    "as DeepSeek": dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5),
}


def groups_by_hand(scores: torch.Tensor, bias: torch.Tensor, n_group: int, topk_group: int, k: int, **_: Any) -> list[set[int]]:
    found = []
    size = E // n_group
    for row in scores + bias:
        groups = [range(g * size, (g + 1) * size) for g in range(n_group)]
        groups.sort(key=lambda members: -sum(sorted((float(row[e]) for e in members), reverse=True)[:2]))
        open_ = [e for members in groups[:topk_group] for e in members]
        found.append(set(sorted(open_, key=lambda e: -float(row[e]))[:k]))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str, device: str) -> None:
    router = made(GroupLimitedRouter, 3, H, **GROUPS[name])
    router.e_score_correction_bias.copy_(torch.randn(E) - 1)  # negative scores, too
    bias, x = router.e_score_correction_bias.clone(), hidden()
    scores = (x.reshape(-1, H) @ weight_of(router).t()).double().sigmoid()
    _, affinities, index = routed(router, x, device)
    assert [set(row) for row in index.tolist()] == groups_by_hand(scores, bias, k=3, **GROUPS[name])
    if router.norm_topk_prob:
        scores = scores / scores.gather(1, index).sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(affinities, scores.float(), rtol=1e-4, atol=1e-6)


def test_as_deepseek() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=H, n_routed_experts=E, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    theirs = DeepseekV3TopkRouter(config)
    router = made(GroupLimitedRouter, 3, H, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
    with torch.no_grad():
        theirs.weight.copy_(router.linear_router.weight)
        theirs.e_score_correction_bias.copy_(torch.randn(E))
    router.load_state_dict({"linear_router.weight": theirs.weight.detach(), "e_score_correction_bias": theirs.e_score_correction_bias})
    x, same = hidden().requires_grad_(), hidden().requires_grad_()
    logits, affinities, index = router(x)
    their_logits, their_weights, their_index = theirs(same)
    order, their_order = index.argsort(-1), their_index.argsort(-1)
    torch.testing.assert_close(logits, their_logits)
    torch.testing.assert_close(index.gather(1, order), their_index.gather(1, their_order))
    mine, their = affinities.gather(1, index).gather(1, order), their_weights.gather(1, their_order)
    torch.testing.assert_close(mine, their)
    scale = torch.randn(mine.shape)
    (mine * scale).sum().backward()
    (their * scale).sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    torch.testing.assert_close(router.linear_router.weight.grad, theirs.weight.grad)


def test_masking_with_zero() -> None:
    """As in NxD: what is masked beats negative scores of the groups that were kept."""
    both = [made(GroupLimitedRouter, 2, H, n_group=4, topk_group=1, mask_with_zero=flag) for flag in (False, True)]
    for router in both:
        router.e_score_correction_bias = torch.tensor([0.0, -9.0, -5.0, -5.0, -5.0, -5.0, -5.0, -5.0])
        with torch.no_grad():
            router.linear_router.weight.zero_()
    _, _, kept = both[0](hidden())
    _, affinities, zeros = both[1](hidden())
    # scores 0.5, -8.5 | -4.5, -4.5 | ...: group 0 adds up to -8, the others to -9
    assert bool((kept == torch.tensor([0, 1])).all())
    assert bool((zeros[:, 0] == 0).all()) and not bool((zeros[:, 1] == 1).any())
    torch.testing.assert_close(affinities, torch.full((S * B, E), 0.5))


def test_a_router_of_your_own_chooses_otherwise() -> None:
    class Last(GroupLimitedRouter):
        def noaux_tc_top_k(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((len(scores), 1), E - 1, dtype=torch.int32), scores * 2

    router = made(Last, 1, H, n_group=2, topk_group=1)
    logits, affinities, index = router(hidden())
    torch.testing.assert_close(affinities, logits.sigmoid() * 2)
    assert bool((index == E - 1).all()) and index.dtype == torch.int64


# -- weights -----------------------------------------------------------------------------------------


def test_transposed_weights_and_the_full_checkpoint() -> None:
    router = made(RouterTopK, 2, H, store_transposed_weights=True, dtype=torch.bfloat16)
    assert router.weight_T.shape == (H, E) and not router.weight_T.requires_grad
    torch.testing.assert_close(router.weight_T.detach(), weight_of(router).t())
    state = {"mlp.router.linear_router.weight": torch.randn(E, H), "mlp.other": torch.ones(1)}
    router.preshard_hook(state, "mlp.router.weight")
    torch.testing.assert_close(state["mlp.router.weight_T"], state["mlp.router.linear_router.weight"].t())
    router.preshard_hook(empty := {}, "router.weight")
    made(RouterTopK, 2, H).preshard_hook(plain := {"router.linear_router.weight": torch.ones(E, H)}, "router.weight")
    assert empty == {} and list(plain) == ["router.linear_router.weight"]


def test_meta() -> None:
    router = made(GroupLimitedRouter, 2, H, n_group=2, topk_group=1, device="meta")
    assert {t.device.type for t in (*router.parameters(), *router.buffers())} == {"meta"}
    logits, affinities, index = router(hidden().to("meta"))
    assert logits.shape == affinities.shape == (S * B, E) and index.shape == (S * B, 2)


ERRORS = {
    "no expert": (ValueError, lambda: RouterTopK(E, 0, H), r"top_k=0 must be in 1\.\.8"),
    "too many": (ValueError, lambda: RouterTopK(E, 9, H), r"top_k=9 must be in 1\.\.8, the number of experts"),
    "activation": (ValueError, lambda: RouterTopK(E, 2, H, act_fn="relu"), "act_fn='relu' is not one of sigmoid, softmax"),
    "two of Sinkhorn": (NotImplementedError, lambda: RouterSinkhorn(E, 2, H), "one expert for each token, got top_k=2: use top_k=1, or RouterTopK"),
    "rounds": (ValueError, lambda: RouterSinkhorn(E, 1, H, sinkhorn_iterations=-1), "sinkhorn_iterations=-1 must not be negative"),
    "uneven groups": (ValueError, lambda: GroupLimitedRouter(E, 2, H, 3, 1), r"n_group=3 must divide the 8 experts"),
    "no group": (ValueError, lambda: GroupLimitedRouter(E, 2, H, 0, 1), r"n_group=0 must divide the 8 experts"),
    "too many groups": (ValueError, lambda: GroupLimitedRouter(E, 2, H, 4, 5), r"topk_group=5 must be in 1\.\.4"),
    "small groups": (ValueError, lambda: GroupLimitedRouter(E, 3, H, 4, 1), "top_k=3 experts cannot be chosen from topk_group=1 groups of 2"),
    "base": (NotImplementedError, lambda: RouterBase(E, 2, H, "softmax")(hidden()), "RouterBase.forward: derive from RouterTopK"),
    "no groups of ranks": (RuntimeError, lambda: RouterTopK(E, 2, H, True)(hidden()), "initialize_model_parallel"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, call, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()


# -- ranks -------------------------------------------------------------------------------------------

RANKED = {
    "top k": (RouterTopK, dict(top_k=2, bias=True)),
    "Sinkhorn": (RouterSinkhorn, dict(top_k=1)),
    "groups": (GroupLimitedRouter, dict(top_k=2, n_group=4, topk_group=2)),
}


@pytest.mark.thorough(keep=10)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("name", RANKED)
def test_sequence_parallel(nxd: Nxd, name: str, ep: int, dim: int, training: bool) -> None:
    """Each rank routes its part of the sequence and gets the logits of all, whatever ep; gradients add up over the ranks to the undivided router's."""
    nxd(4, tp=2, ep=ep)
    kind, kwargs = RANKED[name]
    reference = made(kind, hidden_size=H, **kwargs).train(training)
    router = made(kind, hidden_size=H, sequence_parallel_enabled=True, sequence_dimension=dim, **kwargs).train(training)
    assert all(p.sequence_parallel_enabled for p in router.parameters())
    x, scale = hidden(), torch.randn(S * B, E)
    expected = x.clone().requires_grad_()
    logits, affinities, index = reference(expected)
    ((affinities * scale).sum() + logits.square().sum()).backward()

    router.to("xla")
    parts = x.chunk(2, dim)
    given = own([parts[tp_place(r)] for r in range(world.size())], ["tp"]).requires_grad_()
    found = router(given)
    for mine, theirs in zip(found, (logits, affinities, index), strict=True):
        close(mine, theirs.detach())
    ((found[1] * scale.to("xla")).sum() + found[0].square().sum()).backward()
    grads.allreduce_sequence_parallel_gradients(torch.optim.SGD(router.parameters(), lr=1.0))
    assert expected.grad is not None and given.grad is not None
    for r, part in enumerate(per_rank(given.grad)):
        torch.testing.assert_close(part, expected.grad.chunk(2, dim)[tp_place(r)], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(router.parameters(), reference.parameters(), strict=True):
        close(mine.grad, theirs.grad)


def test_only_logits_are_gathered(nxd: Nxd) -> None:
    nxd(4, tp=2)
    router = made(RouterTopK, 2, H, sequence_parallel_enabled=True).to("xla")
    assert router.sequence_dimension == 0 and made(RouterTopK, 2, H).sequence_dimension is None
    given = own([hidden().chunk(2)[tp_place(r)] for r in range(4)], ["tp"])
    with torch.no_grad():
        found = router(given)
        assert collectives_run() == {"all_gather": 1}
    assert found[1].shape == (S * B, E)


def test_tokens_of_each_rank(nxd: Nxd) -> None:
    """Data-parallel ranks have other tokens; without sequence parallelism nothing moves."""
    nxd(4, tp=2)
    router = made(RouterTopK, 2, H)
    tokens = [hidden(seed=r // 2) for r in range(4)]
    expected = [router(t) for t in tokens]
    logits, affinities, index = router.to("xla")(own(tokens, ["dp"]))
    for r in range(4):
        torch.testing.assert_close(per_rank(logits)[r], expected[r][0].detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(per_rank(affinities)[r], expected[r][1].detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(per_rank(index)[r], expected[r][2])


def test_one_program_whatever_the_routing() -> None:
    router = made(GroupLimitedRouter, 2, H, n_group=4, topk_group=2).to("xla")
    seen, compiled = [], []
    for seed in range(4):
        x = hidden(seed=seed).to("xla")
        seen.append(router(x)[2].cpu())
        compiled.append(met.counter_value("UncachedCompile") or 0)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
    assert compiled[1:] == compiled[:-1], compiled
