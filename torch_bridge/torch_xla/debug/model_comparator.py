"""`torch_xla.debug.model_comparator`: keep tensors of two runs in files, and compare them."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import torch

from torch_bridge.torch_xla.core import xla_model

_SAVE_DIR = "MODELCMP_SAVEDIR"
_folder: str | None = None
_counts: dict[tuple[Any, str], int] = {}


def configure(save_dir: str | os.PathLike[str] | None) -> None:
    """`model_comparator.configure`: the folder for `save`, which must exist. None: that of MODELCMP_SAVEDIR, or, if it is not set, nothing is kept."""
    global _folder
    _folder = None if save_dir is None else os.fspath(save_dir)
    _counts.clear()


def save(name: str | None, tensor: torch.Tensor, step: int | None = None) -> torch.Tensor:
    """`model_comparator.save`: write a tensor to `<folder>/[step-<step>/]<name>.<k>`, the k-th of that name, on rank 0. Returns the tensor.

    name: None is the caller's file and line.
    """
    folder = _folder or os.environ.get(_SAVE_DIR)
    if folder is None:
        return tensor
    value = tensor.detach().cpu()
    if xla_model.is_master_ordinal():
        caller = sys._getframe(1)
        label = name or f"{os.path.basename(caller.f_code.co_filename)}.l{caller.f_lineno}"
        number = _counts.get((step, label), 0)
        _counts[step, label] = number + 1
        place = pathlib.Path(folder, *([] if step is None else [f"step-{step}"]))
        place.mkdir(exist_ok=True)
        torch.save(value, place / f"{label}.{number}")
    return tensor


def compare(
    save_dir1: str | os.PathLike[str], save_dir2: str | os.PathLike[str], rtol: float = 1e-05, atol: float = 1e-08, max_diffs: int = 25
) -> str:
    """`model_comparator.compare`: what differs between two folders that `save` filled, as text; empty if nothing does."""
    files = [_saved(pathlib.Path(folder)) for folder in (save_dir1, save_dir2)]
    report = ""
    for name in sorted({**files[0], **files[1]}):
        if name not in files[0] or name not in files[1]:
            report += f"Mismatch: {name} not in {save_dir2 if name in files[0] else save_dir1}\n"
        else:
            report += tensor_file_compare(files[0][name], files[1][name], rtol, atol, max_diffs)
    return report


def tensor_file_compare(
    path1: str | os.PathLike[str], path2: str | os.PathLike[str], rtol: float = 1e-05, atol: float = 1e-08, max_diffs: int = 25
) -> str:
    """`model_comparator.tensor_file_compare`: `compare_tensors` of two files."""
    report = compare_tensors(torch.load(path1), torch.load(path2), rtol, atol, max_diffs)
    return f"Changes in {path1}\n" + "".join(f"  {line}\n" for line in report.splitlines()) if report else ""


def compare_tensors(tensor1: torch.Tensor, tensor2: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, max_diffs: int = 25) -> str:
    """`model_comparator.compare_tensors`: a line for each of the first `max_diffs` places where |a - b| > atol + rtol * |b|."""
    if tensor1.shape != tensor2.shape:
        return f"Tensors have different shape: {list(tensor1.shape)} vs. {list(tensor2.shape)}\n"
    a, b = (t.detach().cpu() for t in (tensor1, tensor2))
    wide = torch.promote_types(torch.float64, torch.promote_types(a.dtype, b.dtype))
    places = (~torch.isclose(a.to(wide), b.to(wide), rtol, atol)).nonzero().tolist()
    lines = [f"{place}: {a[tuple(place)].item()} vs. {b[tuple(place)].item()}\n" for place in places[:max_diffs]]
    return "".join(lines) + (f"... and {len(places) - max_diffs} more\n" if len(places) > max_diffs else "")


def _saved(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    return {str(p.relative_to(folder)): p for p in folder.rglob("*.*") if p.is_file() and p.suffix[1:].isdigit()}
