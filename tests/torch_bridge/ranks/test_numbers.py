"""Numbers that differ by rank: `RankInt` and its relatives, and numbers read from tensors."""

# ruff: noqa: UP031, UP032

from __future__ import annotations

import copy
import math
import operator
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import sharded

ARITHMETIC = [
    operator.add, operator.sub, operator.mul, operator.mod, operator.floordiv, operator.truediv, operator.pow, operator.and_, operator.or_,
    operator.xor, operator.lshift, operator.rshift,
]  # fmt: skip
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pytest.fixture
def rank(hosted: Hosted) -> Any:
    hosted(4, dp=2, tp=2)
    return world.rank()


def values(x: Any) -> list[Any]:
    return rank_numbers.per_rank(x)


@pytest.mark.parametrize("fn", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("swap", [False, True], ids=["rank first", "rank second"])
def test_arithmetic_is_each_ranks_own(rank: Any, fn: Any, swap: bool) -> None:
    own = rank * 2 + 1
    plain = [2 * r + 1 for r in range(4)]
    assert values(fn(3, own) if swap else fn(own, 3)) == [fn(3, v) if swap else fn(v, 3) for v in plain]
    assert values(fn(rank + 1, own)) == [fn(r + 1, v) for r, v in enumerate(plain)]


@pytest.mark.parametrize(
    "fn", [operator.neg, operator.pos, operator.invert, abs, math.floor, math.ceil, math.trunc, round, int.__neg__], ids=str
)
def test_unary(rank: Any, fn: Any) -> None:
    own = rank - 2
    if fn is int.__neg__:
        assert values(-own) == [2, 1, 0, -1]
        return
    assert values(fn(own)) == [fn(r - 2) for r in range(4)]


def test_divmod(rank: Any) -> None:
    row, column = divmod(rank, 2)
    assert (values(row), values(column)) == ([0, 0, 1, 1], [0, 1, 0, 1])
    most, rest = divmod(7, rank + 1)
    assert (values(most), values(rest)) == ([7, 3, 2, 1], [0, 1, 1, 3])


def test_floats(rank: Any) -> None:
    half = rank / 2
    assert isinstance(half, (rank_numbers.RankFloat, torch.SymFloat)) and values(half) == [0.0, 0.5, 1.0, 1.5]
    assert values(half * 2.5 - 1) == [-1.0, 0.25, 1.5, 2.75]
    assert values(rank * 0.5) == values(half) and values(1 / (half + 1)) == [1.0, 1 / 1.5, 0.5, 0.4]
    assert values(math.floor(half)) == [0, 0, 1, 1] and values(round(half)) == [0, 0, 1, 2]
    assert half.is_integer() and f"{half + 0.25:.1f}" == "0.2" and float(half) == 0.0
    assert values(half**2) == [0.0, 0.25, 1.0, 2.25] and values(2**half)[2] == 2.0


def test_truth_values(rank: Any) -> None:
    odd = rank % 2 == 1
    assert isinstance(odd, rank_numbers.RankBool) and values(odd) == [False, True, False, True]
    assert values(odd & (rank > 1)) == [False, False, False, True] and values(odd | True) == [True] * 4
    assert values(odd ^ (rank > 1)) == [False, True, True, False]
    assert not odd and str(odd) == "False"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lambda r: f"{r}", "1"), (lambda r: f"{r:02d}", "01"), (lambda r: "%d" % r, "1"), (lambda r: "%03d" % r, "001"),
        (lambda r: "{:>4}".format(r), "   1"), (lambda r: str(r), "1"), (lambda r: repr(r), "1"), (lambda r: f"{r!r}", "1"),
        (lambda r: "%s of %s" % (r, r), "1 of 1"), (lambda r: "step_%i" % r, "step_1"), (lambda r: f"{r:x}", "1"), (lambda r: "".join(map(str, [r])), "1"),
        (lambda r: f"{r / 2:.2f}", "0.50"), (lambda r: "%.1f" % (r / 2), "0.5"), (lambda r: str(r > 0), "True"), (lambda r: hex(r), "0x1"),
    ],
)  # fmt: skip
def test_text_is_the_first_ranks(rank: Any, text: Any, expected: str) -> None:
    assert text(rank + 1) == expected


