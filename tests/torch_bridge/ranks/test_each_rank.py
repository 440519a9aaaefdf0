"""Files that ranks take out of a list before they make a dataset: each rank reads its own, asked for (`each_rank`) or not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

import torch_bridge
from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import sharded
from torch_bridge.script import rank_indexing

N = 4
SHARDS = 6


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted(N, dp=2, tp=2)
    monkeypatch.setattr(rank_indexing, "_reported", set())
    monkeypatch.setattr(rank_indexing, "_taken", {})
    world.rank()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Shards with other numbers of rows."""
    for k in range(SHARDS):
        np.save(tmp_path / f"{k}.npy", np.arange(16.0 + 2 * k).reshape(-1, 2) + 100 * k)
    return sorted(str(p) for p in tmp_path.glob("*.npy"))


class Shard(Dataset[torch.Tensor]):
    """Reads its file when it is made, as the BERT sample's does."""

    scale = 1

    def __init__(self, input_file: str, offset: int = 0):
        self.input_file = input_file
        self.rows = np.load(input_file) + offset

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[i]) * self.scale


def create_dataset(input_file: str, batch: int) -> tuple[DataLoader[torch.Tensor], str]:
    data = Shard(input_file=input_file)
    return DataLoader(data, sampler=RandomSampler(data), batch_size=batch, drop_last=True), input_file


def aws_script(files: list[str], rank: Any) -> list[torch.Tensor]:
    """The loop over files of AWS's BERT sample: the next file is read by another thread."""
    pool = ThreadPoolExecutor(1)
    torch.manual_seed(3)
    data_file = files[rank % len(files)]
    loader, _ = create_dataset(data_file, 2)
    device_loader = pl.MpDeviceLoader(loader, "xla")
    found = []
    for f in range(1, 3):
        data_file = files[(f * N + rank) % len(files)]
        future = pool.submit(create_dataset, data_file, 2)
        found += list(device_loader)[:3]
        loader, _ = future.result()
        device_loader = pl.MpDeviceLoader(loader, "xla")
    return [*found, *list(device_loader)[:3]]


pytestmark = pytest.mark.filterwarnings(
    "ignore:ranks .* and ranks .* have more, which are left out:UserWarning"
)  # files of several lengths
READ = pytest.mark.filterwarnings("ignore:.* by a number that differs by rank")


