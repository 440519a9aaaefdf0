"""Loaders in a process that hosts several ranks: each rank gets exactly what a loader of its own would give it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.per_rank import rank_loaders
from torch_bridge.recorder import rank_tensor, sharded

N = 4
DATA = TensorDataset(torch.arange(46.0).reshape(23, 2), torch.arange(23))


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(N, dp=2, tp=2)
    world.rank()


class Strided(Sampler[int]):
    """A sampler that somebody wrote by hand."""

    def __init__(self, count: int, rank: Any, size: int):
        self.count, self.rank, self.size = count, rank, size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(3)).tolist()
        return iter(order[self.rank : self.count // self.size * self.size : self.size])

    def __len__(self) -> int:
        return self.count // self.size


class MegatronBatches:
    """Batches of indices, as Megatron's samplers give them: no torch class at all."""

    def __init__(self, rank: Any, size: int, batch: int = 2):
        self.start, self.size, self.batch = rank * batch, size, batch

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, 16, self.size * self.batch):
            yield list(range(first + self.start, first + self.start + self.batch))

    def __len__(self) -> int:
        return 16 // (self.size * self.batch)


class Shard(Dataset[Any]):
    """A dataset that holds only its rank's part."""

    def __init__(self, rank: Any, size: int):
        self.rank, self.size = rank, size

    def __len__(self) -> int:
        return 20 // self.size

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.tensor([float(i * self.size + self.rank)]), "meta": {"index": i * self.size + self.rank}}


class Stream(IterableDataset[Any]):
    def __init__(self, rank: Any, size: int):
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[torch.Tensor]:
        for k in range(self.rank, 12, self.size):
            yield torch.full((2,), float(k))


