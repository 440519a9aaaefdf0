"""Serve prompts with a traced language model: more prompts than the KV cache has lines, tokens as they are made, the model in a file.

python examples/inference/generate.py                          a small random Llama on 4 ranks
python examples/inference/generate.py --model llama-hf --tp 8  a Hugging Face folder
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers

from nxd_jax.inference import InferenceConfig, LanguageModel, load, save, stream


def random_llama(folder: Path) -> Path:
    """A Llama of two layers that nobody trained."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def serve(model: LanguageModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Print what is made when, and return the answers."""
    answers: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    for made in stream(model, prompts, new):
        if made.token is not None:
            answers[made.prompt].append(made.token)
        if made.last:
            print(f"prompt {made.prompt}: {len(answers[made.prompt])} tokens after {time.perf_counter() - started:.2f} s")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: a small random Llama")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--lines", type=int, default=2, help="texts that are decoded together")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    args = parser.parse_args()
    options = InferenceConfig(
        tp_degree=args.tp, batch_size=args.lines, seq_len=64, max_context_length=32, context_buckets=(16, 32), is_continuous_batching=True
    )
    with tempfile.TemporaryDirectory() as folder:
        model = LanguageModel.from_pretrained(args.model or random_llama(Path(folder)), options)
        source = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, 256, (5 * k + 3,), generator=source).tolist() for k in range(args.prompts)]
        answers = serve(model, prompts, args.new)
        save(model, Path(folder) / "model.pt")
        again = load(Path(folder) / "model.pt")
        print("the saved model answers the same:", serve(again, prompts, args.new) == answers)


if __name__ == "__main__":
    main()
