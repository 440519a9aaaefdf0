"""The other processes of the job: who they are, what each does, and a word when one of them ends or says nothing any more.

Two threads of every process. One talks with the store: it tells what this process does, and reads what the others told. The other one asks the system of each
machine whether a process is there, which needs nobody's answer. The first process watches all others and tells them what it finds; they watch the first.

Nobody is ended here because it is slow. JAX's own heartbeats, which no lock of Python holds up, end a job with a process that does not run at all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch_bridge.config.variables import VARIABLES
from torch_bridge.errors import PeerEndedError
from torch_bridge.mesh import termination, together, world

TICK = 2.0
"""Seconds between two times that a process tells what it does."""
SILENT = 10.0
"""Seconds after which others are told that a process says nothing."""
GRACE = 30.0
"""Seconds in which a process whose job has lost another may end by itself: what waits raises PeerEndedError."""
DOING: Callable[[], str] | None = None
"""In words, what this process does; handed in by those who know."""


def timeout() -> int:
    """Seconds without a heartbeat after which a process counts as lost (NXD_JAX_PEER_TIMEOUT)."""
    return int(VARIABLES["NXD_JAX_PEER_TIMEOUT"].now() or 40)


class Peer(NamedTuple):
    """A process of the job. rank: the first that it hosts, of `ranks`, of `size` in all; host: its machine's name; where: an address at which
    the system answers for it."""

    rank: int
    ranks: int
    size: int
    host: str
    pid: int
    where: tuple[str, int]

    def __str__(self) -> str:
        last = self.rank + self.ranks - 1
        named = f"rank {self.rank}" if self.ranks == 1 else f"ranks {self.rank} to {last}"
        return f"{named} of {self.size} (process {self.pid} on {self.host})"


class _Known:
    """What this process knows of the job.

    store: the watching thread's connection. own: its number among the processes; peers: all of them. does: what each was last known to do; quiet: seconds since
    it told; waited: for so long this process has been waiting since one had done its work. begun, before: what each has begun with others, now and when that
    was last looked at; crossed: for so long two have been waiting for each other. reached: whose machines answer for them; talking: held while the store is
    asked. answered: when the store answered last. lost: why the job cannot go on, and since when; done: this process has done its work; last_word: it has said
    its own.
    """

    def __init__(self, store: Any, own: int, peers: Sequence[Peer]):
        self.store = store
        self.own = own
        self.peers = peers
        self.watched = [k for k in range(len(peers)) if k != own] if own == 0 else [0]
        self.reached = set(range(len(peers)))
        self.talking = threading.Lock()
        self.does: dict[int, str] = {}
        self.told: dict[int, int] = {}
        self.quiet: dict[int, float] = dict.fromkeys(self.watched, 0.0)
        self.waited: dict[int, float] = {}
        self.begun: dict[int, Any] = {}
        self.before: dict[int, Any] = {}
        self.crossed: dict[tuple[int, int], float] = {}
        self.words: list[str] = []
        self.heard = 0
        self.answered = time.monotonic()
        self.lost: tuple[str, float] | None = None
        self.done = False
        self.leaving = False
        self.last_word = False


_known: _Known | None = None
_listening: socket.socket | None = None
_waiting: list[str] = []


# -- who is there ------------------------------------------------------------------------------------


def be_found(store: Any, own: int, address: str) -> None:
    """Tell the others who this process is, and let its machine's system answer for it as long as it lives."""
    global _listening
    _listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024)
    _listening.setblocking(False)
    os.register_at_fork(after_in_child=_forget)
    hosted = world.current().hosted
    store.set(
        f"lives/{own}", json.dumps([hosted[0], len(hosted), world.size(), socket.gethostname(), os.getpid(), _listening.getsockname()[:2]])
    )
    store.set(f"does/{own}", _record(0, "starting"))
    if own == 0:
        store.set("words", "[]")


