"""Example inputs of a trace against the signature of forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nxd_jax.trace.model_builder_utils import ModelParamInfo, ProvidedArgInfo


def provided(model: Any, args: Any, kwargs: Any) -> tuple[tuple[ProvidedArgInfo, ...], tuple[ModelParamInfo, ...]]:
    """The example inputs in the order of the signature, and the parameters of forward.

    Raises NotImplementedError for *args and **kwargs in the signature, ValueError for everything else that does not fit.
    """
    params = parameters(model)
    found = _positional(args, params)
    given = _keywords(kwargs, params, found)
    found += [ProvidedArgInfo(p.param_name, p.is_positional, given[p.param_name]) for p in params if p.param_name in given]
    there = {a.param_name for a in found}
    missing = [p.param_name for p in params if p.is_positional and p.param_name not in there]
    if missing:
        raise ValueError(f"forward needs {', '.join(missing)}: give an example tensor for each in args or kwargs")
    if not found:
        raise ValueError("a trace needs an example tensor for at least one parameter of forward, in args or kwargs")
    return tuple(found), params


def parameters(model: torch.nn.Module | Callable[..., Any] | None) -> tuple[ModelParamInfo, ...]:
    """What forward (or a function) takes. Raises as `provided` does."""
    if model is None:
        raise ValueError("the model is None: give an nn.Module or a function")
    signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    if not signature.parameters:
        raise ValueError("forward takes no parameters: a traced model needs at least one input tensor")
    found = []
    for name, p in signature.parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise NotImplementedError(f"forward takes {p}: name every parameter, so that inputs have names to be routed by")
        if p.default is not p.empty and p.default is not None:
            raise ValueError(
                f"parameter {name} of forward has default {p.default!r}: None is the only default that a traced model may have"
            )
        found.append(ModelParamInfo(name, p.default is p.empty))
    return tuple(found)


def _positional(args: Any, params: tuple[ModelParamInfo, ...]) -> list[ProvidedArgInfo]:
    if args is None:
        return []
    several = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(several, tuple) or not all(isinstance(t, torch.Tensor) for t in several):
        raise ValueError(f"args must be None, a tensor or a tuple of tensors, got {_named(args)}")
    if len(several) > len(params):
        raise ValueError(f"args has {len(several)} tensors, and forward takes {len(params)}: {', '.join(p.param_name for p in params)}")
    return [ProvidedArgInfo(p.param_name, p.is_positional, t) for p, t in zip(params, several, strict=False)]


def _keywords(kwargs: Any, params: tuple[ModelParamInfo, ...], found: list[ProvidedArgInfo]) -> Mapping[str, torch.Tensor]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"kwargs must be a dict of tensors, got {_named(kwargs)}")
    names = [p.param_name for p in params]
    unknown = [k for k in kwargs if k not in names]
    if unknown:
        raise ValueError(f"forward has no parameter {', '.join(map(str, unknown))}: it takes {', '.join(names)}")
    twice = [a.param_name for a in found if a.param_name in kwargs]
    if twice:
        raise ValueError(f"{', '.join(twice)} is given in args and in kwargs: give it once")
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"kwargs[{name!r}] must be a tensor, got {_named(value)}")
    return kwargs


def _named(x: object) -> str:
    if isinstance(x, (tuple, list)):
        return f"{type(x).__name__} of {', '.join(sorted({type(y).__name__ for y in x})) or 'nothing'}"
    return type(x).__name__
