"""Python containers indexed with a rank give rank 0's element to all ranks: said once for a line, with the line."""

from __future__ import annotations

import io
import itertools
import json
import pathlib
import tempfile
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch_xla.core.xla_model as xm
from datasets import Dataset as Rows
from torch.utils.data import Subset

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.script import rank_file_names, rank_indexing

Script = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted(4)
    monkeypatch.setattr(rank_indexing, "_reported", set())
    monkeypatch.setattr(rank_indexing, "_arrays", set())
    monkeypatch.setattr(rank_file_names, "_seen", set())


FILES = [f"part-{k}" for k in range(8)]
SAME = ["a"] * 8


class Holder:
    files = ()

    def __init__(self) -> None:
        self.names = ["x"] * 4
        self.files = FILES  # type: ignore[assignment]


def _of_file(r: Any) -> list[float]:
    with tempfile.NamedTemporaryFile() as file:
        np.arange(8.0).tofile(file.name)
        return np.memmap(file.name, dtype=np.float64, mode="r")[2 * r : 2 * r + 2].tolist()  # type: ignore[no-any-return]


def _rotated(r: Any) -> list[int]:
    found = deque(range(4))
    found.rotate(-r)
    return list(found)


def _sought(r: Any) -> bytes:
    file = io.BytesIO(b"abcd")
    file.seek(r)
    return file.read(1)


def _subset(r: Any) -> Any:
    return Subset(FILES, (torch.arange(8) + r)[:4].tolist())[0]  # type: ignore[arg-type]


def _without(r: Any) -> list[str]:
    found = list(FILES)
    del found[r]
    return found


def _popped(r: Any) -> str:
    found = list(FILES)
    return found.pop(r)


def _masked(r: Any) -> list[float]:
    mask = np.arange(4) == r
    whole = np.arange(4.0)
    return whole[mask].tolist()  # type: ignore[no-any-return]


def _rows(r: Any) -> list[int]:
    frame = pd.DataFrame({"part": [0, 1, 2, 3], "value": [5, 6, 7, 8]})
    return frame[frame["part"] == r]["value"].tolist()  # type: ignore[no-any-return]


def _written(r: Any) -> list[float]:
    whole = np.zeros(4)
    scores = (torch.ones(2) * (r + 1)).numpy()
    whole[2:] = scores
    return whole.tolist()  # type: ignore[no-any-return]


REPORTED: dict[str, tuple[Script, Any, str]] = {
    "list": (lambda r: FILES[(4 + r) % 8], "part-4", r"takes FILES\[\(4 \+ r\) % 8\] by a number"),
    "every fourth": (lambda r: FILES[r::4], ["part-0", "part-4"], r"takes FILES\[r::4\]"),
    "range": (lambda r: list(range(r, 8, 4)), [0, 4], r"takes range\(r, 8, 4\)"),
    "attribute": (lambda r: Holder().files[r], "part-0", r"takes Holder\(\).files\[r\]"),
    "dict": (lambda r: dict(enumerate(FILES))[r], "part-0", r"takes .*\[r\] by a number"),
    "array": (lambda r: np.arange(8.0)[r], 0.0, r"takes np.arange\(8.0\)\[r\]"),
    "part of an array": (lambda r: np.arange(8.0)[2 * r : 2 * r + 2].tolist(), [0.0, 1.0], r"takes np.arange\(8.0\)\[2 \* r:2 \* r \+ 2\]"),
    "a number out of a tensor": (lambda r: FILES[torch.tensor([r])[0]], "part-0", r"takes FILES\[torch.tensor\(\[r\]\)\[0\]\]"),
    "a number out of a list": (
        lambda r: FILES[torch.tensor([r]).tolist()[0]],
        "part-0",
        r"takes FILES\[torch.tensor\(\[r\]\).tolist\(\)\[0\]\]",
    ),
    "between tensors": (
        lambda r: torch.arange(8)[(i := torch.tensor(r)) : i + 2].tolist(),
        [0, 1],
        r"takes torch.arange\(8\)\[\(i := torch.tensor\(r\)\):i",
    ),
    "an array in a file": (_of_file, [0.0, 1.0], "has numpy take data"),
    "in a library": (lambda r: Rows.from_dict({"a": FILES})[2 * r : 2 * r + 1]["a"][0], "part-0", "has datasets take data"),
    "a shard": (lambda r: Rows.from_dict({"a": FILES}).shard(4, r)[0]["a"], "part-0", "has datasets take data"),
    "a subset": (_subset, "part-0", "has torch.utils.data take data"),
    "a module": (
        lambda r: torch.nn.ModuleList([torch.nn.Identity(), *map(torch.nn.ReLU, [True] * 3)])[r].extra_repr(),
        "",
        "has torch.nn take a module",
    ),
    "a deque": (_rotated, [0, 1, 2, 3], r"calls found.rotate\(-r\)"),
    "a place in a file": (_sought, b"a", r"calls file.seek\(r\)"),
    "without one": (_without, FILES[1:], r"takes found\[r\] by a number"),
    "popped": (_popped, "part-0", r"calls found.pop\(r\)"),
    "a slice of an iterator": (
        lambda r: list(itertools.islice(FILES, r, None, 4)),
        ["part-0", "part-4"],
        r"takes itertools.islice\(FILES, r, None, 4\)",
    ),
    "by a truth": (lambda r: FILES[r == 0], "part-1", r"takes FILES\[r == 0\] by a number"),
    "a mask": (_masked, [0.0], r"has NumPy or pandas take whole\[mask\] \(line \d+\) by an array"),
    "rows of a table": (_rows, [5], "has pandas take data"),
    "a write to an array": (_written, [0.0, 0.0, 1.0, 1.0], r"writes an array that differs by rank to whole\[2:\] \(line \d+\)"),
    "pieces in a list": (lambda r: list(torch.arange(4.0).chunk(4))[r].tolist(), [0.0], r"takes list\(.*\)\[r\] by a number"),
}


