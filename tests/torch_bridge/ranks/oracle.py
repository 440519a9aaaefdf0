"""The oracle for rank programs: what one process that hosts all ranks gives each of them must be what each of several real processes gives.

    python -m tests.torch_bridge.ranks.oracle [--count 300] [--seed 0] [program.py ...]

runs files, or generated programs (`rank_programs`), once under torchrun and once in one process, and prints those that differ without a word. A program is
a file with a function `program(r)` of a rank's number. The rule for each: every rank's value right, or a warning or an error with the script's line. Right is
what a process under torchrun gets of its rank as a plain int; of the number that `xm.get_ordinal()` gives it must get the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
RUNNER = pathlib.Path(__file__).with_name("oracle_runner.py")
RANKS = 4


def compare(programs: Mapping[str, str]) -> dict[str, str]:
    """How each program (name: source) ended: "right", "warned", "refused" (an error with the line), "both refuse", or "WRONG: ..."."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in programs.items():
            (pathlib.Path(folder) / f"{name}.py").write_text(text)
        separate = [json.loads(text) for text in _torchrun(folder)]
        hosted = json.loads(_one_process(folder))
    return {name: _verdict(name, [p[name] for p in separate], hosted[name]) for name in programs}


def _torchrun(folder: str) -> list[str]:
    target = os.path.join(folder, "of_{rank}.json")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    _launch([*launcher, str(RUNNER), folder, target], JAX_NUM_CPU_DEVICES="1")
    return [pathlib.Path(target.format(rank=r)).read_text() for r in range(RANKS)]


def _one_process(folder: str) -> str:
    target = os.path.join(folder, "of_all.json")
    _launch([str(RUNNER), folder, target], NEURON_RT_NUM_CORES=str(RANKS), JAX_NUM_CPU_DEVICES=str(RANKS))
    return pathlib.Path(target).read_text()


def _launch(arguments: list[str], **more: str) -> None:
    dropped = ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "JAX_COMPILATION_CACHE_DIR")
    env = {k: v for k, v in os.environ.items() if k not in dropped}
    env |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **more}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def _verdict(name: str, separate: list[dict[str, Any]], hosted: dict[str, Any]) -> str:
    refused = [p["error"] for p in separate]
    for r, p in enumerate(separate):
        given = p.get("with_rank", p)
        if given["error"] is None and not p["error"] and not _same(given["results"], p["results"]):
            return f"WRONG: under torchrun rank {r} has {given['results']} with its number from xm.get_ordinal(), with a plain one {p['results']}"
        if given["error"] is not None and not p["error"] and f"{name}.py" not in given["error"]:
            return f"WRONG: under torchrun an error without the script's line: {given['error']}"
    if hosted["error"] is not None:
        if all(refused):
            return "both refuse"
        return "refused" if f"{name}.py" in hosted["error"] else f"WRONG: an error without the script's line: {hosted['error']}"
    expected = [p["results"] and p["results"][0] for p in separate]
    different = [r for r in range(RANKS) if refused[r] or not _same(expected[r], hosted["results"][r])]
    if not different:
        return "right"
    if any(f"{name}.py:" in text for text in hosted["warnings"]):
        return "warned"
    r = different[0]
    return f"WRONG: rank {r} has {hosted['results'][r]}, alone {refused[r] or expected[r]}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) or (a != a and b != b)
    return bool(a == b)


def main() -> int:
    from tests.torch_bridge.ranks import rank_programs

    options = argparse.ArgumentParser(description="Compare rank programs in one process with the same under torchrun.")
    options.add_argument("--count", type=int, default=300, help="how many programs to generate where no files are given")
    options.add_argument("--seed", type=int, default=0, help="of the first generated program")
    options.add_argument("--verbose", action="store_true", help="print every program's verdict")
    options.add_argument("files", nargs="*", type=pathlib.Path)
    given = options.parse_args()
    programs = {f.stem: f.read_text() for f in given.files} or rank_programs.generated(given.count, given.seed)
    verdicts = compare(programs)
    counts: dict[str, int] = {}
    for name, verdict in verdicts.items():
        kind = verdict.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "WRONG" or given.verbose:
            body = programs[name].partition("def program")[2] if kind == "WRONG" else ""
            sys.stdout.write(f"{name}: {verdict}\n{body}\n")
    sys.stdout.write(f"{counts}\n")
    return 1 if "WRONG" in counts else 0


if __name__ == "__main__":
    sys.exit(main())
