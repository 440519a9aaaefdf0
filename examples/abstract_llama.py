"""What one training step of Llama 3 needs on every core of a Trainium machine that is not at hand: memory and collectives, from shapes alone.

    python examples/abstract_llama.py --size 8b --tp 8 --dp 4                 # 32 cores
    python examples/abstract_llama.py --size 70b --tp 32 --dp 4 --layers 4    # 128 cores, 4 of the 80 layers
    python examples/abstract_llama.py --size 70b --tp 32 --dp 16              # 512 cores
    python examples/abstract_llama.py --model llama3.1-405b --pp 16 --tp 32 --dp 4 --seq 8192    # 2,048 cores, 32 micro-batches

bfloat16 weights, sequence parallelism, ZeRO-1 with float32 master weights, activation checkpoints of every layer. No weights are made and nothing is
computed, so this takes minutes and a few GiB on a laptop. With --pp layers are shared out to the stages of a pipeline, and every stage is reported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "llama"))

import neuronx_distributed as nxd
import torch
import torch_xla
from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, NxDLlamaOptions
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils.batch_utils import shift_labels
from transformers import LlamaConfig

import nxd_jax

SIZES = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, vocab_size=256),
    "8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    ),
    "70b": dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256
    ),
    "405b": dict(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8, vocab_size=128256
    ),
}


def size_of(model: str) -> str:
    """llama3.1-405b -> 405b."""
    return model.rpartition("-")[2]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", "--model", choices=SIZES, type=size_of, default="8b", help="also llama3-8b, llama3-70b, llama3.1-405b")
    parser.add_argument("--tp", type=int, default=8, help="tensor parallel size")
    parser.add_argument("--dp", type=int, default=4, help="data parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--microbatches", type=int, help="of the pipeline in a step (default 2 pp)")
    parser.add_argument("--schedule", help="of the pipeline: 1f1b, gpipe, zb_h1, zbv, ...")
    parser.add_argument("--chunks", type=int, default=1, help="stages of a pipeline rank (virtual_pipeline_size)")
    parser.add_argument("--layers", type=int, help="instead of all of the size's")
    parser.add_argument("--seq", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences per data-parallel rank, of a pipeline in a micro-batch")
    parser.add_argument("--no-flash", action="store_true", help="attention that keeps all scores instead of blockwise attention")
    parser.add_argument("--instance", default="trn1.32xlarge", help="the machines, of which as many are taken as hold the cores")
    return parser.parse_args()


def get_model(config: LlamaConfig, options: NxDLlamaOptions) -> LlamaForCausalLM:
    return LlamaForCausalLM(config, options)


def pipeline_config(args: argparse.Namespace) -> dict | None:
    """What NxDPPModel is given: layers shared out evenly, a batch cut into micro-batches."""
    if args.pp == 1:
        return None
    return {
        "transformer_layer_cls": DecoderLayer,
        "leaf_module_cls": ["RotaryEmbedding"],  # it asks on which device it is: that must wait until the model is there
        "auto_partition": True,
        "input_names": ["input_ids", "labels"],
        "output_loss_value_spec": (True, False),
        "num_microbatches": args.microbatches or 2 * args.pp,
        "virtual_pipeline_size": args.chunks,
        "use_zero1_optimizer": True,
        **({"schedule": args.schedule} if args.schedule else {}),
    }


def train_step(args: argparse.Namespace) -> None:
    """One training step, as a script on Trainium has it."""
    pipeline = pipeline_config(args)
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        pipeline_config=pipeline,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=True,
        activation_checkpoint_config=DecoderLayer,
    )
    shape = SIZES[args.size] | ({"num_hidden_layers": args.layers} if args.layers else {})
    config = LlamaConfig(**shape, max_position_embeddings=args.seq, tie_word_embeddings=False)
    copies = max(args.tp // config.num_key_value_heads, 1)
    options = NxDLlamaOptions(sequence_parallel=True, kv_size_multiplier=copies, flash=not args.no_flash, dtype=torch.bfloat16)
    model = nxd.initialize_parallel_model(nxd_config, get_model, config, options)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=3e-4)
    ids = torch.randint(config.vocab_size, (args.batch * (pipeline["num_microbatches"] if pipeline else 1), args.seq))
    batch = shift_labels({"input_ids": ids, "labels": ids})
    if pipeline:
        model.run_train(**batch)
    else:
        model(**{name: t.to("xla") for name, t in batch.items()})[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()


def main() -> None:
    args = parse_args()
    cores = args.pp * args.tp * args.dp
    per_node = nxd_jax.topology.Topology(args.instance).cores_per_node
    with nxd_jax.abstract_run(cores, instance=args.instance, nodes=-(-cores // per_node)) as run:
        train_step(args)
        stages = f"PP {parallel_state.get_pipeline_model_parallel_size()} x " if args.pp > 1 else ""
        print(
            f"Llama {args.size}, {stages}TP {parallel_state.get_tensor_model_parallel_size()} x DP {parallel_state.get_data_parallel_size()}:"
        )
        print(run.report())
        if args.pp > 1:
            print(nxd_jax.inspect.look(run).estimate(sequences=args.batch * args.dp * pipeline_config(args)["num_microbatches"]))


if __name__ == "__main__":
    main()
