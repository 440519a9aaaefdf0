"""Outputs of modules replaced where masks say so: values, arguments, errors, and graphs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from nxd_jax.utils.tensor_replacement import modify_model_for_tensor_replacement, patch_forward_with_additional_args
from nxd_jax.utils.tensor_replacement.registry import RuntimeRegister


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found = ["first", "rest.0"]
    monkeypatch.setattr(RuntimeRegister, "module_superset", found)
    yield found
    RuntimeRegister.clear_runtime_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = nn.Sequential(nn.Linear(4, 5))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.rest(self.first(x).relu()) * scale


def given(device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    tensors = [torch.randn(2, 4), torch.randn(2, 5)]
    return [t.to(device) for t in tensors], [(torch.rand(2, n) > 0.5).to(device) for n in (4, 5)]


def replaced(model: Net, x: torch.Tensor, tensors: list[torch.Tensor], masks: list[torch.Tensor], scale: float) -> torch.Tensor:
    """By hand."""
    first = torch.where(masks[0], tensors[0], nn.functional.linear(x, model.first.weight, model.first.bias)).relu()
    last = nn.functional.linear(first, model.rest[0].weight, model.rest[0].bias)
    return torch.where(masks[1], tensors[1], last) * scale


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_values(device: str) -> None:
    model, x = Net().to(device), torch.randn(2, 3).to(device)
    same, hooks = modify_model_for_tensor_replacement(model)
    assert same is model and list(hooks) == ["first", "rest.0"]
    tensors, masks = given(device)
    torch.testing.assert_close(model(x, 2.0, *tensors, *masks), replaced(model, x, tensors, masks, 2.0))
    none = [torch.zeros_like(m) for m in masks]
    torch.testing.assert_close(model(x, 1.0, *tensors, *none), replaced(model, x, tensors, none, 1.0))
    every = [torch.ones_like(m) for m in masks]
    assert torch.equal(model(x, 1.0, *tensors, *every).cpu(), tensors[1].cpu())
    numbers = [m.int() * 3 for m in masks]
    torch.testing.assert_close(model(x, 2.0, *tensors, *numbers), replaced(model, x, tensors, masks, 2.0))
    for hook in hooks.values():
        hook.remove()
    torch.testing.assert_close(model(x, 1.0, *tensors, *every), replaced(model, x, tensors, none, 1.0))


@pytest.mark.parametrize("played", [False, True])
def test_copies_have_their_own_weights(played: bool) -> None:
    model, x = Net(), torch.randn(2, 3)
    if played:
        torch_bridge.optimize(model)
    modify_model_for_tensor_replacement(model)
    new = copy.deepcopy(model)
    with torch.no_grad():
        new.rest[0].weight.mul_(2)
    tensors, masks = given()
    torch.testing.assert_close(new(x, 1.0, *tensors, *masks), replaced(new, x, tensors, masks, 1.0))
    torch.testing.assert_close(model(x, 1.0, *tensors, *masks), replaced(model, x, tensors, masks, 1.0))


def test_gradients_flow_around_what_is_replaced() -> None:
    model, x = Net(), torch.randn(2, 3)
    modify_model_for_tensor_replacement(model)
    (a, b), (ma, mb) = given()
    model(x, 1.0, a, b, torch.ones_like(ma), torch.zeros_like(mb)).sum().backward()
    assert model.first.weight.grad.abs().max() == 0 and model.rest[0].weight.grad.abs().max() > 0


def test_the_dtype_and_shape_stay() -> None:
    """Upstream's where() would give float32, and the shape of the larger."""
    model = Net().bfloat16()
    modify_model_for_tensor_replacement(model)
    (a, b), (ma, mb) = given()
    x = torch.randn(2, 3).bfloat16()
    assert model(x, 1.0, a, b, ma, mb).dtype == torch.bfloat16
    assert model(x, 1.0, a[:1], b, ma[0], mb).shape == (2, 5)
    with pytest.raises(RuntimeError, match="expand|broadcast|dimension"):
        model(x[:1], 1.0, a, b, ma, mb)
    with pytest.raises(RuntimeError, match="expand|broadcast|dimension"):
        model(x, 1.0, a[:, :3], b, ma, mb)


