"""What the environment variables ask for: which instance, how many nodes, which cores of a node, how cores are paired.

`NXD_JAX_INSTANCE` and `NXD_JAX_NNODES` are our own, set by the launcher; the rest are the Neuron runtime's. A variable that is empty
counts as unset.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nxd_jax.topology.instances import INSTANCES, Instance, instance

FAMILIES: dict[str, tuple[str, ...]] = {
    "trn1": ("trn1.2xlarge", "trn1.32xlarge"),
    "trn1n": ("trn1n.32xlarge",),
    "trn2": ("trn2.3xlarge", "trn2.48xlarge"),
    "inf2": ("inf2.xlarge", "inf2.24xlarge", "inf2.48xlarge"),
}
"""Values of `NEURON_PLATFORM_TARGET_OVERRIDE` and the instances each may stand for, smallest first."""


@dataclass(frozen=True)
class Settings:
    """The arguments of a `Topology`, as the environment gives them."""

    instance: Instance
    nodes: int
    lnc: int | None
    visible: tuple[int, ...] | None


def read(environ: Mapping[str, str]) -> Settings:
    """The topology that `environ` describes; ValueError naming the variable where a value is wrong or two disagree."""
    lnc = _lnc(environ)
    visible, wanted = _cores(environ)
    chosen = _instance(environ, lnc, wanted)
    if lnc is not None and lnc not in chosen.lnc_options:
        raise ValueError(
            f"NEURON_LOGICAL_NC_CONFIG={lnc} is not possible on {chosen.name}: its cores are not combined (only Trn2 has a choice); unset it, "
            "or set NXD_JAX_INSTANCE or NEURON_PLATFORM_TARGET_OVERRIDE to a Trn2 name"
        )
    if wanted > (held := chosen.cores_per_node(lnc)):
        variable = "NEURON_RT_VISIBLE_CORES" if visible else "NEURON_RT_NUM_CORES"
        raise ValueError(
            f"{variable}={environ[variable]} needs {wanted} cores, but a node of {chosen.name} has {held} (LNC {lnc or chosen.lnc_default}); "
            "ask for fewer, choose a larger instance with NXD_JAX_INSTANCE, or more nodes with NXD_JAX_NNODES"
        )
    nodes = _number(environ, "NXD_JAX_NNODES", lowest=1)
    return Settings(chosen, nodes or 1, lnc, visible or (tuple(range(wanted)) if wanted else None))


def parse_cores(text: str) -> tuple[int, ...]:
    """Core ids of a `NEURON_RT_VISIBLE_CORES` value: "3", "0-3", "3,4,5", "3-5,6" -> (3, 4, 5, 6).

    As for the Neuron runtime they have to increase without gaps; ValueError otherwise.
    """
    ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f"NEURON_RT_VISIBLE_CORES={text!r}: {part!r} is no core id and no range; write 3, 0-3, 3,4,5 or 3-5,6")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"NEURON_RT_VISIBLE_CORES={text!r}: the range {part.strip()!r} runs backwards; write {last}-{first}")
        ids += range(first, last + 1)
    require_run(ids, f"NEURON_RT_VISIBLE_CORES={text!r}")
    return tuple(ids)


def require_run(ids: Sequence[int], what: str) -> None:
    """ValueError, opening with `what`, unless the core ids increase by one each."""
    for before, after in itertools.pairwise(ids):
        if after != before + 1:
            raise ValueError(f"{what}: core ids must be contiguous and increasing, but {after} follows {before}")


def _cores(environ: Mapping[str, str]) -> tuple[tuple[int, ...] | None, int]:
    """The visible cores, if named, and how many cores the node needs to have (0: no wish)."""
    text = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if text:
        ids = parse_cores(text)
        return ids, ids[-1] + 1
    return None, _number(environ, "NEURON_RT_NUM_CORES", lowest=0) or 0


def _lnc(environ: Mapping[str, str]) -> int | None:
    """Physical cores per logical core, from the present variable or the older one."""
    new, old = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"
    values = {name: value for name in (new, old) if (value := _number(environ, name, lowest=1)) is not None}
    if len(set(values.values())) > 1:
        raise ValueError(f"{new}={values[new]} and {old}={values[old]} disagree; they mean the same, so unset the older {old}")
    for name, value in values.items():
        if value not in (1, 2):
            raise ValueError(f"{name}={value}: a logical core is made of 1 or 2 physical cores; set 1 or 2")
    return next(iter(values.values()), None)


def _instance(environ: Mapping[str, str], lnc: int | None, wanted: int) -> Instance:
    """The instance that is named, else the smallest one of the wanted family that holds the wanted cores."""
    name = environ.get("NXD_JAX_INSTANCE", "").strip()
    target = environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "").strip().lower()
    if target and target not in FAMILIES:
        raise ValueError(f"NEURON_PLATFORM_TARGET_OVERRIDE={target!r} is not emulated; use one of {', '.join(FAMILIES)}")
    if name:
        found = _named(name)
        if target and found.chip.platform_target != target.removesuffix("n"):
            raise ValueError(
                f"NXD_JAX_INSTANCE={name} carries {found.chip.name}, but NEURON_PLATFORM_TARGET_OVERRIDE={target} asks for another chip; "
                "unset one of them"
            )
        return found
    # Without a target: trn1 as the default of `get_platform_target`, and Trn2 where only that has the cores or the core pairs.
    names = FAMILIES[target] if target else FAMILIES["trn1"] + FAMILIES["trn2"]
    fitting = [i for i in map(INSTANCES.__getitem__, names) if lnc is None or lnc in i.lnc_options] or [INSTANCES[names[-1]]]
    return next((i for i in fitting if wanted <= i.cores_per_node(lnc)), fitting[-1])


def _named(name: str) -> Instance:
    try:
        return instance(name)
    except ValueError as error:
        raise ValueError(f"NXD_JAX_INSTANCE={name}: {error}") from None


def _number(environ: Mapping[str, str], name: str, lowest: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < lowest:
        raise ValueError(f"{name}={text!r} is not a whole number of at least {lowest}")
    return int(text)
