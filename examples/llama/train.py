"""Train a Llama written with NeuronX Distributed layers on bytes of Python's documentation: tensor, data, context and pipeline parallelism.

    nxd-run --instance trn1.32xlarge examples/llama/train.py --tp 8          # 32 emulated NeuronCores in one process
    nxd-run --instance trn1.32xlarge examples/llama/train.py --tp 4 --pp 2 --schedule zbv
    torchrun --nproc_per_node=4 examples/llama/train.py --tp 2               # one process per rank
    python examples/llama/train.py --tp 2                                    # a world just large enough

Losses go to standard output and, with `--out`, to summary.json; `--save-hf` writes a folder that transformers loads, `--hf` starts from one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import hf_weights
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # registers backend "xla"
from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, NxDLlamaOptions
from neuronx_distributed.parallel_layers import checkpointing, grads, parallel_state
from neuronx_distributed.parallel_layers.random import model_parallel_xla_manual_seed
from neuronx_distributed.pipeline import NxDPPModel
from neuronx_distributed.utils.batch_utils import get_batch_on_this_context_parallel_rank, shift_labels
from neuronx_distributed.utils.model_utils import move_model_to_device
from torch.utils.data import DataLoader
from tqdm import tqdm
from training_parts import ONE_STAGE, global_mean, make_loader, warmup_cosine
from transformers import LlamaConfig


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size")
    parser.add_argument("--cp", type=int, default=1, help="context parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--schedule", default="1f1b", help="with --pp: 1f1b, gpipe, zb_h1, interleaved, looped_bfs, zbv, dualpipev, ...")
    parser.add_argument("--microbatches", type=int, help="with --pp: into how many a batch is cut; default: each sequence by itself")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--kv-copies", type=int, default=1, help="kv_size_multiplier: copies of each K/V head")
    parser.add_argument("--no-fuse-qkv", action="store_true")
    parser.add_argument("--flash", action="store_true", help="blockwise attention")
    parser.add_argument("--bias", action="store_true", help="biases in attention and MLP")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 parameters")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences per data-parallel rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, help="default: 2, or as many as there are stages")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hf", type=Path, help="start from the weights of this Hugging Face folder or .safetensors file")
    parser.add_argument("--save-hf", type=Path, help="write a Hugging Face folder at the end")
    parser.add_argument("--checkpoint", type=Path, help="write each rank's checkpoint to this folder at the end")
    parser.add_argument("--out", type=Path, help="folder for summary.json")
    args = parser.parse_args()
    args.stages = 1 if args.pp == 1 or args.schedule in ONE_STAGE else 2
    args.layers = args.layers or max(2, args.pp * args.stages)
    args.microbatches = args.microbatches or args.batch
    return args


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.seq,
        attention_bias=args.bias,
        mlp_bias=args.bias,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    options = NxDLlamaOptions(
        sequence_parallel=args.sequence_parallel,
        kv_size_multiplier=args.kv_copies,
        fuse_qkv=not args.no_fuse_qkv,
        flash=args.flash,
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
    )
    return LlamaForCausalLM(config, options)


def in_pipeline(model: LlamaForCausalLM, args: argparse.Namespace) -> NxDPPModel:
    """The model cut into stages with as many layers each, on their cores. Gradients are left as each rank has them."""
    return NxDPPModel(
        model,
        transformer_layer_cls=DecoderLayer,
        leaf_module_cls=["RotaryEmbedding"],  # it asks on which device it is: that must wait until the model is there
        auto_partition=True,
        input_names=["input_ids", "labels"],
        output_loss_value_spec=(True, False),
        num_microbatches=args.microbatches,
        virtual_pipeline_size=args.stages,
        schedule=args.schedule,
        use_optimizer_wrapper=True,
        broadcast_and_average_loss=True,  # all ranks have the loss, also those that are not the last stage's
        return_loss_on_cpu=False,
    )


def reduce_gradients(optimizer: torch.optim.Optimizer, sequence_parallel: bool) -> torch.Tensor:
    """Gradients as one rank alone would have them for the whole batch, clipped to norm 1; returns the norm."""
    if parallel_state.get_context_model_parallel_size() > 1:
        grads.allreduce_context_parallel_gradients(optimizer)
    if sequence_parallel:
        grads.allreduce_sequence_parallel_gradients(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    grads.bucket_allreduce_gradients([p.grad for p in parameters if p.grad is not None])
    return grads.clip_grad_norm(parameters, 1.0)


def own_part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This context-parallel rank's run of each sequence, with each token's label at the token's own place."""
    if parallel_state.get_context_model_parallel_size() > 1:
        return get_batch_on_this_context_parallel_rank(batch)  # moves the labels before it cuts
    return shift_labels(batch)


