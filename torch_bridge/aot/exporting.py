"""A traced graph as StableHLO that needs neither torch nor the model's code, in up to two forms with the same arguments.

"mesh": one device for each rank. "one": all ranks on one device, as batched dimensions, whose collectives are sums and gathers along them.
Ranks' tensors lie in arrays with the ranks as dim 0, in row-major order over the mesh axes. Weights that all ranks share have no such dim, and neither has
anything of a program for one rank: XLA for CPUs updates a state in place only if it comes out as it went in.

The form "one" of several ranks takes longer than all else of a trace. It is made when a model is saved, or when it runs on one device.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_bridge import _compat
from torch_bridge.aot import facts, products
from torch_bridge.aot.tracing import Traced
from torch_bridge.compiler import interpret
from torch_bridge.ir import dtypes
from torch_bridge.mesh import sharding, world
from torch_bridge.precision import precision_mode
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.runtime import transfer

logger = logging.getLogger("nxd_jax")

PLATFORMS = ("cpu", "cuda", "tpu")
FORMS = ("mesh", "one")


def platform() -> str:
    """What this machine is, as `jax.export` calls it."""
    here = jax.default_backend()
    return "cuda" if here == "gpu" else here


class Forms:
    """The exported forms of a program, serialized; and why one is missing. later: makes the form "one" when it is first asked for (`get`)."""

    def __init__(self, serialized: Mapping[str, bytes], missing: Mapping[str, str], later: Callable[[], bytes] | None = None):
        self.serialized = dict(serialized)
        self.missing = dict(missing)
        self._later = later
        self._lock = threading.Lock()

    def get(self, form: str) -> bytes | None:
        """A form; None if it is `missing`."""
        with self._lock:
            if form == "one" and self._later is not None:
                try:
                    self.serialized["one"] = self._later()
                except (
                    NotImplementedError,
                    AssertionError,
                    ValueError,
                    TypeError,
                ) as error:  # JAX's rules for batched operations are not all there
                    self.missing["one"] = f"a collective cannot run as a batched one: {type(error).__name__}: {error}"
                self._later = None  # and the graph that it holds
        return self.serialized.get(form)

    def made(self) -> Forms:
        """The same, with all forms that can be made."""
        self.get("one")
        return self

    @property
    def for_all_ranks(self) -> bytes:
        """The form with a device for each rank."""
        return self.serialized.get("mesh") or self.serialized["one"]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Forms):
            return NotImplemented
        self.made(), other.made()
        return (self.serialized, self.missing) == (other.serialized, other.missing)

    __hash__ = None  # type: ignore[assignment]


def export_forms(traced: Traced) -> Forms:
    """Lower a traced graph for one device per rank where the world has several, else for one device. Must be called in the world of the trace: the form that
    is made later is made for that world, too."""
    mode = precision_mode.current()
    products.contract(traced.graph.graph)
    if traced.facts.ranks.size == 1:
        return Forms({"one": _exported(_on_one_device(traced, mode), traced.facts, None)}, {"mesh": "the program has one rank"})
    mesh, now = sharding.mesh(), copy.copy(world.current())  # a layout that comes later changes the world itself

    def one() -> bytes:
        with world.taken_for(now):
            return _exported(_on_one_device(traced, mode), traced.facts, None)

    return Forms({"mesh": _exported(_on_mesh(traced, mesh, mode), traced.facts, mesh)}, {}, one)


def _exported(fn: Callable[..., Any], of: facts.Facts, mesh: Mesh | None) -> bytes:
    def lower(platforms: Sequence[str]) -> bytes:
        with _compat.enable_x64():
            return bytes(export.export(jax.jit(fn), platforms=tuple(platforms))(*arguments(of, mesh)).serialize())

    here = platform()
    if here not in PLATFORMS:
        return lower((here,))
    try:
        return lower(PLATFORMS)
    except NotImplementedError as error:  # an op that another platform has no lowering of
        logger.info("the program is exported for %s alone: %s", here, error)
        return lower((here,))


def arguments(of: facts.Facts, mesh: Mesh | None) -> tuple[Any, ...]:
    """Shapes of a form's arguments: draws (none or one array), weights, states, inputs."""

    def stacked(t: facts.Tensor, shared: bool = False) -> Any:
        shape = t.shape if shared or of.ranks.size == 1 else (of.ranks.size, *t.shape)
        place = None if mesh is None else NamedSharding(mesh, PartitionSpec() if shared else ranked(mesh))
        return jax.ShapeDtypeStruct(shape, dtypes.to_jax(t.dtype), sharding=place)

    drawn = jax.ShapeDtypeStruct(
        (of.draws, 4), np.dtype(np.uint32), sharding=None if mesh is None else NamedSharding(mesh, PartitionSpec())
    )
    return (
        [drawn] if of.draws else [],
        [stacked(t, t.shared) for t in of.weights],
        [stacked(t) for t in of.states],
        [stacked(t) for t in of.inputs],
    )


