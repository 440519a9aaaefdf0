"""One training step of the benchmark's Llama as a torch script: on "xla" (our bridge or original torch_xla) or in PyTorch on the CPU."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import measure
import numpy as np
import torch
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


def xla_variant(weights: dict[str, np.ndarray]) -> measure.Variant:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    is_bridge = "+" not in torch_xla.__version__ and "torch_bridge" in (getattr(torch_xla, "__doc__", None) or "") + str(torch_xla.__path__)
    device = xm.xla_device()
    variant = cpu_variant(weights, device=device)
    run_step, recording = variant.dispatch, variant.recording

    def dispatch(ids: np.ndarray) -> torch.Tensor:
        start = time.perf_counter()
        loss = run_step(ids)
        recording.append(time.perf_counter() - start)
        xm.mark_step()
        return loss

    def counters() -> dict[str, float]:
        counts = {name: met.metric_data(name) for name in ("CompileTime", "ExecuteTime")}
        return {"compilations": (counts["CompileTime"] or [0])[0], "executions": (counts["ExecuteTime"] or [0])[0]}

    names = ["torch", "transformers", *(["jax", "jaxlib"] if is_bridge else ["torch_xla"])]
    return measure.Variant(dispatch, variant.read, measure.versions_of(names), counters, recording)


def cpu_variant(weights: dict[str, np.ndarray], device: torch.device | str = "cpu", compiled: bool = False) -> measure.Variant:
    model = make_model()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model.to(device)
    optimizer, scheduler = make_optimizer(model)
    forward = torch.compile(model) if compiled else model

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
    parser.add_argument("--write-weights", action="store_true", help="write the initial weights to the --weights file and stop")
    args: argparse.Namespace = parser.parse_args()
    if args.write_weights:
        write_weights(args.weights)
    elif args.device == "xla":
        measure.measure(xla_variant, args)
    else:
        measure.measure(lambda weights: cpu_variant(weights, compiled=args.compile), args)


def write_weights(path: Path) -> None:
    np.savez(path, **{name: value.numpy() for name, value in make_model().state_dict().items()})


if __name__ == "__main__":
    main()
