"""Where ops come from: module path, user's line, phase; also in backward passes, recomputation, and steps that were predicted."""

from __future__ import annotations

import pathlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch_xla
import typing_extensions
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from torch_bridge import source
from torch_bridge.runtime import executor, session
from torch_bridge.source import Source

pytestmark = pytest.mark.usefixtures("clean_step")


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """A program has the sources of whoever recorded its ops first."""
    executor.clear_cache()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks, whose activations are computed again in the backward pass if `reentrant` is not None."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(Block() for _ in range(2)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def step(model: nn.Module) -> fx.Graph:
    """The graph of a step."""
    x = torch.ones(3, 4).to("xla").requires_grad_()
    model(x).square().sum().backward()
    model.zero_grad()
    torch_xla.sync()
    return session.current().recent[-1].graph


def found(graph: fx.Graph, op: str) -> list[Source]:
    return [n.meta["source"] for n in graph.nodes if str(n.target).startswith(op)]


def line_of(text: str) -> int:
    """Where in this file the text stands first."""
    return next(i for i, line in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if text in line)


def test_forward_and_backward() -> None:
    graph = step(Model().to("xla"))
    forward = [s for s in found(graph, "aten.tanh.") if not s.backward]
    assert [(s.module, s.module_class, s.function) for s in forward] == [("layers.0", "Block", "forward"), ("layers.1", "Block", "forward")]
    assert {(s.file, s.line) for s in forward} == {(__file__, line_of("return self.down(torch.tanh"))}
    backward = found(graph, "aten.tanh_backward")
    assert [s.module for s in backward] == ["layers.1", "layers.0"] and all(s.backward for s in backward)
    assert {(s.file, s.line) for s in backward} == {(s.file, s.line) for s in forward}, "the line of the forward op"
    outside = [s for s in found(graph, "aten.") if not s.module]
    assert outside and {(s.line, s.backward) for s in outside} == {(line_of("model(x).square()"), True)}, "the loss itself is not asked for"


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("steps", [1, 3], ids=["first", "predicted"])
def test_recomputed_ops_have_their_modules_path_and_are_backward(reentrant: bool, steps: int) -> None:
    """Autograd calls the layer alone, which is not below the model then."""
    model = Model(reentrant).to("xla")
    for _ in range(steps):
        graph = step(model)
    forward = [(s.module, s.backward) for s in found(graph, "aten.tanh.")]
    assert forward == [("layers.0", False), ("layers.1", False), ("layers.1", True), ("layers.0", True)]
    modules = {s.module for s in found(graph, "aten.mm") + found(graph, "aten.addmm") if s.backward}
    assert modules == {f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")}
    lines = {s.line for s in found(graph, "aten.tanh")}
    assert lines == {line_of("return self.down(torch.tanh")}


def test_backward_ops_of_predicted_forwards_keep_their_source() -> None:
    """Once a step agrees with the one before, sources are not looked for again: a backward pass that differs still knows its forward ops."""
    model = Model().to("xla")
    for _ in range(3):
        step(model)
    x = torch.ones(3, 4).to("xla").requires_grad_()
    model(x).square().sum().backward()
    (x.grad * 3).cpu()  # other ops than before, after a forward pass as before
    assert x.grad is not None
    graph = session.current().recent[-1].graph
    assert [s.module for s in found(graph, "aten.tanh_backward")] == ["layers.1", "layers.0"]
    assert all(s.backward and s.line == line_of("return self.down(torch.tanh") for s in found(graph, "aten.tanh_backward"))


def test_another_backward_of_a_predicted_forward() -> None:
    """Of a loss that differs from the step before, so that the backward pass is recorded anew."""
    model = Model().to("xla")
    for scale in (1, 1, 1, 2):
        x = torch.ones(3, 4).to("xla").requires_grad_()
        out = model(x)
        loss = out.square().sum() if scale == 1 else (out * out.exp()).sum()
        loss.backward()
        model.zero_grad()
        torch_xla.sync()
    backward = found(session.current().recent[-1].graph, "aten.tanh_backward")
    assert [(s.module, s.backward) for s in backward] == [("layers.1", True), ("layers.0", True)]


def test_training_mode_is_noted() -> None:
    model = Model().to("xla").eval()
    model.layers[1].train()
    modes = {s.module: s.training for s in found(step(model), "aten.tanh.")}
    assert modes == {"layers.0": False, "layers.1": True}


# -- libraries -------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module in a folder of its own, whose code is nobody's in particular until `add_library`."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "some_library_of_ours.py").write_text("def twice(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(source, "_LIBRARIES", source._LIBRARIES)
    import some_library_of_ours  # type: ignore[import-not-found]

    yield some_library_of_ours
    del sys.modules["some_library_of_ours"]
    source._IS_USER.clear()


def test_code_of_a_library_counts_as_its_callers(library: types.ModuleType) -> None:
    def line() -> tuple[str, int]:
        executor.clear_cache()
        library.twice(torch.ones(3, device="xla")).cpu()
        (s,) = found(session.current().recent[-1].graph, "aten.mul")
        return pathlib.Path(s.file).name, s.line

    assert line() == ("some_library_of_ours.py", 2)
    source.add_library(str(pathlib.Path(library.__file__ or "").parent))
    assert line() == ("test_source.py", line_of("library.twice(torch.ones"))
    assert not source.is_user(library.twice.__code__) and source.is_user(line.__code__)


def test_a_folder_with_a_longer_name_is_none_of_the_library(library: types.ModuleType, tmp_path: pathlib.Path) -> None:
    source.add_library(str(tmp_path / "lib"))
    assert source.is_user(library.twice.__code__)


def test_short_line_and_text() -> None:
    assert source.short_line() == f"test_source.py:{line_of('assert source.short_line()')}"
    assert source.user_line().startswith(f"{__file__}:{line_of('source.user_line().starts')} in test_short_line_and_text")
    assert str(Source("m", "M", "/a/b.py", 3, "f")) == "/a/b.py:3 in f [m]"
    assert str(Source()) == "(no Python line: a backward op)"


def test_a_deprecated_function_is_called_at_its_callers_line() -> None:
    line_here = typing_extensions.deprecated("use another one", category=None)(source.short_line)
    assert line_here() == f"test_source.py:{line_of('assert line_here()')}"
