"""What depth costs: compiling and running a training step of 32 equal layers against one of 2, folded into a loop and not, and written by hand in JAX.

    python benchmarks/depth.py --rounds 3 --write

Every variant runs in a process of its own, in turn. The script is plain torch on "xla"; `NXD_JAX_FOLD=0` turns folding off. The losses of the folded
and the unfolded program must agree, and those of the hand-written one to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rounds

BATCH, SEQ, VOCAB = 4, 128, 256
HIDDEN, INTERMEDIATE, HEADS = 128, 344, 4
DEEP = 32
VARIANTS = {
    "two": "2 layers",
    "folded": f"{DEEP} layers, one loop",
    "unfolded": f"{DEEP} layers, unfolded",
    "jax": f"{DEEP} layers, hand-written JAX with `lax.scan`",
}


def batches(count: int) -> list[np.ndarray]:
    """Token ids [BATCH, SEQ]."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, (BATCH, SEQ), dtype=np.int64) for _ in range(count)]


def torch_model(layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQ,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_torch(layers: int) -> tuple[Any, Any, Any]:
    """(dispatch, read, seconds spent compiling so far)."""
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    import torch_bridge

    model = torch_bridge.optimize(torch_model(layers).to("xla"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def dispatch(ids: np.ndarray) -> Any:
        batch = torch.from_numpy(ids).to("xla")
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()
        return loss.detach()

    return dispatch, lambda loss: loss.item(), lambda: 1e-9 * (met.metric_data("CompileTime") or (0, 0))[1]


def make_jax(layers: int) -> tuple[Any, Any, Any]:
    """(dispatch, read, seconds spent tracing, lowering and compiling so far)."""
    import jax
    import jax.numpy as jnp
    import llama_jax
    import optax

    seconds: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: seconds.append(duration) if "/compile/" in event else None
    )
    params = llama_jax.from_torch({name: value.numpy() for name, value in torch_model(layers).state_dict().items()})
    params["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])

    def loss_fn(params, ids_BS):
        def layer(x_BSD, weights):
            x_BSD = x_BSD + llama_jax.attention(weights, llama_jax.rms_norm(x_BSD, weights["attention_norm"]), HEADS)
            h_BSD = llama_jax.rms_norm(x_BSD, weights["mlp_norm"])
            return x_BSD + (jax.nn.silu(h_BSD @ weights["gate"]) * (h_BSD @ weights["up"])) @ weights["down"], None

        x_BSD, _ = jax.lax.scan(layer, params["embedding"][ids_BS], params["layers"])
        logits_BSV = llama_jax.rms_norm(x_BSD, params["norm"])[:, :-1] @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, ids_BS[:, 1:]).mean()

    optimizer = optax.adamw(1e-3, weight_decay=0.01)
    state = jax.jit(optimizer.init)(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, ids_BS):
        loss, grads = jax.value_and_grad(loss_fn)(params, ids_BS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def dispatch(ids: np.ndarray) -> Any:
        nonlocal params, state
        params, state, loss = train_step(params, state, ids.astype(np.int32))
        return loss

    seconds.clear()
    return dispatch, float, lambda: sum(seconds)


def measure(name: str, steps: int) -> dict[str, Any]:
    """Run one variant in this process."""
    os.environ["NXD_JAX_FOLD"] = "0" if name == "unfolded" else "12"
    sys.path[:0] = [str(Path(__file__).resolve().parent)]
    dispatch, read, compiling = make_jax(DEEP) if name == "jax" else make_torch(2 if name == "two" else DEEP)
    data = batches(8)
    losses, first, first_cpu = [], 0.0, 0.0
    for k in range(5):
        start, cpu = time.perf_counter(), time.process_time()
        losses.append(read(dispatch(data[k])))
        first, first_cpu = first or time.perf_counter() - start, first_cpu or time.process_time() - cpu
    wall, own = [], []
    for k in range(steps):
        start, cpu = time.perf_counter(), time.process_time()
        read(dispatch(data[k % 8]))
        wall.append(time.perf_counter() - start)
        own.append(time.process_time() - cpu)
    steady = {"step": statistics.median(wall), "step_cpu": statistics.median(own)}
    return {"losses": losses, "compile": compiling(), "first": first, "first_cpu": first_cpu} | steady


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.steps)))
        return
    text = table(rounds.run(__file__, VARIANTS, args.rounds, ["--steps", str(args.steps)], "step"))
    print(text)
    if args.write:
        rounds.put("depth", text)


COLUMNS = {
    "compile": ("compiling (s)", "two", 1, 2),
    "first": ("first step (s)", "two", 1, 2),
    "first_cpu": ("CPU time of the first step (s)", "two", 1, 2),
    "step": ("step (ms)", "unfolded", 1e3, 0),
    "step_cpu": ("CPU time of a step (ms)", "unfolded", 1e3, 0),
}
"""Title, the variant that the ratio is to, the unit and digits."""


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table. Raises RuntimeError if the losses differ."""
    folded = rounds.difference({name: found[name] for name in ("folded", "unfolded")}, 1e-5)
    jax = rounds.difference({name: found[name] for name in ("folded", "jax")}, 1e-3)
    lines = [f"| variant | {' | '.join(title for title, *_ in COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, title in VARIANTS.items():
        cells = [rounds.cell(found[name], found[to], key, unit, digits) for key, (_, to, unit, digits) in COLUMNS.items()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    shape = (
        f"hidden {HIDDEN}, {BATCH} x {SEQ} tokens, AdamW; ratios of compiling and first steps to 2 layers, of steps to the unfolded program"
    )
    agree = f"losses of the folded and the unfolded program differ by {folded:.0e}, of the hand-written one by {jax:.0e}"
    about = rounds.stack("torch", "transformers", "jax", "jaxlib", "optax")
    return "\n".join([*lines, "", f"{shape}; median of {len(found['two'])} round(s); {agree}; {about}"])


if __name__ == "__main__":
    main()
