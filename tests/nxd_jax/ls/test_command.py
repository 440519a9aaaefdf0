"""`nxd-ls`: the devices with the reference's fields, the processes on them, the options, and what it refuses."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest

from nxd_jax.ls import command
from nxd_jax.top import records
from nxd_jax.topology import Topology
from tests.nxd_jax.top.published import data, put

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """No variable that describes a machine, and no jobs but those of the test."""
    for name in command.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NXD_JAX_TOP_DIR", str(tmp_path))


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert command.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    return json.loads("\n".join(lines(capsys, "-j", *arguments)))


def job(folder: pathlib.Path, **changes: Any) -> dict[str, Any]:
    """A live job (unless `ticks` says otherwise) of this process."""
    made = data(**{"pid": os.getpid(), "ticks": None, "updated": time.time(), **changes})
    put(folder, made)
    return made


# -- the machine -----------------------------------------------------------------------------------


def test_json_has_the_fields_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--instance", "trn2.48xlarge")
    assert found[0] == {
        "instance_type": "trn2.48xlarge",
        "node": 0,
        "neuron_device": 0,
        "bdf": None,
        "cpu_affinity": None,
        "numa_node": "1",
        "connected_to": [12, 3, 4, 1],
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "memory_size": 103079215104,
        "neuroncore_ids": [0, 1, 2, 3],
        "neuron_processes": [],
    }
    assert [d["neuron_device"] for d in found] == list(range(16)) and found[15]["neuroncore_ids"] == [60, 61, 62, 63]
    assert [d["neuron_device"] for d in found if d["numa_node"] == "0"] == list(range(4, 12))
    assert found[10]["connected_to"] == [6, 9, 14, 11]


def test_numa_nodes_only_where_they_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    trn1 = listed(capsys, "--instance", "trn1.32xlarge")
    assert [d["neuron_device"] for d in trn1 if d["numa_node"] == "0"] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert {d["numa_node"] for d in listed(capsys, "--instance", "inf2.48xlarge")} == {None}
    (single,) = listed(capsys, "--instance", "trn2.3xlarge", "--lnc", "1")
    assert (single["connected_to"], single["numa_node"], single["nc_count"], single["logical_neuroncore_config"]) == (None, None, 8, 1)


def test_text_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "--instance", "trn2.48xlarge")
    assert found[:2] == ["instance-type: trn2.48xlarge", "logical-neuroncore-config: 2"]
    assert found[3] == "| NEURON | NEURON | NEURON   | NEURON | CONNECTED     | PCI | CPU      | NUMA |"
    assert found[4] == "| DEVICE | CORES  | CORE IDS | MEMORY | DEVICES       | BDF | AFFINITY | NODE |"
    assert found[6] == "| 0      | 4      | 0-3      | 96 GB  | 12, 3, 4, 1   | -   | -        | 1    |"
    assert len(found) == 23 and "\x1b" not in "".join(found)


def test_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "--instance", "trn1.2xlarge", "--nodes", "2")
    assert "nodes: 2" in found and found[-2].startswith("| 1    | 0      | 2      | 0-1 ")
    ultra = listed(capsys, "--instance", "trn2-ultraserver")
    assert [(d["node"], d["neuron_device"]) for d in ultra] == [(n, d) for n in range(4) for d in range(16)]


def test_topology(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = "\n".join(lines(capsys, "-t", "--instance", "trn1.32xlarge"))
    assert " e──┤     [0]     ├────┤" in drawn and "Equal letters are the two ends" in drawn
    assert "Equal letters" not in "\n".join(lines(capsys, "-t", "--instance", "inf2.24xlarge"))


def test_terminals_that_lack_characters() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-X", "importtime", "-m", "nxd_jax.ls", "-t", "--instance", "trn2.48xlarge"]
    done = subprocess.run(call, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert " e--+     [0]     +----+" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "nxd_jax.ls.command" in loaded and not loaded & {"torch", "jax"}, "it starts while a job takes all cores"


def test_the_environment_says_which_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "4")
    assert len(listed(capsys)) == 16, "the whole machine that has them"
    monkeypatch.setenv("NXD_JAX_INSTANCE", "trn2.48xlarge")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert [d["nc_count"] for d in listed(capsys)] == [8] * 16
    assert [d["nc_count"] for d in listed(capsys, "--lnc", "2")] == [4] * 16
    assert len(listed(capsys, "--nodes", "2")) == 32
    assert [d["nc_count"] for d in listed(capsys, "--instance", "trn2.3xlarge")] == [8], "the option wins, LNC stays"


def test_options_that_describe_no_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert command.main(arguments) == 2
        return capsys.readouterr().err

    assert "nxd-ls: --instance: no instance is called 'p5'; use one of trn1.2xlarge" in refused("--instance", "p5")
    text = refused("--instance", "trn1.32xlarge", "--lnc", "2")
    assert "is not possible on trn1.32xlarge" in text and "(--lnc stands for NEURON_LOGICAL_NC_CONFIG)" in text
    assert "there is no folder nowhere (--dir; NXD_JAX_TOP_DIR of a job" in refused("--dir", "nowhere")
    monkeypatch.setenv("NXD_JAX_NNODES", "two")
    assert "NXD_JAX_NNODES='two' is not a whole number of at least 1" in refused()
    for wrong, said in ((["--nodes", "0"], "'0' must be a whole number of at least 1"), (["--lnc", "3"], "choose from 1, 2")):
        with pytest.raises(SystemExit, match="2"):
            command.main(wrong)
        assert said in capsys.readouterr().err.replace("'1', '2'", "1, 2")


# -- processes -------------------------------------------------------------------------------------


def test_a_process_on_its_devices(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, world=6, environment={"NXD_JAX_INSTANCE": "trn2.48xlarge"})
    found = listed(capsys)
    assert len(found) == 16, "the machine that the job emulates"
    assert found[1]["neuron_processes"] == [
        {"pid": os.getpid(), "command": "train.py", "neuron_runtime_version": None, "state": "running", "neuroncore_ids": [4, 5]}
    ]
    assert [d["neuron_device"] for d in found if d["neuron_processes"]] == [0, 1]
    text = lines(capsys)
    assert text[0] == "instance-type: trn2.48xlarge (what the running jobs emulate)"
    row = next(line for line in text if line.startswith("| 0 "))
    assert [cell.strip() for cell in row.split("|")[9:13]] == [str(os.getpid()), "train.py", "running", "0-3"]
    assert lines(capsys, "--instance", "trn2.48xlarge")[0] == "instance-type: trn2.48xlarge"


def test_ranks_of_several_nodes_and_visible_cores(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = data(pid=os.getpid(), ticks=None, updated=time.time(), world=4)
    made["world"]["local_size"] = 2
    made["environment"] = {"NXD_JAX_INSTANCE": "trn1.32xlarge", "NXD_JAX_NNODES": "2", "NEURON_RT_VISIBLE_CORES": "4-7"}
    put(tmp_path, made)
    used = {(d["node"], d["neuron_device"]): p["neuroncore_ids"] for d in listed(capsys, "--nodes", "2") for p in d["neuron_processes"]}
    assert used == {}, "--nodes describes another machine"
    used = {(d["node"], d["neuron_device"]): p["neuroncore_ids"] for d in listed(capsys) for p in d["neuron_processes"]}
    assert used == {(0, 2): [4, 5], (1, 2): [4, 5]}, "two ranks on each node, on its first visible cores"


def test_dead_processes_only_with_a(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = put(tmp_path, data(pid=os.getpid(), ticks=1, environment={"NXD_JAX_INSTANCE": "trn1.32xlarge"}))
    chosen = ("--instance", "trn1.32xlarge")
    assert not any(d["neuron_processes"] for d in listed(capsys, *chosen))
    for flag in ("-a", "--show-all-procs"):
        found = listed(capsys, flag, *chosen)
        assert [p["state"] for d in found for p in d["neuron_processes"]] == ["crashed"] * 2
    assert file.exists(), "it looks and removes nothing"


def test_jobs_of_other_machines_are_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, world=4, environment={"NXD_JAX_INSTANCE": "trn2.48xlarge", "NXD_JAX_NNODES": "2", "NEURON_LOGICAL_NC_CONFIG": "1"})
    last = lines(capsys, "--instance", "trn1.2xlarge")[-1]
    assert last == f"not shown: train.py (pid {os.getpid()}), on another machine: nxd-ls --instance trn2.48xlarge --nodes 2 --lnc 1"
    job(tmp_path, world=4, environment={"NXD_JAX_INSTANCE": "trn1.2xlarge"})
    assert lines(capsys)[-1].endswith("whose variables describe no machine with 4 cores")


def test_long_commands_and_several_processes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "pretrain_" + "x" * 50 + ".py"
    job(tmp_path, script=script, world=2, environment={"NXD_JAX_INSTANCE": "trn1.2xlarge"})
    put(
        tmp_path,
        data(pid=1, world=2, machine="elsewhere", job="other", updated=time.time(), environment={"NXD_JAX_INSTANCE": "trn1.2xlarge"}),
    )
    short = lines(capsys)
    assert any(f"| {script[:37]}... |" in line for line in short)
    assert any(f"| {script} |" in line for line in lines(capsys, "-w"))
    assert sum(line.startswith("|        |") and "0-1" in line for line in short) == 1, "the second process of the device"


def test_two_machines_at_once_choose_none(tmp_path: pathlib.Path) -> None:
    put(tmp_path, data(pid=os.getpid(), ticks=None, environment={"NXD_JAX_INSTANCE": "trn2.48xlarge"}))
    put(tmp_path, data(pid=os.getppid(), ticks=None, environment={"NXD_JAX_INSTANCE": "trn1.32xlarge"}))
    jobs = command.Watch(lambda: records.folders(str(tmp_path))).look()
    assert len(jobs) == 2 and command.machine({}, jobs=jobs) == (Topology("trn1.2xlarge"), "")
