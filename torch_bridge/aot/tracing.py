"""A module's forward as a graph for all ranks of the world, with what it keeps from call to call told apart from its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_bridge.aot import facts, forwards
from torch_bridge.aot.facts import Initial
from torch_bridge.export import graph_capture
from torch_bridge.ir.layout import Layout, layout
from torch_bridge.mesh import sharding, world
from torch_bridge.passes import varying_axes
from torch_bridge.recorder import sharded, uploads
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.replay.side_effects import shares_memory
from torch_bridge.runtime import executor


@dataclasses.dataclass(frozen=True)
class Traced:
    """A graph and its facts. leaves: the kind ("weights", "states", "inputs") and index of each placeholder; results: for each of the graph's results,
    ("results", i), ("states", i) or ("checks", i). initial: values that states start with where these are not zeros, and weights that no checkpoint holds."""

    graph: fx.GraphModule
    facts: facts.Facts
    leaves: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]
    initial: dict[str, Initial]


Describe = Callable[[torch.Tensor], tuple[bool, tuple[facts.Cut, ...]]]
"""Whether ranks hold different values of a parameter or buffer of the module that is traced, and how they share it out if that is known."""


def of_no_cuts(tensor: torch.Tensor) -> tuple[bool, tuple[facts.Cut, ...]]:
    """A `Describe`: nothing is shared out."""
    return False, ()


def trace(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    aliases: Mapping[int, str] | None = None,
    describe: Describe = of_no_cuts,
) -> Traced:
    """Capture `module(*args, **kwargs)`.

    args, kwargs: example tensors (or nests of them), of which shapes and dtypes count. names: of the tensors in them, in order. aliases: which of the
    tensors in the result are new values of parameters or buffers, by index; they are not returned. Parameters and buffers that the forward updates in
    place or assigns anew are states in any case. describe: of a parameter or buffer.
    """
    graph = forwards.capture(module, *args, **kwargs)
    signature: Any = graph.signature
    if signature.left_out:
        raise facts.no_structure(signature.left_out[0])
    own = {**dict(module.named_parameters()), **dict(module.named_buffers()), **signature.captured}
    held = {name: _held(name, own[name], describe, name in signature.params) for name in (*signature.params, *signature.buffers)}
    aliases = _checked(signature, aliases or {})
    updated = [*aliases.values(), *(n for n in signature.mutated if n not in aliases.values())]
    states = [n for n in held if n in set(updated)]
    _check_memory(own, states)
    weights = [n for n in held if n not in set(updated)]
    given = [n for n in graph.graph.nodes if n.op == "placeholder" and n.target not in ("draws",)]
    inputs = [
        facts.Tensor(name, tuple(n.meta["val"].shape), n.meta["val"].dtype) for name, n in zip(names, given[len(held) :], strict=True)
    ]
    leaves = [("states", states.index(n)) if n in states else ("weights", weights.index(n)) for n in held]
    leaves += [("inputs", i) for i in range(len(inputs))]
    values = _result_nodes(graph)
    kept = [i for i in range(signature.n_outs) if i not in aliases]
    results: list[tuple[str, int]] = []
    for i in range(signature.n_outs):
        results.append(("states", states.index(aliases[i])) if i in aliases else ("results", kept.index(i)))
    results += [("states", states.index(n)) for n in signature.mutated]
    results += [("checks", i) for i in range(len(signature.checks))]
    for i, name in aliases.items():
        _fits(name, held[name], values[i])
    found = facts.Facts(
        _ranks(),
        tuple(inputs),
        tuple(held[n] for n in weights),
        tuple(dataclasses.replace(held[n], shared=False) for n in states),
        tuple(facts.Tensor(str(k), tuple(values[i].meta["val"].shape), values[i].meta["val"].dtype) for k, i in enumerate(kept)),
        _outs(signature, kept),
        max((n.meta["draw"] for n in graph.graph.nodes if "draw" in n.meta), default=-1) + 1,
        tuple(_check(check) for check in signature.checks),
    )
    _spread(graph, found, leaves)
    return Traced(graph, found, tuple(leaves), tuple(results), _initial(module, own, states))


def _check(check: Any) -> facts.IndexCheck:
    of = check.range
    return facts.IndexCheck(check.op, str(check.source), of.low, of.end, of.ignored, of.of, of.indices.size, of.indices.dtype, of.selected)


def _ranks() -> facts.Ranks:
    now = world.current()
    return facts.Ranks(dict(now.axes), tuple(now.order))


def _checked(signature: Any, aliases: Mapping[int, str]) -> dict[int, str]:
    known = {*signature.params, *signature.buffers}
    for index, name in aliases.items():
        if not 0 <= index < signature.n_outs:
            raise ValueError(f"{name} is said to be updated by result {index}, and the forward returns {signature.n_outs} tensors")
        if name not in known:
            raise ValueError(f"{name} is said to be updated by result {index}, and the module has no such parameter or buffer")
    return dict(aliases)


def _check_memory(own: Mapping[str, torch.Tensor], states: Sequence[str]) -> None:
    """Raises ValueError for a state that has elements in common with another parameter or buffer, which would not see what is written there."""
    for state in states:
        key, place = _memory(own[state])
        for name, t in own.items():
            if name != state and t.device.type != "meta" and _memory(t)[0] == key and shares_memory([place, _memory(t)[1]]):
                raise ValueError(
                    f"the forward updates {state}, which shares memory with {name}, and a traced model keeps each for itself: register one of them, and take "
                    "the other from it in forward"
                )


def _memory(t: torch.Tensor) -> tuple[int, Layout]:
    """A tensor's storage, and how it lies there."""
    if isinstance(t, XLATensor):
        return id(t._storage), t._layout
    return t.untyped_storage().data_ptr(), layout(tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype)


