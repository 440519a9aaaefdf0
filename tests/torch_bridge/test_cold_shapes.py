"""Programs of new shapes that run in eager torch first: eager torch's values, the compiled program's random numbers, and compiled when they come again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bridge
from torch_bridge.config import freed_memory
from torch_bridge.config.settings import SETTINGS
from torch_bridge.mesh import stacked_arrays
from torch_bridge.runtime import cold_shapes, eager_programs, executor
from torch_bridge.runtime.session import STATE

torch_bridge.register()

Step = Callable[[int], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _new_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been compiled before."""
    torch.ones(1, device="xla").tolist()  # the environment is read when JAX comes up
    monkeypatch.setattr(STATE.session, "cold_shapes", cold_shapes.ColdShapes())
    monkeypatch.setattr(SETTINGS, "cold_shapes", True)
    monkeypatch.setattr(SETTINGS, "verify", False)  # who checks the passes has all programs compiled
    yield
    executor.clear_cache()


def _compiled() -> int:
    found: Any = met.metric_data("CompileTime")
    return int(found[0]) if found else 0


def _cold() -> int:
    return met.counter_value("ColdShapeExecute") or 0


def _run(
    make: Callable[[str], Step], lengths: list[int], device: str = "xla", cold: bool = True
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """What each step gives, and how many programs were compiled, and ran in eager torch, until its end."""
    SETTINGS.cold_shapes = cold
    executor.clear_cache()
    torch.manual_seed(0)
    step, found, compiled, ran = make(device), [], [], []
    before = _compiled(), _cold()
    for length in lengths:
        found += [t.detach().cpu().clone() for t in step(length)]
        torch_xla.sync()
        compiled.append(_compiled() - before[0])
        ran.append(_cold() - before[1])
    return found, compiled, ran


def _long(x: torch.Tensor) -> torch.Tensor:
    """More ops than small programs have."""
    for k in range(cold_shapes.LEAST):
        x = x * 1.0 + 0.1 * k
    return x


class _Net(nn.Module):
    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.embed, self.norm, self.mix, self.out = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.drop = nn.Dropout(drop)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q = self.mix(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.out(self.drop(nn.functional.gelu(x)))


LENGTHS = [3, 4, 5, 6, 7, 8, 6, 6, 8]


def test_a_text_that_grows() -> None:
    def make(device: str) -> Step:
        net, state = _Net().to(device).eval(), [torch.zeros(1, 1, dtype=torch.int64).to(device)]

        @torch.no_grad()
        def step(k: int) -> list[torch.Tensor]:
            state[0] = torch.cat([state[0], net(state[0])[:, -1].argmax(-1, keepdim=True)], 1)
            return state

        return step

    found, compiled, ran = _run(make, list(range(8)))
    torch.testing.assert_close(found, _run(make, list(range(8)), "cpu")[0])
    assert compiled == [1, 2, 3, 4, 4, 4, 4, 4] and ran == [0, 0, 0, 0, 1, 2, 3, 4], "attention has other ops for one token"


def _training(optimizer: Callable[..., torch.optim.Optimizer], drop: float) -> Callable[[str], Step]:
    def make(device: str) -> Step:
        net = _Net(drop).to(device)
        update = optimizer(net.parameters(), lr=0.05)

        def step(length: int) -> list[torch.Tensor]:
            ids = torch.randint(0, 11, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
            loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            update.zero_grad()
            loss.backward()
            update.step()
            return [loss, *net.parameters(), *(t for state in update.state.values() for t in state.values() if isinstance(t, torch.Tensor))]

        return step

    return make


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_batches_of_other_lengths(optimizer: Any) -> None:
    make = _training(optimizer, 0.0)
    found, compiled, ran = _run(make, LENGTHS)
    torch.testing.assert_close(found, _run(make, LENGTHS, "cpu")[0], rtol=1e-4, atol=1e-5)
    assert ran[-1] == 5 and compiled[-1] == compiled[5] + 1, "6 came a third time, 8 did not"


def test_dropout_draws_what_the_compiled_program_draws() -> None:
    make = _training(torch.optim.SGD, 0.4)
    found, _, ran = _run(make, LENGTHS)
    torch.testing.assert_close(found, _run(make, LENGTHS, cold=False)[0], rtol=1e-4, atol=1e-5)
    assert ran[-1] == 5


def test_other_random_ops_draw_the_same() -> None:
    def make(device: str) -> Step:
        def step(length: int) -> list[torch.Tensor]:
            x = _long(torch.rand(length, 4, device=device))
            drawn = torch.bernoulli(torch.sigmoid(x)), torch.randint(0, 9, (length,), device=device), torch.multinomial(x.softmax(-1), 2)
            return [x, *drawn, torch.randperm(length, device=device), torch.randn_like(x)]

        return step

    found, _, ran = _run(make, [3, 4, 5, 6, 7])
    torch.testing.assert_close(found, _run(make, [3, 4, 5, 6, 7], cold=False)[0], rtol=1e-6, atol=1e-6)
    assert ran[-1] == 2


def _dtypes(device: str) -> Step:
    def step(length: int) -> list[torch.Tensor]:
        x = _long(torch.linspace(-2, 2, 4 * length).view(length, 4).to(device))
        found = [x.to(d) * 2 for d in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32)]
        return [*found, x > 0, torch.complex(x, x.abs()).conj() * 2, x.to(torch.float8_e5m2).float(), (x > 0).sum(), x.argmax()]

    return step


def _strides(device: str) -> Step:
    """Values of a graph lie as contiguous tensors do, whatever they are views of."""

    def step(length: int) -> list[torch.Tensor]:
        x = _long(torch.arange(6.0 * length).view(2, 3, length).to(device))
        turned = x.permute(2, 0, 1)
        return [
            turned.reshape(length, 6).flatten() * 2,
            turned.contiguous().view(torch.int32) + 1,
            x.t() if x.dim() == 2 else x.mT[:, 1:],
            turned.flip(0),
        ]

    return step


def _shared(device: str) -> Step:
    """Results that are inputs, views of each other, and the same twice."""
    kept = torch.ones(4).to(device)

    def step(length: int) -> list[torch.Tensor]:
        x = _long(torch.arange(float(length)).to(device))
        same = x + 1
        kept.add_(same.sum())
        found = [x, same, same.clone(), same.view(1, -1), kept, kept.clone(), same.expand(2, length).contiguous()]
        torch_xla.sync()
        found[1].mul_(3)
        kept.mul_(0.5)
        return found

    return step


def _writes(device: str) -> Step:
    def step(length: int) -> list[torch.Tensor]:
        x = _long(torch.zeros(length, 4, device=device))
        x[1:, 2] = torch.arange(length - 1.0, device=device)
        x[:, :2] += x[:, 2:].clone()
        x[x > 3] = 0
        x.scatter_(1, torch.zeros(length, 1, dtype=torch.int64, device=device), 7.0)
        return [x, x.sort(0).values, x.topk(2).values, x.cumsum(0), torch.where(x > 1, x, -x)]

    return step


@pytest.mark.parametrize("make", [_dtypes, _strides, _shared, _writes])
def test_equals_eager_torch(make: Callable[[str], Step]) -> None:
    found, _, ran = _run(make, [3, 4, 5, 6, 7, 6, 7])
    torch.testing.assert_close(found, _run(make, [3, 4, 5, 6, 7, 6, 7], "cpu")[0], rtol=1e-3, atol=1e-5)
    assert ran[-1] >= 4


def test_what_eager_torch_refuses_is_done_as_programs_do_it() -> None:
    """An index out of range is clamped on the device, and raises in eager torch; histograms are of floats."""

    def make(device: str) -> Step:
        table = torch.arange(8.0).view(4, 2).to(device)

        def step(length: int) -> list[torch.Tensor]:
            counts = torch.histc(torch.arange(length, dtype=torch.int32, device=device), bins=2, max=length)
            return [_long(table[torch.full((length,), 9, device=device)]), counts]

        return step

    found, compiled, ran = _run(make, [3, 4, 5, 6, 7])
    torch.testing.assert_close(found, _run(make, [3, 4, 5, 6, 7], cold=False)[0])
    assert compiled == [1, 2, 3, 3, 3] and ran[-1] == 2


def test_what_cannot_be_done_so_at_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(eager_programs._Run, "results", refuse)
    make = _training(torch.optim.SGD, 0.0)
    found, compiled, _ = _run(make, [3, 4, 5, 6, 7])
    torch.testing.assert_close(found, _run(make, [3, 4, 5, 6, 7], "cpu")[0], rtol=1e-4, atol=1e-5)
    assert compiled == [1, 2, 3, 4, 5]


def test_nothing_of_the_scripts_takes_part() -> None:
    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def make(device: str) -> Step:
        weight = torch.ones(4, 4).to(device)
        return lambda length: [_long(torch.ones(length, 4, device="cpu").to(device)) @ weight / 3]

    plain, _, _ = _run(make, [2, 3, 4, 5, 6, 7], "cpu")
    torch.set_default_device("xla")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _, ran = _run(make, [2, 3, 4, 5, 6, 7])
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, plain)
    assert ran[-1] == 2
    pending, before = make("xla")(8), _cold()
    with Seen():
        torch_xla.sync()
    assert not {"aten.mul.Tensor", "aten.add.Tensor", "aten.mm.default"}.intersection(Seen.names)
    torch.testing.assert_close(pending[0].cpu(), make("cpu")(8)[0])
    assert _cold() == before + 1


def test_memory_that_was_freed_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of ever other sizes leave gaps."""
    trimmed: list[bool] = []
    monkeypatch.setattr(freed_memory, "trim", lambda: trimmed.append(True))
    lengths = list(range(3, 3 + cold_shapes.SHAPES + eager_programs.TRIM_EVERY))
    _run(lambda device: lambda length: [_long(torch.ones(length, 3, device=device))], lengths)
    assert trimmed == [True]


def test_few_graphs_of_cold_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_shapes, "KEPT", 4)
    make = _training(torch.optim.SGD, 0.0)
    lengths = [3, 4, 5, 6, 7, 8, 9, 10, 11, 6, 11, 11, 3]
    found, compiled, _ = _run(make, lengths)
    torch.testing.assert_close(found, _run(make, lengths, "cpu")[0], rtol=1e-4, atol=1e-5)
    assert compiled[-1] == 4, "6 was forgotten when it came again, 11 was not"
    _run(make, lengths[:9])
    assert len(STATE.session.traces) <= cold_shapes.SHAPES + 4


def test_one_variable_turns_it_off() -> None:
    make = _training(torch.optim.SGD, 0.0)
    assert _run(make, [3, 4, 5, 6, 7], cold=False)[1:] == ([1, 2, 3, 4, 5], [0, 0, 0, 0, 0])


def test_a_cold_program_can_be_looked_into() -> None:
    """Whoever asks for its HLO has it compiled."""
    _run(lambda device: lambda length: [_long(torch.ones(length, 3, device=device))], [3, 4, 5, 6])
    program = STATE.session.recent[-1]
    assert program.cold is not None and not program.has_executable
    assert "HloModule" in program.compiled.as_text() and program.has_executable


def test_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torch_bridge"):
        _run(lambda device: lambda length: [_long(torch.ones(length, 3, device=device))], [3, 4, 5, 6, 7, 8])
    (line,) = [r.getMessage() for r in caplog.records if "eager torch" in r.getMessage()]
    assert "have been compiled for 3 shapes" in line and "NXD_JAX_COLD_SHAPES=0" in line


_OPS = (
    torch.sin,
    torch.cos,
    torch.tanh,
    torch.sigmoid,
    torch.erf,
    torch.atan,
    torch.asinh,
    torch.square,
    torch.abs,
    torch.neg,
    torch.expm1,
    torch.relu,
)


def _other_ops(device: str) -> Step:
    """Each step has an op that no other has, and trains."""
    net = _Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(length: int) -> list[torch.Tensor]:
        optimizer.zero_grad()
        x = _long(net(torch.arange(4, device=device)[None]))
        loss = (_OPS[length - 1](x * 0.01) + 1.0).square().mean()
        loss.backward()
        optimizer.step()
        return [loss]

    return step


def test_other_ops_in_each_step(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_shapes, "STREAK", 6)
    lengths = list(range(1, 13))
    with caplog.at_level("INFO", "torch_bridge"):
        found, compiled, ran = _run(_other_ops, lengths)
    wanted, *_ = _run(_other_ops, lengths, "cpu")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert compiled[-1] == cold_shapes.STREAK and ran[-1] == len(lengths) - cold_shapes.STREAK
    (line,) = [r.getMessage() for r in caplog.records if "eager torch" in r.getMessage()]
    assert "the last 6 programs there ran once each" in line


def _episodes(device: str) -> Step:
    """An episode has so many steps, each with a random draw; the program has all of them, and trains."""
    net = _Net().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

    def step(length: int) -> list[torch.Tensor]:
        state = torch.zeros(1, device=device)
        losses = []
        for k in range(length):
            state = (net(torch.tensor([[k % 3]], device=device)) + state.mean()).tanh()
            losses.append(_long(state).square().mean())
        optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        return [loss]

    return step


def test_the_same_ops_another_number_of_times() -> None:
    """What an episode of reinforcement learning records, or a text that is read word by word: as many ops as it has steps."""
    lengths = [4, 5, 7, 4, 9, 6, 9, 9, 8]
    found, compiled, ran = _run(_episodes, lengths)
    wanted, *_ = _run(_episodes, lengths, "cpu")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    first = compiled[3]
    assert ran[3] == 0 and compiled[6] == first, "three lengths are compiled, then 9, 6 and 9 run in eager torch"
    assert ran[-1] == 4 and compiled[-1] == first + 1, "9 is compiled when it comes for the third time"


def test_stacks_of_cold_programs_are_put_together_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over an episode's steps takes what these draw as one array: on the device, that would be a small program for each length."""
    lengths = [14, 15, 16, 17, 18, 17, 17, 17]
    compiled_for: list[int] = []
    put_together = stacked_arrays._put_together

    def noted(arrays: list[Any]) -> Any:
        compiled_for.append(len(arrays))
        return put_together(arrays)

    monkeypatch.setattr(stacked_arrays, "_put_together", noted)
    found, _, ran = _run(_rollouts, lengths)
    torch.testing.assert_close(found, _run(_rollouts, lengths, "cpu")[0], rtol=1e-4, atol=1e-6)
    assert ran[-1] == 3 and set(compiled_for) == {14, 15, 16, 17}, "17 once it is compiled, 18 never"


def _rollouts(device: str) -> Step:
    """Each step of an episode has an input of its own, that is on the device before."""
    net = nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(length: int) -> list[torch.Tensor]:
        inputs = [torch.full((1, 3), 0.1 * k).add(0.01).to(device) for k in range(length)]
        state = torch.zeros(1, 3, device=device)
        for x in inputs:
            state = (net(x + state)).tanh()
        optimizer.zero_grad()
        loss = state.square().mean()
        loss.backward()
        optimizer.step()
        return [loss]

    return step


def test_programs_that_run_again_are_no_streak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_shapes, "STREAK", 6)
    _, compiled, ran = _run(_other_ops, [1, 2, 3, 4, 4, 5, 6, 7, 8, 9])
    assert compiled[-1] == 9 and ran[-1] == 0


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_of_embeddings(mode: str, last: bool) -> None:
    """The kernel on the CPU leaves results empty that the recorded gradient takes. Bags are empty, and of padding alone, too."""

    def make(device: str) -> Step:
        bag = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=2, include_last_offset=last).to(device)
        update = torch.optim.SGD(bag.parameters(), lr=0.1)

        def step(length: int) -> list[torch.Tensor]:
            draw = torch.Generator().manual_seed(length)
            ids = torch.cat([torch.tensor([2]), torch.randint(0, 7, (length,), generator=draw)]).to(device)
            offsets = torch.tensor([0, 1, 1, 3, *([len(ids)] if last else [])]).to(device)
            weights = torch.rand(len(ids), generator=draw).to(device).requires_grad_() if mode == "sum" else None
            loss = _long(bag(ids, offsets, weights)).pow(2).sum()
            update.zero_grad()
            loss.backward()
            update.step()
            return [loss, bag.weight, *([] if weights is None or weights.grad is None else [weights.grad])]

        return step

    found, compiled, ran = _run(make, LENGTHS)
    torch.testing.assert_close(found, _run(make, LENGTHS, "cpu")[0], rtol=1e-4, atol=1e-5)
    assert compiled[5] == 3 and ran[5] == 3


