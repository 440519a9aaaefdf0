"""`NXD_JAX_CHECK_INDICES`: indices that the device would clamp in silence are errors, as they are in eager torch on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_neuronx
import torch_xla
from torch import nn

import torch_bridge
from torch_bridge.collectives import index_checks
from torch_bridge.config import environment
from torch_bridge.device import debug_modes
from torch_bridge.device.startup import use_dispatch
from torch_bridge.recorder import dispatch, expected_indices, tensor
from torch_bridge.runtime import executor, session


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`checked(NAME="1")` applies variables as at the first xla tensor; undone after the test."""
    executor.sync()
    monkeypatch.setattr(session, "CHECKS", [])
    monkeypatch.setattr(session.current(), "observers", ())
    monkeypatch.setattr(expected_indices, "_expect", None)

    def apply(**values: str) -> None:
        for name, value in (values or {"NXD_JAX_CHECK_INDICES": "1"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tensor, "dispatch", debug_modes.configure(environment.check(), dispatch.dispatch))

    yield apply
    monkeypatch.undo()
    use_dispatch()
    executor.clear_cache()


def _raises(run: Callable[[], Any]) -> bool:
    try:
        torch_xla.sync()
        made = run()
        torch_xla.sync()
        del made
    except (IndexError, RuntimeError):
        return True
    return False


X = torch.arange(15.0).view(3, 5)
OPS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "embedding": lambda x, i: F.embedding(i([0, 2]), x),
    "embedding padding_idx": lambda x, i: F.embedding(i([1, 2]), x, padding_idx=1),
    "embedding_bag": lambda x, i: F.embedding_bag(i([0, 2]), x, i([0], True)),
    "index_select": lambda x, i: x.index_select(0, i([0, 2])),
    "gather": lambda x, i: x.gather(0, i([[0, 2]])),
    "scatter": lambda x, i: x.scatter(0, i([[0, 2]]), torch.ones_like(x)),
    "scatter value": lambda x, i: x.scatter(0, i([[0, 2]]), 4.0),
    "scatter_": lambda x, i: x.clone().scatter_(0, i([[0, 2]]), 4.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i([[0, 2]]), torch.ones_like(x)),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i([[0, 2]]), torch.ones_like(x), "amax"),
    "index": lambda x, i: x[i([0, 2])],
    "index of two": lambda x, i: x[:, 1:4][i([0, 2]), torch.zeros_like(i([0, 2]))],
    "index_put": lambda x, i: x.index_put((i([0, 2]),), torch.ones_like(x[:1])),
    "setitem": lambda x, i: x.clone().__setitem__(i([0, 2]), 1.0) or x,
    "index_add": lambda x, i: x.index_add(0, i([0, 2]), torch.ones_like(x[:2])),
    "index_copy": lambda x, i: x.index_copy(0, i([0, 2]), torch.ones_like(x[:2])),
    "index_fill": lambda x, i: x.index_fill(0, i([0, 2]), 1.0),
    "index_reduce": lambda x, i: x.index_reduce(0, i([0, 2]), torch.ones_like(x[:2]), "amin"),
    "take": lambda x, i: x[:1, :3].take(i([0, 2])),
    "put": lambda x, i: x[:1, :3].put(i([0, 2]), torch.ones_like(x[0, :2])),
    "cross_entropy": lambda x, i: F.cross_entropy(x.t(), i([0, 2, 1, 0, 1])),
    "nll_loss": lambda x, i: F.nll_loss(x.t(), i([0, 2, 1, 0, 1]), reduction="sum"),
    "nll_loss in 2d": lambda x, i: F.cross_entropy(x.t()[None, :, :, None].permute(1, 2, 0, 3), i([0, 2, 1, 0, 1]).view(5, 1, 1)),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x.t(), i([0, 2, 1, 0, 1])),
}
"""Each indexes a dim of size 3 with `i([...])`, whose entry 2 is replaced by what is tried."""


