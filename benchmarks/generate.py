"""Time transformers' `generate()`: the unchanged script on "xla", and in eager PyTorch on the CPU.

    python benchmarks/generate.py --rounds 3 --write

Random weights, greedy, one text of 16 tokens and 64 new ones. Both variants of a model run in turn, each in a process of its own, and must generate the
same tokens. The first call, in which xla compiles, counts apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import rounds

MODELS = {
    "llama": "Llama, 8 layers, hidden 256, vocabulary 256",
    "gpt2": "GPT-2: 12 layers, hidden 768, vocabulary 50,257",
}
DEVICES = {"xla": "`xla`, unchanged script", "cpu": "eager PyTorch on the CPU"}
PROMPT, NEW, CALLS = 16, 64, 4


def make(name: str) -> Any:
    """The model, on the CPU, without an end token: every text has all its tokens."""
    import torch
    import transformers

    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**ends)).eval()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8, pad_token_id=0, **ends
    )
    return transformers.LlamaForCausalLM(config).eval()


def child(variant: str) -> None:
    """Seconds of each call, as JSON, with the tokens and the programs that later calls compiled."""
    import torch
    import torch_xla.debug.metrics as met

    name, device = variant.split("-")
    model = make(name).to(device)
    ids = torch.randint(3, 256, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    took, used, tokens, compiled = [], [], [], []
    for _ in range(1 + CALLS):
        started = rounds.now()
        out = model.generate(ids.to(device), max_new_tokens=NEW, do_sample=False)
        tokens.append(out.cpu()[0, PROMPT:].tolist())
        ended = rounds.now()
        took.append(ended[0] - started[0])
        used.append(ended[1] - started[1])
        compiled.append((met.metric_data("CompileTime") or (0,))[0])
    seconds, cpu = (statistics.median(of[1:]) / NEW for of in (took, used))
    found = {
        "seconds": seconds,
        "cpu": cpu,
        "first": took[0],
        "compiled": compiled[0],
        "later": compiled[-1] - compiled[0],
        "tokens": tokens,
    }
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        child(args.variant)
        return
    found = rounds.run(__file__, [f"{name}-{device}" for name in args.models for device in DEVICES], args.rounds, [], key="seconds")
    lines = ["| model | | tokens a second | first call (s) | programs, first call | later calls |", "|---|---|---|---|---|---|"]
    for name in args.models:
        base = found[f"{name}-cpu"]
        for device, title in DEVICES.items():
            runs = found[f"{name}-{device}"]
            if any(r["tokens"] != base[0]["tokens"] for r in runs):
                raise RuntimeError(f"{name}: the tokens on {device} are not those of eager PyTorch on the CPU")
            ratio, cpu = (statistics.median(b[key] / r[key] for r, b in zip(runs, base, strict=True)) for key in ("seconds", "cpu"))
            speed, first = (statistics.median(of(r) for r in runs) for of in (lambda r: 1 / r["seconds"], lambda r: r["first"]))
            lines.append(
                f"| {MODELS[name]} | {title} | {speed:.0f} ({ratio:.2f}x, {cpu:.2f}x) | {first:.1f} | {runs[0]['compiled']} | {runs[0]['later']} |"
            )
    note = f"in brackets the ratio to eager PyTorch, and that of CPU time, median of {args.rounds} round(s) of {CALLS} calls each"
    text = "\n".join(lines) + f"\n\n{note}; {rounds.stack('torch', 'transformers', 'jax', 'jaxlib')}"
    print(text)
    if args.write:
        rounds.put("generate", text)


if __name__ == "__main__":
    main()
