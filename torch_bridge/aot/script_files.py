"""`torch.jit.load` of model files: it gives the models that wrote them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable
from typing import IO, Any

import torch

from torch_bridge import _compat

FOLDER = "nxd_jax"
MODEL = f"{FOLDER}/model.json"
_loaders: dict[str, str] = {}


def is_model(file: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Whether a file is one of ours."""
    with contextlib.suppress(OSError, ValueError, NotImplementedError, struct.error, zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
        return MODEL in archive.namelist()
    return False


STUB = "code/__torch__/torch_bridge/aot/files"
"""Where TorchScript keeps the code of the module that stands in our files."""


def is_plain_script(file: str | os.PathLike[str], *extra: str) -> bool:
    """Whether a file is TorchScript that nothing here wrote: neither a model, whole or not, nor with one of these extra files."""
    with contextlib.suppress(OSError, ValueError, NotImplementedError, struct.error, zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        ours = any(n == MODEL or n.startswith(f"{FOLDER}/") or STUB in n or n.endswith(tuple(f"/extra/{e}" for e in extra)) for n in names)
        return not ours and any(n.endswith("/constants.pkl") for n in names)
    return False


def loads(kind: str, loader: str) -> None:
    """Have `torch.jit.load` give what a function makes of files of a kind. loader: "module:function", imported with the first such file; it takes an
    `aot.files.Opened`. Other files are read as ever."""
    _loaders[kind] = loader
    if not hasattr(torch.jit.load, "reads_models"):
        torch.jit.load = _reading(torch.jit.load)


def _reading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def reads(f: Any, map_location: Any = None, _extra_files: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            return (
                read(f, map_location, _extra_files, *args, **kwargs)
                if is_model(f)
                else load(f, map_location, _extra_files, *args, **kwargs)
            )
        start = f.tell()
        ours = is_model(f)
        f.seek(start)
        if not ours:
            return load(f, map_location, _extra_files, *args, **kwargs)
        with tempfile.NamedTemporaryFile(suffix=".pt") as copied:  # weights are mapped from a file
            shutil.copyfileobj(f, copied)
            copied.flush()
            return read(copied.name, map_location, _extra_files, *args, **kwargs)

    def read(path: Any, map_location: Any, _extra_files: dict[str, Any] | None, *args: Any, **kwargs: Any) -> Any:
        from torch_bridge.aot import files

        with files.opened(path) as opened:
            if opened.kind not in _loaders:
                return load(path, map_location, _extra_files, *args, **kwargs)
            if _extra_files:
                with _compat.torchscript():
                    load(path, map_location, _extra_files)
            module, _, name = _loaders[opened.kind].partition(":")
            return getattr(importlib.import_module(module), name)(opened)

    reads.reads_models = True  # type: ignore[attr-defined]
    return reads
