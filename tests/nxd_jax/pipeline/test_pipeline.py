"""`NxDPPModel` as a user meets it: how it is made, what steps give and refuse, and the state it has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla
from neuronx_distributed.parallel_layers.grads import get_grad_norm
from neuronx_distributed.pipeline import NxDPPModel, model, partition
from neuronx_distributed.pipeline.manual_pipe_stage import mark_weight_sharing
from torch import nn

from nxd_jax.pipeline import runtime, schedules, weights
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Block, Layer, Layout, Model, agree, train
from torch_bridge import metrics
from torch_bridge.recorder import placed

BATCH = {"ids": torch.arange(32).reshape(8, 4) % 16, "labels": torch.arange(32).reshape(8, 4) % 7}


class Nameless(nn.Sequential):
    def forward(self, *inputs: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs[0])


def made(**options: Any) -> NxDPPModel:
    torch.manual_seed(0)
    given = {
        "transformer_layer_cls": Block,
        "num_microbatches": 4,
        "output_loss_value_spec": (True, False),
        "input_names": ["ids", "labels"],
        "auto_partition": True,
    }
    return NxDPPModel(options.pop("model", None) or Model(4), **{**given, **options})


# -- making one -----------------------------------------------------------------------------------


def test_no_other_model_is_a_pipeline(nxd: Nxd) -> None:
    nxd(2)
    wrapped = nxd_api.initialize_parallel_model(nxd_api.neuronx_distributed_config(), lambda: torch.nn.Linear(1, 1))
    assert not isinstance(wrapped, NxDPPModel) and wrapped.pipeline is None
    assert NxDPPModel is model.NxDPPModel is nxd_api.pipeline.NxDPPModel


def test_cutting_by_hand(nxd: Nxd) -> None:
    nxd(2, pp=2)
    pipeline = made(auto_partition=False, input_names=None)
    with pytest.raises(AssertionError, match=r"needs a traced model: call trace\(\) first"):
        pipeline.cut_pipeline_stage("layers.0")
    with pytest.raises(
        RuntimeError, match=r"has no stages yet: set auto_partition=True or pipeline_cuts, or call trace\(\), cut_pipeline_stage\(\)"
    ):
        pipeline.run_train(**BATCH)
    pipeline.trace(input_names=["ids", "labels"])
    with pytest.raises(
        ValueError, match=r"0 cuts make 1 stages, but pipeline_parallel_size=2 and virtual_pipeline_size=1 take 2: give 1 cuts"
    ):
        pipeline.partition()
    with pytest.raises(RuntimeError, match="has no layer 'layers.9' to cut after; its layers are embedding, layers.0"):
        pipeline.cut_pipeline_stage("layers.9")
    pipeline.cut_pipeline_stage("layers.0")
    with pytest.raises(AssertionError, match=r"cut after 'layers.0' already"):
        pipeline.cut_pipeline_stage("layers.0")
    pipeline.partition()
    with pytest.raises(AssertionError, match="partitioned already"):
        pipeline.cut_pipeline_stage("layers.2")
    assert [len(list(stage.parameters())) for stage in pipeline.local_stage_modules] == [5, 13]
    assert pipeline.run_train(**BATCH).item() == pytest.approx(made().run_train(**BATCH).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"transformer_layer_cls": None}, ValueError, "needs transformer_layer_cls"),
        ({"pipeline_cuts": ["layers.1"]}, RuntimeError, "auto_partition=True chooses the cuts itself"),
        ({"pipeline_cuts": ["layers.1"], "auto_partition": False, "input_names": None}, ValueError, "pipeline_cuts needs input_names"),
        ({"input_names": ["ids", "text"]}, ValueError, r"Model.forward has no input named text; it has ids, labels"),
        ({"transformer_layer_cls": nn.LSTM}, ValueError, "the model has no modules of type LSTM"),
        ({"return_mb_loss": True, "broadcast_and_average_loss": True}, AssertionError, "choose one of them"),
        ({"schedule": "1f2b"}, schedules.ScheduleError, "did you mean '1f1b'"),
        ({"schedule": "zbv"}, schedules.ScheduleError, "has 4 stages, .* makes 2: set virtual_pipeline_size=2"),
        ({"schedule": "0F0,1F0\n2F0\n"}, schedules.ScheduleError, "has 3 stages, .* makes 2: give each of the 2 ranks as many stages"),
        ({"schedule": "nowhere.csv"}, schedules.ScheduleError, "there is no file nowhere.csv with a pipeline schedule"),
        ({"virtual_pipeline_size": 2, "num_microbatches": 5}, schedules.ScheduleError, "to a multiple of 2, such as 4 or 6"),
        ({"virtual_pipeline_size": 3}, AssertionError, "4 layers cannot make 6 stages"),
        ({"schedule": [["0F0", "0B0"], ["1B0", "1F0"]], "num_microbatches": 1}, schedules.ScheduleError, "1B0"),
        ({"manual_pp_partition": True}, AssertionError, "takes the model as a list of layers, got Model"),
    ],
)
def test_what_cannot_be_made(nxd: Nxd, options: dict[str, Any], error: type[Exception], text: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(error, match=text):
        made(**options)


def test_a_forward_without_names(nxd: Nxd) -> None:
    nxd(2, pp=2)
    with pytest.raises(
        ValueError, match="Nameless.forward has no input named x; it has no named parameters, and micro-batches go in by name"
    ):
        pipeline = made(model=Nameless(Layer(), Layer()), transformer_layer_cls=Layer, input_names=["x"])
        pipeline.run_train(x=torch.ones(4, 4))


def test_before_ranks_are_laid_out() -> None:
    with pytest.raises(
        RuntimeError, match="model parallel groups are not initialized: call .*initialize_model_parallel.* before NxDPPModel"
    ):
        made(model=nn.Linear(1, 1))


def test_options_that_a_pipeline_does_not_have(nxd: Nxd) -> None:
    nxd(2, pp=2)
    config = nxd_api.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config={"microbatches": 4})
    with pytest.raises(ValueError, match="pipeline_config has no option microbatches; it takes NxDPPModel's: .*num_microbatches"):
        nxd_api.initialize_parallel_model(config, Model)


# -- steps ----------------------------------------------------------------------------------------


def test_what_a_step_gives(nxd: Nxd) -> None:
    nxd(2, pp=2)
    mean = made().run_train(**BATCH)
    losses = made(return_mb_loss=True).run_train(**BATCH)
    assert mean.device.type == "cpu" and not mean.requires_grad and mean.dim() == 0
    assert len(losses) == 4 and torch.stack([x.cpu() for x in losses]).mean().item() == pytest.approx(mean.item())
    assert made(return_loss_on_cpu=False).run_train(**BATCH).device.type == "xla"
    pipeline = made()
    assert pipeline.run_eval(**BATCH).item() == pytest.approx(mean.item(), rel=1e-5) and pipeline.original_torch_module.training
    interleaved = made(virtual_pipeline_size=2)  # (q) NxD evaluates the first chunk of each rank alone
    assert len(interleaved.local_stage_modules) == 4 and interleaved.run_eval(**BATCH).item() == pytest.approx(mean.item(), rel=1e-5)
    outputs = made(output_loss_value_spec=None, num_microbatches=1).run_eval(**BATCH)
    assert outputs[0].item() == pytest.approx(mean.item(), rel=1e-5) and list(outputs[1].shape) == [8, 4, 16]


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"ids": BATCH["ids"]}, RuntimeError, "the model takes ids, labels by keyword, got ids"),
        ({**BATCH, "mask": BATCH["ids"]}, RuntimeError, "got ids, labels, mask"),
        ({**BATCH, "ids": [[1, 2]]}, ValueError, "the input ids must be a torch tensor with the batch along dim 0, got list"),
        ({**BATCH, "ids": BATCH["ids"][:4]}, AssertionError, "one batch size"),
        ({**BATCH, "ids": [BATCH["ids"], BATCH["ids"][:4]]}, AssertionError, r"one batch size \(dim 0\), got ids\[0\]: 8, ids\[1\]: 4"),
        ({name: t[:6] for name, t in BATCH.items()}, RuntimeError, "a batch of 6 cannot be cut into num_microbatches=4 equal parts"),
    ],
)
def test_batches_that_do_not_fit(nxd: Nxd, batch: dict[str, Any], error: type[Exception], text: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(error, match=text):
        made().run_train(**batch)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (True, "output is the loss, but it is of type tuple and no tensor"),
        ((True, False, False), "output is a tuple of 3, but it is a tuple of 2"),
        ({"loss": True}, "output is a dict with loss, but it is a tuple"),
        ((False, False), "has no True"),
        (((True,), False), r"output\[0\] is a tuple of 1, but it is a Tensor"),
        (("loss", False), "must consist of tuples, lists, dicts and booleans"),
    ],
)
def test_specs_that_do_not_fit(nxd: Nxd, spec: Any, text: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(RuntimeError, match=text):
        made(output_loss_value_spec=spec).run_train(**BATCH)


@dataclasses.dataclass
class Found:
    """What `Returning` gives."""

    loss: torch.Tensor
    out: torch.Tensor


class Returning(Model):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Found:  # type: ignore[override]
        return Found(*super().forward(ids, labels))


@pytest.mark.parametrize("spec", [(True, False), {"loss": True, "out": False}])
def test_a_model_that_returns_a_dataclass(nxd: Nxd, spec: Any) -> None:
    nxd(2, pp=2)
    expected, pipeline = made(), made(model=Returning(4), output_loss_value_spec=spec)
    pipeline.load_state_dict(expected.local_state_dict())
    assert pipeline.run_train(**BATCH).item() == pytest.approx(expected.run_train(**BATCH).item())
    for a, b in zip(pipeline.local_parameters(), expected.local_parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad.cpu())


def test_names_that_do_not_belong_to_a_pipeline(nxd: Nxd) -> None:
    nxd(2, pp=2)
    pipeline = made()
    with pytest.raises(RuntimeError, match=r"no forward of its own: call run_train\(\*\*batch\)"):
        pipeline(**BATCH)
    with pytest.raises(RuntimeError, match=r"call local_state_dict\(\)"):
        pipeline.state_dict()
    with pytest.raises(RuntimeError, match="run_train needs a loss: output_loss_value_spec"):
        made(output_loss_value_spec=None).run_train(**BATCH)
    with pytest.raises(AssertionError, match="for num_microbatches=1 alone"):
        made(output_loss_value_spec=None).run_eval(**BATCH)


def test_gradients_add_up_over_steps(nxd: Nxd) -> None:
    nxd(2, pp=2)
    once, twice = made(), made()
    once.run_train(**BATCH)
    for _ in range(2):
        twice.run_train(**BATCH)
    for a, b in zip(once.local_parameters(), twice.local_parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), 2 * a.grad.cpu())


class Stopped(BaseException):
    """Raised in the middle of something, as KeyboardInterrupt is."""


def test_a_step_that_did_not_end_adds_nothing_to_the_next(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a tied weight has a gradient by then, which no `zero_grad` reaches."""
    nxd(2, pp=2)
    whole, stopped = made(model=Model(4, tied=True)), made(model=Model(4, tied=True))
    whole.run_train(**BATCH)
    stopped.move_model_to_device()
    optimizer = torch.optim.SGD(stopped.parameters(), lr=0.1)
    backward, done = runtime.Step.backward, []

    def stopping(step: runtime.Step, index: int, mb: int) -> None:
        if len(done) == 3:
            raise Stopped
        done.append((index, mb))
        backward(step, index, mb)

    with monkeypatch.context() as patched:
        patched.setattr(runtime.Step, "backward", stopping)
        with pytest.raises(Stopped):
            stopped.run_train(**BATCH)
    optimizer.zero_grad()
    stopped.run_train(**BATCH)
    for a, b in zip(stopped.local_parameters(), whole.local_parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad.cpu())


