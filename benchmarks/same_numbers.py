"""Whether two commits compute the same, bit for bit: losses, graphs and HLO of five small training scripts.

    python benchmarks/same_numbers.py A B

Each commit is checked out into a folder of its own and runs the scripts there, one process per script, with this environment's packages. A change that only
moves code must print nothing but "same".
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

HEAD = r"""
import hashlib, json, os, re
import torch
import torch_xla, torch_xla.core.xla_model as xm
import torch_bridge

STEPS = 4

def digest(text):
    # without the places of our own lines
    lines = (re.sub(r" loc\(.*$", "", line) for line in text.splitlines() if not line.startswith("#loc"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

def train(model, optimizer, batch, loss_of):
    losses = []
    for k in range(STEPS):
        x, y = batch(k)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        xm.mark_step()
        losses.append(float(loss).hex())
    return losses

def tell(model, losses, *inputs):
    graph = torch_bridge.capture(model, *inputs)
    print(json.dumps({"losses": losses, "weights": digest(str([p.detach().cpu().double().sum().item().hex() for p in model.parameters()])),
                      "graph": digest(str(graph.graph)), "hlo": digest(str(torch_bridge.hlo(model, *inputs)))}))

torch.manual_seed(0)
"""

TRAINED = """
def rows(k, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k)).to("xla")

def labels(k, n, classes):
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(k)).to("xla")
"""

SCRIPTS = {
    "mlp with dropout, Adam": """
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).to("xla")
losses = train(model, torch.optim.Adam(model.parameters(), lr=0.01), lambda k: (rows(k, 6, 8), labels(k, 6, 4)), torch.nn.functional.cross_entropy)
tell(model.eval(), losses, rows(0, 6, 8))
""",
    "convolutions with batch norm, SGD": """
model = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
                            torch.nn.Linear(6 * 16, 4)).to("xla")
losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lambda k: (rows(k, 4, 3, 8, 8), labels(k, 4, 4)),
               torch.nn.functional.cross_entropy)
tell(model.eval(), losses, rows(0, 4, 3, 8, 8))
""",
    "sixteen equal layers, folded, AdamW": """
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(16)]).to("xla")
losses = train(model, torch.optim.AdamW(model.parameters(), lr=0.01), lambda k: (rows(k, 6, 8), rows(k + 9, 6, 8)), torch.nn.functional.mse_loss)
tell(model, losses, rows(0, 6, 8))
""",
    "bfloat16 attention, Adagrad": """
model = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).bfloat16().to("xla")
losses = train(model, torch.optim.Adagrad(model.parameters(), lr=0.01), lambda k: (rows(k, 2, 5, 8).bfloat16(), rows(k + 9, 2, 5, 8).bfloat16()),
               lambda y, t: torch.nn.functional.mse_loss(y.float(), t.float()))
tell(model, losses, rows(0, 2, 5, 8).bfloat16())
""",
    "four ranks, tensor parallel, played": """
import neuronx_distributed as nxd
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear
config = nxd.neuronx_distributed_config(tensor_parallel_size=4)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = ColumnParallelLinear(8, 16, gather_output=False), RowParallelLinear(16, 8, input_is_parallel=True)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
model = nxd.initialize_parallel_model(config, Block)
optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)
losses = train(model, optimizer, lambda k: (rows(k, 6, 8), rows(k + 9, 6, 8)), torch.nn.functional.mse_loss)
x = rows(0, 6, 8)
print(json.dumps({"losses": losses, "hlo": digest(torch_xla._XLAC._get_xla_tensors_hlo([model(x)]))}))
""",
}


def outcome(checkout: pathlib.Path, name: str, folder: pathlib.Path) -> Any:
    """What a script prints when it runs on the packages of a checkout. It has the same path for all commits: HLO names it."""
    file = folder / "script.py"
    file.write_text(HEAD + TRAINED + SCRIPTS[name])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "aliases"))),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
    }
    if "four ranks" in name:
        environment["NEURON_RT_NUM_CORES"] = "4"
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed at {checkout.name}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs=2, metavar="COMMIT")
    args = parser.parse_args()
    root = pathlib.Path(__file__).parents[1]
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        checkouts = []
        for label, commit in zip("ab", args.commits, strict=True):
            place = pathlib.Path(temporary) / label
            subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(place), commit], cwd=root, check=True)
            checkouts.append(place)
        try:
            for name in SCRIPTS:
                first, second = (outcome(place, name, pathlib.Path(temporary)) for place in checkouts)
                different += first != second
                print(f"{name}: {'same' if first == second else f'DIFFERENT: {first} and {second}'}", flush=True)
        finally:
            for place in checkouts:
                subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=root, check=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