def alone(script: Callable[[Any], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What each rank gets in a process of its own, on the CPU."""
    return [[t.cpu() for t in script(r)] for r in range(N)]


def compare(found: list[torch.Tensor], expected: list[list[torch.Tensor]]) -> None:
    assert len(found) == len(expected[0]) > 0
    for step, batch in enumerate(found):
        eager.same(batch, [own[step] for own in expected], 0, 0)


@READ
def test_the_pattern_of_awss_samples(files: list[str]) -> None:
    compare(aws_script(files, xm.get_ordinal()), alone(lambda r: aws_script(files, r)))


def test_the_warning_says_what_is_right_and_what_cures_the_rest(files: list[str]) -> None:
    rank = xm.get_ordinal()
    with pytest.warns(
        UserWarning,
        match=r"but for a Dataset whose constructor is given it, which is made for each rank.*torch_bridge.each_rank\(lambda rank",
    ):
        files[rank]
    with pytest.warns(UserWarning, match=r"all ranks work with what is rank 0's. Have what") as caught:
        [1, 2, 3, 4][rank]
    assert len(caught) == 1


@READ
def test_other_files_of_the_list_are_everyones(files: list[str]) -> None:
    mine = Shard(files[xm.get_ordinal()])
    other = Shard(files[1])
    assert len(next(iter(DataLoader(mine, batch_size=2)))) == 2
    assert next(iter(DataLoader(other, batch_size=2))).device.type == "cpu"


def read_all(files: list[str]) -> list[Shard]:
    return [Shard(file) for file in files]


SAME: dict[str, Callable[[list[str]], Any]] = {
    "by a plain number": lambda files: Shard(files[0]),
    "by a name": lambda files: _by_name(files),
    "by keyword": lambda files: Shard(offset=0, input_file=files[0]),
    "all of them": lambda files: read_all(files)[0],
    "through a function": lambda files: create_dataset(files[0], 2)[0].dataset,
}


def _by_name(files: list[str]) -> Shard:
    validation = files[0]
    return Shard(validation)


@READ
@pytest.mark.parametrize("name", SAME)
def test_the_same_file_taken_in_another_way_is_everyones(name: str, files: list[str]) -> None:
    rank = xm.get_ordinal()
    mine = Shard(files[rank])
    everyones = SAME[name](files)
    assert mine.input_file is everyones.input_file
    assert next(iter(DataLoader(everyones, batch_size=2))).device.type == "cpu"
    eager.same(
        next(iter(DataLoader(mine, batch_size=1)))[0], [torch.tensor([100.0 * r, 100.0 * r + 1], dtype=torch.float64) for r in range(N)]
    )


@READ
def test_positions_subsets_and_epochs(files: list[str]) -> None:
    def script(rank: Any) -> list[torch.Tensor]:
        data = Shard(files[rank + 1], 7)
        loader = DataLoader(Subset(data, [1, 4, 0, 2]), batch_size=2)
        first = list(loader)
        data.scale = 10  # every rank's, from the next epoch on
        return [*first, *loader]

    compare(script(xm.get_ordinal()), alone(script))


@READ
def test_an_error_says_for_which_rank(files: list[str]) -> None:
    Path(files[2]).unlink()
    with pytest.raises(FileNotFoundError) as error:
        Shard(files[xm.get_ordinal()])
    assert "making the Shard of rank 2, from" in error.value.__notes__[0] and "2.npy" in error.value.__notes__[0]
    assert len(Shard(files[0])) == 8  # nothing is left in a state of its own


def test_datasets_are_made_as_before() -> None:
    class Bare(Dataset[Any]):
        pass

    Bare()
    with pytest.raises(TypeError, match=r"Bare\(\) takes no arguments"):
        Bare(1)  # type: ignore[call-arg]
    assert len(TensorDataset(torch.zeros(3))) == 3


# -- asked for ---------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, numbers: list[int]):
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(torch.tensor([float(k)]) for k in self.numbers)


MADE: dict[str, Callable[[list[str], Any], Any]] = {
    "loader": lambda files, r: DataLoader(TensorDataset(torch.from_numpy(np.load(files[r]))), batch_size=2, shuffle=True),
    "dataset": lambda files, r: Shard(files[r]),
    "list of files": lambda files, r: Stream([int(Path(f).stem) for f in files[r % 2 :: 2]]),
    "random": lambda files, r: TensorDataset(torch.rand(6) + r + random.random() + np.random.rand()),
}


@pytest.mark.parametrize("name", MADE)
def test_each_rank_reads_its_own(name: str, files: list[str]) -> None:
    def script(rank: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        made = torch_bridge.each_rank(lambda r: MADE[name](files, r), rank)
        loader = made if isinstance(made, DataLoader) else DataLoader(made, batch_size=2)
        batches = [*itertools.islice(loader, 3), torch.rand(1) + random.random()]
        return [b[0] if isinstance(b, (list, tuple)) else b for b in batches]

    compare([b.to("xla") for b in script(xm.get_ordinal())], alone(script))


def test_tensors_numbers_and_nests_of_them(files: list[str]) -> None:
    rank = xm.get_ordinal()
    tensor, extra = torch_bridge.each_rank(lambda r, k: (torch.from_numpy(np.load(files[r])[:2]), {"rows": 8 + r, "k": k}), rank, rank // 2)
    eager.same(tensor.to("xla"), [torch.arange(4.0, dtype=torch.float64).reshape(2, 2) + 100 * r for r in range(N)])
    assert rank_numbers.per_rank(extra["rows"]) == [8, 9, 10, 11] and rank_numbers.per_rank(extra["k"]) == [0, 0, 1, 1]
    batch = next(iter(DataLoader(torch_bridge.each_rank(lambda dp: Shard(files[dp]), rank // 2), batch_size=2)))
    assert sharded.varying(batch).axes == ("dp",)


def test_arrays() -> None:
    whole = np.arange(8.0)
    found = torch_bridge.each_rank(lambda rank: whole[rank::4], world.rank())
    compare([torch.from_numpy(found * 2).to("xla")], [[torch.from_numpy(whole[r::4] * 2)] for r in range(N)])
    assert torch_bridge.each_rank(lambda rank: whole, world.rank()) is whole


def test_it_is_called_once_for_each_number() -> None:
    calls: list[Any] = []
    torch_bridge.each_rank(calls.append, xm.get_ordinal() % 2)
    assert calls == [0, 1] and all(type(x) is int for x in calls)
    assert torch_bridge.each_rank(lambda x: x + 1, 4) == 5 and torch_bridge.each_rank(lambda: 6) == 6
    world.configure(world.World(1))
    assert torch_bridge.each_rank(lambda x: f"{x}", world.rank()) == "0"


def test_what_nothing_can_stand_for() -> None:
    with pytest.raises(
        TypeError,
        match=r"each_rank: <lambda> gave ranks different values of type str.*Return a DataLoader, a Dataset, a sampler, a CPU tensor",
    ):
        torch_bridge.each_rank(lambda r: f"file {r}", xm.get_ordinal())


def test_an_epoch_is_told_to_every_ranks_sampler(files: list[str]) -> None:
    def script(rank: Any) -> list[torch.Tensor]:
        def make(r: int) -> DataLoader[torch.Tensor]:
            data = Shard(files[r])
            return DataLoader(data, sampler=torch.utils.data.DistributedSampler(data, 1, 0, seed=r), batch_size=2)

        loader = torch_bridge.each_rank(make, rank)
        found = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch + 3)
            found += list(loader)[:2]
        return found

    compare(script(xm.get_ordinal()), alone(script))


def test_calls_draw_as_if_alone_after_seeds_that_differ_by_rank() -> None:
    def make(rank: Any) -> Any:
        return torch.rand(2) + rank, random.random(), float(np.random.rand())

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5 + world.rank())
    drawn, number, other = torch_bridge.each_rank(make, world.rank())
    after = torch.rand(2)
    for rank in range(world.size()):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5 + rank)
        own = make(rank)
        assert torch.equal(sharded.shards(drawn)[rank], own[0]) and torch.equal(sharded.shards(after)[rank], torch.rand(2))
        assert (rank_numbers.per_rank(number)[rank], rank_numbers.per_rank(other)[rank]) == own[1:]
