"""scikit-learn's metrics and NumPy's functions of what differs by rank."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn.metrics
import torch
import torch_xla.core.xla_model as xm
from sklearn.metrics import accuracy_score

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import first_rank_files, rank_array
from torch_bridge.script import rank_indexing

LABELS = [0, 1, 0, 1]


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(4)
    assert rank_numbers.is_ranked(world.rank())


def _guess(rank: int) -> Any:
    return (torch.arange(4) > rank).long().numpy()


def _guesses() -> Any:
    return (torch.arange(4, device="xla") > world.rank()).long().cpu().numpy()


METRICS: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda p: sklearn.metrics.accuracy_score(LABELS, p),
    "of a list": lambda p: sklearn.metrics.accuracy_score(LABELS, p.tolist()),
    "area": lambda p: sklearn.metrics.roc_auc_score(LABELS, p * 0.5),
    "error": lambda p: sklearn.metrics.mean_squared_error(y_true=LABELS, y_pred=p),
    "confusion": lambda p: sklearn.metrics.confusion_matrix(LABELS, p),
    "several": lambda p: sklearn.metrics.precision_recall_fscore_support(LABELS, p, zero_division=0)[0],
    "a dict": lambda p: sklearn.metrics.classification_report(LABELS, p, zero_division=0, output_dict=True)["macro avg"]["f1-score"],
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str) -> None:
    metric = METRICS[name]
    found = metric(_guesses())
    for place in range(4):
        np.testing.assert_array_equal(rank_array.own(found, place), metric(_guess(place)))


def test_metrics_between_ranks() -> None:
    expected = [sklearn.metrics.accuracy_score(LABELS, _guess(k)) for k in range(4)]
    assert xm.mesh_reduce("accuracy", sklearn.metrics.accuracy_score(LABELS, _guesses()), list) == expected
    assert rank_numbers.own(accuracy_score(LABELS, _guesses()), 3) == expected[3], "imported before there was such a number"


def test_numbers_of_numpys_keep_their_kind() -> None:
    mean = np.mean([(torch.ones(2, device="xla") * world.rank()).sum().item(), 1.0])
    assert torch.tensor(mean).dtype == torch.float64 and rank_numbers.per_rank(mean) == [0.5, 1.5, 2.5, 3.5]
    assert rank_numbers.per_rank(mean.item()) == [0.5, 1.5, 2.5, 3.5] and type(rank_numbers.own(mean.item(), 1)) is float
    at = (np.arange(4) - world.rank()).argmax().item()
    assert rank_numbers.own(at, 1) == 3


def test_views_as_another_dtype() -> None:
    found = (np.arange(2.0) + world.rank()).view(np.int64)
    for place in range(4):
        np.testing.assert_array_equal(rank_array.own(found, place), (np.arange(2.0) + place).view(np.int64))


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "copyto": np.copyto,
    "put": lambda a, own: np.put(a, [0, 1], own),
    "out": lambda a, own: np.clip(own, 0, 1, out=a),
    "out of several": lambda a, own: np.concatenate([own[:1], own[1:]], out=a),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_an_array_of_all_ranks(name: str) -> None:
    """The last rank's values were there."""
    with pytest.raises(
        rank_numbers.PlainNumberNeeded, match=r"numpy.\w+ would write values that differ by rank to an array that all 4 ranks"
    ):
        WRITES[name](np.zeros(2), np.arange(2.0) + world.rank())
    own = np.zeros(2) + world.rank()
    np.copyto(own, np.arange(2.0) + world.rank())
    assert rank_array.own(own, 2).tolist() == [2.0, 3.0]


def test_files_have_the_first_ranks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They had the last one's."""
    monkeypatch.setattr(first_rank_files, "_noted", False)
    with pytest.warns(UserWarning, match="an array or a number that is different on each rank.* is saved as rank 0 holds it"):
        np.save(tmp_path / "a.npy", np.arange(2.0) + world.rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.savetxt(tmp_path / "a.txt", np.arange(2.0) + world.rank())
    assert np.load(tmp_path / "a.npy").tolist() == np.loadtxt(tmp_path / "a.txt").tolist() == [0.0, 1.0]


TABLE = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "name": list("wxyz"), "same": [7] * 4})


def _written(r: Any) -> None:
    table = TABLE.copy()
    table.loc[r, "a"] = 9.0


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "place": lambda r: TABLE["a"].iloc[r],
    "label": lambda r: TABLE["a"].loc[r],
    "element": lambda r: TABLE["a"][r],
    "one place": lambda r: TABLE["a"].iat[r],
    "one label": lambda r: TABLE.at[r, "a"],
    "row and column": lambda r: TABLE.iloc[r, 0],
    "row and label": lambda r: TABLE.loc[r, "a"],
    "read place": lambda r: TABLE["a"].iloc[(torch.ones(2, device="xla").long() * r).max().item()],
}
ROWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda r: TABLE.iloc[r],
    "rows": lambda r: TABLE.iloc[r::4],
    "list of places": lambda r: TABLE.iloc[[r, 0]],
    "slice": lambda r: TABLE["a"][r : r + 1],
    "text": lambda r: TABLE.iloc[r, 1],
    "written": _written,
}


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_indexing, "_reported", set())


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.usefixtures("anew")
def test_numbers_of_a_table(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = NUMBERS[name](world.rank())
        assert TABLE.iloc[world.rank(), 2] == 7 and TABLE["a"].iloc[1:].sum() == 9.0
    assert rank_numbers.per_rank(found) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.usefixtures("anew")
def test_rows_of_a_table_are_the_first_ranks(name: str) -> None:
    with pytest.warns(UserWarning, match=r"test_host_metrics.py:\d+ has pandas .* by a number that differs by rank.*rank 0 alone"):
        ROWS[name](world.rank())
