"""`neuronx_distributed.optimizer.zero_dcp_utils`: a ZeRO-1 optimizer's state dict to a folder and back, by the names of parameters.

NxD's are files of torch.distributed.checkpoint; these are full arrays as in `nxd.save_checkpoint`, `<path>/zero1_optim`, which load with any number of ranks:
`nxd.load_checkpoint(path, "zero1_optim", optimizer=...)` and `nxd-ckpt` read them too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import contents, reading, saving, writing
from nxd_jax.checkpoint.storage import BaseCheckpointStorage, create_checkpoint_storage
from torch_bridge.runtime import executor

TAG = "zero1_optim"


def get_dcp_aux_infos(model: torch.nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """What the functions below need to know of a model and its ZeRO-1 optimizer: `optim_pid_to_params`, `optim_pid_to_pnames` and `shape_info`, by the number
    that a parameter has in the state dict; and both themselves. Raises TypeError for an optimizer without ZeRO-1, ValueError for parameters of another model.
    """
    if not contents.is_zero1(optim):
        raise TypeError(
            f"get_dcp_aux_infos needs a ZeRO-1 optimizer (NeuronZero1Optimizer, or optimizer_config={{'zero_one_enabled': True}}), got "
            f"{type(contents.inner(optim)).__name__}: for others use neuronx_distributed.save_checkpoint(..., model, optimizer)"
        )
    names = contents.names_of(model)
    every = [
        (p, flag)
        for group, own in zip(optim.param_groups, contents.are_experts(optim), strict=True)
        for p, flag in zip(group["params"], own, strict=True)
    ]
    params = dict(enumerate(p for p, _ in sorted(every, key=lambda pair: pair[1])))  # state dicts have experts after all others
    strange = [k for k, p in params.items() if p not in names]
    if strange:
        raise ValueError(
            f"parameters {reading.listed(list(map(str, strange)))} of the optimizer are not of the model: give the model that it trains"
        )
    return {
        "optim_pid_to_params": params,
        "optim_pid_to_pnames": {k: names[p] for k, p in params.items()},
        "shape_info": {k: p.shape for k, p in params.items()},
        "model": model,
        "optimizer": optim,
    }


def save_optim_state_dict(
    path: str | os.PathLike[str], state_dict: Mapping[str, Any], aux_infos: Mapping[str, Any], dedup: bool = False
) -> None:
    """Write `optimizer.state_dict()`, with its tensors on xla or as `move_all_tensor_to_cpu` gives them. An earlier one stays until this one is complete.

    path: a directory, or an address that fsspec knows. aux_infos: `get_dcp_aux_infos(model, optimizer)`. dedup is accepted without effect: what ranks hold
    alike is always stored once. All processes must call it. Raises ValueError for the state dict of another optimizer.
    """
    missing = {"param_groups", "base_state", "shape_info"} - set(state_dict)
    if missing:
        raise ValueError(f"not a ZeRO-1 optimizer's state: it has no {', '.join(sorted(missing))}, only {', '.join(map(str, state_dict))}")
    storage = create_checkpoint_storage(path)
    saving.wait()
    executor.sync()
    optimizer = aux_infos["optimizer"]
    parts = contents.parts_of(optimizer, contents.names_of(aux_infos["model"]))
    state_dict = contents.plain_state(optimizer, state_dict)
    found = contents.of_zero1_state(state_dict, parts, type(contents.stepping(optimizer)).__name__)
    job = saving.Save(storage, TAG)
    job.items[writing.OPTIMIZER] = writing.named_item(found, parts, aux_infos["model"])
    job.start()


def load_optim_state_dict(
    path: str | os.PathLike[str], optimizer: torch.optim.Optimizer, aux_infos: Mapping[str, Any], dedup: bool = False
) -> None:
    """Fill an optimizer from what `save_optim_state_dict` wrote, with any number of ranks. dedup is accepted without effect.

    Raises FileNotFoundError if there is no complete state, NotImplementedError for NxD's own files, ValueError for the state of other parameters.
    """
    storage = create_checkpoint_storage(path)
    _check_theirs(storage)
    folder = saving.fetch(storage, TAG)
    reading.load_optimizer(folder / writing.OPTIMIZER, optimizer, aux_infos["model"])


def _check_theirs(storage: BaseCheckpointStorage) -> None:
    if not storage.file_exists(f"{TAG}/done") and storage.file_exists(".metadata"):
        raise NotImplementedError(
            f"{Path(storage.dirname())} holds files of torch.distributed.checkpoint, as NxD's own zero_dcp_utils writes them; these are not read here. Save "
            "with use_zero1_dcp=False on the machine that has them: those files load"
        )
