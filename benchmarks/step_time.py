"""Time one training step of the same Llama in several ways and print how they compare to hand-written JAX.

Every variant runs in its own process, in turn (A B C A B C ...), so that a busy machine disturbs all of them alike. All start from the same
weights and see the same batches; the losses of the first steps must agree.

    python benchmarks/step_time.py --rounds 3 --write
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch_xla_venv

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN, END = "<!-- step_time: begin -->", "<!-- step_time: end -->"
PEER = "jax"
LOSS_TOLERANCE = 1e-3
BRIDGE_ENV = {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE.parent / 'aliases'}"}

# name: (description, script and arguments, environment, uses the torch_xla venv)
VARIANTS: dict[str, tuple[str, list[str], dict[str, str], bool]] = {
    "bridge": ("unchanged torch script on `xla`, our bridge", ["torch_step.py", "--device", "xla"], BRIDGE_ENV, False),
    "jax": ("hand-written JAX + optax, one jitted step", ["jax_step.py"], {}, False),
    "torch_xla": ("the same script on original torch_xla", ["torch_step.py", "--device", "xla"], {"PJRT_DEVICE": "CPU"}, True),
    "torch": ("the same script in eager PyTorch on the CPU", ["torch_step.py"], {}, False),
    "compile": ("the same script with torch.compile on the CPU", ["torch_step.py", "--compile"], {}, False),
    "torchax": ("the same model through torchax", ["torchax_step.py"], {}, False),
}
DEFAULT = ["bridge", "jax", "torch_xla", "torch"]


def run_script(python: str, script: list[str], weights: Path, env: dict[str, str], extra: list[str]) -> str:
    removed = {"JAX_COMPILATION_CACHE_DIR", "PYTHONPATH"}
    full_env = {name: value for name, value in os.environ.items() if name not in removed} | env
    command = [python, str(HERE / script[0]), *script[1:], "--weights", str(weights), *extra]
    done = subprocess.run(command, env=full_env, capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def run_rounds(names: list[str], rounds: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    venv_python = str(torch_xla_venv.make_venv(torch_xla_venv.DEFAULT_VENV)) if "torch_xla" in names else ""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.npz"
        run_script(sys.executable, ["torch_step.py", "--write-weights"], weights, {}, [])
        for number in range(rounds):
            for name in names:
                _, script, env, uses_venv = VARIANTS[name]
                output = run_script(venv_python if uses_venv else sys.executable, script, weights, env, ["--steps", str(steps)])
                results[name].append(json.loads(output.splitlines()[-1]))
                print(f"round {number + 1}: {name:10} {results[name][-1]['step_free_ms']:8.1f} ms per step", file=sys.stderr, flush=True)
    return results


def check_losses(results: dict[str, list[dict[str, Any]]]) -> float:
    """The largest difference between any loss and the first variant's. Raises if the variants do not compute the same."""
    reference = next(iter(results.values()))[0]["losses"]
    differences = {
        name: max(abs(a - b) for run in runs for a, b in zip(run["losses"], reference, strict=True)) for name, runs in results.items()
    }
    wrong = {name: value for name, value in differences.items() if not value < LOSS_TOLERANCE}
    if wrong:
        raise RuntimeError(f"the variants' losses differ by more than {LOSS_TOLERANCE} from {next(iter(results))}'s: {wrong}")
    return max(differences.values())


def summarise(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, and their ratios to the peer's *in the same round* where that was run."""

    def median(name: str, value: Callable[[dict[str, Any]], float]) -> tuple[float, float]:
        own = [value(run) for run in results[name]]
        if PEER not in results:
            return statistics.median(own), float("nan")
        ratios = [mine / value(peer) for mine, peer in zip(own, results[PEER], strict=True)]
        return statistics.median(own), statistics.median(ratios)

    columns: dict[str, Callable[[dict[str, Any]], float]] = {
        "step_free": lambda run: run["step_free_ms"],
        "step_synced": lambda run: run["step_synced_ms"],
        "cpu": lambda run: run["step_cpu_ms"],
        "first": lambda run: run["first_step_s"],
        "three": lambda run: run["first_three_steps_s"],
        "peak": lambda run: run["peak_rss_mib"],
        "grown": lambda run: run["peak_rss_mib"] - run["rss_after_import_mib"],
    }
    table = {}
    for name in results:
        row = {}
        for column, value in columns.items():
            row[column], row[column + "_ratio"] = median(name, value)
        table[name] = row
    return table


def markdown(results: dict[str, list[dict[str, Any]]], steps: int) -> str:
    table = summarise(results)
    lines = [
        "| variant | step, no waiting (ms) | step, loss read each step (ms) | CPU time per step, all threads (ms) | first step (s) | first three steps (s) | peak RSS (MiB) | RSS above imports (MiB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in table.items():
        cells = [f"{row[column]:{form}} ({row[column + '_ratio']:.2f}x)" for column, form in COLUMN_FORMATS.items()]
        lines.append(f"| {VARIANTS[name][0]} | {' | '.join(cells)} |")
    lines += [
        "",
        f"In brackets: the ratio to hand-written JAX, median of the ratios within a round; {len(next(iter(results.values())))} rounds, {steps} steps each.",
        "",
    ]
    lines += [f"- {line}" for name, runs in results.items() for line in details(name, runs)]
    lines.append(f"- the variants' first {measure.CHECKED_STEPS} losses agree to {check_losses(results):.0e}")
    date = datetime.date.today().isoformat()
    lines.append(f"- measured {date}, {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    return "\n".join(lines)


COLUMN_FORMATS = {"step_free": ".0f", "step_synced": ".0f", "cpu": ".0f", "first": ".2f", "three": ".2f", "peak": ".0f", "grown": ".0f"}


def details(name: str, runs: list[dict[str, Any]]) -> list[str]:
    last = runs[-1]
    lines = [f"`{name}`: " + ", ".join(f"{package} {version}" for package, version in last["versions"].items())]
    if last["counters"]:
        totals = ", ".join(f"{value:.0f} {what}" for what, value in last["counters"].items())
        steady = ", ".join(f"{value:.2f} {what}" for what, value in last["steady_counters_per_step"].items())
        lines[0] += f"; {totals} in all, {steady} per step after the first {measure.CHECKED_STEPS}"
    if last["recording_ms"] is not None:
        milliseconds = statistics.median(run["recording_ms"] for run in runs)
        lines[0] += f"; {milliseconds:.1f} ms of Python per step before `mark_step`"
        if last.get("ops_per_step"):
            lines[0] += f" ({1e3 * milliseconds / last['ops_per_step']:.1f} us for each of {last['ops_per_step']} ops)"
    return lines


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def write_readme(text: str) -> None:
    page = README.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(DEFAULT), help=f"comma-separated, of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    names = args.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}; choose from {', '.join(VARIANTS)}")
    text = markdown(run_rounds(names, args.rounds, args.steps), args.steps)
    print(text)
    if args.write:
        write_readme(text)


if __name__ == "__main__":
    main()