@pytest.mark.core(keep=8)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", OPS)
def test_what_raises_on_the_cpu_raises(name: str, checked: Callable[..., None]) -> None:
    checked()
    for tried in (2, 3, -1, -3, -4):

        def index(given: Any, fixed: bool = False, device: str = "cpu") -> torch.Tensor:
            t = torch.tensor(given)
            return (t if fixed else torch.where(t == 2, tried, t)).to(device)  # noqa: B023  # called at once

        expected = _raises(lambda: OPS[name](X, index))
        x = X.to("xla")
        assert _raises(lambda: OPS[name](x, lambda *a: index(*a, device="xla"))) == expected, tried  # noqa: B023


def test_one_hot(checked: Callable[..., None]) -> None:
    checked()
    assert F.one_hot(torch.tensor([0, 2], device="xla"), 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(IndexError, match=r"aten.one_hot: index 3 is out of range: 0 to 2 are allowed \(3 classes\)"):
        F.one_hot(torch.tensor([0, 3], device="xla"), 3).cpu()
    with pytest.raises(IndexError, match=r"aten.one_hot: index -2"), torch.inference_mode():
        F.one_hot(torch.tensor([-2, 3], device="xla"), 4).cpu()


def test_ignored_targets_are_allowed(checked: Callable[..., None]) -> None:
    checked()
    x = torch.randn(4, 3, device="xla")
    assert F.cross_entropy(x, torch.tensor([0, -100, 2, -100], device="xla")).isfinite().item()
    assert F.cross_entropy(x, torch.tensor([0, 7, 2, 7], device="xla"), ignore_index=7).isfinite().item()
    with pytest.raises(IndexError, match=r"index -100 is out of range: 0 to 2 or 7 are allowed \(the 3 classes of float32\[4, 3\]\)"):
        F.cross_entropy(x, torch.tensor([0, 7, 2, -100], device="xla"), ignore_index=7).item()


def test_masks_are_no_indices(checked: Callable[..., None]) -> None:
    checked()
    x = torch.zeros(2, 3, 4, device="xla")
    x[torch.ones(2, 3, dtype=torch.bool, device="xla")] = 1.0
    x[:, torch.tensor([True, False, True], device="xla")] = 2.0
    assert x.sum().item() == 2 * 4 + 4 * 4 * 2


MASKED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, Any], object], str]] = {
    "rows": (
        lambda x, m, made: x.__setitem__(m, made(2, 4)),
        r"aten.index_put: the mask, bool\[3\], selects \d: 2 fit \(values float32\[2, 4\]\)",
    ),
    "one row for all": (lambda x, m, made: x.__setitem__(m, made(1, 4)), ""),
    "of fewer dims": (lambda x, m, made: x.__setitem__(m, made(4)), ""),
    "columns": (lambda x, m, made: x.t().__setitem__((slice(None), m), made(4, 2)), r"values float32\[4, 2\]"),
    "accumulated": (lambda x, m, made: x.index_put_((m,), made(2, 4), accumulate=True), r"selects \d: 2 fit"),
    "all elements": (
        lambda x, m, made: x.__setitem__(m[:, None].expand(3, 4), made(8)),
        r"aten.index_put: the mask, bool\[3, 4\], selects \d+: 8 fit \(values float32\[8\]\)",
    ),
    "masked_scatter": (
        lambda x, m, made: x.masked_scatter(m[:, None].expand(3, 4), made(9)),
        r"aten.masked_scatter: the mask, bool\[3, 4\], selects 12: 0 to 9 fit \(a source float32\[9\]\)",
    ),
    "masked_scatter_ of a mask with fewer elements": (
        lambda x, m, made: x.masked_scatter_(m[:, None], made(9)),
        r"bool\[3, 1\], selects 3: 0 to 2 fit \(a source float32\[9\], and each is taken 4 times\)",
    ),
    "masked_scatter of fewer elements": (
        lambda x, m, made: x[0].masked_scatter(m[:, None].expand(3, 4), made(8)),
        r"selects 12: 0 to 8 fit",
    ),
}
"""A write to [3, 4] where one of 3 rows is selected, what `made` makes of a shape, and the error."""


