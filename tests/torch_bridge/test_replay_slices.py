"""Played modules whose arguments are slices that start elsewhere in every call: one kind for all of them, on copies, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.changing_numbers import static_families  # noqa: F401
from tests.torch_bridge.decoders import WORDS, llama
from tests.torch_bridge.replaying import Ruled, compile_fast, descend, player  # noqa: F401
from torch_bridge.runtime import executor

CALLS = 24


def _run(module: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor], *watched: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for k in range(CALLS):
        loss = loss_of(module, k)
        module.zero_grad()
        loss.backward()
        descend(module)
        executor.sync()
        found += [loss.detach(), *(w.clone() for w in watched)]
    return [t.cpu() for t in (*found, *module.parameters())]


def _both(make: Callable[[], nn.Module], data: torch.Tensor, loss_of: Callable[..., torch.Tensor]) -> nn.Module:
    """The module that was played, after it did just what the same one did op by op; what it did to the data counts."""
    torch.manual_seed(0)
    first = make()
    own = make()
    own.load_state_dict(first.state_dict())
    one, other = data.clone().to("xla"), data.clone().to("xla")
    played = torch_bridge.optimize(own.to("xla"))
    found = _run(played, lambda m, k: loss_of(m, one, k), one)
    torch.testing.assert_close(found, _run(first.to("xla"), lambda m, k: loss_of(m, other, k), other))
    return played


ROWS = torch.randn(4 * CALLS, 6, generator=torch.Generator().manual_seed(1))


def _rows(module: nn.Module, data: torch.Tensor, k: int) -> torch.Tensor:
    return module(data[4 * k : 4 * k + 4]).square().mean()


def test_rows_of_data_on_the_device() -> None:
    assert player(_both(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), ROWS, _rows)).played >= CALLS // 2


def test_columns_of_data_on_the_device() -> None:
    """With gaps between their rows, in the order of a contiguous copy."""

    def loss_of(module: nn.Module, data: torch.Tensor, k: int) -> torch.Tensor:
        return module(data[:, 3 * k : 3 * k + 6]).square().mean()

    assert player(_both(lambda: nn.Linear(6, 2), torch.randn(4, 3 * CALLS + 6), loss_of)).played >= CALLS // 2


def test_a_decoder_with_labels_from_the_same_data() -> None:
    def loss_of(module: nn.Module, data: torch.Tensor, k: int) -> torch.Tensor:
        words = data[2 * k : 2 * k + 2]
        return module(input_ids=words, labels=words).loss

    assert player(_both(llama, torch.randint(0, WORDS, (2 * CALLS, 6)), loss_of)).played >= CALLS // 2


def test_transposed_slices_keep_their_strides() -> None:
    def rule(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.stride() == (1, 6)
        return module.layer(x.t()) + y.sum()

    def loss_of(module: nn.Module, data: torch.Tensor, k: int) -> torch.Tensor:
        return module(data[6 * k : 6 * k + 6].t()).square().mean()

    _both(lambda: Ruled(rule), torch.randn(6 * CALLS, 6), loss_of)


def _writes(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return module.layer(x * 1.0)


def _gives_back(module: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x, module.layer(x * 1.0)


def _gives_a_view(module: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[1:], module.layer(x * 1.0)


@pytest.mark.parametrize("rule", [_writes, _gives_back, _gives_a_view])
def test_what_is_done_to_a_slice_is_done_to_its_tensor(rule: Callable[..., Any]) -> None:
    def loss_of(module: nn.Module, data: torch.Tensor, k: int) -> torch.Tensor:
        out = module(data[4 * k : 4 * k + 4])
        if isinstance(out, tuple):
            out[0].add_(1)
            assert out[0]._storage is data._storage  # type: ignore[attr-defined]
            return out[1].square().mean()
        return out.square().mean()

    _both(lambda: Ruled(rule), ROWS, loss_of)


def test_a_module_that_begins_to_write() -> None:
    """What is known of calls on other slices says nothing of a module in another state."""

    def rule(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if module.writing:
            x.add_(1)
        return module.layer(x * 1.0)

    def loss_of(module: Any, data: torch.Tensor, k: int) -> torch.Tensor:
        module.writing = k >= 16
        return module(data[4 * k : 4 * k + 4]).square().mean()

    _both(lambda: Ruled(rule), ROWS, loss_of)


def test_a_slice_that_needs_gradients() -> None:
    def run(device: str, play: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module, data = nn.Linear(6, 2).to(device), ROWS.clone().to(device).requires_grad_()
        if play:
            torch_bridge.optimize(module)
        found = []
        for k in range(12):
            data.grad = None
            _rows(module, data, k).backward()
            executor.sync()
            assert data.grad is not None
            found.append(data.grad.clone())
        return [t.cpu() for t in found]

    torch.testing.assert_close(run("xla", True), run("cpu", False))


def _asks_where(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module.layer(x) * (1 + x.storage_offset() % 7)


def _reads_from_the_start(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module.layer(x + torch.as_strided(x, (4, 6), (6, 1), 0))


@pytest.mark.parametrize("rule", [_asks_where, _reads_from_the_start])
def test_what_depends_on_where_a_slice_starts_is_no_call_on_a_copy(rule: Callable[..., Any]) -> None:
    _both(lambda: Ruled(rule), ROWS, _rows)


def _asks_for_strides(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module.layer(x) * (2 if x.is_contiguous() else 3)


def _asks_by_trying(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    try:
        x.view(-1)
    except RuntimeError:
        return module.layer(x) * 3
    return module.layer(x)


def _changes_a_copy(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of a tensor without gaps, that is the tensor itself."""
    copy = x.contiguous()
    copy.mul_(2)
    return module.layer(x + copy)


def _fills_a_copy(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    copy = x.reshape(-1)
    copy.zero_()
    return module.layer(x + copy.view(4, 6))


@pytest.mark.parametrize("rule", [_asks_for_strides, _asks_by_trying, _changes_a_copy, _fills_a_copy])
def test_what_depends_on_gaps_is_no_call_on_a_copy(rule: Callable[..., Any]) -> None:
    def loss_of(module: nn.Module, data: torch.Tensor, k: int) -> torch.Tensor:
        return module(data[:, k : k + 6]).square().mean()

    _both(lambda: Ruled(rule), torch.randn(4, CALLS + 6), loss_of)


@pytest.mark.parametrize("inside", [False, True], ids=["data of before", "data of the mode"])
def test_in_inference_mode(inside: bool) -> None:
    layer = nn.Linear(6, 2).to("xla")
    played = torch_bridge.optimize(layer)
    data = ROWS.to("xla")
    for k in range(CALLS):
        with torch.inference_mode():
            given = data.clone() if inside else data
            found = played(given[4 * k : 4 * k + 4])
            expected = nn.functional.linear(given[4 * k : 4 * k + 4], layer.weight, layer.bias)
            assert found.is_inference()
        executor.sync()
        torch.testing.assert_close(found.cpu(), expected.cpu())
    assert player(played).played >= CALLS // 2
