"""`torch_xla.distributed.parallel_loader` and the prefetching below it."""

from __future__ import annotations

import gc
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import thread as pool
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_xla.distributed import parallel_loader as pl
from torch_xla.utils import utils as xu

from torch_bridge import metrics
from torch_bridge.recorder import prefetch

pytestmark = pytest.mark.usefixtures("clean_step")


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("xla-loader") and "move" not in t.name]


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    gc.collect()
    assert loader_threads() == []


def batches(n: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(i)) for i in range(n)]


def values(loader: Any) -> list[float]:
    return [b[0].item() for b in loader]


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_arrive_in_order_every_epoch(threads: int) -> None:
    loader = pl.MpDeviceLoader(batches(40), torch.device("xla"), host_to_device_transfer_threads=threads, device_prefetch_size=2)
    assert len(loader) == 40
    for _ in range(2):
        got = list(loader)
        assert all(b.device == torch.device("xla:0") for b in got)
        assert [b[0].item() for b in got] == list(map(float, range(40)))


class Rewinding:
    """A loader that is its own iterator, and starts over at every iter()."""

    def __init__(self, n: int):
        self.n = n

    def __iter__(self) -> Rewinding:
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return torch.tensor([float(self.at)])


def test_a_loader_s_iterator_is_not_started_over() -> None:
    """Also without xla: a `for` loop asks a loader for its iterator once."""
    rewinding = pl.MpDeviceLoader(Rewinding(4), "xla")
    assert values(rewinding) == values(rewinding) == [1.0, 2.0, 3.0, 4.0]
    assert values(pl.MpDeviceLoader(xu.SampleGenerator(torch.zeros(1), 4), "xla")) == [0.0] * 4
    pairs = xu.FnDataGenerator(lambda x: 2 * x, batch_size=2, gen_tensor=torch.ones, dims=[3], count=3)
    assert [(a.shape, b[0, 0].item()) for a, b in pl.MpDeviceLoader(pairs, "xla")] == [((2, 3), 2.0)] * 3


