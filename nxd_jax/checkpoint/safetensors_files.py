"""Hugging Face folders: config.json and model.safetensors, or several files with model.safetensors.index.json. Read and written one tensor at a time.

    safetensors_files.load_model("Llama-3.2-1B", model, mapping="llama")
    safetensors_files.save_model(model, "out", mapping="llama", config="Llama-3.2-1B/config.json")

Names go through a mapping (`name_maps.resolve`): a name such as "llama", regular expressions, a function. `nxd-ckpt convert` does it without a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nxd_jax.checkpoint import contents, name_maps, reading
from nxd_jax.checkpoint.name_maps import Heads, Made, NameMap
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.checkpoint.targets import Pace, Target, target_of
from nxd_jax.tensor_parallel import full_weights, kv_groups, parallel_groups
from torch_bridge.aot import safetensors
from torch_bridge.mesh import processes, world
from torch_bridge.runtime import executor

MAX_BYTES = 5 * 10**9
"""Bytes of tensors in one file, unless told otherwise: what Hugging Face does."""

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"


class Planned(NamedTuple):
    """A tensor to write; `read` gives its values on the CPU."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


# -- reading -----------------------------------------------------------------------------------------


class Hub:
    """The tensors of a folder, or of one file. Raises FileNotFoundError if there are none, DamagedCheckpointError for a damaged file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.entries: dict[str, safetensors.Entry] = {}
        self.files: dict[str, Path] = {}
        for file in self._files():
            found = _header(file)
            self.entries.update(found)
            self.files.update(dict.fromkeys(found, file))

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        index = self.path / INDEX
        if index.is_file():
            names = sorted(set(_json(index)["weight_map"].values()))
            missing = [n for n in names if not (self.path / n).is_file()]
            if missing:
                raise FileNotFoundError(f"{index} names {len(names)} files, {', '.join(missing[:4])} missing: download the whole folder")
            return [self.path / n for n in names]
        found = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else []
        if not found:
            raise FileNotFoundError(f"{self.path} is no .safetensors file and holds none")
        return found

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says; nothing if there is none."""
        path = (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        return _json(path) if path.is_file() else {}

    def tied(self) -> dict[str, str]:
        """Tensors that are not there because config.json says that they are others: the output projection of tied embeddings."""
        if not self.config.get("tie_word_embeddings"):
            return {}
        inputs = [n for n in self.entries if n.endswith(("embed_tokens.weight", "wte.weight"))]
        return {"lm_head.weight": inputs[0]} if len(inputs) == 1 and "lm_head.weight" not in self.entries else {}

    def read(self, name: str) -> torch.Tensor:
        """A tensor, mapped to memory: writing to it does not change the file."""
        return safetensors.tensor(np.memmap(self.files[name], np.uint8, "c"), self.entries[name])


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return found


def _header(path: Path) -> dict[str, safetensors.Entry]:
    with open(path, "rb") as f:
        try:
            return safetensors.entries(f, 0, path.stat().st_size)
        except ValueError as error:
            raise DamagedCheckpointError(f"{path} is damaged: {error}. Download it again") from error


# -- writing -----------------------------------------------------------------------------------------


def write(
    folder: Path, tensors: Sequence[Planned], max_bytes: int = MAX_BYTES, config: Mapping[str, Any] | None = None, here: bool = True
) -> list[Path]:
    """Write a folder, files of an earlier model replaced. max_bytes: of tensors in a file. config: for config.json. here: whether this process writes; every
    one reads the tensors, one after the other. Returns the files. Raises ValueError for dtypes that the format does not have."""
    unknown = [f"{t.name} ({t.dtype})" for t in tensors if t.dtype not in safetensors.CODES]
    if unknown:
        raise ValueError(f"safetensors files cannot hold {', '.join(unknown[:4])}: convert them first (dtype=)")
    groups = _groups(tensors, max_bytes)
    names = [_ONE] if len(groups) == 1 else [f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" for k in range(len(groups))]
    if here:
        folder.mkdir(parents=True, exist_ok=True)
    for name, group in zip(names, groups, strict=True):
        _write_file(folder / name, group, here)
    if here:
        _finish(folder, names, groups, config)
    return [folder / n for n in names]


def _groups(tensors: Sequence[Planned], max_bytes: int) -> list[list[Planned]]:
    groups: list[list[Planned]] = [[]]
    total = 0
    for t in tensors:
        if groups[-1] and total + t.bytes > max_bytes:
            groups.append([])
            total = 0
        groups[-1].append(t)
        total += t.bytes
    return groups


def _write_file(path: Path, tensors: Sequence[Planned], here: bool) -> None:
    if not here:
        for t in tensors:
            t.read()
        return
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as f:
        f.write(safetensors.header((t.name, t.dtype, t.shape) for t in tensors))
        for t in tensors:
            value = t.read().to(t.dtype).contiguous()
            assert tuple(value.shape) == t.shape
            if value.numel():
                f.write(safetensors.raw(value))
        f.flush()
        os.fsync(f.fileno())
    os.replace(unfinished, path)


def _finish(folder: Path, names: Sequence[str], groups: Sequence[Sequence[Planned]], config: Mapping[str, Any] | None) -> None:
    """The index and config.json; files of an earlier model go."""
    if config:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(names) > 1:
        weights = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
        total = sum(t.bytes for group in groups for t in group)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in names and (old.name == _ONE or old.name.startswith("model-")):
            old.unlink()


def planned(
    made: Iterable[Made], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], read: Callable[[str], torch.Tensor]
) -> list[Planned]:
    """Tensors to write, from what they are made of; shapes are found without values. A source that two are made of in a row is read once."""
    once = Once(read)
    found = []
    for m in made:
        empty = [torch.empty(shapes[s][0], dtype=shapes[s][1], device="meta") for s in m.sources]
        like = m.of(*empty)
        found.append(Planned(m.name, tuple(like.shape), like.dtype, lambda m=m: m.of(*[once(s) for s in m.sources])))  # type: ignore[misc]
    return found


class Once:
    """Keeps the last value read."""

    def __init__(self, read: Callable[[str], torch.Tensor]):
        self._read = read
        self._last: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = name, self._read(name)
        return self._last[1]


# -- models ------------------------------------------------------------------------------------------


def load_model(path: str | os.PathLike[str], model: torch.nn.Module, mapping: Any = None, strict: bool = True) -> None:
    """Fill a model of any layout from a folder or file, in the model's dtypes. All processes must call it.

    mapping: from the folder's names to the model's (`name_maps.resolve`); where K/V heads have copies, "llama" also brings query heads into the ranks' order.
    strict: names must agree. Raises RuntimeError, before anything changes, for names or shapes that differ.
    """
    hub = Hub(path)
    module = contents.unwrapped(model)
    names = name_maps.resolve(mapping, heads_of_model(module, hub.config))
    made = {m.name: m for m in names.from_hub(list(hub.entries))}
    for name, other in hub.tied().items():
        made.setdefault(name, Made(name, (other,)))
    shapes = {name: (e.shape, e.dtype) for name, e in hub.entries.items()}
    ready = {p.name: p for p in planned(made.values(), shapes, hub.read)}
    targets = {name: target_of(name, t) for name, (t, _) in contents.of_model(module, saving=False).tensors.items()}
    known = {id(t.tensor) for t in targets.values() if all(k in ready for k in t.keys)}
    missing = [name for name, t in targets.items() if not all(k in ready for k in t.keys) and id(t.tensor) not in known]
    used = {k for t in targets.values() for k in t.keys}
    unexpected = sorted(n for n in ready if n not in used and n not in hub.tied())
    problems = [p for t in targets.values() for p in _shape_problems(t, ready)]
    if strict:
        problems += [f"missing in the files: {reading.listed(missing)}"] * bool(missing)
        problems += [f"unexpected in the files: {reading.listed(unexpected)}"] * bool(unexpected)
    if problems:
        hint = " strict=False ignores missing and unexpected names" if missing or unexpected else ""
        raise RuntimeError(f"cannot load {hub.path} into {type(module).__name__}: {'; '.join(problems)}. mapping= translates names.{hint}")
    pace = Pace()
    with torch.no_grad():
        for t in targets.values():
            if all(k in ready for k in t.keys):
                t.write(lambda key: ready[key].read())
                pace.add(t.tensor)
    executor.sync()


def _shape_problems(target: Target, ready: Mapping[str, Planned]) -> list[str]:
    if target.where is not None and target.where.apart:
        return [f"{target.keys[0]} is different on each rank: no one value fills it"] if target.keys[0] in ready else []
    return [
        f"{key} has shape {list(ready[key].shape)} in the files, {list(need.shape)} in the model"
        for key, need in target.needs.items()
        if key in ready and ready[key].shape != need.shape
    ]


def save_model(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    mapping: Any = None,
    config: Any = None,
    max_bytes: int = MAX_BYTES,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write a model's full weights as a Hugging Face folder; returns the files. All processes must call it; the first one writes.

    mapping: from the model's names to the folder's. config: for config.json: a dict, a configuration of transformers or the path of a config.json; default the
    model's `config`. max_bytes: in one file. dtype: of floating-point tensors, default the model's. Tied weights are written once.
    """
    module = contents.unwrapped(model)
    described = _config(config if config is not None else getattr(module, "config", None))
    names = name_maps.resolve(mapping, heads_of_model(module, described))
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    owners: dict[str, tuple[torch.Tensor, int]] = {}
    seen: set[int] = set()
    for name, (t, _) in contents.of_model(module).tensors.items():
        if id(t) in seen:
            continue
        seen.add(id(t))
        target = target_of(name, t)
        if target.where is not None and target.where.apart:
            raise ValueError(
                f"{name} is different on each rank: a Hugging Face folder holds one value of each tensor. nxd.save_checkpoint keeps all"
            )
        for k, key in enumerate(target.keys):
            kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
            shapes[key], owners[key] = (target.needs[key].shape, kind), (t, k)

    gathered = _Gathered()

    def read(key: str) -> torch.Tensor:
        t, k = owners[key]
        full = gathered(t)
        return (full[k] if isinstance(full, tuple) else full).reshape(shapes[key][0]).to(shapes[key][1])

    found = write(Path(folder), planned(names.to_hub(list(shapes)), shapes, read), max_bytes, described, world.process_index() == 0)
    processes.barrier("save_model")
    return found


class _Gathered:
    """The full value of a parameter; the last one is kept, for the parts of fused ones."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, full_weights.Full] | None = None

    def __call__(self, t: torch.Tensor) -> full_weights.Full:
        if self._last is None or self._last[0] is not t:
            self._last = t, full_weights.gather_full(t)
        return self._last[1]


def _config(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if hasattr(config, "to_dict"):
        found: dict[str, Any] = config.to_dict()
        return found
    return dict(config) if isinstance(config, Mapping) else _json(Path(config))


def heads_of_model(module: torch.nn.Module, config: Mapping[str, Any]) -> Heads | None:
    """The heads of a model, with the copies of K and V that its ranks hold. Raises ValueError if there are copies and the configuration says no heads."""
    if not parallel_groups.initialized():
        return name_maps.heads_of(config)
    tp = parallel_groups.size("tp")
    copies = max([1, *(_copies(name, p, tp) for name, p in module.named_parameters())])
    if copies == 1:
        return name_maps.heads_of(config)
    first = sorted(kv_groups.lists())[0]
    found = name_maps.heads_of(config, copies, tp, neighbours=first[1] - first[0] == 1 and copies < tp)
    if found is None:
        raise ValueError(
            f"{copies} ranks hold each K/V head, so query heads have another order than in Hugging Face's model: config.json (config=) must say "
            "num_attention_heads and num_key_value_heads"
        )
    return found


def _copies(name: str, p: torch.Tensor, tp: int) -> int:
    fused = getattr(p, "qkv_partition", None)
    if fused is not None:
        return int(fused[2])
    return tp // int(getattr(p, "num_partitions", tp)) if name.endswith(("weight_k", "weight_v")) and full_weights.is_shared_out(p) else 1


__all__ = ["MAX_BYTES", "Hub", "NameMap", "Planned", "load_model", "save_model", "write"]
