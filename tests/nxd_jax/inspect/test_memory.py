"""What an abstract run predicts of a core's memory is what the executable of a real run needs, and the kinds add up."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch_xla
from torch import nn

import nxd_jax
from nxd_jax import inspect
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.inspect.llama import Job
from torch_bridge.runtime import session

JOBS = [Job(tp=4, zero1=True, sequence_parallel=True), Job(tp=2, dtype=torch.float32, layers=3, checkpoints=True)]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("job", JOBS, ids=["bfloat16-zero1", "float32-checkpoints"])
def test_predicted_is_what_the_executable_needs(job: Job, nxd: Nxd) -> None:
    """Within 10 %, for two ways to lay out 8 cores; the collectives are the same too."""
    with nxd_jax.abstract_run(8) as run:
        job.step(*job.build())
        predicted = inspect.look(run)
        foreseen, rows = predicted.memory, predicted.collectives.rows
    nxd(8, tp=job.tp)
    model, optimizer = job.build()
    for _ in range(3):  # the optimizer's state exists from the second on
        job.step(model, optimizer)
    step = inspect.look()
    plan = session.current().recent[-1].compiled.memory_analysis()
    needed = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
    assert step.memory.peak == needed
    assert abs(foreseen.peak - needed) <= 0.1 * needed
    assert step.collectives.rows == rows
    kinds = step.memory.kinds()
    assert sum(kinds.values()) == needed
    elements = [math.prod(shape) for shape in job.shapes().values()]
    assert kinds["parameter"] == sum(elements) * job.dtype.itemsize
    if job.zero1:
        assert kinds["master weight"] == sum(elements) // (8 // job.tp) * 4
        assert kinds["optimizer state"] == 2 * kinds["master weight"]
    else:
        assert kinds["optimizer state"] == 2 * kinds["parameter"]
    names = {h.name: h for h in step.memory.held if h.kind == "parameter"}
    assert names["model.layers.0.mlp.down_proj.weight"].axes == ("tp",)
    assert names["model.norm.weight"].axes == ()
    assert names["model.layers.0.mlp.down_proj.weight"].shape == (job.hidden, job.ffn // job.tp)
    kept = {kind: {h.name for h in step.memory.held if h.kind == kind} for kind in ("parameter", "master weight", "optimizer state")}
    assert len(kept["parameter"]) == len(elements) and kept["master weight"] == (kept["parameter"] if job.zero1 else set())
    assert kept["optimizer state"] == {f"{key} of {name}" for key in ("exp_avg", "exp_avg_sq") for name in kept["parameter"]}


class Chain(nn.Module):
    """Layers whose activations the backward pass reads: 4 x [rows, 32] of them (tanh keeps its result, a linear layer its input)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def train(model: nn.Module, rows: int, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.zeros(rows, 32).to("xla")).backward()
        torch_xla.sync()


def test_activations_are_what_the_backward_pass_reads() -> None:
    model = Chain().to("xla")
    train(model, 8)
    assert inspect.look().memory.activations == 4 * 8 * 32 * 4
    train(model, 16)
    assert inspect.look().memory.activations == 4 * 16 * 32 * 4


def test_two_passes_in_a_step_do_not_add_up() -> None:
    """Gradient accumulation keeps one pass's activations at a time."""
    model = Chain().to("xla")
    for _ in range(2):
        model(torch.zeros(8, 32).to("xla")).backward()
    torch_xla.sync()
    assert inspect.look().memory.activations == 4 * 8 * 32 * 4


def test_gradients_that_stay_are_told() -> None:
    model = Chain().to("xla")
    train(model, 8, steps=2)  # nobody sets them to None
    kinds = inspect.look().memory.kinds()
    assert kinds["gradient"] == kinds["parameter"] == 4 * (32 * 32 + 32) * 4
    roles = {h.name: h.role for h in inspect.look().memory.held if h.kind == "gradient"}
    assert set(roles.values()) == {"updated"} and "layers.3.weight" in roles


def test_the_verdict() -> None:
    memory = inspect.look(Chain(), torch.zeros(8, 32)).memory
    assert memory.fits and memory.verdict.endswith("fits") and "16.00 GiB on a core of Trainium1" in memory.verdict
    small = dataclasses.replace(memory, hbm_bytes=100)
    assert not small.fits and small.verdict.endswith("does not fit")
    assert "layers.0.weight" in str(memory.tensors())
    assert "Memory of a core" in memory._repr_html_()


def test_topology_says_whose_memory() -> None:
    found = inspect.look(Chain(), torch.zeros(8, 32), topology=nxd_jax.topology.Topology("trn2.48xlarge"))
    assert found.memory.hbm_bytes == 24 * 2**30
