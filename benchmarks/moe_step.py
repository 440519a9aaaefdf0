"""Time one layer of a mixture of experts, forward and backward, without dropping tokens: 8 experts, 2 for each of 4 x 128 tokens, float32 on the CPU.

    python benchmarks/moe_step.py --rounds 2 --compile --write

Variants run in turn, each in a process of its own, from the same weights and on the same tokens; the losses must agree.

- ours: `MoE` with `RouterTopK` and `ExpertMLPs` on xla.
- products: the router and the products of the routed tokens, hand-written in JAX for this one routing: rows of each expert are known when it is traced,
  and every expert has arrays of its own. What the arithmetic costs if routing costs nothing.
- ragged: hand-written JAX with `lax.ragged_dot`, for any routing.
- transformers: the block of transformers' Mixtral, eager, on the CPU.

Gradients of tokens and of all weights are computed in every step and kept until the next one. `--compile` also compiles the layer with 8 and with 128
smaller experts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import measure
import numpy as np
import rounds

EXPERTS, TOP_K, BATCH, SEQ = 8, 2, 4, 128
HIDDEN, INTERMEDIATE = 512, 1792
VARIANTS = {
    "ours": "`MoE` on xla, dropless",
    "products": "products of the routed tokens, hand-written JAX for one routing",
    "ragged": "hand-written JAX with `lax.ragged_dot`",
    "transformers": "transformers' Mixtral block, eager, on the CPU",
}
COMPILED = (8, 128)

Step = Callable[[int], Any]


class Numbers:
    """Weights and tokens. The tokens of batch 1 and up have other routings than those of batch 0."""

    def __init__(self, experts: int = EXPERTS, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE):
        generator = np.random.default_rng(0)

        def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
            return (generator.standard_normal(shape) * scale).astype(np.float32)

        self.router = draw(experts, hidden, scale=hidden**-0.5)
        self.gate_up = draw(experts, hidden, 2 * intermediate, scale=hidden**-0.5)
        self.down = draw(experts, intermediate, hidden, scale=intermediate**-0.5)
        self.target = draw(BATCH, SEQ, hidden)
        self.batches = [draw(BATCH, SEQ, hidden) for _ in range(3)]
        self.batches[1] += 2 * self.router[0]  # all tokens like one expert
        self.batches[2] -= 2 * self.router[1]

    def routing(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """For the tokens of a batch the pairs in the order of their experts, and how many each expert has."""
        logits = self.batches[k].reshape(-1, self.router.shape[1]) @ self.router.T
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K].reshape(-1)
        return np.argsort(chosen, kind="stable"), np.bincount(chosen, minlength=self.router.shape[0])


# -- ours ----------------------------------------------------------------------------------------------


def make_ours(numbers: Numbers) -> tuple[Step, Callable[[Any], float], Callable[[], float]]:
    """(dispatch, read, compilations so far)."""
    import torch
    import torch_xla
    from neuronx_distributed.modules.moe import ExpertMLPs, MoE, RouterTopK
    from neuronx_distributed.parallel_layers import parallel_state

    from torch_bridge import metrics

    torch.distributed.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    experts, hidden, intermediate = *numbers.router.shape, numbers.down.shape[1]
    mlps = ExpertMLPs(experts, TOP_K, hidden, intermediate, "silu", True, 0.0, normalize_top_k_affinities=True)
    layer = MoE(RouterTopK(experts, TOP_K, hidden), mlps)
    layer.load_state_dict(
        {
            "router.linear_router.weight": torch.from_numpy(numbers.router),
            "expert_mlps.mlp_op.gate_up_proj.weight": torch.from_numpy(numbers.gate_up),
            "expert_mlps.mlp_op.down_proj.weight": torch.from_numpy(numbers.down),
        }
    )
    layer.to("xla")
    target = torch.from_numpy(numbers.target).to("xla")
    tokens = [torch.from_numpy(b).to("xla").requires_grad_() for b in numbers.batches]

    def dispatch(k: int) -> Any:
        layer.zero_grad()
        tokens[k].grad = None
        loss = (layer(tokens[k])[0] * target).sum()
        loss.backward()
        torch_xla.sync()
        return loss

    return dispatch, lambda loss: loss.item(), lambda: metrics.COUNTERS.get("UncachedCompile", 0)


# -- JAX -----------------------------------------------------------------------------------------------


def _jitted(numbers: Numbers, layer: Callable[..., Any], params: Any) -> tuple[Step, Callable[[Any], float], Callable[[], float]]:
    import jax

    count = measure.count_jax_compilations()
    target = jax.device_put(numbers.target)
    tokens = [jax.device_put(b) for b in numbers.batches]
    grad = jax.jit(
        jax.value_and_grad(lambda params, x: (layer(params, x.reshape(-1, x.shape[-1])).reshape(x.shape) * target).sum(), (0, 1))
    )
    kept: list[Any] = [None]

    def dispatch(k: int) -> Any:
        loss, kept[0] = grad(params, tokens[k])
        return loss

    return dispatch, lambda loss: float(loss), count


def _weights(params: Any, x: Any) -> tuple[Any, Any]:
    """Experts of each token and their weights, which add up to 1."""
    import jax
    import jax.numpy as jnp

    affinities = jax.nn.softmax(x @ params["router"].T, axis=-1)
    top, index = jax.lax.top_k(affinities, TOP_K)
    return index, top / jnp.sum(top, axis=-1, keepdims=True)


def make_products(numbers: Numbers) -> tuple[Step, Callable[[Any], float], Callable[[], float]]:
    import jax
    import jax.numpy as jnp

    order, sizes = numbers.routing(0)
    place, ends = np.argsort(order), np.cumsum(sizes)
    params = {
        "router": jax.device_put(numbers.router),
        "gate_up": [jax.device_put(w) for w in numbers.gate_up],
        "down": [jax.device_put(w) for w in numbers.down],
    }

    def layer(params: Any, x: Any) -> Any:
        _, weights = _weights(params, x)
        rows = x[order // TOP_K]
        out = []
        for end, size, gate_up, down in zip(ends, sizes, params["gate_up"], params["down"], strict=True):
            gate, up = jnp.split(rows[end - size : end] @ gate_up, 2, axis=-1)
            out.append((jax.nn.silu(gate) * up) @ down)
        return (jnp.concatenate(out)[place].reshape(*weights.shape, -1) * weights[..., None]).sum(1)

    return _jitted(numbers, layer, params)


def make_ragged(numbers: Numbers) -> tuple[Step, Callable[[Any], float], Callable[[], float]]:
    import jax
    import jax.numpy as jnp

    params = {name: jax.device_put(getattr(numbers, name)) for name in ("router", "gate_up", "down")}

    def layer(params: Any, x: Any) -> Any:
        index, weights = _weights(params, x)
        order = jnp.argsort(index.reshape(-1), stable=True)
        sizes = jnp.bincount(index.reshape(-1), length=EXPERTS).astype(jnp.int32)
        rows = x[order // TOP_K]
        gate, up = jnp.split(jax.lax.ragged_dot(rows, params["gate_up"], sizes), 2, axis=-1)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
        return (out[jnp.argsort(order)].reshape(*weights.shape, -1) * weights[..., None]).sum(1)

    return _jitted(numbers, layer, params)


# -- transformers --------------------------------------------------------------------------------------


def make_transformers(numbers: Numbers) -> tuple[Step, Callable[[Any], float], Callable[[], float]]:
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(torch.from_numpy(numbers.router))
        block.experts.gate_up_proj.copy_(torch.from_numpy(numbers.gate_up).mT)
        block.experts.down_proj.copy_(torch.from_numpy(numbers.down).mT)
    target = torch.from_numpy(numbers.target)
    tokens = [torch.from_numpy(b).requires_grad_() for b in numbers.batches]

    def dispatch(k: int) -> Any:
        block.zero_grad()
        tokens[k].grad = None
        loss = (block(tokens[k]) * target).sum()
        loss.backward()
        return loss

    return dispatch, lambda loss: loss.item(), lambda: 0.0


# -- running -------------------------------------------------------------------------------------------


def child(name: str, steps: int) -> dict[str, Any]:
    """Run one variant in this process, on one device."""
    os.environ["NXD_JAX_WORLD_SIZE"] = "1"
    make = {"ours": make_ours, "products": make_products, "ragged": make_ragged, "transformers": make_transformers}[name]
    dispatch, read, compiled = make(Numbers())
    start = time.perf_counter()
    losses = [read(dispatch(0))]
    first, made = time.perf_counter() - start, compiled()
    if name != "products":
        for k in (1, 2, 0):
            losses.append(read(dispatch(k)))
    other_routings = compiled() - made
    for _ in range(rounds.WARM):
        read(dispatch(0))
    wall, cpu, kernel = [], [], []
    for _ in range(steps):
        start, cpu_start, kernel_start = time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
        read(dispatch(0))
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        kernel.append(resource.getrusage(resource.RUSAGE_SELF).ru_stime - kernel_start)
    return {
        "losses": losses[:1] if name == "products" else losses,
        "first": first,
        "wall": statistics.median(wall),
        "cpu": statistics.median(cpu),
        "kernel": statistics.median(kernel),
        "programs": made,
        "later": other_routings,
    }


def compile_child(experts: int) -> dict[str, Any]:
    """The first step of a layer with this many small experts, most of which is compiling."""
    os.environ["NXD_JAX_WORLD_SIZE"] = "1"
    dispatch, read, _ = make_ours(Numbers(experts, 64, 128))
    start, cpu = time.perf_counter(), time.process_time()
    loss = read(dispatch(0))
    return {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu, "losses": [loss]}


def difference(found: dict[str, list[dict[str, Any]]]) -> float:
    """The largest relative difference between the variants' losses, of the batches that a variant ran."""
    ours = found["ours"]
    worst = max(
        abs(a - b) / max(1.0, abs(a))
        for runs in found.values()
        for mine, theirs in zip(ours, runs, strict=True)
        for a, b in zip(mine["losses"], theirs["losses"], strict=False)
    )
    if worst > 1e-3:
        raise RuntimeError(f"the variants' losses differ by {worst}")
    return worst


