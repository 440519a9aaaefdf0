"""Time a step of a Llama under `nxdt-train`'s Trainer, and the same step in a loop of one's own.

    python benchmarks/nxdt_step.py --rounds 3 --write

Both run TP 8 x DP 4 with sequence parallelism and ZeRO-1 on 32 virtual CPU devices, two micro-batches in a step, from the same configuration, and read the
loss and the gradient norm of every step: the Trainer with experiment folder, TensorBoard, progress bar and metrics, the loop with `xm.add_step_closure` and a
progress bar. The losses must be the same.
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

WORLD, TP = 32, 8
SEQ, ROWS, VOCAB = 128, 512, 512
WARM = 5
VARIANTS = {"trainer": "`nxdt-train`'s Trainer", "loop": "a loop of one's own"}

MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 256,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": SEQ,
}


def configuration(folder: Path, steps: int) -> Any:
    """In the shape of the original's files, with the data that it names."""
    import datasets
    import torch
    from omegaconf import OmegaConf

    ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0)).tolist()
    columns = {"input_ids": ids, "attention_mask": [[1] * SEQ] * ROWS, "labels": ids}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "data"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    every = {"max_steps": steps, "max_epochs": -1, "log_every_n_steps": 1, "limit_val_batches": 0.0, "gradient_clip_val": 1.0}
    return OmegaConf.create(
        {
            "name": "hf_llama",
            "model_source": "hf",
            "seed": 0,
            "trainer": {"devices": WORLD, "num_nodes": 1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0, **every},
            "exp_manager": {
                "exp_dir": str(folder),
                "name": "run",
                "create_tensorboard_logger": True,
                "create_checkpoint_callback": False,
                "log_parameter_norm": False,
                "log_gradient_norm": True,
                "resume_from_checkpoint": None,
                "checkpoint_callback_params": {},
            },
            "distributed_strategy": {"tensor_model_parallel_size": TP, "zero1": True, "sequence_parallel": True},
            "data": {"micro_batch_size": 1, "global_batch_size": 2 * WORLD // TP, "train_dir": str(folder / "data")},
            "model": {
                "model_config": str(folder / "config.json"),
                "encoder_seq_length": SEQ,
                "fusions": {"flash_attention": False},
                "optim": {
                    "name": "adamw",
                    "lr": 3e-3,
                    "weight_decay": 0.01,
                    "betas": [0.9, 0.95],
                    "sched": {"name": "LinearAnnealingWithWarmUp", "warmup_steps": 5},
                },
            },
            "precision": {"type": "fp32"},
        }
    )


Found = tuple[list[float], list[tuple[float, float]]]
"""(losses, the times at which steps ended)."""


def with_trainer(cfg: Any) -> Found:
    from pytorch_lightning import Callback

    from nxd_jax.training import workflow

    times: list[tuple[float, float]] = []
    losses: list[float] = []

    class Clock(Callback):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            if times:
                losses.append(float(trainer.callback_metrics["reduced_train_loss"]))
            times.append(rounds.now())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            losses.append(float(trainer.callback_metrics["reduced_train_loss"]))

    made = workflow.make_trainer

    def with_clock(given: Any) -> Any:
        trainer = made(given)
        trainer.callbacks.append(Clock())
        return trainer

    workflow.make_trainer = with_clock
    try:
        workflow.train(cfg)
    finally:
        workflow.make_trainer = made
    return losses, times


def with_loop(cfg: Any) -> Found:
    import datasets
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trainer import initialize_parallel_optimizer
    from tqdm import tqdm
    from transformers import default_data_collator

    from nxd_jax.training import registry, seeding
    from nxd_jax.training.lightning_modules.nlp_overrides import NLPTrainer
    from nxd_jax.training.optim.registry import make_scheduler

    module = registry.find(cfg).model(cfg, NLPTrainer(devices=WORLD, max_steps=cfg.trainer.max_steps, gradient_clip_val=1.0))
    seeding.seed_everything(cfg.seed)
    model = module.build_model()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = initialize_parallel_optimizer(module.nxd_config, torch.optim.AdamW, groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = make_scheduler(optimizer, {**cfg.model.optim.sched, "max_steps": cfg.trainer.max_steps})
    size, among = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_group(as_list=True)
    data = datasets.load_from_disk(cfg.data.train_dir)
    rank = parallel_state.get_data_parallel_rank()
    sampler = torch.utils.data.DistributedSampler(data, size, rank, shuffle=False, drop_last=True)
    loader = torch.utils.data.DataLoader(data, 1, sampler=sampler, collate_fn=default_data_collator, drop_last=True)
    losses: list[float] = []
    times = [rounds.now()]
    bar = tqdm(total=cfg.trainer.max_steps, unit="step")

    def record(loss: torch.Tensor, norm: torch.Tensor) -> None:
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f} norm {norm.item():.3f}", refresh=False)
        bar.update()

    total = torch.zeros(1).to("xla")
    for k, batch in enumerate(pl.MpDeviceLoader(loader, torch_xla.device())):
        loss = model(**batch)[0] / 2
        loss.backward()
        total += loss.detach()
        if k % 2:
            mean = xm.all_reduce(xm.REDUCE_SUM, total / size, groups=among).detach()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total = torch.zeros(1).to("xla")
            xm.add_step_closure(record, args=(mean, optimizer.grad_norm))
            xm.mark_step()
            times.append(rounds.now())
            if len(times) > cfg.trainer.max_steps:
                break
    return losses, times


def measure(name: str, steps: int) -> dict[str, Any]:
    """Run one variant in this process."""
    os.environ["NXD_JAX_WORLD_SIZE"] = str(WORLD)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        losses, times = {"trainer": with_trainer, "loop": with_loop}[name](configuration(Path(folder), steps))
    return {"losses": losses, **rounds.steps_of(times, WARM)}


def table(found: dict[str, list[dict[str, Any]]], steps: int, most: float) -> str:
    """A Markdown table with ratios to the loop."""
    difference = rounds.difference(found, most)
    lines = rounds.against("loop", found, VARIANTS)
    about = rounds.stack("torch", "jax", "pytorch-lightning")
    shape = f"TP {TP} x DP {WORLD // TP} on {WORLD} virtual CPU devices; steps of 2 micro-batches"
    lines += ["", f"{shape}; median of {len(found['loop'])} round(s), {steps} steps each; losses differ by {difference:.0e}; {about}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per measurement")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.steps)))
        return
    text = table(rounds.run(__file__, VARIANTS, args.rounds, ["--steps", str(args.steps)], "median"), args.steps, 1e-6)
    print(text)
    if args.write:
        rounds.put("nxdt_step", text)


if __name__ == "__main__":
    main()
