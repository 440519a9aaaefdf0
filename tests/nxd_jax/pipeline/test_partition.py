"""`pipeline.trace` and `pipeline.partition`: a model is traced, cut into stages that compute what it does, and the stages say what they need of one another."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline import partition
from neuronx_distributed.pipeline.partition import PipelineIO
from neuronx_distributed.pipeline.trace import (
    HFTracerWrapper,
    NxDTracer,
    TorchTracerWrapper,
    get_concrete_args,
    get_tracer_class,
    trace_model,
)
from torch import Tensor, fx, nn

from tests.nxd_jax.conftest import Nxd

WIDTH, VOCAB = 8, 16


class Block(nn.Module):
    """Branches on a value, so it has to be a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.inner(x) * scale if x.sum() < 1e9 else x


class Decoder(nn.Module):
    """Tied embedding and head, a scale that all blocks read, the embeddings once more at the end."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, mask: Tensor, labels: Tensor | None = None, use_cache: bool = False, power: float = 2.0) -> Any:
        x = first = self.embed(input_ids)
        scale = (1 - mask)[..., None] / math.sqrt(WIDTH)
        for layer in self.layers:
            x = layer(x, scale)
        logits = self.head(x + first**power)
        if use_cache:
            return logits, x
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def traced(cuts: tuple[int, ...] = (0, 2), layers: int = 4) -> tuple[Decoder, fx.GraphModule]:
    torch.manual_seed(0)
    model = Decoder(layers)
    found = trace_model(model, input_names=["input_ids", "mask", "labels"], leaf_modules=["Block"])
    for k in cuts:
        partition.cut_after(found, f"layers.{k}")
    return model, found


def batch() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(0, VOCAB, (2, 3)), torch.rand(2, 3), torch.randint(0, VOCAB, (2, 3))


# -- tracing ----------------------------------------------------------------------------------------------


def test_a_traced_model_computes_what_the_model_does() -> None:
    model, found = traced()
    values = batch()
    for expected, actual in zip(model(*values), found(*values), strict=True):
        assert torch.equal(expected, actual)
    nodes = [(node.op, node.name) for node in found.graph.nodes]
    assert nodes[:4] == [("placeholder", "input_ids"), ("placeholder", "mask"), ("placeholder", "labels"), ("call_module", "embed")]
    assert [name for op, name in nodes if op == "call_module"] == ["embed", *(f"layers_{k}" for k in range(4)), "head"]
    assert isinstance(found.get_submodule("layers.1"), Block)


def test_inputs_by_example() -> None:
    found = trace_model(
        Decoder(), (torch.zeros(1),), {"mask": torch.zeros(1)}, leaf_modules=["layers.0", "layers.1", "layers.2", "layers.3"]
    )
    assert [node.name for node in found.graph.nodes if node.op == "placeholder"] == ["input_ids", "mask"]


def test_constants_are_the_defaults() -> None:
    assert get_concrete_args(Decoder(), ["input_ids", "mask"]) == {"labels": None, "use_cache": False, "power": 2.0}
    assert list(get_concrete_args(Decoder(), None, (1, 2), {"use_cache": True})) == ["labels", "power"]
    assert get_concrete_args(nn.Linear(2, 2), []) == {"input": inspect.Parameter.empty}


def test_keyword_only_inputs_and_constants() -> None:
    class Keywords(nn.Module):
        def forward(self, x: Tensor, /, y: Tensor, *, z: Tensor, plus: float = 1.0, **rest: Any) -> Tensor:
            return x * y - z + plus

    found = trace_model(Keywords(), input_names=["x", "y", "z"])
    x, y, z = torch.randn(3, 4)
    assert torch.equal(found(x, y, z), x * y - z + 1.0)


def steps(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


class Helper:
    def apply(self, x: Tensor) -> Tensor:
        return x * 2 if x.max() > 0 else x


class Calls(nn.Module):
    def __init__(self, helper: Helper) -> None:
        super().__init__()
        self.helper = helper

    def forward(self, x: Tensor) -> Tensor:
        return self.helper.apply(steps(x))


def test_functions_and_methods_that_are_not_looked_into() -> None:
    helper = Helper()
    model = Calls(helper)
    found = trace_model(model, input_names=["x"], autowrap_functions=[steps], autowrap_obj_methods={helper: ["apply"]})
    assert [node.op for node in found.graph.nodes] == ["placeholder", "call_function", "call_function", "output"]
    x = torch.randn(4)
    assert torch.equal(found(x), model(x)) and "apply" not in vars(helper)


def test_tracer_classes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8, n_positions=8)
    assert get_tracer_class(transformers.GPT2Model(config)) is HFTracerWrapper
    assert get_tracer_class(nn.Linear(1, 1)) is TorchTracerWrapper
    assert get_tracer_class(nn.Linear(1, 1), "hf") is HFTracerWrapper and get_tracer_class(nn.Linear(1, 1), "torch") is TorchTracerWrapper

    class Own(HFTracerWrapper):
        """As optimum subclasses it."""

    assert get_tracer_class(nn.Linear(1, 1), Own) is Own and issubclass(Own, NxDTracer)
    assert isinstance(trace_model(Decoder(), input_names=["input_ids", "mask"], leaf_modules=["Block"], tracer_cls=Own), fx.GraphModule)


# -- stages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(), (0,), (0, 2), (0, 1, 2, 3), (3,)])
def test_stages_compute_what_the_model_does(cuts: tuple[int, ...]) -> None:
    model, found = traced(cuts)
    names: dict[str, str] = {}
    split = partition.partition_traced_model(found, names)
    children = dict(split.named_children())
    assert list(children) == [f"submod_{k}" for k in range(len(cuts) + 1)]
    values = batch()
    for expected, actual in zip(model(*values), split(*values), strict=True):
        assert torch.equal(expected, actual)
    assert {type(m) for stage in children.values() for m in stage.children()} == {nn.Embedding, Block, nn.Linear}
    assert names["submod_0.embed"] == "embed"
    for expected, actual in zip(model(*values), found(*values), strict=True):  # the traced model is as it was
        assert torch.equal(expected, actual)


def follow(split: fx.GraphModule, inputs: dict[str, Tensor]) -> Any:
    """Run the stages as ranks do: each has the model's inputs and what the stage before sent."""
    connections, model_inputs, counts, results = partition.analyze_pipeline_module(split)
    sent: list[Any] = []
    out: Any = ()
    for stage, module in enumerate(m for _, m in split.named_children()):
        got = dict(zip(connections[stage], sent, strict=True))
        args: list[Any] = [None] * counts[stage]
        for name, place in model_inputs[stage].items():
            args[place] = inputs[name]
        for name, io in connections[stage].items():
            if io.input_idx is not None:
                args[io.input_idx] = got[name]
        assert all(a is not None for a in args)
        out = module(*args)
        out = out if isinstance(out, tuple) else (out,)
        assert len(out) == results[stage]
        following = connections.get(stage + 1, {})
        sent = [got[name] if io.output_idx is None else out[io.output_idx] for name, io in following.items()]
    return out