def table(found: dict[str, list[dict[str, Any]]], compiled: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table: ours, and its ratio to each of the others."""
    lines = [
        "| variant | step (ms) | CPU time, of it in the kernel (ms) | ours: its step, its CPU time | first step (ms) | programs, compiled for other routings |",
        "|---" * 6 + "|",
    ]
    for name, title in VARIANTS.items():
        if name not in found:
            continue
        runs = found[name]
        wall, cpu, kernel, first = (1e3 * statistics.median(r[key] for r in runs) for key in ("wall", "cpu", "kernel", "first"))
        ratios = [statistics.median(a[key] / b[key] for a, b in zip(found["ours"], runs, strict=True)) for key in ("wall", "cpu")]
        programs = (
            "-" if name == "transformers" else f"{int(runs[-1]['programs'])}, {'-' if name == 'products' else int(runs[-1]['later'])}"
        )
        lines.append(f"| {title} | {wall:.0f} | {cpu:.0f}, {kernel:.0f} | {ratios[0]:.2f}x, {ratios[1]:.2f}x | {first:.0f} | {programs} |")
    about = rounds.stack("torch", "transformers", "jax", "jaxlib")
    shape = f"{EXPERTS} experts, {TOP_K} for each of {BATCH} x {SEQ} tokens; hidden {HIDDEN}, intermediate {INTERMEDIATE}, float32"
    text = [*lines, "", f"{shape}; median of {len(found['ours'])} round(s); losses agree to {difference(found):.0e}; {about}"]
    if compiled:
        few, many = (statistics.median(r["cpu"] for r in compiled[str(n)]) for n in COMPILED)
        text += [
            "",
            f"First step with small experts (CPU time): {COMPILED[0]} experts {few:.2f} s, {COMPILED[1]} experts {many:.2f} s ({many / few:.2f}x).",
        ]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps per measurement")
    parser.add_argument("--compile", action="store_true", help="compare compile times of 8 and 128 experts, too")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--only", nargs="*", help="these variants (and ours)")
    parser.add_argument("--variant", choices=[*VARIANTS, *map(str, COMPILED)], help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        found = compile_child(int(args.variant)) if args.variant.isdigit() else child(args.variant, args.steps)
        print(json.dumps(found))
        return
    chosen = [name for name in VARIANTS if not args.only or name in args.only or name == "ours"]
    measured = rounds.run(__file__, chosen, args.rounds, ["--steps", str(args.steps)], "wall")
    compiled = rounds.run(__file__, [str(n) for n in COMPILED], args.rounds, [], "wall") if args.compile else {}
    text = table(measured, compiled)
    print(text)
    if args.write:
        rounds.put("moe_step", text)


if __name__ == "__main__":
    main()
