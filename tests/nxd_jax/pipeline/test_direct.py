"""Passes that are called as programs (`nxd_jax.pipeline.direct`): the same numbers to the bit, and recorded wherever code of the script's may run."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from nxd_jax import inspect
from nxd_jax.pipeline import direct, known_passes, runtime
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layer, Layout, train


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, bool]]]:
    """How many passes were direct (True), and how many of those that might have been were recorded."""
    found: Counter[tuple[str, bool]] = Counter()
    patch = pytest.MonkeyPatch()
    for name in ("forward", "backward", "input_backward", "weight_backward"):
        original = getattr(direct.Direct, name)

        def told(self: Any, *args: Any, _original: Any = original, _name: str = name) -> Any:
            result = _original(self, *args)
            found[_name, result not in (None, False)] += 1
            return result

        patch.setattr(direct.Direct, name, told)
    try:
        yield found
    finally:
        patch.undo()


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """A block in which every pass is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct.Direct, "forward", lambda *_: None)
        yield


class First(Layer):
    """In manual mode, the first layer gets a list."""

    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x[0])


class Sequence(nn.Module):
    """Layers and a loss. dropout: of each."""

    def __init__(self, dropout: float = 0.0, layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Layer(), nn.Dropout(dropout)) for _ in range(layers))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x.square().mean()


def pipeline(model: nn.Module, microbatches: int = 5, **options: Any) -> tuple[Any, Any]:
    """A pipeline of two stages, and its optimizer."""
    settings: dict[str, Any] = {
        "transformer_layer_cls": nn.Sequential,
        "num_microbatches": microbatches,
        "output_loss_value_spec": None,
        "input_names": ["x"],
        "auto_partition": True,
        "use_optimizer_wrapper": True,
    }
    settings |= {"output_loss_value_spec": True, **options}
    config = nxd_api.neuronx_distributed_config(
        pipeline_parallel_size=2, pipeline_config=settings, optimizer_config={"zero_one_enabled": False, "grad_clipping": False}
    )
    wrapped = nxd_api.initialize_parallel_model(config, lambda: model)
    return wrapped, nxd_api.initialize_parallel_optimizer(config, torch.optim.SGD, wrapped.parameters(), lr=0.1, momentum=0.9)


