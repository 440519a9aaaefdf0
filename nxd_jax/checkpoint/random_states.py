"""The random states of a checkpoint: a file for each process that saved.

What a rank of another process, or of another number of processes, drew from is found in the file of the process that hosted it: a training that was started by
torchrun goes on in one process, and the other way round. Where there are ranks that were not there, all go on with rank 0's random numbers of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import reading
from nxd_jax.tensor_parallel.random import State, XLARNGStatesTracker, get_xla_rng_tracker
from torch_bridge.mesh import random_state, world
from torch_bridge.mesh.random_state import RngState
from torch_bridge.per_rank import host_random_states
from torch_bridge.precision import stochastic_rounding
from torch_bridge.torch_xla.core import xla_model as xm


def current() -> dict[str, Any]:
    """The random states of this process: Python's, NumPy's, torch's for the CPU and for xla, those of `get_xla_rng_tracker()`, and of stochastic rounding.

    Where its ranks have states of their own on the host, a list of them.
    """
    device = random_state.DEFAULT
    named = {
        name: {"cpu": _saved(host_random_states.each(state.cpu)), **_of_device(random_state.of_state(state.xla, state.axes))}
        for name, state in get_xla_rng_tracker().states_.items()
    }
    host = {name: _saved(states) for name, states in host_random_states.of_ranks().items()}
    here = world.current()
    more = {"tracker": named, "rounding": stochastic_rounding.STREAM.state, "ranks": list(here.hosted), "mesh": dict(here.axes)}
    return {**host, **_of_device(device), **more}


def _saved(states: Sequence[Any]) -> Any:
    return states[0] if len(states) == 1 else list(states)


def _of_device(state: RngState) -> dict[str, Any]:
    return {"xla": (state.seed, state.offset), "xla_axes": state.axes}


def restore(folder: Path) -> None:
    """Put back what the processes that saved had. folder: with their files."""
    if (found := saved(folder)) is not None:
        _put(found)


def saved(folder: Path) -> Saved | None:
    """The states of a checkpoint. folder: with the files of the processes that saved."""
    files = sorted(folder.glob("*.pt"))
    return Saved(files) if files else None


class Saved:
    """The states of a checkpoint. own: of the file of this process (of the first one, if another number of processes saved)."""

    def __init__(self, files: Sequence[Path]):
        index = world.process_index() if len(files) == world.process_count() else 0
        self.own = reading.load_object(files[index])
        here = world.current()
        ranks = self.own.get("ranks")
        if ranks is None or list(here.hosted) == ranks:
            self._by_rank = None if ranks is None else {rank: (self.own, k) for k, rank in enumerate(ranks)}
        else:
            saved = [self.own, *(reading.load_object(f) for k, f in enumerate(files) if k != index)]
            self._by_rank = {rank: (s, k) for s in saved for k, rank in enumerate(s["ranks"])}
        if self._by_rank is not None and not set(here.hosted) <= set(self._by_rank):
            self._by_rank = None
        self.same_layout = self._by_rank is not None and self.own["mesh"] == dict(here.axes)

    def host(self, read: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        """A state of the host for each hosted rank; rank 0's alone if the ranks of now were not there."""
        if self._by_rank is None:
            return [_entry(read(self.own), 0)]
        return [_entry(read(states), place) for states, place in (self._by_rank[rank] for rank in world.current().hosted)]


def _entry(state: Any, place: int) -> Any:
    return state[place] if isinstance(state, list) else state


def _put(found: Saved) -> None:
    host_random_states.put_for_ranks({name: found.host(itemgetter(name)) for name in host_random_states.NAMES})
    own = found.own
    stochastic_rounding.STREAM.state = own.get("rounding", stochastic_rounding.STREAM.state)
    if isinstance(own["xla"], int):  # as it was before there was a tracker
        xm.set_rng_state(own["xla"])
        random_state.DEFAULT.axes = tuple(own.get("xla_axes", ()))
        return
    seed, offset = own["xla"]
    random_state.DEFAULT.put(seed, offset, own["xla_axes"])
    tracker = get_xla_rng_tracker()
    tracker.states_ = {name: _named(found, tracker, name) for name in tracker.states_}


def _named(found: Saved, tracker: XLARNGStatesTracker, name: str) -> State:
    """A state of the tracker, if the checkpoint has it. Which ranks draw differently is what the layout of now says."""
    now, saved = tracker.states_[name], found.own["tracker"].get(name)
    if saved is None:
        return now
    device = random_state.of_state(now.xla, now.axes)
    axes = saved["xla_axes"] if random_state.fits_world(saved["xla_axes"]) else now.axes
    seed, offset = saved["xla"]
    device.put(seed, offset, axes)
    cpu: torch.Tensor = now.cpu
    if found.same_layout:
        cpu = host_random_states.joined(found.host(lambda s: s["tracker"][name]["cpu"]))
    return State(cpu, device.get_state(), device.axes)
