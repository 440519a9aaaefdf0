"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on xla as one op for each layer and direction: numbers, gradients of any order and lengths as in eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch.nn.utils import rnn

import torch_bridge
from tests.torch_bridge.ranks.conftest import Hosted, hosted  # noqa: F401
from torch_bridge.recorder import recurrent_layers, sharded
from torch_bridge.runtime import session

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KINDS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


def made(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind](3, 4, **options)


def states(model: nn.Module, batch: int, dtype: torch.dtype = torch.float32) -> Any:
    """Of a model's first step, drawn."""
    layers = model.num_layers * (2 if model.bidirectional else 1)
    h = torch.randn(layers, batch, model.proj_size or model.hidden_size, dtype=dtype)
    return (h, torch.randn(layers, batch, model.hidden_size, dtype=dtype)) if isinstance(model, nn.LSTM) else h


def tree(x: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tuple(map(fn, x)) if isinstance(x, tuple) else fn(x)


def flat(x: Any) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def results(model: nn.Module, device: str, x: torch.Tensor, start: Any, run: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """Outputs, last states, and the gradients of everything, of a loss that weighs each element differently."""
    model = model.to(device)
    model.zero_grad()
    x = x.to(device).detach().requires_grad_()
    start = tree(start, lambda t: t.to(device).detach().requires_grad_())
    y, last = (run or model)(x, start)
    outs = [y, *flat(last)]
    sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape).to(device)).sum() for o in outs).backward()
    return [t.detach().cpu() for t in (*outs, x.grad, *(t.grad for t in flat(start)), *(p.grad for p in model.parameters()))]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor], rtol: float = 1e-5, atol: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def layer_ops() -> list[str]:
    """The recurrent ops of the programs that ran last."""
    names = [str(n.target) for p in session.current().recent for n in p.graph.nodes if n.op == "call_function"]
    return [n for n in names if "recurrent_layer" in n or "_cell" in n]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"bidirectional": True, "batch_first": True},
]


@pytest.mark.thorough(keep=10)
@pytest.mark.core(keep=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_states_and_gradients(kind: str, options: dict[str, Any]) -> None:
    model, twin = made(kind, **options), made(kind, **options)
    x = torch.randn(5, 6, 3)
    start = states(model, 5 if options.get("batch_first") else 6)
    session.current().recent.clear()
    equal(results(twin, "xla", x, start), results(model, "cpu", x, start))
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    assert sorted(set(layer_ops())) == ["torch_bridge.recurrent_layer.default", "torch_bridge.recurrent_layer_backward.default"]
    assert len(layer_ops()) == 2 * count


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 3, 1], [2, 5, 4]], ids=str)
def test_packed_sequences(kind: str, lengths: list[int]) -> None:
    """Both directions: the backward one starts at each sequence's own end. The last states are those of the last steps."""

    def packed(model: nn.Module) -> Callable[..., Any]:
        def run(x: torch.Tensor, start: Any) -> Any:
            given = rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
            y, last = model(given, start)
            return rnn.pad_packed_sequence(y)[0], last

        return run

    options = {"num_layers": 2, "bidirectional": True}
    model, twin = made(kind, **options), made(kind, **options)
    x, start = torch.randn(5, 3, 3), states(model, 3)
    session.current().recent.clear()
    equal(results(twin, "xla", x, start, packed(twin.to("xla"))), results(model, "cpu", x, start, packed(model)))
    assert len(layer_ops()) == 8


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind: str, dtype: torch.dtype, rtol: float) -> None:
    model, twin = made(kind).to(dtype), made(kind).to(dtype)
    x, start = torch.randn(7, 2, 3, dtype=dtype), states(model, 2, dtype)
    equal(results(twin, "xla", x, start), results(model, "cpu", x, start), rtol, rtol)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        model = made(kind, bidirectional=True).to(torch.float64).to(device)
        torch.manual_seed(1)
        x = torch.randn(5, 2, 3, dtype=torch.float64).to(device).requires_grad_()
        y, last = model(x)
        loss = y.square().sum() + sum(t.sin().sum() for t in flat(last))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        grad.square().sum().backward()
        return [t.detach().cpu() for t in (grad, x.grad, *(p.grad for p in model.parameters()))]

    equal(run("xla"), run("cpu"), 1e-10, 1e-10)


