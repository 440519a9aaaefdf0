"""What shapes that change cost: a text that grows by one token, and batches of other lengths, against compiling each shape and against eager torch.

    python benchmarks/changing_shapes.py --rounds 3 --write

Every variant runs in a process of its own, in turn, with an empty compilation cache. `NXD_JAX_COLD_SHAPES=0` compiles each shape. The losses of the variants
must agree, and so must the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import rounds

VOCAB, HIDDEN, HEADS, LAYERS, LONGEST = 65, 64, 4, 4, 128
VARIANTS = {"cold": "unchanged script on `xla`", "compiled": "the same, each shape compiled", "eager": "eager PyTorch on the CPU"}


def measure(variant: str, steps: int) -> dict[str, Any]:
    """Seconds for that many tokens and batches, each of a shape of its own, and what came of them."""
    if variant == "compiled":
        os.environ["NXD_JAX_COLD_SHAPES"] = "0"
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    device = "cpu"
    if variant != "eager":
        import torch_xla

        device = "xla"
        torch.zeros(1, device=device).tolist()

    def end_step() -> None:
        if device == "xla":
            torch_xla.sync()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LONGEST,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device).eval()
    started = time.perf_counter()
    ids = torch.zeros(1, 4, dtype=torch.int64).to(device)
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            end_step()
    tokens = ids.tolist()[0]
    grown = time.perf_counter()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for k in range(steps):
        batch = torch.randint(0, VOCAB, (8, 20 + 2 * k), generator=torch.Generator().manual_seed(k)).to(device)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step()
        losses.append(loss.item())
    return {"text": grown - started, "batches": time.perf_counter() - grown, "tokens": tokens, "losses": losses}


COLUMNS = {"text": "a text that grows (s)", "batches": "batches of other lengths (s)"}


def table(found: dict[str, list[dict[str, Any]]], steps: int) -> str:
    """A Markdown table. Raises RuntimeError if the losses or the tokens differ."""
    worst = rounds.difference(found, 1e-3)
    if any(run["tokens"] != found["eager"][0]["tokens"] for runs in found.values() for run in runs):
        raise RuntimeError("the variants' tokens differ")
    lines = [f"| variant | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, title in VARIANTS.items():
        cells = [rounds.cell(found[name], found["compiled"], key, 1, 1) for key in COLUMNS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    shape = f"GPT-2 of {LAYERS} layers, hidden {HIDDEN}; {steps} steps of {steps} lengths each; ratios to compiling each shape"
    about = rounds.stack("torch", "transformers", "jax", "jaxlib")
    return "\n".join([*lines, "", f"{shape}; median of {len(found['eager'])} round(s); losses differ by {worst:.0e}; {about}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--variant", choices=VARIANTS, help="run this one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.steps)))
        return
    sys.stderr.write("compiling each shape takes minutes\n")
    text = table(rounds.run(__file__, VARIANTS, args.rounds, ["--steps", str(args.steps)], "text"), args.steps)
    print(text)
    if args.write:
        rounds.put("changing_shapes", text)


if __name__ == "__main__":
    main()
