"""torch's DistributedDataParallel of modules on xla."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import torch_bridge
from tests.torch_bridge.ranks import eager
from torch_bridge.collectives import backend  # noqa: F401  (it registers backend "xla")
from torch_bridge.mesh import world


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    world.configure(world.World(2))
    dist.init_process_group("xla")
    yield
    dist.destroy_process_group()
    world.configure(None)


class Branches(nn.Module):
    """One of the layers is not used, another in some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


@pytest.mark.filterwarnings("ignore:.*static graph.*", "ignore:.*does not match bucket view strides.*")
@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({"find_unused_parameters": True}, [True, False, True]),
        ({"static_graph": True, "gradient_as_bucket_view": True}, [True, True]),
    ],
)  # fmt: skip
def test_unused_parameters(options: dict[str, Any], used: list[bool]) -> None:
    """They get no gradient, and the others the mean over ranks of theirs."""
    torch.manual_seed(0)
    alone = Branches()
    ours = Branches()
    ours.load_state_dict(alone.state_dict())
    parallel = DistributedDataParallel(ours.to("xla"), **options)
    for k, both in enumerate(used):
        values = eager.each(lambda r, k=k: torch.linspace(-1, 1 + r + k, 12).reshape(4, 3))
        ours.zero_grad()
        alone.zero_grad()
        parallel(eager.on_xla(values), both).pow(2).mean().backward()
        torch.stack([alone(v, both).pow(2).mean() for v in values]).mean().backward()
        for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                eager.same(p.grad, q.grad)


def test_unused_parameters_of_a_played_module(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's reducer finds them in the graph behind the one node of a played module, and does not say that there are none."""
    parallel = DistributedDataParallel(torch_bridge.optimize(Branches().to("xla")), find_unused_parameters=True)
    for _ in range(7):
        parallel.zero_grad()
        parallel(torch.ones(4, 3, device="xla"), True).pow(2).mean().backward()
    assert parallel.module.forward.played > 1
    assert parallel.module.unused.weight.grad is None and parallel.module.second.weight.grad is not None
    assert "did not find any unused parameters" not in capfd.readouterr().err


def test_the_order_of_gradients_runs_no_program() -> None:
    """In the second step the reducer takes the first rank's order of gradients: a step of torch_xla.compile(full_graph=True) stays one graph."""
    torch.manual_seed(0)
    alone, ours = nn.Linear(4, 2), nn.Linear(4, 2)
    ours.load_state_dict(alone.state_dict())
    parallel = DistributedDataParallel(ours.to("xla"), gradient_as_bucket_view=True)
    ours_optimizer, optimizer = torch.optim.SGD(parallel.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        ours_optimizer.zero_grad()
        parallel(x).square().mean().backward()
        ours_optimizer.step()

    compiled = torch_xla.compile(step, full_graph=True)
    for k in range(4):
        values = eager.each(lambda r, k=k: torch.linspace(-1, 1 + r + k, 12).reshape(3, 4))
        compiled(eager.on_xla(values))
        optimizer.zero_grad()
        torch.stack([alone(v).square().mean() for v in values]).mean().backward()
        optimizer.step()
    eager.same(ours.weight.detach(), alone.weight.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchs_own_zero_is_refused() -> None:
    """All ranks of the process would update the first one's parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = nn.Linear(2, 2).to("xla").parameters()
    with pytest.raises(NotImplementedError, match=r"use torch_xla\.distributed\.zero_redundancy_optimizer\.ZeroRedundancyOptimizer"):
        ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")
def test_torchs_gradients_of_broadcasts_are_refused() -> None:
    """They stay on the source rank by a branch in Python. Without gradients broadcasts are right, and so is what the message names."""
    from torch.distributed.nn import functional

    values = eager.each(lambda r: torch.full((2,), r + 1.0))
    x, group = eager.on_xla(values), dist.group.WORLD  # torch's default is the group that there was when this was imported
    eager.same(functional.broadcast(x, 1, group), [values[1]] * 2)
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"functional\.broadcast keeps the gradient on the source rank.*functional\.all_reduce"):
        functional.broadcast(x, 1, group)
    with pytest.raises(NotImplementedError, match=r"functional\.scatter keeps .* take the part"):
        functional.scatter([x, x], 0, group)
    (functional.all_reduce(torch.where(torch.zeros((), device="xla") + dist.get_rank() == 1, x, 0.0), group=group) * 3).sum().backward()
    assert x.grad is not None
    eager.same(x.grad, [torch.zeros(2), torch.full((2,), 6.0)])


def test_mixed_precision_is_refused() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    with pytest.raises(
        NotImplementedError, match=r'mixed_precision=_MixedPrecision\(.*Leave it out, and compute under torch\.autocast\("xla"'
    ):
        DistributedDataParallel(nn.Linear(2, 2).to("xla"), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))


class Uneven(Sampler[int]):
    """The second rank has fewer samples."""

    def __init__(self, rank: Any):
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(3 - self.rank))


@pytest.mark.filterwarnings("ignore:.*Time stats are currently only collected.*")
def test_joins_that_are_to_throw() -> None:
    """Without that, the epoch ends for all with a warning, as for any loader."""
    parallel = DistributedDataParallel(nn.Linear(2, 1).to("xla"))
    loader: DataLoader[Any] = DataLoader(torch.ones(3, 2), sampler=Uneven(world.rank()))  # type: ignore[arg-type]

    def epoch(**options: Any) -> int:
        steps = 0
        with Join([parallel], **options):
            for x in loader:
                parallel(x).sum().backward()
                steps += 1
        return steps

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ranks \[1\] have no more batches and ranks \[0\] have\. Give all ranks equally many"):
            epoch(throw_on_early_termination=True)
    for options in ({}, {"enable": False, "throw_on_early_termination": True}):
        with pytest.warns(UserWarning, match="more, which are left out"):
            assert epoch(**options) == 2
