"""From what a user says (configuration, sizes, `devices`, `num_nodes`, launcher) to ranks that are laid out."""

from __future__ import annotations

import logging
from typing import Any

from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.lightning.module import NeuronLTModule
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.trainer import building, neuronx_distributed_config
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size", "lnc_size")


def asked(nxd_config: dict[str, Any] | None, **sizes: Any) -> dict[str, Any] | None:
    """The configuration that a strategy was given: as such, or by sizes; None if only defaults. Raises MisconfigurationException if both say different."""
    if nxd_config is not None:
        building.check_config(nxd_config)
        different = [name for name, size in sizes.items() if size not in (1, nxd_config[name])]
        if different:
            said = ", ".join(f"{name}={sizes[name]}, but its nxd_config says {nxd_config[name]}" for name in different)
            raise MisconfigurationException(f"NeuronXLAStrategy was given {said}: leave the sizes out")
        return nxd_config
    return None if all(size == 1 for size in sizes.values()) else neuronx_distributed_config(**sizes)


def prepare(config: dict[str, Any] | None, devices: object, num_nodes: int, module: object) -> None:
    """Lay out the ranks for a Trainer's work.

    Raises MisconfigurationException if strategy and module want different sizes, or the Trainer another number of ranks than were started.
    """
    own = module.nxd_config if isinstance(module, NeuronLTModule) else None
    found = config or own or neuronx_distributed_config()
    if config is not None and own is not None:
        _check_same(config, own)
    set_world(getattr(devices, "asked", None), num_nodes, found)
    building.lay_out(found)


def _check_same(strategy: dict[str, Any], module: dict[str, Any]) -> None:
    different = [name for name in _SIZES if strategy[name] != module[name]]
    if different:
        said = ", ".join(f"{name}={strategy[name]} for the strategy and {module[name]} for the module" for name in different)
        raise MisconfigurationException(
            f"NeuronXLAStrategy and NeuronLTModule have different configurations: {said}. Give both the same nxd_config"
        )


def set_world(asked: int | None, num_nodes: int, config: dict[str, Any]) -> None:
    """Have as many ranks as a Trainer asks for: `asked` on each of `num_nodes` machines; None: as many as there are.

    Raises MisconfigurationException if a launcher started another number, or the configuration's sizes do not divide it.
    """
    current = world.current()
    if asked is None:
        if num_nodes > 1 and current.fixed and current.size != num_nodes * current.local_size:
            raise MisconfigurationException(_mismatch(f"num_nodes={num_nodes}", f"{current.size // current.local_size} machine(s)"))
        return
    count = asked * num_nodes
    if current.size == count:
        return
    if current.fixed:
        raise MisconfigurationException(_mismatch(f"devices={asked}, num_nodes={num_nodes}", f"{current.size} rank(s)"))
    need = config["tensor_parallel_size"] * config["pipeline_parallel_size"]
    need *= max(config["context_parallel_size"], config["expert_parallel_size"])
    if count % need:
        raise MisconfigurationException(
            f"Trainer(devices={asked}, num_nodes={num_nodes}) are {count} ranks, which the parallel sizes do not divide: they take multiples of {need}"
        )
    parallel_groups.destroy()
    world.configure(world.World(count, local_size=asked, fixed=False))


def _mismatch(given: str, started: str) -> str:
    return (
        f"Trainer({given}), but the job has {started}, as torchrun, nxd-run or NEURON_RT_NUM_CORES said: leave devices='auto', or start that many "
        f"({world.KNOB})"
    )


def described() -> str:
    """One line on what runs where."""
    sizes = {
        "tp": parallel_groups.size("tp"),
        "pp": parallel_groups.size("pp"),
        "dp": parallel_groups.size("dp"),
        "cp": parallel_groups.size("cp"),
        "ep": parallel_groups.size("ep"),
    }
    parts = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("tp", "dp"))
    where = "in one process" if world.process_count() == 1 else f"in {world.process_count()} processes"
    return f"NeuronCores: {world.size()} ranks {where}, {parts}"
