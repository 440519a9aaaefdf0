"""A model of about 200 MB is converted with the memory of its largest tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, re, sys, threading, time
from pathlib import Path
import torch
from nxd_jax.checkpoint import safetensors_files
from nxd_jax.checkpoint.safetensors_files import Planned
from nxd_jax.training.converters import command, hf_plan
from nxd_jax.training.converters.sizes import Layout, of_json

folder = Path(sys.argv[1])
config = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 512}
plan = hf_plan.plan(of_json(config, "config"), Layout())
tensors = [Planned(n, s, torch.float32, lambda s=s: torch.randn(s)) for n, s in plan.shapes.items()]
safetensors_files.write(folder / "hub", tensors, config=config)
(folder / "config.json").write_text(json.dumps(config))
torch.save({n: torch.randn(s) for n, s in plan.shapes.items()}, folder / "model.pt")

def anonymous():  # MiB that are no pages of files
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024

highest, stop = [0.0], threading.Event()
def watch():
    while not stop.is_set():
        highest[0] = max(highest[0], anonymous())
        time.sleep(0.001)

into = ["--convert_from_full_state", "--tp_size", "2", "--pp_size", "2", "--fuse_qkv", "True", "--output_dir"]
back = ["--convert_to_full_state", "--config", str(folder / "config.json"), "--input_dir", str(folder / "plain"), "--output_dir"]
jobs = {
    "warm": [*into, str(folder / "warm"), "--input_dir", str(folder / "hub")],
    "plain": [*into, str(folder / "plain"), "--input_dir", str(folder / "hub")],
    "xser": [*into, str(folder / "xser"), "--input_dir", str(folder / "hub"), "--save_xser", "True"],
    "of a torch file": [*into, str(folder / "again"), "--input_dir", str(folder / "model.pt"), "--config", str(folder / "config.json")],
    "to a folder": [*back, str(folder / "back")],
    "to a torch file": [*back, str(folder / "back.pt")],
    "to xser": ["--convert_to_xser", "--input_dir", str(folder / "plain"), "--output_dir", str(folder / "form")],
}
base = anonymous()
threading.Thread(target=watch, daemon=True).start()
for name, words in jobs.items():
    sys.argv = ["converter", *words]
    highest[0] = 0.0
    status = command.main()
    assert status == 0, (name, status)
    if name == "warm":  # modules are imported now
        base = anonymous()
    else:
        sys.stdout.write(f"PEAK {name}: {highest[0] - base:.1f}\\n")
stop.set()
size = sum(f.stat().st_size for f in (folder / "hub").iterdir()) / 2**20
sys.stdout.write(f"SIZE {size:.1f}\\n")
"""


@pytest.mark.core(keep=0)
def test_memory_of_the_largest_tensor(tmp_path: Path) -> None:
    """The largest tensor is 8 MB (gate and up of a layer); putting it together takes it a few times."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    size = float(next(line.split()[1] for line in lines if line.startswith("SIZE")))
    peaks = {line.split(": ")[0]: float(line.split(": ")[1]) for line in lines if line.startswith("PEAK")}
    assert size > 190 and len(peaks) == 6
    assert all(peak < 64 for peak in peaks.values()), peaks
