"""Gradients of a module under `torch_bridge.optimize` from a forward pass computed once more, op by op: for a backward pass of a kind that was not recorded,
and for gradients of gradients. The module must still be what it was at the call; where it is not, an error says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter, eq
from typing import Any

import torch

from torch_bridge.ir.segment import LOCK
from torch_bridge.mesh import random_state
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor, copy_storage, make
from torch_bridge.replay import output_trees, returned_views
from torch_bridge.replay.nested_grad import gradients
from torch_bridge.replay.recordings import Forward

_VERSION = attrgetter("_version")


class Again:
    """What it takes to compute a call again, noted before it runs. Tensors that the call reads and overwrites are kept as they are now."""

    def __init__(self, call: Any, forward: Forward):
        self._call = call
        self._forward = forward
        with LOCK:
            copies = [copy_storage(call.given[k]) for k in forward.overwritten]
        self._old = [make(s.layout, s) for s in copies]
        self._read: Sequence[XLATensor] = ()
        self._versions: list[int] = []

    def note_versions(self) -> None:
        """The contents of other tensors that matter must stay what they are now."""
        self._read = self._forward.of_steady(self._call.first)
        self._versions = list(map(_VERSION, self._read))

    def keep(self) -> list[XLATensor]:
        """Tensors to give to autograd until the backward pass, which gives them to `gradients` as `old`."""
        old, self._old = self._old, []
        return old

    def gradients(self, inputs: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool], old: Sequence[XLATensor]) -> list[Any]:
        """The gradient of each input that needs one. Differentiable if gradients are on."""
        self._check()
        call = self._call
        create, theirs = torch.is_grad_enabled(), inputs
        if not create:
            inputs = [*call.detached(), *inputs[len(call.tensors) :]]
        with self._as_then(old), torch.enable_grad():
            args, kwargs = call.on(inputs[: len(call.tensors)])
            outs = output_trees.taken_apart(call.player.plain(*args, **kwargs), call.known(inputs[: len(call.tensors)])).tensors
            outs = returned_views.arranged(outs).given
            with torch.set_grad_enabled(create):
                return gradients(outs, inputs, grads, needed, keep=create, create=create, theirs=() if create else theirs)

    def _check(self) -> None:
        why = "a tensor that it reads was changed in place" if not all(map(eq, map(_VERSION, self._read), self._versions)) else ""
        try:
            self._call.kind.check_state("its forward has been given another state: ")
        except Exception as error:
            why = why or str(error)
        if why:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation, or the module has been changed since its "
                f"forward: torch_bridge.optimize has to compute the forward of {self._call.player.name} again for this backward pass (of a kind that was not "
                f"recorded), but {why}. Run the backward pass before the change, or call torch_bridge.restore(module)"
            )

    @contextlib.contextmanager
    def _as_then(self, old: Sequence[XLATensor]) -> Iterator[None]:
        """Random state, settings and overwritten tensors as they were before the call, and afterwards as they are now."""
        call = self._call
        draws = (random_state.DEFAULT.seed, random_state.DEFAULT.offset)
        with LOCK:
            now = [(call.given[k], copy_storage(call.given[k])) for k in self._forward.tape.written()]
            _write([(call.given[k], t._storage) for k, t in zip(self._forward.overwritten, old, strict=True)])
        random_state.DEFAULT.seed, random_state.DEFAULT.offset = call.draws
        try:
            with call.ambient.restored():
                yield
        finally:
            random_state.DEFAULT.seed, random_state.DEFAULT.offset = draws
            with LOCK:
                _write(now)
            for k in self._forward.bumped:
                torch.autograd.graph.increment_version(call.every[k])


def _write(pairs: Sequence[tuple[Any, Any]]) -> None:
    segment = dispatch.STATE.session.current
    for storage, value in pairs:
        segment.write(storage, segment.read(value, value.layout))
