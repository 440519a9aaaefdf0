"""What can be looked at: programs that ran, programs of an abstract run, captured modules, tensors that wait. All give a graph, a jaxpr, HLO and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from nxd_jax.inspect.memory import Memory, of_graph, of_program
from nxd_jax.inspect.owners import Owner, owners
from torch_bridge import _compat
from torch_bridge.compiler.annotated_labels import AnnotatedLabels
from torch_bridge.export import hlo_text
from torch_bridge.mesh import sharding, world
from torch_bridge.runtime import abstract
from torch_bridge.telemetry import activity


class Subject:
    """A program to look at. name: what it is. graph: its aten ops. axes: of the mesh, outermost first, {} for one rank.

    What takes time (tracing, lowering, compiling) is done when it is asked for, once.
    """

    name: str
    graph: fx.Graph
    partitioned = False
    """Whether XLA divides the work among devices (`xr.use_spmd`), so that collectives stand in the optimised HLO alone."""

    def __init__(self) -> None:
        self.axes: dict[str, int] = dict(world.current().axes) if sharding.active() else {}
        self._world = world.current()
        self._places = {axis: world.coordinates(axis) for axis in self.axes}
        self._order = world.current().order

    @property
    def runs(self) -> int:
        """How often it ran."""
        return 0

    @property
    def compile_seconds(self) -> float:
        """What tracing, lowering and compiling took when the script met it; 0 if it did not."""
        return 0.0

    @cached_property
    def traced(self) -> Any:
        """The `jax.stages.Traced`."""
        if world.current() is not self._world:
            raise RuntimeError(
                f"{self.name} was recorded on ranks that are gone: look at it while they are laid out (within the `with` block of abstract_run, before "
                "destroy_model_parallel)"
            )
        with _compat.enable_x64():
            return self._trace()

    @property
    def jaxpr(self) -> Any:
        """What JAX traced."""
        return self.traced.jaxpr

    @cached_property
    def lowered(self) -> Any:
        """The `jax.stages.Lowered`."""
        traced = self.traced
        with _compat.enable_x64():
            return traced.lower()

    @cached_property
    def compiled(self) -> Any:
        """The `jax.stages.Compiled`: the one that ran, if it did."""
        lowered = self.lowered
        with _compat.enable_x64():
            return lowered.compile()

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The groups of ranks along mesh axes, each in the order of the axes. Raises ValueError for an axis that there is not."""
        unknown = [a for a in axes if a not in self.axes]
        if unknown:
            raise ValueError(f"no mesh axis is called {unknown[0]!r}; there are {', '.join(map(repr, self.axes)) or 'none: one rank'}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self._order:
            found.setdefault(tuple(self._places[a][rank] for a in self.axes if a not in axes), []).append(rank)
        return list(found.values())

    def memory(self, hbm_bytes: int, core: str) -> Memory:
        """Memory on one core."""
        raise NotImplementedError

    def names(self) -> dict[str, str]:
        """Whose inputs of the graph are, by the name of their node."""
        return {}

    def _trace(self) -> Any:
        raise NotImplementedError


class OfProgram(Subject):
    """A program that ran (or was recorded in an abstract run: `recorded`). known: whose storages are; None: found out when it is asked for."""

    def __init__(self, program: Any, recorded: abstract.Recorded | None = None, known: dict[int, Owner] | None = None):
        super().__init__()
        self.program = program
        self.recorded = recorded
        self._known = known
        self.graph = program.graph
        labels = program.spec.labels
        self.partitioned = isinstance(labels, AnnotatedLabels)
        if isinstance(labels, AnnotatedLabels):
            sizes = {str(axis): int(size) for axis, size in labels.mesh.shape.items()}
            self.axes, self._order = sizes, tuple(range(labels.mesh.size))
            places = np.unravel_index(np.arange(labels.mesh.size), tuple(sizes.values()))
            self._places = {axis: tuple(map(int, at)) for axis, at in zip(sizes, places, strict=True)}
        elif labels is not None:  # at a place, an axis of one
            self.axes |= {axis: size for axis, size in program.spec.labels.mesh.shape.items() if axis in self.axes}
        source = activity.describe(program).source
        self.name = f"the program at {source}" if source else "the program"

    @property
    def runs(self) -> int:
        return self.program.executions if self.recorded is None else self.recorded.runs

    @property
    def compile_seconds(self) -> float:
        found = self.recorded
        return float(self.program.compile_seconds if found is None else found.trace_seconds + found.lower_seconds + found.compile_seconds)

    @property
    def jaxpr(self) -> Any:
        known = None if self.recorded is None else self.recorded.jaxpr
        return self.traced.jaxpr if known is None else known

    def _trace(self) -> Any:
        return self.program.jitted.trace(*self.program.signature)

    @cached_property
    def compiled(self) -> Any:
        if self.recorded is not None:
            return self.recorded.compile(abstract.QUICK)
        return self.program.compiled

    def names(self) -> dict[str, str]:
        return names_of(self.program, self._owners())

    def _owners(self) -> dict[int, Owner]:
        return owners() if self._known is None else self._known

    def memory(self, hbm_bytes: int, core: str) -> Memory:
        return of_program(self.program, self.compiled, self._owners(), hbm_bytes, core, self.name)


def names_of(program: Any, known: dict[int, Owner]) -> dict[str, str]:
    """Whose the inputs of a program's graph are, by the name of their node. known: owners of storages (`inspect.owners`)."""
    held = (None if ref is None else ref() for ref in program.held_by)
    found = (None if storage is None else known.get(id(storage)) for storage in held)
    return {n.name: owner.name for n, owner in zip(program.graph.nodes, found, strict=False) if owner is not None and n.op == "placeholder"}


class OfGraph(Subject):
    """A graph that is compiled by itself: of a captured module or of tensors that wait."""

    def __init__(self, graph: fx.Graph, name: str, owner: torch.nn.Module | None = None, owned: dict[str, Owner] | None = None):
        super().__init__()
        self.graph, self.name = graph, name
        self._owner, self._owned = owner, owned or {}

    def _trace(self) -> Any:
        return hlo_text.trace(self.graph, self._owner, "recorded")

    def names(self) -> dict[str, str]:
        return {node: owner.name for node, owner in self._owned.items()}

    def memory(self, hbm_bytes: int, core: str) -> Memory:
        return of_graph(self.graph, self.compiled.memory_analysis(), self._owned, hbm_bytes, core, self.name)


def of_module(module: torch.nn.Module, inputs: Sequence[Any]) -> OfGraph:
    """A module captured on example inputs (their shapes and dtypes alone matter), or a graph from `torch_bridge.capture`."""
    captured = hlo_text.captured(module, *inputs)
    signature: Any = captured.signature
    owned = {path: Owner("parameter", path) for path in signature.params} | {path: Owner("buffer", path) for path in signature.buffers}
    by_node = {n.name: owned[p] for n, p in zip((n for n in captured.graph.nodes if n.op == "placeholder"), owned, strict=False)}
    return OfGraph(captured.graph, f"module {type(module).__name__}", captured, by_node)


def of_tensors(tensors: Sequence[torch.Tensor]) -> OfGraph:
    """What is recorded and has not run yet for these xla tensors. Nothing is run."""
    return OfGraph(hlo_text.pending_graph(tensors), "what is recorded")
