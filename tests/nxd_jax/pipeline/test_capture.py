"""Tracing by running a model without values: what Python may do between layers, and what is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from nxd_jax.parallel_layers import mappings
from nxd_jax.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_jax.pipeline import capture
from nxd_jax.pipeline.call_recorder import storage_key
from nxd_jax.pipeline.capture import Spec
from nxd_jax.pipeline.layer_nodes import layer_of
from nxd_jax.pipeline.partition import cut_after, partition_traced_model, stage_numbers
from nxd_jax.pipeline.trace import trace_model
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import rank_numbers

Forward = Callable[..., Any]


class Net(nn.Module):
    """Two layers, with a forward of the test's."""

    def __init__(self, forward: Forward, layer: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)):
        super().__init__()
        self.first, self.second = layer(), layer()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("count", torch.zeros(()))
        self.table = torch.arange(4.0)  # no buffer
        self.run = forward

    def forward(self, x: torch.Tensor, flag: bool = True) -> Any:
        return self.run(self, x)


def captured(model: nn.Module, *shape: int, **options: Any) -> Any:
    options = {"layers": ["first", "second"], "leaf_modules": [], **options}
    return capture.capture(model, {"x": Spec(shape or (2, 4), torch.float32)}, {}, **options)


def agrees(forward: Forward, **options: Any) -> Any:
    """The captured model gives what the model does, and the same gradients."""
    torch.manual_seed(0)
    model = Net(forward).to("xla")
    found = captured(model, **options)
    x = torch.randn(2, 4).to("xla")
    results = []
    for run in (model, found):
        model.zero_grad()
        torch.manual_seed(1)
        out = run(x.clone())
        loss = out if isinstance(out, torch.Tensor) else sum(t.sum() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        if loss.requires_grad:
            loss.square().sum().backward()
        results.append((out, [p.grad for p in model.parameters()], model.count.clone()))
        model.count.zero_()
    torch.testing.assert_close(*pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, results[::-1]))
    return found


def views(model: Any, x: Any) -> Any:
    h = model.first(x)
    a, b = h.chunk(2, dim=-1)
    first, second = torch.stack([a, b])
    for row in h:
        first = first + row[:2]
    return torch.cat([first, second], -1).T.mT[..., None].squeeze(-1)


def without_gradients(model: Any, x: Any) -> Any:
    h = model.first(x)
    with torch.no_grad():
        factor = h.abs().amax() + model.scale.sum()
    with torch.no_grad(), torch.enable_grad():
        h = h * model.scale
    return model.second(h / factor) + h.detach()


def in_place(model: Any, x: Any) -> Any:
    h = model.first(x).clone()
    part = h[:, :2]
    part.mul_(2)  # the view's storage is h's
    h[0] = 0
    h += 1
    model.count.add_(1)
    return model.second(h)


def attributes(model: Any, x: Any) -> Any:
    positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    return model.second(model.first(x) * model.table.to(x.device) + positions) * torch.tensor(2.0, device=x.device)


