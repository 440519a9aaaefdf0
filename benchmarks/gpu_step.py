"""Time a training step of a 1B-parameter Llama on one NVIDIA GPU: an unchanged torch script through our bridge, eager torch, torch.compile, hand-written JAX.

    python benchmarks/gpu_step.py --rounds 3 --write
    python benchmarks/gpu_step.py --size tiny                    # the same on the CPU in a minute: does the script work?

The model is `transformers` LlamaForCausalLM in the shape of Llama-3.2-1B (without its scaling of long rotary wavelengths), on sequences of 4,096 random
tokens. All variants have weights, activations and gradients in bfloat16, and AdamW works on float32 copies of the weights with float32 state; no
activations are recomputed. Each runs in a process of its own, in turn, from the same weights and on the same batches. Their losses must agree within
`TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rounds

HERE = Path(__file__).resolve().parent
CHECKED, WARM, CHUNKS = 5, 3, 3  # losses that are compared; further steps before the clock starts; measurements of `--steps` steps
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
THETA, EPSILON = 500_000.0, 1e-5  # of the rotary embedding and of RMSNorm
TOLERANCE = 2e-2
"""Between any two variants' losses, in nats. Bfloat16 has 8 bits: a loss of 12 from logits that were rounded alike differs by some 1e-3."""
PEER = "jax"
VARIANTS = {
    "bridge": "unchanged torch script on `xla`, our bridge",
    "replay": "the same with `torch_bridge.optimize(model)`",
    "torch": "the same script in eager PyTorch",
    "compile": "the same script with `torch.compile`",
    "jax": "hand-written JAX + optax, one jitted step",
}


@dataclass(frozen=True)
class Size:
    """A Llama with tied embeddings: its widths, and the sequence it is trained on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int

    @property
    def parameters(self) -> int:
        kv = self.hidden * self.kv_heads // self.heads
        layer = 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden + self.hidden

    def flops(self, batch: int) -> float:
        """Of the model in one step, forward and backward: 6 for each parameter and token, and those of the half of the scores that are causal."""
        tokens = batch * self.seq
        return 6.0 * self.parameters * tokens + 6.0 * self.layers * self.hidden * self.seq * tokens


SIZES = {"1b": Size(16, 2048, 8192, 32, 8, 128_256, 4096), "tiny": Size(2, 64, 128, 4, 2, 256, 64)}


def peak_of(device: str) -> float | None:
    """TFLOP/s in dense bfloat16 of a device by its name, such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    from nxd_jax.topology.device_peaks import peak_flops_of

    peak = peak_flops_of(device)
    return None if peak is None else peak / 1e12


# -- variants ---------------------------------------------------------------------------------------


@dataclass
class Step:
    """`dispatch(ids)` starts a training step on int64 ids [batch, seq] and returns a handle; `read(handle)` waits for its loss.

    device: its name. peak_bytes: the most memory used so far, in bytes; None where it is not counted.
    """

    dispatch: Callable[[np.ndarray], Any]
    read: Callable[[Any], float]
    device: str
    peak_bytes: Callable[[], int | None]


def batches(size: Size, batch: int, count: int = 8) -> list[np.ndarray]:
    """Random token ids [batch, seq]."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, size.vocab, (batch, size.seq), dtype=np.int64) for _ in range(count)]


def torch_model(size: Size) -> Any:
    """The model in bfloat16 on the CPU, its weights the same in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.seq,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).bfloat16()


def torch_script(size: Size, device: str, after: Callable[[], None], wrap: Callable[[Any], Any]) -> Step:
    """The script: nothing in it but the device's name and what follows a step (`mark_step`) differs between devices."""
    import torch

    model = torch_model(size).to(device)
    forward = wrap(model)
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(w.detach().float()) for w in weights]
    fused = True if device == "cuda" else None  # torch's fastest there; elsewhere its default
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused)

    def dispatch(ids: np.ndarray) -> Any:
        batch = torch.from_numpy(ids).to(device)
        loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        after()
        return loss.detach()

    return Step(dispatch, lambda loss: loss.item(), "CPU", lambda: None)


def on_bridge(size: Size, gpu: bool, replay: bool) -> Step:
    """The script on device "xla"."""
    import torch_xla.core.xla_model as xm

    import torch_bridge

    step = torch_script(size, "xla", xm.mark_step, torch_bridge.optimize if replay else lambda model: model)
    return _on_jax(step, gpu)


def on_torch(size: Size, gpu: bool, compiled: bool) -> Step:
    """The script in PyTorch, on "cuda" or the CPU."""
    import torch

    if gpu and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no CUDA device: install a CUDA build of it, or leave the variants torch and compile out"
        )
    step = torch_script(size, "cuda" if gpu else "cpu", lambda: None, torch.compile if compiled else lambda model: model)
    if gpu:
        step.device, step.peak_bytes = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated
    return step