def test_the_registry_is_empty_after_a_forward() -> None:
    model = patch_forward_with_additional_args(Net(), ["first", "rest.0"])
    seen: list[Any] = []
    model.first.register_forward_pre_hook(lambda *_: seen.append(dict(RuntimeRegister._tr_runtime_list)))
    tensors, masks = given()
    model(torch.zeros(2, 3), 1.0, *tensors, *masks)
    assert list(seen[0]) == ["first", "rest.0"] and seen[0]["first"] is not tensors[0] and torch.equal(seen[0]["first"], tensors[0])
    assert RuntimeRegister._tr_runtime_list == RuntimeRegister._tr_mask_list == {}
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 9), 1.0, *tensors, *masks)
    assert RuntimeRegister._tr_runtime_list == RuntimeRegister._tr_mask_list == {}


def test_names_of_arguments() -> None:
    model, x = Net(), torch.randn(2, 3)
    modify_model_for_tensor_replacement(model)
    assert inspect.ismethod(model.forward) and model.forward.__name__ == "forward"
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale", "tensor_first", "tensor_rest_0", "mask_first", "mask_rest_0"]
    (a, b), (ma, mb) = given()
    expected = model(x, 3.0, a, b, ma, mb)
    named = {"tensor_first": a, "tensor_rest_0": b, "mask_first": ma, "mask_rest_0": mb}
    assert torch.equal(model(x, 3.0, **named), expected)
    assert torch.equal(model(x=x, scale=3.0, **named), expected)
    assert torch.equal(model(x, a, b, ma, mb, scale=3.0), expected)


def test_in_a_graph() -> None:
    model, x = Net(), torch.randn(2, 3)
    modify_model_for_tensor_replacement(model)
    tensors, masks = given()
    graph = torch_bridge.capture(model, x, 2.0, *tensors, *masks)
    tensors, masks = given()
    (found,) = graph(*model.parameters(), x, *tensors, *masks)
    torch.testing.assert_close(found, replaced(model, x, tensors, masks, 2.0))


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_another_number_of_tensors(count: int) -> None:
    model = Net()
    modify_model_for_tensor_replacement(model)
    text = rf"expected 4 trailing replacement args .*\['first', 'rest.0'\]\) after all of forward's own \(x, scale\), got {count}"
    with pytest.raises(ValueError, match=text):
        model(torch.zeros(2, 3), 1.0, *[torch.zeros(1)] * count)


def test_errors(names: list[str]) -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"Expected 2 tensors and 2 masks, got 1 and 2: one of each for \['first', 'rest.0'\]"):
        RuntimeRegister.register_runtime_args([torch.zeros(1)], [torch.zeros(1)] * 2)
    with pytest.raises(TypeError, match=r"the tensor for first must be a torch.Tensor, got int"):
        RuntimeRegister.register_runtime_args([1, torch.zeros(1)], [torch.zeros(1)] * 2)
    with pytest.raises(TypeError, match=r"the mask for rest.0 must be a torch.Tensor, got str"):
        RuntimeRegister.register_runtime_args([torch.zeros(1)] * 2, [torch.zeros(1), "all"])
    modify_model_for_tensor_replacement(model)
    with pytest.raises(ValueError, match=r"no tensor and mask for first: call the model itself"):
        model.first(torch.zeros(2, 3))
    names[:] = ["rest.7"]
    with pytest.raises(ValueError, match=r"has no modules \['rest.7'\]"):
        modify_model_for_tensor_replacement(Net())
    names[:] = ["0"]
    pair, _ = modify_model_for_tensor_replacement(nn.Sequential(Pair()))
    with pytest.raises(TypeError, match=r"0 gives a tuple: only modules that give one tensor can be replaced"):
        pair(torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_nothing_to_replace(names: list[str]) -> None:
    names.clear()
    RuntimeRegister.register_runtime_args([], [])
    model, hooks = modify_model_for_tensor_replacement(Net())
    assert hooks == {} and model(torch.zeros(2, 3), 1.0).shape == (2, 5)