class Noisy(Dataset[Any]):
    """Draws from torch's random state, as augmentations do."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.rand(2) + i


def distributed(r: Any, **kwargs: Any) -> DistributedSampler[Any]:
    options = {"num_replicas": N, "shuffle": True, "drop_last": True, "seed": 5} | kwargs
    return DistributedSampler(DATA, rank=r, **options)


def _epoch(loader: Any, epoch: int) -> Any:
    loader.sampler.set_epoch(epoch)
    return loader


LOADERS: dict[str, Callable[[Any], Any]] = {
    "distributed": lambda r: DataLoader(DATA, batch_size=2, sampler=distributed(r)),
    "epoch 3": lambda r: _epoch(DataLoader(DATA, batch_size=2, sampler=distributed(r)), 3),
    "not shuffled": lambda r: DataLoader(DATA, batch_size=2, sampler=distributed(r, shuffle=False)),
    "padded": lambda r: DataLoader(DATA, batch_size=4, sampler=distributed(r, drop_last=False), drop_last=True),
    "last batch short": lambda r: DataLoader(DATA, batch_size=4, sampler=distributed(r)),
    "by dp rank": lambda r: DataLoader(DATA, batch_size=3, sampler=distributed(r // 2, num_replicas=2)),
    "batch sampler": lambda r: DataLoader(DATA, batch_sampler=BatchSampler(distributed(r), 2, True)),
    "custom sampler": lambda r: DataLoader(DATA, batch_size=2, sampler=Strided(23, r, N)),
    "custom batch sampler": lambda r: DataLoader(DATA, batch_sampler=MegatronBatches(r, N)),  # type: ignore[arg-type]
    "no batches": lambda r: DataLoader(DATA, batch_size=None, sampler=distributed(r)),
    "own dataset": lambda r: DataLoader(Shard(r, N), batch_size=2),
    "own dataset, shuffled": lambda r: DataLoader(Shard(r, N), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "own dataset, torch's state": lambda r: DataLoader(Shard(r, N), batch_size=2, shuffle=True),
    "stream": lambda r: DataLoader(Stream(r, N), batch_size=2),
    "random augmentation": lambda r: DataLoader(Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), N, r, shuffle=True)),  # type: ignore[arg-type]
    "collate": lambda r: DataLoader(
        DATA, batch_size=2, sampler=distributed(r), collate_fn=lambda items: {"x": [i[0] for i in items], "n": (len(items), "text")}
    ),
    "two workers": lambda r: DataLoader(DATA, batch_size=2, sampler=distributed(r), num_workers=2),
    "subset": lambda r: DataLoader(torch.utils.data.Subset(Shard(r, N), [0, 3, 4, 1]), batch_size=2),
    "concatenated": lambda r: DataLoader(torch.utils.data.ConcatDataset([Shard(r, N), Shard(r, N)]), batch_size=5),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "loop": lambda loader: loader,
    "MpDeviceLoader": lambda loader: pl.MpDeviceLoader(loader, "xla"),
    "ParallelLoader": lambda loader: pl.ParallelLoader(loader, [xm.xla_device()]).per_device_loader(xm.xla_device()),
}


def _leaves(batch: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(batch)


def _compare(ours: list[Any], alone: list[list[Any]]) -> None:
    assert len(ours) == len(alone[0])
    for step, batch in enumerate(ours):
        expected = [_leaves(epoch[step]) for epoch in alone]
        for k, leaf in enumerate(_leaves(batch)):
            if isinstance(leaf, torch.Tensor):
                eager.same(leaf, [e[k] for e in expected], 0, 0)
            else:
                assert leaf == expected[0][k]


@pytest.mark.core(keep=5)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # JAX warns of fork; workers do not use it
@pytest.mark.parametrize("name", LOADERS)
def test_each_rank_gets_what_it_would_get_alone(name: str) -> None:
    build = LOADERS[name]
    alone = []
    for r in range(N):
        torch.manual_seed(11)
        alone.append(list(build(r)))
    for way, wrap in WAYS.items():
        if way != "loop" and name == "two workers":
            continue
        torch.manual_seed(11)
        _compare(list(wrap(build(world.rank()))), alone)


def test_several_epochs_and_the_state_between_them() -> None:
    def epochs(r: Any, wrap: Any) -> tuple[list[Any], list[torch.Tensor]]:
        torch.manual_seed(2)
        sampler = distributed(r)
        shuffled = DataLoader(Shard(r, N), batch_size=2, shuffle=True)
        loader = wrap(DataLoader(DATA, batch_size=2, sampler=sampler))
        batches, draws = [], []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            batches += [*loader, *shuffled]
            draws.append(torch.rand(2))
        return batches, draws

    alone = [epochs(r, WAYS["loop"]) for r in range(N)]
    for wrap in (WAYS["loop"], WAYS["MpDeviceLoader"]):
        batches, draws = epochs(world.rank(), wrap)
        _compare(batches, [found for found, _ in alone])
        assert all(torch.equal(a, b) for a, b in zip(draws, alone[0][1], strict=True))


def test_only_the_axes_of_the_sampler() -> None:
    batch = next(iter(LOADERS["by dp rank"](world.rank())))
    assert sharded.varying(batch[0]).axes == ("dp",) and batch[0].shape == (3, 2)


def test_a_loader_that_knows_no_rank() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(0)))
    assert rank_loaders.rank_table(loader) is None
    batch = next(iter(loader))
    assert batch[0].device.type == "cpu"
    moved = next(iter(pl.MpDeviceLoader(loader, "xla")))
    assert sharded.varying(moved[0]).axes == ()


def test_training_loop_of_a_real_script() -> None:
    """`x.to(device)` of what is there already."""
    for x, y in LOADERS["distributed"](world.rank()):
        moved = x.to("xla")
        assert sharded.varying(moved).axes == ("dp", "tp") and y.to(xm.xla_device()).device.type == "xla"
        break


def test_breaking_off_and_starting_again() -> None:
    loader = LOADERS["distributed"](world.rank())
    first = next(iter(loader))
    again = next(iter(loader))
    eager.same(first[0], sharded.shards(again[0]))


def test_lengths() -> None:
    loader = LOADERS["distributed"](world.rank())
    assert len(loader) == len(LOADERS["distributed"](0)) and len(pl.MpDeviceLoader(loader, "xla")) == len(loader)


class Uneven(Dataset[Any]):
    def __init__(self, rank: Any):
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.zeros(2 + (self.rank if i > 1 else 0))


def test_batches_of_different_shapes() -> None:
    loader = iter(DataLoader(Uneven(world.rank()), batch_size=2))
    assert next(loader).shape == (2, 2)
    with pytest.raises(
        ValueError,
        match=r"batches of different shapes \[\(2, 2\), \(2, 3\), \(2, 4\), \(2, 5\)\]: all ranks compute together.*drop_last=True",
    ):
        next(loader)


class Short(Sampler[int]):
    """Ranks with fewer samples than others."""

    def __init__(self, rank: Any):
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(8 - 2 * self.rank))

    def __len__(self) -> int:
        return 8 - 2 * self.rank


def test_the_shortest_rank_ends_the_epoch() -> None:
    with pytest.warns(
        UserWarning, match=r"ranks \[3\] have 1 batches and ranks \[0, 1, 2\] have more, which are left out: .* the epoch ends for all"
    ):
        assert len(list(DataLoader(DATA, batch_size=2, sampler=Short(world.rank())))) == 1


def test_numbers_in_a_batch_are_each_ranks_own() -> None:
    def collate(samples: list[Any]) -> Any:
        rows = torch.stack([x for x, _ in samples])
        label = int(samples[0][1])
        return {"rows": rows, "of": ("name", [label, len(samples)]), "mean": float(label), "even": label % 2 == 0, "none": None}

    sampler = DistributedSampler(DATA, N, world.rank(), shuffle=False)
    batch = next(iter(DataLoader(DATA, batch_size=2, sampler=sampler, collate_fn=collate)))
    name, (label, count) = batch["of"]
    assert (name, count, batch["none"]) == ("name", 2, None) and type(count) is int
    assert rank_numbers.values_of(batch["even"]) == (True, False, True, False)
    for number in (label, batch["mean"]):
        assert [x.item() for x in sharded.shards(torch.ones((), device="xla") * number)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:.*os.fork")
@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_that_differ_by_rank(workers: int) -> None:
    """A dataset of each rank's part of a CPU tensor, a subset at its part of an order: batches stay on the CPU."""
    rows, order = torch.arange(16.0).view(8, 2), torch.randperm(8)
    rank = world.rank()
    mine = slice(2 * rank, 2 * rank + 2)
    for dataset in (TensorDataset(rows[mine], rows[:2]), Subset(TensorDataset(rows), order[mine])):  # type: ignore[arg-type]
        (batch,) = DataLoader(dataset, batch_size=2, num_workers=workers)
        found = batch[0]
        assert isinstance(found, rank_tensor.RankTensor) and type(batch[-1]) in (torch.Tensor, rank_tensor.RankTensor)
        for r, own in enumerate(found.parts):
            places = slice(2 * r, 2 * r + 2)
            assert torch.equal(own, rows[places] if len(batch) == 2 else rows[order[places]])


