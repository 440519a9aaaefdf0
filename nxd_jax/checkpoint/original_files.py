"""The files of checkpoints written by NxD itself: their names, and what they hold, tensor by tensor.

<tag>/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt     one for each tensor-parallel rank and stage; with experts also _ep_rank_EE after dp_rank_00
<tag>/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt     with ZeRO-1 one for each data-parallel rank too (rank D is expert-parallel rank D modulo their number);
                                                    with experts and without ZeRO-1 _ep_rank_EE after dp_rank_00
<tag>/scheduler.pt, user_content.pt
<tag>/X.pt, X.pt.info.pt, X.pt.tensors/tensor_N.pt  any of the above as "xser": a file for each tensor; what is not of experts is below ep_rank_00 alone

<dir>/tp_rank_TT_pp_rank_PP[_dp_rank_DD]/checkpoint.pt      older: `parallel_layers.save`, everything in one; or xser without /checkpoint.pt
<dir>/optim.dp_rank_DD.tp_rank_TT                           older: `NeuronZero1Optimizer.save_sharded_state_dict`
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import expert_files
from nxd_jax.checkpoint.orbax_files import INDEX, DamagedCheckpointError
from torch_bridge import nested
from torch_bridge.torch_xla.utils import serialization as xser

_TRAINER = re.compile(r"dp_rank_(?P<dp>\d+)(?:_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_OLDER = re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(?:_dp_rank_(?P<dp>\d+))?")
_OLDER_ZERO = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)(?:\.pp_rank_(?P<pp>\d+))?")

MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_states", "optimizer_state_dict", "optim")
SCHEDULER_KEYS = ("scheduler", "lr_schedulers", "lr_scheduler", "scheduler_state_dict")
"""Where scripts that save with `parallel_layers.save` (Lightning among them) put their states."""

STEP = "step"


@dataclasses.dataclass(frozen=True, order=True)
class Rank:
    """The place of the rank that a file is of."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0

    def file_name(self, experts: bool = False) -> str:
        """The name of its file in `model/` or `optim/`."""
        middle = f"_ep_rank_{self.ep:02d}" if experts else ""
        return f"dp_rank_{self.dp:02d}{middle}_tp_rank_{self.tp:02d}_pp_rank_{self.pp:02d}.pt"

    def __str__(self) -> str:
        return f"dp {self.dp}, tp {self.tp}, pp {self.pp}" + (f", ep {self.ep}" if self.ep else "")


def _rank_of(match: re.Match[str]) -> Rank:
    return Rank(**{k: int(v) for k, v in match.groupdict().items() if v is not None})


class File:
    """A rank's file, read when first asked for; its tensors stay on disk until they are used.

    trust: also read files that hold more than tensors and plain data, which runs the code in them. pick: what of the file is meant.
    """

    def __init__(self, path: Path, trust: bool = True, pick: Callable[[Any], Any] | None = None):
        self.path = path
        self._trust = trust
        self._pick = pick

    @functools.cached_property
    def data(self) -> Any:
        """What the file holds, a `TensorReference` for each tensor with a file of its own. Raises DamagedCheckpointError."""
        found = load(self.path, self._trust)
        return found if self._pick is None else self._pick(found)

    @functools.cached_property
    def _info(self) -> dict[int, Any]:
        path = self.path.with_name(self.path.name + ".info.pt")
        found: dict[int, Any] = load(path, self._trust) if path.is_file() else {}
        return found

    def holds(self, value: object) -> bool:
        """Whether a tensor of `data` is there. (NxD leaves out weights whose master weights are in the optimizer's files.)"""
        return not isinstance(value, xser.TensorReference) or self._tensor_path(value).is_file()

    def tensor(self, value: Any) -> torch.Tensor:
        """A tensor of `data`."""
        if isinstance(value, torch.Tensor):
            return value
        found: torch.Tensor = load(self._tensor_path(value), self._trust)
        return found

    def describe(self, value: object) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a tensor of `data`, without reading its values."""
        known = self._info.get(value.tid) if isinstance(value, xser.TensorReference) else None
        if isinstance(known, Mapping) and isinstance(known.get("dtype"), torch.dtype):
            return tuple(known["shape"]), known["dtype"]
        found = self.tensor(value)
        return tuple(found.shape), found.dtype

    def mark(self, value: object) -> expert_files.Mark | None:
        """What the file says of a tensor's experts; None if it does not."""
        if isinstance(value, xser.TensorReference):
            known = self._info.get(value.tid)
            return expert_files.mark_of(known) if isinstance(known, Mapping) else None
        return expert_files.mark_of(getattr(value, "__dict__", {}))

    def whole(self) -> Any:
        """`data` with all tensors in place."""
        references = nested.collect(self.data, _is_reference)
        return nested.replace(self.data, _is_reference, [self.tensor(r) for r in references])

    def _tensor_path(self, reference: xser.TensorReference) -> Path:
        return Path(xser._get_tensor_file(xser._get_tensors_folder(self.path), reference.tid))


