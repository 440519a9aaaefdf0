"""How long a script takes from the start of its process to the end of its first step: cold, and warm with what the cold process left on disk.

Each variant runs in new processes, cold (an empty cache folder) and then warm (the same folder), in turn with the others. `demo` is
examples/char_lm.py as it is, stopped after its first program; `bridge` the Llama of torch_step.py and `jax` the same step written by hand in JAX, with
JAX's compilation cache.

    python benchmarks/warm_start.py --rounds 3 --write

*Without others' imports*: without the imports of torch, transformers, jax and optax; those of our own packages, beyond these, count. On a machine that
does other things too, the columns of CPU time are the ones to look at.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rounds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
REPORT = "warm_start: "
"""How the line starts in which a child reports."""

BELOW_BRIDGE = ("torch", "transformers.models.llama.modeling_llama", "jax")
"""What the torch scripts import of others; they do it first, so that what our packages add is seen alone."""

Result = dict[str, float]
"""Of one process, in seconds from its start to the end of step 1. `wall`; `cpu`: of all threads; `import_wall`, `import_cpu`: others' imports in them."""


# -- in the children ------------------------------------------------------------------------------


class Imports:
    """Adds up what imports of other packages take."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def take(self, *names: str) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        for name in names:
            importlib.import_module(name)
        self.wall += time.perf_counter() - start
        self.cpu += time.process_time() - cpu


def ended(imports: Imports, loss: float) -> None:
    """Step 1 has ended: report, and leave at once."""
    found = {"ended": time.monotonic(), "cpu": time.process_time(), "import_wall": imports.wall, "import_cpu": imports.cpu, "loss": loss}
    print(REPORT + json.dumps(found), flush=True)
    os._exit(0)


def child_bridge(weights: Path) -> None:
    """One step of torch_step.py on `xla`."""
    imports = Imports()
    imports.take(*BELOW_BRIDGE)
    import measure
    import numpy as np
    import torch_step

    variant = torch_step.xla_variant(dict(np.load(weights)))
    ended(imports, variant.read(variant.dispatch(measure.batches(1)[0])))


def child_jax(weights: Path) -> None:
    """One step of jax_step.py."""
    imports = Imports()
    imports.take("jax", "optax")
    import jax_step
    import measure
    import numpy as np

    variant = jax_step.make(dict(np.load(weights)))
    ended(imports, variant.read(variant.dispatch(measure.batches(1)[0])))


def child_demo(weights: Path) -> None:
    """The script of `make demo`, unchanged, until its first program has run."""
    imports = Imports()
    imports.take(*BELOW_BRIDGE)
    from torch_bridge.telemetry import activity

    def ran(self: Any, graph: Any, output: Any) -> None:
        output.block_until_ready()
        ended(imports, 0.0)

    activity.Activity.ran = ran  # type: ignore[method-assign]
    sys.argv = ["char_lm.py", "--out", str(weights.parent / "demo")]
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "char_lm.py"), run_name="__main__")


CHILDREN = {"demo": child_demo, "bridge": child_bridge, "jax": child_jax}
TITLES = {
    "demo": "examples/char_lm.py on `xla`",
    "bridge": "torch_step.py on `xla`",
    "jax": "jax_step.py, hand-written JAX",
}


# -- in the parent --------------------------------------------------------------------------------


def first_step(name: str, weights: Path, cache: Path) -> Result:
    """One process of a variant, with this folder for compiled programs."""
    path = os.pathsep.join(p for p in (str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")) if p)
    dropped = ("JAX_COMPILATION_CACHE", "PYTHONDONTWRITEBYTECODE")  # scripts have our modules as bytecode
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    env |= {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env["JAX_COMPILATION_CACHE_DIR" if name == "jax" else "NEURON_COMPILE_CACHE_URL"] = str(cache)
    command = [sys.executable, str(HERE / "warm_start.py"), "--child", name, "--weights", str(weights)]
    start = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    lines = [line.removeprefix(REPORT) for line in done.stdout.splitlines() if line.startswith(REPORT)]
    if done.returncode or not lines:
        raise RuntimeError(f"{name} ended with status {done.returncode} before its first step did:\n{done.stderr[-3000:]}")
    found = json.loads(lines[-1])
    return found | {"wall": found.pop("ended") - start}


def run_rounds(names: list[str], rounds: int) -> dict[str, dict[str, list[Result]]]:
    """{variant: {"cold": results, "warm": results}}. Raises RuntimeError if a warm process' loss is not its cold one's, bit for bit."""
    found: dict[str, dict[str, list[Result]]] = {name: {"cold": [], "warm": []} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.npz"
        command = [sys.executable, str(HERE / "torch_step.py"), "--prepare", "--weights", str(weights)]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        for name in names:  # not counted: Python compiles our modules, the system reads the files
            first_step(name, weights, Path(folder) / "unused")
        for number in range(rounds):
            for name, kinds in found.items():
                cache = Path(folder) / f"{name}{number}"
                for kind, results in kinds.items():
                    results.append(first_step(name, weights, cache))
                    sys.stderr.write(f"round {number + 1}: {name:7} {kind} {results[-1]['wall']:6.2f} s\n")
                if kinds["cold"][-1]["loss"] != kinds["warm"][-1]["loss"]:
                    raise RuntimeError(f"{name}: the warm process' first loss differs from the cold one's: {kinds}")
    return found


COLUMNS: dict[str, Callable[[Result], float]] = {
    "wall (s)": lambda r: r["wall"],
    "CPU, all threads (s)": lambda r: r["cpu"],
    "wall without others' imports (s)": lambda r: r["wall"] - r["import_wall"],
    "CPU without others' imports (s)": lambda r: r["cpu"] - r["import_cpu"],
}


def table(found: dict[str, dict[str, list[Result]]]) -> str:
    """Medians, with two ratios (medians over the rounds): warm to cold of the same variant, and to hand-written JAX of the same kind."""
    lines = [f"| variant | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, kinds in found.items():
        for kind, results in kinds.items():
            cells = []
            for value in COLUMNS.values():
                own = [value(r) for r in results]
                ratios = []
                if kind == "warm":
                    ratios.append(f"{_ratio(own, [value(r) for r in kinds['cold']]):.2f}x cold")
                if name != "jax" and "jax" in found:
                    ratios.append(f"{_ratio(own, [value(r) for r in found['jax'][kind]]):.2f}x JAX")
                cells.append(f"{statistics.median(own):.2f}" + (f" ({', '.join(ratios)})" if ratios else ""))
            lines.append(f"| {TITLES[name]}, {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(own: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", default=",".join(CHILDREN), help=f"comma-separated, of {', '.join(CHILDREN)}")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        CHILDREN[args.child](args.weights)
        return
    names = args.variants.split(",")
    if unknown := [name for name in names if name not in CHILDREN]:
        parser.error(f"unknown variants {unknown}; choose from {', '.join(CHILDREN)}")
    text = f"{table(run_rounds(names, args.rounds))}\n\nmedian of {args.rounds} round(s); {rounds.stack('torch', 'transformers', 'jax', 'jaxlib')}"
    print(text)
    if args.write:
        rounds.put("warm_start", text)


if __name__ == "__main__":
    main()