def test_errors_in_a_dataset_arrive() -> None:
    class Broken(Shard):
        def __getitem__(self, i: int) -> Any:
            raise KeyError("no such sample")

    for wrap in WAYS.values():
        with pytest.raises(KeyError, match="no such sample"):
            next(iter(wrap(DataLoader(Broken(world.rank(), N), batch_size=2))))


def test_objects_of_one_rank() -> None:
    sampler = distributed(world.rank())
    own = rank_loaders.own(sampler, 2)
    assert own.rank == 2 and type(own.rank) is int and sampler.rank is not own.rank and own.dataset is sampler.dataset
    shared = [1, "a", torch.zeros(1)]
    assert rank_loaders.own(shared, 1) is shared
    loop: dict[str, Any] = {"rank": world.rank()}
    loop["self"] = loop
    assert rank_loaders.own(loop, 3)["rank"] == 3


# -- random numbers -----------------------------------------------------------------------------------


class Drawing(Dataset[Any]):
    """A dataset that draws."""

    def __init__(self, rank: Any, draw: Callable[[], Any]):
        self.rank, self.draw = rank, draw

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([100.0 * self.rank + i]) + self.draw()


NOISES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: torch.rand(1),
    "random": lambda: random.random(),
    "numpy": lambda: np.random.rand(),
}


def seed_all(seed: Any) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def epoch(rank: Any, noise: str, shuffle: bool, own: bool = False) -> list[Any]:
    """Batches, and what the script draws after each: what each rank has, if `rank` is all ranks' number."""
    generator = torch.Generator().manual_seed(7 + rank) if own else None
    found = []
    for batch in DataLoader(Drawing(rank, NOISES[noise]), batch_size=4, shuffle=shuffle, generator=generator):
        found.append([batch, torch.rand(2), random.random(), np.random.rand()])
    return found


def each_ranks(found: list[Any], place: int) -> list[Any]:
    def one(x: Any) -> Any:
        return sharded.shards(x)[place].tolist() if x.device.type == "xla" else rank_tensor.own(x, place).tolist()

    return [[one(x) if isinstance(x, torch.Tensor) else rank_numbers.own(x, place) for x in row] for row in found]


def alone_with(rank: int, seed: int, *args: Any) -> list[Any]:
    seed_all(seed)
    return each_ranks(epoch(rank, *args), 0)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_copies_draw_as_if_alone(noise: str, shuffle: bool) -> None:
    """Each rank's own after a seed that differs by rank; the script's draws between batches go on."""
    for seed, own in ((5, False), (5 + world.rank(), False), (5 + world.rank(), True)):
        seed_all(seed)
        found = epoch(world.rank(), noise, shuffle, own)
        for rank in range(N):
            assert each_ranks(found, rank) == alone_with(rank, rank_numbers.per_rank(seed)[rank], noise, shuffle, own)
    seed_all(0)


def test_copies_that_ranks_share_draw_for_each_of_them() -> None:
    """Ranks of one data-parallel place read one copy; where their seeds differ, what it draws is picked out for each, and an order is the first rank's."""
    place = world.current().table(lambda r: r // 2)
    for noise in NOISES:
        seed_all(5 + world.rank())
        found = epoch(place, noise, False)
        for rank in range(N):
            assert each_ranks(found, rank) == alone_with(rank // 2, 5 + rank, noise, False)
    seed_all(5 + world.rank())
    with pytest.warns(UserWarning, match=r"test_data.py:\d+ shuffles data after torch.manual_seed with a seed that differs by rank"):
        epoch(place, "nothing", True)
    seed_all(0)


def test_random_split_after_a_seed_of_each_rank() -> None:
    """torch's module of datasets has a `randperm` of its own: all ranks had rank 0's split."""
    torch.manual_seed(5 + world.rank())
    halves = torch.utils.data.random_split(torch.utils.data.TensorDataset(torch.arange(8.0)), [4, 4])
    found = [batch.to("xla") for (batch,) in DataLoader(halves[0], batch_size=2)]
    for place in range(4):
        alone = torch.randperm(8, generator=torch.Generator().manual_seed(5 + place))[:4].float()
        assert torch.equal(torch.cat([sharded.shards(x)[place] for x in found]).cpu(), alone)