def _forget() -> None:
    """A fork (a worker of a DataLoader) may live longer than its parent, and says nothing in its name."""
    global _known, _listening
    if _listening is not None:
        _listening.close()
    _known = _listening = None


def start(store: Any, own: int, count: int) -> None:
    """Begin to watch; all processes can be found by now."""
    global _known
    found = [json.loads(text) for text in store.multi_get([f"lives/{k}" for k in range(count)])]
    peers = [Peer(rank, ranks, size, host, pid, (where[0], where[1])) for rank, ranks, size, host, pid, where in found]
    _known = _Known(store.clone(), own, peers)
    _known.reached = set(range(count)) - set(_out_of_reach(_known))
    termination.LAST_WORD = last_word
    for task in (_talk, _look):
        threading.Thread(target=task, args=(_known,), daemon=True, name=f"nxd_jax {task.__name__.strip('_')}s").start()


def _out_of_reach(known: _Known) -> list[int]:
    """Processes whose address is one that only their own machine knows (its name may stand for 127.0.1.1 there), and watched ones that do not answer though
    they are there: of these, JAX's heartbeats alone know."""
    here = socket.gethostname()
    alone = [k for k, peer in enumerate(known.peers) if peer.host != here and peer.where[0] in ("127.0.0.1", "::1")]
    return [*alone, *(k for k in known.watched if k not in alone and not _is_there(known.peers[k], silent=False))]


def ended(patience: float = 0.0) -> list[str]:
    """The other processes that have ended, in words, as far as their machines answer; those that ended for another's sake only if there are no others.

    patience: seconds that it may take until the system knows.
    """
    until = time.monotonic() + patience
    while _known is not None:
        gone = [k for k, peer in enumerate(_known.peers) if k in _known.reached - {_known.own} and not _is_there(peer, silent=False)]
        if gone or time.monotonic() > until:
            return in_words(gone)
        time.sleep(0.25)
    return []


def in_words(processes: Sequence[int]) -> list[str]:
    """Processes, each with its last word; without those that ended for another's sake, unless there are no others."""
    assert _known is not None
    last = _last_words(_known, processes)
    told = [_worded(_known, k) for k in processes]
    return [text for k, text in zip(processes, told, strict=True) if not last[k].startswith(PeerEndedError.__name__)] or told


def _worded(known: _Known, process: int) -> str:
    last = known.does.get(process)
    return f"{known.peers[process]}{f', whose last word was {last!r},' if last else ''}"


def _last_words(known: _Known, processes: Sequence[int]) -> dict[int, str]:
    def ask() -> None:
        for k, text in zip(processes, known.store.multi_get([f"does/{k}" for k in processes]), strict=True):
            known.does[k] = json.loads(text)[1]

    _try(ask)
    return {k: known.does.get(k, "") for k in processes}


RUNNING = "running a program"
"""What DOING says while one runs."""
_FAREWELL = 300.0
"""Seconds that a process waits for its last programs."""
_LAST, _DONE = -1, -2
"""The numbers of what a process says before it ends, and when it has done its work."""
_ENDING = "waiting for the others to end"
"""What it says then."""


def last_word(text: str) -> None:
    """What the others are told of the end of this process."""
    known = _known
    if known is not None and (_launched() or 0 not in known.reached or _is_there(known.peers[0])):  # the store is there, too
        known.last_word = True
        _try(lambda: known.store.set(f"does/{known.own}", _record(_LAST, text)))


def _record(number: int, text: str) -> str:
    """What a process tells the others: a number that grows, or one of those above; what it does in words; and what it has begun with others."""
    return json.dumps([number, text, together.begun()])


def _try(question: Callable[[], object]) -> None:
    """Ask the store, if it answers within two seconds. It may be gone, or be the one that is stopped."""

    def ask() -> None:
        with suppress(Exception):
            question()

    asking = threading.Thread(target=ask, daemon=True, name="nxd_jax asks")
    with suppress(RuntimeError):  # Python is ending
        asking.start()
        asking.join(2)


