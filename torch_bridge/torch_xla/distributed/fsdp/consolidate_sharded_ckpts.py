"""`python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts`: join every rank's file into one of the whole module."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from torch_bridge.fsdp.consolidation import consolidate_sharded_model_checkpoints

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the files `--ckpt_prefix` + `--ckpt_suffix` (default "*.pth") into `--save_path` (default: the prefix with "_consolidated.pth"). Returns 0, or 1
    with a message on stderr where they cannot be joined."""
    parser = ArgumentParser(prog="python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts", description=__doc__)
    parser.add_argument("--ckpt_prefix", required=True, help="what the paths of all ranks' files begin with")
    parser.add_argument(
        "--ckpt_suffix", default="*.pth", help="the rest of the paths, a pattern such as '_rank-*-of-*.pth' (default: %(default)s)"
    )
    parser.add_argument("--save_path", default="", help="the file to write (default: CKPT_PREFIX_consolidated.pth)")
    given = parser.parse_args(arguments)
    try:
        whole, path = consolidate_sharded_model_checkpoints(given.ckpt_prefix, given.ckpt_suffix, given.save_path)
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{len(whole)} tensors, {sum(t.numel() for t in whole.values()):,} numbers: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
