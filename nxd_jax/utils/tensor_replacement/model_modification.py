"""`neuronx_distributed.utils.tensor_replacement.model_modification`: a forward that takes tensors to replace others with."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nxd_jax.utils.tensor_capture.model_modification import check_names, find_available_modules
from nxd_jax.utils.tensor_replacement.registry import RuntimeRegister


def modify_model_for_tensor_replacement(model: nn.Module) -> tuple[nn.Module, dict[str, RemovableHandle]]:
    """The model, which now takes n tensors and n masks after its own arguments, for the n modules of `RuntimeRegister.module_superset`, and its hooks by name.

    Where a mask (bool, or numbers that are not 0) is set, the module's output is the tensor's entry, in the output's dtype; both must broadcast to its shape.

    Raises ValueError for names of modules that the model has not. Its forward raises ValueError for another number of tensors, TypeError for a module that
    gives something else than a tensor.
    """
    names = RuntimeRegister.module_superset
    check_names(names, find_available_modules(model))
    patch_forward_with_additional_args(model, names)
    modules = dict(model.named_modules(remove_duplicate=False))
    return model, {name: modules[name].register_forward_hook(functools.partial(_replace, name)) for name in names}


def patch_forward_with_additional_args(model: nn.Module, module_superset: Sequence[str]) -> nn.Module:
    """Let a model's forward take the tensors and masks; the hooks of `modify_model_for_tensor_replacement` use them.

    All positional arguments that its own forward has must be given, those with defaults too: what comes after them are tensors and masks. By name these are
    `tensor_{module}` and `mask_{module}`, dots as underscores.
    """
    original = model.forward
    own = list(inspect.signature(original).parameters.values())
    positional = [p.name for p in own if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    added = [f"{kind}_{name.replace('.', '_')}" for kind in ("tensor", "mask") for name in module_superset]
    count = len(module_superset)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = sum(name not in kwargs for name in positional)
        given = [*args[first:], *(kwargs.pop(name) for name in added if name in kwargs)]
        if len(given) != 2 * count:
            raise ValueError(
                f"expected {2 * count} trailing replacement args (a tensor, then a mask, for each of {list(module_superset)}) after all of forward's own "
                f"({', '.join(positional)}), got {len(given)}"
            )
        RuntimeRegister.register_runtime_args(tr_args=given[:count], mask_args=given[count:])
        try:
            return _of(self, model, original)(*args[:first], **kwargs)
        finally:
            RuntimeRegister.clear_runtime_args()

    forward.__signature__ = _longer(own, [*positional, *added])  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)
    return model


def _of(module: nn.Module, model: nn.Module, forward: Any) -> Any:
    """A model's forward; as that of the module, if that is a copy of the model."""
    if module is model:
        return forward
    method = forward if inspect.ismethod(forward) else getattr(forward, "__wrapped__", None)  # played models have another object there
    if inspect.ismethod(method) and method.__self__ is model:
        return types.MethodType(method.__func__, module)
    return forward


def _longer(own: list[Parameter], names: list[str]) -> inspect.Signature:
    """The signature that forward has now, for those who ask what to give it."""
    keywords = [p for p in own if p.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)]
    return inspect.Signature([*(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)), *keywords])


def _replace(name: str, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
    tensor, mask = RuntimeRegister._tr_runtime_list.get(name), RuntimeRegister._tr_mask_list.get(name)
    if tensor is None or mask is None:
        raise ValueError(f"there is no tensor and mask for {name}: call the model itself, which takes them after its own arguments")
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"{name} gives a {type(output).__name__}: only modules that give one tensor can be replaced")
    shape = output.shape
    return torch.where(mask.to(torch.bool).broadcast_to(shape), tensor.to(output.dtype).broadcast_to(shape), output)
