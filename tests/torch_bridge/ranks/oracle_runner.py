"""Runs every rank program of a folder, in one process for all ranks or as one process of several, and writes what each rank got: see `oracle`.

    python oracle_runner.py <folder with programs> <result.json, or a pattern with {rank}>

A program is a file with a function `program(r)` of a rank's number. What it returns may hold tensors, arrays, numbers, strings, None, lists and dicts.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import random
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import first_rank_files, sharded
from torch_bridge.recorder.tensor import XLATensor


def of_each(value: Any) -> list[Any]:
    """What each hosted rank has of a result, as plain lists and numbers."""
    count = len(world.current().hosted)
    if isinstance(value, torch.Tensor):
        return [_numbers(t) for t in _parts(value)]
    if rank_numbers.is_ranked(value):
        return [_number(rank_numbers.own(value, place)) for place in range(count)]
    if isinstance(value, np.ndarray):
        return [_numbers(torch.tensor(part)) for part in getattr(value, "parts", [value] * count)]
    if isinstance(value, (np.generic, bool, int, float)):
        return [_number(value)] * count
    if isinstance(value, dict):
        rows = {str(k): of_each(v) for k, v in value.items()}
        return [{k: row[place] for k, row in rows.items()} for place in range(count)]
    if isinstance(value, (list, tuple)):
        found = [of_each(v) for v in value]
        return [[row[place] for row in found] for place in range(count)]
    return [str(value)] * count


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    known = isinstance(t, XLATensor) or hasattr(t, "parts")
    return sharded.shards(t.detach()) if known else [t.detach()] * len(world.current().hosted)


def _number(value: Any) -> float:
    return float(value)


def _numbers(t: torch.Tensor) -> Any:
    return [str(t.dtype), list(t.shape), t.double().reshape(-1).tolist()]


def run(file: pathlib.Path, rank: Any) -> dict[str, Any]:
    """What a program gave: results (one for each hosted rank), an error in words, and the texts of its warnings."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    xm.set_rng_state(0)
    first_rank_files._noted = False
    found: dict[str, Any] = {"error": None, "results": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scope: dict[str, Any] = {"__name__": file.stem}
            exec(compile(file.read_text(), str(file), "exec"), scope)
            found["results"] = of_each(scope["program"](rank))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__))}"
    found["warnings"] = [str(w.message) for w in caught]
    return found


def main() -> None:
    faulthandler.enable()
    folder, target = sys.argv[1:3]
    found = {}
    for file in sorted(pathlib.Path(folder).glob("*.py")):
        if os.environ.get("ORACLE_VERBOSE"):
            sys.stderr.write(f"{world.first()}: {file.stem}\n")
        rank = xm.get_ordinal()
        if len(world.current().hosted) > 1:
            found[file.stem] = run(file, rank)
        else:  # a plain number is what the others must give
            found[file.stem] = {**run(file, int(rank)), "with_rank": run(file, rank)}
    pathlib.Path(target.format(rank=world.first())).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
