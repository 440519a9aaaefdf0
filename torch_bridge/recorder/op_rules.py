"""Ops with a recording rule of their own: copies across devices, values for the host, storage surgery, batch-norm statistics, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jax.sharding import PartitionSpec

from torch_bridge.identity import any_is
from torch_bridge.ir.entry import Entry
from torch_bridge.ir.layout import Layout, base_of_meta, is_dense, layout
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import abstract_arrays, places, rank_numbers, sharding, spmd, world
from torch_bridge.recorder import captured_values, host_storage, host_values, overlaps, placed, storage_uploads
from torch_bridge.recorder.copies import copied, kept
from torch_bridge.recorder.cpu_attention import additive
from torch_bridge.recorder.dispatch import LOCK, STATE, dispatch, record, record_op, resize, special
from torch_bridge.recorder.downloads import download, each_ranks_number
from torch_bridge.recorder.random_checks import check_dropout
from torch_bridge.recorder.shape_inference import infer, to_meta
from torch_bridge.recorder.tensor import READING, XLATensor, fresh, make, point, read
from torch_bridge.runtime.transfer import to_array

aten = torch.ops.aten


# -- copies ---------------------------------------------------------------------------------------


@special(aten.copy_.default)
def copy_(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dst.copy_(src)`: both are on xla, or one of them is. A number comes as itself."""
    dst: Any = args[0]
    src: Any = args[1] if isinstance(args[1], torch.Tensor) else torch.tensor(args[1])
    if not isinstance(dst, XLATensor):
        constants = STATE.session.cpu_constants
        if constants is not None:
            return copy_(func, (constants.target(dst), src), {})
        dst.copy_(copied(src))
    elif isinstance(src, XLATensor):
        _copy_on_device(dst, src)
    else:
        constants = STATE.session.cpu_constants
        own = kept(src) if constants is None else constants.own(src) or kept(src)
        if own is None:
            _copy_from_host(dst, src)
        else:
            _copy_on_device(dst, own)
    return dst


def _copy_on_device(dst: XLATensor, src: XLATensor) -> None:
    """Between xla tensors nothing moves, values are immutable."""
    view = dst._layout
    if src._storage is dst._storage:
        if src is dst or src._layout is view:
            return
        overlaps.check_copy(dst, src)
    if src._layout.dtype != view.dtype:
        src = record_op(aten._to_copy.default, src, dtype=view.dtype)
    if src._layout.size != view.size:
        src = record_op(aten.expand.default, src, view.size)
    vid = read(src)
    STATE.session.current.write_view(dst._storage, view, vid)


def _copy_from_host(dst: XLATensor, src: torch.Tensor) -> None:
    """From a tensor on the CPU that is the same for all ranks: as a new array, which is the storage's value if it fills all of it."""
    if src.device.type == "meta" and not abstract_arrays.active():
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # torch's words: nn.Module.to() adds what to do
    storage, view = dst._storage, dst._layout
    if not view.numel and not linked(storage):  # nothing to move: `torch.tensor([])` in a module is the same in every call
        return
    host = src if src.dtype == view.dtype and tuple(src.shape) == view.size else src.detach()
    if host.dtype != view.dtype:
        host = host.to(view.dtype)
    if tuple(host.shape) != view.size:
        _copy_expanded(dst, host)
        return
    whole = view is storage.layout and not linked(storage)
    array = to_array(host, spec=_own_spec(storage, view.size) if whole else None)
    if whole:
        if spmd.active() and storage.facts is not None:
            array = spmd.adopt(array, storage.facts)
        storage.views, storage.segment, storage.array = None, None, array
        storage.writes += 1
    else:
        part = Storage(layout(view.size, None, 0, view.dtype), array)
        STATE.session.current.write_view(storage, view, STATE.session.current.read(part, part.layout))


def _own_spec(storage: Storage, size: tuple[int, ...]) -> PartitionSpec | None:
    """How ranks hold a tensor that differs by rank, in a process that hosts one rank alone, which gives it values of this size (its file of a checkpoint):
    they go on differing, as programs that are compiled expect. None for any other tensor."""
    now = world.current()
    if len(now.hosted) != 1 or now.size == 1 or abstract_arrays.active():
        return None
    spec = sharding.label(storage.held)
    return spec if spec is not None and sharding.axes_of(spec) and sharding.global_shape(size, spec) == storage.held.shape else None