def test_ctc_loss_of_texts_in_a_row() -> None:
    """Its lowering keeps a wider table for the backward than torch's kernel."""

    def make(device: str) -> Step:
        def step(length: int) -> list[torch.Tensor]:
            x = torch.randn(length + 4, 2, 5, generator=torch.Generator().manual_seed(length)).to(device).requires_grad_()
            lengths = torch.tensor([length + 4, length + 3]), torch.tensor([2, 1])
            loss = nn.functional.ctc_loss(_long(x).log_softmax(-1), torch.tensor([1, 2, 3]).to(device), *(t.to(device) for t in lengths))
            loss.backward()
            return [loss, x.grad] if x.grad is not None else [loss]

        return step

    found, compiled, ran = _run(make, LENGTHS[:5])
    torch.testing.assert_close(found, _run(make, LENGTHS[:5], "cpu")[0], rtol=1e-4, atol=1e-5)
    assert compiled[-1] == 3 and ran[-1] == 2


def test_whoever_clears_the_cache_starts_anew() -> None:
    """`xr.clear_computation_cache()`: the next shapes are compiled, as in a new process."""

    def compiled(lengths: list[int]) -> int:
        before = _compiled()
        for length in lengths:
            _long(torch.ones(length, device="xla")).sum().item()
        return _compiled() - before

    assert compiled([2, 3, 4, 5]) == cold_shapes.SHAPES
    torch_xla.runtime.clear_computation_cache()
    assert compiled([5, 6]) == 2
