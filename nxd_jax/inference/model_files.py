"""Language models in files: programs, weights, what generation has to know, and the tokenizer; a process without the model's code runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_jax.inference.adapter_slots import Base
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.language_model import About, LanguageModel
from nxd_jax.trace.nxd_model import NxDModel
from torch_bridge.aot.files import DamagedModelError

_FOLDER = "nxd_generate"
_ABOUT = f"{_FOLDER}/model.json"
_TOKENIZER = f"{_FOLDER}/tokenizer/"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def save(model: LanguageModel, path: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None) -> None:
    """Write a model with its weights; an older file stays until the new one is whole. tokenizer: a folder whose tokenizer files go in.

    Raises FileNotFoundError where the folder for the file does not exist.
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.partial")
    described = {"options": model.options.to_json(), "about": dataclasses.asdict(model.about)}
    if model.slots is not None:
        described |= {"base": dataclasses.asdict(model.slots.base), "adapters": model.slots.names}
    try:
        model.nxd_model.save(str(unfinished), save_weights=True)
        with zipfile.ZipFile(unfinished, "a", zipfile.ZIP_STORED) as archive:
            archive.writestr(_ABOUT, json.dumps(described))
            for name in TOKENIZER_FILES if tokenizer is not None else ():
                file = Path(tokenizer) / name  # type: ignore[arg-type]
                if file.is_file():
                    archive.write(file, _TOKENIZER + name)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> LanguageModel:
    """A model of a file, compiled for the devices of this process.

    Raises FileNotFoundError, ValueError for a damaged file or one that `save` did not write.
    """
    found = NxDModel.load(os.fspath(path))
    with zipfile.ZipFile(path) as archive:
        if _ABOUT not in archive.namelist():
            raise ValueError(f"{path} holds a traced model that is no language model: nxd-generate --save writes those")
        try:
            described = _read(json.loads(archive.read(_ABOUT)))
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise DamagedModelError(f"{path} cannot be opened as a language model: {error!r}") from error
    return LanguageModel(found, *described)


def _read(described: dict[str, Any]) -> tuple[InferenceConfig, About, Base | None, dict[str, int] | None]:
    about, base = described["about"], described.get("base")
    if base is not None:
        base = Base(**base | {"sizes": {name: tuple(size) for name, size in base["sizes"].items()}})
    return InferenceConfig.from_json(described["options"]), About(**about | {"end": tuple(about["end"])}), base, described.get("adapters")


@contextlib.contextmanager
def tokenizer_folder(path: str | os.PathLike[str]) -> Iterator[Path | None]:
    """A temporary folder with the tokenizer files of a model file; None if it has none."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if name.startswith(_TOKENIZER) and name.removeprefix(_TOKENIZER) in TOKENIZER_FILES]
        for name in names:
            (Path(folder) / name.removeprefix(_TOKENIZER)).write_bytes(archive.read(name))
        yield Path(folder) if names else None
