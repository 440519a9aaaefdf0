"""The HLO of modules, of graphs that ran and of tensors that wait, as text with module paths and source lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from torch_bridge import _compat
from torch_bridge.compiler import interpret, xla_options
from torch_bridge.compiler.manual_blocks import Blocks
from torch_bridge.ir import dtypes
from torch_bridge.ir.graph import GraphBuilder, number
from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.ir.segment import LOCK
from torch_bridge.ir.view_entries import read_entries
from torch_bridge.mesh import sharding, spmd
from torch_bridge.mesh.spmd_mode import MODE
from torch_bridge.passes import varying_axes
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import backend, session, transfer

if TYPE_CHECKING:
    from torch_bridge.ir.segment import Storage

backend.ensure()

STAGES = ("stablehlo", "optimized")


def hlo(target: object = None, *example_inputs: Any, stage: str = "stablehlo") -> str:
    """HLO text, with module paths and `file:line` in its metadata.

    target: an `nn.Module` (captured on `example_inputs`, whose shapes and dtypes alone matter) or a graph from `torch_bridge.capture`; an
    xla tensor or a nest of them: the pending graph that computes them, which is not run; None: the graphs that ran last, oldest first.
    stage: "stablehlo" (what is given to the compiler) or "optimized" (what the compiler made of it for this machine; takes a compilation).
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(map(repr, STAGES))}, got {stage!r}")
    if target is None:
        return _of_recent(stage)
    if isinstance(target, torch.nn.Module):
        return _render(lower_module(target, *example_inputs), stage)
    tensors = tree_leaves(target)
    if not tensors or not all(isinstance(t, XLATensor) for t in tensors):
        raise TypeError(f"hlo takes an nn.Module, xla tensors or None, got {type(target).__name__}; wrap a function in a module's forward")
    return _render(lower(pending_graph(tensors)), stage)


def lower_module(module: torch.nn.Module, *example_inputs: Any) -> Any:
    """A module, or a captured graph, as a `jax.stages.Lowered`."""
    graph_module = captured(module, *example_inputs)
    return lower(graph_module.graph, graph_module, graph_module._get_name() if graph_module is module else type(module).__name__)


def captured(module: torch.nn.Module, *example_inputs: Any) -> fx.GraphModule:
    """A module as `torch_bridge.capture` gives it; what that gave before stays as it is."""
    from torch_bridge.export.graph_capture import Signature, capture

    if isinstance(module, fx.GraphModule) and isinstance(getattr(module, "signature", None), Signature):
        return module
    return capture(module, *example_inputs)


def pending_graph(tensors: Sequence[torch.Tensor]) -> fx.Graph:
    """The recorded graph that computes these xla tensors. Nothing is run and the recording is left as it is."""
    with LOCK:
        segment = dispatch.STATE.session.current
        nodes = list(segment.nodes)
        sources = list(segment.sources if segment.predicted is None else segment.predicted.sources[: len(nodes)])
        leaves = list(segment.leaves)
        next_vid = segment.next_vid
        outs = []
        for t in tensors:
            assert isinstance(t, XLATensor)
            storage = t._storage
            if storage.segment is segment:
                vid = storage.vid
            else:
                leaves.append(_aval(storage))
                vid = -len(leaves)
            for entry in read_entries(storage.layout, t._layout) if t._layout is not storage.layout else ():
                nodes.append((entry, vid))
                sources.extend([sources[-1]] * (len(nodes) - len(sources)) if sources else [])
                vid, next_vid = next_vid, next_vid + 1
            outs.append(vid)
        builder = GraphBuilder(nodes, sources, outs)
        sizes = {id(t._storage.held): t._storage.layout.size for t in tensors if isinstance(t, XLATensor)}
        avals = {v: _local(leaves[-v - 1], segment, sizes) for v in builder.inputs}
        graph = builder.build({v: contiguous_meta(a.shape, dtypes.to_torch(a.dtype)) for v, a in avals.items()})
        for v, placeholder in zip(builder.inputs, graph.nodes, strict=False):
            found = getattr(leaves[-v - 1], "sharding", None)
            placeholder.meta["spec"] = getattr(found, "spec", sharding.REPLICATED)
            placeholder.meta["lies"] = spmd.lies(leaves[-v - 1]) if spmd.active() else None
        return graph


