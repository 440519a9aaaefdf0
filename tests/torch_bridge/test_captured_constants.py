"""What a captured module has next to its parameters, buffers and inputs: CPU tensors, values that follow from constants, modules under several names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge


class Net(nn.Module):
    """Its forward is a function of it and the input. part, alias: memory of a buffer and a weight, by other ways."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.same = self.layer
        self.register_buffer("state", torch.zeros(3))
        self.part = self.state[1:]
        self.alias = [self.layer.weight.data]
        self.own = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.own(self, x)


def check(forward: Callable[[Any, torch.Tensor], Any], calls: int = 2) -> Any:
    """The captured module gives what the module gives, call after call. Returns the graph."""
    net = Net(forward)
    graph: Any = torch_bridge.capture(net, torch.ones(2, 3))
    held = {n: t.detach().clone() for n, t in [*net.named_parameters(), *net.named_buffers()]}
    for k in range(calls):
        x = torch.randn(2, 3)
        found = graph(*held.values(), x)
        wanted = net(x.clone())
        outs = wanted if isinstance(wanted, tuple) else (wanted,)
        torch.testing.assert_close(found[: len(outs)], tuple(t.detach() for t in outs), msg=lambda text: f"call {k}: {text}")  # noqa: B023
        held.update(zip(graph.signature.mutated, found[len(outs) :], strict=True))
    for n, t in [*net.named_parameters(), *net.named_buffers()]:
        assert t.device.type == "cpu", n
        torch.testing.assert_close(held[n], t.detach())
    return graph


@torch.inference_mode()
def in_inference(m: Any, x: torch.Tensor) -> torch.Tensor:
    k = torch.zeros(3)
    x = x + k
    k.add_(1)
    return x * k


def of_numpys_memory(m: Any, x: torch.Tensor) -> torch.Tensor:
    array = np.zeros(3, np.float32)
    k = torch.from_numpy(array)
    x = x + k
    array[:] = 2
    return x * k


def taken_before_the_last_write(m: Any, x: torch.Tensor) -> torch.Tensor:
    k = torch.zeros(3)
    x = x + k
    k.add_(1)
    return x


def through_a_part_of_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.state.add_(x[0])
    x = x[:, 1:] + m.part
    m.part.mul_(x[0])
    m.part.sub_(x[1])
    return x


def by_a_part_of_a_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ m.alias[0].t()[:, :2] + m.same(x)[:, :2]


def split_by_shapes(m: Any, x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([[1, 1], [2, 1]], device=x.device)
    first, second = x.split([int(h * w) for h, w in sizes], dim=1)
    return first * sizes.prod(1).sum().item() + second[:, : sizes.tolist()[0][0]]


def chosen_by_a_mask(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(3, device=x.device) != 1
    return (
        x[:, mask]
        + x[:, torch.tensor([True, False, True])]
        + torch.arange(3, device=x.device).nonzero().shape[0]
        + m.layer(x)[:, mask.nonzero()[:, 0]]
    )


def read_and_written_on(m: Any, x: torch.Tensor) -> torch.Tensor:
    k = torch.ones(3, device=x.device)
    n = k.sum().item()
    k.add_(x[0])
    return k * n + torch.from_numpy(torch.arange(3.0, device=x.device).numpy())


def on_the_cpu_already(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x.cpu() * torch.ones(3) + x.to(torch.zeros(1, dtype=torch.float64)).float()


def constants_as_results(m: Any, x: torch.Tensor) -> Any:
    m.state = torch.full((3,), 2.0)
    m.layer.bias.data = torch.full((3,), 3.0)
    return torch.arange(3), m.alias[0], x


@pytest.mark.parametrize(
    "forward",
    [
        in_inference,
        of_numpys_memory,
        taken_before_the_last_write,
        through_a_part_of_a_buffer,
        by_a_part_of_a_weight,
        split_by_shapes,
        chosen_by_a_mask,
        read_and_written_on,
        on_the_cpu_already,
        constants_as_results,
    ],
)
def test_forwards_with_constants(forward: Any) -> None:
    check(forward)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_attributes_without_plain_bytes() -> None:
    net = Net(lambda m, x: x)
    net.sparse, net.quantized = torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch_bridge.capture(net, torch.ones(2, 3))
    net.own = lambda m, x: torch.sparse.mm(m.sparse, x.t())
    with pytest.raises(NotImplementedError, match="sparse"):
        torch_bridge.capture(net, torch.ones(2, 3))


def test_the_same_bytes_are_one_constant() -> None:
    graph = check(lambda m, x: x + torch.ones(3) + torch.ones(3) + torch.ones(3).double())
    assert len([n for n in graph.graph.nodes if n.op == "get_attr"]) == 2


def test_other_weights_are_seen_through_aliases() -> None:
    graph = check(by_a_part_of_a_weight)
    weight, bias, state, x = torch.randn(3, 3), torch.randn(3), torch.zeros(3), torch.randn(2, 3)
    torch.testing.assert_close(graph(weight, bias, state, x)[0], (x @ weight.t() * 2 + bias)[:, :2])


CLOSURE = torch.zeros(2, 3)


def writes_to_a_closure(m: Any, x: torch.Tensor) -> torch.Tensor:
    return CLOSURE.add_(x)


def fills_a_cpu_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, 4)
    out[:, :3] = x
    return out


def by_other_bits(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + m.alias[0].view(torch.int32)


def trains_statistics(m: Any, x: torch.Tensor) -> torch.Tensor:
    return STATISTICS(x)


STATISTICS = nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("forward", "kind", "text"),
    [
        (
            writes_to_a_closure,
            RuntimeError,
            r"writes values of the graph to a CPU tensor of shape \[2, 3\] .*: make it where the inputs are",
        ),
        (
            fills_a_cpu_tensor,
            RuntimeError,
            r"writes values of the graph to a CPU tensor of shape \[2, 3\] .*: make it where the inputs are",
        ),
        (trains_statistics, RuntimeError, r"writes values of the graph to a CPU tensor of shape \[3\]"),
        (by_other_bits, ValueError, r"shares memory with layer\.weight and is no plain view of it"),
        (lambda m, x: x * x.sum().item(), RuntimeError, "asked for the value"),
        (lambda m, x: x * m.layer.bias.sum().item(), RuntimeError, "asked for the value"),
        (lambda m, x: x * torch.rand(1, device=x.device).item(), RuntimeError, "asked for the value"),
        (lambda m, x: x[:, m.state != 0], RuntimeError, "shape follows from values"),
        (
            lambda m, x: x + torch.ones(3, device="meta"),
            RuntimeError,
            r"a tensor of shape \[3\] on meta, which has no values .*: make it on the CPU",
        ),
    ],
)
def test_what_has_no_constant(forward: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        torch_bridge.capture(Net(forward), torch.ones(2, 3))


def test_a_weight_under_two_names_of_which_one_is_set_anew() -> None:
    net = nn.Module()
    net.register_buffer("a", torch.zeros(3))
    net.register_buffer("b", net.a)

    def forward(x: torch.Tensor) -> torch.Tensor:
        net.b = net.b + x
        return net.a + x

    net.forward = forward
    with pytest.raises(ValueError, match="the module has a under several names, and the forward sets one of them anew"):
        torch_bridge.capture(net, torch.ones(3))
    assert net.a is net.b


@functools.lru_cache
def steps(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device)


def test_what_a_cache_keeps_serves_the_next_capture() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * steps(3, x.device)

    for _ in range(2):
        check(forward)
