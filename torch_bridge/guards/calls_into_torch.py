"""Calls into torch's C code: methods of tensors, functions and ops. Tables say what depends on nothing but the arguments."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from torch_bridge.guards import inference_mode, probes
from torch_bridge.guards.observer import Args, Function, Kwargs, Observer, Rule, RuleOfType
from torch_bridge.guards.unfollowed import asked_again, is_ours, opaque, plainly
from torch_bridge.guards.values import is_a

_TENSOR_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "storage_offset",
        "type",
        "to",
        "cpu",
        "item",
        "tolist",
        "contiguous",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_conj",
        "is_neg",
        "is_inference",
        "detach",
        "detach_",
        "clone",
        "requires_grad_",
        "new_tensor",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "short",
        "char",
        "bool",
        "byte",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "expand_as",
        "repeat_interleave",
        "numpy",
        "ndimension",
        "is_same_size",
        "get_device",
        "__len__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__getitem__",
        "__setitem__",
        "sym_size",
        "sym_numel",
        "type_as",
        "unflatten",
        "unbind",
        "split",
        "chunk",
        "norm",
        "masked_fill",
        "as_subclass",
        "is_set_to",
        "xpu",
        "has_names",
        "dim_order",
        "data_ptr_",
    ]
)
HIDDEN_METHODS = {
    "register_post_accumulate_grad_hook": "it registers a hook on a tensor",
    "retain_grad": "it asks for the gradient of a tensor inside",
    "backward": "it runs a backward pass inside",
    "data_ptr": "it looks at the address of a tensor",
    "untyped_storage": "it looks at the storage of a tensor",
    "storage": "it looks at the storage of a tensor",
    "share_memory_": "it shares the memory of a tensor",
    "__repr__": "it prints a tensor",
    "__format__": "it prints a tensor",
    "__str__": "it prints a tensor",
    "__hash__": "it uses a tensor as a key",
    "__reversed__": "",
}


@functools.cache
def _is_aten(name: str) -> bool:
    """Whether there is an op of this name."""
    return any(hasattr(torch.ops.aten, n) for n in {name, name.removeprefix("_"), name.strip("_"), name.removesuffix("_")} if n)


_OF_PLACES = frozenset(
    ["storage_offset", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "set_", "is_set_to", "is_alias_of"]
)
"""Methods and functions whose results depend on where in memory a tensor starts, and what lies around it."""
_OF_STRIDES = frozenset(["stride", "is_contiguous", "dim_order"])


def _note_memory(observer: Observer, name: str) -> None:
    """Whether something asks how tensors lie in memory."""
    observer.asks_place |= name in _OF_PLACES
    observer.asks_strides |= name in _OF_STRIDES


def tensor_method(
    observer: Observer, f: Any, of: torch.Tensor, name: str, args: Any, kwargs: Any, do: Callable[[], Any] | None = None
) -> Any:
    """A method of a tensor. f: it, bound or not; of: the tensor; do: makes the call, if `f` does not with these arguments."""
    do = do or (lambda: f(*args, **kwargs))
    _note_memory(observer, name)
    reason = HIDDEN_METHODS.get(name) or _asks_for_mode(name)
    if name == "__format__" and not of.dim():
        return do()  # that of its number, which is asked for
    if reason:
        observer.refuse(reason)
        return do()
    dunder = name.startswith("__") and name.endswith("__")
    if (
        name not in _TENSOR_METHODS
        and not _is_aten(name)
        and not (dunder and _is_aten(name.strip("_").removeprefix("r").removeprefix("i")))
    ):
        observer.refuse(f"it calls Tensor.{name}")
        return do()
    if (name.endswith("_") and not dunder) or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")):
        _check_host_write(observer, (of,))
    _check_out(observer, kwargs)
    probes.check_arguments(observer, args, kwargs, f"calls Tensor.{name} with")
    try:
        return do()
    except RuntimeError:  # `view` says in this way that strides do not fit
        observer.asks_strides = True
        raise


def _asks_for_mode(name: str) -> str:
    """Why a call cannot be followed that asks for inference mode where that is on, as it is left for recordings; "" for others."""
    return "it asks for inference mode" if name in inference_mode.ASKED_BY and inference_mode.on() else ""


def _check_host_write(observer: Observer, tensors: Iterable[Any]) -> None:
    if any(is_a(t, torch.Tensor) and not observer.may_write_host(t) for t in tensors):
        observer.refuse("it writes into a CPU tensor that was there before")


def _check_out(observer: Observer, kwargs: Kwargs) -> None:
    out = kwargs.get("out")
    if out is not None:
        _check_host_write(observer, out if is_a(out, (tuple, list)) else (out,))


def is_torch(f: Function) -> bool:
    """Whether a function in C is a method of one of torch's classes, tensors aside."""
    of = getattr(f, "__self__", None)
    return is_a(of, type) and of.__module__.startswith("torch") and of is not torch.Tensor


