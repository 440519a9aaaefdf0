"""`neuronx_distributed.utils.model_utils`: making models without memory for them, and moving them with their ties and parallel attributes."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from nxd_jax.parallel_layers import utils
from torch_bridge import processes, sharding, world

_ATTRIBUTES = (
    *utils._DEFAULTS,
    "expert_model_parallel",
    "expert_distribution",
    "is_prefill",
    "qkv_partition",
    "sequence_parallel_enabled",
    "shared",
)
"""Attributes of parameters that say how ranks share them."""

_PAYLOAD = ("_storage", "_layout", "_is_param")
"""What an xla tensor consists of: no attributes of a parameter."""

# -- ties and attributes -----------------------------------------------------------------------------


def is_hf_pretrained_model(model: Any) -> bool:
    """`model_utils.is_hf_pretrained_model`: whether a model is one of transformers' (which then has been imported)."""
    found = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return found is not None and isinstance(model, found)


def is_hf_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importable("transformers")


def is_hf_accelerate_available() -> bool:
    """Whether accelerate is installed. `init_on_device` does without it."""
    return importable("accelerate")


def is_nxdt_pretrained_model(model: Any) -> bool:
    """`model_utils.is_nxdt_pretrained_model`: whether a model is a `MegatronModule` of NeuronX Distributed Training."""
    found = getattr(sys.modules.get("neuronx_distributed_training.models.megatron.module"), "MegatronModule", None)
    return found is not None and isinstance(model, found)


def is_nxdt_available() -> bool:
    """Whether NeuronX Distributed Training is installed."""
    return importable("neuronx_distributed_training")


def importable(name: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    from importlib.util import find_spec

    return name in sys.modules or find_spec(name) is not None


def analyze_shared_parameters(module: nn.Module) -> list[list[str]]:
    """`model_utils.analyze_shared_parameters`: for each parameter that the model holds under several names, those names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def retie_shared_weights(module: nn.Module, shared_weight_names: list[list[str]]) -> None:
    """`model_utils.retie_shared_weights`: make the parameters of each list of names the first one's."""
    for first, *others in shared_weight_names:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, parameter)


@contextlib.contextmanager
def preserve_shared_weights(model: nn.Module, ignore_hf: bool = False) -> Iterator[None]:
    """`model_utils.preserve_shared_weights`: after the block, parameters that were one before it are one again (the first name's).

    Models of transformers then tie their weights themselves as well (`tie_weights`), unless `ignore_hf`.
    """
    shared = analyze_shared_parameters(model)
    try:
        yield
    finally:
        retie_shared_weights(model, shared)
        if is_hf_pretrained_model(model) and not ignore_hf:
            model.tie_weights()  # type: ignore[operator]


