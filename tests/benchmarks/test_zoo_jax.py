"""The zoo's models by hand in JAX compute what the torch models compute, and the tables have them beside those."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import torch
import zoo
import zoo_jax
import zoo_jax_text
import zoo_models
from torch import nn

STEPS = 2


def set_dropout(model: nn.Module, rate: float) -> list[float]:
    """The rates that were there."""
    found: list[float] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            found.append(module.p)
            module.p = rate
        elif isinstance(module, nn.LSTM):
            found.append(module.dropout)
            module.dropout = rate
    return found


def test_kinds() -> None:
    assert set(zoo.BY_HAND) == set(zoo_jax.KINDS)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("kind", zoo_jax.KINDS)
def test_losses_equal_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo_models.TEXT, "small", replace(zoo_models.TEXT["small"], layers=2))  # half of them, to compile less
    work = zoo_models.make(kind, "small")
    assert set(set_dropout(work.model, 0.0)) <= {zoo_jax.RATE}
    step = zoo_jax.trainer(zoo_jax.make(kind, work.model, rate=0.0))
    actual = [step(*zoo_jax.batch_of(batch)) for batch in work.batches[:STEPS]]

    optimizer = torch.optim.AdamW(work.model.train().parameters(), lr=1e-3)
    expected = []
    for batch in work.batches[:STEPS]:
        optimizer.zero_grad()
        loss = work.loss(work.model, *batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["resnet", "mobilenet"])
def test_running_statistics_equal_torch(kind: str) -> None:
    work = zoo_models.make(kind, "small")
    model = zoo_jax.make(kind, work.model)
    state = jax.jit(model.loss)(model.params, model.state, *zoo_jax.batch_of(work.batches[0]))[1]
    work.loss(work.model.train(), *work.batches[0])
    expected = zoo_jax.make(kind, work.model).state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state, expected)


def test_dropout() -> None:
    x = jnp.ones((100, 100))
    dropped = zoo_jax_text.dropout(x, 0.1, jax.random.key(0))
    assert set(np.unique(dropped).tolist()) == {0.0, np.float32(1 / 0.9)} and float(dropped.mean()) == pytest.approx(1.0, abs=0.02)
    assert zoo_jax_text.dropout(x, 0.0, jax.random.key(0)) is x


def test_every_step_draws_anew() -> None:
    work = zoo_models.make("mlp", "small")
    model, batch = zoo_jax.make("mlp", work.model), zoo_jax.batch_of(work.batches[0])
    first, key = jax.jit(model.loss)(model.params, model.state, *batch)
    second, _ = jax.jit(model.loss)(model.params, key, *batch)
    assert float(first) != float(second)


def _run(step: float) -> dict[str, Any]:
    return {"first_step_s": 1.0, "step_ms": step, "step_cpu_ms": 2 * step, "memory_mib": 100.0, "losses": [1.0]}


def test_the_tables_of_kinds_with_and_without_jax() -> None:
    found: zoo.Found = {
        ("unet", "small"): {"xla": [_run(9.0), _run(9.0)], "eager": [_run(1.0), _run(1.0)]},
        ("mlp", "small"): {"xla": [_run(2.0), _run(3.0)], "eager": [_run(4.0), _run(4.0)], "jax": [_run(4.0), _run(4.0)]},
    }
    text = zoo.table(found, ["jax", "xla", "eager"])
    assert text.index("mlp") < text.index("unet")  # the first variant's worst, then what it does not have
    assert "| unet, small | jax | - | - | - | - |" in text
    assert "| mlp, small | jax | 1.00 (1.00x) | 4.0 (1.00x) | 8.0 (1.00x) | 100 (1.00x) |" in text
    assert "geometric mean of steps 1.00x, of CPU time 1.00x (1 of 2 models)" in text
    rows = zoo.against_jax(found).splitlines()
    assert rows[0] == "| `xla` against hand-written JAX | first step | step | CPU time of a step | peak memory above imports |"
    assert rows[2:] == ["| mlp, small | 1.00x | 0.62x | 0.62x | 1.00x |", "| geometric mean | 1.00x | 0.62x | 0.62x | 1.00x |"]
    assert zoo.disagreement({("unet", "small"): found["unet", "small"]}) == 0.0
    assert zoo.against_jax({("unet", "small"): found["unet", "small"]}) == ""
