"""Train a Mixtral, or a model of DeepSeek-V3's shape, on bytes of Python's documentation: experts shared out over ranks besides tensors, layers and data.

    nxd-run --instance trn1.32xlarge examples/moe/train.py --tp 4 --ep 2 --pp 2       # 32 emulated NeuronCores in one process
    nxd-run --instance trn1.32xlarge examples/moe/train.py --model deepseek --tp 4 --ep 8 --zero1 --sequence-parallel
    torchrun --nproc_per_node=4 examples/moe/train.py --tp 2 --ep 2                   # one process per rank
    python examples/moe/train.py --tp 2 --ep 2                                        # a world just large enough

Expert-parallel ranks are data-parallel ranks that hold different experts and send each other tokens. Each step shows the loss, how many times the mean the
busiest expert of any layer had to do (of the first stage's layers, if stages are in several processes), and which share of the tokens' choices was dropped.
With `--checkpoint`, kill it and start it again with `--resume`, in any layout. `--save-hf` writes a folder that transformers loads, `--hf` starts from one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # registers backend "xla"
from modeling_moe_nxd import BALANCE, DeepseekForCausalLM, ExpertDecoderLayer, MixtralForCausalLM, NxDMoEOptions
from neuronx_distributed.modules.moe import load
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.random import model_parallel_xla_manual_seed
from neuronx_distributed.utils.batch_utils import shift_labels
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import Glm4MoeConfig, MixtralConfig

# isort: split
import hf_experts
from training_parts import ONE_STAGE, global_mean, make_loader, warmup_cosine


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("mixtral", "deepseek"), default="mixtral")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size; divides the data-parallel ranks and the experts")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--schedule", default="1f1b", help="with --pp: 1f1b, gpipe, zb_h1, interleaved, looped_bfs, zbv, dualpipev, ...")
    parser.add_argument("--microbatches", type=int, help="with --pp: into how many a batch is cut; default: each sequence by itself")
    parser.add_argument("--sequence-parallel", "--sequence_parallel", action="store_true")
    parser.add_argument("--zero1", action="store_true", help="share out the optimizer's state over data-parallel ranks")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 parameters")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument(
        "--capacity-factor", "--capacity_factor", type=float, help="slots of an expert, 1: what equal shares need; later tokens are dropped"
    )
    tokens.add_argument("--dropless", action="store_true", help="no token is dropped (the default)")
    parser.add_argument("--balance", choices=BALANCE, help="what keeps experts equally busy; default: loss (mixtral), bias (deepseek)")
    parser.add_argument("--balance-rate", type=float, default=0.01, help="by how much --balance bias moves a bias after each step")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences per data-parallel rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, help="default: 2, or as many as there are stages")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hf", type=Path, help="start from the weights of this Hugging Face folder or .safetensors file")
    parser.add_argument("--save-hf", type=Path, help="write a Hugging Face folder at the end")
    parser.add_argument("--checkpoint", type=Path, help="write checkpoints to this folder")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints; there is one at the end in any case")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--out", type=Path, help="folder for summary.json")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint, the folder to go on from")
    args.stages = 1 if args.pp == 1 or args.schedule in ONE_STAGE else 2
    args.layers = args.layers or max(2, args.pp * args.stages)
    args.microbatches = args.microbatches or args.batch
    args.balance = args.balance or ("loss" if args.model == "mixtral" else "bias")
    return args


def make_model(args: argparse.Namespace) -> MixtralForCausalLM:
    sizes: dict[str, Any] = dict(
        vocab_size=256,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.seq,
        num_experts_per_tok=args.top_k,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    options = NxDMoEOptions(
        sequence_parallel=args.sequence_parallel,
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        capacity_factor=args.capacity_factor,
        balance=args.balance,
    )
    model: MixtralForCausalLM
    if args.model == "mixtral":
        config = MixtralConfig(**sizes, intermediate_size=args.hidden, num_local_experts=args.experts, router_aux_loss_coef=0.02)
        model = MixtralForCausalLM(config, options)
    else:
        config = Glm4MoeConfig(
            **sizes,
            head_dim=args.hidden // args.heads,
            intermediate_size=2 * args.hidden,  # of the first layer, which is dense
            moe_intermediate_size=args.hidden // 2,
            n_routed_experts=args.experts,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            num_mtp_layers=0,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        )
        model = DeepseekForCausalLM(config, options)
    if args.hf:
        hf_experts.load(model, args.hf)
    return model


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    pipeline = {
        "transformer_layer_cls": ExpertDecoderLayer,
        "leaf_module_cls": ["RotaryEmbedding", "BalanceLoss"],  # they ask for devices and shapes: that must wait until there are tensors
        "auto_partition": True,
        "input_names": ["input_ids", "labels"],
        "output_loss_value_spec": (True, False),
        "num_microbatches": args.microbatches,
        "virtual_pipeline_size": args.stages,
        "schedule": args.schedule,
        "use_optimizer_wrapper": True,
        "use_zero1_optimizer": args.zero1,
        "broadcast_and_average_loss": True,  # all ranks have the loss, also those that are not the last stage's
        "return_loss_on_cpu": False,
    }
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        expert_parallel_size=args.ep,
        pipeline_config=pipeline if args.pp > 1 else None,
        optimizer_config={"zero_one_enabled": args.zero1, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=args.sequence_parallel,
    )


def batches(loader: DataLoader, first: int) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of step `first` and all that follow, epoch after epoch, with each token's label at the token's own place."""
    epoch, done = divmod(first, len(loader))
    while True:
        loader.sampler.set_epoch(epoch)
        for (ids,) in itertools.islice(loader, done, None):
            yield shift_labels({"input_ids": ids, "labels": ids})
        epoch, done = epoch + 1, 0


