"""Every difference between supported torch and jax versions, in one place.

Supported: torch 2.11 to 2.13 and jax 0.10 to 0.11.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import os
import pathlib
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def is_indivisible(error: ValueError) -> bool:
    """Whether JAX could not say on a mesh how a value is divided."""
    return type(error).__name__ == "IndivisibleError"


def x64_enabled() -> bool:
    """Whether the caller's JAX code keeps 64-bit dtypes."""
    import jax

    return bool(jax.config.read("jax_enable_x64"))


def enable_x64() -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX keeps 64-bit dtypes, for this thread only (jax: `jax.enable_x64(True)`)."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as experimental_enable_x64  # type: ignore[attr-defined]

    return experimental_enable_x64()


def not_inlined() -> contextlib.AbstractContextManager[Any]:
    """A context in which calls of `jax.jit` functions that are traced stay calls in what XLA compiles; nothing changes where JAX has no such attribute."""
    try:
        from jax.experimental.xla_metadata import set_xla_metadata
    except ImportError:
        return contextlib.nullcontext()
    return set_xla_metadata(inlineable="false")


@contextlib.contextmanager
def torchscript() -> Iterator[None]:
    """A block that uses torch.jit, which torch 2.13 calls deprecated: files of traced models are TorchScript archives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated", category=DeprecationWarning)
        yield


@functools.cache
def float8_saturates() -> bool:
    """Whether torch makes 448 of larger numbers when it casts them to float8_e4m3fn (torch 2.13 does), instead of NaN."""
    import torch

    return bool(torch.tensor(1e6).to(torch.float8_e4m3fn).float().isfinite())


@functools.cache
def _uploader() -> Any:
    """JAX's own function under `jax.device_put`, which takes a tenth of its time: (numpy array, sharding, its devices). None where it is not found."""
    import jax

    try:
        from jax._src.core import ShapedArray
        from jax._src.interpreters.pxla import batched_device_put
    except ImportError:
        return None

    def upload(host: np.ndarray, place: Any, devices: list[Any]) -> Any:
        return batched_device_put(ShapedArray(host.shape, host.dtype), place, [host] * len(devices), devices)

    device = jax.local_devices()[0]
    try:
        upload(np.zeros(1, np.int32), jax.sharding.SingleDeviceSharding(device), [device])
    except Exception:  # another JAX: whatever it does not like
        return None
    return upload


@functools.cache
def _default_device() -> tuple[Any, list[Any]]:
    """JAX's first device, as a sharding and as a list."""
    import jax

    device = jax.local_devices()[0]
    return jax.sharding.SingleDeviceSharding(device), [device]


@functools.cache
def _copier() -> Any:
    """JAX's own function under `jax.device_put` of arrays from mesh to mesh, which takes a fifth of its time; None where it is not found."""
    import jax

    try:
        from jax._src.lib import xla_client
    except ImportError:
        return None

    def copy(arrays: Sequence[Any], targets: Sequence[Any]) -> Any:
        semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(arrays)
        devices = [target._internal_device_list for target in targets]
        return xla_client.batched_copy_array_to_devices_with_sharding(arrays, devices, targets, semantics)

    try:
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        copy([jax.device_put(np.zeros(1, np.int32), place)], [place])
    except Exception:  # another JAX: whatever it does not like
        return None
    return copy