@pytest.mark.filterwarnings("ignore:.*by a number that differs by rank")
def test_as_rank_0_in_python_containers(rank: Any) -> None:
    second = rank + 1
    letters = ["a", "b", "c", "d", "e"]
    assert letters[second] == "b" and letters[second:] == letters[1:] and "xyz"[second] == "y" and (1, 2)[second] == 2
    assert {1: "one"}[second] == "one" and {second: "one"}[1] == "one" and second in {1, 2} and second in [1] and second in range(3)
    assert list(range(second)) == [0] and list(range(10))[second::4] == [1, 5, 9] and len([0] * second) == 1
    assert hash(second) == hash(1) and second.bit_length() == 1 and operator.index(second) == 1
    assert int(second) == 1 and float(second) == 1.0 and bool(second) and complex(second) == 1
    assert max(second, 0) == 1 and min(second, 5) == 1 and sum([second, 1]) == 2 and sorted([3, second])[0] == 1


def test_isinstance(rank: Any) -> None:
    assert isinstance(rank, torch.SymInt) and isinstance(rank, rank_numbers.RankInt)
    assert isinstance(rank / 2, torch.SymFloat) and isinstance(rank == 0, torch.SymBool)
    assert torch.is_tensor(rank) is False


def test_agreement_collapses_to_plain_numbers(rank: Any) -> None:
    for plain, expected in (
        (rank * 0, 0),
        (rank - rank, 0),
        (rank // 4, 0),
        (rank >= 0, True),
        (rank < 4, True),
        (rank * 0.0, 0.0),
        (rank == rank, True),
    ):
        assert type(plain) is type(expected) and plain == expected
    assert world.current().table(lambda r: "name") == "name" and type(world.size()) is int


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_keep_every_rank(rank: Any, copied: Any) -> None:
    assert values(copied(rank)) == [0, 1, 2, 3] and values(copied({"rank": [rank + 1]})["rank"][0]) == [1, 2, 3, 4]


def test_pickled_as_the_first_ranks(rank: Any) -> None:
    found = pickle.loads(pickle.dumps({"rank": rank + 1, "half": rank / 2, "first": rank == 0}))
    assert found == {"rank": 1, "half": 0.0, "first": True} and [type(v) for v in found.values()] == [int, float, bool]


@pytest.mark.parametrize(
    "use",
    [
        lambda r: torch.zeros(r + 1), lambda r: torch.zeros(r + 1, device="xla"), lambda r: torch.arange(r + 1), lambda r: torch.zeros(4)[:r],
        lambda r: torch.ones(4, 2, device="xla").view(r + 1, -1), lambda r: torch.nn.Linear(r + 1, 2), lambda r: torch.randn(r + 2),
        lambda r: torch.ones(4, device="xla").repeat(r + 1), lambda r: torch.ones(4, 4, device="xla").sum(dim=r % 2),
        lambda r: torch.ones(4, 4, device="xla").transpose(0, r % 2), lambda r: torch.ones(4, device="xla").new_zeros(r + 1),
        lambda r: torch.nn.functional.pad(torch.ones(4, device="xla"), (r, 1)), lambda r: torch.zeros(5)[1:].add_(r),
            lambda r: torch.zeros(5)[1:].__setitem__(r, 1),
        lambda r: torch.ones(4, device="xla").topk(r + 1),
        lambda r: torch.ones(4, device="xla").repeat((torch.ones((), device="xla", dtype=torch.int64) * r).item()),
        lambda r: torch.arange(8.0, device="xla")[torch.ones((), device="xla", dtype=torch.int64) * r :],
        lambda r: torch.full((torch.ones((), device="xla", dtype=torch.int64) * r,), 1.0),
    ],
)  # fmt: skip
def test_one_plain_number_is_refused(rank: Any, use: Any) -> None:
    with pytest.raises(
        rank_numbers.PlainNumberNeeded,
        match=r"runs the script once for 4 ranks.*for rank 0, 1, .*use int\(rank\) if rank 0's number is meant.*torchrun",
    ):
        use(rank)


NEXT_TO_TENSORS = [
    lambda r, x: x + r, lambda r, x: r - x, lambda r, x: x * (r / 2 + 1), lambda r, x: x / (r + 1), lambda r, x: x**r, lambda r, x: x % (r + 1),
    lambda r, x: torch.add(x, x, alpha=r), lambda r, x: torch.sub(x, r), lambda r, x: torch.mul(x, r), lambda r, x: x.add(r), lambda r, x: x.div(r + 1),
    lambda r, x: (x < r).float() * x, lambda r, x: torch.where(x > r, x, r), lambda r, x: torch.where(x > r, 0.0, x), lambda r, x: x.masked_fill(x < r, -1.0),
    lambda r, x: x.masked_fill(x < 2, r), lambda r, x: torch.clamp(x, min=r), lambda r, x: x.clamp(r, r + 2),
    lambda r, x: torch.maximum(x, torch.zeros_like(x) + r),
    lambda r, x: x * (r == 0), lambda r, x: x * torch.where(torch.ones_like(x, dtype=torch.bool) & (r > 1), 2.0, 3.0), lambda r, x: x.pow(r),
    lambda r, x: torch.lerp(x, x * 2, r / 4), lambda r, x: x.detach().floor_divide(r + 1) + x, lambda r, x: torch.sub(x, 2.0, alpha=r / 2),
    lambda r, x: x.clone().fill_(r) * x, lambda r, x: x.clone().add_(r), lambda r, x: x.clone().mul_(r).sub_(1), lambda r, x: torch.full_like(x, r) + x,
    lambda r, x: torch.eq(x, r) * x, lambda r, x: x.ge(r) * x, lambda r, x: x.new_full((3,), r) + x[0, :3],
]  # fmt: skip


def test_next_to_an_xla_tensor_each_rank_uses_its_own(rank: Any) -> None:
    eager.agree_all({str(k): use for k, use in enumerate(NEXT_TO_TENSORS)}, torch.arange(12.0).reshape(3, 4) / 2)


def test_numbers_of_ops_that_take_no_tensor(rank: Any) -> None:
    x = torch.ones(2, device="xla")
    for use in (lambda: torch.addcmul(x, x, x, value=rank), lambda: torch.nn.functional.leaky_relu(x, rank / 4)):
        with pytest.raises(NotImplementedError, match="a number that differs by rank: make it a tensor first"):
            use()


def test_integers_stay_exact(rank: Any) -> None:
    big = 2**53 + 1
    eager.agree(lambda r, x: x + r * big, torch.arange(3))
    eager.agree(lambda r, x: (x + r, x * r, x // (r + 1), x % (r + 1), x << r, x & r, x == r), torch.arange(6))
    out = eager.agree(lambda r, x: x + r, torch.arange(3, dtype=torch.int32))
    assert out.dtype == torch.int32
    assert (torch.ones(2, dtype=torch.bfloat16, device="xla") * rank).dtype == torch.bfloat16


def test_a_table_of_any_numbers(rank: Any) -> None:
    odd = world.current().table([7, 3, 3, 9].__getitem__)
    assert values(odd) == [7, 3, 3, 9]
    eager.same(torch.zeros(2, device="xla") + odd, eager.each(lambda r: torch.full((2,), float([7, 3, 3, 9][r]))))


# -- numbers read from tensors ----------------------------------------------------------------------


def test_items_remember_each_rank(rank: Any) -> None:
    loss = torch.ones((), device="xla") * (rank + 1) * 0.5
    number = loss.item()
    assert isinstance(number, float) and number == 0.5 and f"{number:.2f}" == "0.50" and float(number) == 0.5
    for use in (
        lambda x: x,
        lambda x: x * 2,
        lambda x: x / 4,
        lambda x: 1 - x,
        lambda x: x + x,
        lambda x: -x,
        lambda x: x // 1,
        lambda x: 2 / x,
    ):
        expected = [use((r + 1) * 0.5) for r in range(4)]
        assert xm.mesh_reduce("t", use(number), list) == expected
        eager.same(torch.zeros(2, device="xla") + use(number), eager.each(lambda r, e=expected: torch.full((2,), e[r])))


def mean_absolute(values: Any) -> Any:
    return np.mean([abs(v) for v in values])


OF_LISTS: dict[str, tuple[Callable[[list[Any]], Any], list[float]]] = {
    "np.mean": (lambda v: np.mean(v), [1.5, 3.0, 4.5, 6.0]),
    "np.mean of a function's": (mean_absolute, [1.5, 3.0, 4.5, 6.0]),
    "np.average": (lambda v: np.average([1.0, 4.0], weights=v), [3.0] * 4),
    "np.median": (lambda v: np.median([*v, 3.0]), [2.0, 3.0, 3.0, 4.0]),
    "np.std": (lambda v: np.std(a=v), [0.5, 1.0, 1.5, 2.0]),
    "np.max": (lambda v: np.max(v), [2.0, 4.0, 6.0, 8.0]),
    "np.stack": (lambda v: np.stack([np.full(2, x) for x in v]).sum(), [6.0, 12.0, 18.0, 24.0]),
    "np.array": (lambda v: np.array(v).mean(), [1.5, 3.0, 4.5, 6.0]),
    "np.where": (lambda v: np.where([True, False], 0.0, v).sum(), [2.0, 4.0, 6.0, 8.0]),
    "np.mean of arrays": (lambda v: np.mean([np.array(x) for x in v]), [1.5, 3.0, 4.5, 6.0]),
    "statistics.mean": (lambda v: statistics.mean(v), [1.5, 3.0, 4.5, 6.0]),
    "statistics.median": (lambda v: statistics.median([*v, 3.0]), [2.0, 3.0, 3.0, 4.0]),
    "statistics.stdev": (lambda v: round(statistics.stdev(v), 3), [0.707, 1.414, 2.121, 2.828]),
    "math.fsum": (lambda v: math.fsum(v), [3.0, 6.0, 9.0, 12.0]),
    "sum": (sum, [3.0, 6.0, 9.0, 12.0]),
}


@pytest.mark.parametrize("name", OF_LISTS)
def test_functions_of_lists_of_items(name: str, rank: Any) -> None:
    """`np.mean(losses)` of what `.item()` gave is each rank's own. (It was the first rank's, for all, without a word.)"""
    losses = [((rank + 1) * k * torch.ones((), device="xla")).item() for k in (1, 2)]
    of, wanted = OF_LISTS[name]
    assert xm.mesh_reduce("x", of(losses), lambda found: [float(v) for v in found]) == wanted
    assert type(of([1.0, 2.0])) in (float, np.float64)


def test_integer_items(rank: Any) -> None:
    count = (torch.arange(4, device="xla") < rank).sum().item()
    assert isinstance(count, int) and count == 0 and xm.mesh_reduce("t", count, list) == [0, 1, 2, 3]
    assert xm.mesh_reduce("t", count // 2, sum) == 2 and xm.mesh_reduce("t", {"n": [count]}, lambda found: [f["n"][0] for f in found]) == [
        0,
        1,
        2,
        3,
    ]
    eager.same(torch.ones(2, device="xla") * count, eager.each(lambda r: torch.full((2,), float(r))))


def test_truth_items(rank: Any) -> None:
    found = (torch.arange(4, device="xla") < rank).any()
    assert isinstance(found.item(), rank_numbers.RankBool) and values(found.item()) == [False, True, True, True]
    assert xm.mesh_reduce("t", found.item(), list) == [False, True, True, True] and not found and int(found) == 0
    assert type((found | True).item()) is bool


def test_items_that_agree_are_plain(rank: Any) -> None:
    x = torch.ones((), device="xla") * rank
    total = xm.all_reduce("sum", x)
    assert type(total.item()) is float and total.item() == 6.0
    assert type(x.item() * 0) is float and type(x.item() - x.item()) is float


def test_items_pickle_as_the_first_ranks_and_copy_whole(rank: Any) -> None:
    number = (torch.ones((), device="xla") * (rank + 1)).item()
    found = pickle.loads(pickle.dumps(number))
    assert type(found) is float and found == 1.0
    assert xm.mesh_reduce("t", copy.deepcopy({"a": number})["a"], list) == [1.0, 2.0, 3.0, 4.0]


def test_items_in_python(rank: Any) -> None:
    number = (torch.ones((), device="xla") * (rank + 1)).item()
    assert math.sqrt(number) == 1.0 and round(number, 2) == 1.0 and number < 2 and max(number, 0.0) == 1.0 and "%.1f" % number == "1.0"
    assert torch.tensor(number).item() == 1.0 and (torch.ones(2) * number).tolist() == [1.0, 1.0]
    assert sum([number, 1.0]) == 2.0


def test_mesh_reduce_of_ranks_numbers_and_tensors(rank: Any) -> None:
    own = torch.arange(2.0, device="xla") + rank
    assert xm.mesh_reduce("a", rank, max) == 3
    assert [t.tolist() for t in xm.mesh_reduce("b", own, list)] == [[float(r), r + 1.0] for r in range(4)]
    assert xm.mesh_reduce("c", 5, list) == [5] * 4
    found = xm.mesh_reduce("d", {"loss": own.sum().item(), "rank": rank, "name": "x"}, list)
    assert found == [{"loss": 2.0 * r + 1, "rank": r, "name": "x"} for r in range(4)]


def test_mesh_reduce_of_each_ranks_arrays_and_cpu_tensors(rank: Any) -> None:
    own = (torch.arange(2.0, device="xla") + rank).cpu()
    assert np.concatenate(xm.mesh_reduce("a", own.numpy(), list)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0]
    assert [f["t"][1].tolist() for f in xm.mesh_reduce("b", {"t": [rank, own]}, list)] == [[float(r), r + 1.0] for r in range(4)]


def test_a_world_of_one_has_plain_numbers() -> None:
    world.configure(None)
    assert type(world.rank()) is int and type(xm.get_ordinal()) is int
    assert type(torch.ones((), device="xla").item()) is float


def test_of_a_process_with_one_rank(hosted: Hosted) -> None:
    """It knows all ranks' numbers, as one that hosts them does, so that all processes compile one program; Python sees its own."""
    world.configure(world.World(4, hosted=(2,)))
    rank = world.rank()
    assert values(rank) == [0, 1, 2, 3] and rank == 2 and world.local_rank() == 2 and isinstance(rank, int) and f"{rank:02d}" == "02"
    assert (
        (torch.ones(2) * rank).tolist() == [2.0, 2.0]
        and torch.arange(8)[rank * 2 : rank * 2 + 2].tolist() == [4, 5]
        and [0, 1, 2, 3][rank] == 2
    )
    assert (
        torch.zeros(rank).shape == (2,)
        and float(rank) == 2.0
        and list(range(rank)) == [0, 1]
        and max(rank, 1) == 2
        and math.sqrt(rank + 2) == 2.0
    )
    with pytest.raises(
        rank_numbers.PlainNumberNeeded,
        match="This process is one of 4, which compile one program, and this number is 0, 1, 2, 3 for rank 0",
    ):
        raise rank_numbers.refuse([0, 1, 2, 3])


def test_local_ranks(hosted: Hosted) -> None:
    world.configure(world.World(8, local_size=4))
    assert values(world.local_rank()) == [0, 1, 2, 3] * 2 and world.local_size() == 4
    assert values(xm.get_local_ordinal()) == [0, 1, 2, 3] * 2
    assert sharded.from_ranks(lambda r: torch.tensor(r)).item() == 0
