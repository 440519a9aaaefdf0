"""What a program needs of each core's memory, and whose it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import torch
from jax.sharding import NamedSharding
from torch import fx

from nxd_jax.inspect import units
from nxd_jax.inspect.owners import KINDS, Owner
from nxd_jax.inspect.tables import Column, Table
from torch_bridge.compiler.annotated_labels import AnnotatedLabels
from torch_bridge.lowerings import is_view
from torch_bridge.mesh import sharding
from torch_bridge.source import NOWHERE


@dataclass(frozen=True)
class Held:
    """A tensor that a program takes or gives. name, kind: whose it is (`inspect.owners`). shape, dtype: of what a core holds. axes: mesh axes along which cores
    hold different parts. bytes: on a core. role: "argument", "updated" (an argument whose memory a result
    takes over) or "result" (a new one)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    bytes: int
    role: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one core while a program runs. `peak` is what XLA's plan of the program needs; the rest says what it consists of.

    arguments, results, in_place, temporaries: XLA's plan: what the program takes, gives, gives in the memory of what it takes, and needs besides.
    held: every argument and result, and whose it is. activations: values of the forward pass that the backward pass reads, the most that exist at a time, and
    gradients: of parameters, made and used up within the program: both by the recorded graph, part of `temporaries` (compilers may make some again instead).
    hbm_bytes, core: of the emulated core. program: what was looked at.
    """

    arguments: int
    results: int
    in_place: int
    temporaries: int
    held: tuple[Held, ...]
    activations: int
    gradients: int
    hbm_bytes: int
    core: str
    program: str = ""

    @property
    def peak(self) -> int:
        """Arguments, results that are new, temporaries."""
        return self.arguments + self.results - self.in_place + self.temporaries

    @property
    def fits(self) -> bool:
        """Whether `peak` is within the core's memory."""
        return self.peak <= self.hbm_bytes

    @property
    def verdict(self) -> str:
        """One line: peak, memory, whether it fits."""
        return (
            f"peak {units.size(self.peak)} of {units.size(self.hbm_bytes)} on {self.core} ({units.share(self.peak, self.hbm_bytes)}): "
            f"{'fits' if self.fits else 'does not fit'}"
        )

    def kinds(self) -> dict[str, int]:
        """The peak by kind: those of `held` that are there, "activations", "gradient", and "temporaries" for what is left of them. Adds up to `peak`."""
        found = dict.fromkeys(KINDS, 0)
        for h in self.held:
            found[h.kind] += h.bytes
        known = sum(found.values())
        found["input"] += max(self.peak - self.temporaries - known, 0)  # packed numbers, and what XLA adds to align
        made = min(self.gradients, self.temporaries)
        found["gradient"] += made
        found["activations"] = min(self.activations, self.temporaries - made)
        found["temporaries"] = self.temporaries - made - found["activations"]
        return {kind: n for kind, n in found.items() if n}

    def table(self) -> Table[Part]:
        """`kinds` as a table."""
        rows = [Part(kind, n, n / self.hbm_bytes) for kind, n in self.kinds().items()]
        return Table("Memory of a core", [*rows, Part("peak", self.peak, self.peak / self.hbm_bytes)], _PARTS, self.verdict)

    def tensors(self, most: int | None = 40) -> Table[Held]:
        """Every tensor that the program takes or gives, the largest first."""
        rows = sorted(self.held, key=lambda h: -h.bytes)
        return Table("Tensors on a core", rows, _TENSORS, f"{len(rows)} tensors, {units.size(self.arguments)} of arguments", most)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


@dataclass(frozen=True)
class Part:
    """A kind of memory: bytes on a core, and their share of the core's memory (1.0: all of it)."""

    kind: str
    bytes: int
    share: float


_PARTS = (
    Column("kind", "kind"),
    Column("per core", "bytes", units.size, number=True),
    Column("of the core's memory", "share", lambda s: f"{s:.1%}", number=True),
)
_TENSORS = (
    Column("tensor", lambda h: h.name or "(no name)"),
    Column("kind", "kind"),
    Column("shape on a core", lambda h: "x".join(map(str, h.shape)) or "one number"),
    Column("dtype", "dtype"),
    Column("differs along", lambda h: ", ".join(h.axes) or "-"),
    Column("per core", "bytes", units.size, number=True),
    Column("role", "role"),
)


def of_program(program: Any, compiled: jax.stages.Compiled, owners: dict[int, Owner], hbm_bytes: int, core: str, name: str = "") -> Memory:
    """The memory of a `torch_bridge.compiler.program.Program`. compiled: its `jax.stages.Compiled`. owners: of storages, by id."""
    held, plan = tuple(_held(program, compiled, owners)), compiled.memory_analysis()
    assert plan is not None, "this backend says nothing of memory"
    names = {h.name for h in held if h.kind == "gradient"}
    return Memory(
        arguments=int(plan.argument_size_in_bytes),
        results=int(plan.output_size_in_bytes),
        in_place=int(plan.alias_size_in_bytes),
        temporaries=int(plan.temp_size_in_bytes),
        held=held,
        activations=0 if isinstance(program.spec.labels, AnnotatedLabels) else activations(program.graph),  # the graph has whole tensors
        gradients=_gradients(program, held, names),
        hbm_bytes=hbm_bytes,
        core=core,
        program=name,
    )


