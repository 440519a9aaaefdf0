"""Expert-parallel ranks that have the same tokens, as in inference: each computes its own experts, and results are summed over all ranks once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxd_jax.modules.moe import ExpertMLPs, ExpertMLPsV2, MoE, RouterTopK, SharedExperts, moe_process_group
from nxd_jax.modules.moe.moe_configs import RoutedExpertsMLPOpsConfig
from nxd_jax.tensor_parallel import layer_groups, parallel_groups
from nxd_jax.tensor_parallel.spmd_rank import SPMDRank
from nxd_jax.utils import model_utils
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.test_expert_mlps import data
from tests.nxd_jax.parallel_layers.parts import close, collectives_run, own, per_rank
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

E, H, I, K = 4, 16, 24, 2

pytestmark = pytest.mark.filterwarnings("ignore:a parallel layer was made before")


def experts(phase_groups: bool, **kwargs: Any) -> ExpertMLPsV2:
    given: dict[str, Any] = dict(num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, hidden_act="silu", glu_mlp=True)
    groups = {}
    if phase_groups:
        groups = {
            "cte_tensor_model_parallel_group": moe_process_group.get_moe_tp_ep_group(True),
            "cte_expert_model_parallel_group": moe_process_group.get_moe_ep_group(True),
        }
    return ExpertMLPsV2(RoutedExpertsMLPOpsConfig(**given | kwargs), **groups)


def layer(phase_groups: bool, shared: bool = False, sequence: bool = False, **kwargs: Any) -> MoE:
    torch.manual_seed(3)
    mlps = experts(phase_groups, normalize_top_k_affinities=True, **kwargs)
    with torch.no_grad():
        for bias in (mlps.mlp_op.gate_up_proj.bias, mlps.mlp_op.down_proj.bias):
            if bias is not None:
                bias.fill_(0.5)
    of_shared = SharedExperts(H, I, 1, "silu") if shared else None
    return MoE(RouterTopK(E, K, H), mlps, of_shared, sequence_parallel_enabled=sequence).to("xla")


def world_of_4(nxd: Nxd, ep: int) -> None:
    """TP 4; the experts' groups are TP 4 / ep x EP ep, for prefill and decode."""
    nxd(4, tp=4)
    moe_process_group.init_tensor_expert_parallel_moe_process_groups(4 // ep, ep, 4 // ep, ep)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"capacity_factor": 1.0},
    "bias": {"bias": True},
    "early": {"early_expert_affinity_modulation": True},
    "shared": {"shared": True},
    "distribution": {"expert_distribution": True},
}


