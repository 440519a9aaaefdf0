"""Model files: programs, facts and weights in one zip that a process without the model's code opens.

`torch.jit.load` opens it, too: it is a TorchScript archive of a small module that says what to call, with these members beside it:

    nxd_jax/model.json                      version, kind, facts of all programs; size and checksum of every member
    nxd_jax/programs/K.FORM.stablehlo       program K in a form of `exporting.FORMS`, as `jax.export` serializes it
    nxd_jax/initial.safetensors             what states begin with, and weights that no checkpoint holds
    nxd_jax/weights/tpR_sharded_checkpoint.safetensors      rank R's weights; those that all ranks share are in rank 0's only

Nothing is pickled but torch's own empty module.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib

from torch_bridge import _compat
from torch_bridge.aot import exporting, facts, safetensors
from torch_bridge.aot.facts import Initial
from torch_bridge.aot.model import Program
from torch_bridge.aot.script_files import FOLDER, MODEL

VERSION = 1
ALIGNMENT = 64
"""Bytes: where tensors begin in the file, so that they can be used where they are mapped."""
_LOCAL_HEADER, _ZIP64, _PADDING = 30, 20, 0xD935
_INITIAL = f"{FOLDER}/initial.safetensors"


class DamagedModelError(ValueError):
    """A model file that cannot be read, or is none. `torch.jit.load` raises RuntimeError for those."""


class _Stub(torch.nn.Module):
    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Says what to call."""
        raise RuntimeError(
            "this file holds a model that was traced with nxd_jax: import neuronx_distributed before torch.jit.load, or call "
            "neuronx_distributed.trace.NxDModel.load"
        )


def save(
    path: str | os.PathLike[str],
    kind: str,
    programs: Mapping[str, Program],
    weights: Sequence[Mapping[str, torch.Tensor]] | None = None,
    extra: Mapping[str, Any] | None = None,
    texts: Mapping[str, str | bytes] | None = None,
) -> None:
    """Write a model file; an older one stays until the new one is whole.

    kind: who loads it (`Opened.kind`). weights: each rank's. extra: plain values for whoever loads it. texts: what `torch.jit.load` gives for `_extra_files`.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {target.parent} for {target.name} does not exist")
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        with torch.no_grad(), _compat.torchscript():
            torch.jit.save(torch.jit.script(_Stub()), str(unfinished), _extra_files=dict(texts or {}))
        with zipfile.ZipFile(unfinished, "a", zipfile.ZIP_STORED) as archive:
            _write(archive, kind, programs, weights, dict(extra or {}))
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def in_memory(save: Callable[[Path], None]) -> bytes:
    """What a function writes to the path that it is given: `torch.jit.save` to a buffer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        save(path)
        return path.read_bytes()


def _write(archive: zipfile.ZipFile, kind: str, programs: Mapping[str, Program], weights: Any, extra: dict[str, Any]) -> None:
    described: list[Any] = []
    for k, (tag, program) in enumerate(programs.items()):
        forms = program.forms.made()
        for form, content in forms.serialized.items():
            archive.writestr(f"{FOLDER}/programs/{k}.{form}.stablehlo", content)
        described.append(
            {
                "tag": tag,
                "facts": facts.to_json(program.facts),
                "forms": list(forms.serialized),
                "missing": forms.missing,
                "initial": [name for name, begins in program.initial.items() if isinstance(begins, torch.Tensor)],
                "initial_of_ranks": {name: sorted(begins) for name, begins in program.initial.items() if isinstance(begins, Mapping)},
            }
        )
    initial: dict[str, torch.Tensor] = {}
    for program in programs.values():
        for name, begins in program.initial.items():
            initial.update({_of_rank(name, r): t for r, t in begins.items()} if isinstance(begins, Mapping) else {name: begins})
    if initial:
        _write_tensors(archive, _INITIAL, initial)
    shared = {t.name for program in programs.values() for t in program.facts.weights if t.shared}
    for rank, own in enumerate(weights or ()):
        _write_tensors(archive, _weights_of(rank), {name: t for name, t in own.items() if rank == 0 or name not in shared})
    members = {i.filename: [i.file_size, i.CRC] for i in archive.infolist() if i.filename.startswith(f"{FOLDER}/")}
    text = {"version": VERSION, "kind": kind, "programs": described, "ranks": len(weights or ()), "extra": extra, "members": members}
    archive.writestr(MODEL, json.dumps(text))


def _weights_of(rank: int) -> str:
    return f"{FOLDER}/weights/{rank_file(rank)}"


def _of_rank(name: str, rank: int) -> str:
    """Under which name a rank's own value is among those that programs begin with."""
    return f"{name} of rank {rank}"


def rank_file(rank: int) -> str:
    """The name of a rank's file of weights."""
    return f"tp{rank}_sharded_checkpoint.safetensors"


