"""Records what Python does with tensors as nodes of a torch.fx graph while it runs: calls of torch functions, of modules and of chosen functions."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx.node import base_types
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_jax.pipeline import draws, layer_nodes
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import executor

WRITES, TOUCHES = "writes", "touches"
"""In a node's `meta`: the storages that it writes in place, and all that it has to do with."""

_READS = {"item", "tolist", "numpy", "equal", "is_nonzero", "allclose", "__array__", "__dlpack__", "__contains__"}
_READS |= {"__bool__", "__int__", "__float__", "__complex__", "__index__"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "share_memory_"}
_PLAIN = (*(t for t in base_types if t is not torch.Tensor), type(None), enum.Enum)
_OPAQUE = (type, torch.Generator, dist.ProcessGroup)


class Context:
    """The torch state that changes what a call records: whether gradients are, and autocast on "xla"."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.autocast = torch.is_autocast_enabled("xla")
        self.dtype = torch.get_autocast_dtype("xla")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A block in this state. Gradients are recorded in it where they are around it, too: an evaluation goes on without."""
        with contextlib.nullcontext() if self.grad else torch.no_grad(), torch.autocast("xla", dtype=self.dtype, enabled=self.autocast):
            yield


class BoundCall:
    """A function with what of its call cannot stand in a graph: a context, or arguments of other types. Called with the values of nodes.

    args, kwargs: as in the call, with a `Slot` in the place of each node.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, context: Context | None):
        self.function, self.args, self.kwargs, self.context = function, args, kwargs, context
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = self.__name__
        self.__module__ = __name__

    def __call__(self, *values: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Slot, lambda slot: values[slot.index], (self.args, self.kwargs))
        with self.context.entered() if self.context is not None else contextlib.nullcontext():
            return self.function(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a node's value among the arguments of a `BoundCall`."""

    index: int


