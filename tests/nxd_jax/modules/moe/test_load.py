"""Counting what experts get, as by hand, whatever the layout; nothing else changes by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from neuronx_distributed.modules.moe import ExpertMLPs, MoE, RouterTopK
from neuronx_distributed.modules.moe import model as moe_model
from torch import nn
from torch.utils import checkpoint

import torch_bridge
from nxd_jax import inspect
from nxd_jax.modules.moe import load
from nxd_jax.modules.moe.load import LoadStatistics
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.utils import activation_checkpoint
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe import load_job
from tests.nxd_jax.modules.moe.training import EXPERTS, SEQUENCE, Layout
from tests.nxd_jax.parallel_layers.parts import own
from tests.nxd_jax.pipeline.test_torchrun import launch
from torch_bridge import metrics
from torch_bridge.recorder import sharded

LAYOUTS = [
    Layout(8, tp=2, ep=2, factor=1.0, sequence_parallel=True, zero1=True),
    Layout(4, ep=4, zero1=True, router="group"),
    Layout(8, tp=2, cp=2, ep=2),
    Layout(8, tp=2, factor=0.5, checkpoint=True, router_sp=True, sequence_parallel=True),
    Layout(4, shuffle=2, ep=2, factor=0.75),
    Layout(4, pp=2, microbatches=4, factor=1.0, rows=1),
    Layout(8, pp=2, ep=2, microbatches=2, schedule="zb_h1", router="group", rows=1),
    Layout(8, pp=2, tp=2, ep=2, microbatches=2, factor=1.0, checkpoint=True, rows=1),
]


@pytest.fixture(autouse=True)
def one_rank(nxd: Nxd) -> None:
    """Unless a test asks for more."""
    nxd(1)


class Choices:
    """What the routers of a model chose, in every pass."""

    def __init__(self, model: nn.Module):
        self.passes: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                self.passes[name] = []
                module.router.register_forward_hook(lambda m, args, out, name=name: self.passes[name].append(out[2]))

    def counted(self, name: str, factor: float | None) -> tuple[list[int], int]:
        """Choices by expert and how many are dropped: rank by rank, pass by pass. Of ranks with the same tokens the first counts."""
        tokens, dropped = torch.zeros(EXPERTS, dtype=torch.int64), 0
        tp, pp = parallel_groups.places("tp"), parallel_groups.places("pp")
        for index in self.passes[name]:
            for rank, chosen in enumerate(sharded.shards(index)):
                if tp[rank] or pp[rank]:
                    continue
                found = torch.bincount(chosen.flatten(), minlength=EXPERTS)
                slots = math.inf if factor is None else math.ceil(chosen.numel() * factor / EXPERTS)
                tokens += found
                dropped += sum(max(0, n - slots) for n in found.tolist())
        return tokens.tolist(), int(dropped)


def run(layout: Layout, model: Any, optimizer: Any, after: Callable[[], Any] = lambda: None) -> Iterator[dict[str, torch.Tensor]]:
    """Train, a step at a time."""
    for batch in layout.batches():
        given = layout.local(batch)
        if layout.pp > 1:
            model.run_train(**given)
        else:
            model(**{name: t.to("xla") for name, t in given.items()}).backward()
        optimizer.step()
        after()
        optimizer.zero_grad()
        torch_xla.sync()
        yield batch


@pytest.mark.thorough(keep=3)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_counts_are_those_by_hand(nxd: Nxd, layout: Layout) -> None:
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    model, optimizer = layout.make()
    load.track(model)
    choices = Choices(model)
    for _ in run(layout, model, optimizer):
        pass
    found = load.measure(model)
    assert list(found) == ["layers.0.mlp", "layers.1.mlp"]
    again = 2 if layout.checkpoint else 1  # hooks see what is computed again
    for name, statistics in found.items():
        tokens, dropped = choices.counted(name, layout.factor)
        assert [again * n for n in statistics.tokens] == tokens and again * statistics.dropped == dropped
        assert sum(statistics.tokens) == 5 * layout.k * layout.dp * layout.cp * layout.microbatches * layout.rows * SEQUENCE
        assert (statistics.dropped > 0) == (layout.factor is not None)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("ranks", [2, 1])
def test_processes_count_their_own_stages(nxd: Nxd, tmp_path: Path, ranks: int) -> None:
    """What one process has, by layer, with so many ranks in each process."""
    nxd(4, pp=2, ep=2)
    wanted = load_job.train()
    done = launch(4 // ranks, tmp_path, ranks=ranks, script=load_job.__file__)
    assert done.returncode == 0, done.stdout + done.stderr
    names = set()
    for rank in range(0, 4, ranks):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert len(found) == 1
        for name, of_layer in found.items():
            names.add(name)
            assert (of_layer["counts"], of_layer["last"]) == (wanted[name]["counts"], wanted[name]["last"])
            assert of_layer["imbalance"] == wanted[name]["imbalance"] and torch.equal(of_layer["bias"], wanted[name]["bias"])
    assert names == set(wanted)


# -- one layer -------------------------------------------------------------------------------------------

H = 8


def layer(factor: float | None = None, k: int = 2, **router: Any) -> MoE:
    torch.manual_seed(2)
    return MoE(RouterTopK(EXPERTS, k, H, **router), ExpertMLPs(EXPERTS, k, H, 12, "silu", True, factor), return_expert_index=True)


def only(model: nn.Module, **kwargs: Any) -> LoadStatistics:
    (found,) = load.measure(model, **kwargs).values()
    return found


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_padding_does_not_count(device: str, factor: float | None) -> None:
    moe = layer(factor).to(device)
    load.track(moe)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 1]])
    _, index = moe(torch.randn(2, 6, H).to(device), padding_mask=mask.to(device))
    real = index.cpu().reshape(2, 6, 2)[mask.bool()]
    wanted = torch.bincount(real.flatten(), minlength=EXPERTS)
    slots = math.ceil(12 * 2 * 0.5 / EXPERTS) if factor else 99
    assert only(moe) == LoadStatistics(tuple(wanted.tolist()), int((wanted - slots).clamp(min=0).sum()))


def test_padding_of_each_rank(nxd: Nxd) -> None:
    nxd(4, ep=2)
    moe = layer().to("xla")
    load.track(moe)
    moe(torch.randn(2, 6, H).to("xla"), padding_mask=own([torch.arange(12).reshape(2, 6) < 2 * r for r in range(4)]))
    assert sum(only(moe).tokens) == (0 + 2 + 4 + 6) * 2


def test_what_counts_and_what_does_not() -> None:
    moe = layer().to("xla")
    x = torch.randn(2, 6, H).to("xla")
    moe(x)
    load.track(moe)
    moe.eval()(x)
    with torch.no_grad():
        moe(x)
    assert sum(only(moe).tokens) == 0
    moe.train()(x)
    moe(x)[0].sum().backward()
    assert sum(only(moe).tokens) == 48
    assert sum(only(moe, reset=True).tokens) == 48 and sum(only(moe).tokens) == 0
    moe(x)
    assert sum(only(moe).tokens) == 24
    before = moe.load
    assert load.track(moe) == {"": before}, "those that count go on"
    load.untrack(moe)
    moe(x)
    load.track(moe)
    assert sum(only(moe).tokens) == 0


def test_nothing_is_in_state_dicts_and_devices_are_followed() -> None:
    model = nn.Sequential(nn.Linear(H, H), layer())
    names = list(model.state_dict())
    load.track(model)
    assert list(model.state_dict()) == names
    model.load_state_dict(model.state_dict())
    model.to("xla", torch.bfloat16)
    assert model[1].load.counts.device.type == "xla" and model[1].load.counts.dtype == torch.int64


def test_numbers_of_statistics() -> None:
    found = LoadStatistics((6, 0, 2, 0), 2)
    assert (found.imbalance, found.dropped_share, found.idle_experts) == (3.0, 0.25, 2)
    assert str(found) == "busiest 3.00x of the mean, 2 of 4 idle, 25.0 % dropped"
    assert LoadStatistics((3, 3), 0).imbalance == 1.0
    nothing = LoadStatistics((0, 0), 0)
    assert math.isnan(nothing.imbalance) and math.isnan(nothing.dropped_share) and nothing.idle_experts == 2


CHECKPOINTS: dict[str, Callable[[MoE], Callable[[torch.Tensor], torch.Tensor]]] = {
    "ours": lambda moe: lambda x: activation_checkpoint.recomputed(moe, (x,), {})[0],
    "torch": lambda moe: lambda x: checkpoint.checkpoint(moe, x, use_reentrant=False)[0],
    "reentrant": lambda moe: lambda x: checkpoint.checkpoint(moe, x, use_reentrant=True)[0],
}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("played", [False, True])
def test_what_is_computed_again_is_counted_once(played: bool, kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CHECKPOINTS[kind](self.inner)(x * 2)

    model = Model().to("xla")
    load.track(model)
    choices = Choices(model) if not played else None
    if played:
        torch_bridge.optimize(model)
    for step in range(8):
        x = torch.randn(2, 6, H, generator=torch.Generator().manual_seed(step)).to("xla").requires_grad_()
        model(x).square().sum().backward()
        torch_xla.sync()
        assert sum(only(model).tokens) == 24 * (step + 1), f"step {step}"
    if choices is not None:
        assert len(choices.passes["inner"]) == 16, "it really was computed again"
    else:
        (row,) = inspect.replay().where(module="Model")[-1:]
        assert row.played > 0, row


def test_a_played_layer_in_a_reentrant_checkpoint() -> None:
    """Its forward is called within the backward pass: that call is recorded op by op, and does not count."""
    model = _First(layer(1.0)).to("xla")
    load.track(model)
    torch_bridge.optimize(model)
    for step in range(8):
        x = torch.randn(2, 6, H, generator=torch.Generator().manual_seed(step)).to("xla").requires_grad_()
        checkpoint.checkpoint(model, x, use_reentrant=True).square().sum().backward()
        torch_xla.sync()
        assert sum(only(model).tokens) == 24 * (step + 1), f"step {step}"


def test_played_counts_are_those_of_op_by_op() -> None:
    found = []
    for played in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(H, H), _First(layer(0.75))).to("xla")
        load.track(model)
        if played:
            torch_bridge.optimize(model)
        for step in range(8):
            x = torch.randn(2, 6, H, generator=torch.Generator().manual_seed(step)).to("xla")
            model(x).square().sum().backward()
            torch_xla.sync()
        found.append(load.measure(model))
    assert found[0] == found[1]


class _First(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.inner(x)[0]
        return first


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("factor", [None, 1.0])
def test_counting_compiles_no_more(nxd: Nxd, factor: float | None) -> None:
    """One program from the first step on, as without counting; reading has programs of its own."""
    layout = Layout(4, ep=2, factor=factor, router="group", zero1=True)
    nxd(4, ep=2)
    model, optimizer = layout.make()
    balancer, log = load.ExpertBalancer(model, 0.01), load.LoadLog(model)

    def after() -> None:
        balancer.step()
        log.step()

    compiled = []
    for number, _ in enumerate(run(layout, model, optimizer, after)):
        compiled.append(metrics.COUNTERS["UncachedCompile"])
        if number == 2:
            load.measure(model, reset=True)
            torch_xla.sync()
            compiled[-1] = metrics.COUNTERS["UncachedCompile"]
    assert compiled[0] == compiled[1] and compiled[2] == compiled[3] == compiled[4], compiled


# -- routers that are out of their minds -----------------------------------------------------------------


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("ep", [1, 2])
def test_all_tokens_to_one_expert(nxd: Nxd, ep: int, factor: float | None) -> None:
    nxd(2, ep=ep)
    moe = layer(factor, 1, bias=True).to("xla")
    with torch.no_grad():
        moe.router.linear_router.bias.copy_(torch.tensor([0.0, 0.0, 50.0, 0.0]))
    load.track(moe)
    out, index = moe(torch.randn(2, 6, H).to("xla").requires_grad_())
    out.square().sum().backward()
    assert index.cpu().unique().tolist() == [2] and torch.isfinite(out.cpu()).all()
    found = only(moe)
    assert found.tokens == (0, 0, 24, 0) and found.imbalance == EXPERTS
    assert found.dropped == (0 if factor is None else 24 - 2 * math.ceil(12 / EXPERTS))


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_router_with_nan(device: str, factor: float | None) -> None:
    """The loss says so; counts stay counts, and no other expert's memory is touched."""
    moe = layer(factor).to(device)
    with torch.no_grad():
        moe.router.linear_router.weight[1] = float("nan")
    load.track(moe)
    out, index = moe(torch.randn(2, 6, H).to(device))
    out.sum().backward()
    assert out.isnan().any() and index.min() >= 0 and index.max() < EXPERTS
    assert sum(only(moe).tokens) == 24 and all(n >= 0 for n in only(moe).tokens)


