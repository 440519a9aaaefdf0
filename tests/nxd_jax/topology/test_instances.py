"""Chips and instances against the numbers of the Neuron documentation."""

from __future__ import annotations

import dataclasses

import pytest

from nxd_jax.topology import INFERENTIA2, INSTANCES, TRAINIUM1, TRAINIUM1N, TRAINIUM2, instance
from nxd_jax.topology.chips import dtype_name

GIB = 2**30

# name: chips, cores at the default LNC, device GiB, vCPUs, host GiB, bf16 TFLOP/s, fp32 TFLOP/s, EFA Gbit/s of a node
TABLE = {
    "trn1.2xlarge": (1, 2, 32, 8, 32, 190, 47.5, 0),
    "trn1.32xlarge": (16, 32, 512, 128, 512, 3040, 760, 800),
    "trn1n.32xlarge": (16, 32, 512, 128, 512, 3040, 760, 1600),
    "trn2.3xlarge": (1, 4, 96, 12, 128, 667, 181, None),
    "trn2.48xlarge": (16, 64, 1536, 192, 2048, 10672, 2896, 3200),
    "trn2u.48xlarge": (16, 64, 1536, 192, 2048, 10672, 2896, 3200),
    "trn2u.48xlarge-ultraserver": (64, 256, 6144, 768, 8192, 42688, 11584, 3200),
    "inf2.xlarge": (1, 2, 32, 4, 16, 190, 47.5, None),
    "inf2.8xlarge": (1, 2, 32, 32, 128, 190, 47.5, None),
    "inf2.24xlarge": (6, 12, 192, 96, 384, 1140, 285, None),
    "inf2.48xlarge": (12, 24, 384, 192, 768, 2280, 570, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_instance_table(name):
    i = instance(name)
    flops = [i.chips * i.chip.peak_flops[d] / 1e12 for d in ("bfloat16", "float32")]
    assert (i.chips, i.core_count(), i.hbm_bytes / GIB, i.vcpus, i.host_memory_bytes / GIB, *flops, i.efa_gbps) == TABLE[name]


def test_the_table_is_whole():
    assert list(INSTANCES) == list(TABLE)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("trn2n.48xlarge", "trn2.48xlarge"),
        ("trn2-ultraserver", "trn2u.48xlarge-ultraserver"),
        ("u-trn2", "trn2u.48xlarge-ultraserver"),
        (" TRN1.32xlarge ", "trn1.32xlarge"),
    ],
)
def test_aliases(alias, name):
    assert instance(alias) is INSTANCES[name]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="no instance is called 'p5.48xlarge'") as caught:
        instance("p5.48xlarge")
    assert all(name in str(caught.value) for name in [*INSTANCES, "trn2n.48xlarge = trn2.48xlarge"])


def test_only_trn2_has_a_choice_of_lnc():
    assert {i.chip.platform_target: (i.lnc_options, i.lnc_default) for i in INSTANCES.values()} == {
        "trn1": ((1,), 1),
        "trn2": ((1, 2), 2),
        "inf2": ((1,), 1),
    }
    assert instance("trn2.48xlarge").core_count(lnc=1) == 128 and instance("trn2.3xlarge").core_count(lnc=1) == 8


@pytest.mark.parametrize("chip", [TRAINIUM1, TRAINIUM1N, INFERENTIA2])
def test_a_v2_chip(chip):
    assert (chip.core_version, chip.physical_cores, chip.hbm_bytes, chip.hbm_bandwidth) == ("v2", 2, 32 * GIB, 820 * GIB)
    assert chip.peak_flops["int8"] == 380e12 and not chip.sparse_peak_flops and chip.z_link_bandwidth is None


def test_trainium2():
    assert TRAINIUM2.hbm_bytes == 103079215104  # `memory_size` of `neuron-ls -j`
    assert TRAINIUM2.peak_flops["float8"] == 1299e12 and TRAINIUM2.sparse_peak_flops["bfloat16"] == 2563e12
    assert TRAINIUM2.sbuf_bytes == 28 * 2**20 and TRAINIUM2.psum_bytes == 2 * 2**20


def test_chips_are_constants():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRAINIUM2.hbm_bytes = 1
    with pytest.raises(TypeError):
        TRAINIUM2.peak_flops["bfloat16"] = 1
    assert len({TRAINIUM1, TRAINIUM1N, TRAINIUM2, INFERENTIA2}) == 4


def test_dtype_names():
    import ml_dtypes
    import numpy as np
    import torch

    same = [torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "bf16", "torch.bfloat16", "bfloat16"]
    assert {dtype_name(d) for d in same} == {"bfloat16"}
    assert dtype_name(torch.float8_e4m3fn) == dtype_name("fp8") == "float8"
    assert dtype_name(np.float32) == dtype_name("fp32") == dtype_name(torch.float) == "float32"
