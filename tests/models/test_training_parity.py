"""Ten training steps on device xla give the losses and weights of eager torch on the CPU, in two compilations and one execution per step."""

from __future__ import annotations

import pytest

from tests.models.training import OPTIMIZERS, check
from tests.models.zoo import TASKS


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("llama", "sgd"), ("llama", "adamw"), *((m, ("adamw", "sgd")[i % 2]) for i, m in enumerate(m for m in TASKS if m != "llama"))],
)
def test_trains_as_on_the_cpu(model: str, optimizer: str) -> None:
    task = TASKS[model]
    check(task.build, task.loss, OPTIMIZERS[optimizer])
