"""The accelerator chips as data: what one chip holds, how fast it computes, how fast it talks.

Numbers are those of the Neuron documentation, in bytes, bytes per second and operations per second. `GiB` there is 2**30 bytes and `GB` is
10**9 bytes, as printed. Peaks are dense unless a name says sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
TERA = 10**12

_SAME_PEAK = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "tf32": "tfloat32",
    "fp8": "float8",
    "float8_e4m3": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
}


@dataclass(frozen=True)
class Chip:
    """One accelerator chip (a Neuron device).

    Attributes:
        name: the chip's name, e.g. "Trainium2".
        platform_target: what `torch_neuronx.utils.get_platform_target` says on it: "trn1", "trn2" or "inf2".
        core_version: generation of its NeuronCores: "v2" or "v3".
        physical_cores: NeuronCores on the chip.
        lnc_options: sizes that `NEURON_LOGICAL_NC_CONFIG` may take: physical cores per logical core.
        lnc_default: the one in force when nothing is set.
        hbm_bytes: device memory of the chip, bytes.
        hbm_stacks: HBM stacks that memory is made of.
        hbm_bandwidth: its bandwidth, bytes/s.
        peak_flops: dense peak of the chip by dtype name, operations/s ("tfloat32" is TF32, "float8" any 8-bit float, "int8" integer operations).
        sparse_peak_flops: structured-sparsity peak by dtype name, operations/s; empty where the chip has none.
        sbuf_bytes: on-chip working memory (SBUF) of one physical core, bytes.
        psum_bytes: matrix accumulator memory (PSUM) of one physical core, bytes.
        dma_engines: DMA engines of the chip.
        dma_bandwidth: what they move together, bytes/s.
        collective_cores: cores of the chip that only run collectives (CC-cores).
        neuronlink_version: generation of its chip-to-chip links: "v2" or "v3".
        link_bandwidth: one link to a neighbour on the same node, bytes/s: the documented total of the chip over its number of links. The
            documents do not say whether that total counts one direction or both.
        z_link_bandwidth: one link to a neighbour on another node of an UltraServer, bytes/s; None where the chip has no such links.
    """

    name: str
    platform_target: str
    core_version: str
    physical_cores: int
    lnc_options: tuple[int, ...]
    lnc_default: int
    hbm_bytes: int
    hbm_stacks: int
    hbm_bandwidth: float
    peak_flops: Mapping[str, float] = field(hash=False)
    sparse_peak_flops: Mapping[str, float] = field(hash=False)
    sbuf_bytes: int
    psum_bytes: int
    dma_engines: int
    dma_bandwidth: float
    collective_cores: int
    neuronlink_version: str
    link_bandwidth: float
    z_link_bandwidth: float | None = None


def _peaks(**tera: float) -> Mapping[str, float]:
    return MappingProxyType({dtype: value * TERA for dtype, value in tera.items()})


TRAINIUM1 = Chip(
    name="Trainium1",
    platform_target="trn1",
    core_version="v2",
    physical_cores=2,
    lnc_options=(1,),
    lnc_default=1,
    hbm_bytes=32 * GIB,
    hbm_stacks=2,
    hbm_bandwidth=820 * GIB,
    peak_flops=_peaks(float8=190, bfloat16=190, float16=190, tfloat32=190, float32=47.5, int8=380),
    sparse_peak_flops=_peaks(),
    sbuf_bytes=24 * MIB,
    psum_bytes=2 * MIB,
    dma_engines=32,
    dma_bandwidth=1 * TERA,
    collective_cores=6,
    neuronlink_version="v2",
    link_bandwidth=384 * GB / 4,
)

TRAINIUM1N = replace(TRAINIUM1, name="Trainium1 (trn1n)", link_bandwidth=768 * GB / 4)

INFERENTIA2 = replace(TRAINIUM1, name="Inferentia2", platform_target="inf2", link_bandwidth=192 * GIB / 2)

TRAINIUM2 = Chip(
    name="Trainium2",
    platform_target="trn2",
    core_version="v3",
    physical_cores=8,
    lnc_options=(1, 2),
    lnc_default=2,
    hbm_bytes=96 * GIB,
    hbm_stacks=4,
    hbm_bandwidth=2.9 * TERA,
    peak_flops=_peaks(float8=1299, bfloat16=667, float16=667, tfloat32=667, float32=181),
    sparse_peak_flops=_peaks(float8=2563, bfloat16=2563, float16=2563, tfloat32=2563),
    sbuf_bytes=28 * MIB,
    psum_bytes=2 * MIB,
    dma_engines=128,
    dma_bandwidth=3.5 * TERA,
    collective_cores=16,
    neuronlink_version="v3",
    link_bandwidth=1024 * GB / 4,
    z_link_bandwidth=256 * GB / 2,
)


def dtype_name(dtype: object) -> str:
    """The key of `Chip.peak_flops` for a dtype: `torch.bfloat16`, a NumPy or JAX dtype or scalar type, "bf16", "torch.bfloat16" -> "bfloat16"."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    text = text.rsplit(".", 1)[-1]
    return _SAME_PEAK.get(text, text)