def _is_reference(x: object) -> bool:
    return isinstance(x, xser.TensorReference)


def is_tensor(x: object) -> bool:
    """Whether a value of a file is a tensor, in the file or in one of its own."""
    return isinstance(x, torch.Tensor) or _is_reference(x)


def load(path: Path, trust: bool = True) -> Any:
    """A file of `torch.save`, its tensors mapped to memory where the format allows it. Raises DamagedCheckpointError, naming the file."""
    try:
        return _mapped(path, trust)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is missing. Load another tag") from error
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not trust and "weights_only" in str(error):
            raise DamagedCheckpointError(
                f"{path} holds more than tensors and plain data ({text}): reading it runs code that is in the file. If you know where it comes from, "
                "pass trust=True (--trust)"
            ) from error
        raise DamagedCheckpointError(f"{path} is damaged: {text}. Load another tag") from error


def _mapped(path: Path, trust: bool) -> Any:
    if not path.is_file():
        raise FileNotFoundError(path)
    with torch.serialization.safe_globals([xser.TensorReference]):
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=not trust)


# -- the files of a checkpoint -----------------------------------------------------------------------


@dataclasses.dataclass
class Files:
    """A checkpoint of NxD. model: files by rank (data-parallel rank 0); optimizer: by rank; rest: everything else of an older one's first rank."""

    folder: Path
    model: dict[Rank, File]
    optimizer: dict[Rank, File]
    older: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Of the groups of ranks that wrote it: dp as far as the optimizer's files say."""
        ranks = [*self.model, *self.optimizer]
        return {name: 1 + max(getattr(r, name) for r in ranks) for name in ("tp", "pp", "dp", "ep")}

    def rest(self) -> dict[str, Any]:
        """What an older checkpoint's first file holds besides model, optimizer and scheduler."""
        known = {*MODEL_KEYS, *OPTIMIZER_KEYS, *SCHEDULER_KEYS}
        data = self._first().whole() if self.older and self.model else {}
        return {k: v for k, v in data.items() if k not in known and not isinstance(v, torch.Tensor)}

    def scheduler(self) -> Any:
        """An older checkpoint's scheduler state. Raises FileNotFoundError if it has none."""
        data = self._first().data if self.model else {}
        for key in SCHEDULER_KEYS:
            if key in data:
                return _only(data[key])
        raise FileNotFoundError(
            f"the checkpoint {self.folder} holds no scheduler, only {', '.join(map(str, data))}. Do not pass scheduler="
        )

    def _first(self) -> File:
        return File(self.model[min(self.model)].path)


def is_original(folder: Path) -> bool:
    """Whether a folder is a checkpoint that NxD wrote."""
    if (folder / "model" / INDEX).is_file() or (folder / "optim" / INDEX).is_file() or not folder.is_dir():
        return False
    return any(_names(folder / part, _TRAINER) for part in ("model", "optim")) or is_older(folder)


def is_older(folder: Path) -> bool:
    """Whether a folder holds files of `parallel_layers.save` or of `NeuronZero1Optimizer.save_sharded_state_dict`."""
    return bool(_names(folder, _OLDER) or _names(folder, _OLDER_ZERO))


def find(folder: Path, trust: bool = True) -> Files:
    """The files of a checkpoint. Raises FileNotFoundError if there are none, or some rank's is missing."""
    if any(_names(folder / part, _TRAINER) for part in ("model", "optim")):
        found = Files(folder, _find_part(folder / "model", trust), _find_part(folder / "optim", trust))
    elif is_older(folder):
        found = _find_older(folder, trust)
    else:
        raise FileNotFoundError(
            f"{folder} holds no files of NxD, such as model/{Rank().file_name()} or tp_rank_00_pp_rank_00/checkpoint.pt"
        )
    _check_complete(found.model, folder, dp=False)
    _check_complete(found.optimizer, folder, dp=True)
    _check_same_ranks(found)
    return found


def _find_part(folder: Path, trust: bool) -> dict[Rank, File]:
    return {rank: File(path, trust) for rank, path in _names(folder, _TRAINER).items()}


