"""`neuronx_distributed.optimizer.convert_zero_checkpoints` and the command `nxd_convert_zero_checkpoints`: ZeRO-1 states in NxD's files for another number of
data-parallel ranks.

    nxd_convert_zero_checkpoints --input_dir checkpoints/step_100 --output_dir full --convert_type sharded_to_full
    nxd_convert_zero_checkpoints --input_dir full --output_dir checkpoints/step_100_dp4 --convert_type full_to_sharded --dp_size 4

The options are this package's: those of NxD's command are not documented. `nxd.load_checkpoint` loads any number of ranks without it, and `nxd-ckpt
convert` changes tensor parallelism and formats too; this is for files that go back to NxD.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_jax.checkpoint import original_files, original_states, original_writing
from nxd_jax.checkpoint.full_writing import _rows
from nxd_jax.checkpoint.original_files import File, Rank, is_tensor
from nxd_jax.checkpoint.original_states import MASTER

FULL, SHARDED = "sharded_to_full", "full_to_sharded"


def convert(input_dir: str | Path, output_dir: str | Path, convert_type: str, dp_size: int | None = None, xser: bool = False) -> list[Path]:
    """Write a ZeRO-1 optimizer's files for `dp_size` data-parallel ranks; returns them.

    input_dir: a checkpoint with `optim/`, or that folder. output_dir: files go to `optim/` in it, or into it, alike. convert_type: "sharded_to_full"
    (dp_size 1: each tensor-parallel rank's file holds whole rows) or "full_to_sharded". xser: with a file for each tensor. Tensor and pipeline
    parallelism stay.

    Raises ValueError for options that do not fit and states that are not of ZeRO-1, FileNotFoundError without files,
    FileExistsError if `output_dir` has some.
    """
    size = _size(convert_type, dp_size)
    source, target = Path(input_dir), Path(output_dir)
    if (source / "optim").is_dir():
        source, target = source / "optim", target / "optim"
    files = {rank: File(path) for rank, path in original_files._names(source, original_files._TRAINER).items()}
    if not files:
        raise FileNotFoundError(f"{source} holds no files such as {Rank().file_name()}")
    original_files._check_complete(files, source, dp=True)
    there = original_files._names(target, original_files._TRAINER)
    if there:
        raise FileExistsError(f"{target} holds {next(iter(there.values())).name} already: give an empty output_dir")
    written = []
    for rank, data in _resharded(files, size):
        written.append(target / rank.file_name())
        original_writing.write(written[-1], data, xser)
    return written


def _size(convert_type: str, dp_size: int | None) -> int:
    if convert_type not in (FULL, SHARDED):
        raise ValueError(f"convert_type must be {FULL!r} or {SHARDED!r}, got {convert_type!r}")
    if convert_type == FULL:
        if dp_size not in (None, 1):
            raise ValueError(f"dp_size={dp_size}: {FULL} writes whole rows; leave dp_size out, or use {SHARDED}")
        return 1
    if dp_size is None or dp_size < 1:
        raise ValueError(f"{SHARDED} needs dp_size, the number of data-parallel ranks to write for, got {dp_size}")
    return dp_size


def _resharded(files: Mapping[Rank, File], size: int) -> Iterator[tuple[Rank, dict[str, Any]]]:
    """The files to write, with the state in each."""
    for tp, pp in sorted({(r.tp, r.pp) for r in files}):
        row = [files[r] for r in sorted(files) if (r.tp, r.pp) == (tp, pp)]
        if not original_states.is_zero(row[0].data):
            raise ValueError(f"{row[0].path} is not the state of a ZeRO-1 optimizer: there is nothing to join or to cut")
        for dp in range(size):
            yield Rank(dp, tp, pp), _state(row, dp, size)


def _state(row: Sequence[File], dp: int, size: int) -> dict[str, Any]:
    """What rank `dp` of `size` keeps, from the files of all ranks that there were."""
    first = row[0].data
    shapes = first["shape_info"]
    made: dict[int, dict[str, Any]] = {}
    for index, shape in shapes.items():
        states = [original_states._state_of(f, index, zero=True) for f in row]
        for kind, value in states[0].items():
            made.setdefault(index, {})[kind] = _value(row, [s[kind] for s in states], tuple(shape), dp, size) if is_tensor(value) else value
    found = {**first, "base_state": {i: {k: v for k, v in s.items() if k != MASTER} for i, s in made.items() if set(s) - {MASTER}}}
    if first.get("sharded_master_weights"):
        found["sharded_master_weights"] = {i: s[MASTER] for i, s in made.items() if MASTER in s}
    return found


def _value(row: Sequence[File], values: Sequence[Any], shape: tuple[int, ...], dp: int, size: int) -> Any:
    if row[0].describe(values[0])[0] != original_states._piece(shape, len(row)):
        return row[0].tensor(values[0])
    whole = original_states._joined_rows(list(zip(row, values, strict=True)), shape).read()
    return _rows(whole, dp, size).clone()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    found = argparse.ArgumentParser(prog="nxd_convert_zero_checkpoints", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    found.add_argument("--input_dir", required=True, help="a checkpoint with optim/, or that folder")
    found.add_argument("--output_dir", required=True, help="where to write")
    found.add_argument(
        "--convert_type",
        required=True,
        choices=[FULL, SHARDED],
        help="join the rows of all data-parallel ranks, or cut them for --dp_size ranks",
    )
    found.add_argument("--dp_size", type=int, help="data-parallel ranks to write for")
    found.add_argument("--use_xser", action="store_true", help="write a file for each tensor")
    args = found.parse_args(arguments)
    try:
        written = convert(args.input_dir, args.output_dir, args.convert_type, args.dp_size, args.use_xser)
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"nxd_convert_zero_checkpoints: {error}\n")
        return 2
    sys.stdout.write(f"wrote {len(written)} files to {written[0].parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
