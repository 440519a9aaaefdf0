"""Why did it compile again? A new batch size, a dtype, train/eval, a Python constant, a shape that depends on data, and the less common reasons."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch_xla
from torch import nn

from nxd_jax import inspect
from torch_bridge.runtime import executor, session


class Model(nn.Module):
    """Two layers, dropout, and a Python number that shapes the program."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        self.kept = 16
        self.activation = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.activation(self.up(x)))
        return self.down(nn.functional.pad(hidden[:, : self.kept], (0, 16 - self.kept)))


class Training:
    """A model and its steps; `why` is the reason of what was compiled last."""

    def __init__(self) -> None:
        self.model = Model().to("xla")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.kept: list[torch.Tensor] = []

    def step(self, x: torch.Tensor, keep: bool = False) -> None:
        found = self.model(x)
        if keep:
            self.kept.append(found)
        found.float().square().mean().backward()
        del found
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch_xla.sync()

    def why(self) -> inspect.Difference:
        last = inspect.recompiles()[-1]
        assert last.like is not None, last
        return last.why[0]


def begun() -> Training:
    """One that has run two steps, as the first programs of this process."""
    executor.sync()
    executor.clear_cache()
    session.current().history.compilations.clear()
    session.current().history.reads.clear()
    made = Training()
    made.step(torch.zeros(8, 8).to("xla"))
    made.step(torch.zeros(8, 8).to("xla"))
    return made


@pytest.fixture
def training() -> Iterator[Training]:
    """One that has run, with one program so far; begun once more if a reference from elsewhere had its memory kept for a step."""
    made = begun()
    again = inspect.recompiles(again_only=True).rows
    if again and all(d.kind == "memory" for c in again for d in c.why):
        gc.collect()
        made = begun()
        again = inspect.recompiles(again_only=True).rows
    assert not again, [c.reason for c in again]
    yield made
    session.current().history.compilations.clear()


def test_a_new_batch_size(training: Training) -> None:
    training.step(torch.zeros(6, 8).to("xla"))
    found = training.why()
    assert (found.kind, found.before, found.after, found.module) == ("shape", "float32[8, 8]", "float32[6, 8]", "up")
    assert found.line.startswith("test_recompiles.py:") and "drop_last=True" in found.advice


def test_another_length(training: Training) -> None:
    model = nn.Conv1d(2, 3, 3).to("xla")
    for length in (16, 20):
        model(torch.zeros(2, 2, length).to("xla")).sum().item()
    assert (training.why().kind, training.why().after) == ("shape", "float32[2, 2, 20]")
    assert training.why().advice == "pad to one of a few sizes"


def test_a_dtype_change(training: Training) -> None:
    training.model.to(torch.bfloat16)
    torch_xla.sync()
    training.step(torch.zeros(8, 8, dtype=torch.bfloat16).to("xla"))
    training.step(torch.zeros(8, 8, dtype=torch.bfloat16).to("xla"))
    first = inspect.recompiles()[0].number
    found = next(c for c in inspect.recompiles() if c.like == first and any(d.kind == "dtype" for d in c.why)).why
    assert {d.kind for d in found} == {"dtype"}
    assert {(d.before.partition("[")[0], d.after.partition("[")[0]) for d in found} == {("float32", "bfloat16")}
    assert "up.weight" in {d.what for d in found}


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_autocast(training: Training) -> None:
    with torch.autocast("xla", dtype=torch.bfloat16):
        training.step(torch.zeros(8, 8).to("xla"))
    found = training.why()
    assert found.kind == "dtype" and "aten._to_copy to bfloat16" in found.after and found.module == "up"


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_train_and_eval(training: Training) -> None:
    training.model.eval()
    training.step(torch.zeros(8, 8).to("xla"))
    found = training.why()
    assert (found.kind, found.what.split()[:4], found.before, found.after) == ("mode", ["the", "mode", "of", "Model"], "train()", "eval()")
    with torch.no_grad():
        training.model(torch.zeros(8, 8).to("xla")).cpu()
    assert training.why().kind in ("mode", "ops")  # of the evaluation, or of the step in eval mode


def test_a_constant_after_the_mode_has_changed_and_changed_back(training: Training) -> None:
    training.model.eval()
    training.step(torch.zeros(8, 8).to("xla"))
    training.model.train()
    training.step(torch.zeros(8, 8).to("xla"))
    training.model.kept = 12
    training.step(torch.zeros(8, 8).to("xla"))
    assert training.why().kind == "ops"  # a slice where there was none
    training.model.kept = 11
    training.step(torch.zeros(8, 8).to("xla"))
    assert (training.why().kind, training.why().after) == ("constant", "11")


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_one_module_in_eval(training: Training) -> None:
    training.model.drop.eval()
    training.step(torch.zeros(8, 8).to("xla"))
    assert (training.why().kind, training.why().what, training.why().after) == ("mode", "the mode of drop", "eval()")


def test_a_python_constant(training: Training) -> None:
    training.model.kept = 12
    training.step(torch.zeros(8, 8).to("xla"))
    training.model.kept = 11
    training.step(torch.zeros(8, 8).to("xla"))
    found = training.why()
    assert (found.kind, found.what, found.before, found.after) == ("constant", "argument end of aten.slice.Tensor", "12", "11")
    assert found.line.startswith("test_recompiles.py:")


