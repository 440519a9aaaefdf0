"""`torch.cat` and `torch.stack` of many small tensors, other ones each time (`recorder.sampled_lists`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from torch_bridge import metrics
from torch_bridge.recorder import sampled_lists
from torch_bridge.runtime import executor, session


@pytest.fixture(autouse=True)
def fresh() -> None:
    executor.clear_cache()
    metrics.clear_counters()
    random.seed(0)


def memory(device: str, count: int = 60) -> list[dict[str, torch.Tensor]]:
    """Transitions of which each one's next state is the state of the one after; actions come from views, and from tensors that lie as they look."""
    states = [torch.tensor([0.1 * k, 1.0 - k], device=device).unsqueeze(0) for k in range(count + 1)]
    found = []
    for k in range(count):
        action = torch.tensor([[k % 3]], device=device) if k % 2 else torch.tensor([0.5 * k], device=device).long().view(1, 1)
        found.append({"state": states[k], "next": states[k + 1], "action": action, "reward": torch.tensor([1.0], device=device)})
    executor.sync()
    return found


def compiled() -> int:
    return metrics.COUNTERS.get("UncachedCompile", 0)


def batch(of: list[dict[str, torch.Tensor]], chosen: list[int]) -> list[torch.Tensor]:
    """What a training step takes of a sample: as many next states as the sample happens to have (an end has none)."""
    others = [of[k]["next"] for k in chosen if k % 7]
    return [torch.cat([of[k][name] for k in chosen]) for name in ("state", "action", "reward")] + [torch.cat(others)]


def test_samples_of_a_replay_memory_compile_no_program_each() -> None:
    cpu, xla = memory("cpu"), memory("xla")
    weight = torch.tensor([[0.5, -1.0]], device="xla")
    after = []
    for _ in range(25):
        chosen = random.sample(range(60), 24)
        states, actions, rewards, others = batch(xla, chosen)
        told = (states * weight).sum(1) + actions[:, 0] * rewards
        assert [x.tolist() for x in (states, actions, rewards, others)] == [x.tolist() for x in batch(cpu, chosen)]
        states, actions, rewards, _ = batch(cpu, chosen)
        torch.testing.assert_close(told.cpu(), (states * weight.cpu()).sum(1) + actions[:, 0] * rewards)
        after.append(compiled())
    assert after[-1] - after[8] <= 4, after  # other numbers of next states


@pytest.mark.parametrize("op", [torch.cat, torch.stack])
def test_values_are_those_of_torch(op: Callable[..., torch.Tensor]) -> None:
    """Of mixed dtypes, numbers that fill tensors, several dims; and with gradients."""
    made: list[Callable[[str], torch.Tensor]] = [
        lambda device: torch.arange(6.0, device=device).view(2, 3),
        lambda device: torch.zeros(2, 3, device=device, dtype=torch.int32),
        lambda device: torch.full((2, 3), 2.5, device=device, dtype=torch.bfloat16),
        lambda device: torch.tensor([[True, False, True], [False, True, False]], device=device),
    ]
    for dim in (0, 1, -1, 0):
        for kind in range(sampled_lists.KINDS + 2):
            picked = [random.choice(made) for _ in range(sampled_lists.MANY + kind)]
            expected, got = (op([make(device) for make in picked], dim) for device in ("cpu", "xla"))
            assert got.dtype == expected.dtype and got.stride() == expected.stride() and torch.equal(got.cpu(), expected)


def vary(tensors: list[torch.Tensor]) -> None:
    """Have `torch.cat` of such tensors count as one whose operands vary."""
    for k in range(sampled_lists.KINDS):
        torch.cat(tensors[: sampled_lists.MANY + k])
    executor.sync()


def small(count: int = 40, device: str = "xla") -> list[torch.Tensor]:
    found = [torch.tensor([float(k), -1.0], device=device) for k in range(count)]
    executor.sync()
    return found


def test_gradients_go_through() -> None:
    vary(small())
    results = []
    for device in ("cpu", "xla"):
        tensors = [t.requires_grad_() for t in small(20, device)]
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            layer.bias.zero_()
        layer.to(device)(torch.cat(tensors).view(20, 2)).square().sum().backward()
        results.append([t.grad.tolist() for t in tensors] + [layer.weight.grad.tolist()])  # type: ignore[union-attr]
    assert results[0] == results[1]


def is_pending(t: Any) -> bool:
    return bool(t._storage.pending)


def test_operands_that_do_not_vary_are_recorded() -> None:
    """A mean of the losses of a step's micro-batches stays in the step's program."""
    for _ in range(6):
        losses = small(20)
        found = torch.stack(losses)
        assert is_pending(found)
        assert float(found.mean()) == (19 / 2 - 1) / 2


def test_operands_that_wait_and_large_ones_are_recorded() -> None:
    tensors = small()
    vary(tensors)
    assert not is_pending(torch.cat(tensors[:30]))
    waiting = torch.cat([*tensors[:30], tensors[0] + 1])
    assert is_pending(waiting) and waiting[-2:].tolist() == [1.0, 0.0]
    large = [torch.ones(1 << 14, device="xla") + k for k in range(20)]
    executor.sync()
    for k in range(sampled_lists.KINDS + 2):
        assert is_pending(torch.cat(large[: 17 + k]))
    parts = list(torch.arange(80.0, device="xla").view(40, 2).unbind())
    executor.sync()
    for k in range(sampled_lists.KINDS + 2):
        found = torch.cat(parts[: 20 + k])
        assert is_pending(found) and found.tolist() == [float(x) for x in range(40 + 2 * k)], "rows of a larger tensor"


def test_writes_before_and_behind() -> None:
    tensors = small()
    vary(tensors)
    tensors[3].add_(10)
    waiting = torch.cat(tensors[:30])
    assert waiting[6:8].tolist() == [13.0, 9.0]
    executor.sync()
    found = torch.cat(tensors[:31])
    assert not is_pending(found)
    tensors[3].zero_()
    found[0] = 7
    assert found[:8].tolist() == [7.0, -1.0, 1.0, -1.0, 2.0, -1.0, 13.0, 9.0] and tensors[0].tolist() == [0.0, -1.0]


def test_modes_are_those_of_the_call() -> None:
    tensors = small()
    vary(tensors)
    with torch.inference_mode():
        assert torch.cat(tensors[:30]).is_inference()
    assert not torch.cat(tensors[:31]).is_inference()


def test_a_wrong_shape_is_torchs_error() -> None:
    tensors = small()
    vary(tensors)
    with pytest.raises(RuntimeError, match="must match"):
        torch.cat([*(t.view(1, 2) for t in tensors[:30]), torch.ones(1, 3, device="xla")])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([*tensors[:30], torch.ones(3, device="xla")])


class Joined(nn.Module):
    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors) * 2


def test_whoever_follows_what_is_recorded_sees_the_op() -> None:
    tensors = small()
    vary(tensors)
    graph = torch_bridge.capture(Joined(), tensors[:30])
    assert any("cat" in str(node.target) for node in graph.graph.nodes)
    assert session.current().kinds
    executor.clear_cache()
    assert not session.current().kinds
