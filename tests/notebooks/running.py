"""Running a notebook as a user does, in a kernel of its own, and what there is to say against its outputs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode

from tests import quick

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120

ALLOWED = (r"nxd_jax: \d+ ranks in 1 process\(es\), on \d+ virtual CPU devices",)
"""Lines on standard error that are as they should be."""

OWN = ("JAX_NUM_CPU_DEVICES", "NEURON_RT_NUM_CORES", "NXD_JAX_INSTANCE", "NXD_JAX_NNODES", "DISABLE_XLA", "NEURON_CC_FLAGS")
"""Variables of the tests' process that a user's kernel does not have."""


def run(notebook: NotebookNode, folder: Path, same_bits: bool = False) -> NotebookNode:
    """The notebook with its outputs, after every cell ran in `folder`/notebooks, beside which the examples lie. `complaints` says what went wrong.

    same_bits: it asks two programs for the same bits, which XLA's older emitters (`tests/quick.py`) do not give.
    """
    here = folder / "notebooks"
    here.mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    kept = {key: value for key, value in os.environ.items() if key not in OWN}
    environment = kept | ({} if same_bits else quick.environment()) | {"PYTHONPATH": path}
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(here)}}
    )
    client.execute(env=environment)
    return notebook


def complaints(notebook: NotebookNode) -> Iterator[str]:
    """Errors, and lines on standard error that are not allowed, each with its cell's first line."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            at = f"in the cell that begins with {cell.source.splitlines()[0]!r}"
            if output.output_type == "error":
                yield f"{output.ename}: {output.evalue} {at}"
            elif output.output_type == "stream" and output.name == "stderr":
                yield from (f"{line} {at}" for line in output.text.splitlines() if line.strip() and not _allowed(line))


def _allowed(line: str) -> bool:
    return any(re.fullmatch(pattern, line.strip()) for pattern in ALLOWED)
