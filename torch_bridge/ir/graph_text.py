"""A graph as text."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def graph_text(graph: fx.Graph) -> str:
    """A graph of aten ops, one line each: result with dtype and shape, op, inputs, and where the user's code called it."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(str(n) for n in tree_leaves(node.args[0]))}")
            continue
        meta = node.meta.get("val")
        kind = f": {str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}" if isinstance(meta, torch.Tensor) else ""
        where = f"    # {node.meta['source']}" if "source" in node.meta else ""
        arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
        target = node.target if isinstance(node.target, (str, torch._ops.OpOverload)) else node.target.__name__
        call = "input" if node.op == "placeholder" else f"{target}({', '.join(arguments)})"
        lines.append(f"%{node.name}{kind} = {call}{where}")
    return "\n".join(lines) + "\n"
