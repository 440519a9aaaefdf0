"""Which sets and documents a configuration names, and how several sets are blended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxd_jax.training.data.megatron import blending, prefixes, splits, turns
from nxd_jax.training.data.megatron.prefixes import Parts
from tests.nxd_jax.training.data.megatron import corpora


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (["/a"], Parts(("/a",))),
        ("/a", Parts(("/a",))),
        ([1.0, "/a"], Parts(("/a",), (1.0,))),
        ([3, " /a ", "1", "/b"], Parts(("/a", "/b"), (0.75, 0.25))),
        ([0.5, "/a", 0, "/b", 1.5, "/c"], Parts(("/a", "/b", "/c"), (0.25, 0.0, 0.75))),
    ],
)
def test_lists(said: Any, parts: Parts) -> None:
    assert prefixes.parse(said) == parts


def test_homes_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SETS", "/sets")
    monkeypatch.setenv("HOME", "/home/me")
    assert prefixes.parse([1, "$SETS/a", 1, "~/b"]).prefixes == ("/sets/a", "/home/me/b")


def test_dicts() -> None:
    assert prefixes.by_use([1.0, "/a"]) is None
    found = prefixes.by_use({"train": [0.5, "/a", 0.5, "/b"], "validation": ["/c"], "test": None})
    assert found == {"train": Parts(("/a", "/b"), (0.5, 0.5)), "valid": Parts(("/c",))}
    for said in ({"validation": ["/a"]}, {"train": ["/a"], "valid": ["/b"]}, {}):
        with pytest.raises(ValueError, match="data.data_prefix has the keys .*: they must be train, and validation and test"):
            prefixes.by_use(said)
    with pytest.raises(ValueError, match="data.data_prefix.test: 'x' stands where a weight must be"):
        prefixes.by_use({"train": ["/a"], "test": ["x", "/a"]})


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([], r"data.data_prefix: \[\] names no sets. data.data_prefix is \[PREFIX\], \[WEIGHT, PREFIX"),
        (None, "None names no sets"),
        ([1.0, "/a", 2.0], "has 3 members, and every prefix needs a weight before it"),
        (["/a", "/b"], "'/a' stands where a weight must be, a number of at least 0"),
        ([-1, "/a"], "-1 stands where a weight must be"),
        ([float("nan"), "/a"], "nan stands where a weight must be"),
        ([1, 2], "2 stands where a prefix must be, a path without .bin and .idx"),
        ([0, "/a", 0.0, "/b"], r"the weights \[0.0, 0.0\] sum to 0.0; at least one must be above 0"),
    ],
)
def test_lists_that_say_nothing(said: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prefixes.parse(said)


def test_samples_of_each_set() -> None:
    """Half a percent more, rounded up."""
    assert prefixes.parse(["/a"]).samples(1000) == [1000]
    assert prefixes.parse([1.0, "/a"]).samples(1000) == [1005]
    assert prefixes.parse([3, "/a", 1, "/b"]).samples(1001) == [755, 252]


# -- splits ------------------------------------------------------------------------------------------


def by_hand(weights: list[float], documents: int) -> list[int]:
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / sum(weights) * float(documents)))
    excess = bounds[-1] - documents
    return [0] + [bound - excess for bound in bounds[1:]]


@pytest.mark.parametrize("documents", [3, 7, 40, 1000, 12345])
def test_splits(documents: int) -> None:
    for said, weights in (("980,10,10", [980.0, 10, 10]), ("1/1/1", [1.0, 1, 1]), ("0.9, 0.1, 0", [0.9, 0.1, 0]), ("1,0,0", [1.0, 0, 0])):
        assert splits.split(said, documents) == by_hand(weights, documents)


def test_splits_of_few_documents() -> None:
    assert splits.split("980,10,10", 40) == [0, 40, 40, 40]
    assert by_hand([0, 50, 50], 3) == [0, -1, 1, 3]  # where the original stops
    assert splits.split("0,50,50", 3) == [0, 0, 1, 3]


@pytest.mark.parametrize("said", ["1,1", "", "a,b,c", "0,0,0", "1,1,-1", "1,1,1,1", "100", "nan,1,1", "inf,1,1"])
def test_splits_that_are_none(said: str) -> None:
    with pytest.raises(
        ValueError, match="data.splits_string: .* must be three weights for training, validation and test, such as 980,10,10"
    ):
        splits.split(said, 10)


# -- blending ----------------------------------------------------------------------------------------


def greedy(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    counts, chosen, numbers = [0] * len(weights), [], []
    for k in range(size):
        best = 0
        for number in range(1, len(weights)):
            if weights[number] * max(k, 1.0) - counts[number] > weights[best] * max(k, 1.0) - counts[best]:
                best = number
        chosen.append(best)
        numbers.append(counts[best])
        counts[best] += 1
    return chosen, numbers


WEIGHTS = [
    *([1.0], [0.5, 0.5], [0.3, 0.7], [0.1, 0.0, 0.9], [1 / 7] * 7, [0.123, 0.377, 0.5], [0.05, 0.15, 0.2, 0.6]),
    *([1 / 3, 2 / 3], [0.015, 0.985], [0.2718281828459045, 0.7281718171540955], [0.1234567, 0.8765433]),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_turns_follow_the_weights(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (64, 1 << 16):
        monkeypatch.setattr(turns, "BLOCK", block)
        for size in (0, 1, 7, 3000):
            chosen, numbers = turns.turns(weights, size)
            assert (chosen.tolist(), numbers.tolist()) == greedy(weights, size)
    counts = Counter(chosen.tolist())
    assert all(abs(counts[k] - 3000 * weight) <= 1.5 for k, weight in enumerate(weights))


@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize("seed", range(6))
def test_turns_of_many_samples(seed: int) -> None:
    """Where sets are level, the last digit of a product decides."""
    source = np.random.default_rng(seed)
    parts = source.integers(1, 30, int(source.integers(2, 9)))
    weights = (parts / parts.sum()).tolist()
    chosen, numbers = turns.turns(weights, 300_000)
    assert (chosen.tolist(), numbers.tolist()) == greedy(weights, 300_000)


def test_a_pattern_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong is left where it goes wrong."""
    monkeypatch.setattr(turns, "_pattern", lambda _: 7)
    weights = [0.3, 0.7]
    chosen, numbers = turns.turns(weights, 2000)
    assert (chosen.tolist(), numbers.tolist()) == greedy(weights, 2000)