def batch(rows: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def steps(model: Any, optimizer: Any, count: int, rows: int = 5) -> list[float]:
    """Losses of so many steps."""
    found = []
    for k in range(count):
        loss = model.run_train(x=batch(rows, k))
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        found.append(float(loss))
    return found


def test_small_inputs_are_uploaded_together(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between passes an upload takes several times as long; where arrays are counted by action (`inspect.pipeline`), each action uploads its own."""
    nxd(2, pp=2)
    model, optimizer = pipeline(Sequence())
    steps(model, optimizer, 4)
    found: list[int] = []
    upload, forward = runtime.Step._upload, runtime.Step.forward

    def told(step: Any, t: torch.Tensor, index: int) -> Any:
        found[-1] += 1
        return upload(step, t, index)

    def begun(step: Any, index: int, *args: Any) -> None:
        found.append(0)
        forward(step, index, *args)

    monkeypatch.setattr(runtime.Step, "_upload", told)
    monkeypatch.setattr(runtime.Step, "forward", begun)
    steps(model, optimizer, 1)
    assert found == [5] + [0] * 9
    found.clear()
    with inspect.pipeline(model):
        steps(model, optimizer, 1)
    assert max(found) == 1 and sum(found) == 5


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def trained_both_ways(
    nxd: Nxd, count: int, make: Callable[[], nn.Module], microbatches: int = 5, **options: Any
) -> Counter[tuple[str, bool]]:
    """Train so many steps with every pass recorded, then with direct ones: losses and weights are equal to the bit. Gives how many were direct."""
    results = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(make(), microbatches, **options)
        with block() as passes:
            results.append((steps(model, optimizer, count, rows=microbatches), weights(model)))
    assert results[0][0] == results[1][0]
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight, rtol=0, atol=0)
    assert passes is not None
    return passes


LAYOUTS = [
    Layout(2, 2, 5, layers=2),
    Layout(4, 4, 6, layers=4),
    Layout(4, 2, 6, "interleaved", stages=2, layers=4),
    Layout(4, 2, 4, "gpipe", tp=2, layers=2, zero1=True),
    Layout(8, 2, 4, tp=2, layers=2, sequence_parallel=True, checkpoint=True),
    Layout(2, 2, 5, layers=8, tied=True, skip=True),
    Layout(2, 2, 5, "zb_h1", layers=2),
    Layout(4, 2, 6, "zbv", stages=2, layers=4, tp=2, zero1=True),
]


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_numbers_to_the_bit(nxd: Nxd, layout: Layout) -> None:
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp)
    with recorded():
        expected = train(layout, layout.batch(), steps=4)[0]
    nxd(layout.ranks, tp=layout.tp, pp=layout.pp)
    with counted() as passes:
        found = train(layout, layout.batch(), steps=4)[0]
    assert found.losses == expected.losses and found.norms == expected.norms
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    passed = passes["backward", True] + passes["weight_backward", True]
    assert passes["forward", True] == passed >= layout.pp * layout.stages * (layout.microbatches - 3), passes
    assert passes["input_backward", True] == passes["weight_backward", True]


def test_dropout_is_that_of_the_micro_batch(nxd: Nxd) -> None:
    passes = trained_both_ways(nxd, 4, lambda: Sequence(dropout=0.5))
    assert passes["backward", True] >= 6


def test_backward_passes_in_another_order(nxd: Nxd) -> None:
    """The micro-batches that are recorded are those whose backward passes come first."""
    orders = [[f"{k}F{mb}" for mb in range(6)] + [f"{k}B{mb}" for mb in reversed(range(6))] for k in (0, 1)]
    passes = trained_both_ways(nxd, 4, lambda: Sequence(dropout=0.5), microbatches=6, schedule=orders)
    assert passes["backward", True] >= 6 > 2 >= passes["backward", False]  # those that were recorded to check what is played


def test_whole_backward_passes_and_parted_ones_in_one_stage(nxd: Nxd) -> None:
    """As DualPipeV has them: what is known of one kind says nothing of the other."""
    ends = ["B0", "I1", "W1", "B2", "B3", "I4", "W4", "I5", "W5", "B6", "I7", "W7"]
    orders = [[f"{k}F{mb}" for mb in range(8)] + [f"{k}{end}" for end in ends] for k in (0, 1)]
    passes = trained_both_ways(nxd, 3, lambda: Sequence(layers=2), microbatches=8, schedule=orders)
    assert min(passes[name, True] for name in ("backward", "input_backward", "weight_backward")) >= 2


def test_gradients_that_some_weights_have_before_a_step(nxd: Nxd) -> None:
    """The first pass adds to those, and makes the others."""
    results = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(Sequence(layers=2), schedule="zb_h1")
        first, *rest = model.parameters()
        with block():
            for k in range(6):
                first.grad = first.detach().clone()
                torch_xla.sync()
                model.run_train(x=batch(seed=k))
                grads = [p.grad.cpu() for p in (first, *rest)]
                optimizer.zero_grad()
        results.append(grads)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Reentrant(Layer):
    """Under an activation checkpoint that refuses parts of a backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return found


class Checkpointed(nn.Module):
    """Two stages, the last with a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(layer) for layer in (Layer(), Reentrant()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_reentrant_checkpoints_in_parted_backward_passes(nxd: Nxd) -> None:
    """Those of calls that are recorded again are found, too: these passes are done as a whole."""
    results = []
    for schedule in ("1f1b", "zb_h1"):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(Checkpointed(), schedule=schedule)
        results.append((steps(model, optimizer, 5), weights(model)))
    assert results[0][0] == pytest.approx(results[1][0])
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight)


def test_passes_that_fail_again_and_again_are_recorded(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    nxd(2, pp=2)
    model, optimizer = pipeline(Sequence())
    with monkeypatch.context() as patch:
        patch.setattr(direct.Direct, "backward", lambda *_: None)
        steps(model, optimizer, 6)
    with counted() as passes:
        steps(model, optimizer, 3)
    assert not passes["forward", True]


def test_gradients_of_several_calls_add_up(nxd: Nxd) -> None:
    grads = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(Sequence())
        with block() as passes:
            steps(model, optimizer, 3)
            model.run_train(x=batch())
            kept = [p.grad for p in model.parameters()]
            before = [g.clone() for g in kept]
            version = kept[0]._version
            model.run_train(x=batch(seed=1))
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True)) and kept[0]._version >= version + 5
        grads.append([g.cpu() for g in (*kept, *before)])
    assert passes["backward", True] >= 8
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_hooks_on_weights_are_called(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model, optimizer = pipeline(Sequence())
    steps(model, optimizer, 3)
    called: list[int] = []
    next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda p: called.append(1))
    with counted() as passes:
        steps(model, optimizer, 2)
    assert len(called) == 10 and not passes["backward", True] > 10


def test_what_a_script_changes_between_steps_is_seen(nxd: Nxd) -> None:
    results = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        module = Sequence()
        model, optimizer = pipeline(module)
        with block() as passes:
            found = steps(model, optimizer, 3)
            for layer in module.layers:
                layer[0].linear.bias.data.mul_(3.0)
            found += steps(model, optimizer, 2)
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            found += steps(model, optimizer, 2)
            next(iter(module.parameters())).requires_grad_(False)
            found += steps(model, optimizer, 3)
            model.load_state_dict({name: torch.ones_like(p) for name, p in model.local_state_dict().items()})
            found += steps(model, optimizer, 2)
        results.append(found)
    assert results[0] == results[1] and passes["backward", True] >= 20


def test_batches_of_other_shapes(nxd: Nxd) -> None:
    results = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(Sequence())
        with block() as passes:
            results.append([loss for rows in (5, 10, 5, 10, 10, 5, 5) for loss in steps(model, optimizer, 1, rows)])
    assert results[0] == results[1] and passes["backward", True] >= 6


@pytest.mark.parametrize(("schedule", "part"), [("1f1b", "backward"), ("zb_h1", "input_backward"), ("zb_h1", "weight_backward")])
def test_a_backward_pass_that_turns_out_to_be_another(nxd: Nxd, monkeypatch: pytest.MonkeyPatch, schedule: str, part: str) -> None:
    """The forward pass is computed again, with the same random numbers."""
    results = []
    for lost in (False, True):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(Sequence(dropout=0.5), schedule=schedule)
        losses = steps(model, optimizer, 4)
        with monkeypatch.context() as patch:
            if lost:
                patch.setattr(direct.Direct, part, lambda *_: None)
            with counted() as passes:
                losses += steps(model, optimizer, 1)
        assert passes["forward", True] >= 1
        assert passes[part, lost is False] >= 1
        results.append((losses, weights(model)))
    assert results[0][0] == results[1][0]
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight)


@pytest.mark.parametrize("known", [True, False])
def test_one_micro_batch_is_recorded_where_an_earlier_step_showed_how_gradients_add_up(
    nxd: Nxd, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Else two are, from the step on that finds it out."""
    results = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, optimizer = pipeline(Sequence(dropout=0.5))
        losses = steps(model, optimizer, 4)
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(known_passes.Adding, "after", lambda *_: None)
            losses += steps(model, optimizer, 4)
            direct_passes = []
            for _ in range(6):
                with block() as passes:
                    losses += steps(model, optimizer, 1)
                direct_passes.append((passes or Counter())["backward", True])
        results.append((losses, weights(model)))
    assert results[0][0] == results[1][0]
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight)
    assert max(direct_passes) == 2 * (5 - (1 if known else 2))


def test_nothing_of_a_step_is_kept_alive_for_the_next(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model, optimizer = pipeline(Sequence())
    steps(model, optimizer, 5)
    model.run_train(x=batch())
    grads = [weakref.ref(p.grad._storage) for p in model.parameters()]
    arrays = [weakref.ref(p._storage.held) for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    gc.collect()
    assert not any(ref() for ref in (*grads, *arrays))


def test_a_loss_function_of_the_scripts_runs_for_every_micro_batch(nxd: Nxd) -> None:
    nxd(2, pp=2)
    called: list[int] = []

    def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        called.append(1)
        return nn.functional.mse_loss(out, labels)

    for chosen in (loss, nn.functional.mse_loss):
        model = NxDPPModel([First(), *(Layer() for _ in range(3))], num_microbatches=5, manual_pp_partition=True, manual_pp_loss_fn=chosen)
        with counted() as passes:
            for k in range(4):
                model.run_train(inputs=[batch(seed=k)], labels=batch(seed=9))
                model.zero_grad()
        assert (passes["forward", True] > 0) is (chosen is not loss)
    assert len(called) == 20


def test_somebody_who_follows_segments_sees_every_pass(nxd: Nxd) -> None:
    from torch_bridge.runtime import session
    from torch_bridge.runtime.observers import Observer

    class Count(Observer):
        seen = 0

        def executed(self, trace: Any, live: Any) -> None:
            self.seen += 1

    nxd(2, pp=2)
    model, optimizer = pipeline(Sequence())
    steps(model, optimizer, 3)
    count = Count()
    session.current().observe(count)
    try:
        with counted() as passes:
            model.run_train(x=batch())
    finally:
        session.current().unobserve(count)
    assert count.seen >= 20 and not passes["forward", True]


def test_a_model_in_one_world_with_a_skip_has_its_gradients_summed_first(nxd: Nxd) -> None:
    """A value with two readers: its gradients come from two stages."""
    layout = Layout(3, 3, 6, layers=3, skip=True)
    nxd(layout.ranks, pp=layout.pp)
    with counted() as passes:
        found = train(layout, layout.batch(), steps=4)[0]
    nxd(1)
    expected = train(layout.alone(), layout.batch(), steps=4)[0]
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-6)
    assert passes["backward", True] >= 18


class Skips(nn.Module):
    """The first layer's result is read by the second and the last one, the second's by the third and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Layer()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        return (self.layers[3](self.layers[2](second) + first) + second).square().mean()


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble", "interleaved"])
def test_values_with_readers_in_several_stages_of_a_rank(nxd: Nxd, schedule: str) -> None:
    """Sums of gradients run by themselves: a part of a backward pass that is put off must not take them along."""
    passes = trained_both_ways(nxd, 6, Skips, 6, virtual_pipeline_size=2, schedule=schedule)
    assert passes["forward", True] >= 30


class Asks(Layer):
    """Another thing if some of the mask is 0."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        return y if bool(mask.all()) else y * mask


class Masked(nn.Module):
    """Layers that branch on a mask, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Asks() for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


def test_a_branch_on_values_of_the_batch_is_taken_for_every_micro_batch(nxd: Nxd) -> None:
    """Such passes are played where the values can be told on the host, and one program is not all there is to them."""
    results = []
    for block in (recorded, counted):
        nxd(2, pp=2)
        torch.manual_seed(3)
        model, _ = pipeline(Masked(), transformer_layer_cls=Asks, input_names=["x", "mask"])
        losses = []
        with block() as passes:
            for k in range(7):
                mask = torch.ones(5, 4, dtype=torch.long)
                mask[3, 1] = k < 5
                losses.append(float(model.run_train(x=batch(seed=k), mask=mask)))
        results.append(losses)
    assert results[0] == results[1] and not passes["forward", True]
