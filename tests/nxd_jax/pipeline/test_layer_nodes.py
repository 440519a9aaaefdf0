"""Layers of a pipeline with more around them than a call: transformers collects something inside, or gradients or autocast are switched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import fx, nn

from nxd_jax.pipeline.call_recorder import Context
from nxd_jax.pipeline.layer_nodes import KEYS, Collecting, InContext, give, layer_of
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.test_transformers import MODELS, batch, cut, decoder, layer_class, train_alike

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.utils.output_capturing", reason="this transformers collects nothing by hooks")

EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
QWEN = {**MODELS["Qwen3"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = [
    ("Mixtral", EXPERTS, 4, "1f1b", 1, False),
    ("Mixtral", EXPERTS, 4, "1f1b", 1, True),
    ("Mixtral", EXPERTS, 4, "zbv", 2, False),
    ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2}, 4, "interleaved", 2, False),
    ("Llama", {"output_attentions": True, "attn_implementation": "eager"}, 3, "1f1b", 1, False),
    ("Llama", {"output_hidden_states": True}, 3, "1f1b", 1, False),
]
"""Model, options, how many things it returns, schedule, stages of a rank, whether layers are checkpointed."""


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("kind", "options", "results", "schedule", "chunks", "checkpointed"), CASES)
def test_training_equals_eager_torch(
    nxd: Nxd,
    kind: str,
    options: dict[str, Any],
    results: int,
    schedule: str,
    chunks: int,
    checkpointed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The auxiliary loss is made in the last stage, of every layer's router logits."""
    nxd(2, pp=2)
    monkeypatch.setitem(MODELS, "Qwen3Moe", QWEN)
    eager = decoder(kind, **options)
    model = copy.deepcopy(eager)
    if checkpointed:
        model.activation_checkpointing_enable()
    pipeline = cut(model, kind, results, schedule, chunks)
    train_alike(eager, pipeline)
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in eager.named_parameters()]
    assert set(pipeline.local_state_dict()) == set(eager.state_dict())
    assert all(module.forward.played > 4 for module in pipeline.local_stage_modules)


def test_the_model_collects_once_afterwards(nxd: Nxd) -> None:
    """Its layers have the hooks that transformers puts there in a model's first forward, no others."""
    nxd(2, pp=2)
    model = decoder("Mixtral", **EXPERTS)
    pipeline = cut(model, "Mixtral", 4, "1f1b", 1)
    pipeline.run_train(**batch())
    gates = [module.mlp.gate for module in model.modules() if isinstance(module, layer_class(model, "Mixtral"))]
    assert [len(gate._forward_hooks) for gate in gates] == [1] * len(gates)


class Switching(nn.Module):
    """A part that learns nothing, one in bfloat16, and one as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.layers[0](x)
        h = self.layers[1](h)
        with torch.autocast("xla", dtype=torch.bfloat16):
            h = self.layers[2](h)
        return (self.layers[3](h.float()) - y).square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_and_autocast_are_switched_around_layers(nxd: Nxd, schedule: str) -> None:
    nxd(2, pp=2)
    torch.manual_seed(0)
    alone = Switching().to("xla")
    model = copy.deepcopy(alone).cpu()
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipeline = NxDPPModel(
        model, transformer_layer_cls=nn.Sequential, num_microbatches=4, schedule=schedule, input_names=["x", "y"], auto_partition=True,
        output_loss_value_spec=True,
    )  # fmt: skip
    for _ in range(3):
        loss = torch.stack([alone(a.to("xla"), b.to("xla")) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]).mean()
        loss.backward()
        assert float(pipeline.run_train(x=x, y=y)) == pytest.approx(float(loss.detach()), rel=1e-6)
        for (name, one), other in zip(alone.named_parameters(), pipeline.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None) == name.startswith("layers.0."), name
            if one.grad is not None:
                torch.testing.assert_close(other.grad.cpu(), one.grad.cpu(), rtol=1e-5, atol=1e-6)
        alone.zero_grad()
        pipeline.zero_grad()
    with torch.no_grad():
        assert float(pipeline.run_eval(x=x, y=y)) == pytest.approx(float(loss.detach()), rel=1e-6)


def test_an_evaluation_takes_no_gradients_where_a_layer_has_a_context() -> None:
    with torch.autocast("xla", dtype=torch.bfloat16):
        context = Context()
    layer, x = InContext(nn.Linear(2, 2), context).to("xla"), torch.ones(2, 2, device="xla")
    assert layer(x).dtype is torch.bfloat16 and layer(x).requires_grad
    with torch.no_grad():
        assert not layer(x).requires_grad


class Hooked(nn.Module):
    """A layer that collects one thing or two."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers.utils import output_capturing

        for _ in range(self.count):
            output_capturing._active_collector.get()["router_logits"].append(x + 1)
        return x


def test_a_layer_that_collects_something_else_later() -> None:
    layer = Collecting(Hooked(1), {"router_logits": 1})
    found, (logits,) = layer(torch.ones(2))
    assert found.tolist() == [1.0, 1.0] and logits.tolist() == [2.0, 2.0]
    layer.layer.count = 2
    with pytest.raises(RuntimeError, match="Hooked gave 2 router_logits, and 1 when the pipeline was cut: .* Make the NxDPPModel anew"):
        layer(torch.ones(2))


@pytest.mark.parametrize(("first", "second"), [({"router_logits": 1}, {"router_logits": 1}), ({}, {"router_logits": 1})])
def test_a_layer_that_is_called_twice(first: dict[str, int], second: dict[str, int]) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for counts in (first, second):
        value = graph.call_module("0", (value,))
        value.meta.update({KEYS: counts} if counts else {})
    graph.output(value)
    traced = fx.GraphModule(nn.Sequential(Hooked(1)), graph)
    if not first:
        with pytest.raises(
            RuntimeError, match="0 is called 2 times, and transformers collects router_logits inside of it in some of these calls only"
        ):
            give(traced, [])
        return
    give(traced, [])
    layer = traced.get_submodule("0")
    assert isinstance(layer, Collecting) and isinstance(layer.layer, Hooked) and layer_of(layer) is layer.layer