Pair = namedtuple("Pair", ["x", "label"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str


class Bag(dict):
    pass


def test_nested_structures_are_kept() -> None:
    x, shared = torch.ones(2), torch.zeros(1)
    batch = {"a": [x, (shared, 1)], "b": Pair(x, "cat"), "c": Sample(shared, "s"), "d": None, "e": Bag(k=x), "f": {"deep": {"er": shared}}}
    (got,) = list(pl.MpDeviceLoader([batch], "xla"))
    assert got["a"][0].device.type == got["a"][1][0].device.type == "xla" and got["a"][1][1] == 1
    assert isinstance(got["b"], Pair) and got["b"].x is got["a"][0] and got["b"].label == "cat"
    assert isinstance(got["c"], Sample) and got["c"].x.device.type == "xla" and got["c"].name == "s"
    assert got["d"] is None and isinstance(got["e"], Bag) and got["e"]["k"].device.type == "xla"
    assert got["f"]["deep"]["er"] is got["c"].x
    assert batch["a"][0] is x and batch["c"].x is shared and shared.device.type == "cpu"


def test_a_wrapper_says_what_its_tensors_are() -> None:
    """`xu.DataWrapper`: what the loader gives is what `from_tensors` makes of the moved tensors."""

    class Packed(xu.DataWrapper):
        def __init__(self, data: torch.Tensor, sizes: torch.Tensor):
            self.data, self.sizes = data, sizes

        def get_tensors(self) -> Any:
            return [self.data]

        def from_tensors(self, tensors: Any) -> Any:
            return tensors[0], self.sizes

    packed = Packed(torch.ones(2), torch.zeros(1))
    ((moved, sizes),) = list(pl.MpDeviceLoader([packed], "xla"))
    assert moved.device.type == "xla" and sizes is packed.sizes and packed.data.device.type == "cpu"
    inner = xm.send_cpu_data_to_device({"x": [packed, packed]}, "xla")["x"]
    assert inner[0] is inner[1] and inner[0][0].tolist() == [1.0, 1.0]
    for call in (xu.DataWrapper().get_tensors, lambda: xu.DataWrapper().from_tensors([])):
        with pytest.raises(NotImplementedError, match="is to be written by the subclass"):
            call()


def test_keys_of_dicts_move_too() -> None:
    key = torch.ones(2)
    given = {"a": 1, key: {(key, 3): torch.zeros(1)}}
    moved = xm.send_cpu_data_to_device(given, "xla")
    first, new = moved
    assert first == "a" and new.device.type == "xla"
    (((same, three), value),) = moved[new].items()
    assert same is new and three == 3 and value.device.type == "xla" and list(given)[1] is key
    found: list[Any] = []
    xu.for_each_instance({2: (11, ["a"]), "w": {"q": 12.5}}, lambda x: isinstance(x, (int, str, float)), found.append)
    assert sorted(map(str, found)) == ["11", "12.5", "2", "a", "q", "w"]
    assert xu.for_each_instance_rewrite({1: 2}, lambda x: isinstance(x, int), lambda x: x + 10) == {11: 12}


@pytest.mark.parametrize(("per_execution", "n", "marks"), [(1, 4, 5), (2, 4, 3), (3, 4, 3), (5, 4, 2)])
def test_steps_end_every_batches_per_execution(per_execution: int, n: int, marks: int) -> None:
    """Before the first batch, after every `per_execution` batches, and at the end."""
    before = metrics.COUNTERS.get("MarkStep", 0)
    steps_seen = []
    total = torch.zeros(2, device="xla")
    for batch in pl.MpDeviceLoader(batches(n), "xla", batches_per_execution=per_execution):
        steps_seen.append(metrics.COUNTERS["MarkStep"] - before)
        total += batch
    assert steps_seen == [1 + i // per_execution for i in range(n)]
    assert metrics.COUNTERS["MarkStep"] - before == marks
    assert not total._storage.pending and total.tolist() == [6.0, 6.0]


def test_closures_run_at_the_loader_s_marks() -> None:
    seen = []
    for batch in pl.MpDeviceLoader(batches(3), "xla"):
        xm.add_step_closure(lambda t: seen.append(t.item()), (batch.sum(),))
    assert seen == [0.0, 2.0, 4.0]


class Failing(Dataset[torch.Tensor]):
    def __init__(self, at: int):
        self.at = at

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.at:
            raise FileNotFoundError(f"sample {i} is missing")
        return torch.tensor(float(i))


@pytest.mark.parametrize("at", [0, 1, 6])
def test_errors_arrive_in_their_place(at: int) -> None:
    seen = []
    with pytest.raises(FileNotFoundError, match=f"sample {at} is missing"):
        for batch in pl.MpDeviceLoader(DataLoader(Failing(at), batch_size=1), "xla"):
            seen.append(batch.item())
    assert seen == [float(i) for i in range(at)]
    assert loader_threads() == []


def test_error_while_moving_arrives() -> None:
    class Odd(torch.Tensor):
        def numpy(self, *, force: bool = False) -> Any:
            raise ValueError("cannot be moved")

    with pytest.raises(ValueError, match="cannot be moved"):
        list(pl.MpDeviceLoader([torch.ones(1), torch.ones(1).as_subclass(Odd)], "xla"))


def test_break_stops_the_threads() -> None:
    read: list[int] = []

    def endless() -> Iterator[torch.Tensor]:
        i = 0
        while True:
            read.append(i)
            yield torch.tensor(float(i))
            i += 1

    for batch in pl.MpDeviceLoader(endless(), "xla", loader_prefetch_size=3, device_prefetch_size=2):
        if batch.item() == 2:
            break
    del batch
    gc.collect()
    assert loader_threads() == []
    n = len(read)
    assert n <= 3 + 3 + 2 + 3
    time.sleep(0.05)
    assert len(read) == n


def test_a_garbage_collection_while_a_batch_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may close the prefetcher on the thread that hands batches over, which holds a lock of the pool of threads then."""

    class Item(pool._WorkItem):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.close()

    before = set(threading.enumerate())
    monkeypatch.setattr(pool, "_WorkItem", Item)
    made = prefetch.Prefetcher(range(100), lambda x: x, 2, 2)
    assert next(made) == 0 and len(list(made)) < 100
    until = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    with pool.ThreadPoolExecutor(1) as other:
        assert other.submit(int, "3").result(timeout=20) == 3


def test_reads_ahead_only_as_far_as_told() -> None:
    read: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for i in range(100):
            read.append(i)
            yield torch.tensor(i)

    it = iter(pl.MpDeviceLoader(source(), "xla", loader_prefetch_size=2, device_prefetch_size=1))
    next(it)
    deadline = time.time() + 2
    while len(read) < 5 and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert 3 <= len(read) <= 7
    it.close()
    with pytest.raises(StopIteration):
        next(it)


def test_attributes_are_the_loader_s() -> None:
    class Inner(list):
        dataset = "data"
        batch_sampler = "sampler"
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = Inner(batches(2))
    loader = pl.MpDeviceLoader(inner, "xla", batches_per_execution=2)
    assert (
        loader._loader is inner and loader._device == torch.device("xla") and loader._parallel_loader_kwargs == {"batches_per_execution": 2}
    )
    assert (loader.dataset, loader.batch_sampler) == ("data", "sampler")
    loader.set_epoch(3)
    assert inner.epoch == 3
    loader.dataset = "mine"
    assert (loader.dataset, inner.dataset) == ("mine", "data")
    assert not hasattr(loader, "sampler")
    loader._parallel_loader_kwargs["batches_per_execution"] = 1
    assert values(loader) == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # JAX warns of fork; workers do not use it
def test_shuffling_and_workers_as_without_us() -> None:
    data = TensorDataset(torch.arange(12.0))
    for workers in (0, 1):
        torch.manual_seed(5)
        plain = [b[0].tolist() for b in DataLoader(data, batch_size=4, shuffle=True, num_workers=0)]
        torch.manual_seed(5)
        ours = [b[0].tolist() for b in pl.MpDeviceLoader(DataLoader(data, batch_size=4, shuffle=True, num_workers=workers), "xla")]
        assert ours == plain


def test_parallel_loader() -> None:
    parallel = pl.ParallelLoader(batches(3), [torch.device("xla:0")], batches_per_execution=1)
    one = parallel.per_device_loader("xla:0")
    assert len(one) == 3 and parallel.batches_per_execution == 1 and parallel.per_device_samples() == 3
    assert one.next()[0].item() == 0.0
    assert values(one) == [1.0, 2.0]
    another = parallel.per_device_loader("xla:0")
    next(another)
    parallel.close()
    assert loader_threads() == []


def test_cpu_device_needs_no_xla() -> None:
    assert [b.device.type for b in pl.MpDeviceLoader(batches(2), "cpu")] == ["cpu", "cpu"]


OPTION_ERRORS = [
    ({"batches_per_execution": 0}, ValueError, "batches_per_execution must be a positive number, got 0"),
    ({"loader_prefetch_size": 0}, ValueError, "loader_prefetch_size"),
    ({"device_prefetch_size": -1}, ValueError, "device_prefetch_size"),
    ({"host_to_device_transfer_threads": 1.5}, ValueError, "host_to_device_transfer_threads"),
    ({"input_sharding": object()}, RuntimeError, "Call torch_xla.runtime.use_spmd"),
    ({"prefetch": 3}, TypeError, "prefetch"),
]


@pytest.mark.parametrize(("options", "error", "text"), OPTION_ERRORS)
def test_option_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pl.MpDeviceLoader(batches(1), "xla", **options)
    if "prefetch" not in options:
        with pytest.raises(error, match=text):
            pl.ParallelLoader(batches(1), ["xla"], **options)


def test_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one xla device"):
        pl.ParallelLoader([], ["xla:0", "xla:0"])


def test_empty_loader() -> None:
    assert list(pl.MpDeviceLoader([], "xla")) == []


def test_to_host_moves_nested_data_back() -> None:
    x = torch.ones(2).to("xla")
    back = prefetch.to_host({"x": x * 2, "y": [x, x]})
    assert back["x"].tolist() == [2.0, 2.0] and back["y"][0] is back["y"][1]
    same = {"plain": 1}
    assert prefetch.to_host(same) is same


class Telling(list):
    """A loader that says which batch is the last while somebody has it, as accelerate's do."""

    gradient_state = None
    end_of_dataloader = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.end_of_dataloader = False
        for k in range(len(self)):
            self.end_of_dataloader = k + 1 == len(self)
            yield self[k]


def test_a_loader_that_says_which_batch_is_the_last() -> None:
    loader = Telling(batches(4))
    ahead = pl.MpDeviceLoader(loader, "xla")
    for _ in range(2):
        passing = iter(ahead)
        assert [(b[0].item(), b.device.type, loader.end_of_dataloader) for b in passing] == [
            *((float(k), "xla", False) for k in range(3)),
            (3.0, "xla", True),
        ]
        with pytest.raises(StopIteration):
            next(passing)


def test_a_loader_that_says_so_and_raises() -> None:
    loader = Telling([*batches(1), torch.zeros(2)])
    passing = iter(pl.MpDeviceLoader(loader, "xla"))
    next(passing)
    del loader[1:]
    with pytest.raises(IndexError):
        next(passing)
    with pytest.raises(StopIteration):
        next(passing)


@pytest.mark.parametrize("steps", [2, 3])
def test_accelerate_accumulates_up_to_the_last_batch(steps: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=steps)
    try:
        model = torch.nn.Linear(1, 1)
        loader = DataLoader(TensorDataset(torch.arange(9.0).reshape(9, 1)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        assert isinstance(loader, pl.MpDeviceLoader)
        for _ in range(2):
            synced, rows = [], []
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
                rows += accelerator.gather_for_metrics(x)[:, 0].tolist()
            assert synced == [k % steps == 0 or k == 5 for k in range(1, 6)]
            assert rows == [float(k) for k in range(9)]
    finally:
        accelerator.free_memory()
        for state in (accelerate.state.GradientState, accelerate.state.AcceleratorState, accelerate.state.PartialState):
            state._reset_state()
