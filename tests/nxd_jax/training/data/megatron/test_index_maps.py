"""Index maps are those that plain loops make, whatever the corpus; files that keep them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxd_jax.training.data.megatron import index_maps, map_files
from nxd_jax.training.data.megatron.index_maps import Maps, Wanted
from tests.nxd_jax.training.data.megatron import loops


def wanted(sizes: Any, samples: int, seq_length: int = 4, seed: int = 7, first: int = 0, last: int | None = None, **options: Any) -> Wanted:
    sizes = np.asarray(sizes, np.int32)
    return Wanted(sizes, first, len(sizes) if last is None else last, samples, seq_length, seed, **options)


def as_lists(maps: Maps) -> tuple[list[Any], list[Any], list[Any]]:
    return maps.documents.tolist(), maps.samples.tolist(), maps.shuffle.tolist()


def by_loops(w: Wanted) -> tuple[list[Any], list[Any], list[Any]]:
    return loops.maps(w.sizes.tolist(), range(w.first, w.last), w.seq_length, w.samples, w.seed, w.extra, w.drop_last)


def random_case(seed: int) -> Wanted:
    """Documents without tokens and long ones, parts of a file, one epoch and many."""
    source = np.random.default_rng(seed)
    count = int(source.integers(1, 40))
    sizes = source.integers(0, int(source.choice([2, 5, 60])), count)
    first = int(source.integers(0, count))
    last = int(source.integers(first + 1, count + 1))
    sizes[int(source.integers(first, last))] += 3
    length = int(source.choice([1, 2, 3, 8, 33]))
    of_one = max(int(sizes[first:last].sum()) // length, 1)
    samples = int(source.integers(0, 6 * of_one + 2))
    return wanted(sizes, samples, length, seed, first, last, extra=int(source.integers(0, 2)), drop_last=bool(source.integers(0, 2)))


def compare(seeds: range, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """(cases of several epochs, with the last one apart, with a short last sample)."""
    several = apart = short = 0
    for seed in seeds:
        monkeypatch.setattr(index_maps, "BLOCK", 1 + seed % 9 if seed % 2 else 1 << 22)
        w = random_case(seed)
        made = index_maps.build(w)
        assert as_lists(made) == by_loops(w), w
        assert index_maps.misfit(w, made) is None
        assert [a.dtype.name for a in (made.documents, made.samples, made.shuffle)] == ["int32", "int32", "uint32"]
        assert w.length >= w.samples
        several += w.epochs > 1
        apart += w.separate
        short += not w.drop_last and (w.epochs * w.tokens - w.extra) % w.seq_length > 0
    return several, apart, short


def test_maps_are_those_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    several, apart, short = compare(range(300), monkeypatch)
    assert several > 150 and apart > 60 and short > 60


@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize("part", range(8))
def test_many_more_maps(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(range(1000 * (part + 1), 1000 * (part + 1) + 1000), monkeypatch)


def test_rules_of_the_last_epoch() -> None:
    """20 tokens an epoch, so 9 samples of 2 (one token is shared): below int(0.8 * 9) = 7 of them the last epoch stands apart."""
    for more in range(1, 10):
        w = wanted([20], 9 + more, 2)
        assert (w.epochs, w.before_last, w.separate) == (2, 9, more < 7), more
    assert not wanted([20], 9, 2).separate
    # 12 tokens are 2 samples of 4, 24 are 5: the original stops with an assertion where all 5 are wanted
    w = wanted([12], 5, 4)
    assert (w.epochs, w.length, w.separate) == (2, 5, False)
    assert as_lists(index_maps.build(w)) == by_loops(w)


def test_samples_without_the_one_token_more() -> None:
    one, none = wanted([4, 4], 1, 4), wanted([4, 4], 1, 4, extra=0)
    assert (one.length, none.length) == (1, 2)
    assert index_maps.build(none).samples.tolist() == [[0, 0], [0, 4], [1, 4]]
    assert index_maps.build(one).samples.tolist() == [[0, 0], [1, 0]]


@pytest.mark.core(keep=0)
def test_ten_million_documents() -> None:
    """In seconds, and right at places that are looked at."""
    source = np.random.default_rng(0)
    sizes = source.integers(1, 60, 10_000_000, dtype=np.int32)
    w = wanted(sizes, 300_000, 1024)
    made = index_maps.build(w)
    assert w.epochs == 2 and len(made.shuffle) == w.length
    begins = np.concatenate([[0], np.cumsum(sizes[made.documents], dtype=np.int64)])
    rows = made.samples[[1, 1000, w.length // 2, w.length]].astype(np.int64)
    assert (begins[rows[:, 0]] + rows[:, 1]).tolist() == [k * 1024 for k in (1, 1000, w.length // 2, w.length)]
    assert (rows[:, 1] < sizes[made.documents[rows[:, 0]]]).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": [0, 0], "samples": 1}, "documents 0 to 1 have no tokens"),
        ({"sizes": [3], "samples": 1, "seq_length": 0}, "1 samples of 0 tokens cannot be made"),
        ({"sizes": [3], "samples": -1}, "-1 samples of 4 tokens cannot be made"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wanted(**options)


def test_large_sizes_do_not_overflow() -> None:
    w = wanted([2**31 - 1] * 8, 1, 1 << 20)
    assert w.tokens == 8 * (2**31 - 1)
    made = index_maps.build(w)
    assert made.samples.dtype == np.int32 and (made.samples >= 0).all() and made.samples[-1, 0] == 7


# -- files -------------------------------------------------------------------------------------------

SIZES = [5, 0, 9, 4, 7, 3]


def save(w: Wanted, stem: Path) -> None:
    """As the original does."""
    documents, samples, shuffle = by_loops(w)
    for name, values, kind in (("doc", documents, np.int32), ("sample", samples, np.int32), ("shuffle", shuffle, np.uint32)):
        np.save(f"{stem}_{name}_idx.npy", np.array(values, kind), allow_pickle=True)


@pytest.mark.parametrize("folder", [None, "maps/of/mine"])
def test_files_have_the_originals_names(folder: str | None, tmp_path: Path) -> None:
    w = wanted(SIZES, 12)
    place = tmp_path if folder is None else tmp_path / folder
    made = map_files.load_or_build(tmp_path / "wiki_text_document", "train", w, None if folder is None else place)
    stem = place / "wiki_text_document_train_indexmap_12ns_4sl_7s"
    assert sorted(f for f in os.listdir(place) if not f.startswith(".")) == [
        f"{stem.name}_{n}_idx.npy" for n in ("doc", "sample", "shuffle")
    ]
    assert as_lists(made) == by_loops(w) and isinstance(made.samples, np.memmap)


def test_files_of_the_original_are_taken(tmp_path: Path) -> None:
    w = wanted(SIZES, 12)
    stem = map_files.stem(tmp_path / "a", "valid", w)
    save(w, stem)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert as_lists(map_files.load_or_build(tmp_path / "a", "valid", w)) == by_loops(w)
    assert times == {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}


STALE: dict[str, tuple[dict[str, Any], str]] = {
    "another splits_string": ({"first": 2}, "they have the shapes .*, and .* are needed"),
    "another part of as many documents": ({"first": 0, "last": 5}, "they are of other documents than 1 to 5"),
    "data that was made again": ({"sizes": [5, 0, 9, 4, 6, 4]}, "documents have other lengths now"),
    "another rule": ({"extra": 0}, "no_seqlen_plus_one_input_tokens"),
    "drop_last": ({"drop_last": False}, "they have the shapes"),
}


@pytest.mark.parametrize("name", STALE)
def test_files_that_do_not_fit_are_built_anew(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The original would train on them."""
    changes, said = STALE[name]
    plain: dict[str, Any] = {"sizes": SIZES, "samples": 4, "seq_length": 5, "first": 1, "last": 6}
    old, now = wanted(**{**plain, **changes}), wanted(**plain)
    save(old, map_files.stem(tmp_path / "a", "train", old))
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert as_lists(map_files.load_or_build(tmp_path / "a", "train", now)) == by_loops(now)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "a_train_indexmap_4ns_5sl_7s_*_idx.npy are built anew: " in caplog.text
    caplog.clear()
    assert as_lists(map_files.load_or_build(tmp_path / "a", "train", now)) == by_loops(now) and not caplog.records
    assert re.search(said, index_maps.misfit(now, index_maps.build(old)) or "")