@pytest.mark.parametrize("name", MASKED)
def test_masks_select_as_many_places_as_there_are_values(name: str, checked: Callable[..., None]) -> None:
    checked()
    write, text = MASKED[name]
    errors = 0
    for selected in ([0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 1, 1]):

        def run(device: str) -> None:
            mask = torch.tensor(selected, device=device) > 0  # noqa: B023  # called at once
            write(torch.zeros(3, 4, device=device), mask, lambda *shape: torch.ones(shape, device=device))

        wrong = _raises(lambda: run("cpu"))
        if not wrong:
            run("xla")
            torch_xla.sync()
            continue
        with pytest.raises(IndexError) as caught:
            run("xla")
            torch_xla.sync()
        errors += sum(selected) == 3 and re.search(text, str(caught.value)) is not None
        assert "repeats values" in str(caught.value)
    assert errors == bool(text)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_the_error(checked: Callable[..., None]) -> None:
    """It names op, index, range, place, line and module; the tensors keep their values, and training can go on."""
    checked()
    model = Net().to("xla")
    ids = torch.tensor([[1, 2, 3], [4, 5, 10]], device="xla")
    loss = F.cross_entropy(model(ids).view(-1, 10), ids.view(-1) % 10)
    loss.backward()
    with pytest.raises(IndexError) as caught:
        torch_xla.sync()
    first, last = str(caught.value).splitlines()
    assert first.startswith(
        "aten.embedding: index 10 is out of range: 0 to 9 are allowed (dim 0 of float32[10, 4]). It is at [1, 2] of the indices, int64[2, 3], of which 1 of 6 "
        "are out of range, at "
    )
    assert "test_index_checks.py:" in first and first.endswith("in forward [embed].")
    assert "clamps" in last and "NXD_JAX_CHECK_INDICES" in last
    assert loss.isfinite().item() and model.embed.weight.grad.isfinite().all().item()
    assert F.cross_entropy(model(ids % 10).view(-1, 10), ids.view(-1) % 10).isfinite().item()


def test_each_op_op_by_op(checked: Callable[..., None]) -> None:
    """With NEURON_USE_EAGER_DEBUG_MODE the error comes at the op's own line."""
    checked(NEURON_USE_EAGER_DEBUG_MODE="1")
    x = torch.arange(4.0, device="xla")
    with pytest.raises(IndexError, match=r"aten.index_select: index 4 is out of range: 0 to 3"):
        x.index_select(0, torch.tensor([4], device="xla"))
    with pytest.raises(IndexError, match=r"aten.gather: index -1 .*at \[0\] of the indices, int64\[1\]"):
        x.gather(0, torch.tensor([-1], device="xla"))


def test_off_by_default() -> None:
    assert torch.arange(4.0, device="xla").index_select(0, torch.tensor([9], device="xla")).numel() == 1
    assert not any(isinstance(o, index_checks.IndexChecks) for o in session.current().observers) and expected_indices._expect is None


def test_a_result_that_nobody_reads_is_checked(checked: Callable[..., None]) -> None:
    checked()
    torch.arange(4.0, device="xla")[torch.tensor([4], device="xla")]
    with pytest.raises(IndexError, match="index 4 is out of range: -4 to 3"):
        torch_xla.sync()


def test_several_wrong_ops_are_all_named(checked: Callable[..., None]) -> None:
    checked()
    x = torch.arange(4.0, device="xla")
    made = [x[torch.tensor([4 + k], device="xla")] for k in range(10)]
    with pytest.raises(IndexError) as caught:
        torch_xla.sync()
    text = str(caught.value)
    assert "index 4 is" in text and "index 11 is" in text and "index 12 is" not in text and "... and 2 more" in text
    assert len(made) == 10