def moved(arrays: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    """`jax.device_put` of arrays of this process, each with a sharding to other devices of its own, cut there as it is cut here."""
    import jax

    copy = _copier()
    if copy is not None and all(array.sharding.num_devices == target.num_devices for array, target in zip(arrays, targets, strict=True)):
        return list(copy(arrays, targets))
    with enable_x64():
        return list(jax.device_put(arrays, targets))


def put(host: np.ndarray) -> Any:
    """An array on the default device, 64-bit dtypes kept. The memory becomes JAX's: nobody may write to it."""
    import jax

    upload = _uploader() if getattr(jax.config, "jax_default_device", None) is None else None
    with enable_x64():
        return jax.device_put(host) if upload is None else upload(host, *_default_device())


def put_replicated(host: np.ndarray, target: Any) -> Any:
    """The same as one array with a `NamedSharding` that divides nothing, over devices of this process."""
    import jax

    upload = _uploader()
    with enable_x64():
        return jax.device_put(host, target) if upload is None else upload(host, target, list(target.mesh.devices.flat))


def trace_context() -> list[str]:
    """What JAX's own caches of traced functions depend on in this thread, as text; an empty axis environment is left out."""
    from jax._src import config

    return [repr(state) for state in config.trace_context() if type(state).__name__ != "AxisEnv"]


def compile_options() -> str:
    """What XLA is told by default, XLA_FLAGS as they were when it read them included: a hash."""
    from jax._src import compiler

    return hashlib.sha256(compiler.get_compile_options(num_replicas=1, num_partitions=1).SerializeAsString()).hexdigest()


_OPTIONS = {"xla_multiheap_size_constraint_per_heap", "xla_cpu_experimental_ynn_fusion_type"}
"""Of XLA, in jaxlib 0.10 and 0.11: asking takes a compilation, which metrics and dumps show."""


def has_library_fusions() -> bool:
    """Whether XLA has a flag for what it computes in YNNPACK, with a value for single products."""
    import jaxlib

    return (0, 10) <= jaxlib.version.__version_info__ < (0, 12)


def fuses_products() -> bool:
    """Whether XLA by itself computes a product and what reads it as one in its kernel library on this backend. Compiles a small program (0.1 s)."""
    import jax

    text = jax.jit(lambda x: abs(x @ x).sum(-1)).lower(np.zeros((64, 64), np.float32)).compile().as_text() or ""
    return "__ynn_fusion" in text and any(" dot(" in part and " abs(" in part for part in text.split("\n\n"))


def read_xla_flags() -> None:
    """Have XLA read `XLA_FLAGS`, which it does once in a process. Starts no devices."""
    from jax._src.lib import xla_client

    xla_client.CompileOptions()


def knows_options(options: dict[str, Any]) -> bool:
    """Whether XLA takes these `compiler_options`: names and values differ between versions, and one that it does not know is an error."""
    import jax

    if options.keys() <= _OPTIONS and jax.__version_info__ < (0, 12):
        return True
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(np.zeros((), np.float32)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class _Warnings:
    """How many threads want none of XLA's own, and what XLA logged before."""

    lock = threading.Lock()
    unwanted = 0


@contextlib.contextmanager
def without_warnings_of_xla() -> Iterator[None]:
    """A block in which XLA logs errors alone, in every thread; unless the user has set how much it logs (TF_CPP_MIN_LOG_LEVEL, `jax_logging_level`)."""
    import jax

    try:
        from jaxlib.utils import absl_set_min_log_level as set_level
    except ImportError:
        yield
        return
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") != "1" or jax.config.jax_logging_level not in (None, "NOTSET"):  # type: ignore[attr-defined]
        yield
        return
    with _Warnings.lock:
        _Warnings.unwanted += 1
        set_level(2)
    try:
        yield
    finally:
        with _Warnings.lock:
            _Warnings.unwanted -= 1
            if not _Warnings.unwanted:
                set_level(1)


_watchers = threading.local()


def check_cache_entries(damaged: Callable[[pathlib.Path], None], unread: Callable[[], bool]) -> None:
    """Have JAX call `damaged(file)` for an entry of its persistent cache that cannot be unpacked, and compile as if there were none.

    While `unread()` is true it compiles whatever the cache has.

    On its own JAX warns and compiles at every run: it never writes over an entry that is there, and a process that is killed leaves half of one.
    From then on `watch_cache_entries` sees what passes.
    """
    try:
        from jax._src.compilation_cache import decompress_executable
        from jax._src.lru_cache import LRUCache
    except ImportError:  # a JAX that keeps them elsewhere: its own warning stays
        return
    get, put = LRUCache.get, LRUCache.put

    def checked(self: Any, key: str) -> bytes | None:
        packed = None if unread() else get(self, key)
        if packed is not None:
            try:
                decompress_executable(packed)
            except Exception:
                damaged(pathlib.Path(str(self.path)) / f"{key}-cache")
                return None
            _note(key, packed)
        return packed

    def noted(self: Any, key: str, value: bytes) -> None:
        put(self, key, value)
        _note(key, value)

    LRUCache.get = checked  # type: ignore[method-assign]
    LRUCache.put = noted  # type: ignore[method-assign]


def _note(key: str, packed: bytes) -> None:
    for seen in getattr(_watchers, "lists", ()):
        seen.append((key, packed))


@contextlib.contextmanager
def watch_cache_entries() -> Iterator[list[tuple[str, bytes]]]:
    """The (key, packed executable) of each entry of JAX's persistent cache that this thread reads or writes meanwhile."""
    seen: list[tuple[str, bytes]] = []
    _watchers.lists = [*getattr(_watchers, "lists", ()), seen]
    try:
        yield seen
    finally:
        _watchers.lists = [other for other in _watchers.lists if other is not seen]


def cache_entry(key: str) -> bytes | None:
    """The packed executable of this key in JAX's persistent cache, None if it has none; marked as used now."""
    import jax
    from jax._src import compilation_cache

    cache = compilation_cache._get_cache(jax.devices()[0].client)
    return None if cache is None else cache.get(key)


def without_code(compiled: Any) -> tuple[bytes, list[int]]:
    """A `jax.stages.Compiled` but for its machine code, pickled: how it is called, laid out and sharded; and the numbers of its devices, in its order.

    Raises what pickle does for callbacks into Python, and NotImplementedError for constants that JAX keeps beside the program.
    The code itself is in JAX's persistent cache. (An executable that was loaded must not be serialised again: on CPU the copy lacks functions.)
    """
    import jax
    from jax.experimental import serialize_executable

    unloaded = compiled._executable._unloaded_executable
    if compiled._params.const_args:
        raise NotImplementedError("the program has constants of its own")

    class Pickler(serialize_executable._JaxPjrtPickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("code",) if obj is unloaded.xla_executable else super().persistent_id(obj)

    with io.BytesIO() as out:
        args, tree = jax.tree.flatten(compiled.args_info)
        Pickler(out).dump((unloaded, args, tree, compiled.out_tree, compiled._no_kwargs))
        return out.getvalue(), [device.id for device in unloaded.device_list]


def with_code(pickled: bytes, packed: bytes, devices: Sequence[Any], copied: bool = False) -> Any:
    """The `jax.stages.Compiled` of what `without_code` gave and its entry in JAX's persistent cache, loaded onto devices (in the program's order).

    copied: the entry is of other devices.
    """
    from jax._src import compilation_cache

    code, _ = compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(packed))
    return _loaded(pickled, devices, devices, _options_for(devices) if copied else None, code)


def _loaded(pickled: bytes, devices: Sequence[Any], others: Sequence[Any], options: Any, code: bytes | None = None) -> Any:
    """The `jax.stages.Compiled` of what `packed` or `without_code` gave.

    devices: that it names, and others in their place. options: to load its executable with; None: those that it was compiled with. code: of `without_code`.
    """
    import jax
    from jax.experimental import serialize_executable

    given = {} if options is None else {"compile_options": options}

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] not in ("code", "exec"):
                return super().persistent_load(pid)
            executable = code if pid[0] == "code" else pid[1]
            return self.backend.deserialize_executable(executable, executable_devices=self.execution_devices, **given)

    reader = Unpickler(io.BytesIO(pickled), others[0].client, others)
    reader.devices_by_id = {old.id: new for old, new in zip(devices, others, strict=True)}
    unloaded, args, tree, out_tree, no_kwargs = reader.load()
    return jax.stages.Compiled(unloaded.load(), [], tree.unflatten(args), out_tree, no_kwargs=no_kwargs)


def _options_for(devices: Sequence[Any]) -> Any:
    """Options with which an executable is loaded onto these devices, in the order of its mesh."""
    from jax._src import compiler

    assignment = np.array([[device.id for device in devices]])
    return compiler.get_compile_options(num_replicas=1, num_partitions=len(devices), device_assignment=assignment)


def inputs_of(lowered: Any) -> str:
    """What a `jax.stages.Lowered` is called with, and the numbers of the inputs that it reads: its text has those alone."""
    return f"{lowered.args_info} {sorted(lowered._lowering.compile_args['kept_var_idx'])}"


def packed(compiled: Any) -> bytes:
    """A `jax.stages.Compiled` as `on_devices` takes it. It must have been compiled in this process, and if it sorts it must not have run: XLA on CPUs refuses.

    Raises what pickle does for callbacks into Python, and NotImplementedError for constants beside the program.
    """
    import jax
    from jax.experimental import serialize_executable

    if compiled._params.const_args:
        raise NotImplementedError("the program has constants of its own")
    args, tree = jax.tree.flatten(compiled.args_info)
    with io.BytesIO() as out:
        unloaded = compiled._executable._unloaded_executable
        serialize_executable._JaxPjrtPickler(out).dump((unloaded, args, tree, compiled.out_tree, compiled._no_kwargs))
        return out.getvalue()


def on_devices(packed: bytes, devices: Sequence[Any], others: Sequence[Any]) -> Any:
    """The `jax.stages.Compiled` that was packed, for other devices. devices: those that it was compiled for, in the order of its mesh."""
    return _loaded(packed, devices, others, _options_for(others))


@contextlib.contextmanager
def without_preemption_service() -> Iterator[None]:
    """While entered, `jax.distributed.initialize` leaves SIGTERM alone, unless JAX_ENABLE_PREEMPTION_SERVICE asks for JAX's service.

    The service takes the signal, tells the other processes, and lets this one run on: launchers wait half a minute and then kill it.
    """
    import jax

    name = "jax_enable_preemption_service"
    before = getattr(jax.config, name, None)
    if before is None or os.environ.get(name.upper()):
        yield
        return
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)