@pytest.mark.parametrize(("name", "router"), [("num_experts", (8, 2, H)), ("top_k", (EXPERTS, 1, H)), ("hidden_size", (EXPERTS, 2, 2 * H))])
def test_a_router_and_experts_that_disagree(name: str, router: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"Inconsistent {name} across the router and expert_mlps: .* build both with the same"):
        moe_model.MoE(RouterTopK(*router), ExpertMLPs(EXPERTS, 2, H, 12, "silu", True, None))


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"Linear has no MoE layers \(nxd_jax.modules.moe.MoE\): there are no experts to count tokens of"):
        load.track(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"the MoE layer given does not count its tokens: call load.track\(model\) before training"):
        load.measure(layer())
    with pytest.raises(ValueError, match="the MoE layer 0 does not count its tokens"):
        load.measure(nn.Sequential(layer()))
    with pytest.raises(ValueError, match="keep=0 must be at least 1: the number of steps that are remembered"):
        load.LoadLog(layer(), keep=0)
    model = nn.Sequential(layer())
    log = load.LoadLog(model)
    with pytest.raises(ValueError, match=r"no step was noted yet: call log.step\(\) after each optimizer step"):
        log.line()
    load.untrack(model)
    with pytest.raises(
        ValueError, match=r"the MoE layer 0 does not count its tokens \(load.untrack\?\): call load.track\(model\), and make this anew"
    ):
        log.step()


