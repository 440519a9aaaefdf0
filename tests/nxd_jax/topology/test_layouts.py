"""Groups of ranks, against loops over coordinates, and what the hardware says to them."""

from __future__ import annotations

import itertools

import pytest

from nxd_jax.topology import Topology
from nxd_jax.topology.layouts import sizes

CASES = [
    ("trn1.2xlarge", 1, dict()),
    ("trn1.32xlarge", 1, dict(tp=8)),
    ("trn1.32xlarge", 2, dict(tp=8, pp=4)),
    ("trn1.32xlarge", 2, dict(tp=2, pp=2, cp=4)),
    ("trn1.32xlarge", 1, dict(tp=2, pp=2, cp=2, ep=8)),
    ("trn2.48xlarge", 1, dict(tp=4, cp=2, ep=4)),
    ("trn2.48xlarge", 2, dict(tp=64, pp=2)),
]


@pytest.mark.parametrize(("name", "nodes", "degrees"), CASES)
def test_groups_against_brute_force(name, nodes, degrees):
    t = Topology(name, nodes=nodes)
    tp, pp, cp, ep = (degrees.get(k, 1) for k in ("tp", "pp", "cp", "ep"))
    dp, edp = t.core_count // (tp * pp * cp), t.core_count // (tp * pp * ep)

    def rank(p, d, c, x):
        return ((p * dp + d) * cp + c) * tp + x

    def expert(p, d, e, x):
        return ((p * edp + d) * ep + e) * tp + x

    P, D, C, T, E, X = map(range, (pp, dp, cp, tp, ep, edp))
    assert t.groups(**degrees) == {
        "tp": [[rank(p, d, c, x) for x in T] for p, d, c in itertools.product(P, D, C)],
        "dp": [[rank(p, d, c, x) for d in D] for p, c, x in itertools.product(P, C, T)],
        "pp": [[rank(p, d, c, x) for p in P] for d, c, x in itertools.product(D, C, T)],
        "cp": [[rank(p, d, c, x) for c in C] for p, d, x in itertools.product(P, D, T)],
        "ep": [[expert(p, d, e, x) for e in E] for p, d, x in itertools.product(P, X, T)],
        "edp": [[expert(p, d, e, x) for d in X] for p, e, x in itertools.product(P, E, T)],
    }
    assert sizes(t.core_count, tp, pp, cp, ep) == dict(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, edp=edp)


@pytest.mark.parametrize("layout", ["contiguous", "nxd"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("name", "lnc"), [("trn1.32xlarge", 1), ("trn2.48xlarge", 1), ("trn2.48xlarge", 2)])
def test_every_rank_is_in_one_group_of_each_kind(name, lnc, tp, layout):
    t = Topology(name, nodes=2, lnc=lnc)
    for groups in t.groups(tp=tp, layout=layout).values():
        assert sorted(itertools.chain(*groups)) == list(range(t.core_count))


def test_nxd_strides_tp4_on_whole_trn1_nodes():
    groups = Topology("trn1.32xlarge", nodes=2).groups(tp=4, layout="nxd")
    assert groups["tp"][:2] == [[0, 8, 16, 24], [1, 9, 17, 25]] and groups["tp"][8] == [32, 40, 48, 56]
    assert groups["dp"][0] == [*range(8), *range(32, 40)]
    assert Topology("trn1.32xlarge", visible=range(4)).groups(tp=4, layout="nxd")["tp"] == [[0, 1, 2, 3]]


def test_experts_lie_on_strided_groups_too():
    groups = Topology("trn1.32xlarge").groups(tp=4, pp=2, ep=2, layout="nxd")
    assert groups["tp"][:2] == [[0, 8, 16, 24], [1, 9, 17, 25]]
    assert groups["ep"][0] == [0, 1] and groups["edp"][0] == [0, 2] and groups["pp"][0] == [0, 4]
    assert sorted(itertools.chain(*groups["ep"])) == list(range(32))


@pytest.mark.parametrize(("lnc", "tp", "row"), [(2, 32, 16), (1, 64, 32)])
def test_nxd_pairs_rows_of_a_trn2_node(lnc, tp, row):
    groups = Topology("trn2.48xlarge", lnc=lnc, nodes=2).groups(tp=tp, layout="nxd")
    one, two, three, four = ([*range(i * row, (i + 1) * row)] for i in range(4))
    assert groups["tp"][:2] == [one + four, two + three]
    assert groups["tp"][2] == [r + 4 * row for r in one + four]
    assert groups["dp"][0] == [0, row, 4 * row, 5 * row] and groups["dp"][-1] == [4 * row - 1, 3 * row - 1, 8 * row - 1, 7 * row - 1]


def test_nxd_keeps_ranks_in_order_elsewhere():
    half = Topology("trn2.48xlarge", visible=range(32))
    for t, tp in [(half, 32), (Topology("trn2.48xlarge"), 16), (Topology("trn1.32xlarge"), 8), (Topology("inf2.48xlarge"), 4)]:
        assert t.groups(tp=tp, layout="nxd") == t.groups(tp=tp)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(tp=5), ["invalid implied data parallel degree", "32 cores / (tp 5 * pp 1 * cp 1 = 5)", "NEURON_RT_NUM_CORES"]),
        (dict(tp=64), ["invalid implied data parallel degree", "tp 64"]),
        (dict(tp=8, ep=3), ["invalid implied expert data parallel degree", "ep 3", "divide dp * cp"]),
        (dict(tp=8, dp=2), ["dp=2 is given", "make dp=4"]),
        (dict(tp=0, pp=-1), ["at least 1", "'tp': 0", "'pp': -1"]),
        (dict(layout="ring"), ["layout='ring'", "contiguous, nxd"]),
    ],
)
def test_errors(arguments, words):
    for ask in (Topology("trn1.32xlarge").groups, Topology("trn1.32xlarge").check):
        with pytest.raises(ValueError) as caught:
            ask(**arguments)
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("name", "nodes", "degrees"),
    [
        # layouts of published training runs
        ("trn1.32xlarge", 32, dict(tp=32)),
        ("trn1.32xlarge", 32, dict(tp=32, pp=8, dp=4)),
        ("trn1.32xlarge", 16, dict(tp=8, dp=64)),
        ("trn1.32xlarge", 32, dict(tp=8, pp=4)),
        ("trn1.32xlarge", 16, dict()),
        ("trn1.32xlarge", 1, dict(tp=8)),
        ("trn1.32xlarge", 1, dict(tp=4, layout="nxd")),
        # and those that the documents recommend for Trn2
        ("trn2.48xlarge", 4, dict(tp=4)),
        ("trn2.48xlarge", 1, dict(tp=16)),
        ("trn2.48xlarge", 1, dict(tp=32, layout="nxd")),
        ("trn2.48xlarge", 1, dict(tp=64)),
        ("trn2-ultraserver", 1, dict(tp=64, pp=4)),
        ("trn1.2xlarge", 1, dict(tp=2)),
        ("inf2.48xlarge", 1, dict(tp=24)),
    ],
)
def test_good_layouts_raise_no_warning(name, nodes, degrees):
    assert Topology(name, nodes=nodes).check(**degrees) == []


