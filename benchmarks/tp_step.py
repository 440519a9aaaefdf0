"""Time a tensor-parallel training step on emulated cores: the NxD Llama of examples/llama through our bridge, and the same step hand-written with shard_map.

    python benchmarks/tp_step.py --rounds 3 --write
    python benchmarks/tp_step.py --rounds 3 --write --zero1

Both run TP 8 x DP 4 on 32 virtual CPU devices in a process of their own, in turn, from the same weights and on the same batches; the losses must
agree. The hand-written step is Megatron's: one all-reduce forward and one backward for each attention and each MLP, a vocabulary-parallel embedding and
loss, gradients averaged over dp, AdamW on each rank's shards, one jitted program with donated state. With `--zero1` the gradients are reduce-scattered over
dp, AdamW's state is split among dp ranks, and the new weights are gathered (NxD's NeuronZero1Optimizer, and the same by hand).
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
from pathlib import Path
from typing import Any

import numpy as np
import rounds

HERE = Path(__file__).resolve().parent
TP, DP = 8, 4
BATCH, SEQ, VOCAB = 2, 128, 256  # batch: sequences of each data-parallel rank
LAYERS, HIDDEN, INTERMEDIATE, HEADS = 4, 256, 704, 8
LEARNING_RATE, DECAY = 1e-3, 0.01
VARIANTS = {"ours": "NxD layers through our bridge", "jax": "hand-written shard_map + optax"}


def batches(count: int) -> list[np.ndarray]:
    """Token ids [DP * BATCH, SEQ]."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, (DP * BATCH, SEQ), dtype=np.int64) for _ in range(count)]


