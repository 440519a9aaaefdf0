"""Many storages read and written at once, as an optimizer and a played module do: ids, leaves and nodes are those of one read after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from torch_bridge.identity import ONCE, references
from torch_bridge.ir.layout import Layout, layout
from torch_bridge.ir.segment import Segment, Storage

BASE = layout((2, 3), None, 0, torch.float32)
TURNED = layout((3, 2), (1, 3), 0, torch.float32)

Given = tuple[list[Storage], list[Layout]]


def held(count: int) -> list[Storage]:
    return [Storage(BASE, jnp.full((2, 3), float(k))) for k in range(count)]


def plain(segment: Segment) -> Given:
    return held(4), [BASE] * 4


def some_read_before(segment: Segment) -> Given:
    storages = held(4)
    segment.read(storages[2], BASE)
    return storages, [BASE] * 4


def some_pending(segment: Segment) -> Given:
    storages = held(4)
    segment.write(storages[1], segment.fill(BASE, 5.0))
    return storages, [BASE] * 4


def some_through_views(segment: Segment) -> Given:
    return held(4), [BASE, TURNED, BASE, TURNED]


def one_twice(segment: Segment) -> Given:
    first, second = held(2)
    return [first, second, first, second], [BASE, BASE, TURNED, BASE]


def an_array_in_two_storages(segment: Segment) -> Given:
    storages = held(3)
    return [*storages, Storage(BASE, storages[0].held)], [BASE] * 4


def some_constant(segment: Segment) -> Given:
    storages = held(3)
    storages[1] = Storage(BASE, fill=2.0)
    return storages, [BASE, BASE, TURNED]


CASES: list[Callable[[Segment], Given]] = [
    plain,
    some_read_before,
    some_pending,
    some_through_views,
    one_twice,
    an_array_in_two_storages,
    some_constant,
]


def state(segment: Segment, storages: list[Storage], ids: list[int]) -> Any:
    """All that a read leaves: named by the places of storages and the numbers in arrays."""
    place = {id(s): k for k, s in enumerate(storages)}
    return (
        ids,
        [(str(node[0]), *node[1:]) for node in segment.nodes],
        [float(leaf[0, 0]) for leaf in segment.leaves],
        sorted(segment.leaf_index.values()),
        {vid: place[id(ref())] for vid, ref in segment.holders.items()},
        [place[id(ref())] for ref in segment.sharers],
        [(s.vid, s.segment is segment, s.views) for s in storages],
    )


@pytest.mark.parametrize("case", CASES)
def test_reads(case: Callable[[Segment], Given]) -> None:
    found = []
    for at_once in (True, False):
        segment = Segment()
        storages, views = case(segment)
        ids = segment.read_all(storages, views) if at_once else [segment.read(s, v) for s, v in zip(storages, views, strict=True)]
        found.append(state(segment, storages, ids))
    assert found[0] == found[1]


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("case", [plain, some_pending, some_through_views])
def test_writes(case: Callable[[Segment], Given], described: bool) -> None:
    """described: of a parameter, which says whose it is."""
    found = []
    for at_once in (True, False):
        segment = Segment()
        storages, views = case(segment)
        for storage in storages[:2] if described else ():
            storage.describe(owner=("module", "weight", ()))
        segment.read_all(storages, [BASE] * len(storages))
        new = [segment.fill(view, 7.0) for view in views]
        assert new == list(range(new[0], new[0] + len(new)))
        if at_once:
            segment.write_all(storages, views, new[0])
        else:
            for storage, view, vid in zip(storages, views, new, strict=True):
                segment.write_view(storage, view, vid)
        place = {id(s): k for k, s in enumerate(storages)}
        written = [place[id(ref())] for ref in segment.writers], [(place[id(ref())], leaf) for ref, leaf in segment.saved_with_leaves()]
        found.append((state(segment, storages, []), written, [s.writes for s in storages]))
    assert found[0] == found[1]


class _Link:
    """Stands for another storage that follows."""

    def __init__(self) -> None:
        self.told: list[Storage] = []

    def follow(self, segment: Segment, storage: Storage) -> None:
        self.told.append(storage)


def test_what_is_linked_follows_a_write() -> None:
    segment, storages, link = Segment(), held(2), _Link()
    storages[1].describe(links=[link])
    segment.read_all(storages, [BASE, BASE])
    new = [segment.fill(BASE, 7.0) for _ in range(2)]
    segment.write_all(storages, [BASE, BASE], new[0])
    assert link.told == [storages[1]]


def test_references_are_counted_alike_in_every_python() -> None:
    gc.collect()
    objects = [object() for _ in range(3)]
    other = [objects[1]]
    assert [count - ONCE for count in references(objects)] == [0, 1, 0]
    assert len(other) == 1


def test_results() -> None:
    """Storages that wait for one value both get it, each once; those that are gone, filled or elsewhere do not."""
    segment = Segment()
    first, second, other, filled, elsewhere = (Storage(BASE) for _ in range(5))
    gone = Storage(BASE)
    vids = [segment.fill(BASE, float(k)) for k in (5, 6)]
    for storage in (first, second, gone, filled, elsewhere, second):
        segment.write(storage, vids[0])
    segment.write(other, vids[1])
    filled.set_constant(3.0)
    elsewhere.settle("array")
    del gone, storage
    found = segment.results()
    assert [(v, list(found[v])) for v in found] == [(vids[0], [first, second]), (vids[1], [other])] and len(found) == 2
    assert list(found.only([vids[0]]).items()) == [(vids[0], (first, second))]
    found.settle([vids[0], 99], ["value", "of nobody"])
    assert (first.held, second.held, first.segment, elsewhere.held) == ("value", "value", None, "array") and other.segment is segment
    found.drop(vids[0])
    assert list(found) == [vids[1]]


def test_a_storage_that_got_another_value_waits_for_that_alone() -> None:
    segment = Segment()
    storage = Storage(BASE)
    for k in (5, 6):
        segment.write(storage, segment.fill(BASE, float(k)))
    assert list(segment.results().items()) == [(segment.next_vid - 1, (storage,))]