def on_jax(size: Size, gpu: bool) -> Step:
    """The step written by hand, all of it one program with donated state."""
    import jax
    import jax.numpy as jnp
    import optax

    params = from_torch({name: value.float().numpy() for name, value in torch_model(size).state_dict().items()})
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    state = jax.jit(optimizer.init)(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, ids_BS: Any) -> Any:
        weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        loss, grads = jax.value_and_grad(loss_fn)(weights, ids_BS, size, "cudnn" if gpu else None)
        updates, state = optimizer.update(jax.tree.map(lambda x: x.astype(jnp.float32), grads), state, params)
        return optax.apply_updates(params, updates), state, loss

    def dispatch(ids: np.ndarray) -> Any:
        nonlocal params, state
        params, state, loss = train_step(params, state, ids.astype(np.int32))
        return loss

    return _on_jax(Step(dispatch, float, "CPU", lambda: None), gpu)


def _on_jax(step: Step, gpu: bool) -> Step:
    import jax

    device = jax.devices()[0]
    if gpu:
        if device.platform != "gpu":
            raise SystemExit(f"jax {jax.__version__} sees no CUDA device, only {device.platform}: pip install 'jax[cuda12]'")
        step.device, step.peak_bytes = device.device_kind, lambda: device.memory_stats()["peak_bytes_in_use"]
    return step


def make(name: str, size: Size, gpu: bool) -> Step:
    """A variant, ready to run in this process."""
    if name == "jax":
        return on_jax(size, gpu)
    return on_bridge(size, gpu, name == "replay") if name in ("bridge", "replay") else on_torch(size, gpu, name == "compile")


# -- hand-written JAX ---------------------------------------------------------------------------------
# B batch, S sequence, D hidden, N query heads, K key heads, H head size, V vocabulary


def from_torch(state: dict[str, np.ndarray]) -> dict[str, Any]:
    """`llama_jax.from_torch`, with the embedding as the head."""
    import llama_jax

    params = llama_jax.from_torch(state)
    del params["head"]
    return params