def of_graph(graph: fx.Graph, plan: Any, names: dict[str, Owner], hbm_bytes: int, core: str, name: str = "") -> Memory:
    """The memory of a graph that was compiled by itself (a captured module, a pending one). names: whose inputs are, by their node."""
    held = []
    for node in graph.nodes:
        meta = node.meta.get("val")
        if node.op == "placeholder" and isinstance(meta, torch.Tensor):
            owner = names.get(node.name, Owner("input", str(node.target)))
            axes = _axes(node.meta["spec"]) if node.meta.get("spec") is not None else ()
            held.append(_entry(owner, meta, axes, "argument"))
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    results = [n for n in output.all_input_nodes if n.op != "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
    held += [_entry(Owner("result", n.name), n.meta["val"], (), "result") for n in results]
    return Memory(
        arguments=int(plan.argument_size_in_bytes),
        results=int(plan.output_size_in_bytes),
        in_place=int(plan.alias_size_in_bytes),
        temporaries=int(plan.temp_size_in_bytes),
        held=tuple(held),
        activations=activations(graph),
        gradients=0,
        hbm_bytes=hbm_bytes,
        core=core,
        program=name,
    )


def _entry(owner: Owner, meta: Any, axes: tuple[str, ...], role: str) -> Held:
    dtype = str(meta.dtype).removeprefix("torch.")
    shape = tuple(meta.shape)
    return Held(owner.name, owner.kind, shape, dtype, axes, math.prod(shape) * meta.dtype.itemsize, role)


def _held(program: Any, compiled: jax.stages.Compiled, owners: dict[int, Owner]) -> Iterator[Held]:
    spec = program.spec
    ports, labels = spec.ports, spec.labels
    updated = {i for at in ports.donated for i in ports.inputs[at]}
    for i, (aval, ref) in enumerate(zip(spec.avals, program.held_by, strict=True)):
        role = "updated" if i in updated else "argument"
        yield _entry(_owner(ref, owners, "input"), *_on_a_core(aval, None if labels is None else labels.inputs[i]), role)
    taken_over = {k for at in ports.order[: len(ports.donated)] for k in ports.outputs[at]}
    chosen = _chosen_by_xla(program, compiled)
    for k, node in enumerate(spec.outputs):
        if k not in taken_over:
            ref = program.results_held_by[k] if k < len(program.results_held_by) else None
            lies = None if labels is None else labels.outputs[k] or chosen.get(k)
            yield _entry(_owner(ref, owners, "result"), *_on_a_core(node.meta["val"], lies), "result")


class _Block(NamedTuple):
    """What one device holds of an annotated tensor."""

    shape: tuple[int, ...]
    dtype: Any


def _on_a_core(whole: Any, lies: Any) -> tuple[Any, tuple[str, ...]]:
    """Shape and dtype on a core, and the mesh axes along which cores differ. lies: a label of ranks, which see their own shape already, or a sharding."""
    if not isinstance(lies, NamedSharding):
        return whole, () if lies is None else _axes(lies)
    axes = tuple(a for a in lies.mesh.axis_names if a in sharding.axes_of(lies.spec) and lies.mesh.shape[a] > 1)
    return _Block(lies.shard_shape(tuple(whole.shape)), whole.dtype), axes


def _chosen_by_xla(program: Any, compiled: jax.stages.Compiled) -> dict[int, NamedSharding]:
    """Of an annotated program: how results lie for which nobody asked, by result."""
    if not isinstance(program.spec.labels, AnnotatedLabels):
        return {}
    ports = program.spec.ports
    found = jax.tree.leaves(compiled.output_shardings)
    return {k: lies for at, lies in zip(ports.order, found, strict=True) for k in ports.outputs[at] if isinstance(lies, NamedSharding)}


def _axes(spec: Any) -> tuple[str, ...]:
    return sharding.ordered(sharding.axes_of(spec))


def _owner(ref: Any, owners: dict[int, Owner], otherwise: str) -> Owner:
    storage = None if ref is None else ref()
    return Owner(otherwise) if storage is None else owners.get(id(storage), Owner(otherwise))


def _gradients(program: Any, held: tuple[Held, ...], outside: set[str]) -> int:
    """Bytes of the gradients of parameters that no argument or result is: there are some if the program updates parameters in its backward pass's wake."""
    if not any(n.meta.get("source", NOWHERE).backward for n in program.graph.nodes):
        return 0
    wide = {
        h.name for h in held if h.kind == "master weight" and h.dtype == "float32"
    }  # ZeRO-1 adds gradients up in the dtype of its parts
    updated = [h for h in held if h.kind == "parameter" and h.role == "updated" and h.name not in outside]
    return sum(max(h.bytes, 4 * math.prod(h.shape) if h.name in wide else 0) for h in updated)


def activations(graph: fx.Graph) -> int:
    """The most bytes at a time of values that forward ops make and backward ops read. Views of a value count as the value."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.meta.get("source", NOWHERE).backward:
            for value in node.all_input_nodes:
                base = _base(value)
                if base.op == "call_function" and not base.meta.get("source", NOWHERE).backward:
                    last[base] = place[node]
    changes: dict[int, int] = {}
    for base, end in last.items():
        meta = base.meta.get("val")
        if isinstance(meta, torch.Tensor) and end > place[base]:
            size = math.prod(meta.shape) * meta.dtype.itemsize
            changes[place[base]] = changes.get(place[base], 0) + size
            changes[end] = changes.get(end, 0) - size
    now = most = 0
    for at in sorted(changes):
        now += changes[at]
        most = max(most, now)
    return most


def _base(node: fx.Node) -> fx.Node:
    """The value that a chain of views reads."""
    while node.op == "call_function" and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
