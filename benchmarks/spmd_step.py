"""Time a fully sharded training step by annotations: transformers' Llama under FSDPv2 through our bridge, and hand-written JAX with the same shardings.

    python benchmarks/spmd_step.py --rounds 3 --write

Both run on 8 virtual CPU devices in a process of their own, in turn, from the same weights and on the same batches; the losses must agree. Each weight is
divided along its largest dim, as FSDPv2 does it, and AdamW's state with it; the batch along its first. Steps are timed behind
`rounds.WARM` others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import rounds

DEVICES = 8
BATCH, SEQ, VOCAB = 8, 128, 256
LAYERS, HIDDEN, INTERMEDIATE, HEADS = 4, 256, 704, 8
LEARNING_RATE = 1e-3
VARIANTS = {"ours": "transformers' Llama, FSDPv2", "jax": "hand-written JAX + optax, the same shardings"}
Step = Callable[[np.ndarray], Any]


def batches(count: int) -> list[np.ndarray]:
    """Token ids [BATCH, SEQ]."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, (BATCH, SEQ), dtype=np.int64) for _ in range(count)]


def model() -> Any:
    """transformers' Llama, the same in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def make_ours() -> tuple[Step, Callable[[Any], float]]:
    """The script's step: returns (dispatch, read)."""
    os.environ["NXD_JAX_WORLD_SIZE"] = str(DEVICES)
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

    xr.use_spmd()
    mesh = xs.Mesh(range(DEVICES), (DEVICES,), ("fsdp",))
    sharded = FSDPv2(model(), mesh=mesh, shard_output=lambda out, on: xs.mark_sharding(out.logits, on, ("fsdp", None, None)))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE, weight_decay=0.01)

    def dispatch(ids: np.ndarray) -> Any:
        batch = torch.from_numpy(ids).to("xla")
        xs.mark_sharding(batch, mesh, ("fsdp", None))
        loss = sharded(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss

    return dispatch, lambda loss: loss.item()


def make_jax() -> tuple[Step, Callable[[Any], float]]:
    """The hand-written step: returns (dispatch, read)."""
    import jax
    import llama_jax
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))

    def divided(x: Any) -> NamedSharding:
        dims = [d for d, n in enumerate(x.shape) if n % DEVICES == 0]
        chosen = max(dims, key=lambda d: x.shape[d], default=None)
        return NamedSharding(mesh, P(*("fsdp" if d == chosen else None for d in range(x.ndim))))

    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)
    params = llama_jax.from_torch({name: value.numpy() for name, value in model().state_dict().items()})
    params = jax.tree.map(lambda x: jax.device_put(x, divided(x)), params)
    state = jax.jit(optimizer.init)(params)
    state = jax.tree.map(lambda x: jax.device_put(x, divided(x)), state)
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    rows = NamedSharding(mesh, P("fsdp"))

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*places, NamedSharding(mesh, P())))
    def train_step(params, state, ids_BS):
        loss, grads = jax.value_and_grad(llama_jax.loss_fn)(params, ids_BS, HEADS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def dispatch(ids: np.ndarray) -> Any:
        nonlocal params, state
        params, state, loss = train_step(params, state, jax.device_put(ids.astype(np.int32), rows))
        return loss

    return dispatch, float


def measure(name: str, steps: int) -> dict[str, Any]:
    """Run one variant in this process."""
    dispatch, read = {"ours": make_ours, "jax": make_jax}[name]()
    data = batches(8)
    losses, first = [], 0.0
    for k in range(rounds.WARM):
        start = time.perf_counter()
        losses.append(read(dispatch(data[k % len(data)])))
        first = first or time.perf_counter() - start
    took, used = [], []
    for k in range(steps):
        start, cpu = rounds.now()
        read(dispatch(data[k % 8]))
        end, cpu_end = rounds.now()
        took.append(end - start)
        used.append(cpu_end - cpu)
    return {"losses": losses, "first": first, "step": statistics.median(took), "cpu": statistics.median(used)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help=f"steps per measurement, behind the first {rounds.WARM}")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.steps)))
        return
    text = table(rounds.run(__file__, VARIANTS, args.rounds, ["--steps", str(args.steps)], "step"))
    sys.stdout.write(text + "\n")
    if args.write:
        rounds.put("spmd_step", text)


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table with ratios to the hand-written step."""
    worst = rounds.difference(found, 1e-3)
    columns = {"step": "step, loss read (ms)", "cpu": "CPU time of a step (ms)", "first": "first step (ms)"}
    lines = [f"| variant | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for name, title in VARIANTS.items():
        cells = [rounds.cell(found[name], found["jax"], key) for key in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    about = rounds.stack("torch", "transformers", "jax", "jaxlib", "optax")
    shape = f"{DEVICES} virtual CPU devices; {LAYERS} layers, hidden {HIDDEN}, {BATCH} x {SEQ} tokens"
    return "\n".join([*lines, "", f"{shape}; median of {len(found['jax'])} round(s); losses agree to {worst:.0e}; {about}"])


if __name__ == "__main__":
    main()
