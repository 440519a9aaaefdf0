"""Several Python processes (torchrun): JAX's distributed runtime, and small exchanges between the processes through torch's store."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_bridge import _compat
from torch_bridge.mesh import exits, termination, together, watch, world

_started = False
_starting = threading.RLock()
_store: Any = None
_counts: dict[str, int] = {}


class _Clients(threading.local):
    """store: this thread's connection. A connection does one thing at a time: a thread that waits in it would keep the others from saying anything."""

    store: Any = None


_clients = _Clients()


def store() -> Any:
    """A key-value store that all processes see: torchrun's, under a prefix of our own."""
    global _store
    if _store is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if not os.environ.get(name)]
        if missing:
            raise RuntimeError(f"several processes need {', '.join(missing)} in the environment; start them with torchrun")
        found, _, _ = next(iter(dist.rendezvous("env://", world.process_index(), world.process_count())))
        _store = _clients.store = dist.PrefixStore("nxd_jax", found)
    elif _clients.store is None:
        _clients.store = _store.clone()
    return _clients.store


def start(of: world.World) -> None:
    """Join JAX's distributed runtime; each process brings one device for each rank that it hosts. A loader's thread and the script may both come here first."""
    if not _started:
        with _starting:
            if not _started:
                _join(of)


def _join(of: world.World) -> None:
    global _started
    import jax

    if _compat.jax_started():
        raise RuntimeError(
            "JAX started before the processes found each other: put the first tensor on xla after torch.distributed.init_process_group('xla'), "
            "or call xr.use_spmd() before"
        )
    here = len(of.hosted)
    index = world.process_index()
    if index == 0:
        store().set("jax_coordinator", f"{own_address()}:{_free_port()}")
    address = store().get("jax_coordinator").decode()
    platforms = getattr(jax.config, "jax_platforms", None) or ""
    if platforms in ("", "cpu"):
        os.environ.setdefault("PJRT_NPROC", str((os.cpu_count() or 1) + 2 * here))
        jax.config.update("jax_num_cpu_devices", here)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    watch.be_found(store(), index, _own_host())
    with _compat.without_preemption_service():
        jax.distributed.initialize(address, num_processes=of.processes, process_id=index, heartbeat_timeout_seconds=watch.timeout())
    _started = True
    watch.start(store(), index, of.processes)
    termination.install(f"rank {of.hosted[0]} of {of.size}")
    atexit.register(_leave)  # before JAX's, which was registered earlier
    _end_at_once_after_errors()


def _own_host() -> str:
    """The address of this machine by which the first process is reached."""
    host = own_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _end_at_once_after_errors() -> None:
    """Let a process that an exception ends leave without JAX's farewell, which waits minutes for the others, while they wait for this one in a collective."""
    hook, failed = sys.excepthook, []

    def note(*error: Any) -> None:
        failed.append(error[0])
        hook(*error)
        watch.say_why(error[1])

    def leave() -> None:
        if failed:
            _end_now(1)

    exits.install()
    sys.excepthook = note
    atexit.register(leave)  # before `_leave`


