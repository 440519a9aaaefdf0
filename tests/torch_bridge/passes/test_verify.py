"""The verifier: it lets the passes as they are through, and finds what each of them can break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_bridge
from tests.torch_bridge.passes.faults import FAULTS, changed
from torch_bridge.config import environment
from torch_bridge.config.settings import SETTINGS
from torch_bridge.device import debug_modes
from torch_bridge.errors import VerificationError
from torch_bridge.ir.graph import GraphBuilder
from torch_bridge.passes.verify import segments
from torch_bridge.recorder import dispatch
from torch_bridge.runtime import executor, session

torch_bridge.register()


@pytest.fixture(autouse=True)
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a broken pass made stays, and nothing made before is used."""
    monkeypatch.setenv("NXD_JAX_EXECUTABLES", "0")
    executor.sync()
    executor.clear_cache()
    yield
    monkeypatch.undo()
    session.current().begin()
    segments._READ.clear()
    executor.clear_cache()


def test_the_switch() -> None:
    """NXD_JAX_VERIFY: on while tests run, off by default."""
    torch.ones(1).to("xla")
    before = SETTINGS.verify
    try:
        for text, on in (("1", True), ("0", False), ("", False)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NXD_JAX_VERIFY", text)
                debug_modes.configure(environment.check(), dispatch.dispatch)
            assert SETTINGS.verify is on
    finally:
        SETTINGS.verify = before
    assert before, "tests/conftest.py switches it on"


def test_what_comes_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that had a value keep it, pending ones say what happened, and the next step runs."""
    x = torch.ones(2).to("xla")
    y = x * 2
    with pytest.MonkeyPatch.context() as patch:
        changed(GraphBuilder, "_inputs", lambda inputs, self: [*inputs(self), -1])(patch)
        with pytest.raises(VerificationError):
            y.cpu()
    assert x.tolist() == [1, 1]
    with pytest.raises(torch_bridge.errors.DeadTensorError, match="VerificationError: after GraphBuilder"):
        y.cpu()
    assert (x * 3).tolist() == [3, 3]


def test_sources_after_the_programs_are_forgotten() -> None:
    """`clear_cache` while a step is recorded that was predicted: its ops keep their lines."""

    def step(clear: bool) -> list[int]:
        x = torch.ones(3).to("xla")
        y = x * 2
        if clear:
            executor.clear_cache()
        z = y.sin()
        session.current().current.unpredict()
        lines = [s.line for s in session.current().current.sources]
        z.cpu()
        return lines

    for _ in range(3):
        first = step(False)
    assert len(first) == 2 and first == step(True)


@pytest.mark.parametrize("program", sorted({f.program for f in FAULTS.values()}, key=lambda p: p.__name__))
def test_the_passes_as_they_are(program: Callable[[], Any]) -> None:
    program()


def test_a_storage_that_is_filled_twice_becomes_what_it_was_born_with() -> None:
    """The leaf is full of the first number; the second is recorded."""
    x = torch.full((3,), 7.0, device="xla")
    x.add_(1)
    x.zero_()
    x.add_(2)
    assert x.tolist() == [2, 2, 2]


def test_a_gradient_that_nobody_asked_for_is_no_result() -> None:
    """A frozen layer before a batch norm, whose backward gives three results or fewer."""

    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        x, norm = torch.randn(4, 3).to(device), torch.nn.BatchNorm1d(3).to(device)
        norm(x).square().sum().backward()
        assert norm.weight.grad is not None
        return norm.weight.grad.cpu()

    torch.testing.assert_close(run("xla"), run("cpu"))


def test_a_result_of_a_list_is_written_into_another_dtype() -> None:
    """A number of bfloat16 times one of float32 is float32, until it is written."""
    x, factor = torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(0.3337)
    own = x.to("xla")
    for to, by in ((x, factor), (own, factor.to("xla"))):
        torch._foreach_mul_([to], by)
    assert own.dtype == torch.bfloat16 and torch.equal(own.cpu(), x)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.broken(monkeypatch)
    with pytest.raises(VerificationError) as found:
        fault.program()
    text = str(found.value)
    assert text.startswith(f"after {fault.after}, a rule of torch_bridge does not hold: ") and fault.rule in text.splitlines()[0]
    assert "Found: " in text and "bug of torch_bridge" in text and "NXD_JAX_VERIFY=1" in text


@pytest.mark.thorough(keep=19)
@pytest.mark.core(keep=8)
@pytest.mark.parametrize("name", FAULTS)
def test_nothing_else_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the verifier a broken program runs, or fails in another way."""
    fault = FAULTS[name]
    torch.ones(1, device="xla").tolist()  # the environment is read when JAX comes up
    monkeypatch.setattr(SETTINGS, "verify", False)
    fault.broken(monkeypatch)
    if fault.runs:
        fault.program()
        return
    with pytest.raises(Exception) as found:
        fault.program()
    assert not isinstance(found.value, VerificationError)
