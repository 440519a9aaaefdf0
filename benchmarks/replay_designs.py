"""Time one training step recorded op by op, played from recordings, in hand-written JAX and in eager torch: what a design of replay can win.

docs/explanation/replay_designs.md has the results.

    python benchmarks/replay_designs.py

The step is that of step_time.py with an explicit attention mask; the loss is read in every step. Each variant has a process of its own, which all
make one step in turn; the quietest steps count. recorded_beside.py and dynamo_guards.py measure two designs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import quiet
import rounds

WARM = 6
TITLES = {
    "jax": "hand-written JAX, one jitted step",
    "ops": "unchanged script, `NXD_JAX_REPLAY=0`",
    "played": "unchanged script, `NXD_JAX_REPLAY=all`",
    "torch": "eager torch on the CPU",
}


def torch_step(device: str) -> tuple[Callable[[np.ndarray], Any], Callable[[], None]]:
    """A step of the torch script up to `sync`, which gives the loss, and `sync` itself."""
    import torch
    import torch_step as script

    model = script.make_model().to(device)
    optimizer, scheduler = script.make_optimizer(model)
    mask: list[Any] = []

    def step(ids: np.ndarray) -> Any:
        batch = torch.from_numpy(ids).to(device)
        if not mask:
            mask.append(torch.ones_like(batch))
        loss = model(input_ids=batch, attention_mask=mask[0], labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    if device == "cpu":
        return step, lambda: None
    import torch_xla

    return step, torch_xla.sync


def jax_step() -> tuple[Callable[[np.ndarray], Any], Callable[[], None]]:
    """The same of hand-written JAX."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    import llama_jax
    import measure
    import optax
    import torch_step as script

    optimizer = optax.adamw(lambda step: measure.LEARNING_RATE / (1 + measure.DECAY * step), weight_decay=0.01)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, ids_BS: Any, mask_BS: Any) -> Any:
        loss, grads = jax.value_and_grad(llama_jax.loss_fn)(params, ids_BS, measure.HEADS, mask_BS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = llama_jax.from_torch({name: value.numpy() for name, value in script.make_model().state_dict().items()})
    state = jax.jit(optimizer.init)(params)
    mask_BS = jnp.ones((measure.BATCH, measure.SEQ), jnp.int32)

    def step(ids: np.ndarray) -> Any:
        nonlocal params, state
        params, state, loss = train_step(params, state, ids.astype(np.int32), mask_BS)
        return loss

    return step, lambda: None


def child(variant: str) -> None:
    """Warm up, then make one step for each line of input. Prints its seconds as JSON: wall, host (until `sync`), sync, CPU of host and of all."""
    os.environ["NXD_JAX_REPLAY"] = "all" if variant == "played" else "0"
    import measure

    step, mark = jax_step() if variant == "jax" else torch_step("cpu" if variant == "torch" else "xla")
    data = measure.batches()
    for number in itertools.count():
        if number >= WARM and not sys.stdin.readline():
            return
        started, cpu = time.perf_counter(), time.process_time()
        loss = step(data[number % len(data)])
        recorded = time.perf_counter()
        python = time.process_time() - cpu  # of Python alone: the loss of the last step has been read, so nothing else runs
        mark()
        marked = time.perf_counter()
        value = float(loss)
        wall, host, sync = time.perf_counter() - started, recorded - started, marked - recorded
        answer = {"wall": wall, "host": host, "sync": sync, "python": python, "cpu": time.process_time() - cpu, "loss": value}
        print(json.dumps(answer), flush=True)


class Child:
    """A process that makes one step when asked."""

    def __init__(self, variant: str):
        path = os.pathsep.join([str(rounds.HERE.parent), str(rounds.HERE.parent / "aliases")])
        env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen([sys.executable, __file__, "--variant", variant], env=env, stdin=-1, stdout=-1, text=True)
        self.losses = [self.answer()["loss"] for _ in range(WARM)]

    def answer(self) -> dict[str, float]:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")
        return json.loads(line)

    def step(self) -> dict[str, float]:
        """Make a step; `others` is the share of the cores that other processes had."""
        assert self.process.stdin is not None
        quiet.wait()
        watch = quiet.Watch([self.process.pid, os.getpid()])
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer() | {"others": watch.share()}


def baseline(limit: float) -> str:
    """The table of the variants, which make a step each in turn for `limit` seconds."""
    children = {name: Child(name) for name in TITLES}
    worst = max(abs(a - b) for c in children.values() for a, b in zip(c.losses, children["ops"].losses, strict=True))
    if worst > 1e-3:
        raise RuntimeError(f"the variants' losses differ by {worst}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in TITLES}
    ends = time.monotonic() + limit
    while time.monotonic() < ends:
        for name, c in children.items():
            found[name].append(c.step())
    for c in children.values():
        c.process.stdin.close()
        c.process.wait()
    note = f"{len(found['ops'])} turns; losses agree to {worst:.0e}; {rounds.stack('torch', 'transformers', 'jax', 'jaxlib', 'optax')}"
    return f"{table(found)}\n\n{note}"


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians of the quietest steps, and of all; ratios to hand-written JAX."""
    quietest = {name: quiet.quietest(steps, itemgetter("others")) for name, steps in found.items()}
    columns = (
        "step (ms)",
        "others' share of the cores",
        "least",
        "Python until `sync`",
        "its CPU time",
        "`sync`",
        "CPU time",
        "the same, all steps",
    )
    lines = [f"| variant | {' | '.join(columns)} |", "|---" * 9 + "|"]
    for name, title in TITLES.items():
        keys = ("wall", "host", "python", "sync", "cpu")
        wall, *host, cpu = (1e3 * statistics.median(step[key] for step in quietest[name]) for key in keys)
        ratio = wall / 1e3 / statistics.median(step["wall"] for step in quietest["jax"])
        least = 1e3 * min(step["wall"] for step in found[name])
        python = " | ".join(f"{x:.1f}" if name in ("ops", "played") else "" for x in host)
        every = 1e3 * statistics.median(step["cpu"] for step in found[name])
        others = max(step["others"] for step in quietest[name])
        lines.append(f"| {title} | {wall:.0f} ({ratio:.2f}x) | {others:.0%} | {least:.0f} | {python} | {cpu:.0f} | {every:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="how long")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        child(args.variant)
    else:
        print(baseline(args.seconds))


if __name__ == "__main__":
    main()
