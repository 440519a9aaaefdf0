"""The recorded graph as a table: every aten op with its result, its inputs, and the module and line it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from nxd_jax.inspect import units
from nxd_jax.inspect.tables import Column, Table
from torch_bridge.source import NOWHERE, base_name


@dataclass(frozen=True)
class Node:
    """A node of the graph. name: what others call it. op: the aten name, "input" or "output". dtype, shape: of its result on one core ("" and () if it is no
    tensor). inputs: the nodes that it reads. arguments: its other arguments as text. module: dotted path (the class of the outermost module); file, line,
    function: where the user's code called it, or its forward op for one of the backward pass; phase: "forward", "backward" or "outside" modules.
    training: the mode of the module then."""

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...]
    arguments: str
    module: str
    file: str
    line: int
    function: str
    phase: str
    training: bool = True

    @property
    def where(self) -> str:
        """'file.py:12', '' if no line is known."""
        return f"{base_name(self.file)}:{self.line}" if self.file else ""


_COLUMNS = (
    Column("node", "name"),
    Column("op", "op"),
    Column("result", lambda n: f"{n.dtype}[{', '.join(map(str, n.shape))}]" if n.dtype else ""),
    Column("inputs", lambda n: ", ".join(n.inputs), lambda s: s if len(s) < 48 else s[:45] + "..."),
    Column("phase", "phase"),
    Column("module", "module"),
    Column("line", "where"),
)


def table(graph: fx.Graph, owners: dict[str, str] | None = None, most: int | None = 40) -> Table[Node]:
    """The nodes of a graph in order. owners: what to call inputs (a parameter's path), by node."""
    rows = list(_nodes(graph, owners or {}))
    ops = sum(r.op not in ("input", "output", "getitem", "number") for r in rows)
    return Table(
        f"Graph: {ops} ops",
        rows,
        _COLUMNS,
        f"{units.count(len(rows))} nodes; backward ops have the module and line of their forward op",
        most,
    )


def ops(graph: fx.Graph) -> int:
    """How many nodes compute something: a fused optimizer step is one."""
    return sum(n.op == "call_function" and _op(n) not in ("getitem", "number") for n in graph.nodes)


def _nodes(graph: fx.Graph, owners: dict[str, str]) -> Iterator[Node]:
    for n in graph.nodes:
        meta = n.meta.get("val")
        source = n.meta.get("source", NOWHERE)
        tensor = isinstance(meta, torch.Tensor)
        yield Node(
            name=n.name,
            op=_op(n),
            dtype=str(meta.dtype).removeprefix("torch.") if tensor else "",
            shape=tuple(meta.shape) if tensor else (),
            inputs=tuple(i.name for i in n.all_input_nodes),
            arguments=_arguments(n),
            module=source.module or source.module_class if n.op != "placeholder" else owners.get(n.name, ""),
            file=source.file,
            line=source.line,
            function=source.function,
            phase=node_phase(n),
            training=source.training,
        )


def of_another_run(graph: fx.Graph, lines: Iterable[str]) -> bool:
    """Whether source lines in HLO of a graph ('file.py:12', or '') are not all the graph's own: JAX's cache on disk takes programs that differ in nothing else
    for the same."""
    own = {n.meta["source"].where for n in graph.nodes if "source" in n.meta}
    return any(line and line not in own for line in lines)


def node_phase(node: fx.Node) -> str:
    """ "forward", "backward" or "outside" (modules) of an op; "" for inputs and the output."""
    source = node.meta.get("source")
    if node.op != "call_function" or source is None:
        return ""
    if source.backward:
        return "backward"
    return "forward" if source.module or source.module_class else "outside"


def _op(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return {"placeholder": "input"}.get(node.op, node.op)
    target: Any = node.target
    return str(target).removesuffix(".default") if isinstance(target, (str, torch._ops.OpOverload)) else target.__name__


def _arguments(node: fx.Node) -> str:
    """Arguments that are no nodes, by their names in the schema."""
    if node.op != "call_function":
        return ""
    names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []
    given = [*zip([*names, *[""] * len(node.args)], node.args, strict=False), *node.kwargs.items()]
    plain = [(name, a) for name, a in given if not any(isinstance(x, fx.Node) for x in tree_leaves(a))]
    return ", ".join(f"{name}={a}" if name else str(a) for name, a in plain)
