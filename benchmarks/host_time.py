"""Time what Python does in a training step: op by op (NXD_JAX_REPLAY=0), and played from recordings, part by part.

    python benchmarks/host_time.py --rounds 3 --write

The step is that of step_time.py, an 8-layer Llama, in two sizes: hidden 256, whose arithmetic runs on the same cores and empties their caches between
steps, and hidden 32 with 4 tokens, which leaves Python's own data there, as a device of its own does. Each loss is read before the next step
starts. Played and op by op run in turn, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator

import rounds

SIZES = {"256": (256, 688, 128), "32": (32, 32, 4)}
"""By name: hidden size, intermediate size, tokens of a sequence."""
KINDS = {"ops": "op by op", "played": "played"}
PARTS = ("batch to the device", "forward", "backward", "optimizer", "the rest", "`mark_step`")
STEPS, FIRST = 40, 10


def child(variant: str) -> None:
    """Medians over the steps after the first, as JSON: milliseconds of each part, and of all but the last (`host`)."""
    kind, size = variant.split("-")
    os.environ["NXD_JAX_REPLAY"] = "all" if kind == "played" else "0"

    import measure
    import torch
    import torch_step
    import torch_xla.core.xla_model as xm

    measure.HIDDEN, measure.INTERMEDIATE, measure.SEQ = SIZES[size]
    model = torch_step.make_model().to("xla")
    optimizer, scheduler = torch_step.make_optimizer(model)
    spent: list[dict[str, float]] = []

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        spent[-1][name] = time.perf_counter() - started

    losses = []
    for ids in measure.batches(STEPS):
        spent.append({})
        with part(PARTS[0]):
            batch = torch.from_numpy(ids).to("xla")
        with part(PARTS[1]):
            loss = model(input_ids=batch, labels=batch).loss
        with part(PARTS[2]):
            loss.backward()
        with part(PARTS[3]):
            optimizer.step()
        with part(PARTS[4]):
            scheduler.step()
            optimizer.zero_grad()
            loss = loss.detach()
        with part(PARTS[5]):
            xm.mark_step()
        losses.append(loss.item())
    found = {name: 1e3 * statistics.median(s[name] for s in spent[FIRST:]) for name in PARTS}
    host = 1e3 * statistics.median(sum(s[name] for name in PARTS[:-1]) for s in spent[FIRST:])
    print(json.dumps({"parts": found, "host": host, "seconds": host / 1e3, "losses": losses}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        child(args.variant)
        return
    names = [f"{kind}-{size}" for size in SIZES for kind in KINDS]
    found = rounds.run(__file__, names, args.rounds, [], key="seconds")
    lines = [f"| | {' | '.join(PARTS[:-1])} | **until `mark_step`** | {PARTS[-1]} |", "|---" * (len(PARTS) + 2) + "|"]
    for size, (hidden, _, tokens) in SIZES.items():
        rounds.difference({name: found[name] for name in found if name.endswith(f"-{size}")}, most=1e-5)
        for kind, title in KINDS.items():
            runs = found[f"{kind}-{size}"]
            cells = [f"{statistics.median(r['parts'][name] for r in runs):.2f}" for name in PARTS]
            ratio = statistics.median(r["host"] / base["host"] for r, base in zip(runs, found[f"ops-{size}"], strict=True))
            cells.insert(-1, f"**{statistics.median(r['host'] for r in runs):.2f}** ({ratio:.3f}x)")
            lines.append(f"| hidden {hidden}, 4 x {tokens} tokens, {title} | {' | '.join(cells)} |")
    note = f"milliseconds of Python; ratios to op by op; median of {args.rounds} round(s), {STEPS - FIRST} steps each"
    text = "\n".join(lines) + f"\n\n{note}; {rounds.stack('torch', 'transformers', 'jax', 'jaxlib')}"
    print(text)
    if args.write:
        rounds.put("host_time", text)


if __name__ == "__main__":
    main()
