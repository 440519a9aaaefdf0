"""Tensors captured by hooks and by hand: names, order, values, what a second forward replaces, and what is left afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from nxd_jax.parallel_layers.layers import ColumnParallelLinear
from nxd_jax.utils.tensor_capture import (
    disable_tensor_capture,
    enable_tensor_capture,
    get_available_modules,
    get_captured_tensors_dict,
    register_tensor,
)
from nxd_jax.utils.tensor_capture.model_modification import (
    find_available_modules,
    modify_hf_eager_model_for_tensor_capture,
    restore_model,
)
from nxd_jax.utils.tensor_capture.registry import CapturedModelInfo, TensorRegistry
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import per_rank


@pytest.fixture(autouse=True)
def registry() -> Iterator[TensorRegistry]:
    found = TensorRegistry.get_instance()
    yield found
    found.clear()
    found.enabled = False


class Net(nn.Module):
    """Three layers, the second with what the first one gave under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
            register_tensor("after", x)
        return x


@dataclass
class Result:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...]
    note: str = "said"


class Gives(nn.Module):
    """Gives what it is made with, of its input."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor, scale: Any = None, **kwargs: Any) -> Any:
        return self.make(x)


def shown(make: Any, *args: Any, inputs: bool = False, **kwargs: Any) -> dict[str, torch.Tensor]:
    """What is captured of a module that gives this."""
    model = nn.ModuleDict({"m": Gives(make)})
    enable_tensor_capture(model, ["m"], capture_inputs=inputs)
    model["m"](*args, **kwargs)
    return get_captured_tensors_dict()


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_outputs_inputs_and_manual_tensors(device: str) -> None:
    model, x = Net().to(device), torch.randn(2, 4).to(device)
    assert enable_tensor_capture(model, ["layers.1", "layers.0"], capture_inputs=True) is model
    y = model(x)
    found = get_captured_tensors_dict()
    first = model.layers[0](x)
    second = model.layers[1](first.relu())
    expected = {
        "layers.1.inputs.0": first.relu(),
        "layers.1.outputs": second,
        "layers.0.inputs.0": x,
        "layers.0.outputs": first,
        "manual_after": first.relu(),
        "manual_after_1": second.relu(),
        "manual_after_2": y,
    }
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert not tensor.requires_grad and tensor.device.type == device
        torch.testing.assert_close(tensor.cpu(), expected[name].detach().cpu())
    y.sum().backward()
    assert model.layers[0].weight.grad is not None


def test_every_forward_replaces_the_last() -> None:
    """Upstream keeps what the first forward registered by hand, and goes on counting names."""
    model = enable_tensor_capture(Net(), ["layers.2"], max_tensors=2)
    for _ in range(3):
        x = torch.randn(2, 4)
        model(x)
        found = get_captured_tensors_dict()
        assert list(found) == ["layers.2.outputs", "manual_after", "manual_after_1"]
        torch.testing.assert_close(found["manual_after"], model.layers[0](x).relu())


def test_tensors_registered_between_forwards_stay_for_the_next() -> None:
    model = enable_tensor_capture(Net(), [], max_tensors=10)
    register_tensor("before", torch.ones(1))
    model(torch.randn(2, 4))
    assert list(get_captured_tensors_dict()) == ["manual_before", "manual_after", "manual_after_1", "manual_after_2"]
    register_tensor("between", torch.ones(1))
    assert len(get_captured_tensors_dict()) == 5
    model(torch.randn(2, 4))
    assert list(get_captured_tensors_dict()) == ["manual_between", "manual_after", "manual_after_1", "manual_after_2"]


def test_a_forward_that_fails() -> None:
    model = enable_tensor_capture(Net(), ["layers.0"])
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))
    model(torch.randn(2, 4))
    assert list(get_captured_tensors_dict()) == ["layers.0.outputs", "manual_after", "manual_after_1", "manual_after_2"]


def test_copies() -> None:
    """Changes of the tensor afterwards do not count."""
    enable_tensor_capture(nn.Linear(1, 1), [])
    x = torch.zeros(2, requires_grad=True)
    register_tensor("x", x)
    with torch.no_grad():
        x.add_(1)
    found = get_captured_tensors_dict()["manual_x"]
    assert found.tolist() == [0, 0] and not found.requires_grad


CONTAINERS = {
    "tuple": (lambda x: (x, x + 1), ["0", "1"]),
    "list": (lambda x: [x, None, x + 1], ["0", "2"]),
    "dict": (lambda x: {"a": x, "b": (x + 1, "text")}, ["a", "b.0"]),
    "dataclass": (lambda x: Result(x, (x + 1, x + 2)), ["logits", "states.0", "states.1"]),
    "object": (lambda x: SimpleNamespace(logits=x, _hidden=x, note="text"), ["logits"]),
    "many": (lambda x: tuple(x + i for i in range(12)), [str(i) for i in range(12)]),
    "no tensor": (lambda x: 3, []),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers(kind: str) -> None:
    make, names = CONTAINERS[kind]
    found = shown(make, torch.zeros(2))
    assert list(found) == [f"m.outputs.{name}" for name in names]
    assert [float(t[0]) for t in found.values()] == [float(i) for i in range(len(names))]


def test_keyword_arguments() -> None:
    found = shown(lambda x: x, torch.zeros(1), inputs=True, scale=torch.ones(2), mask=[torch.ones(3)])
    assert list(found) == ["m.inputs.0", "m.inputs.kwargs.mask.0", "m.inputs.kwargs.scale", "m.outputs"]
    assert [t.numel() for t in found.values()] == [1, 3, 2, 1]


def test_names_of_modules() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Sequential(nn.ReLU())]), nn.Identity())
    assert get_available_modules(model) == ["0", "0.0", "0.1", "0.1.0", "1"]
    assert find_available_modules(model[0], "p") == ["p.0", "p.1", "p.1.0"]
    shared = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(a=shared, b=shared))
    enable_tensor_capture(model, ["b"])
    model(torch.zeros(1, 2))
    assert list(get_captured_tensors_dict()) == ["b.outputs"]


def test_disabling_takes_the_hooks_away(registry: TensorRegistry) -> None:
    """Upstream forgets them first, so that they stay."""
    model = Net()
    enable_tensor_capture(model, ["layers.0"])
    model(torch.randn(2, 4))
    assert disable_tensor_capture(model) is model
    assert not registry.enabled and get_captured_tensors_dict() == {}
    modules = [model, *model.layers]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    model(torch.randn(2, 4))
    assert get_captured_tensors_dict() == {}
    enable_tensor_capture(model, ["layers.1"])
    enable_tensor_capture(model, ["layers.1"])
    assert len(model.layers[1]._forward_hooks) == 1
    other = enable_tensor_capture(Net(), ["layers.0"])
    assert not model.layers[1]._forward_hooks
    other(torch.randn(2, 4))
    restore_model(other)
    assert len(get_captured_tensors_dict()) == 4  # what was captured stays
    register_tensor("x", torch.zeros(1))
    assert len(get_captured_tensors_dict()) == 4


def test_the_registry(registry: TensorRegistry) -> None:
    assert TensorRegistry.get_instance() is registry
    registry.configure(enabled=True, modules=["linear"], max_tensors=3, capture_inputs=True)
    assert isinstance(registry.model_info, CapturedModelInfo) and registry.model_info.modules_to_capture == ["linear"]
    for name in ("linear.outputs", "linear.inputs.0", "linear", "linear.other", 5, "x", "too many"):
        registry.register_tensor(name, torch.zeros(2))
    assert list(registry.get_captured_tensors_dict()) == [
        "linear.inputs.0",
        "linear.outputs",
        "linear",
        "manual_linear.other",
        "manual_tensor_1",
        "manual_x",
    ]
    assert (registry.get_monitored_tensor_count(), registry.get_manual_tensor_count(), registry.get_total_tensor_count()) == (3, 3, 6)
    assert list(registry.get_module_tensors()) == ["linear.outputs", "linear.inputs.0", "linear"]
    registry.clear()
    info = registry.model_info
    assert (info.modules_to_capture, info.max_tensors, info.capture_inputs, registry.get_total_tensor_count()) == ([], 10, False, 0)


def test_names_that_are_taken(registry: TensorRegistry) -> None:
    registry.configure(enabled=True)
    for i, name in enumerate(("x_1", "x", "x", "x")):
        registry.register_tensor(name, torch.tensor(i))
    assert {key: int(t) for key, t in registry.get_manual_tensors().items()} == {
        "manual_x_1": 0,
        "manual_x": 1,
        "manual_x_2": 2,
        "manual_x_3": 3,
    }


def test_expert_indices_come_stacked(registry: TensorRegistry) -> None:
    registry.configure(enabled=True)
    for name in ("a", "moe_auto_0", "moe_auto_1"):
        registry.register_tensor(name, torch.arange(3))
    for _ in range(2):
        found = registry.get_manual_tensors()
        assert list(found) == ["manual_a", "auto_moe_stats.expert_index"] and found["auto_moe_stats.expert_index"].shape == (2, 3)
    assert registry.get_manual_tensor_count() == 3


class WithHead(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.lm_head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x)


def test_every_ranks_part(nxd: Nxd) -> None:
    nxd(4, tp=4)
    model = enable_tensor_capture(nn.Sequential(ColumnParallelLinear(6, 8, gather_output=False)).to("xla"), ["0"], capture_inputs=True)
    x = torch.randn(2, 6)
    y = model(x.to("xla"))
    found = get_captured_tensors_dict()
    for part, own in zip(per_rank(found["0.outputs"]), per_rank(y), strict=True):
        assert part.shape == (2, 2)
        torch.testing.assert_close(part, own)
    assert not torch.equal(per_rank(found["0.outputs"])[0], per_rank(found["0.outputs"])[3])
    torch.testing.assert_close(per_rank(found["0.inputs.0"])[3], x)


@pytest.mark.parametrize("keep", [False, True])
def test_padding_of_a_head_is_cut(nxd: Nxd, keep: bool) -> None:
    """Inputs are left as they are, though upstream cuts them, too; so is a plain Linear, for which it fails."""
    nxd(4, tp=4)
    head = ColumnParallelLinear(12, 10, bias=False, gather_output=True, pad=True, keep_padded_output=keep)
    model = enable_tensor_capture(WithHead(head).to("xla").eval(), ["lm_head"], capture_inputs=True)
    y = model(torch.randn(2, 12, device="xla"))
    found = get_captured_tensors_dict()
    assert found["lm_head.inputs.0"].shape == (2, 12)
    assert found["lm_head.outputs"].shape == y.shape == (2, 12 if keep else 10)
    padded = SimpleNamespace(pad=True, pad_size=2, output_size=12, keep_padded_output=keep, sequence_parallel_enabled=False)
    registry = TensorRegistry.get_instance()
    registry.register_tensor("lm_head.outputs", torch.zeros(2, 12), padded)
    assert get_captured_tensors_dict()["lm_head.outputs"].shape[-1] == (12 if keep else 10)


def test_a_plain_head() -> None:
    model = enable_tensor_capture(WithHead(nn.Linear(3, 7)), ["lm_head"])
    model(torch.zeros(1, 3))
    assert get_captured_tensors_dict()["lm_head.outputs"].shape == (1, 7)


def test_a_head_with_sequence_parallelism(nxd: Nxd) -> None:
    nxd(2, tp=2)
    head = ColumnParallelLinear(4, 8, bias=False, gather_output=False, sequence_parallel_enabled=True)
    model = enable_tensor_capture(WithHead(head).to("xla"), ["lm_head"])
    with pytest.raises(ValueError, match=r"lm_head runs with sequence parallelism: .*sequence_parallel_enabled=False"):
        model(torch.zeros(2, 1, 4, device="xla"))


def test_in_a_graph() -> None:
    """Captured tensors that forward returns are results of the graph, which computes what eager torch does."""

    class Returns(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), get_captured_tensors_dict()

    x = torch.randn(2, 4)
    model = enable_tensor_capture(Returns(), ["layers.1"], max_tensors=1)
    y, expected = model(x)
    graph = torch_bridge.capture(model, x)
    found = graph(*model.parameters(), x)
    assert graph.signature.n_outs == 3
    torch.testing.assert_close(list(found), [y, *expected.values()])
    jax_y, jax_found = torch_bridge.to_jax(model)({n: p.detach().numpy() for n, p in model.named_parameters()}, {}, None, x.numpy())[0]
    assert list(jax_found) == ["layers.1.outputs", "manual_after"]
    torch.testing.assert_close(torch.tensor(jax_y.tolist()), y.detach())


class Decoder(nn.Module):
    """Names as transformers has them; its layer gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layer": Gives(lambda x: (x + 1, [x + 2]))})
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model["layer"](x, scale=x * 2)[0])


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_files_of_every_step(tmp_path: Path, device: str) -> None:
    folder = tmp_path / "made" / "here"
    model, hooks, forward = modify_hf_eager_model_for_tensor_capture(Decoder().to(device), ["layer", "head"], folder, capture_inputs=True)
    inputs = [torch.randn(1, 2), torch.randn(1, 2)]
    results = [model(x.to(device)).detach().cpu() for x in inputs]
    names = [f"layer_{name}" for name in ("inputs_0", "inputs_kwargs_scale", "output_0", "output_1_0")] + ["head_inputs_0", "head_output"]
    starts = ["captured_tensors_cte_step_1_module_", "captured_tensors_tkg_step_2_module_"]
    assert {path.name for path in folder.iterdir()} == {f"{start}{name}.pt" for start in starts for name in names}
    for start, x, y in zip(starts, inputs, results, strict=True):
        for name, expected in (
            ("layer_inputs_kwargs_scale", x * 2),
            ("layer_output_1_0", x + 2),
            ("head_inputs_0", x + 1),
            ("head_output", y),
        ):
            torch.testing.assert_close(torch.load(folder / f"{start}{name}.pt"), expected)
    for hook in hooks:
        hook.remove()
    model.forward = forward
    model(inputs[0].to(device))
    assert len(list(folder.iterdir())) == 12
    with pytest.raises(ValueError, match=r"has no modules \['model.layer'\]"):
        modify_hf_eager_model_for_tensor_capture(Decoder(), ["model.layer"], tmp_path)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"modules_to_capture": ["layers.0", "layers.9", "head"]},
            r"has no modules \['layers.9', 'head'\]: get_available_modules\(model\) gives .* 4 modules",
        ),
        ({"modules_to_capture": [""]}, r"has no modules \[''\]"),
        ({"max_tensors": -1}, "max_tensors=-1 must be 0 or more, or None"),
    ],
)
def test_errors(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        enable_tensor_capture(Net(), **given)
