"""What a process knows and says of the others of its job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from torch_bridge.errors import PeerEndedError
from torch_bridge.mesh import processes, together, watch, world
from torch_bridge.mesh.watch import Peer
from torch_bridge.telemetry import activity


class Store(dict[str, str]):
    """What processes share, as one of them sees it."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    made = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def known(sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first of three processes, with two ranks each."""
    peers = [Peer(2 * k, 2, 6, f"host-{k}", 100 + k, one.getsockname()) for k, one in enumerate(sockets)]
    found = watch._Known(Store({f"does/{k}": json.dumps([1, f"in step {k}"]) for k in range(3)}), 0, peers)
    monkeypatch.setattr(watch, "_known", found)
    monkeypatch.setattr(watch, "_listening", None)
    return found


def test_names(known: Any) -> None:
    assert str(known.peers[1]) == "ranks 2 to 3 of 6 (process 101 on host-1)"
    assert str(known.peers[1]._replace(ranks=1)) == "rank 2 of 6 (process 101 on host-1)"
    assert watch.in_words([1]) == ["ranks 2 to 3 of 6 (process 101 on host-1), whose last word was 'in step 1',"]


def test_who_has_ended(known: Any, sockets: list[socket.socket]) -> None:
    assert watch.ended() == []
    sockets[2].close()
    (found,) = watch.ended()
    assert "ranks 4 to 5 of 6" in found and "'in step 2'" in found
    sockets[1].close()
    known.store["does/1"] = json.dumps([-1, "PeerEndedError"])
    assert watch.ended() == [found]  # the other one ended for its sake


def test_errors_of_collectives(known: Any, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch.explain(ValueError("no collective")) is None
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: monkeypatch.setattr(watch.time, "monotonic", lambda: time.time() * 1e9))
    assert watch.explain(RuntimeError("Gloo: timeout")) is None  # all are there
    sockets[1].close()
    found = watch.explain(RuntimeError("Gloo AllReduce failed: Connection closed by peer\nmore"))
    assert isinstance(found, PeerEndedError)
    assert str(found).endswith(
        "has ended while this one was waiting for its values: look for the reason in its own output (Gloo AllReduce failed: Connection closed by peer)"
    )
    assert watch.explain(found) is None


