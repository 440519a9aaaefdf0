"""Fifteen kinds of models in three sizes: first step, step, CPU time and memory of the unchanged script on `xla` against eager PyTorch and others.

    python benchmarks/zoo.py --rounds 3 --write                      # all kinds, small and medium
    python benchmarks/zoo.py --kinds bert,gpt2 --sizes medium --variants xla,jax,compile

Each variant runs in a process of its own, in turn. A step is forward, backward, AdamW and the loss's value. Where a model draws no dropout, the losses of
the variants must agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import rounds
import torch_xla_venv
import zoo_models

VARIANTS = {
    "xla": "unchanged script on `xla`",
    "eager": "eager PyTorch on the CPU",
    "compile": "`torch.compile` on the CPU (needs a C++ compiler)",
    "torch_xla": "original torch_xla 2.7.0",
    "jax": "the model hand-written in JAX and Optax",
}
PEER = "eager"
BY_HAND = ("mlp", "resnet", "mobilenet", "convnext", "lstm", "cells", "bert", "gpt2", "llama")
"""Kinds that `zoo_jax.py` has; the others have no variant `jax`."""
DRAWS = {"mlp", "lstm", "bert", "gpt2", "t5"}
"""Kinds with dropout: each variant draws numbers of its own."""
CHECKED = 3
TOLERANCE = 5e-3
COLUMNS: dict[str, tuple[str, Callable[[dict[str, Any]], float], int]] = {
    "first": ("first step (s)", lambda run: run["first_step_s"], 2),
    "step": ("step (ms)", lambda run: run["step_ms"], 1),
    "cpu": ("CPU time of a step (ms)", lambda run: run["step_cpu_ms"], 1),
    "memory": ("peak memory above imports (MiB)", lambda run: run["memory_mib"], 0),
}


Made = tuple[float, Callable[[int], float]]
"""MiB resident before the weights went to the device, and a function that takes step `k` and returns its loss."""


def on_torch(kind: str, size: str, variant: str) -> Made:
    """The script in torch."""
    import measure as measuring
    import torch

    device = "cpu"
    if variant in ("xla", "torch_xla"):
        import torch_xla.core.xla_model as xm

        device = xm.xla_device()
        (
            torch.zeros(1, device=device) + 1
        ).tolist()  # starts the runtime and its compiler, as `jnp.zeros` does below: they are no part of a first step
    work = zoo_models.make(kind, size)
    before = measuring.resident_mib()
    model = work.model.to(device)
    model.train()
    forward = torch.compile(model) if variant == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [tuple(part.to(device) for part in batch) for batch in work.batches]

    def step(k: int) -> float:
        optimizer.zero_grad()
        loss = work.loss(forward, *batches[k % len(batches)])
        loss.backward()
        optimizer.step()
        if device != "cpu":
            xm.mark_step()
        return loss.item()

    return before, step


def on_jax(kind: str, size: str) -> Made:
    """The same by hand."""
    import jax.numpy as jnp
    import measure as measuring
    import zoo_jax

    jnp.zeros(1).tolist()  # starts the runtime and its compiler
    work = zoo_models.make(kind, size)
    before = measuring.resident_mib()
    train = zoo_jax.trainer(zoo_jax.make(kind, work.model))
    batches = [zoo_jax.batch_of(batch) for batch in work.batches]
    del work
    gc.collect()  # the torch model, which may be a circle
    return before, lambda k: train(*batches[k % len(batches)])


def measure(kind: str, size: str, variant: str, least: int, seconds: float) -> dict[str, Any]:
    """What one variant takes, in this process. Behind `rounds.WARM` steps it runs at least `least`, and until `seconds` have passed."""
    before, step = on_jax(kind, size) if variant == "jax" else on_torch(kind, size, variant)
    losses: list[float] = []
    walls: list[float] = []
    cpus: list[float] = []
    began = time.perf_counter()
    while len(walls) < least + rounds.WARM or time.perf_counter() - began < seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(step(len(walls)))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        if len(walls) == rounds.WARM:
            began = time.perf_counter()
    steady = slice(rounds.WARM, None)
    return {
        "first_step_s": walls[0],
        "first_step_cpu_s": cpus[0],
        "first_steps_s": sum(walls[: CHECKED + 1]),
        "step_ms": 1e3 * statistics.median(walls[steady]),
        "step_cpu_ms": 1e3 * statistics.median(cpus[steady]),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
        "losses": losses[:CHECKED],
    }


def run(kind: str, size: str, variant: str, options: list[str]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    removed = {"JAX_COMPILATION_CACHE_DIR", "PYTHONPATH"}
    env = {k: v for k, v in os.environ.items() if k not in removed}
    python = sys.executable
    if variant == "torch_xla":
        python = str(torch_xla_venv.make_venv(torch_xla_venv.DEFAULT_VENV))
        env["PJRT_DEVICE"] = "CPU"
    elif variant == "xla":
        env |= {"PYTHONPATH": os.pathsep.join([str(rounds.HERE.parent), str(rounds.HERE.parent / "aliases")]), "JAX_PLATFORMS": "cpu"}
    elif variant == "jax":
        env |= {"JAX_PLATFORMS": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # without our device
    command = [python, __file__, "--kinds", kind, "--sizes", size, "--variant", variant, *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kind}, {size}, {variant} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


Runs = dict[str, list[dict[str, Any]]]
Found = dict[tuple[str, str], Runs]
"""(kind, size): variant: what each round found. Variants that a kind does not have are not there."""


def disagreement(found: Found) -> float:
    """The largest relative difference between losses of variants. Raises RuntimeError if it is more than TOLERANCE."""
    worst = 0.0
    for (kind, size), variants in found.items():
        if kind in DRAWS:
            continue
        everyone = [run["losses"] for runs in variants.values() for run in runs]
        here = max(abs(a - b) / max(abs(b), 1e-6) for losses in everyone for a, b in zip(losses, everyone[0], strict=True))
        if here > TOLERANCE:
            raise RuntimeError(f"the losses of {kind}, {size} differ by {here:.1e}: {everyone}")
        worst = max(worst, here)
    return worst


def ratio(variants: Runs, variant: str, column: str, peer: str = PEER) -> float:
    """The median over the rounds of a variant's value over the peer's."""
    value = COLUMNS[column][1]
    return statistics.median(value(mine) / max(value(other), 1e-9) for mine, other in zip(variants[variant], variants[peer], strict=True))


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def table(found: Found, names: list[str]) -> str:
    """Worst first, by the step of the first variant."""
    order = sorted(found, key=lambda case: -ratio(found[case], names[0], "step") if names[0] in found[case] else 0.0)
    lines = [f"| model | variant | {' | '.join(title for title, _, _ in COLUMNS.values())} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for case in order:
        for name in names:
            cells = [_cell(found[case], name, column) if name in found[case] else "-" for column in COLUMNS]
            lines.append(f"| {', '.join(case)} | {name} | {' | '.join(cells)} |")
    lines.append("")
    for name in names:
        having = [variants for variants in found.values() if name in variants]
        if name != PEER and having:
            step, cpu = (mean(ratio(variants, name, column) for variants in having) for column in ("step", "cpu"))
            few = "" if len(having) == len(found) else f" ({len(having)} of {len(found)} models)"
            lines.append(f"- `{name}` ({VARIANTS[name]}): geometric mean of steps {step:.2f}x, of CPU time {cpu:.2f}x{few}.")
    return "\n".join(lines)


def _cell(variants: Runs, name: str, column: str) -> str:
    _, value, digits = COLUMNS[column]
    return f"{statistics.median(value(run) for run in variants[name]):.{digits}f} ({ratio(variants, name, column):.2f}x)"


def against_jax(found: Found) -> str:
    """A table of `xla` against `jax`, worst step first; empty where no model has both."""
    ratios = {
        ", ".join(case): [ratio(variants, "xla", column, "jax") for column in COLUMNS]
        for case, variants in found.items()
        if {"xla", "jax"} <= set(variants)
    }
    if not ratios:
        return ""
    rows = sorted(ratios.items(), key=lambda row: -row[1][list(COLUMNS).index("step")])
    rows.append(("geometric mean", [mean(column) for column in zip(*ratios.values(), strict=True)]))
    titles = [title.rpartition(" (")[0] for title, _, _ in COLUMNS.values()]
    lines = [f"| `xla` against hand-written JAX | {' | '.join(titles)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(f'{value:.2f}x' for value in row)} |" for name, row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(zoo_models.KINDS), help=f"comma-separated, of {', '.join(zoo_models.KINDS)}")
    parser.add_argument("--sizes", default="small,medium", help=f"comma-separated, of {', '.join(zoo_models.SIZES)}")
    parser.add_argument("--variants", default="xla,eager", help=f"comma-separated, of {', '.join(VARIANTS)}; eager is always among them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps per measurement at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement at least")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for given, known in (args.kinds, zoo_models.KINDS), (args.sizes, zoo_models.SIZES), (args.variants, VARIANTS):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if args.variant:
        print(json.dumps(measure(args.kinds, args.sizes, args.variant, args.steps, args.seconds)), flush=True)
        return
    names = args.variants.split(",")
    names += [PEER] if PEER not in names else []
    cases = zoo_models.names(args.kinds.split(","), args.sizes.split(","))
    found: Found = {case: {name: [] for name in names if name != "jax" or case[0] in BY_HAND} for case in cases}
    for number in range(args.rounds):
        for case in cases:
            for name, runs in found[case].items():
                runs.append(run(*case, name, ["--steps", str(args.steps), "--seconds", str(args.seconds)]))
            shown = ", ".join(
                f"{name} {runs[-1]['first_step_s']:.1f} s, {runs[-1]['step_ms']:.1f} ms" for name, runs in found[case].items()
            )
            print(f"round {number + 1}: {', '.join(case)}: {shown}", file=sys.stderr, flush=True)
    text = "\n\n".join(filter(None, [table(found, names), against_jax(found)]))
    stack = rounds.stack("torch", "transformers", "jax", "jaxlib", "optax")
    text += f"\n\nMedian of {args.rounds} round(s); losses agree to {disagreement(found):.0e}; {stack}"
    print(text)
    if args.write:
        rounds.put("zoo", text)


if __name__ == "__main__":
    main()
