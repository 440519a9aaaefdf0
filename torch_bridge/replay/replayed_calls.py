"""A call of a module under `torch_bridge.optimize` that is played from recordings, and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch

from torch_bridge.identity import any_is, same
from torch_bridge.ir.segment import LOCK, Storage
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.replay import accumulate_grad, recordings
from torch_bridge.replay.recompute import Again
from torch_bridge.replay.recordings import Forward, Source

_STORAGE, _VERSION = map(attrgetter, ("_storage", "_version"))


_SWAPPED = (
    "the memory of a parameter was swapped (param.data = ...) between the forward and the backward pass of a module under torch_bridge.optimize: "
    "swap it after the backward pass, or call torch_bridge.restore(module)"
)


class Played:
    """One call (`module_calls.Call`). alone: no other call of the module waits for a backward pass that may be the same one; of: the block around it, where
    blocks have backward passes of their own (`module_calls.with_its_own_backward`)."""

    def __init__(self, call: Any, forward: Forward):
        self.call = call
        self.rest, self.how, self.needs, self.views = forward.rest, forward.how, forward.needs, forward.views
        self.unreached = call.kind.unreached or frozenset()
        self.over = False
        self._forward = forward
        self._kept: dict[Source, Storage] = {}
        self._reads = forward.reads_set
        self._read = forward.of_reads(call.first)
        self._given = forward.of_reads(call.given)
        self.alone = True
        self.of: Any = None

    def forward(self) -> list[XLATensor]:
        """Play it; the tensors that it returns."""
        call, tape = self.call, self._forward.tape
        call.player.played += 1
        call.await_backward(self)
        self._again = Again(call, self._forward)
        with LOCK:
            self._constants = tape.placed()
            self._at = at = tape.play([*call.given, *self._constants])
            if call.kind.later:
                self._kept = {("kept", made.value): recordings.storage_of(made, at) for made in self._forward.kept}
            shared: dict[int, Storage] = {}
            outs = [recordings.tensor_of(made, at, shared, self._constants) for made in self._forward.outs]
        for k in self._forward.bumped:
            torch.autograd.graph.increment_version(call.every[k])
        self._segment = dispatch.STATE.session.current
        self._again.note_versions()
        self._versions = list(map(_VERSION, self._read))
        self._outs = [o._storage.ref for o in outs]
        return outs

    def keep(self) -> list[XLATensor]:
        """Copies that computing the pass again would take."""
        return self._again.keep()

    def release(self) -> None:
        """Let go of everything: there will be no other backward pass."""
        self.over = True
        self.call.player.waiting.discard(self)
        del self.call, self._forward, self._again, self._outs, self._kept, self._constants, self._read, self._given

    def backward(self, saved: Any, grads: Any, needed: Any) -> list[Any]:
        """Gradients of arguments and parameters."""
        call = self.call
        self._check_reads()
        call.note_nested()
        found = None if torch.is_grad_enabled() else self._known(grads, needed)
        if found is None:
            return self._again.gradients([*call.tensors, *call.parameters], grads, needed, saved)
        made = self._play(found)
        if self.alone and accumulate_grad.possible():
            first = len(call.tensors)
            made[first:] = accumulate_grad.hand_over(call.parameters, made[first:])
        return made

    def backward_into_leaves(self, grads: Any, needed: Any) -> bool:
        """The whole backward pass, where it does nothing but fill `.grad` of parameters; False, with nothing done, where autograd is needed."""
        self._check_reads()
        parameters = self.call.parameters
        found = self._known(grads, needed, again=True) if self.alone and not any(needed[: len(self.call.tensors)]) else None
        views = [] if found is None else found.backward.views(len(self.call.tensors))
        if found is None or views is None or not accumulate_grad.empty(parameters, views):
            return False
        for p, g in zip(parameters, self._play(found)[len(self.call.tensors) :], strict=True):
            if g is not None:
                p.grad = g
        return True

    def _check_reads(self) -> None:
        """Raises RuntimeError if what backward passes read was changed."""
        if not same(map(_STORAGE, self._read), self._given):
            raise RuntimeError(_SWAPPED)
        if not all(map(eq, map(_VERSION, self._read), self._versions)):
            raise RuntimeError(_changed(self._read, self._versions))

    def _known(self, grads: Any, needed: Any, again: bool = False) -> _Found | None:
        """The backward pass to play; None if there is none (again: then the engine will ask once more)."""
        if (self.call.kind.functions or self.call.kind.recomputes) and self.call.kind.unknown_backward():
            return None
        later = dispatch.STATE.session.current is not self._segment
        known = self.call.kind.backward(recordings.pattern(grads, needed, self._source, later))
        if known is None:
            if not again:
                self.call.kind.miss()
            return None
        held = {"given": self.call.given, "constant": self._constants}
        storages: list[Any] = [
            self._kept.get((what, k)) if what == "kept" else grads[k]._storage if what == "grad" else held[what][k]
            for what, k in known.reads
        ]
        values = None if later else known.values(self._forward)
        if not known.given <= self._reads or (values is None and any_is(storages, None)):
            return None
        return _Found(known, storages, values)

    def _play(self, found: _Found) -> list[Any]:
        """Its gradients."""
        backward, storages, values = found
        self.call.player.played_backward += 1
        storages = [*storages, *backward.tape.placed()]
        with LOCK:
            at = backward.tape.play(storages, {k: self._at.id(value) for k, value in (values or {}).items()}, self.call.draws)
            return recordings.gradients_of(backward.grads, at, storages)

    def _source(self, storage: Storage) -> Source | None:
        """What a storage is, if it was there before the backward pass."""
        given = self.call.given
        if storage in given:
            return "given", given.index(storage)
        return next((("out", k) for k, ref in enumerate(self._outs) if ref is storage.ref), None)


class _Found(NamedTuple):
    """A backward pass to play: storages for its reads, and values of the forward pass for those of which there is none."""

    backward: recordings.Backward
    storages: list[Any]
    values: dict[int, int] | None


def _changed(tensors: Sequence[XLATensor], versions: Sequence[int]) -> str:
    """torch's words for a tensor that the backward pass reads."""
    t, version = next((t, v) for t, v in zip(tensors, versions, strict=True) if t._version != v)
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: [{t.dtype} {list(t.shape)}] is at version "
        f"{t._version}; expected version {version} instead. Hint: run the backward pass before the change, or change a clone"
    )