def _fits(name: str, state: facts.Held, value: fx.Node) -> None:
    new = value.meta["val"]
    if tuple(new.shape) != state.shape or new.dtype != state.dtype:
        raise ValueError(
            f"{state} is to be updated by a result that is {str(new.dtype).removeprefix('torch.')} {list(new.shape)}: a state keeps its shape and dtype"
        )


def _held(name: str, t: torch.Tensor, describe: Describe, is_parameter: bool) -> facts.Held:
    """A buffer counts as each rank's own: another program may update it, which is for `Model.add` to see."""
    differs, cuts = describe(t)
    shared = is_parameter and (world.size() == 1 or not (differs or cuts or _differs(t)))
    return facts.Held(name, tuple(t.shape), t.dtype, shared, cuts)


def _differs(t: torch.Tensor) -> bool:
    """Whether ranks may have different values of a tensor."""
    if isinstance(t, XLATensor):
        if not sharding.active():
            return False
        executor.materialize(t._storage)
        array = t._storage.held
        return array is not None and bool(sharding.axes_of(array.sharding.spec))
    return isinstance(t, RankTensor) or (uploads.remembers(t) and uploads.remembered(t) is not None)


def _result_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    return list(output.args[0])


def _outs(signature: Any, kept: Sequence[int]) -> facts.Tree:
    """The structure of the result, with what is no tensor of its own left out."""

    class Leaf:
        def __init__(self, place: Any):
            self.place = place

    from torch.utils._pytree import tree_unflatten

    structure = tree_unflatten([Leaf(o) if isinstance(o, graph_capture.Place) else o for o in signature.outs], signature.outs_spec)
    dropped = object()

    def without(x: Any) -> Any:
        if isinstance(x, Leaf):
            return x if int(x.place) in kept else dropped
        if isinstance(x, dict):
            return {k: y for k, v in x.items() if (y := without(v)) is not dropped}
        if isinstance(x, (tuple, list)):
            parts = [y for v in x if (y := without(v)) is not dropped]
            return tuple(parts) if isinstance(x, tuple) else parts
        return x

    found = without(structure)
    return facts.tree_of(None if found is dropped else found, lambda x: kept.index(int(x.place)) if isinstance(x, Leaf) else None)


def _spread(graph: fx.GraphModule, found: facts.Facts, leaves: Sequence[tuple[str, int]]) -> None:
    """Say on every node which mesh axes it may differ over: inputs, states and weights that ranks do not share differ over all."""
    every = frozenset(a for a, n in found.ranks.axes.items() if n > 1)
    axes = [sharding.NONE if kind == "weights" and found.weights[i].shared else every for kind, i in leaves]
    varying_axes.spread(graph.graph, axes)


def _initial(module: torch.nn.Module, own: Mapping[str, torch.Tensor], states: Sequence[str]) -> dict[str, Initial]:
    saved = set(module.state_dict(keep_vars=True))
    found: dict[str, Initial] = {}
    for name, t in own.items():
        if t.device.type == "meta" or (name in saved and name not in states):
            continue
        parts = sharded.of_each(t.detach()) if _differs(t) else None
        if parts is not None:
            if name in states and any(map(_any, parts)):
                raise ValueError(
                    f"{name} is updated by the forward and begins with values that differ by rank: a state begins with zeros, or with values that all have"
                )
            if name not in states:
                found[name] = dict(zip(world.current().hosted, parts, strict=True))
            continue
        value = t.detach().cpu().clone()
        if name not in states or _any(value):
            found[name] = value
    return found


def _any(value: torch.Tensor) -> bool:
    """Whether there is anything but zeros."""
    return bool((value if value.is_complex() else value.to(torch.float32)).ne(0).any())
