"""Train the Llama of examples/llama with PyTorch Lightning on bytes of Python's documentation: tensor, sequence, data and pipeline parallelism, ZeRO-1.

    nxd-run --instance trn1.32xlarge examples/lightning_llama.py --tp 8      # 32 emulated NeuronCores in one process: TP 8 x DP 4
    nxd-run --instance trn1.32xlarge examples/lightning_llama.py --tp 4 --pp 2 --schedule zbv
    torchrun --nproc_per_node=4 examples/lightning_llama.py --tp 2           # one process per rank
    python examples/lightning_llama.py --tp 2                                # a world just large enough

Kill it and start it again with `--resume`: it goes on from the newest checkpoint, with the losses that it would have had.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.lightning import (
    NeuronCheckpointIO,
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trainer import initialize_parallel_optimizer
from neuronx_distributed.utils.batch_utils import shift_labels
from pytorch_lightning import LightningDataModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent / "llama"))

from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, NxDLlamaOptions

ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
"""Schedules with one stage on each pipeline rank; others have two."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--schedule", default="1f1b", help="with --pp: 1f1b, gpipe, zb_h1, interleaved, looped_bfs, zbv, dualpipev, ...")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps in all")
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step; with --pp its micro-batches")
    parser.add_argument("--batch", type=int, default=1, help="sequences per data-parallel rank and batch")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, help="default: 2, or as many as there are stages")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=5, help="steps until the learning rate is --lr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-sequence-parallel", action="store_true")
    parser.add_argument("--no-zero1", action="store_true")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints; 0: none")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that are kept")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints in the background")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    parser.add_argument("--out", type=Path, default=Path("demo_output/lightning_llama"))
    args = parser.parse_args(argv)
    args.stages = 1 if args.pp == 1 or args.schedule in ONE_STAGE else 2
    args.layers = args.layers or max(2, args.pp * args.stages)
    return args


