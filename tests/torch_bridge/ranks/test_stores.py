"""`gathered[rank] = x` of a list of tensors: each rank's tensor at its own place, with gradients, as in one process a rank."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torchmetrics
from torchmetrics.utilities.distributed import gather_all_tensors

import torch_bridge
from tests.torch_bridge.ranks import eager
from torch_bridge.mesh import world
from torch_bridge.script import rank_indexing

RANKS = 4


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    world.configure(world.World(RANKS))
    dist.init_process_group("xla")
    rank_indexing._reported.clear()
    yield
    rank_indexing._reported.clear()
    dist.destroy_process_group()
    world.configure(None)


def gathered(x: torch.Tensor, rank: Any) -> list[torch.Tensor]:
    """What open_clip and SimCLR do."""
    found = [torch.zeros_like(x) for _ in range(RANKS)]
    dist.all_gather(found, x)
    found[rank] = x
    return found


def test_a_contrastive_loss_has_the_gradients_of_each_rank() -> None:
    torch.manual_seed(0)
    images, texts, start = torch.randn(RANKS, 3, 5), torch.randn(RANKS, 3, 5), torch.randn(5, 4)

    def loss(weight: torch.Tensor, rank: int) -> torch.Tensor:
        own = [F.normalize(data[rank] @ weight, dim=-1) for data in (images, texts)]
        others = [[F.normalize(data[k] @ weight, dim=-1).detach() for k in range(RANKS)] for data in (images, texts)]
        x, y = (torch.cat([mine if k == rank else all_of[k] for k in range(RANKS)]) for mine, all_of in zip(own, others, strict=True))
        return F.cross_entropy(x @ y.t(), torch.arange(3 * RANKS))

    wanted = []
    for rank in range(RANKS):
        weight = start.clone().requires_grad_()
        loss(weight, rank).backward()
        wanted.append(weight.grad)
    weight = start.clone().to("xla").requires_grad_()
    rank = xm.get_ordinal()
    own = [F.normalize(data.to("xla")[rank] @ weight, dim=-1) for data in (images, texts)]
    x, y = (torch.cat(gathered(features, dist.get_rank())) for features in own)
    F.cross_entropy(x @ y.t(), torch.arange(3 * RANKS, device="xla")).backward()
    eager.same(weight.grad, wanted)


def _plain(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> torch.Tensor:
    kept[r] = x
    return torch.stack(kept)


def _on_one_line(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> torch.Tensor:
    kept[r] = x; return torch.stack(kept)  # noqa: E702  # fmt: skip


def _from_the_end(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> torch.Tensor:
    kept[-1 - r] = x
    return torch.stack(kept)


def _in_a_loop(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> torch.Tensor:
    for k in range(3):
        kept[(r + k) % RANKS] = x + k
    return torch.stack(kept)


def _last(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> None:
    kept[r // 2] = x


def _of_a_loss(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> torch.Tensor:
    place = (x.sum() * 0 + r).long().item()
    kept[place] = x
    return torch.stack(kept)


class Holder:
    kept: list[torch.Tensor]


def _attribute(kept: list[torch.Tensor], r: Any, x: torch.Tensor) -> torch.Tensor:
    holder = Holder()
    holder.kept = kept
    holder.kept[r] = x
    return torch.stack(kept)


STORES = [_plain, _on_one_line, _from_the_end, _in_a_loop, _last, _of_a_loss, _attribute]


@pytest.mark.parametrize("device", ["xla", "cpu"])
@pytest.mark.parametrize("store", STORES, ids=lambda f: f.__name__)
def test_each_place_is_each_ranks(store: Callable[..., Any], device: str) -> None:
    def run(r: Any, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.full((2,), -1.0 - k, device=x.device) for k in range(RANKS)]
        store(kept, r, x)
        return torch.stack(kept)

    trace = sys.gettrace()
    wanted = eager.each(lambda r: run(r, torch.tensor([1.0, 2.0]) * (r + 1)))
    found = run(xm.get_ordinal(), torch.tensor([1.0, 2.0], device=device) * (xm.get_ordinal() + 1))
    eager.same(found.to("xla"), wanted)
    assert sys.gettrace() is trace and sys._getframe().f_trace is None


def test_an_error_of_python_stays() -> None:
    kept = [torch.zeros(2, device="xla")] * 2
    with warnings.catch_warnings(), pytest.raises(IndexError, match="list assignment index out of range"):
        warnings.simplefilter("ignore")
        kept[xm.get_ordinal() + 2] = kept[0]
    assert sys.gettrace() is None


@pytest.mark.parametrize("new", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), 1.0], ids=["shape", "dtype", "number"])
def test_what_is_no_tensor_like_the_others_is_reported(new: Any) -> None:
    kept: list[Any] = [torch.zeros(2, device="xla") for _ in range(RANKS)]
    new = new.to("xla") if isinstance(new, torch.Tensor) else new
    with pytest.warns(UserWarning, match=r"test_stores.py:\d+ takes kept\[rank\] by a number that differs by rank") as found:
        rank = xm.get_ordinal()
        kept[rank] = new
        assert kept[0] is new
    assert found[0].filename == __file__


def test_lists_of_other_things_are_reported() -> None:
    kept: list[Any] = [None] * RANKS
    with pytest.warns(UserWarning, match=r"takes kept\[rank\] by a number that differs by rank"):
        rank = xm.get_ordinal()
        kept[rank] = torch.zeros(2, device="xla")


def test_under_a_debugger_it_is_reported() -> None:
    kept = [torch.zeros(2, device="xla") for _ in range(RANKS)]
    rank = xm.get_ordinal()
    sys.settrace(lambda frame, event, argument: None)
    try:
        with pytest.warns(UserWarning, match=r"takes kept\[rank\] by a number"):
            kept[rank] = kept[0] + 1
    finally:
        sys.settrace(None)
    torch_xla.sync()


def test_torchmetrics_gathers_each_rank() -> None:
    """It puts a rank's own state into what it gathered; every rank has the same result."""
    own = torch.ones((), device="xla") * (xm.get_ordinal() + 1)
    found = gather_all_tensors(own)
    eager.same(torch.stack(found), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    metric = torchmetrics.MeanMetric().to("xla")
    metric.update(own)
    metric.update(3 * own)
    eager.same(metric.compute(), torch.tensor(5.0))


def parts(device: str = "xla") -> list[torch.Tensor]:
    return [torch.full((2,), float(k), device=device) for k in range(RANKS)]


def _named(rank: Any) -> Any:
    found = parts()
    own = found[rank]
    return own.sum() + own


def _cast(rank: Any) -> Any:
    found = parts()
    own = found[rank].double()
    return (own * 2).float() / 2 + own.mean().float()


def _added(rank: Any) -> Any:
    found = parts()
    found[rank] += 10
    return torch.stack(found)


def _added_out_of_place(rank: Any) -> Any:
    found = parts()
    found[rank] = found[rank] + 10
    return torch.stack(found)


def _backwards(rank: Any) -> Any:
    start = torch.ones(2, device="xla", requires_grad=True)
    found = [start * (k + 1) for k in range(RANKS)]
    torch.square(found[rank]).sum().backward()
    return start.grad


READS: dict[str, Callable[[Any], Any]] = {
    "operand": lambda rank: (lambda found: found[rank] * 2)(parts()),
    "from the end": lambda rank: (lambda found: found[rank - RANKS] * 2)(parts()),
    "method": lambda rank: (lambda found: found[rank].sum())(parts()),
    "function": lambda rank: (lambda found: F.relu(found[rank]))(parts()),
    "element": lambda rank: (lambda found: found[rank][0] + 1)(parts()),
    "of the CPU": lambda rank: (lambda found: found[rank].to("xla"))(parts("cpu")),
    "named": _named,
    "cast": _cast,
    "added in place": _added,
    "added": _added_out_of_place,
    "gradient": _backwards,
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_each_ranks_own(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = READS[name](xm.get_ordinal())
    for rank, own in enumerate(torch_bridge.shards(found)):
        torch.testing.assert_close(own, READS[name](rank).cpu())


def _written(rank: Any) -> None:
    found = parts()
    own = found[rank]
    own.add_(1)


def _added_to_a_name(rank: Any) -> None:
    found = parts()
    own = found[rank]
    own += 1


def _cast_and_written(rank: Any) -> None:
    found = parts()
    found[rank].to("xla").add_(1)


def _a_part_written(rank: Any) -> None:
    found = parts()
    found[rank][0] = 1


def _kept(rank: Any) -> list[torch.Tensor]:
    found = parts()
    return [found[rank]]


def _reduced(rank: Any) -> None:
    found = parts()
    dist.all_reduce(found[rank])


def _parameter(rank: Any) -> None:
    found = [torch.nn.Parameter(x) for x in parts()]
    found[rank].sum().backward()


def _other_shapes(rank: Any) -> torch.Tensor:
    found = [torch.ones(k + 1, device="xla") for k in range(RANKS)]
    return found[rank] * 2


def _one(rank: Any) -> bool:
    found = parts()
    return found[rank] is found[0]


@pytest.mark.parametrize(
    "run",
    [_written, _added_to_a_name, _cast_and_written, _a_part_written, _kept, _reduced, _parameter, _other_shapes, _one],
    ids=lambda f: f.__name__,
)
def test_what_may_be_written_is_the_first_ranks(run: Callable[[Any], Any]) -> None:
    with pytest.warns(UserWarning, match=r"test_stores.py:\d+ takes found\[rank\] by a number that differs by rank"):
        run(xm.get_ordinal())
