"""Biases by which routers choose move against the load: by the rule, alike on all ranks, through whatever optimizer, and go into checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla
from neuronx_distributed.modules.moe import ExpertMLPs, GroupLimitedRouter, MoE, RouterTopK
from torch import nn

from nxd_jax.modules.moe import load
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe import balancing
from tests.nxd_jax.modules.moe.training import EXPERTS, Layout
from torch_bridge.recorder import sharded

H, RATE = 8, 0.25


@pytest.fixture(autouse=True)
def one_rank(nxd: Nxd) -> None:
    """Unless a test asks for more."""
    nxd(1)


def layer(**router: Any) -> MoE:
    torch.manual_seed(2)
    return MoE(
        RouterTopK(EXPERTS, 2, H, act_fn="sigmoid", balancing_bias=True, **router), ExpertMLPs(EXPERTS, 2, H, 12, "silu", True, None)
    )


def bias_of(moe: Any) -> torch.Tensor:
    """Each rank has the same."""
    shards = sharded.shards(moe.router.e_score_correction_bias)
    assert all(torch.equal(shard, shards[0]) for shard in shards)
    return shards[0]


def moved(tokens: Any, rate: float = RATE) -> torch.Tensor:
    """By the rule."""
    counted = torch.tensor(tokens, dtype=torch.float64)
    return (rate * torch.sign(counted.mean() - counted)).to(torch.float32)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_rule(device: str) -> None:
    moe = layer().to(device)
    balancer = load.ExpertBalancer(moe, RATE)
    wanted = torch.zeros(EXPERTS)
    for passes in (1, 3, 0, 1):  # micro-batches of a step
        for _ in range(passes):
            moe(torch.randn(2, 6, H).to(device))
        (found,) = load.measure(moe, reset=True).values()
        balancer.step()
        wanted += moved(found.tokens)
        torch.testing.assert_close(moe.router.e_score_correction_bias.cpu(), wanted, rtol=0, atol=0)
    assert wanted.abs().max() > 0


def test_only_the_choice_changes() -> None:
    moe = layer().to("xla")
    x = torch.randn(2, 6, H).to("xla")
    _, affinities, index = moe.router(x)
    with torch.no_grad():
        moe.router.e_score_correction_bias[1] = 100.0
    _, after, chosen = moe.router(x)
    assert torch.equal(affinities.cpu(), after.cpu()) and (chosen == 1).any(1).all() and not (index == 1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_moves_are_not_lost_in_half_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(layer()).to("xla", dtype)
    balancer = load.ExpertBalancer(model, 1e-4)
    with torch.no_grad():
        model[0].router.e_score_correction_bias += 1.0
    for _ in range(3):
        model[0](torch.randn(2, 6, H).to("xla", dtype))
        (found,) = load.measure(model, reset=True).values()
        before = bias_of(model[0]).clone()
        balancer.step()
        torch.testing.assert_close(bias_of(model[0]), before + moved(found.tokens, 1e-4), rtol=0, atol=1e-7)
    assert bias_of(model[0]).dtype == torch.float32


LAYOUTS = [
    Layout(8, tp=2, ep=2, router="group", zero1=True, sequence_parallel=True, router_sp=True, factor=1.0),
    Layout(4, cp=2, router="group", checkpoint=True),
    Layout(4, pp=2, ep=2, router="group", microbatches=2, zero1=True, rows=1),
    Layout(4, pp=2, router="group", microbatches=2, schedule="zb_h1", rows=1),
]


def train(layout: Layout, model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    given = layout.local(batch)
    if layout.pp > 1:
        model.run_train(**given)
    else:
        model(**{name: t.to("xla") for name, t in given.items()}).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(nxd: Nxd, layout: Layout) -> None:
    """`attach` to NxD's optimizer; the biases are those of the whole batch's counts, on every rank."""
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    model, optimizer = layout.make()
    balancer = load.ExpertBalancer(model, 0.01)
    handle = balancer.attach(optimizer)
    moes = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
    wanted = {name: torch.zeros(EXPERTS) for name in moes}
    for number, batch in enumerate(layout.batches()):
        if number == 3:
            handle.remove()
        train(layout, model, optimizer, batch)
        for name, found in load.measure(model, reset=True).items():
            if number < 3:
                wanted[name] += moved(found.tokens, 0.01)
    for name, moe in moes.items():
        torch.testing.assert_close(bias_of(moe), wanted[name])
        assert wanted[name].abs().max() > 0


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("layout", [Layout(4, ep=2, router="group", zero1=True), LAYOUTS[2]], ids=str)
def test_checkpoints_have_the_biases(nxd: Nxd, layout: Layout, tmp_path: Path) -> None:
    nxd(layout.ranks, pp=layout.pp, ep=layout.ep)
    model, optimizer = layout.make()
    balancer = load.ExpertBalancer(model, 0.01)
    balancer.attach(optimizer)
    batches = layout.batches()
    train(layout, model, optimizer, batches[0])
    nxd_api.save_checkpoint(str(tmp_path), tag="one", model=model, optimizer=optimizer)
    train(layout, model, optimizer, batches[1])
    wanted = {name: bias_of(m) for name, m in model.named_modules() if isinstance(m, MoE)}

    again, optimizer = layout.make()
    nxd_api.load_checkpoint(str(tmp_path), tag="one", model=again, optimizer=optimizer)
    moes = {name: m for name, m in again.named_modules() if isinstance(m, MoE)}
    assert all(bias_of(moe).abs().max() == torch.tensor(0.01) for moe in moes.values())
    load.ExpertBalancer(again, 0.01).attach(optimizer)
    train(layout, again, optimizer, batches[1])
    for name, moe in moes.items():
        assert torch.equal(bias_of(moe), wanted[name])


def test_a_hundred_steps(nxd: Nxd) -> None:
    """With biases the busiest expert of every layer has less than 1.3 times the mean in the end, without them of some layer more than twice."""
    last: dict[bool, dict[str, float]] = {}
    losses = {}
    for balanced in (False, True):
        nxd(1)
        log, losses[balanced] = balancing.train(balanced)
        assert len(log.steps) == balancing.STEPS
        found = {name: [0] * balancing.EXPERTS for name in log.steps[0].layers}
        for step in log.steps[-10:]:
            for name, statistics in step.layers.items():
                found[name] = [a + b for a, b in zip(found[name], statistics.tokens, strict=True)]
        last[balanced] = {name: load.LoadStatistics(tuple(tokens), 0).imbalance for name, tokens in found.items()}
    assert max(last[False].values()) > 2, last
    assert max(last[True].values()) < 1.3, last
    assert losses[False][0] == losses[True][0] and losses[True][-1] < losses[False][-1]


def test_mistakes() -> None:
    plain = MoE(RouterTopK(EXPERTS, 2, H), ExpertMLPs(EXPERTS, 2, H, 12, "silu", True, None))
    with pytest.raises(ValueError, match="rate=0 must be positive: it is what a bias moves by after each step"):
        load.ExpertBalancer(layer(), 0)
    with pytest.raises(
        ValueError, match="the RouterTopK of the layer has no bias for choosing experts: build it with balancing_bias=True, or"
    ):
        load.ExpertBalancer(plain)
    with pytest.raises(ValueError, match="the RouterTopK of 1 has no bias"):
        load.ExpertBalancer(nn.Sequential(layer(), plain))
    with pytest.raises(ValueError, match="Linear has no MoE layers"):
        load.ExpertBalancer(nn.Linear(2, 2))
    assert plain.load is None
    own = MoE(GroupLimitedRouter(EXPERTS, 2, H, n_group=2, topk_group=1), ExpertMLPs(EXPERTS, 2, H, 12, "silu", True, None))
    assert load.ExpertBalancer(own).rate == 0.001
