"""Ten training steps on device xla give the losses and weights of eager torch on the CPU, in two compilations and one execution per step."""

from __future__ import annotations

import pytest

from tests.models.__main__ import main
from tests.models.training import OPTIMIZERS, STEPS, check, played, train_and_compare
from tests.models.zoo import TASKS
from tests.models.zoo_more import MORE


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("llama", "sgd"), ("llama", "adamw"), *((m, ("adamw", "sgd")[i % 2]) for i, m in enumerate(m for m in TASKS if m != "llama"))],
)
def test_trains_as_on_the_cpu(model: str, optimizer: str) -> None:
    task = TASKS[model]
    check(task.build, task.loss, OPTIMIZERS[optimizer])


PROGRAMS = {"detr": 9, "wav2vec2": 2}
"""Models whose loss asks for values, so that a step takes several programs: a matching on the host, labels picked by a mask."""


ADAMW = ("deberta_v2", "fnet", "convnextv2")
"""The others train with plain SGD: one small program instead of two, as compilation takes most of the time."""


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(("model", "optimizer"), [(m, "adamw" if m in ADAMW else "plain") for m in MORE])
def test_ten_more_families(model: str, optimizer: str) -> None:
    task = MORE[model]
    if model in PROGRAMS:
        assert train_and_compare(task.build, task.loss, OPTIMIZERS[optimizer]) <= PROGRAMS[model] * STEPS
    else:
        check(task.build, task.loss, OPTIMIZERS[optimizer])


def test_the_script_names_the_models_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lama"])
    assert "no model lama: choose from llama, gpt2" in capsys.readouterr().err


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", ["bert", "mixtral", "t5", "resnet"])
def test_played(name: str) -> None:
    """With `torch_bridge.optimize`: the same bits, all but the first calls played."""
    task = {**TASKS, **MORE}[name]
    assert played(task.build, task.loss, OPTIMIZERS["adamw"]).endswith("calls played")