def create_text_dataset(seq: int, batch_size: int, dp_size: int, dp_rank: Any, seed: int) -> DataLoader:
    """Python's documentation topics as bytes; every data-parallel rank reads its own rows."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n\n".join(topics[name].strip() for name in sorted(topics)).encode()))
    rows = TensorDataset(text[: len(text) // seq * seq].view(-1, seq))
    sampler = DistributedSampler(rows, num_replicas=dp_size, rank=dp_rank, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(rows, batch_size=batch_size, sampler=sampler, drop_last=True, collate_fn=collate)


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row for (row,) in rows])
    return shift_labels({"input_ids": ids, "labels": ids})


class NeuronLightningDataModule(LightningDataModule):
    """A loader for each data-parallel rank."""

    def __init__(self, dataloader_fn: Callable[..., DataLoader], seq: int, batch_size: int, data_args: tuple = ()):
        super().__init__()
        self.dataloader_fn = dataloader_fn
        self.seq = seq
        self.batch_size = batch_size
        self.data_args = data_args

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        return self.dataloader_fn(self.seq, self.batch_size, strategy.data_parallel_size, strategy.data_parallel_rank, *self.data_args)


class NeuronLlamaLTModule(NeuronLTModule):
    """One optimizer step for every `grad_accum_steps` batches. A pipeline has its micro-batches in their place."""

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.trainer.strategy.pipeline_parallel_size > 1:
            return self.model.run_train(**batch)
        loss, _ = self.model(**batch)
        loss = loss / self.grad_accum_steps
        loss.backward()
        return loss.detach()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        xm.mark_step()
        for logger in self.trainer.loggers:
            logger.print_step = -1
        self.should_print = False
        loss = self.forward_backward(batch)
        self.averaged_loss += loss
        xm.mark_step()
        if (batch_idx + 1) % self.grad_accum_steps == 0:
            self.should_print = True
            mean = self.averaged_loss / self.trainer.strategy.data_parallel_size
            self.loss = xm.all_reduce(xm.REDUCE_SUM, mean, groups=parallel_state.get_data_parallel_group(as_list=True)).detach()
            self.averaged_loss.zero_()
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            xm.mark_step()
        return loss

    def configure_optimizers(self) -> Any:
        groups = self.get_param_groups_by_weight_decay()
        optimizer = initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, **self.opt_kwargs)
        optimizer.zero_grad()
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler}]

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.should_print:
            return
        self.log("loss", self.loss, prog_bar=True)
        self.log("lr", self.lr_schedulers().get_last_lr()[0], prog_bar=True)
        self.log("global_step", float(self.global_step))
        for logger in self.trainer.loggers:
            logger.print_step = self.global_step


def configure_scheduler(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up, then half a cosine to a tenth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    pipeline = {
        "transformer_layer_cls": DecoderLayer,
        "leaf_module_cls": ["RotaryEmbedding"],  # it asks on which device it is: that must wait until the model is there
        "auto_partition": True,
        "input_names": ["input_ids", "labels"],
        "output_loss_value_spec": (True, False),
        "num_microbatches": args.accumulate,
        "virtual_pipeline_size": args.stages,
        "schedule": args.schedule,
        "use_optimizer_wrapper": True,
        "use_zero1_optimizer": not args.no_zero1,
        "broadcast_and_average_loss": True,  # all ranks have the loss, also those that are not the last stage's
    }
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        pipeline_config=pipeline if args.pp > 1 else None,
        optimizer_config={"zero_one_enabled": not args.no_zero1, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=not args.no_sequence_parallel,
    )


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.seq,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config, NxDLlamaOptions(sequence_parallel=not args.no_sequence_parallel))


def make_module(args: argparse.Namespace, kind: type[NeuronLTModule] = NeuronLlamaLTModule) -> NeuronLTModule:
    return kind(
        model_fn=make_model,
        nxd_config=make_config(args),
        model_args=(args,),
        opt_cls=torch.optim.AdamW,
        opt_kwargs={"lr": args.lr, "betas": (0.9, 0.95)},
        scheduler_cls=configure_scheduler,
        scheduler_args=(args.warmup, args.steps),
        grad_accum_steps=args.accumulate if args.pp == 1 else 1,
        manual_opt=True,
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint that was written last."""
    found = sorted(folder.glob("*.ckpt/done"), key=lambda done: done.stat().st_mtime_ns)
    return found[-1].parent if found else None


def train(args: argparse.Namespace, callbacks: tuple[Any, ...] = ()) -> Trainer:
    seed_everything(args.seed)
    checkpoints = args.out / "checkpoints"
    chosen: list[Any] = [NeuronTQDMProgressBar(), *callbacks]
    if args.checkpoint_every:
        keep = ModelCheckpoint(
            save_top_k=args.keep,
            monitor="global_step",
            mode="max",
            every_n_train_steps=args.checkpoint_every,
            dirpath=checkpoints,
        )
        chosen.append(keep)
    trainer = Trainer(
        strategy=NeuronXLAStrategy(nxd_config=make_config(args)),
        max_steps=args.steps,
        plugins=[NeuronXLAPrecisionPlugin(), NeuronCheckpointIO(async_save=args.async_save)],
        enable_checkpointing=bool(args.checkpoint_every),
        logger=NeuronTensorBoardLogger(save_dir=str(args.out / "logs")),
        log_every_n_steps=1,
        callbacks=chosen,
        enable_model_summary=False,
    )
    rows = args.batch if args.pp == 1 else args.batch * args.accumulate
    data = NeuronLightningDataModule(create_text_dataset, args.seq, rows, data_args=(args.seed,))
    newest = newest_checkpoint(checkpoints) if args.resume else None
    trainer.fit(model=make_module(args), datamodule=data, ckpt_path=newest)
    return trainer


def main() -> None:
    args = parse_args()
    trainer = train(args)
    if trainer.is_global_zero:
        last = {name: float(value) for name, value in trainer.logged_metrics.items()}
        (args.out / "summary.json").write_text(json.dumps({"step": trainer.global_step, **last}, indent=1))
        print(f"step {trainer.global_step}: loss {last['loss']:.4f} nats/byte; TensorBoard: tensorboard --logdir {args.out / 'logs'}")


if __name__ == "__main__":
    main()