# -- numbers for a log -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_log(device: str) -> None:
    model = nn.ModuleDict({"a": layer(1.0), "b": layer(None)}).to(device)
    log = load.LoadLog(model, keep=2)
    rows = []
    for _ in range(3):
        for name in model:
            for _micro in range(2):  # two micro-batches
                model[name](torch.randn(2, 6, H).to(device))
        rows.append((log.step(), load.measure(model, reset=True)))
    assert all(t.device.type == device and t.dtype == torch.float32 and t.dim() == 0 for t in rows[0][0].values())
    for found, wanted in rows:
        assert set(found) == {f"moe/{key}{layer}" for key in ("imbalance", "dropped_share", "idle_experts") for layer in ("", "/a", "/b")}
        for name, statistics in wanted.items():
            assert float(found[f"moe/imbalance/{name}"]) == pytest.approx(statistics.imbalance)
            assert float(found[f"moe/dropped_share/{name}"]) == pytest.approx(statistics.dropped_share)
            assert int(found[f"moe/idle_experts/{name}"]) == statistics.idle_experts
        assert float(found["moe/imbalance"]) == pytest.approx(max(s.imbalance for s in wanted.values()))
        assert wanted["a"].dropped_share > 0
        assert float(found["moe/dropped_share"]) == pytest.approx(wanted["a"].dropped_share)
    assert [step.step for step in log.steps] == [1, 2] and [step.layers for step in log.steps] == [wanted for _, wanted in rows[1:]]
    worst = max("ab", key=lambda name: rows[2][1][name].imbalance)
    assert log.steps[-1].worst == worst and log.line() == f"experts: {rows[2][1][worst]} ({worst})"
    quiet = log.step(by_layer=False)
    assert {name: float(t) for name, t in quiet.items()} == {"moe/imbalance": 0, "moe/dropped_share": 0, "moe/idle_experts": EXPERTS}


