"""XLA's FFI in Python: a handler that XLA calls with a call frame, and what it says as CPU tensors that lie in XLA's buffers.

The C structs are those of `xla/ffi/api/c_api.h`, to which versions only add. XLA calls without the GIL, which ctypes takes; torch lets it go while it computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

logger = logging.getLogger("torch_bridge")

MAJOR = 0
"""The version of XLA's FFI that the structs below are of; minor versions only add to it."""

Run = Callable[[dict[str, str], list[torch.Tensor], list[torch.Tensor]], None]


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.POINTER(_Extension))]


class _Version(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    """Arguments or results."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Bytes(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(_Bytes))),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("message", ctypes.c_char_p), ("code", ctypes.c_int))


_MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("make_error", _MakeError),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


_METADATA, _EXECUTE, _STRING, _INTERNAL_ERROR = 1, 3, 4, 13
_DTYPES = {
    1: torch.bool,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.uint8,
    10: torch.float16,
    11: torch.float32,
    12: torch.float64,
    15: torch.complex64,
    16: torch.bfloat16,
    18: torch.complex128,
}
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
_handlers: list[Any] = []
"""Kept as long as the process: XLA has their addresses."""


def register(target: str, run: Run) -> bool:
    """Have XLA's programs for CPUs call `run(string attributes, arguments, results)` by this name. False: this XLA has another FFI."""

    @_Handler
    def handler(frame: Any) -> int | None:
        given = frame.contents
        if given.extension and given.extension.contents.type == _METADATA:
            _tell(given)
            return None
        try:
            if given.stage == _EXECUTE:
                with isolated():
                    run(_strings(given.attributes), _tensors(given.arguments), _tensors(given.results))
        except BaseException as error:  # nothing above would see it
            logger.debug("a kernel failed", exc_info=True)
            return _error(given.api.contents, f"{type(error).__name__}: {error}")
        return None

    try:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value), platform="cpu", api_version=1)
    except Exception as error:
        logger.debug("XLA does not take handlers of ours, so kernels of torch are not used: %s", error)
        return False
    _handlers.append(handler)
    return True


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """torch as on a thread of its own: without modes, function transforms, autograd and autocast, whatever this thread is amid of."""
    included, excluded = _key_sets()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C.DisableTorchFunction():
        yield


@functools.cache
def _key_sets() -> tuple[Any, Any]:
    """What a new thread includes in and excludes from dispatch, but that autograd is excluded, too."""
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))
    )
    thread.start()
    thread.join()
    included, excluded = found
    for key in ("AutogradCPU", "ADInplaceOrView"):
        excluded = excluded.add(getattr(torch._C.DispatchKey, key))
        included = included.remove(getattr(torch._C.DispatchKey, key))
    return included, excluded


def _tell(frame: Any) -> None:
    """XLA asks which version a handler is of: the one that it has itself, if that is one we know."""
    metadata = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
    own = frame.api.contents.version
    metadata.version.major, metadata.version.minor = MAJOR, own.minor
    metadata.traits = 0


def _tensors(buffers: Any) -> list[torch.Tensor]:
    return [_tensor(buffers.items[i].contents) for i in range(buffers.size)]


def _tensor(buffer: Any) -> torch.Tensor:
    """A tensor that lies in a buffer."""
    shape, dtype = [buffer.dims[i] for i in range(buffer.rank)], _DTYPES[buffer.dtype]
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer((ctypes.c_char * size).from_address(buffer.data), dtype=dtype).view(shape)


def _strings(attributes: Any) -> dict[str, str]:
    """The attributes that are strings."""
    found = {}
    for i in range(attributes.size):
        if attributes.types[i] == _STRING:
            found[_text(attributes.names[i].contents)] = _text(ctypes.cast(attributes.values[i], ctypes.POINTER(_Bytes)).contents)
    return found


def _text(value: Any) -> str:
    return ctypes.string_at(value.data, value.size).decode()


def _error(api: Any, text: str) -> int | None:
    made: int | None = api.make_error(_ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text.encode(), _INTERNAL_ERROR))
    return made