def bound_call(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[BoundCall, tuple[Any, ...]]:
    """A call of which a graph is given the tensors alone, and these. Raises RuntimeError for arguments that may hold tensors unseen."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values = [x for x in leaves if isinstance(x, (torch.Tensor, fx.Proxy))]
    order = iter(range(len(values)))
    held = [Slot(next(order)) if isinstance(x, (torch.Tensor, fx.Proxy)) else x for x in leaves]
    for x in held:
        if not isinstance(x, (Slot, *_PLAIN)) and not _is_apart(x):
            raise RuntimeError(f"its forward calls {getattr(function, '__qualname__', function)} with an object of type {type(x).__name__}")
    own_args, own_kwargs = pytree.tree_unflatten(held, spec)
    return BoundCall(function, own_args, own_kwargs, None), tuple(values)


def _is_apart(value: Any) -> bool:
    """Whether it is an object that stands in no graph and has nothing to do with what is traced: a type, a function without a closure."""
    if isinstance(value, functools.partial):
        return all(isinstance(x, _PLAIN) or _is_apart(x) for x in pytree.tree_leaves((value.func, value.args, value.keywords)))
    return isinstance(value, _OPAQUE) or (inspect.isfunction(value) and value.__closure__ is None)


class Unrecordable(RuntimeError):
    """The forward did something that a graph cannot say."""


def storage_key(t: torch.Tensor) -> Any:
    """What tells a tensor's storage from others."""
    return id(t._storage) if isinstance(t, XLATensor) else t.untyped_storage()._cdata


class CallRecorder(TorchFunctionMode):
    """Inside `with recorder:` calls become nodes of `graph`, in the order in which Python makes them.

    Tensors that were there before are constants. One that comes to be otherwise than by such a call is refused.

    Args:
        weights: parameters and buffers, as (tensor, dotted name).
        modules: those that are one node each, by name. What happens inside them is not recorded.
    """

    def __init__(self, weights: Sequence[tuple[torch.Tensor, str]], modules: Mapping[str, nn.Module]):
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._before = {id(t): t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
        self._nodes: dict[int, fx.Node] = {}
        self._weights = {id(t): name for t, name in weights}
        self._modules = {id(module): name for name, module in modules.items()}
        self._kept: list[Any] = [t for t, _ in weights]
        self._storages = {storage_key(t) for t, _ in weights}
        self._inside = False
        self._base = Context()
        self._drawn = draws.drawn_by_python()
        self._ops = _Ops()
        self._entered = contextlib.ExitStack()

    # -- running --------------------------------------------------------------------------------------

    def __enter__(self) -> CallRecorder:
        self._base = Context()
        self._entered.enter_context(self._ops)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            if not args[0].dim():
                raise TypeError("iteration over a 0-d tensor")
            return iter(self.called(torch.Tensor.unbind, (args[0], 0), {}))
        name = _name(func)
        if name == "__set__":
            self.refuse(f"sets .{_name(func.__self__)} of a tensor", "make a new tensor")
        if name in _HOOKS:
            self.refuse(f"calls {name} of a tensor", "do it in a module that is kept whole")
        if name in _READS:
            self.refuse(f"reads the value of a tensor ({name})", "compute with torch.where")
        if name == "__get__":
            return self.called(getattr, (args[0], _name(func.__self__)), {}, func=lambda x, _: func(x))
        if func is getattr(torch.Tensor, name, None) and not name.startswith("__"):
            return self.called(func, args, kwargs, method=name)
        return self.called(func, args, kwargs)

    def called(self, target: Any, args: Any, kwargs: Any, func: Callable[..., Any] | None = None, method: str | None = None) -> Any:
        """Call a function and record it as a node, unless it neither gives nor writes tensors. func: what is called here, if it is not `target`."""
        with self._hidden():
            found = (func or target)(*args, **kwargs)
        made = _tensors(found)
        if not made and not self._ops.written:
            return found
        if method is not None and Context() == self._base and self._plain((args, kwargs)):
            node = self.graph.call_method(method, self.argument(tuple(args)), self.argument(dict(kwargs)))
        else:
            node = self._function(target, args, kwargs)
        return self._recorded(node, (args, kwargs), found)

    def module_called(self, name: str, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Call a module and record it as one node. One that looks at values (whether a mask is all ones) is called again as if it were compiled."""
        given = self.argument(tuple(args)), self.argument(dict(kwargs))
        self.check_draws()
        context, watched = Context(), layer_nodes.Watched()
        with self._hidden():
            try:
                with compiling(False):
                    found = call()
            except executor.AskedForValueError:
                watched.forget()
                with compiling(True):
                    found = call()
        self._drawn = draws.drawn_by_python()
        if Context() != context:
            self.refuse(f"calls {name}, which leaves gradients or autocast switched on or off", "put them back in the module")
        node = self.graph.call_module(name, *given)
        if context != self._base:
            node.meta[layer_nodes.CONTEXT] = context
        inside = watched.inside(_tensors((args, kwargs, found)))
        if inside:
            node.meta[layer_nodes.KEYS] = {key: len(made) for key, made in inside.items()}
            self._recorded(node, (args, kwargs), (found, tuple(t for made in inside.values() for t in made)))
            return found
        return self._recorded(node, (args, kwargs), found)

    def check_draws(self) -> None:
        """Refuse random numbers of the host that were drawn outside of modules: a branch on them would be the same in every step."""
        if draws.drawn_by_python() != self._drawn:
            self.refuse(
                "draws random numbers of Python's or NumPy's between layers (to leave out some of them, say)",
                "do that inside a module that is kept whole",
            )

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        self._inside = True
        self._ops.written = {}
        try:
            yield
        finally:
            self._inside = False

    def _recorded(self, node: fx.Node, given: Any, found: Any) -> Any:
        touched = {storage_key(t) for t in (*_tensors(given), *_tensors(found))}
        node.meta[WRITES] = frozenset(key for key in self._ops.written if key in touched or key in self._storages)
        node.meta[TOUCHES] = frozenset(touched)
        self.bind(found, node)
        return found

    def _function(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        context = Context()
        written_by_fx = not inspect.ismethod(target)  # it would write a method as if it were a function
        if written_by_fx and context == self._base and self._plain((args, kwargs)):
            return self.graph.call_function(target, self.argument(tuple(args)), self.argument(dict(kwargs)))
        values: list[Any] = []
        bound = BoundCall(
            target, self._slots(tuple(args), values), self._slots(dict(kwargs), values), None if context == self._base else context
        )
        return self.graph.call_function(bound, tuple(values))

    # -- values ---------------------------------------------------------------------------------------

    def bind(self, value: Any, node: fx.Node) -> None:
        """Let a value, and what is in it, stand for a node."""
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._keep(value)
        elif isinstance(value, (tuple, list)):
            for k, part in enumerate(value):
                if _holds(part):
                    self.bind(part, self.graph.call_function(operator.getitem, (node, k)))
        elif isinstance(value, Mapping):
            for key, part in value.items():
                if _holds(part):
                    self.bind(part, self.graph.call_function(operator.getitem, (node, key)))
        elif _is_dataclass(value):
            for f in dataclasses.fields(value):
                if _holds(part := getattr(value, f.name)):
                    self.bind(part, self.graph.call_function(getattr, (node, f.name)))
        elif _holds(value):
            self._nodes[id(value)] = node
            self._kept.append(value)

    def _keep(self, t: torch.Tensor) -> None:
        self._kept.append(t)
        self._storages.add(storage_key(t))

    def argument(self, value: Any) -> Any:
        """A value as the argument of a node."""
        known = self._nodes.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.argument, value))
        if isinstance(value, (tuple, list)):
            return (tuple if isinstance(value, tuple) else list)(map(self.argument, value))
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if type(value) is dict:
            return {key: self.argument(part) for key, part in value.items()}
        if _is_dataclass(value):
            return self._dataclass(value)
        if value is None or value is Ellipsis or isinstance(value, base_types):
            return value
        self.refuse(
            f"hands on an object of type {type(value).__name__}",
            "make it inside a module that is kept whole, or leave it out (caches of keys and values are not for training: use_cache=False)",
        )

    def _dataclass(self, value: Any) -> fx.Node:
        """An object with fields (transformers' `ModelOutput`, say) as a call of its class."""
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        given = {name: self.argument(part) for name, part in fields.items() if part is not None}
        return self.graph.call_function(type(value), (), given)

    def _tensor(self, t: torch.Tensor) -> fx.Node:
        name = self._weights.get(id(t))
        if name is None:
            if torch._C._functorch.is_functorch_wrapped_tensor(t):
                self.refuse("uses torch.func (vmap, grad)", "do that inside a module that is kept whole")
            if isinstance(t, nn.Parameter):
                self.refuse(f"uses a parameter of shape {tuple(t.shape)} that is not registered", "make it an attribute of its module")
            if id(t) not in self._before:
                self.refuse(
                    f"uses a tensor of shape {tuple(t.shape)} that no torch function made",
                    "name the function that made it in autowrap_functions; if a layer that is one node made it beside its result (it is kept in a list or an "
                    "attribute), let the layer return it, or leave it out",
                )
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = t
            self._weights[id(t)] = name
            self._keep(t)
        return self.graph.get_attr(name)

    def _plain(self, value: Any) -> bool:
        """Whether a graph can say it."""
        return not any(isinstance(x, (*_OPAQUE, functools.partial)) or inspect.isfunction(x) for x in pytree.tree_leaves(value))

    def _slots(self, value: Any, values: list[Any]) -> Any:
        """A structure with slots for its nodes, which go to `values`."""
        if _is_apart(value):
            return value
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size) and not hasattr(value, "_fields"):
            return (tuple if isinstance(value, tuple) else list)(self._slots(x, values) for x in value)
        if type(value) is dict:
            return {key: self._slots(x, values) for key, x in value.items()}
        found = self.argument(value)
        if not any(True for x in pytree.tree_leaves(found) if isinstance(x, fx.Node)):
            return found
        values.append(found)
        return Slot(len(values) - 1)

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Raise the error that says what cannot be traced."""
        raise Unrecordable(f"its forward {what}: {advice}")

    # -- modules and functions ------------------------------------------------------------------------

    def module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of a class's `__call__`."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = None if self._inside else self._modules.get(id(module))
            if name is None:
                return original(module, *args, **kwargs)
            return self.module_called(name, lambda: original(module, *args, **kwargs), args, kwargs)

        return call

    def function_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of a function that is to be one node."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self._inside else self.called(function, args, kwargs)

        return call

    def autograd_call(self, original: Any) -> Any:
        """In the place of `torch.autograd.Function.apply`: a function with a gradient of its own is one node."""

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(None, cls)
            return bound(*args, **kwargs) if self._inside else self.called(bound, args, kwargs)

        return classmethod(apply)


@contextlib.contextmanager
def compiling(said: bool) -> Iterator[None]:
    """A block in which `torch.compiler.is_compiling()` is this: if true, model code does not look at values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = said
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _Ops(TorchDispatchMode):
    """Sees every op, and notes the storages that ops write in place since `written` was emptied.

    The tensors are kept with them: another tensor's storage would else get the key of one that is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            found = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable:
            for k, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[k] if k < len(args) else (kwargs or {}).get(argument.name)
                    self.written.update((storage_key(t), t) for t in _tensors(value))
        return found


def _name(func: Any) -> str:
    if isinstance(func, property):
        return getattr(func.fget, "__name__", "property")
    return getattr(func, "__name__", type(func).__name__)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value: in tuples, lists and dicts of any class, and in dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for x in value for t in _tensors(x)]
    if isinstance(value, Mapping):
        return [t for x in value.values() for t in _tensors(x)]
    if _is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in _tensors(getattr(value, f.name, None))]
    return []


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _holds(value: Any) -> bool:
    """Whether there may be a tensor in a value."""
    return isinstance(value, torch.Tensor) or not (value is None or value is Ellipsis or isinstance(value, (*base_types, torch.Size)))
