"""`Watch` looks at a script while it runs, and ends it in time; the report of what it saw is whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect.owners import Owner, owners
from nxd_jax.inspect.report import LIMIT
from nxd_jax.inspect.watching import Stopped, Watch
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.inspect.llama import Job
from torch_bridge.runtime import session


def script(marks: int, seen: list[int], between: Callable[[], Any] = lambda: None) -> None:
    """Training with marks after the model is made, after the backward pass and after the optimizer."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    torch_xla.sync()
    for i in range(marks):
        model(torch.zeros(4, 8).to("xla")).square().mean().backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        seen.append(i)


def test_it_ends_a_script_in_time() -> None:
    seen: list[int] = []
    with Watch(3) as watch, pytest.raises(Stopped):
        script(10, seen)
    assert 1 <= len(seen) <= 4 and not session.current().observers  # the third run's mark did not return
    assert watch.inspection is not None and watch.inspection.runs >= 3 and watch.profile is None
    assert {"0.weight", "2.bias"} <= {h.name for h in watch.inspection.memory.held}


def test_a_script_that_ends_by_itself() -> None:
    seen: list[int] = []
    with Watch(0) as watch:
        script(2, seen)
    assert seen == [0, 1] and watch.inspection is not None and watch.inspection.runs >= 1
    assert any(
        h.kind == "optimizer state" and h.name == "exp_avg of 0.weight" for h in watch.inspection.memory.held
    )  # known, though the model is gone


class Unfinished(nn.Module):
    """As an exception in a constructor leaves it, or another thread that is in one."""

    def __init__(self) -> None:
        pass


def test_modules_and_optimizers_that_are_not_finished_stop_nobody() -> None:
    whole = nn.Linear(2, 3).to("xla")
    unfinished = [Unfinished(), torch.optim.SGD.__new__(torch.optim.SGD), nn.Module()]
    unfinished[2].__dict__["_modules"] = {"part": unfinished[0]}  # type: ignore[union-attr]
    assert owners()[id(whole.weight._storage)] == Owner("parameter", "weight")  # type: ignore[attr-defined]


def test_the_larger_half_of_a_step_in_two() -> None:
    with Watch(2) as watch, pytest.raises(Stopped):
        script(5, [], between=torch_xla.sync)
    assert watch.inspection is not None
    assert any(n.phase == "backward" for n in watch.inspection.graph) and watch.inspection.runs >= 2


def test_the_last_steps_are_profiled() -> None:
    with Watch(4, profiled=2) as watch, pytest.raises(Stopped):
        script(10, [])
    assert watch.profile is not None and len(watch.profile.steps) == 2


def test_an_error_of_the_script() -> None:
    def failing() -> None:
        raise ValueError("in the script")

    with Watch(3), pytest.raises(ValueError, match="in the script"):
        script(5, [], between=failing)
    assert not session.current().observers


def check(page: str) -> None:
    """A whole page that needs nothing else."""
    assert len(page.encode()) < LIMIT
    assert "could not be worked out" not in page and "no picture" not in page
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page) and "<script" not in page and "@import" not in page
    assert page.count("<section") == page.count("</section>") > 0


def test_the_report_of_ranks(nxd: Nxd, tmp_path: Any) -> None:
    nxd(8, tp=2)
    job = Job(tp=2, zero1=True, sequence_parallel=True)
    model, optimizer = job.build()
    job.step(model, optimizer)
    page = inspect.look().report(tmp_path / "report.html").read_text()
    check(page)
    for text in (
        "model.layers.1.mlp.down_proj",
        "reduce-scatter",
        "exp_avg of lm_head.weight",
        "fits",
        "Traffic on the wires",
        "stablehlo",
    ):
        assert text in page
    assert page.count("data:image/png;base64,") == 2


def test_the_report_of_an_abstract_run(tmp_path: Any) -> None:
    job = Job()
    with nxd_jax.abstract_run(instance="trn1.32xlarge") as run:
        job.step(*job.build())
        page = inspect.look(run).report(tmp_path / "report.html", title="<b>planned</b>").read_text()
    check(page)
    assert "&lt;b&gt;planned&lt;/b&gt;" in page and "1 x trn1.32xlarge" in page


def test_the_report_of_a_module(tmp_path: Any) -> None:
    page = inspect.look(nn.Linear(4, 4), torch.zeros(2, 4)).report(tmp_path / "sub" / "report.html").read_text()
    check(page)
    assert "no rank communicates" in page


def test_a_large_report_stays_under_the_limit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxd_jax.inspect.report.LIMIT", 200_000)
    page = inspect.look(nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)]), torch.zeros(2, 4)).report(tmp_path / "r.html").read_text()
    assert len(page.encode()) < 400_000 and "--dump-hlo" in page


def test_statistics() -> None:
    before = inspect.statistics()
    script(2, [])
    after = inspect.statistics()
    assert after.steps >= before.steps + 2 and after.compiled + after.reused > before.compiled + before.reused
    assert after.to_device_bytes > before.to_device_bytes
    assert "programs made" in str(after) and "Compilation and caches" in after._repr_html_()
