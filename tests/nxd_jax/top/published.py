"""Records as processes publish them, made up."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from nxd_jax.top import records

NOW = 1_800_000_000.0
"""The time of these records, in seconds since the epoch."""


def data(pid: int = 4242, world: int = 4, hosted: list[int] | None = None, used: int = 2**30, **changes: Any) -> dict[str, Any]:
    """A record's JSON: a job on `world` ranks that runs, with `used` bytes on each core; `changes` replace or add entries."""
    hosted = list(range(world)) if hosted is None else hosted
    return {
        "version": records.VERSION,
        "pid": pid,
        "ticks": 77,
        "machine": records.machine(),
        "job": f"{pid}-1",
        "script": "train.py",
        "started": NOW - 192,
        "updated": NOW - 0.2,
        "error": "",
        "state": "running",
        "world": {"size": world, "hosted": hosted, "axes": {"pp": 1, "dp": 2, "tp": world // 2}, "local_size": world},
        "environment": {},
        "devices": {"platform": "cpu", "count": world, "limit": 0, "used": [used] * len(hosted)},
        "programs": 1300,
        "busy_seconds": 100.0,
        "utilization": 0.75,
        "steps": 1204,
        "steps_per_second": 3.217,
        "compiling": None,
        "graph": {"name": "0123abcd", "ops": 3022, "source": "train.py:57", "core_bytes": 5 * 2**30, "ran_at": NOW - 0.4},
        "compiles": 3,
        "compile_seconds": 12.1,
        "cache_hits": 1297,
        "disk_cache_hits": 0,
        "fallback_ops": 0,
        **changes,
    }


def put(folder: pathlib.Path, of: dict[str, Any]) -> pathlib.Path:
    """Write a record's file."""
    file = folder / f"nxd-{of['pid']}-1.json"
    file.write_text(json.dumps(of))
    return file


def record(**changes: Any) -> records.Record:
    """A record, read."""
    return records.Record.of(data(**changes))