def forward_backward(model: LlamaForCausalLM | NxDPPModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Add up gradients; returns the loss over the whole batch."""
    if isinstance(model, NxDPPModel):
        return model.run_train(**batch)
    loss, _ = model(**batch)
    loss.backward()
    return global_mean(loss.detach())


def train(model: LlamaForCausalLM | NxDPPModel, loader: DataLoader, args: argparse.Namespace) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.local_parameters() if args.pp > 1 else model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    losses: list[float] = []
    bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True, disable=not xm.is_master_ordinal(local=False))

    def record(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")

    step = epoch = 0
    while step < args.steps:
        loader.sampler.set_epoch(epoch)
        for (ids,) in loader if args.pp > 1 else pl.MpDeviceLoader(loader, torch_xla.device()):  # stages take their inputs from the CPU
            loss = forward_backward(model, own_part({"input_ids": ids, "labels": ids}))
            reduce_gradients(optimizer, args.sequence_parallel)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            xm.add_step_closure(record, args=(loss,))
            if args.pp > 1:
                torch_xla.sync()
            bar.update()
            step += 1
            if step == args.steps:
                break
        epoch += 1
    torch_xla.sync()
    bar.close()
    return losses


def main() -> None:
    args = parse_args()
    torch.distributed.init_process_group("xla")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp, context_parallel_size=args.cp
    )
    torch.manual_seed(args.seed)
    model_parallel_xla_manual_seed(args.seed)
    model = make_model(args)
    if args.hf:
        hf_weights.load(model, args.hf)
    names = {name for name, _ in model.named_parameters()}
    trained = in_pipeline(model, args) if args.pp > 1 else model
    if args.pp == 1:
        move_model_to_device(model, torch_xla.device())
    if args.save_hf and names != {name for name, _ in model.named_parameters()}:
        raise SystemExit("--save-hf needs all stages in one process: start with nxd-run in place of torchrun")
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_size(),
        "pp": parallel_state.get_pipeline_model_parallel_size(),
        "dp": parallel_state.get_data_parallel_size(),
        "cp": parallel_state.get_context_model_parallel_size(),
    }
    xm.master_print(f"{torch.distributed.get_world_size()} ranks: " + " x ".join(f"{k} {n}" for k, n in sizes.items()))
    started = time.perf_counter()
    losses = train(trained, make_loader(args.seq, args.batch, args.seed), args)
    done = f"{args.steps} steps of {args.batch * sizes['dp']} sequences, {time.perf_counter() - started:.0f} s"
    xm.master_print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats/byte in {done}")
    if args.checkpoint:
        state = trained.local_state_dict() if args.pp > 1 else model.state_dict()
        checkpointing.save({"model": state}, str(args.checkpoint))
    if args.save_hf:
        hf_weights.save(model, args.save_hf)
        xm.master_print(f"wrote {args.save_hf}")
    if args.out and xm.is_master_ordinal(local=False):
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "summary.json").write_text(
            json.dumps({"losses": losses, **sizes, "world": int(os.environ.get("WORLD_SIZE", 0))}, indent=1)
        )


if __name__ == "__main__":
    main()