@pytest.mark.parametrize("name", REPORTED)
def test_reported_once_for_a_line(name: str) -> None:
    script, expected, text = REPORTED[name]
    rank = xm.get_ordinal()
    with pytest.warns(UserWarning, match=rf"test_reads.py:\d+ {text}.*for 4 ranks.*rank 0's.*torchrun") as caught:
        assert script(rank) == expected
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert script(rank) == expected


def test_a_write_is_reported() -> None:
    rank = xm.get_ordinal()
    found = [0] * 4
    with pytest.warns(UserWarning, match=r"takes found\[rank\] by a number"):
        found[rank] = 1
    assert found == [1, 0, 0, 0]


def test_not_reported() -> None:
    """Formatting, what is the same for all, tensors, keys that are made, hints to libraries."""
    rank, holder = xm.get_ordinal(), Holder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "%d %05d" % (rank, rank) == "0 00000" and f"{rank:02d}" == "00" and hex(rank) == "0x0"  # noqa: UP031
        assert SAME[rank] == "a" and holder.names[rank] == "x"
        assert {rank: 1} == {0: 1} and rank in {0, 1} and json.dumps({"rank": rank})
        assert FILES[int(rank)] == "part-0"
        x = torch.arange(8.0, device="xla")
        x[rank], x[rank : rank + 2], x.chunk(4)[rank], torch.arange(8)[rank], torch.arange(8).chunk(4)[rank]
        np.random.seed(rank)
        assert torch.zeros(3, 2).select(0, rank % 2).shape == (2,)


# -- files by a name that holds a rank ------------------------------------------------------------------


def _open(folder: pathlib.Path, rank: Any) -> Any:
    with open(folder / f"part-{rank}.txt") as file:
        return file.read()


def _named(folder: pathlib.Path, rank: Any) -> Any:
    name = f"part-{rank}.txt"
    return (folder / name).read_text()


def _text(folder: pathlib.Path, rank: Any) -> Any:
    return np.loadtxt(folder / ("part-" + str(rank) + ".txt")).tolist()


def _load(folder: pathlib.Path, rank: Any) -> Any:
    return torch.load(folder / "part-{:d}.pt".format(rank)).tolist()  # noqa: UP032


@pytest.mark.parametrize(
    ("read", "instead"),
    [
        (_open, r"Read all ranks' files into one tensor"),
        (_named, r"Read all ranks' files into one tensor"),
        (_text, r"Read all ranks' files into one tensor"),
        (_load, r"torch_bridge\.each_rank\(lambda rank: torch\.load\(path_of\(rank\)\), xm\.get_ordinal\(\)\)"),
    ],
)
def test_files_of_ranks_that_are_read(read: Any, instead: str, tmp_path: pathlib.Path) -> None:
    for r in range(4):
        (tmp_path / f"part-{r}.txt").write_text(str(r))
        torch.save(torch.tensor(float(r)), tmp_path / f"part-{r}.pt")
    with pytest.warns(
        UserWarning,
        match=r"test_reads.py:\d+ makes a name of a number that differs by rank, and line \d+ reads a file.*rank 0's file.*" + instead,
    ) as caught:
        assert read(tmp_path, xm.get_ordinal()) in ("0", 0.0)
    assert len(caught) == 1


def test_files_of_ranks_that_are_written(tmp_path: pathlib.Path) -> None:
    rank = xm.get_ordinal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open(tmp_path / f"log-{rank}.txt", "w") as file:
            file.write(f"rank {rank}")
        name = f"state-{rank}.pt"
        torch.save({"rank": rank}, tmp_path / name)
        assert str(rank) == "0"
    assert (tmp_path / "log-0.txt").read_text() == "rank 0"


# -- what is looked up by text --------------------------------------------------------------------------

TABLE = {f"part-{k}": k for k in range(4)}


def _by_name(r: Any) -> int:
    key = f"part-{r}"
    return TABLE[key]


def _attribute(r: Any) -> int:
    return getattr(Parts, f"of{r}")  # type: ignore[no-any-return]


class Parts:
    of0 = 0
    of1 = 1


LOOKED_UP: dict[str, Script] = {
    "text": lambda r: TABLE[f"part-{r}"],
    "str": lambda r: TABLE["part-" + str(r)],
    "get": lambda r: TABLE.get("part-{:d}".format(r)),  # noqa: UP032
    "by name": _by_name,
    "attribute": _attribute,
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_what_is_looked_up_by_text(name: str) -> None:
    with pytest.warns(
        UserWarning, match=r"test_reads.py:\d+ makes text of a number.*and line \d+ looks something up by it.*rank 0's"
    ) as caught:
        assert LOOKED_UP[name](xm.get_ordinal()) == 0
    assert len(caught) == 1


def test_what_is_kept_by_text() -> None:
    rank = xm.get_ordinal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {f"loss of {rank}": 1.0}
        found[f"rank {rank}"] = 2.0
    assert found == {"loss of 0": 1.0, "rank 0": 2.0}
