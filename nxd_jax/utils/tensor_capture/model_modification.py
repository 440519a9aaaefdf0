"""`neuronx_distributed.utils.tensor_capture.model_modification`: the hooks that capture, in the registry or in files."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nxd_jax.utils.tensor_capture.registry import TensorRegistry

logger = logging.getLogger("nxd_jax")


def modify_model_for_tensor_capture(
    model: nn.Module, modules_to_capture: Sequence[str] | None = None, max_tensors: int | None = None, capture_inputs: bool = False
) -> nn.Module:
    """What `enable_tensor_capture` does."""
    names = list(modules_to_capture or [])
    modules = dict(model.named_modules(remove_duplicate=False))
    check_names(names, find_available_modules(model))
    registry = TensorRegistry.get_instance()
    registry.configure(enabled=True, modules=names, max_tensors=max_tensors, capture_inputs=capture_inputs)
    info = registry.model_info
    info.hooks.append(model.register_forward_pre_hook(lambda module, args: info.forward_begins()))
    for name in names:
        info.hooks.append(modules[name].register_forward_hook(_Capture(name, capture_inputs), with_kwargs=True))
    info.hooks.append(model.register_forward_hook(lambda module, args, output: info.forward_ends(), always_call=True))
    logger.info("tensors of %s are captured", ", ".join(names) or "no modules")
    return model


def modify_hf_eager_model_for_tensor_capture(
    model: nn.Module,
    modules_to_capture: Sequence[str] | None = None,
    tensor_capture_save_dir: str | Path = "",
    capture_inputs: bool = False,
) -> tuple[nn.Module, list[RemovableHandle], Callable[..., Any]]:
    """Write what these modules of a model of transformers give to files, for comparisons; values are read.

    Names are those of the model, without a leading `model.`. Forward n writes `captured_tensors_{cte | tkg}_step_{n}_module_{name}_output[_{entry}].pt` (cte is
    the first one, on the prompt), and with `capture_inputs` `..._inputs_{entry}.pt`, in a folder that is made if there is none; default the current one.

    Returns the model, the hooks to remove, and its forward to put back. Raises ValueError for names of modules that the model has not.
    """
    names, folder = list(modules_to_capture or []), Path(tensor_capture_save_dir)
    modules = {name.removeprefix("model."): module for name, module in model.named_modules(remove_duplicate=False) if name}
    check_names(names, list(modules))
    folder.mkdir(parents=True, exist_ok=True)
    original, steps = model.forward, [1]

    def write(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        start = f"captured_tensors_{'cte' if steps[0] == 1 else 'tkg'}_step_{steps[0]}_module_{name}"
        given = {"inputs": args, "inputs_kwargs": kwargs} if capture_inputs else {}
        for part, value in {**given, "output": output}.items():
            for way, tensor in tensors_in("", value):
                torch.save(tensor.detach().cpu(), folder / f"{start}_{part}{way.replace('.', '_')}.pt")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        steps[0] += 1
        return found

    model.forward = forward
    hooks = [modules[name].register_forward_hook(functools.partial(write, name), with_kwargs=True) for name in names]
    return model, hooks, original


def restore_model(model: nn.Module) -> nn.Module:
    """Take the hooks away; what was captured stays."""
    registry = TensorRegistry.get_instance()
    registry.remove_hooks()
    registry.enabled = False
    return model


def find_available_modules(model: nn.Module, prefix: str = "") -> list[str]:
    """The names of all modules inside a model, each with a prefix and a dot before it if one is given."""
    return [f"{prefix}.{name}" if prefix else name for name, _ in model.named_modules(remove_duplicate=False) if name]


def check_names(names: Sequence[str], available: Sequence[str]) -> None:
    """Raises ValueError for names of modules that there are not."""
    if unknown := [name for name in names if name not in available]:
        raise ValueError(
            f"the model has no modules {unknown}: get_available_modules(model) gives the names of its {len(available)} modules"
        )


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in tuples, lists, dicts, dataclasses and plain attributes of objects, by the name given and the way to them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors_in(f"{name}.{i}", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(f"{name}.{field.name}", getattr(value, field.name))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for key, item in vars(value).items():
            if isinstance(item, torch.Tensor) and not key.startswith("_"):
                yield f"{name}.{key}", item


class _Capture:
    """A forward hook that registers a module's tensors."""

    def __init__(self, name: str, inputs: bool) -> None:
        self.name, self.inputs = name, inputs

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        registry = TensorRegistry.get_instance()
        given = {"inputs": args, "inputs.kwargs": kwargs} if self.inputs else {}
        for part, value in {**given, "outputs": output}.items():
            for key, tensor in tensors_in(f"{self.name}.{part}", value):
                registry.register_tensor(key, tensor, module)