def _local(leaf: Any, segment: Any, sizes: dict[int, tuple[int, ...]]) -> Any:
    """What a rank sees of a leaf."""
    if not sharding.active() or not hasattr(leaf, "sharding") or leaf.sharding is None:
        return leaf
    shape = () if id(leaf) in segment.scalars else sizes.get(id(leaf)) or leaf.sharding.shard_shape(leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _aval(storage: Storage) -> Any:
    if storage.held is not None:
        return storage.held
    return jax.ShapeDtypeStruct(storage.layout.size, dtypes.to_jax(storage.layout.dtype))


def lower(graph: fx.Graph, owner: torch.nn.Module | None = None, name: str = "recorded") -> Any:
    """A graph of aten ops as a `jax.stages.Lowered`."""
    with _compat.enable_x64():
        return trace(graph, owner, name).lower()


def trace(graph: fx.Graph, owner: torch.nn.Module | None = None, name: str = "recorded") -> Any:
    """A graph of aten ops as a `jax.stages.Traced`."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    rows = max((n.meta["draw"] for n in graph.nodes if "draw" in n.meta), default=-1) + 1
    draws = jax.ShapeDtypeStruct((rows, 4), np.uint32)

    blocks = Blocks(graph) if MODE.regions else None

    def run(draws: Any, *inputs: Any) -> Any:
        supply = iter(inputs)
        values = [draws if p.target == "draws" else next(supply) for p in placeholders]
        return interpret.run(graph, values, interpret.draws_key_of(draws), transfer.attributes_of(owner), blocks=blocks)

    run.__name__ = name
    inputs = [p for p in placeholders if p.target != "draws"]
    if sharding.active():
        return _trace_on_mesh(graph, run, draws, inputs)
    with _compat.enable_x64():
        avals = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p.meta.get("lies")) for p, a in zip(inputs, map(_input_of, inputs), strict=True)
        ]
        return jax.jit(run).trace(draws, *avals)


def _trace_on_mesh(graph: fx.Graph, run: Any, draws: Any, inputs: list[fx.Node]) -> Any:
    """As programs for several ranks are traced: under `shard_map`, each rank on its own blocks."""
    specs = [p.meta.get("spec", sharding.REPLICATED) for p in inputs]
    every = dict(zip(inputs, specs, strict=True))
    varying_axes.spread(graph, [sharding.axes_of(every.get(n, sharding.REPLICATED)) for n in graph.nodes if n.op == "placeholder"])
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    results = [n for n in tree_leaves(output.args[0]) if isinstance(n, fx.Node)]
    local = [_input_of(p) for p in inputs]

    def blocks(draws: Any, *given: Any) -> Any:
        found = tree_leaves(run(draws, *[x.reshape(a.shape) for x, a in zip(given, local, strict=True)]))
        return tuple(x.reshape(1) if not x.ndim and n.meta["axes"] else x for x, n in zip(found, results, strict=True))

    outputs = tuple(sharding.spec_for(n.meta["axes"]) for n in results)
    mapped = jax.shard_map(blocks, mesh=sharding.mesh(), in_specs=(sharding.REPLICATED, *specs), out_specs=outputs, check_vma=False)
    avals = [
        jax.ShapeDtypeStruct(sharding.global_shape(a.shape, spec), a.dtype, sharding=sharding.sharding(spec))
        for a, spec in zip(local, specs, strict=True)
    ]
    blocks.__name__ = run.__name__
    with _compat.enable_x64():
        return jax.jit(mapped).trace(
            jax.ShapeDtypeStruct(draws.shape, draws.dtype, sharding=sharding.sharding(sharding.REPLICATED)), *avals
        )


def _input_of(placeholder: fx.Node) -> Any:
    meta = placeholder.meta.get("val")
    if meta is not None:
        return jax.ShapeDtypeStruct(tuple(meta.shape), dtypes.to_jax(meta.dtype))
    indices: list[Any] = [user.args[1] for user in placeholder.users if user.target is number]
    dtype = np.float64 if placeholder.target == "floats" else np.int64
    return jax.ShapeDtypeStruct((max(indices, default=-1) + 1,), dtype)


def _render(lowered: Any, stage: str) -> str:
    if stage == "stablehlo":
        return lowered.as_text(debug_info=True)
    with _compat.enable_x64():
        return lowered.compile(compiler_options=xla_options.without_graph()).as_text()


def _of_recent(stage: str) -> str:
    programs = list(dict.fromkeys(session.current().recent))
    if not programs:
        raise ValueError(
            "no graph has run yet in this process: call torch_xla.sync() after some work on xla tensors, or pass a module or tensors to "
            "torch_bridge.hlo"
        )
    texts = []
    for i, program in enumerate(programs, 1):
        head = f"// graph {i} of {len(programs)}: {len(program.graph.nodes)} nodes, run {program.executions} times\n"
        texts.append(head + (program.lowered().as_text(debug_info=True) if stage == "stablehlo" else program.compiled.as_text()))
    return "\n".join(texts)