def linger() -> None:
    """Let the others hear the last word of a process that takes the store with it."""
    if _known is not None and _known.own == 0 and not _launched() and _known.last_word and not is_lost():
        time.sleep(1.5 * TICK)


def _is_there(peer: Peer, silent: bool = True) -> bool:
    """Whether a process lives, by its machine's system. silent: what a machine counts for that does not answer at all."""
    try:
        socket.create_connection(peer.where, timeout=2).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return silent
    return True


# -- what is lost ------------------------------------------------------------------------------------


def is_lost() -> bool:
    """Whether the job has lost a process, so that nobody waits for this one."""
    return _known is not None and _known.lost is not None


def check() -> None:
    """Raise PeerEndedError if the job has lost a process."""
    if _known is not None and _known.lost is not None:
        raise PeerEndedError(_known.lost[0])


def explain(error: BaseException) -> PeerEndedError | None:
    """What to raise in place of an error of JAX's, if it is one of a collective in which another process has ended."""
    text = str(error)
    if _known is None or isinstance(error, PeerEndedError) or not any(sign in text for sign in _OF_COLLECTIVES):
        return None
    gone = ended(patience=2.0)
    if not gone:
        return None
    return PeerEndedError(
        f"{' and '.join(gone)} has ended while this one was waiting for its values: look for the reason in its own output ({text.splitlines()[0]})"
    )


_OF_COLLECTIVES = ("Gloo", "Connection closed", "Socket closed", "NCCL")