def test_dropout_between_layers() -> None:
    """Draws once for each layer but the last, on its whole result; none in evaluation."""
    model = made("gru", num_layers=3, dropout=0.5).to("xla")
    x = torch.ones(6, 4, 3).to("xla")
    session.current().recent.clear()
    one, other = (model(x)[0].detach().cpu() for _ in range(2))
    assert not torch.equal(one, other)
    draws = [n for n in session.current().recent[-1].graph.nodes if "draw" in n.meta]
    assert len(draws) == 2
    model.eval()
    assert torch.equal(model(x)[0].detach().cpu(), model(x)[0].detach().cpu())


def test_without_gradients() -> None:
    model, twin = made("lstm", num_layers=2), made("lstm", num_layers=2).to("xla")
    x = torch.randn(8, 2, 3)
    for block in (torch.no_grad, torch.inference_mode):
        with block():
            y, (h, c) = twin(x.to("xla"))
            equal([y.cpu(), h.cpu(), c.cpu()], [t.detach() for t in (model(x)[0], *model(x)[1])])
    twin.requires_grad_(False)
    given = x.to("xla").requires_grad_()
    twin(given)[0].sum().backward()
    wanted = x.clone().requires_grad_()
    model(wanted)[0].sum().backward()
    equal([given.grad.cpu()], [wanted.grad])


def test_only_what_is_needed_has_gradients() -> None:
    """A frozen weight, and a loss of the last state alone."""

    def run(device: str) -> list[Any]:
        model = made("lstm").to(device)
        model.weight_hh_l0.requires_grad_(False)
        torch.manual_seed(1)
        model(torch.randn(5, 2, 3).to(device))[1][1].sum().backward()
        return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]

    found, expected = run("xla"), run("cpu")
    assert [g is None for g in found] == [g is None for g in expected]
    equal([g for g in found if g is not None], [g for g in expected if g is not None])


def test_long_sequences_are_no_longer_programs() -> None:
    """The graph does not grow with time; a new length is a new program."""
    model = made("lstm", num_layers=2).to("xla")
    counts = []
    for steps in (16, 200):
        session.current().recent.clear()
        model(torch.ones(steps, 2, 3).to("xla"))[0].sum().backward()
        xm.mark_step()
        counts.append(max(len(p.graph.nodes) for p in session.current().recent))
        model.zero_grad()
    assert counts[0] == counts[1] < 120


def test_short_sequences_are_recorded_step_by_step() -> None:
    session.current().recent.clear()
    steps = recurrent_layers.LEAST_STEPS - 1
    made("lstm").to("xla")(torch.ones(steps, 2, 3).to("xla"))[0].cpu()
    assert layer_ops() == ["aten._thnn_fused_lstm_cell.default"] * steps


def test_autocast_and_functional_transforms_go_torchs_way() -> None:
    model = made("lstm")
    expected = model(torch.ones(5, 2, 3))[0]
    twin = made("lstm").to("xla")
    session.current().recent.clear()
    with torch.autocast("xla", torch.bfloat16):
        found = twin(torch.ones(5, 2, 3).to("xla"))[0]
    found.cpu()
    assert "torch_bridge.recurrent_layer.default" not in layer_ops() and "aten._thnn_fused_lstm_cell.default" in layer_ops()
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.05)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(twin, weights, (x,))[0].square().sum()

    grads = torch.func.grad(loss)(dict(twin.named_parameters()), torch.ones(5, 2, 3).to("xla"))
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name].cpu(), parameter.grad, rtol=1e-4, atol=1e-5)