def _copy_expanded(dst: XLATensor, host: torch.Tensor) -> None:
    """Write a CPU tensor into a larger one: only its own elements are moved, the device repeats them."""
    host.expand(dst._layout.size)  # raises torch's own error
    small = Storage(layout(tuple(host.shape), None, 0, host.dtype), to_array(host))
    wide = record_op(aten.expand.default, make(small.layout, small), dst._layout.size)
    STATE.session.current.write_view(dst._storage, dst._layout, read(wide))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`copy_` for each pair of xla tensors, past torch's dispatcher."""
    with LOCK:
        for dst, src in zip(targets, sources, strict=True):
            copy_(aten.copy_.default, (dst, src), {})
    torch.autograd.graph.increment_version(targets)


def adds_whole(target: XLATensor, other: XLATensor) -> bool:
    """Whether `target.add_(other)` adds all of a storage to all of another that lies alike: then `add_all` may do it."""
    view, base = target._layout, target._storage.layout
    if view is not other._layout or base is not other._storage.layout or target._storage is other._storage:
        return False
    if view is base:
        return True
    return view.numel == base.numel and view.dtype == base.dtype and not (view.conj or view.neg) and is_dense(view.size, view.stride)


def add_all(targets: Sequence[XLATensor], others: Sequence[XLATensor]) -> None:
    """`add_` for each pair of tensors that `adds_whole`, past torch's dispatcher, and without gradients. No two of them share memory."""
    if not targets:
        return
    with LOCK:
        segment = STATE.session.current
        into, added = ([t._storage for t in of] for of in (targets, others))
        layouts = [storage.layout for storage in into]
        entries = [_ADDITIONS.get(base) for base in layouts]
        if segment.watch is None and not any_is(entries, None):
            pairs = zip(segment.read_all(into, layouts), segment.read_all(added, layouts), strict=True)
            vids = [segment.emit(entry, pair) for entry, pair in zip(entries, pairs, strict=True)]  # type: ignore[arg-type]
            segment.write_all(into, layouts, vids[0])
        else:
            for target, other in zip(into, added, strict=True):
                record(aten.add_.Tensor, (make(target.layout, target), make(other.layout, other)))
                node = segment.nodes[-1][0]
                if node.op is aten.add.Tensor:  # else the last of what follows a write
                    _ADDITIONS[target.layout] = node
    torch.autograd.graph.increment_version(targets)


_ADDITIONS: dict[Layout, Entry] = {}
"""The entry of `add_` on two whole storages of a layout."""


