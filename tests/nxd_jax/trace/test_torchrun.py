"""Traced models in real processes of one rank each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys

import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend
from neuronx_distributed import ModelBuilder, NxDModel, NxDParallelState, shard_checkpoint
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, bias=False, gather_output=False)
        self.down = RowParallelLinear(16, 8, bias=False, input_is_parallel=True)
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x, place):
        y = self.down(torch.relu(self.up(x)))
        self.seen = torch.index_copy(self.seen, 0, place, y)
        return y + self.seen.sum(0)


dist.init_process_group("xla")
rank = int(dist.get_rank())
torch.manual_seed(0)
full = {"up.weight": torch.randn(16, 8), "down.weight": torch.randn(8, 16)}
with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
    module = Memory()
    model = ModelBuilder(module).trace(kwargs={"x": torch.zeros(1, 8), "place": torch.arange(1)}, tag="one").compile()
    weights = shard_checkpoint(full, module, start_rank=rank, end_rank=rank)
model.set_weights(weights)
model.to_neuron()
seen = torch.zeros(4, 8)
for k in range(3):
    x = torch.randn(1, 8)
    y = torch.relu(x @ full["up.weight"].T) @ full["down.weight"].T
    seen[k] = y[0]
    torch.testing.assert_close(model(x=x, place=torch.tensor([k])), y + seen.sum(0))
torch.testing.assert_close(model.read_from_neuron_buffer("seen", rank), seen)
try:
    model.read_from_neuron_buffer("seen", 1 - rank)
except KeyError as error:
    sys.stdout.write(f"said {error}\\n")


class Choice(torch.nn.Module):
    def forward(self, logits):
        return torch.multinomial(torch.softmax(logits, -1), 1)


with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
    chooser = ModelBuilder(Choice()).trace(torch.zeros(20, 50)).compile()
chooser.to_neuron()
torch.manual_seed(rank)
sys.stdout.write(f"chosen {[chooser(torch.zeros(20, 50)).flatten().tolist() for _ in range(2)]}\\n")
sys.stdout.write(f"done {rank}\\n")
"""


def test_each_process_has_its_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "script.py")]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done 0" in done.stdout and "done 1" in done.stdout
    first, second = [line for line in done.stdout.splitlines() if line.startswith("chosen")]
    assert first == second, "each process has its own seed, and ranks must agree"
    assert "rank 1 is not among the ranks of this process, [0]" in done.stdout


AFTER = """
import torch
import torch_neuronx

one = torch_neuronx.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
one(torch.ones(1, 2))
from neuronx_distributed import ModelBuilder, NxDParallelState
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
    model = ModelBuilder(ColumnParallelLinear(2, 2)).trace(torch.ones(1, 2)).compile()
print(sorted(model.get_available_keys())[0][:6])
"""


def test_ranks_after_a_trace_of_one(tmp_path: Path) -> None:
    """JAX has started with the first one, whose process may go on with a larger world."""
    environment = {n: v for n, v in os.environ.items() if n not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"
    done = subprocess.run([sys.executable, "-c", AFTER], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "model_"
