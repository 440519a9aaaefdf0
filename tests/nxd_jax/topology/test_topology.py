"""Cores, their numbers and shares, and the mesh."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_jax.topology import Topology, instance

ROOT = Path(__file__).parents[3]
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "lnc", "per_chip", "per_node"),
    [("trn1.32xlarge", None, 2, 32), ("trn2.48xlarge", None, 4, 64), ("trn2.48xlarge", 1, 8, 128), ("inf2.48xlarge", None, 2, 24)],
)
def test_cores_are_numbered_chip_by_chip_and_node_by_node(name, lnc, per_chip, per_node):
    t = Topology(name, nodes=2, lnc=lnc)
    expected = itertools.product(range(2), range(per_node // per_chip), range(per_chip))
    assert [(c.node, c.chip, c.index) for c in t.cores] == list(expected)
    assert [c.rank for c in t.cores] == list(range(2 * per_node)) and t.core_count == 2 * per_node
    assert [c.id for c in t.cores] == list(range(per_node)) * 2


def test_physical_cores():
    assert [c.physical for c in Topology("trn2.3xlarge").cores] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [c.physical for c in Topology("trn2.3xlarge", lnc=1).cores] == [(i,) for i in range(8)]
    assert Topology("trn2.48xlarge").cores[63].physical == (126, 127)


def test_visible_cores_are_the_same_on_every_node():
    t = Topology("trn1.32xlarge", nodes=2, visible=range(8, 16))
    assert (t.core_count, t.cores_per_node) == (16, 8)
    assert [(c.rank, c.node, c.id, c.chip) for c in t.cores][6:10] == [(6, 0, 14, 7), (7, 0, 15, 7), (8, 1, 8, 4), (9, 1, 9, 4)]


def test_an_ultraserver_has_four_nodes():
    t = Topology("trn2-ultraserver", nodes=2)
    assert (t.nodes, t.node_count, t.cores_per_node, t.core_count) == (2, 8, 64, 512)
    assert t.place(255) == (0, 63) and t.place(256 + 64) == (1, 16)


@pytest.mark.parametrize(
    ("name", "lnc", "hbm", "bf16", "fp32", "kind", "target"),
    [
        ("trn1.2xlarge", None, 16, 95, 23.75, "NC_v2", "trn1"),
        ("inf2.24xlarge", None, 16, 95, 23.75, "NC_v2", "inf2"),
        ("trn2.48xlarge", None, 24, 166.75, 45.25, "NC_v3d", "trn2"),
        ("trn2.48xlarge", 2, 24, 166.75, 45.25, "NC_v3d", "trn2"),
        ("trn2.48xlarge", 1, 12, 83.375, 22.625, "NC_v3", "trn2"),
    ],
)
def test_the_share_of_a_core(name, lnc, hbm, bf16, fp32, kind, target):
    t = Topology(name, lnc=lnc)
    assert t.hbm_per_core == hbm * GIB
    assert (t.peak_flops_per_core(), t.peak_flops_per_core("float32")) == (bf16 * 1e12, fp32 * 1e12)
    assert (t.device_kind, t.platform_target) == (kind, target)


def test_bandwidth_shares():
    assert [Topology("trn2.48xlarge", lnc=lnc).efa_gbps_per_core for lnc in (1, 2)] == [25, 50]
    assert Topology("trn2.3xlarge").efa_gbps_per_core is None
    assert Topology("trn2.48xlarge").hbm_bandwidth_per_core == 2.9e12 / 4


def test_a_dtype_without_a_peak():
    with pytest.raises(ValueError, match="Trainium2 has no documented peak for float64; known: .*bfloat16"):
        Topology("trn2.48xlarge").peak_flops_per_core("float64")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"instance": "p5"}, ["no instance is called 'p5'", "trn2.48xlarge"]),
        ({"instance": "trn1.32xlarge", "nodes": 0}, ["nodes=0", "at least 1", "NXD_JAX_NNODES"]),
        ({"instance": "trn1.32xlarge", "lnc": 2}, ["lnc=2 is not possible on trn1.32xlarge", "of 1 physical", "NEURON_LOGICAL_NC_CONFIG"]),
        ({"instance": "trn2.48xlarge", "lnc": 8}, ["lnc=8", "1 or 2"]),
        ({"instance": "trn1.32xlarge", "visible": [0, 2]}, ["contiguous and increasing", "2 follows 0"]),
        ({"instance": "trn1.32xlarge", "visible": [1, 0]}, ["0 follows 1"]),
        ({"instance": "trn1.32xlarge", "visible": [31, 32]}, ["cores 0-31 at LNC 1", "NEURON_RT_VISIBLE_CORES", "NXD_JAX_INSTANCE"]),
        ({"instance": "trn1.32xlarge", "visible": [-1, 0]}, ["cores 0-31"]),
        ({"instance": "trn1.32xlarge", "visible": []}, ["at least one"]),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError) as caught:
        Topology(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_equality_and_repr():
    a, b = Topology("trn2n.48xlarge"), Topology(instance("trn2.48xlarge"), lnc=2)
    assert a == b and hash(a) == hash(b) and a != Topology("trn2.48xlarge", lnc=1) and a != "trn2.48xlarge"
    assert repr(a) == "Topology('trn2.48xlarge', nodes=1, lnc=2: 64 cores)"
    assert repr(Topology("trn1.32xlarge", 2, visible=range(8))) == "Topology('trn1.32xlarge', nodes=2, lnc=1, visible=0-7: 16 cores)"


def _python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_meshes():
    code = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 64)
import numpy as np
from nxd_jax.topology import Topology

def ids(mesh):
    return np.vectorize(lambda d: d.id)(mesh.devices)

t = Topology("trn2.48xlarge")
mesh = t.mesh(tp=4, pp=2, cp=2)
print(dict(mesh.shape), (ids(mesh) == np.arange(64).reshape(2, 4, 2, 4)).all())
print(ids(mesh)[1, 2, 0].tolist() in t.groups(tp=4, pp=2, cp=2)["tp"], ids(mesh)[1, :, 0, 3].tolist() in t.groups(tp=4, pp=2, cp=2)["dp"])
experts = t.expert_mesh(tp=4, pp=2, cp=2, ep=4)
print(dict(experts.shape), ids(experts)[1, 0, :, 3].tolist() in t.groups(tp=4, pp=2, cp=2, ep=4)["ep"])
small = Topology("trn1.2xlarge")
print(ids(small.mesh(tp=2)).tolist(), ids(small.mesh(tp=2, devices=jax.devices()[8:10])).tolist())
for make in (lambda: Topology("trn2.48xlarge", lnc=1).mesh(tp=8), lambda: t.mesh(tp=5), lambda: t.mesh(tp=4, ep=3)):
    try:
        make()
    except ValueError as error:
        print(error)
"""
    shape, lines, experts, small, few, tp, ep = _python(code)
    assert shape == "{'pp': 2, 'dp': 4, 'cp': 2, 'tp': 4} True"
    assert lines == "True True"
    assert experts == "{'pp': 2, 'edp': 2, 'ep': 4, 'tp': 4} True"
    assert small == "[[[[0, 1]]]] [[[[8, 9]]]]"
    assert "128 cores, but there are 64 JAX devices" in few and '"jax_num_cpu_devices", 128' in few and "NXD_JAX_INSTANCE" in few
    assert "invalid implied data parallel degree" in tp and "invalid implied expert data parallel degree" in ep


def test_the_package_needs_no_jax_and_no_torch():
    code = """
import sys
from nxd_jax.topology import Topology, pictures
t = Topology("trn1.32xlarge", nodes=2)
str(t), t.check(tp=8), pictures.html(t, t.groups(tp=8))
print([m for m in ("jax", "torch", "matplotlib") if m in sys.modules])
t.mesh
import jax
print("jax" in sys.modules)
"""
    loaded, control = _python(code)
    assert loaded == "[]" and control == "True"
