"""Cells that a script calls for each step of a sequence are computed as loops, forward and backward, with the numbers of the unfolded program and the CPU's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.torch_bridge.test_folding import loops
from torch_bridge import torch_xla as xla
from torch_bridge.passes import fold_repeats
from torch_bridge.passes.fold_repeats import StackedHere
from torch_bridge.runtime import executor, session

BATCH, STEPS, WIDTH, HIDDEN = 3, 11, 5, 6


class Model(nn.Module):
    """Something before the loop, a cell, something after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.cell = self.make()
        self.after = nn.Linear(HIDDEN, 4)

    def make(self) -> nn.Module:
        raise NotImplementedError

    def zeros(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), HIDDEN, device=x.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self.before(x))

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LSTM(Model):
    def make(self) -> nn.Module:
        return nn.LSTMCell(WIDTH, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h = c = self.zeros(x)
        found = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            found.append(self.after(h))
        return torch.stack(found, 1)


class LastState(LSTM):
    def loop(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.after(state[0])


class TwoLayers(LSTM):
    def make(self) -> nn.Module:
        self.second = nn.LSTMCell(HIDDEN, HIDDEN)
        return super().make()

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.zeros(x), self.zeros(x)), (self.zeros(x), self.zeros(x))
        found = []
        for t in range(x.shape[1]):
            first = self.cell(x[:, t], first)
            second = self.second(first[0], second)
            found.append(second[0].unsqueeze(1))
        return self.after(torch.cat(found, 1))


class Buffer(LSTM):
    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h = c = self.zeros(x)
        found = torch.zeros(len(x), x.shape[1], HIDDEN, device=x.device)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            found[:, t] = h
        return self.after(found)


class Embedded(LSTM):
    """A language model's loop: what cells take, and give to others, needs no step to wait."""

    def make(self) -> nn.Module:
        self.embed = nn.Embedding(WIDTH, WIDTH)
        return super().make()

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        ids, state, found = x.detach().argmax(-1), None, []
        for t in range(x.shape[1]):
            state = self.cell(self.embed(ids[:, t]), state)
            found.append(self.after(state[0]))
        return torch.stack(found, 1) + 0 * x.sum()


class Mixed(Embedded):
    """The input of a step is a sum of two, and its loss is added up step by step."""

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        ids, state, loss = x.detach().argmax(-1), None, 0.0
        for t in range(x.shape[1]):
            state = self.cell(x[:, t] + self.embed(ids[:, t]), state)
            loss = loss + self.after(state[0]).square().mean()
        return loss


class GRU(Model):
    def make(self) -> nn.Module:
        self.start = nn.Parameter(torch.full((1, HIDDEN), 0.1))
        return nn.GRUCell(WIDTH, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h, found = self.start.expand(len(x), HIDDEN), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            found.append(h)
        return self.after(torch.stack(found, 1))


class StepsFirst(GRU):
    def loop(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        h, loss = torch.zeros(x.shape[1], HIDDEN, device=x.device), 0.0
        for step in x:
            h = self.cell(step, h)
            loss = loss + self.after(h).square().mean()
        return loss + 0 * self.start.sum()


class BothWays(GRU):
    def make(self) -> nn.Module:
        self.back = nn.GRUCell(WIDTH, HIDDEN)
        return super().make()

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h = g = self.start.expand(len(x), HIDDEN)
        forth: list[torch.Tensor] = []
        back: list[torch.Tensor] = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            forth.append(h)
        for t in reversed(range(x.shape[1])):
            g = self.back(x[:, t], g)
            back.insert(0, g)
        return self.after(torch.stack(forth, 1) + torch.stack(back, 1))


class Tanh(Model):
    def make(self) -> nn.Module:
        return nn.RNNCell(WIDTH, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h, found = self.zeros(x), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            found.append(h)
        return self.after(torch.stack(found))


class HandWritten(Model):
    """A GRU of linear layers, each of which reads the step."""

    def make(self) -> nn.Module:
        self.gates = nn.Linear(WIDTH + HIDDEN, 2 * HIDDEN)
        return nn.Linear(WIDTH + HIDDEN, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h, found = self.zeros(x), []
        for t in range(x.shape[1]):
            z, r = torch.sigmoid(self.gates(torch.cat([x[:, t], h], 1))).chunk(2, 1)
            new = torch.tanh(self.cell(torch.cat([x[:, t], r * h], 1)))
            h = (1 - z) * new + z * h
            found.append(h)
        return self.after(torch.stack(found, 1))


class KeptDims(Model):
    def make(self) -> nn.Module:
        return nn.Linear(WIDTH + HIDDEN, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h, found = self.zeros(x).unsqueeze(1), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, t : t + 1], h], -1)))
            found.append(h)
        return self.after(torch.cat(found, 1))


class Selective(Model):
    """A state space model, as Mamba is: each step reads what it multiplies with through a view of its own of all steps' values."""

    def make(self) -> nn.Module:
        return nn.Linear(WIDTH, 3 * HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.cell(x)
        decay = torch.sigmoid(parts[..., :HIDDEN])
        h, found = self.zeros(x), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + parts[..., HIDDEN : 2 * HIDDEN][:, t]
            found.append(torch.matmul(h.unsqueeze(1), parts[..., 2 * HIDDEN :][:, t].unsqueeze(-1))[:, 0] * h)
        return self.after(torch.stack(found, 1))


class Masked(LSTM):
    """Sequences of different lengths: a row that has ended keeps its state. Each step compares with a number of its own."""

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([3, 7, STEPS], device=x.device)
        h = c = self.zeros(x)
        found = []
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], (h, c))
            going = (t < lengths).unsqueeze(1)
            h, c = (torch.where(going, a, b) for a, b in zip(new, (h, c), strict=True))
            found.append(h * 0.9**t)
        return self.after(torch.stack(found, 1))