def test_results_that_are_rounded_go_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all results are rounded to bfloat16, those of each step are."""
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
    session.current().recent.clear()
    made("gru").to("xla")(torch.ones(5, 2, 3).to("xla"))[0].cpu()
    assert layer_ops() == ["aten._thnn_fused_gru_cell.default"] * 5


def test_packed_sequences_with_a_default_device() -> None:
    """Row numbers and batch sizes stay on the CPU."""
    model, x = made("lstm"), torch.randn(5, 2, 3)
    lengths = torch.tensor([5, 4])
    expected = model(rnn.pack_padded_sequence(x, lengths))[0].data
    twin = made("lstm").to("xla")
    with torch.device("xla"):
        found = twin(rnn.pack_padded_sequence(x.to("xla"), lengths))[0]
        padded, _ = rnn.pad_packed_sequence(found)
    equal([found.data.detach().cpu()], [expected.detach()])
    assert tuple(padded.shape) == (5, 2, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(x[..., :2]),
        lambda m, x: m(x, (x.new_zeros(1, 9, 4), x.new_zeros(1, 9, 4))),
        lambda m, x: torch._VF.lstm(x, [x.new_zeros(1, 2, 4)], m._flat_weights, True, 1, 0.0, True, False, False),
    ],
    ids=["input size", "batch of the states", "one state"],
)
def test_errors_are_torchs(call: Callable[[Any, torch.Tensor], Any]) -> None:
    texts = []
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError) as caught:
            call(made("lstm").to(device), torch.ones(5, 2, 3).to(device))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_captured_and_as_a_jax_function() -> None:
    """The graph runs in eager torch, with gradients, and as JAX."""
    model = made("gru", num_layers=2)
    x = torch.randn(6, 2, 3)
    y = model(x)[0]
    graph = torch_bridge.capture(model, x)
    assert sum("recurrent_layer" in str(n.target) for n in graph.graph.nodes) == 2
    weights = [dict(model.named_parameters())[name] for name in graph.signature.params]
    torch.testing.assert_close(graph(*weights, x)[0], y, rtol=1e-5, atol=1e-6)
    given = x.clone().requires_grad_()
    graph(*weights, given)[0].square().sum().backward()
    wanted = x.clone().requires_grad_()
    model(wanted)[0].square().sum().backward()
    torch.testing.assert_close(given.grad, wanted.grad, rtol=1e-5, atol=1e-6)
    params = {name: p.detach().numpy() for name, p in model.named_parameters()}
    found, _ = torch_bridge.to_jax(model)(params, {}, None, x.numpy())
    np.testing.assert_allclose(np.asarray(found[0]), y.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_played() -> None:
    """A module that is played does what it does op by op."""

    def losses(optimize: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4, 2)).to("xla")
        if optimize:
            torch_bridge.optimize(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        found = []
        for step in range(6):
            loss = model(torch.full((5, 2, 3), 1.0 + step).to("xla"))[0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            xm.mark_step()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_each_rank_has_its_own_batch(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, dp=2, tp=2)
    model = made("lstm", bidirectional=True)
    twin = made("lstm", bidirectional=True).to("xla")
    batches = [torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    x = sharded.from_ranks(lambda rank: batches[rank // 2], ("dp",))
    y = twin(x)[0]
    y.square().sum().backward()
    for rank, own in enumerate(sharded.shards(y.detach())):
        torch.testing.assert_close(own, model(batches[rank // 2])[0].detach(), rtol=1e-5, atol=1e-6)
    for k in range(2):
        model.zero_grad()
        model(batches[k])[0].square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(sharded.shards(q.grad)[2 * k], p.grad, rtol=1e-4, atol=1e-5)


def test_torch_xlas_gru_is_torchs() -> None:
    from torch_xla.experimental.gru import GRU

    ours, wanted = GRU(3, 4, num_layers=2, batch_first=True), nn.GRU(3, 4, num_layers=2, batch_first=True)
    wanted.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 3)
    for found, value in zip(ours.to("xla")(x.to("xla")), wanted(x), strict=True):
        torch.testing.assert_close(found.cpu(), value)