def ranked(mesh: Mesh) -> PartitionSpec:
    """Dim 0 over all mesh axes: a rank's own at each place."""
    return PartitionSpec(tuple(mesh.axis_names))


def _rank_function(traced: Traced, mode: Mode | None = None) -> Callable[..., Any]:
    """What a rank computes: (draws, weights, states, inputs) -> (results and checks of indices, states). mode: the precision, None: the environment's."""
    graph, of = traced.graph.graph, traced.facts
    attribute = transfer.attributes_of(traced.graph)
    places = [n for n in graph.nodes if n.op == "placeholder"]

    def run(draws: Any, weights: Any, states: Any, inputs: Any) -> Any:
        given = {"weights": weights, "states": states, "inputs": inputs}
        supply = iter(traced.leaves)
        values: list[Any] = []
        for place in places:
            if place.target == "draws":
                values.append(None)
            else:
                kind, index = next(supply)
                values.append(given[kind][index])
        key_of = interpret.draws_key_of(draws[0] if of.draws else np.zeros((0, 4), np.uint32))
        found: dict[str, dict[int, Any]] = {"results": {}, "states": {}, "checks": {}}
        for (kind, index), value in zip(traced.results, interpret.run(graph, values, key_of, attribute, mode=mode), strict=True):
            found[kind][index] = value
        results = [found[kind][i] for kind, count in (("results", len(of.results)), ("checks", len(of.checks))) for i in range(count)]
        return results, [found["states"][i] for i in range(len(of.states))]

    return run


def _on_mesh(traced: Traced, mesh: Mesh, mode: Mode | None = None) -> Callable[..., Any]:
    run, of = _rank_function(traced, mode), traced.facts

    def blocks(draws: Any, weights: Any, states: Any, inputs: Any) -> Any:
        own = [w if t.shared else w[0] for w, t in zip(weights, of.weights, strict=True)]
        results, new = run(draws, own, [s[0] for s in states], [x[0] for x in inputs])
        return [r[None] for r in results], [s[None] for s in new]

    one = ranked(mesh)
    specs = ([PartitionSpec()] * bool(of.draws), [PartitionSpec() if t.shared else one for t in of.weights], [one] * len(of.states))
    outs = ([one] * (len(of.results) + len(of.checks)), [one] * len(of.states))
    return jax.shard_map(blocks, mesh=mesh, in_specs=(*specs, [one] * len(of.inputs)), out_specs=outs, check_vma=False)


def _on_one_device(traced: Traced, mode: Mode | None = None) -> Callable[..., Any]:
    run, of = _rank_function(traced, mode), traced.facts
    if of.ranks.size == 1:
        return run
    axes = of.ranks.axes
    batched = (None, [None if t.shared else 0 for t in of.weights], 0, 0)
    for axis in reversed(axes):
        run = jax.vmap(run, in_axes=batched, out_axes=0, axis_name=axis, axis_size=axes[axis])
    grid = tuple(axes.values())

    def together(draws: Any, weights: Any, states: Any, inputs: Any) -> Any:
        def spread(x: Any) -> Any:
            return x.reshape((*grid, *x.shape[1:]))

        own = [w if t.shared else spread(w) for w, t in zip(weights, of.weights, strict=True)]
        results, new = run(draws, own, [spread(s) for s in states], [spread(x) for x in inputs])
        return tuple([y.reshape((of.ranks.size, *y.shape[len(grid) :])) for y in part] for part in (results, new))

    return together