def test_indices_are_compiled_once_and_checked_in_every_run(checked: Callable[..., None]) -> None:
    checked()
    x = torch.arange(4.0, device="xla")
    for k in (0, 1, 2):
        (x[torch.tensor([k], device="xla")] * 2).item()
    programs = len(session.current().traces)
    with pytest.raises(IndexError, match="index 7"):
        (x[torch.tensor([7], device="xla")] * 2).item()
    assert len(session.current().traces) == programs
    assert (x[torch.tensor([3], device="xla")] * 2).item() == 6


def test_played_modules_are_checked(checked: Callable[..., None]) -> None:
    checked()
    model = torch_bridge.optimize(Net().to("xla"))
    for k in range(5):
        model(torch.tensor([[k, 2, 3]], device="xla")).sum().backward()
        torch_xla.sync()
    assert model.forward.played  # type: ignore[attr-defined]
    model(torch.tensor([[1, 2, 99]], device="xla")).sum().backward()
    with pytest.raises(IndexError, match=r"aten.embedding: index 99 .*in forward \[embed\]"):
        torch_xla.sync()


def test_folded_layers_are_checked(checked: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_FOLD", "2")
    checked()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.mix = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.mix(x).tanh() + self.embed((ids + x.mean().mul(0).long()) * 2)

    layers = nn.ModuleList([Layer() for _ in range(4)]).to("xla")

    def run(ids: list[int]) -> torch.Tensor:
        x = torch.zeros(len(ids), 4, device="xla")
        at = torch.tensor(ids, device="xla")
        for layer in layers:
            x = layer(x, at)
        torch_xla.sync()
        return x

    run([1, 2, 3])
    with pytest.raises(IndexError) as caught:
        run([1, 2, 6])
    assert str(caught.value).count("index 12 is out of range") == 4


def test_abstract_runs_have_no_indices(checked: Callable[..., None]) -> None:
    from nxd_jax import abstract_run

    checked()
    with abstract_run(1):
        x = torch.zeros(4, device="xla")[torch.tensor([9], device="xla")] + 1
        torch_xla.sync()
        assert x.shape == (1,)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2))
        self.table = nn.Embedding(5, 2)

    def forward(self, ids: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.cache = torch.index_copy(self.cache, 0, place, self.table(ids))
        return self.cache.sum(0)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(x > 0, values)


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_traced_modules(checked: Callable[..., None], tmp_path: Path) -> None:
    """They check what they were traced to check, from a file, too."""
    ids, place = torch.tensor([4]), torch.tensor([3])
    module = Cache()
    assert torch_neuronx.trace(module, (ids, place))(ids + 3, place).shape == (2,)  # clamped
    checked()
    traced = torch_neuronx.trace(module, (ids, place))
    torch.jit.save(traced, tmp_path / "cache.pt")
    for model in (traced, torch.jit.load(tmp_path / "cache.pt")):
        torch.testing.assert_close(model(ids, place), module.table(ids)[0].detach())
        with pytest.raises(
            IndexError,
            match=r"aten\.index_copy: index 9 is out of range: 0 to 3 are allowed \(dim 0 of float32\[4, 2\]\).*test_index_checks",
        ):
            model(ids, place + 6)
        with pytest.raises(
            IndexError, match=r"aten\.embedding: index 7 is out of range: 0 to 4 are allowed .*int64\[1\].*(?s:.*)the device clamps"
        ):
            model(ids + 3, place)


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_traced_masks(checked: Callable[..., None], tmp_path: Path) -> None:
    checked()
    x, values = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([5.0, 6.0])
    traced = torch_neuronx.trace(Masked(), (x, values))
    torch.jit.save(traced, tmp_path / "masked.pt")
    for model in (traced, torch.jit.load(tmp_path / "masked.pt")):
        assert model(x, values).tolist() == [5, 0, 6]
        with pytest.raises(
            IndexError,
            match=r"aten\.masked_scatter: the mask, bool\[3\], selects 3: 0 to 2 fit \(a source float32\[2\]\), at .*test_index_",
        ):
            model(x + 1, values)
