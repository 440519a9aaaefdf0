"""Whether two commits compute the same, bit for bit: losses, graphs and HLO of five small training scripts.

    python benchmarks/same_numbers.py A B [--more]

Each commit is checked out into a folder of its own and runs the scripts there, one process per script, with this environment's packages. A change that only
moves code must print nothing but "same". With `--more` also the losses of the examples and those of every model of `tests/models` (ten minutes).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
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


MODELS = """
import json, sys
from tests.models.__main__ import EVERY
from tests.models.training import OPTIMIZERS, train
losses = {}
for name, task in EVERY.items():
    try:
        losses[name] = [x.hex() for x in train(task.build, task.loss, OPTIMIZERS["adamw"], "xla")[0]]
    except Exception as error:
        losses[name] = f"{type(error).__name__}: {error}"
print(json.dumps(losses))
"""
"""Ten steps of every model, which is more than `python -m tests.models` trains."""

SMALL = ["--steps", "4", "--seq", "16", "--batch", "1", "--hidden", "32", "--layers", "2", "--out", "out"]
EXAMPLES = {
    "char_lm.py": [sys.executable, "examples/char_lm.py", *SMALL, "--eval-every", "2"],
    "mlp_digits.py": [sys.executable, "examples/mlp_digits.py", "--epochs", "2"],
    "plain_torch.py": [sys.executable, "examples/plain_torch.py"],
    "lightning_linear.py": [sys.executable, "examples/lightning_linear.py"],
    "lightning_llama.py": [
        sys.executable,
        "-m",
        "nxd_jax.run",
        "--nproc_per_node",
        "4",
        "examples/lightning_llama.py",
        *SMALL,
        "--heads",
        "4",
    ],
    "llama/train.py": [
        sys.executable,
        "-m",
        "nxd_jax.run",
        "--nproc_per_node",
        "4",
        "examples/llama/train.py",
        *SMALL,
        "--tp",
        "2",
        "--heads",
        "4",
        "--kv-heads",
        "4",
    ],
}
"""Commands, with paths in a checkout. What they print counts, but for times and rates."""
_TIMES = re.compile(r"(\d+:)*[\d.,]+ ?(it/s|s/it|ms|s|seconds|steps/s|tokens/s|bytes/s|MiB|GiB|MB|GB)(?![a-z])|\d\d:\d\d")


def _counts(line: str) -> bool:
    """Whether a line says what was computed; progress bars say how long it took."""
    return "Epoch" not in line and ("loss" in line.lower() or "accuracy" in line.lower())


def printed(checkout: pathlib.Path, command: list[str], folder: pathlib.Path) -> Any:
    """The losses and other numbers that an example prints at a checkout, and the losses that it writes to its summary."""
    work = folder / "work"
    work.mkdir()
    try:
        lines = run([str(checkout / part) if part.startswith("examples/") else part for part in command], checkout, work, {}).splitlines()
        summary = work / "out" / "summary.json"
        losses = [v for k, v in sorted(json.loads(summary.read_text()).items()) if "loss" in k] if summary.exists() else []
    finally:
        shutil.rmtree(work)
    return [_TIMES.sub("", line.split("\r")[-1]) for line in lines if _counts(line)], losses


def run(command: list[str], checkout: pathlib.Path, folder: pathlib.Path, more: dict[str, str]) -> str:
    """The standard output of a command that runs on the packages of a checkout."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "aliases"))),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        **more,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:3])} failed at {checkout.name}:\n{done.stderr[-3000:]}")
    return done.stdout


def outcome(checkout: pathlib.Path, name: str, folder: pathlib.Path) -> Any:
    """What a script prints when it runs on the packages of a checkout. It has the same path for all commits: HLO names it."""
    file = folder / "script.py"
    file.write_text(HEAD + TRAINED + SCRIPTS[name])
    ranks = {"NEURON_RT_NUM_CORES": "4"} if "four ranks" in name else {}
    return json.loads(run([sys.executable, str(file)], checkout, folder, ranks).splitlines()[-1])


def models(checkout: pathlib.Path, folder: pathlib.Path) -> Any:
    """The losses of the models of the tests at a checkout."""
    file = folder / "models.py"
    file.write_text(MODELS)
    return json.loads(run([sys.executable, str(file)], checkout, folder, {}).splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs=2, metavar="COMMIT")
    parser.add_argument("--more", action="store_true", help="compare the examples and the models of the tests, too")
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
            folder = pathlib.Path(temporary)
            found: dict[str, Callable[[pathlib.Path], Any]] = {
                name: functools.partial(outcome, name=name, folder=folder) for name in SCRIPTS
            }
            if args.more:
                found |= {name: functools.partial(printed, command=command, folder=folder) for name, command in EXAMPLES.items()}
                found["models of the tests"] = functools.partial(models, folder=folder)
            for name, of in found.items():
                first, second = map(of, checkouts)
                different += first != second
                print(f"{name}: {'same' if first == second else f'DIFFERENT: {first} and {second}'}", flush=True)
        finally:
            for place in checkouts:
                subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=root, check=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
