"""`torch.nn.utils.rnn` on xla: packed and padded sequences, and recurrent layers on them, forward and backward, against eager torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch_xla
from torch import nn
from torch.nn.utils import rnn

from tests.torch_bridge.devices import same
from torch_bridge import metrics

SORTED, UNSORTED = [5, 3, 3, 1], [2, 5, 1, 3]


def padded(device: str, batch_first: bool, *rest: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(4, 5, *rest)
    x = x.round().to(dtype)
    return (x if batch_first else x.transpose(0, 1)).to(device)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED])
@pytest.mark.parametrize("rest", [(3,), (), (2, 3)])
def test_packing_and_padding(batch_first: bool, lengths: list[int], rest: tuple[int, ...]) -> None:
    def run(device: str) -> object:
        x = padded(device, batch_first, *rest).requires_grad_()
        packed = rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first, enforce_sorted=lengths is SORTED)
        y, n = rnn.pad_packed_sequence(packed, batch_first, padding_value=-2.5)
        (y * torch.arange(float(y.numel()), device=device).view(y.shape)).sum().backward()
        assert packed.data.device.type == device
        assert packed.batch_sizes.device.type == n.device.type == "cpu"
        return packed.data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices, y, n, x.grad

    same(run)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def run(device: str) -> object:
        packed = rnn.pack_padded_sequence(padded(device, True, 2, dtype=dtype), SORTED, True)
        return packed.data, rnn.pad_packed_sequence(packed, padding_value=1, total_length=7)

    same(run)


@pytest.mark.parametrize(
    ("layer", "bidirectional", "lengths"),
    [(nn.LSTM, True, UNSORTED), (nn.LSTM, False, SORTED), (nn.GRU, True, UNSORTED), (nn.GRU, False, UNSORTED), (nn.RNN, True, UNSORTED)],
)
def test_recurrent_layers(layer: Callable[..., nn.Module], bidirectional: bool, lengths: list[int]) -> None:
    torch.manual_seed(1)
    model = layer(3, 4, num_layers=1 + (layer is nn.GRU), batch_first=True, bidirectional=bidirectional)
    state = model.state_dict()

    def run(device: str) -> object:
        own = layer(3, 4, num_layers=1 + (layer is nn.GRU), batch_first=True, bidirectional=bidirectional)
        own.load_state_dict(state)
        own.to(device)
        x = padded(device, True, 3).requires_grad_()
        out, last = own(rnn.pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False))
        y, n = rnn.pad_packed_sequence(out, True)
        states = last if isinstance(last, tuple) else (last,)
        (y.square().sum() + sum(s.sum() for s in states)).backward()
        return y, n, *states, x.grad, *(p.grad for p in own.parameters())

    same(run, rtol=1e-4, atol=1e-5)


def test_projections_states_and_dropout_free_training() -> None:
    torch.manual_seed(1)
    state = nn.LSTM(3, 4, proj_size=2).state_dict()

    def run(device: str) -> object:
        lstm = nn.LSTM(3, 4, proj_size=2)
        lstm.load_state_dict(state)
        lstm.to(device)
        optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
        losses = []
        for lengths in (SORTED, UNSORTED, SORTED):
            packed = rnn.pack_padded_sequence(padded(device, False, 3), lengths, enforce_sorted=False)
            start = torch.ones(1, 4, 2, device=device), torch.ones(1, 4, 4, device=device)
            optimizer.zero_grad()
            out, (h, c) = lstm(packed, start)
            loss = out.data.square().mean() + h.sum() + c.sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        return losses

    same(run, rtol=1e-4)


def test_sequences_of_their_own() -> None:
    def run(device: str) -> object:
        parts = [torch.randn(n, 3, device="cpu").to(device).requires_grad_() for n in (4, 2, 1)]
        packed = rnn.pack_sequence(parts)
        mixed = rnn.pack_sequence(parts[::-1], enforce_sorted=False)
        back = rnn.unpack_sequence(packed)
        sum((k + 1) * t.sum() for k, t in enumerate(back)).backward()
        padded_, lengths = rnn.pad_packed_sequence(mixed)
        return packed.data, mixed.data, back, padded_, lengths, rnn.unpad_sequence(padded_, lengths), [t.grad for t in parts]

    same(run)


def test_inference_mode_and_moving_a_packed_sequence() -> None:
    def run(device: str) -> object:
        with torch.inference_mode():
            packed = rnn.pack_padded_sequence(padded(device, True, 3), UNSORTED, True, enforce_sorted=False)
            y, n = rnn.pad_packed_sequence(packed)
        moved = rnn.pack_padded_sequence(padded("cpu", True, 3), UNSORTED, True, enforce_sorted=False).to(device)
        assert moved.data.device.type == device
        return y, n, moved.data, moved.sorted_indices, rnn.pad_packed_sequence(moved.to("cpu"))

    same(run)


def test_random_lengths() -> None:
    draw = random.Random(0)
    for _ in range(4):
        batch, steps = draw.randint(1, 5), draw.randint(1, 6)
        lengths = [draw.randint(1, steps) for _ in range(batch)]
        for total, first in itertools.product((None, steps + 2), (True, False)):

            def run(device: str, lengths: list[int] = lengths, total: int | None = total, first: bool = first) -> object:
                x = torch.randn(len(lengths), steps, 2).to(device)  # noqa: B023  # called at once
                packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
                return packed.data, rnn.pad_packed_sequence(packed, first, total_length=total)

            same(run)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda x: rnn.pack_padded_sequence(x, [1, 2, 3, 4], True), "sorted in decreasing order"),
        (lambda x: rnn.pack_padded_sequence(x, [3, 2], True), "equal to batch_size"),
        (lambda x: rnn.pack_padded_sequence(x, [3, 2, 1, 0], True), "greater than 0"),
        (lambda x: rnn.pack_padded_sequence(x[:, :0], [1, 1, 1, 1], True), "empty"),
        (lambda x: rnn.pad_packed_sequence(rnn.pack_padded_sequence(x, SORTED, True), total_length=2), "total_length"),
    ],
)
def test_errors_are_torchs(pack: Callable[[torch.Tensor], object], message: str) -> None:
    for device in ("cpu", "xla"):
        with pytest.raises((RuntimeError, ValueError), match=message):
            pack(torch.zeros(4, 5, 3, device=device))


def test_lengths_on_xla_are_refused_as_on_any_device() -> None:
    with pytest.raises(RuntimeError, match=r"lengths.*CPU"):
        rnn.pack_padded_sequence(torch.zeros(4, 5, 3, device="xla"), torch.tensor(SORTED, device="xla"), True)


def test_a_training_step_is_one_program() -> None:
    """The order of the sequences, which torch takes to the CPU, is known there."""
    lstm = nn.LSTM(4, 8, batch_first=True).to("xla")
    counts = []
    for seed in range(3):
        x = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(seed)).to("xla")
        torch_xla.sync()
        ran = metrics.EXECUTE_TIME.count
        packed = rnn.pack_padded_sequence(x, torch.tensor([3, 7, 5]), True, enforce_sorted=False)
        y, _ = rnn.pad_packed_sequence(lstm(packed)[0], True)
        y.square().sum().backward()
        torch_xla.sync()
        counts.append(metrics.EXECUTE_TIME.count - ran)
    assert counts == [1, 1, 1]


def test_integers_on_their_way_come_to_the_cpu_without_a_program() -> None:
    torch_xla.sync()
    ran = metrics.EXECUTE_TIME.count
    order = torch.tensor([3, 1, 2]).to("xla")
    twice = order.argsort() * 2
    found, shifted = twice.cpu(), (twice + 1)[1:].to("cpu", torch.int32)
    twice.add_(1)
    assert found.tolist() == [2, 4, 0] and shifted.tolist() == [5, 1] and shifted.dtype == torch.int32
    assert twice.cpu().tolist() == [3, 5, 1]
    found[0] = 7
    assert metrics.EXECUTE_TIME.count == ran
    torch_xla.sync()
    assert twice.tolist() == [3, 5, 1]
