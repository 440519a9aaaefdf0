"""A Hugging Face checkpoint as tensors that are read one at a time: a folder of safetensors or pytorch_model*.bin files, or one torch file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import joining, original_files
from nxd_jax.checkpoint.full_states import HUB, Full, FullState
from nxd_jax.checkpoint.safetensors_files import Hub, planned
from nxd_jax.training.converters.entries import Plan, is_computed

BIN, BIN_INDEX = "pytorch_model*.bin", "pytorch_model.bin.index.json"
_STACKED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.*)\.mlp\.gate\.weight")


@dataclasses.dataclass(frozen=True)
class Source:
    """shapes: of each tensor, with its dtype. read: a tensor's values by name. config: what config.json beside it says."""

    path: Path
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str], torch.Tensor]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def state(self, plan: Plan) -> FullState:
        """The model under NxD Training's names. Raises ValueError naming what is missing, of no use, or of another shape."""
        plan.check_hub({name: shape for name, (shape, _) in self.shapes.items()}, self.path)
        found = FullState(HUB, config=self.config)
        splits = {e.ours: e.split for e in plan.entries}
        for p in planned(plan.from_hub([]), self.shapes, self.read):
            split = splits[p.name]
            need = joining.Need(p.shape, split.dim, split.stride, experts=split.experts)
            found.model[p.name] = Full(need, p.dtype, p.read)
        return found

    def untied(self, head: str = "lm_head.weight", embedding: str = "model.embed_tokens.weight") -> Source:
        """The same without a head that is the embedding. Raises ValueError if it holds other values."""
        if head not in self.shapes or embedding not in self.shapes:
            return self
        if not torch.equal(self.read(head), self.read(embedding)):
            raise ValueError(f"{self.path}: {head} is not {embedding}, and config.json has tie_word_embeddings: true. Set it to false")
        return dataclasses.replace(self, shapes={name: shape for name, shape in self.shapes.items() if name != head})

    def of_files(self) -> Source:
        """The same under the names that files have, of all experts of a layer each by itself; without what follows from the configuration."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        views: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {}
        for name, (shape, dtype) in self.shapes.items():
            for new, view in _as_in_files(name, shape).items():
                like = view(torch.empty(shape, device="meta"))
                shapes[new], views[new] = (tuple(like.shape), dtype), (name, view)
        return dataclasses.replace(self, shapes=shapes, read=lambda name: views[name][1](self.read(views[name][0])))


def _as_in_files(name: str, shape: tuple[int, ...]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What files have of a tensor of transformers' model, by name."""
    if is_computed(name):
        return {}
    if match := _ROUTER.fullmatch(name):
        return {f"{match[1]}.block_sparse_moe.gate.weight": lambda t: t}
    if not (match := _STACKED.fullmatch(name)) or len(shape) != 3:
        return {name: lambda t: t}
    prefix = f"{match[1]}.block_sparse_moe.experts"
    if match[2] == "down_proj":
        return {f"{prefix}.{j}.w2.weight": lambda t, j=j: t[j] for j in range(shape[0])}  # type: ignore[misc]
    kinds = {"w1": 0, "w3": 1}
    return {f"{prefix}.{j}.{kind}.weight": lambda t, j=j, k=k: t[j].chunk(2)[k] for kind, k in kinds.items() for j in range(shape[0])}  # type: ignore[misc]


def of_tensors(tensors: Mapping[str, torch.Tensor], path: Path, config: Mapping[str, Any] | None = None) -> Source:
    """Tensors that are in memory, or mapped to it."""
    return Source(path, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, lambda name: tensors[name], dict(config or {}))


def open_source(path: Path, model_key: str | None = "model", trust: bool = False) -> Source:
    """A folder or a file. model_key: where in a torch file the state dict is, if it is not the whole file. trust: run code that is in torch files.

    Raises FileNotFoundError where there are no weights, DamagedCheckpointError for files that cannot be read.
    """
    if path.is_file() and path.suffix != ".safetensors":
        return of_tensors(_tensors(path, model_key, trust), path, config_in(path.parent)).of_files()
    if path.is_dir() and not any(path.glob("*.safetensors")) and any(path.glob(BIN)):
        return _of_bin(path, trust).of_files()
    if not path.exists():
        raise FileNotFoundError(f"--input_dir {path}: there is no such folder or file")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(
            f"--input_dir {path} holds no weights: neither *.safetensors nor {BIN}. Give a folder of Hugging Face, or a file of torch.save"
        )
    hub = Hub(path)
    return Source(path, {name: (e.shape, e.dtype) for name, e in hub.entries.items()}, hub.read, hub.config).of_files()


def _of_bin(folder: Path, trust: bool) -> Source:
    index = folder / BIN_INDEX
    files = sorted(folder.glob(BIN))
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names {len(names)} files, {', '.join(missing[:4])} missing: download the whole folder")
        files = [folder / name for name in names]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(_tensors(file, None, trust))
    return of_tensors(found, folder, config_in(folder))


def _tensors(file: Path, model_key: str | None, trust: bool) -> dict[str, torch.Tensor]:
    data = original_files.load(file, trust)
    if model_key and isinstance(data, Mapping) and isinstance(data.get(model_key), Mapping):
        data = data[model_key]
    found = {name: t for name, t in data.items() if isinstance(t, torch.Tensor)} if isinstance(data, Mapping) else {}
    if not found:
        keys = ", ".join(map(str, list(data)[:8])) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"{file} holds no state dict, only {keys}: --model_key says under which key it is")
    return found


def config_in(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; nothing if there is none."""
    path = folder / "config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
