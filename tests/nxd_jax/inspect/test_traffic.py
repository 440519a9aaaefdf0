"""What collectives put on links, network and chips, against sums worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate import DOCUMENTED
from nxd_jax.inspect.tables import plain
from nxd_jax.inspect.traffic import axis_groups, traffic, ways
from nxd_jax.topology import Topology, instance

NODE = Topology("trn1.32xlarge")
TWO = Topology("trn1.32xlarge", nodes=2)
S = 1024.0


def send(kind: str, ranks: int, size: float = S, axis: str = "tp") -> Collective:
    return Collective(kind=kind, axes=(axis,), ranks=ranks, count=1, bytes=int(size))


def mesh(**sizes: int):
    return lambda axes: axis_groups(sizes, axes)


# -- groups -------------------------------------------------------------------------------------------


def test_axis_groups_are_those_of_the_topology():
    sizes = {"pp": 2, "dp": 4, "tp": 8}
    groups = TWO.groups(tp=8, pp=2)
    for axis in sizes:
        assert axis_groups(sizes, (axis,)) == groups[axis]
    assert axis_groups(sizes, ("dp", "tp")) == axis_groups(sizes, ("tp", "dp")) == [list(range(32)), list(range(32, 64))]
    assert axis_groups({"tp": 2}, ()) == [[0], [1]]


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(ValueError, match="no axis 'cp'; it has 'dp', 'tp'"):
        axis_groups({"dp": 2, "tp": 4}, ("cp",))


# -- ways ---------------------------------------------------------------------------------------------


def test_neighbours_have_one_way_and_diagonals_two():
    machine = instance("trn1.32xlarge")
    assert [(link.chips, part) for link, part in ways(machine, 0, 1)] == [((0, 1), 1.0)]
    assert {link.chips: part for link, part in ways(machine, 0, 5)} == {(0, 1): 0.5, (1, 5): 0.5, (0, 4): 0.5, (4, 5): 0.5}
    assert {link.chips: part for link, part in ways(machine, 0, 2)} == {(0, 1): 0.5, (1, 2): 0.5, (0, 3): 0.5, (2, 3): 0.5}


@pytest.mark.parametrize("name", ["trn1.32xlarge", "inf2.48xlarge", "trn2.48xlarge"])
def test_parts_of_all_ways_add_up_to_the_hops(name: str):
    machine = instance(name)
    topology = Topology(machine)
    for b in range(machine.chips):
        found = ways(machine, 3, b)
        assert sum(part for _, part in found) == pytest.approx(topology.hops(3 * topology.cores_per_chip, b * topology.cores_per_chip))


# -- one instance -------------------------------------------------------------------------------------

FACTORS = {"all-reduce": 2 * 7 / 8, "all-gather": 7, "reduce-scatter": 7 / 8, "permute": 1}


@pytest.mark.parametrize("kind", FACTORS)
def test_a_ring_of_eight_cores_goes_round_a_row_of_chips(kind: str):
    found = traffic(NODE, [send(kind, 8)], mesh(dp=4, tp=8))
    wire = FACTORS[kind] * S
    assert wire == send(kind, 8).wire_bytes
    assert {link.axis for _, link in found.links} == {"x"} and len(found.links) == 16
    assert set(found.links.values()) == {wire}
    assert found.local == {(0, chip): wire for chip in range(16)}
    assert found.network == {}
    assert found.link_seconds == wire / 96e9
    assert found.local_seconds == 2 * wire / NODE.chip.hbm_bandwidth


def test_two_cores_of_a_chip_need_no_link():
    found = traffic(Topology("trn1.2xlarge"), [send("all-reduce", 2)], mesh(tp=2))
    assert found.links == {} and found.local == {(0, 0): 2 * S}
    assert found.link_seconds == found.network_seconds == 0.0


def test_groups_along_columns_share_the_links_of_their_column():
    found = traffic(NODE, [send("all-reduce", 4, axis="dp")], mesh(dp=4, tp=8))
    assert {link.axis for _, link in found.links} == {"y"}
    assert set(found.links.values()) == {2 * 2 * (3 / 4) * S}  # both cores of a chip belong to groups
    assert found.local == {}


def test_all_to_all_goes_to_each_rank_directly():
    found = traffic(NODE, [send("all-to-all", 8)], mesh(dp=4, tp=8))
    assert found.local[0, 0] == 2 * S / 8
    hops = sum(NODE.hops(a, b) for a in range(8) for b in range(8))
    assert sum(n for (_, link), n in found.links.items() if max(link.chips) < 4) == pytest.approx(hops * S / 8)


def test_collectives_add_up():
    one, two = send("all-gather", 8), send("all-reduce", 4, axis="dp")
    both = traffic(NODE, [one, two], mesh(dp=4, tp=8))
    assert sum(both.links.values()) == sum(sum(traffic(NODE, [c], mesh(dp=4, tp=8)).links.values()) for c in (one, two))


# -- several instances --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "within", "between"),
    [
        ("all-reduce", 2 * 31 / 32 * S, 2 * 1 / 2 * S / 32),
        ("reduce-scatter", 31 / 32 * S, 1 / 2 * S / 32),
        ("all-gather", 31 * 2 * S, S),
    ],
)
def test_over_two_instances_a_collective_is_hierarchical(kind: str, within: float, between: float):
    found = traffic(TWO, [send(kind, 64)], mesh(tp=64))
    assert found.network == {0: pytest.approx(32 * between), 1: pytest.approx(32 * between)}
    assert found.local[1, 0] == pytest.approx(within)
    alone = traffic(NODE, [send(kind, 32, 2 * S if kind == "all-gather" else S)], mesh(tp=32))
    assert sum(found.links.values()) == pytest.approx(2 * sum(alone.links.values()))
    assert found.network_seconds == pytest.approx(32 * between / 1e11)


def test_ranks_with_the_same_place_on_each_instance_use_the_network_alone():
    found = traffic(TWO, [send("all-reduce", 2, axis="dp")], mesh(dp=2, tp=32))
    assert found.links == found.local == {}
    assert found.network == {0: 32 * S, 1: 32 * S}


@pytest.mark.parametrize("group", [[0, 1, 32], [0, 1, 32, 33]])
def test_unequal_shares_and_permutes_are_one_ring(group: list[int]):
    found = traffic(TWO, [send("permute" if len(group) == 4 else "all-gather", len(group))], lambda axes: [group])
    each = S if len(group) == 4 else 2 * S
    assert found.network == {0: each, 1: each}
    assert found.local[0, 0] == each


def test_an_ultraserver_is_joined_by_links():
    found = traffic(Topology("trn2-ultraserver"), [send("all-reduce", 4, axis="dp")], mesh(dp=4, tp=64))
    assert found.network == {} and {link.axis for _, link in found.links} == {"z"}


# -- what is not known, and errors --------------------------------------------------------------------


def test_groups_that_are_not_known_are_named_and_not_counted():
    found = traffic(NODE, [send("all-reduce", 2)], mesh(dp=4, tp=8))
    assert found.links == {} and len(found.unplaced) == 1
    assert "without 1 whose groups are not known (1.00 KiB that each core sends)" in str(found)


def test_groups_that_are_too_small_or_outside():
    with pytest.raises(ValueError, match=r"among 16 ranks, but groups\(\('tp',\)\) gives a group of 8"):
        traffic(NODE, [send("all-reduce", 16)], mesh(dp=4, tp=8))
    with pytest.raises(ValueError, match=r"rank 63 .* not one of the 32 cores .*take more nodes"):
        traffic(NODE, [send("all-reduce", 64)], mesh(tp=64))
    with pytest.raises(ValueError, match=r"'gossip' is no collective that is known; it must be one of all-reduce, .*all-to-all"):
        traffic(NODE, [send("gossip", 8)], mesh(dp=4, tp=8))


def test_a_network_without_a_documented_bandwidth():
    found = traffic(Topology("trn2.3xlarge", nodes=2), [send("all-reduce", 8)], mesh(tp=8))
    assert math.isinf(found.network_seconds)
    assert [row.seconds for row in found.table() if row.kind == "EFA"] == [None, None]


# -- shown ---------------------------------------------------------------------------------------------


def test_the_busiest_wire_comes_first_and_all_is_plain_data():
    found = traffic(TWO, [send("all-reduce", 64, 2**20)], mesh(tp=64))
    seconds = [row.seconds for row in found.table()]
    assert seconds == sorted(seconds, reverse=True)
    assert "host 0" in str(found.table().all()) and "link 0-1" in str(found.table().all())
    assert "<table" in found._repr_html_()
    assert json.dumps(plain(found)) and json.loads(found.table().to_json())[0]["bytes"] > 0


def test_the_constant_of_the_wires_is_what_the_documented_sample_says():
    """nccom-test: an all-reduce of 1 GB among 64 ranks of two instances takes 41,806 us."""
    found = traffic(TWO, [send("all-reduce", 64, 1e9)], mesh(tp=64))
    full = found.link_seconds + found.network_seconds
    assert full == pytest.approx(30.2e-3, rel=0.01)
    assert full / 41.806e-3 == pytest.approx(DOCUMENTED.wire, abs=0.005)
