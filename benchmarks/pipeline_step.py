"""Time a training step through a pipeline in one process: a Llama in 4 stages with 16 micro-batches, against one rank and a hand-written SPMD pipeline.

    python benchmarks/pipeline_step.py --rounds 3 --write

Variants run in turn, each in a process of its own, from the same weights and on the same batches; the losses must agree.

- pipeline: `NxDPPModel`, PP 4, by several schedules. Each stage's passes are programs of their own on a device of their own.
- one rank: the same model through our bridge, 16 micro-batches with accumulated gradients. Each is one program; in the variant "apart" its forward and its
  backward pass are programs of their own, as those of every pipeline's stages are: what the schedule costs is the difference to that.
- SPMD: what one jitted program can express, hand-written in JAX: stages stacked along an axis of the mesh (vmap), a buffer that shifts by one stage in every
  turn of a scan, gradients by autodiff through the scan. All stages compute in every turn, also where there is no micro-batch.

All devices are virtual and share the machine's cores, so a step's time is that of the work; the idle time of a schedule does not show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import numpy as np
import rounds

STAGES, MICROBATCHES = 4, 16
SEQ, LAYERS = 128, 8
SCHEDULES = {"1f1b": 1, "zb_h1": 1, "interleaved": 2, "zbv": 2}
VARIANTS = {
    "pipeline-1f1b": "pipeline, 1F1B",
    "pipeline-zb_h1": "pipeline, ZB-H1",
    "pipeline-interleaved": "pipeline, interleaved (2 stages a rank)",
    "pipeline-zbv": "pipeline, ZBV (2 stages a rank)",
    "alone": "one rank, accumulated gradients",
    "alone-apart": "the same, forward and backward apart",
    "spmd": "SPMD pipeline, hand-written JAX",
}

Step = Callable[[np.ndarray], Any]


def batches(count: int, rows: int) -> list[np.ndarray]:
    """Token ids [rows, SEQ]: a row for each micro-batch."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, measure.VOCAB, (rows, SEQ), dtype=np.int64) for _ in range(count)]


def make_model() -> Any:
    """transformers' Llama, with the same weights in every variant."""
    measure.LAYERS, measure.SEQ = LAYERS, SEQ
    import torch_step

    return torch_step.make_model()


class Counted:
    """What a variant of ours counts: programs, compilations and the host's time of each action of a step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        """Host seconds of JAX's own calls of executables, in order."""

    def time_calls(self) -> None:
        """From now on."""
        from torch_bridge.compiler.program import Program

        run = Program.run_placed

        def timed(program: Any, args: Any) -> Any:
            compiled = program.compiled

            def call(*arrays: Any) -> Any:
                start = time.thread_time()
                found = compiled(*arrays)
                self.seconds.append(time.thread_time() - start)
                return found

            program.compiled = call
            try:
                return run(program, args)
            finally:
                program.compiled = compiled

        Program.run_placed = timed  # type: ignore[method-assign]

    def __call__(self) -> dict[str, float]:
        from torch_bridge import metrics

        return {"compilations": metrics.COUNTERS.get("UncachedCompile", 0)}


def make_pipeline(schedule: str, microbatches: int) -> tuple[Step, Callable[[Any], float], dict[str, list[float]]]:
    """(dispatch, read, host seconds by action)."""
    os.environ["NXD_JAX_WORLD_SIZE"] = str(STAGES)
    import neuronx_distributed as nxd
    import torch
    import torch_xla
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from nxd_jax.pipeline import runtime

    torch.distributed.init_process_group("xla")
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=STAGES,
        pipeline_config={
            "transformer_layer_cls": LlamaDecoderLayer,
            "num_microbatches": microbatches,
            "virtual_pipeline_size": SCHEDULES[schedule],
            "schedule": schedule,
            "auto_partition": True,
            "input_names": ["input_ids", "labels"],
            "output_loss_value_spec": (True, False),
            "use_optimizer_wrapper": True,
            "return_loss_on_cpu": False,
        },
        optimizer_config={"zero_one_enabled": False, "grad_clipping": False},
    )
    model = nxd.initialize_parallel_model(config, make_model)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=measure.LEARNING_RATE)
    host: dict[str, list[float]] = {}
    do = runtime.Step._do

    def timed(self: Any, action: Any) -> None:
        start = time.thread_time()
        do(self, action)
        host.setdefault(action.kind.name, []).append(time.thread_time() - start)

    runtime.Step._do = timed  # type: ignore[method-assign]

    def dispatch(ids: np.ndarray) -> Any:
        rows = torch.from_numpy(ids)
        loss = model.run_train(input_ids=rows, labels=rows)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return loss

    return dispatch, lambda loss: float(loss), host


