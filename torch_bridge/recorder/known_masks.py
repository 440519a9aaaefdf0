"""Ops whose results have as many elements as values say (`x[mask]`, `mask.nonzero()`), where the host can tell these values: they do not cut the graph.

A mask often comes from a batch (`labels >= 0`), or of sizes alone (`~torch.eye(n)`), while what it picks from is a result of the model. Then its indices are
made on the host, and what they pick is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_bridge import metrics
from torch_bridge.recorder import captured_values, host_values
from torch_bridge.recorder.copies import upload
from torch_bridge.recorder.downloads import download
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.recorder.varying import differs
from torch_bridge.runtime.session import STATE

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def recorded(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> XLATensor | None:
    """What an op gives, without a cut; None if the values that say its size take the device to know them, or the graph would not be cut."""
    rule = _RULES.get(func)
    segment = STATE.session.current
    if rule is None or not (segment.capture or segment.nodes):
        return None
    segment.asked()
    out = rule(*args)
    if out is not None:
        metrics.count(f"host::{func._schema.name.removeprefix('aten::')}")
    return out


def _index(x: Any, indices: Sequence[Any]) -> XLATensor | None:
    found = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        mask = _known(index)
        if mask is None:
            return None
        found += [upload(picked.contiguous()) for picked in mask.nonzero(as_tuple=True)]
    out: XLATensor = aten.index.Tensor(x, found)
    return out


def _masked_select(x: Any, mask: Any) -> XLATensor | None:
    known = _known(mask) if mask.dtype == torch.bool else None  # torch refuses others, uint8 too
    if known is None:
        return None
    size = torch.broadcast_shapes(x.shape, known.shape)
    picked = known.expand(size).flatten().nonzero().flatten()
    out: XLATensor = aten.index.Tensor(x.expand(size).reshape(-1), [upload(picked)])
    return out


def _on_values(op: Callable[..., torch.Tensor], x: Any, *args: Any) -> XLATensor | None:
    known = _known(x)
    return None if known is None else upload(op(known, *args).contiguous())


_RULES: dict[Any, Callable[..., XLATensor | None]] = {
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten.nonzero.default: functools.partial(_on_values, aten.nonzero.default),
}


def _known(mask: Any) -> torch.Tensor | None:
    """A mask's values, if nothing needs to run for them and all ranks have the same."""
    if STATE.session.current.capture and not captured_values.known(mask):
        return None
    if not isinstance(mask, XLATensor):
        return mask  # on the CPU
    if mask._storage.pending:
        found = host_values.known_untold(STATE.session.current, mask._storage, mask._layout)
        return None if found is None else found.reshape(mask.shape)
    return None if differs(mask) else download(mask)