def _names(folder: Path, pattern: re.Pattern[str]) -> dict[Rank, Path]:
    if not folder.is_dir():
        return {}
    matches = [(m, path) for path in sorted(folder.iterdir()) if (m := pattern.fullmatch(path.name)) is not None]
    return {_rank_of(m): path for m, path in matches}


def _find_older(folder: Path, trust: bool) -> Files:
    paths = {rank: path / "checkpoint.pt" if path.is_dir() else path for rank, path in _names(folder, _OLDER).items()}
    model = {rank: File(path, trust, pick_model) for rank, path in paths.items() if rank.dp == 0}
    optimizer = {rank: File(path, trust) for rank, path in _names(folder, _OLDER_ZERO).items()}
    first = File(paths[min(paths)], trust).data if paths else {}
    key = next((k for k in OPTIMIZER_KEYS if isinstance(first, Mapping) and k in first), None)
    if not optimizer and key is not None:
        zero = _is_zero(_only(first[key]))
        optimizer = {rank: File(path, trust, lambda data: _only(data[key])) for rank, path in paths.items() if zero or rank.dp == 0}
    return Files(folder, model, optimizer, older=True)


def pick_model(data: object) -> Any:
    """The model's state in what a script saved: under a name that scripts use, or all of it."""
    found = next((data[k] for k in MODEL_KEYS if isinstance(data, Mapping) and isinstance(data.get(k), Mapping)), data)
    if not isinstance(found, Mapping) or not any(is_tensor(v) for v in found.values()):
        keys = ", ".join(map(str, list(data)[:8])) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(
            f"no state of a model under {', '.join(MODEL_KEYS)}; there is {keys}: parallel_layers.load(path, model, model_key=...) takes any key"
        )
    return found


def _only(states: object) -> Any:
    """The state of the only optimizer or scheduler (Lightning has lists)."""
    return states[0] if isinstance(states, (list, tuple)) and len(states) == 1 else states


def _is_zero(state: object) -> bool:
    return isinstance(state, Mapping) and "base_state" in state and "shape_info" in state


def _check_complete(files: Mapping[Rank, File], folder: Path, dp: bool) -> None:
    if not files:
        return
    sizes = {name: 1 + max(getattr(r, name) for r in files) for name in ("dp", "tp", "pp", "ep")}
    needed = [
        Rank(d, t, p, e)
        for d in range(sizes["dp"] if dp else 1)
        for t in range(sizes["tp"])
        for p in range(sizes["pp"])
        for e in range(sizes["ep"])
    ]
    path = files[min(files)].path
    if sizes["ep"] == 1 and "_ep_rank_" in path.name:
        raise FileNotFoundError(
            f"{folder} has files of expert-parallel rank 0 alone ({path.parent.name}/{path.name}), and there were several ranks, or they would not be called "
            "so: copy the files of all nodes into one folder"
        )
    missing = [r for r in needed if r not in files]
    if missing:
        name = missing[0].file_name(sizes["ep"] > 1)
        place = f", {path.parent.name}/{name}" if _TRAINER.fullmatch(path.name) else ""
        raise FileNotFoundError(
            f"{folder} has files of {len(files)} ranks out of {len(needed)}: that of {missing[0]} is missing{place} ({len(missing)} are). Copy the files of "
            "all nodes into one folder"
        )


def _check_same_ranks(files: Files) -> None:
    """The model's and the optimizer's files must be of the same tensor-, pipeline- and (where both say so) expert-parallel ranks."""
    if not files.model or not files.optimizer:
        return
    ep, other, dp = (
        1 + max(getattr(r, name) for r in own) for own, name in ((files.model, "ep"), (files.optimizer, "ep"), (files.optimizer, "dp"))
    )
    if other not in (1, ep) or (other == 1 and dp % ep):
        counted = f"{dp} data-parallel ranks, which {ep} do not divide" if other == 1 else f"{other}"
        raise ValueError(
            f"the files in {files.folder} are of different runs, or some are missing: those of the model are of {ep} expert-parallel ranks, those of the "
            f"optimizer of {counted}. Copy the files of all nodes of one run into one folder"
        )
    model, optimizer = ({name: 1 + max(getattr(r, name) for r in own) for name in ("tp", "pp")} for own in (files.model, files.optimizer))
    if model != optimizer:
        said = " and ".join(
            f"those of the {what} of tp {n['tp']}, pp {n['pp']}" for what, n in (("model", model), ("optimizer", optimizer))
        )
        raise ValueError(
            f"the files in {files.folder} are of different runs, or some are missing: {said}. Copy the files of all nodes of one run into one folder"
        )
