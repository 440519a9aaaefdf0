"""What a program was made of, written to a folder: its graph, StableHLO and optimised HLO (`NEURON_FRAMEWORK_DEBUG`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from torch_bridge.config import environment
from torch_bridge.ir.graph_text import graph_text


@contextlib.contextmanager
def compiling(program: Any) -> Iterator[None]:
    """Around the compilation of an `executor.Program`."""
    environment.prepare()
    yield
    if environment.framework_debug():
        dump(program, pathlib.Path(os.environ.get("NEURON_DUMP_DIR") or "."))


def dump(program: Any, folder: pathlib.Path) -> pathlib.Path:
    """Write a compiled program's graph and HLO under `folder`; returns the new directory."""
    return write_dump(program.graph, program.lowered(), program.compiled, folder)


def write_dump(graph: Any, lowered: Any, compiled: Any, folder: pathlib.Path) -> pathlib.Path:
    """Write a graph of aten ops, its StableHLO and what the compiler made of it to `MODULE_<hash>/` under `folder`; returns the new directory."""
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    target = folder / f"MODULE_{digest}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "graph.txt").write_text(graph_text(graph))
    (target / "stablehlo.mlir").write_text(lowered.as_text(debug_info=True))
    (target / "optimized_hlo.txt").write_text(compiled.as_text())
    return target