def say_why(error: BaseException) -> None:
    """Of an error that ends this process: tell the others, and say here if another process is to blame."""
    found = explain(error)
    if found is not None and _known is not None:
        _lose(_known, str(found))  # what waits in other threads need not
    last_word(type(found).__name__ if found is not None else f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
    if found is not None and _known is not None:
        _say(_known, str(found))


def store_failed(error: Exception) -> PeerEndedError:
    """The error of a process that the store does not answer any more. It belongs to whoever joined the processes, and ends with it."""
    why = str(error).partition("\n")[0]
    return PeerEndedError(
        f"the job's store at {_store_address()} is gone: {_store_owner()} has ended. Look for the reason in its output ({why})"
    )


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _store_owner() -> str:
    if _launched():
        return "the torchrun of the first machine, which keeps it,"
    return in_words([0])[0] if _known is not None else "process 0, which keeps it,"


def _launched() -> bool:
    """Whether torchrun keeps the store, and not the first process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _lose(known: _Known, why: str) -> None:
    if known.lost is None:
        known.lost = (why, time.monotonic())


def all_done(seconds: float) -> bool:
    """Whether all other processes have done their work within these seconds."""
    known = _known
    if known is None:
        return True
    until = time.monotonic() + seconds
    while not is_lost():
        records = _records(known)
        if records and all(number == _DONE for _, (number, *_) in records):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return False


def _tell_done(known: _Known) -> None:
    """Held while `talking` is."""
    known.done = True
    _try(lambda: known.last_word or known.store.set(f"does/{known.own}", _record(_DONE, _ENDING)))


def _records(known: _Known) -> list[tuple[int, Any]]:
    """What the other processes told last, with their numbers; nothing if the store does not answer."""
    others = [k for k in range(len(known.peers)) if k != known.own]
    found: list[tuple[int, Any]] = []

    def ask() -> None:
        found[:] = zip(others, map(json.loads, known.store.multi_get([f"does/{k}" for k in others])), strict=True)

    with known.talking:
        _try(ask)
    return found


def done() -> bool:
    """This process has done its work, what still runs included. Wait until all others have. Whether it has to leave without them: one waits for it in vain."""
    known = _known
    if known is None or known.leaving:
        return False
    until = time.monotonic() + _FAREWELL
    while RUNNING in _doing() and not is_lost() and time.monotonic() < until:
        time.sleep(0.05)
    with known.talking:
        _tell_done(known)
    while not is_lost() and not termination.seen():
        records = _records(known)
        for k, (_, does, begun) in records:
            vain = together.waits_in_vain(begun, known.own)
            if vain is not None:
                _leave_behind(known, k, does, vain)
                return True
        if all(number < 0 for _, (number, *_) in records):
            break
        time.sleep(0.2)
    return False


def _leave_behind(known: _Known, other: int, does: str, vain: str) -> None:
    """Say that another process waits for this one in vain, and here which one ends for it."""
    _say(
        known,
        f"this process is at the end of its script, and {known.peers[other]}, {does}, waits for it in {vain}. All ranks must run the same steps: look for a "
        "loop that ends earlier on some ranks (data of different lengths), a return, an exit, or a branch on the rank around a collective",
    )
    last_word("at the end of its script, while others wait for it")
    linger()


def leaving() -> None:
    """From now on nothing is said, but a farewell to who does not come is cut short."""
    known = _known
    if known is not None and not known.leaving:
        known.leaving = True
        if known.talking.acquire(timeout=5):  # for good: a thread inside of the store's client when Python ends would abort the process
            _tell_done(known)


@contextmanager
def waiting(at: str) -> Iterator[None]:
    """While this process waits for the others, so that they can be told at what."""
    _waiting.append(at)
    try:
        yield
    finally:
        _waiting.remove(at)


# -- the threads -------------------------------------------------------------------------------------


def _talk(known: _Known) -> None:
    """Tell and read, for ever."""
    number, before = 0, time.monotonic()
    text = ""
    while True:
        with suppress(Exception):
            text = _doing()
        with known.talking:
            try:
                number += 1
                if not known.last_word:
                    known.store.set(f"does/{known.own}", _record(_DONE, _ENDING) if known.done else _record(number, text))
                now = time.monotonic()
                _read(known, min(now - before, 2 * TICK))  # a machine that slept has not heard anybody
                known.answered, before = time.monotonic(), now
            except Exception as error:
                if not known.leaving:
                    _lose(known, str(store_failed(error)))
                return
        time.sleep(TICK)


def _doing() -> str:
    at = _waiting[-1:]
    return f"waiting for the others at {at[0]!r}" if at else DOING() if DOING is not None else "at work"


def _read(known: _Known, passed: float) -> None:
    """What the watched ones told, and (from the first process) what is wrong."""
    for k, text in zip(known.watched, known.store.multi_get([f"does/{k}" for k in known.watched]), strict=True):
        number, known.does[k], *begun = json.loads(text)
        known.begun[k] = begun[0] if begun else None
        if number == _LAST:
            _lose(known, f"{in_words([k])[0]} ends. Look for the reason in its own output")
            continue
        if number == _DONE:
            _note_done(known, k, passed)
        if known.told.get(k) != number or number == _DONE:
            known.told[k] = number
            if known.quiet[k] >= SILENT:
                _spread(known, f"{known.peers[k]} is back after {known.quiet[k]:.0f} s")
            known.quiet[k] = 0.0
            continue
        before, known.quiet[k] = known.quiet[k], known.quiet[k] + passed
        if before < SILENT <= known.quiet[k]:
            _spread(known, silence(in_words([k])[0]))
    if known.own == 0:
        _note_crossed(known, passed)
        if known.words or known.lost:
            known.store.set("words", json.dumps([[w, False] for w in known.words] + ([[known.lost[0], True]] if known.lost else [])))
        return
    for word, fatal in json.loads(known.store.get("words"))[known.heard :]:
        known.heard += 1
        if fatal:
            _lose(known, word)
        else:
            _say(known, word)


def _note_done(known: _Known, k: int, passed: float) -> None:
    """Say once that a process which has done its work does not come, where this one has been waiting for something for long."""
    doing = _doing()
    waits = RUNNING in doing or bool(_waiting)
    before, known.waited[k] = known.waited.get(k, 0.0), known.waited.get(k, 0.0) + passed if waits else 0.0
    if before < SILENT <= known.waited[k]:
        _spread(
            known,
            f"{known.peers[k]} is at the end of its script, and this process has been {doing} for {SILENT:.0f} s. If that has collectives with it, they wait "
            "for ever: all ranks must run the same steps. Look for a loop that ends earlier on some ranks (data of different lengths), or a return",
        )


def _note_crossed(known: _Known, passed: float) -> None:
    """Say once that two processes wait for each other at different places, for long, in which neither has begun anything more."""
    begun = {k: found for k, found in known.begun.items() if found is not None} | {known.own: json.loads(json.dumps(together.begun()))}
    waiting = [k for k, found in begun.items() if found["waits"]][:_LOOKED_AT]
    pairs = {(min(a, b), max(a, b)) for a in waiting for b in begun if a != b and together.crossed(begun[a], a, begun[b], b)}
    same = begun == known.before
    before, known.before = known.crossed, begun
    known.crossed = {pair: before.get(pair, 0.0) + passed if same else 0.0 for pair in pairs}
    for pair, seconds in known.crossed.items():
        if before.get(pair, 0.0) < SILENT <= seconds:
            first, second = (f"{known.peers[k]} is {_doing() if k == known.own else known.does[k]}" for k in pair)
            _spread(
                known,
                f"{first}, and {second}, both for {SILENT:.0f} s, and each has begun what the other has not: they wait for each other, it seems, for ever. "
                "All ranks must call the same collectives in the same order: look for a branch on the rank around a collective, a rendezvous or a barrier",
            )
            return


_LOOKED_AT = 64
"""Waiting processes that are compared with others."""


def silence(who: str) -> str:
    """What is said of a process that says nothing."""
    return (
        f"{who} has said nothing for {SILENT:.0f} s: it is stopped (SIGSTOP, a debugger), its machine hangs, or one long call keeps Python from running. "
        f"This process waits. If it does not run at all, JAX's runtime ends the job within {timeout()} s (NXD_JAX_PEER_TIMEOUT)"
    )


def _spread(known: _Known, word: str) -> None:
    """Say it here, and let the others say it."""
    if known.own == 0:
        known.words.append(word)
    _say(known, word)


def _say(known: _Known, word: str) -> None:
    if not known.leaving:
        os.write(2, f"nxd_jax: {known.peers[known.own]}: {word}\n".encode())


def _look(known: _Known) -> None:
    """See whether the watched ones live and the store answers, for ever; end this process if it does not end by itself."""
    unheard = False
    while True:
        before = time.monotonic()
        time.sleep(TICK)
        if time.monotonic() - before > 2 * TICK:  # this process did not run itself
            known.answered = time.monotonic()
        _answer()
        watched = [k for k in known.watched if k in known.reached] if known.lost is None and not known.leaving else []
        gone = [k for k in watched if not _is_there(known.peers[k])]
        if gone:
            _lose(known, f"{' and '.join(in_words(gone))} has ended. Look for the reason in its own output")
        late = time.monotonic() - known.answered > SILENT + TICK
        if late and not unheard and known.lost is None:
            _say(known, silence("the torchrun of the first machine" if _launched() else _worded(known, 0)))
        unheard = late
        if known.lost is not None and time.monotonic() - known.lost[1] > GRACE and not termination.seen():
            _end(known)


def _answer() -> None:
    """Take the connections of those who asked."""
    while _listening is not None:
        try:
            _listening.accept()[0].close()
        except OSError:
            return


def _end(known: _Known) -> None:
    assert known.lost is not None
    os.write(2, f"nxd_jax: {known.peers[known.own]} ends: {known.lost[0]}\n".encode())
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):
            continue
    os._exit(1)
