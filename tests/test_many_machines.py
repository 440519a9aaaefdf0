"""The recipes of docs/how-to/run_on_many_machines.md, with stand-ins for `srun`, `scontrol` and `ssh` that start what they are given on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ports, quick

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "run_on_many_machines.md"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SRUN = """#!/bin/bash
# Tasks of two machines; options come first.
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE))
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) SLURM_NODEID=$((task / SLURM_NTASKS_PER_NODE)) "$@" &
done
status=0
for ((task = 0; task < SLURM_NTASKS; task++)); do wait -n || status=$?; done
exit $status
"""
STAND_INS = {
    "srun": SRUN,
    "scontrol": '#!/bin/bash\n[[ $1 == show && $2 == hostnames && $3 == "host-[a-b]" ]] && echo localhost && echo other\n',
    "ssh": '#!/bin/bash\n[[ $1 == -tt && $2 == localhost ]] && exec bash -c "$3"\n',
    "python": f'#!/bin/bash\nexec {sys.executable} -W ignore "$@"\n',
    "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
}

NOTES = f"""
import json, os, pathlib
pathlib.Path("rank" + os.environ["RANK"]).write_text(json.dumps({{name: os.environ[name] for name in {VARIABLES}}}))
"""
TRAINS = """
import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend

dist.init_process_group("xla")
x = torch.ones(2, device="xla") * dist.get_rank()
dist.all_reduce(x)
print("sum", x.tolist(), flush=True)
"""


def recipe(heading: str, language: str) -> str:
    """The code below a heading."""
    found = re.search(rf"^## {heading}\n.*?^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


RECIPES = {"torchrun": ("SLURM with torchrun", 1), "srun": ("SLURM without torchrun", 2), "ssh": ("ssh", 1)}
"""Headings, and tasks on each machine as the recipe's `#SBATCH` lines say."""


def ran(folder: Path, name: str, script: str) -> subprocess.CompletedProcess[str]:
    """A recipe, as a user would save and start it."""
    heading, tasks = RECIPES[name]
    text = recipe(heading, "sh")
    if name != "ssh":
        assert f"#SBATCH --ntasks-per-node={tasks}\n" in text and "#SBATCH --nodes=2\n" in text
    text = text.replace("29500", str(ports.free())).replace("host-a host-b", "localhost localhost")
    for file, content in {**{f"bin/{k}": v for k, v in STAND_INS.items()}, "recipe": text, "train.py": script}.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NTASKS": str(2 * tasks)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    env = (
        os.environ
        | quick.environment()
        | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": path}
        | (slurm if name != "ssh" else {})
    )
    return subprocess.run([str(folder / "recipe")], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["srun", "torchrun", "ssh"])
def test_what_processes_are_told(tmp_path: Path, name: str) -> None:
    done = ran(tmp_path, name, NOTES)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*"))]
    assert [f["RANK"] for f in told] == ["0", "1", "2", "3"] and [f["LOCAL_RANK"] for f in told] == ["0", "1", "0", "1"], told
    assert {(f["WORLD_SIZE"], f["LOCAL_WORLD_SIZE"], f["MASTER_ADDR"]) for f in told} == {("4", "2", "localhost")}
    assert len({f["MASTER_PORT"] for f in told}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_processes_find_each_other(tmp_path: Path, name: str) -> None:
    done = ran(tmp_path, name, TRAINS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [6.0, 6.0]") == 4, done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_a_failure_is_seen(tmp_path: Path, name: str) -> None:
    done = ran(
        tmp_path,
        name,
        "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(5)\ntime.sleep(0 if 'SLURM_NNODES' in os.environ else 100)\n",
    )
    assert done.returncode != 0


def test_kubernetes() -> None:
    job = yaml.safe_load(recipe("Kubernetes with JobSet", "yaml"))
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == ("Indexed", 2, 2, 0)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (
        given["MASTER_ADDR"] == f"{job['metadata']['name']}-{replicated['name']}-0-0.{job['metadata']['name']}"
        and given["MASTER_PORT"].isdigit()
    )
    shell, flag, command = container["command"]
    assert (shell, flag) == ("bash", "-c")
    words = subprocess.run(
        ["bash", "-c", command.replace("exec torchrun", "printf '%s\\n'")],
        env=given | {"JOB_COMPLETION_INDEX": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    assert (args.nnodes, args.node_rank, args.nproc_per_node, args.training_script) == ("2", 1, "2", "train.py")
    assert (args.master_addr, args.master_port) == (given["MASTER_ADDR"], int(given["MASTER_PORT"]))
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
