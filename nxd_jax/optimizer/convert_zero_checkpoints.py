"""`neuronx_distributed.optimizer.convert_zero_checkpoints` and the command `nxd_convert_zero_checkpoints`: ZeRO-1 states in NxD's files for another number of
data-parallel ranks.

    nxd_convert_zero_checkpoints --input_dir checkpoints/step_100 --output_dir full --convert_to_full
    nxd_convert_zero_checkpoints --input_dir full --output_dir checkpoints/step_100_dp4 --convert_to_sharded --dp_size 4

NxD's options write NxD's names: full rows in `optim/full_tp_rank_TT_pp_rank_PP.pt`, with a file for each tensor where the input has them. `--convert_type` is
this package's: full rows go to `dp_rank_00_...`, as of one data-parallel rank, which NxD loads. Both read either. `nxd.load_checkpoint` loads any number of
ranks without the command, and `nxd-ckpt convert` changes tensor parallelism and formats too; this is for files that go back to NxD.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_jax.checkpoint import original_files, original_states, original_writing
from nxd_jax.checkpoint.full_writing import _rows
from nxd_jax.checkpoint.original_files import File, Rank, is_tensor
from nxd_jax.checkpoint.original_states import MASTER
from nxd_jax.tensor_parallel import expert_states

FULL, SHARDED = "sharded_to_full", "full_to_sharded"
_FULL_FILE = re.compile(r"full_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")


def convert(
    input_dir: str | Path,
    output_dir: str | Path,
    convert_type: str,
    dp_size: int | None = None,
    xser: bool = False,
    full_names: bool = False,
) -> list[Path]:
    """Write a ZeRO-1 optimizer's files for `dp_size` data-parallel ranks; returns them.

    input_dir: a checkpoint with `optim/`, or that folder. output_dir: files go to `optim/` in it, or into it, alike. convert_type: "sharded_to_full"
    (dp_size 1: each tensor-parallel rank's file holds whole rows) or "full_to_sharded", from any number of ranks. xser: with a file for each tensor.
    full_names: with "sharded_to_full", call the files as NxD's command does. Tensor and pipeline parallelism stay.

    Raises ValueError for options that do not fit and states that are not of ZeRO-1, FileNotFoundError without files,
    FileExistsError if `output_dir` has some.
    """
    size = _size(convert_type, dp_size)
    source, target = Path(input_dir), Path(output_dir)
    if (source / "optim").is_dir():
        source, target = source / "optim", target / "optim"
    full, parts = (original_files._names(source, pattern) for pattern in (_FULL_FILE, original_files._TRAINER))
    if full and convert_type == FULL:
        raise ValueError(f"{source} holds {next(iter(full.values())).name}: these are full states already")
    if full and parts:
        raise ValueError(
            f"{source} holds full states and parts ({next(iter(full.values())).name} and {next(iter(parts.values())).name}): keep only one kind there"
        )
    files = {rank: File(path) for rank, path in (full or parts).items()}
    if not files:
        raise FileNotFoundError(f"{source} holds no files such as {Rank().file_name()} or {_full_name(Rank())}")
    original_files._check_complete(files, source, dp=True)
    there = [path for pattern in (_FULL_FILE, original_files._TRAINER) for path in original_files._names(target, pattern).values()]
    if there:
        raise FileExistsError(f"{target} holds {there[0].name} already: give an empty output_dir")
    named = _full_name if full_names and convert_type == FULL else Rank.file_name
    written = []
    for rank, data in _resharded(files, size):
        written.append(target / named(rank))
        original_writing.write(written[-1], data, xser)
    return written


def _full_name(rank: Rank) -> str:
    return f"full_tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:02d}.pt"


def _is_xser(folder: Path) -> bool:
    """Whether a folder of states has a file for each tensor."""
    source = folder / "optim" if (folder / "optim").is_dir() else folder
    return any(source.glob("*.pt.tensors"))


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
        if expert_states.is_combined(row[0].data) and _of_experts(row[0].data):
            raise ValueError(
                f"{row[0].path} is of a model with experts, of which data-parallel ranks have different ones: their rows are not one tensor's. Use nxd-ckpt "
                "convert --to original --zero1 --dp ... --ep ..., which knows them by the model's files beside it"
            )
        for dp in range(size):
            yield Rank(dp, tp, pp), _state(row, dp, size)


def _of_experts(data: Mapping[str, Any]) -> list[int]:
    """The numbers of parameters of experts."""
    return [k for k in data["shape_info"] if k >= data["ep_shape_info_offset"]]


def _state(row: Sequence[File], dp: int, size: int) -> dict[str, Any]:
    """What rank `dp` of `size` keeps, from the files of all ranks that there were."""
    first = row[0].data
    shapes = first["shape_info"]
    made: dict[int, dict[str, Any]] = {}
    for index, shape in shapes.items():
        states = [original_states.state_of(f.data, index, zero=True) for f in row]
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
    kinds = found.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--convert_to_full", action="store_true", help="join the rows of all data-parallel ranks, in files full_tp_rank_...")
    kinds.add_argument(
        "--convert_to_sharded", action="store_true", help="cut full states, or those of any number of ranks, for --dp_size ranks"
    )
    kinds.add_argument("--convert_type", choices=[FULL, SHARDED], help="the same; the first into files dp_rank_00_...")
    found.add_argument("--dp_size", type=int, help="data-parallel ranks to write for")
    found.add_argument("--num_workers", type=int, help="accepted without effect")
    found.add_argument(
        "--use_xser", action="store_true", help="write a file for each tensor (without --convert_type also if the input has them)"
    )
    args = found.parse_args(arguments)
    kind = args.convert_type or (FULL if args.convert_to_full else SHARDED)
    xser = args.use_xser or (args.convert_type is None and _is_xser(Path(args.input_dir)))
    try:
        written = convert(args.input_dir, args.output_dir, kind, args.dp_size, xser, args.convert_to_full)
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"nxd_convert_zero_checkpoints: {error}\n")
        return 2
    sys.stdout.write(f"wrote {len(written)} files to {written[0].parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
