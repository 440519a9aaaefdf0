"""How long training waits for a checkpoint: saved in the foreground, and in the background. Prints the ratio of the two in one run.

python benchmarks/async_save.py --megabytes 500
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import neuronx_distributed as nxd
import torch
import torch_xla


class Layers(torch.nn.Module):
    """Square layers."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width, bias=False) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500, help="of weights and AdamW's state")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    width = 1024
    count = max(args.megabytes * 10**6 // (3 * 4 * width * width), 1)
    config = nxd.neuronx_distributed_config()
    model = nxd.initialize_parallel_model(config, Layers, count, width)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-4)
    x = torch.randn(8, width, device="xla")

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        model.run_train(x)
        optimizer.step()
        torch_xla.sync(wait=True)
        return time.perf_counter() - started

    for _ in range(3):
        step()
    foreground, calls, after, plain = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(args.rounds):
            plain.append(step())
            for background, times in ((False, foreground), (True, calls)):
                started = time.perf_counter()
                nxd.save_checkpoint(folder, f"{k}{background}", model, optimizer, num_kept_ckpts=1, async_save=background)
                times.append(time.perf_counter() - started)
                if background:
                    after.append(step())
            nxd.finalize_checkpoint()
    saved, held, stepped, usual = (statistics.median(t) for t in (foreground, calls, after, plain))
    print(
        f"state {count * 3 * 4 * width * width / 1e6:.0f} MB; a save in the foreground {saved:.2f} s; in the background the call takes {held:.3f} s"
    )
    print(f"the step after it takes {stepped:.3f} s, otherwise {usual:.3f} s")
    print(
        f"training waits {100 * held / saved:.1f} % of a foreground save for the call, {100 * (held + stepped - usual) / saved:.1f} % with the slower step"
    )


if __name__ == "__main__":
    main()