@special(aten._to_copy.default)
def to_copy(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`.to(...)` that makes a copy: to the host, or to another dtype on the device."""
    src: XLATensor = args[0]
    device = kwargs.get("device")
    dtype = kwargs.get("dtype") or src.dtype
    if device is not None and torch.device(device).type != "xla":
        if torch.device(device).type == "meta":
            return infer(func, args, kwargs)
        constants = STATE.session.cpu_constants
        if constants is not None and constants.everywhere and not captured_values.known(src):  # for the script it is on the CPU
            return to_copy(func, args, {k: v for k, v in kwargs.items() if k != "device"})
        host = copied(src)
        memory_format = kwargs.get("memory_format")
        if memory_format in (None, torch.preserve_format):
            if dtype == host.dtype and torch.device(device).type == "cpu":
                return host  # another op would ask for the values of all ranks
            return host.to(device=device, dtype=dtype)
        return host.to(device=device, dtype=dtype, memory_format=memory_format)
    if dtype == src.dtype:
        return clone(aten.clone.default, (src,), {k: v for k, v in kwargs.items() if k == "memory_format"})
    rest = {k: v for k, v in kwargs.items() if k == "memory_format" and v is not None}
    return record(func, (src,), {"dtype": dtype, **rest})


@special(aten.clone.default)
def clone(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new storage with the same value; the bytes are copied only when one of the two is written."""
    src: XLATensor = args[0]
    base = _clone_layout(src._layout.anchor, kwargs.get("memory_format"))
    view, own = src._layout, src._storage.layout
    if src._storage.constant and view.dtype == own.dtype and view.conj == own.conj and view.neg == own.neg:  # else it shows another number
        return make(base, Storage(base, fill=src._storage.fill))
    return fresh(STATE.session.current, base, read(src))


_CLONES: dict[tuple[Layout, Any], Layout] = {}


def _clone_layout(of: Layout, memory_format: torch.memory_format | None) -> Layout:
    found = _CLONES.get((of, memory_format))
    if found is None:
        meta = torch.empty_strided(of.size, of.stride, dtype=of.dtype, device="meta")
        found = _CLONES[of, memory_format] = base_of_meta(meta.clone(memory_format=memory_format or torch.preserve_format))
    return found


@special(aten._copy_from.default, aten._copy_from_and_resize.default)
def copy_from(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    src, dst = args[0], args[1]
    if func is aten._copy_from_and_resize.default and isinstance(dst, XLATensor) and dst.shape != src.shape:
        resize(dst, tuple(src.shape))
    return copy_(aten.copy_.default, (dst, src), {})


# -- values for the host --------------------------------------------------------------------------


@special(aten._local_scalar_dense.default)
def item(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Python number; small integers may come without running the graph. Torch's own code may not take the first rank's for all of them."""
    t: XLATensor = args[0]
    segment = STATE.session.current
    if not t.dtype.is_floating_point:
        known = host_values.known(segment, t._storage, t._layout)
        if known is not None:
            return STATE.session.history.read(known.item())
    segment.asked()
    plain = host_values.number(segment, t._storage, t._layout) if t.dtype.is_floating_point else None
    if plain is not None:
        return STATE.session.history.read(plain.item())
    found = STATE.session.history.read(download(t).item())
    if not READING.allowed:
        values = each_ranks_number(t)
        if values and rank_numbers.is_ranked(rank_numbers.item(values)):
            raise rank_numbers.refuse(values)
    return found


@special(aten.allclose.default)
def allclose(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A Python bool, from a comparison on the device."""
    return bool(record_op(aten.all.default, record_op(aten.isclose.default, *args, **kwargs)).item())


@special(aten._nested_tensor_from_mask_left_aligned.default)
def may_be_nested(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Asked by `nn.TransformerEncoder` in evaluation: padded batches stay padded, as there are no nested xla tensors."""
    return False


@special(aten._has_same_storage_numel.default)
def has_same_storage_numel(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Asked by forward-mode differentiation."""
    a, b = args
    return bool(a._storage.layout.numel == b._storage.layout.numel)


@special(aten._new_zeros_with_same_feature_meta.default)
def new_zeros_with_same_feature_meta(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asked by forward-mode differentiation for a tangent that does not lie as its primal does: zeros that do, one for each index of the first dims."""
    like, other = args
    batch = tuple(like.shape[: kwargs.get("self_num_batch_dims", 0)])
    view, held = other._layout, other._storage.layout
    n = held.numel * held.dtype.itemsize // view.dtype.itemsize
    strides = tuple(n * math.prod(batch[i + 1 :]) for i in range(len(batch)))
    zeros = dispatch(aten.new_zeros.default, (like, [math.prod(batch) * n]), {})
    return dispatch(aten.as_strided.default, (zeros, [*batch, *view.size], [*strides, *view.stride], view.offset), {})


@special(aten.is_pinned.default)
def is_pinned(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


@special(aten._conj.default)
def conj(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A lazy conjugate, as a view."""
    t: XLATensor = args[0]
    v = t._layout
    if not v.dtype.is_complex:
        return make(v, t._storage)
    return make(layout(v.size, v.stride, v.offset, v.dtype, not v.conj, v.neg), t._storage)


@special(aten._neg_view.default)
def neg_view(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t: XLATensor = args[0]
    v = t._layout
    return make(layout(v.size, v.stride, v.offset, v.dtype, v.conj, not v.neg), t._storage)


@special(aten.view_as_real.default)
def view_as_real(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch refuses a real view of a conjugated tensor, and so do we."""
    if args[0]._layout.conj:
        raise RuntimeError(
            "view_as_real doesn't work on unresolved conjugated tensors. Use x.clone() first for a real view of the conjugate."
        )
    return record(func, args, kwargs)


@special(aten.real.default)
def real_in_inference_mode(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return real(*args)


@special(aten.imag.default)
def imag_in_inference_mode(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return imag(*args)


def real(z: torch.Tensor) -> torch.Tensor:
    """`z.real`, a view, also of a conjugate (torch's own rule looks at a flag that xla tensors keep in their layout)."""
    if not z.is_complex():
        return z
    conjugated = isinstance(z, XLATensor) and z._layout.conj
    return torch.view_as_real(torch.conj(z) if conjugated else z).select(-1, 0)


def imag(z: torch.Tensor) -> torch.Tensor:
    """`z.imag`, a view, also of a conjugate."""
    if not z.is_complex():
        raise RuntimeError("imag is not implemented for tensors with non-complex dtypes.")
    if isinstance(z, XLATensor) and z._layout.conj:
        return torch._neg_view(torch.view_as_real(torch.conj(z)).select(-1, 1))
    return torch.view_as_real(z).select(-1, 1)


# -- memory ---------------------------------------------------------------------------------------


@special(aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default)
def empty_like(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_size(args)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "xla":
        out = infer(func, args, kwargs)
        return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=device)
    return uninitialized(base_of_meta(infer(func, args, kwargs)))


def _check_size(args: tuple[Any, ...]) -> None:
    """Sizes must be the same on all ranks."""
    for number in args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ():
        if rank_numbers.is_ranked(number):
            raise rank_numbers.refuse(rank_numbers.per_rank(number))


def uninitialized(base: Layout) -> XLATensor:
    """A tensor whose storage has no value yet (it reads as zeros)."""
    return make(base, Storage(base))


_FILLS = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}


@special(*_FILLS, aten.full_like.default, aten.new_full.default)
def filled(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors that are one number: a constant storage, without a node until something reads it."""
    _check_size(args)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "xla":
        return func(*[to_meta(a) for a in args], **kwargs)
    value = _FILLS[func] if func in _FILLS else kwargs.get("fill_value", args[-1])
    if rank_numbers.is_ranked(value):
        return rank_numbers.hooks().filled_like(
            args[0], args[1] if func is aten.new_full.default else args[0].shape, value, kwargs.get("dtype")
        )
    base = _base_of_filled(func, args, kwargs)
    _check_number(value, base)
    made = make(base, Storage(base, fill=value))
    if (sharding.active() or spmd.active()) and isinstance(args[0], XLATensor):
        lie_as(made, args[0])
    return made


_LIKE = frozenset({aten.zeros_like.default, aten.ones_like.default})


def _base_of_filled(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    """The layout of the result. Every `loss.backward()` asks for ones like the loss."""
    given = args[0]._layout if isinstance(args[0], XLATensor) else None
    if func in _LIKE and given is not None and given.contiguous and kwargs.get("dtype") in (None, given.dtype) and _keeps_strides(kwargs):
        return layout(given.size, None, 0, given.dtype)
    return base_of_meta(infer(func, args, kwargs))


def _keeps_strides(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format) and kwargs.get("layout") in (
        None,
        torch.strided,
    )


def lie_as(made: XLATensor, like: XLATensor) -> None:
    """Say that a new tensor will differ among the ranks that another differs among, as an optimizer's state for a parameter does."""
    storage = like._storage
    if spmd.active():
        lies = spmd.lies(storage.held) if storage.spec is None else storage.spec
        if lies is not None and made._storage.layout.size == storage.layout.size:
            made._storage.describe(start=lies)
        return
    spec = sharding.label(storage.held) if storage.spec is None else storage.spec
    if spec is not None and sharding.axes_of(spec):
        made._storage.describe(start=sharding.spec_for(sharding.axes_of(spec)))
    if places.in_use():
        home = placed.place_of(like)
        if home is not None:
            made._storage.describe(home=home)


@special(aten.arange.out, aten.arange.start_out, aten.range.out, aten.linspace.out, aten.logspace.out)
def numbers_into(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of several dims with as many elements keeps its shape, and has the numbers in the order of its elements."""
    out = kwargs["out"]
    if isinstance(out, XLATensor) and out.dim() != 1 and out.numel():
        row = torch.empty(0, dtype=out.dtype, device=out.device)
        record(func, args, {**kwargs, "out": row})
        if row.numel() == out.numel():
            return copy_(aten.copy_.default, (out, row.view(out.shape)), {})
    return record(func, args, kwargs)


@special(aten.zero_.default)
def zero_(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _fill(args[0], 0)


@special(aten.fill_.Scalar)
def fill_(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _fill(args[0], args[1])


@special(aten.fill_.Tensor)
def fill_tensor_(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[1].dim():
        raise RuntimeError(f"fill_ only supports 0-dimension value tensor but got tensor with {args[1].dim()} dimensions.")
    t, value = args
    if isinstance(value, XLATensor) and value._storage is t._storage:
        value = clone(aten.clone.default, (value,), {})
    return copy_(aten.copy_.default, (t, value), {})


def linked(storage: Storage) -> bool:
    """True if a write has to reach other storages too."""
    return storage.facts is not None and bool(storage.facts.links)


def _check_number(value: complex, of: Layout) -> None:
    """Raise what torch raises for a number that the dtype cannot hold (it lets one element be)."""
    if (type(value) in (int, float) and value not in (0, 1)) or (type(value) is complex and not of.dtype.is_complex):
        aten.full.default((min(of.numel, 2),), value, dtype=of.dtype)


def _fill(t: XLATensor, value: complex) -> XLATensor:
    storage, view = t._storage, t._layout
    _check_number(value, view)
    if view is storage.layout and not STATE.session.current.capture and not linked(storage):
        storage.set_constant(value)
    elif view.numel:
        once = _each_once(view)
        STATE.session.current.write_view(storage, once, STATE.session.current.fill(once, value))
    return t


def _each_once(view: Layout) -> Layout:
    """A view of the same elements without the repetitions of expand()."""
    if 0 not in view.stride:
        return view
    size = tuple(1 if s == 0 else n for n, s in zip(view.size, view.stride, strict=True))
    return layout(size, view.stride, view.offset, view.dtype, view.conj, view.neg)


@special(aten.set_.source_Tensor)
def set_source(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, src = args
    if not isinstance(src, XLATensor) or not isinstance(t, XLATensor):
        raise RuntimeError(f"set_ needs both tensors on the same device, got {t.device} and {src.device}: move one with .to()")
    point(t, src._layout, src._storage)
    return t


@special(aten.set_.source_Tensor_storage_offset)
def set_source_offset(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, src, offset, size = args[:4]
    stride = tuple(args[4]) if len(args) > 4 and args[4] else None
    point(t, layout(tuple(size), stride, offset, src.dtype), src._storage)
    return t


@special(aten.set_.default)
def set_empty(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    empty = layout((0,), None, 0, t.dtype)
    point(t, empty, Storage(empty))
    return t


@special(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def set_storage(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `torch.load` does with the bytes of a file; other storages are not ours."""
    t, host, *view = args
    if isinstance(host, host_storage.HostStorage):
        storage = storage_uploads.device_storage(host, t.dtype)
        offset, size, *stride = view or (0, storage.layout.size)
        point(t, layout(tuple(size), tuple(stride[0]) if stride else None, offset, t.dtype), storage)
        return t
    raise NotImplementedError(
        "Tensor.set_(storage, ...) on an xla tensor: xla tensors have no addressable torch storage. Use tensor.set_(other_tensor), "
        "other_tensor.as_strided(...), or assign tensor.data."
    )


@special(aten.as_strided.default)
def as_strided(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view by strides; torch's meta kernels do not know where the storage ends."""
    out = record(func, args, kwargs)
    view, n = out._layout, args[0]._storage.layout
    reach = view.offset + 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    if view.numel and reach * view.dtype.itemsize > n.numel * n.dtype.itemsize:
        raise RuntimeError(
            f"setStorage: sizes {list(view.size)}, strides {list(view.stride)}, storage offset {view.offset} require a storage of {reach} elements, "
            f"out of bounds for storage of {n.numel * n.dtype.itemsize // view.dtype.itemsize} elements"
        )
    return out


@special(aten.resize_as_.default)
def resize_as_(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`resize_` to another tensor's size."""
    return resize_(aten.resize_.default, (args[0], list(args[1].shape)), kwargs)


@special(aten.resize_.default)
def resize_(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t, size = args[0], tuple(args[1])
    if t._layout.size != size:
        resize(t, size)
    return t


_INPLACE_VIEWS = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
}


@special(*_INPLACE_VIEWS)
def inplace_view(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`t.transpose_()` and the like: the same elements under new metadata."""
    t = args[0]
    out = dispatch(_INPLACE_VIEWS[func], args, kwargs)
    point(t, out._layout, out._storage)
    return t


# -- batch norm -----------------------------------------------------------------------------------


@special(aten.native_batch_norm.default)
def native_batch_norm(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's schema hides that training updates the running statistics in place; write them out."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training:
        return record(aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, momentum, eps))
    if mean is None:
        return record(aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, eps))
    if STATE.session.cpu_constants is not None:
        mean, var = (t if isinstance(t, XLATensor) else STATE.session.cpu_constants.target(t) for t in (mean, var))
    *outs, new_mean, new_var = record(aten._native_batch_norm_legit_functional.default, (x, weight, bias, mean, var, True, momentum, eps))
    segment = STATE.session.current
    segment.write_view(mean._storage, mean._layout, read(new_mean))
    segment.write_view(var._storage, var._layout, read(new_var))
    return tuple(outs)


@special(aten.native_batch_norm.out)
def native_batch_norm_out(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of the form above, written to what `out=` names."""
    outs = [kwargs[name] for name in ("out", "save_mean", "save_invstd")]
    made = native_batch_norm(aten.native_batch_norm.default, args, {})
    for out, value in zip(outs, made, strict=True):
        resize_(aten.resize_.default, (out, value.shape), {})
        copy_(aten.copy_.default, (out, value), {})
    return tuple(outs)


# -- linear algebra -------------------------------------------------------------------------------


@special(aten._linalg_det.default, aten._linalg_slogdet.default)
def determinant(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's backward looks at A's strides to know whose LU it was given (A's or A^T's): for a strided A the lowering's would be the other's."""
    outs = record(func, args, kwargs)
    a: XLATensor = args[0]
    if a.is_contiguous():
        return outs
    lu, pivots, _ = record(aten.linalg_lu_factor_ex.default, (a,), {})
    return (*outs[:-2], lu, pivots)


# -- attention ------------------------------------------------------------------------------------


@special(aten.scaled_dot_product_attention.default)
def attention_in_inference_mode(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return attention(*args, **kwargs)


def _only_plain() -> bool:
    """Whether the script allows nothing but the plain formula: `sdpa_kernel(SDPBackend.MATH)`, which has gradients of gradients."""
    return torch._C._get_math_sdp_enabled() and not any(allowed() for allowed in _FUSED_ALLOWED)


_FUSED_ALLOWED = (
    torch._C._get_overrideable_sdp_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
)


def _check_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    dims, types = [t.dim() for t in (query, key, value)], [t.dtype for t in (query, key, value)]
    if min(dims) < 2:
        raise RuntimeError(
            f"Expected query, key, and value to all be at least 2 dimensional, but got query.dim: {dims[0]} key.dim: {dims[1]} and value.dim: {dims[2]} instead"
        )
    if len(set(types)) > 1:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {types[0]} key.dtype: {types[1]} and value.dtype: {types[2]} "
            "instead: convert with .to()"
        )
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"Expected as many keys as values, but got key of shape {list(key.shape)} and value of shape {list(value.shape)}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"Expected queries and keys of one size, but got query of shape {list(query.shape)} and key of shape {list(key.shape)}"
        )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` as one fused op; anything that op cannot say goes through torch's plain formula."""
    _check_operands(query, key, value)
    check_dropout(dropout_p)
    fused = query.dim() == 4 and query.dtype.is_floating_point and (attn_mask is None or not attn_mask.requires_grad)
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: {attn_mask.dtype}: use attn_mask.bool() if it "
            "says what is seen"
        )
    if attn_mask is not None and is_causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if not fused or (query.shape[1] != key.shape[1] and not enable_gqa) or key.shape[1] != value.shape[1] or _only_plain():
        return aten._scaled_dot_product_attention_math(
            query, key, value, additive(attn_mask, query.dtype), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return aten._scaled_dot_product_fused_attention_overrideable(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
