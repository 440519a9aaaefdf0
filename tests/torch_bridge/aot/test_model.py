"""Programs, facts and models below the names of torch_neuronx and NxD."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from tests.torch_bridge.aot.nets import Net, X
from torch_bridge.aot import devices, facts, files, traced_module, tracing
from torch_bridge.aot.model import Model, Program


@pytest.fixture(scope="module")
def program() -> Program:
    return traced_module.trace_program(Net(), (X,))[0]


def weights() -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in Net().state_dict().items()}


def test_facts(program: Program) -> None:
    found = program.facts
    assert [str(t) for t in found.inputs] == ["input_0: float32 [2, 3]"] and found.route == "(input_0: [2, 3])"
    assert [str(t) for t in found.states] == ["calls: int32 [1]"]
    assert {t.name: t.nbytes for t in found.weights} == {"linear.weight": 48, "linear.bias": 16, "scale": 2, "table": 16}
    assert set(program.initial) == {"table", "calls"}
    assert facts.from_json(json.loads(json.dumps(facts.to_json(found)))) == found


def test_what_is_said_of_weights(program: Program) -> None:
    model = Model()
    model.add("a", program)
    with pytest.raises(ValueError, match="weights are needed for 1 ranks, got 2 dicts"):
        model.set_weights([weights(), weights()])
    with pytest.raises(
        ValueError, match=r"3 weights are missing: linear\.weight, linear\.bias, scale; they are named as in|3 weights are missing"
    ):
        model.set_weights([{}])
    with pytest.raises(
        RuntimeError, match=r"the model has no weights yet \(.*\): call set_weights\(\.\.\.\) with a dict for each rank first"
    ):
        model.start()
    model.set_weights([weights()])
    model.start(workers=2)
    torch.testing.assert_close(model.results("a", model.run("a", [X]), 0)[0], Net()(X)["y"].detach())


def test_another_platform(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.add("a", program)
    model.set_weights([weights()])
    monkeypatch.setattr("torch_bridge.aot.model.jax.default_backend", lambda: "rocm")
    with pytest.raises(RuntimeError, match="program 'a' was exported for cpu, cuda, tpu, and this machine is rocm: trace it here"):
        model.start()


def test_aliases_of_names_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="nothing is said to be updated by result 0, and the module has no such parameter or buffer"):
        tracing.trace(nn.Linear(3, 2), (X,), {}, ["x"], {0: "nothing"})


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_states_of_any_dtype(dtype: torch.dtype) -> None:
    """They begin with the module's values."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.tensor([1, 0, 1]).to(dtype))

        def forward(self, x: torch.Tensor) -> Any:
            before = self.last
            self.last = torch.where(x > 0, x.to(dtype), before)
            return before.to(torch.complex64) if dtype.is_complex else before.to(torch.float32)

    program, _ = traced_module.trace_program(Keeps(), (torch.ones(3),))
    model = Model()
    model.add("a", program)
    model.start()
    x = torch.tensor([0.0, 1.0, 0.0])
    first, second = (model.results("a", model.run("a", [x]), 0)[0] for _ in range(2))
    assert first.real.tolist() == [1.0, 0.0, 1.0] and second.real.tolist() == [1.0, 1.0, 1.0]
    assert model.read("last", 0).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 2)])
def test_weights_are_copied_once(shape: tuple[int, ...], dtype: Any) -> None:
    """Into memory that JAX takes as it is on CPUs, and that is nobody else's."""
    parts = [np.ones(shape, dtype), np.zeros(shape, dtype)]
    own = devices._own(parts)
    assert own.shape == (2, *shape) and own.dtype == dtype and (not own.size or own.ctypes.data % 64 == 0)
    assert np.array_equal(own, np.stack(parts)) and not any(np.shares_memory(own, part) for part in parts)


def test_weights_that_do_not_fit_are_told_of_beside_a_compilation() -> None:
    """The block's error is raised, not the compilation's."""
    program, _ = traced_module.trace_program(nn.Linear(3, 2), (torch.ones(4, 3),))
    model = Model()
    model.add("a", program)
    with pytest.raises(ValueError, match=r"weight was traced with shape \[2, 3\], got \[3, 2\]"), model.compiling():
        model.set_weights([{"weight": torch.ones(3, 2), "bias": torch.zeros(2)}])
    with model.compiling():
        model.set_weights([{"weight": torch.ones(2, 3), "bias": torch.zeros(2)}])
    model.start()
    (found,) = model.results("a", model.run("a", [torch.ones(4, 3)]), 0)
    assert found.tolist() == [[3.0, 3.0]] * 4


class Own(nn.Module):
    """A table that no state dict holds, and a state. updates: it is a state, too."""

    def __init__(self, table: float, begin: float = 0.0, updates: bool = False, size: int = 2) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((size,), table), persistent=False)
        self.register_buffer("calls", torch.full((1,), begin))
        self.updates = updates

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        if self.updates:
            self.table = self.table * 2
        return x * self.table.sum(), self.calls


def test_tables_of_one_name_and_other_values(tmp_path: Path) -> None:
    """Each program has its own, in files too; what is equal is there once."""
    modules = {"a": Own(1.0), "b": Own(3.0), "c": Own(1.0), "d": Own(1.0, size=3)}
    programs = {tag: traced_module.trace_program(m, (torch.ones(1),))[0] for tag, m in modules.items()}
    assert programs["a"] == programs["c"] != programs["b"]
    found = programs
    for _ in range(2):
        model = Model()
        for tag, p in found.items():
            model.add(tag, p)
        assert set(model.weights) == {"table", "table@b", "table@d"} and set(model.states) == {"calls"}
        model.start()
        for k, (tag, value) in enumerate({"a": 2.0, "b": 6.0, "c": 2.0, "d": 3.0}.items()):
            assert [t.item() for t in model.results(tag, model.run(tag, [torch.ones(1)]), 0)] == [value, k + 1]
        files.save(tmp_path / "model.pt", "kind", model.programs)
        with files.opened(tmp_path / "model.pt") as opened:
            found = opened.programs


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (Own(1.0), Own(1.0, begin=5.0), "calls"),
        (Own(1.0), Own(3.0, updates=True), "table"),
        (Own(3.0, updates=True), Own(1.0), "table"),
    ],
)
def test_states_that_begin_with_other_values(first: nn.Module, second: nn.Module, name: str) -> None:
    model = Model()
    model.add("a", traced_module.trace_program(first, (torch.ones(1),))[0])
    with pytest.raises(
        ValueError, match=f"{name} is a state, and begins with other values in program 'b' than in 'a': programs share states by name"
    ):
        model.add("b", traced_module.trace_program(second, (torch.ones(1),))[0])
