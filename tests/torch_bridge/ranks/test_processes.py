"""Ranks under torchrun: one table of ranks in all processes, and processes whose collectives do not fit together."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from torch_bridge.mesh import processes, world
from torch_bridge.recorder import sharded

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")
ROOT = pathlib.Path(__file__).parents[3]


def launch(folder: pathlib.Path, how: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES")} | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT), str(folder), how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return done, [json.loads((folder / f"rank_{r}.json").read_text()) for r in range(2)]


@pytest.mark.slow
def test_processes_have_one_table_of_ranks_and_must_run_the_same_collectives(tmp_path: pathlib.Path) -> None:
    done, found = launch(tmp_path, "mismatch")
    assert [f["rank"] for f in found] == [0, 1] and all(f["isinstance"] for f in found)
    assert [f["part"] for f in found] == [[0.0, 1.0], [2.0, 3.0]] and all(f["total"] == [2.0, 4.0] for f in found)
    for f in found:
        part, own, total = f["varying"]
        assert part.startswith("shape [2], different along dp")
        assert own == total and "the same on all ranks if each process put the same data on xla" in own
    for r, f in enumerate(found):
        torch.manual_seed(5 + r)
        assert f["host"] == torch.randn(2).tolist()
    assert found[0]["drawn"] != found[1]["drawn"]
    assert [f["gathered"] for f in found] == [[[0.0, 0.0]] * 2, [[0.0, 0.0], [1.0, 1.0]]]
    assert [f["scattered"] for f in found] == [[0.0, 1.0], [4.0, 12.0]] and found[1]["said"] == ["one"]
    assert done.returncode != 0
    for text in (
        "the collectives of program",
        "differ among processes",
        "all_reduce of float32[4]",
        "all_gather of float32[4]",
        "two_processes.py:",
        "int(rank)",
    ):
        assert text in done.stderr, text


@pytest.mark.slow
def test_a_process_that_ends_while_another_waits_for_it(tmp_path: pathlib.Path) -> None:
    """They waited for each other for five minutes, and JAX aborted both."""
    began = time.monotonic()
    done, _ = launch(tmp_path, "exit")
    assert done.returncode != 0 and time.monotonic() - began < 120, done.stderr
    for text in (
        "rank 1 of 2",
        "this process is at the end of its script, and rank 0 of 2",
        "waits for it in a program with collectives, its number",
    ):
        assert text in done.stderr, done.stderr


class Store(dict[str, str]):
    """What processes share, as one of them sees it."""

    def check(self, keys: list[str]) -> bool:
        return all(k in self for k in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Store()
    world.configure(world.World(2, hosted=(1,)))
    monkeypatch.setattr(processes, "store", lambda: found)
    monkeypatch.setattr(processes, "_counts", {})
    yield found
    world.configure(None)


SUM, MAX = ("all_reduce of float32[2] (sum, dp)", "a.py:3"), ("all_reduce of float32[2] (max, dp)", "a.py:4")


def test_programs_that_fit_together(shared: Store) -> None:
    processes.agree([])
    assert not shared
    processes.agree([SUM])  # the first to come
    shared["programs/2/0"] = json.dumps([(SUM[0], "b.py:9")])
    processes.agree([SUM])  # the same at another line
    assert json.loads(shared["programs/2/1"]) == [list(SUM)]


OTHERS = {
    "another": ([MAX], r"Number 1 is: rank 1 all_reduce.*sum.*\(a.py:3\), rank 0 all_reduce.*max.*\(a.py:4\)"),
    "more": ([SUM, MAX], r"Number 2 is: rank 1 nothing, rank 0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_programs_that_do_not(shared: Store, name: str) -> None:
    theirs, text = OTHERS[name]
    shared["programs/1/0"] = json.dumps(theirs)
    with pytest.raises(
        processes.ProgramsDiffer, match=rf"the collectives of program 1 differ among processes.*{text}.*same collectives in the same order"
    ):
        processes.agree([SUM])


def test_what_a_process_knows_of_the_others(hosted: Any) -> None:
    hosted(2)
    x = sharded.varying(torch.ones(2, device="xla"))
    assert x.known and str(x) == "shape [2], the same on all ranks"


def test_threads_that_come_first_together_join_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of an MpDeviceLoader, and the script. The second one raised "distributed.initialize should only be called once"."""
    joined: list[Any] = []

    def join(of: Any) -> None:
        time.sleep(0.05)
        joined.append(of)
        monkeypatch.setattr(processes, "_started", True)

    monkeypatch.setattr(processes, "_started", False)
    monkeypatch.setattr(processes, "_join", join)
    threads = [threading.Thread(target=processes.start, args=(world.current(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(joined) == 1
