"""An `nn.Module` as a graph: run it once on tensors without values, and keep what it recorded.

The same recorder that runs scripts captures modules, so module paths, source lines, views and in-place updates come out alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torch_bridge.collectives import index_checks
from torch_bridge.config import capturing
from torch_bridge.export import known_values, stand_ins
from torch_bridge.export.cpu_constants import CpuConstants
from torch_bridge.ir.layout import layout
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.mesh import sharding
from torch_bridge.recorder.subgraph import AbstractLeaf, Place, abstract, build, constants, recording, result_ids
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import backend
from torch_bridge.runtime.session import STATE

backend.ensure()


@dataclass
class Signature:
    """What a captured graph's placeholders and results are.

    Placeholders: the parameters, then the buffers, then the tensors among the inputs. Results: the module's tensors, then the new
    values of what is `mutated`: buffers, and parameters that the forward itself updates. `inputs_spec`/`inputs` and `outs_spec`/`outs` rebuild the
    module's own argument and result structure (an int stands for that tensor, anything else for itself).
    """

    params: list[str]
    buffers: list[str]
    inputs: list[Any]
    inputs_spec: TreeSpec | None
    outs: list[Any]
    outs_spec: TreeSpec
    mutated: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Types of what the module returns that is neither a tensor nor a constant, and None here."""
    checks: list[index_checks.Check] = field(default_factory=list)
    """Of indices (`with_checks`)."""
    captured: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that differ by rank and that the forward has from elsewhere: buffers by names that the module does not have (`with_checks`)."""

    @property
    def n_outs(self) -> int:
        """How many results are the module's own."""
        return sum(isinstance(o, Place) for o in self.outs)


_CONSTANTS = (bool, int, float, complex, str)
"""What a captured module may return besides tensors (anything else becomes None)."""


def capture(module: torch.nn.Module, *example_inputs: Any, **example_kwargs: Any) -> fx.GraphModule:
    """The graph of `module(*example_inputs, **example_kwargs)` as a `torch.fx.GraphModule` of aten ops.

    Only shapes and dtypes of the example tensors matter: they and the module's weights may live on any device, including `meta`; nothing is computed. CPU
    tensors that the forward takes from elsewhere (attributes that are no buffers) are constants.
    Placeholders are the parameters, the buffers (by name, dots as underscores) and the input tensors; Python numbers are constants. The result is a
    flat tuple: the module's tensors, then the new values of buffers (and parameters) that the forward updates or assigns anew. `graph_module.signature`
    (a `Signature`) tells which is which, and
    `torch_bridge.to_jax(graph_module)` makes it a JAX function. A module that looks at values (`.item()`, `if tensor:`) raises `RuntimeError`.
    """
    return _captured(module, example_inputs, example_kwargs, False, False)


def with_checks(module: torch.nn.Module, *example_inputs: Any, **example_kwargs: Any) -> fx.GraphModule:
    """The same for all ranks of the world. If indices are checked (`NXD_JAX_CHECK_INDICES`), there are more results at the end, which say what is out of
    range: `signature.checks`. Constants that ranks have their own of are placeholders behind the buffers: `signature.captured`."""
    return _captured(module, example_inputs, example_kwargs, index_checks.asked(), True)


def _captured(module: torch.nn.Module, example_inputs: Any, example_kwargs: Any, checked: bool, for_ranks: bool) -> fx.GraphModule:
    _check_code(module)
    with recording() as segment:
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        params = {n: _stand_in(segment, p) for n, p in module.named_parameters()}
        buffers = {n: _stand_in(segment, b) for n, b in module.named_buffers()}
        flat, spec = tree_flatten((example_inputs, example_kwargs))
        inputs: list[Any] = []
        filled: list[Any] = []
        for x in flat:
            if isinstance(x, torch.Tensor):
                inputs.append(Place(sum(isinstance(i, Place) for i in inputs)))
                filled.append(_stand_in(segment, x))
            else:
                inputs.append(x)
                filled.append(x)
        args, kwargs = tree_unflatten(filled, spec)
        held: dict[str, Any] = {**params, **buffers}
        on_cpu = STATE.session.cpu_constants = CpuConstants(module, own, held, [x for x in flat if isinstance(x, torch.Tensor)])
        segment.known = known_values.settle
        read: dict[int, Storage] = {}
        segment.watch = lambda storage, view, vid: read.setdefault(vid, storage)
        before = {n: (t, t._storage.vid) for n, t in held.items()}
        with stand_ins.replaced(module, own, held) as now, capturing.block():
            out = module(*args, **kwargs)
        outs, outs_spec = tree_flatten(out)
        outs = [on_cpu.of(o) if _is_on_cpu(o) else o for o in outs]
        vids, places = result_ids(segment, outs)
        left_out = [_kind(o) for o in places if o is not None and not isinstance(o, _CONSTANTS)]
        places = [o if isinstance(o, _CONSTANTS) else None for o in places]
        now = {n: on_cpu.of(t) if _is_on_cpu(t) and own[n].device.type != "xla" else t for n, t in now.items()}
        updated = {n: _updated(n, t, now[n]) for n, (t, vid) in before.items() if now[n] is not t or t._storage.vid != vid}
        mutated = list(updated)
        vids += [segment.read(t._storage, t._layout) for t in updated.values()]
        checks = index_checks.added(segment) if checked else []
        vids += [check.result.vid for check in checks]
        on_cpu.check()
        differing = _differing(segment, read)
        if differing and not for_ranks:
            raise ValueError(
                "the forward takes a tensor that differs by rank and is no parameter or buffer of the module: a graph holds constants that all ranks have; "
                "register it (module.register_buffer(name, tensor, persistent=False))"
            )
        for i, storage in differing.items():
            segment.leaves[i] = AbstractLeaf(storage.layout)
        names = _placeholder_names(segment, params, buffers, differing)
        graph = build(segment, vids, names)[0]
    signature = Signature(list(params), list(buffers), inputs, spec, places, outs_spec, mutated, left_out, checks)
    if differing:
        _as_buffers(graph, signature, differing, names)
    return _graph_module(graph, segment, signature, type(module).__name__)


