"""Numbers that differ by rank in files and seeds: the first hosted rank's."""

from __future__ import annotations

import io
import json
import pathlib
import random
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser
import yaml

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers
from torch_bridge.recorder import first_rank_files


@pytest.fixture
def numbers(hosted: Hosted) -> dict[str, Any]:
    """One of each kind, beside plain ones."""
    hosted(4, dp=2, tp=2)
    rank = xm.get_ordinal() + 3
    item = (torch.ones((), device="xla") * rank / 2).item()
    count = (torch.ones((), device="xla", dtype=torch.int64) * rank).item()
    found = {"rank": rank, "half": rank / 4, "first": rank == 3, "loss": item, "count": count, "plain": 7}
    assert tuple(map(type, list(found.values())[:5])) == rank_numbers.KINDS
    return found


FIRST = {"rank": 3, "half": 0.75, "first": True, "loss": 1.5, "count": 3, "plain": 7}


@pytest.mark.parametrize("indent", [None, 2])
def test_json(numbers: dict[str, Any], indent: int | None) -> None:
    assert json.dumps(numbers, indent=indent, sort_keys=True) == json.dumps(FIRST, indent=indent, sort_keys=True)
    assert json.loads(json.dumps([numbers])) == [FIRST]
    with pytest.raises(TypeError, match="Object of type SimpleNamespace is not JSON serializable"):
        json.dumps(SimpleNamespace())


def test_encoders_of_scripts(numbers: dict[str, Any]) -> None:
    class Encoder(json.JSONEncoder):
        def default(self, o: Any) -> Any:
            return str(o) if isinstance(o, pathlib.PurePosixPath) else super().default(o)

    assert json.loads(json.dumps({**numbers, "path": pathlib.PurePosixPath("a")}, cls=Encoder)) == {**FIRST, "path": "a"}


@pytest.mark.parametrize("dump", [yaml.dump, yaml.safe_dump])
def test_yaml(numbers: dict[str, Any], dump: Any) -> None:
    assert yaml.safe_load(dump(numbers)) == FIRST


def test_checkpoints_load_without_trust(numbers: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """`torch.load` takes plain numbers only, by default; what is saved stays as it was for the script."""
    state = OrderedDict(weights=torch.ones(2), history=[numbers, (numbers["loss"], 1)], epoch=2)
    torch.save(state, tmp_path / "a.pt")
    with (tmp_path / "b.pt").open("wb") as f:
        torch.save(obj=state, f=f)
    for name in ("a.pt", "b.pt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert found["history"] == [FIRST, (1.5, 1)] and type(found["history"][0]["rank"]) is int and type(found["history"][1][0]) is float
        assert type(found) is OrderedDict and found["weights"].tolist() == [1, 1] and found["epoch"] == 2
    assert state["history"][0] is numbers and isinstance(numbers["rank"], rank_numbers.RankInt)


def test_only_what_has_such_numbers_is_copied(numbers: dict[str, Any]) -> None:
    class Refuses:
        def __copy__(self) -> Any:
            raise AssertionError

        def __reduce__(self) -> Any:
            return str, ("saved",)

    file = io.BytesIO()
    torch.save({"other": Refuses(), **numbers}, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)["other"] == "saved"


def test_seeds_of_the_host(numbers: dict[str, Any]) -> None:
    rank = numbers["rank"]
    random.seed(40 + rank)
    again = random.Random(rank + 40).random()
    assert random.random() == random.Random(43).random() == again
    random.seed(a=rank)
    assert random.random() == random.Random(3).random()
    assert np.random.default_rng(seed=rank).random() == np.random.default_rng(3).random()
    with pytest.raises(TypeError, match="seed types"):
        random.seed([1])  # type: ignore[arg-type]


def test_rounding(numbers: dict[str, Any]) -> None:
    assert rank_numbers.values_of(round(numbers["half"], 1)) == (0.8, 1.0, 1.2, 1.5)
    assert rank_numbers.values_of(round(numbers["half"])) == (1, 1, 1, 2)
    assert rank_numbers.values_of(round(numbers["rank"] * 10, -1)) == (30, 40, 50, 60)


@pytest.mark.parametrize("copied", ["cpu", "xser", "_maybe_convert_to_cpu"])
def test_copies_of_what_differs_by_rank(copied: str, hosted: Hosted, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A file has the first rank's values, which is said, also of a copy on the CPU; what all ranks share is saved without a word."""
    hosted(4)
    monkeypatch.setattr(first_rank_files, "_noted", False)
    own, same = torch.ones(2, device="xla") * xm.get_ordinal(), torch.ones(2, device="xla")
    save = {
        "cpu": lambda t: torch.save({"a": t.cpu()}, tmp_path / "a.pt"),
        "xser": lambda t: xser.save({"a": t}, str(tmp_path / "a.ckpt"), master_only=False),
        "_maybe_convert_to_cpu": lambda t: torch.save(xm._maybe_convert_to_cpu({"a": t}), tmp_path / "a.pt"),
    }[copied]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(same)
    with pytest.warns(UserWarning, match=r"is saved as rank 0 holds it: .*save_checkpoint keeps all of them; torchrun"):
        save(own)


def test_xser_writes_each_ranks_files(hosted: Hosted, tmp_path: pathlib.Path) -> None:
    """If all ranks save, and the path has the rank's number."""
    hosted(4)
    rank = xm.get_ordinal()
    own, same = torch.ones(2, device="xla") * rank, torch.ones(2, device="xla")
    xser.save({"own": own, "same": [same, own], "rank": rank}, f"{tmp_path}/rank-{rank}.pt", master_only=False)
    for r in range(4):
        found = xser.load(tmp_path / f"rank-{r}.pt")
        assert found["own"].tolist() == [r, r] and found["same"][0].tolist() == [1, 1] and found["rank"] == r
        assert found["same"][1] is found["own"] or found["same"][1].tolist() == [r, r]
    xser.save({"same": same}, f"{tmp_path}/same-{rank}.pt", master_only=False)  # the same on all ranks: one file
    assert [p.name for p in tmp_path.glob("same-*.pt")] == ["same-0.pt"]
