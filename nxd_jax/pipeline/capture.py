"""A model as a torch.fx graph of its layers, from one run of its forward: for models that `trace`, symbolic tracing, refuses.

The run has tensors with shapes and without values, on "xla", in place of inputs and weights, so it computes nothing. Sizes are constants of the graph: it holds
for inputs of the same shapes and dtypes (`Specs`). What a tensor's value decides is refused; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxd_jax.pipeline import draws, layer_nodes
from nxd_jax.pipeline.call_recorder import TOUCHES, WRITES, CallRecorder, compiling
from nxd_jax.pipeline.trace import check_buffers, place_of_error
from torch_bridge.ir.layout import layout
from torch_bridge.ir.segment import Segment
from torch_bridge.recorder.subgraph import abstract, recording
from torch_bridge.recorder.tensor import XLATensor


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of an input: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Specs = Mapping[str, Any]
"""By input of the model, a `Spec` or a list or tuple of them."""


def specs_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes and dtypes of inputs."""
    return {name: pytree.tree_map_only(torch.Tensor, lambda t: Spec(tuple(t.shape), t.dtype), value) for name, value in inputs.items()}


def capture(
    model: nn.Module,
    inputs: Specs,
    constants: Mapping[str, Any],
    layers: Iterable[str],
    cuts: Iterable[str] = (),
    leaf_modules: Sequence[str] = (),
    functions: Sequence[Any] = (),
) -> fx.GraphModule:
    """The model's forward as a GraphModule of calls of its layers and of torch functions.

    Args:
        model: the module; its weights may lie on any device, "meta" too. They and its state stay as they are, and so do random numbers.
        inputs: shapes and dtypes of the inputs.
        constants: the other arguments of its forward.
        layers: dotted names of layers that are to be nodes: modules that have one of them inside are looked into, all others are one node each.
        cuts: the same, and `leaf_modules` does not hold for modules that have them inside.
        leaf_modules: class names or dotted names of modules that are one node, even so.
        functions: functions, or Python modules of them, whose calls are one node each.

    Raises RuntimeError, with the line, for a forward that needs values of tensors or makes tensors in ways that cannot be seen.
    """
    asked, allowed = _holders(cuts), _holders(layers)
    modules: dict[str, nn.Module] = {}
    looked_into = [model]
    for name, module in model.named_modules():
        if name in asked or (name in allowed and not {type(module).__name__, name} & set(leaf_modules)):
            looked_into.append(module)
        elif name:  # an activation checkpoint and the layer in it have one name: what is there under that name is the checkpoint
            modules.setdefault(name, module)
    try:
        with recording() as segment, draws.kept(), _stand_ins(model, segment, looked_into) as weights, torch.enable_grad():
            recorder = CallRecorder(weights, modules)
            given = {name: _input(recorder, segment, name, spec) for name, spec in inputs.items()}
            with (
                _calls_replaced(recorder, model, looked_into, functions),
                compiling(True),
                _without_cache(model),
                recorder,
                _dicts_inside(model) as wants_tuple,
            ):
                found = model(**given, **constants)
                recorder.check_draws()
            hooked = layer_nodes.hooked(model)
            recorder.graph.output(
                recorder.argument(_plain_tuple(found.to_tuple() if wants_tuple and hasattr(found, "to_tuple") else found))
            )
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, IndexError) as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be traced by running it without values: {error}{place_of_error(error)}. Keep the module that does this whole: "
            "add its class name to leaf_modules; or make it a module of its own"
        ) from error
    made = _graph_module(model, recorder)
    layer_nodes.give(made, hooked)
    return made


@contextlib.contextmanager
def _dicts_inside(model: nn.Module) -> Iterator[bool]:
    """A block in which modules of transformers return dicts, although `config.return_dict` is False: today's read each other's results by name.

    Gives whether the model is to return a tuple. NxD's scripts set that option.
    """
    config = getattr(model, "config", None)
    wants_tuple = getattr(config, "return_dict", None) is False
    try:
        if wants_tuple:
            config.return_dict = True  # type: ignore[union-attr]
        yield wants_tuple
    finally:
        if wants_tuple:
            config.return_dict = False  # type: ignore[union-attr]


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A block in which transformers' models do not make caches of keys and values by themselves: not all of their forwards take `use_cache`."""
    found = {id(config): config for config in (getattr(m, "config", None) for m in model.modules())}
    configs = [config for config in found.values() if getattr(config, "use_cache", None) is True]
    for config in configs:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True  # type: ignore[union-attr]


def _holders(names: Iterable[str]) -> set[str]:
    """Names of the modules that have modules of these names inside."""
    parts = [name.split(".") for name in names]
    return {".".join(path[:k]) for path in parts for k in range(1, len(path))}


