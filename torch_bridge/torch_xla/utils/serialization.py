"""`torch_xla.utils.serialization`, known as `xser`: a checkpoint whose tensors lie in files of their own, so that saving and loading need
little host memory.

`path` holds the data with a `TensorReference` for each tensor; tensor `i` is `path.tensors/tensor_i.pt`.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.runtime import whole_files
from torch_bridge.torch_xla.core import xla_model as xm


class TensorReference:
    """`xser.TensorReference`: stands for tensor `tid` in the pickled data."""

    def __init__(self, tid: int):
        self.tid = tid

    def __repr__(self) -> str:
        return f"TensorReference({self.tid})"


# Files written here load with the original torch_xla and the other way round, so the pickled path must be this one.
TensorReference.__module__ = "torch_xla.utils.serialization"


def _get_tensors_folder(path: str | os.PathLike[str]) -> str:
    """`xser._get_tensors_folder`: where the tensors of the checkpoint at `path` lie."""
    return os.fspath(path) + ".tensors"


def _get_tensor_file(path: str, tid: int) -> str:
    """`xser._get_tensor_file`: the file of a tensor in that folder."""
    return os.path.join(path, f"tensor_{tid}.pt")


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def save(data: Any, path: str | os.PathLike[str], master_only: bool = True, global_master: bool = False) -> None:
    """`xser.save`: by rank 0 of each host (of the job if `global_master`), or by all ranks, each to a path of its own, if not
    `master_only`.

    CPU tensors stay inside the pickled data; a tensor that occurs twice is stored once. A process that hosts several ranks writes each one's files as
    `xm.save` does.
    """
    from torch_bridge.fsdp import rank_files
    from torch_bridge.recorder import first_rank_files

    writes = not master_only or xm.is_master_ordinal(local=not global_master)
    found = nested.collect(data, _on_xla)
    xm.unlazy(found)
    if not writes:
        return
    parted = nested.replace(data, _on_xla, [TensorReference(i) for i in range(len(found))]), found
    if not master_only and rank_files.needed(data, path):
        rank_files.save(parted, path, _write)
    else:
        with first_rank_files.asked_for(master_only and not rank_files.has_shards(data)):
            _write(parted, path)


def _write(parted: tuple[Any, list[torch.Tensor]], path: str | os.PathLike[str]) -> None:
    """Data with references and the tensors that they are to, in their files."""
    data, tensors = parted
    folder = _get_tensors_folder(path)
    if os.path.isdir(folder):
        shutil.rmtree(folder)
    os.mkdir(folder)
    for tid, t in enumerate(tensors):
        whole_files.save(t.detach().cpu(), _get_tensor_file(folder, tid))
    whole_files.save(data, path)


def load(path: str | os.PathLike[str]) -> Any:
    """`xser.load`: the data, with its tensors on the CPU."""
    folder = _get_tensors_folder(path)
    data = torch.load(path, map_location="cpu", weights_only=False)

    def reference(x: object) -> bool:
        return isinstance(x, TensorReference)

    tensors = [torch.load(_get_tensor_file(folder, r.tid), map_location="cpu") for r in nested.collect(data, reference)]
    return nested.replace(data, reference, tensors)