def _differing(segment: Segment, read: Mapping[int, Storage]) -> dict[int, Storage]:
    """The constants that ranks have their own of, by the place of the leaf."""
    return {i: read[-i - 1] for i, array in constants(segment).items() if sharding.axes_of(sharding.spec_of(array))}


def _as_buffers(graph: fx.Graph, signature: Signature, differing: Mapping[int, Storage], names: Mapping[int, str]) -> None:
    """Put the placeholders of constants that ranks have their own of behind those of buffers."""
    nodes = {n.target: n for n in graph.nodes if n.op == "placeholder"}
    held = len(signature.params) + len(signature.buffers)
    following = [n for n in graph.nodes if n.op == "placeholder"][held]
    for i, storage in differing.items():
        name = names[-i - 1].removeprefix("b_")
        following.prepend(nodes[names[-i - 1]])
        signature.buffers.append(name)
        signature.captured[name] = make(storage.layout, storage)


def _check_code(module: torch.nn.Module) -> None:
    """Raises ValueError for TorchScript with weights inside: they are not Python's to replace."""
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule) and (any(True for _ in m.parameters()) or any(True for _ in m.buffers())):
            raise ValueError(
                f"{f'{name} in the module' if name else 'the module'} is {m.original_name} in TorchScript, which keeps its weights to itself: give the module "
                "as it was before torch.jit.script or torch.jit.trace"
            )


def _is_on_cpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.layout == torch.strided


def _kind(o: Any) -> str:
    return f"a {o.device.type} tensor (make it on the device of an input)" if isinstance(o, torch.Tensor) else type(o).__name__


def _stand_in(segment: Segment, t: torch.Tensor) -> XLATensor:
    new = abstract(segment, layout(tuple(t.shape), None, 0, t.dtype))
    if isinstance(t, torch.nn.Parameter):
        new.requires_grad_(t.requires_grad)
        new._is_param = True
    return new


def _updated(name: str, before: XLATensor, after: Any) -> XLATensor:
    """The new value of a parameter or buffer, which must be able to stand where the old one was."""
    if not isinstance(after, XLATensor) or after.shape != before.shape or after.dtype != before.dtype:
        found = f"{after.dtype} {list(after.shape)} on {after.device}" if isinstance(after, torch.Tensor) else type(after).__name__
        raise ValueError(
            f"the forward sets {name} to {found}, which was {before.dtype} {list(before.shape)}: what is kept from call to call must stay on the "
            "device, with its shape and dtype"
        )
    return after


def _placeholder_names(
    segment: Segment, params: dict[str, XLATensor], buffers: dict[str, XLATensor], differing: Iterable[int]
) -> dict[int, str]:
    names = {-i - 1: f"input_{i - len(params) - len(buffers)}" for i in range(len(segment.leaves))}
    for kind, tensors, first in (("p", params, 0), ("b", buffers, len(params))):
        for i, n in enumerate(tensors):
            names[-(first + i) - 1] = f"{kind}_{n.replace('.', '_')}"
    for i, leaf in enumerate(segment.leaves):
        if not isinstance(leaf, AbstractLeaf):
            names[-i - 1] = f"constant_{i}"
    free = (name for k in itertools.count() if (name := f"captured_tensor_{k}") not in buffers)
    for i in differing:
        names[-i - 1] = f"b_{next(free)}"
    return names


def _replace_input(user: fx.Node, old: fx.Node, value: Any) -> None:
    """Put a constant where a node used another's result."""

    def swap(n: fx.Node) -> Any:
        return value if n is old else n

    user.args = fx.node.map_arg(user.args, swap)
    user.kwargs = fx.node.map_arg(user.kwargs, swap)


def _graph_module(graph: fx.Graph, segment: Segment, signature: Signature, name: str) -> fx.GraphModule:
    """Wrap a captured graph: closed-over tensors and Python numbers become attributes and constants."""
    from torch_bridge.ir.graph import KINDS, number
    from torch_bridge.runtime.transfer import to_cpu

    owner = torch.nn.Module()
    placeholders = {n.target: n for n in graph.nodes if n.op == "placeholder"}
    for i, array in constants(segment).items():
        node = placeholders[f"constant_{i}"]
        owner.register_buffer(node.target, to_cpu(array))
        with graph.inserting_before(node):
            attribute = graph.get_attr(node.target)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    flat = [v for _, values in segment.numbers for v in values]
    by_kind = {name: [v for v in flat if type(v) is kind] for name, kind in KINDS.items()}
    for node in list(graph.nodes):
        if node.target is number:
            _, index, kind = node.args
            value = by_kind[kind][index]
            for user in list(node.users):
                _replace_input(user, node, value)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target in ("floats", "ints", "draws") and not node.users:
            graph.erase_node(node)
    module = fx.GraphModule(owner, graph, name)
    module.signature = signature  # type: ignore[assignment]
    return module