def make_alone(microbatches: int, apart: bool) -> tuple[Step, Callable[[Any], float], dict[str, list[float]]]:
    """The same model and micro-batches on one rank. apart: forward and backward passes are programs of their own."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    model = make_model().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=measure.LEARNING_RATE)

    def dispatch(ids: np.ndarray) -> Any:
        rows = torch.from_numpy(ids).to("xla")
        losses = []
        for part in rows.chunk(microbatches):
            loss = model(input_ids=part, labels=part).loss
            if apart:
                xm.mark_step()
            (loss / microbatches).backward()
            losses.append(loss.detach())
            xm.mark_step()
        mean = torch.stack(losses).mean()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return mean

    return dispatch, lambda loss: float(loss), {}


def make_spmd(microbatches: int) -> tuple[Step, Callable[[Any], float], dict[str, list[float]]]:
    """One program: in turn t, stage s computes micro-batch t - s."""
    import jax
    import jax.numpy as jnp
    import llama_jax
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", STAGES)
    params = llama_jax.from_torch({name: t.numpy() for name, t in make_model().state_dict().items()})
    mesh = jax.make_mesh((STAGES,), ("pp",), axis_types=(jax.sharding.AxisType.Auto,))
    by_stage, same = NamedSharding(mesh, P("pp")), NamedSharding(mesh, P())
    layers = params["layers"]
    share = len(layers) // STAGES
    stacked = jax.tree.map(lambda *found: jax.device_put(jnp.stack(found).reshape(STAGES, share, *found[0].shape), by_stage), *layers)
    params = {**{name: jax.device_put(params[name], same) for name in ("embedding", "norm", "head")}, "layers": stacked}

    def stage(weights: Any, x_BSD: Any) -> Any:
        for k in range(share):
            layer = jax.tree.map(lambda w, k=k: w[k], weights)
            x_BSD = x_BSD + llama_jax.attention(layer, llama_jax.rms_norm(x_BSD, layer["attention_norm"]), measure.HEADS)
            h_BSD = llama_jax.rms_norm(x_BSD, layer["mlp_norm"])
            x_BSD = x_BSD + (jax.nn.silu(h_BSD @ layer["gate"]) * (h_BSD @ layer["up"])) @ layer["down"]
        return x_BSD

    def loss_fn(params: Any, ids_MBS: Any) -> Any:
        x_MBSD = params["embedding"][ids_MBS]
        turns = microbatches + STAGES - 1
        padded = jnp.concatenate([x_MBSD, jnp.zeros((STAGES - 1, *x_MBSD.shape[1:]), x_MBSD.dtype)])
        state = jax.lax.with_sharding_constraint(jnp.zeros((STAGES, *x_MBSD.shape[1:]), x_MBSD.dtype), by_stage)

        def turn(state: Any, x_BSD: Any) -> tuple[Any, Any]:
            state = state.at[0].set(x_BSD)
            out = jax.lax.with_sharding_constraint(jax.vmap(stage)(params["layers"], state), by_stage)
            return jnp.roll(out, 1, axis=0), out[-1]

        _, outs = jax.lax.scan(turn, state, padded, length=turns)
        h_MBSD = llama_jax.rms_norm(outs[STAGES - 1 :], params["norm"])
        logits = h_MBSD[:, :, :-1] @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids_MBS[:, :, 1:]).mean()

    optimizer = optax.adamw(measure.LEARNING_RATE, weight_decay=0.01)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, ids_MBS: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, ids_MBS)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.jit(optimizer.init)(params)

    def dispatch(ids: np.ndarray) -> Any:
        nonlocal params, state
        params, state, loss = train_step(params, state, jax.device_put(ids.astype(np.int32).reshape(microbatches, -1, SEQ), same))
        return loss

    return dispatch, lambda loss: float(loss), {}


def _calls_until_played(kind: str) -> int:
    """Of a module whose gradients are accumulated."""
    if kind == "spmd":
        return 0
    from torch_bridge.replay.player import WARM_UP_ADDING

    return WARM_UP_ADDING


def child(name: str, steps: int, microbatches: int) -> dict[str, Any]:
    """Run one variant in this process."""
    kind, _, schedule = name.partition("-")
    made = {"pipeline": lambda: make_pipeline(schedule, microbatches), "alone": lambda: make_alone(microbatches, schedule == "apart")}
    dispatch, read, host = made.get(kind, lambda: make_spmd(microbatches))()
    counted = Counted() if kind != "spmd" else dict
    data = batches(4, microbatches)
    start = time.perf_counter()
    losses = [read(dispatch(data[0]))]
    first, made_first = time.perf_counter() - start, counted()
    losses += [read(dispatch(data[k])) for k in range(1, 4)]
    for k in range(8 + _calls_until_played(kind) // microbatches):  # modules are played after some calls
        read(dispatch(data[k % 4]))
    host.clear()
    if isinstance(counted, Counted):
        counted.time_calls()
    wall, cpu = [], []
    for k in range(steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        read(dispatch(data[k % 4]))
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    after = counted()
    return {
        "losses": losses,
        "first": first,
        "wall": statistics.median(wall),
        "cpu": statistics.median(cpu),
        "programs": made_first.get("compilations"),
        "later": after.get("compilations", 0) - made_first.get("compilations", 0),
        "host": {kind: statistics.median(found) for kind, found in host.items()},
        "call": statistics.median(counted.seconds) if isinstance(counted, Counted) else None,
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table with ratios to one rank."""
    difference = rounds.difference(found, 1e-3)
    columns = {"wall": "step (ms)", "cpu": "CPU time (ms)", "first": "first step (ms)"}
    lines = [
        "| variant | step (ms) | CPU time (ms) | first step (ms) | programs | compiled later | host time of an action (us) | of that, JAX's call |",
        "|---" * 8 + "|",
    ]
    for name, title in VARIANTS.items():
        if name not in found:
            continue
        cells = [rounds.cell(found[name], found["alone"], key) for key in columns]
        last = found[name][-1]
        host = ", ".join(f"{kind.lower().replace('_', ' ')} {1e6 * seconds:.0f}" for kind, seconds in last["host"].items()) or "-"
        cells += [str(last["programs"] or "-"), str(int(last["later"])) if last["programs"] else "-", host]
        cells.append(f"{1e6 * last['call']:.0f}" if last["host"] else "-")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    apart = found.get("alone-apart")
    said = ""
    if apart and "pipeline-1f1b" in found:
        said = f"; 1F1B's CPU time is {rounds.ratio(found['pipeline-1f1b'], apart, 'cpu'):.2f}x of one rank's with passes apart"
    about = rounds.stack("torch", "transformers", "jax", "jaxlib", "optax")
    shape = f"PP {STAGES}, {MICROBATCHES} micro-batches of 1 x {SEQ} tokens; Llama of {LAYERS} layers, hidden {measure.HIDDEN}"
    return "\n".join(
        [
            *lines,
            "",
            f"{shape}; ratios to one rank; median of {len(found['alone'])} round(s); losses agree to {difference:.0e}{said}; {about}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps per measurement")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--only", nargs="*", help="these variants (and those of one rank)")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(child(args.variant, args.steps, args.microbatches)))
        return
    chosen = [name for name in VARIANTS if not args.only or name in args.only or name.startswith("alone")]
    options = ["--steps", str(args.steps), "--microbatches", str(args.microbatches)]
    text = table(rounds.run(__file__, chosen, args.rounds, options, "wall"))
    print(text)
    if args.write:
        rounds.put("pipeline_step", text)


if __name__ == "__main__":
    main()
