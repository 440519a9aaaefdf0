"""CPU tensors that a module meets which is captured: its own parameters and buffers by whatever way they come, and constants of the graph.

A constant has the values that it has when it meets a tensor of the graph; they are told apart by their bytes, as torch does not count all writes to a tensor
(numpy's, and those in inference mode).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from torch_bridge.recorder.copies import upload
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.recorder.tensor import XLATensor

_Bytes = tuple[object, ...]


class _Own(NamedTuple):
    """A parameter or buffer. at: where its elements lie in its memory, from the first to behind the last."""

    name: str
    tensor: torch.Tensor
    stand_in: XLATensor
    at: range


class _Met(NamedTuple):
    """A constant. first: its bytes when it was met first."""

    tensor: torch.Tensor
    first: _Bytes


class CpuConstants:
    """What the CPU tensors are in the graph of a module. named: its parameters and buffers; stand_ins: what they are in the graph; inputs: of the forward.

    everywhere: the script has the module and the inputs on the CPU, so that `.cpu()` in the forward moves nothing.
    """

    def __init__(
        self, module: torch.nn.Module, named: Mapping[str, torch.Tensor], stand_ins: Mapping[str, XLATensor], inputs: Iterable[torch.Tensor]
    ):
        self.everywhere = not any(map(_is_on_xla, (*named.values(), *inputs)))
        own = [_Own(name, t, stand_ins[name], _place(t)) for name, t in named.items() if _has_bytes(t)]
        self._own = {id(o.tensor): o for o in own}
        self._in_memory: dict[int, list[_Own]] = {}
        for o in own:
            if len(o.at):
                self._in_memory.setdefault(o.tensor.untyped_storage().data_ptr(), []).append(o)
        self._before = {o.name: _version(o.tensor) for o in own}
        self._attributes = {
            id(x): (f"{path}.{name}".lstrip("."), x, _bytes(x))
            for path, m in module.named_modules()
            for name, x in vars(m).items()
            if isinstance(x, torch.Tensor) and _has_bytes(x)
        }
        self._uploaded: dict[_Bytes, XLATensor] = {}
        self._met: dict[int, _Met] = {}

    def of(self, t: torch.Tensor) -> XLATensor:
        """What a CPU tensor is in the graph: the module's own one, or a part of it, or a constant."""
        own = self.own(t)
        if own is not None:
            return own
        if not _has_bytes(t):
            return upload(t)  # which says what it cannot take
        content = _bytes(t)
        self._met.setdefault(id(t), _Met(t, content))
        found = self._uploaded.get(content)
        if found is None:
            found = self._uploaded[content] = upload(t)
        return found

    def own(self, t: torch.Tensor) -> XLATensor | None:
        """The module's own tensor, or the part of it that `t` is a view of; None for any other. Raises ValueError for a view that cannot be told."""
        exact = self._own.get(id(t))
        if exact is not None:
            return exact.stand_in
        if not self._in_memory or not _has_bytes(t) or not t.numel():
            return None
        at = _place(t)
        for o in self._in_memory.get(t.untyped_storage().data_ptr(), ()):
            if at.stop > o.at.start and o.at.stop > at.start and isinstance(t, RankTensor) == isinstance(o.tensor, RankTensor):
                return _part(o, t, at)
        return None

    def target(self, t: torch.Tensor) -> XLATensor:
        """What the forward writes to. Raises RuntimeError unless it is the module's own."""
        own = self.own(t)
        if own is None:
            raise _writes(t)
        for o in self._own.values():
            if o.stand_in._storage is own._storage and _unchanged(o.tensor, self._before[o.name]):
                self._before[o.name] = _bytes(o.tensor)  # torch counts the write that becomes one of the graph
        return own

    def check(self) -> None:
        """Raises ValueError for CPU tensors that the forward has written to, and that it would not write to again in the graph."""
        for own in self._own.values():
            if not _unchanged(own.tensor, self._before[own.name]):
                raise ValueError(
                    f"the forward writes to {own.name}, by another way than the module's name for it: the graph would not do it again"
                )
        for met in self._met.values():
            attribute = self._attributes.get(id(met.tensor))
            if attribute is not None and not attribute[2] == met.first == _bytes(met.tensor):
                raise ValueError(
                    f"the forward writes to {attribute[0]}, which is no buffer: register it as one: the graph would not do it again"
                )
            if sys.getrefcount(met.tensor) > _FREE and _bytes(met.tensor) != met.first:
                raise ValueError(
                    f"the forward writes to a CPU tensor of shape {list(met.tensor.shape)} after it took it: register it as a buffer of the module"
                )
        if any(x._storage.writes for x in self._uploaded.values()):
            raise _writes(next(x for x in self._uploaded.values() if x._storage.writes))


def _part(own: _Own, t: torch.Tensor, at: range) -> XLATensor:
    """What a tensor that shares memory with a parameter or buffer is of it."""
    whole, start = own.tensor, own.tensor.storage_offset()
    if t.dtype == whole.dtype and (t.shape, t.stride(), t.storage_offset()) == (whole.shape, whole.stride(), start):
        return own.stand_in
    if t.dtype == whole.dtype and whole.is_contiguous() and own.at.start <= at.start and at.stop <= own.at.stop:
        return own.stand_in.as_strided(t.shape, t.stride(), int(t.storage_offset() - start))  # type: ignore[return-value]
    raise ValueError(
        f"the forward takes a CPU tensor of shape {list(t.shape)} that shares memory with {own.name} and is no plain view of it: make it from {own.name} "
        "in the forward"
    )


_FREE = 2
"""References to a tensor that nobody has any more but `_Met`: its own, and that of the call that counts."""


def _writes(t: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"the forward writes values of the graph to a CPU tensor of shape {list(t.shape)} that is no buffer of the module: make it where the inputs are "
        "(torch.zeros(..., device=x.device)), or register it as a buffer"
    )


def _is_on_xla(t: torch.Tensor) -> bool:
    """Whether the script knows a tensor as one on xla."""
    return isinstance(t, XLATensor) and not (t._storage.facts is not None and t._storage.facts.cpu)


def _has_bytes(t: torch.Tensor) -> bool:
    """Whether it is a plain tensor on the CPU, and no sparse or quantized one."""
    return t.device.type == "cpu" and t.layout == torch.strided and not t.is_quantized


def _place(t: torch.Tensor) -> range:
    """The elements of its memory between which a tensor lies."""
    start = int(t.storage_offset())
    return range(start, start + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) if t.numel() else range(0)


def _version(t: torch.Tensor) -> object:
    """Something else after a write: a number, or the bytes."""
    return _bytes(t) if t.is_inference() else t._version


def _unchanged(t: torch.Tensor, before: object) -> bool:
    return before == (_bytes(t) if isinstance(before, tuple) else t._version)


def _bytes(t: torch.Tensor) -> _Bytes:
    """What tells constants apart."""
    if isinstance(t, RankTensor):
        return ("of ranks", t.axes, *(_bytes(p) for p in t.parts))
    with torch.no_grad():
        plain = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().resolve_neg().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
    return t.dtype, tuple(t.shape), t.stride(), hashlib.blake2b(content, digest_size=16).digest()
