"""`activation_checkpoint_config`: the same gradients from less memory, because activations really are computed again."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from neuronx_distributed.trainer import initialize_parallel_model, neuronx_distributed_config
from torch import nn

from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.tensor_parallel.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_jax.utils.activation_checkpoint import NxDCheckpointWrapper, checkpoint_wrapper
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded
from torch_bridge.runtime import session

transformers = pytest.importorskip("transformers")

SEQ, ROWS, HIDDEN, INNER = 64, 8, 64, 256


class Up(ColumnParallelLinear):
    """A class of its own, to be chosen."""


class Layer(nn.Module):
    def __init__(self, sequence_parallel: bool, drop: float, size: int, inner: int):
        super().__init__()
        layout: dict[str, Any] = {"sequence_parallel_enabled": sequence_parallel, "sequence_dimension": 0}
        self.norm = nn.LayerNorm(size)
        self.up = Up(size, inner, gather_output=False, **layout)
        self.down = RowParallelLinear(inner, size, input_is_parallel=True, **layout)
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, sequence_parallel: bool = False, drop: float = 0.1, layers: int = 8, size: int = HIDDEN, inner: int = INNER):
        super().__init__()
        self.layers = nn.ModuleList(Layer(sequence_parallel, drop, size, inner) for _ in range(layers))
        self.out = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x).square().mean()


def make(chosen: Any, tp: int = 1, model_fn: Any = Model, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return initialize_parallel_model(
        neuronx_distributed_config(tensor_parallel_size=tp, activation_checkpoint_config=chosen), model_fn, **kwargs
    )


def step(model: nn.Module, x: torch.Tensor) -> tuple[float, list[list[torch.Tensor]]]:
    """The loss, and each rank's gradient of each parameter, from one program."""
    xm.set_rng_state(7)
    torch_xla.sync()
    loss = model.run_train(x.to("xla"))  # type: ignore[operator]
    torch_xla.sync()
    return loss.item(), [sharded.shards(p.grad) for p in model.parameters()]  # type: ignore[arg-type]


