"""Checkpoints of NeMo Megatron on Neuron (neuronx-nemo-megatron) into those of NxD Training's Megatron models.

    python -m nxd_jax.training.converters.nnm --tp 8 --pp 4 --n_layers 32 --nnm_ckpt_path nnm --nxdt_ckpt_path nxdt

It reads `tp_rank_TT_pp_rank_PPP/model_optim_rng.ckpt` of each rank (`mp_rank_TT` with one pipeline rank) and writes `model/` with a file for each tensor, and
the marks of a complete checkpoint. Weights stay as they are; layers, which NeMo counts from 0 on each pipeline rank, get their numbers in the whole model. The
optimizer is left out. (The original: nnm_model_ckpt_to_nxdt_model_ckpt_converter.py.)
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_jax.checkpoint import original_files, original_writing, tags
from nxd_jax.checkpoint.original_files import Rank
from nxd_jax.checkpoint.savers import BEGUN
from nxd_jax.training.converters import arguments, writing

FILE = "model_optim_rng.ckpt"
_LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..*)")


def parser() -> argparse.ArgumentParser:
    """The command line: the original's flags."""
    words = __doc__ or ""
    found = argparse.ArgumentParser(
        prog="nnm",
        description=words.split("\n\n")[0],
        epilog=words.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--tp", type=int, required=True, help="tensor-parallel ranks")
    found.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    found.add_argument("--n_layers", type=int, required=True, help="layers of the whole model")
    found.add_argument("--nnm_ckpt_path", required=True, help="the folder with a folder for each rank")
    found.add_argument(
        "--nxdt_ckpt_path", required=True, help="the folder to write, or NAME_v1, NAME_v2, ... beside it if that holds something"
    )
    parallel = {"type": arguments.truth, "nargs": "?", "const": True, "default": False}
    found.add_argument("--enable_parallel_processing", **parallel, help="accepted: one process copies as fast as the disk allows")  # type: ignore[arg-type]
    found.add_argument("--num_parallel_processes", type=int, help="accepted")
    found.add_argument(
        "--trust", action="store_true", help="read files that hold more than tensors and plain data, as NeMo's do; this runs code in them"
    )
    return found


def convert(source: Path, target: Path, tp: int, pp: int, layers: int, trust: bool = False) -> Path:
    """Convert a checkpoint; returns the folder that was written.

    Raises ValueError for layers that pipeline ranks do not divide, FileNotFoundError naming folders of ranks that are missing.
    """
    if min(tp, pp, layers) < 1 or layers % pp:
        raise ValueError(f"--n_layers {layers} must be a multiple of --pp {pp}, as NeMo has it, and these and --tp {tp} positive")
    files = {Rank(0, t, p): source / _folder(source, t, p, pp) / FILE for t in range(tp) for p in range(pp)}
    _check_ranks(source, files, tp, pp)
    folder = free(target)
    with writing.unfinished(folder.parent) as made:
        for rank, path in writing.progress(list(files.items()), "converting"):
            state = renamed(_state(path, trust), rank.pp * (layers // pp), layers // pp, path)
            original_writing.write(made / writing.MODEL / rank.file_name(), state, xser=True)
        for mark in (BEGUN, tags.DONE):
            (made / mark).write_text("1")
        if folder.is_dir():
            folder.rmdir()
        os.replace(made, folder)
    return folder


def _folder(source: Path, t: int, p: int, pp: int) -> str:
    single = f"mp_rank_{t:02d}"
    return single if pp == 1 and (source / single).is_dir() else f"tp_rank_{t:02d}_pp_rank_{p:03d}"


def _check_ranks(source: Path, files: Mapping[Rank, Path], tp: int, pp: int) -> None:
    missing = [str(path.relative_to(source)) for path in files.values() if not path.is_file()]
    known = {path.parent.name for path in files.values()}
    more = sorted(path.name for path in source.glob("*_rank_*") if path.is_dir() and path.name not in known) if source.is_dir() else []
    problems = [f"{', '.join(missing[:4])} missing ({len(missing)} of {len(files)})"] * bool(missing)
    problems += [f"{', '.join(more[:4])} more than these"] * bool(more)
    if problems:
        raise FileNotFoundError(f"{source} is no checkpoint of --tp {tp} and --pp {pp}: {'; '.join(problems)}")


def _state(path: Path, trust: bool) -> Mapping[str, Any]:
    data = original_files.load(path, trust)
    found = data.get("state_dict") if isinstance(data, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} has no state_dict: it is no checkpoint of NeMo")
    return found


def renamed(state: Mapping[str, Any], first: int, count: int, where: object) -> dict[str, Any]:
    """A rank's tensors by their names in NxD Training. first: the number of its first layer; count: its layers. Raises ValueError for other layers."""
    found = {}
    for name, value in state.items():
        new = name.replace("model.language_model.", "language_model.", 1)
        if match := _LAYER.fullmatch(new):
            if int(match[2]) >= count:
                raise ValueError(f"{where} has {name}, and --n_layers and --pp give each pipeline rank {count} layers, counted from 0")
            new = f"{match[1]}{int(match[2]) + first}{match[3]}"
        found[new] = value
    return found


def free(target: Path) -> Path:
    """The folder itself if it holds nothing, else the first of NAME_v1, NAME_v2, ... that is not there."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    number = 1
    while (found := target.with_name(f"{target.name}_v{number}")).exists():
        number += 1
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its status."""
    args = parser().parse_args(argv)
    try:
        folder = convert(Path(args.nnm_ckpt_path), Path(args.nxdt_ckpt_path), args.tp, args.pp, args.n_layers, args.trust)
    except (OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"nnm: {error}\n")
        return 2
    sys.stdout.write(f"{args.nnm_ckpt_path} (NeMo Megatron) -> {folder} (NxD Training, tp {args.tp}, pp {args.pp}, xser)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
