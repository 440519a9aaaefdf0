"""What is saved beside shards: `get_shard_metadata()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.fsdp import naming
from torch_bridge.fsdp.shards import Shared


def of(units: Sequence[tuple[str, Sequence[Shared], dict[str, torch.dtype]]]) -> dict[str, Any]:
    """units: (path of the wrapper, what it shares out, dtypes that its buffers had, by name).

    Returns torch_xla's keys, `shard_info` (by unit and registered name: whole size and original name), `flatten_info` (by name of a flat parameter: names,
    shapes and lengths of what lies in it) and `buffer_info` (dtypes before conversion); and one of ours, `tied_info`: further names of tied parameters.
    """
    shard_info: dict[str, Any] = {}
    flatten_info: dict[str, Any] = {}
    buffer_info: dict[str, Any] = {}
    tied_info: dict[str, str] = {}
    for path, shared, dtypes in units:
        shard_info[path] = {naming.registered(s.original): {"_orig_size": s.layout.size, "_orig_name": s.original} for s in shared}
        for s in shared:
            if s.is_flat:
                names = [naming.joined(naming.INNER, p.path) for p in s.pieces]
                flatten_info[naming.joined(path, s.original)] = names, [p.size for p in s.pieces], [p.size.numel() for p in s.pieces]
            for piece in s.pieces:
                for other in piece.others:
                    tied_info[_plain(path, other)] = _plain(path, piece.path)
        for name, dtype in dtypes.items():
            buffer_info[naming.joined(path, naming.WRAPPED, name)] = {"_orig_dtype": dtype}
    return {"shard_info": shard_info, "flatten_info": flatten_info, "buffer_info": buffer_info, "tied_info": tied_info}


def _plain(unit: str, path: str) -> str:
    return naming.plain(naming.joined(unit, path))
