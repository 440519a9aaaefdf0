"""Programs that differ in their devices alone, such as the passes of equal stages of a pipeline: one is compiled, the others are its code on their devices.

Whether two are the same is decided by what JAX lowers them to, so each is traced and lowered; that takes a fraction of XLA's time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from torch_bridge import _compat, metrics
from torch_bridge.config import environment
from torch_bridge.mesh import places, world

if TYPE_CHECKING:
    from torch_bridge.compiler.annotated_labels import AnnotatedLabels
    from torch_bridge.compiler.program import Program
    from torch_bridge.compiler.shard_mapping import RankLabels

logger = logging.getLogger("nxd_jax")

_COMPILED: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
"""Programs at places that were compiled here, by what they were lowered to."""
_PACKED: weakref.WeakKeyDictionary[Program, bytes] = weakref.WeakKeyDictionary()
"""Those of them that sort: XLA packs none once it has run."""


def compiling(program: Program, lowered: Any) -> Callable[[], Any]:
    """What gives the executable of a program that has been lowered."""
    labels = program.spec.labels
    if labels is None or not are_looked_for(labels):
        return lowered.compile
    text = lowered.as_text()
    return functools.partial(_compiled, program, lowered, _key(labels.mesh, lowered, text), "stablehlo.sort" in text)


def are_looked_for(labels: RankLabels | AnnotatedLabels | None) -> bool:
    """Whether equal programs are looked for among those with these labels: those at places of the mesh, while all ranks are in this process."""
    return labels is not None and places.ranks(labels.mesh) is not None and world.is_local() and not environment.dumping()


def _key(mesh: Any, lowered: Any, program: str) -> str:
    """What a program is, but for its devices. The text leaves out inputs that nothing reads, so it does not say which of them it takes."""
    text = f"{mesh.axis_names} {mesh.devices.shape} {_compat.inputs_of(lowered)} {lowered.out_tree} {program}"
    return hashlib.sha256(text.encode()).hexdigest()


class _Hits(threading.local):
    """How often this thread has found a program in JAX's cache on disk: what was loaded from there cannot be copied."""

    count = 0


_HITS = _Hits()


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_note)


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _HITS.count += 1


def _compiled(program: Program, lowered: Any, key: str, sorts: bool) -> Any:
    twin = _COMPILED.get(key)
    if twin is not None and twin is not program and twin.compiled is not None:
        try:
            found = _compat.on_devices(_PACKED.get(twin) or _compat.packed(twin.compiled), _devices(twin), _devices(program))
        except Exception as error:  # host callbacks, say: slower, nothing worse
            logger.debug("a program is compiled again for other devices: %s: %s", type(error).__name__, error)
        else:
            metrics.count("EqualProgram")
            program.code = twin.code
            return found
    _listen()
    before = _HITS.count
    made = lowered.compile()
    if _HITS.count == before:
        _COMPILED[key] = program
        if sorts:
            with contextlib.suppress(Exception):  # as above
                _PACKED[program] = _compat.packed(made)
    return made


def _devices(program: Program) -> list[Any]:
    assert program.spec.labels is not None
    return list(program.spec.labels.mesh.devices.flat)
