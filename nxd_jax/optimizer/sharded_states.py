"""Files with each rank's part of a ZeRO-1 optimizer's state: `<dir>/optim.dp_rank_DD.tp_rank_TT`, with pipeline stages `.pp_rank_PP` besides."""

from __future__ import annotations

import os
from typing import Any

import torch

from nxd_jax.tensor_parallel import parallel_groups, rank_states
from nxd_jax.tensor_parallel.rank_files import wait
from torch_bridge.mesh import world
from torch_bridge.runtime import executor, whole_files


def save(state: dict[str, Any], directory: str | os.PathLike[str]) -> None:
    """Write what each rank holds of a state dict. All processes must call it."""
    executor.sync()
    os.makedirs(directory, exist_ok=True)
    hosted = list(world.current().hosted)
    for path, own in dict(zip(_paths(directory, hosted), rank_states.split(state, hosted), strict=True)).items():
        whole_files.save(own, path)
    wait("save sharded state")


def load(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """One state dict that stands for what every rank wrote. Raises FileNotFoundError naming the first missing file."""
    hosted = list(world.current().hosted)
    paths = _paths(directory, hosted)
    missing = [p for p in paths if not os.path.isfile(p)]
    if missing:
        raise FileNotFoundError(
            f"no optimizer state {missing[0]} ({len(set(missing))} of {len(set(paths))} files are missing): data- and tensor-parallel sizes must be those it "
            "was saved with. neuronx_distributed's load_checkpoint loads any sizes"
        )
    states = {path: torch.load(path, map_location="cpu", weights_only=False) for path in dict.fromkeys(paths)}
    return rank_states.merge({r: states[p] for r, p in zip(hosted, paths, strict=True)})


def _paths(directory: str | os.PathLike[str], ranks: list[int]) -> list[str]:
    dp, tp, pp, cp = (parallel_groups.places(kind) for kind in ("dp", "tp", "pp", "cp"))
    stages = parallel_groups.size("pp") > 1
    size = parallel_groups.size("cp")
    names = [f"optim.dp_rank_{dp[r] * size + cp[r]:02d}.tp_rank_{tp[r]:02d}" + (f".pp_rank_{pp[r]:02d}" if stages else "") for r in ranks]
    return [os.path.join(directory, name) for name in names]
