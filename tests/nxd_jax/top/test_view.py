"""The picture: what it says, and that it fits the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from nxd_jax.top.cells import cells, size, spans
from nxd_jax.top.jobs import Job, Process
from nxd_jax.top.view import NONE, duration, heading, screen
from tests.nxd_jax.top.published import NOW, record

TRN1 = {"NXD_JAX_INSTANCE": "trn1.32xlarge"}
TRN2 = {"NXD_JAX_INSTANCE": "trn2.48xlarge", "NEURON_LOGICAL_NC_CONFIG": "1"}


def job(state: str = "running", gone: float | None = None, pid: int = 4242, **changes: Any) -> Job:
    """A job of one process."""
    return Job(f"{pid}-1", (Process(record(pid=pid, **changes), state, gone),))


def drawn(*jobs: Job, width: int = 80, height: int | None = 38, ascii_only: bool = False) -> list[str]:
    """The lines of the picture; none is wider than the terminal, nor are there more than fit."""
    console = Console(width=width, height=height or 1000, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    with console.file:
        console.print(screen(jobs, width, height, ascii_only, NOW))
        lines = console.export_text().rstrip("\n").split("\n")
    assert all(len(line) <= width for line in lines) and (height is None or len(lines) <= height)
    return [line.rstrip() for line in lines]


def test_a_job_on_32_cores() -> None:
    lines = drawn(job(world=32, environment=TRN1))
    assert "train.py running pid 4242" in lines[0]
    assert "world 32: dp 2 x tp 16 · trn1.32xlarge on 32 cpu devices · up 3m12s" in lines[1]
    assert "step 1,204 · 3.22 steps/s · 1,300 programs · busy 75%" in lines[2]
    assert "last graph 0123abcd (3,022 ops, train.py:57, needs 5GiB a core) 0.4 s ago" in lines[3]
    assert "3 graphs compiled in 12 s · reused 1,297 times" in lines[4]
    assert lines[5].count("core busy") == 2 and lines[5].count("mem of 16GiB") == 2
    assert "   0 █████████░░░  75% █░░░░░░    1Gi " in lines[6]
    assert lines[21].split()[1] == "30" and len(lines) == 23


def test_128_cores_shrink_to_chips() -> None:
    of = job(world=128, environment=TRN2)
    lines = drawn(of)
    assert "  0-7 █" in lines[6] and " 8-15 █" in lines[6] and "120-127 █" in lines[13] and len(lines) == 15
    assert len(drawn(of, height=None)) == 2 + 4 + 1 + 64, "not into a pipe"
    assert len(drawn(of, width=160)) == 2 + 4 + 1 + 26, "a wider terminal has room for every core"


def test_cells() -> None:
    of = job(world=128, environment=TRN2)
    assert [len(cells(of, level)) for level in ("core", "chip", "node", "job")] == [128, 16, 1, 1]
    unknown = job(world=999)
    assert [len(cells(unknown, level)) for level in ("core", "chip", "node", "job")] == [999, 125, 16, 1]
    several = Job("x", tuple(Process(record(world=4, hosted=[r], used=r, utilization=r / 4), "running") for r in range(4)))
    (cell,) = cells(several, "job")
    assert (cell.label, cell.busy, cell.used) == ("0-3", 0.375, 3)


def test_many_jobs_share_the_terminal() -> None:
    jobs = [job(pid=k, world=32, environment=TRN1) for k in range(1, 4)]
    lines = drawn(*jobs)
    assert sum("train.py running" in line for line in lines) == 3 and any("0-31" in line for line in lines)
    lines = drawn(*[job(pid=k) for k in range(1, 60)])
    assert len(lines) == 38 and lines[-1] == "and 22 more"
    assert lines[3] == "train.py running pid 4 · world 4 · step 1,204 · 3.22 steps/s · 1,300 programs ·…"[:80]
    assert drawn(*jobs, height=1) == ["and 3 more"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps_per_second": 0.25}, "4 s/step"),
        ({"steps_per_second": None}, "step 1,204 · 1,300 programs"),
        ({"graph": None}, "no graph has run yet"),
        ({"devices": {}}, "trn1.32xlarge · up"),
        ({"fallback_ops": 7}, "7 ops fell back to the CPU"),
        ({"disk_cache_hits": 2}, "3 graphs compiled in 12 s, 2 from disk"),
        ({"compiles": 1}, "1 graph compiled"),
        ({"environment": {"NXD_JAX_INSTANCE": "nonsense"}}, "no known machine on 4 cpu devices"),
        ({"environment": TRN1 | {"NXD_JAX_NNODES": "2"}}, "2 x trn1.32xlarge"),
        ({"world": 1, "devices": {"platform": "gpu", "count": 1, "limit": 0, "used": [0]}}, "on 1 gpu device ·"),
    ],
)
def test_details(changes: dict[str, Any], expected: str) -> None:
    assert expected in "\n".join(drawn(job(**{"environment": TRN1, **changes})))


def test_compiling() -> None:
    graph = {"name": "deadbeef", "ops": 3022, "source": "train.py:57", "core_bytes": 0, "since": NOW - 12}
    lines = drawn(job("compiling", compiling=graph, graph=None))
    assert "train.py compiling" in lines[0] and "compiling graph deadbeef (3,022 ops, train.py:57) for 12 s" in lines[3]


def test_the_dead() -> None:
    lines = drawn(job("crashed", gone=NOW - 100, error="ValueError"))
    assert "train.py crashed: ValueError pid" in lines[0] and "up 1m32s" in lines[1] and "busy 0%" in lines[2] and "steps/s" not in lines[2]
    assert "train.py ended pid" in drawn(job("ended", gone=NOW))[0]


def test_several_processes() -> None:
    workers = [Process(record(pid=10 + r, world=4, hosted=[r]), "running") for r in range(3)]
    lines = drawn(Job("x", tuple(workers)))
    assert "3 processes, pids 10, 11, ..." in lines[0] and "world 4: dp 2 x tp 2, 0-2 here" in lines[1]
    dead = [*workers[:2], Process(workers[2].record, "crashed", NOW)]
    assert "train.py running, 1 of 3 processes crashed" in drawn(Job("x", tuple(dead)))[0]


def test_no_job() -> None:
    assert drawn() == [NONE] and "nxd-run" in NONE


def test_terminals_without_block_characters() -> None:
    text = "\n".join(drawn(job(world=32), ascii_only=True)[1:-1])
    assert "#########..." in text and " | up 3m12s" in text and not set("█░·") & set(text)


def test_heading() -> None:
    found = heading([job(), job("ended", gone=NOW)], NOW).plain
    assert found.startswith("nxd-top ") and found.endswith("  2 jobs, 4 cores")


@pytest.mark.parametrize("width", [20, 40, 60, 100, 200])
def test_every_width(width: int) -> None:
    assert drawn(job(world=32, environment=TRN1), width=width)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1023, "1023"), (1024, "1Ki"), (130 * 1024, "130Ki"), (15.94 * 2**30, "15.9Gi"), (2**40, "1Ti"), (1000 * 2**20, "1000Mi")],
)
def test_size(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (9.96, "10 s"), (59.4, "59 s"), (192, "3m12s"), (7500, "2h05m"), (273600, "3d04h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("ranks", "text"), [([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 5], "0-1,5"), ([0, 2, 4, 6], "0..6")])
def test_spans(ranks: list[int], text: str) -> None:
    assert spans(ranks) == text