@pytest.mark.parametrize(
    ("topology", "degrees", "words"),
    [
        (Topology("trn1.32xlarge", visible=range(12)), dict(), "12 workers per node: .* documented counts are 1, 2, 8 or 32"),
        (Topology("trn2.48xlarge", visible=range(2)), dict(), "2 workers per node: .* 1, 4, 16 or 64"),
        (
            Topology("trn1.32xlarge", visible=range(4, 12)),
            dict(),
            "8 cores starting at core 4: .* multiple of N .*here 0 or 8.* fail at run time",
        ),
        (Topology("trn1.2xlarge", nodes=2), dict(), "no EFA, so collectives do not cross nodes"),
        (Topology("trn2.3xlarge", nodes=2), dict(), "documents give this instance no EFA network"),
        (Topology("trn1.32xlarge", nodes=2, visible=range(8)), dict(), "8 of 32 cores on each of 2 nodes: .* all cores of each node only"),
        (Topology("trn1.32xlarge"), dict(tp=4), "adjacent cores need Neuron 2.21 .*layout='nxd'"),
        (Topology("trn1.32xlarge"), dict(tp=16), "only the all-reduce is documented, on cores 0-15 or 16-31.*use tp 1, 2, 8 or 32"),
        (Topology("inf2.24xlarge"), dict(tp=6), "tp 6 is not a degree known to work on inf2; .* 1, 2, 4, 8, 12 or 24"),
        (Topology("trn2.48xlarge", lnc=1), dict(tp=16), "tp 16 is not a degree known to work on trn2 at LNC 1; .*128"),
        (
            Topology("trn1.32xlarge", visible=range(4, 12)),
            dict(tp=8),
            "the tp group .e.g. ranks 0-7.: it starts at core 4, .* reduce-scatter",
        ),
        (Topology("trn2.48xlarge", nodes=2), dict(tp=128), "tp group .*spans 2 nodes, .* network .50 Gbit/s per core., not for NeuronLink"),
        (Topology("trn1.32xlarge", nodes=3), dict(pp=4, tp=8), "pp groups .*different cores on different nodes.* refuses"),
        (Topology("trn2.48xlarge"), dict(tp=4, pp=2), "32 of 32 pp groups .e.g. ranks 0, 32.: its chips .*not wired"),
        (
            Topology("trn1.32xlarge"),
            dict(tp=16),
            "16 of 16 dp groups .e.g. ranks 0, 16.: its chips 0, 8 are not wired to each other; .*JAX",
        ),
        (Topology("trn2.48xlarge"), dict(tp=8, cp=8), "8 of 8 cp groups .*Neuron 2.24"),
        (Topology("trn2.48xlarge"), dict(tp=32), "32 of 32 dp groups .*Neuron 2.24 .*layout='nxd'"),
        (Topology("trn1.32xlarge"), dict(tp=2, pp=4), "8 of 8 dp groups .*groups of 4 ranks on adjacent cores .*8 cores apart"),
        (
            Topology("trn1.32xlarge"),
            dict(tp=2),
            "2 of 2 dp groups .e.g. ranks 0, 2, 4, .*, \\.\\.\\.\\): trn1 does groups of 16 ranks on cores 0-15 or",
        ),
    ],
)
def test_warnings(topology, degrees, words):
    import re

    found = topology.check(**degrees)
    assert any(re.search(words, message) for message in found), found
    assert len(set(found)) == len(found)


def test_expert_groups_are_checked_when_there_are_experts():
    assert not any("edp" in m for m in Topology("trn2.48xlarge").check(tp=32))
    assert any("edp groups" in m for m in Topology("trn2.48xlarge").check(tp=4, ep=8))
