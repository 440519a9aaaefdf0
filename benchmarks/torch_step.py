"""One training step of the benchmark's Llama as a torch script: on "xla" (our bridge or original torch_xla) or in PyTorch on the CPU."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from pathlib import Path

import measure
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=measure.VOCAB,
        hidden_size=measure.HIDDEN,
        intermediate_size=measure.INTERMEDIATE,
        num_hidden_layers=measure.LAYERS,
        num_attention_heads=measure.HEADS,
        max_position_embeddings=measure.SEQ,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=measure.LEARNING_RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + measure.DECAY * step))


def xla_variant(weights: dict[str, np.ndarray], replay: bool = False) -> measure.Variant:
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    device = xm.xla_device()
    variant = cpu_variant(weights, device=device, replay=replay)
    run_step, recording = variant.dispatch, variant.recording

    def dispatch(ids: np.ndarray) -> torch.Tensor:
        start = time.perf_counter()
        loss = run_step(ids)
        recording.append(time.perf_counter() - start)
        xm.mark_step()
        return loss

    def counters() -> dict[str, float]:
        compiled, executed = (met.metric_data(name) or (0,) for name in ("CompileTime", "ExecuteTime"))
        return {"compilations": compiled[0], "executions": executed[0]}

    below = ["jax", "jaxlib"] if importlib.util.find_spec("torch_bridge") else ["torch_xla"]
    return measure.Variant(dispatch, variant.read, measure.versions_of(["torch", "transformers", *below]), counters, recording)


def cpu_variant(
    weights: dict[str, np.ndarray], device: torch.device | str = "cpu", compiled: bool = False, replay: bool = False
) -> measure.Variant:
    model = make_model()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model.to(device)
    optimizer, scheduler = make_optimizer(model)
    forward = torch.compile(model) if compiled else importlib.import_module("torch_bridge").optimize(model) if replay else model

    def dispatch(ids: np.ndarray) -> torch.Tensor:
        batch = torch.from_numpy(ids).to(device)
        loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return measure.Variant(dispatch, lambda loss: loss.item(), measure.versions_of(["torch", "transformers"]))


def main() -> None:
    parser = measure.parser()
    parser.add_argument("--device", choices=["xla", "cpu"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--replay", action="store_true", help="use torch_bridge.optimize")
    parser.add_argument(
        "--prepare", action="store_true", help="only write the initial weights to the --weights file and print the ops per step"
    )
    args: argparse.Namespace = parser.parse_args()
    if args.prepare:
        prepare(args.weights)
    elif args.device == "xla":
        if importlib.util.find_spec("torch_bridge"):
            importlib.import_module(
                "torch_bridge.device.startup"
            )  # the bridge imports JAX when a tensor first needs it; imports are not measured
        measure.measure(lambda weights: xla_variant(weights, args.replay), args)
    else:
        measure.measure(lambda weights: cpu_variant(weights, compiled=args.compile), args)


class OpCounter(TorchDispatchMode):
    """Counts the aten ops that reach a backend."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def prepare(path: Path) -> None:
    """Write the initial weights to a file and print how many aten ops a step (not the first) has in eager PyTorch."""
    weights = {name: value.numpy() for name, value in make_model().state_dict().items()}
    np.savez(path, **weights)
    step = cpu_variant(weights).dispatch
    first, second = measure.batches(2)
    step(first)
    with OpCounter() as counter:
        step(second)
    print(counter.count)


if __name__ == "__main__":
    main()