def test_a_size_that_was_read_from_a_tensor(training: Training) -> None:
    for ones in (5, 3):
        mask = (torch.arange(8) < ones).to("xla")
        count = int(mask.sum().item())
        training.step(torch.zeros(8, 8).to("xla")[:count])
    found = training.why()
    assert found.kind == "data" and found.after == "3"
    assert "3 was read from a tensor at test_recompiles.py:" in found.advice and "mask" in found.advice


def test_a_shape_that_an_op_on_the_host_decided(training: Training) -> None:
    for ones in (5, 3):
        x = torch.zeros(8, 8).to("xla")
        training.step(x[(torch.arange(8) < ones).to("xla")])
    found = training.why()
    assert found.kind == "data" and (found.before, found.after) == ("float32[5, 8]", "float32[3, 8]")
    assert "made on the host by aten.index.Tensor at test_recompiles.py:" in found.what and "torch.where" in found.advice


def test_another_op(training: Training) -> None:
    training.model.activation = torch.tanh
    training.step(torch.zeros(8, 8).to("xla"))
    found = training.why()
    assert (found.kind, found.before, found.after) == ("ops", "aten.relu", "aten.tanh")


def test_a_tensor_that_is_kept(training: Training) -> None:
    training.step(torch.zeros(8, 8).to("xla"), keep=True)
    found = training.why()
    assert found.kind == "results" and "still refers" in found.advice


def test_without_gradients(training: Training) -> None:
    with torch.no_grad():
        training.model(torch.zeros(8, 8).to("xla")).sum().cpu()
    found = training.why()
    assert (found.kind, found.before, found.after) == ("ops", "with a backward pass", "without one")


def test_the_table(training: Training) -> None:
    training.step(torch.zeros(6, 8).to("xla"))
    table = inspect.recompiles()
    assert [c.like for c in table] == [None, table[0].number] and "first of its kind" in str(table)
    assert table[1].reason.startswith("an input of up (aten.addmm) was float32[8, 8], now float32[6, 8] at test_recompiles.py:")
    assert inspect.why() == table[1]
    assert table[1].seconds > 0 and table.data()[1]["why"][0]["kind"] == "shape"


def test_gradient_accumulation() -> None:
    """The first micro-batch makes gradients, others add to them, one steps: three programs, and why."""
    model = Model().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    for k in range(6):
        model(torch.ones(2, 8, device="xla")).square().mean().backward()
        if k % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()
    rows = inspect.recompiles()[-3:].rows
    assert rows[0].like is None or "gradient" not in rows[0].reason
    assert [[d.kind for d in c.why] for c in rows[1:]] == [["ops"], ["ops"]]
    line = test_gradient_accumulation.__code__.co_firstlineno
    assert rows[1].reason == f"each gradient was new, now added to those of earlier backward passes at test_recompiles.py:{line + 5}"
    assert rows[2].reason == f"the optimizer's step was not taken, now taken at test_recompiles.py:{line + 7}"
    assert all("gradient accumulation" in c.why[0].advice for c in rows[1:])


def test_ops_that_are_only_in_one(training: Training) -> None:
    """Not 'was nothing'."""
    for k in range(2):
        x = torch.ones(2, 8).to("xla")
        training.step(x.cos() if k else x)
    assert training.why().what == "aten.cos" and (training.why().before, training.why().after) == ("not recorded", "recorded")


def test_why_reads_as_sentences(training: Training) -> None:
    for rows in (4, 4, 3):
        training.step(torch.ones(rows, 8).to("xla"))
    text = str(inspect.why())
    head, *rest = text.splitlines()
    assert head.startswith("program ") and "ops up to test_recompiles.py:" in head and head.endswith("but:")
    assert any("was float32[4, 8], now float32[3, 8]" in line and "another batch size" in line for line in rest)
    assert "Difference(" not in text and repr(inspect.why()) == text
    first = inspect.recompiles()[0]
    assert str(first).endswith(": first of its kind") or first.like is not None


def test_nothing_was_compiled_again() -> None:
    session.current().history.compilations.clear()
    with pytest.raises(ValueError, match="nothing was compiled again"):
        inspect.why()


def test_a_step_that_runs_as_before_notes_nothing(training: Training) -> None:
    before = len(session.current().history.compilations)
    for _ in range(3):
        training.step(torch.zeros(8, 8).to("xla"))
    assert len(session.current().history.compilations) == before


def test_two_captured_graphs() -> None:
    """`compare` says the same of graphs that never ran."""
    model = Model()
    small, large = (inspect.look(model, torch.zeros(rows, 8)) for rows in (4, 6))
    found = inspect.compare(small, large)
    assert [(d.kind, d.before, d.after) for d in found] == [("shape", "float32[4, 8]", "float32[6, 8]")]
    assert not inspect.compare(small, small).rows and "the graphs are the same" in str(inspect.compare(small, small))
    model.kept = 5
    assert inspect.compare(small, inspect.look(model, torch.zeros(4, 8)))[0].kind == "ops"
