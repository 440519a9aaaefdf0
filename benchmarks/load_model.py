"""Seconds until a saved model is ready (`NxDModel.load` and `to_neuron`), against reading its weights alone, with warm caches.

    python benchmarks/load_model.py --rounds 5 --write

Two programs and 200 MB of float32 weights, on 2 ranks with a device each. Both variants run in processes of their own, in turn; JAX has started, the file is in
the page cache, and its programs are in the cache of compiled ones. "read" fills new memory from the file and puts it on the devices.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import rounds

TP, WIDTH, INNER, LAYERS = 2, 1024, 3072, 8
VARIANTS = {"read": "reading the weights", "load": "load and to_neuron", "first": "the first model of a process"}


def save(path: Path) -> None:
    """Trace a model and save it with random weights."""
    import torch

    from nxd_jax.parallel_layers import layers
    from nxd_jax.trace.functions import shard_checkpoint
    from nxd_jax.trace.model_builder_v2 import ModelBuilder
    from nxd_jax.trace.parallel_context import NxDParallelState

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = layers.ColumnParallelLinear(WIDTH, INNER, bias=False, gather_output=False)
            self.down = layers.RowParallelLinear(INNER, WIDTH, bias=False, input_is_parallel=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    with NxDParallelState(world_size=TP, tensor_model_parallel_size=TP):
        module = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        builder = ModelBuilder(module).trace(torch.zeros(16, WIDTH), tag="prefill").trace(torch.zeros(1, WIDTH), tag="decode")
        shapes = {"up": (INNER, WIDTH), "down": (WIDTH, INNER)}
        full = {f"{k}.{name}.weight": 0.02 * torch.randn(shape) for k in range(LAYERS) for name, shape in shapes.items()}
        model = builder.compile(compiler_workdir=path.parent)
        model.set_weights(shard_checkpoint(full, module))
    model.save(str(path), save_weights=True)


def read(path: Path) -> list[Any]:
    """What a hand-written loader does with the file's weights: arrays on the devices."""
    import zipfile

    import jax
    import torch

    found = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as f:
        names = sorted(n for n in archive.namelist() if n.endswith(".safetensors"))
        for device, name in zip(jax.devices(), names, strict=False):
            offset = archive.getinfo(name).header_offset
            f.seek(offset)
            start = offset + 30 + sum(struct.unpack("<HH", f.read(30)[26:]))
            f.seek(start)
            length = struct.unpack("<Q", f.read(8))[0]
            described = json.loads(f.read(length))
            for tensor, entry in described.items():
                if tensor != "__metadata__":
                    memory = torch.empty(entry["shape"]).numpy()  # aligned as XLA wants it
                    f.seek(start + 8 + length + entry["data_offsets"][0])
                    f.readinto(memory)  # type: ignore[attr-defined]
                    found.append(jax.device_put(memory, device))
    return [array.block_until_ready() for array in found]


def load(path: Path) -> Any:
    """A model that is ready to be called."""
    from nxd_jax.trace.nxd_model import NxDModel

    model = NxDModel.load(str(path))
    model.to_neuron()
    return model


def run(variant: str, path: Path) -> None:
    """Time a variant and print JSON."""
    import jax

    jax.config.update("jax_num_cpu_devices", TP)
    import torch

    from nxd_jax.trace.nxd_model import NxDModel  # noqa: F401
    from torch_bridge.runtime import backend

    backend.ensure()
    jax.block_until_ready([jax.device_put(1.0, device) for device in jax.devices()])
    if variant != "first":
        _call_an_exported_program()
    started = rounds.now()
    found = read(path) if variant == "read" else load(path)
    ended = rounds.now()
    if variant != "read":
        assert found(torch.zeros(1, WIDTH)).shape == (1, WIDTH)
    print(json.dumps({"wall": ended[0] - started[0], "cpu": ended[1] - started[1]}), flush=True)


def _call_an_exported_program() -> None:
    """JAX imports scipy with the first one."""
    import jax
    from jax import export

    program = export.deserialize(export.export(jax.jit(lambda x: x + 1))(1.0).serialize())
    jax.jit(program.call)(1.0).block_until_ready()


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians of rounds as Markdown, with the median of ratios to reading."""
    lines = ["| variant | wall (ms) | CPU time, all threads (ms) |", "|---|---|---|"]
    for name, runs in found.items():
        cells = [rounds.cell(runs, found["read"], key) for key in ("wall", "cpu")]
        lines.append(f"| {VARIANTS[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    if args.variant:
        run(args.variant, args.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        save(path)
        os.environ["NEURON_COMPILE_CACHE_URL"] = str(Path(folder) / "programs")
        script, options = str(Path(__file__).resolve()), ["--file", str(path)]
        rounds.run(script, VARIANTS, 1, options, "wall")  # fills the caches
        text = table(rounds.run(script, VARIANTS, args.rounds, options, "wall"))
    text += "\n\n" + rounds.stack("torch", "jax")
    sys.stdout.write(f"{text}\n")
    if args.write:
        rounds.put("load", text)


if __name__ == "__main__":
    main()
