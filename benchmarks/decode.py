"""Tokens per second of greedy decoding, batch 1, with `nxd_jax.inference` (the builder's programs), against the same model hand-written in JAX and
against eager torch on the CPU. (`generate.py` is about transformers' `generate()` on xla.)

    python benchmarks/decode.py --rounds 3 --write

A Llama of 8 layers, hidden 256, random weights. Each variant runs in a process of its own, in turn, and makes
the same tokens. Times are of a token after the prompt, read on the host; compilations are counted after a warm-up. "host" is a token of the same model with
hidden size 16 through the builder's programs: what a token costs beside its arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import rounds

PROMPT, TOKENS, LENGTH, VOCAB = 16, 256, 512, 1024
SIZES = {"hidden": 256, "intermediate": 704, "layers": 8, "heads": 8}
VARIANTS = {
    "jax": "hand-written JAX, static cache",
    "builder": "nxd_jax.inference (ModelBuilder)",
    "host": "nxd_jax.inference, hidden 16",
    "eager": "eager torch, transformers' generate",
}

Generate = Callable[[list[int], int], list[int]]


def llama(hidden: int | None = None) -> Any:
    """transformers' model, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden or SIZES["hidden"],
        intermediate_size=2 * hidden if hidden else SIZES["intermediate"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["heads"],
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def by_hand() -> Generate:
    from decode_jax import generate
    from llama_jax import from_torch

    params = from_torch({n: p.detach().numpy() for n, p in llama().state_dict().items()})
    size = SIZES["hidden"] // SIZES["heads"]
    return lambda prompt, count: generate(params, prompt, count, LENGTH, SIZES["heads"], size)


def by_builder(hidden: int | None = None) -> Generate:
    from nxd_jax.inference import generation
    from nxd_jax.inference.config import InferenceConfig
    from nxd_jax.inference.language_model import LanguageModel

    with tempfile.TemporaryDirectory() as folder:
        llama(hidden).save_pretrained(folder)
        options = InferenceConfig(seq_len=LENGTH, max_context_length=PROMPT, on_device_sampling=True)
        model = LanguageModel.from_pretrained(folder, options)
    return lambda prompt, count: generation.generate(model, [prompt], count, end=())[0]


def by_transformers() -> Generate:
    import torch

    model = llama()

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
        return found[0, len(prompt) :].tolist()

    return generate


def made(variant: str) -> Generate:
    """The function that makes tokens."""
    if variant == "jax":
        return by_hand()
    if variant in ("builder", "host"):
        return by_builder(16 if variant == "host" else None)
    return by_transformers()


def run(variant: str) -> None:
    """Time a variant and print JSON."""
    generate = made(variant)
    prompt = [(7 * k + 3) % VOCAB for k in range(PROMPT)]
    first = generate(prompt, 24)
    compiled = measure.count_jax_compilations() if variant != "eager" else lambda: 0
    found: list[int] = []
    took = []
    for _ in range(3):
        started = time.perf_counter()
        generate(prompt, 1)
        between = time.perf_counter()
        found = generate(prompt, TOKENS)
        took.append((time.perf_counter() - between - (between - started)) / (TOKENS - 1))
    if variant == "builder":
        generate(prompt, LENGTH - PROMPT)
    if found[:24] != first:
        raise RuntimeError("two runs made other tokens")
    token = min(took)
    result = {"token": token, "tokens_per_second": 1 / token, "compilations": compiled(), "losses": [float(t) for t in found]}
    print(json.dumps(result), flush=True)


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians of rounds as Markdown, with the median of ratios to the floor's tokens per second."""
    lines = ["| variant | tokens/s | against | ratio | token (us) | compilations after warm-up |", "|---|---|---|---|---|---|"]
    for name, runs in found.items():
        rate = statistics.median(r["tokens_per_second"] for r in runs)
        floors = ["jax", "eager"] if name == "builder" and {"jax", "eager"} <= set(found) else []
        ratios = [
            statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(runs, found[f], strict=True)) for f in floors
        ]
        against = ", ".join(VARIANTS[f] for f in floors)
        ratio = ", ".join(f"{r:.2f}x" for r in ratios)
        token = 1e6 * statistics.median(r["token"] for r in runs)
        lines.append(f"| {VARIANTS[name]} | {rate:.0f} | {against} | {ratio} | {token:.0f} | {max(r['compilations'] for r in runs)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="these variants (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    if args.variant:
        run(args.variant)
        return
    chosen = args.only or list(VARIANTS)
    found = rounds.run(str(Path(__file__).resolve()), chosen, args.rounds, [], "token")
    rounds.difference({name: runs for name, runs in found.items() if name != "host"}, 0.0)
    text = table(found) + "\n\n" + rounds.stack("torch", "jax", "transformers")
    sys.stdout.write(f"{text}\n")
    if args.write:
        rounds.put("decode", text)


if __name__ == "__main__":
    main()
