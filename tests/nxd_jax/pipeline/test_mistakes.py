"""What `NxDPPModel` says of wrong options, and of models that a pipeline cannot run, or not as one rank would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layer


class Model(nn.Module):
    """Four layers and a mean; subclasses do with them what they should not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.extend()

    def extend(self) -> None:
        """What a subclass has besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class WithoutMean(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class EarlyLoss(Model):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        loss = self.layers[0](x).square().mean().detach()
        return loss, super().forward(x)


X = torch.arange(32.0).reshape(8, 4) / 32


def made(model: Any = None, **options: Any) -> NxDPPModel:
    torch.manual_seed(0)
    given = {
        "transformer_layer_cls": Layer,
        "num_microbatches": 4,
        "output_loss_value_spec": True,
        "input_names": ["x"],
        "auto_partition": True,
    }
    return NxDPPModel(Model() if model is None else model() if isinstance(model, type) else model, **{**given, **options})


def manual(layers: list[nn.Module] | None = None, **options: Any) -> NxDPPModel:
    return NxDPPModel(layers or [nn.Linear(4, 4), nn.Linear(4, 4)], manual_pp_partition=True, **options)


def alone(model: type[nn.Module]) -> float:
    """The loss on one rank, a micro-batch after the other."""
    torch.manual_seed(0)
    one = model()
    return sum(float(one(part).detach()) for part in X.chunk(4)) / 4


# -- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_microbatches": 0}, ValueError, "num_microbatches must be a whole number, 1 or more, got 0"),
        ({"num_microbatches": "4"}, ValueError, "num_microbatches must be a whole number, 1 or more, got '4'"),
        ({"virtual_pipeline_size": None}, ValueError, "virtual_pipeline_size must be a whole number, 1 or more, got None"),
        ({"input_names": None}, ValueError, "auto_partition=True needs input_names, the names of the inputs"),
        ({"input_names": "x"}, TypeError, r"input_names takes a list of names, got 'x': write input_names=\['x'\]"),
        ({"leaf_module_cls": "Layer"}, TypeError, r"leaf_module_cls takes a list of names, got 'Layer'"),
        (
            {"leaf_module_cls": [Layer]},
            TypeError,
            r"leaf_module_cls takes a list of names, got .*Layer.*\]: write leaf_module_cls=\['...'\]",
        ),
        ({"pipeline_cuts": "layers.1", "auto_partition": False}, TypeError, r"write pipeline_cuts=\['layers.1'\]"),
        (
            {"model": WithoutMean, "pipeline_cuts": ["layers.3"], "auto_partition": False},
            ValueError,
            r"1 cuts \(layers.3\) make 1 stages: the model computes nothing after one of these layers",
        ),
        (
            {"transformer_layer_cls": "Layer"},
            TypeError,
            "transformer_layer_cls must be a class of torch.nn.Module, such as .*, got 'Layer'",
        ),
        ({"tracer_cls": "jax"}, ValueError, "tracer_cls='jax' must be 'hf', 'torch', a subclass of torch.fx.Tracer, or None"),
        (
            {"schedule": 3},
            TypeError,
            r"schedule takes a name \(gpipe, 1f1b, .*\), a Schedule, a list of actions for each rank, or torch's CSV, got int",
        ),
        (
            {"model": [nn.Linear(4, 4)]},
            TypeError,
            "whole model as a torch.nn.Module, got list; a list of layers needs manual_pp_partition=True",
        ),
        ({"manual_pp_partition": True, "model": [Layer(), 2]}, TypeError, "one of these is of type int: wrap it in a module"),
        ({"manual_pp_partition": True, "model": [Layer()] * 2, "virtual_pipeline_size": 2}, ValueError, "has one stage on each rank"),
        (
            {"manual_pp_partition": True, "model": [Layer()]},
            AssertionError,
            "1 layers cannot make 2 stages: each needs one. Use fewer stages",
        ),
    ],
)
def test_options(nxd: Nxd, options: dict[str, Any], error: type[Exception], text: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(error, match=text):
        made(**options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: manual().trace(), RuntimeError, r"traces nothing: leave out trace\(\), and cut by manual_pp_stage_partition_fn"),
        (lambda: manual().cut_pipeline_stage("0"), AssertionError, "partitioned already"),
        (lambda: manual().run_train(inputs=X, labels=X), RuntimeError, "run_train needs a loss: manual_pp_loss_fn makes it"),
        (lambda: made(auto_partition=False).partition(), AssertionError, r"partition needs a traced model: call trace\(\) first"),
        (lambda: made(auto_partition=False).trace(leaf_modules="Layer"), TypeError, r"write leaf_modules=\['Layer'\]"),
        (lambda: made(auto_partition=False).local_stage_modules, RuntimeError, "no stages yet: set auto_partition=True or pipeline_cuts"),
        (lambda: torch.no_grad()(made().run_train)(x=X), RuntimeError, r"gradients, and they are switched off here .*: use run_eval"),
        (
            lambda: made(EarlyLoss, output_loss_value_spec=(True, False)).run_train(x=X),
            RuntimeError,
            "the loss takes no gradients in the last stage of the pipeline: an earlier stage makes it, it is detached",
        ),
        (lambda: made().run_train(x=X[:0]), RuntimeError, r"the batch has no rows \(dim 0 is 0\).*drop_last=True"),
        (lambda: made().run_train(x=X.to("meta")), ValueError, "the input x is on meta: give run_train tensors on the CPU"),
        (lambda: made().run_train(x=torch.tensor(1.0)), ValueError, "with the batch along dim 0, got a tensor without dims"),
        (lambda: made().load_state_dict({}), RuntimeError, "Missing key.*layers.0.linear.weight"),
        (
            lambda: made().translate_local_state_dict_to_origin_state_dict({"a": 1}),
            ValueError,
            r"have no a: give what local_state_dict\(\)",
        ),
    ],
)
def test_calls(nxd: Nxd, call: Callable[[], Any], error: type[Exception], text: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: made().trace(input_names=["x"]), "trace() was called before; the model stays as it was traced then"),
        (lambda: made().partition(), "partition() was called before; the stages stay as they are"),
        (lambda: made(fuse_microbatches=True), "the loss stays on the device (return_loss_on_cpu=False)"),
        (
            lambda: made(auto_partition=False, pipeline_cuts=["layers.3"]),
            "stage 1 of the pipeline has no parameters: cut the model elsewhere",
        ),
        (
            lambda: manual(auto_partition=True, pipeline_cuts=["0"]),
            "manual_pp_partition=True leaves aside auto_partition, pipeline_cuts: cuts follow",
        ),
        (
            lambda: made(manual_pp_loss_fn=nn.functional.mse_loss),
            "manual_pp_partition=False leaves aside manual_pp_loss_fn: it is for lists of layers",
        ),
    ],
)
def test_warnings(nxd: Nxd, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], text: str) -> None:
    nxd(2, pp=2)
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        make()
    assert text in caplog.text


def test_more_stages_than_ranks(nxd: Nxd) -> None:
    nxd(2, pp=2)
    config = nxd_api.neuronx_distributed_config(pipeline_parallel_size=4, pipeline_config={"transformer_layer_cls": Layer})
    with pytest.raises(
        ValueError, match="pipeline_parallel_size=4 needs 4 ranks or more, and there are 2: start the script with more of them"
    ):
        nxd_api.initialize_parallel_model(config, Model)


def test_a_first_layer_that_takes_no_list(nxd: Nxd) -> None:
    nxd(2, pp=2)
    with pytest.raises(TypeError, match="must be Tensor, not list") as error:
        manual(manual_pp_loss_fn=nn.functional.mse_loss).run_train(inputs=X, labels=X)
    assert error.value.__notes__[0].startswith(
        "The first layer in manual mode (Linear) is given a list of tensors, as NxD gives it: let its forward"
    )


# -- names ------------------------------------------------------------------------------------------


def test_names_of_the_model(nxd: Nxd) -> None:
    """Parameters have the model's names, stages or not; states are translated under the same ones; layers are found by class."""
    nxd(2, pp=2)
    pipeline = made()
    names = [name for name, _ in Model().named_parameters()]
    assert [name for name, _ in pipeline.named_parameters()] == names and len(list(pipeline.parameters())) == 8
    assert list(pipeline.named_buffers()) == list(pipeline.buffers()) == []
    state = pipeline.local_state_dict()
    assert list(pipeline.translate_local_state_dict_to_origin_state_dict(state, prefix="m.")) == [f"m.{name}" for name in names]
    assert list(pipeline.translate_origin_state_dict_to_local_state_dict({**state, "other": 1})) == names
    assert pipeline.get_model_layers(pipeline.original_torch_module, Layer) == [f"layers.{k}" for k in range(4)]
    assert pipeline.get_model_layers(nn.Sequential(Layer(), nn.Sequential(Layer())), nn.Module, ["m"]) == ["m.0", "m.1"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_stage(nxd: Nxd, ranks: int) -> None:
    """`auto_partition` with one pipeline rank: all layers are one stage."""
    nxd(ranks)
    pipeline = made()
    assert len(pipeline.local_stage_modules) == 1
    assert float(pipeline.run_train(x=X)) == pytest.approx(alone(Model), rel=1e-5)


# -- what goes past the pipeline ----------------------------------------------------------------------


class LayerThatKeeps(Layer):
    """Keeps its result where another layer finds it. detached: without its history."""

    def __init__(self, kept: list[torch.Tensor], detached: bool):
        super().__init__()
        self.kept, self.detached = kept, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.kept[:] = [found.detach() if self.detached else found]
        return found


class LayerThatTakes(Layer):
    """Reads what another layer kept."""

    def __init__(self, kept: list[torch.Tensor]):
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.kept[0]


class Past(Model):
    """The last layer reads a result of the first."""

    detached = False

    def extend(self) -> None:
        kept: list[torch.Tensor] = []
        self.layers[0], self.layers[3] = LayerThatKeeps(kept, self.detached), LayerThatTakes(kept)


class PastDetached(Past):
    detached = True


class OthersWeight(Model):
    """The last layer reads a weight of the first that it does not have."""

    def extend(self) -> None:
        self.layers[3] = LayerThatTakes([self.layers[0].linear.bias])


class LayerThatShares(Layer):
    """Has a weight of another layer as its own, too."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.shared = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shared


class SharedWeight(Model):
    """As `OthersWeight` should be."""

    def extend(self) -> None:
        self.layers[3] = LayerThatShares(self.layers[0].linear.bias)  # type: ignore[union-attr, arg-type]


class Statistics(Model):
    """All layers have one batch norm. tracking: whether it has running statistics."""

    tracking = True

    def extend(self) -> None:
        self.norm = nn.BatchNorm1d(4, track_running_stats=self.tracking)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x.square().mean()


class NoStatistics(Statistics):
    tracking = False


@pytest.mark.parametrize(("model", "size"), [(Past, r"float32\[2, 4\]"), (OthersWeight, r"float32\[4\]")])
def test_gradients_past_the_pipeline(nxd: Nxd, model: type[Model], size: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(
        RuntimeError,
        match=rf"stage 1 of the pipeline reads a tensor of another stage \({size}, on the cores of pp 0\) that is not handed to it, and gradients would go "
        "back to it past the pipeline. Let the layer return the tensor, and give it to the other layer as an argument",
    ):
        made(model).run_train(x=X)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("model", [SharedWeight, NoStatistics, PastDetached, Statistics])
def test_values_past_the_pipeline(nxd: Nxd, caplog: pytest.LogCaptureFixture, model: type[Model]) -> None:
    """What stages share by its name is right; what the schedule decides is warned of, once."""
    nxd(2, pp=2)
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        pipeline = made(model)
        losses = [float(pipeline.run_train(x=X)) for _ in range(2)]
    said = {
        PastDetached: "that is not handed to it: it may be another micro-batch's. Let the layer return the tensor",
        Statistics: "stages 0 and 1 of the pipeline have the same BatchNorm1d (norm): the order in which they update its running statistics is the schedule's",
    }.get(model)
    assert caplog.text.count(said or "of the pipeline") == (said is not None) and len(caplog.records) == (said is not None)
    if model is not PastDetached:
        assert losses == pytest.approx([alone(model)] * 2, rel=1e-5)


# -- writing in place ---------------------------------------------------------------------------------


class InPlace(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).mul_(2)
        return x.square().mean()


class InPlaceModule(Model):
    def extend(self) -> None:
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x.square().mean()


class InPlaceInput(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y + x.mul_(2)).square().mean()


class InPlaceWithin(Model):
    """In place, but each stage its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x) + 1
            x = y.mul_(2)
            x *= 0.5
        return nn.functional.relu(x + 1, inplace=True).square().mean()


@pytest.mark.parametrize(("model", "node"), [(InPlace, "mul_"), (InPlaceModule, "act_1"), (InPlaceInput, "mul_")])
def test_writing_what_another_stage_has(nxd: Nxd, model: type[Model], node: str) -> None:
    nxd(2, pp=2)
    with pytest.raises(
        RuntimeError,
        match=rf"stage 1 of the pipeline writes a tensor in place \({node}\w*\) that stage 0 makes or uses: .*Write the operation out of place \(x = x \* 2",
    ):
        made(model)


def test_writing_what_is_ones_own(nxd: Nxd) -> None:
    nxd(2, pp=2)
    assert float(made(InPlaceWithin).run_train(x=X)) == pytest.approx(alone(InPlaceWithin), rel=1e-5)