def _end_now(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    watch.linger()
    os._exit(status)


TOGETHER = 5.0
"""Seconds that a process which `sys.exit` ends with an error waits for the others to end, too."""

PATIENCE = 1.0, 2.0
"""Seconds that a process which got SIGTERM, and ends by the script's own handler, waits for the others; and process 0, without which JAX aborts the others."""


def _leave() -> None:
    """JAX's farewell waits up to five minutes for the other processes. Who got SIGTERM does not have them, and whom `sys.exit` ends with an error may leave
    others in a collective that waits for it."""
    failure = exits.failure()
    if failure is not None and not watch.all_done(TOGETHER):
        watch.last_word(failure.words)
        _end_now(failure.status)
    alone = watch.done()
    watch.leaving()
    if alone or watch.is_lost() or (termination.seen() and not _all_leave(PATIENCE[world.process_index() == 0])):
        _compat.abandon_distributed()


_ALONE = 1 << 32


def _all_leave(seconds: float) -> bool:
    """Whether all processes have got here within these seconds."""
    until = time.monotonic() + seconds
    try:
        shared = store()
        shared.add("leaving", 1)
        while shared.add("leaving", 0) < world.process_count():
            if time.monotonic() > until:
                shared.add("leaving", _ALONE)
                return False
            time.sleep(0.05)
        return bool(shared.add("leaving", 0) < _ALONE)  # nobody has gone without the others
    except RuntimeError:  # the process that has the store is gone
        return False


def listening_address() -> str:
    """This machine's address for others, with any port: "host:0"."""
    host = _own_host()
    return f"[{host}]:0" if ":" in host else f"{host}:0"


def own_address() -> str:
    """Where the first process is reached."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Questions to the store; PeerEndedError if it is gone."""
    try:
        yield
    except dist.DistError as error:
        raise watch.store_failed(error) from error


@_answering()
def exchange(tag: str, payload: bytes, among: Sequence[int] | None = None) -> list[bytes]:
    """The payloads of these processes (None: of all), in their order. They call it with the same tag; it waits for all of them."""
    members = range(world.process_count()) if among is None else among
    if len(members) == 1:
        return [payload]
    name = tag if among is None else f"{tag} of {together.named(among)}"
    number = together.begin_exchange(name)
    key = f"{name}/{number}"
    shared = store()
    shared.set(f"{key}/{world.process_index()}", payload)
    with together.exchanging(name, number, together.named(among)):
        found = [told(f"{key}/{k}") for k in members]
    if shared.add(f"{key}/read", 1) == len(members):
        for k in members:
            shared.delete_key(f"{key}/{k}")
    return found


@_answering()
def told(key: str) -> bytes:
    """What another process puts into the store under a key. It waits as long as that takes: the other may be compiling. PeerEndedError if the job has lost a
    process meanwhile."""
    shared, began = store(), time.monotonic()
    with watch.waiting(key.rpartition("/")[0]):
        while not shared.check([key]):  # `wait` logs each time that it is asked in vain
            watch.check()
            time.sleep(min(0.1, max(0.001, (time.monotonic() - began) / 10)))
    found: bytes = shared.get(key)
    return found


@_answering()
def of_first(tag: str, payload: bytes) -> bytes:
    """The first process's payload, in all processes, which call it with the same tag. The first waits for nobody."""
    count = world.process_count()
    if count == 1:
        return payload
    number = _counts[tag] = _counts.get(tag, 0) + 1
    key, shared = f"{tag}/{number}", store()
    if world.process_index() == 0:
        shared.set(key, payload)
        return payload
    found = told(key)
    if shared.add(f"{key}/read", 1) == count - 1:
        shared.delete_key(key)
        shared.delete_key(f"{key}/read")
    return found


class ProgramsDiffer(RuntimeError):
    """Processes are about to run programs whose collectives do not fit together."""


class Meeting(NamedTuple):
    """Where processes wait for each other before a program with collectives runs for the first time.

    processes: who runs it; among: the same (`together.named`). collectives: what each does, and where, in order; word: stands for what they do.
    """

    processes: Sequence[int]
    among: str
    collectives: Sequence[tuple[str, str]]
    word: str


def meeting(collectives: Sequence[tuple[str, str]], among: Sequence[int] | None = None) -> Meeting | None:
    """For a program with these collectives: (what it does, where) for each of them, in order. None if it concerns one process alone.

    among: the processes that run it, None for all.
    """
    members = range(world.process_count()) if among is None else among
    if len(members) == 1 or not collectives:
        return None
    word = hashlib.blake2b("\n".join(what for what, _ in collectives).encode(), digest_size=6).hexdigest()
    return Meeting(members, together.named(among), collectives, word)


_ASK = 0.5
"""Seconds after which a process that waits for others asks whether they run a program that they have run before, and so do not come."""


@_answering()
def meet(at: Meeting, word: str) -> None:
    """Wait until all others are here, in the program that they run at this place in the order of programs: one may compile for minutes, and the first
    collective of processes waits for half a minute only. Others may run one that they have run before (their last batch had another shape, say).

    word: stands for the order of its collectives, as compiled; `together.running` has it, too. Raises ProgramsDiffer, which ends the job, if the collectives of
    the others' program are not the same. Programs that all have run before are not compared.
    """
    shared, own, number = store(), world.process_index(), together.count(at.among)
    key = f"programs of {at.among}/{number}"
    shared.set(f"{key}/{own}", json.dumps(at.collectives))
    others = [other for other in at.processes if other != own]
    for other in others:
        if shared.check([f"{key}/{other}"]):
            _compare(at, number, other, shared.get(f"{key}/{other}"))
    if shared.add(f"{key}/here", 1) == len(at.processes):
        shared.set(f"{key}/go", b"")
        return
    began = asked = time.monotonic()
    with watch.waiting(key):
        while not shared.check([f"{key}/go"]):
            watch.check()
            now = time.monotonic()
            if now - asked > _ASK and all(_is_there(shared, at, word, number, f"{key}/{other}", other) for other in others):
                return
            asked = now if now - asked > _ASK else asked
            time.sleep(min(0.1, max(0.001, (now - began) / 10)))


def _is_there(shared: Any, at: Meeting, word: str, number: int, key: str, other: int) -> bool:
    """Whether another process has come to this meeting, or is in a program of that number that it has run before."""
    if shared.check([key]):
        return True
    _, doing, begun = json.loads(shared.get(f"does/{other}"))
    theirs = together.ran(begun, at.among, number)
    if theirs is not None and theirs != word:
        annotated = world.current().process[1] > 1
        own = f"{_name(world.process_index(), annotated)} {_listed(at.collectives)}"
        raise ProgramsDiffer(
            _advice(
                number,
                f"{own}; {_name(other, annotated)}, {doing}: others, or the same in another order, in a program that it has run before",
                annotated,
            )
        )
    return theirs is not None


def _listed(collectives: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(f"{what}{_place(where)}" for what, where in collectives[:3])
    return shown + (f" and {len(collectives) - 3} more" if len(collectives) > 3 else "")


def _compare(at: Meeting, number: int, other: int, told: bytes) -> None:
    found = [(what, where) for what, where in json.loads(told)]
    if [what for what, _ in found] != [what for what, _ in at.collectives]:
        raise ProgramsDiffer(_difference(number, {world.process_index(): list(at.collectives), other: found}))


def _difference(number: int, programs: dict[int, list[tuple[str, str]]]) -> str:
    annotated = world.current().process[1] > 1
    longest = max(map(len, programs.values()))
    at = next(k for k in range(longest) if len({p[k][0] if k < len(p) else None for p in programs.values()}) > 1)
    shown = ", ".join(
        f"{_name(process, annotated)} {f'{p[at][0]}{_place(p[at][1])}' if at < len(p) else 'nothing'}" for process, p in programs.items()
    )
    return _advice(number, f"Number {at + 1} is: {shown}", annotated)


def _advice(number: int, found: str, annotated: bool) -> str:
    what, all_of, own = ("operations", "processes", "process") if annotated else ("collectives", "ranks", "rank")
    return (
        f"the {what} of program {number} differ among processes, which would wait for each other for ever or mix up their values. {found}. "
        f"All {all_of} must run the same {what} in the same order, on the same shapes: look for a branch, a loop or a shape that depends on "
        f"{'xr.process_index()' if annotated else 'int(rank)'}, on a value of this {own}'s own data, or on a file that not all {all_of} have."
    )


def _name(process: int, annotated: bool) -> str:
    if annotated:
        return f"process {process}"
    hosted = world.current().hosted
    return f"rank {hosted[0] if process == world.process_index() else process * len(hosted)}"


def _place(where: str) -> str:
    return f" ({where})" if where else ""


def barrier(tag: str, among: Sequence[int] | None = None) -> None:
    """Wait until these processes (None: all) are here."""
    exchange(f"barrier {tag}", b"x", among)
