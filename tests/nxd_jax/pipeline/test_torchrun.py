"""Pipelines in several processes: the numbers of one process, what a script sees in each, and a process that dies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.pipeline.exchange import Content, Exchange, Sent
from tests import ports, quick
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline import torchrun_job as job
from tests.nxd_jax.pipeline.models import Layout

ROOT = Path(__file__).parents[3]
NXD_RUN = Path(sys.executable).with_name("nxd-run")


def launch(
    processes: int, folder: Path, *what: object, ranks: int = 1, limit: float = 500, script: str = job.__file__
) -> subprocess.CompletedProcess[str]:
    """torchrun, with so many ranks in each process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES")} | {"OMP_NUM_THREADS": "1"}
    environment |= quick.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    if ranks > 1:
        command += ["--no-python", str(NXD_RUN), "--nproc_per_node", str(ranks)]
    command += [script, str(folder), *map(str, what)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)


def check(nxd: Nxd, folder: Path, layouts: list[Layout], numbers: tuple[int, ...], processes: int) -> None:
    """Losses, norms and weights of each process are those of one that hosts all ranks."""
    for number in numbers:
        layout = layouts[number]
        nxd(layout.ranks, tp=layout.tp, pp=layout.pp, cp=layout.cp)
        alone = job.trained(layout)
        share, names = layout.ranks // processes, set()
        for process in range(processes):
            found = torch.load(folder / f"{number}.{process}.pt")
            torch.testing.assert_close(found["numbers"], alone["numbers"], rtol=1e-5, atol=1e-6)
            assert found["stages"] < alone["stages"]
            names |= found["weights"].keys()
            for name, blocks in found["weights"].items():
                wanted = alone["weights"][name][process * share : (process + 1) * share]
                for block, other in zip(blocks, wanted, strict=True):
                    torch.testing.assert_close(block, other, rtol=1e-5, atol=1e-6, msg=lambda m, n=name, la=layout: f"{la} {n}: {m}")
        assert names == alone["weights"].keys()


@pytest.mark.thorough
@pytest.mark.parametrize("numbers", [(1, 2, 3), (0, 4, 5)], ids=str)
def test_processes_of_one_rank(nxd: Nxd, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    done = launch(4, tmp_path, "four", *numbers)
    assert not done.returncode, done.stderr
    check(nxd, tmp_path, job.FOUR, numbers, 4)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("numbers", [(0,), (1, 2)], ids=str)
def test_processes_of_four_ranks(nxd: Nxd, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """nxd-run under torchrun: each process hosts some pipeline ranks whole."""
    done = launch(2, tmp_path, "eight", *numbers, ranks=4)
    assert not done.returncode, done.stderr
    assert "nxd-run: ranks 4 to 7 of 8 in process 1 of 2" in done.stderr
    check(nxd, tmp_path, job.EIGHT, numbers, 2)


def test_what_a_script_sees(nxd: Nxd, tmp_path: Path) -> None:
    """Losses on the last rank alone, the same dropout for every schedule, and names, states and collectives of each process's own stage."""
    done = launch(2, tmp_path, "two")
    assert not done.returncode, done.stderr
    first, last = (json.loads((tmp_path / f"two.{k}.json").read_text()) for k in range(2))
    nxd(2, pp=2)
    alone: dict[str, Any] = {schedule: job.noisy(schedule) for schedule in ("1f1b", "zbv")}
    assert alone["1f1b"]["losses"][0] != alone["1f1b"]["losses"][1]
    assert alone["1f1b"]["losses"] != alone["zbv"]["losses"]  # stages of other layers draw other numbers
    every = [f"layers.{k}.linear.{name}" for k in range(4) for name in ("weight", "bias")]
    assert alone["1f1b"]["names"] == alone["1f1b"]["state"] == every
    assert first["1f1b"]["losses"] == [None, None] and first["each"]["losses"] == [None, None]
    assert last["1f1b"]["losses"] == pytest.approx(alone["1f1b"]["losses"], rel=1e-6)
    assert all(len(found) == 4 for found in last["each"]["losses"])
    for process, seen in enumerate((first, last)):
        mine = every[4 * process : 4 * process + 4]
        assert seen["1f1b"]["names"] == seen["1f1b"]["state"] == seen["1f1b"]["gradients"] == mine
        assert seen["1f1b"]["loaded"] == "<All keys matched successfully>"
        assert seen["reduced"] == [3.0, 2.0]
    assert first["zbv"]["losses"] == pytest.approx(alone["zbv"]["losses"], rel=1e-6)  # the first rank has the last stage
    thawed = job.thawing()
    assert [len(found) for found in thawed] == [6, 7, 6]
    assert [a + b for a, b in zip(first["thawing"], last["thawing"], strict=True)] == thawed
    assert last["zbv"]["losses"] == [None, None]


def test_a_process_that_dies_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The others end soon, and torchrun says which one it was."""
    done = launch(2, tmp_path, "dying", limit=200)
    ended = time.time()
    assert done.returncode
    died = float(re.findall(r"([\d.]+) dies", done.stderr)[-1])
    assert ended - died < 30, done.stderr
    assert re.search(r"exitcode\s*: -9", done.stderr) and re.search(r"rank\s*: 1 ", done.stderr), done.stderr


def test_a_process_that_dies_without_a_launcher(tmp_path: Path) -> None:
    """Whoever waits for it raises an error that names it."""
    port = str(ports.free())
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = []
    for rank in "01":
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        started.append(
            subprocess.Popen(
                [sys.executable, job.__file__, str(tmp_path), "dying"],
                env=os.environ | numbers | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said, killed = (process.communicate(timeout=200)[0] for process in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [1, -9], said
    assert time.time() - float(re.findall(r"([\d.]+) dies", killed)[-1]) < 30
    assert re.search(r"PeerEndedError: rank 1 of 2 \(process \d+ on .*\).* has ended while this one was waiting for its values", said)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"requires_grad": False},
            r"took gradients in earlier steps and does not now, .*: weights were frozen or unfrozen \(requires_grad_\)",
        ),
        ({"size": (3,)}, r"has .*size=\(3,\).* now, and had .*size=\(2,\).* before, .*Pad what differs"),
    ],
)
def test_a_message_that_is_another_than_before(changed: dict[str, Any], text: str) -> None:
    sent = Sent(None, torch.float32, (2,), True)  # type: ignore[arg-type]
    spec = torch.utils._pytree.tree_flatten(0)[1]
    exchange = Exchange()
    exchange._agreed["", "F 0 None 1"] = Content([sent], spec)
    with pytest.raises(RuntimeError, match=text):
        exchange._agree("F 0 None 1", Content([sent._replace(**changed)], spec), None)  # type: ignore[arg-type]


def test_no_step_follows_one_that_an_exception_has_ended() -> None:
    """Other processes wait in it: a script that caught it hung for good."""
    exchange = Exchange()
    with exchange.whole_step():
        pass
    with pytest.raises(KeyError), exchange.whole_step():
        raise KeyError("a bad sample")
    with pytest.raises(
        RuntimeError, match=r"ended a step .* \(KeyError in step 0\), and processes with other stages wait in it .* let it end the process"
    ):
        exchange.begin("")
