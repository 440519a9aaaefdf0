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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch_xla_venv

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN, END = "<!-- step_time: begin -->", "<!-- step_time: end -->"
PEER = "jax"
LOSS_TOLERANCE = 1e-3
TAKE_XLA_FLAGS = ("bridge", "per-op", "replay", PEER)
"""The variants that `--xla-flags` is for: those on the jaxlib of this environment."""
BRIDGE_ENV = {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE.parent / 'aliases'}"}

# name: (description, script and arguments, environment, uses the torch_xla venv)
VARIANTS: dict[str, tuple[str, list[str], dict[str, str], bool]] = {
    "bridge": ("unchanged torch script on `xla`, our bridge", ["torch_step.py", "--device", "xla"], BRIDGE_ENV, False),
    "per-op": (
        "the same, its optimizer recorded op by op too",
        ["torch_step.py", "--device", "xla"],
        {**BRIDGE_ENV, "NXD_JAX_FUSED_OPTIMIZERS": "0"},
        False,
    ),
    "replay": ("the first with `torch_bridge.optimize(model)`", ["torch_step.py", "--device", "xla", "--replay"], BRIDGE_ENV, False),
    "jax": ("hand-written JAX + optax, one jitted step", ["jax_step.py"], {}, False),
    "torch_xla": ("the same script on original torch_xla", ["torch_step.py", "--device", "xla"], {"PJRT_DEVICE": "CPU"}, True),
    "torch": ("the same script in eager PyTorch on the CPU", ["torch_step.py"], {}, False),
    "compile": ("the same script with torch.compile on the CPU", ["torch_step.py", "--compile"], {}, False),
}


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, how a run's result gives its value, and the digits after the point."""

    title: str
    value: Callable[[dict[str, Any]], float]
    digits: int = 0


COLUMNS = [
    Column("step, no waiting (ms)", lambda run: run["step_free_ms"]),
    Column("step, loss read each step (ms)", lambda run: run["step_synced_ms"]),
    Column("CPU time per step, all threads (ms)", lambda run: run["step_cpu_ms"]),
    Column("first step (s)", lambda run: run["first_step_s"], digits=2),
    Column("first three steps (s)", lambda run: run["first_three_steps_s"], digits=2),
    Column("peak RSS (MiB)", lambda run: run["peak_rss_mib"]),
    Column("RSS above imports (MiB)", lambda run: run["peak_rss_mib"] - run["rss_after_import_mib"]),
]
DEFAULT = ["bridge", "replay", "jax", "torch_xla", "torch"]


def run_script(python: str, script: list[str], weights: Path, env: dict[str, str], extra: list[str]) -> str:
    removed = {"JAX_COMPILATION_CACHE_DIR", "PYTHONPATH"}
    full_env = {name: value for name, value in os.environ.items() if name not in removed} | env
    command = [python, str(HERE / script[0]), *script[1:], "--weights", str(weights), *extra]
    done = subprocess.run(command, env=full_env, capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def with_flags(name: str, flags: str) -> dict[str, str]:
    """A variant's environment, with `flags` behind what XLA_FLAGS has already (the later of two wins); only for `TAKE_XLA_FLAGS`."""
    env = VARIANTS[name][2]
    return {**env, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()} if flags and name in TAKE_XLA_FLAGS else env


def run_rounds(names: list[str], rounds: int, steps: int, flags: str = "") -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    venv_python = str(torch_xla_venv.make_venv(torch_xla_venv.DEFAULT_VENV)) if "torch_xla" in names else ""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.npz"
        ops = int(run_script(sys.executable, ["torch_step.py", "--prepare"], weights, {}, []))
        for number in range(rounds):
            for name in names:
                _, script, _, uses_venv = VARIANTS[name]
                python = venv_python if uses_venv else sys.executable
                output = run_script(python, script, weights, with_flags(name, flags), ["--steps", str(steps)])
                results[name].append(json.loads(output.splitlines()[-1]) | {"ops_per_step": ops})
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


def summarise(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, tuple[float, float]]]:
    """{variant: {column: (median over the rounds, median of the ratios to the peer in the same round)}}."""
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for name, runs in results.items():
        table[name] = {}
        for column in COLUMNS:
            own = [column.value(run) for run in runs]
            ratios = [mine / column.value(peer) for mine, peer in zip(own, results.get(PEER, []), strict=PEER in results)]
            table[name][column.title] = statistics.median(own), statistics.median(ratios) if ratios else float("nan")
    return table


def markdown(results: dict[str, list[dict[str, Any]]], steps: int, flags: str = "") -> str:
    lines = [f"| variant | {' | '.join(column.title for column in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in summarise(results).items():
        cells = [f"{row[column.title][0]:.{column.digits}f} ({row[column.title][1]:.2f}x)" for column in COLUMNS]
        lines.append(f"| {VARIANTS[name][0]} | {' | '.join(cells)} |")
    rounds = len(next(iter(results.values())))
    lines += [
        "",
        f"In brackets: the ratio to hand-written JAX, median of the ratios within a round; {rounds} rounds, {steps} steps each.",
        "",
    ]
    lines += [f"- {details(name, runs)}" for name, runs in results.items()]
    lines.append(f"- the variants' first {measure.CHECKED_STEPS} losses agree to {check_losses(results):.0e}")
    if flags:
        lines.append(
            f"- `XLA_FLAGS` of {', '.join(f'`{name}`' for name in results if name in TAKE_XLA_FLAGS) or 'none of them'}: `{flags}`"
        )
    date = datetime.date.today().isoformat()
    lines.append(f"- measured {date}, {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    return "\n".join(lines)


def details(name: str, runs: list[dict[str, Any]]) -> str:
    """One line of versions, counts and recording time."""
    last = runs[-1]
    steady = last["steady_counters_per_step"]
    line = f"`{name}`: " + ", ".join(f"{package} {version}" for package, version in last["versions"].items())
    if "compilations" in steady:
        line += f"; {last['counters']['compilations']:.0f} compilations"
        line += f", {steady['compilations']:.2f} a step after the first {measure.CHECKED_STEPS} steps"
    if "executions" in steady:
        line += f"; {steady['executions']:.2f} executions a step"
    if last["recording_alone_ms"] is not None:
        alone, beside = (statistics.median(run[f"recording_{when}_ms"] for run in runs) for when in ("alone", "beside"))
        line += f"; Python before `mark_step`: {alone:.1f} ms a step while the device is idle"
        line += f" ({1e3 * alone / last['ops_per_step']:.1f} us for each of the {last['ops_per_step']} aten ops that eager PyTorch runs)"
        line += f", {beside:.1f} ms while the step before is executing on the same cores"
    return line


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
    parser.add_argument(
        "--xla-flags",
        default="",
        metavar="FLAGS",
        help=f"added to XLA_FLAGS of {', '.join(TAKE_XLA_FLAGS)}, for a second table: --xla-flags=--xla_cpu_prefer_vector_width=512",
    )
    args = parser.parse_args()
    if args.write and args.xla_flags:
        parser.error("--write keeps the table of XLA's own defaults; with --xla-flags the table is only printed")
    names = args.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}; choose from {', '.join(VARIANTS)}")
    text = markdown(run_rounds(names, args.rounds, args.steps, args.xla_flags), args.steps, args.xla_flags)
    print(text)
    if args.write:
        write_readme(text)


if __name__ == "__main__":
    main()