class Euler(Model):
    """A differential equation that depends on the time, from step to step."""

    def make(self) -> nn.Module:
        return nn.Linear(HIDDEN, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h, dt = self.zeros(x) + x.mean((1, 2), keepdim=True)[:, 0], 0.1
        for t in range(20):
            h = h + dt * torch.tanh(self.cell(h) + torch.full_like(h, t * dt + 0.05)) * math.cos(t * dt) + (t + 1) * 1e-3
        return self.after(h)


class FedBack(Model):
    """A decoder that takes its last output for its next input."""

    def make(self) -> nn.Module:
        self.feed = nn.Linear(4, WIDTH)
        return nn.GRUCell(WIDTH, HIDDEN)

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        h, step, found = self.zeros(x), x[:, 0], []
        for _ in range(x.shape[1]):
            h = self.cell(step, h)
            out = self.after(h)
            found.append(out)
            step = self.feed(torch.tanh(out))
        return torch.stack(found, 1)


def train(model: type[Model], device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = model().to(device=device, dtype=dtype)
    x = torch.randn(BATCH, STEPS, WIDTH).to(device=device, dtype=dtype).requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        x.grad = None
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        if device == "xla":
            xla.sync()
        losses.append(loss.detach().cpu())
    return [*losses, x.grad.cpu(), *(p.detach().cpu() for p in net.parameters())]  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    executor.clear_cache()
    yield
    monkeypatch.undo()
    executor.clear_cache()


MODELS = [
    LSTM,
    Embedded,
    Mixed,
    LastState,
    TwoLayers,
    Buffer,
    GRU,
    StepsFirst,
    BothWays,
    Tanh,
    HandWritten,
    KeptDims,
    Selective,
    Masked,
    Euler,
    FedBack,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_loops_over_time_have_the_numbers_of_the_unfolded_program_and_of_the_cpu(
    model: type[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXD_JAX_FOLD", "6")
    folded = train(model, "xla")
    found = loops()
    assert len(found) == (4 if model is BothWays else 2), "forward and backward"
    assert all(loop.run.count >= STEPS - 3 for loop in found)
    monkeypatch.setenv("NXD_JAX_FOLD", "0")
    executor.clear_cache()
    unfolded, cpu = train(model, "xla"), train(model, "cpu")
    assert not loops()
    for a, b, c in zip(folded, unfolded, cpu, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)


def test_sequences_are_read_and_put_together_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not step by step outside of the loops: that would be as much to compile as the loop saves."""
    monkeypatch.setenv("NXD_JAX_FOLD", "6")
    train(LSTM, "xla")
    plan = session.current().recent[-1].spec.plan
    assert plan is not None
    assert not any(isinstance(ref.series, StackedHere) for loop in loops() for ref in loop.refs.values())
    longest = {max(len(piece.nodes) for piece in pieces) for pieces in plan.pieces.values()}
    assert longest == {STEPS - 1, STEPS}


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_FOLD", "6")
    folded, cpu = train(GRU, "xla", torch.bfloat16), train(GRU, "cpu", torch.bfloat16)
    assert loops()
    for a, b in zip(folded, cpu, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=1e-2)


def test_twelve_steps_are_folded_unasked() -> None:
    assert fold_repeats.LEAST == 12
    net = nn.LSTMCell(WIDTH, HIDDEN).to("xla")
    x = torch.randn(BATCH, 16, WIDTH).to("xla")
    state = None
    for t in range(x.shape[1]):
        state = net(x[:, t], state)
    state[0].sum().backward()  # type: ignore[index]
    xla.sync()
    assert [loop.run.count for loop in loops()] == [16, 15]