def test_blends(tmp_path: Path) -> None:
    parts = [corpora.samples(corpora.write(tmp_path / name, corpora.rows(20, seed)), 40) for name, seed in (("a", 1), ("b", 2))]
    blend = blending.Blend(parts, [1, 3], 40)
    chosen, numbers = greedy([0.25, 0.75], 40)
    assert len(blend) == 40
    for k in range(40):
        wanted = parts[chosen[k]][numbers[k]]
        assert all(np.array_equal(blend[k][name], wanted[name]) for name in wanted)
    assert blend[39]["loss_mask"].sum() > 0 == blend[-1]["loss_mask"].sum()  # a sample that fills a batch has a loss in the original


@pytest.mark.parametrize("weights", [[1.0, 3.0], [1.0, 0.0], [1.0, 1.0], [5.0, 1.0]])
def test_one_pass(weights: list[float]) -> None:
    """Until a set whose turn it is has no more."""
    sets = [list(range(6)), list(range(9))]
    blend = blending.Blend(sets, weights, None)
    chosen, numbers = greedy([w / sum(weights) for w in weights], 60)
    end = next(k for k in range(60) if numbers[k] >= len(sets[chosen[k]]))
    assert [blend[k] for k in range(len(blend))] == numbers[:end]


def test_blends_that_cannot_be(tmp_path: Path) -> None:
    made = corpora.samples(corpora.write(tmp_path / "a", corpora.rows(20, empty=False)), 4)
    with pytest.raises(ValueError, match="1 sets cannot be blended by 2 weights"):
        blending.Blend([made], [1, 1], 4)
    with pytest.raises(ValueError, match=rf"100 of 100 samples are to be of .*a, which has {len(made)}"):
        blending.Blend([made], [1], 100)