def test_silence_is_said_once_and_so_is_its_end(known: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        known.store["does/1"] = json.dumps([number, "in step 9"])
        watch._read(known, 2.0)
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith(
        "nxd_jax: ranks 0 to 1 of 6 (process 100 on host-0): ranks 4 to 5 of 6 (process 102 on host-2)"
    )
    for part in (
        "whose last word was 'in step 2'",
        "has said nothing for 10 s",
        "SIGSTOP",
        "This process waits",
        "within 40 s (NXD_JAX_PEER_TIMEOUT)",
    ):
        assert part in said
    known.store["does/2"] = json.dumps([2, "in step 2"])
    watch._read(known, 2.0)
    assert "ranks 4 to 5 of 6 (process 102 on host-2) is back after 14 s\n" in capfd.readouterr().err
    told = json.loads(known.store["words"])
    assert len(told) == 2 and not any(fatal for _, fatal in told)


def test_the_first_process_tells_the_others(known: Any, capfd: pytest.CaptureFixture[str]) -> None:
    other = watch._Known(known.store, 1, known.peers)
    known.store["words"] = json.dumps([["rank 5 is silent", False], ["rank 5 has ended", True]])
    watch._read(other, 2.0)
    assert "rank 5 is silent\n" in capfd.readouterr().err and other.lost is not None and other.lost[0] == "rank 5 has ended"
    watch._read(other, 2.0)
    assert capfd.readouterr().err == ""  # each word once


def test_a_last_word_is_the_end(known: Any) -> None:
    known.store["does/2"] = json.dumps([-1, "OSError: full"])
    watch._read(known, 2.0)
    with pytest.raises(
        PeerEndedError, match=r"ranks 4 to 5 of 6 .*whose last word was 'OSError: full', ends. Look for the reason in its own output"
    ):
        watch.check()
    assert json.loads(known.store["words"])[0][1] is True


def test_who_has_done_its_work_is_not_silent(known: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(watch, "_known", watch._Known(known.store, 1, known.peers))
    watch.leaving()
    assert json.loads(known.store["does/1"])[:2] == [-2, "waiting for the others to end"]
    for number in range(8):
        known.store["does/2"] = json.dumps([number, "in step 9"])
        watch._read(known, 2.0)
    assert capfd.readouterr().err == "" and known.lost is None


def test_who_does_not_come_any_more(known: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A process that waits for one at the end of its script says so once."""
    monkeypatch.setattr(watch, "DOING", lambda: "in step 5, running a program (train.py:7)")
    known.store["does/2"] = json.dumps([watch._DONE, "waiting for the others to end"])
    for number in range(12):
        known.store["does/1"] = json.dumps([number, "in step 5"])
        watch._read(known, 2.0)
    said = capfd.readouterr().err
    assert said.count("ranks 4 to 5 of 6 (process 102 on host-2) is at the end of its script") == 1 and said.count("\n") == 1
    assert "running a program (train.py:7) for 10 s" in said and known.lost is None


def test_all_have_done_their_work(known: Any) -> None:
    assert not watch.all_done(0.0)
    for k in (1, 2):
        known.store[f"does/{k}"] = json.dumps([watch._DONE, ""])
    assert watch.all_done(0.0)


def _tells(known: Any, process: int, number: int, **begun: Any) -> None:
    known.store[f"does/{process}"] = json.dumps([number, "in step 9", {"programs": {}, "waits": [], **begun}])


def test_the_end_of_a_script_waits_for_the_others(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as they work without it; and says meanwhile that it has done its own."""
    found = []
    for k in (1, 2):
        _tells(known, k, 7)

    def later(seconds: float) -> None:
        found.append(json.loads(known.store["does/0"])[:2])
        for k in (1, 2):
            _tells(known, k, watch._DONE)

    monkeypatch.setattr(watch.time, "sleep", later)
    assert watch.done() is False and found == [[watch._DONE, "waiting for the others to end"]]


WAITING: dict[str, tuple[dict[str, Any], str]] = {
    "program": ({"programs": {"all": [3, []]}}, "waits for it in a program with collectives, its number 3, and there were 2 here"),
    "of some": (
        {"programs": {"0,2": [1, ["b"]], "1,2": [5, []]}},
        "waits for it in a program with collectives, its number 1, and there were 0 here",
    ),
    "exchange": (
        {"waits": [["barrier y", 1, "1,2"], ["barrier x", 2, "all"]]},
        "waits for it in 'barrier x', for the 2nd time, and here it was called once",
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_end_of_a_script_that_another_waits_for(
    known: Any, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process ends, so that the other one, which would wait for ever, hears of it."""
    begun, text = WAITING[name]
    monkeypatch.setattr(together, "_programs", {})
    for _ in range(2):
        with together.running("all", "a"):
            pass
    monkeypatch.setattr(together, "_exchanges", {"barrier x": 1})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    _tells(known, 1, 7, programs={"all": [2, []], "1,2": [6, []]}, waits=[["barrier x", 1, "all"]])  # nothing of this process
    _tells(known, 2, 7, **begun)
    assert watch.done() is True
    said = capfd.readouterr().err
    assert "this process is at the end of its script, and ranks 4 to 5 of 6 (process 102 on host-2), in step 9, " + text in said
    assert json.loads(known.store["does/0"])[:2] == [watch._LAST, "at the end of its script, while others wait for it"]


CROSSED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "two exchanges": ({"waits": [["a", 1, "all"]]}, {"waits": [["b", 1, "all"]]}, True),
    "the same": ({"waits": [["a", 1, "all"]]}, {"waits": [["a", 1, "all"]]}, False),
    "exchange and program": ({"waits": [["a", 1, "all"]]}, {"programs": {"all": [2, []]}}, True),
    "of others": ({"waits": [["a", 1, "0,1"]]}, {"programs": {"all": [2, []]}}, False),
    "ahead": ({"waits": [["a", 1, "all"]]}, {}, False),
    "programs": ({"programs": {"1,2": [2, []]}}, {"programs": {"all": [1, []]}}, False),
}


@pytest.mark.parametrize("name", CROSSED)
def test_who_waits_for_each_other(known: Any, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One in a rendezvous, another one in a collective: nobody said a word."""
    one, other, said = CROSSED[name]
    for number in range(8):
        _tells(known, 1, number, **one)
        _tells(known, 2, number, **other)
        watch._read(known, 2.0)
    found = capfd.readouterr().err
    assert found.count("they wait for each other") == said
    assert not said or "ranks 2 to 3 of 6 (process 101 on host-1) is in step 9, and ranks 4 to 5 of 6" in found
    for number in range(8, 16):
        _tells(known, 1, number, **{**one, "programs": {"0,1": [number, []]}})  # goes on
        _tells(known, 2, number, **other)
        watch._read(known, 2.0)
    assert capfd.readouterr().err == ""


def test_a_program_that_cannot_run_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_programs", {})
    with pytest.raises(MemoryError), together.running("all", "a"):
        raise MemoryError
    with together.running("0,2", "b"):
        pass
    with together.exchanging("x", 4, "all"):
        assert together.begun() == {"programs": {"all": (0, []), "0,2": (1, ["b"])}, "waits": [("x", 4, "all")]}
    assert together.begun()["waits"] == []


def test_addresses_that_only_their_own_machine_knows(known: Any, sockets: list[socket.socket]) -> None:
    """A machine whose name is 127.0.1.1 to itself: its processes would be taken for ended by those on others."""
    assert watch._out_of_reach(known) == [0, 1, 2]  # host-0 and so on
    known.peers = [peer._replace(host=socket.gethostname()) for peer in known.peers]
    assert watch._out_of_reach(known) == []
    sockets[1].close()
    assert watch._out_of_reach(known) == [1]  # there, as it has joined, but behind something that refuses
    known.reached = {0, 2}
    assert watch.ended() == []


def test_a_store_that_does_not_answer(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that SIGTERM ends does not wait for it."""
    answers = threading.Event()
    monkeypatch.setattr(known.store, "set", lambda *_: answers.wait(30), raising=False)
    began = time.monotonic()
    watch.last_word("ended by SIGTERM")
    assert time.monotonic() - began < 10
    answers.set()


def test_a_fork_does_not_speak_for_its_parent(known: Any) -> None:
    watch._forget()
    watch.say_why(ValueError("in a child"))
    assert json.loads(known.store["does/0"]) == [1, "in step 0"]


def test_why_this_one_ends(known: Any, sockets: list[socket.socket], capfd: pytest.CaptureFixture[str]) -> None:
    watch.say_why(ValueError("bad number\nand more"))
    assert json.loads(known.store["does/0"])[:2] == [-1, "ValueError: bad number"]
    sockets[1].close()
    watch.say_why(RuntimeError("Gloo"))
    assert json.loads(known.store["does/0"])[:2] == [-1, "PeerEndedError"] and watch.is_lost()
    assert "ranks 2 to 3 of 6" in capfd.readouterr().err


def test_waiting_for_what_does_not_come(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "store", lambda: known.store)
    watch._lose(known, "rank 1 has ended")
    with pytest.raises(PeerEndedError, match="rank 1 has ended"):
        processes.told("barrier x/1/0")
    assert watch._waiting == []


class Gone(Store):
    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer\nframes")


@pytest.mark.parametrize(
    ("launched", "owner"), [(False, r"rank.* 0 .*process 100 on host-0.*, has ended"), (True, "the torchrun of the first machine")]
)
def test_a_store_that_is_gone(known: Any, monkeypatch: pytest.MonkeyPatch, launched: bool, owner: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host-0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x") if launched else monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(processes, "store", Gone)
    with pytest.raises(PeerEndedError, match=rf"the job's store at host-0:29500 is gone: {owner}.*\(Connection reset by peer\)"):
        processes.told("barrier x/1/0")


def test_what_a_process_does() -> None:
    done = activity.Activity(steps=6)
    assert activity.in_words(done) == "in step 7, running Python"
    done.graph, done.dispatching = activity.Graph("x", 1, "train.py:3"), True
    assert activity.in_words(done) == "in step 7, running a program (train.py:3)"
    done.compiling = activity.Graph("x", 1, ""), 0.0
    assert activity.in_words(done) == "in step 7, compiling"
    with watch.waiting("save_checkpoint"):
        assert watch._doing() == "waiting for the others at 'save_checkpoint'"


def test_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_PEER_TIMEOUT", "120")
    assert watch.timeout() == 120 and "within 120 s" in watch.silence("rank 1")
    monkeypatch.setenv("NXD_JAX_PEER_TIMEOUT", "1")
    with pytest.raises(ValueError, match="NXD_JAX_PEER_TIMEOUT='1': must be a whole number of at least 5"):
        watch.timeout()


ENDS = """
import sys, time
from torch_bridge.mesh import watch
watch.TICK, watch.GRACE = 0.05, 0.2
known = watch._Known(None, 0, [watch.Peer(0, 1, 1, "here", 7, ("127.0.0.1", 1))])
watch._lose(known, "rank 1 has ended")
sys.stdout.write("kept")
watch._look(known)
"""


def test_a_process_that_does_not_end_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert (done.returncode, done.stdout) == (1, "kept")
    assert done.stderr.endswith("nxd_jax: rank 0 of 1 (process 7 on here) ends: rank 1 has ended\n")


def test_who_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    world.configure(world.World(4, hosted=(0, 1)))
    monkeypatch.setattr(watch.os, "register_at_fork", lambda **_: None)
    try:
        watch.be_found(store, 0, "127.0.0.1")
        rank, ranks, size, host, pid, where = json.loads(store["lives/0"])
        assert (rank, ranks, size, host, pid) == (0, 2, 4, socket.gethostname(), os.getpid()) and store["words"] == "[]"
        assert watch._is_there(Peer(rank, ranks, size, host, pid, tuple(where)))
        watch._answer()
    finally:
        assert watch._listening is not None
        watch._listening.close()
        watch._listening = None
        world.configure(None)
    assert not watch._is_there(Peer(rank, ranks, size, host, pid, tuple(where)))
