"""`torch_neuronx.trace` and what is done with traced models: batches of any size, buckets, other weights, loading."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_neuronx
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch_neuronx import contexts

from torch_bridge.aot.model import Model
from torch_bridge.mesh import world

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


class Net(nn.Module):
    """Convolution, batch norm and dropout, in evaluation mode; several results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv1d(2, 3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.uniform_()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.drop(torch.relu(self.norm(self.conv(x))))
        return self.out(h.flatten(1)), {"hidden": h, "rows": h.mean((1, 2))}


X = torch.arange(40.0).view(4, 2, 5) / 40


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return Net().eval()


@pytest.fixture(scope="module")
def saved(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced") / "net.pt"
    torch.jit.save(torch_neuronx.trace(net, X, compiler_args=["-O1"], compiler_workdir=path.parent / "work"), path)
    return path


def check(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got[0], wanted[0].detach())
    assert list(got[1]) == ["hidden", "rows"]
    for name in got[1]:
        torch.testing.assert_close(got[1][name], wanted[1][name].detach())


def test_the_same_as_the_module(net: nn.Module, saved: Path) -> None:
    traced = torch_neuronx.trace(net, X)
    check(traced(X), net(X))
    check(torch.jit.load(saved)(X), net(X))
    assert torch.equal(X, torch.arange(40.0).view(4, 2, 5) / 40) and not net.training


def test_any_batch(net: nn.Module, saved: Path) -> None:
    """Rows run 4 at a time; the last ones are filled up."""
    traced = torch.jit.load(saved)
    with pytest.raises(
        ValueError, match=r"traced for inputs float32 \[4, 2, 5\], got float32 \[3, 2, 5\]: .*; torch_neuronx\.dynamic_batch\(model\) lets"
    ):
        traced(X[:3])
    assert torch_neuronx.dynamic_batch(traced) is traced
    for rows in (1, 3, 4, 5, 8, 11):
        x = torch.randn(rows, 2, 5)
        check(traced(x), net(x))
    with pytest.raises(
        ValueError, match=r"traced for inputs float32 \[4, 2, 5\], got float32 \[3, 2, 6\]: pad them, or trace the model for these"
    ):
        traced(torch.ones(3, 2, 6))
    with pytest.raises(
        ValueError, match=r"traced for inputs float32 \[4, 2, 5\], got float64 \[4, 2, 5\]: cast them, or trace the model for these"
    ):
        traced(X.double())
    with pytest.raises(ValueError, match=r"dynamic_batch needs inputs of the same number of rows, at least one, got \[0, 2, 5\]"):
        traced(X[:0])


def test_batches_of_several_inputs() -> None:
    class Two(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor], more: dict[str, torch.Tensor]) -> Any:
            return [pair[0] + pair[1], more["z"] * 2]

    example = ((torch.ones(2, 3), torch.ones(2, 3)), {"z": torch.ones(2)})
    traced = torch_neuronx.dynamic_batch(torch_neuronx.trace(Two(), example))
    x, z = torch.randn(5, 3), torch.randn(5)
    got = traced((x, x), {"z": z})
    assert torch.equal(got[0], x + x) and torch.equal(got[1], z * 2)
    with pytest.raises(
        ValueError, match=r"traced with inputs \(\(tensor, tensor\), \{'z': tensor\}\), got \(\[tensor, tensor\], \{'z': tensor\}\)"
    ):
        traced([x, x], {"z": z})
    with pytest.raises(ValueError, match=r"the same number of rows, at least one, got \[5, 3\], \[5, 3\], \[4\]"):
        traced((x, x), {"z": z[:4]})


def test_results_without_a_batch() -> None:
    number = torch_neuronx.dynamic_batch(torch_neuronx.trace(lambda x: (x, x.sum()), torch.ones(2, 3)))
    with pytest.raises(
        ValueError, match=r"dynamic_batch needs results with the batch as dim 0, 2 rows here, and the model returns one of shape \[\]"
    ):
        number(torch.ones(4, 3))
    turned = torch_neuronx.dynamic_batch(torch_neuronx.trace(lambda x: x.t(), torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"2 rows here, and the model returns one of shape \[3, 2\]"):
        turned(torch.ones(4, 3))


def test_data_parallel(net: nn.Module, saved: Path) -> None:
    traced = torch.jit.load(saved)
    parallel = torch_neuronx.DataParallel(traced, device_ids=[0, 1])
    x = torch.randn(6, 2, 5)
    check(parallel(x), net(x))
    assert not traced.dynamic_batch
    parallel.disable_dynamic_batching()
    with pytest.raises(ValueError, match="traced for inputs"):
        parallel(x)
    check(torch_neuronx.DataParallel(traced, set_dynamic_batching=False)(X), net(X))


def test_data_parallel_without_dynamic_batching() -> None:
    """Each core has a part of the traced size, as the samples for Stable Diffusion want it, whose guidance doubles the batch."""

    def scaled(x: torch.Tensor, scale: torch.Tensor, *, by: float = 2.0) -> dict[str, torch.Tensor]:
        return {"y": x * scale * by, "sum": x.sum()}

    x, scale = torch.arange(12.0).reshape(2, 6), torch.tensor(3.0)
    rows = torch_neuronx.DataParallel(torch_neuronx.trace(scaled, (x[:1], scale)), [0, 1], set_dynamic_batching=False)
    torch.testing.assert_close(rows(x, scale)["y"], x * 6)
    assert rows(x, scale)["sum"].tolist() == [15.0, 51.0]
    with pytest.raises(ValueError, match=r"each of 2 cores an equal part along dim 0, .* got an input of shape \[3, 6\]"):
        rows(torch.ones(3, 6), scale)
    with pytest.raises(ValueError, match="traced for inputs"):
        rows(torch.ones(4, 6), scale)
    columns = torch_neuronx.DataParallel(torch_neuronx.trace(scaled, (x[:, :2], scale)), dim=1)
    torch.testing.assert_close(columns(x, scale)["y"], x * 6)


def test_aliases() -> None:
    """A state begins with the values of the module, and its result is not returned."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
            self.register_buffer("n", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            return self.total + x, 3, self.n + 1, x * 2

    module = Sum()
    traced = torch_neuronx.trace(module, torch.ones(2), input_output_aliases={module.total: 0, module.n: 1})
    for k in range(1, 4):
        three, doubled = traced(torch.ones(2))
        assert three == 3 and doubled.tolist() == [2.0, 2.0]
        assert traced.programs.read("total", 0).tolist() == [1.0 + k, 2.0 + k] and traced.programs.read("n", 0).item() == k
    assert module.total.tolist() == [1.0, 2.0]


def test_states_and_batches_that_are_filled_up() -> None:
    """Rows that fill up the last batch would count in the state."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.sum()
            return x * 2

    traced = torch_neuronx.dynamic_batch(torch_neuronx.trace(Count(), torch.ones(2, 3)))
    assert traced(torch.ones(4, 3)).shape == (4, 3)
    with pytest.raises(
        ValueError, match=r"dynamic_batch got 3 rows, and the model was traced for 2 and keeps seen from call to call: .* Pass a multiple"
    ):
        traced(torch.ones(3, 3))
    assert traced.programs.read("seen", 0).item() == 12


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
def test_attributes_that_forward_replaces() -> None:
    """A warning, as the traced model does not keep them; the module has what it had."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.calls, self.last = torch.tensor(1.0), torch.tensor(0), None
            self.normed = torch.nn.utils.weight_norm(nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total, self.calls, self.last, self.new = self.total + x.sum(), self.calls + 1, x, x + 1
            return self.normed(x) + self.total + self.calls

    module = Sums()
    with pytest.warns(
        UserWarning, match=r"forward assigns (calls, total|total, calls) anew, and the traced model has the value of the trace"
    ):
        traced = torch_neuronx.trace(module, torch.ones(2, 3))
    assert (module.total.item(), module.calls.item(), module.last, hasattr(module, "new")) == (1.0, 0, None, False)
    torch.testing.assert_close(traced(torch.ones(2, 3)), module(torch.ones(2, 3)))


class Caches(nn.Module):
    """Tables that are made when they are first needed, and kept in every place that code has for them."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.table: torch.Tensor | None = None
        self.by_length: dict[int, Any] = {}
        self.nested: list[Any] = [[None], 3]
        self.shape: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.length < len(x):
            self.length, self.table = len(x), torch.arange(len(x), device=x.device)
        if len(x) not in self.by_length:
            self.by_length[len(x)] = (torch.arange(len(x), device=x.device) * 2, len(x))
        if self.shape != tuple(x.shape):
            self.shape, self.nested[0][0] = tuple(x.shape), torch.ones(len(x), device=x.device)
        if not hasattr(self, "made") or len(self.made) < len(x):
            self.register_buffer("made", torch.arange(len(x), device=x.device) * 3, persistent=False)
        assert self.table is not None
        return x + self.table[: len(x)] + self.by_length[len(x)][0] + self.nested[0][0] + self.made[: len(x)]


def test_what_forward_caches_is_gone_behind_the_trace() -> None:
    module = Caches()
    for n in (2, 3, 2):
        x = torch.randn(n)
        torch.testing.assert_close(torch_neuronx.trace(module, x)(x), Caches()(x))
        assert (module.length, module.table, module.by_length, module.nested, module.shape) == (0, None, {}, [[None], 3], ())
        assert not dict(module.named_buffers())
    torch.testing.assert_close(module(torch.ones(3)), Caches()(torch.ones(3)))


class Parts(nn.Module):
    """One layer under two names, and TorchScript without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.embed = nn.ModuleList([self.shared])
        self.act = torch.jit.script(nn.GELU())
        self.traced = torch.jit.trace(nn.Tanh(), torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.traced(self.act(self.shared(x))) + self.embed[0](x)


def test_modules_under_two_names_and_scripts(tmp_path: Path) -> None:
    module, other, x = Parts(), Parts(), torch.randn(2, 3)
    traced = torch_neuronx.trace(module, x)
    torch.jit.save(traced, tmp_path / "model.pt")
    for one in (traced, torch.jit.load(tmp_path / "model.pt")):
        torch.testing.assert_close(one(x), module(x).detach())
        torch_neuronx.replace_weights(one, other)
        torch.testing.assert_close(one(x), other(x).detach())
    assert not torch.compiler.is_exporting() and module.shared.weight.device.type == "cpu"


def test_other_weights(net: nn.Module, saved: Path) -> None:
    other = Net().eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.rand_like(p))
        other.norm.running_var.mul_(3)
    for run_first in (False, True):
        traced = torch.jit.load(saved)
        if run_first:
            traced(X)
        torch_neuronx.replace_weights(traced, other)
        check(traced(X), other(X))
        torch_neuronx.replace_weights(traced, {"out.bias": net.out.bias.detach()})  # others stay
        wanted = other(X)
        check(traced(X), (wanted[0] - other.out.bias + net.out.bias, wanted[1]))
    with pytest.raises(ValueError, match="the traced model has no weight nothing"):
        torch_neuronx.replace_weights(traced, {"nothing": torch.ones(1)})
    with pytest.raises(ValueError, match=r"out\.bias was traced with shape \[2\], got \[3\]"):
        torch_neuronx.replace_weights(traced, {"out.bias": torch.ones(3)})
    check(traced(X), (wanted[0] - other.out.bias + net.out.bias, wanted[1]))  # as before


def test_weights_that_change_after_the_trace(tmp_path: Path) -> None:
    """The traced model goes on with those of the trace, whether it ran before they changed or not."""
    module, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch.no_grad():
        wanted = module(x)
        ran, waits = torch_neuronx.trace(module, x), torch_neuronx.trace(module, x)
        ran(x)
        module.weight.zero_()
    torch.jit.save(ran, tmp_path / "ran.pt")
    for model in (ran, waits, torch.jit.load(tmp_path / "ran.pt")):
        torch.testing.assert_close(model(x), wanted)
    given = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    torch_neuronx.replace_weights(again := torch_neuronx.trace(module, x), given)
    given["weight"].zero_()
    torch.testing.assert_close(again(x), torch.full((1, 2), 4.0))
    with pytest.raises(ValueError, match=r"weight was traced with shape \[2, 3\], got \[3, 2\]"):  # before the first call, too
        torch_neuronx.replace_weights(waits, {"weight": torch.ones(3, 2)})
    torch.testing.assert_close(waits(x), wanted)


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def test_tied_weights_by_all_their_names(tmp_path: Path) -> None:
    module, other, tokens = Tied(), Tied(), torch.tensor([[0, 4, 2]])
    torch.jit.save(torch_neuronx.trace(module, tokens), tmp_path / "tied.pt")
    wanted, weight = other(tokens).detach(), other.head.weight.detach()
    for weights in (other, other.state_dict(), {"embedding.weight": weight, "head.weight": weight.clone()}, {"head.weight": weight}):
        traced = torch.jit.load(tmp_path / "tied.pt")
        torch_neuronx.replace_weights(traced, weights)
        torch.testing.assert_close(traced(tokens), wanted)
        module.load_state_dict(traced.state_dict())
    with pytest.raises(ValueError, match=r"head\.weight is embedding\.weight in the traced model, .* are given other values"):
        torch_neuronx.replace_weights(traced, {"embedding.weight": weight, "head.weight": weight + 1})


def test_inputs_by_keyword(tmp_path: Path) -> None:
    class Minus(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return ids - mask

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    traced = torch_neuronx.trace(Minus(), (x, y))
    torch.jit.save(traced, tmp_path / "model.pt")
    for one in (traced, torch.jit.load(tmp_path / "model.pt"), torch_neuronx.DataParallel(traced)):
        assert torch.equal(one(mask=y, ids=x), x - y) and torch.equal(one(x, mask=y), x - y)
        with pytest.raises(TypeError, match=r"the model was traced with inputs ids, mask; got 1 by position, and ids by keyword"):
            one(x, ids=x)
    with pytest.raises(TypeError, match=r"the model was traced with inputs positional ones only; got 0 by position, and input by keyword"):
        torch_neuronx.trace(torch.sigmoid, x)(input=x)


def test_inputs_of_the_same_structure() -> None:
    """Keys may come in any order. A number of another type is another constant: results would have another dtype."""
    a, b = torch.ones(2), torch.full((2,), 3.0)
    traced = torch_neuronx.trace(lambda named, k: named["a"] - named["b"][0] * k, ({"a": a, "b": [b]}, 2))
    for order in ({"a": a, "b": [b]}, {"b": [b], "a": a}):
        torch.testing.assert_close(traced(order, 2), a - 2 * b)
    for named, k in (({"b": [b], "c": a}, 2), ({"a": a, "b": (b,)}, 2), ({"a": a, "b": [b]}, 2.0), ({"a": a, "b": [b]}, 3)):
        with pytest.raises(ValueError, match=r"the model was traced with inputs \(\{'a': tensor, 'b': \[tensor\]\}, 2\), got"):
            traced(named, k)


class Count(nn.Module):
    """Adds the number of its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight + self.calls


def test_copies() -> None:
    """States and weights are the copy's own, and states go on from what they are."""
    x = torch.zeros(2)
    unused = torch_neuronx.trace(Count(), x)
    one = nn.Sequential(copy.deepcopy(unused))
    one(x)
    other = copy.deepcopy(one)
    torch_neuronx.replace_weights(other[0], {"weight": torch.full((2,), 3.0)})
    assert [m(torch.ones(2))[0].item() for m in (one, one, other, one, other, unused)] == [3, 4, 5, 5, 6, 2]


def test_the_first_call_from_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them loads the model; states begin once."""
    begun: list[Model] = []
    waiting, beginning = threading.Barrier(4), Model.reset_states

    def slowly(self: Model) -> None:
        time.sleep(0.1)
        begun.append(self)
        beginning(self)

    monkeypatch.setattr(Model, "reset_states", slowly)
    traced = torch_neuronx.trace(Count(), torch.zeros(2))

    def call(_: int) -> float:
        waiting.wait()
        return float(traced(torch.zeros(2))[0])

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(call, range(4))) == [1, 2, 3, 4]
    assert len(begun) == 1


def test_loading(saved: Path) -> None:
    with contexts.disable_nrt_load(), contexts.lazy_load(True):
        traced = torch.jit.load(saved)
    torch_neuronx.lazy_load(traced)
    torch_neuronx.move_trace_to_device(traced, 3)
    assert not traced.programs.started
    torch_neuronx.async_load(traced)
    assert traced.programs.started
    other = torch.jit.load(saved)
    torch_neuronx.lazy_load(other, False)
    assert other.programs.started
    with pytest.raises(ValueError, match="device_id must not be negative, got -1"):
        torch_neuronx.move_trace_to_device(traced, -1)
    for load in (torch_neuronx.async_load, lambda m: torch_neuronx.lazy_load(m, False)):
        parts = nn.ModuleList([torch.jit.load(saved), torch.jit.load(saved)])
        load(parts)
        assert all(part.programs.started for part in parts)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("DataParallel", torch_neuronx.DataParallel),
        ("async_load", torch_neuronx.async_load),
        ("lazy_load", lambda m: torch_neuronx.lazy_load(m, False)),
        ("move_trace_to_device", lambda m: torch_neuronx.move_trace_to_device(m, 0)),
        ("replace_weights", lambda m: torch_neuronx.replace_weights(m, {})),
        ("dynamic_batch", torch_neuronx.dynamic_batch),
    ],
)
def test_models_that_are_not_traced(name: str, call: Callable[[Any], Any]) -> None:
    text = rf"torch_neuronx\.{name} takes a model that torch_neuronx\.trace returned or torch\.jit\.load read, got Linear"
    with pytest.raises(ValueError, match=text):
        call(nn.Linear(1, 1))


def test_what_cannot_be_traced() -> None:
    trace = torch_neuronx.trace
    with pytest.raises(ValueError, match=r"func must be an nn\.Module or a function, got int"):
        trace(3, torch.ones(1))
    with pytest.raises(ValueError, match="a trace needs at least one example tensor"):
        trace(nn.Linear(1, 1), ())
    with pytest.raises(ValueError, match="a traced forward returns set"):
        trace(lambda x: {"a": {1}, "x": x}, torch.ones(1))
    with pytest.raises(RuntimeError, match="asked for the value of a tensor"):
        trace(lambda x: x if x.sum() > 0 else -x, torch.ones(1))
    with pytest.raises(ValueError, match="a traced forward is given set: only tensors, constants"):
        trace(lambda x, y: x, (torch.ones(1), {1}))


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


def test_where_a_value_is_read() -> None:
    """The error names the line; in transformers, what reads no values."""
    asked = r"asked for the value of a tensor(.|\n)*It was asked for at .*test_torch_neuronx_trace\.py:\d+ in reads: return x \* float\(x\.sum\(\)\)\.$"
    for call in (torch_neuronx.trace, torch_neuronx.analyze):
        with pytest.raises(RuntimeError, match=asked):
            call(reads, torch.ones(1))
    found: dict[str, Any] = {}
    exec(compile("def mask(x):\n    return x if x.all() else -x", "/x/transformers/masks.py", "exec"), found)
    with pytest.raises(
        RuntimeError, match=r'masks\.py:2 in mask: .*\. Make the model with attn_implementation="eager", which reads no values of masks'
    ):
        torch_neuronx.trace(lambda x: found["mask"](x), torch.ones(1))
    assert not torch.compiler.is_exporting()


class _Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return xm.all_reduce(xm.REDUCE_SUM, x)


class _Numbered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + xr.global_ordinal()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    world.configure(world.World(2))
    yield
    world.configure(None)


@pytest.mark.usefixtures("two_ranks")
def test_a_world_of_several_ranks_has_a_model_of_one(net: nn.Module, tmp_path: Path) -> None:
    """Scripts for inference set NEURON_RT_NUM_CORES=2, so that DataParallel has two cores."""
    model = torch_neuronx.trace(net, X)
    check(model(X), net(X))
    torch.jit.save(model, tmp_path / "model.pt")
    more = torch.cat([X, X + 1])
    check(torch_neuronx.DataParallel(torch.jit.load(tmp_path / "model.pt"), device_ids=[0, 1])(more), net(more))
    assert world.size() == 2


@pytest.mark.usefixtures("two_ranks")
def test_a_forward_that_needs_the_other_ranks_is_refused() -> None:
    for module in (_Summed(), _Numbered()):
        with pytest.raises(
            RuntimeError, match=r"one rank, the world has 2, and its forward communicates .*parallel_model_trace or ModelBuilder"
        ):
            torch_neuronx.trace(module, torch.ones(1))
    with pytest.raises(RuntimeError, match=r"on xla, where each rank has its own: move them to the CPU first"):
        torch_neuronx.trace(nn.Linear(1, 1).to("xla"), torch.ones(1))


def test_analyze_counts_the_modules_own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    module, ids = nn.Embedding(4, 2), torch.tensor([1, 2])
    plain = torch_neuronx.analyze(module, ids)
    monkeypatch.setenv("NXD_JAX_CHECK_INDICES", "1")
    assert torch_neuronx.analyze(module, ids) == plain


def test_analyze(net: nn.Module) -> None:
    report = torch_neuronx.analyze(net, X)
    assert report["support_percentage"] == 100.0 and report["unsupported_operators"] == []
    found = {o["operator"]: o["instances"] for o in report["supported_operators"]}
    assert found["aten.relu.default"] == 1 and any("convolution" in name for name in found)


class Halves(nn.Module):
    """Two buffers in one tensor."""

    def __init__(self, end: int, start: int) -> None:
        super().__init__()
        both = torch.zeros(2, 4)
        self.register_buffer("k", both[:, :end])
        self.register_buffer("v", both[:, start:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.k.add_(x)
        return self.k.sum() + self.v.sum()


def test_a_state_in_the_memory_of_another_buffer_is_refused() -> None:
    """Its writes would not be seen there. Parts of one tensor that do not meet are two states as good as any."""
    with pytest.raises(ValueError, match="updates k, which shares memory with v, .* register one of them"):
        torch_neuronx.trace(Halves(3, 2), torch.tensor(1.0))
    traced = torch_neuronx.trace(Halves(2, 2), torch.tensor(1.0))
    assert [traced(torch.tensor(1.0)).item() for _ in range(2)] == [4, 8]


def test_states_of_several_parts_are_refused() -> None:
    """Each of the original's cores has its own."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.sum()
            return x + self.total

    traced = torch_neuronx.trace(Sum(), torch.ones(2, 3))
    for dynamic in (True, False):
        parallel = torch_neuronx.DataParallel(traced, set_dynamic_batching=dynamic)
        with pytest.raises(NotImplementedError, match="several parts: the model keeps total from call to call"):
            parallel(torch.ones(4, 3))
        parallel(torch.ones(2, 3))
    assert traced(torch.zeros(2, 3))[0, 0] == 12  # the refused calls have added nothing


def test_what_has_no_code_to_trace_is_refused() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the module is Linear in TorchScript, .* before torch.jit.script or torch.jit.trace"):
        torch_neuronx.trace(script, torch.ones(1, 2))
    with pytest.raises(ValueError, match="0 in the module is Linear in TorchScript"):
        torch_neuronx.trace(nn.Sequential(script), torch.ones(1, 2))
    traced = torch_neuronx.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="the model is traced already"):
        torch_neuronx.trace(traced, torch.ones(1, 2))
    with pytest.raises(ValueError, match="0 is traced already"):
        torch_neuronx.trace(nn.Sequential(traced), torch.ones(1, 2))


@pytest.mark.parametrize("select", [lambda x: x[x > 0], torch.nonzero, torch.unique], ids=["mask", "nonzero", "unique"])
def test_shapes_that_follow_from_values_are_named(select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="gives a result whose shape follows from values, .* torch.where"):
        torch_neuronx.trace(select, torch.ones(3))