def loss_fn(params: dict[str, Any], ids_BS: Any, size: Size, implementation: Any = None) -> Any:
    """Mean cross-entropy in nats of predicting each token from those before it. Weights and products in bfloat16; norms and the loss in float32."""
    import jax
    import jax.numpy as jnp
    import llama_jax
    import optax

    def norm(x: Any, weight: Any) -> Any:
        return weight * llama_jax.rms_norm(x.astype(jnp.float32), jnp.float32(1), EPSILON).astype(x.dtype)

    def attend(layer: Any, x_BSD: Any) -> Any:
        counts = {"q": size.heads, "k": size.kv_heads, "v": size.kv_heads}
        q_BSNH, k_BSKH, v_BSKH = ((x_BSD @ layer[name]).reshape(*x_BSD.shape[:2], count, -1) for name, count in counts.items())
        q_BSNH, k_BSKH = (llama_jax.rotate(x, THETA).astype(x.dtype) for x in (q_BSNH, k_BSKH))
        out = jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True, implementation=implementation)
        return out.reshape(x_BSD.shape) @ layer["o"]

    x_BSD = params["embedding"][ids_BS]
    for layer in params["layers"]:
        x_BSD = x_BSD + attend(layer, norm(x_BSD, layer["attention_norm"]))
        h_BSD = norm(x_BSD, layer["mlp_norm"])
        x_BSD = x_BSD + (jax.nn.silu(h_BSD @ layer["gate"]) * (h_BSD @ layer["up"])) @ layer["down"]
    logits_BSV = (norm(x_BSD, params["norm"]) @ params["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, jnp.roll(ids_BS, -1, axis=1))[:, :-1].mean()


# -- measuring ----------------------------------------------------------------------------------------


def measure(step: Step, data: list[np.ndarray], steps: int) -> dict[str, Any]:
    """Run and time a variant in this process: seconds per step without waiting in between, and of the first; bytes; losses."""
    losses, first = [], 0.0
    for k in range(CHECKED):
        start = time.perf_counter()
        losses.append(step.read(step.dispatch(data[k % len(data)])))
        first = first or time.perf_counter() - start
    seconds = []
    for count in (WARM, *[steps] * CHUNKS):
        start = time.perf_counter()
        for k in range(count):
            handle = step.dispatch(data[k % len(data)])
        step.read(handle)
        seconds.append((time.perf_counter() - start) / count)
    return {
        "losses": losses,
        "first": first,
        "step": statistics.median(seconds[1:]),
        "peak_bytes": step.peak_bytes(),
        "device": step.device,
    }


def run(names: list[str], count: int, options: list[str], gpu: bool) -> dict[str, list[dict[str, Any]]]:
    """`count` rounds of all variants, each in a process of its own."""
    dropped = {"JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS"}
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent / "aliases"), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k not in dropped} | {"PYTHONPATH": path}
    env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} if gpu else {"JAX_PLATFORMS": "cpu"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for k in range(count):
        for name in names:
            done = subprocess.run([sys.executable, __file__, "--variant", name, *options], env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            sys.stderr.write(f"round {k + 1}: {name:8} {1e3 * found[name][-1]['step']:.1f} ms per step\n")
    return found


def gpu_memory() -> float | None:
    """GiB of the first NVIDIA GPU, None if there is none (asked without starting CUDA in this process)."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    first = done.stdout.split()[:1]
    return float(first[0]) / 1024 if done.returncode == 0 and first and first[0].isdigit() else None


def batch_for(gib: float) -> int:
    """Sequences of 4,096 tokens that fit: 25 GiB of weights, gradients and state, and some 22 GiB a sequence in eager torch (the logits above all)."""
    return max(1, min(4, int((gib - 25) // 22)))


# -- the table ----------------------------------------------------------------------------------------


def table(found: dict[str, list[dict[str, Any]]], size: Size, batch: int, peak: float | None) -> str:
    """A Markdown table. Raises RuntimeError if the losses differ."""
    worst = rounds.difference(found, TOLERANCE)
    device = next(iter(found.values()))[0]["device"]
    peak = peak or peak_of(device)
    lines = [
        "| variant | tokens/s | step (ms) | MFU | peak device memory (GiB) | first step (s) |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        seconds = statistics.median(r["step"] for r in runs)
        ratio = (
            f" ({statistics.median(r['step'] / p['step'] for r, p in zip(runs, found[PEER], strict=True)):.2f}x)" if PEER in found else ""
        )
        used = f"{100 * size.flops(batch) / seconds / (1e12 * peak):.1f}%" if peak else "-"
        memory = f"{max(r['peak_bytes'] for r in runs) / 2**30:.1f}" if runs[0]["peak_bytes"] else "-"
        first = statistics.median(r["first"] for r in runs)
        cells = [f"{batch * size.seq / seconds:.0f}", f"{1e3 * seconds:.1f}{ratio}", used, memory, f"{first:.1f}"]
        lines.append(f"| {VARIANTS[name]} | {' | '.join(cells)} |")
    shape = f"{size.parameters / 1e9:.2f}B parameters, {size.layers} layers, hidden {size.hidden}, {batch} x {size.seq} tokens on {device}"
    flops = f"{size.flops(batch) / 1e12:.4g} model TFLOP a step" + (
        f", MFU of {peak:g} TFLOP/s" if peak else ", no peak known (--peak-tflops)"
    )
    about = rounds.stack("torch", "transformers", "jax", "jaxlib", "optax")
    compared = "; in brackets: steps to hand-written JAX's in the same round" if PEER in found else ""
    count = len(next(iter(found.values())))
    return "\n".join([*lines, "", f"{shape}; {flops}{compared}; median of {count} round(s); losses differ by {worst:.0e}; {about}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1b", help="tiny: a small model on the CPU, to try the script")
    parser.add_argument("--batch", type=int, help="sequences a step (default: what fits the GPU; 2 for tiny)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="steps per measurement")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"some of {','.join(VARIANTS)} (the default is all)")
    parser.add_argument("--peak-tflops", type=float, help="of the device in dense bfloat16, if its name does not tell")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    names, size, gpu = args.variants.split(","), SIZES[args.size], args.size != "tiny"
    if unknown := sorted(set(names) - set(VARIANTS)):
        parser.error(f"--variants has no {', '.join(unknown)}: choose from {', '.join(VARIANTS)}")
    memory = gpu_memory() if gpu else None
    if gpu and memory is None:
        sys.exit(
            "gpu_step needs an NVIDIA GPU, and nvidia-smi finds none: run it on a machine with one, or try the script on the CPU with --size tiny"
        )
    batch = args.batch or (batch_for(memory) if memory else 2)
    if args.variant:
        print(json.dumps(measure(make(args.variant, size, gpu), batches(size, batch), args.steps)))
        return
    options = ["--size", args.size, "--batch", str(batch), "--steps", str(args.steps)]
    text = table(run(names, args.rounds, options, gpu), size, batch, args.peak_tflops)
    print(text)
    if args.write:
        rounds.put("gpu_step", text)


if __name__ == "__main__":
    main()