def test_tied_weights_that_are_frozen_or_unfrozen_between_steps(nxd: Nxd) -> None:
    """The copy that the last stage has follows."""
    nxd(2, pp=2)
    changing, always = made(model=Model(4, tied=True)), made(model=Model(4, tied=True))
    always.run_train(**BATCH)
    tied = next(p for n, p in changing.named_parameters() if "embed" in n)
    tied.requires_grad_(False)
    changing.run_train(**BATCH)
    assert tied.grad is None
    changing.zero_grad()
    tied.requires_grad_(True)
    changing.run_train(**BATCH)
    expected = next(p for n, p in always.named_parameters() if "embed" in n)
    assert tied.grad is not None and expected.grad is not None
    torch.testing.assert_close(tied.grad.cpu(), expected.grad.cpu())


def test_what_was_stopped_while_weights_were_laid_out_is_done_again(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is on the device, and has stages of its own for evaluation."""
    nxd(2, pp=2)
    expected = made().run_eval(**BATCH).item()
    pipeline = made()

    def stopping(*args: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(weights, "place", stopping)
        with pytest.raises(Stopped):
            pipeline.run_eval(**BATCH)
    assert pipeline.original_torch_module.training
    assert pipeline.run_eval(**BATCH).item() == pytest.approx(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_data_parallel_gradients_are_averaged_unless_the_optimizer_does(nxd: Nxd, tied: bool) -> None:
    """Ranks with other batches: the mean of both, which is what one batch of all rows gives."""
    layout = Layout(4, 2, 2, layers=4)
    batch = layout.batch()

    def build(**options: Any) -> NxDPPModel:
        torch.manual_seed(0)
        return made(model=Model(4, tied), num_microbatches=2, **options)

    nxd(4, pp=2)
    here, left = build(), build(use_optimizer_wrapper=True)
    grads = []
    for pipeline in here, left:
        pipeline.run_train(**layout.local(batch))
        grads.append([p.grad.cpu() for p in pipeline.local_parameters()])
    nxd(2, pp=2)
    whole = build()
    whole.run_train(**batch)
    for a, b, p in zip(*grads, whole.local_parameters(), strict=True):
        torch.testing.assert_close(a, p.grad.cpu(), rtol=1e-4, atol=1e-6)
        if b.abs().max() > 1e-3:
            assert not torch.allclose(b, p.grad.cpu())


def test_autocast_around_a_step(nxd: Nxd) -> None:
    nxd(2, pp=2)
    plain = made().run_train(**BATCH)
    pipeline = made()
    seen = []
    pipeline.layers[0].up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = pipeline.run_train(**BATCH)
    assert set(seen) == {torch.bfloat16} and len(seen) == 4
    assert loss.item() == pytest.approx(plain.item(), rel=0.02) and loss.item() != plain.item()
    assert all(p.grad.dtype == torch.float32 for p in pipeline.local_parameters())


def test_a_norm_of_gradients_that_a_scaler_has_put_on_all_ranks(nxd: Nxd) -> None:
    """`_amp_foreach_non_finite_check_and_unscale_` reads gradients of all stages. They were counted once for each stage."""
    nxd(2, pp=2)
    pipeline = made()
    pipeline.run_train(**BATCH)
    parameters = list(pipeline.local_parameters())
    expected = float(get_grad_norm(parameters))
    gradients = [p.grad for p in parameters]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1, device="xla"), torch.full((1,), 0.5, device="xla"))
    assert {placed.place_of(g) for g in gradients} == {None}
    assert float(get_grad_norm(parameters)) == pytest.approx(expected / 2, rel=1e-5)


def test_dropout_draws_anew_for_each_microbatch_and_not_in_evaluation(nxd: Nxd) -> None:
    class Dropping(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = nn.functional.dropout(self.embedding(ids), 0.5, self.training)
            for layer in self.layers:
                x = layer(x)
            out = self.head(x)
            return nn.functional.cross_entropy(out.reshape(-1, 16), labels.reshape(-1)), out

    nxd(2, pp=2)
    same = {name: t[:1].repeat(8, 1) for name, t in BATCH.items()}
    torch.manual_seed(0)
    pipeline = made(model=Dropping(4), return_mb_loss=True)
    assert len({round(x.item(), 5) for x in pipeline.run_train(**same)}) == 4
    assert len({round(x.item(), 5) for x in pipeline.run_eval(**same)}) == 1


class Inner(nn.Module):
    """Dropout before layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        for layer in self.layers:
            x = layer(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_a_part_of_the_model_that_is_not_trained(nxd: Nxd) -> None:
    """It computes as in evaluation from then on, and stays in that mode after `run_eval`."""
    nxd(2, pp=2)
    model = Outer()
    pipeline = made(model=model, output_loss_value_spec=True, input_names=["x"])
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    evaluated = pipeline.run_eval(x=x).item()
    assert pipeline.run_train(x=x).item() != pytest.approx(evaluated)
    model.inner.eval()
    assert pipeline.run_train(x=x).item() == pytest.approx(evaluated)
    pipeline.run_eval(x=x)
    assert model.training and not model.inner.training and not model.inner.layers[0].training
    assert pipeline.run_train(x=x).item() == pytest.approx(evaluated)


def test_a_batch_norm_keeps_its_running_mean(nxd: Nxd) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    nxd(2, pp=2)
    torch.manual_seed(0)
    alone = Normed()
    torch.manual_seed(0)
    pipeline = made(model=Normed(), transformer_layer_cls=nn.Sequential, output_loss_value_spec=True, input_names=["x"], num_microbatches=2)
    x = torch.randn(8, 4)
    pipeline.run_train(x=x)
    for part in x.chunk(2):
        alone(part)
    for (name, a), b in zip(alone.named_buffers(), pipeline.local_buffers(), strict=True):
        torch.testing.assert_close(b.cpu(), a, msg=name)


def test_a_schedule_of_ones_own(nxd: Nxd, tmp_path: Path) -> None:
    nxd(2, pp=2)
    orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    expected = made(num_microbatches=2).run_train(**BATCH).item()
    table = tmp_path / "own.csv"
    table.write_text(schedules.from_orders(orders).csv())
    for schedule in orders, str(table), schedules.from_orders(orders):
        assert made(num_microbatches=2, schedule=schedule).run_train(**BATCH).item() == pytest.approx(expected)


def test_frozen_layers(nxd: Nxd) -> None:
    """Nothing goes back to stages before the first one that learns."""
    nxd(4, pp=4)
    for schedule in "1f1b", "zb_h1":
        pipeline = made(schedule=schedule)
        for name, p in pipeline.local_named_parameters():
            p.requires_grad_(name.startswith("layers.3"))
        pipeline.run_train(**BATCH)
        assert {n.split(".")[1] for n, p in pipeline.local_named_parameters() if p.grad is not None} == {"3"}


# -- manual mode ----------------------------------------------------------------------------------


def layers_of(count: int) -> list[nn.Module]:
    class First(nn.Linear):
        def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(inputs[0])

    torch.manual_seed(0)
    return [First(4, 4), *(nn.Linear(4, 4) for _ in range(count - 1))]


@pytest.mark.parametrize("shared", [False, True])
def test_manual_mode(nxd: Nxd, shared: bool) -> None:
    nxd(4, pp=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    alone = layers_of(5)
    if shared:
        alone[4].weight = alone[1].weight
    hidden: Any = [x]
    for layer in alone:
        hidden = layer(hidden)
    nn.functional.mse_loss(hidden, y).backward()
    layers = layers_of(5)
    if shared:
        mark_weight_sharing([(layers[1], "weight"), (layers[4], "weight")], "tied")
        with torch.no_grad():
            layers[4].weight.copy_(layers[1].weight)
    pipeline = NxDPPModel(
        layers, num_microbatches=4, manual_pp_partition=True, manual_pp_loss_fn=nn.functional.mse_loss, broadcast_and_average_loss=True
    )
    loss = pipeline.run_train(inputs=x, labels=y)
    assert loss.item() == pytest.approx(nn.functional.mse_loss(hidden, y).item(), rel=1e-5)
    for k, layer in enumerate(alone):
        torch.testing.assert_close(layers[k].weight.grad.cpu(), layer.weight.grad, rtol=1e-4, atol=1e-6)
    assert set(pipeline.local_state_dict()) == {f"layers.{k}.{n}" for k in range(5) for n in ("weight", "bias")}
    pipeline.eval()
    assert not layers[3].training


# -- state ----------------------------------------------------------------------------------------


def test_state_has_the_names_of_the_model(nxd: Nxd) -> None:
    nxd(4, pp=2, tp=2)
    pipeline = made()
    names = [name for name, _ in Model(4).named_parameters()]
    assert [name for name, _ in pipeline.local_named_parameters()] == names == list(pipeline.local_state_dict())
    state = {name: t.detach().cpu() for name, t in pipeline.local_state_dict().items()}
    other = made()
    with torch.no_grad():
        for p in other.local_parameters():
            p.zero_()
    other.load_state_dict({name: t.to("xla") for name, t in pipeline.local_state_dict().items()})
    assert other.run_eval(**BATCH).item() == pytest.approx(pipeline.run_eval(**BATCH).item())
    assert [placed.place_of(p) for p in other.local_parameters()] == [placed.place_of(p) for p in pipeline.local_parameters()]
    assert set(state) == set(names)


@pytest.mark.thorough  # tests/nxd_jax/checkpoint/test_pipeline.py goes from layout to layout, too
@pytest.mark.parametrize("zero1", [False, True])
def test_a_checkpoint_loads_in_other_layouts(nxd: Nxd, tmp_path: Path, zero1: bool) -> None:
    """pp 4 x tp 2, pp 2 x 2 chunks x tp 4, and no pipeline: the same weights and state, and the same training goes on."""
    layouts = [
        Layout(8, 4, 2, tp=2, zero1=zero1, tied=True),
        Layout(8, 2, 2, "zbv", stages=2, tp=4, zero1=zero1, tied=True),
        Layout(4, 1, 1, tp=4, zero1=zero1, tied=True),
    ]
    batch = layouts[0].batch()
    nxd(8, tp=2, pp=4)
    _, pipeline, optimizer = train(layouts[0], batch, steps=2)
    nxd_api.save_checkpoint(str(tmp_path), "two", model=pipeline, optimizer=optimizer)
    expected = [step(layouts[0], pipeline, optimizer, batch) for _ in range(2)]
    for layout in layouts:
        nxd(layout.ranks, tp=layout.tp, pp=layout.pp)
        again, stepper = layout.make()
        nxd_api.load_checkpoint(str(tmp_path), "two", model=again, optimizer=stepper)
        found = [step(layout, again, stepper, batch) for _ in range(2)]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


def step(layout: Layout, wrapped: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> float:
    given = batch if layout.pp > 1 else {name: t.to("xla") for name, t in batch.items()}
    loss = wrapped.run_train(**given)
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return float(loss.detach())


def test_meta_weights_are_made_where_they_belong(nxd: Nxd) -> None:
    def fill(module: nn.Module, device: Any) -> None:
        for p in module.parameters(recurse=False):
            if not p.is_meta:
                nn.init.constant_(p, 0.1)
        if hasattr(module, "init_weight_cpu"):
            module.init_weight_cpu()

    nxd(4, pp=2, tp=2)
    config = Layout(4, 2, 4, tp=2).config()
    config["model_init_config"].update(meta_device_init=True, param_init_fn=fill)
    wrapped = nxd_api.initialize_parallel_model(config, Model)
    assert not any(p.is_meta for p in wrapped.parameters())
    assert {placed.place_of(p).name for p in wrapped.parameters()} == {"pp 0", "pp 1"}  # type: ignore[union-attr]
    assert torch.isfinite(wrapped.run_train(**BATCH))


def test_training_with_nxds_wrappers_equals_one_rank(nxd: Nxd) -> None:
    layout = Layout(2, 2, 4, layers=4)
    nxd(1)
    expected = train(layout.alone(), layout.batch())[0]
    nxd(2, pp=2)
    found, wrapped, _ = train(layout, layout.batch())
    agree(found, expected)
    assert wrapped.pp_enabled and len(wrapped.local_modules()) == 2 and wrapped.original_module() is wrapped.module
    with pytest.raises(RuntimeError, match="no forward of its own"):
        wrapped(**BATCH)
    assert wrapped.run_eval(**layout.batch()).item() < expected.losses[0]


# -- helpers of NxD -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "layers", "ends"), [(4, 40, [9, 19, 29]), (4, 19, [3, 8, 13]), (3, 5, [0, 2]), (1, 7, []), (3, 3, [0, 1])]
)
def test_layers_of_stages(stages: int, layers: int, ends: list[int]) -> None:
    names = [f"layers.{k}" for k in range(layers)]
    assert partition.create_partitions(stages, names) == [names[k] for k in ends]


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(AssertionError, match="2 layers cannot make 3 stages: each needs one"):
        partition.create_partitions(3, ["a", "b"])


def test_stages_go_round(nxd: Nxd) -> None:
    assert [partition.stage_to_pipeline_parallel_rank(s, 2) for s in range(4)] == [0, 1, 0, 1]
    nxd(4, pp=4)
    assert partition.stage_to_pipeline_parallel_rank(5) == 1


class Hiding(nn.Linear):
    """A layer whose result is an object with a tensor inside."""

    def forward(self, x: Any) -> Any:
        return type("State", (), {"x": super().forward(x[0])})()


def test_objects_do_not_go_from_stage_to_stage(nxd: Nxd) -> None:
    nxd(2, pp=2)
    pipeline = NxDPPModel([Hiding(4, 4), nn.Linear(4, 4)], manual_pp_partition=True, manual_pp_loss_fn=lambda out, labels: out.sum())
    with pytest.raises(
        TypeError, match="stage 0 of the pipeline hands on an object of type State: stages take tensors, numbers, strings, and tuples"
    ):
        pipeline.run_train(inputs=[torch.ones(2, 4)], labels=[torch.ones(2)])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_dropout_is_drawn_again_by_activation_checkpoints(nxd: Nxd, schedule: str) -> None:
    """A pass that is computed again in the backward pass draws what it drew: losses and gradients are those without checkpoints."""
    from torch.utils.checkpoint import checkpoint

    from tests.nxd_jax.pipeline.torchrun_job import Noise, Noisy

    class Kept(Noisy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    found = []
    for layer in (Noisy, Kept):
        nxd(2, pp=2)
        torch.manual_seed(3)
        plain = Noise()
        for module in plain.layers:
            module.__class__ = layer
        model = NxDPPModel(
            plain, layer, num_microbatches=4, output_loss_value_spec=True, input_names=["x"], auto_partition=True, schedule=schedule
        )
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        losses = [float(model.run_train(x=x)) for _ in range(3)]
        found.append((losses, [p.grad.cpu() for p in model.local_parameters()]))
    (one, grads), (two, others) = found
    assert len(set(one)) == 3 and one == pytest.approx(two, rel=1e-6)
    torch.testing.assert_close(others, grads)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_in_a_split_backward_pass(nxd: Nxd, reentrant: bool) -> None:
    """Reentrant ones cannot be split: their stage does all of its backward pass at once."""
    from torch.utils.checkpoint import checkpoint

    class Kept(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    nxd(2, pp=2)
    plain, split = Model(4), Model(4)
    split.load_state_dict(plain.state_dict())
    for layer in split.layers:
        layer.__class__ = Kept
    expected = made(model=plain)
    pipeline = made(model=split, transformer_layer_cls=Kept, schedule="zb_h1")
    assert pipeline.run_train(**BATCH).item() == pytest.approx(expected.run_train(**BATCH).item(), rel=1e-5)
    for (name, a), b in zip(pipeline.local_named_parameters(), expected.local_parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad.cpu(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_programs_do_not_depend_on_the_number_of_micro_batches(nxd: Nxd, device: str) -> None:
    from tests.nxd_jax.pipeline.torchrun_job import Noise, Noisy

    made = []
    for count in (4, 8):
        nxd(2, pp=2)
        model = NxDPPModel(Noise(), Noisy, count, output_loss_value_spec=True, input_names=["x"], auto_partition=True)
        before = metrics.COUNTERS.get("UncachedCompile", 0)
        for _ in range(3):
            model.run_train(x=torch.randn(2 * count, 8).to(device))
        made.append(metrics.COUNTERS.get("UncachedCompile", 0) - before)
    assert made[0] == made[1] > 4
