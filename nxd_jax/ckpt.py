"""`nxd-ckpt`: look into checkpoints, convert them and check them, without a model, an accelerator or the ranks that wrote them.

    nxd-ckpt inspect checkpoints --tensors
    nxd-ckpt convert checkpoints llama-hf --to safetensors --map llama --config config.json
    nxd-ckpt convert llama-hf checkpoints --to nxd --tag pretrained --map llama
    nxd-ckpt convert trainium_checkpoints checkpoints --to nxd --map llama --config config.json
    nxd-ckpt convert checkpoints trainium_checkpoints --to original --tp 8 --pp 4 --map llama
    nxd-ckpt verify checkpoints --against trainium_checkpoints

A path is a directory of tags, one tag's folder, a Hugging Face folder or a .safetensors file; where tags are, also an address such as s3://bucket/path. Formats
are found out: nxd (`nxd.save_checkpoint` of this package), original (files of NxD on Trainium) and safetensors.

`verify` ends with status 1 if it finds problems; wrong arguments and unreadable checkpoints end with status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch

from nxd_jax._progress import bar
from nxd_jax.checkpoint import (
    full_states,
    full_writing,
    inspecting,
    joining,
    name_maps,
    orbax_files,
    original_files,
    savers,
    stage_rules,
    tags,
    verifying,
)
from nxd_jax.checkpoint.full_states import HUB, NXD, ORIGINAL, FullState, How
from nxd_jax.checkpoint.name_maps import NameMap
from nxd_jax.checkpoint.safetensors_files import MAX_BYTES
from nxd_jax.checkpoint.storage import BaseCheckpointStorage, FilesysCheckpointStorage, create_checkpoint_storage

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MANY = 4
_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""
_SHOWN = 20


class CommandError(Exception):
    """What the command cannot do, for the user to read."""


# -- the command line --------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="nxd-ckpt", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False, epilog="nxd-ckpt COMMAND --help tells more"
    )
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="what there is: tags, sizes, the layout that wrote them, tensors", allow_abbrev=False)
    inspect.add_argument("path", metavar="PATH")
    inspect.add_argument(
        "--tensors",
        action="store_true",
        help="every tensor with its shape, dtype and shards (of the newest complete tag, if --tag names none)",
    )
    inspect.add_argument("--json", action="store_true", help="as JSON")
    convert = commands.add_parser("convert", help="into another format", allow_abbrev=False)
    convert.add_argument("path", metavar="SRC")
    convert.add_argument("target", metavar="DST", help="a directory of tags, or the folder for safetensors")
    convert.add_argument("--to", required=True, choices=[NXD, ORIGINAL, HUB], help="the format to write")
    convert.add_argument("--to-tag", help="the tag to write (default: the one read, else 'converted')")
    convert.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks to write NxD's files for (default 1)")
    convert.add_argument(
        "--dp", type=int, default=1, help="data-parallel ranks that share out the optimizer's state, with --zero1 (default 1)"
    )
    convert.add_argument("--ep", type=int, default=1, help="expert-parallel ranks to write NxD's files for; --dp counts them (default 1)")
    convert.add_argument("--pp", type=int, default=1, help="pipeline ranks to write NxD's files for (default 1)")
    convert.add_argument("--vpp", type=int, default=1, help="stages on each pipeline rank (virtual_pipeline_size; default 1)")
    convert.add_argument(
        "--stage", action="append", default=[], metavar="NAMES=first|last|N", help="with --pp: the stage of tensors that are in no layer"
    )
    convert.add_argument("--zero1", action="store_true", help="write the optimizer's state as ZeRO-1 keeps it")
    convert.add_argument("--xser", action="store_true", help="write NxD's files with a file for each tensor")
    convert.add_argument("--separate-qkv", action="store_true", help="write q, k and v as three weights in NxD's files (fuse_qkv=False)")
    convert.add_argument("--dtype", choices=list(_DTYPES), help="of the model's floating-point tensors (default: as they are)")
    convert.add_argument(
        "--max-shard-gb", type=float, default=MAX_BYTES / 1e9, help="gigabytes in a .safetensors file (default %(default)g)"
    )
    convert.add_argument("--model-only", action="store_true", help="leave out the optimizer")
    convert.add_argument(
        "--param-names",
        metavar="FILE",
        help="the names of the optimizer's parameters in order, one on a line, pipeline rank 0's first (for NxD's files)",
    )
    convert.add_argument("--force", action="store_true", help="replace what is complete at DST")
    verify = commands.add_parser(
        "verify", help="whether everything can be read, and is the same as in another checkpoint", allow_abbrev=False
    )
    verify.add_argument("path", metavar="PATH")
    verify.add_argument("--against", metavar="OTHER", help="another checkpoint, of any layout and format, that should hold the same values")
    verify.add_argument("--against-tag", help="its tag (default: the newest)")
    verify.add_argument("--finite", action="store_true", help="count infinite values and NaN as problems")
    verify.add_argument(
        "--checksum", action="store_true", help="print a SHA-256 of the model's full tensors, the same for every layout and format"
    )
    for command in (inspect, convert, verify):
        command.add_argument("--tag", help="the tag to read (default: the newest complete one)")
        command.add_argument(
            "--trust", action="store_true", help="read pickled files that hold more than tensors and plain data; this runs code in them"
        )
    for command in (convert, verify):
        command.add_argument(
            "--map", dest="mapping", help=f"names in Hugging Face folders, and how ranks share tensors out: {', '.join(name_maps.known())}"
        )
        command.add_argument(
            "--split", action="append", default=[], metavar="NAMES=DIM[xFUSED]", help="how NxD's ranks share out tensors; see the errors"
        )
        command.add_argument("--config", metavar="FILE", help="the model's config.json (default: SRC's)")
        command.add_argument("--kv-multiplier", type=int, default=1, help="ranks that hold each K/V head (kv_size_multiplier; default 1)")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = parser().parse_args(arguments)
    if arguments is None:
        _own_process()
    try:
        return {"inspect": _inspect, "convert": _convert, "verify": _verify}[args.command](args)
    except (CommandError, orbax_files.DamagedCheckpointError, OSError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        sys.stderr.write(f"nxd-ckpt: {error}\n")
        return 2


def _own_process() -> None:
    """What the command changes in a process that is its own: no accelerator is started, and memory of large tensors goes back to the system at once."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(AttributeError, OSError):  # glibc only; its heap would be full of holes between tensors
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def _say(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """The items, with a bar on a terminal if there are some."""
    return bar(items, what, _MANY)


# -- where checkpoints are ---------------------------------------------------------------------------


def _locate(path: str, tag: str | None) -> Path:
    """The folder of the checkpoint that is meant."""
    if tag is None and "://" not in path and full_states.format_of(Path(path)) is not None:
        return Path(path)
    storage = _storage(path)
    complete = storage.completed_tags()
    if tag is None:
        if not complete:
            raise CommandError(f"{path} holds no complete checkpoint{_unfinished(storage)}")
        return storage.fetch(complete[-1])
    if tag not in complete:
        if isinstance(storage, FilesysCheckpointStorage) and original_files.is_older(storage.root / tag):
            return storage.root / tag
        raise CommandError(
            f"{path} has no complete checkpoint {tag!r}; complete ones are: {', '.join(complete[-8:]) or 'none'}{_unfinished(storage)}"
        )
    return storage.fetch(tag)


def _storage(path: str) -> BaseCheckpointStorage:
    storage = create_checkpoint_storage(path)
    if isinstance(storage, FilesysCheckpointStorage) and not storage.root.exists():
        raise CommandError(f"there is no {path}")
    return storage


def _unfinished(storage: BaseCheckpointStorage) -> str:
    if not isinstance(storage, FilesysCheckpointStorage):
        return ""
    found = tags.unfinished(storage.root)
    return f" ({', '.join(found)}: begun, but without the `done` that marks a complete one)" if found else ""


# -- inspect -----------------------------------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> int:
    if args.tag is None and "://" not in args.path and full_states.format_of(Path(args.path)) is None:
        listed = _tags(_storage(args.path))
        if len(listed) != 1 or not listed[0]["complete"]:
            if not (args.tensors and any(t["complete"] for t in listed)):
                return _show_tags(args, listed)
            others = f"{len(listed) - 1} other tag{'s' * (len(listed) > 2)}"
            sys.stderr.write(f"nxd-ckpt: the newest complete tag of {args.path}, which has {others}: --tag names another\n")
    found = inspecting.describe(_locate(args.path, args.tag), args.trust)
    if args.json:
        _say(json.dumps(found if args.tensors else {**found, "tensors": {k: len(v) for k, v in found["tensors"].items()}}, indent=1))
        return 0
    _show(found, args.tensors)
    return 0


def _tags(storage: BaseCheckpointStorage) -> list[dict[str, Any]]:
    if not isinstance(storage, FilesysCheckpointStorage):
        return [{"name": tag, "complete": True} for tag in storage.completed_tags()]
    names = [*storage.completed_tags(), *tags.unfinished(storage.root)]
    return [inspecting.tag_of(storage.root / name) for name in names]


def _show_tags(args: argparse.Namespace, listed: Sequence[Mapping[str, Any]]) -> int:
    if args.json:
        _say(json.dumps({"path": args.path, "tags": listed}, indent=1))
        return 0
    if not listed:
        raise CommandError(f"{args.path} holds no checkpoint")
    if args.tensors:
        raise CommandError(f"{args.path} holds no complete checkpoint whose tensors could be listed{_unfinished(_storage(args.path))}")
    width = max(len(t["name"]) for t in listed)
    for t in listed:
        state = "complete" if t["complete"] else "unfinished"
        size = f"  {t['format']:11}  {_size(t['bytes'])} in {t['files']} files" if "bytes" in t else ""
        _say(f"{t['name']:{width}}  {state:10}{size}")
    _say("nxd-ckpt inspect PATH --tag TAG tells more about one")
    return 0


def _show(found: Mapping[str, Any], tensors: bool) -> None:
    layout = ", ".join(f"{k} {v}" for k, v in found["layout"].items())
    zero = {True: ", ZeRO-1", False: "", None: ""}[found.get("zero1")]
    state = "" if found["complete"] else ", unfinished"
    _say(
        f"{found['name']}: {found['format']}{state}, {_size(found['bytes'])} in {found['files']} files"
        + (f"; written by {layout}{zero}" if layout else "")
    )
    for part, listed in found["tensors"].items():
        if listed:
            own = [t for t in listed.values() if "same_as" not in t]
            kinds = ", ".join(sorted({t["dtype"] for t in own}))
            stages = found["layout"].get("pp", 1)
            on_one = " on one rank" if stages == 1 else f" on the {stages} pipeline ranks of one tensor-parallel rank"
            each = on_one if found["format"] == ORIGINAL else ""
            _say(f"  {part}: {len(own)} tensors of {kinds}, {_size(sum(map(inspecting.size, own)))}{each}")
    if found["other"]:
        _say(f"  besides: {', '.join(found['other'])}")
    if "problem" in found:
        _say(f"  problem: {found['problem']}")
    for part, listed in found["tensors"].items() if tensors else ():
        _show_tensors(part, listed)


def _show_tensors(part: str, listed: Mapping[str, Any]) -> None:
    width = max((len(name) for name in listed), default=0)
    for name, t in listed.items():
        shards = f"{t['shards']} x {t['shard_shape']}" if t["shards"] > 1 else t.get("file", "")
        tail = f"the same as {t['same_as']}" if "same_as" in t else shards
        if "experts" in t:
            tail += "  experts"
        if "pp" in t:
            tail += f"  pipeline rank{'s' * (len(t['pp']) > 1)} {', '.join(map(str, t['pp']))}"
        _say(f"{part}  {name:{width}}  {t['dtype']:9} {t['shape']!s:20} {tail}".rstrip())


def _size(count: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} bytes"


# -- convert -----------------------------------------------------------------------------------------


def _convert(args: argparse.Namespace) -> int:
    _check_numbers(args)
    source = _locate(args.path, args.tag)
    kind = full_states.format_of(source)
    config = _config(args, source)
    _check_order(args, source, kind)
    in_order = ORIGINAL not in (kind, args.to)  # tags of ours hold query heads as Hugging Face's model has them
    names = _names(args, config, args.tp if kind == HUB else _tp_of([source], args), 1 if in_order else args.kv_multiplier)
    how = How(
        rules=_rules(args, names),
        config=config,
        copies=args.kv_multiplier,
        parameters=_lines(args.param_names),
        trust=args.trust,
        optimizer=not args.model_only and args.to != HUB,
    )
    state = full_states.read(source, how, names if kind == HUB else None)
    state.config = config or state.config
    tag = args.to_tag or (source.name if (source / tags.DONE).exists() else "converted")
    if args.to == HUB:
        _write_hub(args, state, names)
        where = args.target
    else:
        _write_tag(args, state, how, tag)
        where = f"{args.target}, tag {tag}"
    size = sum(f.bytes for f in state.model.values())
    parts = "model and optimizer" if state.other is not None and args.to != HUB else "model"
    _say(f"wrote {parts}, {len(state.model)} tensors, {_size(size)}, as {args.to} to {where}")
    return 0


def _rules(args: argparse.Namespace, names: NameMap) -> joining.Rules:
    """How ranks share tensors out: as the user says, as the map does, and of mixtures of experts as NxD's modules do."""
    return [*joining.parse_rules(args.split), *names.rules, *name_maps.EXPERTS]


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("tp", "pp", "vpp", "dp", "ep", "kv_multiplier"):
        if getattr(args, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be a positive number, got {getattr(args, name)}")
    if args.to != ORIGINAL and (args.pp > 1 or args.vpp > 1 or args.stage):
        raise CommandError(f"--pp, --vpp and --stage say how NxD's files are written; --to {args.to} holds full tensors for any ranks")
    if args.pp == 1 and (args.vpp > 1 or args.stage):
        raise CommandError("--vpp and --stage are about stages of a pipeline: give --pp, the number of its ranks, as well")
    if args.to != ORIGINAL and (args.dp > 1 or args.ep > 1 or args.zero1 or args.xser):
        raise CommandError(
            f"--dp, --ep, --zero1 and --xser say how NxD's files are written; --to {args.to} holds full tensors for any ranks"
        )
    if args.zero1 and args.dp % args.ep:
        raise CommandError(f"--dp {args.dp} must be a multiple of --ep {args.ep}: expert-parallel ranks are data-parallel ranks, too")
    if args.dp > 1 and not args.zero1:
        raise CommandError(
            "--dp cuts the optimizer's state among ranks: give --zero1 as well (without it all data-parallel ranks read one file)"
        )
    if args.max_shard_gb <= 0:
        raise CommandError(f"--max-shard-gb must be positive, got {args.max_shard_gb}")


def _check_order(args: argparse.Namespace, source: Path, kind: str | None) -> None:
    """Without a Hugging Face folder on either side query heads stay in the order of the ranks that wrote them."""
    if args.kv_multiplier > 1 and {kind, args.to} == {NXD, ORIGINAL}:
        raise CommandError(
            f"with --kv-multiplier {args.kv_multiplier} NxD's files have query heads in the order of the ranks that wrote them, those of --to nxd "
            "are in the model's order: convert to safetensors first (--map and --config say how)"
        )
    if args.kv_multiplier == 1 or args.to != ORIGINAL or kind == HUB:
        return
    tp = _tp_of([source], args)
    if tp != args.tp:
        raise CommandError(
            f"with --kv-multiplier {args.kv_multiplier} query heads are in the order of the ranks that wrote them, {tp}, and --tp is {args.tp}: convert to "
            "safetensors first (--map and --config say how), then to NxD's files"
        )


def _tp_of(folders: Sequence[Path], args: argparse.Namespace) -> int:
    """The tensor-parallel ranks in whose order query heads are, where K/V heads have copies."""
    if args.kv_multiplier == 1:
        return 1
    return max(int(inspecting.describe(folder, args.trust)["layout"].get("tp", 1)) for folder in folders)


def _config(args: argparse.Namespace, source: Path) -> dict[str, Any]:
    path = Path(args.config) if args.config else (source if source.is_dir() else source.parent) / "config.json"
    if not path.is_file():
        if args.config:
            raise CommandError(f"--config {path}: there is no such file")
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise CommandError(f"{path} is no JSON: {error}") from error
    return found


def _names(args: argparse.Namespace, config: Mapping[str, Any], tp: int, copies: int) -> NameMap:
    heads = name_maps.heads_of(config, copies, tp)
    if heads is None and copies > 1 and args.mapping:
        raise CommandError(
            "--kv-multiplier changes the order of query heads: give the model's config.json (--config) with num_attention_heads"
        )
    return name_maps.resolve(args.mapping, heads)


def _lines(path: str | None) -> list[str]:
    return [line.strip() for line in Path(path).read_text().splitlines() if line.strip()] if path else []


def _write_hub(args: argparse.Namespace, state: FullState, names: NameMap) -> None:
    folder = Path(args.target)
    if folder.is_dir() and any(folder.glob("*.safetensors")) and not args.force:
        raise CommandError(f"{folder} holds .safetensors files already: give another folder, or --force to replace them")
    full_writing.to_hub(state, folder, names, progress, _DTYPES.get(args.dtype), int(args.max_shard_gb * 1e9))


def _write_tag(args: argparse.Namespace, state: FullState, how: How, tag: str) -> None:
    storage = create_checkpoint_storage(args.target)
    tags.check(tag)
    if tag in storage.completed_tags() and not args.force:
        raise CommandError(
            f"{args.target} has a complete checkpoint {tag!r} already: give another name (--to-tag), or --force to replace it"
        )
    dtype = _DTYPES.get(args.dtype)
    folder = storage.begin(tag)
    with savers.writing(folder, args.target, first=True):
        with full_writing.scratch(storage.root) as place:
            if args.to == NXD:
                full_writing.to_nxd(state, folder, place, progress, dtype)
            else:
                pipeline = stage_rules.Pipeline(args.pp, args.vpp, stage_rules.parse(args.stage))
                fuse = not args.separate_qkv
                ranks = full_writing.Ranks(args.tp, args.dp, args.ep, args.zero1, args.kv_multiplier, fuse, args.xser, pipeline)
                full_writing.to_original(state, folder, ranks, how.rules, place, progress, dtype)
        storage.commit(tag, folder)


# -- verify ------------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    folder = _locate(args.path, args.tag)
    report = verifying.verify(folder, progress, args.trust)
    problems = list(report.problems)
    odd = [f"{name} has {count} values that are infinite or not numbers" for name, count in report.odd.items()]
    problems += odd if args.finite else []
    if not problems and (args.against or args.checksum):
        config = _config(args, folder)
        other = _locate(args.against, args.against_tag) if args.against else None
        first, second = _both(args, folder, other, config, report.notes)
        problems += verifying.compare(first, second, progress) if second is not None else []
        if args.checksum:
            digests = {name: verifying.digest(full) for name, full in first.model.items()}
            _say(f"model sha256 {verifying.checksum(digests)}")
    _say_some("problem", problems)
    _say_some("note", report.notes + ([] if args.finite else odd))
    _say(f"{folder}: {report.read} tensors read, " + (f"{len(problems)} problems" if problems else "no problems"))
    return 1 if problems else 0


def _say_some(what: str, texts: Sequence[str]) -> None:
    for text in texts[:_SHOWN]:
        _say(f"{what}: {text}")
    if len(texts) > _SHOWN:
        _say(f"and {len(texts) - _SHOWN} more")


def _both(
    args: argparse.Namespace, folder: Path, other: Path | None, config: dict[str, Any], notes: list[str]
) -> tuple[FullState, FullState | None]:
    """Both checkpoints as full tensors. What NxD's files do not say is taken from the other one. notes: gets what is left out."""
    order = [folder] if other is None else [folder, other]
    found: dict[Path, FullState] = {}
    shapes: dict[str, joining.Need] = {}
    for path in sorted(order, key=lambda p: full_states.format_of(p) == ORIGINAL):
        kind = full_states.format_of(path)
        ranks = any(full_states.format_of(p) == ORIGINAL for p in order)
        names = _names(args, config, _tp_of(order, args), args.kv_multiplier if ranks else 1)
        how = How(_rules(args, names), config, args.kv_multiplier, shapes, trust=args.trust)
        try:
            found[path] = full_states.read(path, how, names if kind == HUB else None)
        except (ValueError, NotImplementedError) as error:
            if "--model-only" not in str(error):
                raise
            how.optimizer = False
            found[path] = full_states.read(path, how)
            if other is not None:
                notes.append(f"the optimizers are not compared: {str(error).partition(': list their')[0]}")
        shapes = {name: full.need for name, full in found[path].model.items()}
    return found[folder], found[other] if other is not None else None


if __name__ == "__main__":
    sys.exit(main())