@pytest.mark.thorough(keep=4)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("tokens", [7, 1])
@pytest.mark.parametrize("ep", [2, 4])
def test_a_layer_equals_one_rank(nxd: Nxd, ep: int, tokens: int, option: str) -> None:
    """Prefill (several tokens of each sequence) and decode (one)."""
    kwargs = dict(OPTIONS[option])
    x = torch.randn(3, tokens, H, generator=torch.Generator().manual_seed(tokens))
    nxd(1)
    alone = {name: value for name, value in kwargs.items() if name != "expert_distribution"}
    with torch.no_grad():
        wanted = layer(False, **alone).eval()(x.to("xla"))[0].cpu()
    world_of_4(nxd, ep)
    if "expert_distribution" in kwargs:
        kwargs["expert_distribution"] = [[3, 0], [2, 1]] if ep == 2 else [[2], [0], [3], [1]]
    moe = layer(True, **kwargs).eval()
    given = x.to("xla")
    executor.sync()
    with torch.no_grad():
        out = moe(given)[0]
    assert collectives_run() == {"all_reduce": 1}
    close(out, wanted)


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("option", ["plain", "early", "capacity"])
@pytest.mark.parametrize("ep", [2, 4])
def test_gradients(nxd: Nxd, ep: int, option: str, sequence: bool) -> None:
    """Of the tokens, the router and each rank's own experts."""
    x = torch.randn(8, 1, H, generator=torch.Generator().manual_seed(1))
    g = torch.randn(8, 1, H, generator=torch.Generator().manual_seed(2))
    nxd(1)
    alone, flat = layer(False, sequence=sequence, **OPTIONS[option]), x.to("xla").requires_grad_()
    alone(flat)[0].backward(g.to("xla"))
    wanted = {name: p.grad.cpu() for name, p in alone.named_parameters()}
    hidden = flat.grad.cpu()
    world_of_4(nxd, ep)
    moe = layer(True, sequence=sequence, **OPTIONS[option])

    def parts(t: torch.Tensor) -> torch.Tensor:
        return own(list(t.chunk(4))) if sequence else t.to("xla")

    given = parts(x).requires_grad_()
    moe(given)[0].backward(parts(g))
    found = torch.cat(per_rank(given.grad)) if sequence else given.grad
    close(found, hidden) if not sequence else torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-5)
    close(moe.router.linear_router.weight.grad, wanted["router.linear_router.weight"])
    for rank, shard in enumerate(per_rank(moe.expert_mlps.mlp_op.down_proj.weight.grad)):
        place, cut = divmod(rank, 4 // ep)
        full = wanted["expert_mlps.mlp_op.down_proj.weight"].chunk(ep)[place].chunk(4 // ep, 1)[cut]
        torch.testing.assert_close(shard, full, rtol=1e-4, atol=1e-5)


# -- experts without a layer -----------------------------------------------------------------------


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("seq_len", [11, 1])
def test_experts_alone_in_eval_mode(nxd: Nxd, seq_len: int, tp: int, ep: int, factor: float | None) -> None:
    """NxD's rule: partial sums over all ranks that share out the experts, which a script that has no `MoE` sums over the world."""
    x, affinities, index, _ = data(K)
    kwargs: dict[str, Any] = dict(normalize_top_k_affinities=True, capacity_factor=factor)
    nxd(1)
    torch.manual_seed(3)
    wanted = experts(False, **kwargs).eval()(x, affinities, index, seq_len).detach()
    nxd(tp * ep, tp=tp, ep=ep)
    torch.manual_seed(3)
    mlps = experts(False, **kwargs).to("xla").eval()
    assert mlps.has_same_tokens() and not mlps.train().has_same_tokens()
    found = mlps.eval()(x.to("xla"), affinities.to("xla"), index.to("xla"), seq_len)
    torch.testing.assert_close(torch.stack(per_rank(found)).sum(0), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("same", [True, False])
def test_the_layer_says_how_tokens_lie(nxd: Nxd, same: bool) -> None:
    """A layer over tensor-parallel ranks may get other tokens on each expert-parallel rank, in eval mode, too; one over all of them gets the same."""
    x = torch.randn(2, 3, H, generator=torch.Generator().manual_seed(4))
    nxd(1)
    wanted = layer(False).eval()(x.to("xla"))[0].cpu().detach()
    nxd(4, tp=2, ep=2)
    torch.manual_seed(3)
    mlps, router = experts(False, normalize_top_k_affinities=True), RouterTopK(E, K, H)
    moe = MoE(router, mlps, tensor_model_parallel_group=layer_groups.Members([[0, 1, 2, 3]]) if same else None).to("xla").eval()
    assert mlps.has_same_tokens() is same and mlps.train().has_same_tokens() is same
    moe.eval()
    if same:
        close(moe(x.to("xla"))[0].detach(), wanted)
        return
    halves = own([x[parallel_groups.places("dp")[rank]] for rank in range(4)]).unsqueeze(0)
    for rank, shard in enumerate(sharded.shards(moe(halves)[0].detach())):
        torch.testing.assert_close(shard[0], wanted[parallel_groups.places("dp")[rank]], rtol=1e-4, atol=1e-5)


# -- groups of both phases, and which experts a rank has ----------------------------------------------


def four_groups() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for phase, prefill in (("cte", True), ("tkg", False)):
        found[f"{phase}_tensor_model_parallel_group"] = moe_process_group.get_moe_tp_ep_group(prefill)
        found[f"{phase}_expert_model_parallel_group"] = moe_process_group.get_moe_ep_group(prefill)
    return found


@pytest.mark.parametrize("prefill", [True, False])
def test_groups_for_prefill_and_decode(nxd: Nxd, prefill: bool) -> None:
    """They are the experts' if both have the same ranks; the layer's own group stays what it was."""
    world_of_4(nxd, 2)
    mlps = ExpertMLPs(E, K, H, I, "silu", True, None, is_prefill=prefill, **four_groups())
    assert layer_groups.size(mlps.moe_tensor_model_parallel_group) == layer_groups.size(mlps.moe_expert_model_parallel_group) == 2
    assert layer_groups.size(mlps.tensor_parallel_group) == 4 and layer_groups.size(mlps.expert_model_parallel_group) == 1
    assert mlps.mlp_op.down_proj.weight.shape == (E // 2, I // 2, H)
    moe_process_group.destroy_moe_model_parallel()
    moe_process_group.init_tensor_expert_parallel_moe_process_groups(1, 4, 2, 2)
    with pytest.raises(
        NotImplementedError,
        match=r"cte_tensor_model_parallel_group has the ranks \[\[0, 1\], \[2, 3\]\], tkg_tensor_\w* \[\[0\], .*: one copy of the experts serves",
    ):
        ExpertMLPs(E, K, H, I, "silu", True, None, **four_groups())


@pytest.mark.parametrize("distribution", [None, [[3, 0], [2, 1]]])
def test_the_experts_of_a_rank(nxd: Nxd, distribution: Any) -> None:
    """NxD's keys for them are read over: they follow from the rank."""
    world_of_4(nxd, 2)
    mlps = ExpertMLPs(E, K, H, I, "silu", True, None, enable_spmd_rank=True, expert_distribution=distribution, **four_groups())
    rank = mlps.to("xla").get_spmd_rank()
    wanted = distribution or [[0, 1], [2, 3]]
    for place, found in enumerate(per_rank(rank.get_local_expert_indices())):
        assert found.dtype == torch.int32 and found.tolist() == [wanted[place // 2]]
    assert rank.local_expert_indices.shape == (1, 2)
    state = {name: value.detach() for name, value in mlps.state_dict().items()}
    assert list(state) == ["mlp_op.gate_up_proj.weight", "mlp_op.down_proj.weight", "spmd_rank.rank"]
    more = {"spmd_rank.local_expert_indices": torch.zeros(1, 2, dtype=torch.int32), "spmd_rank.ep_rank": torch.zeros(1, dtype=torch.int32)}
    mlps.load_state_dict(state | more)
    full: dict[str, Any] = {"layer." + name: value for name, value in more.items()}
    rank.preshard_hook(full, "layer.spmd_rank.rank")
    assert list(full) == ["layer.spmd_rank.rank"] and full["layer.spmd_rank.rank"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["to_empty", "materialize_model"])
def test_a_distribution_of_layers_made_on_meta(nxd: Nxd, how: str) -> None:
    """Where experts stand follows from the configuration, and is in no state dict."""
    nxd(2, ep=2)
    make = functools.partial(ExpertMLPs, E, K, H, I, "silu", True, None, expert_distribution=[[3, 0], [2, 1]])
    wanted = make().to("xla")
    with model_utils.init_on_device(torch.device("meta"), include_buffers=True):
        found = make()
    if how == "to_empty":
        found.to_empty(device="xla")
    else:
        model_utils.materialize_model(found, "xla", lambda module, device: getattr(module, "init_weight_cpu", lambda: None)())
    found.load_state_dict({name: value.detach() for name, value in wanted.state_dict().items()})
    x, affinities = torch.randn(5, H).to("xla"), torch.rand(5, E).to("xla")
    index = affinities.topk(K, -1).indices
    for a, b in zip(per_rank(found(x, affinities, index, 5)), per_rank(wanted(x, affinities, index, 5)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_rank_without_experts(nxd: Nxd) -> None:
    nxd(2, ep=2)
    rank = SPMDRank(2)
    with pytest.raises(RuntimeError, match="knows nothing of experts yet: call initialize_expert_indices"):
        rank.get_local_expert_indices()
    rank.initialize_expert_indices(num_local_experts=3)
    assert [found.tolist() for found in per_rank(rank.to("xla").get_local_expert_indices())] == [[[0, 1, 2]], [[3, 4, 5]]]


# -- mistakes --------------------------------------------------------------------------------------


def other_groups() -> None:
    pairs = layer_groups.Members([[0, 2], [1, 3]])
    MoE(RouterTopK(E, K, H), ExpertMLPs(E, K, H, I, "silu", True, None, tensor_model_parallel_group=pairs))


def other_shared_experts() -> None:
    every = layer_groups.Members([[0, 1, 2, 3]])
    MoE(RouterTopK(E, K, H), experts(False), SharedExperts(H, I, 1, "silu"), tensor_model_parallel_group=every)


MISTAKES: dict[str, tuple[Callable[[], None], str]] = {
    "experts": (
        other_groups,
        r"MoE sums results over the ranks \[0, 1\], \[2, 3\], but the experts are shared out among the tensor parallel ranks \[0, 2\], \[1, 3\], with expert "
        r"parallel ranks \[0, 2\], \[1, 3\]: give MoE and the experts the same tensor_model_parallel_group, or, .* MoE the group of all of them",
    ),
    "shared experts": (
        other_shared_experts,
        r"MoE sums results over the ranks \[0, 1, 2, 3\], but the shared experts are divided among \[0, 1\], \[2, 3\]: give both the same",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_groups_that_disagree(nxd: Nxd, name: str) -> None:
    nxd(4, tp=2, ep=2)
    call, text = MISTAKES[name]
    with pytest.raises(ValueError, match=text):
        call()
