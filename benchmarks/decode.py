"""Tokens per second of greedy decoding, batch 1, with `nxd_jax.inference` (the builder's programs), against the same model hand-written in JAX and
against eager torch on the CPU. (`generate.py` is about transformers' `generate()` on xla.)

    python benchmarks/decode.py --rounds 3 --write

A Llama of 8 layers, hidden 256, and GPT-2 (12 layers, hidden 768), random weights. Each variant runs in a process of its own, in turn, and those of a model
make the same tokens. Times are of a token after the prompt, read on the host; compilations are counted after a warm-up. "CPU time" is that of all threads.

"host" is a token of the Llama whose program for one token is replaced by one that takes and gives back the same arrays and computes nothing: what Python, JAX
and PJRT do for a token. Other processes only add to it: of its tokens the fastest tenth counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import rounds

PROMPT = 16
VOCAB = 1024
SIZES = {"hidden": 256, "intermediate": 704, "layers": 8, "heads": 8}
VARIANTS = {
    "jax": "Llama, hand-written JAX, static cache",
    "builder": "Llama, nxd_jax.inference (ModelBuilder)",
    "eager": "Llama, eager torch, transformers' generate",
    "host": "Llama, nxd_jax.inference, without arithmetic",
    "gpt2-jax": "GPT-2, hand-written JAX, static cache",
    "gpt2-builder": "GPT-2, nxd_jax.inference (ModelBuilder)",
    "gpt2-eager": "GPT-2, eager torch, transformers' generate",
}
TOKENS = {"": 256, "gpt2-": 24}
"""How many are timed; for a model's name in front of a variant's."""
LENGTH = {"": 512, "gpt2-": 128}
"""Slots of the cache."""

Generate = Callable[[list[int], int], list[int]]


def family(variant: str) -> str:
    """What stands in front of a variant's name for its model."""
    return "gpt2-" if variant.startswith("gpt2-") else ""


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
        max_position_embeddings=LENGTH[""],
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    """The same for GPT-2, with dims of the published one."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, initializer_range=0.1)).eval()


def by_hand(of: str) -> Generate:
    import decode_jax
    from llama_jax import from_torch

    state = {n: p.detach().numpy() for n, p in (gpt2() if of else llama()).state_dict().items()}
    if of:
        weights, layers = decode_jax.gpt2_from_torch(state), 12
        return lambda prompt, count: decode_jax.generate(decode_jax.gpt2_step, weights, layers, prompt, count, LENGTH[of], 12, 64)
    params, size = from_torch(state), SIZES["hidden"] // SIZES["heads"]
    return lambda prompt, count: decode_jax.generate(
        decode_jax.step, params, SIZES["layers"], prompt, count, LENGTH[of], SIZES["heads"], size
    )


def built(of: str, hidden: int | None = None) -> Any:
    """The `LanguageModel`."""
    from nxd_jax.inference.config import InferenceConfig
    from nxd_jax.inference.language_model import LanguageModel

    with tempfile.TemporaryDirectory() as folder:
        (gpt2() if of else llama(hidden)).save_pretrained(folder)
        options = InferenceConfig(seq_len=LENGTH[of], max_context_length=PROMPT, on_device_sampling=True)
        return LanguageModel.from_pretrained(folder, options)


def by_builder(of: str = "", hidden: int | None = None) -> Generate:
    from nxd_jax.inference import generation

    model = built(of, hidden)
    return lambda prompt, count: generation.generate(model, [prompt], count, end=())[0]


def by_transformers(of: str) -> Generate:
    import torch

    model = gpt2() if of else llama()

    def generate(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
        return found[0, len(prompt) :].tolist()

    return generate


def made(variant: str) -> Generate:
    """The function that makes tokens."""
    of = family(variant)
    return {"jax": by_hand, "builder": by_builder, "eager": by_transformers}[variant.removeprefix(of)](of)


def run(variant: str) -> None:
    """Time a variant and print JSON."""
    of = family(variant)
    generate, count = made(variant), TOKENS[of]
    prompt = [(7 * k + 3) % VOCAB for k in range(PROMPT)]
    first = generate(prompt, count // 2)
    compiled = measure.count_jax_compilations() if "eager" not in variant else lambda: 0
    found: list[int] = []
    took = []
    for _ in range(3):
        started = rounds.now()
        generate(prompt, 1)
        between = rounds.now()
        found = generate(prompt, count)
        took.append([(end - b - (b - a)) / (count - 1) for a, b, end in zip(started, between, rounds.now(), strict=True)])
    if variant == "builder":
        generate(prompt, LENGTH[of] - PROMPT)
    if found[: count // 2] != first:
        raise RuntimeError("two runs made other tokens")
    token, cpu = (min(of_runs) for of_runs in zip(*took, strict=True))
    print(json.dumps({"token": token, "cpu": cpu, "compilations": compiled(), "losses": [float(t) for t in found]}), flush=True)


def host() -> None:
    """The same for a model whose program for one token computes nothing."""
    from nxd_jax.inference import generation

    model = built("")
    _compute_nothing(model.nxd_model._model, f"decode_{LENGTH['']}")
    prompt = list(range(1, 1 + PROMPT))
    list(generation.stream(model, [prompt], 8, end=()))
    compiled = measure.count_jax_compilations()
    took = [t for _ in range(3) for t in _between(generation.stream(model, [prompt], TOKENS[""], end=()))]
    token, cpu = (statistics.quantiles(of_tokens, n=10)[0] for of_tokens in zip(*took, strict=True))
    print(json.dumps({"token": token, "cpu": cpu, "compilations": compiled(), "losses": []}), flush=True)


def _between(tokens: Iterator[Any]) -> list[tuple[float, float]]:
    next(tokens)
    times = [rounds.now(), *(rounds.now() for _ in tokens)]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)]


def _compute_nothing(model: Any, tag: str) -> None:
    """Replace a program by one with its arguments and results, zeros, whose states come back as they are."""
    import jax
    import jax.numpy as jnp

    from torch_bridge import _compat
    from torch_bridge.aot import exporting
    from torch_bridge.ir import dtypes

    of = model.programs[tag].facts
    zeros = [(t.shape, dtypes.to_jax(t.dtype)) for t in of.results]

    def nothing(draws: Any, weights: Any, states: Any, inputs: Any) -> Any:
        return [jnp.zeros(*z) for z in zeros], jax.lax.optimization_barrier(list(states))

    with _compat.enable_x64():
        jitted = jax.jit(nothing, donate_argnums=2, keep_unused=True)
        model._compiled[tag] = jitted.lower(*exporting.arguments(of, model.where.mesh)).compile()


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians of rounds as Markdown; of our rows also the median ratio of tokens/s to each other variant of the model."""
    lines = [
        "| variant | tokens/s | to JAX | to eager torch | token (us) | CPU time of a token (us) | compilations after warm-up |",
        "|---" * 7 + "|",
    ]
    for name, runs in found.items():
        of = family(name)
        token, cpu = (1e6 * statistics.median(r[key] for r in runs) for key in ("token", "cpu"))
        ratios = [_ratio(found, name, f"{of}{other}") for other in ("jax", "eager")]
        rate = "" if name == "host" else f"{1e6 / token:.0f}"
        lines.append(
            f"| {VARIANTS[name]} | {rate} | {' | '.join(ratios)} | {token:.0f} | {cpu:.0f} | {max(r['compilations'] for r in runs)} |"
        )
    return "\n".join(lines)


def _ratio(found: dict[str, list[dict[str, Any]]], name: str, other: str) -> str:
    """Of tokens/s; in brackets of CPU time."""
    if not name.endswith("builder") or other not in found:
        return ""
    pairs = list(zip(found[other], found[name], strict=True))
    wall, cpu = (statistics.median(a[key] / b[key] for a, b in pairs) for key in ("token", "cpu"))
    return f"{wall:.2f}x ({cpu:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, help="these variants (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    if args.variant:
        host() if args.variant == "host" else run(args.variant)
        return
    chosen = args.only or list(VARIANTS)
    found = rounds.run(str(Path(__file__).resolve()), chosen, args.rounds, [], "token")
    for of in TOKENS:
        same = {name: runs for name, runs in found.items() if family(name) == of and name != "host"}
        if same:
            rounds.difference(same, 0.0)
    text = table(found) + "\n\nIn brackets: the ratio of CPU time. " + rounds.stack("torch", "jax", "transformers")
    sys.stdout.write(f"{text}\n")
    if args.write:
        rounds.put("decode", text)


if __name__ == "__main__":
    main()