class Progress:
    """Losses and loads by step, and the line that shows them."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module, first: int):
        self.model = model
        self.losses: list[float] = []
        self.imbalance: list[float] = []
        self.dropped: list[float] = []
        quiet = not xm.is_master_ordinal(local=False)
        self.bar = tqdm(total=args.steps, initial=first, unit="step", dynamic_ncols=True, disable=quiet)

    def record(self, loss: torch.Tensor) -> None:
        """At the end of a step."""
        found = load.measure(self.model, reset=True).values()
        self.losses.append(loss.item())
        self.imbalance.append(max(layer.imbalance for layer in found))
        self.dropped.append(sum(layer.dropped_share for layer in found) / len(found))
        self.bar.set_postfix_str(
            f"loss {self.losses[-1]:.3f}, busiest expert {self.imbalance[-1]:.2f}x the mean, {100 * self.dropped[-1]:.1f} % dropped"
        )
        self.bar.update()


def train(model: Any, optimizer: Any, scheduler: Any, first: int, args: argparse.Namespace) -> Progress:
    """From step `first` to the last one."""
    balancer = load.ExpertBalancer(model, args.balance_rate) if args.balance == "bias" else None
    progress = Progress(args, model, first)
    given = batches(make_loader(args.seq, args.batch, args.seed), first)
    for step in range(first, args.steps):
        batch = next(given)
        if args.pp > 1:  # stages take their inputs from the CPU
            loss = model.run_train(**batch)
        else:
            loss = global_mean(model.run_train(**{name: t.to(torch_xla.device()) for name, t in batch.items()}).detach())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if balancer is not None:
            balancer.step()
        torch_xla.sync()
        progress.record(loss)
        if args.checkpoint and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            nxd.save_checkpoint(str(args.checkpoint), f"step_{step + 1:06d}", model, optimizer, scheduler, {"step": step + 1})
    progress.bar.close()
    return progress


def describe(args: argparse.Namespace) -> dict[str, int]:
    """Say what runs where; returns the sizes."""
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_size(),
        "pp": parallel_state.get_pipeline_model_parallel_size(),
        "dp": parallel_state.get_data_parallel_size(),
        "ep": parallel_state.get_expert_model_parallel_size(),
    }
    ranks = " x ".join(f"{name} {sizes[name]}" for name in ("tp", "pp", "dp"))
    held = f"{args.experts // sizes['ep']} of the {args.experts} experts of a layer on each (ep {sizes['ep']})"
    xm.master_print(f"{args.model} on {torch.distributed.get_world_size()} ranks: {ranks}, {held}")
    return sizes


def main() -> None:
    args = parse_args()
    torch.distributed.init_process_group("xla")
    config = make_config(args)
    torch.manual_seed(args.seed)
    model_parallel_xla_manual_seed(args.seed)
    names: set[str] = set()

    def build() -> MixtralForCausalLM:
        model = make_model(args)
        names.update(name for name, _ in model.named_parameters())
        return model

    model = nxd.initialize_parallel_model(config, build)
    if args.save_hf and names != {name for name, _ in model.named_parameters()}:
        raise SystemExit("--save-hf needs all stages in one process: start with nxd-run in place of torchrun")
    load.track(model)
    optimizer = nxd.initialize_parallel_optimizer(
        config, torch.optim.AdamW, model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    sizes = describe(args)
    first = 0
    if args.resume and nxd.has_checkpoint(str(args.checkpoint)):
        first = nxd.load_checkpoint(str(args.checkpoint), None, model, optimizer, scheduler)["step"]
        xm.master_print(f"goes on after step {first}")
    started = time.perf_counter()
    done = train(model, optimizer, scheduler, first, args)
    if done.losses:
        took = f"{len(done.losses)} steps of {args.batch * sizes['dp']} sequences, {time.perf_counter() - started:.0f} s"
        xm.master_print(f"loss {done.losses[0]:.4f} -> {done.losses[-1]:.4f} nats/byte in {took}")
    if args.save_hf:
        hf_experts.save(model.original_module(), args.save_hf)
        xm.master_print(f"wrote {args.save_hf}")
    if args.out and xm.is_master_ordinal(local=False):
        args.out.mkdir(parents=True, exist_ok=True)
        summary = {"losses": done.losses, "imbalance": done.imbalance, "dropped": done.dropped, "first": first, **sizes}
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