class Double(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: type) -> torch.Tensor:
        return x * kind(2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g * 5, None


def own_gradient(model: Any, x: Any) -> Any:
    return model.second(Double.apply(model.first(x), float))


class Negative(Double):
    """One whose arguments a graph can say."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:  # type: ignore[override]
        return x * -factor


def another_gradient(model: Any, x: Any) -> Any:
    return model.second(Negative.apply(model.first(x), 2))


def branches(model: Any, x: Any) -> Any:
    h = model.first(x)
    if h.shape[0] > 1 and h.dtype.is_floating_point and len(h) == 2 and h.requires_grad:
        h = h + h.numel()
    return torch.where(h.sum() > 0, model.second(h), h)


def structures(model: Any, x: Any) -> Any:
    h = model.first(x)
    top = torch.max(h, dim=-1)
    return {"out": [model.second(h), (top.values, top.indices)], "size": 3, "none": None}


def dropped(model: Any, x: Any) -> Any:
    return nn.functional.dropout(model.first(x), 0.5, model.training)


@pytest.mark.parametrize(
    "forward", [views, without_gradients, in_place, attributes, own_gradient, another_gradient, branches, structures, dropped]
)
def test_it_computes_what_the_model_does(forward: Forward) -> None:
    agrees(forward)


def without_gradients_of_a_layer(model: Any, x: Any) -> Any:
    with torch.no_grad():
        h = model.first(x)
    return model.second(h)


def in_bfloat16(model: Any, x: Any) -> Any:
    with torch.autocast("xla", dtype=torch.bfloat16):
        h = model.first(x)
    return model.second(h.float()), h


def out_of_bfloat16(model: Any, x: Any) -> Any:
    with torch.autocast("xla", dtype=torch.bfloat16):
        with torch.autocast("xla", enabled=False):
            h = model.first(x)
        with torch.no_grad():
            return h, model.second(h)


@pytest.mark.parametrize("forward", [without_gradients_of_a_layer, in_bfloat16, out_of_bfloat16])
def test_layers_that_are_called_without_gradients_or_with_autocast(forward: Forward) -> None:
    found = agrees(forward)
    assert layer_of(found.first) is not found.first or layer_of(found.second) is not found.second


def test_a_layer_that_is_called_with_and_without_gradients() -> None:
    def forward(model: Any, x: Any) -> Any:
        h = model.first(x)
        with torch.no_grad():
            return model.first(h)

    with pytest.raises(
        RuntimeError, match="first is called 2 times, and gradients or autocast are switched around it in some of these calls only"
    ):
        captured(Net(forward))


def test_a_layer_that_leaves_gradients_switched_off() -> None:
    class Off(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(False)
            return super().forward(x)

    with pytest.raises(RuntimeError, match="its forward calls first, which leaves gradients or autocast switched on or off: put them back"):
        captured(Net(lambda model, x: model.first(x), lambda: Off(4, 4)))
    assert torch.is_grad_enabled()


def test_autocast_between_layers() -> None:
    def forward(model: Any, x: Any) -> Any:
        h = model.first(x)
        with torch.autocast("xla", dtype=torch.bfloat16):
            h = h @ model.first.weight.T
        return model.second(h.float())

    model = Net(forward).to("xla")
    x = torch.randn(2, 4).to("xla")
    found = captured(model)
    torch.testing.assert_close(found(x).cpu(), model(x).cpu())
    assert not torch.equal(found(x).cpu(), model.second(model.first(x) @ model.first.weight.T).cpu())


def layer_drop(model: Any, x: Any) -> Any:
    h = model.first(x)
    return h if torch.rand([]) < 0.5 else model.second(h)


def item(model: Any, x: Any) -> Any:
    return model.first(x) * x.sum().item()


def hook(model: Any, x: Any) -> Any:
    h = model.first(x)
    h.register_hook(lambda g: g * 2)
    return h


def data_set(model: Any, x: Any) -> Any:
    h = model.first(x)
    h.data = h.data * 2
    return h


class Cache:
    """Neither a tensor nor a dataclass."""


def cache(model: Any, x: Any) -> Any:
    return model.keeper(model.first(x), Cache())


def mapped(model: Any, x: Any) -> Any:
    return torch.vmap(model.first)(x)


def unseen(model: Any, x: Any) -> Any:
    return model.first(x) + torch.FloatTensor(4).to(x.device)


def unregistered(model: Any, x: Any) -> Any:
    return model.first(x) * model.table_of_parameters[0]


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (
            layer_drop,
            r"its forward reads the value of a tensor \(__bool__\): compute with torch.where \(.*test_capture.py:\d+: return h if torch.rand",
        ),
        (item, r"reads the value of a tensor \(item\)"),
        (hook, "calls register_hook of a tensor: do it in a module that is kept whole"),
        (data_set, "sets .data of a tensor: make a new tensor"),
        (cache, "hands on an object of type Cache: .*use_cache=False"),
        (mapped, "cannot be traced by running it without values"),
        (unseen, "that no torch function made: name the function that made it in autowrap_functions"),
        (unregistered, r"uses a parameter of shape \(4,\) that is not registered"),
    ],
)
def test_what_is_refused(forward: Forward, text: str) -> None:
    rank_numbers.prepare()  # which replaces some of torch's functions
    model = Net(forward)
    model.table_of_parameters = [nn.Parameter(torch.ones(4, device="xla"))]
    model.keeper = nn.Identity()
    with pytest.raises(RuntimeError, match=text):
        captured(model)


def written_earlier(model: Any, x: Any) -> Any:
    h = model.first(x)
    kept = h.clone()
    h = model.second(kept)
    kept.mul_(2)
    return h + kept


def written_in_one_stage(model: Any, x: Any) -> Any:
    h = model.second(model.first(x))
    h = h.clone()
    h[0].mul_(2)
    return h


def test_writes_of_another_stages_tensors_are_refused() -> None:
    found = captured(Net(written_earlier))
    cut_after(found, "first")
    capture.check_writes(found, stage_numbers(found))  # all of it is in the second stage
    found = captured(Net(written_earlier))
    cut_after(found, "second")
    with pytest.raises(
        RuntimeError,
        match=r"stage 1 of the pipeline writes a tensor in place \(mul_\) that stage 0 uses, too: a stage cannot change another's",
    ):
        capture.check_writes(found, stage_numbers(found))
    found = captured(Net(written_in_one_stage))
    cut_after(found, "first")
    capture.check_writes(found, stage_numbers(found))


def test_writes_of_tensors_that_are_gone_do_not_count() -> None:
    """What a layer makes next may lie in memory where a tensor that it wrote in place was."""

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            temporaries = [torch.zeros(3, device=x.device).add_(1) for _ in range(10)]
            written = set(map(storage_key, temporaries))
            del temporaries
            gc.collect()
            outs = [x + k for k in range(10)]
            return next((out for out in outs if storage_key(out) in written), outs[0])

    found = captured(Net(lambda m, x: m.second(m.first(x)), Layer))
    assert [node.name for node in found.graph.nodes if node.meta.get("writes")] == []


def test_a_layer_that_writes_its_input() -> None:
    model = Net(lambda model, x: model.second(h := model.first(x)) + h)
    model.second = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    found = captured(model)
    cut_after(found, "first")
    with pytest.raises(RuntimeError, match="stage 1 of the pipeline writes a tensor in place"):
        capture.check_writes(found, stage_numbers(found))


def test_stages_compute_what_the_model_does() -> None:
    torch.manual_seed(0)
    model = Net(without_gradients)
    found = captured(model)
    cut_after(found, "first")
    x = torch.randn(2, 4)
    torch.testing.assert_close(partition_traced_model(found)(x), model(x))


@dataclass
class Result:
    """As a layer may return it."""

    out: torch.Tensor
    extra: Any = None


class Returning(nn.Module):
    """A layer with a dataclass as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(self.linear(x), x.shape[0])


def test_layers_may_return_objects_with_fields() -> None:
    torch.manual_seed(0)
    model = Net(lambda model, x: (r := model.first(x)).out + model.second(r.out).out + r.extra, Returning)
    x = torch.randn(2, 4)
    torch.testing.assert_close(captured(model)(x), model(x))


class Refusing(nn.Module):
    """A container that reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_which_modules_are_nodes() -> None:
    model = Net(lambda model, x: model.second(model.first(x)), Refusing)

    def calls(**options: Any) -> list[Any]:
        return [node.target for node in captured(model, **options).graph.nodes if node.op == "call_module"]

    assert calls() == ["first", "second"]
    assert calls(layers=["first.inner", "second.inner"]) == ["first.inner", "second.inner"]
    assert calls(layers=["first.inner", "second.inner"], leaf_modules=["Refusing"]) == ["first", "second"]
    assert calls(layers=[], cuts=["first.inner"], leaf_modules=["Refusing"]) == ["first.inner", "second"]


class Looking(nn.Linear):
    """Looks at a value unless it is compiled, as masks of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 1e9).all()):
            return x
        return super().forward(x)


