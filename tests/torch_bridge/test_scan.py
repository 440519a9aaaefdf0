"""`torch_xla.experimental.scan` and `scan_layers`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers

from tests.torch_bridge.replaying import bits
from tests.torch_bridge.test_folding import loops


def _leaf(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to("xla").requires_grad_()


def test_running_sums() -> None:
    xs = torch.arange(1.0, 5.0, device="xla")
    carry, ys = scan(lambda c, x: (c + x, c * x), torch.zeros((), device="xla"), xs)
    assert carry.item() == 10 and ys.tolist() == [0, 2, 9, 24]
    carry, ys = scan(lambda c, x: (c + x, c * x), torch.zeros((), device="xla"), xs, reverse=True)
    assert carry.item() == 10 and ys.tolist() == [9, 14, 12, 0]


def test_nested_data_and_gradients() -> None:
    """A recurrent cell over (inputs, gates), as JAX's `lax.scan` and a Python loop compute it."""

    def cell(carry: dict[str, torch.Tensor], x: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        hidden = torch.tanh(carry["h"] @ weight + x[0]) * x[1].sigmoid()
        return {"h": hidden, "n": carry["n"] + 1}, (hidden.sum(-1), None)

    weight, inputs, gates = _leaf(4, 4), _leaf(5, 2, 4, seed=1), _leaf(5, 2, 4, seed=2)
    init = {"h": torch.zeros(2, 4, device="xla"), "n": torch.zeros((), device="xla", dtype=torch.int64)}
    found = []
    for looped in (True, False):
        for t in (weight, inputs, gates):
            t.grad = None
        if looped:
            carry, rows = init, []
            for k in range(5):
                carry, (row, _) = cell(carry, (inputs[k], gates[k]))
                rows.append(row)
            ys = (torch.stack(rows), None)
        else:
            carry, ys = scan(cell, init, (inputs, gates))
        assert carry["n"].item() == 5 and ys[1] is None
        (carry["h"].sum() + ys[0].square().sum()).backward()
        found.append(bits([carry["h"], ys[0], weight.grad, inputs.grad, gates.grad]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("xs", "text"),
    [
        ((), r"scan: xs must hold tensors with the same length of dimension 0, at least 1; got \[\]"),
        ((torch.ones(2), torch.ones(3, 1)), r"got \[\(2,\), \(3, 1\)\]"),
        (torch.ones(()), r"got \[\(\)\]"),
        (torch.ones(0, 2), r"got \[\(0, 2\)\]"),
        ((torch.ones(2), 3), r"got \[\(2,\), 'int'\]"),
    ],
)
def test_what_cannot_be_scanned(xs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        scan(lambda c, x: (c, x), torch.ones(1), xs)


def test_functions_that_do_not_fit() -> None:
    x = torch.ones(3, 2, device="xla")
    with pytest.raises(TypeError, match=r"scan: fn must return \(carry, y\), got XLATensor"):
        scan(lambda c, x: c, x[0], x)
    with pytest.raises(RuntimeError, match=r"carry like the one it was given \(torch.float32 \[2\]\), got torch.float32 \[3, 2\]"):
        scan(lambda c, x: (c.expand(3, 2), x), x[0], x)
    with pytest.raises(RuntimeError, match=r"got torch.float64 \[2\]"):
        scan(lambda c, x: (c.double(), x), x[0], x)


def _layers(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)])


@pytest.mark.switched_on("NXD_JAX_FOLD")
@pytest.mark.parametrize("count", [3, 12])
def test_layers(count: int) -> None:
    """Outputs and gradients of calling them; twelve are compiled as one loop."""
    layers = _layers(count).to("xla")
    plain = copy.deepcopy(layers)
    x = _leaf(4, 6)
    out = scan_layers(layers, x, is_layer_pure=True)
    out.square().mean().backward()
    torch_xla.sync()
    assert bool(loops()) == (count == 12)
    expected = nn.Sequential(*plain)(x)
    expected.square().mean().backward()
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
    for p, q in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_a_tuple_is_given_as_several_arguments() -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x).sin(), super().forward(y).cos()

    layers = [Layer(3, 3).to("xla") for _ in range(3)]
    x = y = torch.ones(2, 3, device="xla")
    for found, expected in zip(scan_layers(layers, (x, y)), functools.reduce(lambda xs, layer: layer(*xs), layers, (x, y)), strict=True):
        assert found.tolist() == expected.tolist()


def test_layers_that_differ() -> None:
    assert scan_layers([], "x") == "x" and scan_layers(iter(_layers(1)), torch.ones(1, 6)).shape == (1, 6)
    with pytest.raises(
        ValueError, match=r"layers must be alike, but 0.weight is \[6, 6\] in layer 0 and \[7, 6\] in layer 1 \(Shape mismatch\)"
    ):
        scan_layers([*_layers(1), nn.Sequential(nn.Linear(6, 7))], torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"0.bias is \[6\] in layer 0 and missing in layer 1 \(mismatched keys\)"):
        scan_layers([*_layers(1), nn.Sequential(nn.Linear(6, 6, bias=False))], torch.ones(1, 6))