def transfer_server(client: Any, address: str) -> Any:
    """JAX's server that sends arrays to other processes. address: where it listens, "host:0" for any port. Large arrays take four connections side by side.

    Raises NotImplementedError where this JAX has none.
    """
    try:
        from jax.experimental import transfer
    except ImportError as error:
        raise NotImplementedError(
            "this build of JAX has no jax.experimental.transfer, through which pipeline stages in several processes send each other arrays: start the script "
            "with nxd-run, which hosts all ranks in one process, or install another release of jaxlib"
        ) from error
    return transfer.start_transfer_server(client, address, [address] * 4, 8, 1 << 22)


def abandon_distributed() -> None:
    """Let this process end without JAX's farewell to the other processes."""
    from jax._src import distributed

    state = distributed.global_state
    for part in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # never destroyed: that would wait, too, or abort this process
    state.client = state.service = None


def has_foreach(name: str) -> bool:
    """Whether torch has `_foreach_{name}`: those of `clone` and `mm` came after 2.11."""
    import torch

    return hasattr(torch.ops.aten, f"_foreach_{name}")


def linear_cross_entropy_ops() -> tuple[Any, Any] | None:
    """torch's chunked `linear_cross_entropy` with and without reduction, or None before torch 2.13."""
    import torch

    try:
        import torch.nn.modules.linear_cross_entropy  # registers them
    except ImportError:
        return None
    ops = torch.ops.torch_nn
    return ops._linear_cross_entropy_batch_chunked.default, ops._linear_cross_entropy_batch_chunked_no_reduction.default


