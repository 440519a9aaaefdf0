"""Python branches on a rank: reported once where tensor work depends on them, silent where they print."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
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


class Lazy:
    """What asks to be left alone: attributes whose truth, equality or mere reading raises."""

    def __init__(self) -> None:
        self.table = torch.arange(3.0)
        self.array = np.arange(3.0)
        self.zero = 0
        self.nothing = None

    zero = torch.ones(3)  # the object's own comes first, though it is false

    @property
    def computed(self) -> Any:
        raise AssertionError("a property was run")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked for")

    def __bool__(self) -> bool:
        raise AssertionError("its truth was asked for")


class Module(torch.nn.Module):
    """Attributes of every kind, several elements in each."""

    kept = torch.ones(3)

    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(3))
        self.bias = None
        self.register_buffer("b", torch.ones(3))
        self.own = Lazy()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(3, 3)])

    def forward(self, r: Any, x: torch.Tensor) -> torch.Tensor:
        chosen = 1.0 if r == 0 else self.own.zero
        looked_at = (self.own.table, self.own.array, self.own.nothing, self.kept, self.bias, self.inner, np.float64)
        if not looked_at:
            looked_at = (self.own.computed, self.own.missing, self.absent, torch.absent)  # type: ignore[attr-defined]
        if r == 1:
            x = x * self.p
        return x * chosen + self.p.sum() + self.b + self.own.table.to(x.device)


def test_attributes_are_found_without_asking_for_their_truth() -> None:
    """As in models of transformers, whose attributes are tensors of several elements, and objects that load what they are asked for."""
    module = Module().to("xla")
    x = torch.ones(3, device="xla")
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        y = module(world.rank(), x)
        assert y.tolist() == [5.0, 6.0, 7.0]
    texts = [str(w.message) for w in raised if w.category is UserWarning]
    assert len(texts) == 2 and all("branches on a rank" in t for t in texts)


def test_or_of_a_rank_and_a_tensor_is_pythons() -> None:
    """Operands come back as they are; a tensor's truth is asked for where Python asks, and raises where Python's would."""
    r, t = world.rank(), torch.ones(3, device="xla")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (r or t) is t  # rank 0's number is false
        assert (r + 1 or t) is not t and (r and t) is not t
        assert ((r + 1) and t) is t and (None or t) is t
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
            _ = t or r
