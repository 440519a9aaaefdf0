"""Time a step of examples/lightning_llama.py under Lightning's Trainer, and the same step in a loop of one's own.

    python benchmarks/lightning_step.py --rounds 3 --write

Both run TP 8 x DP 4 with sequence parallelism and ZeRO-1 on 32 virtual CPU devices, two batches in a step, and read the loss of every step: Lightning with
progress bar, TensorBoard and `self.log`, the loop with `xm.add_step_closure` and a progress bar. The losses must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import rounds

HERE = Path(__file__).resolve().parent
WORLD, TP = 32, 8
WARM = 5
VARIANTS = {"lightning": "Lightning's Trainer", "loop": "a loop of one's own"}


def arguments(steps: int, folder: str, more: list[str]) -> argparse.Namespace:
    """Of the example."""
    import lightning_llama

    options = ["--tp", str(TP), "--steps", str(steps), "--checkpoint-every", "0", "--out", folder, *more]
    return lightning_llama.parse_args(options)


def with_lightning(args: argparse.Namespace) -> tuple[list[float], list[tuple[float, float]]]:
    """(losses, the times at which steps ended)."""
    import lightning_llama
    from pytorch_lightning import Callback

    class Clock(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.times: list[tuple[float, float]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if module.should_print:
                self.times.append(rounds.now())

        def on_train_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
            self._keep(trainer)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self._keep(trainer)

        def _keep(self, trainer: Any) -> None:
            if len(self.losses) < len(self.times):
                self.losses.append(float(trainer.logged_metrics["loss"]))

    clock = Clock()
    lightning_llama.train(args, (clock,))
    return clock.losses, clock.times


def with_loop(args: argparse.Namespace) -> tuple[list[float], list[tuple[float, float]]]:
    """(losses, the times at which steps ended)."""
    import lightning_llama as example
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    from neuronx_distributed import initialize_parallel_model, initialize_parallel_optimizer
    from neuronx_distributed.parallel_layers import parallel_state
    from pytorch_lightning import seed_everything
    from tqdm import tqdm

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("xla")
    config = example.make_config(args)
    seed_everything(args.seed)
    model = initialize_parallel_model(config, example.make_model, args)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = example.configure_scheduler(optimizer, args.warmup, args.steps)
    size, among = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_group(as_list=True)
    loader = example.create_text_dataset(args.seq, args.batch, size, parallel_state.get_data_parallel_rank(), args.seed)
    losses: list[float] = []
    times: list[tuple[float, float]] = []
    bar = tqdm(total=args.steps, unit="step")

    def record(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
        bar.update()

    total = torch.zeros(1, dtype=torch.double).to("xla")
    loader.sampler.set_epoch(0)
    for k, batch in enumerate(pl.MpDeviceLoader(loader, torch_xla.device())):
        loss, _ = model(**batch)
        loss = loss / args.accumulate
        loss.backward()
        total += loss.detach()
        xm.mark_step()
        if (k + 1) % args.accumulate == 0:
            mean = xm.all_reduce(xm.REDUCE_SUM, total / size, groups=among).detach()
            total.zero_()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            xm.add_step_closure(record, args=(mean,))
            xm.mark_step()
            times.append(rounds.now())
            if len(times) == args.steps:
                break
    return losses, times


def measure(name: str, steps: int, more: list[str]) -> dict[str, Any]:
    """Run one variant in this process."""
    os.environ["NXD_JAX_WORLD_SIZE"] = str(WORLD)
    sys.path[:0] = [str(HERE.parent / "examples")]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        losses, times = {"lightning": with_lightning, "loop": with_loop}[name](arguments(steps, folder, more))
    return {"losses": losses, **rounds.steps_of(times, WARM)}


def table(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace, most: float) -> str:
    """A Markdown table with ratios to the loop."""
    difference = rounds.difference(found, most)
    lines = rounds.against("loop", found, VARIANTS)
    about = rounds.stack("torch", "jax", "pytorch-lightning")
    shape = f"TP {TP} x DP {WORLD // TP} on {WORLD} virtual CPU devices; steps of 2 batches"
    lines += ["", f"{shape}; median of {len(found['loop'])} round(s), {args.steps} steps each; losses differ by {difference:.0e}; {about}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per measurement")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args, more = parser.parse_known_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.steps, more)))
        return
    text = table(rounds.run(__file__, VARIANTS, args.rounds, ["--steps", str(args.steps), *more], "median"), args, 0.0)
    print(text)
    if args.write:
        rounds.put("lightning_step", text)


if __name__ == "__main__":
    main()
