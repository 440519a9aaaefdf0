"""Python branches on a rank: reported once where tensor work depends on them, silent where they print."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import world
from torch_bridge.runtime import executor
from torch_bridge.script import rank_branches


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> Iterator[None]:
    hosted(4, dp=2, tp=2)
    rank_branches._taken.clear()
    executor.clear_cache()
    yield
    rank_branches._taken.clear()


def reports(run: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = run(world.rank(), torch.ones(3, device="xla"), *args)
        executor.sync()
        del out
    return [str(w.message) for w in found if w.category is UserWarning]


def plain(r: Any, x: torch.Tensor) -> torch.Tensor:
    if r == 0:
        x = x * 2
    return x


def otherwise(r: Any, x: torch.Tensor) -> torch.Tensor:
    if r != 0:
        pass
    else:
        x = x * 2
    return x


def elif_(r: Any, x: torch.Tensor) -> torch.Tensor:
    if x is None:
        pass
    elif r < 2:
        x = x - 1
    return x


def truth(r: Any, x: torch.Tensor) -> torch.Tensor:
    if not r:
        x = x + 1
    return x


def both(r: Any, x: torch.Tensor) -> torch.Tensor:
    if r % 2 == 0 and r < 2:
        for _ in range(2):
            x = x + 1
    return x


def loop(r: Any, x: torch.Tensor) -> torch.Tensor:
    steps = 0
    while steps < 3 - r:
        x = x * 2
        steps += 1
    return x


def of_a_tensor(r: Any, x: torch.Tensor) -> torch.Tensor:
    if (x * r).sum() < 4:
        x = x * 3
    return x


def of_an_item(r: Any, x: torch.Tensor) -> torch.Tensor:
    if ((x * r).sum() < 4).item():
        x = x * 3
    return x


def master(r: Any, x: torch.Tensor) -> torch.Tensor:
    if xm.is_master_ordinal():
        x = x * 2
    return x


def chosen(r: Any, x: torch.Tensor) -> torch.Tensor:
    y = (
        x * 2
        if r == 0
        else x * 3
    )  # fmt: skip
    return y


def chosen_on_one_line(r: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if r == 0 else x * 3


@pytest.mark.parametrize(
    "run",
    [plain, otherwise, elif_, truth, both, loop, of_a_tensor, of_an_item, master, chosen, chosen_on_one_line],
    ids=lambda f: f.__name__,
)
def test_tensor_work_that_only_some_ranks_would_do(run: Any) -> None:
    (message,) = reports(run)
    assert __file__ in message and "branches on a rank" in message and "torch.where" in message and "torchrun" in message
    assert reports(run) == []


def printing(r: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if r == 0:
        names = [f"{r}", str(list(x.shape))]
        assert names
    return y


def same_for_all(r: Any, x: torch.Tensor) -> torch.Tensor:
    if r >= 0 and world.size() == 4:
        x = x * 2
    return x


def name_only(r: Any, x: torch.Tensor) -> torch.Tensor:
    assert ("first" if r == 0 else "other") == "first"
    return x * 2


def after(r: Any, x: torch.Tensor) -> torch.Tensor:
    if r == 0:
        shown = str(r)
        assert shown
    return x * 2


def saving(r: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if xm.is_master_ordinal():
        assert y.cpu().tolist() == [2.0] * 3 and y.shape == (3,)
    return y


@pytest.mark.parametrize("run", [printing, same_for_all, name_only, after, saving], ids=lambda f: f.__name__)
def test_harmless_branches(run: Any) -> None:
    assert reports(run) == []


def test_each_branch_once() -> None:
    def run(r: Any, x: torch.Tensor) -> torch.Tensor:
        if r == 0:
            x = x * 2
        if r == 1:
            x = x * 3
        if r < 2:
            x = x * 4
        return x

    assert len(reports(run)) == 3  # the second is not taken for rank 0, and rank 0 decides: rank 1 would


def test_the_first_ranks_choice_is_taken() -> None:
    with pytest.warns(UserWarning, match="the first rank's choice was taken for all of them"):
        y = plain(world.rank(), torch.ones(2, device="xla"))
        assert y.tolist() == [2.0, 2.0]


def test_code_without_source() -> None:
    scope: dict[str, Any] = {}
    exec("def run(r, x):\n    if r == 0:\n        x = x * 2\n    return x\n", scope)
    assert reports(scope["run"]) == []


def test_master_print(capsys: pytest.CaptureFixture[str]) -> None:
    xm.master_print("step", world.rank())
    assert capsys.readouterr().out == "step 0\n"