_FREE = frozenset(
    [
        "get_tracing_state",
        "is_grad_enabled",
        "is_autocast_enabled",
        "is_autocast_cache_enabled",
        "get_autocast_dtype",
        "get_default_dtype",
        "is_tensor",
        "is_floating_point",
        "is_complex",
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
        "is_tracing",
        "is_inference_mode_enabled",
        "has_torch_function",
        "promote_types",
        "result_type",
        "can_cast",
        "broadcast_shapes",
        "are_deterministic_algorithms_enabled",
        "is_fwd_grad_enabled",
        "is_autocast_cpu_enabled",
        "get_autocast_cpu_dtype",
        "get_autocast_gpu_dtype",
        "get_privateuse1_backend_name",
        "is_nonzero",
        "numel",
        "log_api_usage_once",
        "functionalize_enabled",
        "peek_interpreter_stack",
        "is_any_autocast_enabled",
        "is_torch_function_enabled",
        "len_torch_dispatch_stack",
        "len_torch_function_stack",
        "is_torch_function_mode_enabled",
        "is_inference",
        "is_alias_of",
    ]
)
"""Functions of torch's that depend on their arguments, or on settings that are compared anyway (`torch_state`)."""
PYBIND = "pybind11_builtins"
"""The module of what functions of extensions are bound to where pybind11 is older (torch 2.11)."""
_ASKS = re.compile(r"_?(get|is)_|_(accelerator|cuda|mps|mtia|xpu)_(get|is)")
"""Names of functions that say something about torch. transformers asks whether a CUDA stream is captured, which is such a function in CUDA builds of torch."""


def c_function(observer: Observer, f: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    """A function in C of a module: torch's, or of `math` and `operator`."""
    module = getattr(f, "__module__", None) or ""
    of: Any = getattr(f, "__self__", None)
    home = of.__name__ if is_a(of, types.ModuleType) else ""
    if is_torch(f) or module.startswith("torch") or home.startswith("torch"):
        if mode := _asks_for_mode(name):
            observer.refuse(mode)
            return f(*args, **kwargs)
        _note_memory(observer, name.lstrip("_"))
        if name.lstrip("_") in _FREE or (_is_aten(name) and not name.startswith("set_")) or f in _TORCH_PURE:
            _check_out(observer, kwargs)
            if name.endswith("_"):
                _check_host_write(observer, args[:1])
            probes.check_arguments(observer, args, kwargs, f"calls torch.{name} with")
            return f(*args, **kwargs)
        if _ASKS.match(name) and not args and not kwargs:
            return asked_again(observer, f, args, kwargs)
        return opaque(observer, f, args, kwargs)
    if home in ("math", "cmath", "_operator", "operator") or f in _PURE:
        for x in (*args, *kwargs.values()):
            probes.operand(x)
        return f(*args, **kwargs)
    return opaque(observer, f, args, kwargs)


_TORCH_PURE: tuple[Any, ...] = tuple(
    f
    for f in (getattr(torch, n, None) for n in ("tensor", "as_tensor", "from_numpy", "scalar_tensor", "asarray", "finfo", "iinfo"))
    if f is not None
)
_PURE = (abs, bin, chr, divmod, hex, oct, ord, pow, round, ascii)


def _checkpoint(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """An activation checkpoint: the function is followed now, and runs again in the backward pass."""
    observer.recomputes = True
    function, *rest = args
    return f(functools.partial(probes.call, function), *rest, **kwargs)


def _op(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    namespace, name = (f._schema.name if is_a(f, torch._ops.OpOverload) else f._qualified_op_name).split("::")
    if namespace not in ("aten", "prims", "torch_bridge", "nxd_jax", "xla"):
        return opaque(observer, f, args, kwargs)
    _note_memory(observer, name)
    _check_out(observer, kwargs)
    _check_host_write(observer, [a for a in args[:1] if is_a(a, torch.Tensor)] if "_." in str(f) or str(f).endswith("_") else ())
    probes.check_arguments(observer, args, kwargs, f"calls {f} with")
    return f(*args, **kwargs)


def _register_hook(observer: Observer, f: Any, args: Args, kwargs: Kwargs) -> Any:
    hook = args[1] if len(args) > 1 else None
    if not is_ours(getattr(hook, "__func__", hook)):  # those of activation checkpoints are part of what is recorded
        observer.refuse("it registers a hook on a tensor")
    return f(*args, **kwargs)


def _backward_inside(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    observer.refuse("it runs a backward pass inside, which sets .grad")
    return f(*args, **kwargs)


def _gradients_inside(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    probes.check_arguments(observer, args, kwargs, "takes gradients of")
    return f(*args, **kwargs)


def _running_backward(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """Which backward pass runs: none (-1) in a forward pass, but for one that an activation checkpoint computes again."""
    found = f(*args, **kwargs)
    if found >= 0:
        observer.refuse("it asks which backward pass runs, within one", lasting=False)
    return found


def _torch_value(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    probes.check_arguments(observer, args, kwargs, f"makes a {f.__name__} of")
    return f(*args, **kwargs)


def _own_context(observer: Observer, f: Function, args: Args, kwargs: Kwargs) -> Any:
    """A context manager of torch's that sets what no xla op depends on, and sets it back."""
    return observer.own(f(*args, **kwargs))


RULES: list[Rule] = [
    (_checkpoint, [checkpoints.checkpoint]),
    (_register_hook, [torch.Tensor.register_hook]),
    (_backward_inside, [torch.Tensor.backward, torch.autograd.backward]),
    (_gradients_inside, [torch.autograd.grad]),
    (_running_backward, [torch._C._current_graph_task_id]),
    (plainly, [torch.compiler.is_compiling, torch.jit.is_scripting, torch.jit.is_tracing]),
    (_own_context, [torch.backends.cudnn.flags]),  # around torch's CTC loss, in models of speech
    (_torch_value, [torch.device, torch.finfo, torch.iinfo, torch.Size]),
]
BY_TYPE: list[RuleOfType] = [((torch._ops.OpOverload, torch._ops.OpOverloadPacket), _op)]
