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

from torch_bridge.mesh import processes, together, world
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
def test_last_batches_of_different_sizes(tmp_path: pathlib.Path) -> None:
    """A new program in one process, a known one in the other: they hung."""
    done, found = launch(tmp_path, "uneven")
    assert done.returncode == 0, done.stderr
    assert [f["sums"] for f in found] == [[3.0 + 6.0, 3.0 + 6.0, 3.0 + 4.0]] * 2
    assert [f["told"] for f in found] == [[[5.0, 5.0], [8.0, 16.0]] * 3] * 2  # one waited in vain in the second round
    for one in found:
        steps, error = one["joined"]
        assert steps == [0, 1] and "ranks [0] of the group have no more inputs" in error and "DistributedSampler pads" in error
    plain = torch.nn.BatchNorm1d(2)
    rows = torch.tensor([[0.0, 2.0], [4.0, 6.0], [1.0, 3.0]])
    expected = [plain(rows), plain.running_mean, plain.running_var]
    normed = [torch.tensor(found[0]["normed"][0] + found[1]["normed"][0]), *map(torch.tensor, found[1]["normed"][1:])]
    torch.testing.assert_close(normed, expected)
    assert [f["behind a barrier"] for f in found] == [[[1.0, 1.0], [2.0, 2.0]], None]


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

    def add(self, key: str, number: int) -> int:
        self[key] = str(int(self.get(key, "0")) + number)
        return int(self[key])


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Store()
    world.configure(world.World(2, hosted=(1,)))
    monkeypatch.setattr(processes, "store", lambda: found)
    monkeypatch.setattr(together, "_programs", {})
    yield found
    world.configure(None)


SUM, MAX = ("all_reduce of float32[2] (sum, dp)", "a.py:3"), ("all_reduce of float32[2] (max, dp)", "a.py:4")


def run(collectives: list[tuple[str, str]]) -> None:
    """A program with these collectives runs for the first time."""
    at = processes.meeting(collectives)
    assert at is not None
    with together.running(at.among, at.word):
        processes.meet(at, at.word)


def test_programs_that_fit_together(shared: Store) -> None:
    assert processes.meeting([]) is None and processes.meeting([SUM], [1]) is None
    for number in (1, 2):
        shared[f"programs of all/{number}/0"] = json.dumps([(SUM[0], "b.py:9")])  # the same at another line
        shared[f"programs of all/{number}/here"] = "1"
        run([SUM])
    assert json.loads(shared["programs of all/2/1"]) == [list(SUM)] and "programs of all/2/go" in shared


OTHERS = {
    "another": ([MAX], r"Number 1 is: rank 1 all_reduce.*sum.*\(a.py:3\), rank 0 all_reduce.*max.*\(a.py:4\)"),
    "more": ([SUM, MAX], r"Number 2 is: rank 1 nothing, rank 0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_programs_that_do_not(shared: Store, name: str) -> None:
    theirs, text = OTHERS[name]
    shared["programs of all/1/0"] = json.dumps(theirs)
    with pytest.raises(
        processes.ProgramsDiffer, match=rf"the collectives of program 1 differ among processes.*{text}.*same collectives in the same order"
    ):
        run([SUM])


def _in_a_known_program(shared: Store, collectives: list[tuple[str, str]], count: int) -> None:
    at = processes.meeting(collectives)
    assert at is not None
    begun = {"programs": {"all": [count, [at.word] * count]}, "waits": []}
    shared["does/0"] = json.dumps([7, "in step 9, running a program (a.py:4)", begun])


def test_the_other_runs_a_program_that_it_has_run_before(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not come: its last batch had the shape of those before. They waited for each other for ever."""
    monkeypatch.setattr(processes, "_ASK", 0.0)
    _in_a_known_program(shared, [(SUM[0], "")], 1)
    run([SUM])
    run_later = threading.Thread(target=run, args=([SUM],))
    run_later.start()
    run_later.join(0.3)
    assert run_later.is_alive()  # the other one is still at its first
    _in_a_known_program(shared, [SUM], 2)
    run_later.join(10)
    assert not run_later.is_alive()
    _in_a_known_program(shared, [MAX, MAX], 3)
    with pytest.raises(
        processes.ProgramsDiffer,
        match=r"program 3 differ.*rank 1 all_reduce.*\(a.py:3\); rank 0, in step 9, running a program \(a.py:4\): others, or the same in another order",
    ):
        run([SUM])


def test_what_is_long_forgotten(shared: Store) -> None:
    told: together.Begun = {"programs": {"all": (100, ["x", "y"])}, "waits": []}
    assert [together.ran(told, "all", n) for n in (101, 100, 99, 98)] == [None, "y", "x", ""]
    assert together.ran(told, "0,1", 1) is None


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
