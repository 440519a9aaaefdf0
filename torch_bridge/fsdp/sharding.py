"""Taking a module's parameters out, and putting placeholders in: what the wrapper does to the module that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torch_bridge.fsdp import naming
from torch_bridge.fsdp.shard_layout import ShardLayout
from torch_bridge.fsdp.shards import Piece, Place, Shared
from torch_bridge.mesh.groups import Groups
from torch_bridge.optimizers import param_partition

_TAKEN = "_taken_by_fsdp"
"""What a parameter that was shared out remembers: which module did it."""


def check_wrappable(module: nn.Module, wrapper: type) -> None:
    """Raises RuntimeError for a module that is wrapped already, or has no forward."""
    if isinstance(module, wrapper):
        raise RuntimeError(
            "this module is wrapped already: for nested wrappers, wrap modules inside first, and then the module around them"
        )
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise RuntimeError(
            f"{type(module).__name__} has no forward of its own, and a wrapper gathers parameters when its module is called: wrap the modules in it (those of "
            "an nn.ModuleList, one by one), or the module around it"
        )


def materialize(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    """Give parameters and buffers on the meta device memory and values: by `init(module)`, or by each module's `reset_parameters()`.

    Raises ValueError where a module has none, or parameters are on the meta device still.
    """
    if not any(t.is_meta for t in _tensors(module)):
        return
    if init is not None:
        init(module)
    else:
        for name, m in module.named_modules():
            if any(t.is_meta for t in (*m._parameters.values(), *m._buffers.values()) if t is not None):
                if not callable(getattr(m, "reset_parameters", None)):
                    raise ValueError(
                        f"{name or 'the module'} ({type(m).__name__}) has parameters on the meta device and no reset_parameters(): pass param_init_fn=, a "
                        "function that gives the module's parameters values"
                    )
                m.to_empty(device="cpu", recurse=False)
                m.reset_parameters()
    left = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta and not hasattr(t, _TAKEN)]
    if left:
        raise ValueError(f"param_init_fn left parameters on the meta device: {', '.join(left)}")


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def share_out(module: nn.Module, among: Groups, multiple: int, rows: bool, flatten: bool) -> list[Shared]:
    """Cut the module's parameters among ranks, but for those of wrappers inside, and take them out of it.

    multiple: of how many entries a shard is; rows: cut along dim 0; flatten: all parameters as one vector, those that need no gradients as another.

    Raises TypeError for parameters that are not float32, ValueError for one that is shared with a module in another wrapper.
    """
    found = list(_found(module))
    _check(found)
    if not flatten:
        return [_shared(p, [_piece(p, names)], naming.original(names[0][0]), among, multiple, rows) for p, names in found]
    shared: list[Shared] = []
    for chosen in ([f for f in found if f[0].requires_grad], [f for f in found if not f[0].requires_grad]):
        if chosen:
            pieces = [_piece(p, names) for p, names in chosen]
            with torch.no_grad():
                flat = torch.cat([p.detach().to("xla").reshape(-1) for p, _ in chosen]).requires_grad_(chosen[0][0].requires_grad)
            shared.append(_shared(flat, pieces, naming.flat(len(shared)), among, multiple, False))
    return shared


Names = list[tuple[str, Place]]


def _found(module: nn.Module) -> Iterator[tuple[nn.Parameter, Names]]:
    """Each parameter once, with all its places and their paths."""
    names: dict[int, tuple[nn.Parameter, Names]] = {}
    for path, m in module.named_modules():
        for name, p in m._parameters.items():
            if p is not None and not hasattr(p, "_is_sharded"):
                names.setdefault(id(p), (p, []))[1].append((naming.joined(path, name), Place(m, name)))
    yield from names.values()


def _check(found: Sequence[tuple[nn.Parameter, Names]]) -> None:
    for p, names in found:
        if hasattr(p, _TAKEN):
            raise ValueError(
                f"{names[0][0]} is tied to {getattr(p, _TAKEN)} of a module that is wrapped already, which has shared it out: wrap both modules in one wrapper "
                "(leave the inner one out, or exclude its class in auto_wrap_policy)"
            )
    others = [f"{names[0][0]} ({p.dtype})" for p, names in found if p.dtype != torch.float32]
    if others:
        raise TypeError(
            f"only fp32 parameters are supported, these are not: {', '.join(others)}. Convert the module before (module.float()), and compute in another dtype "
            "with compute_dtype=torch.bfloat16"
        )


def _piece(p: nn.Parameter, names: Names) -> Piece:
    (first, _), *others = names
    stand_in = torch.empty(p.size(), dtype=p.dtype, device="meta")
    return Piece(first, tuple(path for path, _ in others), p.size(), tuple(place for _, place in names), stand_in)


def _shared(p: torch.Tensor, pieces: Sequence[Piece], original: str, among: Groups, multiple: int, rows: bool) -> Shared:
    layout = ShardLayout(p.size(), among, multiple, rows)
    found = Shared(p.detach().to("xla"), layout, pieces, original, p.requires_grad)
    param_partition.mark(found.shard, layout.divided())
    for piece in pieces:
        _take_out(piece)
    return found


def _take_out(piece: Piece) -> None:
    """A placeholder without memory takes the parameter's place: it has its shape and dtype, and no values."""
    for place in piece.places:
        p = place.module._parameters.pop(place.name)
        setattr(p, _TAKEN, piece.path)
        setattr(place.module, place.name, piece.stand_in)


def convert_buffers(module: nn.Module, dtype: torch.dtype, wrapper: type) -> dict[str, torch.dtype]:
    """Move buffers to xla, those of floats as `dtype`, but for those of wrappers inside. Returns the dtypes that were changed, by the buffers' names."""
    before: dict[str, torch.dtype] = {}
    inside = {id(m) for w in module.modules() if isinstance(w, wrapper) for m in w.modules()}
    for path, m in module.named_modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and id(m) not in inside:
                changed = buffer.is_floating_point() and buffer.dtype != dtype
                if changed:
                    before[naming.joined(path, name)] = buffer.dtype
                m._buffers[name] = buffer.to("xla", dtype if changed else buffer.dtype)
    return before
