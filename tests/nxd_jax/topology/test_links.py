"""Neighbours, links and distances."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from nxd_jax.topology import INSTANCES, Topology, instance
from nxd_jax.topology import links as wiring

# CONNECTED DEVICES of `neuron-ls` on trn1.32xlarge and on trn2.48xlarge
TORUS = {
    0: (12, 3, 4, 1),
    1: (13, 0, 5, 2),
    2: (14, 1, 6, 3),
    3: (15, 2, 7, 0),
    4: (0, 7, 8, 5),
    5: (1, 4, 9, 6),
    6: (2, 5, 10, 7),
    7: (3, 6, 11, 4),
    8: (4, 11, 12, 9),
    9: (5, 8, 13, 10),
    10: (6, 9, 14, 11),
    11: (7, 10, 15, 8),
    12: (8, 15, 0, 13),
    13: (9, 12, 1, 14),
    14: (10, 13, 2, 15),
    15: (11, 14, 3, 12),
}


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge", "trn2-ultraserver"])
def test_the_printed_neighbours_of_a_torus(name):
    assert Topology(name).connected_devices() == TORUS


def test_a_ring():
    assert Topology("inf2.24xlarge").connected_devices() == {0: (5, 1), 1: (0, 2), 2: (1, 3), 3: (2, 4), 4: (3, 5), 5: (4, 0)}
    assert Topology("inf2.48xlarge").connected_devices()[11] == (10, 0)


@pytest.mark.parametrize("name", ["trn1.2xlarge", "trn2.3xlarge", "inf2.xlarge", "inf2.8xlarge"])
def test_a_single_chip_has_no_neighbours(name):
    assert Topology(name).connected_devices() == {0: ()} and Topology(name).links() == ()


def test_an_ultraserver_joins_equal_chips_in_rings():
    table = wiring.neighbours(instance("trn2-ultraserver"))
    assert table[0] == (12, 3, 4, 1, 48, 16)
    assert table[16 + 5] == (16 + 1, 16 + 4, 16 + 9, 16 + 6, 5, 32 + 5)
    assert len(table) == 64


@pytest.mark.parametrize("name", INSTANCES)
def test_neighbours_are_mutual(name):
    table = wiring.neighbours(instance(name))
    assert all(a in table[b] for a, row in enumerate(table) for b in row)
    assert all(len(set(row)) == len(row) and a not in row for a, row in enumerate(table))


@pytest.mark.parametrize(
    ("name", "axes", "wraps"),
    [
        ("trn1.32xlarge", {"x": (16, 96e9), "y": (16, 96e9)}, 8),
        ("trn1n.32xlarge", {"x": (16, 192e9), "y": (16, 192e9)}, 8),
        ("trn2.48xlarge", {"x": (16, 256e9), "y": (16, 256e9)}, 8),
        ("trn2-ultraserver", {"x": (64, 256e9), "y": (64, 256e9), "z": (64, 128e9)}, 48),
        ("inf2.24xlarge", {"ring": (6, 96 * 2**30)}, 1),
        ("inf2.48xlarge", {"ring": (12, 96 * 2**30)}, 1),
    ],
)
def test_links(name, axes, wraps):
    found = Topology(name).links()
    assert Counter(link.axis for link in found) == {axis: count for axis, (count, _) in axes.items()}
    assert all(link.bandwidth == axes[link.axis][1] for link in found)
    assert sum(link.wraps for link in found) == wraps
    assert all(a < b for a, b in (link.chips for link in found))


def test_hops_on_a_torus_are_the_wrapped_manhattan_distance():
    def ring(a, b):
        return min((a - b) % 4, (b - a) % 4)

    hops = wiring.hops(instance("trn2-ultraserver"))
    for a, b in itertools.product(range(64), repeat=2):
        (za, ya, xa), (zb, yb, xb) = ((i // 16, i // 4 % 4, i % 4) for i in (a, b))
        assert hops[a, b] == ring(za, zb) + ring(ya, yb) + ring(xa, xb)


def test_hops_between_ranks():
    trn2 = Topology("trn2.48xlarge", nodes=2)
    assert [trn2.hops(0, r) for r in (0, 3, 4, 12, 16, 40)] == [0, 0, 1, 1, 1, 4]
    assert trn2.hops(0, 64) is None
    assert Topology("trn2-ultraserver").hops(0, 64) == 1
    assert Topology("trn2-ultraserver").hops(0, 128 + 40) == 6
    assert Topology("inf2.48xlarge").hops(0, 12) == 6


def test_connected_sets():
    torus = instance("trn1.32xlarge")
    assert wiring.connected(torus, {0, 4, 8, 12}) and wiring.connected(torus, {0, 3}) and wiring.connected(torus, set())
    assert not wiring.connected(torus, {0, 8}) and not wiring.connected(torus, {0, 5})
