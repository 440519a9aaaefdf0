"""`XLATensor`: what `device="xla"` gives, a torch tensor without memory of its own.

It has torch's metadata (shape, stride, dtype, autograd) and points to a `Storage` whose value is a JAX array or a pending
node. Everything it does arrives at `dispatch`, which the device's startup sets to `recorder.dispatch.dispatch`.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Any, Protocol, SupportsIndex

import torch
from torch.autograd import forward_ad

from torch_bridge.errors import is_located
from torch_bridge.ir.layout import Layout, layout, reach
from torch_bridge.ir.segment import LOCK, Segment, Storage
from torch_bridge.mesh import rank_numbers
from torch_bridge.recorder import expected_answers, rank_array
from torch_bridge.recorder.downloads import download, each_ranks, each_ranks_number
from torch_bridge.recorder.host_storage import HostStorage
from torch_bridge.recorder.varying import differs, note_file
from torch_bridge.runtime import backend
from torch_bridge.runtime.session import STATE

DEVICE = torch.device("xla:0")
_make_wrapper = torch.Tensor._make_wrapper_subclass


class StorageHandle:
    """Stands for the storage of xla tensors: an identity (`data_ptr`), a size in bytes and a device."""

    def __init__(self, storage: Storage):
        self._storage = storage

    @property
    def device(self) -> torch.device:
        return DEVICE

    def data_ptr(self) -> int:
        return id(self._storage)

    def nbytes(self) -> int:
        return self._storage.layout.numel * self._storage.layout.dtype.itemsize

    size = nbytes
    __len__ = nbytes

    def __getattr__(self, name: str) -> Any:
        if name in _OF_BYTES:
            raise NotImplementedError(
                f"untyped_storage().{name} of an xla tensor: its values have no bytes to reach. Write with the tensor's own methods (fill_, copy_, resize_), "
                "or use tensor.cpu().untyped_storage()"
            )
        raise AttributeError(f"'StorageHandle' object has no attribute {name!r}")


_OF_BYTES = frozenset(name for name in dir(torch.UntypedStorage) if not name.startswith("_"))


class XLATensor(torch.Tensor):
    """A tensor on device `xla`. Scripts never construct it: `.to("xla")`, `device="xla"` and ops on xla tensors do."""

    _storage: Storage
    _layout: Layout

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        try:
            return dispatch(func, args, kwargs)
        except Exception as error:
            if is_located(error):  # it says where: the frames below would only hide it
                raise error.with_traceback(None) from None
            raise

    @property
    def is_xla(self) -> bool:
        return True

    @property
    def data(self) -> torch.Tensor:
        """The same storage without autograd history, as in torch.

        Set to a CPU tensor it takes a copy, where it stands for a weight on the CPU (`cpu_draws`); other xla tensors take xla tensors only.
        """
        if self.is_inference() and not torch.is_inference_mode_enabled():
            return make(self._layout, self._storage)  # a normal tensor, which may be written
        return _raw_data_get(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        facts = self._storage.facts
        if facts is not None and facts.cpu and value.device.type == "cpu":  # a script that runs for one rank has both on the CPU
            value = value.detach().to(DEVICE)
            value._storage.describe(cpu=True)  # type: ignore[attr-defined]
        constants = STATE.session.cpu_constants
        if constants is not None and constants.everywhere and value.device.type == "cpu":
            value = constants.of(value)
        if not isinstance(value, XLATensor):
            raise TypeError(
                f"cannot set .data of a tensor on xla:0 to a tensor on {value.device}: move it first with .to('xla'), "
                "or use module.to('cpu') to move a whole module"
            )
        _, self._storage, self._layout = _raw_data_set(self, value), value._storage, value._layout  # one line: torch's shape and ours agree

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            text = torch._tensor_str._str(_on_host(self))
        extra = ", device='xla:0'"
        if self.grad_fn is not None:
            extra += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            extra += ", requires_grad=True"
        tangent = forward_ad.unpack_dual(self).tangent if forward_ad._current_level >= 0 else None
        if tangent is not None:
            extra += f", tangent={tangent}"
        text = f"{text[:-1]}{extra})"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def as_subclass(self, cls: Any) -> Any:
        """The tensor itself for its own class and those above; it has no memory that a tensor of another class could stand for."""
        if issubclass(XLATensor, cls):
            return torch.Tensor.as_subclass(self, cls)
        raise NotImplementedError(
            f"a tensor on xla:0 cannot become a {cls.__name__}: tensors there have a class of their own. Keep the {cls.__name__} on the CPU, or hold the "
            "tensor in an attribute of an object"
        )

    def numpy(self, *, force: bool = False) -> Any:
        constants = STATE.session.cpu_constants
        if force or (constants is not None and constants.everywhere):
            return _on_host(self).numpy()
        raise TypeError(
            "can't convert an xla:0 tensor to numpy: its value may not even be computed yet. "
            "Use tensor.cpu().numpy() (or tensor.detach().cpu().numpy(), or tensor.numpy(force=True)); it runs what is pending and copies to the host."
        )

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        return self.numpy()

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def item(self) -> Any:
        """The number in a one-element tensor. If ranks hold different ones, the first hosted rank's, which remembers the others' (`rank_numbers.item`)."""
        with READING:
            value = torch.Tensor.item(self)
        return value if isinstance(value, complex) else _each_ranks(self, value)

    def __int__(self) -> int:
        with READING:
            value = torch.Tensor.__int__(self)
        return int(_each_ranks(self, value))

    def __float__(self) -> float:
        with READING:
            value = torch.Tensor.__float__(self)
        return float(_each_ranks(self, value))

    def __complex__(self) -> complex:
        with READING:
            return torch.Tensor.__complex__(self)

    def __bool__(self) -> bool:
        """The first hosted rank's answer. Where ranks differ, a branch on it is remembered, as one on a rank is (`branches`).

        Checks of torch's own are answered before the values are there (`expected_answers`)."""
        answer = expected_answers.expected(self, sys._getframe(1))
        if answer is not None:
            return answer
        with READING:
            value = torch.Tensor.__bool__(self)
        return bool(_each_ranks(self, value))

    def tolist(self) -> Any:
        """Nested lists of numbers. Where ranks hold different ones, the first hosted rank's, which remember the others' (`rank_numbers.item`)."""
        found = _on_host(self).tolist()
        return rank_array.nested([own.tolist() for own in each_ranks(self)]) if differs(self) else found

    def data_ptr(self) -> int:
        """A number that tensors share exactly when they start at the same element of the same storage; not an address."""
        return id(self._storage) + self._layout.offset * self._layout.dtype.itemsize

    def untyped_storage(self) -> Any:
        """What libraries compare to find tensors that share memory; it gives no access to the bytes."""
        return StorageHandle(self._storage)

    def storage(self) -> Any:
        raise NotImplementedError(
            "Tensor.storage() of an xla tensor: its values have no bytes to show. Use untyped_storage() to compare, or tensor.cpu().storage()"
        )

    def is_shared(self) -> bool:
        return False

    def share_memory_(self) -> Any:
        raise NotImplementedError(
            "share_memory_ of a tensor on xla:0: its values are in this process alone. Share tensors of the CPU (module.cpu().share_memory()), and start "
            "processes that train together with torchrun or torch_xla.launch"
        )

    def storage_type(self) -> Any:
        return self.storage()

    def is_set_to(self, tensor: torch.Tensor) -> bool:
        """Whether both show the same elements of the same storage in the same way."""
        return isinstance(tensor, XLATensor) and tensor._storage is self._storage and tensor._layout == self._layout

    def set_(self, source: Any = None, storage_offset: int = 0, size: Any = None, stride: Any = None) -> Any:  # type: ignore[override]
        """As torch's, also with what `untyped_storage()` of an xla tensor gives, or with a part of another tensor's storage. A storage does not grow."""
        plain: Any = super().set_
        if not isinstance(source, (StorageHandle, XLATensor)) or (size is None and isinstance(source, XLATensor)):
            given = [source] if source is not None else []
            given += [] if size is None else [storage_offset, size]
            return plain(*given, *([] if stride is None else [stride]))
        held = source._storage
        if held.layout.dtype != self.dtype:
            raise NotImplementedError(
                f"Tensor.set_: the storage is of {held.layout.dtype} and the tensor of {self.dtype}: bytes are not read as another dtype; use view(dtype)"
            )
        view = layout(
            (held.layout.numel,) if size is None else tuple(size), None if stride is None else tuple(stride), storage_offset, self.dtype
        )
        if view.numel and reach(view) > held.layout.numel:
            raise RuntimeError(
                f"Tensor.set_: size {list(view.size)}, stride {list(view.stride)} and offset {view.offset} reach element {reach(view) - 1} of a storage of "
                f"{held.layout.numel}, and storages of xla tensors do not grow"
            )
        return plain(make(view, held))

    def __copy__(self) -> XLATensor:
        """Another tensor on the same storage, as in torch."""
        new = self.detach().requires_grad_(self.requires_grad)
        new.__dict__.update(user_attributes(self))
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True
        return new  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> XLATensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment. "
                "Use tensor.detach().clone() for a copy without history."
            )
        return _deepcopy(self, memo)

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        torch.utils.hooks.warn_if_has_hooks(self)
        note_file([self])
        host = _on_host(self).clone()
        if isinstance(self, torch.nn.Parameter):  # torch's own ways to rebuild one, which weights_only accepts
            state = user_attributes(self)
            hooks: dict[Any, Any] = OrderedDict()
            if state:
                return torch._utils._rebuild_parameter_with_state, (self.data, self.requires_grad, hooks, state)
            return torch._utils._rebuild_parameter, (self.data, self.requires_grad, hooks)
        if (
            sys._getframe(1).f_code is torch.serialization._legacy_save.__code__
        ):  # it writes values last: whoever loads must not copy before
            return _tagged(host, self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (host, self.dtype, "xla:0", self.requires_grad)


def _tagged(host: torch.Tensor, requires_grad: bool) -> Any:
    """How to rebuild a tensor on xla from bytes that are tagged so, as torch rebuilds those of other devices."""
    bytes_ = host.untyped_storage()
    bytes_.__class__ = HostStorage
    storage = torch.storage.TypedStorage(wrap_storage=bytes_, dtype=host.dtype, _internal=True)
    return torch._utils._rebuild_tensor_v2, (storage, 0, host.shape, host.stride(), requires_grad, OrderedDict())


def user_attributes(t: torch.Tensor) -> dict[str, Any]:
    """What scripts have set on a tensor object."""
    return {k: v for k, v in t.__dict__.items() if k not in ("_storage", "_layout", "_is_param")}


def _deepcopy(t: XLATensor, memo: dict[int, Any]) -> XLATensor:
    import copy

    parameter = isinstance(t, torch.nn.Parameter)
    with torch.no_grad():
        storage = t._storage
        if parameter:  # torch clones it: its copy has a memory of its own, and no gradient
            new: Any = make(t._layout, copy_storage(storage)) if t._layout is storage.layout else t.detach().clone()
        else:
            shared = memo.get(id(storage))
            if shared is None:
                shared = memo[id(storage)] = copy_storage(storage)
            new = make(t._layout, shared)
    new.requires_grad_(t.requires_grad)
    memo[id(t)] = new
    if parameter:
        new._is_param = True
    elif t.grad is not None:
        new.grad = copy.deepcopy(t.grad, memo)
    new.__dict__.update(copy.deepcopy(user_attributes(t), memo))
    return new


class _Reading(threading.local):
    """Whether Python asks for a number (and so may be given each rank's), not torch's own code."""

    allowed = False

    def __enter__(self) -> None:
        self.allowed = True

    def __exit__(self, *error: object) -> None:
        self.allowed = False


READING = _Reading()


def _on_host(t: XLATensor) -> torch.Tensor:
    """The values as a CPU tensor, those of the first hosted rank where ranks differ."""
    with torch.no_grad():
        return download(t)


def _each_ranks(t: XLATensor, value: Any) -> Any:
    """The number that Python asked for, with the other ranks' where they differ. value: the first hosted rank's."""
    values = each_ranks_number(t)
    return rank_numbers.item(values) if values else value


_raw_data_get = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_raw_data_set = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def make(layout: Layout, storage: Storage) -> XLATensor:
    """A new tensor that views `storage` through `layout`."""
    if layout.contiguous:  # the common case, and a third cheaper
        t = _make_wrapper(XLATensor, layout.size, dtype=layout.dtype, device=DEVICE)
    else:
        t = _make_wrapper(XLATensor, layout.size, strides=layout.stride, storage_offset=layout.offset, dtype=layout.dtype, device=DEVICE)
    t._storage = storage
    t._layout = layout
    return t


def fresh(segment: Segment, base: Layout, vid: int) -> XLATensor:
    """A new tensor whose storage holds a pending value."""
    storage = Storage(base)
    segment.write(storage, vid)
    return make(base, storage)


def read(t: XLATensor) -> int:
    """The id of a tensor's value in the current segment."""
    return STATE.session.current.read(t._storage, t._layout)


def point(t: XLATensor, layout: Layout, storage: Storage) -> None:
    """Make `t` view other elements, keeping its identity (`set_`, `resize_`, `.data =`, in-place view ops)."""
    view = make(layout, storage)
    _, t._storage, t._layout = _raw_data_set(t, view), storage, layout  # one line: torch's shape and ours agree


def copy_storage(storage: Storage) -> Storage:
    """A storage of its own with the same value; nothing is computed, values are immutable."""
    with LOCK:
        new = Storage(storage.layout)
        new.lie_as(storage)
        if storage.held is not None:
            new.held = storage.array
        elif storage.constant:
            new.fill = storage.fill
        else:
            segment = STATE.session.current
            segment.write(new, segment.read(storage, storage.layout))
        return new


class Dispatch(Protocol):
    """What is done with an aten call that involves an xla tensor."""

    def __call__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any: ...


def _bring_up(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """For the first call: the device's startup says what is done with it, and with all others."""
    backend.ensure()
    assert dispatch is not _bring_up, "the startup has not called dispatch_with"
    return dispatch(func, args, kwargs)


dispatch: Dispatch = _bring_up


def dispatch_with(recorded: Dispatch) -> None:
    """Say what is done with ops on xla tensors from now on."""
    global dispatch
    dispatch = recorded