def _write_tensors(archive: zipfile.ZipFile, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    unknown = [f"{n} ({t.dtype})" for n, t in tensors.items() if t.dtype not in safetensors.CODES]
    if unknown:
        raise ValueError(f"a model file cannot hold {', '.join(unknown[:4])}: convert the weights before the trace")
    info = zipfile.ZipInfo(name)
    before = archive.fp.tell() + _LOCAL_HEADER + len(name.encode()) + _ZIP64 + 4  # type: ignore[union-attr]
    padding = -before % ALIGNMENT
    info.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as f:
        safetensors.write(f, tensors)


class Opened:
    """A model file's content. kind, extra: as saved. programs: by tag. ranks: of how many ranks it holds weights, 0 for none."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, text: Mapping[str, Any]):
        self._path = path
        self._archive = archive
        self.kind: str = text["kind"]
        self.extra: dict[str, Any] = text["extra"]
        self.ranks: int = int(text["ranks"])
        initial = self._tensors(_INITIAL) if any(p["initial"] or p.get("initial_of_ranks") for p in text["programs"]) else {}
        self.programs: dict[str, Program] = {}
        for k, found in enumerate(text["programs"]):
            forms = {form: archive.read(f"{FOLDER}/programs/{k}.{form}.stablehlo") for form in found["forms"]}
            own: dict[str, Initial] = {name: initial[name].clone() for name in found["initial"]}
            for name, ranks in found.get("initial_of_ranks", {}).items():
                own[name] = {int(r): initial[_of_rank(name, r)].clone() for r in ranks}
            self.programs[found["tag"]] = Program(facts.from_json(found["facts"]), exporting.Forms(forms, found["missing"]), own)

    def weights(self, ranks: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Ranks' weights, mapped to memory. Raises DamagedModelError if their bytes are not those that were written."""
        shared = {t.name for program in self.programs.values() for t in program.facts.weights if t.shared}
        with _said(self._path, _READING):
            wanted = sorted({0, *ranks})
            with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:  # checksums take longest
                found = dict(zip(wanted, pool.map(lambda rank: self._tensors(_weights_of(rank)), wanted), strict=True))
            common = {name: t for name, t in found[0].items() if name in shared}
            return [found[0] if rank == 0 else common | found[rank] for rank in ranks]

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        info = self._archive.getinfo(name)
        with open(self._path, "rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            memory = np.frombuffer(mapped, np.uint8)
            f.seek(info.header_offset)
            fixed = f.read(30)
            if fixed[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
                raise DamagedModelError(f"{name} is not where the archive says")
            start = info.header_offset + 30 + sum(struct.unpack("<HH", fixed[26:30]))
            _populate(mapped, start, info.file_size)
            if isal_zlib.crc32(memory[start : start + info.file_size].data) != info.CRC:  # zlib's own takes five times as long
                raise DamagedModelError(f"the bytes of {name} are not those that were written")
            found = safetensors.entries(f, start, info.file_size)
        return {n: safetensors.tensor(memory, entry) for n, entry in found.items()}


_POPULATE_READ = 22
"""Linux's number of `MADV_POPULATE_READ` (5.14 and later)."""


def _populate(mapped: mmap.mmap, start: int, size: int) -> None:
    """Map all pages of some bytes at once, where the system can: one by one takes as long as a checksum of them."""
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and start + size <= len(mapped):
        with contextlib.suppress(OSError, ValueError):
            mapped.madvise(_POPULATE_READ, begin, start + size - begin)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Opened]:
    """A model file. Raises FileNotFoundError, or DamagedModelError that says what is wrong with it."""
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(f"{target} does not exist" if not target.exists() else f"{target} is no file")
    with _said(target, _READING), zipfile.ZipFile(target) as archive:
        found = Opened(target, archive, _text(archive))
    with zipfile.ZipFile(target) as archive, _said(target):
        found._archive = archive
        yield found


_CONTENT = (DamagedModelError, zipfile.BadZipFile, KeyError, TypeError, IndexError, AttributeError, struct.error)
_READING = (*_CONTENT, ValueError, RuntimeError, NotImplementedError, EOFError, OverflowError, zlib.error)
"""What Python's readers of zip files and JSON raise for bytes that they cannot make sense of."""


@contextlib.contextmanager
def _said(path: Path, kinds: tuple[type[Exception], ...] = _CONTENT) -> Iterator[None]:
    """Say of errors that come from a file's content which file it is."""
    try:
        yield
    except kinds as error:
        if isinstance(error, DamagedModelError) and str(path) in str(error):
            raise
        raise DamagedModelError(f"{path} cannot be opened as a model file: {error}") from error


def _text(archive: zipfile.ZipFile) -> Mapping[str, Any]:
    names = archive.namelist()
    if any(i.header_offset < 0 for i in archive.infolist()):
        raise DamagedModelError("its directory names places before the file's beginning")
    if MODEL not in names:
        script = any(n.endswith("/constants.pkl") for n in names)
        raise DamagedModelError("it is a TorchScript file of another library" if script else f"it has no {MODEL}")
    try:
        text: dict[str, Any] = json.loads(archive.read(MODEL))
    except ValueError as error:
        raise DamagedModelError(f"{MODEL} is no JSON: {error}") from error
    if not isinstance(text, dict) or not isinstance(text.get("version"), int):
        raise DamagedModelError(f"{MODEL} has no version")
    if text["version"] > VERSION:
        raise DamagedModelError(f"it has version {text['version']}, and this release reads up to {VERSION}: install a newer nxd_jax")
    sizes = {i.filename: [i.file_size, i.CRC] for i in archive.infolist()}
    for name, expected in text["members"].items():
        if sizes.get(name) != expected:
            raise DamagedModelError(f"{name} is missing" if name not in sizes else f"{name} is not what was written")
    return text
