"""Train a small Llama on bytes of Python's own documentation, as a torch_xla script.

Model, optimizer and scheduler are unmodified: `transformers.LlamaForCausalLM`, `torch.optim.AdamW` and
`torch.optim.lr_scheduler.LambdaLR`. Set DISABLE_XLA=1 to run the same script in plain PyTorch on the CPU.

    python examples/char_lm.py --out demo_output

Writes loss.png, model.pt, sample.txt and summary.json to the output folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import matplotlib
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

if os.environ.get("DISABLE_XLA"):
    from plain_torch import pl, torch_xla, xm
else:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl

BLOCK_BYTES = 4096  # the text is cut into blocks of this size; every tenth is held out
LOG_EVERY = 10  # steps between readings of the loss: a reading waits for the device
VALIDATION_BATCHES = 16
SAMPLE_BYTES = 240


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("demo_output"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes: about 90 % and 10 % of Python's documentation topics, by contiguous blocks."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()
    blocks = [text[i : i + BLOCK_BYTES] for i in range(0, len(text), BLOCK_BYTES)]
    train = b"".join(block for i, block in enumerate(blocks) if i % 10 != 9)
    held_out = b"".join(block for i, block in enumerate(blocks) if i % 10 == 9)
    return torch.tensor(list(train)), torch.tensor(list(held_out))


def make_loader(data: torch.Tensor, batch: int, seq: int, shuffle_seed: int | None = None) -> DataLoader:
    rows = data[: len(data) // seq * seq].view(-1, seq)
    generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(TensorDataset(rows), batch_size=batch, shuffle=generator is not None, generator=generator, drop_last=True)


def make_model(hidden: int, layers: int, seq: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 32, 1),
        max_position_embeddings=seq,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def warmup_cosine(step: int, steps: int) -> float:
    """Factor on the learning rate: a linear rise over the first 5 %, then a cosine down to 10 %."""
    warmup = max(steps // 20, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def evaluate(model: LlamaForCausalLM, batches: list, device: torch.device) -> float:
    """Mean loss in nats per byte. The sum stays on the device: one reading for all batches."""
    model.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for (ids,) in pl.MpDeviceLoader(batches, device):
            total += model(input_ids=ids, labels=ids).loss
    model.train()
    return total.item() / len(batches)


def sample(model: LlamaForCausalLM, prompt: torch.Tensor, device: torch.device, temperature: float = 0.7) -> str:
    """Continue `prompt` (one window of bytes). Every step has the same shapes, so there is one compilation."""
    seq = len(prompt)
    text = torch.cat([torch.zeros(SAMPLE_BYTES, dtype=torch.long), prompt]).unsqueeze(0).to(device)
    model.eval()
    with torch.no_grad():
        for _ in range(SAMPLE_BYTES):
            logits = model(input_ids=text[:, -seq:]).logits[:, -1]
            next_byte = torch.multinomial(torch.softmax(logits / temperature, dim=-1), num_samples=1)
            text = torch.cat([text[:, 1:], next_byte], dim=1)
            torch_xla.sync()
    model.train()
    return bytes(text[0, -SAMPLE_BYTES:].tolist()).decode(errors="replace")


class TrainingLog:
    """Receives losses from step closures, shows them on the progress bar and keeps them for the picture."""

    def __init__(self, bar: tqdm, tokens_per_step: int):
        self.bar, self.tokens_per_step = bar, tokens_per_step
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.speeds: list[float] = []
        self.restart_clock(0)

    def restart_clock(self, step: int) -> None:
        self.last_step, self.last_time = step, time.perf_counter()

    def record(self, step: int, loss: torch.Tensor, lr: float) -> None:
        value = loss.item()
        self.speeds.append((step - self.last_step) * self.tokens_per_step / (time.perf_counter() - self.last_time))
        self.restart_clock(step)
        self.train.append((step, value))
        self.bar.set_postfix_str(f"loss {value:.3f}, lr {lr:.1e}, {self.speeds[-1]:,.0f} tokens/s")


def train(model: LlamaForCausalLM, loader: DataLoader, held_out: list, device: torch.device, args: argparse.Namespace) -> TrainingLog:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True, mininterval=1.0)
    log = TrainingLog(bar, args.batch * args.seq)
    device_loader = pl.MpDeviceLoader(loader, device)
    step = 0
    while step < args.steps:
        for (ids,) in device_loader:
            step += 1
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            xm.optimizer_step(optimizer)
            scheduler.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0 or step == args.steps:
                xm.add_step_closure(log.record, args=(step, loss.detach(), scheduler.get_last_lr()[0]))
            bar.update()
            if step % args.eval_every == 0 or step == args.steps:
                torch_xla.sync()
                log.validation.append((step, evaluate(model, held_out, device)))
                bar.write(f"step {step}: validation loss {log.validation[-1][1]:.4f} nats/byte")
                log.restart_clock(step)
            if step == args.steps:
                break
    bar.close()
    return log


def save_and_check(model: LlamaForCausalLM, path: Path, batch: torch.Tensor, device: torch.device) -> float:
    """Save the weights, load them into a new model on the CPU and return how far the two losses are apart."""
    xm.save({"model": model.state_dict(), "config": model.config.to_dict()}, str(path))
    stored = torch.load(path)
    restored = LlamaForCausalLM(LlamaConfig.from_dict(stored["config"]))
    restored.load_state_dict(stored["model"])
    with torch.no_grad():
        expected = restored(input_ids=batch, labels=batch).loss.item()
        actual = model(input_ids=batch.to(device), labels=batch.to(device)).loss.item()
    return abs(expected - actual)


def plot(log: TrainingLog, path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(*zip(*log.train, strict=True), label="training")
    axes.plot(*zip(*log.validation, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats/byte)", title="Byte-level Llama on Python's documentation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def describe(device: torch.device, model: LlamaForCausalLM) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type == "cpu":
        return f"plain PyTorch on cpu | Llama, {parameters / 1e6:.1f} M parameters | {versions}"
    import jax

    runs_on = jax.devices()[0]
    return (
        f"torch device {device} runs on JAX {jax.default_backend()} ({runs_on.device_kind}) | "
        f"Llama, {parameters / 1e6:.1f} M parameters | {versions}, jax {jax.__version__}"
    )


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    device = torch_xla.device()
    model = make_model(args.hidden, args.layers, args.seq).to(device)
    print(describe(device, model), flush=True)

    train_bytes, held_out_bytes = load_text()
    held_out = list(make_loader(held_out_bytes, args.batch, args.seq))[:VALIDATION_BATCHES]
    started = time.perf_counter()
    log = train(model, make_loader(train_bytes, args.batch, args.seq, shuffle_seed=args.seed), held_out, device, args)
    seconds = time.perf_counter() - started

    text = sample(model, held_out_bytes[: args.seq], device)
    difference = save_and_check(model, args.out / "model.pt", held_out[0][0], device)
    plot(log, args.out / "loss.png")
    (args.out / "sample.txt").write_text(text)
    summary = {
        "device": str(device),
        "steps": args.steps,
        "training_loss": log.train[-1][1],
        "validation_loss": log.validation[-1][1],
        "tokens_per_second": sorted(log.speeds)[len(log.speeds) // 2],
        "training_seconds": seconds,
        "reloaded_loss_difference": difference,
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    print(f"\nA sample (temperature 0.7):\n{text}\n")
    print(f"Loaded the checkpoint again on the CPU: the loss differs by {difference:.1e}.")
    print(f"Validation loss {summary['validation_loss']:.4f} nats/byte after {args.steps} steps in {seconds:.0f} s.")
    print(f"Results are in {args.out}/: loss.png, model.pt, sample.txt, summary.json.")


if __name__ == "__main__":
    main()