def scan_parts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of the operands of a `scan` stay the same, and how many it carries. params: of the equation; jax 0.11 has them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def never_trace(code: types.CodeType) -> None:
    """torch.compile's tracer leaves this code, and all that it calls, as it is. (`torch._dynamo.disable` would add a call to each call.)"""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def record_untraced(entries: Iterable[Any]) -> None:
    """Where torch and scripts come into the recorder, these functions and all that they call (JAX) run as they are, whatever traces the script around."""
    for entry in entries:
        function = getattr(entry, "__func__", entry)
        if isinstance(function, types.FunctionType):
            never_trace(function.__code__)


def jax_started() -> bool:
    """Whether JAX has made its devices."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def provision_cpu_devices(count: int) -> None:
    """Ask for at least so many virtual CPU devices, if JAX has not started."""
    import jax

    if not jax_started():
        jax.config.update("jax_num_cpu_devices", max(count, getattr(jax.config, "jax_num_cpu_devices", 1)))


@functools.cache
def ldexp_keeps_dtype() -> bool:
    """Whether torch.ldexp shifts exponents by integers, in the dtype of the first operand (torch 2.13). Before, it multiplied by a float32 power of two."""
    import torch

    half = torch.ldexp(torch.ones(1, dtype=torch.float16, device="cpu"), torch.ones(1, dtype=torch.int64, device="cpu"))
    return half.dtype == torch.float16
