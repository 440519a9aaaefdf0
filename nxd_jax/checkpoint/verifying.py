"""Whether everything of a checkpoint can be read, and whether two checkpoints hold the same values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import full_states, orbax_files, original_files, original_states, reading, writing
from nxd_jax.checkpoint.full_states import HUB, NXD, ORIGINAL, Full, FullState
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.checkpoint.safetensors_files import Hub
from torch_bridge.runtime import transfer

Progress = Callable[[Sequence[Any], str], Iterable[Any]]
_BAD = (DamagedCheckpointError, OSError, ValueError, KeyError, NotImplementedError)


@dataclasses.dataclass
class Report:
    """problems: what is wrong. notes: what to know. odd: by tensor, how many values are infinite or not numbers. read: tensors that were."""

    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    odd: dict[str, int] = dataclasses.field(default_factory=dict)
    read: int = 0

    def check(self, name: str, get: Callable[[], torch.Tensor], shape: Sequence[int] | None = None) -> None:
        """Read a tensor."""
        try:
            value = get()
            if shape is not None and list(value.shape) != list(shape):
                self.problems.append(f"{name} has shape {list(value.shape)}, the index says {list(shape)}")
            self.read += 1
            if value.is_floating_point():
                count = int((~torch.isfinite(value.float())).sum())
                if count:
                    self.odd[name] = count
        except _BAD as error:
            self.problems.append(f"{name}: {_first_line(error)}")


def verify(folder: Path, progress: Progress, trust: bool = False) -> Report:
    """Read everything that a checkpoint holds, tensor by tensor."""
    report = Report()
    kind = full_states.format_of(folder)
    try:
        if kind == NXD:
            _verify_nxd(folder, report, progress)
        elif kind == ORIGINAL:
            _verify_original(folder, report, progress, trust)
        elif kind == HUB:
            hub = Hub(folder)
            for name in progress(list(hub.entries), "reading"):
                report.check(name, functools.partial(hub.read, name))
        else:
            report.problems.append(f"{folder} holds no checkpoint of a known format")
    except _BAD as error:
        report.problems.append(_first_line(error))
    for name in full_states.COPIED if kind != HUB else ():
        if (folder / name).is_file():
            _check_object(folder / name, report, trust)
    if kind != HUB:
        _check_random(folder, report)
    return report


def _check_random(folder: Path, report: Report) -> None:
    """The random states: a file for each process that saved, if `save_checkpoint` did and did not leave out how many there were."""
    place = folder / writing.RANDOM
    found = sorted(place.glob("*.pt"))
    count = _processes(folder)
    if not place.is_dir() and count is None:
        if full_states.format_of(folder) == NXD:
            report.notes.append(f"no random states ({place}): a run that resumes draws numbers of its own. Converted checkpoints have none")
        return
    if not found:
        report.problems.append(f"the random states are missing: {place} {'is empty' if place.is_dir() else 'is not there'}")
    numbers = [f"{k:05d}.pt" for k in range(count if count is not None else 1 + max((_number(p) for p in found), default=-1))]
    missing = [name for name in numbers if not (place / name).is_file()] if found else []
    if missing:
        report.problems.append(
            f"random states of {len(missing)} of {len(numbers)} processes are missing: {', '.join(missing[:4])} in {place}"
        )
    for path in found:
        if not path.stat().st_size:
            report.problems.append(f"{path} is empty")
        else:
            _check_object(path, report, trust=False)


def _processes(folder: Path) -> int | None:
    """How many processes saved, as far as the indices say."""
    parts = [folder / part for part in (writing.MODEL, writing.OPTIMIZER) if (folder / part / orbax_files.INDEX).is_file()]
    with contextlib.suppress(*_BAD):
        return next((int(n) for part in parts if (n := orbax_files.read_index(part).get("processes")) is not None), None)
    return None


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _verify_nxd(folder: Path, report: Report, progress: Progress) -> None:
    for part in (writing.MODEL, writing.OPTIMIZER):
        if not (folder / part).is_dir():
            continue
        own = reading.Folder(folder / part)
        _check_object(own.path / writing.OBJECTS, report, trust=False)
        for name, entry in progress(list(own.entries.items()), f"reading {part}"):
            report.check(f"{part}/{name}", functools.partial(_stored, own, name), entry["stored"])
        report.problems += [
            f"{part}/{alias} stands for {name}, which is not there" for alias, name in own.aliases.items() if name not in own.entries
        ]


def _stored(own: reading.Folder, name: str) -> torch.Tensor:
    return transfer.from_numpy(full_states.stored_array(own, name).copy())


def _check_object(path: Path, report: Report, trust: bool) -> None:
    """Whether a pickled file can be read; without `trust` only as far as no code of it runs."""
    try:
        original_files.load(path, trust)
    except DamagedCheckpointError as error:
        if "trust=True" not in str(error):
            report.problems.append(_first_line(error))


def _verify_original(folder: Path, report: Report, progress: Progress, trust: bool) -> None:
    files = original_files.find(folder, trust)
    every = [*files.model.items(), *files.optimizer.items()]
    for rank, file in progress(every, "reading"):
        try:
            values = {name: v for name, v in _tensors(file.data) if file.holds(v) or not (files.optimizer or _elsewhere(rank, file, v))}
        except _BAD as error:
            report.problems.append(_first_line(error))
            continue
        for name, value in values.items():
            shape = file.describe(value)[0] if file.holds(value) else None
            label = f"{file.path.relative_to(folder)}: {name}"
            report.check(label, functools.partial(file.tensor, value), shape)
    if files.model and not report.problems:
        report.problems += original_states.model_state(files.model).differing()


def _elsewhere(rank: original_files.Rank, file: original_files.File, value: Any) -> bool:
    """Whether the values of a tensor are in the files of the first expert-parallel rank."""
    mark = file.mark(value)
    return rank.ep > 0 and mark is not None and not mark.experts


def _tensors(data: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in nested data, by the keys that lead to them."""
    if original_files.is_tensor(data):
        yield path, data
    elif isinstance(data, (Mapping, list, tuple)):
        for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from _tensors(value, f"{path}.{key}" if path else str(key))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# -- two checkpoints ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Digest:
    """A tensor's shape, dtype and the SHA-256 of its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sha: str


def digest(full: Full) -> Digest:
    """Of a full tensor; a number counts as one row."""
    value = full.read().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
    return Digest(tuple(full.need.shape) or (1,), value.dtype, hashlib.sha256(data).hexdigest())


def checksum(digests: Mapping[str, Digest]) -> str:
    """One SHA-256 for all tensors, the same for every layout and format that holds them."""
    text = "".join(f"{name} {list(d.shape)} {d.dtype} {d.sha}\n" for name, d in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def compare(state: FullState, other: FullState, progress: Progress) -> list[str]:
    """How two checkpoints differ, in the model and, where both have one, the optimizer."""
    problems = _compare("model", state.model, other.model, state, other, progress)
    if state.other is not None and other.other is not None:
        problems += _compare("optimizer", state.optimizer, other.optimizer, None, None, progress)
    return problems


def _compare(
    part: str, a: Mapping[str, Full], b: Mapping[str, Full], left: FullState | None, right: FullState | None, progress: Progress
) -> list[str]:
    known_a = set(a) | (set(left.aliases) if left is not None else set())
    known_b = set(b) | (set(right.aliases) if right is not None else set())
    problems = [f"{part}: {name} is only in the first" for name in sorted(set(a) - known_b)]
    problems += [f"{part}: {name} is only in the second" for name in sorted(set(b) - known_a)]
    for name in progress([n for n in a if n in b], f"comparing {part}"):
        problems += _difference(f"{part}: {name}", a[name], b[name])
    return problems


def _difference(name: str, a: Full, b: Full) -> list[str]:
    try:
        one, two = digest(a), digest(b)
    except _BAD as error:
        return [f"{name}: {_first_line(error)}"]
    if one.shape != two.shape:
        return [f"{name} has shape {list(one.shape)} in the first, {list(two.shape)} in the second"]
    if one.dtype != two.dtype:
        return [f"{name} is {one.dtype} in the first, {two.dtype} in the second"]
    if one.sha == two.sha:
        return []
    x, y = a.read().reshape(-1).double(), b.read().reshape(-1).double()
    return [f"{name} differs in {int((x != y).sum())} of {x.numel()} values, by at most {float((x - y).abs().max()):.3g}"]