@pytest.mark.parametrize("cuts", [(0,), (0, 2), (0, 1, 2), (0, 1, 2, 3), (3,)])
def test_values_that_are_sent_are_all_that_stages_need(cuts: tuple[int, ...]) -> None:
    model, found = traced(cuts)
    values = dict(zip(("input_ids", "mask", "labels"), batch(), strict=True))
    for expected, actual in zip(model(**values), follow(partition.partition_traced_model(found), values), strict=True):
        assert torch.equal(expected, actual)


def test_connections() -> None:
    """`scale` is read by all blocks, `embed` by the last stage alone: the stages between hand it on."""
    _, found = traced((0, 1, 2))
    connections, inputs, counts, results = partition.analyze_pipeline_module(partition.partition_traced_model(found))
    shown = {stage: {name: (io.input_idx, io.output_idx) for name, io in ios.items()} for stage, ios in connections.items()}
    assert shown[0] == {}
    assert set(shown[1]) == {"embed", "truediv", "layers_0"}
    assert shown[1]["embed"][0] is None and None not in shown[1]["truediv"] + shown[1]["layers_0"]
    assert shown[2]["embed"] == (None, None) and shown[2]["truediv"][1] is None and shown[2]["layers_1"][1] is not None
    assert shown[3]["embed"][0] is not None and shown[3]["embed"][1] is None
    assert inputs == {0: {"input_ids": 0, "mask": 1}, 1: {}, 2: {}, 3: {"labels": inputs[3]["labels"]}}
    assert counts == {0: 2, 1: 2, 2: 2, 3: 4} and results == {0: 3, 1: 1, 2: 1, 3: 2}


def test_text_of_a_connection() -> None:
    assert str(PipelineIO("mul", input_idx=1)) == "mul_1_None"
    assert "a_0_2" in str(OrderedDict(a=PipelineIO("a", 0, 2)))


def test_shared_weights() -> None:
    model, found = traced((0, 2))
    stages = [module for _, module in partition.partition_traced_model(found).named_children()]
    assert partition.analyze_shared_weights_across_stages(model, stages) == [[("embed.weight", 0), ("head.weight", 2)]]
    _, whole = traced(())
    assert partition.analyze_shared_weights_across_stages(model, [partition.partition_traced_model(whole)]) == []


def test_weights_shared_by_two_stages_of_a_rank(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model, found = traced((0, 1))
    stages = [module for _, module in partition.partition_traced_model(found).named_children()]
    assert partition.analyze_shared_weights_across_stages(model, stages) == []  # stages 0 and 2 are both on rank 0


# -- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "kind", "said"),
    [
        (
            lambda: trace_model(Decoder(), input_names=["input_ids", "mask"]),
            RuntimeError,
            r"Decoder cannot be traced symbolically: .*test_partition.py:\d+: return x \+ self.*add the class name",
        ),
        (
            lambda: trace_model(Decoder(), input_names=["ids", "mask"]),
            ValueError,
            "Decoder.forward has no input named ids; it has input_ids, mask",
        ),
        (lambda: trace_model(Decoder(), input_names=["mask"]), ValueError, "needs input_ids, which has no default: add it to input_names"),
        (lambda: trace_model(Decoder()), ValueError, "say what the inputs are: input_names, or example args and kwargs"),
        (lambda: get_concrete_args(Decoder(), None, range(6)), ValueError, "6 args were given, Decoder.forward takes 5"),
        (
            lambda: get_tracer_class(Decoder(), "jax"),
            ValueError,
            "tracer_cls='jax' must be 'hf', 'torch', a subclass of torch.fx.Tracer, or None",
        ),
        (
            lambda: partition.cut_after(traced()[1], "layers.9"),
            RuntimeError,
            "has no layer 'layers.9' to cut after; its layers are embed, layers.0",
        ),
        (lambda: partition.cut_after(traced()[1], "layers.2"), AssertionError, "the model is cut after 'layers.2' already"),
        (lambda: trace_model(Calls(Helper()), input_names=["x"], autowrap_obj_methods={Helper(): ["no"]}), AttributeError, "no"),
    ],
)
def test_mistakes(mistake: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        mistake()