def test_a_whole_module_may_look_at_values_unless_it_is_compiled() -> None:
    model = Net(lambda model, x: model.second(model.first(x)), lambda: Looking(4, 4)).to("xla")
    x = torch.randn(2, 4).to("xla")
    torch.testing.assert_close(captured(model)(x).cpu(), model(x).cpu())


def test_chosen_functions_are_nodes(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = Net(lambda model, x: model.second(mappings.scatter_to_tensor_model_parallel_region(model.first(x))), lambda: nn.Linear(4, 4))
    model.second = nn.Linear(2, 4)
    nodes = captured(model, functions=[mappings]).graph.nodes
    assert [getattr(node.target, "__name__", "") for node in nodes if node.op == "call_function"] == [
        "scatter_to_tensor_model_parallel_region"
    ]


class ForkedDropout(nn.Module):
    def forward(self, x: Any) -> Any:
        with get_xla_rng_tracker().fork():
            return nn.functional.dropout(x, 0.5)


def test_a_fork_of_the_tracker_stays_in_its_module(nxd: Nxd) -> None:
    """A graph of operations would draw from the default state, tensor-parallel ranks alike."""
    nxd(2, tp=2)
    model_parallel_xla_manual_seed(1)
    model = Net(lambda model, x: model.second(model.drop(model.first(x))))
    model.drop = ForkedDropout()
    before = get_xla_rng_tracker().get_states()["model-parallel-rng"]
    with pytest.raises(
        RuntimeError, match=r"cannot be traced symbolically: its forward draws within get_xla_rng_tracker\(\).fork\(\).*leaf_modules"
    ):
        trace_model(model, input_names=["x"])
    assert "drop" in [node.target for node in captured(model).graph.nodes]
    after = get_xla_rng_tracker().get_states()["model-parallel-rng"]
    assert torch.equal(before.xla, after.xla) and torch.equal(before.cpu, after.cpu)


class Scaled(nn.Linear):
    """Draws numbers of the host's, which is for the layer alone to do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random() * float(np.random.rand())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_numbers_of_the_host_are_drawn_within_layers(draw: Callable[[], float]) -> None:
    """Which layers to leave out, say: a graph would have the same ones in every step."""

    def forward(model: Any, x: Any) -> Any:
        x = model.first(x)
        return model.second(x) if draw() < 2 else x

    model = Net(forward)
    with pytest.raises(RuntimeError, match=r"draws random numbers of Python's or NumPy's, which would be the same in every step"):
        trace_model(model, input_names=["x"])
    with pytest.raises(RuntimeError, match=r"draws random numbers of Python's or NumPy's between layers .*do that inside a module"):
        captured(model)
    assert captured(Net(lambda model, x: model.second(model.first(x)), lambda: Scaled(4, 4)))


@pytest.mark.parametrize("device", ["cpu", "meta", "xla"])
def test_the_model_stays_as_it_was(device: str) -> None:
    def forward(model: Any, x: Any) -> Any:
        model.kept = model.first(x)
        model.count.add_(1)
        return model.second(model.kept + torch.rand_like(x))

    model = Net(forward, lambda: Scaled(4, 4)).to(device)
    model.kept = None
    before = dict(model.state_dict(keep_vars=True))
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2), random.random(), torch.rand(2, device="xla").cpu()
    torch.manual_seed(3)
    random.seed(3)
    captured(model)
    torch.testing.assert_close((torch.rand(2), random.random(), torch.rand(2, device="xla").cpu()), expected)
    assert model.kept is None
    for name, t in model.state_dict(keep_vars=True).items():
        assert t is before[name] and t.device.type == device
    if device != "meta":
        assert model.count.item() == 0


def test_what_nobody_needs_is_left_out() -> None:
    def forward(model: Any, x: Any) -> Any:
        model.second(x)
        torch.zeros(3)
        h = model.first(x)
        h.add_(1)
        return h

    assert [node.op for node in captured(Net(forward)).graph.nodes] == ["placeholder", "call_module", "call_method", "output"]


def test_fields_are_taken_where_the_object_is_made() -> None:
    torch.manual_seed(0)
    model = Net(lambda model, x: model.second(model.first(x).out).out, Returning)
    found = captured(model)
    cut_after(found, "first")
    split = partition_traced_model(found)
    x = torch.randn(2, 4)
    assert isinstance(split.submod_0(x), torch.Tensor)
    torch.testing.assert_close(split(x), model(x))


def test_pieces_of_a_world_of_ranks(nxd: Nxd) -> None:
    nxd(2)
    agrees(views)
