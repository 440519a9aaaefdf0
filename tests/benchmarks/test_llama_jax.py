"""The benchmark's hand-written JAX Llama computes what the `transformers` Llama computes."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import llama_jax
import measure
import step_time
import torch
import torch_step


@pytest.mark.thorough
def test_loss_and_gradients_equal_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "LAYERS", 2)
    model = torch_step.make_model()
    ids = measure.batches(1)[0]
    loss = model(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(ids)).loss
    loss.backward()

    params = llama_jax.from_torch({name: value.numpy() for name, value in model.state_dict().items()})
    expected = llama_jax.from_torch({name: parameter.grad.numpy() for name, parameter in model.named_parameters()})
    actual_loss, actual = jax.value_and_grad(llama_jax.loss_fn)(params, ids.astype(np.int32), measure.HEADS)
    assert float(actual_loss) == pytest.approx(loss.item(), abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual, expected)


def run(losses: list[float], milliseconds: float) -> dict:
    numbers = dict.fromkeys(("step_free_ms", "step_synced_ms", "step_cpu_ms", "first_step_s", "first_three_steps_s"), milliseconds)
    return numbers | {"losses": losses, "peak_rss_mib": 300.0, "rss_after_import_mib": 100.0}


def test_ratios_are_taken_within_a_round():
    results = {"jax": [run([5.0], 10.0), run([5.0], 100.0)], "torch": [run([5.0], 20.0), run([5.0], 200.0)]}
    assert step_time.summarise(results)["torch"]["step, no waiting (ms)"] == (110.0, pytest.approx(2.0))


def test_variants_that_compute_something_else_are_refused():
    with pytest.raises(RuntimeError, match=r"losses differ.*torch"):
        step_time.check_losses({"jax": [run([5.0], 1.0)], "torch": [run([5.1], 1.0)]})
