"""Folders with adapters: what is in them, and the files of `save_lora`.

    <lora_save_dir>[/<tag>]/adapter_model.pt                    full tensors, of `save_lora`
    <lora_save_dir>/<tag>[/model]/dp_rank_00_tp_rank_00_pp_rank_00.pt   a tensor parallel rank's own, of NxD's `save_checkpoint`; tensors in one file or many
    <lora_save_dir>/<tag>/model/tensors.json, ...               of `save_checkpoint`
    <lora_save_dir>[/<tag>]/adapter_model.safetensors           Hugging Face PEFT's
    adapter_config.json                                         beside one of them or in `<lora_save_dir>`, if the configuration is not in the file

`READERS` is where checkpoints of other kinds announce themselves.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nxd_jax.checkpoint import heads
from nxd_jax.modules.lora import peft_format
from nxd_jax.modules.lora import state as lora_state
from nxd_jax.modules.lora.config import LoraConfig
from nxd_jax.modules.lora.folders import CONFIG_FILE, Source, read_json, write_config
from nxd_jax.tensor_parallel import parallel_groups, rank_files, rank_states
from torch_bridge.mesh import processes, world
from torch_bridge.runtime import whole_files

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CONFIG_FILE", "MODEL_FILE", "READERS", "Source", "at", "config_of", "find", "read_json", "write", "write_config"]

logger = logging.getLogger("nxd_jax")

MODEL_FILE = "adapter_model.pt"
_DEFAULT_DIR = "lora_adapter"


READERS: list[Callable[[str], Source | None]] = []
"""Called with a folder, each returns what it finds there, or None. The last one added is asked first."""


def find(directory: str, tag: str | None) -> Source:
    """The adapters in `<directory>/<tag>`; a tag may be given with `/model` or without.

    A configuration that is not with the tensors is looked for in `directory`, then in `lora_adapter`, where it is saved by default. Raises FileNotFoundError,
    saying what is there.
    """
    folders = list(_folders(directory, tag))
    for folder in folders:
        for reader in reversed(READERS):
            source = reader(folder)
            if source is not None:
                return source if source.config is not None else source._replace(config=config_near(folder, directory))
    raise FileNotFoundError(_explain_missing(directory, tag, folders))


def at(path: str | os.PathLike[str]) -> Source:
    """What is in one file, of adapters or of a base model: torch's or safetensors; or in a folder. Raises FileNotFoundError naming it."""
    path = os.fspath(path)
    if os.path.isdir(path):
        return find(path, None)
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no LoRA checkpoint {path}: ckpt_path must be a file with a state dict, or a folder with one that save_lora or PEFT wrote"
        )
    folder, name = os.path.split(path)
    reader = _rank_files if name.startswith("dp_rank_") else _peft_folder if name == peft_format.TENSORS_FILE else None
    source = reader(folder) if reader is not None else None
    if source is None:
        data = peft_format._safetensors().load_file(path) if name.endswith(".safetensors") else _load(path)
        source = Source(path, data.get(lora_state.CONFIG), lambda model: data)
        if not any(".lora_" in name for name in data):
            return source
    return source if source.config is not None else source._replace(config=config_near(folder, folder))


def write(directory: str, tag: str | None, state: dict[str, Any]) -> str:
    """Write a state dict (the same in all processes) as `save_lora` does; the file's path. Waits for all processes."""
    path = os.path.join(directory, tag or "", MODEL_FILE)
    if world.first() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        whole_files.save(state, path)
    processes.barrier("save_lora")
    return path


def config_of(values: Any, where: str) -> LoraConfig:
    """The configuration in a checkpoint, which may be a `LoraConfig`, its fields or PEFT's. Unknown fields (of other releases) are left out with a warning."""
    if isinstance(values, LoraConfig):
        return values
    if peft_format.is_peft(values):
        return peft_format.config_from_peft(values)
    fields = {f.name for f in dataclasses.fields(LoraConfig)} | {"r"}
    unknown = sorted(set(values) - fields)
    if unknown:
        logger.warning("LoRA configuration of %s: unknown fields %s are ignored", where, ", ".join(unknown))
    return LoraConfig.from_dict({k: v for k, v in values.items() if k in fields})


# -- where -------------------------------------------------------------------------------------------


