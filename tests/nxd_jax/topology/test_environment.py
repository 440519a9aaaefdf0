"""Topologies from environment variables."""

from __future__ import annotations

import pytest

from nxd_jax.topology import Topology, parse_cores


def made(**variables: object) -> Topology:
    return Topology.from_environment({name: str(value) for name, value in variables.items()})


@pytest.mark.parametrize(
    ("text", "ids"), [("3", (3,)), ("0-3", (0, 1, 2, 3)), ("3,4,5", (3, 4, 5)), ("3-5,6", (3, 4, 5, 6)), (" 8 - 9 , 10 ", (8, 9, 10))]
)
def test_core_lists(text, ids):
    assert parse_cores(text) == ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,2", "contiguous and increasing, but 2 follows 0"),
        ("0-1,3-4", "3 follows 1"),
        ("1,0", "0 follows 1"),
        ("0-2,2", "2 follows 2"),
        ("5-3", "runs backwards; write 3-5"),
        ("0;3", "'0;3' is no core id and no range; write 3, 0-3, 3,4,5 or 3-5,6"),
        ("1,", "'' is no core id"),
        ("-1", "'-1' is no core id"),
    ],
)
def test_bad_core_lists(text, words):
    with pytest.raises(ValueError, match="NEURON_RT_VISIBLE_CORES=") as caught:
        parse_cores(text)
    assert words in str(caught.value)


def test_nothing_set():
    assert made() == Topology("trn1.2xlarge")
    assert made(NEURON_RT_NUM_CORES="", NXD_JAX_INSTANCE=" ", NEURON_RT_VISIBLE_CORES="") == Topology("trn1.2xlarge")


def test_the_process_environment(monkeypatch):
    for name in ("NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    monkeypatch.setenv("NXD_JAX_INSTANCE", "trn2.48xlarge")
    monkeypatch.setenv("NXD_JAX_NNODES", "2")
    assert Topology.from_environment() == Topology("trn2.48xlarge", nodes=2)


@pytest.mark.parametrize(
    ("target", "cores", "name"),
    [
        ("", 2, "trn1.2xlarge"),
        ("", 8, "trn1.32xlarge"),
        ("", 64, "trn2.48xlarge"),
        ("trn1", 0, "trn1.2xlarge"),
        ("trn1", 3, "trn1.32xlarge"),
        ("TRN1N", 2, "trn1n.32xlarge"),
        ("trn2", 4, "trn2.3xlarge"),
        ("trn2", 5, "trn2.48xlarge"),
        ("inf2", 2, "inf2.xlarge"),
        ("inf2", 8, "inf2.24xlarge"),
        ("inf2", 24, "inf2.48xlarge"),
    ],
)
def test_the_smallest_instance_that_holds_the_cores(target, cores, name):
    t = made(NEURON_PLATFORM_TARGET_OVERRIDE=target, NEURON_RT_NUM_CORES=cores)
    assert t.instance.name == name and t.cores_per_node == (cores or t.instance.cores_per_node())


def test_lnc():
    assert made(NEURON_LOGICAL_NC_CONFIG=1, NXD_JAX_INSTANCE="trn2.48xlarge").core_count == 128
    assert made(NEURON_RT_VIRTUAL_CORE_SIZE=1, NXD_JAX_INSTANCE="trn2.3xlarge") == Topology("trn2.3xlarge", lnc=1)
    assert made(NEURON_LOGICAL_NC_CONFIG=2, NEURON_RT_VIRTUAL_CORE_SIZE=2).instance.name == "trn2.3xlarge"
    assert made(NEURON_LOGICAL_NC_CONFIG=1, NEURON_PLATFORM_TARGET_OVERRIDE="trn2", NEURON_RT_NUM_CORES=8).instance.name == "trn2.3xlarge"
    assert made(NEURON_LOGICAL_NC_CONFIG=1) == Topology("trn1.2xlarge")


def test_visible_cores_win_over_their_number():
    t = made(NEURON_RT_VISIBLE_CORES="8-15", NEURON_RT_NUM_CORES=2)
    assert t.instance.name == "trn1.32xlarge" and t.visible == tuple(range(8, 16))
    assert made(NEURON_RT_VISIBLE_CORES="5", NXD_JAX_INSTANCE="trn1.32xlarge").visible == (5,)


def test_a_misaligned_start_warns():
    with pytest.warns(UserWarning, match="NEURON_RT_VISIBLE_CORES: 2 cores starting at core 3: .*here 2 or 4"):
        assert made(NEURON_RT_VISIBLE_CORES="3,4").visible == (3, 4)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NXD_JAX_INSTANCE": "trn9"}, ["NXD_JAX_INSTANCE=trn9", "no instance is called 'trn9'", "trn1.32xlarge"]),
        ({"NXD_JAX_NNODES": "0"}, ["NXD_JAX_NNODES='0'", "at least 1"]),
        ({"NXD_JAX_NNODES": "two"}, ["NXD_JAX_NNODES='two'"]),
        ({"NEURON_RT_NUM_CORES": "-1"}, ["NEURON_RT_NUM_CORES='-1'", "at least 0"]),
        ({"NEURON_RT_NUM_CORES": 65}, ["NEURON_RT_NUM_CORES=65 needs 65 cores", "trn2.48xlarge has 64", "NXD_JAX_NNODES"]),
        ({"NEURON_RT_NUM_CORES": 33, "NXD_JAX_INSTANCE": "trn1.32xlarge"}, ["a node of trn1.32xlarge has 32", "NXD_JAX_INSTANCE"]),
        ({"NEURON_RT_VISIBLE_CORES": "30-40", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}, ["NEURON_RT_VISIBLE_CORES=30-40 needs 41"]),
        ({"NEURON_RT_VISIBLE_CORES": "0,2"}, ["NEURON_RT_VISIBLE_CORES", "contiguous"]),
        ({"NEURON_LOGICAL_NC_CONFIG": "8"}, ["NEURON_LOGICAL_NC_CONFIG=8", "set 1 or 2"]),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "3"}, ["NEURON_RT_VIRTUAL_CORE_SIZE=3", "set 1 or 2"]),
        (
            {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "2"},
            ["CONFIG=1 and", "CORE_SIZE=2 disagree", "unset the older"],
        ),
        ({"NEURON_LOGICAL_NC_CONFIG": "2", "NXD_JAX_INSTANCE": "trn1.32xlarge"}, ["not possible on trn1.32xlarge", "only Trn2"]),
        ({"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}, ["not possible on inf2.48xlarge"]),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, ["'trn3' is not emulated", "trn1, trn1n, trn2, inf2"]),
        (
            {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "NXD_JAX_INSTANCE": "trn1.32xlarge"},
            ["NXD_JAX_INSTANCE=trn1.32xlarge carries Trainium1", "NEURON_PLATFORM_TARGET_OVERRIDE=trn2", "unset one"],
        ),
    ],
)
def test_errors(variables, words):
    with pytest.raises(ValueError) as caught:
        made(**variables)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_agreeing_target_is_fine():
    assert made(NEURON_PLATFORM_TARGET_OVERRIDE="trn1", NXD_JAX_INSTANCE="trn1n.32xlarge").instance.name == "trn1n.32xlarge"
