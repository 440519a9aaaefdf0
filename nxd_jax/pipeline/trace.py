"""`neuronx_distributed.pipeline.trace`: a model as a torch.fx graph whose nodes are layers, to see and choose where it is cut into stages.

Tracing is symbolic: Python runs once with proxies in place of tensors, so a forward that branches on a tensor cannot be traced. Name the modules that do so
in `leaf_modules`: they become one node each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import os
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import torch_bridge
from nxd_jax.pipeline import draws
from nxd_jax.pipeline.call_recorder import Context, bound_call
from nxd_jax.tensor_parallel.random import get_xla_rng_tracker
from nxd_jax.utils.model_utils import is_hf_pretrained_model

HF, TORCH = "hf", "torch"


class NxDTracer(fx.Tracer):
    """`trace.NxDTracer`: a tracer that keeps chosen modules as one node.

    Args:
        leaf_modules: names of classes (or parts of them), or dotted names of modules, that are not looked into; `torch.nn`'s own are not either.
        autowrap_modules: Python modules whose functions are recorded as calls.
        autowrap_functions: functions that are recorded as calls.
        autowrap_obj_methods: by object, names of methods that are recorded as calls.
    """

    proxy_buffer_attributes = True  # what is made of a buffer is computed in every step: its values may change

    def __init__(
        self,
        leaf_modules: Sequence[str] = (),
        autowrap_modules: Sequence[ModuleType] = (),
        autowrap_functions: Sequence[Callable[..., Any]] = (),
        autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
    ):
        modules: Any = (math, *autowrap_modules)  # torch annotates a tuple of one
        super().__init__(autowrap_modules=modules, autowrap_functions=tuple(autowrap_functions))
        self.leaf_modules = tuple(leaf_modules)
        self.autowrap_obj_methods = dict(autowrap_obj_methods or {})
        self._constants: dict[str, Any] = {}
        self._context = Context()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        name = type(m).__name__
        return any(leaf in name or leaf == module_qualified_name for leaf in self.leaf_modules) or super().is_leaf_module(
            m, module_qualified_name
        )

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of a module. concrete_args: values of the parameters of its forward that are no inputs (`get_concrete_args`)."""
        self._constants = dict(concrete_args or {})
        self._context = Context()
        with _recorded(self.autowrap_obj_methods), _own_gradients_recorded():
            return super().trace(root)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, which is evaluated with gradients and autocast as they are around the model. RuntimeError if its forward has switched them."""
        if self._context != Context():
            raise RuntimeError("its forward switches gradients or autocast on or off, which a graph of operations does not show")
        return super().create_node(*args, **kwargs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The forward and what it is called with: a placeholder for each input, constants for the rest."""
        parameters = list(inspect.signature(root_fn).parameters.values())[is_module:]
        given = {
            p.name: self._constants[p.name] if p.name in self._constants else self.create_proxy("placeholder", p.name, (), {})
            for p in parameters
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        args: list[Any] = [self.root] if is_module else []
        args += [given[p.name] for p in parameters if p.kind is p.POSITIONAL_ONLY]
        return functools.partial(
            root_fn, **{p.name: given[p.name] for p in parameters if p.name in given and p.kind is not p.POSITIONAL_ONLY}
        ), args


class TorchTracerWrapper(NxDTracer):
    """`trace.TorchTracerWrapper`: for models in plain torch."""


class HFTracerWrapper(NxDTracer):
    """`trace.HFTracerWrapper`: for models of transformers. (transformers no longer has a tracer of its own; `NxDPPModel` traces their
    models by running them, `capture.py`.)
    """


TRACERS: dict[str, type[NxDTracer]] = {HF: HFTracerWrapper, TORCH: TorchTracerWrapper}


def get_tracer_class(model: nn.Module, tracer_cls: str | type[fx.Tracer] | None = None) -> type[fx.Tracer]:
    """`trace.get_tracer_class`: the class that is meant. tracer_cls: "hf", "torch", a class, or None: by the model. ValueError for anything else."""
    if tracer_cls is None:
        tracer_cls = HF if is_hf_pretrained_model(model) else TORCH
    if isinstance(tracer_cls, str) and tracer_cls in TRACERS:
        return TRACERS[tracer_cls]
    if isinstance(tracer_cls, type) and issubclass(tracer_cls, fx.Tracer):
        return tracer_cls
    raise ValueError(f"tracer_cls={tracer_cls!r} must be {HF!r}, {TORCH!r}, a subclass of torch.fx.Tracer, or None")


def get_concrete_args(
    model: nn.Module, input_names: Sequence[str] | None, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`trace.get_concrete_args`: the parameters of the model's forward that are no inputs, with their defaults (`inspect.Parameter.empty` without one).

    input_names: the inputs; None: what `args` and `kwargs` give. Raises ValueError for a name that the forward does not have, or if nothing is given.
    """
    signature = inspect.signature(model.forward)
    parameters = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if input_names is None:
        if not args and not kwargs:
            raise ValueError("say what the inputs are: input_names, or example args and kwargs")
        positional = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        if len(args or ()) > len(positional):
            raise ValueError(
                f"{len(args or ())} args were given, {type(model).__name__}.forward takes {len(positional)}: {', '.join(positional)}"
            )
        input_names = [*positional[: len(args or ())], *(kwargs or {})]
    unknown = [name for name in input_names if name not in parameters]
    if unknown:
        there = (
            f"it has {', '.join(parameters)}" if parameters else "it has no named parameters, and micro-batches go in by name: give it some"
        )
        raise ValueError(f"{type(model).__name__}.forward has no input named {', '.join(unknown)}; {there}")
    return {name: p.default for name, p in parameters.items() if name not in input_names}


def constants_of(
    model: nn.Module, input_names: Sequence[str] | None, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`get_concrete_args`, each with a value. Raises ValueError for a parameter that is neither an input nor has a default."""
    found = get_concrete_args(model, input_names, args, kwargs)
    missing = [name for name, default in found.items() if default is inspect.Parameter.empty]
    if missing:
        raise ValueError(f"{type(model).__name__}.forward needs {', '.join(missing)}, which has no default: add it to input_names")
    return found


def trace_model(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    leaf_modules: Sequence[str] | None = None,
    autowrap_functions: Sequence[Callable[..., Any]] | None = None,
    autowrap_modules: Sequence[ModuleType] | None = None,
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
    tracer_cls: str | type[fx.Tracer] | None = None,
) -> fx.GraphModule:
    """`trace.trace_model`: the model as a GraphModule; what nothing needs is left out.

    Args:
        model: the module.
        args, kwargs: example inputs, of which the names matter alone.
        input_names: names of the inputs in place of examples; the other parameters of the forward become constants (their defaults).
        leaf_modules, autowrap_functions, autowrap_modules, autowrap_obj_methods: of the tracer (`NxDTracer`).
        tracer_cls: "hf", "torch", or a class (`get_tracer_class`).

    Raises ValueError for wrong names, RuntimeError for a model whose Python needs values of tensors.
    """
    constants = constants_of(model, input_names, args, kwargs)
    cls: Any = get_tracer_class(model, tracer_cls)
    tracer = cls(
        leaf_modules=tuple(leaf_modules or ()),
        autowrap_modules=tuple(autowrap_modules or ()),
        autowrap_functions=tuple(autowrap_functions or ()),
        autowrap_obj_methods=autowrap_obj_methods,
    )
    try:
        with draws.kept(), attributes_kept(model):
            before, forks, python = draws.drawn(), list[str](), draws.drawn_by_python()
            with get_xla_rng_tracker().telling(forks.append):
                graph = tracer.trace(model, concrete_args=constants)
            if draws.drawn() != before:
                raise RuntimeError("its forward draws random tensors that depend on no input, which would be the same in every step")
            if draws.drawn_by_python() != python:
                raise RuntimeError("its forward draws random numbers of Python's or NumPy's, which would be the same in every step")
            if forks:
                raise RuntimeError("its forward draws within get_xla_rng_tracker().fork(), which a graph of operations does not show")
            made = fx.GraphModule(model, graph, type(model).__name__)  # has the constants that tracing has left in the model
    except (fx.proxy.TraceError, TypeError, RuntimeError) as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be traced symbolically: {error}{place_of_error(error)}. Python there needs a tensor's value or shape: add the "
            "class name of the module to leaf_modules, or the function to autowrap_functions"
        ) from error
    made.graph.eliminate_dead_code(lambda node: _writes(node) or node.is_impure())
    made.graph.lint()
    made.recompile()
    return made


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """A block after which the attributes of a model's modules are as they were. Raises RuntimeError if it gave a module another buffer."""
    before = [(prefix, module, dict(module.__dict__), dict(module._buffers)) for prefix, module in model.named_modules()]
    held = [(table, dict(table)) for _, module, _, _ in before for table in module.__dict__.values() if isinstance(table, dict)]
    try:
        yield
        for prefix, module, _, buffers in before:
            check_buffers(prefix, module, buffers)
    finally:
        for _, module, attributes, _ in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for table, entries in held:
            table.clear()
            table.update(entries)


def check_buffers(prefix: str, module: nn.Module, before: Mapping[str, Any]) -> None:
    """Raise RuntimeError if a forward has given a module another buffer than before: a graph cannot say that."""
    for name, buffer in before.items():
        if buffer is not None and module._buffers.get(name) is not buffer:
            path = f"{prefix}.{name}".lstrip(".")
            raise RuntimeError(
                f"its forward assigns the buffer {path} anew, and later steps would not see that: write it in place (self.{name}.copy_(...))"
            )


def _writes(node: fx.Node) -> bool:
    """Whether a call changes a tensor in place, so that it is needed though nobody takes its result."""
    name = str(node.target)
    return bool(node.kwargs.get("inplace")) or (node.op == "call_method" and name.endswith("_") and not name.endswith("__"))


def check_writes(traced: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> None:
    """Raise RuntimeError for a tensor that one stage writes in place and another makes or uses: each stage has a copy of its own of what it gets.

    (`x *= 2` is traced as `x = x * 2`; a model that assigns to a part of a tensor is traced by running it.)
    """
    for node in traced.graph.nodes:
        if not node.args or not isinstance(node.args[0], fx.Node) or not _writes_its_input(traced, node):
            continue
        written = node.args[0]
        while written.target is operator.getitem and isinstance(written.args[0], fx.Node):
            written = written.args[0]
        made_by = set() if written.op in ("placeholder", "get_attr") else {stage_of[written]}
        stages = {stage_of[user] for user in written.users} | made_by
        others = stages - {stage_of[node]}
        if others:
            raise RuntimeError(
                f"stage {stage_of[node]} of the pipeline writes a tensor in place ({node.name}) that stage {min(others)} makes or uses: a stage cannot change "
                "another's tensors. Write the operation out of place (x = x * 2 in place of x.mul_(2)), or cut the model elsewhere"
            )


def _writes_its_input(traced: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def place_of_error(error: BaseException) -> str:
    """Where in the model an error came from: its last line that is neither torch's nor of what stands for it here."""
    folders = (f"{pathlib.Path(str(module.__file__)).parent}{os.sep}" for module in (torch, torch_bridge))
    inside = (*folders, str(pathlib.Path(__file__).parent), str(contextlib.__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


@contextlib.contextmanager
def _recorded(methods: Mapping[Any, Sequence[str]]) -> Iterator[None]:
    """Record calls of these methods as nodes as long as the block runs. AttributeError for a method that an object does not have."""
    missing = object()
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, names in methods.items():
            for name in names:
                undo.append((owner, name, vars(owner).get(name, missing)))
                setattr(owner, name, _as_call(getattr(owner, name)))
        yield
    finally:
        for owner, name, before in reversed(undo):
            if before is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


@contextlib.contextmanager
def _own_gradients_recorded() -> Iterator[None]:
    """Record calls of autograd functions as one node each as long as the block runs: the operations inside would give other gradients than their own."""
    original: Any = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        proxy = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Proxy)), None)
        if proxy is None:
            return bound(*args, **kwargs)
        call, values = bound_call(bound, args, kwargs)
        return proxy.tracer.create_proxy("call_function", call, values, {})

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _as_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxy = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Proxy)), None)
        return method(*args, **kwargs) if proxy is None else proxy.tracer.create_proxy("call_function", method, args, kwargs)

    return call