def _graph_module(model: nn.Module, recorder: CallRecorder) -> fx.GraphModule:
    for name, value in recorder.constants.items():
        setattr(model, name, value)
    try:
        made = fx.GraphModule(model, recorder.graph, type(model).__name__)
    finally:
        for name in recorder.constants:
            delattr(model, name)
    made.graph.eliminate_dead_code(lambda node: bool(node.meta.get(WRITES)) or node.is_impure())
    made.graph.lint()
    made.recompile()
    return made


def _input(recorder: CallRecorder, segment: Segment, name: str, spec: Any) -> Any:
    value = pytree.tree_map_only(Spec, lambda s: abstract(segment, layout(s.shape, None, 0, s.dtype)), spec)
    recorder.bind(value, recorder.graph.placeholder(name))
    return value


def _plain_tuple(found: Any) -> Any:
    """What a forward returns, as the output of a graph can say it."""
    return tuple(found) if isinstance(found, tuple) and hasattr(found, "_fields") else found


@contextlib.contextmanager
def _stand_ins(model: nn.Module, segment: Segment, looked_into: Sequence[nn.Module]) -> Iterator[list[tuple[torch.Tensor, str]]]:
    """A block in which a model's parameters and buffers have no values, with those tensors and their names. Attributes of modules are put back after it.

    Raises RuntimeError if the block gave one of the modules that are looked into another buffer.
    """
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, torch.Tensor] = {}
    names: list[tuple[torch.Tensor, str]] = []
    try:
        for prefix, module in model.named_modules():
            undo.append((module.__dict__, dict(module.__dict__)))
            undo += [(held, dict(held)) for held in module.__dict__.values() if isinstance(held, dict)]
            for held in (module._parameters, module._buffers):
                for name, t in held.items():
                    if t is None:
                        continue
                    if id(t) not in made:
                        made[id(t)] = _stand_in(segment, t)
                        names.append((made[id(t)], f"{prefix}.{name}" if prefix else name))
                    held[name] = made[id(t)]
        buffers = [(module, dict(module._buffers)) for module in looked_into]
        yield names
        prefixes = {id(module): prefix for prefix, module in model.named_modules()}
        for module, before in buffers:
            check_buffers(prefixes[id(module)], module, before)
    finally:
        for held, before in reversed(undo):
            held.clear()
            held.update(before)


def _stand_in(segment: Segment, t: torch.Tensor) -> XLATensor:
    found = abstract(segment, layout(tuple(t.shape), None, 0, t.dtype))
    if isinstance(t, nn.Parameter):
        found.requires_grad_(t.requires_grad)
        found._is_param = True
    found.__dict__.update({name: value for name, value in t.__dict__.items() if not name.startswith("_")})
    return found


@contextlib.contextmanager
def _calls_replaced(recorder: CallRecorder, model: nn.Module, looked_into: Sequence[nn.Module], functions: Sequence[Any]) -> Iterator[None]:
    """A block in which calls of modules, of autograd functions and of `functions` go through the recorder."""
    with contextlib.ExitStack() as undo:
        classes = {cls: None for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        for cls in classes:
            if "__call__" in vars(cls):
                _set(undo, cls, "__call__", recorder.module_call(vars(cls)["__call__"]))
        _set(undo, torch.autograd.Function, "apply", recorder.autograd_call(vars(torch.autograd.Function)["apply"]))
        replaced = {id(function): recorder.function_call(function) for function in _functions(functions)}
        known: dict[int, dict[str, Any]] = {id(vars(m)): vars(m) for m in functions if isinstance(m, ModuleType)}
        for module in looked_into:
            names = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
            known[id(names)] = names
        for names in known.values():
            for name, value in list(names.items()):
                if id(value) in replaced:
                    undo.callback(names.__setitem__, name, value)
                    names[name] = replaced[id(value)]
        yield


def _functions(given: Sequence[Any]) -> Iterator[Callable[..., Any]]:
    for one in given:
        if isinstance(one, ModuleType):
            yield from (f for f in vars(one).values() if inspect.isfunction(f))
        else:
            yield one


def _set(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def check_writes(traced: fx.GraphModule, stage_of: Mapping[fx.Node, int]) -> None:
    """Raise RuntimeError for a tensor that one stage writes in place and another uses: each stage has a copy of its own of what it gets."""
    users: dict[Any, set[int]] = {}
    for node in traced.graph.nodes:
        for key in node.meta.get(TOUCHES, ()):
            users.setdefault(key, set()).add(stage_of[node])
    for node in traced.graph.nodes:
        for key in node.meta.get(WRITES, ()):
            others = users[key] - {stage_of[node]} if key in users else set()
            if others:
                raise RuntimeError(
                    f"stage {stage_of[node]} of the pipeline writes a tensor in place ({node.name}) that stage {min(others)} uses, too: a stage cannot change "
                    "another's tensors. Write the operation out of place, or cut the model elsewhere"
                )