def _folders(directory: str, tag: str | None) -> Iterator[str]:
    """Folders that a tag may mean."""
    base = (tag or "").replace("\\", "/").strip("/").removesuffix("/model")
    yield os.path.join(directory, base) if base else directory
    yield os.path.join(directory, base, "model") if base else os.path.join(directory, "model")


def config_near(folder: str, directory: str) -> dict[str, Any] | None:
    """The configuration beside adapters in a folder, or in one around it; None if there is none."""
    for place in dict.fromkeys((folder, os.path.dirname(folder), directory, _DEFAULT_DIR)):
        path = os.path.join(place, CONFIG_FILE)
        if os.path.isfile(path):
            logger.info("LoRA configuration: %s", path)
            return read_json(path)
    return None


def _explain_missing(directory: str, tag: str | None, folders: list[str]) -> str:
    looked = (
        f"no LoRA checkpoint in {' or '.join(folders)}: expected {MODEL_FILE}, adapter_model.safetensors or {_rank_file(world.first())}"
    )
    if not os.path.isdir(directory):
        return f"{looked}. There is no directory {directory}: set lora_save_dir"
    inside = next((f for f in folders if os.path.isdir(f)), directory)
    there = sorted(os.listdir(inside))
    listed = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
    return f"{looked}. {inside} has {listed or 'no files'}" + ("" if tag else ": is one of them the tag, lora_load_tag?")


# -- readers -----------------------------------------------------------------------------------------


def _single_file(folder: str) -> Source | None:
    path = os.path.join(folder, MODEL_FILE)
    if not os.path.isfile(path):
        return None
    data = _load(path)
    return Source(path, data.get(lora_state.CONFIG), lambda model: data)


def _rank_file(rank: int) -> str:
    tp, pp = (parallel_groups.places(kind)[rank] if parallel_groups.initialized() else 0 for kind in ("tp", "pp"))
    return f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def _rank_files(folder: str) -> Source | None:
    """NxD's files, one for each tensor parallel rank. Those with full tensors are all alike, so that any number of ranks can take the first."""
    hosted = world.current().hosted
    first = os.path.join(folder, "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    own = {r: os.path.join(folder, _rank_file(r)) for r in hosted}
    if not os.path.isfile(first):
        return None
    complete = all(os.path.isfile(path) for path in own.values())
    paths = own if complete else dict.fromkeys(hosted, first)
    contents = {path: _load(path) for path in dict.fromkeys(paths.values())}
    states = {r: {k: v for k, v in contents[path].items() if k != lora_state.CONFIG} for r, path in paths.items()}

    def read(model: Any) -> dict[str, Any]:
        known = model.tensors()
        lora_state.groups_of(model.module)
        likes = {}
        for name, value in states[hosted[0]].items():
            parameter = known.get(lora_state.own_name(name, known))
            if parameter is not None and parameter.shape == getattr(value, "shape", None):
                likes[(name,)] = parameter
            elif parameter is not None and isinstance(value, torch.Tensor):  # NxD joins them as ranks hold them
                for state in states.values():
                    state[name] = heads.in_model_order(state[name], parameter)
        return rank_states.merge(states, likes)

    return Source(folder, contents[paths[hosted[0]]].get(lora_state.CONFIG), read)


def _load(path: str) -> dict[str, Any]:
    """The state dict in a file, on the CPU. Only tensors, plain data and `LoraConfig`s are read: nothing in the file is run."""
    names: list[Any] = [LoraConfig, (LoraConfig, "neuronx_distributed.modules.lora.config.LoraConfig")]
    with torch.serialization.safe_globals(names):
        if os.path.isdir(f"{path}.tensors"):
            data = rank_files.read_xser(path, True, set())
        else:
            data = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a state dict, got {type(data).__name__}")
    inner = data.get("model", data)
    return inner if isinstance(inner, dict) else data


def _peft_folder(folder: str) -> Source | None:
    return peft_format.source(folder)


def _orbax_folder(folder: str) -> Source | None:
    """The model's folder of a tag that `save_checkpoint` wrote."""
    from nxd_jax.checkpoint import orbax_files, reading

    path = Path(folder)
    if not (path / orbax_files.INDEX).is_file():
        return None
    config = reading.Folder(path).objects()["other"].get(lora_state.CONFIG)

    def read(model: nn.Module) -> dict[str, Any]:
        reading.load_model(path, model, False, None)
        return {}

    return Source(folder, config, read)


READERS.extend([_orbax_folder, _peft_folder, _rank_files, _single_file])