def test_damaged_files_are_built_anew(tmp_path: Path) -> None:
    w = wanted(SIZES, 12)
    stem = map_files.stem(tmp_path / "a", "train", w)
    for damage in (b"", b"\x93NUMPY nonsense", b"no numbers"):
        save(w, stem)
        Path(f"{stem}_sample_idx.npy").write_bytes(damage)
        assert as_lists(map_files.load_or_build(tmp_path / "a", "train", w)) == by_loops(w)
    for name, values in (
        ("shuffle", np.zeros(w.length, np.uint32)),
        ("doc", np.full(w.documents, 99, np.int32)),
        ("shuffle", np.ones(w.length)),
    ):
        save(w, stem)
        np.save(f"{stem}_{name}_idx.npy", values)
        assert as_lists(map_files.load_or_build(tmp_path / "a", "train", w)) == by_loops(w)


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read only")

    w = wanted(SIZES, 12)
    monkeypatch.setattr(np, "save", refuse)
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert as_lists(map_files.load_or_build(tmp_path / "a", "train", w)) == by_loops(w)
    assert "index maps are kept in memory, as they cannot be written beside the data (read only)" in caplog.text
    with pytest.raises(OSError, match=r"data.index_mapping_dir=.*: index maps cannot be written there: read only"):
        map_files.load_or_build(tmp_path / "a", "train", w, tmp_path / "maps")
    assert not [f for f in tmp_path.rglob("*") if f.suffix == ".npy"]


def _one_of_several(folder: str, barrier: Any, found: Any) -> None:
    barrier.wait()
    maps = map_files.load_or_build(Path(folder) / "a", "train", wanted(SIZES, 200))
    found.put(as_lists(maps))


@pytest.mark.slow
def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(3), context.Queue()
    others = [context.Process(target=_one_of_several, args=(str(tmp_path), barrier, found)) for _ in range(3)]
    for process in others:
        process.start()
    results = [found.get(timeout=300) for _ in others]
    for process in others:
        process.join()
    assert results == [by_loops(wanted(SIZES, 200))] * 3
    assert not list(tmp_path.glob(".*partial*"))
