"""Plain numbers and truths that Python takes from a number that differs by rank: reported where they meet tensors, silent where they print, log and save."""

from __future__ import annotations

import array
import contextlib
import io
import json
import logging
import math
import pickle
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.runtime import executor
from torch_bridge.script import rank_branches, rank_file_names, rank_indexing, rank_memory_reads

Program = Callable[[Any, torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> Iterator[None]:
    hosted(4)
    rank_branches._taken.clear()
    rank_file_names._seen.clear()
    rank_memory_reads._seen.clear()
    rank_indexing._arrays.clear()
    executor.clear_cache()
    yield
    rank_branches._taken.clear()


def reports(run: Program) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = run(world.rank(), torch.ones(3, device="xla"), torch.ones(3))
        executor.sync()
        del out
    return [str(w.message) for w in found if w.category is UserWarning]


class Config:
    scale = 1.0
    steps: Any = ()


class Net(torch.nn.Module):
    def __init__(self, rank: Any):
        super().__init__()
        self.factor = float(rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _through_a_module(r: Any, x: Any, c: Any) -> Any:
    return Net(r).to("xla")(x)


def _scaled(t: torch.Tensor, scale: float) -> torch.Tensor:
    return t * scale


def _through_a_function(r: Any, x: Any, c: Any) -> Any:
    return _scaled(x, 2.0 if r else 1.0)


def _chosen(r: Any) -> float:
    if r > 1:
        return 2.0
    return 1.0


def _returned(r: Any, x: Any, c: Any) -> Any:
    scale = _chosen(r)
    return x * scale


def _early(r: Any, x: Any, c: Any) -> Any:
    for k in range(4):
        if k == r:
            break
        x = x * 2
    return x


def _assigned(r: Any, x: Any, c: Any) -> Any:
    if r == 0:
        scale = 2.0
    else:
        scale = 3.0
    return x * scale


def _attribute(r: Any, x: Any, c: Any) -> Any:
    config = Config()
    config.scale = bool(r)
    return x * config.scale


def _in_place(r: Any, x: Any, c: Any) -> Any:
    if r == 1:
        c.mul_(2)
    return c


def _collective_of_others(r: Any, x: Any, c: Any) -> Any:
    if r in (1, 3):
        dist.all_reduce(x)
    return x


def _generated(r: Any, x: Any, c: Any) -> Any:
    return list(_picked(r))


def _picked(r: Any) -> Iterator[Any]:
    for k in range(8):
        if k % 4 == r:
            yield [k]


def _skipped(r: Any, x: Any, c: Any) -> Any:
    return list(_left(r))


def _left(r: Any) -> Iterator[Any]:
    for k in range(8):
        if k % 4 != r:
            continue
        yield {"row": k}


def _of_a_loss(r: Any, x: Any, c: Any) -> Any:
    loss = (x * r).sum().item()
    scale = 0.5 if loss > 2 else 1.0
    return x * scale


def _gathered_sum(r: Any, x: Any, c: Any) -> Any:
    total = 0.0
    for _ in range(2):
        total += float((x * r).sum())
    return xm.mesh_reduce("loss", total / 2, max)


def _gathered_array(r: Any, x: Any, c: Any) -> Any:
    losses = np.zeros(2)
    for k in range(2):
        losses[k] = (x * r).sum().item()
    return xm.mesh_reduce("loss", losses.mean(), max)


def _gathered_count(r: Any, x: Any, c: Any) -> Any:
    right = int((x * r > 1).sum())
    return xm.mesh_reduce("right", {"right": right, "of": 4}, lambda parts: sum(part["right"] for part in parts))


def _seed(r: Any, x: Any, c: Any) -> Any:
    torch.manual_seed(1 if r else 2)
    return torch.randn(2)


def _matched(r: Any, x: Any, c: Any) -> Any:
    match r:
        case 0:
            scale = 1.0
        case _:
            scale = 2.0
    return x * scale


def _other_turns(r: Any, x: Any, c: Any) -> Any:
    parts = []
    for k, part in enumerate(x.split(1)):
        if k != r:
            continue
        parts.append(part * 2)
    return parts


def _kept_weights(r: Any, x: Any, c: Any) -> Any:
    model, best, kept = torch.nn.Linear(1, 1), 3.0, None
    loss = (x * r).sum().item()
    if loss < best:
        kept = {k: v.clone() for k, v in model.state_dict().items()}
    return kept


def _table(r: Any, x: Any, c: Any) -> Any:
    table = pd.DataFrame({"loss": [(x * r).sum().item(), 1.0]})
    return torch.tensor(table["loss"].to_numpy())


def _in_order(r: Any, x: Any, c: Any) -> Any:
    losses = [(x * r).sum().item(), 0.5]
    losses.sort()
    return torch.tensor(losses)


def _loss(r: Any, x: Any) -> Any:
    return (x * r).sum().item()


def _by_text(r: Any, x: Any, c: Any) -> Any:
    text = ",".join(str(v) for v in [r, _loss(r, x)])
    parts = text.split(",")
    return x * float(parts[1])


def _by_format(r: Any, x: Any, c: Any) -> Any:
    shown = "{:.3f}".format(_loss(r, x))  # noqa: UP032
    return x * float(shown)


def _by_bytes(r: Any, x: Any, c: Any) -> Any:
    kept = pickle.dumps({"loss": _loss(r, x)})
    return x * pickle.loads(kept)["loss"]


def _by_memory(r: Any, x: Any, c: Any) -> Any:
    losses = np.zeros(1) + _loss(r, x)
    return x * memoryview(losses)[0]


def _uploaded_alone(r: Any, x: Any, c: Any) -> Any:
    kept = []
    for k, batch in enumerate(c.split(1)):
        if k != r:
            continue
        kept.append(batch.to("xla"))
    return torch.cat(kept)


def _early_import(r: Any, x: Any, c: Any) -> Any:
    return x * _Early.sqrt(r)


class _Early:
    """A function that was taken before there were such numbers, and not as a module's name, which would be bound anew."""

    sqrt = staticmethod(getattr(math.sqrt, "__wrapped__", math.sqrt))  # a test before may have put ours in its place: unwrapped


REPORTED: dict[str, Program] = {
    "float": lambda r, x, c: x * float(r),
    "float on the CPU": lambda r, x, c: c * float(r),
    "bool": lambda r, x, c: x * bool(r),
    "and": lambda r, x, c: x * (r and 5),
    "conditional": lambda r, x, c: x * (2.0 if r else 1.0),
    "in": lambda r, x, c: x * (r in (1, 2)),
    "not": lambda r, x, c: x * (not r),
    "any": lambda r, x, c: x * any(k == r for k in (1, 2)),
    "sorted": lambda r, x, c: x * sorted([2, r, 1])[0],
    "comprehension": lambda r, x, c: x * len([k for k in range(4) if k < r]),
    "torch.full": lambda r, x, c: torch.full((2,), float(r)),
    "module": _through_a_module,
    "function": _through_a_function,
    "returned": _returned,
    "left loop": _early,
    "assigned": _assigned,
    "attribute": _attribute,
    "in place": _in_place,
    "collective": _collective_of_others,
    "yielded": _generated,
    "not skipped": _skipped,
    "loss": _of_a_loss,
    "seed": _seed,
    "early import": _early_import,
    "match": _matched,
    "other turns of a loop": _other_turns,
    "kept weights": _kept_weights,
    "table": _table,
    "series": lambda r, x, c: x * float(pd.Series([(x * r).sum().item()]).mean()),
    "int of a truth": lambda r, x, c: x * int(r == 0),
    "sorted in place": _in_order,
    "the larger of tuples": lambda r, x, c: x * max([((x * r).sum().item(), 1.0), (2.0, 2.0)])[1],
    "number of a loss's text": lambda r, x, c: x * float(f"{(x * r).sum().item():.2f}"),
    "number of its text": lambda r, x, c: x * int(str(r)),
    "percent format": lambda r, x, c: x * float("%.3f" % _loss(r, x)),  # noqa: UP031
    "percent format of several": lambda r, x, c: x * float(("%d %.3f" % (1, r * 0.5)).split()[1]),  # noqa: UP031
    "format": lambda r, x, c: x * float(format(_loss(r, x), ".3f")),
    "text of a read integer": lambda r, x, c: x * int(str((x.long() * r).sum().item())),
    "text by names": _by_text,
    "format by name": _by_format,
    "json": lambda r, x, c: x * json.loads(json.dumps({"losses": [_loss(r, x)]}))["losses"][0],
    "pickle": _by_bytes,
    "pickled rank": lambda r, x, c: x * pickle.loads(pickle.dumps(r)),
    "struct": lambda r, x, c: x * struct.unpack("f", struct.pack("f", _loss(r, x)))[0],
    "tensor of bytes": lambda r, x, c: torch.frombuffer(bytearray(struct.pack("f", _loss(r, x))), dtype=torch.float32),
    "tensor of an array's bytes": lambda r, x, c: torch.frombuffer(bytearray((np.zeros(1) + r).tobytes()), dtype=torch.float64),
    "array's memory": _by_memory,
    "array of Python's": lambda r, x, c: torch.tensor(array.array("f", [_loss(r, x)])),
    "uploaded alone": _uploaded_alone,
    "int of a tensor": lambda r, x, c: x * int((x * r).sum()),
    "gathered float": lambda r, x, c: xm.mesh_reduce("rank", float(r), sum),
    "gathered sum": _gathered_sum,
    "gathered count": _gathered_count,
    "gathered array": _gathered_array,
}


@pytest.mark.parametrize("name", REPORTED)
def test_reported_once_with_the_line(name: str) -> None:
    found = reports(REPORTED[name])
    assert len(found) == 1
    assert f"{__file__}:" in found[0] and "the first rank's choice was taken for all of them" in found[0] and "torch.where" in found[0]
    assert reports(REPORTED[name]) == []


@pytest.mark.parametrize("name", ["float", "conditional", "assigned", "in place"])
def test_strict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_STRICT_RANKS", "1")
    with pytest.raises(rank_numbers.RankError, match=r"test_plain_numbers.py:\d+ (takes|branches on)"):
        REPORTED[name](world.rank(), torch.ones(3, device="xla"), torch.ones(3)).to("xla").cpu()


# -- what is right ------------------------------------------------------------------------------------


def _printing(r: Any, x: Any, c: Any) -> None:
    y = (x * 2).sum()
    if r == 0:
        print(end="")  # noqa: T201
        logging.getLogger("nobody").info("loss %f of rank %d", y.item(), r)


def _saving(r: Any, x: Any, c: Any) -> None:
    if xm.is_master_ordinal():
        state = {"x": x.cpu(), "rank": r}
        assert state
    if not xm.is_master_ordinal():
        return
    assert f"{r:02d} {float(r):.1f} %d" % r


def _progress(r: Any, x: Any, c: Any) -> Any:
    bar = list(enumerate(SimpleNamespace(items=[1, 2], disable=not xm.is_master_ordinal()).items))
    for _, k in bar:
        x = x * k
    return x


def _log_level(r: Any, x: Any, c: Any) -> Any:
    logger = logging.getLogger("nobody")
    logger.setLevel(logging.INFO if r == 0 else logging.WARNING)
    logger.setLevel(logging.NOTSET)
    return x * 2


def _timed(r: Any, x: Any, c: Any) -> Any:
    started = time.time() if r == 0 else None
    y = x * 2
    if r == 0:
        assert started is not None
        print(f"{time.time() - started:.1f}", end="")  # noqa: T201
    return y


def _gathering(r: Any, x: Any, c: Any) -> Any:
    if r == 0:
        assert dist.is_available()
        found: list[Any] = [xm.get_ordinal(), dist.ReduceOp.SUM]
        assert found
    else:
        dist.barrier()
    return x * 2


@contextlib.contextmanager
def _first_alone(r: Any) -> Iterator[Any]:
    if r == 0:
        yield [r]
    else:
        yield None


def _shown(r: Any, rows: list[int]) -> Iterator[int]:
    if r == 0:
        for row in rows:
            print(end="")  # noqa: T201
            yield row
    else:
        for row in rows:
            yield row


def _managed(r: Any, x: Any, c: Any) -> Any:
    with _first_alone(r):
        return x * sum(_shown(r, [1, 2]))


def _best(r: Any, x: Any, c: Any) -> Any:
    best = 10.0
    for k in range(2):
        loss = (x * k).sum()
        if r == 0:
            best = min(best, loss.item())
            print(f"best {best}", end="")  # noqa: T201
    return x * 2


def _early_stopping(r: Any, x: Any, c: Any) -> Any:
    best, waited = 10.0, 0
    for k in range(3):
        own = x * (r + k)
        if own.mean().item() < best:
            best = own.mean().item()
        else:
            waited += 1
        logging.getLogger("nobody").info("loss %f, best %f", own.mean().item(), best)
        if waited > 1:
            break
    return x * 2


def _name(r: Any, x: Any, c: Any) -> Any:
    name = "first" if r == 0 else f"rank {r}"
    log = print if r == 0 else (lambda *a, **k: None)
    log(name, end="")
    return x * 2


def _writer(r: Any, x: Any, c: Any) -> Any:
    writer = None
    if r == 0:
        writer = SimpleNamespace(add=lambda *a: None)
    if writer is not None:
        writer.add("loss", 1.0)
    return x * 2


def _logging_turns(r: Any, x: Any, c: Any) -> Any:
    for k in range(3):
        x = x * 2
        if r != 0:
            continue
        print(f"step {k} {int(r == 0)} {int(str(r))}", end="")  # noqa: T201
    return x


def _table_in_a_file(r: Any, x: Any, c: Any) -> Any:
    rows = [{"step": k, "loss": (x * r).sum().item()} for k in range(2)]
    assert pd.DataFrame(rows).to_csv().startswith(",step,loss")
    return x * 2


def _records(r: Any, x: Any, c: Any) -> Any:
    """Lines of a log: what is written there is the first rank's."""
    file, rank = io.StringIO(), int(str(r))
    file.write(json.dumps({"loss": (x * r).mean().item(), "rank": r}) + "\n")
    file.write("%.3f of rank %d\n" % ((x * r).sum().item(), rank) + f"{float(f'{(x * r).sum().item():.2f}')}")  # noqa: UP031
    kept = pickle.dumps({"loss": (x * r).mean().item()})
    assert pickle.loads(kept)["loss"] == 0.0 and struct.pack("<d", (x * r).mean().item()) == bytes(8)
    assert len((np.zeros(2) + r).tobytes()) == 16 and float("%.3f" % (x * r).sum().item()) == 0.0  # noqa: UP031
    return x * 2


def _sleeping(r: Any, x: Any, c: Any) -> Any:
    time.sleep(r * 0.001)
    return x * r


def _metrics(r: Any, x: Any, c: Any) -> Any:
    loss, right = (x * r).sum(), (x * r > 1).sum()
    assert xm.mesh_reduce("loss", loss.item() / 2, max) == 4.5
    assert xm.mesh_reduce("right", {"right": right.item()}, lambda parts: sum(part["right"] for part in parts)) == 6
    print(f"{float(loss):.2f} {int(right)}", end="")  # noqa: T201
    assert int(loss) == 0
    return x * 2


def _saved_weights(r: Any, x: Any, c: Any) -> None:
    """As transformers' `save_pretrained`: weights that nobody gave are all ranks' own."""
    model, adapters, state = torch.nn.Linear(1, 1), None, None
    if r == 0 and adapters is not None:
        renamed = {}
        for key, value in adapters.items():
            renamed[f"base.{key}"] = value
        state = renamed
    if state is None:
        state = model.state_dict()
    torch.save(state, io.BytesIO())


@pytest.mark.parametrize(
    "run",
    [
        _metrics,
        _printing,
        _saving,
        _progress,
        _log_level,
        _timed,
        _gathering,
        _managed,
        _best,
        _early_stopping,
        _name,
        _writer,
        _sleeping,
        _records,
        _logging_turns,
        _table_in_a_file,
        _saved_weights,
    ],
    ids=lambda f: f.__name__,
)
def test_no_noise(run: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports(run) == []


def test_numbers_of_math_and_numpy_are_each_ranks_own() -> None:
    r = world.rank()
    assert rank_numbers.per_rank(math.sqrt(r)) == [math.sqrt(k) for k in range(4)] and rank_numbers.per_rank(math.floor(r / 2)) == [
        0,
        0,
        1,
        1,
    ]
    assert rank_numbers.per_rank(max(r, 1)) == [1, 1, 2, 3] and rank_numbers.per_rank(min([r, 2], key=lambda k: -k)) == [2, 2, 2, 3]
    assert max(3, 4) == 4 and min([2, 1]) == 1 and max([], default=3) == 3 and math.gcd(4, 6) == 2
    assert rank_numbers.per_rank(math.prod([r, 2])) == [0, 2, 4, 6] and [rank_numbers.per_rank(v) for v in math.modf(r / 2)] == [
        [0.0, 0.5, 0.0, 0.5],
        [0.0, 0.0, 1.0, 1.0],
    ]
    assert rank_numbers.per_rank(np.multiply(r, 2.0)) == [0.0, 2.0, 4.0, 6.0]
    own = np.arange(3.0) + r
    assert rank_numbers.per_rank(own.sum()) == [3.0, 6.0, 9.0, 12.0] and rank_numbers.per_rank(own[1]) == [1.0, 2.0, 3.0, 4.0]
    assert [v.tolist() for v in torch.from_numpy(own).parts] == [[k, k + 1, k + 2] for k in range(4)]  # type: ignore[attr-defined]
    assert rank_numbers.per_rank(np.concatenate([own, own]).mean()) == [1.0, 2.0, 3.0, 4.0] and repr(own) == "array([0., 1., 2.])"
    own += r
    assert rank_numbers.per_rank(own.max()) == [2.0, 4.0, 6.0, 8.0]
    with pytest.raises(
        rank_numbers.PlainNumberNeeded, match=r"numpy.add would write values that differ by rank to an array that all 4 ranks"
    ):
        plain = np.ones(3)
        plain += r
    with pytest.raises(rank_numbers.PlainNumberNeeded, match=r"an array would be float64\[1\], float64\[3\], float64\[3\]"):
        own[own > 1.5]


def test_isinstance_answers_as_for_plain_numbers() -> None:
    r = world.rank()
    assert (
        isinstance(r, int)
        and isinstance(r, torch.SymInt)
        and isinstance(r / 2, float)
        and isinstance(r == 0, bool)
        and isinstance(r == 0, int)
    )
    assert not isinstance(r, (str, float, bool)) and not isinstance(r / 2, int)


def test_a_process_that_is_one_rank_has_its_own() -> None:
    r = world.rank()
    table = pd.Series([1.0, 2.0, 3.0, 4.0])
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 100.0)
    world.configure(world.World(4, hosted=[2]))
    r = world.rank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.utils.clip_grad_value_(weight, 1 + r)
        table.iloc[r] = 9 * table.iloc[r]
        found = [
            json.loads(json.dumps([r]))[0],
            struct.unpack("i", struct.pack("i", r))[0],
            pickle.loads(pickle.dumps(r)),
            int("%d" % r),  # noqa: UP031
        ]
        made = torch.ones(1) * sum(found) + torch.Tensor([r])
    assert found == [2] * 4 and made.tolist() == [10.0] and table.tolist() == [1.0, 2.0, 27.0, 4.0] and weight.grad.tolist() == [3.0] * 3