@contextlib.contextmanager
def preserve_parallel_attributes(model: nn.Module) -> Iterator[None]:
    """`model_utils.preserve_parallel_attributes`: after the block, parameters that were replaced in it have the attributes of the old ones.

    Tensor, expert and sequence parallel attributes and `shared`; also `rank_ordering` and `qkv_partition`, which NxD loses.
    """
    before = {name: _attributes(p) for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for key, value in before.get(name, {}).items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    return {key: getattr(parameter, key) for key in _ATTRIBUTES if hasattr(parameter, key)}


# -- moving ------------------------------------------------------------------------------------------


def move_model_to_device(model: nn.Module, device: Any) -> None:
    """`model_utils.move_model_to_device`: `model.to(device)`, keeping ties between weights and the attributes of parallel parameters."""
    with preserve_parallel_attributes(model), preserve_shared_weights(model):
        model.to(device)


def reinit_model(model: nn.Module, device: Any, param_init_fn: Callable[..., Any]) -> None:
    """`model_utils.reinit_model`: give every module empty parameters on a device (for those on "meta", say) and let `param_init_fn(module, device)` fill them.

    `param_init_fn(module)`, as earlier releases called it, works too. Attributes and ties are kept; of tied parameters the first one's values count.
    Weights that several ranks of this process share out are on xla once their layer's `init_weight_cpu()` has been called.
    """
    two = _takes_two(param_init_fn)
    with preserve_parallel_attributes(model), preserve_shared_weights(model), torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                    empty.__dict__.update(_attributes(parameter))
                    module._parameters[name] = empty
            param_init_fn(module, device) if two else param_init_fn(module)


def _takes_two(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments."""
    try:
        inspect.signature(fn).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def get_model_sequential(model: Any, device: Any, sequential_move_factor: int = 11, param_init_fn: Callable[..., Any] | None = None) -> Any:
    """`model_utils.get_model_sequential`: initialise a model on the CPU if `param_init_fn` is given (`reinit_model`), move it to a device, return it.

    Of the processes on a host, `sequential_move_factor` do so at a time, which bounds the host's memory. A pipeline model moves its own stage.
    """
    if sequential_move_factor < 1:
        raise ValueError(f"sequential_move_factor={sequential_move_factor} must be positive")
    if world.process_count() > 1:
        sharding.mesh()  # processes find each other here, which they could not while some wait for their turn
    here = len(world.current().hosted)
    place = world.first() % world.local_size() // here
    for turn in range(math.ceil(world.local_size() / here / sequential_move_factor)):
        if place // sequential_move_factor == turn:
            _materialize_and_move(model, device, param_init_fn)
        processes.barrier("get_model_sequential")
    return model


def _materialize_and_move(model: Any, device: Any, param_init_fn: Callable[..., Any] | None) -> None:
    if hasattr(type(model), "maybe_materialize_local_module"):
        model.maybe_materialize_local_module()
        model.move_model_to_device()
        return
    if param_init_fn is not None:
        reinit_model(model, torch.device("cpu"), param_init_fn)
    move_model_to_device(model, device)


# -- making ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def init_on_device(device: Any, include_buffers: bool = False, force_custom_init_on_device: bool = False) -> Iterator[None]:
    """`model_utils.init_on_device`: within the block, parameters that modules register are on a device, "meta" as a rule: models without memory.

    include_buffers: buffers as well, and whatever else is made without saying where. Attributes and `requires_grad` stay, and a parameter
    registered twice stays one. force_custom_init_on_device: NxD uses accelerate's function otherwise; here there is one for both.
    """
    target = torch.device(device)
    register, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def parameter_there(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.device.type == target.type:
            register(module, name, param)
            return
        if id(param) not in moved:
            moved[id(param)] = param, _moved(param, target)
        register(module, name, moved[id(param)][1])

    def buffer_there(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor if tensor is None else tensor.to(target), persistent)

    nn.Module.register_parameter = parameter_there  # type: ignore[method-assign, assignment]
    if include_buffers:
        nn.Module.register_buffer = buffer_there  # type: ignore[method-assign, assignment]
    try:
        with target if include_buffers else contextlib.nullcontext():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    new = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
    new.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in _PAYLOAD})
    return new


# -- structures and the platform ---------------------------------------------------------------------


def recursive_filter(item: Any, predicate: Callable[[torch.Tensor], bool]) -> Any:
    """`model_utils.recursive_filter`: nested dicts, lists, tuples and sets without the tensors for which `predicate` is false.

    Other values stay. A tensor by itself gives None if it goes.
    """
    if isinstance(item, dict):
        return {k: recursive_filter(v, predicate) for k, v in item.items() if _stays(v, predicate)}
    if isinstance(item, (list, tuple, set)):
        return type(item)([recursive_filter(v, predicate) for v in item if _stays(v, predicate)])
    return item if _stays(item, predicate) else None


def _stays(x: Any, predicate: Callable[[torch.Tensor], bool]) -> bool:
    return not isinstance(x, torch.Tensor) or bool(predicate(x))


class LogicalNCConfig(IntEnum):
    """`model_utils.LogicalNCConfig`: physical cores in a logical one."""

    LNC_1 = 1
    LNC_2 = 2


def get_platform_lnc() -> LogicalNCConfig:
    """`model_utils.get_platform_lnc`: two physical cores in a logical one on trn2, else one."""
    from torch_bridge.torch_neuronx.utils import get_platform_target

    return LogicalNCConfig.LNC_2 if get_platform_target() == "trn2" else LogicalNCConfig.LNC_1


def check_delay_tracing(nxd_config: Any) -> bool:
    """`model_utils.check_delay_tracing`: whether pipeline tracing waits for the first batch: never, as in NxD."""
    return False


def get_delay_tracing(arg: Any) -> bool:
    """`model_utils.get_delay_tracing`: never, as in NxD."""
    return False
