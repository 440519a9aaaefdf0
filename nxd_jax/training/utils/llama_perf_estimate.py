"""`neuronx_distributed_training.utils.llama_perf_estimate`: from sequences per second to the share of a machine's peak, with the original's counts.

    python -m neuronx_distributed_training.utils.llama_perf_estimate --config config.json --batch_size 1024 --throughput 20 --num_nodes 4 --seq_len 4096 \
        --hw_backend trn1

It counts every pair of tokens in attention, also those that a causal mask hides, and the embedding as a matrix product; the metric `mfu` of a training does
neither (`utils.mfu`).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

PEAKS = {"trn1": 3040, "trn2": 10672, "p5": 8000}
"""Of a node, in TFLOP/s: trn1.32xlarge, trn2.48xlarge, p5.48xlarge, bfloat16."""


def get_attention_flop(hidden_size: int, num_heads: int, num_key_value_heads: int, seq_len: int) -> int:
    """Operations of a layer's attention for one sequence, forward: projections, scores, softmax (3 for each score, twice as they are float32), values."""
    kv = num_key_value_heads * (hidden_size // num_heads)
    projections = 2 * seq_len * hidden_size * (2 * hidden_size + 2 * kv)
    return projections + seq_len**2 * (4 * hidden_size + 6 * num_heads)


def get_mlp_flops(hidden_size: int, intermediate_size: int, seq_len: int) -> int:
    """Operations of a layer's three matrices for one sequence, forward."""
    return 6 * intermediate_size * hidden_size * seq_len


def llama2_flops_per_seq(config: Any, seq_len: int, output_logits: bool = True) -> int:
    """Operations of a sequence, forward and backward (twice the forward pass). config: a LlamaConfig of transformers."""
    attention = get_attention_flop(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, seq_len)
    mlp = get_mlp_flops(config.hidden_size, config.intermediate_size, seq_len)
    table = 2 * config.vocab_size * config.hidden_size * seq_len
    return 3 * (config.num_hidden_layers * (attention + mlp) + table * (2 if output_logits else 1))


def calculate_mfu(
    config_path: str, batch_size: int, throughput: float, num_nodes: int, seq_len: int, hw_backend: str
) -> tuple[float, float, float, float, float]:
    """(percent of the peak, sequences per second and node, TFLOP/s of a node, TFLOP of a sequence, seconds of a batch).

    throughput: sequences per second of all nodes. Raises ValueError for another machine than those of `PEAKS`.
    """
    from transformers import LlamaConfig

    if hw_backend not in PEAKS:
        raise ValueError(f"hw_backend must be one of {', '.join(PEAKS)}, got {hw_backend!r}")
    tera = llama2_flops_per_seq(LlamaConfig.from_json_file(config_path), seq_len) / 1e12
    by_node = throughput / num_nodes
    return 100 * by_node * tera / PEAKS[hw_backend], by_node, by_node * tera, tera, batch_size / throughput


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="llama_perf_estimate", description="The share of a machine's peak that a Llama's training takes.")
    parser.add_argument("--config", required=True, help="config.json of the model")
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--throughput", type=float, required=True, help="sequences per second")
    parser.add_argument("--num_nodes", type=int, required=True)
    parser.add_argument("--seq_len", type=int, required=True)
    parser.add_argument("--hw_backend", choices=list(PEAKS), required=True)
    said = parser.parse_args(arguments)
    mfu, sequences, flops, each, seconds = calculate_mfu(
        said.config, said.batch_size, said.throughput, said.num_nodes, said.seq_len, said.hw_backend
    )
    lines = (
        f"TFLOP per sequence: {each:.2f}",
        f"Seconds per batch: {seconds:.2f}",
        f"Sequences per second and node: {sequences:.2f}",
        f"TFLOP/s per node: {flops:.2f}",
        f"Model FLOPs utilization: {mfu:.2f} %",
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