def assert_same(found: tuple[float, Any], expected: tuple[float, Any]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for a, b in zip(found[1], expected[1], strict=True):
        for s, t in zip(a, b, strict=True):
            torch.testing.assert_close(s, t, rtol=1e-5, atol=1e-6 * max(1e-3, t.abs().max().item()))


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("layers", "tp", "sequence_parallel"), [(8, 1, False), (3, 2, True), (3, 2, False)])
def test_same_gradients_from_less_memory(nxd: Nxd, layers: int, tp: int, sequence_parallel: bool) -> None:
    """With dropout, whose masks must be the same in both passes.

    What is saved is, for all layers but the one that is being computed again, what lies between its input and its output.
    """
    nxd(tp, tp=tp)
    parts = tp if sequence_parallel else 1
    x = torch.randn(SEQ // parts, ROWS, HIDDEN)
    steps, memory, tanhs, dots = [], [], [], []
    for chosen in (None, Layer):
        steps.append(step(make(chosen, tp, sequence_parallel=sequence_parallel, layers=layers), x))
        compiled = session.current().recent[-1].compiled
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        text = compiled.as_text()
        tanhs.append(text.count(" tanh("))
        dots.append(text.count(" dot("))
    assert_same(steps[1], steps[0])
    assert (
        tanhs == [layers, 2 * layers] and dots[1] >= dots[0] + layers
    )  # the compiled program has every layer's first product and tanh twice
    tokens = SEQ * ROWS
    kept = 4 * tokens * INNER // tp + 4 * tokens * HIDDEN // parts + tokens * HIDDEN // parts  # tanh(...), norm(x), dropout's mask
    saved = memory[0] - memory[1]
    assert 0.8 < saved / ((layers - 1) * kept) < 1.25
    assert memory[1] < 0.75 * memory[0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("drop", [0.1, 0.0])
def test_over_several_steps(nxd: Nxd, monkeypatch: pytest.MonkeyPatch, drop: float) -> None:
    """Played from a recording, with dropout and without: what it gives without replay, and without activation checkpoints."""
    nxd(2, tp=2)
    x = torch.randn(SEQ, ROWS, HIDDEN)
    found = []
    for chosen, replay in ((None, "0"), (Layer, "0"), (Layer, "1")):
        monkeypatch.setenv("NXD_JAX_REPLAY", replay)
        model = make(chosen, 2, layers=2, drop=drop)
        xm.set_rng_state(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(6):
            loss = model(x.to("xla"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert model.original_module().forward.played
    assert found[1] == found[2] and found[1] == pytest.approx(found[0], rel=1e-5)


def test_draws_of_a_fork_between_steps_leave_it_played(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker's states are others for each call: the module must not be recorded for that."""
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")
    nxd(1)
    model_parallel_xla_manual_seed(1)
    model = make(Layer, layers=2)
    for _ in range(10):
        with get_xla_rng_tracker().fork():
            torch.rand(2, device="xla").tolist()
        model(torch.ones(SEQ, ROWS, HIDDEN).to("xla")).backward()
        torch_xla.sync()
    assert model.original_module().forward.played >= 4


def test_hooks_of_parameters_run_once(nxd: Nxd) -> None:
    nxd(1)
    model, calls = make(Layer, layers=2), list[int]()
    model.original_module().layers[0].up.weight.register_hook(lambda g: calls.append(1))
    for _ in range(3):
        model(torch.randn(SEQ, ROWS, HIDDEN).to("xla")).backward()
    assert calls == [1, 1, 1]


SMALL: dict[str, Any] = {"drop": 0.5, "layers": 2, "size": 8, "inner": 16}


@pytest.mark.parametrize("chosen", [Up, (Up, nn.LayerNorm), {nn.Dropout}])
def test_one_class_or_several(nxd: Nxd, chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    nxd(2, tp=2)
    x = torch.randn(4, 3, 8)
    plain = make(None, 2, **SMALL)
    with caplog.at_level(logging.INFO, "nxd_jax"):
        model = make(chosen, 2, **SMALL)
    classes = tuple(chosen) if isinstance(chosen, (list, tuple, set)) else (chosen,)
    found = [m._checkpoint_wrapped_module for m in model.modules() if isinstance(m, NxDCheckpointWrapper)]
    expected = [m for m in model.modules() if isinstance(m, classes)]
    assert {id(m) for m in found} == {id(m) for m in expected} and len(found) == 2 * len(classes)
    assert f"activation checkpoints: {len(found)} modules of" in caplog.text
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert_same(step(model, x), step(plain, x))


def test_dropout_draws_the_same_numbers_again_and_the_next_ones_as_without(nxd: Nxd) -> None:
    nxd(1)
    x = torch.ones(4, 3, 8)
    states = []
    for chosen in (None, Layer):
        model = make(chosen, 1, **SMALL)
        first = step(model, x)[0]
        model.zero_grad()
        second = model.run_train(x.to("xla")).item()
        assert first != second
        states.append((first, pytest.approx(second, rel=1e-6), xm.get_rng_state()))
    assert states[0] == states[1]


# -- what wrapped modules take and give --------------------------------------------------------------------


class Nested(nn.Module):
    """Tensors deep in arguments and results, by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, pair: Any, *, table: Any = None, note: str = "") -> Any:
        x, (y, count) = pair
        out = x * self.gain + y.tanh() * count
        return {"out": out, "rest": [out.exp() if table is None else out * table["z"], None]}, note


@pytest.mark.parametrize("requires_grad", [True, False])
def test_nested_arguments_and_results(nxd: Nxd, requires_grad: bool) -> None:
    """Also if no argument requires a gradient: the module's parameters get theirs."""
    nxd(1)
    found = []
    for wrap in (lambda m: m, checkpoint_wrapper):
        module = wrap(Nested()).to("xla")
        x, y, z = (torch.tensor(v).to("xla").requires_grad_(requires_grad) for v in ([1.0, 2.0], [0.5, 0.1], [3.0, 4.0]))
        tree, note = module((x, (y, 3)), table={"z": z}, note="n")
        assert note == "n" and tree["rest"][1] is None
        (tree["out"].sum() + tree["rest"][0].square().sum()).backward()
        grads = [t.grad for t in (x, y, z, *module.parameters())]
        found.append([None if g is None else g.tolist() for g in grads])
    assert found[1] == [g if g is None else pytest.approx(g) for g in found[0]] and found[0][3] is not None


def test_without_gradients_it_is_a_plain_call(nxd: Nxd) -> None:
    nxd(1)
    module = checkpoint_wrapper(nn.Linear(2, 2)).to("xla")
    x = torch.ones(1, 2).to("xla")
    with torch.no_grad():
        assert not module(x).requires_grad
    assert module(x).requires_grad
    module.requires_grad_(False)
    assert not module(x).requires_grad


def test_results_whose_tensors_autograd_would_not_see(nxd: Nxd) -> None:
    nxd(1)

    @dataclasses.dataclass
    class Result:
        out: torch.Tensor

    class Module(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Result(super().forward(x))

    with pytest.raises(
        TypeError, match="Module computes its activations again and returns a Result, whose tensors would get no gradients: return a tensor"
    ):
        checkpoint_wrapper(Module(2, 2)).to("xla")(torch.ones(1, 2).to("xla"))


def test_preserve_rng_state_can_be_turned_off(nxd: Nxd) -> None:
    nxd(1)
    x = torch.ones(64, 8).to("xla")
    for preserve in (True, False):
        module = checkpoint_wrapper(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), preserve_rng_state=preserve).to("xla")
        out = module(x)
        out.sum().backward()
        same = torch.allclose(module.get_parameter("_checkpoint_wrapped_module.0.bias").grad.cpu(), (out != 0).sum(0).cpu() * 2.0)
        assert same == preserve


# -- "full" ----------------------------------------------------------------------------------------------


def llama(**kwargs: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="eager",
        **kwargs,
    )
    return transformers.LlamaForCausalLM(config)


def test_full_is_every_transformer_layer(nxd: Nxd) -> None:
    nxd(1)
    ids = torch.tensor([[1, 2, 3, 4]]).to("xla")
    plain, model = make(None, 1, llama), make("full", 1, llama)
    wrapped = [type(m._checkpoint_wrapped_module).__name__ for m in model.modules() if isinstance(m, NxDCheckpointWrapper)]
    assert wrapped == ["LlamaDecoderLayer"] * 2 and type(model.model.layers[0]) is NxDCheckpointWrapper
    assert plain.config.use_cache and not model.config.use_cache  # a layer that is computed twice would write to it twice
    losses = [m.run_train(input_ids=ids, labels=ids).item() for m in (plain, model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), rtol=1e-5, atol=1e-8)
    with pytest.raises(
        ValueError, match="LlamaDecoderLayer computes its activations again .* was given a key-value cache, .* set config.use_cache = False"
    ):
        model.run_train(input_ids=ids, labels=ids, use_cache=True)
    assert model.run_eval(input_ids=ids, use_cache=True).past_key_values is not None


def test_full_for_an_unknown_model(nxd: Nxd) -> None:
    nxd(1)
    with pytest.raises(
        RuntimeError, match="'full' does not know which modules of Model are its transformer layers: .* Give the class of the layers"
    ):
        make("full", 1, **SMALL)


def test_a_class_that_the_model_does_not_have(nxd: Nxd) -> None:
    nxd(1)
    with pytest.raises(ValueError, match="the model has no module of class Conv2d, GELU, so no activation would be computed again"):
        make([nn.Conv2d, nn.GELU], 1, **SMALL)


def test_a_list_of_layers(nxd: Nxd) -> None:
    """In a pipeline's manual mode the layers of the list are wrapped; gradients are the same."""

    class First(nn.Linear):
        def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            return super().forward(inputs[0])

    class Middle(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x))

    def gradients(chosen: Any) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        config = neuronx_distributed_config(
            pipeline_parallel_size=2,
            activation_checkpoint_config=chosen,
            pipeline_config={"manual_pp_partition": True, "num_microbatches": 2, "manual_pp_loss_fn": nn.functional.mse_loss},
        )
        model = initialize_parallel_model(config, lambda: [First(4, 4), Middle(4, 4), Middle(4, 4), nn.Linear(4, 1)])
        draw = torch.Generator().manual_seed(1)
        model.run_train(inputs=torch.randn(4, 4, generator=draw), labels=torch.randn(4, 1, generator=draw))
        wrapped = sum(isinstance(m, NxDCheckpointWrapper) for m in model.modules())
        return wrapped, {name: p.grad.cpu() for name, p in model.named_parameters()}

    nxd(2, pp=2)
    none, expected = gradients(None)
    two, found = gradients(Middle)
    assert (none, two) == (0, 2)
    assert len(found) == len(expected) == 8
    for (name, value), wanted in zip(found.items(), expected.values(), strict=True):
        torch.testing.assert_close(value, wanted, msg=lambda m, n=name: f"{n}: {m}")