def test_a_log_waits_for_nothing() -> None:
    moe = layer().to("xla")
    log = load.LoadLog(moe, prefix="experts")
    torch_xla.sync()
    before = metrics.EXECUTE_TIME.count
    moe(torch.randn(2, 6, H).to("xla"))
    found = log.step()
    assert metrics.EXECUTE_TIME.count == before and found["experts/imbalance"]._storage.pending  # type: ignore[attr-defined]
    written: list[dict[str, float]] = []
    torch_xla.core.xla_model.add_step_closure(lambda m: written.append({k: float(v) for k, v in m.items()}), args=(found,))
    torch_xla.sync()
    assert written[0]["experts/imbalance"] == pytest.approx(only(moe).imbalance)
    assert log.line() == f"experts: {only(moe)}"


def test_a_log_of_stages(nxd: Nxd) -> None:
    """Layers of several stages, each with its own; the largest of all is on all."""
    layout = Layout(4, pp=2, microbatches=2, factor=1.0, rows=1)
    nxd(4, pp=2)
    model, optimizer = layout.make()
    log = load.LoadLog(model)
    found: list[dict[str, torch.Tensor]] = []
    compiled = []
    for _ in run(layout, model, optimizer, lambda: found.append(log.step())):
        compiled.append(metrics.COUNTERS["UncachedCompile"])
    assert compiled[-1] == compiled[-2]
    wanted = load.measure(model)
    total = {name: [sum(s.layers[name].tokens[e] for s in log.steps) for e in range(EXPERTS)] for name in wanted}
    assert total == {name: list(s.tokens) for name, s in wanted.items()}
    last = log.steps[-1].layers
    assert float(found[-1]["moe/imbalance"]) == pytest.approx(max(s.imbalance for s in last.values()))