def weights() -> dict[str, np.ndarray]:
    """Full weights under Hugging Face's names, [out, in]."""
    generator = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return (0.02 * generator.standard_normal(shape)).astype(np.float32)

    full = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "lm_head.weight": normal(VOCAB, HIDDEN)}
    full["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for k in range(LAYERS):
        prefix = f"model.layers.{k}."
        full |= {f"{prefix}self_attn.{n}_proj.weight": normal(HIDDEN, HIDDEN) for n in "qkvo"}
        full |= {f"{prefix}mlp.{n}_proj.weight": normal(INTERMEDIATE, HIDDEN) for n in ("gate", "up")}
        full[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        full |= {f"{prefix}{n}.weight": np.ones(HIDDEN, np.float32) for n in ("input_layernorm", "post_attention_layernorm")}
    return full


Step = Callable[[np.ndarray], Any]


def make_ours(zero1: bool) -> tuple[Step, Callable[[Any], float]]:
    """The script's step: returns (dispatch, read)."""
    os.environ["NXD_JAX_WORLD_SIZE"] = str(TP * DP)
    sys.path[:0] = [str(HERE.parent / "examples" / "llama")]
    import hf_weights
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_backend  # noqa: F401
    from modeling_llama_nxd import LlamaForCausalLM
    from neuronx_distributed.optimizer import NeuronZero1Optimizer
    from neuronx_distributed.parallel_layers import grads, parallel_state
    from transformers import LlamaConfig

    from torch_bridge.recorder import sharded

    torch.distributed.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        rms_norm_eps=1e-6,
    )
    model = LlamaForCausalLM(config)
    hf_weights.from_full(model, {name: torch.from_numpy(w) for name, w in weights().items()})
    model.to("xla")
    if zero1:
        optimizer: Any = NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.01, grad_clipping=False, pin_layout=False
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + DECAY * step))
    groups = parallel_state.get_data_parallel_group(as_list=True)

    def dispatch(ids: np.ndarray) -> Any:
        rows = torch.from_numpy(ids)
        batch = sharded.from_ranks(lambda r: rows[r // TP * BATCH : (r // TP + 1) * BATCH], ["dp"])
        labels = torch.cat([batch[:, 1:], torch.full_like(batch[:, :1], -100)], dim=1)
        loss, _ = model(batch, labels)
        loss.backward()
        if not zero1:
            grads.bucket_allreduce_gradients([p.grad for p in model.parameters()])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = xm.all_reduce("sum", loss.detach(), 1 / DP, groups=groups)
        xm.mark_step()
        return mean

    return dispatch, lambda loss: loss.item()


def make_jax(zero1: bool) -> tuple[Step, Callable[[Any], float]]:
    """The hand-written step: returns (dispatch, read)."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    sys.path[:0] = [str(HERE)]
    from llama_jax import rms_norm, rotate

    jax.config.update("jax_num_cpu_devices", TP * DP)
    mesh = jax.make_mesh((DP, TP), ("dp", "tp"))

    @jax.custom_vjp
    def enter(x):  # Megatron's f: its gradient is summed over tp
        return x

    enter.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "tp"),))

    @jax.custom_vjp
    def leave(x):  # Megatron's g: summed over tp
        return jax.lax.psum(x, "tp")

    leave.defvjp(lambda x: (jax.lax.psum(x, "tp"), None), lambda _, g: (g,))

    def own_rows(ids):
        local = ids - jax.lax.axis_index("tp") * (VOCAB // TP)
        inside = (local >= 0) & (local < VOCAB // TP)
        return jnp.where(inside, local, 0), inside

    def loss_fn(params, ids_BS):
        rows, inside = own_rows(ids_BS)
        x_BSD = leave(jnp.where(inside[..., None], params["embedding"][rows], 0.0))
        for layer in params["layers"]:
            h_BSD = enter(rms_norm(x_BSD, layer["attention_norm"]))
            q, k, v = ((h_BSD @ layer[n]).reshape(*h_BSD.shape[:2], HEADS // TP, -1) for n in "qkv")
            out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x_BSD = x_BSD + leave(out.reshape(*h_BSD.shape[:2], -1) @ layer["o"])
            h_BSD = enter(rms_norm(x_BSD, layer["mlp_norm"]))
            x_BSD = x_BSD + leave((jax.nn.silu(h_BSD @ layer["gate"]) * (h_BSD @ layer["up"])) @ layer["down"])
        logits_BSV = enter(rms_norm(x_BSD, params["norm"]))[:, :-1] @ params["head"]
        rows, inside = own_rows(ids_BS[:, 1:])
        top = jax.lax.pmax(jax.lax.stop_gradient(logits_BSV.max(-1)), "tp")
        total = leave(jnp.exp(logits_BSV - top[..., None]).sum(-1))
        right = leave(jnp.where(inside, jnp.take_along_axis(logits_BSV, rows[..., None], -1)[..., 0], 0.0))
        return (jnp.log(total) + top - right).mean()

    optimizer = optax.adamw(lambda step: LEARNING_RATE / (1 + DECAY * step), weight_decay=0.01)

    def train_step(params, state, ids_BS):
        loss, grads = jax.value_and_grad(loss_fn)(params, ids_BS)
        mine = params
        if zero1:
            grads = jax.tree.map(lambda g: jax.lax.psum_scatter(g, "dp", tiled=True) / DP, grads)
            at = jax.lax.axis_index("dp")
            mine = jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, at * (w.shape[0] // DP), w.shape[0] // DP), params)
        else:
            grads = jax.lax.pmean(grads, "dp")
        updates, state = optimizer.update(grads, state, mine)
        mine = optax.apply_updates(mine, updates)
        params = jax.tree.map(lambda w: jax.lax.all_gather(w, "dp", tiled=True), mine) if zero1 else mine
        return params, state, jax.lax.pmean(loss, "dp")

    full = weights()
    column, row, same = P(None, "tp"), P("tp", None), P()
    layout: dict[str, Any] = {"embedding": row, "head": column, "norm": same}
    params: dict[str, Any] = {
        "embedding": full["model.embed_tokens.weight"],
        "head": full["lm_head.weight"].T,
        "norm": full["model.norm.weight"],
    }
    params["layers"], layout["layers"] = [], []
    for k in range(LAYERS):
        prefix = f"model.layers.{k}."
        layer = {n: full[f"{prefix}self_attn.{n}_proj.weight"].T for n in "qkvo"}
        layer |= {n: full[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up", "down")}
        layer["attention_norm"] = full[f"{prefix}input_layernorm.weight"]
        layer["mlp_norm"] = full[f"{prefix}post_attention_layernorm.weight"]
        params["layers"].append(layer)
        layout["layers"].append({n: row if n in ("o", "down") else same if n.endswith("norm") else column for n in layer})
    params = jax.tree.map(lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec)), params, layout)
    state_layout = jax.tree.map(lambda x: same, jax.eval_shape(optimizer.init, params))
    split = {column: P("dp", "tp"), row: P(("tp", "dp"), None), same: P("dp")}
    kept = jax.tree.map(lambda spec: split[spec], layout) if zero1 else layout
    state_layout = optax.tree_map_params(optimizer, lambda _, spec: spec, state_layout, kept)
    state = jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), state_layout))(params)
    specs = (layout, state_layout, P("dp"))
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=specs, out_specs=(layout, state_layout, same), check_vma=False)
    step = partial(jax.jit, donate_argnums=(0, 1))(mapped)

    def dispatch(ids: np.ndarray) -> Any:
        nonlocal params, state
        params, state, loss = step(params, state, jax.device_put(ids.astype(np.int32), NamedSharding(mesh, P("dp"))))
        return loss

    return dispatch, float


def measure(name: str, steps: int, zero1: bool) -> dict[str, Any]:
    """Run one variant in this process."""
    dispatch, read = {"ours": make_ours, "jax": make_jax}[name](zero1)
    data = batches(8)
    losses, first = [], 0.0
    for k in range(5):
        start = time.perf_counter()
        losses.append(read(dispatch(data[k])))
        first = first or time.perf_counter() - start
    synced, free, cpu = [], [], []
    for _ in range(4):
        for k in range(steps // 4):
            start = time.perf_counter()
            read(dispatch(data[k % 8]))
            synced.append(time.perf_counter() - start)
        start, cpu_start = time.perf_counter(), time.process_time()
        for k in range(steps // 4):
            handle = dispatch(data[k % 8])
        read(handle)
        free.append((time.perf_counter() - start) / (steps // 4))
        cpu.append((time.process_time() - cpu_start) / (steps // 4))
    medians = {"free": free, "synced": synced, "cpu": cpu}
    return {"losses": losses, "first": first} | {k: statistics.median(v) for k, v in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--zero1", action="store_true", help="split the optimizer's state among data-parallel ranks")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.steps, args.zero1)))
        return
    options = ["--steps", str(args.steps), *["--zero1"][: args.zero1]]
    text = table(rounds.run(__file__, VARIANTS, args.rounds, options, "free"), args.zero1)
    print(text)
    if args.write:
        rounds.put("tp_step_zero1" if args.zero1 else "tp_step", text)


def table(found: dict[str, list[dict[str, Any]]], zero1: bool) -> str:
    """A Markdown table with ratios to the hand-written step."""
    difference = rounds.difference(found, 1e-3)
    columns = {
        "free": "step, no waiting (ms)",
        "synced": "step, loss read each step (ms)",
        "cpu": "CPU time per step (ms)",
        "first": "first step (ms)",
    }
    lines = [f"| variant | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for name, title in VARIANTS.items():
        cells = [rounds.cell(found[name], found["jax"], key) for key in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    zero = " with ZeRO-1" if zero1 else ""
    shape = f"TP {TP} x DP {DP}{zero} on {TP * DP} virtual CPU devices; {LAYERS} layers, hidden {HIDDEN}, {DP * BATCH} x {SEQ} tokens"
    about = rounds.stack("torch", "jax", "jaxlib", "optax")
    lines += ["", f"{shape}; median of {len(found['jax'])} round(s); losses agree to {difference:.0e}; {about}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
